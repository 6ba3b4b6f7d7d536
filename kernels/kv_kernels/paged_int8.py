"""Paged pools to 8-bit payloads and back on a GPU, in one pass over the numbers.

A slice's form and its arithmetic are those of `int8`, bit for bit, which rests on: float32 throughout; division as IEEE
says (`div_rn`); integer arithmetic where interpreter and GPUs do not agree on a cast; and no multiplication fused with
an addition. That is asked of the compiler at every launch, and not relied on: ptxas of CUDA 12.9 fuses the paired ones
of Blackwell all the same. When quantizing a clamp stands between the two, and when dequantizing the product of a code
(8 bits) and a scale (11 bits) is exact. A zero point of -0.0 is stored as 0.0.

One launch covers all blocks, a range of layers, all heads and both planes; a program takes 64 tokens of one block,
layer and head. See `paged` for pools, page tables and payloads. With `paged` the only file that imports triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kv_kernels.int8 import GROUP, Axis, PlaneForm
from kv_kernels.paged import pages_of, place, pool_at, power_of_two, run, step_of
from kv_kernels.pools import PoolTable, check_launch, check_status

_TILE = 8192
"""Numbers that a program holds at a time."""
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_UNFUSED = {"enable_fp_fusion": False}


def gather_quantize(
    pools: PoolTable,
    codec: str,
    table: torch.Tensor,
    payloads: torch.Tensor,
    status: torch.Tensor,
    payload_at: int = 0,
    first: int = 0,
    last: int | None = None,
) -> None:
    """Quantize the blocks of `table` into payloads, layers [first, last) of them; padding is written as zeros.

    codec: `int8.KC64` or `int8.TH`. table, payloads: as in `paged.gather`.
    status: int32 [blocks], zeroed by the caller. Of each block the worst of its groups, as the value of a `Flaw`, or
    0. Nothing is promised about the payload of a block that is not 0.
    Raises `ValueError` where the arguments do not fit together (`pools.check_launch`).
    """
    launch = check_launch(pools, codec, table, payloads, payload_at, first, last)
    check_status(status, launch, pools.device)
    assert launch.form is not None
    form = launch.form
    ends = (*form.gap, form.padding[0])
    constants = _constants(pools, form.planes)
    run(_gather_quantize, pools, table, payloads, payload_at, launch, constants, *_places(form.planes), status, ends)


def dequantize_scatter(
    pools: PoolTable,
    codec: str,
    table: torch.Tensor,
    payloads: torch.Tensor,
    payload_at: int = 0,
    first: int = 0,
    last: int | None = None,
) -> None:
    """The mirror of `gather_quantize`. A page id of -1 leaves that page out; no page may be named twice."""
    launch = check_launch(pools, codec, table, payloads, payload_at, first, last)
    assert launch.form is not None
    constants, places = _constants(pools, launch.form.planes), _places(launch.form.planes)
    run(_dequantize_scatter, pools, table, payloads, payload_at, launch, constants, *places)


def _places(planes: tuple[PlaneForm, ...]) -> list[tuple[int, int, int]]:
    """Of K and V in a slice: codes, scales, zero points."""
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


def _step(plane: PlaneForm) -> int:
    """Numbers of a row that a program holds at a time: all that share a scale."""
    if plane.axis is Axis.CHANNEL:
        return step_of(plane.width)
    return power_of_two(plane.width) if plane.axis is Axis.TOKEN else GROUP


# The kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first", "layers"])
def _gather_quantize(
    payloads,
    row_bytes,
    payload_at,
    slice_bytes,
    table,
    table_row,
    addresses,
    first,
    layers,
    groups,
    heads,
    k_strides,
    v_strides,
    k_places,
    v_places,
    status,
    ends,
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
    block, layer, group, head = place(first, layers, groups, heads)
    payload = payloads + block * row_bytes + payload_at + layer * slice_bytes
    row = table + block * table_row
    state = status + block
    line = head * groups + group
    pool = pool_at(addresses, layer, 0, PLANES, INTEGER, ALIGNED) + head * k_strides[2]
    if K_AXIS == 0:
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
        x = _to_float(bits, KIND)
        low, high = tl.min(x, 0) + 0.0, tl.max(x, 0) + 0.0  # of two zeros the positive one, on every route
        scale = _scale_up(tl.div_rn(high - low, tl.full([STEP], 255.0, tl.float32)))
        _report(state, _is_not_finite(x, 0), scale)
        y = (x - low[None, :]) * _inverse(scale)[None, :]
        codes = _steps(y, 0.0, 255.0) - 128.0
        tl.store(codes_at[:, None] + column[None, :], codes.to(tl.int8), mask=inside[None, :])
        tl.store(scales_at + column, scale.to(tl.int16), mask=inside)
        tl.store(zeros_at + column, _to_bits(low, KIND), mask=inside)


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
            x = _to_float(bits, KIND)
            scale = _scale_up(tl.div_rn(tl.max(tl.abs(x), 1), tl.full([TOKENS], 127.0, tl.float32)))
            _report(state, _is_not_finite(x, 1), scale)
            codes = _steps(x * _inverse(scale)[:, None], -127.0, 127.0)
            tl.store(codes_at[:, None] + column[None, :], codes.to(tl.int8), mask=inside)
            tl.store(scales_at + step, scale.to(tl.int16))


@triton.jit(do_not_specialize=["first", "layers"])
def _dequantize_scatter(
    payloads,
    row_bytes,
    payload_at,
    slice_bytes,
    table,
    table_row,
    addresses,
    first,
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
    block, layer, group, head = place(first, layers, groups, heads)
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
    """A number of the pool, from its bits as an integer; exact."""
    if KIND == "bf16":
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _to_bits(x, KIND: tl.constexpr):
    """To nearest even; fp16 is held within its largest number first."""
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
    """Of a scale given as fp16 bits, in fp32; 0 of 0."""
    exact = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    one = tl.full(exact.shape, 1.0, tl.float32)
    return tl.where(exact > 0, tl.div_rn(one, tl.where(exact > 0, exact, one)), 0.0)


@triton.jit
def _steps(y, least, most):
    """floor(y + 0.5) within two integers. Held within them first, which is the same and keeps y's product apart."""
    return tl.floor(tl.minimum(tl.maximum(y, least), most) + 0.5)


@triton.jit
def _is_not_finite(x, AXIS: tl.constexpr):
    """Whether any number along that axis is a NaN or an infinity, as 0 or 1."""
    return tl.max(((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000).to(tl.int32), AXIS)


@triton.jit
def _report(state, is_not_finite, scale):
    """Raise a block's status to the worst of these groups."""
    worst = tl.max(tl.where(is_not_finite != 0, 1, tl.where(scale > 0x7BFF, 2, 0)), 0)
    tl.atomic_max(state, worst, mask=worst > 0, sem="relaxed")
