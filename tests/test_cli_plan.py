"""`kvstore plan` and `kvstore models` as people and scripts see them, and the page that the latter writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

from kvstore.insight.models import MODELS
from kvstore.insight.served import Engine, Verdict, shapes
from recorded import line
from test_cli import NO_TORCH, Here, error_line, run_cli

PAGE = Path(__file__).resolve().parent.parent / "docs/models.md"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.slow
def test_a_table_for_people_and_an_object_for_scripts() -> None:
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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "give a model, such as kvstore plan llama-3.1-8b, or --config FILE, or --layers"),
        (("llama-3.1-8b", "--layers", "3"), "give a model, such as"),
        (("--layers", "3"), "a described model needs all of --layers, --kv-heads and --head-dim"),
        (("--layers", "1025", "--kv-heads", "8", "--head-dim", "64"), "'1025'; give a whole number from 1 to 1024"),
        (("--layers", "9", "--kv-heads", "0", "--head-dim", "64"), "--kv-heads '0'; give a whole number from 1 to"),
        (("--layers", "9", "--kv-heads", "8", "--head-dim", "x"), "--head-dim 'x'; give a whole number from 1 to"),
        (("llama-9-8b",), "model 'llama-9-8b' is not in the table; near it: llama-3.1-8b"),
        (("--config", "none.json"), "none.json: No such file or directory"),
        (("llama-3.1-8b", "--context", "8k"), "--context '8k'; give a whole number from 1 to"),
        (
            ("llama-3.1-8b", "--window", "15 minutes"),
            "--window '15 minutes'; give a time, such as 900s, 15m, 24h or 7d",
        ),
        (("llama-3.1-8b", "--dram", "much"), "--dram='much' is not a size; write a number with B, KiB"),
        (("llama-3.1-8b", "--dram-speed", "fast"), "--dram-speed='fast' is not a rate"),
        (("llama-3.1-8b", "--nvme-overhead", "x"), "--nvme-overhead 'x'; give milliseconds, 0 or more"),
        (("llama-3.1-8b", "--dtype", "int4"), "--dtype 'int4'; allowed: float32"),
        (("llama-3.1-8b", "--codec", "zip"), "codec 'zip' is not known; allowed: int8-kc64, raw"),
        (("llama-3.1-8b", "--tensor-parallel", "3"), "--tensor-parallel 3 does not divide the 8 KV heads of llama-3.1"),
        (("llama-3.1-8b", "--utilisation", "1.5"), "--utilisation 1.5; give a share"),
        (("llama-3.1-8b", "--utilisation", "nan"), "--utilisation nan; give a share"),
        (("llama-3.1-8b", "--window", "0s"), "--window 0 seconds; give more than 0"),
        (("llama-3.1-8b", "--new-tokens-per-second", "-1"), "--new-tokens-per-second -1; give 0 or more"),
        (("llama-3.1-8b", "--dram", "999999999999GiB"), "give 0 or more, such as 80GB"),
        (("llama-3.1-8b", "--nvme-overhead", "nan"), "nan seconds before a load from nvme; give 0 to 3600"),
        (("llama-3.1-8b", "--nvme-overhead", "-1"), "-0.001 seconds before a load from nvme; give 0 to 3600"),
        (("llama-3.1-8b", "--prefill-rate", "0"), "--prefill-rate 0; give tokens per second"),
        (("llama-3.1-8b", "--prefill-rate", "x"), "--prefill-rate 'x'; give tokens per second"),
        (("llama-3.1-8b", "--gpu-memory", "80GB"), "--gpu-memory is shared with the weights; give --weights"),
        (("qwen3.5-27b", "--state-share", "65"), "a share of 65.0 for states; give their bytes for each byte of KV"),
        (("llama-3.1-8b", "--trace", "none.jsonl"), "none.jsonl: No such file or directory"),
        (("llama-3.1-8b", "--trace", "/"), "--trace / is a folder; give a file in it"),
        (
            ("llama-3.1-8b", "--trace", "none.jsonl", "--new-tokens-per-second", "5"),
            "--trace says how many new tokens come; leave --new-tokens-per-second out",
        ),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(given: tuple[str, ...], says: str, here: Here) -> None:
    assert says in error_line(here("plan", *given))


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


def test_the_page_has_all_models_and_architectures() -> None:
    text = PAGE.read_text("utf-8")
    assert len(MODELS) == 65 and all(f"| {name} |" in text for name in MODELS)
    assert len(shapes()) == 48 and all(name in text for name, _, _ in shapes())


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


@pytest.mark.parametrize("given", ["no such model", "deepseek-v4"])
def test_a_model_that_is_not_known_is_one_line(given: str, here: Here) -> None:
    assert given in error_line(here("models", given))
