"""Which blocks NVMe has, and in which order those that DRAM alone holds are written to it.

    stored > waits > used: last in the order > its turn > written: NVMe has it
                                                        > declined: stays, and waits again once it is used
           > a client asked to retain it: before all others, from then on until its turn

The part of `BlockTable` that exists where there is a tier below DRAM. A block is listed in that tier's policy while
NVMe has it. No lock, clock or leases: callers hold the store's lock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvstore.core.rows.index import NO_ROW, Column, PrefixIndex, RowState
from kvstore.core.rows.reclaim import SlabReclaim, givers
from tiering.counts.tally import CopyKind, EvictedTo, Tally, TierName
from tiering.policies.admission import Admission
from tiering.policies.shares import Shares
from tiering.residency import LastUses, Residency
from tiering.tier import NO_PLACE, LowerTier, SlotClass, TierMiss


class DirtyBlocks:
    """Blocks that DRAM alone holds: rows, each with its bytes. Pure.

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


@dataclass(frozen=True)
class Lower(Generic[TierBelow]):
    """NVMe: its tier, the blocks in it, and the policy that admits blocks to it."""

    tier: TierBelow
    residency: Residency
    admission: Admission


class BlockSlots(Protocol):
    """What a block of a namespace takes in a tier: a slot of each class, and that many bytes."""

    @property
    def classes(self) -> tuple[SlotClass, ...]: ...

    @property
    def block_bytes(self) -> int: ...


