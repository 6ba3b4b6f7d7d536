"""The console's colours, light and dark: what WCAG 2.2 asks of text (4.5 : 1) and of what has a meaning (3 : 1), and
that those who see red, green or blue badly can tell hits from misses."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest

from kvstore.block.account import MissReason
from kvstore.console.answers import FIRST_TIME
from kvstore.console.reasons import FINE

ROOT = Path(__file__).resolve().parents[2]
STATIC, GRAFANA = ROOT / "kvstore" / "console" / "static", ROOT / "deploy" / "grafana" / "kvstore.json"
STYLE = (STATIC / "style.css").read_text()
HITS, MISSES = ("engine", "dram", "nvme", "remote"), ("miss", "miss2", "calm")
PIECES = HITS + MISSES
CALM = set(FINE)
ALARMING = {
    MissReason.CORRUPT,
    MissReason.TIER_DOWN,
    MissReason.UNREACHABLE,
    MissReason.KEY_MISMATCH,
    MissReason.NONFINITE,
    MissReason.OUT_OF_RANGE,
    MissReason.UNSUPPORTED,
}
TEXTS = ("text", "quiet", "link", "ok", "warning", "error")
LEAST_APART = 20.0
"""CIE76, between a hit and a miss: what is told apart at a glance is 10 and more."""

# Viénot, Brettel, Mollon 1999 (protanopia, deuteranopia) and Brettel 1997 as one matrix (tritanopia), on linear RGB.
BLINDNESSES = {
    "none": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.112, 0.888, 0.0), (0.112, 0.888, 0.0), (0.004, -0.004, 1.0)),
    "deuteranopia": ((0.292, 0.708, 0.0), (0.292, 0.708, 0.0), (-0.022, 0.022, 1.0)),
    "tritanopia": ((1.0, 0.152, -0.152), (0.0, 0.867, 0.133), (0.0, 0.867, 0.133)),
}

Linear = tuple[float, float, float]


def colours(theme: str) -> dict[str, str]:
    """By their names in the style sheet."""
    head = r":root \{" if theme == "light" else r':root\[data-theme="dark"\] \{'
    (block,) = re.findall(head + r"(.*?)\}", STYLE, re.DOTALL)
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))


def linear(colour: str) -> Linear:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return red, green, blue


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: Linear) -> Linear:
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = [
        sum(weight * max(0.0, part) for weight, part in zip(row, rgb, strict=True)) / of
        for row, of in zip(rows, white, strict=True)
    ]
    fx, fy, fz = [part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z)]
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def apart(one: str, other: str, blindness: str) -> float:
    """CIE76 between two colours, as somebody sees them."""
    seen = [
        lab(tuple(sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in BLINDNESSES[blindness]))  # type: ignore[arg-type]
        for colour in (one, other)
    ]
    return float(sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_pieces_stand_out_from_what_is_behind_them(theme: str) -> None:
    known = colours(theme)
    for name in TEXTS:
        for behind in ("panel", "page"):
            assert contrast(known[name], known[behind]) >= 4.5, (name, behind)
    for name in PIECES:
        assert contrast(known[name], known["panel"]) >= 3, name
    least = min(contrast(known[name], known[behind]) for name in TEXTS for behind in ("panel", "page"))
    of_pieces = min(contrast(known[name], known["panel"]) for name in PIECES)
    print(f"{theme}: least contrast of text {least:.2f}, of pieces {of_pieces:.2f}")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("blindness", BLINDNESSES)
def test_hits_and_misses_are_told_apart_by_everybody(theme: str, blindness: str) -> None:
    known = colours(theme)
    for one, other in product(HITS, MISSES):
        assert apart(known[one], known[other], blindness) >= LEAST_APART, (one, other)


def looks() -> dict[str, tuple[str, str]]:
    """The page's one table: a reason's hue and hatch."""
    (table,) = re.findall(r"LOOKS = \{(.*?)\n\};", (STATIC / "charts.js").read_text(), re.DOTALL)
    return {name: (hue, hatch) for name, hue, hatch in re.findall(r'(\w+): \["(\w+)", (\d+)\]', table)}


def test_each_reason_has_a_look_of_its_own_that_says_whether_to_act() -> None:
    known = looks()
    assert known.keys() == {*MissReason, "others"} and len(set(known.values())) == len(known)
    assert {name for name, (hue, _) in known.items() if hue == "calm"} == CALM
    assert {name for name, (hue, _) in known.items() if hue == "miss"} == ALARMING


@pytest.mark.parametrize("title", ["Misses by reason", "Puts refused by reason"])
def test_grafana_draws_each_reason_in_a_colour_of_its_own_that_says_so(title: str) -> None:
    rows = json.loads(GRAFANA.read_text())["panels"]
    (panel,) = [one for row in rows for one in row.get("panels", ()) if one["title"] == title]
    given = {
        one["matcher"]["options"]: one["properties"][0]["value"]["fixedColor"]
        for one in panel["fieldConfig"]["overrides"]
    }
    assert given.keys() == set(MissReason) and len(set(given.values())) == len(given)
    hues = {name: colour.rpartition("-")[2] for name, colour in given.items()}
    assert {name for name, hue in hues.items() if hue in ("green", "blue")} == CALM
    assert {name for name, hue in hues.items() if hue in ("red", "purple")} == ALARMING


def test_grafanas_largest_avoidable_miss_leaves_out_what_the_consoles_does() -> None:
    (panel,) = [one for one in json.loads(GRAFANA.read_text())["panels"] if one["title"] == "Largest avoidable miss"]
    (left_out,) = re.findall(r'reason!~"([\w|]+)"', panel["targets"][0]["expr"])
    assert set(left_out.split("|")) == {*FINE, *FIRST_TIME}
