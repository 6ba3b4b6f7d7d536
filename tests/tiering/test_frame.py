"""The frame's header: what goes in comes out, and whatever else is found there is refused by name."""

from __future__ import annotations

import random
import struct
import tracemalloc
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from simulation.machine import MAC_KEY, OneKey
from tiering.errors import BlockCorrupt
from tiering.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    MAX_BLOCK_INDEX,
    MAX_NUMBER,
    MAX_SLICES,
    FrameHeader,
    Sealer,
    Stamp,
    digest,
    frame_bytes,
    names_block,
    open_header,
    parse_header,
    split_digests,
    verify_frame,
    verify_payload,
)

STAMP = Stamp(
    key_id=b"key-id--",
    epoch=7,
    tenant=b"tenant-16-bytes-",
    namespace=b"namespace-of-thirty-two-bytes---",
    codec="raw",
    part=2,
    parts=4,
    block_tokens=64,
    slices=3,
    payload_bytes=3 * 1000,
)
KEY, PARENT = b"K" * 32, b"P" * 32
PAYLOAD = bytes(index * 7 % 256 for index in range(STAMP.payload_bytes))
DIGESTS = [digest(PAYLOAD[at : at + 1000]) for at in range(0, 3000, 1000)]

# Where the fields stand, written down once more: magic, version, size, key id, epoch, tenant, namespace, codec, part,
# parts, tokens, slices, payload | prefix key, parent, index, priority, generation, expiry | digests | MAC.
PACKED = struct.Struct("<8sHH8sI16s32s16sHHIIQ32s32sIiQQ")
SLICES_AT = struct.calcsize("<8sHH8sI16s32s16sHHI")


class Keys:
    """`MacKeys` with one key."""

    def __init__(self, stamp: Stamp = STAMP, key: bytes = MAC_KEY) -> None:
        self._known = {(stamp.tenant, stamp.key_id, stamp.epoch): key}

    def mac_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        return self._known.get((tenant, key_id, epoch))


def sealed(stamp: Stamp = STAMP, **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "prefix_key": KEY,
        "parent": PARENT,
        "block_index": 5,
        "generation": 99,
        "digests": DIGESTS,
        "priority": -3,
        "expires_at": 1_800_000_000,
    }
    return Sealer(stamp, MAC_KEY).seal(**{**values, **changes})


def authenticated(body: bytes, slices: int) -> bytes:
    """A header with any body under a valid MAC, as one would be that a bug had written."""
    used = PACKED.size + 16 * slices
    body = body[:used].ljust(used, b"\x00")
    return (body + blake2b(body, digest_size=32, key=MAC_KEY).digest()).ljust(HEADER_BYTES, b"\x00")


# What goes in comes out -----------------------------------------------------------------------------------------------


def test_every_field_survives() -> None:
    header = open_header(sealed(), Keys())
    assert header == FrameHeader(STAMP, KEY, PARENT, 5, 99, -3, 1_800_000_000, tuple(DIGESTS))
    assert header.stamp.slice_bytes == 1000 and header.stamp.frame_bytes == 4096 + 4096


stamps = st.builds(
    lambda slices, slice_bytes, **rest: Stamp(slices=slices, payload_bytes=slices * slice_bytes, **rest),
    slices=st.integers(1, MAX_SLICES),
    slice_bytes=st.integers(0, 1 << 40),
    key_id=st.binary(min_size=8, max_size=8),
    epoch=st.integers(0, 2**32 - 1),
    tenant=st.binary(min_size=16, max_size=16),
    namespace=st.binary(min_size=32, max_size=32),
    codec=st.text("abcdefghijklmnopqrstuvwxyz0123456789-", max_size=16),
    part=st.integers(0, 2**16 - 1),
    parts=st.integers(0, 2**16 - 1),
    block_tokens=st.integers(0, 2**32 - 1),
)


