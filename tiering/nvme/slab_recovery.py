"""Recovers what a start finds in a directory: slabs by their headers, and then their frames, slab by slab.

    slab file > header verified > its records, or every frame header if the index is not trusted > in use
              > left alone: its bytes are kept, and count against the budget

A record that verifies is believed. A frame that only its header tells of stays unproven until its bytes were looked at.
Must never overwrite a slab whose header it cannot confirm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tiering.errors import BlockCorrupt, IndexDoubtful, TierError, TierUnavailable
from tiering.frame import MacKeys
from tiering.nvme.group_commit import BatchRequest, GroupCommit
from tiering.nvme.index_records import IndexRecords, NvmeSlab
from tiering.nvme.slab import (
    SLOTS_PER_RECORD,
    STAMP_SLAB,
    Entries,
    slab_number,
    split_entries,
    unproven_key,
    unread_key,
)
from tiering.nvme.slab_files import Files
from tiering.slab_header import PAGE_BYTES, KeyAbsent, SlabHeader, read_slab_header
from tiering.slots import FrameState
from tiering.tier import place_of, slot_of

_RESIDENT = int(FrameState.RESIDENT)
_STATE_OF_ENTRY = bytes([FrameState.FREE, FrameState.RESIDENT, FrameState.QUARANTINED]).ljust(256, b"\x00")
SCAN_BYTES = 1 << 20
HEADERS_PER_STEP = 1024
"""A rebuild reports its progress, and writes what it found, after this many slots."""

Progress = Callable[[int, int], None]
"""Called with slots done, and slots in all."""


class Found(NamedTuple):
    """Frames of one slab that were there at the start: places and entries, in the same order.

    is_proven: whether all of them were written to their end. If not, only a header says that a frame is there, and a
    crash may have cut it short, since the index that knew is lost. They stay unproven, over restarts, until `proved`.
    """

    header: SlabHeader
    places: list[int]
    entries: Entries
    is_proven: bool = True


class LeftAlone(NamedTuple):
    """A slab that cannot be used, and why; its bytes are kept and count against the budget.

    needs_keys: it was written under a key that is not at hand, and can be used once that is. unread: the disk did not
    give its header, and may in a later run.
    """

    name: str
    size_bytes: int
    reason: str
    needs_keys: bool = False
    unread: bool = False


class SlabRecovery:
    """The slabs that were there at the start, until each is in use."""

    def __init__(
        self, files: Files, keys: MacKeys, records: IndexRecords, commits: GroupCommit, *, ended_clean: bool
    ) -> None:
        """Reads the slab headers; slabs whose making was cut short are removed. ended_clean: the last session ended in
        order: none of its writes was cut short."""
        self._files = files
        self._keys = keys
        self._records = records
        self._commits = commits
        self._ended_clean = ended_clean
        self.left_alone: list[LeftAlone] = []
        self._to_load: list[NvmeSlab] = []
        self._unproven: set[int] = set()  # slabs
        for name, size in sorted(files.sizes().items()):
            if slab_number(name) != STAMP_SLAB:
                self._find(name, size)
        self.taken_bytes = sum(one.size_bytes for one in self.left_alone)
        self.taken_bytes += sum(slab.header.size_bytes for slab in self._to_load)

    @property
    def is_complete(self) -> bool:
        """Whether every slab is in use, with frames that were all proved."""
        return not self._to_load and not self._unproven

    # Slab headers --------------------------------------------------------------------------------------------------

    def _find(self, name: str, size: int) -> None:
        try:
            if slab_number(name) < 0:
                raise BlockCorrupt("not the name of a slab")
            if self._is_unfinished(name, size):
                self._files.remove(name)
                return
            header = self._slab_header(name, size)
        except (BlockCorrupt, OSError) as error:
            needs_keys, unread = isinstance(error, KeyAbsent), isinstance(error, OSError)
            self.left_alone.append(LeftAlone(name, size, str(error), needs_keys, unread))
            return
        key = self._keys.slab_key(header.slot_class.tenant, header.key_id, header.epoch)
        assert key is not None
        self._to_load.append(NvmeSlab(header, key))

    def _is_unfinished(self, name: str, size: int) -> bool:
        try:
            self._slab_header(name, size)
            return False
        except KeyAbsent:
            return False
        except BlockCorrupt:
            pass
        if size < 2 * PAGE_BYTES or size % PAGE_BYTES:
            return False  # slabs are created in full size
        buffer = memoryview(bytearray(SCAN_BYTES))
        for offset in range(PAGE_BYTES, size - PAGE_BYTES, SCAN_BYTES):
            piece = buffer[: min(SCAN_BYTES, size - PAGE_BYTES - offset)]
            self._files.read(name, offset, piece)
            if bytes(piece).strip(b"\x00"):
                return False
        return True

    def _slab_header(self, name: str, size: int) -> SlabHeader:
        fault: Exception = BlockCorrupt("not the size of a slab")
        doubt: Exception | None = None
        for offset in (0, size - PAGE_BYTES) if size >= 2 * PAGE_BYTES and size % PAGE_BYTES == 0 else ():
            page = bytearray(PAGE_BYTES)
            try:
                self._files.read(name, offset, memoryview(page))
                header = read_slab_header(bytes(page), self._keys)
            except (KeyAbsent, OSError) as error:  # a damaged page may name any key
                doubt = error
                continue
            except BlockCorrupt as error:
                fault = error
                continue
            if header.number == slab_number(name) and header.size_bytes == size:
                return header
            fault = BlockCorrupt("the header of another slab")
        raise doubt or fault

    # Frames --------------------------------------------------------------------------------------------------------

    def load(self, progress: Progress | None = None) -> Iterator[Found]:
        """The frames, slab by slab; each slab is in use once it was handed out. Raises `TierUnavailable`."""
        total = sum(slab.slots.capacity for slab in self._to_load)
        done = 0
        slabs = [slab.number for slab in self._to_load]
        try:
            doubts, unread = self._records.doubts(), self._records.unread(slabs)
            self._unproven = self._records.unproven(slabs)
        except IndexDoubtful as error:
            raise TierUnavailable(f"the index cannot be loaded: {error}") from error
        while self._to_load:
            slab = self._to_load[0]
            is_unread = self._records.rebuilds or slab.number in unread
            try:
                damaged: set[int] = set()
                if is_unread:
                    entries = self._scan(slab, progress, done, total)
                else:
                    entries = self._records.entries(slab, damaged)
            except (OSError, TierError) as error:
                raise TierUnavailable(f"{slab.name} cannot be loaded: {error}") from error
            is_proven = slab.number not in self._unproven
            yield self._take_in(slab, entries, doubts, damaged)._replace(is_proven=is_proven)
            self._to_load.pop(0)
            done += slab.slots.capacity
            if progress is not None:
                progress(done, total)
        if self._records.is_rebuilding:
            self._records.is_rebuilding = False
            # Slabs that could not be read may be readable in a later run.
            numbers = [slab_number(one.name) for one in self.left_alone]
            marks = [(unread_key(number), b"") for number in numbers if number > 0]
            try:
                self._commits.join(BatchRequest(changes=marks))
            except TierUnavailable:
                self._records.is_rebuilding = True
                raise
        elif unread:
            self._commits.join(BatchRequest())

    def _scan(self, slab: NvmeSlab, progress: Progress | None, done: int, total: int) -> Entries:
        found = []
        for first in range(0, slab.slots.capacity, HEADERS_PER_STEP):
            last = min(first + HEADERS_PER_STEP, slab.slots.capacity)
            found.append(self._records.headers(slab, range(first, last)).tobytes())
            if progress is not None:
                progress(done + first, total)
        entries = split_entries(b"".join(found))
        is_proven = self._records.rebuilds and self._ended_clean
        if not is_proven:
            self._unproven.add(slab.number)
        self._records.build(slab, entries, is_proven=is_proven)  # durable with the batch that ends the rebuild
        return entries

    def _take_in(
        self, slab: NvmeSlab, entries: Entries, doubts: dict[int, list[int]], damaged: Collection[int]
    ) -> Found:
        states = bytearray(entries["state"].tobytes().translate(_STATE_OF_ENTRY))
        mine = [place_of(slab.number, slot) for slot in doubts.get(slab.number, ()) if slot < slab.slots.capacity]
        for place in mine:
            state = states[slot_of(place)]
            # A record that verifies overrides a doubt, which has no MAC; a header read in its place does not.
            if state == FrameState.FREE or (state == _RESIDENT and slot_of(place) // SLOTS_PER_RECORD in damaged):
                states[slot_of(place)] = FrameState.RESERVED
        slab.slots.load(bytes(states))
        self._commits.take_in(slab, [place for place in mine if states[slot_of(place)] == FrameState.RESERVED])
        held = np.flatnonzero(np.frombuffer(states, np.uint8) == _RESIDENT)
        chosen = entries if len(held) == len(entries) else entries[held]
        return Found(slab.header, (held + place_of(slab.number, 0)).tolist(), chosen)

    def proved(self, slabs: Iterable[int]) -> None:
        """All incomplete frames of these slabs were given up; this is durable on return. Raises `TierUnavailable`."""
        numbers = [number for number in slabs if number in self._unproven]
        if numbers:
            self._commits.join(BatchRequest(changes=[(unproven_key(number), None) for number in numbers]))
            self._unproven.difference_update(numbers)

    def retired(self, number: int) -> None:
        """A slab was given back, and its mark in the index with it."""
        self._unproven.discard(number)
