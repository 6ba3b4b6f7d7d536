"""Blocks as rows, pure: which there are, and the orders in which they are reclaimed, flushed and recovered."""
