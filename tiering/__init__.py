"""Tiers of frames: memory, states, eviction and moves. Knows keys and frames, never tokens or models."""
