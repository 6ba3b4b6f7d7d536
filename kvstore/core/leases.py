"""The store's leases and reservations.

A lease pins blocks for one owner until it is released or expires. An expired lease pins nothing, but its reader may
still be copying: its places are then *held*, so a slot evicted meanwhile is not reused before the reader releases the
lease.

A reservation is a put in progress. Its blocks become visible one after another, each when all its parts are committed
and its parent is visible.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.block.account import HitTier, MissReason
from kvstore.core.rows.index import TierRuns as TierRuns
from kvstore.core.table import BlockTable
from kvstore.protocol import messages as m
from kvstore.protocol.replies import LeaseReply
from tiering.clock import Clock
from tiering.counts.awaits import AwaitEnd, ParkedAwait
from tiering.dram.tier import DramTier
from tiering.residency import Residency
from tiering.tier import NO_PLACE


@dataclass(eq=False, slots=True)
class LeaseRecord:
    """rows: the pinned blocks in chain order, from block `first_block` on. places: of the frames, part after part: 8
    bytes each, since they are most of a lease's memory. holders: releases needed to end it. owner: the tenant.

    has_expired: it pins nothing any more, or soon. is_released: its last holder has released it. It then ends in pieces
    (see `Endings`): unpinned counts rows; held counts places, of which the first `let_go` are not held any more.
    """

    number: int
    namespace: int
    first_block: int
    rows: array[int]
    places: array[int]
    expires_at: float
    holders: int = 1
    owner: bytes = b""
    has_expired: bool = False
    is_released: bool = False
    unpinned: int = 0
    held: int = 0
    let_go: int = 0

    def place(self, part: int, at: int) -> int | None:
        """Where a part's frame of block `at` of the lease was when leased; None if there is none."""
        index = part * len(self.rows) + at
        return self.places[index] if part >= 0 and 0 <= at < len(self.rows) and index < len(self.places) else None


