"""What would go for room, and which slab is chosen, against chains of blocks that are followed one by one."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore.core.index
from kvstore.core.index import NO_ROW, PrefixIndex, ReclaimPlan, SlabReclaim
from kvstore.insight.replay import CountingTier
from tiering.policies.lru import LeafFirstLru
from tiering.policies.retention import Retention
from tiering.residency import Pins, Residency
from tiering.slots import Piece
from tiering.tier import extent_of
from workbench import slot_class

CLASS = slot_class(owner=b"a")
ASKER = 7


class Slabs(CountingTier):
    """Several of them."""

    def __init__(self, slabs: int, blocks: int) -> None:
        """blocks: of each."""
        super().__init__(slabs * blocks * CLASS.frame_bytes)
        self.slabs = slabs
        for number in range(slabs):
            self._ledger.add(Piece(number, CLASS, blocks))


class Disk:
    """Chains of blocks, most of them on NVMe, in slabs at random; some in use, some being written, some kept for a
    time."""

    def __init__(self, random: Random, blocks: int) -> None:
        self.index, pins = PrefixIndex(), Pins()
        space = self.index.add_namespace(b"one")
        self.residency = Residency(LeafFirstLru(), pins)
        self.wanted: set[int] = set()
        self.residency.retention = Retention(self, self.residency.is_listed, lambda: 0.0, [1 << 40])
        slab_blocks, wanted = random.choice([1, 3, 8]), random.choice([0.1, 0.4])
        self.tier = Slabs(blocks // slab_blocks + 1, slab_blocks)
        self.below: list[int] = []
        for number in range(blocks):
            parent = random.choice([NO_ROW, *self.index.rows(space)])
            row = self.index.insert(space, number.to_bytes(32, "little"), parent)
            self.index.publish(row)
            self.residency.grow_to(row)
            if (parent == NO_ROW or parent in self.below) and random.random() < 0.9:
                self.below.append(row)
        self.above = {row for row in self.index.rows(space) if row not in self.below or random.random() < 0.5}
        self.dram = Residency(LeafFirstLru(), pins)
        for row in self.above:
            self.dram.grow_to(row)
            self.dram.listed(row)
            if self.index.parent(row) != NO_ROW:
                self.dram.grow_to(self.index.parent(row))
                self.dram.child_came(self.index.parent(row))
        self.dram.grow_to(blocks)
        self.wanted |= {row for row in self.below if random.random() < wanted}
        inner = {self.index.parent(row) for row in self.below}
        self.writing = {row for row in self.below if row not in inner and random.random() < 0.05}
        places = self.tier.reserve(CLASS, len(self.below))
        for row, place in zip(random.sample(self.below, len(self.below)), places, strict=True):
            self.residency.reserved([row], [[place]])
            if row not in self.writing:
                self.tier.commit([place])
                self.tier.own([place], [row])
        for row in self.below:
            if self.index.parent(row) != NO_ROW:
                self.residency.child_came(self.index.parent(row))
        listed = [row for row in self.below if row not in self.writing]
        for row in listed:
            self.residency.listed(row)
        for row in random.sample(listed, len(listed) // 2):
            self.residency.policy.touched(self.index.chain(row))
        pins.pin([row for row in self.index.rows(space) if random.random() < 0.05])
        self.residency.held.defer_reuse([self.residency.place(row, 0) for row in listed if random.random() < 0.05])

    has_hints = True

    def hint(self, row: int) -> tuple[int, int]:
        return 0, int(row in self.wanted) * 100

    def hinted(self, rows: range) -> list[int]:
        return [row for row in rows if row in self.wanted]

    def parent(self, row: int) -> int:
        return self.index.parent(row)

    def depth(self, row: int) -> int:
        return self.index.depth(row)

    def size_bytes(self, row: int) -> int:
        return 1

    def group(self, row: int) -> int:
        return 0

    def slab_of(self, row: int) -> int:
        return extent_of(self.residency.place(row, 0))

    def stays(self, row: int) -> bool:
        """It is in use, or being written; or only NVMe has it, and it is the way to a block that stays, since it is
        not there alone."""
        children = {one for one in self.index.rows(0) if self.index.parent(one) == row}
        is_way = row not in self.above and not children <= set(self.below) - self.above
        is_read = self.residency.pins.counts[row] or self.residency.place(row, 0) in self.residency.held
        return bool(is_read) or row in self.writing or is_way

    def family(self, slab: int) -> set[int]:
        """What a slab has, and all that follows that, in whatever tier."""
        here = {row for row in self.below if self.slab_of(row) == slab}
        return {row for row in self.index.rows(0) if here & set(self.index.chain(row))}

    def may_go(self, slab: int) -> bool:
        return not any(self.stays(row) for row in self.family(slab) & set(self.below))

    def is_wanted(self, rows: set[int]) -> bool:
        retention = self.residency.retention
        assert retention is not None
        return any(retention.holds(row) for row in rows & set(self.below))

    def first_empty(self) -> int | None:
        """The slab that is empty first if leaves go one by one, each with the ancestors that it leaves alone; of those
        that have nothing to be kept."""
        gone: set[int] = set()
        for leaf in self.residency.worst():
            row = leaf
            while row != NO_ROW and not self.stays(row):
                if not {one for one in self.below if self.index.parent(one) == row} <= gone:
                    break
                gone.add(row)
                mine = {one for one in self.below if self.slab_of(one) == self.slab_of(row)}
                if mine <= gone and not self.is_wanted(mine):
                    return self.slab_of(row)
                row = self.index.parent(row)
        return None


@pytest.mark.slow
@given(seed=st.integers(0, 10**9), blocks=st.integers(1, 40), most=st.sampled_from([1, 2, 4, 8, 1000]))
@settings(max_examples=400, deadline=None)
def test_one_slab_is_chosen_and_what_follows_it(seed: int, blocks: int, most: int) -> None:
    """most: blocks that are looked at, which may be too few to know."""
    disk = Disk(Random(seed), blocks)
    first = disk.first_empty()
    choice = SlabReclaim(ASKER, disk.index, disk.residency, disk.tier, disk.dram)
    with patch.object(kvstore.core.index, "MOST_LOOKED_AT", most):
        for leaf in disk.residency.worst():
            if choice.look_at(leaf):
                break
    lost = choice.blocks()
    seen = set(choice._going)
    depths = [disk.index.depth(row) for row in lost]
    assert depths == sorted(depths, reverse=True) and len(lost) == len(set(lost))
    families = {slab: disk.family(slab) & set(disk.below) for slab in seen if disk.may_go(slab)}
    if not families:
        assert not lost
        full = [slab for slab in range(disk.tier.slabs) if disk.family(slab)]
        assert not any(map(disk.may_go, full)), "not where one might go"
        return
    assert set(lost) in families.values(), "one slab, with what follows it on NVMe, none of it in use"
    if any(not disk.is_wanted(family) for family in families.values()):
        assert not disk.is_wanted(set(lost)), "what is kept for a time goes where nothing else may"
    if first is not None and disk.may_go(first) and not disk.is_wanted(disk.family(first)) and most > blocks:
        assert set(lost) == families[first]


@given(seed=st.integers(0, 10**9), blocks=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_what_would_go_leaf_by_leaf_is_what_goes(seed: int, blocks: int) -> None:
    """All that nobody uses, each block once and behind its children."""
    disk = Disk(Random(seed), blocks)
    departures = ReclaimPlan(disk.index, disk.residency, disk.dram)
    going = [row for leaf in disk.residency.worst() for row in departures.with_leaf(leaf)]
    assert departures.blocks == len(going) == len(set(going))
    gone = []
    while (row := next((one for one in disk.residency.worst() if not disk.stays(one)), None)) is not None:
        disk.residency.left(row, disk.index.parent(row))
        gone.append(row)
    assert set(going) == set(gone)
