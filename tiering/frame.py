"""The frame: one format in DRAM, on NVMe, on the wire and in a remote engine.

    0                                   4096                          4096 + payload, padded to 4 KiB
    +-----------------------------------+---------------------------------------------+
    | header                            | payload: one slice per layer, equal lengths | zeros
    +-----------------------------------+---------------------------------------------+

    header:  stamp (same for every frame of a slot class)
             identity of this block (prefix key, parent, index, generation, retention)
             one xxh3_128 digest per layer slice
             keyed BLAKE2b-256 over all of the above
             zeros up to 4096, checked to be zero

The MAC says who wrote the header, the header's digests say what the payload was. A consumer that was told the digest of
the header by the daemon needs no key: it checks the header against that digest and its own copy of the payload against
the header. Keys, tenants and namespaces are opaque bytes here.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol

from xxhash import xxh3_128, xxh3_128_digest

from tiering.errors import BlockCorrupt, EpochRetired

ALIGNMENT = 4096
HEADER_BYTES = 4096
KEY_BYTES = 32
TENANT_BYTES = 16
NAMESPACE_BYTES = 32
KEY_ID_BYTES = 8
DIGEST_BYTES = 16
_DIGEST_FORMAT = f"{DIGEST_BYTES}s"
MAC_BYTES = 32
MAGIC = b"KVFRAME\x00"
VERSION = 1

# magic, version, header bytes, key id, key epoch, tenant, namespace, codec, part, parts, block tokens, slices, payload
_STAMP = struct.Struct("<8sHH8sI16s32s16sHHIIQ")
# prefix key, parent, block index, priority, generation, expires at (Unix seconds, 0 for never)
_IDENTITY = struct.Struct("<32s32sIiQQ")
STAMP_BYTES = _STAMP.size
_FIXED_BYTES = _STAMP.size + _IDENTITY.size
_PREFIX_KEY_AT = _STAMP.size
_KEY = struct.Struct("<8sI")
_KEY_AT, _KEY_END = struct.calcsize("<8sHH"), struct.calcsize("<8sHH8sI")
_GENERATION = struct.Struct("<Q")
_GENERATION_AT = _STAMP.size + struct.calcsize("<32s32sIi")
MAX_NUMBER, MAX_BLOCK_INDEX = (1 << 63) - 1, (1 << 31) - 1
"""Of a generation and of Unix seconds, and of a block's index: columns of signed numbers hold them."""
MAX_SLICES = (HEADER_BYTES - _FIXED_BYTES - MAC_BYTES) // DIGEST_BYTES
"""Most layer slices in one frame; a part with more layers is cut into several parts."""

_ZEROS = bytes(HEADER_BYTES)


class MacKeys(Protocol):
    """The keys of header MACs. The daemon's side alone holds them."""

    def mac_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        """The key, or None where this store does not hold it; empty where its epoch was retired."""
        ...

    def slab_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        """The same for what says where frames are, never what is in them: slab headers and index records. All are
        signed in a tenant's first epoch, whose frames may not be accepted any more."""
        ...


@dataclass(frozen=True, slots=True)
class Stamp:
    """What all frames of one slot class have in common, but for the key that signed them: two stamps are equal whatever
    that is. Lengths: key_id 8, tenant 16, namespace 32 bytes."""

    key_id: bytes = field(compare=False)
    epoch: int = field(compare=False)
    tenant: bytes
    namespace: bytes
    codec: str
    part: int
    parts: int
    block_tokens: int
    slices: int
    payload_bytes: int

    def __post_init__(self) -> None:
        assert len(self.key_id) == KEY_ID_BYTES and len(self.tenant) == TENANT_BYTES
        assert len(self.namespace) == NAMESPACE_BYTES and len(self.codec.encode()) <= 16
        assert 1 <= self.slices <= MAX_SLICES and self.payload_bytes % self.slices == 0

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer slice."""
        return self.payload_bytes // self.slices

    @property
    def frame_bytes(self) -> int:
        """Header and payload, padded."""
        return frame_bytes(self.payload_bytes)

    def pack(self) -> bytes:
        """The first bytes of every header of this slot class."""
        return _STAMP.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            self.key_id,
            self.epoch,
            self.tenant,
            self.namespace,
            self.codec.encode(),
            self.part,
            self.parts,
            self.block_tokens,
            self.slices,
            self.payload_bytes,
        )


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A header as read back."""

    stamp: Stamp
    prefix_key: bytes
    parent: bytes
    block_index: int
    generation: int
    priority: int
    expires_at: int
    digests: tuple[bytes, ...]


