"""Blocks between paged pools and payloads on a GPU; each number crosses from and to the GPU's memory once.

    pool    one tensor [pages, page_tokens, heads, width] per layer and plane, of any strides, named by its address
    payload one layer slice after another, row b of a uint8 tensor: [plane][head, token, width] in C order, or in 8 bits

One launch covers all blocks, layers, heads and planes; a program takes 64 tokens of one block, layer and head. The host
allocates nothing and waits for nothing. Offsets have 64 bits: the pages of 128k tokens of an 8B model hold more numbers
than 32 bits can count.

The form of a slice in 8 bits and its arithmetic are those of `int8`, bit for bit, which rests on: float32 throughout;
division as IEEE says (`div_rn`); integer arithmetic where interpreter and GPUs do not agree on a cast; and no
multiplication fused with an addition. That is asked of the compiler at every launch, and not relied on: ptxas of CUDA
12.9 fuses the paired ones of Blackwell all the same. When quantizing a clamp stands between the two, and when
dequantizing the product of a code (8 bits) and a scale (11 bits) is exact. A zero point of -0.0 is stored as 0.0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.int8_form import GROUP, Axis, Form, PlaneForm
from kv_kernels.plain import PoolTable
from kv_kernels.triton_digest import digest_copy, on_device

WARPS = 4
LARGEST_GRID = 2**31 - 1
REACHING, REACHED_TILE = 16, tl.constexpr(8)
"""Programs that reach into host memory, and the KiB that each reads at once: 128 KiB on the way (PCIe 5 wants 70 to
110), and a decoding engine keeps its processors."""
_TILE = 8192
"""Numbers that a program of `WARPS` warps holds at a time."""
_PAIRS_TILE, _LANES = 2048, 32
"""Where channels go in pairs: numbers of V that a warp holds at a time, and pairs that it has."""
_AT_ONCE = tl.constexpr(16)
"""Tokens of a pair of channels that are held at a time."""
INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""What a number is moved as, by its bytes."""
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Reached(NamedTuple):
    """Payloads in page-locked host memory, which few programs read or write by themselves: each takes a layer slice
    into its part of a scratch on the device, and is done with it before the next one. Digests are those of the words
    that it read, or wrote, on the host.

    addresses: int64 [blocks, 1] on the device, of the payloads, multiples of 16. at: bytes into each where its first
    layer slice begins. digests: int64 [blocks, layers, 2], as `triton_digest.digest_slices` writes them. keys:
    `digest_keys`.
    """

    addresses: Tensor
    at: int
    digests: Tensor
    keys: Tensor


def save(
    pools: PoolTable, form: Form, table: Tensor, payloads: Tensor, status: Tensor, reached: Reached | None = None
) -> None:
    """Put the blocks of `table` into payloads, into the current stream.

    table: int32 or int64 [blocks, pages of a block] of page ids, all of them in the pool. payloads: uint8 [blocks,
    bytes], rows at multiples of 16; a flat scratch where others are reached. status: int64 [blocks] with any stride,
    zeroed by the caller: in 8 bits it gets of each block the worst `Flaw` as its value, or stays 0. Nothing is promised
    about the payload of a block that is not 0. Raises ValueError for too many blocks.
    """
    _launch(False, pools, form, table, payloads, status, reached)


def load(pools: PoolTable, form: Form, table: Tensor, payloads: Tensor, reached: Reached | None = None) -> None:
    """The mirror of `save`. A page id of -1 leaves that page out; no page may be named twice."""
    _launch(True, pools, form, table, payloads, table, reached)


