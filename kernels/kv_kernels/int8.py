"""KV in 8 bits: how a layer slice lies in a payload, and what its numbers become, in plain torch.

`int8-kc64` keeps K asymmetric per channel over 64 tokens and V symmetric per token and head (the axes of KIVI, arXiv
2402.02750, at 8 bits). One latent plane (MLA) is kept symmetric per token in groups of 64 along its width, of which the
last may be shorter. A layer slice, C order:

    K and V                                     one latent plane
    K codes  int8 [head, token, width]          codes  int8 [head, token, width]
    V codes  int8 [head, token, width]          scale  fp16 [head, token, group]
    K scale  fp16 [head, token / 64, width]     zeros up to a multiple of 16
    zeros up to a multiple of a number's bytes
    K zero   the pool's dtype, as K scale
    V scale  fp16 [head, token]
    zeros up to a multiple of 16

All arithmetic is float32 and every operation rounds to nearest even, none is fused with another: two routes that keep
to that agree bit by bit. (Divisors here are tensors: by a Python number, torch on CUDA multiplies with its inverse.)
A scale s is (max - min) / 255 or max|x| / 127, rounded up to fp16; a code is floor((x - z) * (1 / s) + 0.5), clamped,
and K's is kept minus 128; a number comes back as code * s + z in the pool's dtype, and is at most its largest finite
number. So for every number of a block

    |x - decoded x| <= s / 2 * (1 + 2**-12) + e * |decoded x|     e: 2**-8 bfloat16, 2**-11 float16, 2**-23 float32

Where s is 0 all numbers were equal (K), or zero, and come back exactly; -0.0 comes back as 0.0. A block with a NaN or
an infinity, or whose scale is beyond fp16, cannot be written.

One exception, far below what a model computes: a scale for which float32 has no number is 0 as well. So where all
numbers of a group lie within 2**-142 of each other (K) or of zero, add 2**-142 to the bound; on a thread that flushes
denormals (`torch.set_flush_denormal`) that is 2**-118, and up to there its bytes are not those of other threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from kv_kernels.copies import Flaw
from kv_kernels.int8_form import GROUP, Axis, PlaneForm, SliceForm
from kv_kernels.int8_form import KC64 as KC64


class Unwritable(ValueError):
    """A block that the codec cannot write."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.name.lower())
        self.flaw = flaw


class Quantized(NamedTuple):
    """codes: int8 [heads, tokens, width]. scales: fp16, zeros: the pool's dtype, [heads, ...] as `PlaneForm` has it."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


def quantize(numbers: torch.Tensor, axis: Axis) -> Quantized:
    """numbers: [heads, tokens, width] of a 16- or 32-bit float dtype. Raises `Unwritable`."""
    if not bool(torch.isfinite(numbers).all()):
        raise Unwritable(Flaw.NONFINITE)
    x = numbers.float()
    _, tokens, width = x.shape
    if axis is Axis.CHANNEL:
        grouped = x.unflatten(1, (tokens // GROUP, GROUP))
        low, high = grouped.amin(2) + 0.0, grouped.amax(2) + 0.0  # of two zeros the positive one, on every route
        scales = _scale_up((high - low) / low.new_tensor(255.0))
        codes = _steps((grouped - low.unsqueeze(2)) * _inverse(scales).unsqueeze(2)).clamp(0, 255) - 128
        return Quantized(codes.to(torch.int8).flatten(1, 2), scales, low.to(numbers.dtype))
    share = axis.share(width)
    grouped = pad(x, (0, -width % share)).unflatten(2, (-1, share))
    scales = _scale_up(grouped.abs().amax(3) / x.new_tensor(127.0))
    codes = _steps(grouped * _inverse(scales).unsqueeze(3)).clamp(-127, 127).to(torch.int8)
    return Quantized(codes.flatten(2)[..., :width], scales, None)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype) -> Any:
    """The mirror of `quantize`: [heads, tokens, width] in the pool's dtype. zeros: where the axis is a channel."""
    _, tokens, width = codes.shape
    if zeros is not None:
        grouped = codes.float().unflatten(1, (tokens // GROUP, GROUP)) + 128.0
        x = (grouped * scales.float().unsqueeze(2) + zeros.float().unsqueeze(2)).flatten(1, 2)
    else:
        share = width if scales.shape[2] == 1 else GROUP
        x = codes.float() * scales.float().repeat_interleave(share, 2)[..., :width]
    largest = torch.finfo(dtype).max  # of fp16 a decoded number could be half a scale above it
    return x.clamp(-largest, largest).to(dtype)


def packed(form: SliceForm, parts: Sequence[Quantized]) -> torch.Tensor:
    """A layer slice as bytes: uint8 [form.size_bytes], on the device of the parts."""
    row = torch.zeros(form.size_bytes, dtype=torch.uint8, device=parts[0].codes.device)
    for part, of_plane in zip(parts, form.planes, strict=True):
        for numbers, at in zip(part, (of_plane.codes_at, of_plane.scales_at, of_plane.zeros_at), strict=True):
            if numbers is not None:
                raw = numbers.contiguous().view(torch.uint8).flatten()
                row[at : at + raw.numel()] = raw
    return row


def unpacked(row: torch.Tensor, form: SliceForm, of_plane: PlaneForm, dtype: torch.dtype) -> Quantized:
    """One plane of a layer slice: as `packed` wrote it. dtype: the pool's."""
    shape = form.heads, *of_plane.scales
    codes = _cut(row, of_plane.codes_at, torch.int8, (form.heads, form.tokens, of_plane.width))
    scales = _cut(row, of_plane.scales_at, torch.float16, shape)
    zeros = _cut(row, of_plane.zeros_at, dtype, shape) if of_plane.axis is Axis.CHANNEL else None
    return Quantized(codes, scales, zeros)


def _cut(row: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return row[start : start + count].view(dtype).view(shape)


def _scale_up(exact: torch.Tensor) -> torch.Tensor:
    """In fp16, not below the exact one. Raises `Unwritable`."""
    nearest = exact.to(torch.float16)
    above = (nearest.view(torch.int16) + 1).view(torch.float16)
    scales = torch.where(nearest.float() < exact, above, nearest)
    if not bool(torch.isfinite(scales).all()):
        raise Unwritable(Flaw.OUT_OF_RANGE)
    return scales


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    exact = scales.float()
    return torch.where(exact > 0, 1.0 / exact, torch.zeros_like(exact))


def _steps(y: torch.Tensor) -> torch.Tensor:
    return torch.floor(y + 0.5)
