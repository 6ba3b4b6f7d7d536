"""`kvstore bench ttft`: options, rows and their table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

from engine_adapter.hf_cache import CHUNK_TOKENS_CUDA
from kv_kernels.int8 import KC64
from kvstore.bench.engines.on_device import describe
from kvstore.bench.engines.random_llama import EIGHT_B, TINY
from kvstore.bench.measure import machine
from kvstore.block.errors import BadInput
from kvstore.config import format_size

RAW = "raw"
COLD, FILL, DRAM, HBM = PATHS = ("cold", "fill", "dram", "hbm")
SPEEDUPS = {(32768, RAW): 14.0, (32768, KC64): 22.0}
"""Targets for (context, codec) from DRAM against the cold run, for the 8B shape on a GPU."""


@dataclass(frozen=True, slots=True)
class TtftOptions:
    """shape: the model's. contexts: tokens of the stored prefix, whole chunks. suffix_tokens: behind it, always
    computed. chunk_tokens: of the prefill grid. laps: per row. copy_bytes: of the plain copies."""

    shape: str = EIGHT_B
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    codecs: tuple[str, ...] = (RAW, KC64)
    suffix_tokens: int = 64
    chunk_tokens: int = CHUNK_TOKENS_CUDA
    laps: int = 5
    copy_bytes: int = 1 << 30
    seconds: float = 1800.0


SMALL = TtftOptions(TINY, (256, 512), chunk_tokens=128, laps=3, copy_bytes=1 << 20)
"""Takes seconds on a CPU."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of this run: bytes per second of copies, and FLOP/s of matrix products."""

    pinned_bytes_per_second: float
    device_bytes_per_second: float
    peak_flops: float


@dataclass(frozen=True, slots=True)
class TtftRow:
    """One path at one length. Times in milliseconds, medians over `laps`; ttft_ms_low, _high: the extremes.

    bytes_moved: the prefix's size where it comes from, or as saved. suffix_ms: the forward pass over the tokens behind
    the prefix. limit_ms: see the file's head; None if nothing is loaded. ratio: limit / time. speedup: against the cold
    time. cold_mfu: of the cold run. tokens: the last lap's prompt by source.
    """

    context_tokens: int
    path: str
    codec: str
    laps: int
    ttft_ms: float
    ttft_ms_low: float
    ttft_ms_high: float
    lookup_ms: float
    restored_ms: float
    save_ms: float
    bytes_moved: int
    suffix_ms: float
    limit_ms: float | None
    ratio: float | None
    speedup: float
    cold_mfu: float
    target_speedup: float | None
    tokens: dict[str, int]

    @property
    def met(self) -> bool | None:
        """None without a target."""
        return None if self.target_speedup is None else self.speedup >= self.target_speedup

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}


@dataclass
class TtftResult:
    """All rows and their conditions. faults: what failed, one line each. left_out: rows without time or memory, and
    why."""

    options: TtftOptions
    device: torch.device
    engine: str
    rates: Rates
    rows: list[TtftRow] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return {
            "bench": "ttft",
            "engine": self.engine,
            "machine": machine(),
            "device": describe(self.device),
            "options": asdict(self.options),
            "rates": asdict(self.rates),
            "rows": [row.to_dict() for row in self.rows],
            "faults": self.faults,
            "left_out": self.left_out,
        }

    def render(self, console: Any) -> None:
        table = Table()
        for name in _COLUMNS:
            table.add_column(name)
        for row in self.rows:
            table.add_row(*(cell(row) for cell in _COLUMNS.values()))
        for what in self.left_out:
            console.print(f"left out: {what}")
        rates = self.rates
        console.print(f"on {describe(self.device)['name']}, a random {self.options.shape} Llama, engine {self.engine}")
        console.print(table)
        console.print(
            f"limit: the prefix's bytes at {rates.pinned_bytes_per_second / 1e9:,.1f} GB/s from pinned memory, or "
            f"{rates.device_bytes_per_second / 1e9:,.0f} GB/s read and written on the device, and the forward pass "
            f"over the {self.options.suffix_tokens} tokens behind it. MFU: of the cold run, to "
            f"{rates.peak_flops / 1e12:,.2f} TFLOP/s of a matrix product in this run."
        )


def _target(row: TtftRow) -> str:
    return "" if row.target_speedup is None else f"{row.target_speedup:.0f} {'met' if row.met else 'missed'}"


_COLUMNS: dict[str, Callable[[TtftRow], str]] = {
    "context": lambda row: f"{row.context_tokens:,}",
    "path": lambda row: row.path,
    "codec": lambda row: row.codec,
    "TTFT ms": lambda row: f"{row.ttft_ms:,.1f}",
    "lowest, highest": lambda row: f"{row.ttft_ms_low:,.1f} .. {row.ttft_ms_high:,.1f}",
    "moved": lambda row: format_size(row.bytes_moved) if row.bytes_moved else "",
    "limit ms": lambda row: "" if row.limit_ms is None else f"{row.limit_ms:,.1f}",
    "ratio": lambda row: "" if row.ratio is None else f"{row.ratio:.2f}",
    "sooner": lambda row: f"{row.speedup:.1f}",
    "cold MFU": lambda row: f"{row.cold_mfu:.2f}",
    "target": _target,
}


# ---------------------------------------------------------------------------------------------------------------------
# Lengths of prompts as people write them.


def parse_tokens(given: str) -> int:
    """ "8k" or "8192". Raises `BadInput`."""
    text = given.strip().lower()
    number = text.removesuffix("k")
    if not number.isdecimal() or not int(number):
        raise BadInput(f"context={given!r} is not a number of tokens; write e.g. 8192 or 8k")
    return int(number) * (1024 if text.endswith("k") else 1)
