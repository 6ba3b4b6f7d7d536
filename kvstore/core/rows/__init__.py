"""Blocks as rows, without lock and leases: which there are, and the order of reclaim."""
