"""Leases: blocks pinned for one owner, until it releases them or they expire.

An expired lease pins nothing, but its reader may still be copying: its places are then *held*, so a slot evicted
meanwhile is not reused before the reader releases the lease. `shared` has the table of leases, and how they end.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from kvstore.block.account import REASON_OF_FINDING, HitTier, MissReason
from kvstore.core.index import RowState, TierRuns
from kvstore.core.levels import Levels
from kvstore.core.recovery import read_first
from kvstore.core.room import Room
from kvstore.core.shared import GIVE_WAY_SECONDS, Shared
from kvstore.core.table import LOCKED_BLOCKS
from kvstore.protocol.messages import LeaseReply
from tiering.counts.tally import CheckedAt

LOCKED_PLACES = 2 * LOCKED_BLOCKS
"""The same for blocks of several parts, counted in frames."""
IS_CLOSED = "the store is closed"
IS_DROPPED = "it is being dropped"


class LeaseEnd(NamedTuple):
    """Why a lease goes no further; as in `LeaseReply`."""

    reason: MissReason | None
    detail: str
    lacks_room: bool = False


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


class Leasing:
    """Grants leases of a store's blocks: matched, pinned, and promoted first where DRAM lacks them; of long chains in
    pieces, with the lock free in between. Marks long chains as used or retained. Thread-safe."""

    def __init__(self, shared: Shared, levels: Levels | None, room: Room) -> None:
        self._shared, self._blocks, self._leases, self._levels = shared, shared.blocks, shared.leases, levels
        self._clock, self._limits, self._room = shared.clock, shared.limits, room
        self._pin, self._unpin = shared.blocks.pin, shared.blocks.unpin
        self.pinned_budget_bytes = int(shared.limits.pinned_fraction * shared.blocks.dram.budget_bytes)

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
        """As `Store.lease`. deadline_ms: None for no wait, and None is returned where it takes one; only for chains of
        at most `locked_blocks`. takes_what_there_is: while ended leases pin, return a shorter lease, not None."""
        ends_at = self._clock.monotonic_seconds() + deadline_ms / 1000 if deadline_ms is not None else None
        wanted: list[int] = []
        waiting = (number, wanted)
        try:
            with self._shared.lock:
                chain, tiers, end = self._pinned(waiting, keys, first_block)
                is_up = len(keys) <= self.locked_blocks(number)
                is_up = is_up and (self._levels is None or all([self._blocks.is_above(row) for row in wanted]))
                is_up = is_up and self._blocks.unverified.isdisjoint(wanted)
                is_short_for_ended = end.lacks_room and self._leases.ending and not takes_what_there_is
                if is_short_for_ended or (ends_at is None and not is_up):
                    self._give_back(waiting)
                    return None
                if is_up:
                    return self._granted(waiting, first_block, chain, tiers, end, is_up=True)
                self._waits(waiting)
            assert ends_at is not None
            late = self._bring_up(number, wanted, ends_at)
            with self._shared.lock:
                reply = self._granted(waiting, first_block, chain, tiers, end, late)
        except BaseException:  # interrupted: no client learns of the pins
            with self._shared.lock:
                self._give_back(waiting)
            raise
        if reply.lease and len(keys) > LOCKED_BLOCKS:
            try:
                self.refresh()
            except BaseException:  # interrupted: no client learns this lease's number
                self._leases.release(reply.lease)
                raise
        return reply

    def _pinned(
        self, waiting: tuple[int, list[int]], keys: Sequence[bytes], first_block: int
    ) -> tuple[list[int], TierRuns, LeaseEnd]:
        """The rows of a chain, as far as they are readable and those from `first_block` on may be pinned; their tiers
        before promotion, so that a promoted block counts as a hit of the tier it came from; and why it ends there.
        waiting: pinned so far. Under the lock, which is released between pieces."""
        number, wanted = waiting
        chain: list[int] = []
        tiers: list[tuple[HitTier, int]] = []
        for first in range(0, len(keys), LOCKED_BLOCKS) or (0,):
            if first:
                self._waits(waiting)
                self._shared.moves_done.wait(GIVE_WAY_SECONDS)
            if self._shared.closed:
                return chain, tuple(tiers), LeaseEnd(MissReason.DISABLED, IS_CLOSED)
            if number in self._blocks.dropping:
                return chain, tuple(tiers), LeaseEnd(MissReason.DISABLED, IS_DROPPED)
            self._shared.end_due()
            asked = keys[first : first + LOCKED_BLOCKS]
            rows = self._blocks.index.match(number, asked)
            own = min(max(0, first_block - first), len(rows))
            affordable, limit = self._affordable(number, rows[own:])
            is_cut, matched = affordable < len(rows) - own, len(rows)
            rows = rows[: own + affordable]
            self._pin(number, rows[own:])
            wanted += rows[own:]
            chain += rows
            tiers = join_runs(tiers, self._shared.tiers(rows))
            if is_cut:
                return chain, tuple(tiers), LeaseEnd(MissReason.PINNED_FULL, limit, lacks_room=True)
            if matched < len(asked):
                break
        return chain, tuple(tiers), LeaseEnd(*self._shared.why(number, keys, len(chain)))

    def _waits(self, waiting: tuple[int, list[int]]) -> None:
        if not any(one is waiting for one in self._leases.promoting):
            self._leases.promoting.append(waiting)

    def _waits_no_more(self, waiting: tuple[int, list[int]]) -> None:
        if self._leases.promoting:
            self._leases.promoting = [one for one in self._leases.promoting if one is not waiting]
            self._shared.moves_done.notify_all()

    def _give_back(self, waiting: tuple[int, list[int]]) -> None:
        number, wanted = waiting
        rows = wanted[:]
        wanted.clear()
        self._waits_no_more(waiting)
        self._unpin(number, rows)

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

    def _affordable(self, number: int, wanted: Sequence[int]) -> tuple[int, str]:
        """How many leading ones of these rows may be pinned, and which limit stops it there. Under the lock."""
        if not wanted:
            return 0, ""
        limits, mine = self._limits, self._leases.counts[self._blocks.spaces[number].tenant]
        if len(self._leases) >= limits.leases:
            return 0, f"there are as many leases as limits.leases allows ({limits.leases})"
        most = limits.leases if limits.tenant_leases is None else limits.tenant_leases
        if mine >= most:
            return 0, f"this tenant has as many leases as limits.tenant_leases allows ({most})"
        budget = self.pinned_budget_bytes
        while True:
            blocks = max(0, budget - self._blocks.pinned_bytes) // self._blocks.spaces[number].block_bytes
            found = self._blocks.residency.pins.affordable(wanted, blocks)
            if found == len(wanted) or not self._shared.fetched.give_way():
                return found, f"at most {budget} bytes may be pinned at once (limits.pinned_fraction of DRAM)"

    def _granted(
        self,
        waiting: tuple[int, list[int]],
        first_block: int,
        chain: list[int],
        tiers: TierRuns,
        end: LeaseEnd,
        late: MissReason | None = None,
        *,
        is_up: bool = False,
    ) -> LeaseReply:
        """A lease of pinned rows, as far as DRAM has them by now: all, if `is_up`. late: as `_bring_up` has it. Under
        the lock, which is released between pieces."""
        number, wanted = waiting
        parts = range(len(self._blocks.spaces[number].classes))
        places: tuple[list[int], ...] = tuple([] for _ in parts)
        digests: tuple[list[bytes], ...] = tuple([] for _ in parts)
        generations: list[int] = []
        residency, most = self._blocks.residency, self.locked_blocks(number)
        for first in range(0, len(wanted), most):
            if first:
                self._shared.moves_done.wait(GIVE_WAY_SECONDS)
            if self._shared.closed:
                break
            ready = wanted[first : first + most]
            if not is_up:
                ready = [*takewhile(self._is_ready, ready)]
            for part in parts:
                places[part].extend(residency.places_of(ready, part))
                digests[part].extend(residency.header_digests_of(ready, part))
            generations += residency.generations_of(ready)
            if len(generations) < min(len(wanted), first + most):
                break
        self._waits_no_more(waiting)
        if self._shared.closed:
            return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail=IS_CLOSED)
        rows, rest = wanted[: len(generations)], wanted[len(generations) :]
        wanted.clear()  # whatever interrupts this unpins none of them twice
        if rest:
            self._unpin(number, rest)
            end = self._end_of_what_is_up(late, rest[0])
            chain = chain[: first_block + len(generations)]
            tiers = cut_runs(tiers, len(chain))
        if not rows:  # nothing to pin: the caller has the blocks before `first_block`
            blocks = min(first_block, len(chain))
            return LeaseReply(0, first_block, blocks, (), (), [], cut_runs(tiers, blocks), *end)
        flat = array("q")
        for column in places:
            flat.extend(column)
        lease = self._leases.add(number, first_block, rows, flat)
        is_long = len(chain) > LOCKED_BLOCKS  # then rows before `first_block` may have gone between pieces
        self._blocks.used(self._blocks.index.chain(rows[-1]) if is_long else chain[::-1], len(rows))
        return LeaseReply(lease, first_block, len(chain), places, digests, generations, tiers, *end)

    def _is_ready(self, row: int) -> bool:
        blocks = self._blocks
        return blocks.index.state(row) is RowState.VISIBLE and blocks.is_above(row) and row not in blocks.unverified

    def _end_of_what_is_up(self, late: MissReason | None, row: int) -> LeaseEnd:
        """Why a lease ends before a row that is not in DRAM. late: as `bring_up` has it. Under the lock."""
        if late is MissReason.PINNED_FULL:
            return LeaseEnd(*self._room.why_full(), lacks_room=True)
        reason = late or REASON_OF_FINDING[self._blocks.index.why_lost(row)]
        return LeaseEnd(reason, "not all blocks could be brought up to DRAM in time")

    def refresh(self) -> None:
        """Mark used long chains as recent, one piece at a time."""
        refreshing = self._blocks.refreshing
        with self._shared.lock:
            while refreshing and not self._shared.closed:
                chain, count = refreshing.popleft()
                self._blocks.refreshed(chain[:LOCKED_BLOCKS], count)
                if len(chain) > LOCKED_BLOCKS:
                    refreshing.appendleft((chain[LOCKED_BLOCKS:], max(0, count - LOCKED_BLOCKS)))
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
            if not self._is_live(lease):
                return False
            self._leases.live[lease].holders += 1
            return True

    def is_leased(self, lease: int) -> bool:
        """Whether a lease still pins."""
        with self._shared.lock:
            return self._is_live(lease)

    def _is_live(self, lease: int) -> bool:
        if self._shared.closed:
            return False
        self._shared.end_due()
        return self._leases.is_live(lease)

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
