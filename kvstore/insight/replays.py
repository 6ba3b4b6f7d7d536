"""What several policies make of traces at several sizes, beside the offline optimum: `kvstore replay` (floor 2).

Every figure is a numerator and a denominator over the requests behind the warm-up; what happens in the warm-up fills
the store and is not counted. Prefill seconds are those of a model: a prompt of n tokens takes n / rate * (1 + n /
QUADRATIC).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from rich.table import Table
from rich.text import Text

from kvstore.config import format_size
from kvstore.errors import BadInput
from kvstore.insight.optimum import optimal_hits
from kvstore.insight.replay import Replay
from kvstore.insight.trace import Column, Trace
from tiering.policies.policy import PolicyMaker

QUADRATIC_TOKENS = 61_000
"""Where attention costs as much as all else: 16 GFLOP for each token of a model with 8 billion weights, and 262,144 n
for the attention of 32 layers and 4,096 channels behind n tokens."""

KV_BYTES_PER_TOKEN = 128 << 10
"""Of the same model in bfloat16, with 8 KV heads."""

OPTIMUM = "optimum"
MOST_BLOCKS = 1 << 22
"""What tables are made for; a trace of that many distinct blocks has some million requests."""


@dataclass(frozen=True, slots=True)
class Options:
    """blocks: sizes of DRAM. warmup: the share of requests that only fill. prefill_rate: tokens per second of a short
    prompt. kv_bytes_per_token: for what is written."""

    blocks: Sequence[int]
    count_partial: bool = False
    warmup: float = 0.0
    seed: int = 0
    prefill_rate: float = 10_000.0
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN

    def __post_init__(self) -> None:
        for blocks in self.blocks:
            if not 1 <= blocks <= MOST_BLOCKS:
                raise BadInput(f"{blocks} blocks; give 1 to {MOST_BLOCKS}")
        if not self.blocks:
            raise BadInput("no size was given; give --blocks, such as --blocks 1000,10000")
        if not 0 <= self.warmup < 1:
            raise BadInput(f"--warmup {self.warmup:g}; give the share of requests that is not counted, 0 to below 1")
        if not 0 <= self.seed < 1 << 31:
            raise BadInput(f"--seed {self.seed}; give 0 to {(1 << 31) - 1}")
        if not 1e-3 <= self.prefill_rate < 1e12:
            raise BadInput(f"--prefill-rate {self.prefill_rate:g}; give tokens per second, 0.001 or more")
        if not 0 < self.kv_bytes_per_token < 1 << 40:
            raise BadInput(f"--kv-bytes-per-token {self.kv_bytes_per_token}; give bytes, more than 0")


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one size. Rates are shares of what was asked for; written: to DRAM."""

    trace: str
    policy: str
    dram_blocks: int
    asked_blocks: int
    hit_blocks: int
    block_hit_rate: float
    asked_tokens: int
    hit_tokens: int
    token_hit_rate: float
    prefill_seconds: float
    saved_prefill_seconds: float
    written_blocks: int
    written_bytes: int


class Builder(Protocol):
    """Makes the tables of a store: `node.build_replay`."""

    def __call__(self, policy: PolicyMaker, dram_blocks: int, seed: int) -> Replay: ...


