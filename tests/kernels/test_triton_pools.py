"""Blocks between paged pools and payloads: the kernel against its twin in plain torch, and that against `int8`, bit for
bit. Codes, scales, zero points, padding and decoded numbers are all compared as bits.

On a machine with a GPU the kernels run on it, elsewhere in triton's interpreter, which tests/conftest.py asks for. What
is compared is all of memory, also what no launch should have reached.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv_kernels import int8, plain, triton_pools
from kv_kernels.int8 import dequantize, quantize
from kv_kernels.int8_form import SliceForm, slice_form
from kv_kernels.plain import PoolTable
from paged_memory import DEVICE, Case, Memory, kernels_can_run, ones, page_table, random_bits

__all__ = ["kernels_can_run"]

pytestmark = pytest.mark.usefixtures("kernels_can_run")

PATH = str(Path(__file__).resolve().parents[2] / "kernels")
HEADER, TAIL = 4096, 64
"""Of a frame before its payload, and bytes behind it that no launch may touch."""

CASES = [
    Case("token-major", "bfloat16", 16, 4, 2, (128, 128), layers=4),
    Case("head-major", "float16", 1, 64, 3, (72, 80), table=torch.int32),
    Case("fused", "float32", 48, 4, 2, (96, 64)),
    Case("transposed", "bfloat16", 32, 2, 2, (64, 192), layers=3),
    Case("gaps", "uint8", 256, 1, 3, (7, 5), layers=1),
    Case("head-range", "bfloat16", 3, 64, 2, (80, 128), layers=1, blocks=1),
    Case("token-major", "bfloat16", 64, 1, 1, (576,), blocks=3),
    Case("gaps", "float8_e4m3fn", 128, 1, 1, (567,), layers=1),
    Case("token-major", "bfloat16", 16, 7, 2, (72, 40)),
    Case("head-major", "uint8", 4, 1, 3, (80, 128)),
]


def payloads_for(case: Case, bits: int | None = None) -> torch.Tensor:
    """[blocks, header, payload and tail]; filled with a pattern, or at random."""
    payloads = torch.full((case.blocks, HEADER + case.raw_bytes + TAIL), 0xA5, dtype=torch.uint8)
    if bits is not None:
        payloads.random_(0, 256, generator=torch.Generator().manual_seed(bits))
    return payloads


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gather_is_the_twin_bit_for_bit(case: Case) -> None:
    memory, table = Memory.of(case, random_bits(1)), page_table(case, 2)
    want, got = payloads_for(case), payloads_for(case).to(DEVICE)
    plain.save(memory.pools, None, table, want[:, HEADER:], table)
    there = memory.copy(DEVICE)
    triton_pools.save(there.pools, None, _on_device(table), got[:, HEADER:], _on_device(table))
    assert torch.equal(got.cpu(), want)
    assert torch.equal(there.bits(), memory.bits()), "a gather writes no page"
    for row in want:
        assert bool((row[:HEADER] == 0xA5).all()) and bool((row[-TAIL:] == 0xA5).all()), "nothing but its layers"
        assert len(row[HEADER:-TAIL].unique()) > 64


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scatter_is_the_twin_and_touches_nothing_else(case: Case) -> None:
    table, payloads = page_table(case, 3, left_out=True), payloads_for(case, 4)
    want, got = Memory.of(case, ones), Memory.of(case, ones).copy(DEVICE)
    plain.load(want.pools, None, table, payloads[:, HEADER:])
    sent = payloads.to(DEVICE, copy=True)
    triton_pools.load(got.pools, None, _on_device(table), sent[:, HEADER:])
    assert torch.equal(got.bits(), want.bits())
    assert torch.equal(sent.cpu(), payloads)
    named = set(table.flatten().tolist())
    for planes in want.planes:
        for plane in planes:
            for page in range(case.pages):
                filled = bool((plane[page].contiguous().view(torch.uint8) == 0xFF).all())
                assert filled == (page not in named)


@pytest.mark.parametrize("strides", [(1 << 30, 64, 64, 1), (64, 1 << 26, 64, 1), (64, 1, 64, 1 << 26)], ids=str)
def test_offsets_have_64_bits(strides: tuple[int, ...]) -> None:
    """Numbers further apart than 32 bits can count, although each stride is less: of memory that is not touched."""
    buffer = torch.empty((1 << 32) + 8192, dtype=torch.uint8, device=DEVICE)
    plane = buffer.as_strided((5, 64, 1, 64), strides)
    plane[4] = torch.randint(0, 256, (64, 1, 64), generator=torch.Generator().manual_seed(16)).to(DEVICE)
    pools, table = PoolTable.of([[plane]]), torch.tensor([[4]], device=DEVICE)
    want, got = (torch.zeros(1, 4096, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    plain.save(pools, None, table, want, table)
    triton_pools.save(pools, None, table, got, table)
    assert torch.equal(got, want) and torch.equal(got.view(64, 64), plane[4, :, 0])
    plane[4] = 0
    triton_pools.load(pools, None, table, want)
    assert torch.equal(got.view(64, 64), plane[4, :, 0])


def test_no_blocks_launch_nothing() -> None:
    case = CASES[0]
    memory, payloads = Memory.of(case, ones).copy(DEVICE), payloads_for(case, 1).to(DEVICE)
    table = _on_device(page_table(case, 1))
    triton_pools.load(memory.pools, None, table[:0], payloads[:0][:, HEADER:])
    assert bool((memory.bits() == 0xFF).all())


# What a launch costs, and what it refuses -----------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(operation))
        return operation(*args, **(kwargs or {}))


class Launched:
    """Stands where a kernel stands, since the interpreter copies its arguments by torch; notes what it is given."""

    def __init__(self) -> None:
        self.grids: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


def test_a_launch_asks_torch_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No allocation, no copy, no view, whatever the strides: one launch, for all blocks, layers, heads and planes."""
    case = Case("transposed", "bfloat16", 16, 8, 3, (64, 64), layers=5, blocks=4)
    pools, table = Memory.of(case, ones).copy(DEVICE).pools, _on_device(page_table(case, 1))
    payloads = payloads_for(case).to(DEVICE)
    status = torch.zeros(case.blocks, dtype=torch.int64, device=DEVICE)
    staged, kernel = payloads[:, HEADER:], Launched()
    monkeypatch.setattr(triton_pools, "_move", kernel)
    with Operations() as operations:
        for form in (None, slice_form(case.heads, case.block_tokens, case.widths, 2)):
            triton_pools.save(pools, form, table, staged, status)
            triton_pools.load(pools, form, table, staged)
    assert operations.seen == []
    assert kernel.grids == [(120,)] * 4


