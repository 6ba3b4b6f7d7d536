"""Raw copies between paged pools and payloads: the kernels against their twins in plain torch, bit for bit.

On a machine with a GPU the kernels run on it, elsewhere in triton's interpreter, which tests/conftest.py asks for. What
is compared is all of memory, also what no launch should have reached.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv_kernels import plain, triton_pools
from kv_kernels.int8_form import KC64, slice_form
from kv_kernels.pools import PoolTable
from paged_memory import DEVICE, Case, Memory, kernels_can_run, ones, page_table, random_bits

__all__ = ["kernels_can_run"]

pytestmark = pytest.mark.usefixtures("kernels_can_run")

PATH = str(Path(__file__).resolve().parents[2] / "kernels")
HEADER, TAIL = 4096, 64
"""Of a frame before its payload, and bytes behind it that nobody may touch."""

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


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5]], ids=str)
def test_there_and_back(case: Case) -> None:
    """scatter(gather(x)) == x in other pages, and gather(scatter(y)) == y."""
    memory, table = Memory.of(case, random_bits(5)).copy(DEVICE), _on_device(page_table(case, 6))
    payloads = payloads_for(case).to(DEVICE)
    triton_pools.save(memory.pools, None, table, payloads[:, HEADER:], table)
    other, elsewhere = Memory.of(case, ones).copy(DEVICE), _on_device(page_table(case, 7))
    triton_pools.load(other.pools, None, elsewhere, payloads[:, HEADER:])
    for planes, copies in zip(memory.planes, other.planes, strict=True):
        for plane, copy in zip(planes, copies, strict=True):
            assert torch.equal(_bits(plane[table.flatten().long()]), _bits(copy[elsewhere.flatten().long()]))
    again = payloads_for(case).to(DEVICE)
    triton_pools.save(other.pools, None, elsewhere, again[:, HEADER:], elsewhere)
    assert torch.equal(again, payloads)


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
        for form in (None, slice_form(KC64, case.heads, case.block_tokens, case.widths, 2)):
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
    program = "import sys; sys.modules['triton'] = None; from kv_kernels import host, int8, plain, pools"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": PATH}, timeout=120, check=True)


def _on_device(table: torch.Tensor) -> torch.Tensor:
    """With its strides: the rows of an engine's table are wider than a block's part of them."""
    whole = table._base if table._base is not None else table
    return whole.to(DEVICE)[: table.shape[0], : table.shape[1]]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
