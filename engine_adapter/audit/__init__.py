"""Hits that are computed all the same, to compare them with what is stored."""
