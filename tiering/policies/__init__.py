"""Eviction policies, one readable file each (floor 1). `policy.py` is the contract."""
