"""Engines behind OpenAI's HTTP API: a bounded client for one engine, and a proxy for disaggregated prefill."""
