"""The 8-bit codecs between pages in host memory and a payload, through compiled loops.

A payload is one layer slice after another, each as `int8.SliceForm` has it, written straight from the pages; its digest
is taken while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from kv_kernels.copies import Flaw
from kv_kernels.host import Array, Planes, SliceBySlice
from kv_kernels.int8 import SliceForm


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
    tokens; pages: of the others.
    """

    encode: Callable[..., int]
    decode: Callable[..., None]


class Int8Copy(SliceBySlice):
    """Encodes and decodes blocks between host pages and payloads."""

    def __init__(
        self, loops: Int8Loops, form: SliceForm, planes: Planes, table: Sequence[int], page_tokens: int
    ) -> None:
        """planes: of the dtype for which the loops were compiled, or of integers of its width. Raises `ValueError`
        where strides are not whole numbers of elements, or the numbers of a token run backwards."""
        super().__init__(planes, np.array(table, np.int64), page_tokens, form.tokens, form.size_bytes)
        self._loops, self._form = loops, form
        self._fields = [_fields(layer, form) for layer in self._planes]

    def encode_slice(self, layer: int, pages: Array, into: Array) -> Flaw | None:
        form = self._form
        how = self._fields[layer], pages, self._page_tokens, form.heads, form.tokens, into.ctypes.data
        found = self._loops.encode(*how)
        for first, end in (form.gap, form.padding):
            into[first:end] = 0
        return Flaw(found) if found else None

    def decode_slice(self, layer: int, pages: Array, skip: int, private: Array) -> None:
        form = self._form
        how = self._fields[layer], pages, self._page_tokens, form.heads, form.tokens, private.ctypes.data
        self._loops.decode(*how, skip)


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