class BlocksBelow:
    """The blocks on NVMe: each change of what it has goes through here, so that its tables agree with DRAM's."""

    def __init__(
        self,
        lower: Lower[LowerTier],
        index: PrefixIndex,
        above: Residency,
        dirty: DirtyBlocks,
        spaces: Sequence[BlockSlots],
        shares: Shares | None,
        tally: Tally,
        last_uses: LastUses,
        counters: Counter[str],
        gone: Callable[[int, bytes], None] | None,
    ) -> None:
        """above: DRAM's residency. spaces: of each namespace, by number. gone: called with namespace number and prefix
        key of each block that NVMe gives up, before its frames go."""
        self._tier = lower.tier
        self._residency = lower.residency
        self.admission = lower.admission
        self._index = index
        self._above = above
        self._dirty = dirty
        self._spaces = spaces
        self._shares = shares
        self._tally = tally
        self._last_uses = last_uses
        self._counters = counters
        self._gone = gone
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
        if self.admission.chooses:
            priority, ends_at = self._index.retention(row)
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
            self._came(row)
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
        self._counters["demoted_blocks"] += len(kept)
        self._tally.copied_bytes[CopyKind.DEMOTE] += len(kept) * self._spaces[number].block_bytes

    def not_demoted(self, rows: Sequence[int]) -> None:
        """The write failed: free their places on NVMe."""
        for row in rows:
            self._tier.abort(self._residency.forget(row))
            self._went(row)

    # Recovery ------------------------------------------------------------------------------------------------------

    def loaded(self, rows: range, parents: Column, generations: Column, places: Sequence[Column]) -> None:
        """New rows for blocks that were on NVMe before a restart, most recently used first."""
        self._index.link(rows, parents)
        self._residency.loaded(rows, parents, generations, places)
        self.admission.found(rows)
        for column in places:
            self._tier.own_many(column, np.arange(rows.start, rows.stop))

    def adopt(self, row: int, generation: int, places: Sequence[int]) -> None:
        """A readable block was also found on NVMe, from before a restart."""
        self._residency.reserved([row], [[place] for place in places])
        self._came(row)
        self._residency.published(row, generation)
        self._residency.listed(row)
        self._dirty.discard(row)
        self._tier.own(places, [row] * len(places))

    def give_up_unread(self, number: int, key: bytes) -> None:
        """A block from before a restart goes with its ancestor, before it was recovered."""
        self._gives_up(number, key)
        self._tally.evicted(TierName.NVME, EvictedTo.NOTHING, None)
        self._counters["nvme_evicted_blocks"] += 1
        self._counters["evicted_blocks"] += 1

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
        groups = givers(self._shares, number, self._residency, self._tier)
        choice = SlabReclaim(number, self._index, self._residency, self._tier, self._above)
        gone = self._evict_own(self._while_worst(groups, choice), blocks, claimed)
        if not gone:
            gone = sum(self._evicted(row, claim=False) is not None for row in choice.blocks())
        if gone:
            return gone, claimed
        rows = (row for row in self._residency.worst(groups) if self._index.namespace_of(row) == number)
        return self._evict_own(rows, blocks, claimed), claimed

    def _while_worst(self, groups: Sequence[int] | None, choice: SlabReclaim) -> Iterator[int]:
        """Leaves of the asking namespace, as long as they are worse than the slab that another would give."""
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
        """Returns the places that a block had on NVMe; None if it must stay because it leads to others."""
        stays = self._above.is_listed(row)
        if not self._may_go(row):
            return None
        places = self.leave(row, claim=claim)
        self._counters["nvme_evicted_blocks"] += 1
        to = EvictedTo.DRAM if stays else EvictedTo.NOTHING
        self._tally.evicted(TierName.NVME, to, self._last_uses.idle_seconds(row))
        if not stays:
            self._index.remove(row, remember=True, stamp=self._tally.stamp(TierName.NVME))
            self._counters["evicted_blocks"] += 1
        return places

    def quarantine(self, row: int, why: TierMiss = TierMiss.CORRUPT) -> None:
        """A frame read from NVMe failed a check, or its epoch was retired, in which case its slots are free. Without a
        copy in DRAM the row stays, lost."""
        index, is_retired = self._index, why is TierMiss.RETIRED
        (self._tier.delete if is_retired else self._tier.quarantine)(self._residency.forget(row))
        self._residency.unlisted(row)
        self._went(row)
        if not self._above.is_listed(row):
            index.mark_lost(row, why)
            parent = index.parent(row)
            if parent != NO_ROW:
                self._above.child_came(parent)
            self._above.listed(row)
        elif index.state(row) is RowState.VISIBLE:
            self.lacks(row)
        self._counters["retired_blocks" if is_retired else "quarantined_blocks"] += 1
        self._tally.quarantined[TierName.NVME] += not is_retired

    def leave(self, row: int, *, claim: bool = False) -> list[int]:
        """Give up NVMe's copy and report it; returns its places. claim: they are kept for the caller's blocks."""
        self._gives_up(self._index.namespace_of(row), self._index.key(row))
        return self._forget(row, claim=claim)

    def _forget(self, row: int, *, claim: bool = False) -> list[int]:
        """The same without the report."""
        places = self._residency.forget(row)
        self._tier.delete(places, claim=claim)
        self._residency.unlisted(row)
        self._went(row)
        return places

    def _gives_up(self, number: int, key: bytes) -> None:
        if self._gone is not None:
            self._gone(number, key)
        self._end_older(number, key)

    def _end_older(self, number: int, key: bytes) -> None:
        """A newer copy is durable, or was given up: the copy from before the restart must not come back."""
        if self.older:
            self._tier.delete(self.older.pop((number, key), []))

    def _came(self, row: int) -> None:
        parent = self._index.parent(row)
        if parent != NO_ROW:
            self._residency.child_came(parent)

    def _went(self, row: int) -> None:
        parent = self._index.parent(row)
        if parent != NO_ROW:
            self._residency.child_went(parent)

    def check(self, demoting: Collection[int]) -> None:
        """Every invariant over the tables of NVMe. demoting: rows that are being written there."""
        residency, index = self._residency, self._index
        self._tier.check()
        residency.check()
        children: Counter[int] = Counter()
        rows = [row for number in range(len(self._spaces)) for row in index.rows(number)]
        for row in rows:
            below = residency.is_listed(row)
            assert not below or index.state(row) == RowState.VISIBLE
            placed = residency.place(row, 0) != NO_PLACE
            assert placed >= below and placed <= (below or row in demoting)
            if placed:
                children[index.parent(row)] += 1
        for row in rows:
            assert residency.children(row) == children[row]
