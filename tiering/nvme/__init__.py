"""The NVMe tier: frames in slabs, durable, behind an index that can be built again."""
