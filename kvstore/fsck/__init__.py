"""Checks a store's directory offline, and repairs it."""
