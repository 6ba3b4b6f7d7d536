"""What an engine's opaque chunk is in the store's own words: a layout, a prompt, pages.

A chunk is one block, and one page, of a namespace of its own kind. Its key is that of a prompt of zeros that is exactly
one block long, with the engine's name for it as extra key. In the engine's memory it lies in one or more runs:

    run 0    |=======|      |=======|      |=======|      slot n of a run: `size` bytes at address + n * stride
    run 1        |==|           |==|           |==|       chunk n: slot n of all runs; what is in it is not known
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from kvstore.block.identity import ExtraKey
from kvstore.block.layout import KvGroup, Layout
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
    """The layout of a namespace of chunks whose runs have these sizes. A chunk has a row for each token where that
    divides its run, else one row. Raises `BadInput`, one line, for sizes that no block can have."""
    layers: dict[tuple[int, int], list[int]] = {}
    number = 0
    for size in sizes:
        count, rows, width = _cut(size, block_tokens)
        layers.setdefault((width, block_tokens // rows), []).extend(range(number, number + count))
        number += count
    groups = [
        KvGroup(group, tuple(numbers[first : first + MAX_SLICES]), 1, (width,), "uint8", row_tokens=row_tokens)
        for (width, row_tokens), numbers in layers.items()
        for first in range(0, len(numbers), MAX_SLICES)
    ]
    named = (replace(one, name=f"{group} +{number}" if number else group) for number, one in enumerate(groups))
    return Layout(tuple(named), block_tokens, packing="opaque")


def chunk_planes(block_tokens: int, runs: Sequence[ChunkRun], slots: int) -> dict[int, tuple[torch.Tensor]]:
    """These runs as planes of `Pages` whose page numbers are slots: views, no copy."""
    planes = []
    for address, stride, size in runs:
        memory = memoryview((ctypes.c_uint8 * ((slots - 1) * stride + size)).from_address(address))
        _, rows, width = _cut(size, block_tokens)
        shape, strides = (slots, rows, 1, width), (stride, width, width, 1)
        step = rows * width
        planes += [torch.from_numpy(np.ndarray(shape, np.uint8, memory, at, strides)) for at in range(0, size, step)]
    return {number: (plane,) for number, plane in enumerate(planes)}


def chunk_key(namespace: NamespaceHandle, name: bytes) -> bytes:
    return namespace.hashed(bytes(4 * namespace.block_tokens), (ExtraKey(b"engine:" + name),)).keys[0]


def _cut(size: int, block_tokens: int) -> tuple[int, int, int]:
    count, rows = max(1, min(MAX_RUN_SLICES, size // SLICE_BYTES)), 1 if size % block_tokens else block_tokens
    while size % (count * rows):
        count -= 1
    return count, rows, size // (count * rows)
