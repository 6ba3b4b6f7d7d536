"""What a directory on NVMe is made of: slab headers, index records and the stamp, as bytes.

    00000000.slab     the stamp: two pages, written in turn; which format this is, and how the index was left
    00000001.slab     page 0: slab header | slot 0: frame | slot 1: frame | ... | last page: slab header again
    ...
    index             record of 32 neighbouring slots -> what they hold, with a MAC

A slab header says whose frames a slab holds, so that every slot can be found without the index. The index says which
slots hold a frame, so that a start need not read every header. Both carry a MAC of the tenant's: what it does not
confirm is not used. This file knows bytes and no disk.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from tiering.errors import BlockCorrupt
from tiering.frame import (
    KEY_BYTES,
    MAC_BYTES,
    FrameHeader,
    digest,
)
from tiering.slab_header import FORMAT_VERSION, PAGE_BYTES, UID_BYTES, SlabHeader, mac_of

# Slab files -----------------------------------------------------------------------------------------------------------

MAX_NUMBER = (1 << 32) - 1


def slab_name(number: int) -> str:
    """The file of a slab."""
    return f"{number:08x}.slab"


def slab_number(name: str) -> int:
    """The slab of a file; for any other name, a number that no slab has."""
    try:
        number = int(name.removesuffix(".slab"), 16)
    except ValueError:
        return -1
    return number if 0 <= number <= MAX_NUMBER and slab_name(number) == name else -1


# Index records --------------------------------------------------------------------------------------------------------

SLOTS_PER_RECORD = 32
ENTRY = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("parent", f"V{KEY_BYTES}"),
        ("generation", "<u8"),
        ("expires_at", "<u8"),
        ("block_index", "<u4"),
        ("priority", "<i4"),
        ("state", "u1"),
        ("zero", "V7"),
    ]
)
"""What the index keeps of a slot."""

EMPTY, HELD, BAD = 0, 1, 2
"""An entry's state: no frame, a frame, or a frame that failed a check and whose slot is not used again."""

_RECORD_KEY = struct.Struct(">cII")
_DOUBT_KEY = struct.Struct(">cQ")
_SLAB_KEY = struct.Struct(">cI")
_RUN = struct.Struct("<II")
RECORDS, DOUBTS, UNREAD, UNPROVEN, META = b"r", b"d", b"u", b"p", b"m"
_ENTRIES_BYTES = SLOTS_PER_RECORD * ENTRY.itemsize

Entries = np.ndarray[Any, Any]


def entry_of(
    key: bytes, parent: bytes, block_index: int, generation: int, priority: int, expires_at: int, state: int = HELD
) -> bytes:
    """One entry's bytes."""
    return struct.pack(
        f"<{KEY_BYTES}s{KEY_BYTES}sQQIiB7x", key, parent, generation, expires_at, block_index, priority, state
    )


def entry_of_header(header: FrameHeader) -> bytes:
    """The index entry of a frame."""
    return entry_of(
        header.prefix_key,
        header.parent,
        header.block_index,
        header.generation,
        header.priority,
        header.expires_at,
    )


def record_key(slab: int, record: int) -> bytes:
    """The index key of a slab's `record`-th run of slots."""
    return _RECORD_KEY.pack(RECORDS, slab, record)


def split_record_key(key: bytes) -> tuple[int, int]:
    """(slab, record). Raises `BlockCorrupt`."""
    if len(key) != _RECORD_KEY.size:
        raise BlockCorrupt("record key of another length")
    _, slab, record = _RECORD_KEY.unpack(key)
    return slab, record


def doubt_key(place: int) -> bytes:
    """The index key of a place whose header may be valid although no record holds it."""
    return _DOUBT_KEY.pack(DOUBTS, place)


def split_doubt_key(key: bytes) -> int:
    """The place. Raises `BlockCorrupt`."""
    if len(key) != _DOUBT_KEY.size:
        raise BlockCorrupt("doubt key of another length")
    place: int = _DOUBT_KEY.unpack(key)[1]
    return place


def mark_key(mark: bytes, slab: int) -> bytes:
    """The index key of a slab that is `UNREAD`, whose headers could not be read when the index was built; or
    `UNPROVEN`, whose records were built from headers, which a crash may have left in front of incomplete frames."""
    return _SLAB_KEY.pack(mark, slab)


def pack_record(header: SlabHeader, record: int, entries: bytes, mac_key: bytes) -> bytes:
    """A record's value: 32 entries and a MAC that binds them to this slab and run of slots."""
    assert len(entries) == _ENTRIES_BYTES
    return entries + mac_of(mac_key, b"record", header.uid + _RUN.pack(header.number, record) + entries)


