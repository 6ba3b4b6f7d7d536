"""The DRAM tier: frames in shared memory, which may outlive its process."""
