"""`kvstore replay`, `whatif`, `plan`, `models` and `lint` as people and scripts see them, what they refuse, and the
page that `models` writes."""

from __future__ import annotations

import gzip
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

from kvstore.insight.served import Engine, Verdict
from recorded import line
from test_cli import NO_TORCH, Here, error_line, run_cli

PAGE = Path(__file__).resolve().parent.parent / "docs/models.md"
REQUESTS = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3], [6, 7, 8], [1, 2, 4]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(line(ids) + "\n" for ids in REQUESTS))
    return path


@pytest.mark.slow
def test_a_replay_is_a_table_for_people_and_an_object_for_scripts(trace: Path) -> None:
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


def test_with_a_tier_below_a_row_for_each_admission(trace: Path, here: Here) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    picture, svg = trace.with_name("curves.PNG"), trace.with_name("curves.svg")
    given = ("--dram-blocks", "3", "--nvme-blocks", "8", "--block-tokens", "16", "--admission", "learned,oracle")
    shown = here("replay", str(trace), *given, "--plot", str(picture))
    assert (shown.returncode, shown.stderr) == (0, "") and picture.read_bytes().startswith(b"\x89PNG")
    here("replay", str(trace), *given, "--plot", str(svg))
    assert "optimum" in svg.read_text() and "some.jsonl" in svg.read_text()
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
    assert "needs the package numba; run: pip install 'prefix-kvstore[adaptive]', or take lru" in line


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


def test_of_a_trace_without_a_full_block_nothing_is_estimated(trace: Path, here: Here) -> None:
    trace.write_text(line([1], 9) + "\n")
    assert "has no full block of 16 tokens in it" in error_line(here("whatif", str(trace), "--block-tokens", "16"))


# kvstore plan ----------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.slow
def test_a_plan_is_a_table_for_people_and_an_object_for_scripts() -> None:
    given = ("llama-3.1-8b", "--gpu-memory", "80GB", "--weights", "16GB", "--new-tokens-per-second", "26500")
    shown = run_cli("plan", *given, before=NO_TORCH)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "131,072 B per token  32 layers x 8 KV heads x 2 x 128 x 2 B" in shown.stdout
    told = json.loads(run_cli("plan", *given, "--json", before=NO_TORCH).stdout)
    assert told["codec"] == "int8-kc64" and told["refusals"] == []
    assert told["figures"]["bytes_per_token"]["value"] == 131_072
    assert told["figures"]["users"]["formula"] == "room / KV of a user, rounded down"


def test_what_engines_do_not_serve_is_said_first(here: Here) -> None:
    shown = here("plan", "qwen3.5-27b").stdout
    assert shown.startswith("With SGLang it is served in part: page hashes have 64 bits")


