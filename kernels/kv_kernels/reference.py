"""Plain torch versions of the transfer operations, on any device.

The reference for every faster route: `host` on the CPU (`ReferenceRawCopy`), the kernels of `triton_raw` and
`triton_int8` on a GPU (`gather`, `scatter`, `gather_quantize`, `dequantize_scatter`: the same signatures and the same
bits). Also the route of devices without triton. Written for reading, one index operation per plane; the only file in
this folder that must be right by inspection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kv_kernels.copies import Digest, Flaw, Span
from kv_kernels.host import BlockByBlock
from kv_kernels.int8 import GROUP, Axis, Unwritable, dequantize, quantize, unpacked, write_packed
from kv_kernels.pools import PoolTable, check_launch, check_status


def gather(pools: PoolTable, table: torch.Tensor, payloads: torch.Tensor, payload_at: int = 0) -> None:
    """The twin of `triton_raw.gather`."""
    check_launch(pools, None, table, payloads, payload_at)
    for row, pages in zip(payloads, table.tolist(), strict=True):
        at = payload_at
        for layer in pools.planes:
            for plane in layer:
                at = _put(row, at, gather_plane(_as_integers(plane), pages))


def scatter(pools: PoolTable, table: torch.Tensor, payloads: torch.Tensor, payload_at: int = 0) -> None:
    """The twin of `triton_raw.scatter`."""
    launch = check_launch(pools, None, table, payloads, payload_at)
    for row, pages in zip(payloads, table.tolist(), strict=True):
        at = payload_at
        for layer in pools.planes:
            for plane in map(_as_integers, layer):
                block, at = _take(row, at, plane.dtype, pools.heads, launch.block_tokens, plane.shape[3])
                scatter_plane(block, plane, pages)


def gather_quantize(
    pools: PoolTable, codec: str, table: torch.Tensor, payloads: torch.Tensor, status: torch.Tensor, payload_at: int = 0
) -> None:
    """The twin of `triton_int8.gather_quantize`."""
    launch = check_launch(pools, codec, table, payloads, payload_at)
    check_status(status, launch, pools.device)
    assert launch.form is not None
    for index, pages in enumerate(table.tolist()):
        for number, planes in enumerate(pools.planes):
            at = payload_at + number * launch.slice_bytes
            layer_slice = payloads[index, at : at + launch.slice_bytes].zero_()
            for plane, form in zip(planes, launch.form.planes, strict=True):
                block = gather_plane(plane, pages)
                try:
                    made = quantize(block, form.axis)
                except Unwritable:
                    status[index] = max(int(status[index]), _flaw(block, form.axis))
                    continue
                write_packed(layer_slice, form, made)


def dequantize_scatter(
    pools: PoolTable, codec: str, table: torch.Tensor, payloads: torch.Tensor, payload_at: int = 0
) -> None:
    """The twin of `triton_int8.dequantize_scatter`."""
    launch = check_launch(pools, codec, table, payloads, payload_at)
    assert launch.form is not None
    for row, pages in zip(payloads, table.tolist(), strict=True):
        for number, planes in enumerate(pools.planes):
            layer_slice = row[payload_at + number * launch.slice_bytes :]
            for plane, form in zip(planes, launch.form.planes, strict=True):
                part = unpacked(layer_slice, launch.form, form, pools.dtype)
                scatter_plane(dequantize(*part, pools.dtype), plane, pages)


def _flaw(block: torch.Tensor, axis: Axis) -> int:
    """The largest value of a `Flaw` among the groups of numbers of a block that share a scale."""
    x = block.float()
    if axis is Axis.CHANNEL:
        groups, divisor = list(x.unflatten(1, (-1, GROUP)).transpose(2, 3).unbind(1)), 255.0
    else:
        groups, divisor = list(x.split(GROUP if axis is Axis.LATENT else x.shape[2], 2)), 127.0
    worst = 0
    for group in groups:  # [heads, groups, numbers of a group]
        finite = group.isfinite().all(2)
        reach = group.amax(2) - group.amin(2) if axis is Axis.CHANNEL else group.abs().amax(2)
        beyond = finite & (reach / divisor > torch.finfo(torch.float16).max)
        if bool(beyond.any()):
            worst = Flaw.OUT_OF_RANGE.value
        elif not bool(finite.all()):
            worst = max(worst, Flaw.NONFINITE.value)
    return worst


def _put(row: torch.Tensor, at: int, numbers: torch.Tensor) -> int:
    data = _bytes(numbers.contiguous())
    row[at : at + data.numel()] = data
    return at + data.numel()


def _take(row: torch.Tensor, at: int, dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, int]:
    end = at + torch.Size(shape).numel() * dtype.itemsize
    return row[at:end].clone().view(dtype).view(shape), end


def gather_plane(plane: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
    """Pages [pages, page_tokens, heads, width] named by `pages` as one block [heads, tokens, width], contiguous."""
    index = torch.tensor(list(pages), dtype=torch.int64, device=plane.device)
    chosen = plane.index_select(0, index)
    return chosen.flatten(0, 1).transpose(0, 1).contiguous()


def scatter_plane(block: torch.Tensor, plane: torch.Tensor, pages: Sequence[int]) -> None:
    """The mirror: [heads, tokens, width] into the pages named, and into no other. -1 leaves a page out."""
    heads, tokens, width = block.shape
    chosen = block.transpose(0, 1).reshape(len(pages), tokens // len(pages), heads, width)
    for position, page in enumerate(pages):
        if page >= 0:
            plane[page].copy_(chosen[position])


class ReferenceRawCopy(BlockByBlock):
    """Copies blocks between pages on any device and payloads in host memory, bit for bit."""

    def __init__(
        self, planes: Sequence[Sequence[Any]], table: Sequence[int], page_tokens: int, block_tokens: int
    ) -> None:
        """planes: per layer slice, per plane, a tensor [pages, page_tokens, heads, width]; table: physical pages."""
        self._planes = [[_as_integers(plane) for plane in layer] for layer in planes]
        self._table = table
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens

    def encode_block(self, token: int, into: Span, digest: Digest) -> list[bytes]:
        """Copy the block at `token` into a payload; returns each layer slice's digest, taken from the payload."""
        first = token // self._page_tokens
        pages = self._table[first : first + self._block_tokens // self._page_tokens]
        digests, offset = [], 0
        for layer in self._planes:
            start = offset
            for plane in layer:
                block = _bytes(gather_plane(plane, pages)).cpu()
                torch.frombuffer(into.view, dtype=torch.uint8, count=block.numel(), offset=offset).copy_(block)
                offset += block.numel()
            digests.append(digest(into.view[start:offset]))
        return digests

    def decode_block(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """Copy a payload into the block at `token`, without its first `skip` tokens; False if any digest differs.

        A layer slice is verified in a private copy before any of it reaches the pages.
        """
        first = (token + skip) // self._page_tokens
        pages = self._table[first : first + (self._block_tokens - skip) // self._page_tokens]
        offset = 0
        for layer, want in zip(self._planes, expected, strict=True):
            sizes = [plane.shape[2] * self._block_tokens * plane.shape[3] * plane.element_size() for plane in layer]
            private = torch.frombuffer(bytearray(payload.view[offset : offset + sum(sizes)]), dtype=torch.uint8)
            if digest(private.numpy()) != want:
                return False
            offset += sum(sizes)
            for plane, data in zip(layer, private.split(sizes), strict=True):
                block = data.to(plane.device).view(plane.dtype)
                block = block.view(plane.shape[2], self._block_tokens, plane.shape[3])
                scatter_plane(block[:, skip:], plane, pages)
        return True


def _as_integers(plane: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: every device can index those, which is not so of float8."""
    return plane.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plane.element_size()])


def _bytes(block: torch.Tensor) -> torch.Tensor:
    return block.view(torch.uint8).flatten()
