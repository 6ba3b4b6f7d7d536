"""The console's memory: time series in rings of a fixed size. Pure: times are given.

    10 s x 1 h      60 s x 24 h      10 min x 7 d        8 bytes for each number, NaN where nothing is known

A counter's slot holds its increase, a gauge's its last value. An increase between two readings is spread over the slots
between them in whole numbers, so that a window's slots add up to what was counted. A slot that no reading covers stays
unknown: `read` gives None for it, and pages draw a gap.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan

import msgspec

MOST_SERIES = 96
"""Further names are ignored: a sidecar of another version must not make the console grow."""
MOST_RESTARTS = 64

STEPS = ((10, 360), (60, 1440), (600, 1008))
"""Seconds per slot, and number of slots."""
WINDOWS = {"15m": (900, 10), "1h": (3600, 10), "6h": (21_600, 60), "24h": (86_400, 60), "7d": (604_800, 600)}
"""Seconds that a window covers, and seconds per slot."""


class Ring:
    __slots__ = ("_last", "_slots", "_values", "step")

    def __init__(self, step: int, slots: int) -> None:
        self.step = step
        self._slots = slots
        self._values = array("d", [nan]) * slots
        self._last = -1  # the newest slot, counted from 1970

    def add(self, slot: int, amount: float) -> None:
        """Add a counter's increase to a slot."""
        if self._reach(slot):
            at = slot % self._slots
            known = self._values[at]
            self._values[at] = amount if known != known else known + amount

    def put(self, slot: int, value: float) -> None:
        """Set a gauge's value in a slot."""
        if self._reach(slot):
            self._values[slot % self._slots] = value

    def read(self, first: int, stop: int) -> list[float | None]:
        """Slots from first to before stop; None for what is unknown."""
        found: list[float | None] = [None] * max(0, stop - first)
        for slot in range(max(first, self._last - self._slots + 1), min(stop, self._last + 1)):
            value = self._values[slot % self._slots]
            found[slot - first] = value if value == value else None
        return found

    def _reach(self, slot: int) -> bool:
        """Advance to a slot, marking skipped ones unknown; False if it is too old to be written."""
        if slot <= self._last - self._slots:
            return False
        for passed in range(max(self._last + 1, slot - self._slots + 1), slot + 1):
            self._values[passed % self._slots] = nan
        self._last = max(self._last, slot)
        return True


@dataclass(frozen=True, slots=True)
class SidecarReading:
    """One reading of the sidecar. run: names the sidecar's run, began_at: its start. counters: whole numbers that start
    with the run; most only grow. gauges: current values."""

    run: str
    at: float
    began_at: float
    counters: Mapping[str, int]
    gauges: Mapping[str, float]


class SeriesAnswer(msgspec.Struct, frozen=True):
    """`/api/series`. times: Unix time at which each slot of `step` seconds begins. counters: increase per slot; gauges:
    last value per slot; null if unknown. sums: of the counters over the window. seen_since: the first slot with data.
    restarts: when the sidecar began again."""

    window: str
    step: int
    times: list[int]
    counters: dict[str, list[float | None]]
    gauges: dict[str, list[float | None]]
    sums: dict[str, int]
    seen_since: int | None
    restarts: list[float]


class Rings:
    """All series. Not thread-safe."""

    def __init__(self) -> None:
        self._counters: dict[str, list[Ring]] = {}
        self._gauges: dict[str, list[Ring]] = {}
        self._before: SidecarReading | None = None
        self._first_at: float | None = None
        self._restarts: deque[float] = deque(maxlen=MOST_RESTARTS)

    def take(self, reading: SidecarReading) -> None:
        """Take in a reading. The first only sets where the counters stand."""
        before = self._before
        if before is not None and reading.at == before.at:
            return  # the same reading again
        self._first_at = reading.at if self._first_at is None else self._first_at
        self._before = reading
        if before is None or reading.at < before.at:
            return  # the first, or the clock was set back: the time between is unknown
        since, counted = before.at, before.counters
        if reading.run != before.run:
            # Counters restart with the run, so their whole value was counted since its start.
            since, counted = min(max(before.at, reading.began_at), reading.at), {}
            self._restarts.append(since)
        for name, value in reading.counters.items():
            grown = value - counted.get(name, 0)
            for ring in self._rings(self._counters, name):
                for slot, amount in _spread(grown, since, reading.at, ring.step):
                    ring.add(slot, amount)
        for name, gauge in reading.gauges.items():
            for ring in self._rings(self._gauges, name):
                ring.put(int(reading.at // ring.step), gauge)

    def window(self, name: str, now: float) -> SeriesAnswer:
        """name: one of `WINDOWS`."""
        seconds, step = WINDOWS[name]
        at = next(place for place, (one, _) in enumerate(STEPS) if one == step)
        stop = int(now // step) + 1
        first = stop - seconds // step
        times = [slot * step for slot in range(first, stop)]
        counters = {one: rings[at].read(first, stop) for one, rings in self._counters.items()}
        known = [slot for values in counters.values() for slot, value in enumerate(values) if value is not None]
        return SeriesAnswer(
            name,
            step,
            times,
            counters,
            {one: rings[at].read(first, stop) for one, rings in self._gauges.items()},
            {one: int(sum(value for value in values if value is not None)) for one, values in counters.items()},
            times[min(known)] if known else None,
            [one for one in self._restarts if one >= times[0]],
        )

    def day(self, now: float) -> dict[str, int] | None:
        """Sums of the counters over the last 24 hours; None where they were watched for less."""
        seconds, step = WINDOWS["24h"]
        if self._first_at is None or now - self._first_at < seconds:
            return None
        at, stop = [one for one, _ in STEPS].index(step), int(now // step) + 1
        read = {name: rings[at].read(stop - seconds // step, stop) for name, rings in self._counters.items()}
        return {name: int(sum(filter(None, values))) for name, values in read.items()}

    def _rings(self, of: dict[str, list[Ring]], name: str) -> list[Ring]:
        if name not in of:
            if len(self._counters) + len(self._gauges) >= MOST_SERIES:
                return []
            of[name] = [Ring(step, slots) for step, slots in STEPS]
        return of[name]


def _spread(amount: int, since: float, until: float, step: int) -> Iterator[tuple[int, int]]:
    """Spread an increase over the slots between two moments, in whole numbers that add up to it."""
    first, last = int(since // step), int(until // step)
    if last - first > STEPS[-1][1]:  # longer ago than any ring reaches
        yield last, amount
        return
    given = 0
    for slot in range(first, last + 1):
        share = amount if slot == last else round(amount * ((slot + 1) * step - since) / (until - since))
        yield slot, share - given
        given = share
