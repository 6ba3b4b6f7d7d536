"""Waits for blocks to become readable: a table by key; no thread is held.

    register > look > parked > the last key becomes readable    readable
                             > a put of it is given up       short      aborted, or its writer is gone
                             > its time is over              deadline
                             > it is given up                cancelled  or its client hung up
                             > its namespace is dropped      gone       or the store closed
             > the tenant's limit is reached                 full

A key that was never stored waits like one that is being stored. Register first, then look: no change of the index in
between is missed. Thread-safe; the lock is held for a few additions, and `tell` is called under it.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from tiering.counts.histogram import WAIT_SECONDS, Histogram, HistogramCounts

MOST_PARKED = 1024
"""Of one tenant."""
MAX_AWAIT_SECONDS = 30.0
_STALE_ENTRIES = 64
"""Entries of ended awaits that may stay in the heap, beside as many as are parked."""


class AwaitEnd(StrEnum):
    """Why a wait is over."""

    READABLE = "readable"
    SHORT = "short"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    GONE = "gone"
    FULL = "full"


@dataclass(eq=False, slots=True)
class ParkedAwait:
    """A wait for the last of these keys, which are consecutive in a chain. number: of the namespace. tell: called at
    the end; must do next to nothing. fetch: set if a courier fetches the blocks; then only the fetch ends the wait, not
    a put that is given up. end: None until it is over. follows: the first key that was not readable at the look.
    is_looked: whether the look behind `register` is over."""

    number: int
    tenant: bytes
    keys: Sequence[bytes]
    seconds: float
    tell: Callable[[ParkedAwait], object]
    fetch: object = None
    since: float = 0.0
    end: AwaitEnd | None = None
    follows: bytes = b""
    is_looked: bool = False


class AwaitCounts(NamedTuple):
    """parked: now. ended: since the start, by reason. seconds: how long parked ones waited."""

    parked: int
    ended: dict[AwaitEnd, int]
    seconds: HistogramCounts


_Key = tuple[int, bytes]


class Awaits:
    """The waits of one store."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0, most: int = MOST_PARKED) -> None:
        """now: monotonic seconds. most: waits of one tenant."""
        self.now = now
        self._most = most
        self._lock = threading.Lock()
        self.heads: dict[_Key, dict[ParkedAwait, None]] = {}
        """Waits by their last key; empty if nothing is parked. Whether it is empty may be read without the lock."""
        self._follows: dict[_Key, dict[ParkedAwait, None]] = {}  # if that is not the head
        self._of: Counter[bytes] = Counter()
        self._due: list[tuple[float, int, ParkedAwait]] = []
        self._numbered = 0
        self._ended = Counter[AwaitEnd]()
        self._seconds = Histogram((*WAIT_SECONDS, MAX_AWAIT_SECONDS))

    @property
    def due_at(self) -> float:
        """When to call `expire` next, in monotonic seconds; inf if nothing is parked."""
        with self._lock:
            return self._due[0][0] if self._due else inf

    def register(self, one: ParkedAwait) -> None:
        """Park it, unless its tenant has reached the limit."""
        with self._lock:
            self._expire()
            one.since = self.now()
            if self._of[one.tenant] >= self._most:
                self._over(one, AwaitEnd.FULL)
                return
            self.heads.setdefault((one.number, one.keys[-1]), {})[one] = None
            self._of[one.tenant] += 1
            self._numbered += 1
            one.seconds = min(one.seconds, MAX_AWAIT_SECONDS)
            heapq.heappush(self._due, (one.since + one.seconds, self._numbered, one))

    def looked(self, one: ParkedAwait, readable: int) -> None:
        """Report the look: so many of its leading keys are readable. Under the lock under which the index changes."""
        one.is_looked = True
        if readable >= len(one.keys):
            self.end([one], AwaitEnd.READABLE)
        elif readable < len(one.keys) - 1:
            with self._lock:
                if one.end is None:
                    one.follows = one.keys[readable]
                    self._follows.setdefault((one.number, one.follows), {})[one] = None

    def published(self, number: int, key: bytes) -> None:
        """A block became readable."""
        with self._lock:
            self._end(self.heads.get((number, key), ()), AwaitEnd.READABLE)

    def appeared(self, number: int, keys: Container[bytes]) -> None:
        """These became readable."""
        with self._lock:
            for name in [name for name in self.heads if name[0] == number and name[1] in keys]:
                self._end(self.heads[name], AwaitEnd.READABLE)

    def gave_up(self, number: int, key: bytes) -> None:
        """A put of that block ended before the block was readable."""
        with self._lock:
            for table in (self.heads, self._follows):
                self._end([one for one in table.get((number, key), ()) if one.fetch is None], AwaitEnd.SHORT)

    def end(self, ones: Iterable[ParkedAwait], why: AwaitEnd) -> None:
        """End those of these that are still waiting."""
        with self._lock:
            self._end(ones, why)

    def end_all(self, why: AwaitEnd, number: int | None = None) -> None:
        """End those of a namespace, or all."""
        with self._lock:
            self._end([one for (of, _), ones in self.heads.items() if number in (None, of) for one in ones], why)

    def expire(self) -> None:
        """End those that have expired."""
        with self._lock:
            self._expire()

    def wait(self, one: ParkedAwait, done: threading.Event) -> None:
        """Wait for its end in this thread. done: set by its `tell`."""
        if one.end is None and not done.wait(one.seconds):
            self.end([one], AwaitEnd.DEADLINE)

    def _expire(self) -> None:
        now = self.now()
        while self._due and self._due[0][0] <= now:
            self._end([heapq.heappop(self._due)[2]], AwaitEnd.DEADLINE)

    def _end(self, ones: Iterable[ParkedAwait], why: AwaitEnd) -> None:
        for one in list(ones):
            if one.end is not None:
                continue
            for table, key in ((self.heads, one.keys[-1]), (self._follows, one.follows)):
                parked = table.get((one.number, key), {})
                parked.pop(one, None)
                if not parked:
                    table.pop((one.number, key), None)
            self._of[one.tenant] -= 1
            if not self._of[one.tenant]:
                del self._of[one.tenant]
            self._seconds.add(self.now() - one.since)
            self._over(one, why)
        if len(self._due) > 2 * self._of.total() + _STALE_ENTRIES:
            self._due = [entry for entry in self._due if entry[2].end is None]
            heapq.heapify(self._due)

    def _over(self, one: ParkedAwait, why: AwaitEnd) -> None:
        one.end = why
        self._ended[why] += 1
        one.tell(one)

    def counts(self) -> AwaitCounts:
        with self._lock:
            return AwaitCounts(self._of.total(), {why: self._ended[why] for why in AwaitEnd}, self._seconds.now())

    def check(self, is_readable: Callable[[int, bytes], bool]) -> None:
        """Verify that the tables agree, nothing is parked without need, and bounds hold. Under the index's lock."""
        with self._lock:
            parked = [(name, one) for name, ones in self.heads.items() for one in ones]
            assert all(name == (one.number, one.keys[-1]) and one.end is None for name, one in parked)
            looked = [name for name, one in parked if one.is_looked]
            assert not any(is_readable(*name) for name in looked), "what can be read is waited for by none"
            assert all(self.heads.values()) and all(self._follows.values()), "no key is kept that none waits for"
            following = {one for ones in self._follows.values() for one in ones}
            assert following == {one for _, one in parked if one.follows}, "each stands under both keys, or under one"
            assert Counter(one.tenant for _, one in parked) == self._of
            assert max(self._of.values(), default=0) <= self._most
            assert {one for _, one in parked} <= {one for _, _, one in self._due}, "each has a time"
            assert len(self._due) <= 2 * len(parked) + _STALE_ENTRIES
