"""Where an engine's paged KV lies on a device, in the form that kernels take.

A `PoolTable` is built once, when an engine registers its pages; afterwards a launch needs no Python per layer. A layout
is nothing but strides: pages may be token-major, head-major, fused K and V, or keep K transposed. Nothing here imports
triton; the kernels are in `triton_pools`, their twins in `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from kv_kernels.int8_form import ALIGN_BYTES

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

    def part(self, first: int, last: int, addresses: torch.Tensor) -> PoolTable:
        """Its layers [first, last). addresses: of all its layers, int64 [layers, planes] on the device."""
        return self._replace(planes=self.planes[first:last], addresses=addresses[first:last])


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


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
