"""A ledger that a keeper hands over, with anything in it: it is the extent's, or it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tiering.dram.extents import Extent
from tiering.dram.keeping import MAX_GENERATION, Ledger
from tiering.errors import BlockCorrupt
from tiering.slab_header import PAGE_BYTES, SlabHeader
from tiering.tier import SlotClass

NAME = b"n" * 16
FRAME_BYTES, SLOTS = 12_288, 5
CLASS = SlotClass(b"t" * 16, b"s" * 32, 0, FRAME_BYTES)


@pytest.fixture
def memory() -> Iterator[Extent]:
    one = Extent(2 * PAGE_BYTES)
    yield one
    one.close()


def written(memory: Extent, **changes: Any) -> None:
    fields: dict[str, Any] = {"slot_class": CLASS, "slots": SLOTS, "uid": NAME, **changes}
    header = SlabHeader(0, fields["slot_class"], fields["slots"], bytes(8), 0, fields["uid"], b"about")
    memory.view[:PAGE_BYTES] = header.pack(b"")


def test_a_ledger_is_found_as_it_was_left(memory: Extent) -> None:
    written(memory)
    memory.view[PAGE_BYTES : PAGE_BYTES + 8] = MAX_GENERATION.to_bytes(8, "little")
    found = Ledger.found(memory, NAME, SLOTS * FRAME_BYTES)
    assert (
        found.slot_class == CLASS
        and found.about == b"about"
        and list(found.generations) == [MAX_GENERATION, 0, 0, 0, 0]
    )
    found.generations.release()


@pytest.mark.parametrize(
    "changes",
    [
        {"uid": b"m" * 16},
        {"slots": 0},
        {"slots": SLOTS + 1},
        {"slots": (1 << 32) - 1},
        {"slot_class": CLASS._replace(frame_bytes=0)},
        {"slot_class": CLASS._replace(frame_bytes=4096)},
        {"slot_class": CLASS._replace(frame_bytes=(1 << 64) - 1)},
    ],
)
def test_a_ledger_that_fits_no_extent_is_refused(memory: Extent, changes: dict[str, Any]) -> None:
    written(memory, **changes)
    with pytest.raises(BlockCorrupt):
        Ledger.found(memory, NAME, SLOTS * FRAME_BYTES)


def test_a_generation_that_nothing_can_follow_is_refused(memory: Extent) -> None:
    """The next ones of this process come after the highest that it finds."""
    written(memory)
    memory.view[PAGE_BYTES + 8 : PAGE_BYTES + 16] = b"\xff" * 8
    with pytest.raises(BlockCorrupt):
        Ledger.found(memory, NAME, SLOTS * FRAME_BYTES)
