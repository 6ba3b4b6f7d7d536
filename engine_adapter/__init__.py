"""Adapters that let an engine reuse cached prefixes. One engine, one file."""