def test_a_config_and_a_description(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    by_file = json.loads(here("plan", "--config", str(path), "--json").stdout)
    given = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    described = json.loads(here("plan", *given, "--json").stdout)
    assert by_file["figures"] == described["figures"]
    assert by_file["source"] == str(path)


def test_the_table_of_models(here: Here) -> None:
    shown = here("plan", "--models").stdout
    assert "gemma-3-27b" in shown and "config.json of google/gemma-3-27b-pt" in shown
    told = json.loads(here("plan", "--models", "--json").stdout)
    assert {
        "model": "phi-4",
        "bytes_per_token": 204_800,
        "state_bytes": 0,
        "source": "config.json of microsoft/phi-4",
    } in (told["models"])


def test_a_recording_says_rates_and_hits(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "some.jsonl"
    asked = [[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]]
    path.write_text("".join(line(ids, timestamp=1000 * at) + "\n" for at, ids in enumerate(asked)))
    given = ("plan", "llama-3.1-8b", "--trace", str(path), "--block-tokens", "16", "--window", "3s", "--json")
    told = json.loads(here(*given).stdout)["figures"]
    assert told["new_tokens_per_second"]["value"] == 6 * 16 / 4
    assert told["ceiling"]["value"] == told["reused_in_window"]["value"] == pytest.approx(0.4)
    found = [told[key]["value"] for key in sorted(told) if key.startswith("found_with_")]
    assert found == sorted(found) and found[-1] == pytest.approx(0.4), "more memory finds no less, and all is found"
    small = json.loads(here(*given, "--dram", "3MiB").stdout)["figures"]
    assert small["found_with_0"]["value"] < 0.4


def test_a_large_file_is_no_config(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * ((1 << 20) + 1))
    assert "more than 1048576 bytes" in error_line(here("plan", "--config", str(path)))


def test_a_recording_without_a_rate_is_refused(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "some.jsonl"
    given = ("plan", "llama-3.1-8b", "--trace", str(path), "--block-tokens", "16")
    path.write_text(line([1, 2]) + "\n" + line([1, 3]) + "\n")
    assert "all its requests came at once" in error_line(here(*given))
    path.write_text(line([1], 3) + "\n")
    assert "has no full block of 16 tokens" in error_line(here(*given))


# kvstore models --------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_command_writes(here: Here) -> None:
    assert here("models", "--markdown").stdout == PAGE.read_text("utf-8"), "kvstore models --markdown > docs/models.md"


def test_a_model_by_name_by_directory_and_by_file_is_the_same(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    by_place = [json.loads(here("models", str(one), "--json").stdout)["models"] for one in (tmp_path, path)]
    (by_name,) = json.loads(here("models", "llama-3.1-8b", "--json").stdout)["models"]
    assert by_place[0] == by_place[1] == [{**by_name, "model": "llama"}]
    assert by_name["engines"]["vLLM"] == {"verdict": "served", "reason": "", "remedy": ""}


def test_of_what_is_not_served_the_reason_and_the_remedy_are_shown(here: Here) -> None:
    shown = here("models", "kimi-k3").stdout
    assert "transformers: served in part: prompts with videos or sound; allowed: text and images." in shown
    told = json.loads(here("models", "--json").stdout)["models"]
    answers = [one["engines"][engine] for one in told for engine in Engine]
    assert all(bool(one["reason"]) == (one["verdict"] != Verdict.SERVED) for one in answers)


# kvstore lint ----------------------------------------------------------------------------------------------------

RULES = " ".join(f"Rule {number}: name the source, and write no more than {number} words." for number in range(40))


def written(path: Path, *prompts: Any) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in prompts))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "prompts.jsonl", *(f"Today is {day}.\n{RULES}" for day in ("Monday", "Friday", "Sunday")))


@pytest.mark.slow
def test_lint_is_a_sentence_for_people_and_an_object_for_scripts(prompts: Path) -> None:
    packed = prompts.with_suffix(".gz")
    packed.write_bytes(gzip.compress(prompts.read_bytes()))
    shown = run_cli("lint", str(packed), "--bytes", before=NO_TORCH)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "prompts.gz: 3 prompts, " in shown.stdout and "bytes, taken for tokens" in shown.stdout
    assert "1. 2 prompts part at token 9, differ for 3 tokens, and are the same again for" in shown.stdout
    assert "Move what changes to the end." in shown.stdout
    assert "Compare lines 1 and 2. They part in line 1 of the text, behind 'Today is '." in shown.stdout
    told = json.loads(run_cli("lint", str(prompts), "--bytes", "--json", before=NO_TORCH).stdout)
    assert told["groups"][0]["prompts"] == 2 and told["hit_tokens"] == 0


def test_the_status_of_a_check(prompts: Path, here: Here) -> None:
    given = ("lint", str(prompts), "--bytes", "--min-hit-rate")
    assert here(*given, "0").returncode == 0
    failed = here(*given, "0.5")
    assert (failed.returncode, failed.stderr) == (1, "") and "Below --min-hit-rate 0.5." in failed.stdout
    told = here(*given, "0.5", "--json")
    assert told.returncode == 1 and json.loads(told.stdout)["is_below"]


def test_a_models_own_tokenizer(prompts: Path, here: Here) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra: hf)")
    words = dict.fromkeys(f"Today is Monday Friday Sunday . , : {RULES}".split())
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(words)} | {"?": len(words)}, unk_token="?")
    known = tokenizers.Tokenizer(model)
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = prompts.parent / "model"
    folder.mkdir()
    known.save(str(folder / "tokenizer.json"))
    given = ("lint", str(prompts), "--block", "16", "--json", "--tokenizer")
    by_folder = here(*given, str(folder))
    (group,) = json.loads(by_folder.stdout)["groups"]
    assert (group["first_place"], group["tokens"], group["earlier_tokens"]) == (2, 1, 1)
    assert group["where"] == "They part in line 1 of the text, behind 'Today is '"
    by_file = here(*given, str(folder / "tokenizer.json"))
    assert by_file.stdout == by_folder.stdout


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "packed.gz"
    path.write_bytes(gzip.compress(b" " * (40 << 20)))
    said = error_line(here("lint", str(path), "--bytes"))
    assert "packed.gz line 1: more than 16777216 characters; give shorter prompts" in said


