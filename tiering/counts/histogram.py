"""A histogram: counts of values by upper bound, and their sum. Both only grow.

Takes no lock: the lock that guards what a histogram counts guards it too, or a single thread adds to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Bounds of waits; 50 ms is a lease's usual deadline."""
AGE_SECONDS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0)
"""Bounds of ages: 1 and 10 s, 1, 5 and 15 min, 1, 6 and 24 h."""


class HistogramCounts(NamedTuple):
    """A histogram at one moment. counts: values up to each bound and above the one before it, and at the end those
    above all bounds. sum: of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Histogram:
    """Counts values of one kind."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float] = WAIT_SECONDS) -> None:
        """bounds: ascending, each the highest value that counts for it."""
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """A value below 0, as after a clock was set back, counts as 0: the sum never falls."""
        value = max(0.0, value)
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def now(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._sum)
