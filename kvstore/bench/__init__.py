"""Benches: each path of the product against its physical limit, measured in the same run."""
