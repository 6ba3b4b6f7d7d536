"""Connections that are gone while memory which they were given may still be mapped (floor 2).

What such a connection held is kept from any other use until the kernel says of every extent that was shared with it
that no mapping is left. An extent that it has let go of once is not asked about again: nobody shares anything with a
connection that is gone. So each look costs one question where a mapping stays, and `LOOKS` bounds what a sweep costs,
however many connections are gone: it goes on where the last one ended.

A client can make questions about its memory slow, by placing many locks on it. A tenant where one was slow is left out
of so many sweeps that its questions take a fiftieth of a processor: its own memory waits for that, and no other
tenant's.

Not thread-safe, but for `look`, which asks the kernel and is to be called without a lock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Generic, Protocol, TypeVar

from kvstore.unmapped import Unmapped

C = TypeVar("C")
LOOKS = 64
"""Questions to the kernel in one sweep."""
SLOW_SECONDS = 0.001
"""That questions about one connection may take in one sweep."""
SWEEPS_A_SECOND = 1000
"""Of questions, for which their tenant is left out: sweeps are 50 ms apart as a rule."""


class Mappings(Protocol):
    """What is known of mappings: `Store`."""

    def unmapped(self, extents: Sequence[int], holder: int) -> Unmapped:
        """How many of these, from the first on, that holder has let go of, as far as it was looked."""
        ...


@dataclass(eq=False, slots=True)
class Gone(Generic[C]):
    """One connection. number: by which the kernel knows its mappings. extents: that it may have mapped still."""

    number: int
    tenant: bytes
    caller: C
    extents: list[int]


class Departed(Generic[C]):
    """Who they are, by tenant, and whose turn it is to be looked at."""

    def __init__(self, mappings: Mappings) -> None:
        self._mappings = mappings
        self._gone: OrderedDict[int, Gone[C]] = OrderedDict()  # whose turn is next comes first
        self._of: Counter[bytes] = Counter()
        self._left_out: dict[bytes, int] = {}  # by tenant: of so many sweeps
        self._looked_at: dict[bytes, object] = {}  # by tenant: the look under way, of some thread
        self._asked: list[int] = []  # connections that were asked about since the last sweep began
        self.looks = 0
        """Questions to the kernel since the start."""

    def add(self, number: int, tenant: bytes, caller: C, extents: Iterable[int]) -> Gone[C] | None:
        """A connection is gone; None where that is known."""
        if number in self._gone:
            return None
        gone = self._gone[number] = Gone(number, tenant, caller, list(extents))
        self._of[tenant] += 1
        return gone

    def remove(self, gone: Gone[C]) -> bool:
        """It has nothing mapped any more; whether it was there."""
        if self._gone.get(gone.number) is not gone:
            return False
        del self._gone[gone.number]
        self._of[gone.tenant] -= 1
        if not self._of[gone.tenant]:
            del self._of[gone.tenant]
        return True

    def turns(self) -> list[Gone[C]]:
        """Those who are to be looked at in this sweep; connections that were looked at since the last one come last
        from now on."""
        asked, self._asked = self._asked, []
        for number in asked:
            if number in self._gone:
                self._gone.move_to_end(number)
        left_out = set(self._left_out)
        self._left_out = {tenant: sweeps - 1 for tenant, sweeps in self._left_out.items() if sweeps > 1}
        return list(islice((gone for gone in self._gone.values() if gone.tenant not in left_out), LOOKS))

    def look(self, gone: Gone[C], most: int = LOOKS) -> tuple[bool, int]:
        """Whether it may have something mapped, and how many questions that took: no more than `most`, and none where
        its tenant is left out now, or another thread asks about one of its connections: many threads that ask at a time
        would leave no processor to the door."""
        extents = gone.extents  # what another thread finds out meanwhile is as true
        if not extents or gone.tenant in self._left_out:
            return bool(extents), 0
        look = object()
        if self._looked_at.setdefault(gone.tenant, look) is not look:
            return True, 0
        try:
            unmapped, asked, seconds = self._mappings.unmapped(extents[:most], gone.number)
        finally:
            del self._looked_at[gone.tenant]
        gone.extents = extents[unmapped:]
        self.looks += asked
        self._asked.append(gone.number)
        if seconds > SLOW_SECONDS:
            self._left_out[gone.tenant] = ceil(SWEEPS_A_SECOND * seconds)
        return bool(gone.extents), asked

    def count_of(self, tenant: bytes) -> int:
        """How many a tenant has."""
        return self._of[tenant]

    def callers(self) -> list[C]:
        """All of them."""
        return [gone.caller for gone in self._gone.values()]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._gone)
