"""Benches that run an engine, a model or its kernels."""
