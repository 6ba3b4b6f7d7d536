"""Codecs: how pages become a frame's payload and back (floor 2). A namespace has exactly one.

The contract is in `pages`. This file imports torch through the transfer operations; it is handed in when a store is
opened, so that nothing else has to.
"""

from __future__ import annotations

from operator import index

from kv_kernels import host, reference
from kvstore.errors import BadInput, LayoutMismatch
from kvstore.layout import Layout, Part
from kvstore.pages import Codec, Coder, Pages


class RawCodec:
    """The engine's numbers, bit for bit."""

    name = "raw"

    def payload_bytes(self, part: Part) -> int:
        """All layer slices as they are."""
        return part.raw_bytes

    def bind(self, pages: Pages, layout: Layout, part: Part) -> Coder:
        """Host memory is copied run by run at memcpy speed; any other device goes through plain torch operations."""
        table = _plain_table(pages)
        _check(pages, table, layout, part)
        planes = [pages.planes[layer] for layer in part.layers]
        if part.kv_heads < part.group.kv_heads:
            planes = [[plane[:, :, part.head_start : part.head_stop] for plane in layer] for layer in planes]
        if all(host.is_host(plane) for layer in planes for plane in layer):
            return host.RawCopy(planes, table, pages.page_tokens, part.block_tokens)
        return reference.RawCopy(planes, table, pages.page_tokens, part.block_tokens)


CODECS: dict[str, type[RawCodec]] = {RawCodec.name: RawCodec}


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises `BadInput` with the names that exist."""
    if name not in CODECS:
        raise BadInput(f"codec {name!r} is not known; allowed: {', '.join(sorted(CODECS))}")
    return CODECS[name]()


def _plain_table(pages: Pages) -> list[int]:
    """The page table as Python integers: addresses are computed from it, and an int32 of an array would overflow."""
    try:
        return [index(page) for page in pages.table]
    except TypeError:
        raise LayoutMismatch("the page table holds something else than integers; give one page number each") from None


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
            if plane.shape[1:] != want:
                raise LayoutMismatch(
                    f"layer {layer} has pages of shape {tuple(plane.shape)}; the layout wants "
                    f"[pages, {want[0]}, {want[1]}, {want[2]}] as [pages, page_tokens, kv_heads, width]"
                )
            if plane.dtype is not known:
                given = host.dtype_name(plane)
                if given != group.dtype and not host.is_same_width_numpy(plane, group.element_bytes):
                    raise LayoutMismatch(f"layer {layer} holds {given}; the layout says {group.dtype}")
                known = plane.dtype
            if lowest < 0 or highest >= plane.shape[0]:
                raise LayoutMismatch(
                    f"the page table names page {lowest if lowest < 0 else highest}; "
                    f"layer {layer} has a plane of {plane.shape[0]} pages, counted from 0"
                )
