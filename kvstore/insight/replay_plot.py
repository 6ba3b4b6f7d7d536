"""The curves of a replay as a picture (floor 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from kvstore.insight.replays import OPTIMUM, ReplayResult, Row

TIB = 1 << 40


def draw(result: ReplayResult) -> Figure:
    """Hit rates over sizes, a panel for each trace; the optimum is dashed. With a tier below DRAM: over what was
    written to that, a curve for each admission."""
    figure = Figure(figsize=(6.4 * len(result.traces), 4.4), layout="constrained")
    for axes, trace in zip(figure.subplots(1, len(result.traces), squeeze=False)[0], result.traces, strict=True):
        rows = [row for row in result.rows if row.trace == trace.name]
        if result.options.nvme_blocks:
            _draw_admissions(axes, rows)
        else:
            _draw_sizes(axes, rows, trace.block_tokens)
        axes.set_ylim(bottom=0)
        axes.set_title(trace.name, parse_math=False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure


def _draw_sizes(axes: Any, rows: Sequence[Row], block_tokens: int) -> None:
    for policy in dict.fromkeys(row.policy for row in rows):
        curve = sorted((row.dram_blocks, row.block_hit_rate) for row in rows if row.policy == policy)
        style = {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {}
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3.5, label=policy, **style)
    sizes = sorted({row.dram_blocks for row in rows})
    if len(sizes) > 1:
        axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45, minor=False)
    axes.minorticks_off()
    axes.set_xlabel(f"DRAM, blocks of {block_tokens} tokens")
    axes.set_ylabel("hit rate, blocks")


def _draw_admissions(axes: Any, rows: Sequence[Row]) -> None:
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.admission is not None:
            label = f"{row.admission}, {row.policy} of {row.dram_blocks:,}"
            assert row.nvme_written_bytes is not None
            curves.setdefault(label, []).append((row.nvme_written_bytes / TIB, row.block_hit_rate))
    for label, curve in curves.items():
        axes.plot(*zip(*sorted(curve), strict=True), marker="o", markersize=3.5, label=label)
    best = max(row.block_hit_rate for row in rows if row.policy == OPTIMUM)
    axes.axhline(best, color="black", linestyle="--", linewidth=1, label=OPTIMUM)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"written to NVMe ({rows[0].nvme_blocks:,} blocks), TiB")
    axes.set_ylabel("hit rate of both tiers, blocks")
