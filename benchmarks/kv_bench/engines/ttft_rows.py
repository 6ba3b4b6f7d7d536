"""What `benches.py ttft` is asked for and what it says: options, rows and their table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch

from engine_adapter.hf_cache import CHUNK_TOKENS_CUDA
from kv_bench.engines.on_device import describe
from kv_bench.engines.random_llama import EIGHT_B, TINY
from kv_kernels.int8 import KC64
from kvstore.bench.row import BenchResult, Row, Section
from kvstore.block.errors import BadInput

RAW = "raw"
COLD, FILL, DRAM, HBM = PATHS = ("cold", "fill", "dram", "hbm")
SPEEDUPS = {(32768, RAW): 14.0, (32768, KC64): 22.0}
"""(context, codec): to the cold run, from DRAM, of the 8B shape on a GPU."""


@dataclass(frozen=True, slots=True)
class TtftOptions:
    """shape: of the model. contexts: tokens of the prefix that is kept, whole chunks. suffix_tokens: behind it, always
    computed. chunk_tokens: of the prefill grid. laps: of each row. copy_bytes: of the plain copies.
    """

    shape: str = EIGHT_B
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    codecs: tuple[str, ...] = (RAW, KC64)
    suffix_tokens: int = 64
    chunk_tokens: int = CHUNK_TOKENS_CUDA
    laps: int = 5
    copy_bytes: int = 1 << 30
    seconds: float = 1800.0


SMALL = TtftOptions(TINY, (256, 512), chunk_tokens=128, laps=3, copy_bytes=1 << 20)
"""What a CPU does in seconds."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reached in this run: bytes per second of copies, and FLOP/s of matrix products."""

    pinned_bytes_per_second: float
    device_bytes_per_second: float
    peak_flops: float


LEFT_OUT = (
    *("laps", "ttft ms", "ttft ms low", "ttft ms high", "lookup ms", "restored ms", "save ms", "suffix ms"),
    *("limit ms", "target speedup"),
)


@dataclass
class TtftResult:
    """All rows, and under which conditions they were taken. faults: what failed, one line each. left_out: for what
    there was no time or no memory, and why."""

    options: TtftOptions
    device: torch.device
    engine: str
    rates: Rates
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def found(self) -> BenchResult:
        """One table, and what its words mean."""
        rates, device = self.rates, describe(self.device)
        words = [f"left out: {what}" for what in self.left_out]
        words.append(
            f"beside: the prefix's bytes at {rates.pinned_bytes_per_second / 1e9:,.1f} GB/s from pinned memory, or "
            f"{rates.device_bytes_per_second / 1e9:,.0f} GB/s read and written on the device, and the forward pass "
            f"over the {self.options.suffix_tokens} tokens behind it; ratio: of that to the time. speedup: to the cold "
            f"run. cold mfu: its share of {rates.peak_flops / 1e12:,.2f} TFLOP/s, a matrix product's in this run."
        )
        title = f"on {device['name']}, a random {self.options.shape} Llama, engine {self.engine}"
        about = {"engine": self.engine, "device": device, "rates": asdict(rates), "left_out": self.left_out}
        section = Section(self.rows, title, "\n".join(words), left_out=LEFT_OUT)
        return BenchResult("ttft", self.options, [section], about, self.faults)


# ---------------------------------------------------------------------------------------------------------------------
# Lengths of prompts as people write them.


def parse_tokens(given: str) -> int:
    """Of "8k" or "8192". Raises `BadInput`."""
    text = given.strip().lower()
    number = text.removesuffix("k")
    if not number.isdecimal() or not int(number):
        raise BadInput(f"context={given!r} is not a number of tokens; write e.g. 8192 or 8k")
    return int(number) * (1024 if text.endswith("k") else 1)
