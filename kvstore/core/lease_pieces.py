"""Leases in pieces: long chains are leased, and all leases end, with the lock free in between.

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

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvstore.block.account import HitTier, MissReason
from kvstore.core import GIVE_WAY_SECONDS, Shared
from kvstore.core.dram_recovery import read_first
from kvstore.core.leases import (
    IS_CLOSED,
    IS_DROPPED,
    LOCKED_BLOCKS,
    LeasedFrames,
    LeaseEnd,
    LeaseRecord,
    LeaseTable,
    Leasing,
    cut_runs,
    flat,
    join_runs,
    no_lease,
)
from kvstore.core.levels import Levels
from kvstore.core.rows.index import RowState, TierRuns
from kvstore.core.table import BlockTable
from kvstore.protocol.replies import LeaseReply
from tiering.dram.tier import DramTier
from tiering.residency import Residency
from tiering.tier import NO_PLACE

ENDED_PLACES = 8192
"""Rows and places per piece: the lock is held for less than a millisecond."""
LEASE_COST, PART_COST = 16, 64
"""What one lease, and one part of a lease, counts for at least, however short it is."""


class Endings:
    """Ends leases. Callers hold the store's lock, but for `release`, `expire` and `begin_all`."""

    def __init__(self, shared: Shared, leases: LeaseTable, residency: Residency, dram: DramTier) -> None:
        self._shared = shared
        self._leases = leases
        self._residency = residency
        self._dram = dram
        self._unpin = shared.unpin
        self._under_way = leases.ending
        self._places = leases.ending_places

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
        self.finish(self.under_way())

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