def open_record(header: SlabHeader, record: int, value: bytes, mac_key: bytes) -> bytes:
    """The entries' bytes. Raises `BlockCorrupt` unless they are exactly what was packed for this run of slots."""
    if len(value) != _ENTRIES_BYTES + MAC_BYTES:
        raise BlockCorrupt("record of another length")
    entries = value[:_ENTRIES_BYTES]
    mac = blake2b(header.uid, digest_size=MAC_BYTES, key=mac_key, person=b"kv-record")
    mac.update(_RUN.pack(header.number, record))
    mac.update(entries)
    if not hmac.compare_digest(mac.digest(), value[_ENTRIES_BYTES:]):
        raise BlockCorrupt("record MAC differs")
    return entries


def split_entries(entries: bytes) -> Entries:
    """As an array of `ENTRY`."""
    return np.frombuffer(entries, ENTRY)


# The stamp ------------------------------------------------------------------------------------------------------------

STAMP_SLAB = 0
MAX_SESSION, MAX_COUNT = (1 << 23) - 1, (1 << 62) - 1
"""The most starts, which are the first bits of a block's generation; and the most stamps and batches."""
STAMP_PAGES = 2
_STAMP_MAGIC = b"KVSTAMP\x00"
# magic, version, sequence, session, changes, clean, index uid
_STAMP = struct.Struct(f"<8sIQQQB{UID_BYTES}s")


class OtherFormat(Exception):
    """The directory was written in another version of the format: it is left alone."""


@dataclass(frozen=True, slots=True)
class StoreStamp:
    """How the directory was left. sequence: rises with every stamp written. session: rises with every start.

    index_uid: of the index that belongs to these slabs. changes: how many batches that index had taken in, exactly if
    `clean`, else at the start of the session.
    """

    sequence: int
    session: int
    index_uid: bytes
    changes: int
    clean: bool

    def next(self, *, index_uid: bytes, changes: int, clean: bool, session: int | None = None) -> StoreStamp:
        """The stamp after this one."""
        return replace(
            self,
            sequence=self.sequence + 1,
            session=self.session if session is None else session,
            index_uid=index_uid,
            changes=changes,
            clean=clean,
        )

    def knows(self, index_uid: bytes, changes: int) -> bool:
        """Whether an index with this uid and count is the one that belongs here, with every batch it took in."""
        return index_uid == self.index_uid and (changes == self.changes or (changes > self.changes and not self.clean))

    @property
    def page(self) -> int:
        """The page it is written to: the one before stays readable until this one is durable."""
        return self.sequence % STAMP_PAGES

    def pack(self) -> bytes:
        used = _STAMP.pack(
            _STAMP_MAGIC, FORMAT_VERSION, self.sequence, self.session, self.changes, self.clean, self.index_uid
        )
        return (used + digest(used)).ljust(PAGE_BYTES, b"\x00")


def latest_stamp(pages: Sequence[bytes], besides: StoreStamp | None = None) -> StoreStamp | None:
    """The newest stamp that is whole and on its page; None without any. Raises `OtherFormat`.

    besides: a stamp to ignore.
    """
    stamps = []
    for number, page in enumerate(pages):
        magic, version, sequence, session, changes, clean, uid = _STAMP.unpack_from(page)
        used = page[: _STAMP.size]
        if magic != _STAMP_MAGIC or digest(used) != page[_STAMP.size : _STAMP.size + 16]:
            continue
        if session > MAX_SESSION or max(sequence, changes) > MAX_COUNT:  # no directory ever gets there
            continue
        if version != FORMAT_VERSION:
            raise OtherFormat(f"format {version}; this program knows format {FORMAT_VERSION}")
        stamp = StoreStamp(sequence, session, uid, changes, bool(clean))
        if stamp != besides and stamp.page == number and page == stamp.pack():
            stamps.append(stamp)
    return max(stamps, key=lambda stamp: stamp.sequence, default=None)


_META = struct.Struct(f"<{UID_BYTES}sQ")


def pack_meta(index_uid: bytes, changes: int) -> bytes:
    """The index's own record: its uid and how many batches it has taken in."""
    used = _META.pack(index_uid, changes)
    return used + digest(used)


def open_meta(value: bytes | None) -> tuple[bytes, int] | None:
    """(index uid, changes); None if it is missing or damaged."""
    if value is None or len(value) != _META.size + 16 or digest(value[: _META.size]) != value[_META.size :]:
        return None
    uid, changes = _META.unpack_from(value)
    return (uid, changes) if changes <= MAX_COUNT else None
