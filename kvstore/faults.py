"""The faults of a store's machine: counted, said in the log once a minute, and told as long as they last (floor 2).

    failed > degraded, a line in the log > failed, failed, ... (counted) > worked > well again, a line in the log

A fault lasts until the same thing has worked again. Holds a few counters for each thing and kind, whatever happens.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from kvstore.service.rate_limited import Clock, RateLimitedLog
from tiering.faults import FaultKind

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """What does not work now. count: failures since it last worked. detail: of the last one."""

    what: str
    kind: FaultKind
    count: int
    since_seconds_ago: float
    last_seconds_ago: float
    detail: str

    def __str__(self) -> str:
        """As people are told."""
        return f"{self.kind}: {self.count:,} {self.what} failed, last {_span(self.last_seconds_ago)} ago"


@dataclass(slots=True)
class _Failing:
    since: float
    last: float
    count: int
    detail: str


class Faults:
    """`FaultReports`. Thread-safe; calls nobody but the log."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines = RateLimitedLog(_log, clock)
        self._lock = threading.Lock()
        self._failing: dict[str, dict[FaultKind, _Failing]] = {}  # by what it is that does not work
        self._counts: Counter[FaultKind] = Counter()

    def failed(self, what: str, kind: FaultKind, detail: str) -> None:
        """As in the contract."""
        with suppress(MemoryError):  # there may be none to count what there is none of
            self._count(what, kind, detail)

    def _count(self, what: str, kind: FaultKind, detail: str) -> None:
        at = self._clock.monotonic_seconds()
        with self._lock:
            one = self._failing.setdefault(what, {}).setdefault(kind, _Failing(at, at, 0, detail))
            one.last, one.count, one.detail = at, one.count + 1, detail
            self._counts[kind] += 1
        self._lines.warn(f"{what}: {kind}", "%s: %s failed: %s", kind, what, detail)

    def worked(self, what: str) -> None:
        """As in the contract. Without the lock where nothing is wrong."""
        if what not in self._failing:
            return
        with self._lock:
            over = self._failing.pop(what, {})
        if not over:
            return
        with suppress(MemoryError):
            seconds = self._clock.monotonic_seconds() - min(one.since for one in over.values())
            words = ", ".join(f"{kind} {one.count:,} times" for kind, one in over.items())
            self._lines.warn(f"{what} again", "%s work again, after %s: %s", what, _span(seconds), words)

    def now(self) -> list[Fault]:
        """What does not work, that which failed most lately first."""
        at = self._clock.monotonic_seconds()
        with self._lock:
            found = [
                Fault(what, kind, one.count, at - one.since, at - one.last, one.detail)
                for what, kinds in self._failing.items()
                for kind, one in kinds.items()
            ]
        return sorted(found, key=lambda one: one.last_seconds_ago)

    def reasons(self) -> list[str]:
        """The same in words."""
        return [str(one) for one in self.now()]

    def counts(self) -> dict[str, int]:
        """Failures since the start by kind, under names for scripts."""
        with self._lock:
            return {kind.replace(" ", "_"): count for kind, count in sorted(self._counts.items())}


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
