"""`kvstore prove`: what it refuses, how it takes a command apart, and a model of transformers from end to end."""

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.errors import BadInput
from kvstore.cli.prove import CONNECTOR_FLAGS, has_flag, page_tokens_of, without
from kvstore.cli.run import EngineCommand, engine_of
from kvstore.prove.judge import Way
from kvstore.prove.weights import with_other_weights
from test_cli import Here, error_line

TRAINED = Path(__file__).parents[1] / "kvstore/demo/trained"
MODULE = "vllm.entrypoints.openai.api_server"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "give one of: -- and the engine's command, --url URL, --transformers DIR"),
        (["--url", "http://127.0.0.1:1", "--transformers", "x"], "give one of"),
        (["--transformers", "nowhere"], "--transformers nowhere: no config.json is there"),
        (["--reset", "/reset", "--transformers", "x"], "--reset belongs to --url"),
        (["--url", "ftp://127.0.0.1"], "give an address"),
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--html", "no/such/file", "--transformers", "x"], "there is no folder"),
        (["--", "ls"], "this starts no engine that is known"),
        (["--prompts", "1", "--transformers", "x"], "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_proven_is_one_line(here: Here, given: list[str], says: str) -> None:
    assert says in error_line(here("prove", *given))


WORDS = st.sampled_from(["serve", "model", "--port", "8000", "--kv-transfer-config", "--kv_transfer_config={}", "{}"])


@given(st.lists(WORDS, max_size=8))
def test_a_command_without_flags_keeps_all_else(words: list[str]) -> None:
    flags = CONNECTOR_FLAGS["vllm"]
    left = without(words, flags)
    assert not has_flag(left, flags) and left == without(left, flags)
    assert has_flag(words, flags) or left == words


def test_a_flag_goes_with_its_value_however_it_is_written() -> None:
    words = [sys.executable, "-m", MODULE, "--kv-transfer-config", '{"a": 1}', "--kv_transfer_config={}", "--port", "1"]
    assert without(words, CONNECTOR_FLAGS["vllm"]) == [sys.executable, "-m", MODULE, "--port", "1"]
    with pytest.raises(BadInput, match="the engine has a store already"):
        engine_of(words)
    assert engine_of(words, allows_store=True).engine == "vllm"


@pytest.mark.parametrize(("given", "tokens"), [("32", 32), ("0", 16), ("x", 16), ("100000", 16)])
def test_pages_are_the_engine_s_own(given: str, tokens: int) -> None:
    assert page_tokens_of(EngineCommand("vllm", "python", "", ["--block-size", given])) == tokens


def test_a_model_s_copy_differs_in_the_signs_of_one_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with_other_weights(TRAINED, tmp_path / "other")
    before, after = (load_file(folder / "model.safetensors") for folder in (TRAINED, tmp_path / "other"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 1 and "norm" in changed[0]
    assert torch.equal(before[changed[0]], -after[changed[0]])
    assert {file.name for file in TRAINED.iterdir()} == {file.name for file in (tmp_path / "other").iterdir()}


def test_a_model_without_such_a_tensor_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no safetensors with a norm of the first layer"):
        with_other_weights(tmp_path, tmp_path / "other")
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little"))
    with pytest.raises(BadInput, match="is no file of safetensors"):
        with_other_weights(tmp_path, tmp_path / "other")


@pytest.mark.slow
def test_a_model_of_transformers_answers_the_same_in_every_way(here: Here, tmp_path: Path) -> None:
    model = shutil.copytree(TRAINED, tmp_path / "model")
    given = ["--dram", "256MiB", "--nvme", "1GiB", "--prompts", "4", "--longest", "400"]
    ended = here("prove", "--transformers", str(model), *given, "--html", str(tmp_path / "report.html"), "--json")
    told = json.loads(ended.stdout)
    assert ended.returncode == 0 and told["held"] and told["findings"] == []
    ways = {one["way"]: one for one in told["with_store"]}
    assert all(ways[way]["cached"] for way in (Way.STORE, Way.BOUNDARIES, Way.AT_ONCE, Way.ABORTED, Way.RESTARTED))
    assert ways[Way.EVICTED]["cached"] == ways[Way.OTHER_WEIGHTS]["cached"] == 0
    assert ways[Way.RESTARTED]["tiers"].keys() == {"nvme"} and ways[Way.OTHER_WEIGHTS]["same"] == 0
    assert "Identity holds" in (tmp_path / "report.html").read_text("utf-8")
