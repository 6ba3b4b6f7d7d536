"""Leases: blocks pinned for one owner, until it releases them or they expire; and waits for blocks to be leased.

An expired lease pins nothing, but its reader may still be copying: its places are then *held*, so a slot evicted
meanwhile is not reused before the reader releases the lease. Leases of long chains, and the end of all leases, are in
`lease_pieces`.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import NamedTuple

from kvstore.block.account import REASON_OF_FINDING, HitTier, MissReason
from kvstore.core import Shared
from kvstore.core.dram_recovery import read_first
from kvstore.core.levels import Levels
from kvstore.core.rows.index import RowState, TierRuns
from kvstore.core.table import BlockTable
from kvstore.protocol import messages as m
from kvstore.protocol.replies import LeaseReply
from tiering.counts.awaits import AwaitEnd, ParkedAwait
from tiering.counts.tally import CheckedAt
from tiering.residency import Residency

LOCKED_BLOCKS = 2048
"""Longer chains are worked on in pieces of this many blocks: each holds the lock for a few milliseconds."""
LOCKED_PLACES = 2 * LOCKED_BLOCKS
"""The same for blocks of several parts, counted in frames."""
IS_CLOSED = "the store is closed"
IS_DROPPED = "it is being dropped"


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


class LeaseTable:
    """All leases, in the order in which they expire: every lease lasts equally long."""

    def __init__(self, lease_seconds: float, new_number: Callable[[], int] | None = None) -> None:
        """new_number: draws a number above 0 that no other lease of this table ever has."""
        self.lease_seconds = lease_seconds
        self.live: dict[int, LeaseRecord] = {}
        """Leases that pin."""
        self.ending: dict[int, LeaseRecord] = {}
        """Leases that are over and still pin or hold places; `Endings` ends them."""
        self.ending_places: Counter[bytes] = Counter()
        """Of these, by tenant."""
        self.promoting: list[tuple[int, list[int]]] = []
        """Namespace and pinned rows of each lease that waits for promotions, and has no number yet."""
        self.pinned_bytes = 0
        """Of blocks that leases, repairs and moves pin, each once."""
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
        self.live[number] = LeaseRecord(
            number, namespace, first_block, array("i", rows), places, expires_at, owner=owner
        )
        self._of[owner] += 1
        return number

    def count_of(self, owner: bytes) -> int:
        """How many leases a tenant has."""
        return self._of[owner]

    def get(self, number: int) -> LeaseRecord | None:
        """A lease, live or expired."""
        return self.live.get(number) or self._lapsed.get(number)

    def is_live(self, number: int, now: float = -inf) -> bool:
        """Whether a lease pins at that time."""
        record = self.live.get(number)
        return record is not None and record.expires_at > now

    def attach(self, number: int, now: float = -inf) -> bool:
        """Add a holder to a live lease."""
        if not self.is_live(number, now):
            return False
        self.live[number].holders += 1
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
        return self.live.pop(number, None) or self._lapsed.pop(number, None)

    def expire_due(self, now: float) -> Iterator[LeaseRecord]:
        """Expire leases whose time is over; each stays in the table until its reader releases it."""
        while self.live:
            record = next(iter(self.live.values()))
            if record.expires_at > now:
                return
            yield self._expire(record)

    def expire(self, number: int) -> LeaseRecord | None:
        """Expire a lease now, if it is live."""
        record = self.live.get(number)
        return self._expire(record) if record is not None else None

    def expire_all(self, namespace: int) -> Iterator[LeaseRecord]:
        """Expire every lease of a namespace now."""
        for record in [record for record in self.live.values() if record.namespace == namespace]:
            yield self._expire(record)

    def expired(self) -> Iterator[LeaseRecord]:
        """Leases that expired and were not released."""
        return iter(self._lapsed.values())

    def __len__(self) -> int:
        """Leases that pin or keep slots from reuse."""
        return len(self.live) + len(self._lapsed)

    def _expire(self, record: LeaseRecord) -> LeaseRecord:
        del self.live[record.number]
        self._lapsed[record.number] = record
        record.has_expired = True
        return record


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
    """Grants leases of a store's blocks: matched, pinned, and promoted first where DRAM lacks them. Thread-safe."""

    def __init__(
        self,
        shared: Shared,
        blocks: BlockTable,
        leases: LeaseTable,
        levels: Levels | None,
        why_full: Callable[[], tuple[MissReason, str]],
    ) -> None:
        """why_full: the reason DRAM can evict nothing, with details."""
        self._shared, self._blocks, self._leases, self._levels = shared, blocks, leases, levels
        self._clock, self._limits = shared.clock, shared.limits
        self._pin, self._unpin, self._expire_due = shared.pin, shared.unpin, shared.expire_due
        self._why, self._tiers, self._why_full = shared.why, shared.tiers, why_full
        self.pinned_budget_bytes = int(shared.limits.pinned_fraction * blocks.dram.budget_bytes)

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
            self._expire_due()
            rows = self._blocks.index.match(number, keys)
            end = LeaseEnd(*self._why(number, keys, len(rows)))
            wanted = rows[first_block:]
            affordable, limit = self.affordable(number, wanted)
            if affordable < len(wanted):
                if self._leases.ending and not takes_what_there_is:
                    return None
                end = LeaseEnd(MissReason.PINNED_FULL, limit, lacks_room=True)
                wanted = wanted[:affordable]
            if not wanted:  # nothing to pin: the caller has the blocks before `first_block`
                blocks = min(first_block, len(rows))
                return no_lease(first_block, blocks, self._tiers(rows[:blocks]), end)
            chain = rows[: first_block + len(wanted)]
            tiers = self._tiers(chain)  # before promotion: a promoted block counts as a hit of the tier it came from
            missing = [row for row in wanted if not self._blocks.is_above(row)] if self._levels is not None else []
            unverified = [row for row in wanted if row in self._blocks.unverified] if self._blocks.unverified else []
            if deadline_ms is None and (missing or unverified):
                return None
            self._pin(number, wanted)
            if not missing and not unverified:
                return self._grant(number, first_block, chain, wanted, tiers, end)
            waiting = (number, wanted)
            self._leases.promoting.append(waiting)
        assert deadline_ms is not None
        deadline = self._clock.monotonic_seconds() + deadline_ms / 1000
        late = None
        try:
            if missing:
                assert self._levels is not None
                late = self._levels.promoter.bring_up(number, missing, deadline)
            if unverified and not read_first(self._blocks, self._shared.lock, self._clock, unverified, deadline):
                late = late or MissReason.DEADLINE
        except BaseException:  # interrupted: no lease needs these pins any more
            with self._shared.lock:
                self.end_promoting(waiting)
                self._unpin(number, wanted)
            raise
        with self._shared.lock:
            self.end_promoting(waiting)
            return self._grant_what_is_up(number, first_block, chain, wanted, tiers, end, late)

    def end_promoting(self, waiting: tuple[int, list[int]]) -> None:
        """A lease waits for promotions no more. Under the lock."""
        self._leases.promoting = [one for one in self._leases.promoting if one is not waiting]
        self._shared.moves_done.notify_all()

    def affordable(self, number: int, wanted: Sequence[int]) -> tuple[int, str]:
        """How many leading ones of these rows may be pinned, and which limit stops it there. Under the lock."""
        if not wanted:
            return 0, ""
        limits, mine = self._limits, self._leases.count_of(self._blocks.spaces[number].tenant)
        if len(self._leases) >= limits.leases:
            return 0, f"there are as many leases as limits.leases allows ({limits.leases})"
        if mine >= limits.most_leases:
            return 0, f"this tenant has as many leases as limits.tenant_leases allows ({limits.most_leases})"
        budget = self.pinned_budget_bytes
        while True:
            blocks = max(0, budget - self._leases.pinned_bytes) // self._blocks.spaces[number].block_bytes
            found = self._blocks.residency.pins.affordable(wanted, blocks)
            if found == len(wanted) or self._shared.fetched is None or not self._shared.fetched.give_way():
                return found, f"at most {budget} bytes may be pinned at once (limits.pinned_fraction of DRAM)"

    def _grant(
        self, number: int, first_block: int, chain: list[int], rows: list[int], tiers: TierRuns, end: LeaseEnd
    ) -> LeaseReply:
        self._blocks.used(chain[::-1], len(rows))
        found = LeasedFrames(len(self._blocks.spaces[number].classes))
        found.add(self._blocks.residency, rows)
        return self.granted(number, first_block, len(chain), rows, found, tiers, end)

    def granted(
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
            end = self.end_of_what_is_up(late, rows[ready])
            chain = chain[: first_block + ready]
            tiers = cut_runs(tiers, len(chain))
        if not ready:
            return no_lease(first_block, len(chain), tiers, end)
        return self._grant(number, first_block, chain, rows[:ready], tiers, end)

    def end_of_what_is_up(self, late: MissReason | None, row: int) -> LeaseEnd:
        """Why a lease ends before a row that is not in DRAM. late: as `bring_up` has it. Under the lock."""
        if late is MissReason.PINNED_FULL:
            return LeaseEnd(*self._why_full(), lacks_room=True)
        reason = late or REASON_OF_FINDING[self._blocks.index.why_lost(row)]
        return LeaseEnd(reason, "not all blocks could be brought up to DRAM in time")

    def attach(self, lease: int) -> bool:
        """Add a holder to a live lease; the lease ends when all its holders have released it."""
        with self._shared.lock:
            if self._shared.closed:
                return False
            self._expire_due()
            return self._leases.attach(lease, self._clock.monotonic_seconds())

    def is_leased(self, lease: int) -> bool:
        """Whether a lease still pins."""
        with self._shared.lock:
            if self._shared.closed:
                return False
            self._expire_due()
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
            if index.state(row) != RowState.VISIBLE or residency.place(row, part) != place:
                return
            size_bytes = self._blocks.spaces[record.namespace].classes[part].frame_bytes
            is_sound = self._blocks.verify(row, part)
            self._blocks.tally.checked(CheckedAt.REPORT, size_bytes, is_sound=is_sound)
            if not is_sound:
                self._blocks.quarantine(row)


class ChainWaits:
    """A store's waits for blocks. A wait is parked in the index's table and takes no thread. Thread-safe."""

    def __init__(self, shared: Shared, blocks: BlockTable) -> None:
        self._shared, self._blocks = shared, blocks
        self._awaits = blocks.index.awaits
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
