"""The picture of a replay: what is drawn can be told apart, and nothing is covered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvstore.insight import replay as replays
from kvstore.insight.plots import draw_replay
from kvstore.insight.replay import COIN, LEARNED, ORACLE, ReplayOptions
from recorded import made_of
from tiering.policies.lru import LeafFirstLru

SEED = 5


def picture(policies: int, **options: Any) -> tuple[Figure, replays.ReplayResult]:
    """Of several policies that find the same."""
    random = np.random.default_rng(SEED)
    trace = made_of(*(random.integers(0, 4, random.integers(1, 6)).tolist() for _ in range(300)))
    makers = dict.fromkeys((f"policy {number}" for number in range(policies)), LeafFirstLru)
    result = replays.run([trace], makers, ReplayOptions(**options), lambda *_: None)  # type: ignore[arg-type]
    return draw_replay(result), result


def the_axes(figure: Figure) -> Any:
    """The only ones, drawn; their legend covers nothing of them."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    legend = axes.get_legend().get_window_extent(canvas.get_renderer())
    assert not legend.overlaps(axes.bbox), "the legend covers points"
    assert legend.x1 <= figure.bbox.x1 and legend.y0 >= 0, "all of the legend is in the picture"
    return axes


def names(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("count", [1, 10, 11, 60])
def test_no_colour_comes_twice(count: int) -> None:
    (axes,) = picture(count, blocks=[4])[0].axes
    assert len({to_hex(line.get_color()) for line in axes.get_lines()}) == count + 1


def test_equal_curves_are_all_seen() -> None:
    figure, _ = picture(3, blocks=[4, 8])
    axes = the_axes(figure)
    assert names(axes) == ["policy 0", "policy 1", "policy 2", "optimum"]
    first, second, third, _ = lines = axes.get_lines()
    assert [line.get_ydata().tolist() for line in (first, second)] == [third.get_ydata().tolist()] * 2
    assert first.get_markersize() > second.get_markersize() > third.get_markersize()
    assert first.get_linewidth() > second.get_linewidth() > third.get_linewidth()
    assert {line.get_fillstyle() for line in lines[:3]} == {"none"} and len({line.get_marker() for line in lines}) == 4


def test_many_rows_have_a_colour_each_and_an_optimum_for_each_size() -> None:
    sizes = [2, 4, 8, 12]
    given = {"blocks": sizes, "nvme_blocks": 6, "admission": [LEARNED, COIN, ORACLE], "write_shares": [0.5, 0.8]}
    figure, result = picture(3, **given)
    axes = the_axes(figure)
    drawn = {}
    for line in axes.get_lines():
        drawn.setdefault(to_hex(line.get_color()), []).append(line)
    optima = drawn.pop(to_hex("black"))
    assert len(drawn) == 12 and all(len(lines) == 4 for lines in drawn.values()), "all, learned, random and oracle"
    best = {row.dram_blocks: row.block_hit_rate for row in result.rows if row.policy == "optimum"}
    assert [line.get_ydata()[0] for line in optima] == list(dict.fromkeys(best[size] for size in sizes))
    assert len({str(line.get_linestyle()) + str(line._dash_pattern) for line in optima}) == len(optima) > 2
    assert names(axes)[:2] == ["policy 0 of 2", "policy 1 of 2"] and names(axes)[12:17] == [
        *("all", "learned", "random", "oracle", "optimum of 8"),
    ]


def test_one_line_stands_for_sizes_of_one_optimum() -> None:
    figure, _ = picture(1, blocks=[2000, 4000], nvme_blocks=5000)
    assert names(the_axes(figure))[-1] == "optimum of 7,000, 9,000"
