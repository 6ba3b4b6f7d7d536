"""Reads every frame of a data directory and compares it with the index.

Two threads read windows of frames; results are compared in order, slot by slot. Without a slab's key, payloads are
checked against the digests in headers that themselves stay unverified. Must never write anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

from kvstore.fsck.headers import IN_DOUBT, UNKNOWN, WINDOW_BYTES, IndexView, page_aligned
from kvstore.fsck.result import Problems, Seen, SlabResult, SlabState, Slot
from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, FrameHeader, MacKeys, open_header, parse_header, verify_payload
from tiering.nvme.slab import BAD, EMPTY, ENTRY, HELD, entry_of, slab_name, slab_number
from tiering.nvme.slab_files import Files
from tiering.slab_header import SlabHeader
from tiering.tier import SlotClass

READERS = 2

ShowProgress = Callable[..., None]
"""Called with what is being done and, where known, steps done of how many."""
_ZERO_HEADER = bytes(HEADER_BYTES)


class Frame(NamedTuple):
    """What a slot contains. entry: what the index should say of it, if its header verifies."""

    seen: Seen
    entry: bytes = b""
    detail: str = ""


def _frame(frame: memoryview, slot_class: SlotClass, keys: MacKeys | None) -> Frame:
    found, header = _header(bytes(frame[:HEADER_BYTES]), slot_class, keys)
    if header is None:
        return found
    try:
        verify_payload(header, frame[HEADER_BYTES:])
    except BlockCorrupt as error:
        return Frame(Seen.DAMAGED_PAYLOAD, found.entry, str(error))
    return found


def _header(raw: bytes, slot_class: SlotClass, keys: MacKeys | None) -> tuple[Frame, FrameHeader | None]:
    if raw == _ZERO_HEADER:
        return Frame(Seen.EMPTY), None
    try:
        header = parse_header(raw) if keys is None else open_header(raw, keys)
    except BlockCorrupt as error:
        return Frame(Seen.DAMAGED_HEADER, b"", str(error)), None
    stamp = header.stamp
    if SlotClass(stamp.tenant, stamp.namespace, stamp.part, stamp.frame_bytes) != slot_class:
        return Frame(Seen.DAMAGED_HEADER, b"", "a frame of another slot class than the slab's"), None
    entry = entry_of(
        header.prefix_key,
        header.parent,
        header.block_index,
        header.generation,
        header.priority,
        header.expires_at,
    )
    return Frame(Seen.GOOD, entry), header


def judged(frame: Frame, state: int, entry: bytes) -> Slot:
    """Classify a slot: its contents against the index."""
    if state == BAD:
        return Slot.GIVEN_UP
    if frame.seen is Seen.UNREADABLE_HEADER:
        return Slot.UNREADABLE
    if state == IN_DOUBT:
        return Slot.IN_DOUBT
    damage = _DAMAGE.get(frame.seen)
    if damage is not None:
        return damage
    if frame.seen is Seen.EMPTY:
        return Slot.MISSING if state == HELD else Slot.EMPTY
    if state == HELD:
        return Slot.GOOD if frame.entry == entry else Slot.OTHER_FRAME
    return Slot.UNNAMED if state == EMPTY else Slot.GOOD


_DAMAGE = {
    Seen.DAMAGED_HEADER: Slot.DAMAGED_HEADER,
    Seen.DAMAGED_PAYLOAD: Slot.DAMAGED_PAYLOAD,
    Seen.UNREADABLE_PAYLOAD: Slot.UNREADABLE,
}
_DETAIL = {
    Slot.MISSING: "the index names a frame, and the slot is empty",
    Slot.OTHER_FRAME: "the index names another block or generation",
    Slot.UNNAMED: "the index does not name this frame",
}


# All of it ------------------------------------------------------------------------------------------------------------


class Examiner:
    """Compares slabs with an index, slot by slot, and reads them with two threads. view: of a trusted index, or
    None."""

    def __init__(
        self, files: Files, keys: MacKeys, view: IndexView | None, problems: Problems, show: ShowProgress
    ) -> None:
        self._files = files
        self._keys = keys
        self._view = view
        self._problems = problems
        self._show = show
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="kv-fsck")
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()
        self._buffer_bytes = 0
        self.checked_bytes = 0

    def examine(self, slabs: Sequence[SlabResult]) -> None:
        """Read every frame; fills in each slab's `seen` and `slots`. Called once."""
        total = sum(slab.size_bytes for slab in slabs)
        try:
            for slab in slabs:
                before = self.checked_bytes
                self._name_faults(slab)
                if slab.header is not None:
                    self._read(slab, total)
                self.checked_bytes = before + slab.size_bytes
        finally:
            self._pool.shutdown(cancel_futures=True)
        there = {slab_number(slab.name) for slab in slabs}
        for number in sorted(self._view.slabs() - there) if self._view is not None else ():
            fault = "the index names frames in it, and the file is not there"
            self._problems.add("missing_slab", fault, slab_name(number))

    def _read(self, slab: SlabResult, total: int) -> None:
        header = slab.header
        assert header is not None
        key = self._keys.slab_key(header.slot_class.tenant, header.key_id, header.epoch)
        states, entries = bytearray([UNKNOWN]) * header.slots, bytearray()
        if self._view is not None:
            states, entries = self._view.says(header, key, self._problems)
        slab.seen, slab.slots = bytearray(header.slots), bytearray(header.slots)
        for first, frames in self._frames(slab):
            for slot, frame in enumerate(frames, first):
                entry = bytes(entries[slot * ENTRY.itemsize : (slot + 1) * ENTRY.itemsize])
                verdict = judged(frame, states[slot], entry)
                slab.seen[slot], slab.slots[slot] = frame.seen, verdict
                if verdict > Slot.GIVEN_UP:
                    detail = _DETAIL.get(verdict) or frame.detail
                    self._problems.add(verdict.name.lower(), detail, slab.name, slot)
            self.checked_bytes += len(frames) * header.slot_class.frame_bytes
            self._show(f"checking {slab.name}", self.checked_bytes, total)

    def _name_faults(self, slab: SlabResult) -> None:
        if slab.state is SlabState.ONE_HEADER:
            self._problems.add("damaged_slab_header", slab.detail, slab.name)
        elif slab.state is SlabState.UNUSABLE:
            self._problems.add("unusable_slab", slab.detail, slab.name)
        elif slab.state is SlabState.NEEDS_KEYS:
            self._problems.add("needs_keys", "it was written under keys that are not at hand", slab.name)

    def _frames(self, slab: SlabResult) -> Iterator[tuple[int, Sequence[Frame]]]:
        """Runs of neighbouring slots in order, each with its first slot."""
        header = slab.header
        assert header is not None
        frame_bytes = header.slot_class.frame_bytes
        step = max(1, WINDOW_BYTES // frame_bytes)
        self._make_buffers(min(step, header.slots) * frame_bytes)
        keys = None if slab.state is SlabState.NEEDS_KEYS else self._keys

        def window(first: int) -> Sequence[Frame]:
            buffer = self._buffers.get()
            try:
                return self._window(slab.name, header, range(first, min(first + step, header.slots)), keys, buffer)
            finally:
                self._buffers.put(buffer)

        firsts = range(0, header.slots, step)
        yield from zip(firsts, self._pool.map(window, firsts), strict=True)

    def _make_buffers(self, size_bytes: int) -> None:
        if size_bytes > self._buffer_bytes:
            self._buffers, self._buffer_bytes = SimpleQueue(), size_bytes
            for _ in range(READERS):
                self._buffers.put(page_aligned(size_bytes))

    def _window(
        self, name: str, header: SlabHeader, slots: range, keys: MacKeys | None, buffer: memoryview
    ) -> Sequence[Frame]:
        frame_bytes = header.slot_class.frame_bytes
        try:
            self._files.read(name, header.offset(slots[0]), buffer[: len(slots) * frame_bytes])
        except OSError:
            return [self._alone(name, header, slot, keys, buffer[:frame_bytes]) for slot in slots]
        frames = (buffer[at * frame_bytes : (at + 1) * frame_bytes] for at in range(len(slots)))
        return [_frame(frame, header.slot_class, keys) for frame in frames]

    def _alone(self, name: str, header: SlabHeader, slot: int, keys: MacKeys | None, frame: memoryview) -> Frame:
        try:
            self._files.read(name, header.offset(slot), frame)
            return _frame(frame, header.slot_class, keys)
        except OSError as error:
            fault = error.strerror
        try:
            self._files.read(name, header.offset(slot), frame[:HEADER_BYTES])
        except OSError as error:
            return Frame(Seen.UNREADABLE_HEADER, b"", f"its header: {error.strerror}")
        found, _ = _header(bytes(frame[:HEADER_BYTES]), header.slot_class, keys)
        return Frame(Seen.UNREADABLE_PAYLOAD, found.entry, f"its payload: {fault}") if found.entry else found
