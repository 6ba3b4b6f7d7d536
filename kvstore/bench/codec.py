"""`kvstore bench codec`: how small the codecs make KV, how large their error is, and what that does to answers.

Sizes and error bounds follow from the payload's form; nothing is run for them. `--speed` adds rates on this CPU
(`codec_speed`), `--quality` the effect on a model's answers (`demo.codec_quality`). Each mode is a part of the result
with its own `--json` object, tables and failures. This file imports no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from rich.table import Table

from kv_kernels.int8 import GROUP, KC64, TH, slice_form
from kvstore.bench.measure import machine

RAW = "raw"
POOL_DTYPE = torch.bfloat16

SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "head_dim 128": (8, (128, 128)),
    "head_dim 64": (8, (64, 64)),
    "MLA, 576 wide": (1, (576,)),
}
"""KV heads, and widths of planes."""

BOUNDS = {
    RAW: "exact",
    KC64: f"K: (max - min) / 510 of a channel over {GROUP} tokens; V: as int8-th",
    TH: "max / 254 of a token and head",
}
LATENT_BOUND = f"max / 254 of {GROUP} channels of a token"


class ModeResult(Protocol):
    """The result of one mode."""

    @property
    def failures(self) -> list[str]:
        """Reasons why its figures are worthless, one line each."""
        ...

    def to_dict(self) -> dict[str, object]: ...

    def render(self, console: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class SizeRow:
    """bits_per_number: with parameters and padding. smaller: factor against the pool's dtype. bound: of a number's
    error, before rounding to that dtype."""

    codec: str
    shape: str
    bits_per_number: float
    smaller: float
    bound: str


@dataclass(frozen=True)
class CodecResult:
    """speed, quality: None unless asked for."""

    sizes: list[SizeRow]
    speed: ModeResult | None = None
    quality: ModeResult | None = None

    @property
    def failures(self) -> list[str]:
        return [failure for part in (self.speed, self.quality) if part is not None for failure in part.failures]

    def to_dict(self) -> dict[str, object]:
        return {
            "bench": "codec",
            "machine": machine(),
            "block_tokens": GROUP,
            "pool_dtype": str(POOL_DTYPE).removeprefix("torch."),
            "sizes": [asdict(row) for row in self.sizes],
            "speed": None if self.speed is None else self.speed.to_dict(),
            "quality": None if self.quality is None else self.quality.to_dict(),
        }

    def render(self, console: Any) -> None:
        console.print(_table(self.sizes))
        console.print("bound: how far a number may be off, before it is rounded to the pool's dtype.")
        if self.speed is not None:
            self.speed.render(console)
        if self.quality is not None:
            self.quality.render(console)
        if self.speed is None and self.quality is None:
            console.print("How fast they run here: --speed. What they do to a model's answers: --quality")


def size_rows(tokens: int = GROUP) -> list[SizeRow]:
    """Every codec and shape, for blocks of so many tokens in a pool of `POOL_DTYPE`."""
    rows = []
    pool_bits = 8 * POOL_DTYPE.itemsize
    for shape, (heads, widths) in SHAPES.items():
        for codec in (RAW, KC64, TH):
            bits, bound = float(pool_bits), BOUNDS[codec]
            if codec != RAW:
                form = slice_form(codec, heads, tokens, widths, POOL_DTYPE.itemsize)
                bits = 8 * form.size_bytes / (heads * tokens * sum(widths))
                bound = bound if len(widths) > 1 else LATENT_BOUND
            rows.append(SizeRow(codec, shape, bits, pool_bits / bits, bound))
    return rows


def _table(rows: Iterable[SizeRow]) -> Table:
    table = Table(title=f"Sizes against bfloat16, blocks of {GROUP} tokens", title_justify="left")
    for name in ("codec", "KV", "bits", "smaller", "bound"):
        table.add_column(name, justify="right" if name in ("bits", "smaller") else "left")
    for row in rows:
        table.add_row(row.codec, row.shape, f"{row.bits_per_number:.3f}", f"{row.smaller:.3f}x", row.bound)
    return table
