"""Reads the frame headers of a slab, when the index is not to be trusted.

Many reads are in flight at once, and frames close together are read in one piece, so that the disk is the limit. A
header that fails any check is no frame. One that cannot be read at all may be anything: its slot counts as bad, unless
so much of the slab cannot be read that the disk, and not a sector, is at fault.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from tiering.errors import BlockCorrupt
from tiering.files import private_pages
from tiering.frame import HEADER_BYTES, MacKeys, open_header
from tiering.nvme.slab import BAD, ENTRY, Entries, entry_of, entry_of_header, split_entries
from tiering.nvme.slab_files import Files
from tiering.slab_header import SlabHeader
from tiering.tier import SlotClass

SPAN_BYTES = 1 << 20
"""Read at a time if frames are small; for larger ones, up to a quarter of it, the payloads in between are read too."""
MOST_UNREADABLE = 8
"""Unreadable headers in one call; beyond it the disk is not trusted with the rest."""
TRIES = 2

_NOTHING = bytes(ENTRY.itemsize)
_BAD = entry_of(bytes(32), bytes(32), 0, 0, 0, 0, BAD)

_log = logging.getLogger(__name__)


class HeaderScan:
    """Reads headers of slabs with so many threads."""

    def __init__(self, files: Files, keys: MacKeys, threads: int) -> None:
        self._files = files
        self._keys = keys
        self._threads = threads

    def entries(self, name: str, slab: SlabHeader, slots: range) -> Entries:
        """The entries by these slots' headers. Raises `OSError` if too many cannot be read."""
        frame_bytes = slab.slot_class.frame_bytes
        together = SPAN_BYTES // frame_bytes if 4 * frame_bytes <= SPAN_BYTES else 1
        share = together * max(1, len(slots) // (4 * self._threads * together))
        shares = [range(first, min(first + share, slots.stop)) for first in range(slots.start, slots.stop, share)]

        def read(mine: range) -> list[bytes]:
            buffer = private_pages((together - 1) * frame_bytes + HEADER_BYTES).view
            found: list[bytes] = []
            for first in range(mine.start, mine.stop, together):
                found += self._read(name, slab, range(first, min(first + together, mine.stop)), buffer)
            return found

        if self._threads == 1 or len(shares) == 1:
            pieces = [read(mine) for mine in shares]
        else:
            with ThreadPoolExecutor(self._threads, "kv-scan") as pool:
                pieces = list(pool.map(read, shares))
        found = [entry for piece in pieces for entry in piece]
        unreadable = found.count(_BAD)
        if unreadable > MOST_UNREADABLE:
            raise OSError(f"{unreadable} of {len(slots)} headers cannot be read")
        if unreadable:
            _log.warning("%s: %d frame headers cannot be read; their slots are not used any more", name, unreadable)
        return split_entries(b"".join(found))

    def _read(self, name: str, slab: SlabHeader, slots: range, buffer: memoryview) -> list[bytes]:
        step = slab.slot_class.frame_bytes
        whole = buffer[: (len(slots) - 1) * step + HEADER_BYTES]
        for tries_left in reversed(range(TRIES)):
            try:
                self._files.read(name, slab.offset(slots.start), whole)
                break
            except OSError:
                if len(slots) > 1:
                    return [entry for slot in slots for entry in self._read(name, slab, range(slot, slot + 1), buffer)]
                if not tries_left:
                    return [_BAD]
        return [self._entry(slab, bytes(whole[at : at + HEADER_BYTES])) for at in range(0, len(whole), step)]

    def _entry(self, slab: SlabHeader, raw: bytes) -> bytes:
        try:
            header = open_header(raw, self._keys)
        except BlockCorrupt:
            return _NOTHING
        stamp = header.stamp
        if SlotClass(stamp.tenant, stamp.namespace, stamp.part, stamp.frame_bytes) != slab.slot_class:
            return _NOTHING
        return entry_of_header(header)
