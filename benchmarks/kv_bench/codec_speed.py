"""`benches.py codec --speed`: how fast codecs run on this CPU, beside memcpy of the same numbers.

One thread encodes blocks from pages into payloads and decodes them again with the store's coders, computing and
comparing every digest. Rates are decimal GB/s of the pool's numbers, whatever the payload's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from kvstore.bench.measure import Against, Progress, Turn, against, teller, timed
from kvstore.bench.row import Row, Section, Target, rate_row
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


def run(
    options: SpeedOptions | None = None, progress: Progress = None
) -> tuple[list[Section], dict[str, Any], list[str]]:
    """Every codec, dtype and page order."""
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
            teller(progress)(f"{dtype}, pages {order}")
            rows += _rows(options, layout, dtype, order)
    words = (
        "GB/s of the pool's numbers on one thread, digests included; core GB/s: by processor time. memcpy: of the same "
        f"numbers in the same run. Target of 8-bit codecs on 16-bit pools: {TARGET_GB_PER_SECOND:.0f} per core."
    )
    return [Section(rows, "Speed on this CPU", words, "speed")], {"speed_options": asdict(options), "threads": 1}, []


def _rows(options: SpeedOptions, layout: Layout, dtype: str, order: str) -> list[Row]:
    size = layout.raw_bytes * options.blocks
    found = against(_memcpy(size), _turns(options, layout, order), options.laps)
    return [_row(codec, path, dtype, order, size, beside) for (codec, path), beside in found.items()]


def _row(codec: str, path: str, dtype: str, order: str, size: int, beside: Against) -> Row:
    limit = size / beside.limit_seconds / 1e9  # one thread's, so its processor time is its wall time
    wanted = Target(TARGET_GB_PER_SECOND, of="core_gb_per_second") if codec != "raw" and dtype != "float32" else None
    what = {"dtype": dtype, "page_order": order, "codec": codec, "path": path}
    return rate_row(what, beside, size, "memcpy", wanted, core_gb_per_second=limit * beside.cpu_ratio)


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

        turns[name, ENCODE], turns[name, DECODE] = timed(encode), timed(decode)
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

    return timed(copy)
