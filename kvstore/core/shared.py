"""What all parts of one store share: its tables, its leases, and the lock that guards them.

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

import threading
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import ClassVar

import numpy as np

from kvstore.block.account import HitTier, MissReason
from kvstore.config import Limits
from kvstore.core.index import TierRuns
from kvstore.core.table import BlockTable
from tiering.clock import Clock
from tiering.nvme.tier import NvmeTier
from tiering.tier import NO_PLACE

GIVE_WAY_SECONDS = 1e-4
"""Pause between two pieces of long work, in `Shared.moves_done`: without it this thread takes the lock again before a
waiting one wakes up."""
ENDED_PLACES = 4096
"""Rows and places of ending leases per piece: the lock is held for less than a millisecond."""
LEASE_COST, PART_COST = 16, 64
"""What one lease, and one part of a lease, counts for at least, however short it is."""


@dataclass(slots=True, kw_only=True)
class SlotRequest:
    """Blocks that need slots in DRAM: for a promotion or, as a `ReservationRecord`, for a put. `Room` finds them.

    rows: the blocks, in chain order. places: of each part, the slots of the first `filled` blocks. cancelled: it needs
    no more. detail: why it got no more. room_until: until when it waits for room, if it set a limit. is_collective:
    other processes wait for its answer. is_fetched: a courier fills it.
    """

    is_put: ClassVar[bool] = False
    namespace: int
    rows: list[int] = field(default_factory=list)
    places: list[list[int]]
    filled: int = 0
    cancelled: bool = False
    detail: str = ""
    room_until: float | None = None
    is_collective: bool = False
    is_fetched: bool = False


@dataclass(slots=True, kw_only=True)
class ReservationRecord(SlotRequest):
    """A put in progress. Its blocks become visible one after another, each when all its parts are committed and its
    parent is visible.

    rows, parents, indexes: the blocks to fill, in chain order. done: of each part, the committed blocks.

    repairs: lost rows among them, pinned while the reservation lives. abandoned_slots: places of a reservation that
    ended while a producer may still write. depends_on: reservations of the same session whose blocks these follow, and
    which must become visible first. is_ending: it is being aborted. is_cancelling: its producer was lost, and writes no
    more of it. fetched_from: where a courier has its blocks from.
    """

    is_put: ClassVar[bool] = True
    number: int
    priority: int
    expires_at: int
    done: list[int]
    parents: list[bytes] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    repairs: set[int] = field(default_factory=set)
    published: int = 0
    abandoned_slots: list[int] = field(default_factory=list)
    depends_on: set[int] = field(default_factory=set)
    is_ending: bool = False
    is_cancelling: bool = False
    fetched_from: HitTier = HitTier.PEER

    @property
    def parts(self) -> int:
        return len(self.done)


class Fetched:
    """Blocks that couriers fetch, of a store that has no couriers: `kvstore.elsewhere` has those of one that does. They
    are slots of reservations that are `is_fetched`, and adopted blocks, pinned for a moment and marked with their
    origin. Called under the store's lock; `due_at` may be read without it."""

    due_at = inf
    """When `expire` next has work."""
    door = ""
    """The address at which peers reach this node."""
    marks: Sized = ()
    """Blocks that are marked with an origin."""

    @property
    def has_slots(self) -> bool:
        """Whether couriers hold slots that are not filled yet."""
        return False

    def is_served(self, tenant: bytes) -> bool:
        """Whether any courier serves a tenant."""
        return False

    def room(self, number: int, tenants: int) -> int:
        """How many more blocks of a namespace couriers may reserve now, if so many tenants have couriers."""
        return 0

    def came(self, number: int, rows: Sequence[int], tier: HitTier) -> None:
        """Adopted blocks became readable."""

    def expire(self) -> None:
        """Unpin adopted blocks whose time is over."""

    def give_way(self) -> bool:
        """An engine lacks room: unpin some more adopted blocks; False if there are none."""
        return False

    def forget(self, number: int) -> None:
        """A namespace is dropped."""

    def tiers(self, rows: Sequence[int], runs: TierRuns) -> TierRuns:
        """Where blocks were found; one from elsewhere that no lease has had yet counts as its origin's."""
        return runs

    def pinned(self) -> list[int]:
        """Verify its own tables; returns all pinned rows, each once."""
        return []


