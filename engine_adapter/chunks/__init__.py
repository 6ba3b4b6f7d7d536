"""Opaque chunks of an engine's own offloading, kept in the store."""
