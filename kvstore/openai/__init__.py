"""Engines behind OpenAI's HTTP API: a bounded client of one, and a proxy for prefill apart from decode."""
