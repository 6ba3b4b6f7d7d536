"""`kvstore bench traffic`: replays recorded requests at their times against engines behind OpenAI's HTTP API."""
