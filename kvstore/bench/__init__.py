"""Benches: each path of the product beside its physical limit, measured in the same run."""