class LongLeases:
    """Grants leases of chains longer than are leased at once, and marks long chains as used or retained."""

    def __init__(
        self,
        shared: Shared,
        blocks: BlockTable,
        leases: LeaseTable,
        leasing: Leasing,
        endings: Endings,
        levels: Levels | None,
    ) -> None:
        self._shared, self._blocks, self._leases, self._leasing = shared, blocks, leases, leasing
        self._endings, self._levels, self._clock = endings, levels, shared.clock
        self._pin, self._unpin, self._expire_due = shared.pin, shared.unpin, shared.expire_due
        self._why, self._tiers = shared.why, shared.tiers
        self.refreshing: deque[tuple[list[int], int]] = deque()
        """Used long chains, for `BlockTable.refreshed`; cleared where their rows may become another namespace's."""

    def lease(self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float) -> LeaseReply:
        """As `Leasing.lease`, in pieces; the lock is free in between."""
        deadline = self._clock.monotonic_seconds() + deadline_ms / 1000
        wanted: list[int] = []
        waiting = (number, wanted)
        try:
            blocks, tiers, end = self._pinned(waiting, keys, first_block)
            late = None
            missing = [row for row in wanted if not self._blocks.is_above(row)] if self._levels is not None else []
            if missing:
                assert self._levels is not None
                late = self._levels.promoter.bring_up(number, missing, deadline)
            unverified = [row for row in wanted if row in self._blocks.unverified] if self._blocks.unverified else []
            if unverified and not read_first(self._blocks, self._shared.lock, self._clock, unverified, deadline):
                late = late or MissReason.DEADLINE
            found = self._found(number, wanted)
        except BaseException:  # interrupted: no lease needs these pins any more
            with self._shared.lock:
                self._leasing.end_promoting(waiting)
                self._unpin(number, wanted)
            raise
        with self._shared.lock:
            self._leasing.end_promoting(waiting)
            ready = len(found.generations)
            self._unpin(number, wanted[ready:])
            if self._shared.closed:
                return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail=IS_CLOSED)
            if ready < len(wanted):
                end = self._leasing.end_of_what_is_up(late, wanted[ready])
                blocks = first_block + ready
                tiers = cut_runs(tiers, blocks)
                del wanted[ready:]
            if not wanted:
                blocks = min(first_block, blocks)
                return no_lease(first_block, blocks, cut_runs(tiers, blocks), end)
            reply = self._leasing.granted(number, first_block, blocks, wanted, found, tiers, end)
            chain = self._blocks.index.chain(wanted[-1])
            self._blocks.counted(chain, ready)
            self.refreshing.append((chain, ready))
        try:
            self.refresh()
        except BaseException:  # interrupted: no client learns this lease's number
            self._endings.release(reply.lease)
            raise
        return reply

    def _pinned(
        self, waiting: tuple[int, list[int]], keys: Sequence[bytes], first_block: int
    ) -> tuple[int, TierRuns, LeaseEnd]:
        """Pin the readable prefix of a long chain. Returns how many blocks that is, the tiers they were found in, and
        why it ends there. waiting: pinned so far."""
        number, wanted = waiting
        blocks = 0
        tiers: list[tuple[HitTier, int]] = []
        may_wait = True  # once: for ended leases that still pin
        with self._shared.lock:
            self._leases.promoting.append(waiting)
            first = 0
            while first < len(keys):
                if self._shared.closed:
                    return blocks, tuple(tiers), LeaseEnd(MissReason.DISABLED, IS_CLOSED)
                if number in self._blocks.dropping:
                    return blocks, tuple(tiers), LeaseEnd(MissReason.DISABLED, IS_DROPPED)
                self._expire_due()
                asked = keys[first : first + LOCKED_BLOCKS]
                rows = self._blocks.index.match(number, asked)
                own = min(max(0, first_block - first), len(rows))
                affordable, limit = self._leasing.affordable(number, rows[own:])
                is_cut = affordable < len(rows) - own
                if is_cut and self._leases.ending and may_wait:
                    may_wait = False
                    self._endings.finish_all()
                    continue
                rows = rows[: own + affordable]
                self._pin(number, rows[own:])
                wanted += rows[own:]
                blocks += len(rows)
                tiers = join_runs(tiers, self._tiers(rows))
                if is_cut:
                    return blocks, tuple(tiers), LeaseEnd(MissReason.PINNED_FULL, limit, lacks_room=True)
                if len(rows) < len(asked):
                    break
                first += LOCKED_BLOCKS
                self._shared.moves_done.wait(GIVE_WAY_SECONDS)
            return blocks, tuple(tiers), LeaseEnd(*self._why(number, keys, blocks))

    def _found(self, number: int, rows: Sequence[int]) -> LeasedFrames:
        found = LeasedFrames(len(self._blocks.spaces[number].classes))
        blocks, state = self._blocks, self._blocks.index.state
        most = self._leasing.locked_blocks(number)
        with self._shared.lock:
            for first in range(0, len(rows), most):
                if self._shared.closed:
                    break
                some = rows[first : first + most]
                ready = 0
                for row in some:
                    if state(row) is not RowState.VISIBLE or not blocks.is_above(row) or row in blocks.unverified:
                        break
                    ready += 1
                found.add(blocks.residency, some[:ready])
                if ready < len(some):
                    break
                self._shared.moves_done.wait(GIVE_WAY_SECONDS)
        found.flat = flat(found.places)
        return found

    def refresh(self) -> None:
        """Mark used long chains as recent, one piece at a time."""
        with self._shared.lock:
            while self.refreshing and not self._shared.closed:
                chain, count = self.refreshing.popleft()
                self._blocks.refreshed(chain[:LOCKED_BLOCKS], count)
                if len(chain) > LOCKED_BLOCKS:
                    self.refreshing.appendleft((chain[LOCKED_BLOCKS:], max(0, count - LOCKED_BLOCKS)))
                self._shared.moves_done.wait(GIVE_WAY_SECONDS)

    def retain(self, number: int, keys: Sequence[bytes], expires_at: int) -> None:
        """Retain the readable prefix of a chain until then. The lock is free between pieces."""
        for first in range(0, len(keys), LOCKED_BLOCKS):
            with self._shared.lock:
                some = keys[first : first + LOCKED_BLOCKS]
                is_served = not self._shared.closed and number not in self._blocks.dropping
                rows = self._blocks.index.match(number, some) if is_served else []
                self._blocks.renew(rows, 0, expires_at)
                if len(rows) < len(some):
                    return
                self._shared.moves_done.wait(GIVE_WAY_SECONDS)
