"""The end of leases, in pieces, with the lock free in between.

A lease may be of millions of frames, and a tenant may have thousands of leases that all end in one moment: when its
connection breaks, when one message releases them, when they expire. Ending one is only recorded, which takes a
microsecond; from then on it cannot be released, attached to or used again. The rest is done under the store's lock in
pieces of at most `ENDED_PLACES`, by whichever call comes next:

    lapsed      1. its places are held from reuse, part by part    2. its rows are unpinned
    released    1. its rows are unpinned                           2. its held places may be reused

At every moment each row is pinned, or all its places are held, or its reader is done: memory that a reader may still
copy is never reused, however far the work is. A lease that is released while it lapses goes on from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from kvstore.core.shared import GIVE_WAY_SECONDS, Shared
from kvstore.core.table import LeaseRecord
from tiering.tier import NO_PLACE

ENDED_PLACES = 8192
"""Rows and places per piece: the lock is held for less than a millisecond."""
LEASE_COST, PART_COST = 16, 64
"""What one lease, and one part of a lease, counts for at least, however short it is."""


class Endings:
    """Ends leases. Callers hold the store's lock, but for `release`, `expire` and `begin_all`."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._leases = shared, shared.leases
        self._residency, self._dram, self._unpin = shared.blocks.residency, shared.blocks.dram, shared.blocks.unpin
        self._under_way, self._places = shared.leases.ending, shared.leases.ending_places

    def release(self, lease: int) -> None:
        """Unpin; the places of an expired lease may be reused from now on."""
        with self._shared.lock:
            record = self._leases.take(lease)
            if record is not None:
                self.finish([record])

    def expire(self, lease: int) -> None:
        """Expire a lease whose holder is unreachable and may still read: it pins nothing, and its places are not reused
        before it is released."""
        with self._shared.lock:
            record = self._leases.expire(lease)
            if record is not None:
                self.finish([record])

    def begin_all(self, released: Collection[int], expired: Collection[int]) -> None:
        """`release` some leases and `expire` others, quickly, however many: they are over at once; `finish_all`, or a
        put or lease that lacks room, unpins them."""
        if not released and not expired:
            return
        with self._shared.lock:
            records = [*map(self._leases.take, released), *map(self._leases.expire, expired)]
            if self._shared.closed:
                return
            for record in records:
                if record is not None:
                    self.begin(record)
            self.work()

    def finish(self, records: Iterable[LeaseRecord]) -> None:
        """End these, all of them begun at once. Under the lock, which is released between pieces."""
        spent, records = 0, list(records)
        for record in records:  # from now on puts and leases that lack room find all of them
            if not self._shared.closed:
                self.begin(record)
        for record in records:
            while self.is_under_way(record) and not self._shared.closed:
                spent += self.step(record, ENDED_PLACES - spent)
                if spent >= ENDED_PLACES:
                    spent = 0
                    self._shared.moves_done.wait(GIVE_WAY_SECONDS)

    def finish_all(self) -> None:
        """The same for all that were begun."""
        self.finish(self._under_way.values())

    def begin(self, record: LeaseRecord) -> None:
        """Start ending a lease that expired or was released. If it is ending already, it continues in its new state."""
        if record.number not in self._under_way:
            self._under_way[record.number] = record
            self._places[record.owner] += len(record.places)

    def work(self, most: int = ENDED_PLACES) -> None:
        """Do one piece, of the leases that began to end first."""
        while self._under_way and most > 0:
            most -= self.step(next(iter(self._under_way.values())), most)

    def step(self, record: LeaseRecord, most: int = ENDED_PLACES) -> int:
        """Do one piece of this lease; returns how many places it counts for."""
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
        return self._under_way.get(record.number) is record

    def check(self, records: Iterable[LeaseRecord]) -> tuple[Counter[int], Counter[int]]:
        """How often each row is pinned and each place is held, by these leases and by the ending ones. records: those
        that no holder has released."""
        pins: Counter[int] = Counter()
        held: Counter[int] = Counter()
        for record in {**self._under_way, **{one.number: one for one in records}}.values():
            pins.update(record.rows[record.unpinned :])
            held.update(place for place in record.places[record.let_go : record.held] if place >= 0)
            is_over = record.has_expired or record.is_released
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
        cost, rows = 0, len(record.rows)
        while cost < most and record.held < len(record.places):
            part, at = divmod(record.held, rows)
            count = min(most - cost, rows - at)
            column = np.frombuffer(record.places, np.int64)[record.held : record.held + count]
            self._residency.defer_reuse_of_current(record.rows[at : at + count], part, column)
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
        self._dram.allow_reuse(self._residency.held.allow_reuse(column[column != NO_PLACE]))
        record.let_go += count
        return count

    def _end(self, record: LeaseRecord) -> None:
        del self._under_way[record.number]
        self._places[record.owner] -= len(record.places)
        if not self._places[record.owner]:
            del self._places[record.owner]
