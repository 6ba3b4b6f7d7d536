"""What tiers count of themselves, for people: events since the start, and how long things took. Imports nothing."""