@given(stamps, st.data())
@settings(max_examples=80)
def test_any_header_that_can_be_sealed_can_be_opened(stamp: Stamp, data: st.DataObject) -> None:
    want = FrameHeader(
        stamp,
        data.draw(st.binary(min_size=32, max_size=32)),
        data.draw(st.binary(min_size=32, max_size=32)),
        data.draw(st.integers(0, MAX_BLOCK_INDEX)),
        data.draw(st.integers(0, MAX_NUMBER)),
        data.draw(st.integers(-(2**31), 2**31 - 1)),
        data.draw(st.integers(0, MAX_NUMBER)),
        tuple(random.Random(stamp.slices).randbytes(16) for _ in range(stamp.slices)),
    )
    raw = Sealer(stamp, MAC_KEY).seal(
        want.prefix_key, want.parent, want.block_index, want.generation, want.digests, want.priority, want.expires_at
    )
    assert len(raw) == HEADER_BYTES
    assert open_header(raw, Keys(stamp)) == parse_header(raw) == want
    assert split_digests(raw, stamp.slices) == want.digests
    assert raw.startswith(stamp.pack()) and names_block(raw, stamp.pack(), want.prefix_key)


def test_a_header_names_its_block_only() -> None:
    assert names_block(sealed(), STAMP.pack(), KEY)
    assert not names_block(sealed(), STAMP.pack(), PARENT)
    for field in ("part", "payload_bytes"):
        other = replace(STAMP, **{field: getattr(STAMP, field) + 3})
        assert not names_block(sealed(), other.pack(), KEY)
    assert not names_block(sealed(), replace(STAMP, tenant=b"T" * 16).pack(), KEY)
    later = replace(STAMP, key_id=b"later-id", epoch=STAMP.epoch + 1)
    assert names_block(sealed(), later.pack(), KEY) and later == STAMP, "which epoch signed it is no part of its name"


def test_as_many_slices_as_fit() -> None:
    assert PACKED.size + 16 * MAX_SLICES + 32 <= HEADER_BYTES < PACKED.size + 16 * (MAX_SLICES + 1) + 32
    stamp = replace(STAMP, slices=MAX_SLICES, payload_bytes=0)
    raw = sealed(stamp, digests=[bytes(16)] * MAX_SLICES)
    assert len(open_header(raw, Keys()).digests) == MAX_SLICES


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "check"),
    [
        (Keys(key=bytes(32)), "MAC differs"),
        (Keys(replace(STAMP, epoch=8)), "does not hold"),
        (Keys(replace(STAMP, tenant=b"T" * 16)), "does not hold"),
        (Keys(replace(STAMP, key_id=b"another-")), "does not hold"),
    ],
    ids=["key", "epoch", "tenant", "key id"],
)
def test_a_header_of_somebody_else(keys: Keys, check: str) -> None:
    with pytest.raises(BlockCorrupt, match=check):
        open_header(sealed(), keys)


def test_every_bit_of_the_header_counts() -> None:
    raw = sealed()
    used = PACKED.size + 16 * 3 + 32
    positions = [*range(used), *random.Random(1).sample(range(used, HEADER_BYTES), 200), HEADER_BYTES - 1]
    for position in positions:
        wrong = bytearray(raw)
        wrong[position] ^= 1 << position % 8
        with pytest.raises(BlockCorrupt):
            open_header(bytes(wrong), Keys())


@pytest.mark.parametrize(
    ("at", "value", "check"),
    [
        (0, b"KVFRAMF\x00", "magic"),
        (8, struct.pack("<H", 2), "version 2"),
        (8, struct.pack("<H", 0), "version 0"),
        (10, struct.pack("<H", 8192), "version"),
        (HEADER_BYTES - 1, b"\x01", "not zero"),
        (PACKED.size + 16 * 3 + 32, b"\x01", "not zero"),
        *((SLICES_AT, struct.pack("<I", slices), "slice count") for slices in (0, MAX_SLICES + 1, 2**32 - 1)),
        (SLICES_AT + 4, struct.pack("<Q", 3001), "slice count"),  # a payload that is not whole slices
    ],
)
def test_a_check_that_fails_is_named(at: int, value: bytes, check: str) -> None:
    raw = sealed()
    with pytest.raises(BlockCorrupt, match=check):
        parse_header(raw[:at] + value + raw[at + len(value) :])


