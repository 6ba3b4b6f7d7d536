"""What an engine's opaque chunk is in the store's own words: a layout, a prompt, pages.

A chunk is one block, and one page, of a namespace of its own kind. Its key is that of a prompt of zeros that is exactly
one block long, with the engine's name for it as extra key. In the engine's memory it lies in one or more runs:

    run 0    |=======|      |=======|      |=======|      slot n of a run: `size` bytes at address + n * stride
    run 1        |==|           |==|           |==|       chunk n: slot n of all runs; what is in it is not known
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvstore.block.errors import BadInput
from kvstore.block.identity import ExtraKey
from kvstore.block.layout import BLOCK_TOKENS_UNIT, MAX_BLOCK_TOKENS, KvGroup, Layout
from kvstore.client.handle import NamespaceHandle
from tiering.frame import MAX_SLICES

SLICE_BYTES = 512 << 10
"""Runs are cut into slices of at least this size, each with a digest: copied and checked while it is in a cache."""
MAX_RUN_SLICES = 32


class ChunkRun(NamedTuple):
    """One run of every chunk, in memory that its engine keeps."""

    address: int
    stride: int
    size: int


def chunk_layout(group: str, block_tokens: int, sizes: Sequence[int]) -> Layout:
    """The layout of a namespace of chunks whose runs have these sizes. Raises `BadInput`, one line, for sizes that no
    block can have."""
    is_block = 0 < block_tokens <= MAX_BLOCK_TOKENS and block_tokens % BLOCK_TOKENS_UNIT == 0
    if not is_block or not sizes or any(size < 1 or size % block_tokens for size in sizes):
        raise BadInput(
            f"chunks of {block_tokens} tokens and {sum(sizes)} bytes (KV group {group!r}) cannot be stored; give a "
            f"chunk a multiple of {BLOCK_TOKENS_UNIT} tokens that divides its bytes, at most {MAX_BLOCK_TOKENS}: "
            f"{BLOCK_TOKENS_UNIT}, 128, 256, 512, ..."
        )
    layers: dict[int, list[int]] = {}
    number = 0
    for size in sizes:
        count = _slices_of(size, block_tokens)
        layers.setdefault(size // (count * block_tokens), []).extend(range(number, number + count))
        number += count
    cut = [
        (width, numbers[first : first + MAX_SLICES])
        for width, numbers in layers.items()
        for first in range(0, len(numbers), MAX_SLICES)
    ]
    names = (f"{group} +{number}" if number else group for number in range(len(cut)))
    groups = [KvGroup(name, tuple(some), 1, (width,), "uint8") for name, (width, some) in zip(names, cut, strict=True)]
    return Layout(tuple(groups), block_tokens, packing="opaque")


def chunk_planes(block_tokens: int, runs: Sequence[ChunkRun], slots: int) -> dict[int, tuple[torch.Tensor]]:
    """These runs as planes of `Pages` whose page numbers are slots: views, no copy."""
    planes = []
    for address, stride, size in runs:
        memory = memoryview((ctypes.c_uint8 * ((slots - 1) * stride + size)).from_address(address))
        width = size // (_slices_of(size, block_tokens) * block_tokens)
        shape, strides = (slots, block_tokens, 1, width), (stride, width, width, 1)
        step = block_tokens * width
        planes += [torch.from_numpy(np.ndarray(shape, np.uint8, memory, at, strides)) for at in range(0, size, step)]
    return {number: (plane,) for number, plane in enumerate(planes)}


def chunk_key(namespace: NamespaceHandle, name: bytes) -> bytes:
    return namespace.hashed(bytes(4 * namespace.block_tokens), (ExtraKey(b"engine:" + name),)).keys[0]


def _slices_of(size: int, block_tokens: int) -> int:
    count = max(1, min(MAX_RUN_SLICES, size // SLICE_BYTES))
    while size % (count * block_tokens):
        count -= 1
    return count
