"""`kvstore prove`: what it refuses, how it takes a command apart, and a model of transformers from end to end."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.errors import BadInput
from kvstore.cli.prove import CONNECTOR_FLAGS, has_flag, page_tokens_of, without
from kvstore.cli.run import EngineCommand, engine_of
from kvstore.prove import trials
from kvstore.prove.judge import Way
from kvstore.prove.weights import with_other_weights
from openai_api.small_openai import Asked, SmallOpenAi
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


MODELS = {"data": [{"id": "a model", "max_model_len": 4096}]}
FOUND = {"tokens": ["1"], "token_logprobs": [-0.1], "top_logprobs": [{"1": -0.1, "2": -3.0}]}
ROUTES: dict[str, tuple[int, Any]] = {
    "/v1/models": (200, MODELS),
    "/v1/completions": (200, {"choices": [{"logprobs": FOUND}]}),
    "/reset_prefix_cache": (200, {"success": True}),
}


@contextmanager
def engine_with(routes: dict[str, tuple[int, Any]]) -> Iterator[str]:
    """Something that answers so at an engine's address."""

    async def answered(status: int, told: Any, asked: Asked) -> None:
        await asked.json(told, status)

    with closing(SmallOpenAi({path: partial(answered, *one) for path, one in routes.items()})) as engine:
        yield engine.url


@pytest.mark.parametrize(
    ("path", "status", "told", "says"),
    [
        ("/v1/models", 200, b"\xff", "names no model"),
        ("/v1/models", 200, {"data": [{"id": "small", "max_model_len": 10}]}, "takes 10 tokens"),
        ("/v1/completions", 500, b"broken \x1b[1m", "with status 500: broken"),
        ("/v1/completions", 200, {"choices": [{}]}, "without log probabilities"),
        ("/v1/completions", 200, b"[" * 100_000, "without log probabilities"),
        ("/reset_prefix_cache", 404, {}, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_what_is_no_engine_is_one_line(here: Here, path: str, status: int, told: Any, says: str) -> None:
    with engine_with({**ROUTES, path: (status, told)}) as url:
        assert says in error_line(here("prove", "--url", url, "--prompts", "2"))


def test_an_engine_from_whose_store_nothing_comes_is_not_proven(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SAVED_TRIES", 2)
    with engine_with(ROUTES) as url:
        ended = here("prove", "--url", url, "--prompts", "2", "--longest", "64")
    assert ended.returncode == 1 and "nothing is proven of it" in ended.stdout


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

    assert with_other_weights(TRAINED, tmp_path / "other")
    before, after = (load_file(folder / "model.safetensors") for folder in (TRAINED, tmp_path / "other"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 1 and "norm" in changed[0]
    assert torch.equal(before[changed[0]], -after[changed[0]])
    assert {file.name for file in TRAINED.iterdir()} == {file.name for file in (tmp_path / "other").iterdir()}


def test_a_model_without_such_a_tensor_has_no_other_weights(tmp_path: Path) -> None:
    assert not with_other_weights(tmp_path, tmp_path / "other")
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
