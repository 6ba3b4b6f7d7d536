"""The 8-bit codec between pages in host memory and a payload, as loops that numba compiles.

One call encodes or decodes one layer slice, without the interpreter lock. The arithmetic is that of `int8`, operation
by operation: float32, rounded to nearest even, nothing fused; fp16 is widened and narrowed in integers, so that no mode
of the processor matters. What a row of numbers needs is done while it is in the cache: its extremes (as integers that
sort as the numbers do, sixteen or thirty-two at a time), its scale, its codes.

Loops take addresses: a caller must have checked shapes, page ids and alignment (`kvstore.block.codec`), and must hold
the memory.
"""

from __future__ import annotations

from functools import cache, partial
from logging import getLogger
from typing import Any

import numpy as np
from numba import carray, float32, from_dtype, int8, int16, int32, int64, njit, typeof, types, uint32, uint64
from numba.extending import intrinsic, overload

from kv_kernels.compiled import OPTIONS, compiled
from kv_kernels.copies import Flaw
from kv_kernels.host import Array, Paged, Planes, SliceBySlice, address, strides
from kv_kernels.int8_form import GROUP, Axis, SliceForm

_log = getLogger(__name__)


PLANE = np.dtype(
    [(name, np.int64) for name in "address page token head number width axis codes_at scales_at zeros_at".split()]
)
"""A plane of a layer: its strides in numbers, and offsets in the layer slice in bytes."""


class Int8Copy(SliceBySlice):
    """Encodes and decodes blocks between host pages and payloads."""

    def __init__(self, form: SliceForm, paged: Paged, dtype: str) -> None:
        """dtype: as for `prepare`; planes are of it, or of integers of its width. Raises `ValueError` where strides are
        not whole numbers of elements, or the numbers of a token run backwards."""
        super().__init__(paged._replace(table=np.array(paged.table, np.int64)), form.size_bytes)
        self._encode, self._decode = prepare(dtype)
        self._form, self._rows = form, _rows_of(paged.planes, form)

    def encode_slice(self, layer: int, pages: Array, into: memoryview, address: int) -> Flaw | None:
        form = self._form
        found = self._encode(self._rows[layer], pages, self._page_tokens, form.heads, form.tokens, address)
        for first, end in (form.gap, form.padding):
            into[first:end] = bytes(end - first)
        return Flaw(found) if found else None

    def decode_slice(self, layer: int, pages: Array, skip: int, private: Array, address: int) -> None:
        form = self._form
        self._decode(self._rows[layer], pages, self._page_tokens, form.heads, form.tokens, address, skip)