# What cannot be --------------------------------------------------------------------------------------------------

REFUSED = [
    ("replay {trace} --blocks 4 --model qwen3.5-27b --nvme-blocks 4", "states are replayed in DRAM alone"),
    ("replay {trace} --blocks 4 --model nothing", "model 'nothing' is not in the table"),
    ("replay {trace} --blocks 4 --model phi-4 --kv-bytes-per-token 9", "--model says how many bytes a token has"),
    ("replay {trace} --blocks 4 --state-share -1", "a share of -1.0 for states; give their bytes for each byte"),
    ("replay {trace} --blocks 4 --policy arc", "--policy 'arc'; give lru, adaptive, or several with commas"),
    ("replay {trace} --blocks 4 --policy ,", "--policy ','; give lru, adaptive"),
    ("replay {trace} --policy lru", "no size was given; give --blocks"),
    ("replay {trace} --blocks '²'", "--blocks '²'; give whole numbers"),
    ("replay {trace} --blocks {nines}", "give whole numbers"),
    ("replay {trace} --blocks 0", "--blocks '0'; give whole numbers from 1 to 4194304"),
    ("replay {trace} --blocks 1,000",
     "--blocks '000'; give whole numbers from 1 to 4194304, with commas between them and not"),
    ("replay {trace} --blocks ''", "--blocks ''; give whole numbers"),
    ("replay {trace} --dram-blocks 4 --nvme-blocks 100,200",
     "--nvme-blocks '100,200'; give a whole number from 0 to 41"),
    ("replay {trace} --blocks 4 --warmup 5%", "--warmup '5%'; give the share of requests that is not counted, 0 to"),
    ("replay {trace} --blocks 4 --seed x", "--seed 'x'; give a whole number from 0 to 2147483647"),
    ("replay {trace} --blocks 4 --block-tokens 0", "--block-tokens '0'; give a whole number from 1 to 2147483647"),
    ("replay {trace} --blocks 4 --prefill-rate fast", "--prefill-rate 'fast'; give tokens per second"),
    ("replay {trace} --blocks 4 --kv-bytes-per-token 1.5", "--kv-bytes-per-token '1.5'; give a whole number from 1 to"),
    ("replay {trace} --blocks 4 --plot no/such/place.png",
     "--plot no/such/place.png: there is no folder no/such; make"),
    ("replay {trace} --blocks 4 --block-tokens 512", "give the --block-tokens that it was recorded with"),
    ("replay {trace} --blocks 4 --plot curves.bmp", "--plot curves.bmp: give a name that ends in .png"),
    ("replay {trace} --blocks 4 --warmup 1", "--warmup 1; give the share"),
    ("replay {trace} --blocks 4 --warmup nan", "--warmup nan; give the share"),
    ("replay {trace} --blocks 4 --prefill-rate 1e-320", "e-321; give tokens per second, 0.001"),
    ("replay {trace} --blocks 4 --nvme-blocks 8 --admission luck", "--admission 'luck'; allowed: all, learned"),
    ("replay {trace} --blocks 4 --nvme-blocks 8 --write-share half", "--write-share 'half'; give shares"),
    ("replay {trace} --blocks 4 --nvme-blocks 8 --write-share 0", "--write-share 0; give a share"),
    ("replay {trace} --blocks 4 --nvme-blocks 8 --write-share nan", "--write-share nan; give a share"),
    ("replay {trace} --blocks 4 --nvme-blocks 8 --admission random", "random writes a share; give --write-share"),
    ("replay {trace} --blocks 4 --write-share 0.5", "give --nvme-blocks, too"),
    ("replay {trace} --blocks 4 --nvme-blocks 8 --admission oracle --write-share 0.5",
     "--write-share is a budget of learned and random, and --admission oracle names neither; add one"),
    ("replay {trace} --blocks 4 --admission oracle", "--admission is to NVMe; give --nvme-blocks, too"),
    ("replay {trace} --dram-blocks x", "--dram-blocks 'x'; give whole numbers from 1 to 4194304"),
    ("whatif {trace} --block-tokens 16 --policy arc", "--policy 'arc'; give lru or adaptive"),
    ("whatif {trace} --block-tokens 16 --sizes 1e3", "--sizes '1e3'; give whole numbers from 1 to 4194304"),
    ("whatif {trace} --block-tokens 16 --dram much", "--dram='much' is not a size; write a number with"),
    ("whatif {trace} --block-tokens 16 --dram ,", "--dram ','; give sizes with commas between them, as 64GiB,128GiB"),
    ("whatif {trace} --block-tokens 16 --dram 1KiB",
     "--dram 1.0 KiB has room for 0 blocks of 2.0 MiB; give 2.0 MiB to 8.0 TiB"),
    ("whatif {trace} --block-tokens 16 --names 8", "--names '8'; give a whole number from 16 to 1048576"),
    ("whatif {trace} --block-tokens 16 --seed x", "--seed 'x'; give a whole number from 0 to 2147483647"),
    ("whatif {trace} --block-tokens 16 --kv-bytes-per-token 0", "--kv-bytes-per-token '0'; give a whole number from 1"),
    ("whatif {trace} --block-tokens 16 --svg curve.png", "--svg curve.png: give a name that ends in .svg"),
    ("whatif {trace} --block-tokens 16 --svg no/such/place.svg",
     "--svg no/such/place.svg: there is no folder no/such; make it"),
    ("plan", "give a model, such as kvstore plan llama-3.1-8b, or --config FILE, or --layers"),
    ("plan llama-3.1-8b --layers 3", "give a model, such as"),
    ("plan --layers 3", "a described model needs all of --layers, --kv-heads and --head-dim"),
    ("plan --layers 1025 --kv-heads 8 --head-dim 64", "'1025'; give a whole number from 1 to 1024"),
    ("plan --layers 9 --kv-heads 0 --head-dim 64", "--kv-heads '0'; give a whole number from 1 to"),
    ("plan --layers 9 --kv-heads 8 --head-dim x", "--head-dim 'x'; give a whole number from 1 to"),
    ("plan llama-9-8b", "model 'llama-9-8b' is not in the table; near it: llama-3.1-8b"),
    ("plan --config none.json", "none.json: No such file or directory"),
    ("plan llama-3.1-8b --context 8k", "--context '8k'; give a whole number from 1 to"),
    ("plan llama-3.1-8b --window '15 minutes'", "--window '15 minutes'; give a time, such as 900s, 15m, 24h or 7d"),
    ("plan llama-3.1-8b --dram much", "--dram='much' is not a size; write a number with B, KiB"),
    ("plan llama-3.1-8b --dram-speed fast", "--dram-speed='fast' is not a rate"),
    ("plan llama-3.1-8b --nvme-overhead x", "--nvme-overhead 'x'; give milliseconds, 0 or more"),
    ("plan llama-3.1-8b --dtype int4", "--dtype 'int4'; allowed: float32"),
    ("plan llama-3.1-8b --codec zip", "codec 'zip' is not known; allowed: int8-kc64, raw"),
    ("plan llama-3.1-8b --tensor-parallel 3", "--tensor-parallel 3 does not divide the 8 KV heads of llama-3.1"),
    ("plan llama-3.1-8b --utilisation 1.5", "--utilisation 1.5; give a share"),
    ("plan llama-3.1-8b --utilisation nan", "--utilisation nan; give a share"),
    ("plan llama-3.1-8b --window 0s", "--window 0 seconds; give more than 0"),
    ("plan llama-3.1-8b --new-tokens-per-second -1", "--new-tokens-per-second -1; give 0 or more"),
    ("plan llama-3.1-8b --dram 999999999999GiB", "give 0 or more, such as 80GB"),
    ("plan llama-3.1-8b --nvme-overhead nan", "nan seconds before a load from nvme; give 0 to 3600"),
    ("plan llama-3.1-8b --nvme-overhead -1", "-0.001 seconds before a load from nvme; give 0 to 3600"),
    ("plan llama-3.1-8b --prefill-rate 0", "--prefill-rate 0; give tokens per second"),
    ("plan llama-3.1-8b --prefill-rate x", "--prefill-rate 'x'; give tokens per second"),
    ("plan llama-3.1-8b --gpu-memory 80GB", "--gpu-memory is shared with the weights; give --weights"),
    ("plan qwen3.5-27b --state-share 65", "a share of 65.0 for states; give their bytes for each byte of KV"),
    ("plan llama-3.1-8b --trace none.jsonl", "none.jsonl: No such file or directory"),
    ("plan llama-3.1-8b --trace /", "--trace / is a folder; give a file in it"),
    ("plan llama-3.1-8b --trace none.jsonl --new-tokens-per-second 5",
     "--trace says how many new tokens come; leave --new-tokens-per-second out"),
    ("lint none.jsonl", "none.jsonl: No such file or directory"),
    ("lint /", "/ is a folder; give a file of JSON lines"),
    ("lint {prompts}", "prompts.jsonl line 1: it has text, and no tokenizer was given; give --tokenizer"),
    ("lint {prompts} --bytes --tokenizer x", "--bytes is for prompts without a tokenizer"),
    ("lint {prompts} --tokenizer nowhere", "--tokenizer nowhere: there is no nowhere; give a folder with"),
    ("lint {prompts} --tokenizer {prompts}", "is no tokenizer.json; give that of a model"),
    ("lint {prompts} --bytes --block 0", "--block '0'; give a whole number from 1 to 4096"),
    ("lint {prompts} --bytes --min-hit-rate x", "--min-hit-rate 'x'; give a share of the tokens, 0 to 1"),
    ("lint {prompts} --bytes --min-hit-rate 60", "--min-hit-rate 60; give a share of the tokens, 0 to 1"),
    ("lint {prompts} --bytes --min-hit-rate nan", "--min-hit-rate nan; give a share of the tokens"),
    ("models 'no such model'", "no such model"),
    ("models deepseek-v4", "deepseek-v4"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "says"), REFUSED)
def test_what_cannot_be_is_one_line_that_says_what_to_do(
    command: str, says: str, trace: Path, prompts: Path, here: Here
) -> None:
    given = shlex.split(command.format(trace=trace, prompts=prompts, nines="9" * 5000))
    assert says.replace("{prompts}", str(prompts)) in error_line(here(*given))
