"""What the index of a directory says of its slabs, and how many batches it has taken in.

    record     32 neighbouring slots -> their entries; a damaged one is replaced by the headers of its slots
    doubt      a place whose header may be valid although no record holds it
    unread     a slab whose headers could not be read when the index was built
    unproven   a slab whose records were built from headers, which a crash may have left before incomplete frames
    meta       which index this is, and how many batches it has taken in: the stamp tells whether it belongs here

Thread-safe. Must never trust an index that the stamp does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import NamedTuple

from tiering.errors import BlockCorrupt, IndexDoubtful, TierError
from tiering.nvme.frame_index import Change, FrameIndex, IndexMaker
from tiering.nvme.slab import (
    BAD,
    DOUBTS,
    EMPTY,
    ENTRY,
    META,
    RECORDS,
    SLOTS_PER_RECORD,
    UNPROVEN,
    UNREAD,
    Entries,
    StoreStamp,
    mark_key,
    open_meta,
    open_record,
    pack_meta,
    pack_record,
    record_key,
    slab_name,
    split_doubt_key,
    split_entries,
    split_record_key,
)
from tiering.nvme.slab_scan import SlabScan
from tiering.slab_header import SlabHeader
from tiering.slots import FrameState, Piece, SlotLedger
from tiering.tier import extent_of, slot_of

_RESIDENT = int(FrameState.RESIDENT)
_STATE_AT = int(ENTRY.fields["state"][1])  # type: ignore[index]
_RECORD_BYTES = SLOTS_PER_RECORD * ENTRY.itemsize
_NO_ENTRIES = bytes(_RECORD_BYTES)


class NvmeSlab(Piece):
    """A slab in use."""

    def __init__(self, header: SlabHeader, mac_key: bytes) -> None:
        super().__init__(header.number, header.slot_class, header.slots)
        self.header = header
        self.mac_key = mac_key
        self.name = slab_name(header.number)
        self.evictions = 0


class IndexState(Enum):
    """Whether a start can use the index; if not, it reads every header."""

    GOOD = "good"
    MISSING = "missing"
    DOUBTFUL = "doubtful"  # failed a check of its structure
    FOREIGN = "foreign"  # belongs to another directory, or is incomplete
    STALE = "stale"  # older than the stamp, or changed by another program


class KnownIndex(NamedTuple):
    """An index beside a stamp. opened: None unless `state` is good; its reader closes it. detail: why, for people.
    uid, changes: as `IndexRecords` has them."""

    opened: FrameIndex | None
    state: IndexState
    detail: str
    uid: bytes = b""
    changes: int = 0


def known_index(open_index: Callable[[], FrameIndex | None], stamp: StoreStamp | None) -> KnownIndex:
    """The index, if it is the one that the stamp knows. open_index: None where there is none."""
    index = None
    try:
        index = open_index()
        if index is None:
            return KnownIndex(None, IndexState.MISSING, "there is none")
        meta = open_meta(index.get([META])[0])
    except IndexDoubtful as error:
        if index is not None:
            index.close()
        return KnownIndex(None, IndexState.DOUBTFUL, str(error))
    if stamp is not None and meta is not None and stamp.knows(*meta):
        return KnownIndex(index, IndexState.GOOD, f"batches taken in: {meta[1]}", *meta)
    index.close()
    if meta is None:
        return KnownIndex(None, IndexState.FOREIGN, "it does not say whose it is, as one that was not finished")
    if stamp is None:
        return KnownIndex(None, IndexState.FOREIGN, "there is no stamp to compare it with")
    if meta[0] != stamp.index_uid:
        return KnownIndex(None, IndexState.FOREIGN, "it belongs to another directory")
    detail = f"it has taken in {meta[1]} batches, and the stamp says {stamp.changes}"
    return KnownIndex(None, IndexState.STALE, detail)


class SlabEntries(NamedTuple):
    """What an index says of a slab's slots. damaged: records that failed a check, so that the entries of their slots
    are those of headers. faults: for people, in the order of the records' keys."""

    entries: Entries
    damaged: set[int]
    faults: list[str]


