"""Paged KV in memory of a test's own, in the layouts that engines have, for the kernels and their twins.

A `Memory` is flat buffers and the views of them that make planes, so that it can be copied to a device, and compared as
a whole: a byte written anywhere else is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from kv_kernels import triton_pools
from kv_kernels.plain import PoolTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels_can_run() -> Iterator[None]:
    """On a GPU or in the interpreter; with torch on one thread, which for tensors this small is faster by far."""
    if DEVICE == "cpu" and not hasattr(triton_pools._move, "rewrite"):
        pytest.skip("no GPU for torch, and TRITON_INTERPRET was not set before triton was imported")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """Pages of some layers, and the blocks that a page table names in them."""

    layout: str
    dtype: str
    page_tokens: int
    pages_per_block: int
    heads: int
    widths: tuple[int, ...]
    layers: int = 2
    blocks: int = 2
    table: torch.dtype = torch.int64

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def block_tokens(self) -> int:
        return self.page_tokens * self.pages_per_block

    @property
    def pages(self) -> int:
        return self.blocks * self.pages_per_block + 3

    @property
    def raw_bytes(self) -> int:
        """Of a payload."""
        return self.layers * self.heads * self.block_tokens * sum(self.widths) * self.torch_dtype.itemsize

    def __str__(self) -> str:
        widths = "+".join(map(str, self.widths))
        return f"{self.layout}-{self.dtype}-{self.page_tokens}x{self.pages_per_block}-{self.heads}x{widths}"


View = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Buffer, offset, shape, strides."""


@dataclass
class Memory:
    case: Case
    buffers: list[torch.Tensor]
    views: list[list[View]] = field(repr=False)

    @staticmethod
    def of(case: Case, fill: Callable[[torch.Tensor], object]) -> Memory:
        """fill: writes the bytes of a buffer."""
        views, sizes = LAYOUTS[case.layout](case)
        buffers = [torch.empty(size, dtype=case.torch_dtype) for size in sizes]
        for buffer in buffers:
            fill(buffer.view(torch.uint8))
        return Memory(case, buffers, views)

    def copy(self, device: str = "cpu") -> Memory:
        return Memory(self.case, [buffer.clone().to(device) for buffer in self.buffers], self.views)

    @property
    def planes(self) -> list[list[torch.Tensor]]:
        return [
            [self.buffers[index].as_strided(shape, strides, offset) for index, offset, shape, strides in layer]
            for layer in self.views
        ]

    @property
    def pools(self) -> PoolTable:
        return PoolTable.of(self.planes)

    def bits(self) -> torch.Tensor:
        """Of all memory, also what no plane reaches."""
        return torch.cat([buffer.view(torch.uint8) for buffer in self.buffers]).cpu()


def random_bits(seed: int) -> Callable[[torch.Tensor], object]:
    generator = torch.Generator().manual_seed(seed)
    return lambda buffer: buffer.random_(0, 256, generator=generator)


def ones(buffer: torch.Tensor) -> None:
    """Every number a NaN."""
    buffer.fill_(0xFF)


def page_table(case: Case, seed: int, *, left_out: bool = False) -> torch.Tensor:
    """Distinct pages in any order; with `left_out` one in four, and a whole block's last page, is -1. The table is a
    view of a wider one, as an engine's is."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(case.pages, generator=generator)[: case.blocks * case.pages_per_block]
    wide = torch.full((case.blocks, case.pages_per_block + 5), -7)
    wide[:, : case.pages_per_block] = pages.view(case.blocks, case.pages_per_block)
    table = wide.to(case.table)[:, : case.pages_per_block]
    if left_out:
        table[torch.rand(table.shape, generator=generator) < 0.25] = -1
        table[0, -1] = -1
    return table


# Layouts: of each layer and plane where it lies, and the sizes of the buffers, in numbers -----------------------------


def _token_major(case: Case) -> tuple[list[list[View]], list[int]]:
    return _apart(case, lambda width: (case.page_tokens * case.heads * width, case.heads * width, width, 1))


def _head_major(case: Case) -> tuple[list[list[View]], list[int]]:
    return _apart(case, lambda width: (case.page_tokens * case.heads * width, width, case.page_tokens * width, 1))


def _head_range(case: Case) -> tuple[list[list[View]], list[int]]:
    """Two more heads in the pool than in the part, one on each side."""
    heads = case.heads + 2
    return _apart(
        case, lambda width: (case.page_tokens * heads * width, heads * width, width, 1), lambda width: width, heads
    )


def _gaps(case: Case) -> tuple[list[list[View]], list[int]]:
    """Rows with unused numbers behind them, and a base that is aligned to nothing but the number."""
    return _apart(
        case,
        lambda width: (case.page_tokens * case.heads * (width + 3) + 1, case.heads * (width + 3), width + 3, 1),
        lambda width: 1,
    )


def _apart(
    case: Case,
    strides: Callable[[int], tuple[int, ...]],
    offset: Callable[[int], int] = lambda width: 0,
    heads: int | None = None,
) -> tuple[list[list[View]], list[int]]:
    """A buffer for each plane of each layer."""
    views: list[list[View]] = []
    sizes: list[int] = []
    for _ in range(case.layers):
        views.append([])
        for width in case.widths:
            shape = (case.pages, case.page_tokens, case.heads, width)
            views[-1].append((len(sizes), offset(width), shape, strides(width)))
            sizes.append(case.pages * strides(width)[0] + offset(width) + width)
    return views, sizes


def _fused(case: Case) -> tuple[list[list[View]], list[int]]:
    """K and V of a token and head side by side."""
    row = sum(case.widths)
    strides = (case.page_tokens * case.heads * row, case.heads * row, row, 1)
    views = [
        [
            (layer, sum(case.widths[:plane]), (case.pages, case.page_tokens, case.heads, width), strides)
            for plane, width in enumerate(case.widths)
        ]
        for layer in range(case.layers)
    ]
    return views, [case.pages * strides[0]] * case.layers


def _transposed(case: Case) -> tuple[list[list[View]], list[int]]:
    """As vLLM keeps pages on a CPU: all layers in one buffer, of each head K as [width, token] and V behind it."""
    tokens, heads, slab = case.page_tokens, case.heads, case.page_tokens * sum(case.widths)
    layer_size = case.pages * heads * slab
    views: list[list[View]] = []
    for layer in range(case.layers):
        views.append([])
        for plane, width in enumerate(case.widths):
            offset = layer * layer_size + tokens * sum(case.widths[:plane])
            token, number = (width, 1) if plane else (1, tokens)
            shape = (case.pages, tokens, heads, width)
            views[-1].append((0, offset, shape, (heads * slab, token, slab, number)))
    return views, [case.layers * layer_size]


LAYOUTS = {
    "token-major": _token_major,
    "head-major": _head_major,
    "head-range": _head_range,
    "gaps": _gaps,
    "fused": _fused,
    "transposed": _transposed,
}
