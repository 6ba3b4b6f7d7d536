"""`kvstore bench codec --speed`: codec rates on this CPU, beside memcpy of the same numbers.

One thread encodes blocks from pages into payloads and decodes them again with the store's coders, computing and
comparing every digest. Rates are decimal GB/s of the pool's numbers, whatever the payload's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table

from kvstore.bench.measure import Against, Cost, Progress, Turn, against
from kvstore.block.codec import CODECS, codec_named
from kvstore.block.errors import BadInput
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from tiering.frame import digest
from tiering.tier import FrameSpan

TOKEN_MAJOR, HEAD_MAJOR, TRANSPOSED = "[token, head, dim]", "[head, token, dim]", "K [head, dim, token]"
PAGE_ORDERS = (TOKEN_MAJOR, HEAD_MAJOR, TRANSPOSED)
"""Orders within a page. Transposed: K as in vLLM's pages on a CPU, V by heads."""
ENCODE, DECODE = "encode", "decode"
TARGET_GB_PER_SECOND = 4.0
"""On one core, for bfloat16 in 8-bit codecs."""


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """Layers per block, number of blocks; a page holds one block."""

    layers: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    block_tokens: int = 128
    blocks: int = 16
    laps: int = 7
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    def __post_init__(self) -> None:
        if self.laps < 1 or self.blocks < 1:
            raise BadInput(f"laps={self.laps}, blocks={self.blocks}; give 1 or more")


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """gb_per_second: of the pool's numbers by wall time; core_gb_per_second: by the process's CPU time. ratio: memcpy's
    wall time to the codec's, median over laps; ratio_low, ratio_high: its quartiles."""

    codec: str
    path: str
    dtype: str
    page_order: str
    gb_per_second: float
    core_gb_per_second: float
    memcpy_gb_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    target_gb_per_second: float | None

    @property
    def met(self) -> bool | None:
        """None without a target."""
        return None if self.target_gb_per_second is None else self.core_gb_per_second >= self.target_gb_per_second


@dataclass(frozen=True)
class SpeedResult:
    options: SpeedOptions
    rows: list[SpeedRow]

    @property
    def failures(self) -> list[str]:
        """None: no condition makes a rate worthless."""
        return []

    def to_dict(self) -> dict[str, object]:
        return {
            "options": asdict(self.options),
            "threads": 1,
            "rows": [{**asdict(row), "met": row.met} for row in self.rows],
        }

    def render(self, console: Any) -> None:
        console.print(_table(self.rows))
        console.print(
            "GB/s of the pool's numbers on one thread, digests included; core: by processor time. memcpy: of the same "
            f"numbers in the same run. Target of 8-bit codecs on 16-bit pools: {TARGET_GB_PER_SECOND:.0f} per core.",
            highlight=False,
        )


def run(options: SpeedOptions | None = None, progress: Progress = None) -> SpeedResult:
    """Measure every codec, dtype and page order."""
    options = options or SpeedOptions()
    rows = []
    for dtype in options.dtypes:
        layout = Layout.gqa(
            layers=options.layers,
            kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            dtype=dtype,
            block_tokens=options.block_tokens,
            page_tokens=options.block_tokens,
        )
        for order in PAGE_ORDERS:
            if progress is not None:
                progress(f"{dtype}, pages {order}")
            rows += _rows(options, layout, dtype, order)
    return SpeedResult(options, rows)


def _rows(options: SpeedOptions, layout: Layout, dtype: str, order: str) -> list[SpeedRow]:
    size = layout.raw_bytes * options.blocks
    found = against(_memcpy(size), _turns(options, layout, order), options.laps)
    return [_row(codec, path, dtype, order, size, beside) for (codec, path), beside in found.items()]


def _row(codec: str, path: str, dtype: str, order: str, size: int, beside: Against) -> SpeedRow:
    limit = size / beside.limit_seconds / 1e9  # one thread: CPU time equals wall time
    is_targeted = codec != "raw" and dtype != "float32"
    return SpeedRow(
        codec=codec,
        path=path,
        dtype=dtype,
        page_order=order,
        gb_per_second=size / beside.seconds / 1e9,
        core_gb_per_second=limit * beside.cpu_ratio,
        memcpy_gb_per_second=limit,
        ratio=beside.ratio,
        ratio_low=beside.low,
        ratio_high=beside.high,
        target_gb_per_second=TARGET_GB_PER_SECOND if is_targeted else None,
    )