class IndexReader:
    """What an index says of slabs. Thread-safe."""

    def __init__(self, index: FrameIndex) -> None:
        self._index = index
        self._lock = threading.Lock()  # one call to the index at a time

    def slab_entries(self, slab: SlabHeader, mac_key: bytes, by_headers: Callable[[range], bytes]) -> SlabEntries:
        """A slab's records. by_headers: the entries of a run of slots by their headers, for damaged records."""
        with self._lock:
            pairs = list(self._index.iterate(record_key(slab.number, 0)[:5]))
        pieces = [_NO_ENTRIES] * -(-slab.slots // SLOTS_PER_RECORD)
        damaged: set[int] = set()
        faults: list[str] = []
        for key, value in pairs:
            try:
                _, record = split_record_key(key)
            except BlockCorrupt:
                faults.append("a record under no slot's name")
                continue
            first = record * SLOTS_PER_RECORD
            if first >= slab.slots:
                faults.append(f"a record of slots from {first} on")
                continue
            try:
                pieces[record] = open_record(slab, record, value, mac_key)
            except BlockCorrupt as error:
                slots = range(first, min(first + SLOTS_PER_RECORD, slab.slots))
                faults.append(f"{error}, for slots {first} to {slots.stop - 1}")
                damaged.add(record)
                pieces[record] = by_headers(slots)
        return SlabEntries(split_entries(b"".join(pieces)[: slab.slots * ENTRY.itemsize]), damaged, faults)

    def slabs(self) -> set[int]:
        """The slabs that have records."""
        with self._lock:
            keys = [key for key, _ in self._index.iterate(RECORDS)]
        slabs = set()
        for key in keys:
            with suppress(BlockCorrupt):
                slabs.add(split_record_key(key)[0])
        return slabs

    def doubts(self) -> dict[int, list[int]]:
        """Slots in doubt, by slab."""
        doubts: dict[int, list[int]] = {}
        with self._lock:
            keys = [key for key, _ in self._index.iterate(DOUBTS)]
        for key in keys:
            with suppress(BlockCorrupt):
                place = split_doubt_key(key)
                doubts.setdefault(extent_of(place), []).append(slot_of(place))
        return doubts

    def marked(self, mark: bytes, slabs: Collection[int]) -> set[int]:
        """Which of these slabs are `UNREAD`, to be read, or `UNPROVEN`, to be proved."""
        with self._lock:
            keys = {key for key, _ in self._index.iterate(mark)}
        return {number for number in slabs if mark_key(mark, number) in keys}

    def close(self) -> None:
        with self._lock:
            self._index.close()


class IndexRecords(IndexReader):
    """The index of a directory. uid: which one it is. changes: how many batches it has taken in."""

    def __init__(
        self,
        maker: IndexMaker,
        stamp: StoreStamp | None,
        new_uid: Callable[[], bytes],
        scanner: SlabScan,
        ledger: SlotLedger[NvmeSlab],
        *,
        has_slabs: bool,
    ) -> None:
        """Opens the index that the stamp knows or, without such a one, a new one, to be built from the headers of the
        slabs there are. ledger: the slabs in use."""
        self._scanner = scanner
        self._ledger = ledger
        self.rebuilds = False  # the index is not trusted: every header is to be read
        self.is_rebuilding = False  # until they have been, it has no uid: the next start would begin again
        known = known_index(partial(maker.open, clean=stamp.clean), stamp) if stamp is not None else None
        if known is not None and known.opened is not None:
            self.uid, self.changes = known.uid, known.changes
            super().__init__(known.opened)
            return
        self.rebuilds = self.is_rebuilding = has_slabs
        maker.discard()
        self.uid, self.changes = new_uid(), 0
        super().__init__(maker.open(clean=True))

    # Reading -------------------------------------------------------------------------------------------------------

    def entries(self, slab: NvmeSlab) -> SlabEntries:
        """A slab's records. Runs of slots whose record is damaged are read from their headers."""
        return self.slab_entries(slab.header, slab.mac_key, lambda slots: self.headers(slab, slots).tobytes())

    def headers(self, slab: NvmeSlab, slots: range) -> Entries:
        """The entries by these slots' headers; a header that fails any check is no frame."""
        return self._scanner.entries(slab.name, slab.header, slots)

    # Writing -------------------------------------------------------------------------------------------------------

    def edited(self, edits: dict[int, bytes | int]) -> list[Change]:
        """The changed records that hold these places. edits: place -> an entry, or the new state of its entry."""
        runs: dict[tuple[int, int], list[int]] = {}
        for place in edits:
            runs.setdefault((extent_of(place), slot_of(place) // SLOTS_PER_RECORD), []).append(place)
        changes: list[Change] = []
        with self._lock:
            values = self._index.get([record_key(*run) for run in runs])
            for (number, record), value in zip(runs, values, strict=True):
                slab = self._ledger.pieces[number]
                entries = bytearray(self._present(slab, record, value))
                for place in runs[number, record]:
                    at = slot_of(place) % SLOTS_PER_RECORD * ENTRY.itemsize
                    edit = edits[place]
                    if isinstance(edit, bytes):
                        entries[at : at + ENTRY.itemsize] = edit
                    elif edit == EMPTY:
                        entries[at : at + ENTRY.itemsize] = bytes(ENTRY.itemsize)
                    else:
                        entries[at + _STATE_AT] = edit
                changes.append(_change(slab, record, bytes(entries)))
        return changes

    def _present(self, slab: NvmeSlab, record: int, value: bytes | None) -> bytes:
        """A record's present entries; if it is damaged, those by the headers of readable frames."""
        if value is None:
            return _NO_ENTRIES
        try:
            return open_record(slab.header, record, value, slab.mac_key)
        except BlockCorrupt:
            first = record * SLOTS_PER_RECORD
            slots = range(first, min(first + SLOTS_PER_RECORD, slab.slots.capacity))
            entries = bytearray(self.headers(slab, slots).tobytes().ljust(_RECORD_BYTES, b"\x00"))
            for at, slot in enumerate(slots):
                state = slab.slots.states[slot]
                if state == FrameState.QUARANTINED:
                    entries[at * ENTRY.itemsize + _STATE_AT] = BAD
                elif state != _RESIDENT:  # a frame that is being written, or whose zeros are not written yet
                    entries[at * ENTRY.itemsize : (at + 1) * ENTRY.itemsize] = bytes(ENTRY.itemsize)
            return bytes(entries)

    def build(self, slab: NvmeSlab, entries: Entries, *, is_proven: bool) -> None:
        """Write the records of a slab that was read from its headers; they are durable with the next `write`."""
        whole = entries.tobytes()
        changes: list[Change] = [(mark_key(UNREAD, slab.number), None)]
        if not is_proven:
            changes.append((mark_key(UNPROVEN, slab.number), b""))
        for record in range(-(-slab.slots.capacity // SLOTS_PER_RECORD)):
            piece = whole[record * _RECORD_BYTES : (record + 1) * _RECORD_BYTES].ljust(_RECORD_BYTES, b"\x00")
            if piece.strip(b"\x00"):
                changes.append(_change(slab, record, piece))
        with self._lock:
            self._apply(changes)

    def write(self, changes: list[Change]) -> None:
        """One batch, durable when this returns. An index that is not being rebuilt counts it."""
        with self._lock:
            self._apply(changes)
            self._index.sync()

    def _apply(self, changes: list[Change]) -> None:
        if not self.is_rebuilding:
            self.changes += 1
            changes = [*changes, (META, pack_meta(self.uid, self.changes))]
        if changes:
            self._index.apply(changes)

    def has_refused(self) -> bool:
        """After a batch failed: whether the index is as it was before, by its count of batches."""
        try:
            with self._lock:
                meta = open_meta(self._index.get([META])[0])
        except (OSError, TierError):
            return False
        if self.is_rebuilding or meta != (self.uid, self.changes - 1):
            return False
        self.changes -= 1
        return True


def _change(slab: NvmeSlab, record: int, entries: bytes) -> Change:
    if not entries.strip(b"\x00"):
        return record_key(slab.number, record), None
    return record_key(slab.number, record), pack_record(slab.header, record, entries, slab.mac_key)
