"""Plots of a replay and of an estimated curve.

Equal curves coincide, so each has hollow marks of its own shape and size and all stay visible. The legend stands beside
the axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvstore.insight.replay import ADMISSIONS, OPTIMUM, ReplayResult, ReplayRow
from kvstore.insight.whatif import WhatIfResult

GIB, TIB = 1 << 30, 1 << 40
MARKS = "osD^vP*X"
DASHES: tuple[Any, ...] = ("--", ":", "-.", (0, (8, 3)), (0, (1, 4)), (0, (8, 2, 1, 2, 1, 2)))
"""One for each size's optimum."""
_INCHES_A_LINE = 0.21
_OPTIMUM: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}


def draw_replay(result: ReplayResult) -> Figure:
    """A panel for each trace: hit rates over sizes, the optimum dashed. With a lower tier: hit rates over bytes written
    to it, a colour for each policy and DRAM size, a mark for each admission."""
    draw_panel = _draw_admissions if result.options.nvme_blocks else _draw_sizes
    entries = len({(row.policy, row.dram_blocks) for row in result.rows}) + len(ADMISSIONS)
    height = max(4.4, 1.2 + _INCHES_A_LINE * (entries if result.options.nvme_blocks else 0))
    figure = Figure(figsize=(8.4 * len(result.traces), height), layout="constrained")
    for axes, trace in zip(figure.subplots(1, len(result.traces), squeeze=False)[0], result.traces, strict=True):
        rows = [
            row if row.states is None else replace(row, policy=f"{row.policy}, states at {row.states}")
            for row in result.rows
            if row.trace == trace.name
        ]
        _finish(axes, trace.name, draw_panel(axes, rows, trace.block_tokens))
    return figure


def draw_whatif(result: WhatIfResult) -> Figure:
    """Hit rates over sizes in GiB, the ceiling as a line, the full replay's results as marks."""
    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    axes: Any = figure.subplots()
    sizes = [row.size_bytes / GIB for row in result.rows]
    handles = axes.plot(
        sizes,
        [row.hit_rate for row in result.rows],
        "o-",
        fillstyle="none",
        label=f"{result.options.policy}, estimated",
    )
    if result.options.is_exact:
        exact = [row.exact_hit_rate for row in result.rows]
        handles += axes.plot(sizes, exact, linestyle="", marker="x", color="black", label="replayed in full")
    handles.append(axes.axhline(result.rows[0].ceiling, label="ceiling", **_OPTIMUM))
    _label_sizes(axes, sizes, ",.3g", f"size, GiB ({result.options.kv_bytes_per_token:,} bytes per token)")
    _finish(axes, result.trace.name, handles)
    return figure


def _finish(axes: Any, title: str, handles: list[Any]) -> None:
    axes.set_ylim(bottom=0)
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(handles=handles, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))


def _label_sizes(axes: Any, sizes: Sequence[float], form: str, label: str) -> None:
    """Sizes are logarithmic if there are several."""
    if len(sizes) > 1:
        axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:{form}}" for size in sizes], rotation=45, minor=False)
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel("hit rate, blocks")


def _draw_sizes(axes: Any, rows: Sequence[ReplayRow], block_tokens: int) -> list[Any]:
    policies = [policy for policy in dict.fromkeys(row.policy for row in rows) if policy != OPTIMUM]
    handles = []
    for at, policy in enumerate([*policies, OPTIMUM]):
        curve = sorted((row.dram_blocks, row.block_hit_rate) for row in rows if row.policy == policy)
        style = {"marker": MARKS[at % len(MARKS)], **_style(at, len(policies))}
        handles += axes.plot(
            *zip(*curve, strict=True), label=policy, **({**_OPTIMUM, "marker": "."} if policy == OPTIMUM else style)
        )
    sizes = sorted({row.dram_blocks for row in rows})
    _label_sizes(axes, sizes, ",", f"DRAM, blocks of {block_tokens} tokens")
    return handles


def _draw_admissions(axes: Any, rows: Sequence[ReplayRow], block_tokens: int) -> list[Any]:
    groups = [one for one in dict.fromkeys((row.policy, row.dram_blocks) for row in rows) if one[0] != OPTIMUM]
    marks = [
        (one, mark) for one, mark in zip(ADMISSIONS, MARKS, strict=False) if one in {row.admission for row in rows}
    ]
    handles: list[Any] = []
    for at, (policy, blocks) in enumerate(groups):
        style = _style(at, len(groups))
        for admission, mark in marks:
            curve = sorted(
                ((row.nvme_written_bytes or 0) / TIB, row.block_hit_rate)
                for row in rows
                if (row.policy, row.dram_blocks, row.admission) == (policy, blocks, admission)
            )
            axes.plot(*zip(*curve, strict=True), marker=mark, **style)
        handles.append(Line2D([], [], color=style["color"], linewidth=3, label=f"{policy} of {blocks:,}"))
    hollow: dict[str, Any] = {"color": "black", "linestyle": "", "fillstyle": "none"}
    handles += [Line2D([], [], label=admission, marker=mark, **hollow) for admission, mark in marks]
    optima: dict[float, list[int]] = {}
    for row in rows:
        if row.policy == OPTIMUM:
            optima.setdefault(row.block_hit_rate, []).append(row.dram_blocks + row.nvme_blocks)
    for at, (rate, same) in enumerate(optima.items()):
        label = f"{OPTIMUM} of {', '.join(f'{size:,}' for size in same)}"
        handles.append(axes.axhline(rate, label=label, **{**_OPTIMUM, "linestyle": DASHES[at % len(DASHES)]}))
    axes.set_xlim(left=0)
    axes.set_xlabel(f"written to NVMe ({rows[0].nvme_blocks:,} blocks of {block_tokens} tokens), TiB")
    axes.set_ylabel("hit rate of both tiers, blocks")
    return handles


def _style(at: int, count: int) -> dict[str, Any]:
    """Of one of so many curves: those drawn above others are smaller; a colour that no other one has."""
    name = next((one for one in ("tab10", "tab20") if count <= colormaps[one].N), "turbo")
    colour = colormaps[name](at / max(1, count - 1) if name == "turbo" else at)
    part = 1 - 0.65 * at / max(1, count - 1)
    return {"color": colour, "markersize": 11 * part, "fillstyle": "none", "linewidth": 3.5 * part, "alpha": 0.8}