_PADDING = memoryview(_ZEROS)
"""Shared: there is a sealer for each part of each namespace, and 3.7 KiB of zeros in each came to a gigabyte."""


class Sealer:
    """Makes the headers of one slot class. The constant part is packed once: a header costs one MAC."""

    def __init__(self, stamp: Stamp, mac_key: bytes) -> None:
        self.stamp = stamp
        self._prefix = stamp.pack()
        self._mac = blake2b(self._prefix, digest_size=MAC_BYTES, key=mac_key)
        self._padding = _PADDING[: HEADER_BYTES - _FIXED_BYTES - DIGEST_BYTES * stamp.slices - MAC_BYTES]

    def seal(
        self,
        prefix_key: bytes,
        parent: bytes,
        block_index: int,
        generation: int,
        digests: Sequence[bytes],
        priority: int = 0,
        expires_at: int = 0,
    ) -> bytes:
        """The 4 KiB header. `digests`: one of 16 bytes per layer slice, in the payload's order."""
        assert len(digests) == self.stamp.slices and len(prefix_key) == len(parent) == KEY_BYTES
        identity = _IDENTITY.pack(prefix_key, parent, block_index, priority, generation, expires_at)
        own = b"".join((identity, *digests))
        mac = self._mac.copy()
        mac.update(own)
        header = b"".join((self._prefix, own, mac.digest(), self._padding))
        assert len(header) == HEADER_BYTES
        return header


def open_header(raw: bytes, keys: MacKeys) -> FrameHeader:
    """Parse and verify a header under its MAC. Raises `BlockCorrupt` naming the first check that failed."""
    header = parse_header(raw)
    stamp = header.stamp
    used = _FIXED_BYTES + DIGEST_BYTES * stamp.slices
    key = keys.mac_key(stamp.tenant, stamp.key_id, stamp.epoch)
    if key is None:
        raise BlockCorrupt("header names a key that this store does not hold")
    if not key:
        raise EpochRetired("header was signed in an epoch that was retired")
    mac = blake2b(raw[:used], digest_size=MAC_BYTES, key=key).digest()
    if not hmac.compare_digest(mac, raw[used : used + MAC_BYTES]):
        raise BlockCorrupt("header MAC differs")
    return header


def parse_header(raw: bytes) -> FrameHeader:
    """Parse a header whose bytes are already trusted (its digest was compared). Raises `BlockCorrupt`."""
    if len(raw) != HEADER_BYTES:
        raise BlockCorrupt(f"header of {len(raw)} bytes")
    (magic, version, size, key_id, epoch, tenant, namespace, codec, part, parts, tokens, slices, payload) = (
        _STAMP.unpack_from(raw)
    )
    if magic != MAGIC:
        raise BlockCorrupt("no frame magic")
    if version != VERSION or size != HEADER_BYTES:
        raise BlockCorrupt(f"frame version {version}")
    if not 1 <= slices <= MAX_SLICES or payload % slices:
        raise BlockCorrupt("slice count out of range")
    used = _FIXED_BYTES + DIGEST_BYTES * slices
    if raw[used + MAC_BYTES :] != _ZEROS[used + MAC_BYTES :]:
        raise BlockCorrupt("header is not zero after its end")
    try:
        codec_name = codec.rstrip(b"\x00").decode("ascii")
    except UnicodeDecodeError:
        raise BlockCorrupt("codec name is not text") from None
    stamp = Stamp(key_id, epoch, tenant, namespace, codec_name, part, parts, tokens, slices, payload)
    prefix_key, parent, block_index, priority, generation, expires_at = _IDENTITY.unpack_from(raw, _STAMP.size)
    if generation > MAX_NUMBER or expires_at > MAX_NUMBER or block_index > MAX_BLOCK_INDEX:
        raise BlockCorrupt("a generation, a time or an index that no block has")
    return FrameHeader(
        stamp, prefix_key, parent, block_index, generation, priority, expires_at, split_digests(raw, slices)
    )