@dataclass(eq=False, slots=True)
class LeaseRecord:
    """rows: the pinned blocks in chain order, from block `first_block` on. places: of the frames, part after part: 8
    bytes each, since they are most of a lease's memory. owner: the tenant. holders: releases needed to end it.

    has_expired: it pins nothing any more, or soon. is_released: its last holder has released it. It then ends in
    pieces: unpinned counts rows; held counts places, of which the first `let_go` are not held any more.
    """

    number: int
    namespace: int
    first_block: int
    rows: array[int]
    places: array[int]
    expires_at: float
    owner: bytes
    holders: int = 1
    has_expired: bool = False
    is_released: bool = False
    unpinned: int = 0
    held: int = 0
    let_go: int = 0

    def place(self, part: int, at: int) -> int | None:
        """Where a part's frame of block `at` of the lease was when leased; None if there is none."""
        index = part * len(self.rows) + at
        return self.places[index] if part >= 0 and 0 <= at < len(self.rows) and index < len(self.places) else None


class Leases:
    """All leases of a store, in the order in which they expire: every lease lasts equally long. Callers hold the
    store's lock, but for `release`, `expire` and `begin_all`."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._blocks = shared, shared.blocks
        self._residency = shared.blocks.residency
        self.live: dict[int, LeaseRecord] = {}
        """Leases that pin."""
        self.lapsed: dict[int, LeaseRecord] = {}
        """Leases that expired and were not released."""
        self.ending: dict[int, LeaseRecord] = {}
        """Leases that are over and still pin or hold places."""
        self.ending_places: Counter[bytes] = Counter()
        """Of these, by tenant."""
        self.promoting: list[tuple[int, list[int]]] = []
        """Namespace and pinned rows of each lease that waits for promotions, and has no number yet."""
        self.counts: Counter[bytes] = Counter()
        """Leases, by tenant."""

    def __len__(self) -> int:
        """Leases that pin or keep slots from reuse."""
        return len(self.live) + len(self.lapsed)

    def add(self, namespace: int, first_block: int, rows: Sequence[int], places: array[int]) -> int:
        """A new lease; returns its number. places: as in `LeaseRecord`."""
        shared, owner = self._shared, self._blocks.spaces[namespace].tenant
        number, expires_at = shared.new_number(), shared.clock.monotonic_seconds() + shared.limits.lease_seconds
        self.live[number] = LeaseRecord(number, namespace, first_block, array("i", rows), places, expires_at, owner)
        self.counts[owner] += 1
        return number

    def get(self, number: int) -> LeaseRecord | None:
        """A lease, live or expired."""
        return self.live.get(number) or self.lapsed.get(number)

    def is_live(self, number: int) -> bool:
        record = self.live.get(number)
        return record is not None and record.expires_at > self._shared.clock.monotonic_seconds()

    def take(self, number: int) -> LeaseRecord | None:
        """Release one holder of a live or expired lease; the last one removes it and gets its record."""
        record = self.get(number)
        if record is not None and record.holders > 1:
            record.holders -= 1
            return None
        if record is not None:
            self.counts[record.owner] -= 1
            record.is_released = True
        return self.live.pop(number, None) or self.lapsed.pop(number, None)

    def expire_due(self, now: float) -> Iterator[LeaseRecord]:
        """Expire leases whose time is over; each stays in the table until its reader releases it."""
        while self.live:
            record = next(iter(self.live.values()))
            if record.expires_at > now:
                return
            yield self._lapse(record)

    def expire_all(self, namespace: int) -> Iterator[LeaseRecord]:
        for record in [record for record in self.live.values() if record.namespace == namespace]:
            yield self._lapse(record)

    def _lapse(self, record: LeaseRecord) -> LeaseRecord:
        del self.live[record.number]
        self.lapsed[record.number] = record
        record.has_expired = True
        return record

    # Ending, in pieces -----------------------------------------------------------------------------------------------

    def release(self, lease: int) -> None:
        """Unpin; the places of an expired lease may be reused from now on."""
        with self._shared.lock:
            record = self.take(lease)
            if record is not None:
                self.finish([record])

    def expire(self, lease: int) -> None:
        """Expire a lease whose holder is unreachable and may still read: it pins nothing, and its places are not reused
        before it is released."""
        with self._shared.lock:
            self.finish(self._over([], [lease]))

    def begin_all(self, released: Collection[int], expired: Collection[int]) -> None:
        """`release` some leases and `expire` others, quickly, however many: they are over at once; `finish_all`, or a
        put or lease that lacks room, unpins them."""
        if not released and not expired:
            return
        with self._shared.lock:
            records = self._over(released, expired)
            if self._shared.closed:
                return
            for record in records:
                self.begin(record)
            self.work()

    def _over(self, released: Collection[int], expired: Collection[int]) -> list[LeaseRecord]:
        taken = [record for record in map(self.take, released) if record is not None]
        return [*taken, *(self._lapse(self.live[lease]) for lease in expired if lease in self.live)]

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
        self.finish(self.ending.values())

    def begin(self, record: LeaseRecord) -> None:
        """Start ending a lease that expired or was released. If it is ending already, it continues in its new state."""
        if record.number not in self.ending:
            self.ending[record.number] = record
            self.ending_places[record.owner] += len(record.places)

    def work(self) -> None:
        """Do one piece, of the leases that began to end first."""
        most = ENDED_PLACES
        while self.ending and most > 0:
            most -= self.step(next(iter(self.ending.values())), most)

    def step(self, record: LeaseRecord, most: int) -> int:
        """Do one piece of this lease, which is ending; returns how many places it counts for."""
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
        return self.ending.get(record.number) is record

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
        self._blocks.unpin(record.namespace, rows)
        record.unpinned += len(rows)
        return len(rows)

    def _let_go(self, record: LeaseRecord, most: int) -> int:
        count = min(most, record.held - record.let_go)
        column = np.frombuffer(record.places, np.int64)[record.let_go : record.let_go + count]
        self._blocks.dram.allow_reuse(self._residency.held.allow_reuse(column[column != NO_PLACE]))
        record.let_go += count
        return count

    def _end(self, record: LeaseRecord) -> None:
        del self.ending[record.number]
        self.ending_places[record.owner] -= len(record.places)
        if not self.ending_places[record.owner]:
            del self.ending_places[record.owner]

    def check(self) -> tuple[Counter[int], Counter[int]]:
        """How often each row is pinned and each place is held, by all leases."""
        pins: Counter[int] = Counter()
        held: Counter[int] = Counter()
        for record in {**self.ending, **self.live, **self.lapsed}.values():
            pins.update(record.rows[record.unpinned :])
            held.update(place for place in record.places[record.let_go : record.held] if place >= 0)
            is_over = record.has_expired or record.is_released
            assert is_over or not (record.unpinned or record.held), "only what is over is ended"
            assert not record.unpinned or record.is_released or record.held == len(record.places)
            if is_over and not self.is_under_way(record):
                assert not record.is_released and record.unpinned == len(record.rows)
        places = Counter[bytes]()
        for record in self.ending.values():
            places[record.owner] += len(record.places)
        assert +self.ending_places == places
        return pins, held


class Shared(ABC):
    """The tables of a store, which is the one class that is made of it. Those parts that say "under the lock" mean this
    one's.

    reservations: by number. fetched: replaced where couriers fetch blocks. closed: the tables are void. moves_done: a
    condition of the lock, notified as moves end; long work waits at it to let others have the lock.
    """

    def __init__(
        self, blocks: BlockTable[NvmeTier], clock: Clock, limits: Limits, new_number: Callable[[], int] | None
    ) -> None:
        self.blocks, self.lower, self.clock, self.limits = blocks, blocks.lower, clock, limits
        self.new_number = new_number or count(1).__next__
        self.leases = Leases(self)
        self.reservations: dict[int, ReservationRecord] = {}
        self.fetched = Fetched()
        self.closed = False
        self.renew_lock()

    def renew_lock(self) -> None:
        """In a forked child, where a thread that is not there may hold the parent's."""
        self.lock = threading.Lock()
        self.moves_done = threading.Condition(self.lock)

    @abstractmethod
    def end_due(self) -> None:
        """Expire leases and all else that is due; called, under the lock, before anything that needs room or pins."""

    @abstractmethod
    def why(self, number: int, keys: Sequence[bytes], blocks: int) -> tuple[MissReason | None, str]:
        """The reason a chain is readable for so many blocks and no longer, with details. Under the lock."""

    @abstractmethod
    def tiers(self, rows: Sequence[int]) -> TierRuns:
        """Where these rows are found. Under the lock."""

    @abstractmethod
    def check_open(self) -> None:
        """Raises `StoreClosed`."""
