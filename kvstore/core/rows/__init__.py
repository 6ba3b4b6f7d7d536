"""Blocks as rows, without lock and leases: which there are, which NVMe has, and the order of reclaim."""