@dataclass(slots=True)
class ReservationRecord:
    """rows, parents, indexes: the blocks to fill, in chain order. Of each part: done, the committed blocks, and places,
    the slots.

    repairs: lost rows among them, pinned while the reservation lives. abandoned_slots: places of a reservation that
    ended while a producer may still write. depends_on: reservations of the same session whose blocks these follow, and
    which must become visible first. is_collective: other processes wait for its answer. detail: why it got no more
    slots. room_until: until when its put waits for room, if it set a limit. is_ending: it is being aborted.
    is_cancelling: its producer was lost, and writes no more of it. is_fetched: a courier fills it, with blocks from
    `fetched_from`.
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
    repairs: set[int] = field(default_factory=set)
    filled: int = 0  # blocks that have slots
    published: int = 0
    done: list[int] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    abandoned_slots: list[int] = field(default_factory=list)
    cancelled: bool = False
    depends_on: set[int] = field(default_factory=set)
    is_collective: bool = False
    detail: str = ""
    room_until: float | None = None
    is_ending: bool = False
    is_cancelling: bool = False
    is_fetched: bool = False
    fetched_from: HitTier = HitTier.PEER

    def __post_init__(self) -> None:
        self.done = [0] * self.parts
        self.places = [[] for _ in range(self.parts)]


class LeaseTable:
    """All leases, in the order in which they expire: every lease lasts equally long."""

    def __init__(self, lease_seconds: float, new_number: Callable[[], int] | None = None) -> None:
        """new_number: draws a number above 0 that no other lease of this table ever has."""
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
        """How many leases a tenant has."""
        return self._of[owner]

    def get(self, number: int) -> LeaseRecord | None:
        """A lease, live or expired."""
        return self._live.get(number) or self._lapsed.get(number)

    def is_live(self, number: int, now: float = -inf) -> bool:
        """Whether a lease pins at that time."""
        record = self._live.get(number)
        return record is not None and record.expires_at > now

    def attach(self, number: int, now: float = -inf) -> bool:
        """Add a holder to a live lease."""
        if not self.is_live(number, now):
            return False
        self._live[number].holders += 1
        return True

    def take(self, number: int) -> LeaseRecord | None:
        """Release one holder of a live or expired lease; the last one removes it and gets its record."""
        record = self.get(number)
        if record is not None and record.holders > 1:
            record.holders -= 1
            return None
        if record is not None:
            self._of[record.owner] -= 1
            record.is_released = True
        return self._live.pop(number, None) or self._lapsed.pop(number, None)

    def expire_due(self, now: float) -> Iterator[LeaseRecord]:
        """Expire leases whose time is over; each stays in the table until its reader releases it."""
        while self._live:
            record = next(iter(self._live.values()))
            if record.expires_at > now:
                return
            yield self._expire(record)

    def expire(self, number: int) -> LeaseRecord | None:
        """Expire a lease now, if it is live."""
        record = self._live.get(number)
        return self._expire(record) if record is not None else None

    def expire_all(self, namespace: int) -> Iterator[LeaseRecord]:
        """Expire every lease of a namespace now."""
        for record in [record for record in self._live.values() if record.namespace == namespace]:
            yield self._expire(record)

    def live(self) -> Iterator[LeaseRecord]:
        """Leases that pin."""
        return iter(self._live.values())

    def expired(self) -> Iterator[LeaseRecord]:
        """Leases that expired and were not released."""
        return iter(self._lapsed.values())

    def __len__(self) -> int:
        """Leases that pin or keep slots from reuse."""
        return len(self._live) + len(self._lapsed)

    def _expire(self, record: LeaseRecord) -> LeaseRecord:
        del self._live[record.number]
        self._lapsed[record.number] = record
        record.has_expired = True
        return record


# ---------------------------------------------------------------------------------------------------------------------
# Leases that are over, ended a piece at a time.
#
# A lease may be of millions of frames, and a tenant may have thousands of leases that all end in one moment: when its
# connection breaks, when one message releases them, when they expire. Ending one is only recorded, which takes a
# microsecond; from then on it cannot be released, attached to or used again. The rest is done under the store's lock in
# pieces of at most `ENDED_PLACES`, by whichever call comes next:
#
#     lapsed      1. its places are held from reuse, part by part    2. its rows are unpinned
#     released    1. its rows are unpinned                           2. its held places may be reused
#
# At every moment each row is pinned, or all its places are held, or its reader is done: memory that a reader may still
# copy is never reused, however far the work is. A lease that is released while it lapses goes on from there.
#
# No clock and no lock here: `store` has those, and lets others have the lock between pieces.


ENDED_PLACES = 8192
"""Rows and places per piece: the lock is held for less than a millisecond."""
LEASE_COST, PART_COST = 16, 64
"""What one lease, and one part of a lease, counts for at least, however short it is."""


class Endings:
    """Leases that are ending. Callers hold the store's lock."""

    def __init__(self, residency: Residency, dram: DramTier, unpin: Callable[[int, Sequence[int]], None]) -> None:
        """unpin: called with rows of a namespace, to lower the store's pin counts."""
        self._residency = residency
        self._dram = dram
        self._unpin = unpin
        self._under_way: dict[int, LeaseRecord] = {}
        self._places: Counter[bytes] = Counter()

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

    def under_way(self) -> list[LeaseRecord]:
        return list(self._under_way.values())

    def under_way_of(self, namespace: int) -> list[LeaseRecord]:
        return [record for record in self._under_way.values() if record.namespace == namespace]

    def places_of(self, owner: bytes) -> int:
        """Places of a tenant's ending leases."""
        return self._places[owner]

    def __len__(self) -> int:
        return len(self._under_way)

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
        """Hold the next places: of one part, or of several short ones. Returns how many places it counts for."""
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
        self._dram.allow_reuse(self._residency.allow_reuse(column[column != NO_PLACE]))
        record.let_go += count
        return count

    def _end(self, record: LeaseRecord) -> None:
        del self._under_way[record.number]
        self._places[record.owner] -= len(record.places)
        if not self._places[record.owner]:
            del self._places[record.owner]


def flat(columns: Sequence[Sequence[int]]) -> array[int]:
    """Places by part, in a lease record's form."""
    places = array("q")
    for column in columns:
        places.extend(column)
    return places


# ---------------------------------------------------------------------------------------------------------------------
# What a lease's answer is made of.


class LeasedFrames:
    """The frames of a lease's answer, by part."""

    def __init__(self, parts: int) -> None:
        self.places: list[list[int]] = [[] for _ in range(parts)]
        self.header_digests: list[list[bytes]] = [[] for _ in range(parts)]
        self.generations: list[int] = []
        self.flat: array[int] | None = None
        """The places in a lease record's form, once made."""

    def add(self, residency: Residency, rows: Sequence[int]) -> None:
        """Add the frames of more rows."""
        for part, (places, digests) in enumerate(zip(self.places, self.header_digests, strict=True)):
            places += residency.places_of(rows, part)
            digests += residency.header_digests_of(rows, part)
        self.generations += residency.generations_of(rows)


class LeaseEnd(NamedTuple):
    """Why a lease goes no further; as in `LeaseReply`."""

    reason: MissReason | None
    detail: str
    lacks_room: bool = False


