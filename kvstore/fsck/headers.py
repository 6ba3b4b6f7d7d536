"""Reads a data directory's stamp, slab headers and index.

It judges each as the next start would, but opens nothing for writing, mends nothing and removes nothing: it reports
what the start would do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvstore.fsck.result import IndexState, Problems, SlabResult, SlabState, StampResult
from tiering.errors import BlockCorrupt, IndexDoubtful
from tiering.frame import HEADER_BYTES, MacKeys
from tiering.nvme.frame_index import FrameIndex
from tiering.nvme.slab import (
    DOUBTS,
    EMPTY,
    ENTRY,
    META,
    RECORDS,
    SLOTS_PER_RECORD,
    STAMP_PAGES,
    STAMP_SLAB,
    UNREAD,
    StoreStamp,
    latest_stamp,
    open_meta,
    open_record,
    record_key,
    slab_name,
    slab_number,
    split_doubt_key,
    split_entries,
    split_record_key,
    unread_key,
)
from tiering.nvme.slab_files import Files
from tiering.slab_header import PAGE_BYTES, KeyAbsent, SlabHeader, parse_slab_header, read_slab_header
from tiering.tier import extent_of, slot_of

WINDOW_BYTES = 4 << 20
"""Read at once; a larger frame is read as a whole."""

IN_DOUBT, UNKNOWN = 254, 255
"""States of a slot besides EMPTY, HELD and BAD. UNKNOWN: the index says nothing, so the frame's header decides."""


# The stamp ------------------------------------------------------------------------------------------------------------


def look_at_stamp(files: Files) -> tuple[StoreStamp | None, StampResult]:
    """The newest stamp, and faults of its file. Raises `OtherFormat`."""
    name = slab_name(STAMP_SLAB)
    size = files.sizes().get(name)
    if size is None:
        return None, StampResult(None, None, ["the stamp is missing"])
    if size != STAMP_PAGES * PAGE_BYTES:
        return None, StampResult(None, None, [f"the stamp has {size} bytes instead of {STAMP_PAGES * PAGE_BYTES}"])
    pages, faults = [], []
    for number in range(STAMP_PAGES):
        page = bytearray(PAGE_BYTES)
        try:
            files.read(name, number * PAGE_BYTES, memoryview(page))
        except OSError as error:
            faults.append(f"page {number} of the stamp cannot be read: {error.strerror}")
            page = bytearray(b"\xff" * PAGE_BYTES)
        pages.append(bytes(page))
    last = latest_stamp(pages)
    if last is None:
        return None, StampResult(None, None, faults or ["neither page of the stamp is whole"])
    other = pages[1 - last.page]
    is_first = last.sequence == 1 and not other.strip(b"\x00")
    if not faults and not is_first and latest_stamp(pages, besides=last) is None:
        faults.append(f"page {1 - last.page} of the stamp is damaged; the other one counts")
    return last, StampResult(last.session, last.clean, faults)


# Slab headers ---------------------------------------------------------------------------------------------------------


def look_at_slabs(files: Files, keys: MacKeys) -> list[SlabResult]:
    """Every slab but the stamp, judged by its two header pages; ordered by name."""
    stamp = slab_name(STAMP_SLAB)
    return [_slab(files, keys, name, size) for name, size in sorted(files.sizes().items()) if name != stamp]


def _slab(files: Files, keys: MacKeys, name: str, size: int) -> SlabResult:
    if slab_number(name) < 0:
        return SlabResult(name, size, SlabState.UNUSABLE, "not the name of a slab")
    if size < 2 * PAGE_BYTES or size % PAGE_BYTES:
        return SlabResult(name, size, SlabState.UNUSABLE, f"{size} bytes are not the size of a slab")
    copies = [_copy(files, keys, name, size, offset) for offset in (0, size - PAGE_BYTES)]
    good = next((copy for copy in copies if copy.verified), None)
    if good is not None:
        bad = tuple(copy.offset for copy in copies if copy.page != good.page)
        faults = [f"the {copy.which} header: {copy.fault or 'not the same'}" for copy in copies if copy.offset in bad]
        state = SlabState.ONE_HEADER if bad else SlabState.GOOD
        return SlabResult(name, size, state, "; ".join(faults), good.header, good.page, bad)
    told = next((copy for copy in copies if copy.header is not None), None)
    if told is not None:
        return SlabResult(name, size, SlabState.NEEDS_KEYS, told.fault, told.header)
    if all(copy.page for copy in copies) and _holds_nothing(files, name, size):
        return SlabResult(name, size, SlabState.UNFINISHED, "it has no header and never held a frame")
    faults = [f"the {copy.which} header: {copy.fault}" for copy in copies]
    return SlabResult(name, size, SlabState.UNUSABLE, "; ".join(faults))


def _holds_nothing(files: Files, name: str, size: int) -> bool:
    buffer = page_aligned(WINDOW_BYTES)
    for offset in range(PAGE_BYTES, size - PAGE_BYTES, WINDOW_BYTES):
        piece = buffer[: min(WINDOW_BYTES, size - PAGE_BYTES - offset)]
        try:
            files.read(name, offset, piece)
        except OSError:
            return False
        if np.frombuffer(piece, np.uint8).any():
            return False
    return True


