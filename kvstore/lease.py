"""Leases and reservations as the store keeps them (floor 2).

A lease pins blocks for one owner until it is released or runs out. One that ran out (it *lapsed*) pins nothing any
more, but its reader may still be copying: its places are then *held*, and a slot that is evicted meanwhile is not used
again before the reader says that it is done.

A reservation is a put under way. Its blocks become visible one after the other, each when all its parts are committed
and its parent is visible.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf


@dataclass(eq=False, slots=True)
class LeaseRecord:
    """rows: the pinned blocks, in chain order, the first of them block `first_block`. places: of each part's frames,
    one part after the other: 8 bytes each, since most of the memory that leases take is this. holders: how many have to
    let go before it ends. owner: the tenant.

    has_lapsed: it pins nothing any more, or is about to. is_released: its last holder has let go. How far its end has
    come, since that goes in pieces (see `endings`): unpinned, so many rows; held, so many places, of which the first
    `let_go` are not any more.
    """

    number: int
    namespace: int
    first_block: int
    rows: array[int]
    places: array[int]
    expires_at: float
    holders: int = 1
    owner: bytes = b""
    has_lapsed: bool = False
    is_released: bool = False
    unpinned: int = 0
    held: int = 0
    let_go: int = 0

    def place(self, part: int, at: int) -> int | None:
        """Where a part's frame of its block `at` was when it was leased; None where it has not so many."""
        index = part * len(self.rows) + at
        return self.places[index] if part >= 0 and 0 <= at < len(self.rows) and index < len(self.places) else None


@dataclass(slots=True)
class ReservationRecord:
    """rows, parents, indexes: the blocks to fill, in chain order. Of each part: done, the committed blocks, and
    places, the slots.

    refills: hollow rows among them, pinned for as long as the reservation lives. orphans: places of a reservation
    that ended while somebody may still write. bases: reservations of the same session whose blocks these follow, and
    which have to be visible first. is_joint: other processes wait for its answer. detail: why it got no more slots.
    room_until: when its put has waited for room for long enough, if it said so. is_ending: it is being aborted.
    is_cancelling: its producer was lost, and writes no more of it.
    """

    number: int
    namespace: int
    parts: int
    priority: int
    expires_at: int
    rows: list[int] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    refills: set[int] = field(default_factory=set)
    filled: int = 0  # blocks that have slots
    published: int = 0
    done: list[int] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)
    cancelled: bool = False
    bases: set[int] = field(default_factory=set)
    is_joint: bool = False
    detail: str = ""
    room_until: float | None = None
    is_ending: bool = False
    is_cancelling: bool = False

    def __post_init__(self) -> None:
        self.done = [0] * self.parts
        self.places = [[] for _ in range(self.parts)]


class LeaseTable:
    """All leases, in the order in which they run out: every lease lasts equally long."""

    def __init__(self, lease_seconds: float, new_number: Callable[[], int] | None = None) -> None:
        """new_number: one above 0 that no other lease of this table had or will have."""
        self.lease_seconds = lease_seconds
        self._live: dict[int, LeaseRecord] = {}
        self._lapsed: dict[int, LeaseRecord] = {}
        self._new_number = new_number or count(1).__next__
        self._of: Counter[bytes] = Counter()

    def add(
        self,
        namespace: int,
        first_block: int,
        rows: Sequence[int],
        places: array[int],
        now: float,
        owner: bytes = b"",
    ) -> int:
        """A new lease; returns its number. places: as in `LeaseRecord`."""
        number = self._new_number()
        expires_at = now + self.lease_seconds
        self._live[number] = LeaseRecord(
            number, namespace, first_block, array("i", rows), places, expires_at, owner=owner
        )
        self._of[owner] += 1
        return number

    def count_of(self, owner: bytes) -> int:
        """How many of them a tenant has."""
        return self._of[owner]

    def get(self, number: int) -> LeaseRecord | None:
        """A lease, live or run out."""
        return self._live.get(number) or self._lapsed.get(number)

    def is_live(self, number: int, now: float = -inf) -> bool:
        """Whether a lease still pins, and does so at that time."""
        record = self._live.get(number)
        return record is not None and record.expires_at > now

    def attach(self, number: int, now: float = -inf) -> bool:
        """One more holder, of a lease of which that is so."""
        if not self.is_live(number, now):
            return False
        self._live[number].holders += 1
        return True

    def take(self, number: int) -> LeaseRecord | None:
        """A holder lets go of a lease, live or run out; with the last one it is removed. The record tells which it
        was."""
        record = self.get(number)
        if record is not None and record.holders > 1:
            record.holders -= 1
            return None
        if record is not None:
            self._of[record.owner] -= 1
            record.is_released = True
        return self._live.pop(number, None) or self._lapsed.pop(number, None)

    def run_out(self, now: float) -> Iterator[LeaseRecord]:
        """Leases whose time is over; each is kept as run out until its reader lets go."""
        while self._live:
            record = next(iter(self._live.values()))
            if record.expires_at > now:
                return
            yield self._lapse(record)

    def lapse(self, number: int) -> LeaseRecord | None:
        """End one now, if it is live."""
        record = self._live.get(number)
        return self._lapse(record) if record is not None else None

    def lapse_all(self, namespace: int) -> Iterator[LeaseRecord]:
        """End every lease of a namespace now."""
        for record in [record for record in self._live.values() if record.namespace == namespace]:
            yield self._lapse(record)

    def live(self) -> Iterator[LeaseRecord]:
        """Every lease that still pins."""
        return iter(self._live.values())

    def lapsed(self) -> Iterator[LeaseRecord]:
        """Every lease that ran out and was not released."""
        return iter(self._lapsed.values())

    def __len__(self) -> int:
        """Leases that pin, or that keep slots from reuse."""
        return len(self._live) + len(self._lapsed)

    def _lapse(self, record: LeaseRecord) -> LeaseRecord:
        del self._live[record.number]
        self._lapsed[record.number] = record
        record.has_lapsed = True
        return record
