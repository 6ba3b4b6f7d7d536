"""Codecs: how pages become a frame's payload and back. A namespace has exactly one.

    raw         the engine's numbers, bit for bit
    int8-kc64   8 bits: K asymmetric per channel over 64 tokens, V symmetric per token and head

A payload is one layer slice after another. What an 8-bit slice looks like (codes, then K's scales and zero points, V's
scales, padding) is drawn in `kv_kernels.int8`, with the bound on each number's error. A block is encoded only once:
engines never offer decoded blocks again, and a namespace keeps the codec it was opened with.

The contract is in `pages`. This file imports torch; it is handed in when a store is opened, so that others need not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from kv_kernels import host, int8, routes
from kv_kernels.copies import BlockCopy
from kvstore.block.errors import BadInput, LayoutMismatch
from kvstore.block.layout import Layout, Part
from kvstore.block.pages import RAW, Codec, Pages, int8_form, page_numbers, payload_bytes
from kvstore.block.pages import default_codec as default_codec

CLOSE_SECONDS = 10.0
"""How long the close of a store waits for a GPU."""

_log = logging.getLogger(__name__)


class _PartCodec:
    name: str

    def __init__(self, devices: routes.Devices | None = None) -> None:
        """devices: the routes to pages on GPUs."""
        self._devices = devices

    def payload_bytes(self, part: Part) -> int:
        """Of all layer slices. Raises `BadInput` for numbers of a dtype that the codec does not write."""
        return payload_bytes(self.name, part)


class RawCodec(_PartCodec):
    """The engine's numbers, bit for bit."""

    name = RAW
    is_exact = True

    def prepare(self, layout: Layout) -> None:
        """Does nothing."""

    def bind(self, pages: Pages, layout: Layout, part: Part) -> BlockCopy:
        """Host memory is copied run by run at memcpy speed; see `routes` for pages on a device."""
        return routes.block_copy(None, _checked(pages, layout, part), part.group.dtype, self._devices)


class Int8Codec(_PartCodec):
    """KV in 8 bits: 1.9 times smaller than 16-bit numbers, with a bound on every number's error."""

    name = int8.KC64
    is_exact = False

    def prepare(self, layout: Layout) -> None:
        """Compile for the layout's dtypes: seconds, the first time on a machine."""
        routes.prepare_int8({part.group.dtype for part in layout.parts})

    def bind(self, pages: Pages, layout: Layout, part: Part) -> BlockCopy:
        """Host memory goes through compiled loops; see `routes` for pages on a device."""
        paged = _checked(pages, layout, part)
        try:
            form = int8_form(self.name, part)
            return routes.block_copy(form, paged, part.group.dtype, self._devices)
        except ValueError as error:
            raise LayoutMismatch(f"layers {list(part.layers)}: {error}") from None


CODECS: dict[str, Callable[[routes.Devices | None], Codec]] = {RawCodec.name: RawCodec, Int8Codec.name: Int8Codec}


def codec_named(name: str, devices: routes.Devices | None = None) -> Codec:
    """The codec of that name. devices: the routes to pages on GPUs; without any, such pages go through plain torch.

    Raises `BadInput` with the names that exist.
    """
    if not isinstance(name, str) or name not in CODECS:
        raise BadInput(f"codec {name!r} is not known; allowed: {', '.join(sorted(CODECS))}")
    return CODECS[name](devices)


class Codecs:
    """The codecs of one opened store, and what they share: a route to each GPU that its pages are on. Thread-safe."""

    def __init__(self, open_gpu: Callable[[int], routes.OnDevice | None]) -> None:
        """open_gpu: makes the route to a GPU when pages on it are first seen; None if there is none."""
        self._open_gpu = open_gpu
        self._lock = threading.Lock()
        self._ways: dict[int, routes.OnDevice | None] = {}
        self._is_closed = False

    def __call__(self, name: str) -> Codec:
        """As `codec_named`."""
        return codec_named(name, self._way)

    def close(self) -> None:
        """End all routes. Copies that are bound and used later go through plain torch."""
        with self._lock:
            self._is_closed = True
            ways = [way for way in self._ways.values() if way is not None]
            self._ways.clear()
        for way in ways:
            if not way.close(CLOSE_SECONDS):
                _log.warning("a GPU did not finish its transfers within %g seconds", CLOSE_SECONDS)

    def _way(self, device: torch.device) -> routes.OnDevice | None:
        if device.type != "cuda":
            return None
        index = device.index if device.index is not None else 0
        with self._lock:
            if self._is_closed:
                return None
            if index not in self._ways:
                self._ways[index] = self._opened(index)
            return self._ways[index]

    def _opened(self, index: int) -> routes.OnDevice | None:
        try:
            return self._open_gpu(index)
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            _log.warning("pages on GPU %d go block by block through plain torch, which is slow: %s", index, text)
            return None


def _checked(pages: Pages, layout: Layout, part: Part) -> host.Paged:
    """The planes of this part's heads. Raises `LayoutMismatch`."""
    of_group = pages.of_group(part.group.name)
    table, page_rows = page_numbers(of_group.table), of_group.page_tokens // part.group.row_tokens
    if part.block_tokens % of_group.page_tokens or of_group.page_tokens % part.group.row_tokens:
        raise LayoutMismatch(
            f"pages of {of_group.page_tokens} tokens do not divide a block of {part.block_tokens} into whole rows of "
            f"{part.group.row_tokens} (group {part.group.name!r}); choose block_tokens as a multiple of the page"
        )
    _check(pages, table, page_rows, layout, part)
    planes = [list(pages.planes[layer]) for layer in part.layers]
    if part.kv_heads < part.group.kv_heads:
        planes = [[plane[:, :, part.head_start : part.head_stop] for plane in layer] for layer in planes]
    return host.Paged(planes, table, page_rows, part.rows)


def _check(pages: Pages, table: list[int], page_rows: int, layout: Layout, part: Part) -> None:
    group = part.group
    lowest, highest = min(table, default=0), max(table, default=-1)
    page_shapes = [(page_rows, group.kv_heads, width) for width in group.plane_widths]
    known: object = None  # the dtype that was found right last
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
                    f"[pages, {want[0]}, {want[1]}, {want[2]}] as [pages, rows of a page, kv_heads, width]"
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