def no_lease(first_block: int, blocks: int, tiers: TierRuns, end: LeaseEnd) -> LeaseReply:
    """An answer that pins nothing: all blocks it names lie before `first_block`."""
    return LeaseReply(
        0, first_block, blocks, tiers=tiers, reason=end.reason, detail=end.detail, lacks_room=end.lacks_room
    )


def cut_runs(tiers: TierRuns, blocks: int) -> TierRuns:
    """The runs of the first blocks."""
    runs = []
    for tier, length in tiers:
        if blocks > 0:
            runs.append((tier, min(length, blocks)))
        blocks -= length
    return tuple(runs)


def join_runs(runs: list[tuple[HitTier, int]], more: Sequence[tuple[HitTier, int]]) -> list[tuple[HitTier, int]]:
    """Runs, and those that follow them."""
    for tier, length in more:
        if runs and runs[-1][0] is tier:
            runs[-1] = tier, runs[-1][1] + length
        else:
            runs.append((tier, length))
    return runs


class Fetched(Protocol):
    """Blocks that couriers fetch (`kvstore.elsewhere`), as the store sees them: slots of reservations that are
    `is_fetched`, and adopted blocks, pinned for a moment and marked with their origin. Called under the store's lock;
    `due_at` may be read without it."""

    due_at: float
    """When `expire` next has work."""
    door: str
    """The address at which peers reach this node."""

    def is_served(self, tenant: bytes) -> bool:
        """Whether any courier serves a tenant."""
        ...

    @property
    def is_any_marked(self) -> bool:
        """Whether any block is marked with an origin."""
        ...

    @property
    def has_slots(self) -> bool:
        """Whether couriers hold slots that are not filled yet."""
        ...

    def room(self, number: int, tenants: int) -> int:
        """How many more blocks of a namespace couriers may reserve now, if so many tenants have couriers."""
        ...

    def came(self, number: int, rows: Sequence[int], tier: HitTier) -> None:
        """Adopted blocks became readable."""
        ...

    def expire(self) -> None:
        """Unpin adopted blocks whose time is over."""
        ...

    def give_way(self) -> bool:
        """An engine lacks room: unpin some more adopted blocks; False if there are none."""
        ...

    def forget(self, number: int) -> None:
        """A namespace is dropped."""
        ...

    def tiers(self, rows: Sequence[int], runs: TierRuns) -> TierRuns:
        """Where blocks were found; one from elsewhere that no lease has had yet counts as its origin's."""
        ...

    def pinned(self) -> list[int]:
        """Verify its own tables; returns all pinned rows, each once."""
        ...


# ---------------------------------------------------------------------------------------------------------------------
# Waits for blocks that are not readable yet.


class ChainWaits:
    """A store's waits for blocks. A wait is parked in the index's table and takes no thread. Thread-safe."""

    def __init__(self, blocks: BlockTable, clock: Clock, lock: threading.Lock, is_closed: Callable[[], bool]) -> None:
        """lock: the store's."""
        self._blocks, self._lock, self._is_closed = blocks, lock, is_closed
        self._awaits = blocks.index.awaits
        self._awaits.now = clock.monotonic_seconds

    def park(
        self,
        number: int,
        keys: Sequence[bytes],
        seconds: float,
        tell: Callable[[ParkedAwait], object],
        fetch: object = None,
    ) -> ParkedAwait:
        """Wait until the last of these keys is readable, which may be at once. `Awaits.expire` ends it at its deadline.
        fetch: as in `ParkedAwait`."""
        index = self._blocks.index
        one = ParkedAwait(number, self._blocks.spaces[number].tenant, keys, seconds, tell, fetch)
        self._awaits.register(one)
        with self._lock:
            if self._is_served(number):
                is_there = index.matched(number, keys[-1:])
                self._awaits.looked(one, len(keys) if is_there else index.matched(number, keys))
            else:
                self._awaits.end([one], AwaitEnd.GONE)
        return one

    def awaited(self, one: ParkedAwait) -> m.Awaited:
        """The answer to a wait that is over: how many leading keys are readable now."""
        assert one.end is not None
        return m.Awaited(self.readable(one.number, one.keys), one.end)

    def readable(self, number: int, keys: Sequence[bytes]) -> int:
        """How many leading blocks of these are readable now."""
        with self._lock:
            return self._blocks.index.matched(number, keys) if self._is_served(number) else 0

    def wait(self, number: int, keys: Sequence[bytes], seconds: float) -> m.Awaited:
        """`park`, and wait for its end in this thread."""
        done = threading.Event()
        one = self.park(number, keys, seconds, lambda _: done.set())
        self._awaits.wait(one, done)
        return self.awaited(one)

    def _is_served(self, number: int) -> bool:
        return not self._is_closed() and number not in self._blocks.dropping
