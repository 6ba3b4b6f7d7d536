"""Lengths of prompts as people write them (floor 4)."""

from __future__ import annotations

from kvstore.errors import BadInput


def parse_tokens(given: str) -> int:
    """Of "8k" or "8192". Raises `BadInput`."""
    text = given.strip().lower()
    number = text.removesuffix("k")
    if not number.isdecimal() or not int(number):
        raise BadInput(f"context={given!r} is not a number of tokens; write e.g. 8192 or 8k")
    return int(number) * (1024 if text.endswith("k") else 1)
