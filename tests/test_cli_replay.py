"""`kvstore replay` and `kvstore whatif` as people and scripts see them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

from recorded import line
from test_cli import NO_TORCH, Here, error_line, run_cli

REQUESTS = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3], [6, 7, 8], [1, 2, 4]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(line(ids) + "\n" for ids in REQUESTS))
    return path


@pytest.mark.slow
def test_a_table_for_people_and_an_object_for_scripts(trace: Path) -> None:
    packed = trace.with_suffix(".gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    given = ("--policy", "lru,adaptive", "--blocks", "4,8", "--block-tokens", "16")
    shown = run_cli("replay", str(trace), str(packed), *given, before=NO_TORCH)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "some.jsonl: 6 requests, 16 blocks of 16 tokens, 8 distinct (full blocks alone)" in shown.stdout
    assert "some.gz: 6 requests" in shown.stdout and "of optimum" in shown.stdout
    told = json.loads(run_cli("replay", str(trace), *given, "--json", before=NO_TORCH).stdout)
    assert [(row["policy"], row["dram_blocks"]) for row in told["rows"]] == [
        (policy, blocks) for blocks in (4, 8) for policy in ("lru", "adaptive", "optimum")
    ]
    assert told["traces"][0]["distinct_blocks"] == 8
    assert [row["hit_blocks"] for row in told["rows"]][3:] == [8, 8, 8], "with room for all, all is found again"


def test_values_stand_between_commas_and_spaces(trace: Path, here: Here) -> None:
    given = ("--policy", "lru, s3-fifo", "--policy", "lru,", "--blocks", "4, 8,4,", "--block-tokens", "16", "--json")
    told = json.loads(here("replay", str(trace), *given).stdout)
    assert told["options"]["policies"] == ["lru", "adaptive"] and told["options"]["blocks"] == [4, 8, 4]
    assert len(told["rows"]) == 6
    assert all(row["written_bytes"] is None for row in told["rows"] if row["policy"] == "optimum")


def test_the_first_line_is_one_line_and_says_what_was_put_in_order(tmp_path: Path, here: Here) -> None:
    path = tmp_path / f"{'long' * 20}.jsonl"
    path.write_text("".join(line([number], timestamp=9 - number) + "\n" for number in range(3)))
    shown = here("replay", str(path), "--blocks", "4", "--block-tokens", "16").stdout
    assert shown.splitlines()[0] == (
        f"{path.name}: 3 requests, 3 blocks of 16 tokens, 3 distinct (full blocks alone); 2 stood behind a later one, "
        "and are put in the order of their timestamps"
    )


@pytest.mark.slow
def test_curves_are_drawn(trace: Path, here: Here) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    picture = trace.with_name("curves.png")
    given = ("--blocks", "2,4,8", "--block-tokens", "16", "--plot", str(picture))
    done = here("replay", str(trace), *given)
    assert (done.returncode, done.stderr) == (0, "") and picture.read_bytes().startswith(b"\x89PNG")
    svg = trace.with_name("curves.svg")
    here("replay", str(trace), *given[:-1], str(svg))
    assert "optimum" in svg.read_text() and "some.jsonl" in svg.read_text()
    loud = trace.with_name("curves.PNG")
    assert here("replay", str(trace), *given[:-1], str(loud)).returncode == 0
    assert loud.read_bytes().startswith(b"\x89PNG")


def test_with_a_tier_below_a_row_for_each_admission(trace: Path, here: Here) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    picture = trace.with_name("curves.png")
    given = ("--dram-blocks", "3", "--nvme-blocks", "8", "--block-tokens", "16", "--admission", "learned,oracle")
    shown = here("replay", str(trace), *given, "--plot", str(picture))
    assert (shown.returncode, shown.stderr) == (0, "") and picture.read_bytes().startswith(b"\x89PNG")
    assert "to NVMe" in shown.stdout and "learned" in shown.stdout
    told = json.loads(here("replay", str(trace), *given, "--json").stdout)
    assert [row["admission"] for row in told["rows"]] == ["all", "learned", "oracle", None]
    assert told["options"]["nvme_blocks"] == 8 and told["rows"][0]["nvme_hit_blocks"] > 0
    best = told["rows"][-1]
    assert best["policy"] == "optimum" and best["hit_blocks"] > 0
    for unsaid in ("dram_hit_blocks", "nvme_hit_blocks", "written_blocks", "written_bytes", "nvme_written_bytes"):
        assert best[unsaid] is None and told["rows"][0][unsaid] is not None


def test_a_model_with_states_says_what_they_cost_and_find(trace: Path, here: Here) -> None:
    given = ("--blocks", "8000", "--block-tokens", "16", "--model", "qwen3.5-27b")
    shown = here("replay", str(trace), *given).stdout
    assert "the same, where a hit needs a state at its end" in shown and "states / KV" in shown
    told = json.loads(here("replay", str(trace), *given, "--json").stdout)
    assert told["options"]["state_bytes"] == 153_944_064 and told["options"]["kv_bytes_per_token"] == 65_536
    assert [row["states"] for row in told["rows"]] == [None, "policy", "each block", "ends alone", None]
    assert [row["hit_blocks"] for row in told["rows"]] == [8, 6, 6, 6, 8]
    assert all(row["written_state_bytes"] == 153_944_064 * row["written_states"] for row in told["rows"])
    assert "needs a state" not in here("replay", str(trace), *given[:-1], "llama-3.1-8b").stdout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--blocks", "4", "--model", "qwen3.5-27b", "--nvme-blocks", "4"), "states are replayed in DRAM alone"),
        (("--blocks", "4", "--model", "nothing"), "model 'nothing' is not in the table"),
        (("--blocks", "4", "--model", "phi-4", "--kv-bytes-per-token", "9"), "--model says how many bytes a token has"),
        (("--blocks", "4", "--state-share", "-1"), "a share of -1.0 for states; give their bytes for each byte"),
        (("--blocks", "4", "--policy", "arc"), "--policy 'arc'; give lru, adaptive, or several with commas"),
        (("--blocks", "4", "--policy", ","), "--policy ','; give lru, adaptive"),
        (("--policy", "lru"), "no size was given; give --blocks"),
        (("--blocks", "1e3"), "--blocks '1e3'; give whole numbers"),
        (("--blocks", "\u00b2"), "--blocks '\u00b2'; give whole numbers"),
        (("--blocks", "9" * 5000), "give whole numbers"),
        (("--blocks", "0"), "--blocks '0'; give whole numbers from 1 to 4194304"),
        (("--blocks", "-5"), "--blocks '-5'; give whole numbers from 1 to 4194304"),
        (("--blocks", "9999999999999"), "--blocks '9999999999999'; give whole numbers from 1 to 4194304"),
        (
            ("--blocks", "1,000"),
            "--blocks '000'; give whole numbers from 1 to 4194304, with commas between them and not",
        ),
        (("--blocks", ""), "--blocks ''; give whole numbers"),
        (
            ("--dram-blocks", "4", "--nvme-blocks", "100,200"),
            "--nvme-blocks '100,200'; give a whole number from 0 to 41",
        ),
        (("--blocks", "4", "--warmup", "5%"), "--warmup '5%'; give the share of requests that is not counted, 0 to"),
        (("--blocks", "4", "--seed", "x"), "--seed 'x'; give a whole number from 0 to 2147483647"),
        (("--blocks", "4", "--block-tokens", "0"), "--block-tokens '0'; give a whole number from 1 to 2147483647"),
        (("--blocks", "4", "--block-tokens", str(1 << 63)), "give a whole number from 1 to 2147483647"),
        (("--blocks", "4", "--prefill-rate", "fast"), "--prefill-rate 'fast'; give tokens per second"),
        (("--blocks", "4", "--kv-bytes-per-token", "1.5"), "--kv-bytes-per-token '1.5'; give a whole number from 1 to"),
        (
            ("--blocks", "4", "--plot", "no/such/place.png"),
            "--plot no/such/place.png: there is no folder no/such; make",
        ),
        (("--blocks", "4", "--block-tokens", "512"), "give the --block-tokens that it was recorded with"),
        (("--blocks", "4", "--plot", "curves.bmp"), "--plot curves.bmp: give a name that ends in .png"),
        (("--blocks", "4", "--warmup", "1"), "--warmup 1; give the share"),
        (("--blocks", "4", "--warmup", "nan"), "--warmup nan; give the share"),
        (("--blocks", "4", "--prefill-rate", "1e-320"), "e-321; give tokens per second, 0.001"),
        (("--blocks", "4", "--nvme-blocks", "8", "--admission", "luck"), "--admission 'luck'; allowed: all, learned"),
        (("--blocks", "4", "--nvme-blocks", "8", "--write-share", "half"), "--write-share 'half'; give shares"),
        (("--blocks", "4", "--nvme-blocks", "8", "--write-share", "0"), "--write-share 0; give a share"),
        (("--blocks", "4", "--nvme-blocks", "8", "--write-share", "nan"), "--write-share nan; give a share"),
        (("--blocks", "4", "--nvme-blocks", "8", "--admission", "random"), "random writes a share; give --write-share"),
        (("--blocks", "4", "--write-share", "0.5"), "give --nvme-blocks, too"),
        (
            ("--blocks", "4", "--nvme-blocks", "8", "--admission", "oracle", "--write-share", "0.5"),
            "--write-share is a budget of learned and random, and --admission oracle names neither; add one",
        ),
        (("--blocks", "4", "--admission", "oracle"), "--admission is to NVMe; give --nvme-blocks, too"),
        (("--dram-blocks", "x"), "--dram-blocks 'x'; give whole numbers from 1 to 4194304"),
    ],
)
def test_what_cannot_be_is_one_line(given: tuple[str, ...], says: str, trace: Path, here: Here) -> None:
    result = here("replay", str(trace), "--json", *given)
    assert says in error_line(result)


def test_files_that_cannot_be_read_are_one_line(trace: Path, here: Here) -> None:
    def asked(path: Path) -> str:
        return error_line(here("replay", str(path), "--blocks", "4"))

    assert "none: No such file; give a trace" in asked(trace.with_name("none"))
    assert "is a folder; give the files in it" in asked(trace.parent)
    cut = trace.with_name("cut.gz")
    cut.write_bytes(gzip.compress(trace.read_bytes() * 100)[:-20])
    assert "cut.gz cannot be unpacked" in asked(cut) and "fetch it again" in asked(cut)
    other = trace.with_name("other")
    other.write_bytes(bytes(range(256)))
    assert "other, line 1: no JSON" in asked(other)


def test_traces_of_one_name_are_told_apart_and_pipes_are_read(trace: Path, here: Here) -> None:
    other = trace.parent / "deeper" / trace.name
    other.parent.mkdir()
    other.write_bytes(trace.read_bytes())
    given = ("--blocks", "4", "--block-tokens", "16", "--json")
    told = json.loads(here("replay", str(trace), str(other), *given).stdout)
    assert [one["trace"] for one in told["traces"]] == [str(trace), str(other)]
    line = error_line(here("replay", str(trace), str(trace), str(other), *given))
    assert f"trace {trace} was given twice; give each once" in line
    marked = trace.with_name("marked")
    marked.write_bytes(b"\xef\xbb\xbf" + trace.read_bytes())
    told_again = json.loads(here("replay", str(marked), *given).stdout)
    assert told_again["traces"][0]["requests"] == told["traces"][0]["requests"], "with a byte order mark"
    reader, writer = os.pipe()
    os.write(writer, trace.read_bytes())
    os.close(writer)
    told = json.loads(here("replay", f"/dev/fd/{reader}", *given).stdout)
    os.close(reader)
    assert told["traces"][0]["requests"] == 6


@pytest.mark.slow
def test_without_numba_it_names_the_extra(trace: Path) -> None:
    without = {"before": "sys.modules['numba'] = None"}
    given = ("replay", str(trace), "--blocks", "4", "--block-tokens", "16")
    assert run_cli(*given, "--policy", "lru", **without).returncode == 0
    line = error_line(run_cli(*given, "--policy", "adaptive", **without))
    assert "needs the package numba; run in a checkout: pip install '.[server]'" in line


# kvstore whatif --------------------------------------------------------------------------------------------------


def test_an_estimate_is_a_table_for_people_and_an_object_for_scripts(trace: Path, here: Here) -> None:
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


def test_an_estimate_without_sizes_takes_some_and_compares_with_nothing(trace: Path, here: Here) -> None:
    given = ("--block-tokens", "16", "--names", "16", "--seed", "3")
    told = json.loads(here("whatif", str(trace), *given, "--json").stdout)
    assert told["rows"][-1]["blocks"] == 8 and told["mean_error"] is None
    assert all(row["exact_hit_rate"] is None for row in told["rows"])
    shown = here("whatif", str(trace), *given, "--policy", "adaptive").stdout
    assert "exact" not in shown and "distinct; adaptive" in shown


@pytest.mark.slow
def test_an_estimated_curve_is_drawn(trace: Path, here: Here) -> None:
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
def test_what_cannot_be_estimated_is_one_line(given: tuple[str, ...], says: str, trace: Path, here: Here) -> None:
    result = here("whatif", str(trace), "--block-tokens", "16", "--json", *given)
    assert says in error_line(result)


def test_of_a_trace_without_a_full_block_nothing_is_estimated(trace: Path, here: Here) -> None:
    trace.write_text(line([1], 9) + "\n")
    assert "has no full block of 16 tokens in it" in error_line(here("whatif", str(trace), "--block-tokens", "16"))
