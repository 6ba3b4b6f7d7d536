"""Where an engine's paged KV lies on a device, in the form that kernels take.

A `PoolTable` is built once, when an engine registers its pages; afterwards a launch needs no Python per layer. A layout
is nothing but strides: pages may be token-major, head-major, fused K and V, or keep K transposed. Every launch's
checks, before it touches memory, are here too. Nothing here imports triton; the kernels are in `triton_raw` and
`triton_int8`, their twins in plain torch in `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from kv_kernels.int8 import ALIGN_BYTES, GROUP, KC64, SliceForm, slice_form

RAW_BYTES = (1, 2, 4)
"""Widths of a number that a raw copy can move."""
NUMBERS = (torch.bfloat16, torch.float16, torch.float32)
"""What the 8-bit codecs quantize."""
WIDEST = 4096
"""Numbers of a token and head in one plane; more does not fit into a program's registers."""


class Strides(NamedTuple):
    """Of a plane [pages, page_tokens, heads, width], in numbers."""

    page: int
    token: int
    head: int
    number: int


@dataclass(frozen=True, eq=False)
class PoolTable:
    """The pools of a range of layers: base addresses on the device, and what is equal in all of them.

    planes: [layers][planes] tensors [pages, page_tokens, heads, width]; held, so that the addresses stay good.
    addresses: int64 [layers, planes] on the device.
    strides, widths: of each plane, the same in every layer.
    aligned: whether every address is a multiple of 16, so that accesses may be as wide.
    """

    planes: tuple[tuple[torch.Tensor, ...], ...] = field(repr=False)
    addresses: torch.Tensor = field(repr=False)
    strides: tuple[Strides, ...]
    widths: tuple[int, ...]
    dtype: torch.dtype
    pages: int
    page_tokens: int
    heads: int
    aligned: bool

    @property
    def layers(self) -> int:
        return len(self.planes)

    @property
    def device(self) -> torch.device:
        return self.addresses.device

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
            strides=tuple([Strides(*tensor.stride()) for tensor in first]),
            widths=tuple([tensor.shape[3] for tensor in first]),
            dtype=first[0].dtype,
            pages=first[0].shape[0],
            page_tokens=first[0].shape[1],
            heads=first[0].shape[2],
            aligned=all(address % ALIGN_BYTES == 0 for layer in places for address in layer),
        )

    def part(self, first: int, last: int, addresses: torch.Tensor) -> PoolTable:
        """Its layers [first, last). addresses: of all its layers, int64 [layers, planes] on the device."""
        return replace(self, planes=self.planes[first:last], addresses=addresses[first:last])


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


class Launch(NamedTuple):
    """What a launch covers: `blocks` blocks, whose payloads have `form`, or none if raw."""

    blocks: int
    block_tokens: int
    slice_bytes: int
    form: SliceForm | None


def check_launch(
    pools: PoolTable,
    codec: str | None,
    table: torch.Tensor,
    payloads: torch.Tensor,
    payload_at: int,
) -> Launch:
    """What every launch and every twin checks first: no operation on a tensor, no wait for the device.

    Page ids are not looked at, which would be such a wait: that each is below `pools.pages`, and that no page is named
    twice where pages are written, is the caller's to keep. Raises `ValueError`.
    """
    if table.dim() != 2 or table.dtype not in (torch.int32, torch.int64) or table.stride(1) != 1:
        given = f"{table.dtype} {list(table.shape)} with strides {table.stride()}"
        raise ValueError(f"the page table is {given}; give int32 or int64 [blocks, pages_per_block] with rows in a run")
    if payloads.dim() != 2 or payloads.dtype is not torch.uint8 or payloads.stride(1) != 1:
        given = f"{payloads.dtype} {list(payloads.shape)} with strides {payloads.stride()}"
        raise ValueError(f"the payloads are {given}; give uint8 [blocks, bytes] with rows in a run")
    blocks, block_tokens = table.shape[0], table.shape[1] * pools.page_tokens
    if payloads.shape[0] != blocks:
        raise ValueError(f"{blocks} rows of the page table and {payloads.shape[0]} payloads; give one payload per row")
    if not pools.device == table.device == payloads.device:
        given = f"pools on {pools.device}, page table on {table.device}, payloads on {payloads.device}"
        raise ValueError(f"{given}; all of them belong on one device")
    if block_tokens == 0 or (codec is not None and block_tokens % GROUP):
        given = f"{table.shape[1]} pages of {pools.page_tokens} tokens"
        raise ValueError(f"{given} are a block of {block_tokens} tokens; in 8 bits a block has a multiple of {GROUP}")
    form = _form(pools, codec, block_tokens)
    if form is None:
        slice_bytes = pools.heads * block_tokens * sum(pools.widths) * pools.dtype.itemsize
    else:
        slice_bytes = form.size_bytes
    end = payload_at + pools.layers * slice_bytes
    if payload_at < 0 or end > payloads.shape[1]:
        given = f"payloads at byte {payload_at} end at byte {end} of rows of {payloads.shape[1]}"
        raise ValueError(f"{given}; give rows of at least {pools.layers * slice_bytes} bytes from payload_at on")
    if payload_at % ALIGN_BYTES or payloads.data_ptr() % ALIGN_BYTES or (blocks > 1 and payloads.stride(0) % 16):
        given = f"address {payloads.data_ptr():#x}, payload_at {payload_at}, stride {payloads.stride(0)}"
        raise ValueError(f"payloads lie at {given}; each has to be a multiple of {ALIGN_BYTES}")
    return Launch(blocks, block_tokens, slice_bytes, form)


def _form(pools: PoolTable, codec: str | None, block_tokens: int) -> SliceForm | None:
    if codec is None:
        if pools.dtype.itemsize not in RAW_BYTES:
            raise ValueError(f"numbers of {pools.dtype} have {pools.dtype.itemsize} bytes; raw moves 1, 2 or 4")
        return None
    if codec != KC64:
        raise ValueError(f"codec {codec!r} is not known here; give {KC64!r}")
    if pools.dtype not in NUMBERS:
        raise ValueError(f"pools of {pools.dtype}; {codec} is for {', '.join(str(dtype) for dtype in NUMBERS)}")
    return _slice_form(codec, pools.heads, block_tokens, pools.widths, pools.dtype.itemsize)


_slice_form = lru_cache(maxsize=256)(slice_form)


def check_status(status: torch.Tensor, launch: Launch, device: torch.device) -> None:
    """Raises `ValueError` unless status is int32 [blocks], in a run, on that device."""
    shape_is_right = tuple(status.shape) == (launch.blocks,) and status.is_contiguous()
    if not shape_is_right or status.dtype is not torch.int32 or status.device != device:
        given = f"{status.dtype} {list(status.shape)} on {status.device}"
        raise ValueError(f"the status is {given}; give int32 [{launch.blocks}], zeroed, on {device}")
