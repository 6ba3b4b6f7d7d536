"""Blocks: the index, the residency tables, the policies and the slots of both tiers, kept in step.

Every change in a block's life goes through a method here or, if it is about NVMe alone, through `below`, so that the
tables never disagree. No lock, clock or leases: `store` has those. `check()` verifies everything.

A block is readable (a visible row) as long as DRAM or NVMe has all its frames. It is listed in the policy of each tier
that has it. A quarantined row is listed in DRAM's, without frames, until a put fills it again or it is evicted.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from kvstore.block.identity import Namespace, TenantKeys, sealers_of, stamps_of
from kvstore.core.index import (
    NO_ROW,
    Column,
    ExtentReclaim,
    OpenedNamespace,
    PrefixIndex,
    RowState,
    SlabReclaim,
    givers,
)
from tiering.counts.tally import CAUSE_OF, CopyKind, EvictedTo, EvictionCause, Tally, TierName
from tiering.dram.extents import Extent
from tiering.dram.tier import DramTier
from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, KEY_BYTES, MacKeys, digest, epoch_in, open_header, verify_payload
from tiering.move_queue import Move, MoveQueue
from tiering.policies.admission import Admission
from tiering.residency import LastUses, Residency
from tiering.slots import FrameState
from tiering.tier import NO_PLACE, LowerTier, SlotClass, TierMiss, extent_of, slot_of

_log = logging.getLogger(__name__)

LOCKED_BLOCKS = 2048
"""Longer chains are worked on in pieces of this many blocks: each holds the lock for a few milliseconds."""
GROWN_AT_ONCE = 1024
"""Rows for which columns are made ahead."""


Unsealed = tuple[int, bytes, int, int, Sequence[bytes]]
"""Row, key of the parent, blocks before it, generation, and the digests of its layer slices."""


class DirtyBlocks:
    """Blocks that DRAM alone holds: rows, each with its bytes, and in which order they are written to NVMe. Pure.

        stored > waits > used: last in the order > its turn > written: NVMe has it
                                                            > declined: stays, and waits again once it is used
               > a client asked to retain it: before all others, from then on until its turn

    One that NVMe has too, or that left DRAM, is not here.
    """

    def __init__(self) -> None:
        self._prioritized: OrderedDict[int, int] = OrderedDict()
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._declined: dict[int, int] = {}
        self.waiting_bytes = 0
        self.missed = 0
        """Dirty blocks that left DRAM before their turn; the flusher resets it when it looks at the rest."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._prioritized) + len(self._waiting)

    def __contains__(self, row: int) -> bool:
        return self.waits(row) or row in self._declined

    def came(self, row: int, size_bytes: int) -> None:
        """DRAM alone has the block: it is looked at after all others."""
        self.discard(row)
        self._waiting[row] = size_bytes
        self.waiting_bytes += size_bytes

    def discard(self, row: int) -> None:
        """NVMe has it too, or DRAM has it no more. Idempotent."""
        if self.waits(row):
            self.waiting_bytes -= self._pop(row)
        else:
            self._declined.pop(row, None)

    def prioritize(self, row: int) -> None:
        """Move a block to the front of the order, even if it was declined."""
        if row in self._declined:
            self.came(row, self._declined[row])
        if row in self._waiting:
            self._prioritized[row] = self._waiting.pop(row)

    def requeue(self, row: int) -> None:
        """Move a waiting block to the end of the order."""
        self._waiting[row] = self._pop(row)

    def used(self, rows: Iterable[int]) -> None:
        """Move these to the end of the order, in turn, except prioritized ones; declined ones wait again."""
        waiting, declined = self._waiting, self._declined
        for row in rows:
            if row in waiting:
                waiting.move_to_end(row)
            elif row in declined:
                self.came(row, declined[row])

    def waits(self, row: int) -> bool:
        """Whether the flusher has yet to look at it."""
        return row in self._waiting or row in self._prioritized

    @property
    def is_any_prioritized(self) -> bool:
        return bool(self._prioritized)

    def prioritized(self, count: int) -> list[int]:
        return [row for row, _ in zip(self._prioritized, range(count), strict=False)]

    def oldest(self, count: int) -> list[int]:
        return [row for row, _ in zip(self._waiting, range(count), strict=False)]

    def decline(self, row: int) -> None:
        """The admission policy declines a waiting block."""
        size_bytes = self._pop(row)
        self.waiting_bytes -= size_bytes
        self._declined[row] = size_bytes

    def was_declined(self, row: int) -> bool:
        return row in self._declined

    def declined(self) -> dict[int, int]:
        """Declined blocks, with the bytes of each."""
        return dict(self._declined)

    def check(self, rows: Sequence[int]) -> None:
        """Verify that only these rows, which DRAM alone has, are here, and that bytes are the sum of those that wait. A
        block that NVMe gave up again is not here."""
        all_here = [*self._prioritized, *self._waiting, *self._declined]
        assert len(set(all_here)) == len(all_here)
        assert set(all_here) <= set(rows)
        assert self.waiting_bytes == sum(self._prioritized.values()) + sum(self._waiting.values())

    def _pop(self, row: int) -> int:
        return (self._waiting if row in self._waiting else self._prioritized).pop(row)


