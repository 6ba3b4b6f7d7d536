"""Paged pools to 8-bit payloads and back on a GPU; each number crosses from and to the GPU's memory once.

A slice's form and its arithmetic are those of `int8`, bit for bit, which rests on: float32 throughout; division as IEEE
says (`div_rn`); integer arithmetic where interpreter and GPUs do not agree on a cast; and no multiplication fused with
an addition. That is asked of the compiler at every launch, and not relied on: ptxas of CUDA 12.9 fuses the paired ones
of Blackwell all the same. When quantizing a clamp stands between the two, and when dequantizing the product of a code
(8 bits) and a scale (11 bits) is exact. A zero point of -0.0 is stored as 0.0.

One launch covers all blocks, layers, heads and planes; a program takes 64 tokens of one block, layer and head. See
`triton_raw` for pools, page tables and payloads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kv_kernels.int8 import GROUP, Axis, PlaneForm
from kv_kernels.pools import PoolTable, check_launch, check_status
from kv_kernels.triton_raw import WARPS, pages_of, place, pool_at, power_of_two, run, step_of

_TILE = 8192
"""Numbers that a program of `triton_raw.WARPS` warps holds at a time."""
_PAIRS_TILE, _LANES = 2048, 32
"""Where channels go in pairs: numbers of V that a warp holds at a time, and pairs that it has."""
_AT_ONCE = tl.constexpr(16)
"""Tokens of a pair of channels that are held at a time."""
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_UNFUSED = {"enable_fp_fusion": False}


def gather_quantize(
    pools: PoolTable, codec: str, table: torch.Tensor, payloads: torch.Tensor, status: torch.Tensor, payload_at: int = 0
) -> None:
    """Quantize the blocks of `table` into payloads; padding is written as zeros.

    codec: `int8.KC64`. table, payloads: as in `triton_raw.gather`.
    status: int32 [blocks], zeroed by the caller. Of each block the worst of its groups, as the value of a `Flaw`, or
    0. Nothing is promised about the payload of a block that is not 0.
    Raises `ValueError` where the arguments do not fit together (`pools.check_launch`).
    """
    launch = check_launch(pools, codec, table, payloads, payload_at)
    check_status(status, launch, pools.device)
    assert launch.form is not None
    form = launch.form
    ends = (*form.gap, form.padding[0])
    constants, warps = _constants(pools, form.planes), WARPS
    pairs = _pairs_at_once(pools, form.planes[0])
    constants["K_PAIRS"] = pairs
    if pairs:
        warps = pairs // _LANES
        constants["V_TOKENS"] = min(64, warps * _PAIRS_TILE // constants["V_STEP"])
    more = (*_places(form.planes), status, ends, 0)
    run(_gather_quantize, pools, table, payloads, payload_at, launch, constants, *more, warps=warps)


def dequantize_scatter(
    pools: PoolTable, codec: str, table: torch.Tensor, payloads: torch.Tensor, payload_at: int = 0
) -> None:
    """The mirror of `gather_quantize`. A page id of -1 leaves that page out; no page may be named twice."""
    launch = check_launch(pools, codec, table, payloads, payload_at)
    assert launch.form is not None
    constants, places = _constants(pools, launch.form.planes), _places(launch.form.planes)
    run(_dequantize_scatter, pools, table, payloads, payload_at, launch, constants, *places)


def _places(planes: tuple[PlaneForm, ...]) -> list[tuple[int, int, int]]:
    places = [(plane.codes_at, plane.scales_at, plane.zeros_at) for plane in planes]
    return [places[0], places[-1]]


def _constants(pools: PoolTable, planes: tuple[PlaneForm, ...]) -> dict[str, Any]:
    constants: dict[str, Any] = {"KIND": _KINDS[pools.dtype], **_UNFUSED}
    for name, plane in (("K", planes[0]), ("V", planes[-1])):
        step = _step(plane)
        constants[f"{name}_AXIS"] = int(plane.axis)
        constants[f"{name}_WIDTH"] = plane.width
        constants[f"{name}_STEP"] = step
        constants[f"{name}_TOKENS"] = min(64, _TILE // step)
    return constants


def _pairs_at_once(pools: PoolTable, plane: PlaneForm) -> int:
    """Pairs of neighbouring channels that a program takes at a time, one for each thread; 0 where K is not made of
    pairs: scales of tokens, numbers of 32 bits, or channels that lie apart."""
    *between, step = pools.strides[0]
    if plane.axis is not Axis.CHANNEL or pools.dtype.itemsize != 2 or step != 1 or not pools.aligned:
        return 0
    if any(stride % 2 for stride in between):
        return 0
    return next((pairs for pairs in (2 * _LANES, _LANES) if plane.width % (2 * pairs) == 0), 0)


def _step(plane: PlaneForm) -> int:
    if plane.axis is Axis.CHANNEL:
        return step_of(plane.width)
    return power_of_two(plane.width) if plane.axis is Axis.TOKEN else GROUP


# The kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["layers", "nothing"])
def _gather_quantize(
    payloads,
    row_bytes,
    payload_at,
    slice_bytes,
    table,
    table_row,
    addresses,
    layers,
    groups,
    heads,
    k_strides,
    v_strides,
    k_places,
    v_places,
    status,
    ends,
    nothing,
    PLANES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    INTEGER: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    K_PAIRS: tl.constexpr,
    K_AXIS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_STEP: tl.constexpr,
    K_TOKENS: tl.constexpr,
    V_AXIS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_STEP: tl.constexpr,
    V_TOKENS: tl.constexpr,
):
    block, layer, group, head = place(layers, groups, heads)
    payload = payloads + block * row_bytes + payload_at + layer * slice_bytes
    row = table + block * table_row
    state = status + block
    line = head * groups + group
    pool = pool_at(addresses, layer, 0, PLANES, INTEGER, ALIGNED) + head * k_strides[2]
    if K_PAIRS:
        # 0, of which the compiler does not know that 16 divides it: it gives each thread one pair at a time, not four.
        apart, into = pool + nothing, payload + nothing
        _write_pairs(apart, k_strides, row, group, into, k_places, line, state, PAGE_TOKENS, KIND, K_WIDTH, K_PAIRS)
    elif K_AXIS == 0:
        _write_channels(pool, k_strides, row, group, payload, k_places, line, state, PAGE_TOKENS, KIND, K_WIDTH, K_STEP)
    else:
        _write_tokens(
            pool, k_strides, row, group, payload, k_places, line, state, PAGE_TOKENS, KIND, K_WIDTH, K_STEP, K_TOKENS
        )
    if PLANES == 2:
        pool = pool_at(addresses, layer, 1, PLANES, INTEGER, ALIGNED) + head * v_strides[2]
        _write_tokens(
            pool, v_strides, row, group, payload, v_places, line, state, PAGE_TOKENS, KIND, V_WIDTH, V_STEP, V_TOKENS
        )
    if line == 0:
        # What no other program writes: between K's scales and its zero points, and behind all.
        places = tl.arange(0, 16)
        if K_AXIS == 0:
            tl.store(payload + ends[0] + places, 0, mask=places < ends[1] - ends[0])
        tl.store(payload + ends[2] + places, 0, mask=places < slice_bytes - ends[2])


@triton.jit
def _write_channels(
    pool,
    strides,
    row,
    group,
    payload,
    places,
    line,
    state,
    PAGE_TOKENS: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    page, within = pages_of(row, group * 64, 64, PAGE_TOKENS)
    lines = pool + page * strides[0] + within * strides[1]
    codes_at = (payload + places[0]).to(tl.pointer_type(tl.int8)) + (line * 64 + tl.arange(0, 64)) * WIDTH
    scales_at = (payload + places[1]).to(tl.pointer_type(tl.int16)) + line * WIDTH
    zeros_at = (payload + places[2]).to(lines.dtype.scalar) + line * WIDTH
    for at in range(0, WIDTH, STEP):
        column = at + tl.arange(0, STEP)
        inside = column < WIDTH
        bits = tl.load(lines[:, None] + column[None, :].to(tl.int64) * strides[3], mask=inside[None, :], other=0)
        least, most = _ends(bits, KIND)
        low, scale = _channel_scale(least, most, state, KIND, STEP)
        y = (_to_float(bits, KIND) - low[None, :]) * _inverse(scale)[None, :]
        codes = _steps(y, 0.0, 255.0) - 128.0
        tl.store(codes_at[:, None] + column[None, :], codes.to(tl.int8), mask=inside[None, :])
        tl.store(scales_at + column, scale.to(tl.int16), mask=inside)
        tl.store(zeros_at + column, _to_bits(low, KIND), mask=inside)


@triton.jit
def _write_pairs(
    pool,
    strides,
    row,
    group,
    payload,
    places,
    line,
    state,
    PAGE_TOKENS: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
):
    # As `_write_channels`, where a number has 16 bits and channels are neighbours. A thread has two channels of all
    # tokens, so that threads exchange nothing, and reads them twice: first for the scale, then from the cache.
    lines = pool.to(tl.pointer_type(tl.int32))
    codes_at = (payload + places[0]).to(tl.pointer_type(tl.int16)) + line * 64 * (WIDTH // 2)
    scales_at = (payload + places[1]).to(tl.pointer_type(tl.int16)) + line * WIDTH
    zeros_at = (payload + places[2]).to(tl.pointer_type(tl.int16)) + line * WIDTH
    for at in range(0, WIDTH // 2, PAIRS):
        pair = at + tl.arange(0, PAIRS)
        both = _pairs(lines, strides, row, group * 64, pair, PAGE_TOKENS)
        least0, most0 = _ends(both.to(tl.int16), KIND)
        least1, most1 = _ends((both >> 16).to(tl.int16), KIND)
        for token in range(_AT_ONCE, 64, _AT_ONCE):
            both = _pairs(lines, strides, row, group * 64 + token, pair, PAGE_TOKENS)
            least, most = _ends(both.to(tl.int16), KIND)
            least0, most0 = tl.minimum(least0, least), tl.maximum(most0, most)
            least, most = _ends((both >> 16).to(tl.int16), KIND)
            least1, most1 = tl.minimum(least1, least), tl.maximum(most1, most)
        low0, scale0 = _channel_scale(least0, most0, state, KIND, PAIRS)
        low1, scale1 = _channel_scale(least1, most1, state, KIND, PAIRS)
        inverse0, inverse1 = _inverse(scale0), _inverse(scale1)
        for token in range(0, 64, _AT_ONCE):
            both = _pairs(lines, strides, row, group * 64 + token, pair, PAGE_TOKENS)
            codes0 = _steps((_to_float(both.to(tl.int16), KIND) - low0[None, :]) * inverse0[None, :], 0.0, 255.0)
            codes1 = _steps(
                (_to_float((both >> 16).to(tl.int16), KIND) - low1[None, :]) * inverse1[None, :], 0.0, 255.0
            )
            codes = (codes0.to(tl.int32) | (codes1.to(tl.int32) << 8)) ^ 0x8080  # 128 less, each
            number = token + tl.arange(0, _AT_ONCE)
            tl.store(codes_at + number[:, None] * (WIDTH // 2) + pair[None, :], codes.to(tl.int16))
        tl.store(scales_at + 2 * pair, scale0.to(tl.int16))
        tl.store(scales_at + 2 * pair + 1, scale1.to(tl.int16))
        tl.store(zeros_at + 2 * pair, _to_bits(low0, KIND))
        tl.store(zeros_at + 2 * pair + 1, _to_bits(low1, KIND))


@triton.jit
def _pairs(lines, strides, row, token, pair, PAGE_TOKENS: tl.constexpr):
    page, within = pages_of(row, token, _AT_ONCE, PAGE_TOKENS)
    at = (page * strides[0] + within * strides[1]) // 2
    return tl.load(lines + at[:, None] + pair[None, :])


@triton.jit
def _ends(bits, KIND: tl.constexpr):
    ordered = _ordered(bits, KIND)
    return tl.min(ordered, 0), tl.max(ordered, 0)


@triton.jit
def _channel_scale(least, most, state, KIND: tl.constexpr, COUNT: tl.constexpr):
    low, high = _of_ordered(least, KIND) + 0.0, _of_ordered(most, KIND) + 0.0  # of two zeros the positive one
    scale = _scale_up(tl.div_rn(high - low, tl.full([COUNT], 255.0, tl.float32)))
    _report(state, tl.maximum(most, ~least) >= _infinity(KIND), scale)
    return low, scale


@triton.jit
def _write_tokens(
    pool,
    strides,
    row,
    group,
    payload,
    places,
    line,
    state,
    PAGE_TOKENS: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    GROUPS: tl.constexpr = (WIDTH + STEP - 1) // STEP
    for token in range(0, 64, TOKENS):
        page, within = pages_of(row, group * 64 + token, TOKENS, PAGE_TOKENS)
        lines = pool + page * strides[0] + within * strides[1]
        number = line * 64 + token + tl.arange(0, TOKENS)
        codes_at = (payload + places[0]).to(tl.pointer_type(tl.int8)) + number * WIDTH
        scales_at = (payload + places[1]).to(tl.pointer_type(tl.int16)) + number * GROUPS
        for step in range(0, GROUPS):
            column = step * STEP + tl.arange(0, STEP)
            inside = (column < WIDTH)[None, :]
            bits = tl.load(lines[:, None] + column[None, :].to(tl.int64) * strides[3], mask=inside, other=0)
            largest = tl.max(_magnitude(bits, KIND), 1)
            scale = _scale_up(tl.div_rn(_of_ordered(largest, KIND), tl.full([TOKENS], 127.0, tl.float32)))
            _report(state, largest >= _infinity(KIND), scale)
            codes = _steps(_to_float(bits, KIND) * _inverse(scale)[:, None], -127.0, 127.0)
            tl.store(codes_at[:, None] + column[None, :], codes.to(tl.int8), mask=inside)
            tl.store(scales_at + step, scale.to(tl.int16))


@triton.jit(do_not_specialize=["layers"])
def _dequantize_scatter(
    payloads,
    row_bytes,
    payload_at,
    slice_bytes,
    table,
    table_row,
    addresses,
    layers,
    groups,
    heads,
    k_strides,
    v_strides,
    k_places,
    v_places,
    PLANES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    INTEGER: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    K_AXIS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_STEP: tl.constexpr,
    K_TOKENS: tl.constexpr,
    V_AXIS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_STEP: tl.constexpr,
    V_TOKENS: tl.constexpr,
):
    block, layer, group, head = place(layers, groups, heads)
    payload = payloads + block * row_bytes + payload_at + layer * slice_bytes
    row = table + block * table_row
    line = head * groups + group
    pool = pool_at(addresses, layer, 0, PLANES, INTEGER, ALIGNED) + head * k_strides[2]
    if K_AXIS == 0:
        _read_channels(pool, k_strides, row, group, payload, k_places, line, PAGE_TOKENS, KIND, K_WIDTH, K_STEP)
    else:
        _read_tokens(pool, k_strides, row, group, payload, k_places, line, PAGE_TOKENS, KIND, K_WIDTH, K_STEP, K_TOKENS)
    if PLANES == 2:
        pool = pool_at(addresses, layer, 1, PLANES, INTEGER, ALIGNED) + head * v_strides[2]
        _read_tokens(pool, v_strides, row, group, payload, v_places, line, PAGE_TOKENS, KIND, V_WIDTH, V_STEP, V_TOKENS)


@triton.jit
def _read_channels(
    pool,
    strides,
    row,
    group,
    payload,
    places,
    line,
    PAGE_TOKENS: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    page, within = pages_of(row, group * 64, 64, PAGE_TOKENS)
    lines = pool + page * strides[0] + within * strides[1]
    codes_at = (payload + places[0]).to(tl.pointer_type(tl.int8)) + (line * 64 + tl.arange(0, 64)) * WIDTH
    scales_at = (payload + places[1]).to(tl.pointer_type(tl.int16)) + line * WIDTH
    zeros_at = (payload + places[2]).to(lines.dtype.scalar) + line * WIDTH
    for at in range(0, WIDTH, STEP):
        column = at + tl.arange(0, STEP)
        inside = column < WIDTH
        wanted = (page >= 0)[:, None] & inside[None, :]
        scale = tl.load(scales_at + column, mask=inside, other=0).to(tl.float16, bitcast=True).to(tl.float32)
        zero = _to_float(tl.load(zeros_at + column, mask=inside, other=0), KIND)
        codes = tl.load(codes_at[:, None] + column[None, :], mask=wanted, other=0).to(tl.float32)
        x = (codes + 128.0) * scale[None, :] + zero[None, :]
        tl.store(lines[:, None] + column[None, :].to(tl.int64) * strides[3], _to_bits(x, KIND), mask=wanted)


@triton.jit
def _read_tokens(
    pool,
    strides,
    row,
    group,
    payload,
    places,
    line,
    PAGE_TOKENS: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    GROUPS: tl.constexpr = (WIDTH + STEP - 1) // STEP
    for token in range(0, 64, TOKENS):
        page, within = pages_of(row, group * 64 + token, TOKENS, PAGE_TOKENS)
        lines = pool + page * strides[0] + within * strides[1]
        number = line * 64 + token + tl.arange(0, TOKENS)
        codes_at = (payload + places[0]).to(tl.pointer_type(tl.int8)) + number * WIDTH
        scales_at = (payload + places[1]).to(tl.pointer_type(tl.int16)) + number * GROUPS
        for step in range(0, GROUPS):
            column = step * STEP + tl.arange(0, STEP)
            wanted = (page >= 0)[:, None] & (column < WIDTH)[None, :]
            scale = tl.load(scales_at + step).to(tl.float16, bitcast=True).to(tl.float32)
            codes = tl.load(codes_at[:, None] + column[None, :], mask=wanted, other=0).to(tl.float32)
            x = codes * scale[:, None]
            tl.store(lines[:, None] + column[None, :].to(tl.int64) * strides[3], _to_bits(x, KIND), mask=wanted)


# Numbers and their bits -----------------------------------------------------------------------------------------------


@triton.jit
def _to_float(bits, KIND: tl.constexpr):
    if KIND == "bf16":
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _to_bits(x, KIND: tl.constexpr):
    if KIND == "bf16":
        wide = x.to(tl.int32, bitcast=True)
        bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).to(tl.int16)
    elif KIND == "fp16":
        bits = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.int16, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _scale_up(exact):
    """The bits of the smallest fp16 that is not below an fp32 >= 0; above 0x7BFF where there is none."""
    bits = exact.to(tl.int32, bitcast=True)
    # fp16 counts in steps of 2**-24 below 2**-14: the significand, shifted there, and up for what is shifted out.
    exponent = tl.maximum(bits >> 23, 1)
    significand = (bits & 0x7FFFFF) + tl.where(bits >= 0x800000, 0x800000, 0)
    shift = tl.minimum(tl.maximum(126 - exponent, 0), 24)
    small = (significand + (1 << shift) - 1) >> shift
    usual = (bits - (112 << 23) + 0x1FFF) >> 13
    return tl.where(bits < (113 << 23), small, usual)


@triton.jit
def _inverse(scale):
    exact = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    one = tl.full(exact.shape, 1.0, tl.float32)
    return tl.where(exact > 0, tl.div_rn(one, tl.where(exact > 0, exact, one)), 0.0)


@triton.jit
def _steps(y, least, most):
    return tl.floor(tl.minimum(tl.maximum(y, least), most) + 0.5)


@triton.jit
def _magnitude(bits, KIND: tl.constexpr):
    return bits.to(tl.int32) & (0x7FFFFFFF if KIND == "fp32" else 0x7FFF)


@triton.jit
def _ordered(bits, KIND: tl.constexpr):
    wide = bits.to(tl.int32)
    return wide ^ ((wide >> 31) & (0x7FFFFFFF if KIND == "fp32" else 0x7FFF))


@triton.jit
def _of_ordered(ordered, KIND: tl.constexpr):
    bits = _ordered(ordered, KIND)  # it is its own inverse
    return _to_float(bits if KIND == "fp32" else bits.to(tl.int16), KIND)


@triton.jit
def _infinity(KIND: tl.constexpr):
    return 0x7F800000 if KIND == "fp32" else (0x7F80 if KIND == "bf16" else 0x7C00)


@triton.jit
def _report(state, is_not_finite, scale):
    worst = tl.max(tl.where(is_not_finite, 1, tl.where(scale > 0x7BFF, 2, 0)), 0)
    tl.atomic_max(state, worst, mask=worst > 0, sem="relaxed")
