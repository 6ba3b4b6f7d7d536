"""Leases that are over, ended a piece at a time (floor 2).

A lease may be of millions of frames, and a tenant may have thousands of leases that all end in one moment: when its
connection breaks off, when it releases them by one message, when their time is over. Ending one is only noted,
which takes a microsecond; from then on it cannot be released, attached to or used again. What follows is done in pieces
of at most `ENDED_PLACES` under the store's lock, by callers that pass by:

    lapsed      1. its places are held from reuse, part by part    2. its rows are unpinned
    released    1. its rows are unpinned                           2. what is held is let go

In between each row is pinned, or all its places are held, or its reader is done: so what a reader may still copy is
never used for anything else, wherever the work stands. A lease that is released while it lapses goes on from there.

No clock and no lock here: `store` has those, and lets others have the lock between pieces.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvstore.lease import LeaseRecord
from tiering.dram import DramTier
from tiering.residency import Residency
from tiering.tier import NO_PLACE

ENDED_PLACES = 8192
"""Rows and places that are worked on at a time: the lock is held for less than a millisecond."""
LEASE_COST, PART_COST = 16, 64
"""That one lease counts for, and a part of one, however short it is."""


class Endings:
    """Those under way. Callers hold the store's lock."""

    def __init__(self, residency: Residency, dram: DramTier, unpin: Callable[[int, Sequence[int]], None]) -> None:
        """unpin: rows of a namespace, as the store counts pins."""
        self._residency = residency
        self._dram = dram
        self._unpin = unpin
        self._under_way: dict[int, LeaseRecord] = {}
        self._places: Counter[bytes] = Counter()

    def begin(self, record: LeaseRecord) -> None:
        """It has lapsed or was released, as it says itself. One that is under way goes on as it is now."""
        if record.number not in self._under_way:
            self._under_way[record.number] = record
            self._places[record.owner] += len(record.places)

    def work(self, most: int = ENDED_PLACES) -> None:
        """One piece of those that began first."""
        while self._under_way and most > 0:
            most -= self.step(next(iter(self._under_way.values())), most)

    def step(self, record: LeaseRecord, most: int = ENDED_PLACES) -> int:
        """One piece of this one; returns for how many places it counts."""
        if not self.is_under_way(record):
            return 0
        most = max(1, most)
        if not record.is_released and record.held < len(record.places):
            cost = self._hold(record, most)
        elif record.unpinned < len(record.rows):
            cost = self._unpin_next(record, most)
        else:
            cost = self._let_go(record, most) if record.is_released else 0
        is_held = record.let_go == record.held if record.is_released else record.held == len(record.places)
        if is_held and record.unpinned == len(record.rows):
            self._end(record)
        return cost + LEASE_COST

    def is_under_way(self, record: LeaseRecord) -> bool:
        """Whether anything of it is left to be done."""
        return self._under_way.get(record.number) is record

    def under_way(self) -> list[LeaseRecord]:
        """All of them, those that began first at the front."""
        return list(self._under_way.values())

    def under_way_of(self, namespace: int) -> list[LeaseRecord]:
        """Those of a namespace."""
        return [record for record in self._under_way.values() if record.namespace == namespace]

    def places_of(self, owner: bytes) -> int:
        """How many places those of a tenant have."""
        return self._places[owner]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._under_way)

    def check(self, records: Iterable[LeaseRecord]) -> tuple[Counter[int], Counter[int]]:
        """How often each row is pinned and each place is held by these leases and by those under way. records: those
        that no holder has released."""
        pins: Counter[int] = Counter()
        held: Counter[int] = Counter()
        for record in {**self._under_way, **{one.number: one for one in records}}.values():
            pins.update(record.rows[record.unpinned :])
            held.update(place for place in record.places[record.let_go : record.held] if place >= 0)
            is_over = record.has_lapsed or record.is_released
            assert is_over or not (record.unpinned or record.held), "only what is over is ended"
            assert not record.unpinned or record.is_released or record.held == len(record.places)
            if is_over and not self.is_under_way(record):
                assert not record.is_released and record.unpinned == len(record.rows)
        places = Counter[bytes]()
        for record in self._under_way.values():
            places[record.owner] += len(record.places)
        assert +self._places == places
        return pins, held

    def _hold(self, record: LeaseRecord, most: int) -> int:
        """The next places, of one part, or of some more where a part has few. Returns for how many it counts."""
        cost, rows = 0, len(record.rows)
        while cost < most and record.held < len(record.places):
            part, at = divmod(record.held, rows)
            count = min(most - cost, rows - at)
            column = np.frombuffer(record.places, np.int64)[record.held : record.held + count]
            self._residency.hold_current(record.rows[at : at + count], part, column)
            record.held += count
            cost += max(count, PART_COST)
        return cost

    def _unpin_next(self, record: LeaseRecord, most: int) -> int:
        rows = record.rows[record.unpinned : record.unpinned + most]
        self._unpin(record.namespace, rows)
        record.unpinned += len(rows)
        return len(rows)

    def _let_go(self, record: LeaseRecord, most: int) -> int:
        count = min(most, record.held - record.let_go)
        column = np.frombuffer(record.places, np.int64)[record.let_go : record.let_go + count]
        self._dram.let_go(self._residency.let_go(column[column != NO_PLACE]))
        record.let_go += count
        return count

    def _end(self, record: LeaseRecord) -> None:
        del self._under_way[record.number]
        self._places[record.owner] -= len(record.places)
        if not self._places[record.owner]:
            del self._places[record.owner]


def flat(columns: Sequence[Sequence[int]]) -> array[int]:
    """Places by part, as a lease's record has them."""
    places = array("q")
    for column in columns:
        places.extend(column)
    return places
