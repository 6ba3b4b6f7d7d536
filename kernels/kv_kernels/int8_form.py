"""The sizes and offsets of an 8-bit layer slice, without torch.

`int8` draws the slices and says what the numbers become; `kvstore plan`, which only counts bytes, needs no more than
this file. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
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


class PlaneForm(NamedTuple):
    """Of one plane in a layer slice: offsets in bytes. zeros_at: 0 without zero points. groups: scales of a head."""

    axis: Axis
    width: int
    codes_at: int
    scales_at: int
    zeros_at: int
    groups: int


class SliceForm(NamedTuple):
    """A layer slice: its planes, its bytes, and the two runs (first, stop) of zeros in it, if not empty: before K's
    zero points, and at the end."""

    heads: int
    tokens: int
    planes: tuple[PlaneForm, ...]
    size_bytes: int
    gap: tuple[int, int]
    padding: tuple[int, int]


def slice_form(codec: str, heads: int, tokens: int, widths: Sequence[int], element_bytes: int) -> SliceForm:
    """widths: of each plane. element_bytes: of a number of the pool, which is 2 or 4. tokens: a multiple of 64."""
    assert codec == KC64 and tokens % GROUP == 0 and element_bytes in (2, 4)
    axes = (Axis.LATENT,) if len(widths) == 1 else (Axis.CHANNEL, Axis.TOKEN)
    codes_at = [sum(widths[:index]) * heads * tokens for index in range(len(widths))]
    at = sum(widths) * heads * tokens
    planes = []
    gap = (0, 0)
    for axis, width, codes in zip(axes, widths, codes_at, strict=True):
        groups = {Axis.CHANNEL: tokens // GROUP * width, Axis.TOKEN: tokens, Axis.LATENT: tokens * -(-width // GROUP)}[
            axis
        ]
        scales_at, at = at, at + heads * groups * SCALE_BYTES
        zeros_at = 0
        if axis is Axis.CHANNEL:
            zeros_at = -(-at // element_bytes) * element_bytes
            gap, at = (at, zeros_at), zeros_at + heads * groups * element_bytes
        planes.append(PlaneForm(axis, width, codes, scales_at, zeros_at, groups))
    size_bytes = -(-at // ALIGN_BYTES) * ALIGN_BYTES
    return SliceForm(heads, tokens, tuple(planes), size_bytes, gap, (at, size_bytes))