def _turns(options: SpeedOptions, layout: Layout, order: str) -> dict[tuple[str, str], Turn]:
    (part,) = layout.parts
    tokens = [block * options.block_tokens for block in range(options.blocks)]
    source, target = _pages(options, layout, order, 1), _pages(options, layout, order, 2)
    turns: dict[tuple[str, str], Turn] = {}
    for name in CODECS:
        codec = codec_named(name)
        codec.prepare(layout)
        payloads = _payloads(options.blocks, codec.payload_bytes(part))
        reader, writer = codec.bind(source, layout, part), codec.bind(target, layout, part)
        digests = [one for one in reader.encode(tokens, payloads, digest) if isinstance(one, list)]
        assert len(digests) == options.blocks, "numbers of a normal distribution can be written"

        def encode(reader: Any = reader, payloads: Sequence[FrameSpan] = payloads) -> None:
            for _ in reader.encode(tokens, payloads, digest):
                pass

        def decode(writer: Any = writer, payloads: Any = payloads, digests: Any = digests) -> None:
            assert writer.decode(payloads, tokens, 0, digests, digest) == options.blocks

        turns[name, ENCODE], turns[name, DECODE] = _timed(encode), _timed(decode)
    return turns


def _pages(options: SpeedOptions, layout: Layout, order: str, seed: int) -> Pages:
    """Pages in a random order, with one spare."""
    (group,) = layout.groups
    generator = torch.Generator().manual_seed(seed)
    tokens, heads, dim = options.block_tokens, options.kv_heads, options.head_dim
    planes = {}
    for layer in layout.layers:
        pair = []
        for plane in ("K", "V"):
            numbers = torch.randn(options.blocks + 1, heads, tokens, dim, generator=generator)
            kept = numbers.to(getattr(torch, group.dtype))
            if order == TOKEN_MAJOR:
                pair.append(kept.transpose(1, 2).contiguous())
            elif order == TRANSPOSED and plane == "K":
                pair.append(kept.transpose(2, 3).contiguous().permute(0, 3, 1, 2))
            else:
                pair.append(kept.transpose(1, 2))
        planes[layer] = pair
    table = torch.randperm(options.blocks + 1, generator=generator)[: options.blocks].tolist()
    return Pages(planes, table, tokens)


def _payloads(blocks: int, size: int) -> list[FrameSpan]:
    memory = np.ones((blocks, -(-size // 4096) * 4096), np.uint8)
    return [FrameSpan(row.ctypes.data, memoryview(row.data)[:size]) for row in memory]


def _memcpy(size: int) -> Turn:
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def copy() -> None:
        target[:] = source

    return _timed(copy)


def _timed(work: Any) -> Turn:
    def turn() -> Cost:
        wall, cpu = perf_counter(), process_time()
        work()
        return Cost(perf_counter() - wall, process_time() - cpu)

    return turn


def _table(rows: Iterable[SpeedRow]) -> Table:
    table = Table(title="Speed on this CPU", title_justify="left")
    for name in ("dtype", "pages", "codec", "", "GB/s", "core", "memcpy", "ratio"):
        table.add_column(name, justify="right" if name in ("GB/s", "core", "memcpy", "ratio") else "left")
    before: tuple[str, str] | None = None
    for row in rows:
        kind = (row.dtype, row.page_order)
        if before is not None and kind != before:
            table.add_section()
        table.add_row(
            *(map(escape, kind) if kind != before else ("", "")),
            row.codec if row.path == ENCODE else "",
            row.path,
            f"{row.gb_per_second:.2f}",
            f"{row.core_gb_per_second:.2f}",
            f"{row.memcpy_gb_per_second:.2f}",
            f"{row.ratio:.2f}",
        )
        before = kind
    return table