@pytest.mark.parametrize(
    "change",
    [
        {"generation": MAX_NUMBER + 1},
        {"generation": 2**64 - 1},
        {"expires_at": MAX_NUMBER + 1},
        {"expires_at": 2**64 - 1},
        {"block_index": MAX_BLOCK_INDEX + 1},
        {"block_index": 2**32 - 1},
    ],
)
def test_numbers_that_no_block_has(change: dict[str, int]) -> None:
    """They would be negative where the store keeps them."""
    numbers = {"block_index": 5, "generation": 99, "priority": -3, "expires_at": 1_800_000_000}
    raw = Sealer(STAMP, MAC_KEY).seal(KEY, PARENT, digests=DIGESTS, **{**numbers, **change})
    with pytest.raises(BlockCorrupt, match="that no block has"):
        open_header(raw, Keys())


@pytest.mark.parametrize("length", [0, 1, 4095, 4097, 8192])
def test_a_header_of_another_length(length: int) -> None:
    with pytest.raises(BlockCorrupt, match=f"{length} bytes"):
        parse_header(sealed().ljust(8192, b"\x00")[:length])


@given(st.integers(0, 2**64 - 1), st.integers(0, HEADER_BYTES))
@settings(max_examples=150)
def test_random_bytes_are_corrupt(seed: int, true_bytes: int) -> None:
    """Also with a beginning that is right: parse may accept that, the MAC may not."""
    noise = sealed()[:true_bytes] + random.Random(seed).randbytes(HEADER_BYTES - true_bytes)
    if noise == sealed():
        return
    with pytest.raises(BlockCorrupt):
        open_header(noise, OneKey())


@given(st.integers(0, 2**64 - 1), st.integers(0, 4), st.booleans())
@settings(max_examples=200)
def test_any_body_under_a_valid_mac_is_a_header_or_corrupt(seed: int, changes: int, keep_frame: bool) -> None:
    """Even with a valid MAC nothing but `BlockCorrupt` is raised, and what is accepted is what the bytes say."""
    source = random.Random(seed)
    body = bytearray(sealed()[: PACKED.size + 16 * MAX_SLICES])
    for _ in range(changes):
        at, length = source.randrange(PACKED.size), source.choice([1, 1, 2, 4, 8, 16])
        body[at : at + length] = source.randbytes(len(body[at : at + length]))
    if keep_frame:
        body[:12] = sealed()[:12]
    (slices,) = struct.unpack_from("<I", body, SLICES_AT)
    raw = authenticated(bytes(body), slices if slices <= MAX_SLICES else 3)
    try:
        header = open_header(raw, OneKey())
    except BlockCorrupt:
        return
    assert header.stamp.pack() + b"".join((header.prefix_key, header.parent)) == raw[: STAMP_BYTES + 64]
    assert (
        Sealer(header.stamp, MAC_KEY).seal(
            header.prefix_key,
            header.parent,
            header.block_index,
            header.generation,
            header.digests,
            header.priority,
            header.expires_at,
        )
        == raw
    )


STAMP_BYTES = len(STAMP.pack())


def test_a_codec_that_is_not_text() -> None:
    at = struct.calcsize("<8sHH8sI16s32s")
    body = sealed()[:at] + b"\xff\xfe" + sealed()[at + 2 :]
    with pytest.raises(BlockCorrupt, match="not text"):
        open_header(authenticated(body, 3), OneKey())


def test_no_message_repeats_the_bytes() -> None:
    for raw in (sealed()[:100], b"secret-prompt" * 316, sealed()[:-1] + b"!"):
        with pytest.raises(BlockCorrupt) as caught:
            parse_header(raw)
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


# Payloads -------------------------------------------------------------------------------------------------------------


def test_a_payload_is_verified_slice_by_slice() -> None:
    header = open_header(sealed(), Keys())
    verify_payload(header, memoryview(PAYLOAD))
    verify_payload(header, memoryview(PAYLOAD + bytes(1096)))  # a frame's padding is not payload
    for at in (0, 999, 1000, 2999):
        wrong = bytearray(PAYLOAD)
        wrong[at] ^= 0x10
        with pytest.raises(BlockCorrupt, match=f"slice {at // 1000} "):
            verify_payload(header, memoryview(wrong))
    with pytest.raises(BlockCorrupt, match="slice 2 "):
        verify_payload(header, memoryview(PAYLOAD)[:-1])


