"""Adapters that let an engine reuse cached prefixes (floor 3). One engine, one file."""