Progress = Callable[[str, int, int], object]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """All rows, by trace, size and policy; those of the optimum come last of each."""

    options: Options
    traces: tuple[Trace, ...]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        traces = [
            {
                "trace": one.name,
                "block_tokens": one.block_tokens,
                "requests": one.requests,
                "blocks": len(one.blocks),
                "distinct_blocks": one.distinct_blocks,
            }
            for one in self.traces
        ]
        options = asdict(self.options) | {"blocks": list(self.options.blocks)}
        return {"options": options, "traces": traces, "rows": [asdict(row) for row in self.rows]}

    def render(self, console: Any) -> None:
        """For people."""
        counted = "partly filled blocks count" if self.options.count_partial else "full blocks alone"
        for trace in self.traces:
            console.print(
                Text(
                    f"{trace.name}: {trace.requests:,} requests, {len(trace.blocks):,} blocks of {trace.block_tokens} "
                    f"tokens, {trace.distinct_blocks:,} distinct ({counted})"
                )
            )
            table = Table(box=None, pad_edge=False)
            heads = "policy|*DRAM blocks|*hit blocks|*of asked|*of optimum|*tokens|*prefill saved|*written"
            for head in heads.split("|"):
                table.add_column(head.lstrip("*"), justify="right" if head.startswith("*") else "left")
            rows = [row for row in self.rows if row.trace == trace.name]
            best = {row.dram_blocks: row.hit_blocks for row in rows if row.policy == OPTIMUM}
            for row in rows:
                table.add_row(
                    row.policy,
                    f"{row.dram_blocks:,}",
                    f"{row.hit_blocks:,}",
                    f"{row.block_hit_rate:.4f}",
                    f"{row.hit_blocks / best[row.dram_blocks]:.3f}" if best[row.dram_blocks] else "-",
                    f"{row.token_hit_rate:.4f}",
                    f"{row.saved_prefill_seconds:,.0f} of {row.prefill_seconds:,.0f} s",
                    "-" if row.policy == OPTIMUM else format_size(row.written_bytes),
                )
            console.print(table)


def run(
    traces: Sequence[Trace], policies: Mapping[str, PolicyMaker], options: Options, build: Builder, progress: Progress
) -> ReplayResult:
    """Every policy at every size on every trace."""
    if not policies:
        raise BadInput("no policy was given")
    if len({trace.name for trace in traces}) < len(traces):
        raise BadInput("a trace was given twice; give each once")
    used = traces if options.count_partial else [trace.without_partial() for trace in traces]
    rows = []
    for trace in used:
        account = _Account(trace, options)
        for blocks in dict.fromkeys(options.blocks):
            for name, policy in policies.items():
                replay = build(policy, blocks, options.seed)
                doing = f"{trace.name}: {name}, {blocks:,} blocks"

                def told(done: int, doing: str = doing, steps: int = trace.requests) -> None:
                    progress(doing, done, steps)

                done = replay.run(trace, told)
                rows.append(account.row(name, blocks, done.dram_hits, done.dram_writes))
            progress(f"{trace.name}: optimum, {blocks:,} blocks", 0, 0)
            hits = optimal_hits(trace, blocks)
            rows.append(account.row(OPTIMUM, blocks, hits, np.zeros_like(hits)))
    return ReplayResult(options, tuple(used), tuple(rows))


class _Account:
    """What was asked for, and what hits are worth."""

    def __init__(self, trace: Trace, options: Options) -> None:
        self._trace = trace
        self._options = options
        self._first = int(options.warmup * trace.requests)
        self._asked_blocks = int(np.diff(trace.starts)[self._first :].sum())
        self._tokens = trace.input_tokens[self._first :]

    def row(self, policy: str, dram_blocks: int, hits: Column, writes: Column) -> Row:
        """hits, writes: blocks of each request."""
        blocks = hits[self._first :]
        written = int(writes[self._first :].sum())
        tokens = np.minimum(blocks * self._trace.block_tokens, self._tokens)
        asked, hit = self._asked_blocks, int(blocks.sum())
        asked_tokens, hit_tokens = int(self._tokens.sum()), int(tokens.sum())
        return Row(
            self._trace.name,
            policy,
            dram_blocks,
            asked,
            hit,
            hit / asked if asked else 0.0,
            asked_tokens,
            hit_tokens,
            hit_tokens / asked_tokens if asked_tokens else 0.0,
            self._seconds(self._tokens),
            self._seconds(tokens),
            written,
            written * self._trace.block_tokens * self._options.kv_bytes_per_token,
        )

    def _seconds(self, tokens: Column) -> float:
        return float((tokens / self._options.prefill_rate * (1 + tokens / QUADRATIC_TOKENS)).sum())
