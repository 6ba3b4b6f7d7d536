"""Estimates hit rates of a recorded trace at several sizes: `kvstore whatif`.

    lru         one pass over the trace for all sizes (`curve`)
    adaptive    one pass per size over a part of the blocks, through the store's own tables with as small a part of
                the room. Few blocks teach the policy little, so a small size takes a larger part

A chain from which blocks are left out by a hash of their names is still a chain, with the same nearest ancestors: C.
Waldspurger, T. Saemundsson, I. Ahmad, N. Park, "Cache modeling and optimization using miniature simulations", USENIX
ATC 2017. Hot names are left out of the part and counted as found each time: each would take a whole block of a room in
which all others take a fraction. Only the seed is random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np
from rich.text import Text

from kvstore.block.errors import BadInput
from kvstore.config import format_size
from kvstore.insight.curve import HOT_NAMES, HOT_SHARE, MARKS, NAMES, LruCurve, Marks, marks_of
from kvstore.insight.replay import KV_BYTES_PER_TOKEN, MOST_BLOCKS, Progress, Replay, headed
from kvstore.insight.trace import Trace
from tiering.clock import Clock
from tiering.policies.policy import PolicyMaker

LRU, ADAPTIVE = ESTIMATED = ("lru", "adaptive")
MOST_NAMES = 1 << 20
LEAST_PART = 0.1
"""Smallest share of blocks that adaptive is replayed with."""
LEAST_ROOM = 200
"""Smallest room for that replay, in blocks, unless the size itself is smaller."""
SIZES = 10
"""Number of sizes if none is given, up to all distinct blocks."""
SMALLEST = 200
"""The smallest of these is all distinct blocks divided by this."""
REQUESTS_AT_A_TIME = 200


@dataclass(frozen=True, slots=True)
class WhatIfOptions:
    """blocks: sizes; empty for some that fit the trace. sizes_bytes: further sizes. policy: of `ESTIMATED`. names:
    sampled at a time. seed: chooses the sampled names. is_exact: also replay each size in full."""

    blocks: Sequence[int] = ()
    sizes_bytes: Sequence[int] = ()
    policy: str = LRU
    names: int = NAMES
    seed: int = 0
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """One size. hit_rate: share of blocks asked for, estimated. ceiling: the limit over all sizes, estimated.
    sample_ratio: share of names, or of blocks, used. seconds: taken; for LRU one pass gives all rows. exact_hit_rate,
    error: of the full replay, if any; error is estimate minus exact."""

    blocks: int
    size_bytes: int
    hit_rate: float
    ceiling: float
    sample_ratio: float
    seconds: float
    exact_hit_rate: float | None = None
    error: float | None = None
    exact_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class WhatIfResult:
    """mean_error: mean absolute error of all rows. ceiling_error: estimate minus exact."""

    options: WhatIfOptions
    trace: Trace
    rows: tuple[WhatIfRow, ...]
    mean_error: float | None = None
    ceiling_error: float | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            "options": asdict(self.options),
            "trace": self.trace.to_dict(),
            "rows": [asdict(row) for row in self.rows],
            "mean_error": self.mean_error,
            "ceiling_error": self.ceiling_error,
        }

    def render(self, console: Any) -> None:
        trace = self.trace
        block_bytes = trace.block_tokens * self.options.kv_bytes_per_token
        read = (
            f"{trace.name}: {trace.requests:,} requests, {len(trace.blocks):,} full blocks of {trace.block_tokens} "
            f"tokens ({format_size(block_bytes)} each), {trace.distinct_blocks:,} distinct; {self.options.policy}"
        )
        console.print(Text(read), soft_wrap=True)
        table = headed(
            "*blocks|*size|*hit rate|*ceiling|*sample|*seconds"
            + ("|*exact|*error|*seconds" if self.options.is_exact else "")
        )
        for row in self.rows:
            cells = [f"{row.blocks:,}", f"{row.size_bytes / (1 << 30):,.1f} GiB", f"{row.hit_rate:.4f}"]
            cells += [f"{row.ceiling:.4f}", f"{100 * row.sample_ratio:.3g} %", f"{row.seconds:.2f}"]
            if row.exact_hit_rate is not None:
                cells += [f"{row.exact_hit_rate:.4f}", f"{row.error:+.4f}", f"{row.exact_seconds:.2f}"]
            table.add_row(*cells)
        console.print(table)
        if self.mean_error is not None:
            said = f"mean absolute error (MAE) {self.mean_error:.4f}, of the ceiling {self.ceiling_error:+.4f}"
            console.print(Text(said), soft_wrap=True)


def run(
    trace: Trace,
    options: WhatIfOptions,
    maker_of: Callable[[float], PolicyMaker],
    clock: Clock,
    progress: Progress = lambda doing, done, steps: None,
) -> WhatIfResult:
    """Estimate every size. maker_of: makes the options' policy for a given share of all blocks."""
    full = trace.without_partial()
    if not len(full.blocks):
        raise BadInput(f"{trace.name} has no full block of {trace.block_tokens} tokens in it, and others are not kept")
    sizes = _sizes(full, options)
    progress(full.name, 0, 0)
    began = clock.monotonic_seconds()
    curve = curve_of(full, options.names, options.seed)
    *rates, ceiling = curve.hit_rates([*sizes, inf])
    seconds = clock.monotonic_seconds() - began

    def replayed(blocks: int, part: float) -> tuple[float, float]:
        """The hit rate by a replay of that part, and seconds taken."""
        began = clock.monotonic_seconds()
        doing = f"{full.name}: {options.policy}, {blocks:,} blocks, {100 * part:.3g} % of the trace"

        def told(done: int) -> None:
            progress(doing, done, full.requests)

        rate = (thinned_rate if part < 1 else replayed_rate)(full, blocks, options.seed, maker_of(part), told)
        return rate, clock.monotonic_seconds() - began

    rows = []
    for blocks, rate in zip(sizes, rates, strict=True):
        part = curve.sample_ratio
        if options.policy == ADAPTIVE:
            part = part_for(blocks)
            rate, seconds = replayed(blocks, part)
        row = WhatIfRow(blocks, blocks * full.block_tokens * options.kv_bytes_per_token, rate, ceiling, part, seconds)
        if options.is_exact:
            exact, exact_seconds = replayed(blocks, 1.0)
            row = replace(row, exact_hit_rate=exact, error=rate - exact, exact_seconds=exact_seconds)
        rows.append(row)
    errors = [abs(row.error) for row in rows if row.error is not None]
    if not errors:
        return WhatIfResult(options, full, tuple(rows))
    exact_ceiling = 1 - full.distinct_blocks / len(full.blocks)
    return WhatIfResult(options, full, tuple(rows), sum(errors) / len(errors), ceiling - exact_ceiling)


