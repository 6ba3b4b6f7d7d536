"""The connector beside vLLM's own `ExampleConnector` in a `MultiConnector`, which loads from the first that has any."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from engines import models
from engines.session import SEED, account_of, prompts

pytestmark = pytest.mark.slow
COUNT = int(os.environ.get("ENGINE_PROMPTS", "20"))
PAGE = 128
OURS, THEIRS = "ours first", "theirs first"


def transfer(url: str, place: Path, order: str) -> dict[str, Any]:
    ours = models.connector(url)
    policy = ours.pop("kv_load_failure_policy")
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(place)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [ours, theirs] if order == OURS else [theirs, ours]},
    }


@pytest.mark.parametrize("order", [OURS, THEIRS])
def test_beside_another_connector_hits_are_counted_once_and_tokens_are_right(
    order: str, sidecar: Any, saved: Any, run: Any, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    # A prompt of whole pages and one token ends an engine with their connector: it looks for a file of another name.
    asked, rng = [[*ids, 1, 2, 3] for ids in prompts(COUNT, SEED)], random.Random(SEED)
    longer = [ids + [rng.randrange(999) for _ in range(PAGE)] for ids in asked]
    ask = {"do": "generate", "prompts": asked}
    plan = {
        "model": saved(),
        "transfer": transfer(sidecar.url, tmp_path, order),
        "options": {"dtype": "float32"},
        "steps": [
            {"do": "generate", "prompts": [[1, 2, 3]], "as": "before"},  # the workers' facts come with this step
            {**ask, "as": "first"},
            {"do": "settle"},
            {**ask, "as": "own"},
            {**ask, "as": "outside", "reset_before_each": True},
            # Their connector looks for all pages of a prompt, and does not know these.
            {"do": "generate", "prompts": longer, "as": "longer", "reset_before_each": True},
            {"do": "metrics", "as": "metrics"},
        ],
    }
    told = run(plan)
    for name in ("first", "own", "outside", "longer"):
        assert all(map(account_of, told[name]))
    for own, outside, more in zip(told["own"], told["outside"], told["longer"], strict=True):
        assert outside["tokens"] == own["tokens"]
        assert outside["cached"] == own["cached"] > 0
        if order == OURS:
            assert outside["kvstore"]["hits"] == {"dram": own["cached"]}
        else:
            assert outside["kvstore"]["hits"] == {}, "what another connector brought is no hit of ours"
            assert outside["kvstore"]["misses"]["disabled"] == own["cached"]
        assert more["kvstore"]["hits"] == {"dram": more["cached"]} and more["cached"] >= own["cached"]
    brought = sum(one["cached"] for name in ("outside", "longer") for one in told[name])
    assert told["metrics"]["vllm:external_prefix_cache_hits"] >= brought