def _launch(
    loads: bool, pools: PoolTable, form: Form, table: Tensor, payloads: Tensor, status: Tensor, reached: Reached | None
) -> None:
    blocks, block_pages = table.shape
    tokens, slices = block_pages * pools.page_tokens, blocks * pools.layers
    raw_bytes = pools.heads * tokens * sum(pools.widths) * pools.dtype.itemsize
    slice_bytes, groups = raw_bytes if form is None else form.size_bytes, -(-tokens // GROUP)
    row_bytes, programs = slice_bytes, slices * groups * pools.heads
    if reached is None:
        row_bytes = payloads.stride(0)
        assert payloads.shape[0] == blocks and pools.layers * slice_bytes <= payloads.shape[1]
        assert blocks < 2 or not row_bytes % 16
    else:
        programs = min(programs and REACHING, slices, len(payloads) // slice_bytes)
    assert not payloads.data_ptr() % 16
    if programs == 0:
        return
    if programs > LARGEST_GRID:
        raise ValueError(f"{blocks} blocks are {programs} programs; at most {LARGEST_GRID}: launch fewer blocks")
    if form is None:
        forms = [(0, width, _step(width), 0) for width in pools.widths]
        places, ends, pairs = [(0, 0, 0)], (0, 0, 0), 0
    else:
        forms = [_form(plane) for plane in form.planes]
        places = [(plane.codes_at, plane.scales_at, plane.zeros_at) for plane in form.planes]
        ends, pairs = (*form.gap, form.padding[0]), 0 if loads else _pairs_at_once(pools, form.planes[0])
    if pairs:
        forms[-1] = (*forms[-1][:3], min(64, pairs // _LANES * _PAIRS_TILE // forms[-1][2]))
    where = payloads, row_bytes, slice_bytes, table, table.stride(0), pools.addresses
    shape = pools.layers, groups, pools.heads, tokens
    # With one plane the last one is the first, and is not read again; nor is what is reached where nothing is.
    lies = pools.strides[0], pools.strides[-1], places[0], places[-1]
    addresses, at, digests, keys = reached or (table, 0, table, table)
    with on_device(payloads.device):
        _move[(programs,)](
            *where, *shape, *lies, status, status.stride(0), ends, 0, slices,
            addresses, at, digests, digests.stride(0), keys,
            REACHED=0 if reached is None else slice_bytes, LOADS=loads, PAGE_TOKENS=pools.page_tokens,
            INTEGER=INTEGERS[pools.dtype.itemsize], ALIGNED=pools.aligned,
            KIND="raw" if form is None else _KINDS[pools.dtype], PAIRS=pairs, FORMS=tuple(forms),
            num_warps=pairs // _LANES or WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _form(plane: PlaneForm) -> tuple[int, int, int, int]:
    """Its axis and width, and the numbers of a token and the tokens that a program holds at a time."""
    if plane.axis is Axis.CHANNEL:
        step = _step(plane.width)
    else:
        step = triton.next_power_of_2(plane.width) if plane.axis is Axis.TOKEN else GROUP
    return int(plane.axis), plane.width, step, min(64, _TILE // step)


def _pairs_at_once(pools: PoolTable, plane: PlaneForm) -> int:
    """Pairs of neighbouring channels that a program takes at a time, one for each thread; 0 where K is not made of
    pairs: scales of tokens, numbers of 32 bits, or channels that lie apart."""
    *between, step = pools.strides[0]
    if plane.axis is not Axis.CHANNEL or pools.dtype.itemsize != 2 or step != 1 or not pools.aligned:
        return 0
    if any(stride % 2 for stride in between):
        return 0
    return next((pairs for pairs in (2 * _LANES, _LANES) if plane.width % (2 * pairs) == 0), 0)


def _step(width: int) -> int:
    """Numbers of a row that a program holds at a time where it need not hold all: without a rest if 64 allows it."""
    return next((step for step in (128, 64) if width % step == 0), min(128, triton.next_power_of_2(width)))


# The kernel -----------------------------------------------------------------------------------------------------------
# A program reads each number once and writes it once. Strides of 1 are specialised by triton, so that along whichever
# axis a pool's numbers lie side by side, accesses are as wide as its alignment allows.


@triton.jit(
    do_not_specialize=["layers", "nothing", "slices", "reached_at"],
    do_not_specialize_on_alignment=["table", "addresses", "status", "reached", "digests"],  # parts of tables
)
def _move(
    payloads, row_bytes, slice_bytes, table, table_row, addresses, layers, groups, heads, tokens, k_strides, v_strides,
    k_places, v_places, status, status_row, ends, nothing, slices, reached, reached_at, digests, digests_row, keys,
    REACHED: tl.constexpr, LOADS: tl.constexpr, PAGE_TOKENS: tl.constexpr, INTEGER: tl.constexpr,
    ALIGNED: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr, FORMS: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = len(FORMS)
    shape, strides, places = (groups, heads, tokens, slice_bytes), (k_strides, v_strides), (k_places, v_places, ends)
    if REACHED:
        payload = payloads + tl.program_id(0).to(tl.int64) * row_bytes
        slice_ = tl.program_id(0)
        while slice_ < slices:
            layer, block = (slice_ % layers).to(tl.int64), (slice_ // layers).to(tl.int64)
            row, state = table + block * table_row, status + block * status_row
            host = (tl.load(reached + block) + reached_at + layer * REACHED).to(tl.pointer_type(tl.uint8))
            host = tl.multiple_of(host, 16)
            digest = digests + block * digests_row + layer * 2
            pool = addresses + layer * PLANES
            if LOADS:
                digest_copy(host, payload, digest, keys, REACHED, True, REACHED_TILE)
                tl.debug_barrier()  # the words that were digested are in the scratch, for all of this program
            line = slice_ * 0
            while line < groups * heads:
                _move_line(
                    line, pool, row, payload, state, shape, strides, places, nothing,
                    LOADS, PAGE_TOKENS, INTEGER, ALIGNED, KIND, PAIRS, FORMS,
                )  # fmt: skip
                line += 1
            tl.debug_barrier()
            if not LOADS:
                digest_copy(payload, host, digest, keys, REACHED, True, REACHED_TILE)
                tl.debug_barrier()
            slice_ += tl.num_programs(0)
    else:
        # This program's block, layer, group of 64 tokens and head; neighbours differ in the head.
        number = tl.program_id(0)
        lines = groups * heads
        line, slice_ = number % lines, number // lines
        layer, block = (slice_ % layers).to(tl.int64), (slice_ // layers).to(tl.int64)
        payload, row = payloads + block * row_bytes + layer * slice_bytes, table + block * table_row
        pool, state = addresses + layer * PLANES, status + block * status_row
        _move_line(
            line, pool, row, payload, state, shape, strides, places, nothing,
            LOADS, PAGE_TOKENS, INTEGER, ALIGNED, KIND, PAIRS, FORMS,
        )  # fmt: skip


@triton.jit
def _move_line(
    number, addresses, row, payload, state, shape, strides, places, nothing,
    LOADS: tl.constexpr, PAGE_TOKENS: tl.constexpr, INTEGER: tl.constexpr, ALIGNED: tl.constexpr,
    KIND: tl.constexpr, PAIRS: tl.constexpr, FORMS: tl.constexpr,
):  # fmt: skip
    """64 tokens of one head, of all planes of a layer. number: of group and head; addresses: of the layer's planes."""
    groups, heads, tokens, slice_bytes = shape
    group, head = (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    line = head * groups + group
    numbers = payload.to(tl.pointer_type(INTEGER))
    for plane in tl.static_range(len(FORMS)):
        lies, place = strides[plane], places[plane]
        pool = tl.load(addresses + plane).to(tl.pointer_type(INTEGER))
        if ALIGNED:
            pool = tl.multiple_of(pool, 16)
        pool += head * lies[2]
        if KIND == "raw":
            at = numbers + head * tokens * FORMS[plane][1]
            _move_numbers(pool, lies, row, group, tokens, at, LOADS, PAGE_TOKENS, FORMS, plane)
            numbers += heads * tokens * FORMS[plane][1]
        elif FORMS[plane][0] != 0:
            _move_tokens(pool, lies, row, group, payload, place, line, state, LOADS, PAGE_TOKENS, KIND, FORMS, plane)
        elif PAIRS:
            # 0, of which the compiler does not know that 16 divides it: it gives each thread one pair at a time.
            apart, into = pool + nothing, payload + nothing
            _write_pairs(apart, lies, row, group, into, place, line, state, PAGE_TOKENS, KIND, FORMS[plane][1], PAIRS)
        else:
            _move_channels(pool, lies, row, group, payload, place, line, state, LOADS, PAGE_TOKENS, KIND, FORMS, plane)
    if KIND != "raw" and not LOADS:
        if line == 0:
            # What no other program writes: between K's scales and its zero points, and behind all.
            bytes_, ends = tl.arange(0, 16), places[2]
            tl.store(payload + ends[0] + bytes_, 0, mask=bytes_ < ends[1] - ends[0])
            tl.store(payload + ends[2] + bytes_, 0, mask=bytes_ < slice_bytes - ends[2])


@triton.jit
def _move_numbers(
    pool, strides, row, group, tokens, numbers,
    LOADS: tl.constexpr, PAGE_TOKENS: tl.constexpr, FORMS: tl.constexpr, PLANE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = FORMS[PLANE][1]
    STEP: tl.constexpr = FORMS[PLANE][2]
    token = group * 64 + tl.arange(0, 64)
    # The page of each token; -1 for those that are left out, and behind the block's last one.
    page = tl.load(row + token // PAGE_TOKENS, mask=token < tokens, other=-1).to(tl.int64)
    lines = pool + page * strides[0] + (token % PAGE_TOKENS) * strides[1]
    for at in range(0, WIDTH, STEP):
        column = at + tl.arange(0, STEP)
        wanted = (page >= 0)[:, None] & (column < WIDTH)[None, :]
        there = lines[:, None] + column[None, :].to(tl.int64) * strides[3]
        here = numbers + token[:, None] * WIDTH + column[None, :]
        if LOADS:
            tl.store(there, tl.load(here, mask=wanted), mask=wanted)
        else:
            tl.store(here, tl.load(there, mask=wanted), mask=wanted)


@triton.jit
def _pages_of(row, token, TOKENS: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """The page of each of TOKENS tokens from `token` on, and its place in that page."""
    tokens = token + tl.arange(0, TOKENS)
    return tl.load(row + tokens // PAGE_TOKENS).to(tl.int64), (tokens % PAGE_TOKENS).to(tl.int64)


@triton.jit
def _move_channels(
    pool, strides, row, group, payload, places, line, state,
    LOADS: tl.constexpr, PAGE_TOKENS: tl.constexpr, KIND: tl.constexpr, FORMS: tl.constexpr, PLANE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = FORMS[PLANE][1]
    STEP: tl.constexpr = FORMS[PLANE][2]
    page, within = _pages_of(row, group * 64, 64, PAGE_TOKENS)
    lines = pool + page * strides[0] + within * strides[1]
    codes_at = (payload + places[0]).to(tl.pointer_type(tl.int8)) + (line * 64 + tl.arange(0, 64)) * WIDTH
    scales_at = (payload + places[1]).to(tl.pointer_type(tl.int16)) + line * WIDTH
    zeros_at = (payload + places[2]).to(lines.dtype.scalar) + line * WIDTH
    for at in range(0, WIDTH, STEP):
        column = at + tl.arange(0, STEP)
        inside = column < WIDTH
        there = lines[:, None] + column[None, :].to(tl.int64) * strides[3]
        here = codes_at[:, None] + column[None, :]
        if LOADS:
            wanted = (page >= 0)[:, None] & inside[None, :]
            scale = tl.load(scales_at + column, mask=inside, other=0).to(tl.float16, bitcast=True).to(tl.float32)
            zero = _to_float(tl.load(zeros_at + column, mask=inside, other=0), KIND)
            codes = tl.load(here, mask=wanted, other=0).to(tl.float32)
            tl.store(there, _to_bits((codes + 128.0) * scale[None, :] + zero[None, :], KIND), mask=wanted)
        else:
            bits = tl.load(there, mask=inside[None, :], other=0)
            least, most = _ends(bits, KIND)
            low, scale = _channel_scale(least, most, state, KIND, STEP)
            y = (_to_float(bits, KIND) - low[None, :]) * _inverse(scale)[None, :]
            tl.store(here, (_steps(y, 0.0, 255.0) - 128.0).to(tl.int8), mask=inside[None, :])
            tl.store(scales_at + column, scale.to(tl.int16), mask=inside)
            tl.store(zeros_at + column, _to_bits(low, KIND), mask=inside)


@triton.jit
def _write_pairs(
    pool, strides, row, group, payload, places, line, state,
    PAGE_TOKENS: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    # As `_move_channels`, where a number has 16 bits and channels are neighbours. A thread has two channels of all
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
    page, within = _pages_of(row, token, _AT_ONCE, PAGE_TOKENS)
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
def _move_tokens(
    pool, strides, row, group, payload, places, line, state,
    LOADS: tl.constexpr, PAGE_TOKENS: tl.constexpr, KIND: tl.constexpr, FORMS: tl.constexpr, PLANE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = FORMS[PLANE][1]
    STEP: tl.constexpr = FORMS[PLANE][2]
    TOKENS: tl.constexpr = FORMS[PLANE][3]
    GROUPS: tl.constexpr = (WIDTH + STEP - 1) // STEP
    for token in range(0, 64, TOKENS):
        page, within = _pages_of(row, group * 64 + token, TOKENS, PAGE_TOKENS)
        lines = pool + page * strides[0] + within * strides[1]
        number = line * 64 + token + tl.arange(0, TOKENS)
        codes_at = (payload + places[0]).to(tl.pointer_type(tl.int8)) + number * WIDTH
        scales_at = (payload + places[1]).to(tl.pointer_type(tl.int16)) + number * GROUPS
        for step in range(0, GROUPS):
            column = step * STEP + tl.arange(0, STEP)
            inside = (column < WIDTH)[None, :]
            there = lines[:, None] + column[None, :].to(tl.int64) * strides[3]
            here = codes_at[:, None] + column[None, :]
            if LOADS:
                wanted = (page >= 0)[:, None] & inside
                scale = tl.load(scales_at + step).to(tl.float16, bitcast=True).to(tl.float32)
                codes = tl.load(here, mask=wanted, other=0).to(tl.float32)
                tl.store(there, _to_bits(codes * scale[:, None], KIND), mask=wanted)
            else:
                bits = tl.load(there, mask=inside, other=0)
                largest = tl.max(bits.to(tl.int32) & (0x7FFFFFFF if KIND == "fp32" else 0x7FFF), 1)
                scale = _scale_up(tl.div_rn(_of_ordered(largest, KIND), tl.full([TOKENS], 127.0, tl.float32)))
                _report(state, largest >= _infinity(KIND), scale)
                codes = _steps(_to_float(bits, KIND) * _inverse(scale)[:, None], -127.0, 127.0)
                tl.store(here, codes.to(tl.int8), mask=inside)
                tl.store(scales_at + step, scale.to(tl.int16))


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
    worst = tl.max(tl.where(is_not_finite, 2, tl.where(scale > 0x7BFF, 1, 0)), 0)
    tl.atomic_max(state, worst.to(tl.int64), mask=worst > 0, sem="relaxed")
