"""Raw copies between paged pools and payloads on a GPU: bytes as they are, any strides.

    pool    one tensor [pages, page_tokens, heads, width] per layer and plane, named by its address
    payload [layer][plane][head, token, width] in C order, at `payload_at` in row b of a uint8 tensor

One launch covers all blocks, layers, heads and planes; a program copies 64 tokens of one block, layer and head. The
host allocates nothing and waits for nothing. Offsets have 64 bits: the pages of 128k tokens of an 8B model hold more
numbers than 32 bits can count.
This file, `triton_int8` and `triton_digest` are the only ones that import triton.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from kv_kernels.int8 import GROUP
from kv_kernels.pools import Launch, PoolTable, Strides, check_launch

WARPS = 4
LARGEST_GRID = 2**31 - 1
INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""What a number is moved as, by its bytes."""
_ABSENT = Strides(0, 0, 0, 0)


def gather(pools: PoolTable, table: torch.Tensor, payloads: torch.Tensor, payload_at: int = 0) -> None:
    """Copy the blocks of `table` into payloads.

    table: int32 or int64 [blocks, pages_per_block] of page ids, all of them in the pool.
    payloads: uint8 [blocks, bytes]; a row begins with `payload_at` bytes of something else, as a frame's header.
    Raises `ValueError` where these do not fit together (`pools.check_launch`).
    """
    launch = check_launch(pools, None, table, payloads, payload_at)
    run(_gather, pools, table, payloads, payload_at, launch, _constants(pools), launch.block_tokens)


def scatter(pools: PoolTable, table: torch.Tensor, payloads: torch.Tensor, payload_at: int = 0) -> None:
    """The mirror of `gather`. A page id of -1 leaves that page out; no page may be named twice."""
    launch = check_launch(pools, None, table, payloads, payload_at)
    run(_scatter, pools, table, payloads, payload_at, launch, _constants(pools), launch.block_tokens)


