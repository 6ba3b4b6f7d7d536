"""A real vLLM on a GPU, as it is started for service: graphs, a scheduler that plans ahead, pages of 16 tokens.

A prompt is answered from the engine's own cache and from the store, with as many tokens computed behind as many cached
ones: the same kernels see the same shapes, so with `raw` both answers agree to the last bit of their log probabilities.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engines import models
from engines.session import FORGET, account_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here that torch can use")

PAGE, BLOCK, TOLD = 16, 64, 8
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
CONFIGURED: dict[str, dict[str, Any]] = {
    "as started": {},
    "graphs of decode, nothing compiled": GRAPHS,
    "step by step": {"enforce_eager": True, "async_scheduling": False},
}
SHAPE = {"hidden": 512, "heads": 8, "kv_heads": 4, "dtype": torch.bfloat16}


def prompts(seed: int, count: int = 8, vocab: int = 999) -> list[list[int]]:
    """Some begin alike; behind whole stored blocks each has less than a page, so the engine's own cache and the store
    can give equally much."""
    rng = random.Random(seed)
    stems = [[rng.randrange(vocab) for _ in range(20 * BLOCK)] for _ in range(3)]
    made = []
    for _ in range(count):
        shared = rng.randrange(1, 20) * BLOCK
        own = [rng.randrange(vocab) for _ in range(rng.randrange(4) * BLOCK + rng.randrange(1, PAGE))]
        made.append(rng.choice(stems)[:shared] + own)
    return made


def options(more: dict[str, Any]) -> dict[str, Any]:
    """Several engines find room on one GPU."""
    return {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 30,  # and not what is free, which other engines change meanwhile
        **more,
    }


def asked(prompts: list[list[int]]) -> dict[str, Any]:
    return {"do": "generate", "prompts": prompts, "max_tokens": TOLD, "logprobs": True}


def plan(
    url: str | None, model: str, more: dict[str, Any], steps: list[dict[str, Any]], **extra: Any
) -> dict[str, Any]:
    made = {"model": model, "options": options(more), "alone": True, "steps": steps}
    return made if url is None else {**made, "transfer": models.connector(url, **extra)}


def answers(told: list[dict[str, Any]]) -> list[Any]:
    return [(one["tokens"], one["logprobs"]) for one in told]


@pytest.mark.parametrize("configured", CONFIGURED)
def test_a_hit_is_what_the_engines_own_cache_gives_bit_for_bit(
    sidecar: Any, saved: Any, run: Any, configured: str
) -> None:
    """Also of another engine, which has computed nothing; and a connector that finds nothing changes nothing."""
    ask, model, more = asked(prompts(seed=41)), saved(**SHAPE), CONFIGURED[configured]
    first = [
        {"do": "about", "as": "about"},
        {**ask, "as": "cold"},
        {"do": "settle"},
        {**ask, "as": "own"},
        {**ask, "as": "outside", "reset_before_each": True},
        {"do": "counted", "as": "counted"},
    ]
    told = run(plan(sidecar.url, model, more, first))
    second = [{**ask, "as": "outside", "reset_before_each": True}, {"do": "counted", "as": "counted"}]
    another = run(plan(sidecar.url, model, more, second))
    alone = run(plan(None, model, more, [{**ask, "as": "cold"}]))
    print(configured, told["about"], told["counted"])
    assert "cuda" in told["about"]["pages"]
    is_plain = configured == "step by step"
    assert ("NONE" in told["about"]["graphs"]) is is_plain and told["about"]["is_async"] is not is_plain
    assert answers(told["cold"]) == answers(alone["cold"])
    for outside in (told["outside"], another["outside"]):
        for one, own in zip(outside, told["own"], strict=True):
            assert one["cached"] == own["cached"] == one["prompt_tokens"] // BLOCK * BLOCK
            assert one["kvstore"]["hits"] == {"dram": one["cached"]}
        assert answers(outside) == answers(told["own"])
    for counted in (told["counted"], another["counted"]):
        assert not counted.get("failed_loads")


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_what_is_stored_is_what_this_gpu_computes_anew(sidecar: Any, saved: Any, run: Any, codec: str) -> None:
    """The audit computes every hit all the same, and compares it with what is stored."""
    ask = asked(prompts(seed=42))
    steps = [
        ask,
        {"do": "settle"},
        {**ask, "reset_before_each": True},
        {"do": "report"},
        {"do": "counted", "as": "counted"},
    ]
    told = run(plan(sidecar.url, saved(**SHAPE), GRAPHS, steps, codec=codec, audit=1.0))
    print(codec, told["counted"])
    compared = {name: count for name, count in told["counted"].items() if name.startswith("audited_")}
    assert sum(compared.values()) == len(ask["prompts"]) and not compared.get("audited_drifted"), told["counted"]


def test_many_at_once_some_given_up_and_few_pages(sidecar: Any, saved: Any, run: Any) -> None:
    """Prompts come while others decode, loads are given up on the way, and pages are taken from those that run. All
    that was not given up is answered, and its tokens are all accounted for."""
    model, seeds = saved(**SHAPE), (43, 44, 45)
    churns = [
        {"do": "churn", "prompts": prompts(43, 24), "at_once": 12, "aborts": 0.01, "seed": seed, "max_tokens": 100}
        for seed in seeds
    ]
    steps: list[dict[str, Any]] = []
    for number, churn in enumerate(churns):
        steps += [{**churn, "as": str(number)}, *FORGET]
    steps.append({"do": "counted", "as": "counted"})
    few = {**GRAPHS, "num_gpu_blocks_override": 400, "max_num_seqs": 16}
    told = run(plan(sidecar.url, model, few, steps, codec="auto"))
    print(told["counted"])
    for number in range(len(seeds)):
        whole = [one for one in told[str(number)] if "aborted" not in one]
        assert len(whole) >= 8 and all(len(one["tokens"]) == 100 for one in whole)
        assert all(map(account_of, whole))
    assert told["counted"].get("hit_dram", 0) > 0 and not told["counted"].get("failed_loads")


def test_the_sidecar_is_killed_and_the_engine_goes_on(sidecar: Any, saved: Any, run: Any) -> None:
    """SIGKILL among requests that load: the engine answers all of them, and finds its prefixes again once the sidecar
    is back."""
    model, given = saved(**SHAPE), prompts(46, 24)
    ask = asked(given)
    churn = {"do": "churn", "prompts": given, "at_once": 8, "seed": 46, "max_tokens": TOLD}
    steps = [
        ask,
        {"do": "settle"},
        {**ask, "as": "own"},
        {"do": "reset"},
        {**churn, "kill": sidecar.said["pid"], "kill_at": 6, "as": "killed"},
        {"do": "settle", "seconds": 15},
        {**ask, "as": "after", "reset_before_each": True},
    ]
    told = run(plan(sidecar.url, model, GRAPHS, steps))
    assert all(len(one["tokens"]) == TOLD for one in told["killed"])
    assert answers(told["after"]) == answers(told["own"])
    assert all(one["kvstore"]["hits"].get("dram") for one in told["after"])
