"""Preallocated K and V buffers, seen as a model's cache and as the store's pages. Imports torch only.

    one plane of one layer: [rows, kv_heads, capacity, head_dim]
      row 0   | block 0 | block 1 | block 2 | ...      one page of the store: one block of one row, all heads
      row 1   | block 0 | block 1 | ...                every row begins at index 0: a token's index is its position

Must never be given to two requests at once, nor hold more than `MAX_FREE` unused sets.
"""

from __future__ import annotations

import torch

from kvstore.block.layout import Layout
from kvstore.block.pages import Pages

MAX_FREE = 2


class BufferSet:
    """Memory for the K and V of up to `rows` sequences of `capacity` tokens each, in every layer of a model."""

    def __init__(self, layout: Layout, rows: int, capacity: int, device: torch.device) -> None:
        """capacity: tokens, whole blocks. The memory is not cleared: it is written before it is read."""
        assert capacity % layout.block_tokens == 0, "a buffer holds whole blocks"
        (group,) = layout.groups
        dtype = getattr(torch, group.dtype)
        self.rows, self.capacity = rows, capacity
        self.planes = [
            tuple(
                torch.empty(rows, group.kv_heads, capacity, width, dtype=dtype, device=device)
                for width in group.plane_widths
            )
            for _ in group.layers
        ]
        self._block_tokens = layout.block_tokens

    def pages(self, row: int, stop_token: int) -> Pages:
        """The whole blocks of one row before `stop_token`, as the store's pages: views, no copy."""
        block = self._block_tokens
        planes = {layer: [_paged(plane[row], block) for plane in planes] for layer, planes in enumerate(self.planes)}
        return Pages(planes, range(stop_token // block), block)

    def of_rows(self, start: int, stop: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of every layer, for the rows start .. stop - 1."""
        return [(keys[start:stop], values[start:stop]) for keys, values in self.planes]

    def clear(self, row: int, first_token: int) -> None:
        """Zero a row from a token on: what is masked must still be finite, as 0 * NaN is NaN."""
        for planes in self.planes:
            for plane in planes:
                plane[row, :, first_token:].zero_()


class FreeList:
    """Keeps the last buffer sets for the next request, so that fresh memory's page faults are paid once."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._free: list[BufferSet] = []

    def take(self, rows: int, tokens: int) -> BufferSet:
        """The smallest set that fits, or a new one of up to a quarter more than was asked for."""
        fitting = [buffers for buffers in self._free if buffers.rows >= rows and buffers.capacity >= tokens]
        if fitting:
            chosen = min(fitting, key=lambda buffers: buffers.rows * buffers.capacity)
            self._free.remove(chosen)
            return chosen
        self._free.clear()  # gives the memory back before more is taken
        step = max(self._layout.block_tokens, 1 << max(0, tokens.bit_length() - 3))
        step = -(-step // self._layout.block_tokens) * self._layout.block_tokens
        return BufferSet(self._layout, rows, -(-tokens // step) * step, self._device)

    def give(self, buffers: BufferSet) -> None:
        """Hand a set back; its contents are garbage from now on."""
        self._free = [*self._free, buffers][-MAX_FREE:]


def _paged(plane: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """One row's plane [kv_heads, capacity, width] as pages [pages, block_tokens, kv_heads, width]."""
    heads, capacity, width = plane.shape
    return plane.view(heads, capacity // block_tokens, block_tokens, width).permute(1, 2, 0, 3)
