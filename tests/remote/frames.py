"""Frames for tests of remote engines, and what a caller checks of one that it read."""

from __future__ import annotations

from random import Random

from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, Sealer, Stamp, digest, names_block, parse_header, verify_payload
from tiering.remote.driver import remote_key

SLICES, PAYLOAD_BYTES = 4, 64 << 10
SALT = bytes(range(32))


def stamp_of(
    payload_bytes: int = PAYLOAD_BYTES, epoch: int = 0, tenant: bytes = b"tenant-16-bytes-", part: int = 0
) -> Stamp:
    return Stamp(
        b"key-id--", epoch, tenant, b"namespace-of-thirty-two-bytes---", "raw", part, 2, 64, SLICES, payload_bytes
    )


STAMP = stamp_of()
FRAME_BYTES = STAMP.frame_bytes


def prefix_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def key_of(number: int, stamp: Stamp = STAMP) -> bytes:
    return remote_key(SALT, stamp.pack(), prefix_key(number), stamp.part)


def frame(number: int, stamp: Stamp = STAMP) -> bytes:
    """A whole one; the same number gives the same bytes."""
    payload = Random(number).randbytes(stamp.payload_bytes)
    size = stamp.slice_bytes
    digests = [digest(payload[at : at + size]) for at in range(0, len(payload), size)]
    return Sealer(stamp, bytes(32)).seal(prefix_key(number), bytes(32), number, 1, digests) + payload


def halves(number: int, stamp: Stamp = STAMP) -> tuple[bytes, bytes]:
    """Header and payload."""
    whole = frame(number, stamp)
    return whole[:HEADER_BYTES], whole[HEADER_BYTES:]


def is_of(slot: bytes | bytearray, number: int, stamp: Stamp = STAMP) -> bool:
    """What a caller asks of a frame that it read, before it believes a byte of it."""
    raw = bytes(slot[:HEADER_BYTES])
    if not names_block(raw, stamp.pack(), prefix_key(number)):
        return False
    try:
        verify_payload(parse_header(raw), memoryview(slot)[HEADER_BYTES:])
    except BlockCorrupt:
        return False
    return True