def _rows_of(planes: Planes, form: SliceForm) -> Array:
    """[layers, planes] of `PLANE`."""
    rows = []
    for layer in planes:
        for plane, (axis, width, *places, _) in zip(layer, form.planes, strict=True):
            size, bytes_apart = plane.dtype.itemsize, strides(plane)
            if any([stride % size for stride in bytes_apart]) or bytes_apart[3] < 0:
                raise ValueError(f"strides of {bytes_apart} bytes; give whole numbers of {size} bytes, the last one up")
            rows.append((address(plane), *[stride // size for stride in bytes_apart], width, axis, *places))
    return np.array(rows, np.int64).view(PLANE).reshape(len(planes), -1)


@cache
def prepare(dtype: str) -> tuple[Any, Any]:
    """The loops for `bfloat16`, `float16` or `float32`, compiled. Seconds the first time on a machine: later processes
    find the result on disk, where numba has a place to keep it. A place that is full or damaged costs these seconds."""
    try:
        return _compiled(dtype, _encode, _decode)
    except Exception as error:  # of a disk, or whatever damaged bytes make; what else is wrong shows below again
        _log.warning(
            "what numba compiled cannot be kept or read: %s: %s; it is compiled for this process alone: free the disk, "
            "or empty that folder (NUMBA_CACHE_DIR, else __pycache__ beside kv_kernels)",
            type(error).__name__,
            error,
        )
    return _compiled(dtype, *[njit(**OPTIONS)(loop.py_func) for loop in (_encode, _decode)])


def _compiled(dtype: str, encode: Any, decode: Any) -> tuple[Any, Any]:
    kind = _KINDS[dtype]
    taken = typeof(kind), from_dtype(PLANE)[::1], int64[::1], int64, int64, int64, int64
    encode.compile(taken)
    decode.compile((*taken, int64))
    return partial(encode, kind), partial(decode, kind)


# Compiled code. Integers are cast at every step, because numba computes in 64 bits otherwise -------------------------

CHANNEL, LATENT = int(Axis.CHANNEL), int(Axis.LATENT)
BFLOAT16, FLOAT16, FLOAT32 = types.int8, types.int16, types.int32
_KINDS = {"bfloat16": np.int8(0), "float16": np.int16(0), "float32": np.int32(0)}
"""Kinds of numbers. `kind` is an argument whose type says which, so that the choice is made while compiling."""

_FINE, _OUT_OF_RANGE, _NONFINITE = 0, Flaw.OUT_OF_RANGE.value, Flaw.NONFINITE.value
_LARGEST_HALF = np.float32(65504.0)
_UP_112 = 112 << 23  # from fp16's exponent to float32's
_STEPS_HALF = np.float32(2.0**24)  # of fp16's smallest number in 1


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


_INLINED = {"forceinline": True, **OPTIONS}
_inlined = njit(**_INLINED)
_function = njit(**OPTIONS)


@_inlined
def _as_bits(number):
    return np.float32(number).view(np.uint32)


@_inlined
def _as_float(bits):
    return np.uint32(bits).view(np.float32)


@_inlined
def _narrow_scale(exact):
    """The bits of the smallest fp16 that is not below a float32 >= 0; from 0x7C00 on there is none."""
    steps = exact * _STEPS_HALF if exact < np.float32(2.0**-14) else np.float32(0.0)
    whole = int32(steps)
    small = uint32(whole + int32(1)) if float32(whole) < steps else uint32(whole)
    normal = uint32(uint32(uint32(_as_bits(exact) + uint32(0x1FFF)) >> uint32(13)) - uint32(_UP_112 >> 13))
    return small if exact < np.float32(2.0**-14) else normal


@_inlined
def _widen_half(half):
    wide = uint32(uint32(uint32(half & uint32(0x7FFF)) << uint32(13)) + uint32(_UP_112))
    small = uint32(wide + uint32(1 << 23))
    is_small = uint32(half & uint32(0x7C00)) == uint32(0)
    magnitude = _as_float(small) - np.float32(2.0**-14) if is_small else _as_float(wide)
    return _as_float(uint32(_as_bits(magnitude) | uint32(uint32(half & uint32(0x8000)) << uint32(16))))


@_inlined
def _narrow_half(number):
    """A float32 as the bits of the nearest fp16, ties to even, at most the largest one."""
    bits = _as_bits(number)
    sign = uint32(uint32(bits >> uint32(16)) & uint32(0x8000))
    magnitude = _as_float(uint32(bits & uint32(0x7FFFFFFF)))
    magnitude = magnitude if magnitude < _LARGEST_HALF else _LARGEST_HALF
    small = uint32(_as_bits(magnitude + np.float32(0.5)) - uint32(0x3F000000))
    normal = uint32(_as_bits(magnitude) - uint32(_UP_112))
    even = uint32(uint32(normal >> uint32(13)) & uint32(1))
    normal = uint32(uint32(uint32(normal + uint32(0xFFF)) + even) >> uint32(13))
    return uint32(sign | (small if magnitude < np.float32(2.0**-14) else normal))


@_inlined
def _narrow_bfloat(number):
    """A finite float32 as the bits of the nearest bfloat16, ties to even."""
    bits = _as_bits(number)
    even = uint32(uint32(bits >> uint32(16)) & uint32(1))
    return uint32(uint32(uint32(bits + uint32(0x7FFF)) + even) >> uint32(16))


def _by_kind(bfloat16, float32, float16=None):
    """A function that is compiled as one of these, by the kind of its first argument; float16: bfloat16 if left out."""
    compiled_as = {BFLOAT16: bfloat16, FLOAT16: float16 or bfloat16, FLOAT32: float32}

    def chosen(*arguments): ...

    @overload(chosen, jit_options=_INLINED, strict=False)
    def chosen_of(kind, *more):
        return compiled_as[kind]

    return chosen


_row = _by_kind(
    lambda kind, address, count: carray(_pointer(address), (count,), int16),
    lambda kind, address, count: carray(_pointer(address), (count,), int32),
)
"""Numbers side by side, as their bits."""
_size = _by_kind(lambda kind: int64(2), lambda kind: int64(4))
"""Bytes of a number."""
_empty = _by_kind(lambda kind, count: np.empty(count, np.int16), lambda kind, count: np.empty(count, np.int32))
"""Room for the bits of so many numbers."""
_number = _by_kind(
    lambda kind, bits: _as_float(uint32(uint32(bits) << uint32(16))),
    lambda kind, bits: _as_float(uint32(bits)),
    lambda kind, bits: _widen_half(uint32(bits)),
)
"""A finite number as float32."""
_narrow = _by_kind(
    lambda kind, number: int16(_narrow_bfloat(number)),
    lambda kind, number: int32(_as_bits(number)),
    lambda kind, number: int16(_narrow_half(number)),
)
"""A float32 in the pool's dtype, as its bits."""
_infinity = _by_kind(lambda kind: int16(0x7F80), lambda kind: int32(0x7F800000), lambda kind: int16(0x7C00))
"""Its bits; above are NaNs."""
_ordered = _by_kind(
    lambda kind, bits: int16(bits ^ int16(int16(bits >> int16(15)) & int16(0x7FFF))),
    lambda kind, bits: int32(bits ^ int32(int32(bits >> int32(31)) & int32(0x7FFFFFFF))),
)
"""The bits of a number as an integer that sorts as the numbers do; it is its own mirror."""
_magnitude = _by_kind(
    lambda kind, bits: int16(bits & int16(0x7FFF)), lambda kind, bits: int32(bits & int32(0x7FFFFFFF))
)
"""Without the sign."""


@_function
def _places(plane, pages, page_tokens, size, token, places):
    """Where each token of the block begins in a plane, from `token` on. pages: of these."""
    for page in pages:
        place = plane.address + plane.page * page * size
        for _ in range(page_tokens):
            places[token] = place
            place += plane.token * size
            token += 1


@_function
def _extremes(kind, rows, width, low, high):
    """The least and the largest number of each channel, as ordered integers. Four rows at a time: each time low and
    high are read and written once."""
    row = _row(kind, rows[0], width)
    for i in range(width):
        low[i] = _ordered(kind, row[i])
        high[i] = low[i]
    for token in range(0, GROUP, 4):
        one, two = _row(kind, rows[token], width), _row(kind, rows[token + 1], width)
        three, four = _row(kind, rows[token + 2], width), _row(kind, rows[token + 3], width)
        for i in range(width):
            a, b = _ordered(kind, one[i]), _ordered(kind, two[i])
            c, d = _ordered(kind, three[i]), _ordered(kind, four[i])
            low[i] = min(low[i], min(min(a, b), min(c, d)))
            high[i] = max(high[i], max(max(a, b), max(c, d)))


@_function
def _parameters(kind, low, high, width, zeros, inverse, scales, kept):
    infinite = False
    for i in range(width):
        infinite |= high[i] >= _infinity(kind) or low[i] <= ~_infinity(kind)
    if infinite:
        return _NONFINITE
    worst = uint32(0)
    for i in range(width):
        zero = _number(kind, _ordered(kind, low[i])) + np.float32(0.0)
        scale = _narrow_scale((_number(kind, _ordered(kind, high[i])) - zero) / np.float32(255.0))
        worst = max(worst, scale)
        zeros[i] = zero
        kept[i] = _narrow(kind, zero)
        scales[i] = int16(scale)
        inverse[i] = np.float32(1.0) / _widen_half(scale) if scale > uint32(0) else np.float32(0.0)
    return _OUT_OF_RANGE if worst >= uint32(0x7C00) else _FINE


@_function
def _encode_channels(kind, rows, width, codes_at, zeros, inverse):
    for token in range(GROUP):
        row = _row(kind, rows[token], width)
        codes = carray(_pointer(codes_at + token * width), (width,), int8)
        for i in range(width):
            step = int32((_number(kind, row[i]) - zeros[i]) * inverse[i] + np.float32(0.5))
            codes[i] = int8(int32(step - int32(128)))


@_function
def _encode_tokens(kind, rows, width, share, codes_at, scales_at):
    size = _size(kind)
    groups = -(-width // share)
    for token in range(GROUP):
        scales = carray(_pointer(scales_at + 2 * groups * token), (groups,), int16)
        for group in range(groups):
            first = group * share
            count = min(share, width - first)
            row = _row(kind, rows[token] + first * size, count)
            top = _magnitude(kind, row[0])
            for i in range(count):
                top = max(top, _magnitude(kind, row[i]))
            if top >= _infinity(kind):
                return _NONFINITE
            scale = _narrow_scale(_number(kind, top) / np.float32(127.0))
            if scale >= uint32(0x7C00):
                return _OUT_OF_RANGE
            scales[group] = int16(scale)
            inverse = np.float32(1.0) / _widen_half(scale) if scale > uint32(0) else np.float32(0.0)
            codes = carray(_pointer(codes_at + token * width + first), (count,), int8)
            for i in range(count):
                y = _number(kind, row[i]) * inverse + np.float32(0.5)
                step = int32(y)
                codes[i] = int8(int32(step - int32(1)) if float32(step) > y else step)
    return _FINE


@_function
def _decode_channels(kind, rows, start, width, codes_at, zeros, scales):
    for token in range(start, GROUP):
        codes = carray(_pointer(codes_at + token * width), (width,), int8)
        row = _row(kind, rows[token], width)
        for i in range(width):
            row[i] = _narrow(kind, (float32(int32(codes[i])) + np.float32(128.0)) * scales[i] + zeros[i])


@_function
def _decode_tokens(kind, rows, start, width, share, codes_at, scales_at):
    size = _size(kind)
    groups = -(-width // share)
    for token in range(start, GROUP):
        halves = carray(_pointer(scales_at + 2 * groups * token), (groups,), int16)
        for group in range(groups):
            first = group * share
            count = min(share, width - first)
            scale = _widen_half(uint32(halves[group]))
            codes = carray(_pointer(codes_at + token * width + first), (count,), int8)
            row = _row(kind, rows[token] + first * size, count)
            for i in range(count):
                row[i] = _narrow(kind, float32(int32(codes[i])) * scale)


# Where the tokens of a channel lie side by side ("turned", as K does in vLLM's pages on a CPU), a group is done channel
# by channel, and its codes are turned by words: eight rows of eight bytes at a time.


@_inlined
def _swapped(one, other, shift, mask):
    part = uint64((uint64(one >> shift) ^ other) & mask)
    return uint64(one ^ uint64(part << shift)), uint64(other ^ part)


@_function
def _turn(source, source_row, target, target_row, block):
    """Bytes [8, 64] into [64, 8]. source_row, target_row: bytes from row to row. block: 128 words of scratch.

    The rows are put side by side first: the compiler works on several words at once only at distances that it knows.
    """
    for row in range(8):
        given = carray(_pointer(source + row * source_row), (8,), uint64)
        for j in range(8):
            block[8 * row + j] = given[j]
    for j in range(8):
        a, e = _swapped(block[j], block[32 + j], uint64(32), uint64(0xFFFFFFFF))
        b, f = _swapped(block[8 + j], block[40 + j], uint64(32), uint64(0xFFFFFFFF))
        c, g = _swapped(block[16 + j], block[48 + j], uint64(32), uint64(0xFFFFFFFF))
        d, h = _swapped(block[24 + j], block[56 + j], uint64(32), uint64(0xFFFFFFFF))
        a, c = _swapped(a, c, uint64(16), uint64(0x0000FFFF0000FFFF))
        b, d = _swapped(b, d, uint64(16), uint64(0x0000FFFF0000FFFF))
        e, g = _swapped(e, g, uint64(16), uint64(0x0000FFFF0000FFFF))
        f, h = _swapped(f, h, uint64(16), uint64(0x0000FFFF0000FFFF))
        a, b = _swapped(a, b, uint64(8), uint64(0x00FF00FF00FF00FF))
        c, d = _swapped(c, d, uint64(8), uint64(0x00FF00FF00FF00FF))
        e, f = _swapped(e, f, uint64(8), uint64(0x00FF00FF00FF00FF))
        g, h = _swapped(g, h, uint64(8), uint64(0x00FF00FF00FF00FF))
        block[64 + j], block[72 + j], block[80 + j], block[88 + j] = a, b, c, d
        block[96 + j], block[104 + j], block[112 + j], block[120 + j] = e, f, g, h
    for j in range(8):
        for byte in range(8):
            turned = carray(_pointer(target + (8 * j + byte) * target_row), (1,), uint64)
            turned[0] = block[64 + 8 * byte + j]


@_function
def _extremes_turned(kind, address, apart, width, low, high):
    for i in range(width):
        row = _row(kind, address + i * apart, GROUP)
        least = _ordered(kind, row[0])
        most = least
        for token in range(GROUP):
            least = min(least, _ordered(kind, row[token]))
            most = max(most, _ordered(kind, row[token]))
        low[i] = least
        high[i] = most


@_function
def _encode_turned(kind, address, apart, width, zeros, inverse, tile, codes_at, block):
    for i in range(width):
        row = _row(kind, address + i * apart, GROUP)
        codes = carray(_pointer(tile + i * GROUP), (GROUP,), int8)
        zero, factor = zeros[i], inverse[i]
        for token in range(GROUP):
            step = int32((_number(kind, row[token]) - zero) * factor + np.float32(0.5))
            codes[token] = int8(int32(step - int32(128)))
    for i in range(0, width, 8):
        _turn(tile + i * GROUP, GROUP, codes_at + i, width, block)


@_function
def _decode_turned(kind, address, apart, width, codes_at, zeros, scales, tile, block):
    for i in range(0, width, GROUP):
        for token in range(0, GROUP, 8):
            _turn(codes_at + token * width + i, width, tile + i * GROUP + token, GROUP, block)
    for i in range(width):
        row = _row(kind, address + i * apart, GROUP)
        codes = carray(_pointer(tile + i * GROUP), (GROUP,), int8)
        zero, scale = zeros[i], scales[i]
        for token in range(GROUP):
            row[token] = _narrow(kind, (float32(int32(codes[token])) + np.float32(128.0)) * scale + zero)


@_inlined
def _move(kind, planes, pages, page_tokens, heads, tokens, payload, skip, loads):
    """A slice into a payload, or back. planes: [planes] of `PLANE`. pages: int64, of the block, or of its tokens
    from `skip` on. payload: the address of the slice, whose padding is left alone. Returns 0, or a `Flaw`'s value.
    loads: a constant, so that each way is compiled alone."""
    size = _size(kind)
    widest = planes.width.max()
    low, high = _empty(kind, widest), _empty(kind, widest)
    zeros, factors = np.empty(widest, np.float32), np.empty(widest, np.float32)  # scales, or their inverse
    tile, block = np.empty((GROUP, widest * size), np.uint8), np.empty(128, np.uint64)
    places, rows, tile_at = np.empty(tokens, np.int64), np.empty(GROUP, np.int64), int64(tile.ctypes.data)
    for plane in planes:
        width, step = plane.width, plane.number
        share = GROUP if plane.axis == LATENT else width
        is_turned = plane.axis == CHANNEL and plane.token == 1 and step != 1
        is_turned = is_turned and page_tokens % GROUP == 0 and width % GROUP == 0
        is_apart = step != 1 and not is_turned
        _places(plane, pages, page_tokens, size, skip, places)
        for head in range(heads):
            for group in range(skip // GROUP, tokens // GROUP):
                start = max(0, skip - group * GROUP)
                for token in range(start, GROUP):
                    rows[token] = places[group * GROUP + token] + plane.head * head * size
                    if is_apart:
                        row = _row(kind, tile_at + token * widest * size, width)
                        if not loads:
                            numbers = _row(kind, rows[token], width * step)
                            for i in range(width):
                                row[i] = numbers[i * step]
                        rows[token] = tile_at + token * widest * size
                codes_at = payload + plane.codes_at + (head * tokens + group * GROUP) * width
                found = _FINE
                if plane.axis == CHANNEL:
                    at = (head * (tokens // GROUP) + group) * width
                    scales = carray(_pointer(payload + plane.scales_at + 2 * at), (width,), int16)
                    kept = _row(kind, payload + plane.zeros_at + size * at, width)
                    apart = step * size
                    if loads:
                        for i in range(width):
                            factors[i] = _widen_half(uint32(scales[i]))
                            zeros[i] = _number(kind, kept[i])
                        if is_turned:
                            _decode_turned(kind, rows[0], apart, width, codes_at, zeros, factors, tile_at, block)
                        else:
                            _decode_channels(kind, rows, start, width, codes_at, zeros, factors)
                    else:
                        if is_turned:
                            _extremes_turned(kind, rows[0], apart, width, low, high)
                        else:
                            _extremes(kind, rows, width, low, high)
                        found = _parameters(kind, low, high, width, zeros, factors, scales, kept)
                        if found == _FINE and is_turned:
                            _encode_turned(kind, rows[0], apart, width, zeros, factors, tile_at, codes_at, block)
                        elif found == _FINE:
                            _encode_channels(kind, rows, width, codes_at, zeros, factors)
                else:
                    scales_at = payload + plane.scales_at + 2 * (head * tokens + group * GROUP) * -(-width // share)
                    if loads:
                        _decode_tokens(kind, rows, start, width, share, codes_at, scales_at)
                    else:
                        found = _encode_tokens(kind, rows, width, share, codes_at, scales_at)
                if found != _FINE:
                    return found
                if loads and is_apart:
                    for token in range(start, GROUP):
                        place = places[group * GROUP + token] + plane.head * head * size
                        row, numbers = _row(kind, rows[token], width), _row(kind, place, width * step)
                        for i in range(width):
                            numbers[i * step] = row[i]
    return _FINE


@compiled
def _encode(kind, planes, pages, page_tokens, heads, tokens, payload):
    return _move(kind, planes, pages, page_tokens, heads, tokens, payload, 0, False)


@compiled
def _decode(kind, planes, pages, page_tokens, heads, tokens, payload, skip):
    return _move(kind, planes, pages, page_tokens, heads, tokens, payload, skip, True)
