"""`kvstore prove` on a real vLLM: that it holds, and each planted fault by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines import models
from engines.conftest import PRODUCT, ROOT, WAITS_ASLEEP, sidecar_python
from engines.test_vllm_server import NAME, server_of
from engines.tier_engine import BLOCK_TOKENS, offloading
from kvstore.prove.judge import Party, Way

pytestmark = pytest.mark.slow
SMALL = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"]
MOST_SECONDS = 900.0


def engine_words(model: str, *more: str) -> list[str]:
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", model, *SMALL, *more]


def proven(tmp_path: Path, *words: str, prompts: int = 6) -> tuple[int, dict[str, Any]]:
    """The status, and what it reports."""
    models.prepare(multiprocessing=True)
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), PRODUCT["PYTHONPATH"]])}
    command = [
        sidecar_python(),
        "-P",
        "-m",
        "kvstore",
        "prove",
        "--json",
        "--longest",
        "600",
        "--prompts",
        str(prompts),
    ]
    ended = subprocess.run(
        [*command, "--html", str(tmp_path / "report.html"), *words],
        env={**os.environ, **WAITS_ASLEEP, **paths},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    assert ended.returncode in (0, 1), ended.stderr[-3000:]
    return ended.returncode, json.loads(ended.stdout)


def parties(told: dict[str, Any]) -> list[str]:
    return [one["who"] for one in told["findings"]]


def test_identity_holds_in_every_way(saved: Any, tmp_path: Path) -> None:
    status, told = proven(tmp_path, "--dram", "256MiB", "--nvme", "1GiB", "--", *engine_words(saved()))
    assert (status, told["held"], told["findings"]) == (0, True, [])
    ways = {one["way"]: one for one in told["with_store"]}
    stored = [Way.STORE, Way.BOUNDARIES, Way.AT_ONCE, Way.ABORTED, Way.RESTARTED]
    assert all(ways[way]["cached"] > 0 and ways[way]["broken"] == [] for way in stored)
    assert ways[Way.STORE]["tiers"].keys() == {"dram"} and ways[Way.RESTARTED]["tiers"].keys() == {"nvme"}
    assert ways[Way.EVICTED]["cached"] == ways[Way.OTHER_WEIGHTS]["cached"] == 0
    assert ways[Way.OTHER_WEIGHTS]["same"] == 0, "the weights are others"
    assert ways[Way.STORE]["same"] == ways[Way.STORE]["asked"] == 6
    assert "Identity holds" in (tmp_path / "report.html").read_text("utf-8")


def connector(url: str, **changed: Any) -> list[str]:
    return ["--kv-transfer-config", json.dumps(models.connector(url) | changed)]


def test_a_connector_that_loads_into_other_pages_is_named(saved: Any, sidecar: Any, tmp_path: Path) -> None:
    wrong = {"kv_connector": "OnePageConnector", "kv_connector_module_path": "engines.planted"}
    status, told = proven(tmp_path, "--", *engine_words(saved(), *connector(sidecar.url, **wrong)))
    assert (status, parties(told)) == (1, [Party.PAGES])


def test_a_connector_that_loses_the_drafts_kv_is_named(saved: Any, sidecar: Any, tmp_path: Path) -> None:
    """The draft model is the model itself, so that all of its drafts are accepted where its KV is right."""
    drafts = {"method": "draft_model", "model": saved(), "num_speculative_tokens": 3}
    wrong = {"kv_connector": "DraftlessConnector", "kv_connector_module_path": "engines.planted"}
    drafted = ["--speculative-config", json.dumps(drafts)]
    status, told = proven(tmp_path, "--", *engine_words(saved(), *drafted, *connector(sidecar.url, **wrong)))
    assert (status, parties(told)) == (1, [Party.DRAFTS])


def test_weights_that_a_connector_does_not_look_at_are_named(saved: Any, sidecar: Any, tmp_path: Path) -> None:
    """The connector's own setting `model` names the weights in place of their contents."""
    config = models.connector(sidecar.url, model="the same for ever")
    status, told = proven(tmp_path, "--", *engine_words(saved(), "--kv-transfer-config", json.dumps(config)))
    assert (status, parties(told)) == (1, [Party.WEIGHTS])


def test_an_engine_whose_own_cache_is_wrong_is_named_and_the_store_is_not(saved: Any, tmp_path: Path) -> None:
    words = engine_words(saved(), "--worker-cls", "engines.planted.SpoilsOwnCache")
    status, told = proven(tmp_path, "--dram", "256MiB", "--nvme", "off", "--", *words)
    assert (status, told["held"], parties(told)) == (0, True, [Party.ENGINE])
    assert "its own cache" in told["findings"][0]["what"]


def test_an_engine_whose_batches_are_not_repeatable_is_named_and_the_store_is_not(saved: Any, tmp_path: Path) -> None:
    words = engine_words(saved(), "--worker-cls", "engines.planted.NotRepeatable")
    status, told = proven(tmp_path, "--dram", "256MiB", "--nvme", "off", "--", *words)
    assert (status, told["held"], parties(told)) == (0, True, [Party.ENGINE])
    assert "many at once" in told["findings"][0]["what"]


def test_numbers_in_16_bits_are_no_fault_of_the_store(saved: Any, tmp_path: Path) -> None:
    """Sums in another order differ in the last of few bits, and the engine alone need not show it."""
    words = [word if word != "float32" else "bfloat16" for word in engine_words(saved("neox"))]
    status, told = proven(tmp_path, "--dram", "256MiB", "--nvme", "off", "--", *words, prompts=20)
    assert (status, told["held"]) == (0, True) and set(parties(told)) <= {Party.ENGINE}


def test_the_store_of_another_connector_is_proven(saved: Any, tmp_path: Path) -> None:
    """vLLM's own offloading, which lies in its process's memory: a restart finds nothing."""
    words = engine_words(
        saved(),
        "--block-size",
        str(BLOCK_TOKENS),
        "--kv-transfer-config",
        json.dumps(offloading([], cpu_bytes_to_use=64 << 20)),
    )
    status, told = proven(tmp_path, "--", *words)
    assert (status, told["findings"]) == (0, [])
    ways = {one["way"]: one["cached"] for one in told["with_store"]}
    assert all(ways[way] for way in (Way.STORE, Way.BOUNDARIES, Way.AT_ONCE, Way.ABORTED))
    assert ways[Way.RESTARTED] == ways[Way.OTHER_WEIGHTS] == 0 and Way.EVICTED not in ways


def test_an_engine_that_runs_is_asked_where_it_is(saved: Any, sidecar: Any, tmp_path: Path) -> None:
    command = engine_words(saved(), *connector(sidecar.url))
    with server_of(command, tmp_path / "server.log") as server:
        status, told = proven(tmp_path, "--url", server.url)
    assert (status, told["findings"]) == (0, [])
    assert {one["way"]: one["cached"] > 0 for one in told["with_store"]}[Way.STORE], NAME