def plane(pages: int = 4, tokens: int = 16, heads: int = 2, width: int = 64, **options: Any) -> torch.Tensor:
    return torch.zeros(pages, tokens, heads, width, **options)


@pytest.mark.parametrize(
    ("planes", "said"),
    [
        ([], "at least one layer"),
        ([[]], "at least one layer"),
        ([[plane(), plane(), plane()]], r"one \(MLA\) or two planes"),
        ([[plane()[0]]], "give a view"),
        ([[plane(pages=0)]], "give a view"),
        ([[plane(width=4097)]], "at most 4096"),
        ([[plane(), plane()], [plane()]], "layer 1 has 1 planes, layer 0 has 2; make one table"),
        ([[plane(), plane(tokens=32)]], "plane 1 of layer 0 has the shape"),
        ([[plane()], [plane(width=32)]], "layer 0 has .4, 16, 2, 64.; make one table"),
        (
            [[plane()], [plane(dtype=torch.float16)]],
            r"plane 0 of layer 1 is torch.float16 on cpu, others torch.float32",
        ),
        ([[plane()], [plane(heads=16, tokens=2).transpose(1, 2)]], r"strides \(2048, 64, 1024, 1\), layer 0 has"),
    ],
)
def test_planes_that_make_no_table(planes: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PoolTable.of(planes)


@pytest.mark.slow
def test_without_triton_all_but_the_kernels_can_be_imported() -> None:
    program = "import sys; sys.modules['triton'] = None; from kv_kernels import host, int8, plain"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": PATH}, timeout=120, check=True)


def _on_device(table: torch.Tensor) -> torch.Tensor:
    """With its strides: the rows of an engine's table are wider than a block's part of them."""
    whole = table._base if table._base is not None else table
    return whole.to(DEVICE)[: table.shape[0], : table.shape[1]]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# In 8 bits ------------------------------------------------------------------------------------------------------------

INT8_CASES = [
    Case("token-major", "bfloat16", 16, 4, 2, (128, 128), layers=3),
    Case("head-major", "float16", 1, 128, 3, (72, 80), layers=1, table=torch.int32),
    Case("fused", "float32", 48, 4, 1, (96, 65), layers=2),
    Case("transposed", "bfloat16", 32, 2, 2, (64, 192), layers=2),
    Case("gaps", "float32", 64, 1, 5, (7, 5), layers=2),  # with bytes between and behind its pieces
    Case("head-range", "float16", 3, 64, 2, (80, 128), layers=1, blocks=1),
    Case("transposed", "float32", 128, 1, 1, (64, 64), layers=1),
    Case("gaps", "bfloat16", 64, 1, 3, (5, 192), layers=2),
    Case("token-major", "bfloat16", 64, 1, 1, (576,), layers=1),
    Case("gaps", "float16", 16, 8, 1, (567,), layers=2, blocks=1),
    Case("token-major", "bfloat16", 64, 1, 1, (2304, 3), layers=1, blocks=1),
]
int8_cases = pytest.mark.parametrize("case", INT8_CASES, ids=str)


def numbers(case: Case, seed: int) -> Callable[[torch.Tensor], object]:
    """All numbers of a buffer: most of them normal, and in each plane some of what goes wrong easily (`_trouble`)."""
    generator = torch.Generator().manual_seed(seed)

    def fill(buffer: torch.Tensor) -> object:
        values = buffer.view(case.torch_dtype)
        return values.copy_(torch.randn(values.shape, generator=generator))

    return fill


def troubled(case: Case, seed: int) -> Memory:
    memory = Memory.of(case, numbers(case, seed))
    for planes in memory.planes:
        for plane in planes:
            _trouble(plane, torch.Generator().manual_seed(seed))
    return memory


def _trouble(plane: torch.Tensor, generator: torch.Generator) -> None:
    pages, _, _, width = plane.shape
    middle = plane[: pages - pages // 4]
    middle[..., 3 % width] *= 40  # an outlier channel
    if width > 8:
        middle[..., 5] += 300  # a bias
        middle[..., 6] *= 1e-6  # scales below fp16's smallest normal number
        middle[..., 7] *= 1e-39 if plane.dtype is not torch.float16 else 0  # subnormal numbers in 8 bits of exponent
        is_low = torch.rand(middle.shape[:3], generator=generator) < 0.5
        middle[..., 8] = torch.where(is_low, 0.0, middle[..., 8].abs())  # the smallest is zero
        middle[..., 9] = torch.where(is_low, -0.0, 0.0)  # or one of the two zeros
        middle[..., 10] = 1.234
        if plane.dtype is torch.float16:
            middle[..., 11] = torch.where(is_low, -65504.0, 65504.0)  # which decode to what is beyond
    plane[0] = 0.0
    plane[1] = -0.0
    plane[2] = 0.7  # a constant page
    plane[-1, 0] = 0.0  # a token of zeros
    plane[-2] *= 1e-7


def int8_payloads_for(case: Case) -> torch.Tensor:
    size = HEADER + form_of(case).size_bytes * case.layers + TAIL
    return torch.full((case.blocks, -(-size // 64) * 64), 0xA5, dtype=torch.uint8)


def form_of(case: Case) -> SliceForm:
    return slice_form(case.heads, case.block_tokens, case.widths, case.torch_dtype.itemsize)


def status_for(case: Case) -> torch.Tensor:
    return torch.zeros(case.blocks, dtype=torch.int64)


def twin_payloads(case: Case, memory: Memory, table: torch.Tensor) -> torch.Tensor:
    payloads, status = int8_payloads_for(case), status_for(case)
    plain.save(memory.pools, form_of(case), table, payloads[:, HEADER:], status)
    assert status.tolist() == [0] * case.blocks
    return payloads


def kernel_payloads(case: Case, memory: Memory, table: torch.Tensor) -> torch.Tensor:
    payloads, status = int8_payloads_for(case).to(DEVICE), status_for(case).to(DEVICE)
    there = memory.copy(DEVICE)
    triton_pools.save(there.pools, form_of(case), table.to(DEVICE), payloads[:, HEADER:], status)
    assert status.tolist() == [0] * case.blocks
    assert torch.equal(there.bits(), memory.bits()), "a gather writes no page"
    return payloads.cpu()


def block_of(plane: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, width]"""
    return plane[pages.long()].flatten(0, 1).transpose(0, 1)


@pytest.mark.slow
@int8_cases
def test_quantizing_is_the_twin_bit_for_bit(case: Case) -> None:
    """With header and tail as they were."""
    memory, table = troubled(case, 1), page_table(case, 2)
    want, got = twin_payloads(case, memory, table), kernel_payloads(case, memory, table)
    assert torch.equal(got, want)
    end = HEADER + case.layers * form_of(case).size_bytes
    assert bool((got[:, :HEADER] == 0xA5).all()) and bool((got[:, end:] == 0xA5).all())


@int8_cases
def test_dequantizing_is_the_twin_bit_for_bit(case: Case) -> None:
    """Into pages of NaN, some of which are left out; those and all others stay NaN."""
    payloads = twin_payloads(case, troubled(case, 3), page_table(case, 4))
    table = page_table(case, 5, left_out=True)
    want, got = Memory.of(case, ones), Memory.of(case, ones).copy(DEVICE)
    plain.load(want.pools, form_of(case), table, payloads[:, HEADER:])
    sent = payloads.to(DEVICE, copy=True)
    triton_pools.load(got.pools, form_of(case), table.to(DEVICE), sent[:, HEADER:])
    assert torch.equal(got.bits(), want.bits())
    assert torch.equal(sent.cpu(), payloads)
    named = set(table.flatten().tolist()) - {-1}
    for planes in got.planes:
        for plane in planes:
            for page in range(case.pages):
                is_written = page in named
                assert bool(plane[page].isfinite().all() if is_written else plane[page].isnan().all())


@int8_cases
def test_the_twin_is_what_int8_says(case: Case) -> None:
    """Each piece of each slice where `SliceForm` has it, and the decoded numbers in the pages."""
    memory, table, form = troubled(case, 6), page_table(case, 7), form_of(case)
    payloads = twin_payloads(case, memory, table)
    back = Memory.of(case, ones)
    plain.load(back.pools, form_of(case), table, payloads[:, HEADER:])
    for index, pages in enumerate(table):
        for layer in range(case.layers):
            at = HEADER + layer * form.size_bytes
            piece = payloads[index, at : at + form.size_bytes]
            assert not piece[form.padding[0] :].any()
            for plane, decoded, of in zip(memory.planes[layer], back.planes[layer], form.planes, strict=True):
                made = quantize(block_of(plane, pages), of.axis)
                assert _same(piece, of.codes_at, made.codes) and _same(piece, of.scales_at, made.scales)
                if made.zeros is not None:
                    assert _same(piece, of.zeros_at, made.zeros + 0.0)
                want = dequantize(*made, case.torch_dtype)
                assert torch.equal(block_of(decoded, pages), want) and bool((want == want).all())


@pytest.mark.parametrize("mistake", ["truncated", "half to even", "not inverted"])
def test_other_roundings_give_other_codes(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees a code that is off by one: these twins are wrong on purpose."""
    case = Case("token-major", "float32", 64, 1, 1, (64, 64), layers=1, blocks=1)
    memory, table = Memory.of(case, numbers(case, 8)), page_table(case, 9)
    # Multiples of half a step beside the ends that make the step a power of two.
    key = memory.planes[0][0]
    key[:] = torch.randint(0, 511, key.shape, generator=torch.Generator().manual_seed(10)) / 2
    key[:, 0], key[:, 1] = 0, 255
    got = kernel_payloads(case, memory, table)
    assert torch.equal(got, twin_payloads(case, memory, table))
    if mistake == "not inverted":
        memory.planes[0][1].mul_(1 / 3)
        got = kernel_payloads(case, memory, table)
        monkeypatch.setattr(int8, "_inverse", lambda scales: (1.0 / scales.double()).half().float())
    else:
        monkeypatch.setattr(int8, "_steps", torch.trunc if mistake == "truncated" else torch.round)
    assert not torch.equal(got, twin_payloads(case, memory, table))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, about numbers that are meant to be wrong
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_cannot_be_written_is_reported_by_block(dtype: str) -> None:
    """The worst of a block's groups; where a group has a NaN, its scale does not count."""
    case = Case("token-major", dtype, 16, 4, 2, (64, 72), layers=2, blocks=9)
    memory, table = Memory.of(case, numbers(case, 13)), page_table(case, 14)
    far = torch.finfo(case.torch_dtype).max
    key, value = memory.planes[0]
    last_key, last_value = memory.planes[1]
    pages = table.long()
    key[pages[1, 2], 3, 1, 9] = math.nan
    last_value[pages[2, 0], 15, 0, 71] = -math.inf
    key[pages[3, 0], 0, 0, 0] = far
    last_value[pages[4, 3], 15, 1, 71] = -far
    value[pages[5, 1], 2, 0, 3], last_key[pages[5, 3], 2, 1, 3] = math.nan, far
    key[pages[6, 0], 0, 0, :2] = torch.tensor([far, math.nan])
    key[pages[6, 0], 1, 0, 0] = math.inf
    # The largest scale that fits, and the next one.
    last_value[pages[7, 3], 1, 0, 1] = 127 * 65504.0 if dtype == "float32" else 126 * 65536.0
    last_value[pages[8, 3], 1, 0, 1] = 127 * 65504.0 + 1 if dtype == "float32" else 127 * 65536.0
    want, payloads = status_for(case), int8_payloads_for(case)
    plain.save(memory.pools, form_of(case), table, payloads[:, HEADER:], want)
    assert want.tolist() == [0, 2, 2, 1, 1, 2, 2, 0, 1]
    there, got, status = memory.copy(DEVICE), int8_payloads_for(case).to(DEVICE), status_for(case).to(DEVICE)
    triton_pools.save(there.pools, form_of(case), table.to(DEVICE), got[:, HEADER:], status)
    assert status.tolist() == want.tolist()
    for block in (0, 7):
        assert torch.equal(got[block].cpu(), payloads[block])


@pytest.mark.slow
def test_every_scale_is_rounded_up_as_the_twin_does() -> None:
    """From fp32's smallest number to fp16's largest, beside every kind of boundary between two fp16."""
    case = Case("token-major", "float32", 64, 64, 1, (4, 1), layers=1, blocks=1)
    memory, table = Memory.of(case, lambda buffer: buffer.zero_()), page_table(case, 15)
    halves = torch.arange(1, 0x7C00, 13, dtype=torch.int16).view(torch.float16).float()
    edges = torch.cat([halves, (halves[1:] + halves[:-1]) / 2]) * 127
    edges = torch.cat([edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(1e9))])
    tiny = torch.tensor([1, 2, 3, 1 << 22, (1 << 23) - 1, 1 << 23], dtype=torch.int32).view(torch.float32)
    edges = torch.cat([tiny, 127 * tiny, edges.clamp(max=65504 * 127.0)])
    value = memory.planes[0][1]
    for start in range(0, len(edges), 4096):
        part = edges[start : start + 4096]
        block = torch.zeros(4096)
        block[: len(part)] = part
        value[table[0].long()] = block.view(64, 64, 1, 1)
        got = kernel_payloads(case, memory, table)
        assert torch.equal(got, twin_payloads(case, memory, table))


def _same(piece: torch.Tensor, at: int, numbers: torch.Tensor) -> bool:
    data = numbers.contiguous().view(torch.uint8).flatten()
    return torch.equal(piece[at : at + len(data)], data)
