"""What tiers count, for people: events since the start, and durations. Imports nothing."""