@pytest.mark.parametrize(
    ("asked", "check"),
    [
        ({}, None),
        ({"prefix_key": PARENT}, "another block"),
        ({"generation": 98}, "another block"),
        ({"generation": 100}, "another block"),
        ({"stamp": replace(STAMP, part=3)}, "another part"),
        ({"stamp": replace(STAMP, namespace=b"N" * 32)}, "another part"),
        ({"keys": Keys(key=bytes(32))}, "MAC differs"),
    ],
)
def test_a_whole_frame_is_the_one_that_was_asked_for(asked: dict[str, Any], check: str | None) -> None:
    """Also where the same block was stored before: its older frame is another one."""
    frame = memoryview(sealed() + PAYLOAD)
    wanted = {"keys": Keys(), "stamp": STAMP, "prefix_key": KEY, "generation": 99, **asked}
    if check is None:
        verify_frame(frame, **wanted)
        return
    with pytest.raises(BlockCorrupt, match=check):
        verify_frame(frame, **wanted)


def test_a_whole_frame_has_its_own_payload() -> None:
    for at in (0, len(PAYLOAD) - 1):
        wrong = bytearray(sealed() + PAYLOAD)
        wrong[HEADER_BYTES + at] ^= 1
        with pytest.raises(BlockCorrupt, match="payload digest"):
            verify_frame(memoryview(wrong), Keys(), STAMP, KEY, 99)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
@settings(max_examples=50)
def test_a_digest_of_several_buffers_is_that_of_them_joined(buffers: list[bytes]) -> None:
    joined = b"".join(buffers)
    assert digest(*buffers) == digest(joined) == xxh3_128(joined).digest()
    assert digest(memoryview(joined), bytearray(b"")) == digest(joined)


@given(st.integers(0, 1 << 40))
@settings(max_examples=100)
def test_frames_are_whole_pages(payload_bytes: int) -> None:
    size = frame_bytes(payload_bytes)
    assert size % ALIGNMENT == 0
    assert HEADER_BYTES + payload_bytes <= size < HEADER_BYTES + payload_bytes + ALIGNMENT


# The format is a promise to frames on disk and to other hosts: when these bytes change, raise VERSION. ----------------

GOLDEN_USED = (
    "4b564652414d4500010000106b65792d69642d2d0700000074656e616e742d31362d62797465732d6e616d6573706163"
    "652d6f662d7468697274792d74776f2d62797465732d2d2d726177000000000000000000000000000200040040000000"
    "03000000b80b0000000000004b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b4b50505050"
    "5050505050505050505050505050505050505050505050505050505005000000fdffffff630000000000000000d2496b"
    "00000000abee229cdadad76d10ad30264426c8305bcb1edb031e512ed91f084e7dc293dd873a0003c96290451dcf317f"
    "74987e3aa7a37a198eff3151a2e8a8c7fb64bb63dcec1de7573efa26cc3fcb27b2288f37"
)


def test_the_header_is_what_it_always_was() -> None:
    raw = sealed()
    used = bytes.fromhex(GOLDEN_USED)
    assert raw[: len(used)] == used
    assert raw[len(used) :] == bytes(HEADER_BYTES - len(used))


def test_the_header_is_laid_out_as_it_is_drawn() -> None:
    raw = sealed()
    assert PACKED.unpack_from(raw) == (
        b"KVFRAME\x00", 1, 4096, *[getattr(STAMP, field.name) for field in fields(Stamp)][:4],
        b"raw".ljust(16, b"\x00"), 2, 4, 64, 3, 3000, KEY, PARENT, 5, -3, 99, 1_800_000_000,
    )  # fmt: skip
    at = PACKED.size
    assert raw[at : at + 48] == b"".join(DIGESTS)
    assert raw[at + 48 : at + 80] == blake2b(raw[: at + 48], digest_size=32, key=MAC_KEY).digest()


def test_a_sealer_is_small() -> None:
    """A tenant may have hundreds of thousands: one for each part of each of its namespaces."""
    count = 200
    tracemalloc.start()
    try:
        sealers = [Sealer(replace(STAMP, part=0, parts=1), MAC_KEY) for _ in range(count)]
        assert tracemalloc.get_traced_memory()[0] < count * 1500
        assert len(sealers) == count
    finally:
        tracemalloc.stop()
