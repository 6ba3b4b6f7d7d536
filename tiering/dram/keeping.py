"""Memory that outlives the process that uses it: another process (the supervisor) keeps the descriptors.

Beside each kept extent stands a ledger, shared memory that only the store's process maps: whose frames the extent
holds, and for each slot the generation of the frame that is readable there, or 0. A generation is written after its
frame, and cleared before its slot is reused, so the process that finds extent and ledger after a crash knows what was
readable: neither half-filled slots nor evicted frames come back. This file knows no frame.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

from tiering.dram.extents import Extent, rounded_up
from tiering.errors import BlockCorrupt
from tiering.slab_header import PAGE_BYTES, SlabHeader, parse_slab_header
from tiering.tier import SlotClass

NAME_BYTES = 16
_NO_KEY = b""
_WORD_BYTES = 8
MAX_GENERATION = (1 << 62) - 1


class KeptExtent(NamedTuple):
    """Kept descriptors of an extent and of its ledger, which the receiver closes."""

    name: bytes
    extent: int
    ledger: int


class Ledger:
    """Of one extent: its slot class, and the generation in each slot."""

    def __init__(self, memory: Extent, header: SlabHeader) -> None:
        self._memory = memory
        self.slot_class = header.slot_class
        self.about = header.about
        self.generations = memory.view[PAGE_BYTES : PAGE_BYTES + _WORD_BYTES * header.slots].cast("Q")

    @classmethod
    def new(cls, slot_class: SlotClass, slots: int, about: bytes, name: bytes) -> Ledger:
        """An empty one. about: the namespace's record, for the floor above; see `SlabHeader`. Raises `OSError`."""
        header = SlabHeader(0, slot_class, slots, bytes(8), 0, name, about)
        memory = Extent(rounded_up(PAGE_BYTES + _WORD_BYTES * slots, mmap.PAGESIZE))
        memory.view[:PAGE_BYTES] = header.pack(_NO_KEY)
        return cls(memory, header)

    @classmethod
    def found(cls, memory: Extent, name: bytes, extent_bytes: int) -> Ledger:
        """A kept one. Raises `BlockCorrupt` if it has another name, or fits no extent of that size."""
        header = parse_slab_header(bytes(memory.view[:PAGE_BYTES]))
        fits = memory.size_bytes == rounded_up(PAGE_BYTES + _WORD_BYTES * header.slots, mmap.PAGESIZE)
        if header.uid != name or not fits or header.slots != extent_bytes // header.slot_class.frame_bytes:
            raise BlockCorrupt("not the ledger of that extent")
        found = cls(memory, header)
        if max(found.generations, default=0) > MAX_GENERATION:
            found.generations.release()
            raise BlockCorrupt("a generation above the highest")
        return found

    @property
    def descriptor(self) -> int:
        """Of its memory."""
        return self._memory.descriptor

    def write(self, slot: int, generation: int) -> None:
        """A frame of that generation is readable there."""
        self.generations[slot] = generation

    def strike(self, slot: int) -> None:
        """No frame is readable there."""
        self.generations[slot] = 0

    def close(self) -> None:
        self.generations.release()
        self._memory.close()
