"""`kvstore bench traffic`: recorded requests against engines behind OpenAI's HTTP API, as they came."""
