"""Copies between pages in host memory and a payload, at memcpy speed (floor 0).

Pages come as [pages, page_tokens, heads, width] with any strides, the payload is [layer][plane][head, token, width] in
C order. Where a page's planes lie in memory in the payload's own order, a layer slice is one copy of a few long runs;
anything else is copied page by page along its strides. Either way numpy does it, without the interpreter lock. Digests
are taken layer by layer, while a layer's bytes are in the cache.

Must never touch a page that the table does not name for the block, nor hand out bytes whose digest it did not compare.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

Digest = Callable[..., bytes]
Array = np.ndarray[Any, Any]

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_BYTE = _UNSIGNED[1]
_LARGEST_GAP_BYTES = 64 << 10
"""Planes with a larger gap between them are copied one by one. Numpy looks at the ends of a copy only: if a payload lay
in the gap, it would take the two for overlapping and go through a temporary."""


class Span(Protocol):
    """A payload in this process's memory."""

    @property
    def view(self) -> memoryview:
        """All of its bytes."""
        ...


class Runs(NamedTuple):
    """Planes of one layer that lie in memory as the payload does: a page of `pages` [pages, runs, length], in bytes, is
    payload[start:stop] as [runs, length]."""

    pages: Array
    start: int
    stop: int
    shape: tuple[int, int]


class Form(NamedTuple):
    """All that decides how a plane is copied, its address aside. stride: bytes from page to page. length: bytes of a
    block in the payload. is_run: whether a page holds a block, in the payload's order."""

    pages: int
    stride: int
    length: int
    is_run: bool