def curve_of(trace: Trace, names: int = NAMES, seed: int = 0) -> LruCurve:
    """Feed a trace to an estimator; sizes are in blocks."""
    curve = LruCurve(names)
    marks = marks_of_blocks(trace, seed)
    lengths, starts = np.diff(trace.starts).tolist(), trace.starts.tolist()
    for first in range(0, trace.requests, REQUESTS_AT_A_TIME):
        last = min(trace.requests, first + REQUESTS_AT_A_TIME)
        curve.requests(marks[starts[first] : starts[last]], lengths[first:last], 1.0, float(trace.block_tokens))
    return curve


def part_for(blocks: int) -> float:
    """The share of a trace's blocks used to estimate adaptive at that size."""
    return min(1.0, max(LEAST_PART, LEAST_ROOM / blocks))


def replayed_rate(
    trace: Trace, blocks: int, seed: int, maker: PolicyMaker, told: Callable[[int], object] = lambda done: None
) -> float:
    """The share of a trace's blocks that a policy finds with room for so many: exact. told: of requests done."""
    return int(Replay(maker, blocks, seed).run(trace, told).dram_hits.sum()) / len(trace.blocks)


def thinned_rate(
    trace: Trace, blocks: int, seed: int, maker: PolicyMaker, told: Callable[[int], object] = lambda done: None
) -> float:
    """The same, estimated from `part_for` that size. How many blocks are asked for again is known exactly; the part
    says which share of these is found."""
    hot, part = hot_blocks(trace), part_for(blocks)
    thin = thinned(trace, part, seed, hot)
    again = len(thin.blocks) - thin.distinct_blocks
    hot_again = int(np.isin(trace.blocks, hot).sum()) - len(hot)
    if not again:
        return hot_again / len(trace.blocks)
    room = max(1, round((blocks - len(hot)) * part))
    found = replayed_rate(thin, room, seed, maker, told) * len(thin.blocks) / again
    cold_again = len(trace.blocks) - trace.distinct_blocks - hot_again
    return (found * cold_again + hot_again) / len(trace.blocks)


def hot_blocks(trace: Trace) -> Any:
    """Blocks with a large share of all references, at most `HOT_NAMES`; with each block its ancestors."""
    uses = np.bincount(trace.blocks, minlength=trace.distinct_blocks)
    most = np.argsort(-uses, kind="stable")[:HOT_NAMES]
    return most[uses[most] >= HOT_SHARE * len(trace.blocks)]


def thinned(trace: Trace, part: float, seed: int, left_out: Any) -> Trace:
    """The trace with a share of its blocks, chosen by hash, without those of left_out; requests that lose all blocks
    are dropped."""
    kept = marks_of_blocks(trace, seed) < np.uint64(min(int(part * MARKS), MARKS - 1))
    kept &= ~np.isin(trace.blocks, left_out)
    lengths = np.add.reduceat(np.concatenate([kept, [False]]).astype(np.int64), trace.starts[:-1])
    lengths[np.diff(trace.starts) == 0] = 0
    some = lengths > 0
    _, numbers = np.unique(trace.blocks[kept], return_inverse=True)
    starts = np.concatenate([[0], np.cumsum(lengths[some])])
    tokens = lengths[some] * trace.block_tokens
    columns = trace.timestamps_ms[some], tokens, trace.output_tokens[some]
    return Trace(trace.name, trace.block_tokens, *columns, numbers.reshape(-1), starts)


def marks_of_blocks(trace: Trace, seed: int) -> Marks:
    """One mark per block; the seed chooses which are sampled."""
    return marks_of(trace.blocks.astype(np.uint64), 0, seed)


def _sizes(trace: Trace, options: WhatIfOptions) -> list[int]:
    block_bytes = trace.block_tokens * options.kv_bytes_per_token
    sizes = list(options.blocks)
    for size_bytes in options.sizes_bytes:
        blocks = size_bytes // block_bytes
        if not 1 <= blocks <= MOST_BLOCKS:
            raise BadInput(
                f"--dram {format_size(size_bytes)} has room for {blocks} blocks of {format_size(block_bytes)}; give "
                f"{format_size(block_bytes)} to {format_size(block_bytes * MOST_BLOCKS)}, or other --kv-bytes-per-token"
            )
        sizes.append(blocks)
    if not sizes:
        most = min(trace.distinct_blocks, MOST_BLOCKS)
        sizes = [int(size) for size in np.geomspace(max(1, most / SMALLEST), most, SIZES)]
    return sorted(dict.fromkeys(sizes))
