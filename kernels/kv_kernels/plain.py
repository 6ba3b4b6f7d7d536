"""Blocks between pages on any device and payloads in host memory, in plain torch, one plane after another.

The route of pages for which there is no faster one, and what every faster route is held against: it writes the same
bytes. `save` and `load` are the twins of those in `triton_pools`. This file must be right by inspection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_kernels.copies import Digest, Flaw, Span
from kv_kernels.host import UNWRITABLE_PAGES, BlockByBlock
from kv_kernels.int8 import SliceForm, Unwritable, dequantize, packed, quantize, unpacked
from kv_kernels.pools import PoolTable

Planes = Sequence[torch.Tensor]
"""Of one layer, each [pages, page_tokens, heads, width]."""


class PlainCopy(BlockByBlock):
    """Holds the tensors for as long as it lives."""

    def __init__(
        self,
        form: SliceForm | None,
        planes: Sequence[Planes],
        table: Sequence[int],
        page_tokens: int,
        block_tokens: int,
        *,
        writable: bool = True,
    ) -> None:
        """form: of a layer slice in 8 bits; None for bytes as they are. planes: of each layer slice. table: physical
        pages. writable: whether they can be loaded into, which torch cannot tell of memory that it was given."""
        self._form = form
        self._writable = writable
        self._planes = planes
        self._table = table
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens

    def encode_block(self, token: int, into: Span, digest: Digest) -> list[bytes] | Flaw:
        """The block at `token` into a payload: the digests of its layer slices, taken from the payload, or a flaw."""
        pages, digests, start = self._pages(token, 0), [], 0
        for layer in self._planes:
            try:
                made = layer_slice(layer, pages, self._form).cpu()
            except Unwritable as unwritable:
                return unwritable.flaw
            view = into.view[start : start + len(made)]
            torch.frombuffer(view, dtype=torch.uint8).copy_(made)
            digests.append(digest(view))
            start += len(made)
        return digests

    def decode_block(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """A payload into the block at `token`, without its first `skip` tokens; False if a digest differs. A layer
        slice is verified in a private copy before any of it reaches the pages."""
        if not self._writable:
            raise ValueError(UNWRITABLE_PAGES)
        pages, start = self._pages(token, skip), 0
        for layer, want in zip(self._planes, expected, strict=True):
            stop = start + slice_bytes(layer, self._block_tokens, self._form)
            private = torch.frombuffer(bytearray(payload.view[start:stop]), dtype=torch.uint8)
            if digest(private.numpy()) != want:
                return False
            into_pages(private.to(layer[0].device), layer, pages, skip, self._form)
            start = stop
        return True

    def _pages(self, token: int, skip: int) -> Sequence[int]:
        first, stop = (token + skip) // self._page_tokens, (token + self._block_tokens) // self._page_tokens
        return self._table[first:stop]


def save(
    pools: PoolTable, form: SliceForm | None, table: torch.Tensor, payloads: torch.Tensor, status: torch.Tensor
) -> None:
    """The twin of `triton_pools.save`."""
    size = slice_bytes(pools.planes[0], table.shape[1] * pools.page_tokens, form)
    for index, pages in enumerate(table.tolist()):
        for number, layer in enumerate(pools.planes):
            try:
                payloads[index, number * size : (number + 1) * size] = layer_slice(layer, pages, form)
            except Unwritable as unwritable:
                status[index] = max(int(status[index]), unwritable.flaw.value)


def load(pools: PoolTable, form: SliceForm | None, table: torch.Tensor, payloads: torch.Tensor) -> None:
    """The twin of `triton_pools.load`."""
    size = slice_bytes(pools.planes[0], table.shape[1] * pools.page_tokens, form)
    for row, pages in zip(payloads, table.tolist(), strict=True):
        for number, layer in enumerate(pools.planes):
            into_pages(row[number * size : (number + 1) * size], layer, pages, 0, form)


def slice_bytes(layer: Planes, block_tokens: int, form: SliceForm | None) -> int:
    raw = sum([plane.shape[2] * plane.shape[3] * plane.itemsize for plane in layer]) * block_tokens
    return raw if form is None else form.size_bytes


def layer_slice(layer: Planes, pages: Sequence[int], form: SliceForm | None) -> torch.Tensor:
    """Of a block, flat uint8. Raises `Unwritable`, with the worst flaw of its planes."""
    blocks = [gather_plane(plane, pages) for plane in layer]
    if form is None:
        return torch.cat([block.view(torch.uint8).flatten() for block in blocks])
    parts, flaws = [], []
    for block, of_plane in zip(blocks, form.planes, strict=True):
        try:
            parts.append(quantize(block, of_plane.axis))
        except Unwritable as unwritable:
            flaws.append(unwritable.flaw.value)
    if flaws:
        raise Unwritable(Flaw(max(flaws)))
    return packed(form, parts)


def into_pages(row: torch.Tensor, layer: Planes, pages: Sequence[int], skip: int, form: SliceForm | None) -> None:
    """The mirror of `layer_slice`, without a block's first `skip` tokens. pages: of the others; -1 leaves one out."""
    at = 0
    for number, plane in enumerate(layer):
        _, page_tokens, heads, width = plane.shape
        if form is not None:
            block = dequantize(*unpacked(row, form, form.planes[number], plane.dtype), plane.dtype)
        else:
            plane, tokens = _as_integers(plane), skip + len(pages) * page_tokens
            start, at = at, at + heads * tokens * width * plane.itemsize
            block = row[start:at].clone().view(plane.dtype).view(heads, tokens, width)
        scatter_plane(block[:, skip:], plane, pages)


def gather_plane(plane: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
    """Pages [pages, page_tokens, heads, width] named by `pages` as one block [heads, tokens, width], contiguous."""
    index = torch.tensor(list(pages), dtype=torch.int64, device=plane.device)
    chosen = _as_integers(plane).index_select(0, index)
    return chosen.flatten(0, 1).transpose(0, 1).contiguous().view(plane.dtype)


def scatter_plane(block: torch.Tensor, plane: torch.Tensor, pages: Sequence[int]) -> None:
    """The mirror: [heads, tokens, width] into the pages named, and into no other. -1 leaves a page out."""
    heads, tokens, width = block.shape
    chosen = block.transpose(0, 1).reshape(len(pages), tokens // len(pages), heads, width)
    for position, page in enumerate(pages):
        if page >= 0:
            plane[page].copy_(chosen[position])


def _as_integers(plane: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: every device can index those, which is not so of float8."""
    return plane.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plane.element_size()])
