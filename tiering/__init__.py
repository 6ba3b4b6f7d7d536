"""Tiers of frames: memory, states, eviction and moves (floor 1). Knows keys and frames, never tokens or models."""
