"""Eviction policies, one readable file each. `policy.py` is the contract."""
