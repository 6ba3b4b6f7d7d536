"""Blocks that couriers fetch: their slots, and how long each is kept for the engine that waits for it.

    reserved > adopted: pinned, and marked with its origin > leased: unpinned; the lease counts it for the origin
                                                           > 1 s passed: unpinned; the mark stays
                                                           > others lack room: unpinned, the oldest first

Couriers' slots and these pins together take an eighth of DRAM at most. A mark is of one generation of a block: a block
that was evicted and stored anew is not marked. "Under the lock" means the store's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from kvstore.block.account import HitTier
from kvstore.core.leases import join_runs
from kvstore.core.rows.index import RowState, TierRuns
from kvstore.core.shared import Fetched
from kvstore.core.store import Store
from kvstore.elsewhere.adoption import WantedFrame
from kvstore.protocol.courier import ReadableBlock
from kvstore.service.parked import Parking
from tiering.counts.changes import BlockPlace
from tiering.frame import Stamp

KEPT_SECONDS = 1.0
"""How long a fetched block is pinned for the engine that waits for it."""
SHARE_OF_DRAM = 1 / 8
MOST_MARKS = 1 << 16
GIVES_WAY_AT_ONCE = 64
LISTED_AT_ONCE, SCANNED_AT_ONCE = 2048, 1 << 17
"""Readable blocks in one listing, and rows scanned for them: the lock is held for about a millisecond."""


class _Mark(NamedTuple):
    number: int
    generation: int
    tier: HitTier


class FetchedBlocks(Fetched):
    """Of one store with couriers. Thread-safe."""

    def __init__(self, store: Store, parking: Parking, door: str = "") -> None:
        """parking: knows whose couriers are there. door: the address for other nodes."""
        self.keys, self.door = store.blocks.keys, door
        self._parking = parking
        self._blocks, self._clock, self._lock = store.blocks, store.clock, store.lock
        self._reservations, self._leases = store.reservations, store.leases
        self._pins: OrderedDict[int, tuple[int, float]] = (
            OrderedDict()
        )  # row > namespace, until; the first to end first
        self.marks: OrderedDict[int, _Mark] = OrderedDict()
        self._pinned_bytes = 0
        self._tenants: Counter[bytes] = Counter()  # pinned bytes, by tenant
        self.adopted = Counter[HitTier]()
        """Blocks since the start, by origin."""
        self.gave_way = 0
        """Blocks that were unpinned because others lacked room."""

    # Under the lock: called by the store -----------------------------------------------------------------------------

    def is_served(self, tenant: bytes) -> bool:
        return self._parking.is_served(tenant)

    @property
    def has_slots(self) -> bool:
        return any(one.is_fetched for one in self._reservations.values())

    def room(self, number: int, tenants: int) -> int:
        """As `Fetched.room`: if several tenants have couriers, each takes at most half of what is left."""
        left = int(SHARE_OF_DRAM * self._blocks.dram.budget_bytes) - self._pinned_bytes
        mine, tenant = 0, self._blocks.spaces[number].tenant
        for one in self._reservations.values():
            if one.is_fetched:
                space = self._blocks.spaces[one.namespace]
                parts = len(space.classes)
                unfilled = 0 if one.cancelled else len(one.rows) - one.published
                held = unfilled + -(-len(one.abandoned_slots) // parts)
                left -= held * space.block_bytes
                mine += held * space.block_bytes if space.tenant == tenant else 0
        mine += self._tenants[tenant]
        if tenants > 1:
            left = (left - mine) // 2
        return max(0, left) // self._blocks.spaces[number].block_bytes

    def came(self, number: int, rows: Sequence[int], tier: HitTier) -> None:
        until = self._clock.monotonic_seconds() + KEPT_SECONDS
        generation = self._blocks.residency.generation
        fresh = [row for row in rows if row not in self._pins]
        self._blocks.pin(number, fresh)
        self._count(number, len(fresh))
        for row in rows:
            self._pins[row] = number, until
            self._pins.move_to_end(row)
            self.marks[row] = _Mark(number, generation(row), tier)
            self.marks.move_to_end(row)
        self._next_due()
        while len(self.marks) > MOST_MARKS:
            self.marks.popitem(last=False)
        self.adopted[tier] += len(rows)

    def expire(self) -> None:
        now = self._clock.monotonic_seconds()
        while self._pins and next(iter(self._pins.values()))[1] <= now:
            self._let_go([next(iter(self._pins))])

    def give_way(self) -> bool:
        some = list(islice(self._pins, GIVES_WAY_AT_ONCE))
        self._let_go(some)
        self.gave_way += len(some)
        return bool(some)

    def forget(self, number: int) -> None:
        self._let_go([row for row, (of, _) in self._pins.items() if of == number])
        for row in [row for row, mark in self.marks.items() if mark.number == number]:
            del self.marks[row]

    def tiers(self, rows: Sequence[int], runs: TierRuns) -> TierRuns:
        if self.marks.keys().isdisjoint(rows):
            return runs
        found: list[tuple[HitTier, int]] = []
        at = 0
        for tier, count in runs:
            for row in rows[at : at + count]:
                mark = self._mark_of(row) if tier is HitTier.DRAM else None
                found = join_runs(found, [(mark.tier if mark is not None else tier, 1)])
            at += count
        return tuple(found)

    def pinned(self) -> list[int]:
        for row, (number, _) in self._pins.items():
            assert self._blocks.index.is_row_of(row, number), "what is pinned is there"
        assert self._pinned_bytes == sum(self._blocks.spaces[number].block_bytes for number, _ in self._pins.values())
        assert sum(self._tenants.values()) == self._pinned_bytes <= SHARE_OF_DRAM * self._blocks.dram.budget_bytes
        return list(self._pins)

    # Called by the desk ----------------------------------------------------------------------------------------------

    def leased(self, lease: int) -> None:
        """An engine was granted this lease: its blocks need not be kept any longer."""
        if not self.marks and not self._pins:
            return
        with self._lock:
            record = self._leases.get(lease)
            rows = record.rows if record is not None else ()
            self._let_go([row for row in rows if row in self._pins])
            for row in rows:
                self.marks.pop(row, None)

    def wanted(self, reservation: int, part: int, first: int, count: int) -> tuple[Stamp, list[WantedFrame]] | None:
        """The next frames of a part; None if the reservation was cancelled."""
        with self._lock:
            record = self._reservations.get(reservation)
            if record is None or record.cancelled or record.is_ending or first + count > record.filled:
                return None
            stop, key = first + count, self._blocks.index.key
            columns = zip(record.rows[first:stop], record.parents[first:stop], record.indexes[first:stop], strict=True)
            wanted = [WantedFrame(key(row), parent, depth) for row, parent, depth in columns]
            return self._blocks.spaces[record.namespace].stamps[part], wanted

    def comes_from(self, reservation: int, tier: HitTier) -> None:
        with self._lock:
            record = self._reservations.get(reservation)
            if record is not None:
                record.fetched_from = tier

    def listed(self, number: int, after: int) -> tuple[list[ReadableBlock], int]:
        """Some readable blocks of a namespace, from a position on, and the position to go on from; 0 at the end."""
        index, found = self._blocks.index, list[ReadableBlock]()
        with self._lock:
            stop = min(after + SCANNED_AT_ONCE, index.rows_end)
            if number in self._blocks.dropping or after >= index.rows_end:
                return [], 0
            rows, depths = index.rows_and_depths(number, after, stop)
            some = rows[:LISTED_AT_ONCE]
            for row, depth in zip(some.tolist(), depths[:LISTED_AT_ONCE].tolist(), strict=True):
                if index.state(row) is RowState.VISIBLE:
                    where = BlockPlace.DRAM if self._blocks.is_above(row) else BlockPlace.NVME
                    found.append((index.key(row), depth, int(where)))
            after = int(some[-1]) + 1 if len(some) < len(rows) else stop
            return found, after if after < index.rows_end else 0

    @property
    def kept_bytes(self) -> int:
        return self._pinned_bytes

    def _mark_of(self, row: int) -> _Mark | None:
        mark = self.marks.get(row)
        if mark is None:
            return None
        if self._blocks.index.is_row_of(row, mark.number) and self._blocks.residency.generation(row) == mark.generation:
            return mark
        del self.marks[row]  # another block has this row
        return None

    def _let_go(self, rows: Collection[int]) -> None:
        for row in rows:
            number, _ = self._pins.pop(row)
            self._blocks.unpin(number, [row])
            self._count(number, -1)
        self._next_due()

    def _next_due(self) -> None:
        self.due_at = next(iter(self._pins.values()))[1] if self._pins else inf

    def _count(self, number: int, blocks: int) -> None:
        space = self._blocks.spaces[number]
        self._pinned_bytes += blocks * space.block_bytes
        self._tenants[space.tenant] += blocks * space.block_bytes
        if not self._tenants[space.tenant]:
            del self._tenants[space.tenant]
