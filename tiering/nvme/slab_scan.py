"""Reads the slots of a slab: frame headers alone where a start does not trust the index, or whole frames for fsck.

Many reads are in flight at once, and frames close together are read in one piece, so that the disk is the limit. A
header that fails any check is no frame. One that cannot be read at all may be anything: to a start its slot counts as
bad, unless so much of the slab cannot be read that the disk, and not a sector, is at fault.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import NamedTuple

from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, MacKeys, open_header, parse_header, verify_payload
from tiering.nvme.slab import BAD, ENTRY, Entries, entry_of, entry_of_header, split_entries
from tiering.nvme.slab_files import Files, private_pages
from tiering.slab_header import SlabHeader
from tiering.tier import SlotClass

SPAN_BYTES = 1 << 20
"""Read at a time if frames are small; for larger ones, up to a quarter of it, the payloads in between are read too."""
MOST_UNREADABLE = 8
"""Unreadable headers in one call; beyond it the disk is not trusted with the rest."""
TRIES = 2

_NOTHING = bytes(ENTRY.itemsize)
_BAD = entry_of(bytes(32), bytes(32), 0, 0, 0, 0, BAD)
_ZERO_HEADER = bytes(HEADER_BYTES)

_log = logging.getLogger(__name__)


class Seen(IntEnum):
    """What a slot contains, without regard to the index."""

    EMPTY = 0
    GOOD = 1
    DAMAGED_HEADER = 2  # neither zeros nor a header that verifies and belongs in this slab
    DAMAGED_PAYLOAD = 3
    UNREADABLE_HEADER = 4
    UNREADABLE_PAYLOAD = 5


class SlotFound(NamedTuple):
    """What was found in a slot. entry: the index entry of its header, of no frame if that does not verify. detail: what
    is wrong, for people."""

    seen: Seen
    entry: bytes = _NOTHING
    detail: str = ""


class SlabScan:
    """Reads slots of slabs with so many threads. keys: None believes headers, and checks digests alone."""

    def __init__(self, files: Files, keys: MacKeys | None, threads: int) -> None:
        self._files = files
        self._keys = keys
        self._threads = threads

    def entries(self, name: str, slab: SlabHeader, slots: range) -> Entries:
        """The entries by these slots' headers. Raises `OSError` if too many cannot be read."""
        found = self._look(name, slab, slots, HEADER_BYTES)
        unreadable = sum(one.seen is Seen.UNREADABLE_HEADER for one in found)
        if unreadable > MOST_UNREADABLE:
            raise OSError(f"{unreadable} of {len(slots)} headers cannot be read")
        if unreadable:
            _log.warning("%s: %d frame headers cannot be read; their slots are not used any more", name, unreadable)
        return split_entries(b"".join(_BAD if one.seen is Seen.UNREADABLE_HEADER else one.entry for one in found))

    def frames(self, name: str, slab: SlabHeader, slots: range) -> list[SlotFound]:
        """What these slots contain, each frame read and verified to its end."""
        return self._look(name, slab, slots, slab.slot_class.frame_bytes)

    def _look(self, name: str, slab: SlabHeader, slots: range, looked_at_bytes: int) -> list[SlotFound]:
        """looked_at_bytes: of each frame, from its start."""
        frame_bytes = slab.slot_class.frame_bytes
        together = SPAN_BYTES // frame_bytes if 4 * frame_bytes <= SPAN_BYTES else 1
        share = together * max(1, len(slots) // (4 * self._threads * together))
        shares = [range(first, min(first + share, slots.stop)) for first in range(slots.start, slots.stop, share)]

        def read(mine: range) -> list[SlotFound]:
            buffer = private_pages((together - 1) * frame_bytes + looked_at_bytes).view
            found: list[SlotFound] = []
            for first in range(mine.start, mine.stop, together):
                run = range(first, min(first + together, mine.stop))
                found += self._read(name, slab, run, buffer[: (len(run) - 1) * frame_bytes + looked_at_bytes])
            return found

        if self._threads == 1 or len(shares) == 1:
            pieces = [read(mine) for mine in shares]
        else:
            with ThreadPoolExecutor(self._threads, "kv-scan") as pool:
                pieces = list(pool.map(read, shares))
        return [one for piece in pieces for one in piece]

    def _read(self, name: str, slab: SlabHeader, slots: range, into: memoryview) -> list[SlotFound]:
        step = slab.slot_class.frame_bytes
        looked_at_bytes = len(into) - (len(slots) - 1) * step
        for tries_left in reversed(range(TRIES)):
            try:
                self._files.read(name, slab.offset(slots.start), into)
                break
            except OSError as error:
                if len(slots) > 1:
                    one = into[:looked_at_bytes]
                    return [self._read(name, slab, range(slot, slot + 1), one)[0] for slot in slots]
                if not tries_left:
                    return [self._unreadable(name, slab, slots, into, error)]
        return [self._found(slab, into[at : at + looked_at_bytes]) for at in range(0, len(into), step)]

    def _unreadable(self, name: str, slab: SlabHeader, slot: range, frame: memoryview, error: OSError) -> SlotFound:
        if len(frame) == HEADER_BYTES:
            return SlotFound(Seen.UNREADABLE_HEADER, detail=f"its header: {error.strerror}")
        (found,) = self._read(name, slab, slot, frame[:HEADER_BYTES])
        if found.seen is not Seen.GOOD:
            return found
        return found._replace(seen=Seen.UNREADABLE_PAYLOAD, detail=f"its payload: {error.strerror}")

    def _found(self, slab: SlabHeader, frame: memoryview) -> SlotFound:
        raw = bytes(frame[:HEADER_BYTES])
        if raw == _ZERO_HEADER:
            return SlotFound(Seen.EMPTY)
        entry = b""
        try:
            header = parse_header(raw) if self._keys is None else open_header(raw, self._keys)
            stamp = header.stamp
            if SlotClass(stamp.tenant, stamp.namespace, stamp.part, stamp.frame_bytes) != slab.slot_class:
                raise BlockCorrupt("a frame of another slot class than the slab's")
            entry = entry_of_header(header)
            if len(frame) > HEADER_BYTES:
                verify_payload(header, frame[HEADER_BYTES:])
        except BlockCorrupt as error:
            seen = Seen.DAMAGED_PAYLOAD if entry else Seen.DAMAGED_HEADER
            return SlotFound(seen, entry or _NOTHING, str(error))
        return SlotFound(Seen.GOOD, entry)
