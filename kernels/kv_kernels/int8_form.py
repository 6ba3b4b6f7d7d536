"""The sizes and offsets of an 8-bit layer slice, without torch.

`int8` draws the slices and says what the numbers become; `kvstore plan`, which only counts bytes, needs no more than
this file. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import prod
from typing import NamedTuple

KC64 = "int8-kc64"
GROUP = 64
"""Tokens of a group of K's, or numbers along a latent's width."""
ALIGN_BYTES = 16
SCALE_BYTES = 2


class Axis(IntEnum):
    """The numbers of a plane that share a scale."""

    CHANNEL = 0  # 64 tokens of a channel; with a zero point
    TOKEN = 1  # the width of a token
    LATENT = 2  # 64 numbers along the width of a token

    def share(self, width: int) -> int:
        """Of a token's numbers, how many share a scale where tokens have scales of their own."""
        return width if self is Axis.TOKEN else GROUP


class PlaneForm(NamedTuple):
    """Of one plane in a layer slice: offsets in bytes. zeros_at: 0 without zero points. scales: the shape of a head's:
    [tokens / 64, width] of channels, else [tokens, scales of a token]."""

    axis: Axis
    width: int
    codes_at: int
    scales_at: int
    zeros_at: int
    scales: tuple[int, int]


class SliceForm(NamedTuple):
    """A layer slice: its planes, its bytes, and the two runs (first, stop) of zeros in it, if not empty: before K's
    zero points, and at the end."""

    heads: int
    tokens: int
    planes: tuple[PlaneForm, ...]
    size_bytes: int
    gap: tuple[int, int]
    padding: tuple[int, int]


Form = SliceForm | None
"""Of a layer slice in 8 bits; None for bytes as they are."""


def slice_form(heads: int, tokens: int, widths: Sequence[int], element_bytes: int) -> SliceForm:
    """widths: of each plane. element_bytes: of a number of the pool, which is 2 or 4. tokens: a multiple of 64."""
    assert tokens % GROUP == 0 and element_bytes in (2, 4)
    axes = (Axis.LATENT,) if len(widths) == 1 else (Axis.CHANNEL, Axis.TOKEN)
    planes, gap = [], (0, 0)
    codes_at, at = 0, sum(widths) * heads * tokens
    for axis, width in zip(axes, widths, strict=True):
        scales = (tokens // GROUP, width) if axis is Axis.CHANNEL else (tokens, -(-width // axis.share(width)))
        scales_at, at, zeros_at = at, at + heads * prod(scales) * SCALE_BYTES, 0
        if axis is Axis.CHANNEL:
            zeros_at = -(-at // element_bytes) * element_bytes
            gap, at = (at, zeros_at), zeros_at + heads * prod(scales) * element_bytes
        planes.append(PlaneForm(axis, width, codes_at, scales_at, zeros_at, scales))
        codes_at += width * heads * tokens
    size_bytes = -(-at // ALIGN_BYTES) * ALIGN_BYTES
    return SliceForm(heads, tokens, tuple(planes), size_bytes, gap, (at, size_bytes))
