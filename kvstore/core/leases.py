"""Leases: blocks pinned for one owner, until it releases them or they expire; and waits for blocks to be leased.

An expired lease pins nothing, but its reader may still be copying: its places are then *held*, so a slot evicted
meanwhile is not reused before the reader releases the lease. `lease_pieces` has the end of all leases.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvstore.block.account import REASON_OF_FINDING, HitTier, MissReason
from kvstore.core.dram_recovery import read_first
from kvstore.core.lease_pieces import Endings
from kvstore.core.levels import Levels
from kvstore.core.room import Room
from kvstore.core.rows.index import RowState, TierRuns
from kvstore.core.shared import GIVE_WAY_SECONDS, Shared
from kvstore.protocol import messages as m
from kvstore.protocol.messages import LeaseReply
from tiering.counts.awaits import AwaitEnd, ParkedAwait
from tiering.counts.tally import CheckedAt
from tiering.residency import Residency

LOCKED_BLOCKS = 2048
"""Longer chains are worked on in pieces of this many blocks: each holds the lock for a few milliseconds."""
LOCKED_PLACES = 2 * LOCKED_BLOCKS
"""The same for blocks of several parts, counted in frames."""
IS_CLOSED = "the store is closed"
IS_DROPPED = "it is being dropped"


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


def flat(columns: Sequence[Sequence[int]]) -> array[int]:
    """Places by part, in a lease record's form."""
    places = array("q")
    for column in columns:
        places.extend(column)
    return places


