"""How many bytes a block takes: payload and frame by codec, without torch and without a page.

One formula for code that writes blocks (`codec`) and for code that only counts them (`kvstore plan`). Pure.
"""

from __future__ import annotations

import logging

from kv_kernels.int8_form import GROUP, KC64, SliceForm, slice_form
from kvstore.block.errors import BadInput, shown
from kvstore.block.layout import Layout, Part
from tiering.frame import frame_bytes

RAW = "raw"
CODEC_NAMES = (KC64, RAW)
REMOVED_CODEC, SUCCESSOR = "int8-th", KC64
"""A name that stays valid, and what it means: blocks stored under it are not found any more."""
INT8_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of KV that an 8-bit codec can write."""

_log = logging.getLogger(__name__)


def codec_meant(name: str) -> str:
    """The codec that is meant by this name, known or not; warns if it was removed."""
    if name != REMOVED_CODEC:
        return name
    _log.warning("codec %r was removed and is %r now; name that", name, SUCCESSOR)
    return SUCCESSOR


def int8_form(codec: str, part: Part) -> SliceForm:
    """The form of an 8-bit layer slice. Raises `BadInput` for numbers that these codecs cannot write."""
    group = part.group
    if hindrance := _hindrance(part):
        raise BadInput(f"codec {codec!r} cannot write KV of {hindrance} (group {group.name!r}); use codec='raw'")
    return slice_form(part.kv_heads, part.rows, group.plane_widths, group.element_bytes)


def payload_bytes(codec: str, part: Part) -> int:
    """All layer slices of a part. Raises `BadInput` for a codec that is not known, and as `int8_form`."""
    if codec == RAW:
        return part.raw_bytes
    if codec != KC64:
        raise BadInput(f"codec {shown(codec)} is not known; allowed: {', '.join(CODEC_NAMES)}")
    return int8_form(codec, part).size_bytes * len(part.layers)


def block_bytes(codec: str, layout: Layout) -> int:
    """The bytes that a whole block takes in a tier: of each part a header, the payload, and padding. Raises as
    `payload_bytes`."""
    return sum(frame_bytes(payload_bytes(codec, part)) for part in layout.parts)


def default_codec(layout: Layout) -> str:
    """The adapters' default: `int8-kc64`, and `raw` for numbers that no 8-bit codec writes."""
    return RAW if any(map(_hindrance, layout.parts)) else KC64


def _hindrance(part: Part) -> str:
    """Why 8-bit codecs cannot write a part; empty if they can."""
    if part.group.dtype not in INT8_DTYPES:
        return f"dtype {part.group.dtype}, only of {', '.join(INT8_DTYPES)}"
    return f"{part.rows} rows a block, only of a multiple of {GROUP}" if part.rows % GROUP else ""
