"""The header of a slab, and of a ledger beside an extent: whose frames the slots behind it hold.

It carries a MAC of the tenant's where it lies on a disk. This file knows bytes: no disk, and no memory."""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from hashlib import blake2b

from tiering.errors import BlockCorrupt
from tiering.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    KEY_ID_BYTES,
    MAC_BYTES,
    NAMESPACE_BYTES,
    TENANT_BYTES,
    MacKeys,
)
from tiering.tier import SLOT_BITS, SlotClass

FORMAT_VERSION = 1

PAGE_BYTES = ALIGNMENT

UID_BYTES = 16

_SLAB_MAGIC = b"KVSLAB\x00\x00"

# magic, version, key id, key epoch, tenant, namespace, part, frame bytes, slots, number, uid, bytes of `about`
_SLAB = struct.Struct(f"<8sI{KEY_ID_BYTES}sI{TENANT_BYTES}s{NAMESPACE_BYTES}sIQII{UID_BYTES}sI")

MAX_SLOTS = 1 << SLOT_BITS

MAX_ABOUT_BYTES = PAGE_BYTES - _SLAB.size - MAC_BYTES


@dataclass(frozen=True, slots=True)
class SlabSizes:
    """A tier's budget and the size of its slabs, both in bytes, both whole pages."""

    budget_bytes: int
    slab_bytes: int


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """Whose frames a slab holds. about: what the floor above needs to name the namespace; opaque here.

    uid: 16 random bytes, so that records of a slab that is gone never fit one that has got its number.
    """

    number: int
    slot_class: SlotClass
    slots: int
    key_id: bytes
    epoch: int
    uid: bytes
    about: bytes

    @property
    def size_bytes(self) -> int:
        """Of the whole slab: two headers and the slots between them."""
        return 2 * PAGE_BYTES + self.slots * self.slot_class.frame_bytes

    def offset(self, slot: int) -> int:
        """Where a slot's frame starts in the slab."""
        return PAGE_BYTES + slot * self.slot_class.frame_bytes

    def pack(self, mac_key: bytes) -> bytes:
        assert len(self.about) <= MAX_ABOUT_BYTES
        fields = _SLAB.pack(
            _SLAB_MAGIC,
            FORMAT_VERSION,
            self.key_id,
            self.epoch,
            self.slot_class.tenant,
            self.slot_class.namespace,
            self.slot_class.part,
            self.slot_class.frame_bytes,
            self.slots,
            self.number,
            self.uid,
            len(self.about),
        )
        used = fields + self.about
        return (used + mac_of(mac_key, b"slab", used)).ljust(PAGE_BYTES, b"\x00")


def read_slab_header(page: bytes, keys: MacKeys) -> SlabHeader:
    """Raises `BlockCorrupt` where the page is no slab header of this version, or `KeyAbsent` without its key."""
    header = parse_slab_header(page)
    key = keys.slab_key(header.slot_class.tenant, header.key_id, header.epoch)
    if key is None:
        raise KeyAbsent("slab header names a key that this store does not hold")
    end = _SLAB.size + len(header.about)
    if not hmac.compare_digest(mac_of(key, b"slab", page[:end]), page[end : end + MAC_BYTES]):
        raise BlockCorrupt("slab header MAC differs")
    return header


def parse_slab_header(page: bytes) -> SlabHeader:
    """Parse a slab's page, its MAC unchecked: for display, never to be acted on. Raises `BlockCorrupt`."""
    if len(page) != PAGE_BYTES:
        raise BlockCorrupt(f"a slab header of {len(page)} bytes")
    (magic, version, key_id, epoch, tenant, namespace, part, frame_bytes, slots, number, uid, about_bytes) = (
        _SLAB.unpack_from(page)
    )
    if magic != _SLAB_MAGIC or version != FORMAT_VERSION:
        raise BlockCorrupt("no slab header")
    end = _SLAB.size + about_bytes
    if about_bytes > MAX_ABOUT_BYTES or page[end + MAC_BYTES :].strip(b"\x00"):
        raise BlockCorrupt("slab header of another length")
    if not 0 < slots <= MAX_SLOTS or frame_bytes <= HEADER_BYTES or frame_bytes % PAGE_BYTES:
        raise BlockCorrupt("impossible sizes")
    slot_class = SlotClass(tenant, namespace, part, frame_bytes)
    return SlabHeader(number, slot_class, slots, key_id, epoch, uid, page[_SLAB.size : end])


class KeyAbsent(BlockCorrupt):
    """Written under a key that is missing: it cannot be verified, so it is left alone."""


def mac_of(mac_key: bytes, use: bytes, data: bytes) -> bytes:
    return blake2b(data, digest_size=MAC_BYTES, key=mac_key, person=b"kv-" + use).digest()
