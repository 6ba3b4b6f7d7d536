"""Insight: what the store would have done, and what it did, in figures."""