class Leasing:
    """Grants leases of a store's blocks: matched, pinned, and promoted first where DRAM lacks them; those of long
    chains in pieces. Marks long chains as used or retained. Thread-safe."""

    def __init__(self, shared: Shared, levels: Levels | None, room: Room, endings: Endings) -> None:
        self._shared, self._blocks, self._leases, self._levels = shared, shared.blocks, shared.leases, levels
        self._clock, self._limits, self._room, self._endings = shared.clock, shared.limits, room, endings
        self._pin, self._unpin = shared.blocks.pin, shared.blocks.unpin
        self.pinned_budget_bytes = int(shared.limits.pinned_fraction * shared.blocks.dram.budget_bytes)
        self.refreshing: deque[tuple[list[int], int]] = deque()
        """Used long chains, for `BlockTable.refreshed`; cleared where their rows may become another namespace's."""

    def locked_blocks(self, number: int) -> int:
        """How many blocks of a namespace may be leased under one hold of the lock."""
        return max(1, min(LOCKED_BLOCKS, LOCKED_PLACES // len(self._blocks.spaces[number].classes)))

    def lease(
        self,
        number: int,
        keys: Sequence[bytes],
        first_block: int,
        deadline_ms: float | None,
        *,
        takes_what_there_is: bool = False,
    ) -> LeaseReply | None:
        """As `Store.lease`, for chains of at most `locked_blocks`. deadline_ms: None for no wait, and None is returned
        where it takes one. takes_what_there_is: while ended leases pin, return a shorter lease, not None."""
        with self._shared.lock:
            if self._shared.closed:
                return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail=IS_CLOSED)
            if number in self._blocks.dropping:
                return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail=IS_DROPPED)
            self._shared.end_due()
            rows = self._blocks.index.match(number, keys)
            end = LeaseEnd(*self._shared.why(number, keys, len(rows)))
            wanted = rows[first_block:]
            affordable, limit = self._affordable(number, wanted)
            if affordable < len(wanted):
                if self._leases.ending and not takes_what_there_is:
                    return None
                end = LeaseEnd(MissReason.PINNED_FULL, limit, lacks_room=True)
                wanted = wanted[:affordable]
            if not wanted:  # nothing to pin: the caller has the blocks before `first_block`
                blocks = min(first_block, len(rows))
                return no_lease(first_block, blocks, self._shared.tiers(rows[:blocks]), end)
            chain = rows[: first_block + len(wanted)]
            tiers = self._shared.tiers(
                chain
            )  # before promotion: a promoted block counts as a hit of the tier it came from
            is_up = self._levels is None or all([self._blocks.is_above(row) for row in wanted])
            is_up = is_up and self._blocks.unverified.isdisjoint(wanted)
            if deadline_ms is None and not is_up:
                return None
            self._pin(number, wanted)
            if is_up:
                return self._grant(number, first_block, chain, wanted, tiers, end)
            waiting = (number, wanted)
            self._leases.promoting.append(waiting)
        assert deadline_ms is not None
        with self._unpinned_if_interrupted(waiting):
            late = self._bring_up(number, wanted, self._clock.monotonic_seconds() + deadline_ms / 1000)
        with self._shared.lock:
            self._end_promoting(waiting)
            return self._grant_what_is_up(number, first_block, chain, wanted, tiers, end, late)

    @contextmanager
    def _unpinned_if_interrupted(self, waiting: tuple[int, list[int]]) -> Iterator[None]:
        """Around the wait for a lease's pinned rows: an interrupt gives the pins back."""
        try:
            yield
        except BaseException:
            with self._shared.lock:
                self._end_promoting(waiting)
                self._unpin(*waiting)
            raise

    def _bring_up(self, number: int, rows: Sequence[int], deadline: float) -> MissReason | None:
        """Promote and verify pinned rows; returns why not all of them, if it knows."""
        late = None
        missing = [row for row in rows if not self._blocks.is_above(row)] if self._levels is not None else []
        if missing:
            assert self._levels is not None
            late = self._levels.bring_up(number, missing, deadline)
        unverified = [row for row in rows if row in self._blocks.unverified] if self._blocks.unverified else []
        if unverified and not read_first(self._shared, unverified, deadline):
            late = late or MissReason.DEADLINE
        return late

    def _end_promoting(self, waiting: tuple[int, list[int]]) -> None:
        """A lease waits for promotions no more. Under the lock."""
        self._leases.promoting = [one for one in self._leases.promoting if one is not waiting]
        self._shared.moves_done.notify_all()

    def _affordable(self, number: int, wanted: Sequence[int]) -> tuple[int, str]:
        """How many leading ones of these rows may be pinned, and which limit stops it there. Under the lock."""
        if not wanted:
            return 0, ""
        limits, mine = self._limits, self._leases.counts[self._blocks.spaces[number].tenant]
        if len(self._leases) >= limits.leases:
            return 0, f"there are as many leases as limits.leases allows ({limits.leases})"
        if mine >= limits.most_leases:
            return 0, f"this tenant has as many leases as limits.tenant_leases allows ({limits.most_leases})"
        budget = self.pinned_budget_bytes
        while True:
            blocks = max(0, budget - self._blocks.pinned_bytes) // self._blocks.spaces[number].block_bytes
            found = self._blocks.residency.pins.affordable(wanted, blocks)
            if found == len(wanted) or not self._shared.fetched.give_way():
                return found, f"at most {budget} bytes may be pinned at once (limits.pinned_fraction of DRAM)"

    def _grant(
        self, number: int, first_block: int, chain: list[int], rows: list[int], tiers: TierRuns, end: LeaseEnd
    ) -> LeaseReply:
        self._blocks.used(chain[::-1], len(rows))
        found = LeasedFrames(len(self._blocks.spaces[number].classes))
        found.add(self._blocks.residency, rows)
        return self._granted(number, first_block, len(chain), rows, found, tiers, end)

    def _granted(
        self,
        number: int,
        first_block: int,
        blocks: int,
        rows: list[int],
        found: LeasedFrames,
        tiers: TierRuns,
        end: LeaseEnd,
    ) -> LeaseReply:
        """A new lease of pinned rows. Under the lock."""
        now, tenant = self._clock.monotonic_seconds(), self._blocks.spaces[number].tenant
        lease = self._leases.add(number, first_block, rows, found.flat or flat(found.places), now, tenant)
        places, digests = tuple(found.places), tuple(found.header_digests)
        return LeaseReply(lease, first_block, blocks, places, digests, found.generations, tiers, *end)

    def _grant_what_is_up(
        self,
        number: int,
        first_block: int,
        chain: list[int],
        rows: list[int],
        tiers: TierRuns,
        end: LeaseEnd,
        late: MissReason | None,
    ) -> LeaseReply:
        if self._shared.closed:
            return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail=IS_CLOSED)
        index, blocks = self._blocks.index, self._blocks
        ready = 0
        while ready < len(rows) and index.state(rows[ready]) is RowState.VISIBLE and blocks.is_above(rows[ready]):
            if rows[ready] in blocks.unverified:
                break
            ready += 1
        self._unpin(number, rows[ready:])
        if ready < len(rows):
            end = self._end_of_what_is_up(late, rows[ready])
            chain = chain[: first_block + ready]
            tiers = cut_runs(tiers, len(chain))
        if not ready:
            return no_lease(first_block, len(chain), tiers, end)
        return self._grant(number, first_block, chain, rows[:ready], tiers, end)

    def _end_of_what_is_up(self, late: MissReason | None, row: int) -> LeaseEnd:
        """Why a lease ends before a row that is not in DRAM. late: as `bring_up` has it. Under the lock."""
        if late is MissReason.PINNED_FULL:
            return LeaseEnd(*self._room.why_full(), lacks_room=True)
        reason = late or REASON_OF_FINDING[self._blocks.index.why_lost(row)]
        return LeaseEnd(reason, "not all blocks could be brought up to DRAM in time")

    def lease_in_pieces(self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float) -> LeaseReply:
        """As `lease`, for chains of any length; the lock is free between pieces."""
        deadline = self._clock.monotonic_seconds() + deadline_ms / 1000
        wanted: list[int] = []
        waiting = (number, wanted)
        with self._unpinned_if_interrupted(waiting):
            blocks, tiers, end = self._pinned(waiting, keys, first_block)
            late = self._bring_up(number, wanted, deadline)
            found = self._found(number, wanted)
        with self._shared.lock:
            self._end_promoting(waiting)
            ready = len(found.generations)
            self._unpin(number, wanted[ready:])
            if self._shared.closed:
                return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail=IS_CLOSED)
            if ready < len(wanted):
                end = self._end_of_what_is_up(late, wanted[ready])
                blocks = first_block + ready
                tiers = cut_runs(tiers, blocks)
                del wanted[ready:]
            if not wanted:
                blocks = min(first_block, blocks)
                return no_lease(first_block, blocks, cut_runs(tiers, blocks), end)
            reply = self._granted(number, first_block, blocks, wanted, found, tiers, end)
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
        """How many blocks of a long chain are readable, in which tiers, and why it ends there. waiting: pinned so
        far."""
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
                self._shared.end_due()
                asked = keys[first : first + LOCKED_BLOCKS]
                rows = self._blocks.index.match(number, asked)
                own = min(max(0, first_block - first), len(rows))
                affordable, limit = self._affordable(number, rows[own:])
                is_cut = affordable < len(rows) - own
                if is_cut and self._leases.ending and may_wait:
                    may_wait = False
                    self._endings.finish_all()
                    continue
                rows = rows[: own + affordable]
                self._pin(number, rows[own:])
                wanted += rows[own:]
                blocks += len(rows)
                tiers = join_runs(tiers, self._shared.tiers(rows))
                if is_cut:
                    return blocks, tuple(tiers), LeaseEnd(MissReason.PINNED_FULL, limit, lacks_room=True)
                if len(rows) < len(asked):
                    break
                first += LOCKED_BLOCKS
                self._shared.moves_done.wait(GIVE_WAY_SECONDS)
            return blocks, tuple(tiers), LeaseEnd(*self._shared.why(number, keys, blocks))

    def _found(self, number: int, rows: Sequence[int]) -> LeasedFrames:
        found = LeasedFrames(len(self._blocks.spaces[number].classes))
        blocks, state = self._blocks, self._blocks.index.state
        most = self.locked_blocks(number)
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

    def attach(self, lease: int) -> bool:
        """Add a holder to a live lease; the lease ends when all its holders have released it."""
        with self._shared.lock:
            if self._shared.closed:
                return False
            self._shared.end_due()
            return self._leases.attach(lease, self._clock.monotonic_seconds())

    def is_leased(self, lease: int) -> bool:
        """Whether a lease still pins."""
        with self._shared.lock:
            if self._shared.closed:
                return False
            self._shared.end_due()
            return self._leases.is_live(lease, self._clock.monotonic_seconds())

    def report(self, lease: int, block: int, part: int) -> None:
        """A reader's check failed: verify the frame here, and quarantine the block if it fails here too."""
        with self._shared.lock:
            record = self._leases.get(lease) if not self._shared.closed else None
            self._blocks.counters["reported_frames"] += 1
            place = record.place(part, block - record.first_block) if record is not None else None
            if record is None or place is None:
                return
            row = record.rows[block - record.first_block]
            index, residency = self._blocks.index, self._blocks.residency
            is_here = index.state(row) == RowState.VISIBLE and self._blocks.is_above(row)
            if not is_here or residency.place(row, part) != place:
                return
            size_bytes = self._blocks.spaces[record.namespace].classes[part].frame_bytes
            is_sound = self._blocks.verify(row, part)
            self._blocks.tally.checked(CheckedAt.REPORT, size_bytes, is_sound=is_sound)
            if not is_sound:
                self._blocks.quarantine(row)


class ChainWaits:
    """A store's waits for blocks. A wait is parked in the index's table and takes no thread. Thread-safe."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._blocks = shared, shared.blocks
        self._awaits = shared.blocks.index.awaits
        self._awaits.now = shared.clock.monotonic_seconds

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
        with self._shared.lock:
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
        with self._shared.lock:
            return self._blocks.index.matched(number, keys) if self._is_served(number) else 0

    def wait(self, number: int, keys: Sequence[bytes], seconds: float) -> m.Awaited:
        """`park`, and wait for its end in this thread."""
        done = threading.Event()
        one = self.park(number, keys, seconds, lambda _: done.set())
        self._awaits.wait(one, done)
        return self.awaited(one)

    def _is_served(self, number: int) -> bool:
        return not self._shared.closed and number not in self._blocks.dropping
