"""Connections that are gone while memory which they were given may still be mapped (floor 2).

What such a connection held is kept from any other use until the kernel says of every extent that was shared with it
that no mapping is left. An extent that it has let go of once is not asked about again: nobody shares anything with a
connection that is gone. So each look costs one question where a mapping stays, and `LOOKS` bounds what a sweep costs,
however many connections are gone: it goes on where the last one ended.

Not thread-safe, but for `look`, which asks the kernel and is to be called without a lock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

C = TypeVar("C")
LOOKS = 64
"""Questions to the kernel in one sweep."""


class Mappings(Protocol):
    """What is known of mappings: `Store`."""

    def unmapped(self, extents: Sequence[int], holder: int) -> int:
        """How many of these, from the first on, that holder has let go of."""
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
        """Those who are to be looked at next, and come last from now on."""
        chosen = [gone for gone, _ in zip(self._gone.values(), range(LOOKS), strict=False)]
        for gone in chosen:
            self._gone.move_to_end(gone.number)
        return chosen

    def look(self, gone: Gone[C], most: int = LOOKS) -> tuple[bool, int]:
        """Whether it may have something mapped, and how many questions that took: no more than `most`."""
        extents = gone.extents  # what another thread finds out meanwhile is as true
        some = extents[:most]
        unmapped = self._mappings.unmapped(some, gone.number)
        gone.extents = extents[unmapped:]
        asked = min(unmapped + 1, len(some))
        self.looks += asked
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
