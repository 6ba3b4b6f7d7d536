"""`kvstore bench codec`: how small the codecs make KV, and with `--speed` how fast they run on this CPU beside memcpy.

`--quality` is in `codec_quality`. This file imports no engine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kv_bench.measure import Say, Turn, against, rate_row, timed
from kv_kernels.int8_form import GROUP, KC64, slice_form
from kvstore.block.codec import CODECS, RawCodec, codec_named
from kvstore.block.errors import BadInput
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.traffic.row import BenchResult, Row, Section, Target
from tiering.frame import digest
from tiering.tier import FrameSpan

RAW = RawCodec.name
POOL_DTYPE = torch.bfloat16
SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "head_dim 128": (8, (128, 128)),
    "head_dim 64": (8, (64, 64)),
    "MLA, 576 wide": (1, (576,)),
}
"""KV heads and the widths of planes."""
BOUND = f"K: (max - min) / 510 of a channel over {GROUP} tokens; V: max / 254 of a token and head"
LATENT_BOUND = f"max / 254 of {GROUP} channels of a token"

TOKEN_MAJOR, HEAD_MAJOR, TRANSPOSED = "[token, head, dim]", "[head, token, dim]", "K [head, dim, token]"
PAGE_ORDERS = (TOKEN_MAJOR, HEAD_MAJOR, TRANSPOSED)
"""Orders within a page. Transposed: K as in vLLM's pages on a CPU, V by heads."""
TARGET_GB_PER_SECOND = 4.0
"""On one core, for bfloat16 in 8-bit codecs."""

Mode = tuple[list[Section], dict[str, Any], list[str]]
"""What a mode has found: tables, facts beside them, and what makes figures worthless."""


def result_of(*modes: Mode) -> BenchResult:
    title = f"Sizes against {POOL_DTYPE}, blocks of {GROUP} tokens"
    found = BenchResult("codec", None, [Section(size_rows(), title, name="sizes")])
    found.about |= {"block_tokens": GROUP, "pool_dtype": str(POOL_DTYPE).removeprefix("torch.")}
    for sections, about, faults in modes:
        found.sections += sections
        found.about |= about
        found.faults += faults
    return found


def size_rows() -> list[Row]:
    rows, pool_bits, dtype = [], 8.0 * POOL_DTYPE.itemsize, str(POOL_DTYPE).removeprefix("torch.")
    for shape, (heads, widths) in SHAPES.items():
        form = slice_form(heads, GROUP, widths, POOL_DTYPE.itemsize)
        small, bound = 8 * form.size_bytes / (heads * GROUP * sum(widths)), BOUND if len(widths) > 1 else LATENT_BOUND
        for codec, bits, off_by in ((RAW, pool_bits, "exact"), (KC64, small, bound)):
            what, beside = {"codec": codec, "kv": shape}, (dtype, int(pool_bits), pool_bits / bits)
            rows.append(Row(what, bits, "bits", 1, None, None, *beside, details={"bound": off_by}))
    return rows


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


def speed(say: Say, options: SpeedOptions | None = None) -> Mode:
    options, rows = options or SpeedOptions(), []
    sizes = {"layers": options.layers, "kv_heads": options.kv_heads, "head_dim": options.head_dim}
    tokens = options.block_tokens
    for dtype in options.dtypes:
        layout = Layout.gqa(**sizes, dtype=dtype, block_tokens=tokens, page_tokens=tokens)
        size = layout.raw_bytes * options.blocks
        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        for order in PAGE_ORDERS:
            say(f"{dtype}, pages {order}")
            turns = _turns(options, layout, order)
            found = against(timed(partial(np.copyto, target, source)), turns, options.laps)
            for (codec, path), beside in found.items():
                what = {"dtype": dtype, "page_order": order, "codec": codec, "path": path}
                is_targeted = codec != RAW and dtype != "float32"
                wanted = Target(TARGET_GB_PER_SECOND, of="core_gb_per_second") if is_targeted else None
                limit = size / beside.limit_seconds / 1e9  # one thread's, so its processor time is its wall time
                rate = limit * beside.cpu_ratio
                rows.append(rate_row(what, beside, size, "memcpy", wanted, core_gb_per_second=rate))
    about = {"speed_options": asdict(options), "threads": 1}
    return [Section(rows, "Speed on this CPU", name="speed")], about, []


def _turns(options: SpeedOptions, layout: Layout, order: str) -> dict[tuple[str, str], Turn]:
    (part,) = layout.parts
    tokens = [block * options.block_tokens for block in range(options.blocks)]
    source, target = _pages(options, layout, order, 1), _pages(options, layout, order, 2)
    turns: dict[tuple[str, str], Turn] = {}
    for name in CODECS:
        codec = codec_named(name)
        codec.prepare(layout)
        size = codec.payload_bytes(part)
        memory = np.ones((options.blocks, -(-size // 4096) * 4096), np.uint8)
        payloads = [FrameSpan(row.ctypes.data, memoryview(row.data)[:size]) for row in memory]
        reader, writer = codec.bind(source, layout, part), codec.bind(target, layout, part)
        digests = [one for one in reader.encode(tokens, payloads, digest) if isinstance(one, list)]
        assert len(digests) == options.blocks, "numbers of a normal distribution can be written"

        def encode(reader: Any = reader, payloads: Any = payloads) -> None:
            for _ in reader.encode(tokens, payloads, digest):
                pass

        def decode(writer: Any = writer, payloads: Any = payloads, digests: Any = digests) -> None:
            assert writer.decode(payloads, tokens, 0, digests, digest) == options.blocks

        turns[name, "encode"], turns[name, "decode"] = timed(encode), timed(decode)
    return turns


def _pages(options: SpeedOptions, layout: Layout, order: str, seed: int) -> Pages:
    (group,) = layout.groups
    generator = torch.Generator().manual_seed(seed)
    size = options.blocks + 1, options.kv_heads, options.block_tokens, options.head_dim
    planes = {}
    for layer in layout.layers:
        pair = []
        for plane in ("K", "V"):
            kept = torch.randn(size, generator=generator).to(getattr(torch, group.dtype)).transpose(1, 2)
            if order == TOKEN_MAJOR:
                kept = kept.contiguous()
            elif order == TRANSPOSED and plane == "K":
                kept = kept.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
            pair.append(kept)
        planes[layer] = pair
    table = torch.randperm(options.blocks + 1, generator=generator)[: options.blocks].tolist()
    return Pages(planes, table, options.block_tokens)
