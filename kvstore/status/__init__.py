"""What a sidecar reports of itself: each number is declared once, and JSON, metrics, messages and tables are walks."""
