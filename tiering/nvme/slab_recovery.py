"""Recovers what a start finds in a directory: slabs by their headers, and then their frames, slab by slab.

    slab file > header verified > its records, or every frame header if the index is not trusted > in use
              > left alone: its bytes are kept, and count against the budget

A record that verifies is believed. A frame that only its header tells of stays unproven until its bytes were looked at.
Must never overwrite a slab whose header it cannot confirm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tiering.errors import BlockCorrupt, IndexDoubtful, TierError, TierUnavailable
from tiering.frame import MacKeys
from tiering.nvme.group_commit import BatchRequest, GroupCommit
from tiering.nvme.index_records import IndexRecords, NvmeSlab
from tiering.nvme.slab import (
    SLOTS_PER_RECORD,
    STAMP_SLAB,
    UNPROVEN,
    UNREAD,
    Entries,
    mark_key,
    slab_name,
    slab_number,
    split_entries,
)
from tiering.nvme.slab_files import Files, read_page
from tiering.slab_header import PAGE_BYTES, KeyAbsent, SlabHeader, parse_slab_header, read_slab_header
from tiering.slots import FrameState
from tiering.tier import place_of

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


class HeaderCopy(NamedTuple):
    """One of a slab's two header pages. page: nothing if the disk did not give it. header: as parsed, to be believed
    where `fault` is None. fault: why it does not count, a `BlockCorrupt` or an `OSError`."""

    offset: int
    page: bytes
    header: SlabHeader | None
    fault: Exception | None


def header_copies(files: Files, keys: MacKeys, name: str, size_bytes: int) -> Iterator[HeaderCopy]:
    """The first page of a slab file, then the last one, each read when it is asked for. Raises `BlockCorrupt` if it
    cannot be a slab's file."""
    if slab_number(name) < 0:
        raise BlockCorrupt("not the name of a slab")
    if size_bytes < 2 * PAGE_BYTES or size_bytes % PAGE_BYTES:
        raise BlockCorrupt(f"{size_bytes} bytes are not the size of a slab")
    for offset in (0, size_bytes - PAGE_BYTES):
        page, header = b"", None
        fault: Exception | None = None
        try:
            page = read_page(files, name, offset)
            header = read_slab_header(page, keys)
        except KeyAbsent as error:  # a damaged page may name any key
            header, fault = parse_slab_header(page), error
        except (BlockCorrupt, OSError) as error:
            fault = error
        if header is not None and (header.number, header.size_bytes) != (slab_number(name), size_bytes):
            says = f"it says {header.size_bytes} bytes and the file has {size_bytes}"
            if header.number != slab_number(name):
                says = f"the header of slab {slab_name(header.number)}"
            header, fault = None, BlockCorrupt(says) if fault is None else KeyAbsent(says)
        yield HeaderCopy(offset, page, header, fault)


def never_held_frames(files: Files, name: str, size_bytes: int, faults: Sequence[Exception]) -> bool:
    """Whether the making of a slab was cut short, so that it may be removed. faults: of both header pages. Raises
    `OSError`."""
    if any(_may_verify_later(fault) for fault in faults):
        return False
    buffer = memoryview(bytearray(SCAN_BYTES))
    for offset in range(PAGE_BYTES, size_bytes - PAGE_BYTES, SCAN_BYTES):
        piece = buffer[: min(SCAN_BYTES, size_bytes - PAGE_BYTES - offset)]
        files.read(name, offset, piece)
        if bytes(piece).strip(b"\x00"):
            return False
    return True


def _may_verify_later(fault: Exception) -> bool:
    return isinstance(fault, (KeyAbsent, OSError))


