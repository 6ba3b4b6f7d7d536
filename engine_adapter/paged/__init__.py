"""The engine-neutral halves of a connector for engines with paged KV: scheduler and worker."""
