"""The DRAM tier beyond its contract: extents and their classes, late readers, bad frames, emptying, closing."""

from __future__ import annotations

import os

import pytest

from tiering.dram.extents import ExtentPool
from tiering.dram.tier import DramTier
from tiering.errors import BlockMissing, TierUnavailable
from tiering.frame import HEADER_BYTES
from tiering.slots import FrameState
from tiering.tier import SlotClass, extent_of, slot_of
from workbench import KIB, slot_class

A, B = slot_class(owner=b"a"), slot_class(owner=b"b", frame_bytes=24 * KIB)
HEADER = b"\x01" * HEADER_BYTES


def tier_of(*classes: SlotClass, budget: int = 4) -> DramTier:
    tier = DramTier(ExtentPool(budget * 64 * KIB, 64 * KIB))
    for slots in classes:
        tier.adopt(tier.new_extent(), slots)
    return tier


def stored(tier: DramTier, slots: SlotClass, count: int) -> list[int]:
    places = tier.reserve(slots, count)
    tier.commit(places, [HEADER] * len(places))
    assert len(places) == count
    return places


def state(tier: DramTier, place: int) -> FrameState:
    for slots in (A, B):
        for extent in tier.all_extents(slots):
            if extent.number == extent_of(place):
                return FrameState(extent.slots.states[slot_of(place)])
    raise AssertionError("no such extent")


# Extents and classes --------------------------------------------------------------------------------------------------


def test_an_extent_is_cut_into_the_frames_of_its_class() -> None:
    tier = tier_of(A, B)
    assert (tier.free_slots(A), tier.free_slots(B)) == (4, 2)
    usage = tier.usage()
    assert (usage.capacity, usage.free) == (6, 6)
    assert (usage.taken_bytes, usage.budget_bytes) == (128 * KIB, 256 * KIB)
    assert tier.has_room() and tier.extent_bytes == 64 * KIB
    assert tier.free_slots(slot_class(7)) == 0 and list(tier.extents_of(slot_class(7))) == []
    tier.check()


def test_a_retired_extent_gives_its_bytes_back() -> None:
    tier = tier_of(A, A, budget=2)
    descriptors = len(os.listdir("/proc/self/fd"))
    places = stored(tier, A, 5)
    with pytest.raises(AssertionError):
        tier.retire(extent_of(places[0]))
    tier.delete(places[:4])
    tier.retire(extent_of(places[0]))
    assert tier.usage().taken_bytes == 64 * KIB and tier.usage().capacity == 4
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    assert state(tier, places[4]) is FrameState.RESIDENT
    tier.check()
    tier.delete(places[4:])
    tier.retire(extent_of(places[4]))
    assert tier.usage().taken_bytes == 0 and tier.free_slots(A) == 0
    tier.check()


def test_numbers_of_extents_are_not_used_again() -> None:
    tier = tier_of(A)
    (place,) = tier.reserve(A, 1)
    tier.abort([place])
    tier.retire(extent_of(place))
    tier.adopt(tier.new_extent(), A)
    (new,) = tier.reserve(A, 1)
    assert extent_of(new) != extent_of(place)
    with pytest.raises(BlockMissing):
        tier.span_at(place)


# Readers that are late, frames that are bad ---------------------------------------------------------------------------


def test_letting_go_of_what_is_gone_is_nothing() -> None:
    tier = tier_of(A)
    places = stored(tier, A, 1)
    tier.delete(places)
    tier.retire(extent_of(places[0]))
    tier.allow_reuse(places)
    tier.check()


# Closing --------------------------------------------------------------------------------------------------------------


def test_closing_gives_all_memory_back_and_leaves_readers_their_bytes() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    tier = tier_of(A, B)
    (place,) = stored(tier, A, 1)
    span = tier.committed_span(place)
    tier.close()
    assert tier.usage().taken_bytes == 0 and tier.usage().capacity == 0
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert bytes(span.view[:3]) == b"\x01" * 3
    for ask in (tier.committed_span, tier.span_at, tier.reserved_span):
        with pytest.raises(BlockMissing):
            ask(place)
    assert tier.reserve(A, 1) == [] and tier.free_slots(A) == 0
    with pytest.raises(TierUnavailable):
        tier.new_extent()
    tier.close()
