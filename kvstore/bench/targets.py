"""Targets of a bench that were missed, for --check (floor 4). Reads what a bench prints as JSON: `met` beside a figure.

A target that nobody set on this machine is no target; a run without any checks nothing, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MOST_SHOWN = 12
"""Fields of a row that a line about it names."""


def judged(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every row that has a target, met or missed."""
    return [row for row in _rows(result) if isinstance(row.get("met"), bool)]


def missed(result: Mapping[str, Any]) -> list[str]:
    """A line for each target that was missed."""
    return [f"target missed: {_words(row)}" for row in judged(result) if not row["met"]]


def _rows(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for one in value.values():
            yield from _rows(one)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for one in value:
            yield from _rows(one)


def _words(row: Mapping[str, Any]) -> str:
    shown = [(name, value) for name, value in row.items() if name != "met" and isinstance(value, str | int | float)]
    return ", ".join(f"{name} {_short(value)}" for name, value in shown[:_MOST_SHOWN])


def _short(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
