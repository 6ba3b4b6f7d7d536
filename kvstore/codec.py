"""Codecs: how pages become a frame's payload and back (floor 2). A namespace has exactly one.

    raw         the engine's numbers, bit for bit
    int8-kc64   8 bits: K asymmetric per channel over 64 tokens, V symmetric per token and head
    int8-th     8 bits: K and V symmetric per token and head. Not for models with outliers or a bias in K

A payload is one layer slice after another. What an 8-bit slice looks like (codes, then K's scales and zero points, V's
scales, padding) is drawn in `kv_kernels.int8`, with the bound on what comes back. On its way a block is encoded once:
what was decoded is never offered again, and a namespace keeps the codec it was opened with.

The contract is in `pages`. This file imports torch; it is handed in when a store is opened, so that others need not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_kernels import host, int8, routes
from kvstore.errors import BadInput, LayoutMismatch
from kvstore.layout import Layout, Part
from kvstore.pages import Codec, Coder, Pages

INT8_DTYPES = ("bfloat16", "float16", "float32")
"""Of the pools whose numbers an 8-bit codec writes."""


class RawCodec:
    """The engine's numbers, bit for bit."""

    name = "raw"
    is_exact = True

    def payload_bytes(self, part: Part) -> int:
        """All layer slices as they are."""
        return part.raw_bytes

    def prepare(self, layout: Layout) -> None:
        """Nothing to do."""

    def bind(self, pages: Pages, layout: Layout, part: Part) -> Coder:
        """Host memory is copied run by run at memcpy speed; any other device goes through plain torch operations."""
        table, planes = _checked(pages, layout, part)
        return routes.raw_copy(planes, table, pages.page_tokens, part.block_tokens)


class Int8Codec:
    """KV in 8 bits: 1.9 times smaller than 16-bit numbers, with a bound on every number's error."""

    is_exact = False

    def __init__(self, name: str) -> None:
        self.name = name

    def payload_bytes(self, part: Part) -> int:
        """Codes and parameters of all layer slices. Raises `BadInput` for numbers of other dtypes."""
        return self._form(part).size_bytes * len(part.layers)

    def prepare(self, layout: Layout) -> None:
        """Compile what the layout's dtypes need: seconds, the first time on a machine."""
        routes.prepare_int8({part.group.dtype for part in layout.parts})

    def bind(self, pages: Pages, layout: Layout, part: Part) -> Coder:
        """Host memory goes through compiled loops, any other device through plain torch operations."""
        table, planes = _checked(pages, layout, part)
        try:
            return routes.int8_copy(self._form(part), planes, table, pages.page_tokens, part.group.dtype)
        except ValueError as error:
            raise LayoutMismatch(f"layers {list(part.layers)}: {error}") from None

    def _form(self, part: Part) -> int8.SliceForm:
        group = part.group
        if group.dtype not in INT8_DTYPES:
            raise BadInput(
                f"codec {self.name!r} cannot write KV of dtype {group.dtype} (group {group.name!r}); "
                f"allowed: {', '.join(INT8_DTYPES)}; use codec='raw'"
            )
        return int8.slice_form(self.name, part.kv_heads, part.block_tokens, group.plane_widths, group.element_bytes)


CODECS: dict[str, Callable[[], Codec]] = {
    RawCodec.name: RawCodec,
    int8.KC64: lambda: Int8Codec(int8.KC64),
    int8.TH: lambda: Int8Codec(int8.TH),
}


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises `BadInput` with the names that exist."""
    if not isinstance(name, str) or name not in CODECS:
        raise BadInput(f"codec {name!r} is not known; allowed: {', '.join(sorted(CODECS))}")
    return CODECS[name]()


def default_codec(layout: Layout) -> str:
    """What adapters use where nothing else is said: `int8-kc64`, and `raw` for numbers that no 8-bit codec writes."""
    is_writable = all(group.dtype in INT8_DTYPES for group in layout.groups)
    return int8.KC64 if is_writable else RawCodec.name


def _checked(pages: Pages, layout: Layout, part: Part) -> tuple[list[int], list[list[Any]]]:
    """The page table, and of each layer the planes of this part's heads. Raises `LayoutMismatch`."""
    table = pages.page_numbers()
    _check(pages, table, layout, part)
    planes = [list(pages.planes[layer]) for layer in part.layers]
    if part.kv_heads < part.group.kv_heads:
        planes = [[plane[:, :, part.head_start : part.head_stop] for plane in layer] for layer in planes]
    return table, planes


def _check(pages: Pages, table: list[int], layout: Layout, part: Part) -> None:
    """Say in one line what about these pages is not what the layout promises."""
    group = part.group
    lowest, highest = min(table, default=0), max(table, default=-1)
    page_shapes = [(pages.page_tokens, group.kv_heads, width) for width in group.plane_widths]
    known: object = None  # the dtype that was found right last
    if part.block_tokens % pages.page_tokens:
        raise LayoutMismatch(
            f"pages of {pages.page_tokens} tokens do not divide a block of {part.block_tokens}; "
            "choose block_tokens as a multiple of the page"
        )
    for layer in part.layers:
        if layer not in pages.planes:
            raise LayoutMismatch(f"pages hold no layer {layer}; the layout has layers {list(layout.layers)}")
        planes = pages.planes[layer]
        if len(planes) != len(group.plane_widths):
            raise LayoutMismatch(
                f"layer {layer} has {len(planes)} planes; the layout says {len(group.plane_widths)} "
                f"(group {group.name!r})"
            )
        for plane, want in zip(planes, page_shapes, strict=True):
            if not host.is_tensor(plane):
                raise LayoutMismatch(f"layer {layer} holds a {type(plane).__name__}; give tensors of torch or numpy")
            if plane.shape[1:] != want:
                raise LayoutMismatch(
                    f"layer {layer} has pages of shape {tuple(plane.shape)}; the layout wants "
                    f"[pages, {want[0]}, {want[1]}, {want[2]}] as [pages, page_tokens, kv_heads, width]"
                )
            if plane.dtype is not known:
                given = host.dtype_name(plane)
                if given != group.dtype and not host.is_same_width_numpy(plane, group.element_bytes):
                    raise LayoutMismatch(
                        f"layer {layer} holds {given}; the layout says {group.dtype}, or in numpy unsigned integers of "
                        f"{group.element_bytes} bytes"
                    )
                known = plane.dtype
            if lowest < 0 or highest >= plane.shape[0]:
                raise LayoutMismatch(
                    f"the page table names page {lowest if lowest < 0 else highest}; "
                    f"layer {layer} has a plane of {plane.shape[0]} pages, counted from 0"
                )
