"""The mover: a frame that arrives is checked where it arrived, and what fails a check was not moved."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from tiering.dram.extents import ExtentPool
from tiering.dram.mover import FrameCopy, MoveDone, MoveOutcome, Mover
from tiering.dram.tier import DramTier
from tiering.frame import HEADER_BYTES, Sealer, Stamp, digest
from tiering.tier import SlotClass, place_of
from workbench import KIB

MAC_KEY = b"k" * 32
STAMP = Stamp(
    key_id=b"key-id--",
    epoch=1,
    tenant=b"t" * 16,
    namespace=b"n" * 32,
    codec="raw",
    part=0,
    parts=1,
    block_tokens=64,
    slices=2,
    payload_bytes=12 * KIB,
)
SLOTS = SlotClass(STAMP.tenant, STAMP.namespace, STAMP.part, STAMP.frame_bytes)
PAYLOAD = b"".join(blake2b(b"%d" % index).digest() for index in range(STAMP.payload_bytes // 64))


class Keys:
    """`MacKeys` of one tenant."""

    def __init__(self, key: bytes | None = MAC_KEY) -> None:
        self._key = key

    def mac_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        return self._key if (tenant, key_id, epoch) == (STAMP.tenant, STAMP.key_id, STAMP.epoch) else None

    slab_key = mac_key


@pytest.fixture
def tier() -> DramTier:
    tier = DramTier(ExtentPool(256 * KIB, 64 * KIB))
    tier.adopt(tier.new_extent(), SLOTS)
    tier.adopt(tier.new_extent(), SLOTS)
    return tier


def stored(tier: DramTier) -> int:
    (place,) = tier.reserve(SLOTS, 1)
    tier.reserved_span(place).view[HEADER_BYTES : HEADER_BYTES + len(PAYLOAD)] = PAYLOAD
    half = STAMP.slice_bytes
    header = Sealer(STAMP, MAC_KEY).seal(b"K" * 32, b"P" * 32, 0, 1, [digest(PAYLOAD[:half]), digest(PAYLOAD[half:])])
    tier.commit([place], [header])
    return place


def test_a_frame_arrives_bit_for_bit(tier: DramTier) -> None:
    copies = [FrameCopy(row, stored(tier), target) for row, target in enumerate(tier.reserve(SLOTS, 3))]
    assert Mover(tier, Keys()).run(copies) == [MoveDone(copy, MoveOutcome.MOVED) for copy in copies]
    for copy in copies:
        assert bytes(tier.reserved_span(copy.target).view) == bytes(tier.committed_span(copy.source).view)


def test_a_move_changes_no_table(tier: DramTier) -> None:
    copy = FrameCopy(0, stored(tier), tier.reserve(SLOTS, 1)[0])
    before = tier.usage()
    Mover(tier, Keys()).run([copy])
    assert tier.usage() == before
    tier.check()


@pytest.mark.parametrize(
    "at", [0, 40, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 6000, HEADER_BYTES + 12 * KIB - 1]
)
def test_a_bit_that_flipped_is_corrupt(tier: DramTier, at: int) -> None:
    good, bad = stored(tier), stored(tier)
    tier.span_at(bad).view[at] ^= 4
    targets = tier.reserve(SLOTS, 2)
    copies = [FrameCopy(0, bad, targets[0]), FrameCopy(1, good, targets[1])]
    outcomes = [done.outcome for done in Mover(tier, Keys()).run(copies)]
    assert outcomes == [MoveOutcome.CORRUPT, MoveOutcome.MOVED], "one bad frame does not hold up the others"


@pytest.mark.parametrize("keys", [Keys(None), Keys(b"x" * 32)], ids=["no key", "another key"])
def test_a_frame_under_another_key_is_corrupt(tier: DramTier, keys: Keys) -> None:
    copy = FrameCopy(0, stored(tier), tier.reserve(SLOTS, 1)[0])
    assert Mover(tier, keys).run([copy])[0].outcome is MoveOutcome.CORRUPT


def test_a_frame_that_went_meanwhile_is_gone(tier: DramTier) -> None:
    source = stored(tier)
    (target,) = tier.reserve(SLOTS, 1)
    tier.delete([source])
    copies = [FrameCopy(0, source, target), FrameCopy(1, place_of(99, 0), target)]
    assert [done.outcome for done in Mover(tier, Keys()).run(copies)] == [MoveOutcome.GONE, MoveOutcome.GONE]


def test_a_tier_that_was_closed_meanwhile_has_nothing_left(tier: DramTier) -> None:
    copy = FrameCopy(0, stored(tier), tier.reserve(SLOTS, 1)[0])
    tier.close()
    assert Mover(tier, Keys()).run([copy])[0].outcome is MoveOutcome.GONE


def test_nothing_to_move(tier: DramTier) -> None:
    assert Mover(tier, Keys()).run([]) == []
