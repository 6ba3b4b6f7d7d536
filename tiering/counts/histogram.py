"""Histograms: counts of values by upper bound, which only grow. With few bounds they are for metrics, with many
(`BOUNDS_MS`) for percentiles.

They take no lock: the lock that guards what a histogram counts guards it too, or a single thread adds to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Bounds of waits; 50 ms is a lease's usual deadline."""
AGE_SECONDS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0)
"""Bounds of ages: 1 and 10 s, 1, 5 and 15 min, 1, 6 and 24 h."""
_STEPS_PER_DECADE = 20
BOUNDS_MS = tuple(0.01 * 10 ** (step / _STEPS_PER_DECADE) for step in range(7 * _STEPS_PER_DECADE + 1))
"""Of waits for `percentile_ms`, from 10 microseconds to 100 seconds; each is an eighth above the one before."""


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


def percentile_ms(waits: Iterable[Histogram], percent: int) -> float | None:
    """A bound that so many percent of the waits do not exceed, rather too high than too low; None without any. waits:
    of milliseconds, by `BOUNDS_MS`."""
    counts = [sum(column) for column in zip(*[one.now().counts for one in waits], strict=True)]
    total = sum(counts)
    if not total:
        return None
    seen = 0
    for bound, count in zip(BOUNDS_MS, counts, strict=False):
        seen += count
        if 100 * seen >= percent * total:
            return round(bound, 3)
    return round(BOUNDS_MS[-1], 3)