def page_aligned(size_bytes: int) -> memoryview:
    """Memory that direct I/O can read into without a copy."""
    memory = np.empty(size_bytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + size_bytes].data


class _Copy(NamedTuple):
    """One of a slab's two header pages. header: parsed, verified or not."""

    offset: int
    page: bytes
    header: SlabHeader | None
    verified: bool
    fault: str

    @property
    def which(self) -> str:
        return "last" if self.offset else "first"


def _copy(files: Files, keys: MacKeys, name: str, size: int, offset: int) -> _Copy:
    buffer = bytearray(PAGE_BYTES)
    try:
        files.read(name, offset, memoryview(buffer))
    except OSError as error:
        return _Copy(offset, b"", None, False, f"cannot be read: {error.strerror}")
    page, fault = bytes(buffer), ""
    try:
        header = read_slab_header(page, keys)
    except KeyAbsent as error:  # a damaged page may name any key
        header, fault = parse_slab_header(page), str(error)
    except BlockCorrupt as error:
        return _Copy(offset, page, None, False, str(error))
    if header.number != slab_number(name):
        return _Copy(offset, page, None, False, f"the header of slab {slab_name(header.number)}")
    if header.size_bytes != size:
        return _Copy(offset, page, None, False, f"it says {header.size_bytes} bytes and the file has {size}")
    frame_bytes = header.slot_class.frame_bytes
    if not header.slots or frame_bytes <= HEADER_BYTES or frame_bytes % PAGE_BYTES:
        return _Copy(offset, page, None, False, "impossible sizes")
    return _Copy(offset, page, header, not fault, fault)


# The index ------------------------------------------------------------------------------------------------------------


class IndexView:
    """A trusted index's view of slots. Reads all doubts at once, records slab by slab."""

    def __init__(self, index: FrameIndex) -> None:
        self._index = index
        self._doubts: dict[int, set[int]] = {}
        for key, _ in index.iterate(DOUBTS):
            try:
                place = split_doubt_key(key)
            except BlockCorrupt:
                continue
            self._doubts.setdefault(extent_of(place), set()).add(slot_of(place))
        self._unread = {key for key, _ in index.iterate(UNREAD)}

    def says(self, header: SlabHeader, mac_key: bytes | None, problems: Problems) -> tuple[bytearray, bytearray]:
        """A state and an entry for each slot.

        Records that fail a check are reported as problems. Their slots are UNKNOWN, and so are all slots of a slab
        whose key is missing or that was unreadable when the index was built.
        """
        states, entries = self._records(header, mac_key, problems)
        for slot in self._doubts.get(header.number, ()):
            if slot < header.slots:
                states[slot] = IN_DOUBT
        return states, entries

    def _records(self, header: SlabHeader, mac_key: bytes | None, problems: Problems) -> tuple[bytearray, bytearray]:
        name = slab_name(header.number)
        entries = bytearray(header.slots * ENTRY.itemsize)
        if mac_key is None or unread_key(header.number) in self._unread:
            return bytearray([UNKNOWN]) * header.slots, entries
        states = bytearray([EMPTY]) * header.slots
        for key, value in self._index.iterate(record_key(header.number, 0)[:5]):
            try:
                _, record = split_record_key(key)
            except BlockCorrupt:
                problems.add("index_record", "a record under no slot's name", name)
                continue
            first = record * SLOTS_PER_RECORD
            stop = min(first + SLOTS_PER_RECORD, header.slots)
            if first >= header.slots:
                problems.add("index_record", f"a record of slots from {first} on", name)
                continue
            try:
                opened = open_record(header, record, value, mac_key)[: (stop - first) * ENTRY.itemsize]
            except BlockCorrupt as error:
                problems.add("index_record", f"{error}, for slots {first} to {stop - 1}", name)
                states[first:stop] = bytes([UNKNOWN]) * (stop - first)
                continue
            states[first:stop] = split_entries(opened)["state"].tobytes()
            entries[first * ENTRY.itemsize : stop * ENTRY.itemsize] = opened
        return states, entries

    def slabs(self) -> set[int]:
        """Slabs that the index has records of."""
        found = set()
        for key, _ in self._index.iterate(RECORDS):
            try:
                found.add(split_record_key(key)[0])
            except BlockCorrupt:
                continue
        return found


def look_at_index(
    open_index: Callable[[], FrameIndex | None], stamp: StoreStamp | None
) -> tuple[FrameIndex | None, IndexState, str]:
    """The index, if the next start would trust it, else why not. The caller closes it."""
    index = None
    try:
        index = open_index()
        if index is None:
            return None, IndexState.MISSING, "there is none"
        meta = open_meta(index.get([META])[0])
    except IndexDoubtful as error:
        if index is not None:
            index.close()
        return None, IndexState.DOUBTFUL, str(error)
    if stamp is not None and meta is not None and stamp.knows(*meta):
        return index, IndexState.GOOD, f"batches taken in: {meta[1]}"
    index.close()
    if meta is None:
        return None, IndexState.FOREIGN, "it does not say whose it is, as one that was not finished"
    if stamp is None:
        return None, IndexState.FOREIGN, "there is no stamp to compare it with"
    if meta[0] != stamp.index_uid:
        return None, IndexState.FOREIGN, "it belongs to another directory"
    return None, IndexState.STALE, f"it has taken in {meta[1]} batches, and the stamp says {stamp.changes}"
