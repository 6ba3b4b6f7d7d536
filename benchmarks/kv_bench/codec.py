"""`benches.py codec`: how small the codecs make KV, how far a number may be off, and what that does.

Sizes and bounds follow from the form of a payload, and nothing is run for them. `--speed` adds how fast they run here
(`codec_speed`), `--quality` what the codecs do to a model's answers (`demo.codec_quality`). Each mode is a part of the
result with an object of its own for `--json`, tables for people, and failures. This file imports no engine.
"""

from __future__ import annotations

from typing import Any

import torch

from kv_kernels.int8 import GROUP, KC64, slice_form
from kvstore.bench.row import BenchResult, Row, Section

RAW = "raw"
POOL_DTYPE = torch.bfloat16

SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "head_dim 128": (8, (128, 128)),
    "head_dim 64": (8, (64, 64)),
    "MLA, 576 wide": (1, (576,)),
}
"""KV heads and the widths of planes."""

BOUNDS = {
    RAW: "exact",
    KC64: f"K: (max - min) / 510 of a channel over {GROUP} tokens; V: max / 254 of a token and head",
}
LATENT_BOUND = f"max / 254 of {GROUP} channels of a token"
WORDS = "ratio: how many times smaller. bound: how far a number may be off, before it is rounded to the pool's dtype."
MORE = "How fast they run here: --speed. What they do to a model's answers: --quality"


def result_of(*modes: tuple[list[Section], dict[str, Any], list[str]]) -> BenchResult:
    """Sizes, and what the modes have found: tables, facts beside them, and what makes figures worthless."""
    title = f"Sizes against {POOL_DTYPE}, blocks of {GROUP} tokens"
    found = BenchResult("codec", None, [Section(size_rows(), title, WORDS if modes else f"{WORDS} {MORE}", "sizes")])
    found.about |= {"block_tokens": GROUP, "pool_dtype": str(POOL_DTYPE).removeprefix("torch.")}
    for sections, about, faults in modes:
        found.sections += sections
        found.about |= about
        found.faults += faults
    return found


def size_rows(tokens: int = GROUP) -> list[Row]:
    """Every codec and shape, for blocks of so many tokens in a pool of `POOL_DTYPE`."""
    rows = []
    pool_bits = 8 * POOL_DTYPE.itemsize
    for shape, (heads, widths) in SHAPES.items():
        for codec in (RAW, KC64):
            bits, bound = float(pool_bits), BOUNDS[codec]
            if codec != RAW:
                form = slice_form(codec, heads, tokens, widths, POOL_DTYPE.itemsize)
                bits = 8 * form.size_bytes / (heads * tokens * sum(widths))
                bound = bound if len(widths) > 1 else LATENT_BOUND
            what, details = {"codec": codec, "kv": shape}, {"bound": bound}
            dtype = str(POOL_DTYPE).removeprefix("torch.")
            rows.append(Row(what, bits, "bits", 1, None, None, dtype, pool_bits, pool_bits / bits, details=details))
    return rows