def names_block(raw: bytes, stamp: bytes, prefix_key: bytes) -> bool:
    """Whether a header is one of this slot class (its packed stamp) for this block, whichever epoch signed it."""
    return (
        raw.startswith(stamp[_KEY_END:], _KEY_END)
        and raw.startswith(stamp[:_KEY_AT])
        and raw.startswith(prefix_key, _PREFIX_KEY_AT)
    )


def without_signer(stamp: bytes) -> bytes:
    """A packed stamp but for the key and epoch that sign: equal for equal slot classes."""
    return stamp[:_KEY_AT] + stamp[_KEY_END:]


def epoch_in(header: memoryview) -> tuple[bytes, int]:
    """The key id and the epoch that a header names, whose bytes are already trusted."""
    key_id, epoch = _KEY.unpack_from(header, _KEY_AT)
    return key_id, epoch


def generation_in(header: memoryview) -> int:
    """The generation that a header names, whose bytes are already trusted."""
    generation: int = _GENERATION.unpack_from(header, _GENERATION_AT)[0]
    return generation


def split_digests(raw: bytes, slices: int) -> tuple[bytes, ...]:
    """The layer slices' digests of a header."""
    return _digests_of(slices).unpack_from(raw, _FIXED_BYTES)


@lru_cache(MAX_SLICES)
def _digests_of(slices: int) -> struct.Struct:
    return struct.Struct(_DIGEST_FORMAT * slices)


def verify_frame(frame: memoryview, keys: MacKeys, stamp: Stamp, prefix_key: bytes, generation: int) -> None:
    """Check everything about a whole frame: MAC, whose and which it is, and every digest. Raises `BlockCorrupt`."""
    header = open_header(bytes(frame[:HEADER_BYTES]), keys)
    if header.prefix_key != prefix_key or header.generation != generation:
        raise BlockCorrupt("another block's frame")
    if header.stamp != stamp:
        raise BlockCorrupt("the frame of another part")
    verify_payload(header, frame[HEADER_BYTES:])


def verify_payload(header: FrameHeader, payload: memoryview, first: int = 0, stop: int = MAX_SLICES) -> None:
    """Compare the layer slices of a payload with the header's digests, or those from `first` to before `stop`. Raises
    `BlockCorrupt`."""
    length = header.stamp.slice_bytes
    for index, want in enumerate(header.digests[first:stop], first):
        if digest(payload[index * length : (index + 1) * length]) != want:
            raise BlockCorrupt(f"payload digest of layer slice {index} differs")


def digest(buffer: Any, *more: Any) -> bytes:
    """xxh3_128 of one or several buffers taken as one. A checksum, never an identity."""
    if not more:
        return xxh3_128_digest(buffer)
    state = xxh3_128(buffer)  # keeps the interpreter lock, which for a run of KV is cheaper than handing it over
    for buffer in more:
        state.update(buffer)
    return state.digest()


def frame_bytes(payload_bytes: int) -> int:
    """Header, payload and padding to the alignment of direct I/O."""
    return HEADER_BYTES + -(-payload_bytes // ALIGNMENT) * ALIGNMENT
