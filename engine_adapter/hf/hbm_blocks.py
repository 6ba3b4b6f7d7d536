"""Blocks in the pool on the engine's device, copied from and to its pages.

A block in the pool is one row of numbers: for each layer, for each plane, [kv_head, token, width], as in a payload. A
prompt's first blocks are always evicted last, so what is found is a prefix. Must never hold blocks of two namespaces: a
block is found by its prefix key alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from tiering.hbm import HbmPool, HbmUsage

_DECODED = b"decoded"
"""Appended to a prefix key: the name of the block as an inexact codec restored it."""
WINDOW_BLOCKS = 32
"""Blocks gathered at once: more take more memory beside the pool, fewer make more copies of a long prefix."""


class HbmBlocks:
    """Decoded blocks of one namespace in the engine's own memory, asked before the store. Keys are prefix keys."""

    def __init__(self, layout: Layout, device: torch.device, capacity_bytes: int) -> None:
        """capacity_bytes: allocated at once."""
        (group,) = layout.groups
        self._block_tokens = layout.block_tokens
        self._shapes = [
            (layer, number, group.kv_heads, width)
            for layer in group.layers
            for number, width in enumerate(group.plane_widths)
        ]
        elements = sum(heads * layout.block_tokens * width for _, _, heads, width in self._shapes)
        self._pool = HbmPool(device, elements, getattr(torch, group.dtype), capacity_bytes)
        self._device = device

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first on, are here."""
        return self._pool.leading([self._found(key) for key in keys])

    def computed(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first on, are here as the engine computed them."""
        return self._pool.leading(keys)

    def load(self, keys: Sequence[bytes], pages: Pages) -> None:
        """Copy these blocks into pages, which begin with the first of them. All of them must be here."""
        for start in range(0, len(keys), WINDOW_BLOCKS):
            window = keys[start : start + WINDOW_BLOCKS]
            rows = torch.stack([self._row(key) for key in window])
            index, pages_per_block = self._pages_of(pages, start, len(window))
            for (layer, number, heads, width), flat in zip(self._shapes, self._split(rows), strict=True):
                values = flat.reshape(len(window), heads, pages_per_block, pages.page_tokens, width)
                pages.planes[layer][number].index_copy_(0, index, values.permute(0, 2, 3, 1, 4).flatten(0, 1))
        self._touch(keys)

    def save(self, keys: Sequence[bytes], pages: Pages, decoded: range) -> None:
        """Keep as many of these blocks as fit, the first ones first; pages begin with the first of them. decoded:
        numbers of the blocks that an inexact codec restored."""
        count = min(len(keys), self._pool.usage().capacity_blocks)
        first = self.leading(keys[:count])
        for start in range(first, count, WINDOW_BLOCKS):
            window = keys[start : min(start + WINDOW_BLOCKS, count)]
            index, pages_per_block = self._pages_of(pages, start, len(window))
            columns = []
            for layer, number, heads, width in self._shapes:
                values = pages.planes[layer][number].index_select(0, index)
                values = values.view(len(window), pages_per_block, pages.page_tokens, heads, width)
                columns.append(values.permute(0, 3, 1, 2, 4).flatten(1))
            rows = torch.cat(columns, dim=1)
            self._touch(keys[:start])
            for block, (key, row) in enumerate(zip(window, rows, strict=True), start):
                key = key + _DECODED if block in decoded else key
                memory = self._pool.put(key)
                if memory is None:
                    continue
                try:
                    memory.copy_(row)
                except BaseException:  # half a block must not be found
                    self._pool.discard(key)
                    raise
        self._touch(keys[:count])

    def usage(self) -> HbmUsage:
        return self._pool.usage()

    def _row(self, key: bytes) -> torch.Tensor:
        row = self._pool.get(self._found(key))
        assert row is not None, "a block that was found is here until something is put"
        return row

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Use blocks from the last to the first: the first becomes the most recent."""
        for key in reversed(keys):
            self._pool.get(self._found(key))

    def _found(self, key: bytes) -> bytes:
        """The name under which the pool has a block: its key, or else that of its decoded form."""
        return key if self._pool.leading([key]) else key + _DECODED

    def _pages_of(self, pages: Pages, block: int, blocks: int) -> tuple[torch.Tensor, int]:
        assert not pages.groups, "the pool knows one page table"
        each = self._block_tokens // pages.page_tokens
        table = list(pages.table[block * each : (block + blocks) * each])
        return torch.tensor(table, dtype=torch.int64, device=self._device), each

    def _split(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        sizes = [heads * self._block_tokens * width for _, _, heads, width in self._shapes]
        columns: Sequence[torch.Tensor] = rows.split(sizes, dim=1)
        return columns