def run(
    kernel: Any,
    pools: PoolTable,
    table: torch.Tensor,
    payloads: torch.Tensor,
    payload_at: int,
    launch: Launch,
    constants: dict[str, Any],
    *further: Any,
    warps: int = WARPS,
) -> None:
    """Launch a kernel with what all of them are told, one program per block, layer, 64 tokens and head."""
    groups = -(-launch.block_tokens // GROUP)
    programs = launch.blocks * pools.layers * groups * pools.heads
    if programs == 0:
        return
    if programs > LARGEST_GRID:
        raise ValueError(f"{launch.blocks} blocks are {programs} programs; at most {LARGEST_GRID}: launch fewer blocks")
    second = pools.strides[1] if len(pools.widths) == 2 else _ABSENT
    with on_device(payloads.device):
        kernel[(programs,)](
            payloads,
            payloads.stride(0),
            payload_at,
            launch.slice_bytes,
            table,
            table.stride(0),
            pools.addresses,
            pools.layers,
            groups,
            pools.heads,
            tuple(pools.strides[0]),
            tuple(second),
            *further,
            PLANES=len(pools.widths),
            PAGE_TOKENS=pools.page_tokens,
            INTEGER=INTEGERS[pools.dtype.itemsize],
            ALIGNED=pools.aligned,
            num_warps=warps,
            **constants,
        )


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _constants(pools: PoolTable) -> dict[str, Any]:
    k_width, v_width = pools.widths[0], pools.widths[-1]
    return {"K_WIDTH": k_width, "V_WIDTH": v_width, "K_STEP": step_of(k_width), "V_STEP": step_of(v_width)}


def step_of(width: int) -> int:
    """Numbers of a row that a program holds at a time where it need not hold all: without a rest if 64 allows it."""
    return next((step for step in (128, 64) if width % step == 0), min(128, power_of_two(width)))


def power_of_two(width: int) -> int:
    """The smallest that is not below width."""
    return 1 << (width - 1).bit_length()


# The kernels ----------------------------------------------------------------------------------------------------------
# A program reads each number once and writes it once. Strides of 1 are specialised by triton, so that along whichever
# axis a pool's numbers lie side by side, accesses are as wide as its alignment allows.


@triton.jit(do_not_specialize=["layers"])
def _gather(
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
    tokens,
    PLANES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    INTEGER: tl.constexpr,
    ALIGNED: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
):
    block, layer, group, head = place(layers, groups, heads)
    payload = payloads + block * row_bytes + payload_at + layer * slice_bytes
    payload = payload.to(tl.pointer_type(INTEGER))
    token, page, within = places_of(table + block * table_row, group, tokens, PAGE_TOKENS)
    line = head * tokens + token
    pool = pool_at(addresses, layer, 0, PLANES, INTEGER, ALIGNED)
    lines = pool + page * k_strides[0] + within * k_strides[1] + head * k_strides[2]
    for at in range(0, K_WIDTH, K_STEP):
        column = at + tl.arange(0, K_STEP)
        inside = (page >= 0)[:, None] & (column < K_WIDTH)[None, :]
        numbers = tl.load(lines[:, None] + column[None, :].to(tl.int64) * k_strides[3], mask=inside)
        tl.store(payload + line[:, None] * K_WIDTH + column[None, :], numbers, mask=inside)
    if PLANES == 2:
        payload += heads.to(tl.int64) * tokens * K_WIDTH
        pool = pool_at(addresses, layer, 1, PLANES, INTEGER, ALIGNED)
        lines = pool + page * v_strides[0] + within * v_strides[1] + head * v_strides[2]
        for at in range(0, V_WIDTH, V_STEP):
            column = at + tl.arange(0, V_STEP)
            inside = (page >= 0)[:, None] & (column < V_WIDTH)[None, :]
            numbers = tl.load(lines[:, None] + column[None, :].to(tl.int64) * v_strides[3], mask=inside)
            tl.store(payload + line[:, None] * V_WIDTH + column[None, :], numbers, mask=inside)


@triton.jit(do_not_specialize=["layers"])
def _scatter(
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
    tokens,
    PLANES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    INTEGER: tl.constexpr,
    ALIGNED: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
):
    block, layer, group, head = place(layers, groups, heads)
    payload = payloads + block * row_bytes + payload_at + layer * slice_bytes
    payload = payload.to(tl.pointer_type(INTEGER))
    token, page, within = places_of(table + block * table_row, group, tokens, PAGE_TOKENS)
    line = head * tokens + token
    pool = pool_at(addresses, layer, 0, PLANES, INTEGER, ALIGNED)
    lines = pool + page * k_strides[0] + within * k_strides[1] + head * k_strides[2]
    for at in range(0, K_WIDTH, K_STEP):
        column = at + tl.arange(0, K_STEP)
        wanted = (page >= 0)[:, None] & (column < K_WIDTH)[None, :]
        numbers = tl.load(payload + line[:, None] * K_WIDTH + column[None, :], mask=wanted)
        tl.store(lines[:, None] + column[None, :].to(tl.int64) * k_strides[3], numbers, mask=wanted)
    if PLANES == 2:
        payload += heads.to(tl.int64) * tokens * K_WIDTH
        pool = pool_at(addresses, layer, 1, PLANES, INTEGER, ALIGNED)
        lines = pool + page * v_strides[0] + within * v_strides[1] + head * v_strides[2]
        for at in range(0, V_WIDTH, V_STEP):
            column = at + tl.arange(0, V_STEP)
            wanted = (page >= 0)[:, None] & (column < V_WIDTH)[None, :]
            numbers = tl.load(payload + line[:, None] * V_WIDTH + column[None, :], mask=wanted)
            tl.store(lines[:, None] + column[None, :].to(tl.int64) * v_strides[3], numbers, mask=wanted)


@triton.jit
def place(layers, groups, heads):
    """This program's block, layer, group of 64 tokens and head, as 64 bits; neighbours differ in the head."""
    number = tl.program_id(0)
    head = number % heads
    number //= heads
    group = number % groups
    number //= groups
    layer = number % layers
    return (number // layers).to(tl.int64), layer.to(tl.int64), group.to(tl.int64), head.to(tl.int64)


@triton.jit
def places_of(row, group, tokens, PAGE_TOKENS: tl.constexpr):
    """A group's 64 tokens, the page of each, and its place in that page. The page is -1 for those that are left out,
    and behind a block's last token."""
    token = group * 64 + tl.arange(0, 64)
    page = tl.load(row + token // PAGE_TOKENS, mask=token < tokens, other=-1)
    return token, page.to(tl.int64), (token % PAGE_TOKENS).to(tl.int64)


@triton.jit
def pages_of(row, token, TOKENS: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """The page of each of TOKENS tokens from `token` on, and its place in that page."""
    tokens = token + tl.arange(0, TOKENS)
    return tl.load(row + tokens // PAGE_TOKENS).to(tl.int64), (tokens % PAGE_TOKENS).to(tl.int64)


@triton.jit
def pool_at(addresses, layer, plane, PLANES: tl.constexpr, INTEGER: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a plane of a layer begins."""
    pool = tl.load(addresses + layer * PLANES + plane).to(tl.pointer_type(INTEGER))
    if ALIGNED:
        pool = tl.multiple_of(pool, 16)
    return pool
