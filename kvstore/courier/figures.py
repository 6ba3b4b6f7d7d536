"""What a courier counts of other nodes, remote tiers and the directory, for people; and log lines without
repetition."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf

from kvstore.pool.choice import SpeedBook
from kvstore.protocol.courier import MAX_SOURCES, MAX_WHERE_CHARACTERS, SourceFigures
from kvstore.protocol.words import printable
from tiering.clock import Clock

PEER, REMOTE, DIRECTORY = "peer", "remote", "directory"
UP, DOWN, BANNED, OPEN = "up", "down", "banned", "open"
MOST_COUNTED = 1024
"""Sources that are counted, the most recent ones; far more than are shown."""
MOST_KINDS = 16
"""Of reasons for refused frames."""
MANY_LATE = 8
"""Look-ups of a source in a row; from then on it is said to be too far away."""
AGAIN_SECONDS = 60.0
MOST_WRONG = 1024

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counted:
    """One source's counts since the start, by the fields of `SourceFigures`."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    late_in_row: int = 0


class Figures:
    """Thread-safe. A source is named as in the speeds: a node's id, or an engine's name. faults: the present ones."""

    def __init__(self, clock: Clock) -> None:
        self.speeds = SpeedBook()
        self.faults = OncePerKind(clock)
        self._lock = threading.Lock()
        self._counts: OrderedDict[Hashable, _Counted] = OrderedDict()
        self.fetching = self.fetched_blocks = self.fetched_bytes = 0

    def _of(self, source: Hashable) -> _Counted:
        """Under the lock."""
        found = self._counts.setdefault(source, _Counted())
        self._counts.move_to_end(source)
        while len(self._counts) > MOST_COUNTED:
            self._counts.popitem(last=False)
        return found

    def count(self, source: Hashable, **more: int) -> None:
        """Add to a source's counts. more: by the fields of `SourceFigures`."""
        with self._lock:
            counts = self._of(source).counts
            for name, amount in more.items():
                counts[name] += amount

    def came(self, source: Hashable, blocks: int, size: int) -> None:
        """Blocks from it were adopted."""
        self.count(source, blocks_in=blocks, bytes_in=size)
        with self._lock:
            self.fetched_blocks += blocks
            self.fetched_bytes += size

    def refused(self, source: Hashable, what: str) -> None:
        with self._lock:
            kinds = self._of(source).refused
            if what in kinds or len(kinds) < MOST_KINDS:
                kinds[what] += 1

    def answered(self, source: Hashable, name: str, seconds: float, is_late: bool) -> None:
        """A look-up of a source ended. is_late: after the engine that asked had given up. name: for people."""
        with self._lock:
            one = self._of(source)
            one.counts["late"] += is_late
            one.late_in_row = one.late_in_row + 1 if is_late else 0
            in_row = one.late_in_row
        if in_row >= MANY_LATE:
            self.faults.say(
                f"late {name}",
                f"{name} answers too late: of {in_row} look-ups in a row none was over before the 5 ms that an engine "
                f"waits (the last one took {1e3 * seconds:.0f} ms)",
            )
        elif not in_row:
            self.faults.ended(f"late {name}", f"{name} answers in time again")

    def begins(self, fetches: int) -> None:
        """This many fetches begin, or end if negative."""
        with self._lock:
            self.fetching += fetches

    def told(
        self, kind: str, source: Hashable, name: str, state: str, hints: int = 0, detail: str = ""
    ) -> SourceFigures:
        """A source's figures, for display."""
        speed = self.speeds.speed(source)
        with self._lock:
            one = self._counts.get(source) or _Counted()
            return SourceFigures(
                kind,
                printable(name)[:MAX_WHERE_CHARACTERS],
                state,
                **one.counts,
                refused=dict(one.refused),
                gbps=speed.bytes_per_second / 1e9,
                p99_ms=speed.milliseconds_p99,
                hints=hints,
                detail=printable(detail)[:MAX_WHERE_CHARACTERS],
            )


MOST_SHOWN = MAX_SOURCES - 8
"""Nodes; remote tiers and the directory are shown beside them."""


@dataclass(frozen=True, slots=True)
class _Wrong:
    line: str
    said_at: float
    logged_at: float
    is_logged: bool


class OncePerKind:
    """Present faults, by kind. Thread-safe. A kind is logged when it begins, again for each minute that it goes on, and
    when it ends; one that comes and goes, once a minute. A kind that was not reported for a minute counts as over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: OrderedDict[str, _Wrong] = OrderedDict()  # least recently reported first

    def say(self, kind: str, line: str) -> None:
        now = self._clock.monotonic_seconds()
        with self._lock:
            if kind not in self._said and len(self._said) >= MOST_WRONG:
                oldest = next(iter(self._said))
                if now - self._said[oldest].said_at < AGAIN_SECONDS:
                    return
                del self._said[oldest]
            before = self._said.get(kind, _Wrong(line, now, -inf, False))
            is_due = now - before.logged_at >= AGAIN_SECONDS
            self._said[kind] = _Wrong(line, now, now if is_due else before.logged_at, is_due or before.is_logged)
            self._said.move_to_end(kind)
        if is_due:
            _log.warning("%s", line)

    def ended(self, kind: str, line: str) -> None:
        with self._lock:
            one = self._said.get(kind)
            if one is not None:
                self._said[kind] = _Wrong(one.line, -inf, one.logged_at, False)
                self._said.move_to_end(kind, last=False)
        if one is not None and one.is_logged:
            _log.info("%s", line)

    def reasons(self) -> list[str]:
        """The present faults' lines."""
        now = self._clock.monotonic_seconds()
        with self._lock:
            return [one.line for one in self._said.values() if now - one.said_at < AGAIN_SECONDS]
