"""`kvstore whatif` as people and scripts see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

from recorded import line
from test_cli import Here, error_line

REQUESTS = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3], [6, 7, 8], [1, 2, 4]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(line(ids) + "\n" for ids in REQUESTS))
    return path


def test_a_table_for_people_and_an_object_for_scripts(trace: Path, here: Here) -> None:
    given = ("--sizes", "4,8", "--dram", "32MiB", "--block-tokens", "16", "--exact")
    shown = here("whatif", str(trace), *given)
    assert (shown.returncode, shown.stderr) == (0, "")
    first, heads, *rows, last = [" ".join(row.split()) for row in shown.stdout.splitlines()]
    assert first == "some.jsonl: 6 requests, 16 full blocks of 16 tokens (2.0 MiB each), 8 distinct; lru"
    assert heads == "blocks size hit rate ceiling sample seconds exact error seconds"
    assert [row.split()[0] for row in rows] == ["4", "8", "16"]
    assert rows[1].split()[3:6] == ["0.5000", "0.5000", "100"], "with room for all, all is found again"
    assert last == "mean absolute error (MAE) 0.0000, of the ceiling +0.0000"
    told = json.loads(here("whatif", str(trace), *given, "--json").stdout)
    assert [(row["blocks"], row["size_bytes"]) for row in told["rows"]] == [(4, 8 << 20), (8, 16 << 20), (16, 32 << 20)]
    assert told["mean_error"] == 0 and told["trace"]["distinct_blocks"] == 8 and told["options"]["policy"] == "lru"
    assert [row["hit_rate"] for row in told["rows"]] == [row["exact_hit_rate"] for row in told["rows"]]


def test_without_sizes_it_takes_some_and_compares_with_nothing(trace: Path, here: Here) -> None:
    given = ("--block-tokens", "16", "--names", "16", "--seed", "3")
    told = json.loads(here("whatif", str(trace), *given, "--json").stdout)
    assert told["rows"][-1]["blocks"] == 8 and told["mean_error"] is None
    assert all(row["exact_hit_rate"] is None for row in told["rows"])
    shown = here("whatif", str(trace), *given, "--policy", "adaptive").stdout
    assert "exact" not in shown and "distinct; adaptive" in shown


@pytest.mark.slow
def test_a_curve_is_drawn(trace: Path, here: Here) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    picture = trace.with_name("curve.svg")
    given = ("--block-tokens", "16", "--svg", str(picture))
    for more in ((), ("--exact",), ("--sizes", "4")):
        done = here("whatif", str(trace), *given, *more)
        assert (done.returncode, done.stderr) == (0, "")
        text = picture.read_text()
        assert "some.jsonl" in text and "ceiling" in text and ("replayed in full" in text) == ("--exact" in more)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--policy", "arc"), "--policy 'arc'; give lru or adaptive"),
        (("--sizes", "1e3"), "--sizes '1e3'; give whole numbers from 1 to 4194304"),
        (("--sizes", ""), "--sizes ''; give whole numbers"),
        (("--dram", "much"), "--dram='much' is not a size; write a number with"),
        (("--dram", ","), "--dram ','; give sizes with commas between them, as 64GiB,128GiB"),
        (("--dram", "1KiB"), "--dram 1.0 KiB has room for 0 blocks of 2.0 MiB; give 2.0 MiB to 8.0 TiB"),
        (("--names", "8"), "--names '8'; give a whole number from 16 to 1048576"),
        (("--seed", "x"), "--seed 'x'; give a whole number from 0 to 2147483647"),
        (("--kv-bytes-per-token", "0"), "--kv-bytes-per-token '0'; give a whole number from 1"),
        (("--svg", "curve.png"), "--svg curve.png: give a name that ends in .svg"),
        (("--svg", "no/such/place.svg"), "--svg no/such/place.svg: there is no folder no/such; make it"),
    ],
)
def test_what_cannot_be_is_one_line(given: tuple[str, ...], says: str, trace: Path, here: Here) -> None:
    result = here("whatif", str(trace), "--block-tokens", "16", "--json", *given)
    assert says in error_line(result)


def test_files_that_cannot_be_read_are_one_line(trace: Path, here: Here) -> None:
    def asked(path: Path) -> str:
        return error_line(here("whatif", str(path)))

    assert "none: No such file; give a trace" in asked(trace.with_name("none"))
    assert "is a folder; give the files in it" in asked(trace.parent)
    other = trace.with_name("other")
    other.write_bytes(bytes(range(256)))
    assert "other, line 1: no JSON" in asked(other)
    short = trace.with_name("short")
    short.write_text(line([1], 9) + "\n")
    shown = here("whatif", str(short), "--block-tokens", "16")
    assert "short has no full block of 16 tokens in it" in error_line(shown)
