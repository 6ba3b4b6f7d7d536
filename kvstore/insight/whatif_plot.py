"""An estimated curve as a picture: hit rate over size, the ceiling as a line, what the full replay found as marks."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvstore.insight.whatif_trace import WhatIfResult

GIB = 1 << 30


def draw(result: WhatIfResult) -> Figure:
    """Sizes in GiB, on a logarithmic scale where there are several."""
    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    axes = figure.subplots()
    sizes = [row.size_bytes / GIB for row in result.rows]
    rates = [row.hit_rate for row in result.rows]
    axes.plot(sizes, rates, marker="o", fillstyle="none", label=f"{result.options.policy}, estimated")
    exact = [row.exact_hit_rate for row in result.rows if row.exact_hit_rate is not None]
    if exact:
        axes.plot(sizes, exact, linestyle="", marker="x", color="black", label="replayed in full")
    axes.axhline(result.rows[0].ceiling, color="black", linestyle="--", linewidth=1, label="ceiling")
    if len(sizes) > 1:
        axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,.3g}" for size in sizes], rotation=45, minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"size, GiB ({result.options.kv_bytes_per_token:,} bytes per token)")
    axes.set_ylabel("hit rate, blocks")
    axes.set_title(result.trace.name, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure
