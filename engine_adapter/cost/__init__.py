"""How far to load and how far to compute, from what was measured."""
