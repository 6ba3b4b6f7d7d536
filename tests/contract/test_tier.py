"""What every `Tier` keeps: places end in one commit or abort, only committed frames are read, the counts add up.

An implementation is a subclass of `TierContract` with a tier that holds at least `CAPACITY` frames of `MINE` and of
`THEIRS`.
"""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.machine import CLASSES, MAC_KEY, STAMPS, Frame, Machine
from tiering.dram.extents import ExtentPool
from tiering.dram.tier import DramTier
from tiering.errors import BlockMissing
from tiering.nvme.tier import NvmeTier
from tiering.tier import NO_PLACE, SlotClass, Tier, place_of
from workbench import slot_class

MINE, THEIRS = CLASSES
CAPACITY = 8
SLOT_BYTES = MINE.frame_bytes


@functools.cache
def frame(number: int, part: int = 0) -> bytes:
    """A whole frame; the same number gives the same bytes."""
    return Frame(part, number.to_bytes(32, "big"), number + 1, Random(number)).bytes


def read(tier: Tier, place: int) -> bytes:
    buffer = bytearray(SLOT_BYTES)
    tier.read(place, memoryview(buffer))
    return bytes(buffer)


class TierContract:
    """What a tier must do; `make` gives a new one."""

    def make(self) -> Any:
        raise NotImplementedError

    def store(self, tier: Tier, numbers: list[int], slots: SlotClass = MINE) -> list[int]:
        places = tier.reserve(slots, len(numbers))
        assert len(places) == len(numbers)
        tier.commit(places, [frame(number, slots.part) for number in numbers])
        return places

    def test_places_are_different(self) -> None:
        tier = self.make()
        mine, theirs = tier.reserve(MINE, CAPACITY), tier.reserve(THEIRS, CAPACITY)
        assert len(set(mine + theirs)) == 2 * CAPACITY

    def test_when_it_is_full_there_are_fewer_places_or_none(self) -> None:
        tier = self.make()
        first = tier.reserve(MINE, CAPACITY - 1)
        assert len(first) == CAPACITY - 1
        rest = tier.reserve(MINE, 10 * CAPACITY)
        assert tier.reserve(MINE, 1) == []
        tier.abort(rest)
        assert len(tier.reserve(MINE, 10 * CAPACITY)) == len(rest)

    def test_an_unknown_class_has_no_places(self) -> None:
        tier = self.make()
        assert tier.reserve(slot_class(9), 1) == [] and tier.reserve(MINE, 0) == []

    def test_batches_may_be_empty(self) -> None:
        tier = self.make()
        before = tier.usage()
        tier.commit([], [])
        tier.abort([])
        tier.delete([])
        assert tier.usage() == before

    def test_a_frame_that_is_not_committed_is_not_read(self) -> None:
        tier = self.make()
        (place,) = tier.reserve(MINE, 1)
        with pytest.raises(BlockMissing):
            read(tier, place)
        tier.abort([place])
        with pytest.raises(BlockMissing):
            read(tier, place)

    def test_a_deleted_frame_is_not_read(self) -> None:
        tier = self.make()
        places = self.store(tier, [1, 2])
        tier.delete(places[:1])
        with pytest.raises(BlockMissing):
            read(tier, places[0])
        assert read(tier, places[1]) == frame(2)

    @pytest.mark.parametrize("place", [NO_PLACE, place_of(0, 10_000), place_of(10_000, 0)])
    def test_a_place_that_does_not_exist_is_not_read(self, place: int) -> None:
        with pytest.raises(BlockMissing):
            read(self.make(), place)

    def test_a_place_ends_in_one_commit_or_abort(self) -> None:
        tier = self.make()
        committed = self.store(tier, [1])
        aborted, reserved = tier.reserve(MINE, 1), tier.reserve(MINE, 1)
        tier.abort(aborted)
        before = tier.usage()
        wrong: list[Any] = [
            lambda: tier.commit(committed, [frame(9)]),
            lambda: tier.abort(committed),
            lambda: tier.commit(aborted, [frame(9)]),
            lambda: tier.abort(aborted),
            lambda: tier.delete(aborted),
            lambda: tier.delete(reserved),
        ]
        for use in wrong:
            with pytest.raises(AssertionError):
                use()
        assert tier.usage() == before
        assert read(tier, committed[0]) == frame(1), "wrong use changes no byte"

    def test_as_many_frames_as_places(self) -> None:
        tier = self.make()
        with pytest.raises(ValueError):
            tier.commit(tier.reserve(MINE, 2), [frame(1)])

    @given(
        steps=st.lists(
            st.tuples(st.sampled_from(["reserve", "commit", "abort", "delete"]), st.integers(0, 1000)), max_size=40
        )
    )
    @settings(max_examples=50)
    def test_against_two_sets(self, steps: list[tuple[str, int]]) -> None:
        tier = self.make()
        empty = tier.usage()
        reserved: list[int] = []
        committed: dict[int, int] = {}
        for action, choice in steps:
            if action == "reserve":
                places = tier.reserve(MINE, choice % 4)
                assert not set(places) & ({*reserved} | committed.keys()), "a place is handed out once"
                reserved += places
            elif action == "commit" and reserved:
                place = reserved.pop(choice % len(reserved))
                tier.commit([place], [frame(choice % 251)])
                committed[place] = choice % 251
            elif action == "abort" and reserved:
                tier.abort([reserved.pop(choice % len(reserved))])
            elif action == "delete" and committed:
                place = sorted(committed)[choice % len(committed)]
                tier.delete([place])
                del committed[place]
            usage = tier.usage()
            assert (usage.used, usage.reserved) == (len(committed), len(reserved))
            assert usage.free + usage.used + usage.reserved + usage.deleting == usage.capacity == empty.capacity
            assert 0 <= usage.taken_bytes <= usage.budget_bytes
        for place, number in committed.items():
            assert read(tier, place) == frame(number)


class TestDramTier(TierContract):
    def make(self) -> DramTier:
        tier = DramTier(ExtentPool(4 * 65536, 65536))
        for slots in (MINE, MINE, THEIRS, THEIRS):
            tier.adopt(tier.new_extent(), slots)
        return tier


class TestNvmeTier(TierContract):
    def make(self) -> NvmeTier:
        machine = Machine()
        assert machine.start() == []
        assert machine.tier is not None
        for stamp in STAMPS:
            machine.tier.new_slab(stamp, MAC_KEY, b"")
        return machine.tier
