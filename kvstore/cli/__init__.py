"""The command line: what people type, and what it prints."""