class RawCopy:
    """Copies blocks between host pages and payloads, bit for bit. Holds the tensors for as long as it lives."""

    def __init__(
        self, planes: Sequence[Sequence[Any]], table: Sequence[int], page_tokens: int, block_tokens: int
    ) -> None:
        """planes: per layer slice, per plane, a tensor [pages, page_tokens, heads, width]; table: physical pages."""
        self._planes = [list(layer) for layer in planes]
        self._table = table
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._writable = all(_is_writable(plane) for layer in self._planes for plane in layer)
        self._slices: list[tuple[int, int]] = []  # where each layer slice lies in the payload
        self._runs: list[list[Runs]] = []  # of each layer, if every plane of every layer is a run
        self._only_runs = True
        known: Any = None
        form = Form(0, 0, 0, False)
        start = 0
        for layer in self._planes:
            forms = []
            for plane in layer:
                if (described := _describe(plane)) != known:  # nearly always the same as the plane before
                    known, form = described, _form(plane, block_tokens)
                forms.append(form)
            self._only_runs = self._only_runs and all([form.is_run for form in forms])
            if self._only_runs:
                self._runs.append(_runs(layer, forms, start))
            stop = start + sum([form.length for form in forms])
            self._slices.append((start, stop))
            start = stop

    @cached_property
    def _arrays(self) -> list[list[Array]]:
        """Of each layer the planes as [pages, head, token, width] in numbers, for what is not a run."""
        return [[_as_unsigned(plane).transpose(0, 2, 1, 3) for plane in layer] for layer in self._planes]

    @cached_property
    def _scratch(self) -> Array:
        """Room for the longest layer slice."""
        return np.empty(max([stop - start for start, stop in self._slices], default=0), dtype=_BYTE)

    def encode(self, token: int, into: Span, digest: Digest) -> list[bytes]:
        """Copy the block at `token` into a payload; returns each layer slice's digest, taken from the payload."""
        view = into.view
        target = np.frombuffer(view, _BYTE)
        pages = self._pages(token)
        page = pages[0]
        digests = []
        for layer, (start, stop) in enumerate(self._slices):
            if self._only_runs:
                for source, run_start, run_stop, shape in self._runs[layer]:
                    np.copyto(target[run_start:run_stop].reshape(shape), source[page])
            else:
                self._gather(layer, pages, target[start:stop])
            digests.append(digest(view[start:stop]))
        return digests

    def decode(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """Copy a payload into the block at `token`, without its first `skip` tokens; False if any digest differs."""
        if not self._writable:
            raise ValueError("pages that are read-only cannot be loaded into")
        source = np.frombuffer(payload.view, _BYTE)
        pages = self._pages(token, skip)
        if skip or not self._only_runs:
            return self._decode_through_scratch(source, pages, skip, expected, digest)
        page = pages[0]
        for runs, want in zip(self._runs, expected, strict=True):
            copies: list[Array] = []
            for target, start, stop, shape in runs:
                copy = target[page]
                np.copyto(copy, source[start:stop].reshape(shape))
                copies.extend(copy)
            if digest(*copies) != want:
                return False
        return True

    def _decode_through_scratch(
        self, source: Array, pages: Sequence[int], skip: int, expected: Sequence[bytes], digest: Digest
    ) -> bool:
        """Verify a private copy of each layer slice first, then scatter that copy: pages only ever see good bytes."""
        for layer, ((start, stop), want) in enumerate(zip(self._slices, expected, strict=True)):
            private = self._scratch[: stop - start]
            np.copyto(private, source[start:stop])
            if digest(private) != want:
                return False
            self._scatter(layer, pages, skip, private)
        return True

    def _gather(self, layer: int, pages: Sequence[int], slice_bytes: Array) -> None:
        for plane, block in self._blocks(layer, slice_bytes):
            position = 0
            for page in pages:
                np.copyto(block[:, position : position + self._page_tokens], plane[page])
                position += self._page_tokens

    def _scatter(self, layer: int, pages: Sequence[int], skip: int, slice_bytes: Array) -> None:
        for plane, block in self._blocks(layer, slice_bytes):
            position = skip
            for page in pages:
                np.copyto(plane[page], block[:, position : position + self._page_tokens])
                position += self._page_tokens

    def _blocks(self, layer: int, slice_bytes: Array) -> Iterator[tuple[Array, Array]]:
        """Each plane of a layer, with its part of a layer slice as [head, token, width]."""
        start = 0
        for plane in self._arrays[layer]:
            _, heads, _, width = plane.shape
            stop = start + heads * self._block_tokens * width * plane.itemsize
            yield plane, slice_bytes[start:stop].view(plane.dtype).reshape(heads, self._block_tokens, width)
            start = stop

    def _pages(self, token: int, skip: int = 0) -> Sequence[int]:
        """Physical pages of the block at `token`, from its `skip`-th token on."""
        first, rest = divmod(token + skip, self._page_tokens)
        count = (self._block_tokens - skip) // self._page_tokens
        assert rest == 0 and first >= 0 and first + count <= len(self._table), "the block is not inside the pages"
        return self._table[first : first + count]


def is_host(tensor: Any) -> bool:
    """Whether the tensor's bytes lie in host memory (numpy, or torch on the CPU)."""
    return isinstance(tensor, np.ndarray) or bool(tensor.is_cpu)


def dtype_name(tensor: Any) -> str:
    """`bfloat16`, `float32`, ...: torch's and numpy's names without their prefix."""
    return str(tensor.dtype).rsplit(".", 1)[-1]


def is_same_width_numpy(tensor: Any, element_bytes: int) -> bool:
    """Numpy has no bfloat16 or float8: an array of unsigned integers of the same width stands for them."""
    return isinstance(tensor, np.ndarray) and tensor.dtype == _UNSIGNED.get(element_bytes)


def _describe(tensor: Any) -> tuple[Any, ...]:
    if isinstance(tensor, np.ndarray):
        return tensor.shape, tensor.strides, tensor.dtype
    return tensor.shape, tensor.stride(), tensor.dtype


def _form(tensor: Any, block_tokens: int) -> Form:
    pages, tokens, heads, width = tensor.shape
    if isinstance(tensor, np.ndarray):
        item, strides = tensor.itemsize, tensor.strides
    else:
        item = tensor.element_size()
        strides = tuple([stride * item for stride in tensor.stride()])
    is_run = (
        pages > 0
        and tokens == block_tokens
        and (strides[3] == item or width == 1)
        and (strides[1] == width * item or tokens == 1)
        and (strides[2] == tokens * width * item or heads == 1)
    )
    return Form(pages, strides[0], heads * block_tokens * width * item, is_run)


def _runs(layer: Sequence[Any], forms: Sequence[Form], start: int) -> list[Runs]:
    """A layer whose planes are all runs, as few arrays as possible: two planes are nearly always one."""
    addresses = [_address(plane) for plane in layer]
    if len(layer) == 2 and forms[0] == forms[1]:
        reach = abs(forms[0].stride) * forms[0].pages
        if abs(addresses[1] - addresses[0]) <= reach + _LARGEST_GAP_BYTES:
            return [_run_array(addresses, forms[0], start)]
    runs = []
    for address, form in zip(addresses, forms, strict=True):
        runs.append(_run_array([address], form, start))
        start += form.length
    return runs


def _run_array(addresses: Sequence[int], form: Form, start: int) -> Runs:
    """Planes of one form, with equal distances between them, as one array over their memory."""
    pages, stride, length, _ = form
    step = addresses[-1] - addresses[0]
    lowest = min(addresses) + min(0, stride * (pages - 1))
    highest = max(addresses) + max(0, stride * (pages - 1)) + length
    memory = (ctypes.c_char * (highest - lowest)).from_address(lowest)
    runs = len(addresses)
    stop = start + runs * length
    if step == length:  # K and V side by side in a page: one run
        runs, length = 1, runs * length
    array = np.ndarray((pages, runs, length), _BYTE, memoryview(memory), addresses[0] - lowest, (stride, step, 1))
    return Runs(array, start, stop, (runs, length))


def _address(tensor: Any) -> int:
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def _is_writable(tensor: Any) -> bool:
    return not isinstance(tensor, np.ndarray) or bool(tensor.flags.writeable)


class _Borrowed:
    """A torch tensor's memory in the form that numpy adopts without a copy (the array interface, version 3)."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor  # keeps the memory alive
        size = tensor.element_size()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": _UNSIGNED[size].str,
            "version": 3,
        }


def _as_unsigned(tensor: Any) -> Array:
    """The same memory as unsigned integers of the same width, shape and strides kept."""
    if isinstance(tensor, np.ndarray):
        return tensor.view(_UNSIGNED[tensor.dtype.itemsize])
    return np.asarray(_Borrowed(tensor))
