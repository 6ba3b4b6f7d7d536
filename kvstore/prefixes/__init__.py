"""Live prefix diagnostics: which stored prefixes are hot."""
