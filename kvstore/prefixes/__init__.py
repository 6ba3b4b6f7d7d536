"""Prefix diagnostics, live: which stored prefixes are hot, and where prompts part that need not."""
