"""The 8-bit codecs between pages in host memory and a payload, through compiled loops.

A payload is one layer slice after another, each as `int8.SliceForm` has it. Encoding writes straight into the payload
and takes the digest of a slice while it is in the cache. Decoding copies a slice, compares the digest of that copy, and
only then writes pages from it: pages never see a byte that was not compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kv_kernels.copies import Digest, Flaw, Span
from kv_kernels.host import UNWRITABLE_PAGES, BlockByBlock, are_writable
from kv_kernels.int8 import SliceForm

Array = np.ndarray[Any, Any]


class Field(IntEnum):
    """Columns of a table of planes, int64 [planes, fields]. Strides in numbers, offsets in the layer slice in bytes."""

    ADDRESS = 0
    PAGE = 1
    TOKEN = 2
    HEAD = 3
    NUMBER = 4
    WIDTH = 5
    AXIS = 6
    CODES_AT = 7
    SCALES_AT = 8
    ZEROS_AT = 9


class Int8Loops(NamedTuple):
    """Compiled for one dtype.

    encode(planes, pages, page_tokens, heads, tokens, into) -> 0, or the value of a `Flaw`. planes: see `Field`; pages:
    int64, those of the block, page_tokens each; into: the address of the layer slice. Padding is left alone.
    decode(planes, pages, page_tokens, heads, tokens, source, skip): the mirror, without the block's first `skip`
    tokens, whose pages are not touched.
    """

    encode: Callable[..., int]
    decode: Callable[..., None]


class Int8Copy(BlockByBlock):
    """Encodes and decodes blocks between host pages and payloads. Holds the tensors for as long as it lives."""

    def __init__(
        self, loops: Int8Loops, form: SliceForm, planes: Sequence[Sequence[Any]], table: Sequence[int], page_tokens: int
    ) -> None:
        """planes: per layer slice, per plane, a tensor [pages, page_tokens, heads, width] of the dtype for which the
        loops were compiled, or of integers of its width; table: physical pages. Raises `ValueError` where strides are
        not whole numbers of elements, or the numbers of a token run backwards."""
        self._loops = loops
        self._form = form
        self._planes = [list(layer) for layer in planes]
        self._table = np.array(table, np.int64)
        self._page_tokens = page_tokens
        self._fields = [_fields(layer, form) for layer in self._planes]

    @cached_property
    def _writable(self) -> bool:
        return are_writable(self._planes)

    @cached_property
    def _scratch(self) -> Array:
        return np.empty(self._form.size_bytes, np.uint8)

    def encode_block(self, token: int, into: Span, digest: Digest) -> list[bytes] | Flaw:
        """Encode the block at `token` into a payload; returns each layer slice's digest, taken from the payload."""
        form, view = self._form, into.view
        pages = self._pages(token, 0)
        digests = []
        start = 0
        for fields in self._fields:
            stop = start + form.size_bytes
            found = self._loops.encode(fields, pages, self._page_tokens, form.heads, form.tokens, into.address + start)
            if found:
                return Flaw(found)
            for first, end in (form.gap, form.padding):
                view[start + first : start + end] = bytes(end - first)
            digests.append(digest(view[start:stop]))
            start = stop
        return digests

    def decode_block(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """Decode a payload into the block at `token`, without its first `skip` tokens; False if any digest differs."""
        if not self._writable:
            raise ValueError(UNWRITABLE_PAGES)
        form, scratch = self._form, self._scratch
        private, source = scratch.ctypes.data, payload.address
        pages = self._pages(token, skip)
        for fields, want in zip(self._fields, expected, strict=True):
            ctypes.memmove(private, source, form.size_bytes)
            if digest(scratch) != want:
                return False
            self._loops.decode(fields, pages, self._page_tokens, form.heads, form.tokens, private, skip)
            source += form.size_bytes
        return True

    def _pages(self, token: int, skip: int) -> Array:
        """Physical pages of the block at `token`; those before its `skip`-th token need not be in the table."""
        count = self._form.tokens // self._page_tokens
        first, rest = divmod(token, self._page_tokens)
        missing = max(0, -first)
        assert not rest and missing * self._page_tokens <= skip, "the block is not inside the pages"
        assert first + count <= len(self._table), "the block is not inside the pages"
        if not missing:
            return self._table[first : first + count]
        return np.concatenate([np.zeros(missing, np.int64), self._table[: first + count]])


def _fields(layer: Sequence[Any], form: SliceForm) -> Array:
    rows = np.zeros((len(layer), len(Field)), np.int64)
    for row, plane, of_plane in zip(rows, layer, form.planes, strict=True):
        if isinstance(plane, np.ndarray):
            address, bytes_apart, size = plane.ctypes.data, plane.strides, plane.itemsize
            if any(stride % size for stride in bytes_apart) or bytes_apart[3] < 0:
                raise ValueError(f"strides of {bytes_apart} bytes; give whole numbers of {size} bytes, the last one up")
            strides: Sequence[int] = [stride // size for stride in bytes_apart]
        else:
            address, strides = plane.data_ptr(), plane.stride()
        row[Field.ADDRESS] = address
        row[Field.PAGE], row[Field.TOKEN], row[Field.HEAD], row[Field.NUMBER] = strides
        row[Field.WIDTH], row[Field.AXIS] = of_plane.width, of_plane.axis
        row[Field.CODES_AT], row[Field.SCALES_AT] = of_plane.codes_at, of_plane.scales_at
        row[Field.ZEROS_AT] = of_plane.zeros_at
    return rows
