"""Digests of layer slices where they lie in device memory: XXH3-128, as frames carry it.

What a transfer moved can be compared on the device that received it, without a pass over it on the CPU, and what a
device is about to send gets its digest before the bytes leave it.

XXH3's long form takes 8 lanes of 64 bits through blocks of 16 stripes of 64 bytes. Within a block a lane's 16 steps are
a sum, so they are done at once; from one block of 1 KiB to the next there is a short chain of scrambles. Slices are
independent: one program each. The result is that of `xxhash.xxh3_128_digest`, seed 0 (github.com/Cyan4973/xxHash,
doc/xxhash_spec.md), of inputs above 240 bytes whose length is a multiple of 8.
"""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

SHORTEST_BYTES = 241
"""Shorter inputs have other forms in XXH3."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_START = (
    _PRIME32[2], _PRIME64[0], _PRIME64[1], _PRIME64[2], _PRIME64[3], _PRIME32[1], _PRIME64[4], _PRIME32[0],
)  # fmt: skip


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def digest_keys(device: torch.device) -> torch.Tensor:
    """What the kernel multiplies with: int64 [56]. The secret's words, those of the last stripe, of both halves of the
    result, and the first state of the lanes. Made once per device."""

    def words(start: int, count: int) -> list[int]:
        return list(struct.unpack_from(f"<{count}q", _SECRET, start))

    size = len(_SECRET)
    start = [number - (1 << 64) if number >> 63 else number for number in _START]
    keys = words(0, 24) + words(size - 64 - 7, 8) + words(11, 8) + words(size - 64 - 11, 8) + start
    return torch.tensor(keys, dtype=torch.int64, device=device)


def digest_slices(payloads: torch.Tensor, slice_bytes: int, into: torch.Tensor, keys: torch.Tensor) -> None:
    """Digest every layer slice of every block.

    payloads: uint8 [blocks, row bytes], one slice after another; addresses and sizes are multiples of 8, slices longer
    than 240 bytes. into: int64 [blocks, slices, 2], rows at any stride: of each slice the low and the high half of its
    XXH3-128. keys: `digest_keys` of the device. Launched on the current stream; allocates nothing.
    """
    blocks, slices, _ = into.shape
    assert slice_bytes >= SHORTEST_BYTES and slice_bytes % 8 == 0 and slices * slice_bytes <= payloads.shape[1]
    assert payloads.shape[0] == blocks and not payloads.data_ptr() % 8 and (blocks < 2 or not payloads.stride(0) % 8)
    if blocks and slices:
        with on_device(payloads.device):
            # A grid may be long along its first axis only.
            _digest_slice[(blocks, slices)](
                payloads, payloads.stride(0), into, into.stride(0), keys, SLICE_BYTES=slice_bytes, num_warps=1
            )


@triton.jit
def _mixed(even, odd, keys, first):
    even_keys, odd_keys = _words(keys + first + 2 * tl.arange(0, 4)[:, None] + tl.arange(0, 2)[None, :])
    one, other = even ^ even_keys, odd ^ odd_keys
    return tl.sum((one * other) ^ tl.umulhi(one, other), 0)


@triton.jit
def _words(places):
    return tl.split(tl.load(places).to(tl.uint64, bitcast=True))


@triton.jit
def _avalanche(state):
    state = (state ^ (state >> 37)) * 0x165667919E3779F9
    return state ^ (state >> 32)


@triton.jit
def _product(word, key):
    mixed = word ^ key
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit(do_not_specialize_on_alignment=["into"])
def _digest_slice(payload, row_bytes, into, into_row, keys, SLICE_BYTES: tl.constexpr):
    block, number = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = payload + block * row_bytes + number * SLICE_BYTES
    digest_copy(start, start, into + block * into_row + number * 2, keys, SLICE_BYTES, False, 1)


@triton.jit
def digest_copy(start, target, place, keys, SLICE_BYTES: tl.constexpr, COPIES: tl.constexpr, TILE: tl.constexpr):
    """Digest a slice into `place`. COPIES: and write what was digested to `target`. TILE: KiB that are read at once."""
    words, copied = start.to(tl.pointer_type(tl.int64)), target.to(tl.pointer_type(tl.int64))
    stripe, pair = tl.arange(0, 16)[:, None], tl.arange(0, 4)
    lane = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    at = 8 * stripe[:, :, None] + lane[None]
    even, odd = _words(keys + 48 + lane)
    whole: tl.constexpr = (SLICE_BYTES - 1) // 1024
    tiled: tl.constexpr = whole // TILE * TILE
    for first in range(0, tiled, TILE):
        even, odd = _digest_blocks(words + first * 128, copied + first * 128, even, odd, keys, COPIES, TILE)
    for first in range(tiled, whole):
        even, odd = _digest_blocks(words + first * 128, copied + first * 128, even, odd, keys, COPIES, 1)
    # The stripes of the last block, and the last 64 bytes, which may overlap them.
    even_keys, odd_keys = _words(keys + stripe[:, :, None] + lane[None])
    is_there = stripe < (SLICE_BYTES - 1 - whole * 1024) // 64
    there = tl.load(words + whole * 128 + at, mask=is_there[:, :, None], other=0)
    if COPIES:
        tl.store(copied + whole * 128 + at, there, mask=is_there[:, :, None])
    evens, odds = tl.split(there.to(tl.uint64, bitcast=True))
    even += tl.sum(tl.where(is_there, _product(evens, even_keys) + odds, 0), 0)
    odd += tl.sum(tl.where(is_there, _product(odds, odd_keys) + evens, 0), 0)
    there = tl.load(words + (SLICE_BYTES // 8 - 8) + lane)
    if COPIES:
        tl.store(copied + (SLICE_BYTES // 8 - 8) + lane, there)
    evens, odds = tl.split(there.to(tl.uint64, bitcast=True))
    even_keys, odd_keys = _words(keys + 24 + lane)
    even += _product(evens, even_keys) + odds
    odd += _product(odds, odd_keys) + evens
    length = tl.full((), SLICE_BYTES, tl.uint64)
    low = _avalanche(length * 0x9E3779B185EBCA87 + _mixed(even, odd, keys, 32))
    high = _avalanche((length * 0xC2B2AE3D27D4EB4F ^ 0xFFFFFFFFFFFFFFFF) + _mixed(even, odd, keys, 40))
    tl.store(place, low.to(tl.int64, bitcast=True))
    tl.store(place + 1, high.to(tl.int64, bitcast=True))


@triton.jit
def _digest_blocks(words, copied, even, odd, keys, COPIES: tl.constexpr, TILE: tl.constexpr):
    """TILE blocks of 1 KiB: their sums at once, their scrambles one after another."""
    tile, pair = tl.arange(0, TILE)[:, None], tl.arange(0, 4)
    stripe = tl.arange(0, 16)[None, :, None]
    lane = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    at = 128 * tile[:, :, None, None] + 8 * stripe[:, :, :, None] + lane[None, None]
    there = tl.load(words + at)
    if COPIES:
        tl.store(copied + at, there)
    evens, odds = tl.split(there.to(tl.uint64, bitcast=True))
    even_keys, odd_keys = _words(keys + stripe[:, :, :, None] + lane[None, None])
    even_scramble, odd_scramble = _words(keys + 16 + lane)
    even_sums = tl.sum(_product(evens, even_keys) + odds, 1)
    odd_sums = tl.sum(_product(odds, odd_keys) + evens, 1)
    for number in tl.static_range(TILE):
        even += tl.sum(tl.where(tile == number, even_sums, 0), 0)
        odd += tl.sum(tl.where(tile == number, odd_sums, 0), 0)
        even = (even ^ (even >> 47) ^ even_scramble) * 0x9E3779B1
        odd = (odd ^ (odd >> 47) ^ odd_scramble) * 0x9E3779B1
    return even, odd
