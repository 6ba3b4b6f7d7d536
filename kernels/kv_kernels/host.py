"""Copies between pages in host memory and a payload, at memcpy speed (floor 0).

Pages come as [pages, page_tokens, heads, width] with any strides, the payload is [layer][plane][head, token, width] in
C order. Where a page's plane lies in memory in the payload's own order, a block is a handful of long runs and goes
through `memmove` by address, which costs no view and releases the interpreter lock; anything else is one strided numpy
copy per page. Digests are taken layer by layer, while a layer's bytes are in the cache.

Must never touch a page that the table does not name for the block, nor hand out bytes whose digest it did not compare.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

Digest = Callable[..., bytes]
Array = np.ndarray[Any, Any]

_memmove = ctypes.memmove
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class Span(Protocol):
    """A payload in this process's memory."""

    @property
    def address(self) -> int:
        """Where it starts."""
        ...

    @property
    def view(self) -> memoryview:
        """All of its bytes."""
        ...


class Run(NamedTuple):
    """One plane whose pages lie in memory as the payload does: page p is the bytes at base + p * stride."""

    base: int
    stride: int
    length: int
    offset: int  # in the payload


class Strided(NamedTuple):
    """One plane in any other order: pages as [pages, head, token, width], and where it goes in the payload."""

    pages: Array
    shape: tuple[int, int, int]
    offset: int


class RawCopy:
    """Copies blocks between host pages and payloads, bit for bit. Holds the tensors for as long as it lives."""

    def __init__(
        self, planes: Sequence[Sequence[Any]], table: Sequence[int], page_tokens: int, block_tokens: int
    ) -> None:
        """planes: per layer slice, per plane, a tensor [pages, page_tokens, heads, width]; table: physical pages."""
        self._table = table
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._arrays = [[_as_unsigned(plane).transpose(0, 2, 1, 3) for plane in layer] for layer in planes]
        self._layers: list[tuple[int, int, list[Run], list[Strided]]] = []
        offset = 0
        for layer in self._arrays:
            start = offset
            runs: list[Run] = []
            strided: list[Strided] = []
            for array in layer:
                _, heads, tokens, width = array.shape
                length = heads * block_tokens * width * array.itemsize
                if tokens == block_tokens and len(array) and array[0].flags.c_contiguous:
                    runs.append(Run(array.ctypes.data, array.strides[0], length, offset))
                else:
                    strided.append(Strided(array, (heads, block_tokens, width), offset))
                offset += length
            self._layers.append((start, offset - start, _joined(runs), strided))
        self._only_runs = all(not strided for _, _, _, strided in self._layers)
        self._scratch = np.empty(max((length for _, length, _, _ in self._layers), default=0), dtype=np.uint8)

    def encode(self, token: int, into: Span, digest: Digest) -> list[bytes]:
        """Copy the block at `token` into a payload; returns each layer slice's digest, taken from the payload."""
        base, view = into.address, into.view
        pages = self._pages(token)
        digests = []
        for start, length, runs, strided in self._layers:
            for run in runs:
                _memmove(base + run.offset, run.base + pages[0] * run.stride, run.length)
            for plane in strided:
                self._gather(plane, pages, view, plane.offset)
            digests.append(digest(view[start : start + length]))
        return digests

    def decode(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """Copy a payload into the block at `token`, without its first `skip` tokens; False if any digest differs."""
        if skip or not self._only_runs:
            return self._decode_through_scratch(payload, token, skip, expected, digest)
        base = payload.address
        page = self._pages(token)[0]
        for (_, _, runs, _), want in zip(self._layers, expected, strict=True):
            copies = []
            for run in runs:
                address = run.base + page * run.stride
                _memmove(address, base + run.offset, run.length)
                copies.append((ctypes.c_char * run.length).from_address(address))
            if digest(*copies) != want:
                return False
        return True

    def _decode_through_scratch(
        self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest
    ) -> bool:
        """Verify a private copy of each layer slice first, then scatter that copy: pages only ever see good bytes."""
        base = payload.address
        pages = self._pages(token, skip)
        scratch = self._scratch
        for (start, length, _, _), layer, want in zip(self._layers, self._arrays, expected, strict=True):
            _memmove(scratch.ctypes.data, base + start, length)
            if digest(scratch[:length]) != want:
                return False
            offset = 0
            for array in layer:
                _, heads, _, width = array.shape
                size = heads * self._block_tokens * width * array.itemsize
                source = scratch[offset : offset + size].view(array.dtype)
                source = source.reshape(heads, self._block_tokens, width)
                position = skip
                for page in pages:
                    np.copyto(array[page], source[:, position : position + self._page_tokens])
                    position += self._page_tokens
                offset += size
        return True

    def _gather(self, plane: Strided, pages: Sequence[int], view: memoryview, offset: int) -> None:
        heads, tokens, width = plane.shape
        target = np.frombuffer(view, dtype=plane.pages.dtype, count=heads * tokens * width, offset=offset)
        target = target.reshape(plane.shape)
        position = 0
        for page in pages:
            np.copyto(target[:, position : position + self._page_tokens], plane.pages[page])
            position += self._page_tokens

    def _pages(self, token: int, skip: int = 0) -> Sequence[int]:
        """Physical pages of the block at `token`, from its `skip`-th token on."""
        first, rest = divmod(token + skip, self._page_tokens)
        count = (self._block_tokens - skip) // self._page_tokens
        assert rest == 0 and first >= 0 and first + count <= len(self._table), "the block is not inside the pages"
        return self._table[first : first + count]


def is_host(tensor: Any) -> bool:
    """Whether the tensor's bytes lie in host memory (numpy, or torch on the CPU)."""
    return isinstance(tensor, np.ndarray) or tensor.device.type == "cpu"


def dtype_name(tensor: Any) -> str:
    """`bfloat16`, `float32`, ...: torch's and numpy's names without their prefix."""
    return str(tensor.dtype).rsplit(".", 1)[-1]


def is_same_width_numpy(tensor: Any, element_bytes: int) -> bool:
    """Numpy has no bfloat16 or float8: an array of unsigned integers of the same width stands for them."""
    return isinstance(tensor, np.ndarray) and tensor.dtype == _UNSIGNED.get(element_bytes)


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


def _joined(runs: list[Run]) -> list[Run]:
    """Neighbouring runs as one, where both the pages and the payload go on without a gap (fused K|V pages)."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.stride == run.stride
            and last.base + last.length == run.base
            and last.offset + last.length == run.offset
        ):
            joined[-1] = last._replace(length=last.length + run.length)
        else:
            joined.append(run)
    return joined