TierBelow = TypeVar("TierBelow", bound=LowerTier, covariant=True)


@dataclass
class Lower(Generic[TierBelow]):
    """NVMe: its tier, the blocks in it, and the policy that admits blocks to it. queue: runs the moves between it and
    DRAM; None where there are none, as in a replay.

    gone: called with namespace number and prefix key of each block that NVMe gives up, before its frames go; it runs
    under the lock and must not call the store. Blocks whose frames failed a check are not reported.
    """

    tier: TierBelow
    residency: Residency
    admission: Admission
    queue: MoveQueue | None = None
    gone: Callable[[int, bytes], None] | None = None


@dataclass(slots=True)
class Promotion:
    """A block being promoted. waiting: leases that wait for it. settled: its slots are in use or were freed."""

    number: int
    row: int
    move: Move | None = None
    waiting: int = 1
    settled: bool = False


class BlockTable(Generic[TierBelow]):
    """Which blocks exist, and where. Callers hold the store's lock."""

    def __init__(
        self,
        index: PrefixIndex,
        residency: Residency,
        dram: DramTier,
        keys: MacKeys,
        lower: Lower[TierBelow] | None = None,
        first_generation: Callable[[], int] = lambda: 1,
        seconds: Callable[[], float] | None = None,
    ) -> None:
        """keys: for MACs. first_generation: a tenant's first one, above that of every existing frame. seconds: a clock
        for the ages of evicted blocks, or None."""
        self.index = index
        self.residency = residency
        self.dram = dram
        self.lower = lower
        self.shares = index.shares
        self.spaces: list[OpenedNamespace] = []
        self.counters: Counter[str] = Counter()
        self.tally = Tally(seconds)
        self.last_uses = LastUses(seconds)
        self._rows = 0  # columns have room for so many
        self.keys = keys
        self._first_generation = first_generation
        self._next_generations: dict[bytes, int] = {}  # by tenant
        self._newest: dict[bytes, TenantKeys] = {}  # by tenant, if an epoch began while this store was open
        self.pinned_bytes = 0  # of blocks that leases, repairs and moves pin, each once
        self.demoting: set[int] = set()  # rows being demoted, with or without a place on NVMe
        self.promoting: dict[int, Promotion] = {}  # by row
        self.dropping: set[int] = set()  # namespaces that are about to be dropped
        self.dirty = DirtyBlocks()
        self.refreshing: deque[tuple[list[int], int]] = deque()
        """Used long chains, for `refreshed`; cleared where their rows may become another namespace's."""
        self.unverified: set[int] = set()  # rows taken over from an earlier process, their frames not yet read
        self.below = BlocksBelow(self, lower) if lower is not None else None

    @property
    def residencies(self) -> tuple[Residency, ...]:
        """Of DRAM, and of NVMe where there is one."""
        return (self.residency, self.lower.residency) if self.lower is not None else (self.residency,)

    def pin(self, number: int, rows: Sequence[int]) -> None:
        """Pin distinct blocks of a namespace. Leases, repairs and moves pin alike: one block may have all three."""
        self.pinned_bytes += self.residency.pins.pin(rows) * self.spaces[number].block_bytes

    def unpin(self, number: int, rows: Sequence[int]) -> None:
        self.pinned_bytes -= self.residency.pins.unpin(rows) * self.spaces[number].block_bytes

    def add_space(self, keys: TenantKeys, namespace: Namespace, payload_bytes: Sequence[int]) -> OpenedNamespace:
        stamps = stamps_of(keys, namespace, payload_bytes)
        classes = tuple(SlotClass(one.tenant, one.namespace, one.part, one.frame_bytes) for one in stamps)
        sealers = sealers_of(self._newest.get(keys.tenant, keys), stamps)
        self.residency.policy.expect(self.dram.budget_bytes // sum(one.frame_bytes for one in classes))
        if self.lower is not None:
            self.lower.admission.expect(self.lower.tier.budget_bytes // sum(one.frame_bytes for one in classes))
        number = self.index.add_namespace(keys.tenant, sum(one.frame_bytes for one in classes), namespace.beside)
        space = OpenedNamespace(number, keys.tenant, namespace, classes, stamps, sealers)
        assert space.number == len(self.spaces)
        self.spaces.append(space)
        return space

    def find_space(self, tenant: bytes, digest: bytes) -> OpenedNamespace | None:
        """A tenant's namespace by its digest."""
        mine = (one for one in self.spaces if one.tenant == tenant and one.classes[0].namespace == digest)
        return next(mine, None)

    def rotate(self, keys: TenantKeys) -> None:
        """Sign the tenant's frames in this epoch from now on."""
        self._newest[keys.tenant] = keys
        mine = {one.number: sealers_of(keys, one.stamps) for one in self.spaces if one.tenant == keys.tenant}
        self.spaces[:] = [replace(one, sealers=mine.get(one.number, one.sealers)) for one in self.spaces]

    # A block's life ------------------------------------------------------------------------------------------------

    def begin(self, number: int, key: bytes, parent: int, priority: int, expires_at: int) -> int:
        """1. A pending row: the block is being stored, and its parent cannot be evicted any more."""
        row = self.index.insert(number, key, parent, priority, expires_at)
        if row >= self._rows:
            self.grow_to(row + GROWN_AT_ONCE)
        self.residency.child_came(parent)
        return row

    def place(self, number: int, rows: Sequence[int]) -> list[list[int]]:
        """2. One slot per part and block, by part; every class must have as many free ones."""
        columns = [self.dram.reserve(slot_class, len(rows)) for slot_class in self.spaces[number].classes]
        assert all([len(places) == len(rows) for places in columns]), "asked for slots that are not there"
        self.residency.reserved(rows, columns)
        return columns

    def next_generations(self, number: int, count: int) -> range:
        """Numbers that no other block of this tenant ever has. Each tenant has its own count, since clients read the
        generations of their blocks."""
        tenant = self.spaces[number].tenant
        first = self._next_generations.get(tenant) or self._first_generation()
        self._next_generations[tenant] = first + count
        return range(first, first + count)

    def seal(self, number: int, part: int, unsealed: Sequence[Unsealed]) -> None:
        """3. The payloads of a part are in their slots: write the headers in front of them."""
        index, residency = self.index, self.residency
        sealer = self.spaces[number].sealers[part]
        rows, headers = [], []
        for row, parent_key, depth, generation, digests in unsealed:
            header = sealer.seal(index.key(row), parent_key, depth, generation, digests, *index.hint(row))
            residency.part_sealed(row, part, digest(header))
            rows.append(row)
            headers.append(header)
        self.dram.commit(residency.places_of(rows, part), headers)

    def publish(self, number: int, rows: Sequence[int], generations: Sequence[int]) -> None:
        """4. All parts are sealed and the parents are visible: from now on matches find the blocks."""
        index, residency = self.index, self.residency
        for row, generation in zip(rows, generations, strict=True):
            is_new = index.publish(row)
            residency.published(row, generation)
            self.unverified.discard(row)
            if is_new:
                residency.listed(row)
                if self.lower is not None:
                    self.lower.admission.stored(row)
            elif residency.retention is not None:
                residency.retention.came(row)
            if self.below is not None and not self.below.has(row):
                self.below.lacks(row)
        self.last_uses.used(rows)
        self.tally.stored_tokens += len(rows) * self.spaces[number].namespace.layout.block_tokens
        for part in range(len(self.spaces[number].classes)):
            self.dram.own(residency.places_of(rows, part), rows)

    def used(self, chain: list[int], count: int, *, at_once: bool = False) -> None:
        """Record one use of a chain, deepest block first. The first `count` entries are new uses; the rest were counted
        by an earlier call. The policies learn from it as a whole; a long one is `refreshed` later, if not
        `at_once`."""
        for residency in self.residencies:
            residency.policy.used(chain, count)
        if self.lower is not None:
            self.lower.admission.used(chain, count)
        if at_once or len(chain) <= LOCKED_BLOCKS:
            self.refreshed(chain, count)
        else:
            self.refreshing.append((chain, count))

    def refreshed(self, chain: Sequence[int], count: int) -> None:
        """The second half of `used`, which may be done in pieces, deepest first: the chain's blocks become the most
        recent. Rows that are not readable any more are skipped."""
        for residency in self.residencies:
            if residency.retention is not None and self.index.has_hints:
                residency.retention.used(chain)
            is_listed = residency.is_listed
            residency.policy.touched([row for row in chain if is_listed(row)])
        self.last_uses.used(chain)
        if self.lower is not None:
            self.dirty.used(chain[:count])

    def renew(self, rows: Sequence[int], priority: int, expires_at: int) -> None:
        """Extend the retention of a chain's readable blocks, first block first."""
        for row in rows:
            self.index.renew(row, priority, expires_at)
        for residency in self.residencies:
            if residency.retention is not None:
                for row in rows:
                    if residency.is_listed(row):
                        residency.retention.came(row)
        if self.lower is not None and self.lower.admission.chooses:
            for row in rows:
                self.dirty.prioritize(row)

    def givers(self, number: int) -> list[int] | None:
        """Groups of tenants that may lose blocks in DRAM for a namespace, in order; None if no tenant has settings."""
        return givers(self.shares, number, self.residency, self.dram)

    def evict_worst(self, blocks: int, leaves: Callable[[int], object] | None = None) -> int:
        """5. Evict the worst unpinned leaves from DRAM, up to that many; returns how many went.

        Those that NVMe has stay readable; the others are gone, rows and frames. leaves: called with each row that NVMe
        lacks before it goes, and may demote it.
        """
        return self._evict(self.residency.worst(), blocks, leaves)

    def evict_for(self, number: int, blocks: int) -> int:
        """Evict for a namespace that is short of slots, up to `blocks` of its own. The caller has to look again.

        Each of its own leaves frees a slot. Another namespace helps only by emptying an extent that is not in use: the
        first that can do so with leaves among the worst gives as many as that takes, and the others lose none. If every
        extent is in use, no other namespace loses any, since it would free nothing.
        """
        groups = self.givers(number)
        below = self.lower.residency if self.lower is not None else None
        choice = ExtentReclaim(number, self.index, self.residency, below, self.dram, self.spaces)
        gone = self._evict(choice.own(self._worst_for(groups)), blocks)
        if gone or choice.giver is None:
            return gone
        giver, most = choice.giver
        namespace_of = self.index.namespace_of
        return self._evict((row for row in self._worst_for(groups) if namespace_of(row) == giver), most)

    def _worst_for(self, groups: Sequence[int] | None) -> Iterator[int]:
        residency, is_guarded = self.residency, self.dram.is_guarded
        rows = (row for row in residency.worst(groups) if not is_guarded(residency.place(row, 0)))
        if residency.held:
            rows = (row for row in rows if not residency.is_row_held(row))
        return (row for row in rows if self._may_go(row)) if self.lower is not None else rows

    def _may_go(self, row: int) -> bool:
        """False for a quarantined block that leads to blocks which only NVMe has."""
        return self.is_below(row) or not self.index.children(row)

    def evict_own(self, blocks: int, number: int) -> int:
        """The same from one namespace's leaves only, even if others have worse ones."""
        namespace_of = self.index.namespace_of
        return self._evict((row for row in self._worst_for(None) if namespace_of(row) == number), blocks)

    def _evict(self, worst: Iterable[int], blocks: int, leaves: Callable[[int], object] | None = None) -> int:
        gone = 0
        places: list[int] = []
        evicted = 0
        below = self.lower.residency if self.lower is not None else None
        for row in worst if blocks > 0 else ():
            if leaves is not None and below is not None and not below.is_listed(row):
                leaves(row)
            stays = below is not None and below.is_listed(row)
            if below is not None and not self._may_go(row):
                continue
            places += self.residency.left(row, self.index.parent(row))
            to = EvictedTo.DECLINED if self.dirty.was_declined(row) else EvictedTo.NOTHING
            self.tally.evicted(TierName.DRAM, EvictedTo.NVME if stays else to, self.last_uses.idle_seconds(row))
            self.dirty.missed += self.dirty.waits(row)
            self.dirty.discard(row)
            if stays:
                self.index.moved_below(row)
            else:
                self.index.remove(row, remember=True, stamp=self.tally.stamp(TierName.DRAM, CAUSE_OF[to]))
                evicted += 1
            gone += 1
            if gone == blocks:
                break
        self.free(places)
        self.counters["evicted_blocks"] += evicted
        if gone:
            _log.debug("evicted from dram", extra={"blocks": gone, "given_up": evicted, "wanted": blocks})
        return gone

    def orphan(self, row: int) -> list[int]:
        """Remove a block that was never published; its children went before. Returns its places, which stay taken: its
        producer may still be writing."""
        return self.residency.left(row, self.index.remove(row))

    def drop(self, row: int) -> None:
        """Remove a readable or lost leaf with its namespace. Its pins ended before."""
        assert self.residency.pins.counts[row] == 0
        self.dirty.discard(row)
        self.free(self.residency.forget(row))
        if self.below is not None and self.below.has(row):
            self.below.leave(row)
        parent = self.index.remove(row, remember=True, stamp=self.tally.stamp(TierName.DRAM, EvictionCause.DROP))
        if self.residency.is_listed(row):
            self.residency.left(row, parent)

    def quarantine(self, row: int) -> bool:
        """A check failed: no frame of the block is ever used again, and the row stays, lost, so that its children keep
        their place. Returns True if the frames are sound and only the epoch that signed one was retired: then their
        slots are free, except while they are read."""
        space = self.spaces[self.index.namespace_of(row)]
        places = [place for part in range(len(space.classes)) if (place := self.residency.place(row, part)) != NO_PLACE]
        headers = [one.view for one in self.dram.spans_at(places)]
        is_retired = any(self.keys.mac_key(space.tenant, *epoch_in(one)) == b"" for one in headers)
        if is_retired and self.residency.pins.counts[row] > (row in self.demoting):
            return True
        (self.free if is_retired else self.dram.quarantine)(self.residency.forget(row))
        self._lost_above(row, TierMiss.RETIRED if is_retired else TierMiss.CORRUPT)
        self.counters["retired_blocks" if is_retired else "quarantined_blocks"] += 1
        self.tally.quarantined[TierName.DRAM] += not is_retired
        return is_retired

    def _lost_above(self, row: int, why: TierMiss) -> None:
        self.dirty.discard(row)
        if self.is_below(row):  # NVMe's frames are different ones
            self.residency.left(row, self.index.parent(row))
            self.index.moved_below(row)
        else:
            self.index.mark_lost(row, why)

    def relocate(self, row: int, part: int, target: int) -> bool:
        """Use the verified copy at `target` from now on, if it is a copy of what was committed; else returns False and
        changes nothing."""
        source = self.residency.place(row, part)
        raw = bytes(self.dram.reserved_span(target).view[:HEADER_BYTES])
        if digest(raw) != self.residency.header_digest(row, part):
            return False
        self.dram.commit([target], [raw])
        self.dram.own([target], [row])
        self.residency.moved(row, part, target)
        self.tally.copied_bytes[CopyKind.COMPACT] += self.dram.class_of(extent_of(target)).frame_bytes
        self.dram.delete([source])
        return True

    def verify(self, row: int, part: int) -> bool:
        """Whether a part's frame is what was committed: MAC, identity, generation and every digest."""
        place = self.residency.place(row, part)
        if place == NO_PLACE:
            return False
        view = self.dram.span_at(place).view
        raw = bytes(view[:HEADER_BYTES])
        try:
            header = open_header(raw, self.keys)
            verify_payload(header, view[HEADER_BYTES:])
        except BlockCorrupt:
            return False
        return (
            header.prefix_key == self.index.key(row)
            and header.generation == self.residency.generation(row)
            and digest(raw) == self.residency.header_digest(row, part)
        )

    # Up, and recovered ---------------------------------------------------------------------------------------------

    def is_below(self, row: int) -> bool:
        """Whether NVMe has the block."""
        return self.lower is not None and self.lower.residency.is_listed(row)

    def is_above(self, row: int) -> bool:
        """Whether DRAM has the block of a visible row."""
        return self.residency.is_listed(row)

    def stands(self, row: int, generation: int) -> bool:
        """Whether DRAM has the block that had this row and generation."""
        is_here = self.index.state(row) is RowState.VISIBLE and self.residency.is_listed(row)
        return is_here and self.residency.generation(row) == generation

    def expect(self, blocks: int) -> None:
        """Make columns for that many blocks, which are about to be recovered."""
        self.grow_to(self.index.expect(blocks))

    def make_place_above(self, number: int, rows: Sequence[int]) -> list[list[int]]:
        """Slots in DRAM for blocks that are about to be promoted, by part."""
        for row in rows:
            self.residency.child_came(self.index.parent(row))
        return self.place(number, rows)

    def promoted(self, row: int, header_digests: Sequence[bytes]) -> None:
        """Whole frames were read into the slots and verified: DRAM has the block again."""
        assert self.lower is not None
        residency = self.residency
        for part, header_digest in enumerate(header_digests):
            place = residency.place(row, part)
            residency.part_sealed(row, part, header_digest)
            self.dram.commit([place], [b""])
            self.dram.own([place], [row])
        residency.published(row, self.lower.residency.generation(row))
        residency.listed(row)
        self.index.moved_above(row)
        self.unverified.discard(row)
        self.counters["promoted_blocks"] += 1
        self.tally.copied_bytes[CopyKind.PROMOTE] += self.spaces[self.index.namespace_of(row)].block_bytes

    def taken_over(self, row: int, generation: int, places: Sequence[int], header_digests: Sequence[bytes]) -> None:
        """A block's frames, one per part, were found in the DRAM of an earlier process, and are not verified yet.

        row: pending, just begun; or readable from NVMe alone, with the same generation there.
        """
        residency = self.residency
        if self.index.state(row) is RowState.VISIBLE:
            self.residency.child_came(self.index.parent(row))
        else:
            self.index.publish(row)
            if self.lower is not None:
                self.lower.admission.found(range(row, row + 1))
        residency.reserved([row], [[place] for place in places])
        for part, header_digest in enumerate(header_digests):
            residency.part_sealed(row, part, header_digest)
        residency.published(row, generation)
        residency.listed(row)
        self.dram.own(places, [row] * len(places))
        self.unverified.add(row)
        self.last_uses.found(row)
        if self.below is not None and not self.below.has(row):
            self.below.lacks(row)

    def not_promoted(self, row: int) -> None:
        """The read failed: free its slots in DRAM."""
        self.dram.abort(self.residency.left(row, self.index.parent(row)))

    def retire_empty(self, number: int, most: int) -> list[Extent]:
        """Take up to so many empty extents of a namespace out of the pool; they are unmapped with the returned list."""
        gone: list[Extent] = []
        for slot_class in self.spaces[number].classes:
            for extent in list(self.dram.extents_of(slot_class)):
                if extent.slots.is_empty and not self.residency.held.has_extent(extent.number):
                    gone.append(self.dram.retire(extent.number))
                    if len(gone) == most:
                        return gone
        return gone

    def check(self, pins: Mapping[int, int]) -> None:
        """Every invariant over the tables. pins: row -> how many leases, reservations and moves pin it."""
        if self.below is not None:
            self.below.check()
        self.index.check()
        self.dram.check()
        self.residency.check()
        self.residency.pins.check(dict(pins))
        children: Counter[int] = Counter()
        alone = []
        for space in self.spaces:
            for row in self.index.rows(space.number):
                state = self.index.state(row)
                if state == RowState.VISIBLE and self.lower is not None and not self.is_below(row):
                    alone.append(row)
                above, below = self.residency.is_listed(row), self.is_below(row)
                assert not (state == RowState.PENDING and (above or below)) and (state != RowState.LOST or above)
                assert state != RowState.VISIBLE or above or below, "a visible row is somewhere"
                if state == RowState.PENDING or above or self.residency.place(row, 0) != NO_PLACE:
                    parent = self.index.parent(row)
                    children[parent] += 1
                if state != RowState.VISIBLE or not above:
                    continue
                parent = self.index.parent(row)
                parent_key = self.index.key(parent) if parent != NO_ROW else None
                for part, slot_class in enumerate(space.classes):
                    self._check_frame(row, part, slot_class, parent_key)
        self.dirty.check(alone)
        for space in self.spaces:
            for row in self.index.rows(space.number):
                assert self.residency.children(row) == children[row]

    def _check_frame(self, row: int, part: int, slot_class: SlotClass, parent_key: bytes | None) -> None:
        place = self.residency.place(row, part)
        extent = next(extent for extent in self.dram.all_extents(slot_class) if extent.number == extent_of(place))
        assert extent.slots.states[slot_of(place)] == FrameState.RESIDENT
        assert extent.slots.owners[slot_of(place)] == row
        raw = bytes(self.dram.committed_span(place).view[:HEADER_BYTES])
        if digest(raw) != self.residency.header_digest(row, part):
            return  # damaged since: a reader's check, not an invariant, finds that
        header = open_header(raw, self.keys)
        assert header.prefix_key == self.index.key(row) and header.stamp.part == part
        assert header.block_index == self.index.depth(row)
        assert len(header.parent) == KEY_BYTES and (parent_key is None or header.parent == parent_key)

    def free(self, places: Sequence[int]) -> None:
        """Free slots in any state; one that a late reader may still copy is kept from reuse."""
        dram, residency = self.dram, self.residency
        dirty, held, written = [], [], []
        for place in places:
            if dram.is_reserved(place):
                dirty.append(place)
            elif place in residency.held:
                held.append(place)
            else:
                written.append(place)
        dram.abort(dirty)
        dram.retain(held)
        dram.delete(written)

    def grow_to(self, row: int) -> None:
        self._rows = max(self._rows, row + 1)
        self.last_uses.grow_to(row)
        for residency in self.residencies:
            residency.grow_to(row)


class BlocksBelow:
    """The blocks on NVMe: each change of what it has goes through here, so that its tables agree with DRAM's."""

    def __init__(self, blocks: BlockTable[LowerTier], lower: Lower[LowerTier]) -> None:
        self._blocks = blocks
        self._lower, self._tier, self._residency = lower, lower.tier, lower.residency
        self._index, self._above = blocks.index, blocks.residency
        self._dirty, self._spaces = blocks.dirty, blocks.spaces
        self.is_loading = False  # blocks from before a restart are being recovered
        self.all_known = True  # recovery is over: before that, a block on NVMe may lead to others not yet recovered
        self.older: dict[tuple[int, bytes], list[int]] = {}
        """Copies from before a restart that recovery left undecided: their places, by namespace and key."""

    def has(self, row: int) -> bool:
        """Whether NVMe has the block."""
        return self._residency.is_listed(row)

    def lacks(self, row: int) -> None:
        """DRAM alone has the block from now on: it is dirty."""
        self._dirty.came(row, self._spaces[self._index.namespace_of(row)].block_bytes)
        if self._lower.admission.chooses:
            priority, ends_at = self._index.hint(row)
            if priority > 0 or ends_at:
                self._dirty.prioritize(row)

    def would_keep(self, row: int) -> bool:
        """Whether a block would be retained on NVMe."""
        retention = self._residency.retention
        return retention is not None and retention.has_room_for(row)

    def is_to_be_kept(self, row: int) -> bool:
        """Whether a block that DRAM alone holds is retained there, or would be retained on NVMe."""
        retention = self._above.retention
        return (retention is not None and retention.holds(row)) or self.would_keep(row)

    # Down ----------------------------------------------------------------------------------------------------------

    def make_place(self, number: int, rows: Sequence[int], claimed: list[list[int]] | None = None) -> list[list[int]]:
        """Slots on NVMe for blocks that are about to be written, by part; every class must have as many free ones.

        claimed: use these instead.
        """
        tier, residency = self._tier, self._residency
        assert all(residency.place(row, 0) == NO_PLACE for row in rows), "a block has one place there"
        columns = claimed or [tier.reserve(slot_class, len(rows)) for slot_class in self._spaces[number].classes]
        assert all([len(places) == len(rows) for places in columns]), "asked for slots that are not there"
        residency.reserved(rows, columns)
        for row in rows:
            self._residency.child_came(self._index.parent(row))
        return columns

    def demoted(self, number: int, rows: Sequence[int], generations: Sequence[int]) -> None:
        """The frames are durable: NVMe has the blocks from now on, except those that were quarantined, and perhaps
        refilled, meanwhile. generations: as of the start of the write."""
        residency, index = self._residency, self._index
        kept = []
        for row, generation in zip(rows, generations, strict=True):
            if index.state(row) is RowState.VISIBLE and self._above.generation(row) == generation:
                residency.published(row, generation)
                residency.listed(row)
                self._dirty.discard(row)
                kept.append(row)
                self._end_older(number, index.key(row))
            else:
                self._forget(row)
        # An ancestor must be the more recent one: else eviction takes the last block of every chain in turn.
        followed = {index.parent(row) for row in kept}
        for row in kept:
            if row not in followed:
                residency.policy.touched([one for one in index.chain(row) if residency.is_listed(one)])
        for part in range(len(self._spaces[number].classes)):
            self._tier.own(residency.places_of(kept, part), kept)
        self._blocks.counters["demoted_blocks"] += len(kept)
        self._blocks.tally.copied_bytes[CopyKind.DEMOTE] += len(kept) * self._spaces[number].block_bytes

    def not_demoted(self, rows: Sequence[int]) -> None:
        """The write failed: free their places on NVMe."""
        for row in rows:
            self._tier.abort(self._residency.left(row, self._index.parent(row)))

    # Recovery ------------------------------------------------------------------------------------------------------

    def loaded(self, rows: range, parents: Column, generations: Column, places: Sequence[Column]) -> None:
        """New rows for blocks that were on NVMe before a restart, most recently used first."""
        self._index.link(rows, parents)
        self._residency.loaded(rows, parents, generations, places)
        self._lower.admission.found(rows)
        for column in places:
            self._tier.own_many(column, np.arange(rows.start, rows.stop))

    def adopt(self, row: int, generation: int, places: Sequence[int]) -> None:
        """A readable block was also found on NVMe, from before a restart."""
        self._residency.reserved([row], [[place] for place in places])
        self._residency.child_came(self._index.parent(row))
        self._residency.published(row, generation)
        self._residency.listed(row)
        self._dirty.discard(row)
        self._tier.own(places, [row] * len(places))

    def give_up_unread(self, number: int, key: bytes) -> None:
        """A block from before a restart goes with its ancestor, before it was recovered."""
        self._gives_up(number, key)
        self._blocks.tally.evicted(TierName.NVME, EvictedTo.NOTHING, None)
        self._blocks.counters["nvme_evicted_blocks"] += 1
        self._blocks.counters["evicted_blocks"] += 1

    # Out -----------------------------------------------------------------------------------------------------------

    def evict(self, blocks: int, number: int) -> tuple[int, list[list[int]]]:
        """Evict a namespace's worst leaves on NVMe, up to that many, as long as they are the worst of all.

        Other namespaces' worse blocks help only if a slab of theirs gets empty, since frames on NVMe do not move: the
        slab that would be empty first goes, with the descendants of its blocks, and nothing else of theirs. Returns how
        many blocks went, and the places of those of this namespace, by part: they are claimed for the new blocks.
        """
        assert self.all_known, "a block may lead to others that are not recovered yet"
        claimed: list[list[int]] = [[] for _ in self._spaces[number].classes]
        if blocks < 1:
            return 0, claimed
        groups = givers(self._index.shares, number, self._residency, self._tier)
        choice = SlabReclaim(number, self._index, self._residency, self._tier, self._above)
        gone = self._evict_own(self._while_worst(groups, choice), blocks, claimed)
        if not gone:
            gone = sum(self._evicted(row, claim=False) is not None for row in choice.blocks())
        if gone:
            return gone, claimed
        rows = (row for row in self._residency.worst(groups) if self._index.namespace_of(row) == number)
        return self._evict_own(rows, blocks, claimed), claimed

    def _while_worst(self, groups: Sequence[int] | None, choice: SlabReclaim) -> Iterator[int]:
        has_own = False
        for row in self._residency.worst(groups):
            if self._index.namespace_of(row) == choice.asker:
                has_own = has_own or self._may_go(row)
                yield row
            elif has_own or choice.look_at(row):
                return

    def _evict_own(self, rows: Iterable[int], blocks: int, claimed: Sequence[list[int]]) -> int:
        gone = 0
        for row in rows:
            places = self._evicted(row, claim=True)
            if places is None:
                continue
            for column, place in zip(claimed, places, strict=True):
                column.append(place)
            gone += 1
            if gone == blocks:
                break
        return gone

    def _may_go(self, row: int) -> bool:
        """False for a block that only NVMe has and that leads to blocks not on NVMe."""
        return self._above.is_listed(row) or not self._index.children(row)

    def _evicted(self, row: int, *, claim: bool) -> list[int] | None:
        stays = self._above.is_listed(row)
        if not self._may_go(row):
            return None
        places = self.leave(row, claim=claim)
        self._blocks.counters["nvme_evicted_blocks"] += 1
        to = EvictedTo.DRAM if stays else EvictedTo.NOTHING
        self._blocks.tally.evicted(TierName.NVME, to, self._blocks.last_uses.idle_seconds(row))
        if not stays:
            self._index.remove(row, remember=True, stamp=self._blocks.tally.stamp(TierName.NVME))
            self._blocks.counters["evicted_blocks"] += 1
        return places

    def quarantine(self, row: int, why: TierMiss = TierMiss.CORRUPT) -> None:
        """A frame read from NVMe failed a check, or its epoch was retired, in which case its slots are free. Without a
        copy in DRAM the row stays, lost."""
        index, is_retired = self._index, why is TierMiss.RETIRED
        places = self._residency.left(row, index.parent(row))
        (self._tier.delete if is_retired else self._tier.quarantine)(places)
        if not self._above.is_listed(row):
            index.mark_lost(row, why)
            self._above.child_came(index.parent(row))
            self._above.listed(row)
        elif index.state(row) is RowState.VISIBLE:
            self.lacks(row)
        self._blocks.counters["retired_blocks" if is_retired else "quarantined_blocks"] += 1
        self._blocks.tally.quarantined[TierName.NVME] += not is_retired

    def leave(self, row: int, *, claim: bool = False) -> list[int]:
        """Give up NVMe's copy and report it; returns its places. claim: they are kept for the caller's blocks."""
        self._gives_up(self._index.namespace_of(row), self._index.key(row))
        return self._forget(row, claim=claim)

    def _forget(self, row: int, *, claim: bool = False) -> list[int]:
        places = self._residency.left(row, self._index.parent(row))
        self._tier.delete(places, claim=claim)
        return places

    def _gives_up(self, number: int, key: bytes) -> None:
        if self._lower.gone is not None:
            self._lower.gone(number, key)
        self._end_older(number, key)

    def _end_older(self, number: int, key: bytes) -> None:
        """A newer copy is durable, or was given up: the copy from before the restart must not come back."""
        if self.older:
            self._tier.delete(self.older.pop((number, key), []))

    def check(self) -> None:
        """Every invariant over the tables of NVMe."""
        residency, index = self._residency, self._index
        self._tier.check()
        residency.check()
        children: Counter[int] = Counter()
        rows = [row for number in range(len(self._spaces)) for row in index.rows(number)]
        for row in rows:
            below = residency.is_listed(row)
            assert not below or index.state(row) == RowState.VISIBLE
            placed = residency.place(row, 0) != NO_PLACE
            assert placed >= below and placed <= (below or row in self._blocks.demoting)
            if placed:
                children[index.parent(row)] += 1
        for row in rows:
            assert residency.children(row) == children[row]
