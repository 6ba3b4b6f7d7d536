"""How long requests waited, counted by size: all of them, in a kilobyte."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

_STEPS_PER_DECADE = 20
BOUNDS_MS = tuple(0.01 * 10 ** (step / _STEPS_PER_DECADE) for step in range(7 * _STEPS_PER_DECADE + 1))
"""From 10 microseconds to 100 seconds; each is an eighth above the one before."""


class Waits:
    """Counts, one for each bound and one for longer waits. One thread adds; any may read."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = array("L", bytes(array("L").itemsize * (len(BOUNDS_MS) + 1)))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_MS, 1000 * seconds)] += 1


def percentile_ms(waits: Iterable[Waits], percent: int) -> float | None:
    """A bound that so many percent of the waits do not exceed, rather too high than too low; None without any."""
    counts = [sum(column) for column in zip(*[one.counts for one in waits], strict=True)]
    total = sum(counts)
    if not total:
        return None
    seen = 0
    for bound, count in zip(BOUNDS_MS, counts, strict=False):
        seen += count
        if 100 * seen >= percent * total:
            return round(bound, 3)
    return round(BOUNDS_MS[-1], 3)