def slot_states(entries: Entries, doubts: Iterable[int], damaged: Collection[int]) -> bytearray:
    """A `FrameState` for each slot of a slab; RESERVED: in doubt, so what is there must never count.

    doubts: slots that the index has in doubt. damaged: records whose entries were taken from headers. A record that
    verifies overrides a doubt, which has no MAC; a header read in its place does not.
    """
    states = bytearray(entries["state"].tobytes().translate(_STATE_OF_ENTRY))
    for slot in doubts:
        if slot < len(states):
            state = states[slot]
            if state == FrameState.FREE or (state == _RESIDENT and slot // SLOTS_PER_RECORD in damaged):
                states[slot] = FrameState.RESERVED
    return states


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
        faults: list[Exception] = []
        try:
            for copy in header_copies(self._files, self._keys, name, size):
                if copy.fault is None:
                    assert copy.header is not None
                    owner = copy.header.slot_class
                    key = self._keys.slab_key(owner.tenant, copy.header.key_id, copy.header.epoch)
                    assert key is not None
                    self._to_load.append(NvmeSlab(copy.header, key))
                    return
                faults.append(copy.fault)
            if never_held_frames(self._files, name, size, faults):
                self._files.remove(name)
                return
        except (BlockCorrupt, OSError) as error:
            faults = [error]
        fault = next((one for one in faults if _may_verify_later(one)), faults[-1])
        needs_keys, unread = isinstance(fault, KeyAbsent), isinstance(fault, OSError)
        self.left_alone.append(LeftAlone(name, size, str(fault), needs_keys, unread))

    # Frames --------------------------------------------------------------------------------------------------------

    def load(self, progress: Progress) -> Iterator[Found]:
        """The frames, slab by slab; each slab is in use once it was handed out. Raises `TierUnavailable`."""
        total = sum(slab.slots.capacity for slab in self._to_load)
        done = 0
        slabs = [slab.number for slab in self._to_load]
        try:
            doubts, unread = self._records.doubts(), self._records.marked(UNREAD, slabs)
            self._unproven = self._records.marked(UNPROVEN, slabs)
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
                    entries, damaged, _ = self._records.entries(slab)
            except (OSError, TierError) as error:
                raise TierUnavailable(f"{slab.name} cannot be loaded: {error}") from error
            is_proven = slab.number not in self._unproven
            yield self._take_in(slab, entries, doubts, damaged)._replace(is_proven=is_proven)
            self._to_load.pop(0)
            done += slab.slots.capacity
            progress(done, total)
        if self._records.is_rebuilding:
            self._records.is_rebuilding = False
            # Slabs that could not be read may be readable in a later run.
            numbers = [slab_number(one.name) for one in self.left_alone]
            marks = [(mark_key(UNREAD, number), b"") for number in numbers if number > 0]
            try:
                self._commits.join(BatchRequest(changes=marks))
            except TierUnavailable:
                self._records.is_rebuilding = True
                raise
        elif unread:
            self._commits.join(BatchRequest())

    def _scan(self, slab: NvmeSlab, progress: Progress, done: int, total: int) -> Entries:
        found = []
        for first in range(0, slab.slots.capacity, HEADERS_PER_STEP):
            last = min(first + HEADERS_PER_STEP, slab.slots.capacity)
            found.append(self._records.headers(slab, range(first, last)).tobytes())
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
        mine = doubts.get(slab.number, [])
        states = slot_states(entries, mine, damaged)
        slab.slots.load(bytes(states))
        in_doubt = [slot for slot in mine if slot < slab.slots.capacity and states[slot] == FrameState.RESERVED]
        self._commits.take_in(slab, [place_of(slab.number, slot) for slot in in_doubt])
        held = np.flatnonzero(np.frombuffer(states, np.uint8) == _RESIDENT)
        chosen = entries if len(held) == len(entries) else entries[held]
        return Found(slab.header, (held + place_of(slab.number, 0)).tolist(), chosen)

    def proved(self, slabs: Iterable[int]) -> None:
        """All incomplete frames of these slabs were given up; this is durable on return. Raises `TierUnavailable`."""
        numbers = [number for number in slabs if number in self._unproven]
        if numbers:
            self._commits.join(BatchRequest(changes=[(mark_key(UNPROVEN, number), None) for number in numbers]))
            self._unproven.difference_update(numbers)

    def retired(self, number: int) -> None:
        """A slab was given back, and its mark in the index with it."""
        self._unproven.discard(number)
