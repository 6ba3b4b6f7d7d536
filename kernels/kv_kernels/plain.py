"""Where an engine's paged KV lies on a device, and blocks between such pages and payloads in host memory, in plain
torch, one plane after another.

A `PoolTable` is built once, when an engine registers its pages; afterwards a launch needs no Python per layer. A layout
is nothing but strides: pages may be token-major, head-major, fused K and V, or keep K transposed.

The route of pages for which there is no faster one, and what every faster route is held against: it writes the same
bytes. `save` and `load` are the twins of those in `triton_pools`. This file must be right by inspection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_kernels.copies import Flaw
from kv_kernels.host import Array, Paged, SliceBySlice
from kv_kernels.int8 import Unwritable, dequantize, packed, quantize, unpacked
from kv_kernels.int8_form import ALIGN_BYTES, Form

Layer = Sequence[torch.Tensor]
"""Its planes, each [pages, page_tokens, heads, width]."""
WIDEST = 4096
"""Numbers of a token and head in one plane; more does not fit into a program's registers."""


class PoolTable(NamedTuple):
    """The pools of a range of layers: base addresses on the device, and what is equal in all of them.

    planes: [layers][planes] tensors [pages, page_tokens, heads, width]; held, so that the addresses stay good.
    addresses: int64 [layers, planes] on the device.
    strides, widths: of each plane, the same in every layer; strides in numbers, as its shape.
    aligned: whether every address is a multiple of 16, so that accesses may be as wide.
    """

    planes: tuple[tuple[torch.Tensor, ...], ...]
    addresses: torch.Tensor
    strides: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    dtype: torch.dtype
    page_tokens: int
    heads: int
    aligned: bool

    @property
    def layers(self) -> int:
        return len(self.planes)

    @staticmethod
    def of(planes: Sequence[Sequence[torch.Tensor]], addresses: torch.Tensor | None = None) -> PoolTable:
        """planes: one (MLA) or two (K, V) per layer, [pages, page_tokens, heads, width], any strides; head ranges and
        fused pools as views. addresses: where the caller puts them; if not given they are copied to the device, which
        waits for it. Raises `ValueError` where layers differ: such layers need tables of their own."""
        if not planes or len(planes[0]) not in (1, 2):
            raise ValueError("a pool table needs at least one layer of one (MLA) or two planes (K, V); none were given")
        first = planes[0]
        for layer, tensors in enumerate(planes):
            if len(tensors) != len(first):
                raise ValueError(f"layer {layer} has {len(tensors)} planes, layer 0 has {len(first)}; {_SPLIT}")
            for plane, tensor in enumerate(tensors):
                _check_plane(f"plane {plane} of layer {layer}", tensor, first[0], first[plane])
        table = tuple([tuple(layer) for layer in planes])
        places = [[tensor.data_ptr() for tensor in layer] for layer in table]
        if addresses is None:
            addresses = torch.tensor(places, dtype=torch.int64).to(first[0].device)
        return PoolTable(
            planes=table,
            addresses=addresses,
            strides=tuple([tensor.stride() for tensor in first]),
            widths=tuple([tensor.shape[3] for tensor in first]),
            dtype=first[0].dtype,
            page_tokens=first[0].shape[1],
            heads=first[0].shape[2],
            aligned=all(address % ALIGN_BYTES == 0 for layer in places for address in layer),
        )


_SPLIT = "make one table for the layers that are alike and another one for the rest"


def _check_plane(name: str, tensor: torch.Tensor, pool: torch.Tensor, alike: torch.Tensor) -> None:
    if tensor.dim() != 4 or 0 in tensor.shape:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}; give a view [pages, page_tokens, heads, width]")
    if tensor.shape[:3] != pool.shape[:3] or tensor.shape != alike.shape:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, layer 0 has {list(alike.shape)}; {_SPLIT}")
    if (tensor.dtype, tensor.device) != (pool.dtype, pool.device):
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, others {pool.dtype} on {pool.device}; {_SPLIT}")
    if tensor.stride() != alike.stride():
        raise ValueError(f"{name} has the strides {tensor.stride()}, layer 0 has {alike.stride()}; {_SPLIT}")
    if tensor.shape[3] > WIDEST:
        raise ValueError(f"{name} is {tensor.shape[3]} wide; at most {WIDEST} numbers per token and head are allowed")


class PlainCopy(SliceBySlice):
    """Through a block in memory of its own."""

    def __init__(self, form: Form, paged: Paged, dtype: str = "") -> None:
        """dtype: of the numbers of numpy's arrays."""
        self._form, self._tensors = form, [[_as_torch(plane, dtype) for plane in layer] for layer in paged.planes]
        super().__init__(paged, slice_bytes(self._tensors[0], paged.block_tokens, form))

    def encode_slice(self, layer: int, pages: Sequence[int], into: memoryview, address: int) -> Flaw | None:
        try:
            torch.frombuffer(into, dtype=torch.uint8).copy_(layer_slice(self._tensors[layer], pages, self._form))
        except Unwritable as unwritable:
            return unwritable.flaw
        return None

    def decode_slice(self, layer: int, pages: Sequence[int], skip: int, private: Array, address: int) -> None:
        planes = self._tensors[layer]
        into_pages(torch.from_numpy(private).to(planes[0].device), planes, pages, skip, self._form)


def save(pools: PoolTable, form: Form, table: torch.Tensor, payloads: torch.Tensor, status: torch.Tensor) -> None:
    """The twin of `triton_pools.save`."""
    size = slice_bytes(pools.planes[0], table.shape[1] * pools.page_tokens, form)
    for index, pages in enumerate(table.tolist()):
        for number, layer in enumerate(pools.planes):
            try:
                payloads[index, number * size : (number + 1) * size] = layer_slice(layer, pages, form)
            except Unwritable as unwritable:
                status[index] = max(int(status[index]), unwritable.flaw.value)


def load(pools: PoolTable, form: Form, table: torch.Tensor, payloads: torch.Tensor) -> None:
    """The twin of `triton_pools.load`."""
    size = slice_bytes(pools.planes[0], table.shape[1] * pools.page_tokens, form)
    for row, pages in zip(payloads, table.tolist(), strict=True):
        for number, layer in enumerate(pools.planes):
            into_pages(row[number * size : (number + 1) * size], layer, pages, 0, form)


def slice_bytes(layer: Layer, block_tokens: int, form: Form) -> int:
    raw = sum([plane.shape[2] * plane.shape[3] * plane.itemsize for plane in layer]) * block_tokens
    return raw if form is None else form.size_bytes


def layer_slice(layer: Layer, pages: Sequence[int], form: Form) -> torch.Tensor:
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


def into_pages(row: torch.Tensor, layer: Layer, pages: Sequence[int], skip: int, form: Form) -> None:
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


def _as_torch(plane: Any, dtype: str) -> torch.Tensor:
    if isinstance(plane, np.ndarray):
        plane = torch.from_numpy(plane.view(f"i{plane.itemsize}")).view(getattr(torch, dtype))
    return plane  # type: ignore[no-any-return]


def _as_integers(plane: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: every device can index those, which is not so of float8."""
    return plane.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plane.element_size()])
