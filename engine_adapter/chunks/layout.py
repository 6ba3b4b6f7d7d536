"""What an engine's opaque chunk is in the store's own words: a layout, a prompt, pages.

A chunk is one block of a namespace of its own kind, named by a prompt of zeros that is exactly one block long, with the
engine's name as extra key. Must never know what is in a chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.block.errors import BadInput
from kvstore.block.identity import ExtraKey
from kvstore.block.layout import BLOCK_TOKENS_UNIT, MAX_BLOCK_TOKENS, KvGroup, Layout
from kvstore.client.handle import NamespaceHandle

SLICE_BYTES = 128 << 10
"""Chunks are cut into slices of at least this size, each with a digest: copied and checked while it is in a cache."""
MAX_SLICES = 32


def chunk_layout(group: str, block_tokens: int, chunk_bytes: int) -> Layout:
    """The layout of a namespace of opaque chunks. Raises `BadInput`, one line, for sizes that no block can have."""
    is_block = 0 < block_tokens <= MAX_BLOCK_TOKENS and block_tokens % BLOCK_TOKENS_UNIT == 0
    if not is_block or chunk_bytes < 1 or chunk_bytes % block_tokens:
        raise BadInput(
            f"chunks of {block_tokens} tokens and {chunk_bytes} bytes (KV group {group!r}) cannot be stored; give a "
            f"chunk a multiple of {BLOCK_TOKENS_UNIT} tokens that divides its bytes, at most {MAX_BLOCK_TOKENS}: "
            f"{BLOCK_TOKENS_UNIT}, 128, 256, 512, ..."
        )
    count = max(1, min(MAX_SLICES, chunk_bytes // SLICE_BYTES))
    while chunk_bytes % (count * block_tokens):
        count -= 1
    width = chunk_bytes // (count * block_tokens)
    return Layout((KvGroup(group, tuple(range(count)), 1, (width,), "uint8"),), block_tokens, packing="opaque")


def chunk_prompt(namespace: NamespaceHandle, name: bytes) -> tuple[bytes, tuple[ExtraKey]]:
    """What a chunk is called in the store's own words: token ids and extra keys of one full block."""
    return bytes(4 * namespace.block_tokens), (ExtraKey(b"engine:" + name),)


def chunk_planes(namespace: NamespaceHandle, memory: np.ndarray[Any, Any]) -> dict[int, tuple[np.ndarray[Any, Any]]]:
    """Memory, uint8 [slots, chunk bytes], as planes of `Pages` whose page numbers are slots: views, no copy."""
    (group,) = namespace.layout.groups
    size = namespace.block_tokens * group.plane_widths[0]
    shape = (len(memory), namespace.block_tokens, 1, group.plane_widths[0])
    return {n: (memory[:, n * size : (n + 1) * size].reshape(shape),) for n in group.layers}
