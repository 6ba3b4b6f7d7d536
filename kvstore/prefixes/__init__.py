"""Live prefix diagnostics: which stored prefixes are hot, and where prompts part needlessly."""
