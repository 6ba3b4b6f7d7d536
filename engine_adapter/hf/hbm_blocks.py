"""Blocks in the pool on the engine's device, copied from and to its pages; least recently used out first.

A block in the pool is what its page holds, for each layer and plane [token, kv_head, width]. A prompt's first blocks
are always evicted last, so what is found is a prefix. Must never hold blocks of two namespaces: a block is found by its
prefix key alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import torch

from kvstore.block.layout import Layout
from kvstore.block.pages import Pages


class HbmBlocks:
    """Decoded blocks of one namespace in the engine's own memory, asked before the store. Keys are prefix keys; pages
    begin with the first of them, and each is a block."""

    def __init__(self, layout: Layout, capacity_bytes: int) -> None:
        self.capacity_blocks = max(0, capacity_bytes) // layout.raw_bytes
        self._blocks: OrderedDict[bytes, list[torch.Tensor]] = OrderedDict()
        """The planes of the layers in turn, by prefix key."""

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first on, are here."""
        return len(list(takewhile(self._blocks.__contains__, keys)))

    def load(self, keys: Sequence[bytes], pages: Pages) -> None:
        """Copy these blocks into pages. All of them must be here."""
        blocks = [self._blocks[key] for key in keys]
        for number, plane in enumerate(_planes(pages)):
            plane[pages.table[0] : pages.table[0] + len(keys)].copy_(torch.stack([one[number] for one in blocks]))
        self._touch(keys)

    def save(self, keys: Sequence[bytes], pages: Pages) -> None:
        """Keep as many of these blocks as fit, the first ones first."""
        keys = keys[: self.capacity_blocks]
        for number in range(self.leading(keys), len(keys)):
            if len(self._blocks) >= self.capacity_blocks:
                self._touch(keys[:number])
                self._blocks.popitem(last=False)
            self._blocks[keys[number]] = [plane[pages.table[number]].clone() for plane in _planes(pages)]
        self._touch(keys)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Use blocks from the last to the first: the first becomes the most recent."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _planes(pages: Pages) -> list[torch.Tensor]:
    return [plane for layer in sorted(pages.planes) for plane in pages.planes[layer]]
