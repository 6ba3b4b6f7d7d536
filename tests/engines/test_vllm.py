"""The connector in a real vLLM, through a real sidecar: the tokens are those that the engine's own cache gives."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest

from engines import models
from engines.session import FORGET, SEED, account_of, prompts, tokens

COUNT = int(os.environ.get("ENGINE_PROMPTS", "20"))

DTYPES = {
    "bf16": dict(options=dict(dtype="bfloat16")),
    "fp32": dict(options=dict(dtype="float32")),
    "fp8": dict(options=dict(dtype="bfloat16", kv_cache_dtype="fp8")),
    "small pages": dict(options=dict(dtype="bfloat16", block_size=32)),
    "head_dim 80": dict(options=dict(dtype="float32"), shape=dict(hidden=320, heads=4, kv_heads=2)),
    "head_dim 64": dict(options=dict(dtype="bfloat16"), shape=dict(hidden=256, heads=4, kv_heads=2)),
    "async": dict(options=dict(dtype="bfloat16"), extra=dict(load="async")),
    "two processes": dict(options=dict(dtype="bfloat16"), multiprocessing=True),
    "two ranks": dict(options=dict(dtype="float32", tensor_parallel_size=2)),
    # What vLLM's CPU build passes from stage to stage has memory only where the model is compiled.
    "two stages": dict(options=dict(dtype="float32", pipeline_parallel_size=2, enforce_eager=False)),
    "windows": dict(options=dict(dtype="float32", block_size=32), model="windowed"),
    "nothing but windows": dict(options=dict(dtype="float32", block_size=32), model="mistral"),
}


def chosen(cases: dict[str, Any], *first: str) -> list[Any]:
    """All of them; those that are not named here are for the matrix of versions, which takes its time."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.slow) for name in cases]


@pytest.mark.parametrize("name", chosen(DTYPES, "bf16", "fp8", "windows"))
def test_an_external_hit_gives_the_tokens_of_the_engines_own(name: str, sidecar: Any, saved: Any, run: Any) -> None:
    print(f"seed {SEED}")
    case: dict[str, Any] = DTYPES[name]
    if case["options"].get("kv_cache_dtype") == "fp8" and not models.has_fp8():
        pytest.skip("this processor has neither AVX-512 nor AMX: vLLM keeps KV in fp8 on no other")
    ask = {"do": "generate", "prompts": {"count": COUNT, "seed": SEED}}
    # What is compared is asked one by one. Where pages leave a window, what is stored late is lost, so that is, too.
    together = 1 if "windows" in name else 8
    plan = {
        "model": saved(**case.get("shape", {}), kind=case.get("model", "llama")),
        "transfer": models.connector(sidecar.url, **case.get("extra", {})),
        "options": case["options"],
        "multiprocessing": case.get("multiprocessing", False),
        "steps": [
            {**ask, "at_once": together},
            {"do": "settle"},
            {**ask, "as": "own"},
            {**ask, "reset_before_each": True, "as": "outside"},
        ],
    }
    told = run(plan)
    if "windows" in name and not models.takes_windows():
        for one in told["outside"]:
            assert one["kvstore"]["misses"] == {"unsupported": one["prompt_tokens"]} and one["cached"] == 0
        return
    for own, external in zip(told["own"], told["outside"], strict=True):
        assert account_of(external)["hits"].get("dram", 0) == external["cached"], external
        assert external["cached"] == own["cached"] > 0, (own, external)
        assert own["tokens"] == external["tokens"]


# Many at once ---------------------------------------------------------------------------------------------------------

CROWDED = dict(
    dtype="float32",
    block_size=32,
    max_model_len=2048,
    max_num_batched_tokens=512,
    max_num_seqs=8,
    num_gpu_blocks_override=70,
    **models.ADMITS_BY_THE_CHUNK,
)
"""Chunked prefill, eight at once, and pages for some of them: the others are preempted."""

TOKENS = 48
CROWD = max(COUNT, 20)
"""Fewer would all have pages."""

CROWDS = {
    "as it is": {},
    "beside the steps": dict(extra=dict(load="async")),
    "in the steps": dict(extra=dict(load="sync")),
    "layer by layer": dict(extra=dict(load="layerwise")),
    "late": dict(wrong="late"),
    "late and in the steps": dict(wrong="late", extra=dict(load="sync")),
    "no cache of its own": dict(options=dict(enable_prefix_caching=False), extra=dict(without_prefix_caching=True)),
    "half of it": dict(wrong="half_of_it"),
    "half of it, in the steps": dict(wrong="half_of_it", extra=dict(load="sync")),
    "large pages": dict(options=dict(block_size=128, num_gpu_blocks_override=40)),
    "windows, half of it": dict(wrong="half_of_it", model="windowed", options=dict(num_gpu_blocks_override=None)),
    "nothing but windows, half of it": dict(
        wrong="half_of_it", model="mistral", options=dict(num_gpu_blocks_override=50)
    ),
    **{
        family: dict(model="windowed", shape=dict(family=family), options=dict(num_gpu_blocks_override=None))
        for family in ("gemma 4", "olmo", "gpt-oss")
    },
    "drafts of another width": dict(draft=dict(layers=2, hidden=128, heads=4, kv_heads=2)),
}


LEAD = 1e-4
"""Where two tokens are as likely but for less than this, rounding may decide: other chunks and batches add up in other
orders, which moves a logit by some millionths."""


def drawn(count: int, **more: Any) -> list[list[int]]:
    """So many prompts, and some in place of those whose answers nobody can foretell."""
    return prompts(count + count // 3, SEED, **more)


def clear(count: int, asked: list[list[int]], told: list[Any]) -> tuple[list[list[int]], list[Any]]:
    """The first so many prompts at each of whose answer's tokens one leads clearly, and what was told of these."""
    found = [(ids, one) for ids, one in zip(asked, told, strict=True) if one["lead"] >= LEAD][:count]
    assert len(found) == count, sorted(one["lead"] for one in told)
    return [ids for ids, _ in found], [one for _, one in found]


@pytest.fixture(scope="module")
def alone(saved: Any, run: Any, pair: Any) -> Any:
    """Prompts, and what a model answers to them without a connector."""
    asked = drawn(CROWD)
    ask = {"do": "generate", "prompts": asked, "at_once": 8, "max_tokens": TOKENS, "leads": True, "as": "alone"}

    @cache
    def answers(kind: str, **shape: Any) -> tuple[list[list[int]], list[Any]]:
        if kind == "llama":
            told = pair.alone([ask])
        else:
            told = run({"model": saved(kind=kind, **shape), "options": {"dtype": "float32"}, "steps": [ask]})
        return clear(CROWD, asked, told["alone"])

    return answers


@pytest.mark.parametrize("name", chosen(CROWDS, "as it is", "late", "half of it"))
def test_a_crowd_gets_the_tokens_of_an_engine_without_a_store(
    name: str, request: pytest.FixtureRequest, saved: Any, run: Any, alone: Any, pair: Any
) -> None:
    print(f"seed {SEED}")
    case: dict[str, Any] = CROWDS[name]
    kind = case.get("model", "llama")
    shape, options = case.get("shape", {}), {**CROWDED, **case.get("options", {})}
    if "draft" in case:
        options["speculative_config"] = dict(
            method="draft_model", model=saved(**case["draft"]), num_speculative_tokens=3
        )
    asked, answers = alone(kind, **shape)
    ask = {"do": "generate", "prompts": asked, "at_once": 8, "max_tokens": TOKENS}
    steps = [
        {"do": "become", "wrong": case.get("wrong")},
        {**ask, "as": "first"},
        *FORGET,
        {**ask, "as": "second"},
        {"do": "reset"},
        {**ask, "do": "churn", "aborts": 0.004, "seed": SEED, "as": "churned"},
        {"do": "metrics", "as": "metrics"},
    ]
    if set(case) <= {"wrong"}:  # these share an engine
        told = pair.with_store(steps, CROWDED)
    else:
        transfer = models.connector(request.getfixturevalue("sidecar").url, **case.get("extra", {})) | models.CHANGING
        told = run({"model": saved(kind=kind, **shape), "transfer": transfer, "options": options, "steps": steps})
    metrics = told.pop("metrics")
    for step, all_of_it in told.items():
        for number, (mine, theirs) in enumerate(zip(all_of_it, answers, strict=True)):
            assert mine.get("aborted") or mine["tokens"] == theirs["tokens"], (name, step, number, mine, theirs)
    if kind != "llama" and not models.takes_windows():
        return
    accounts = {step: [account_of(one) for one in told[step] if "kvstore" in one] for step in told}
    external = [sum(one["hits"].get("dram", 0) for one in accounts[step]) for step in ("second", "churned")]
    assert min(external) > 0, external
    print(f"{metrics['vllm:num_preemptions']:.0f} preempted, {external} tokens from the store")
    assert metrics["vllm:num_preemptions"] > 0 or kind != "llama", "with windows pages are free soon"


def test_other_numbers_give_other_tokens(pair: Any) -> None:
    """What is compared above would show it if the store's bytes were not those that are used."""
    ask = {"do": "generate", "prompts": {"count": COUNT, "seed": SEED}}
    wrong, settle = {"do": "become", "wrong": "reversed_numbers"}, {"do": "settle"}
    outside = {**ask, "reset_before_each": True, "as": "outside"}
    told = pair.with_store([wrong, ask, settle, {**ask, "as": "own"}, outside])
    both = zip(told["outside"], told["own"], strict=True)
    differ = [mine["tokens"] != theirs["tokens"] for mine, theirs in both if mine["cached"]]
    assert len(differ) > COUNT // 2 and all(differ), differ


# When the store fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_with_the_policy_fail_a_request_ends_with_an_error_or_is_right(
    load: str, sidecar: Any, saved: Any, run: Any
) -> None:
    print(f"seed {SEED}")
    ask = {"do": "generate", "prompts": {"count": COUNT, "seed": SEED}}
    transfer = models.connector(sidecar.url, load=load) | models.CHANGING | {"kv_load_failure_policy": "fail"}
    wrong, outside = {"do": "become", "wrong": "half_of_it"}, {**ask, "reset_before_each": True, "as": "outside"}
    steps = [wrong, {**ask, "as": "own"}, *FORGET, outside]
    told = run({"model": saved(), "transfer": transfer, "options": {"dtype": "float32"}, "steps": steps})
    ends = [one["finish"] for one in told["outside"]]
    assert "error" in ends and "length" in ends, ends
    for mine, theirs in zip(told["outside"], told["own"], strict=True):
        assert mine["finish"] == "error" or mine["tokens"] == theirs["tokens"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_sidecar_is_killed_under_a_hundred_requests(
    processes: int, sidecar: Any, saved: Any, run: Any, pair: Any
) -> None:
    """Also where the engine's core is a process of its own."""
    print(f"seed {SEED}")
    more = drawn(100, longest=500)
    options = {"dtype": "float32", "block_size": 32, "max_num_seqs": 100, "max_num_batched_tokens": 1024}
    ask = {"do": "generate", "prompts": more, "at_once": 100, "max_tokens": 24}
    asked, alone = clear(100, more, pair.alone([{**ask, "leads": True, "as": "alone"}])["alone"])
    ask["prompts"] = asked
    churn = {**ask, "do": "churn", "seed": SEED}
    told = run(
        {
            "model": saved(),
            "transfer": models.connector(sidecar.url),
            "options": options,
            "multiprocessing": processes > 1,
            "steps": [
                {**ask, "as": "first"},
                *FORGET,
                {**churn, "kill": sidecar.said["pid"], "kill_at": 10, "as": "killed"},
                {"do": "settle", "seconds": 3.0},
                {"do": "reset"},
                {**churn, "as": "after"},
            ],
        }
    )
    for answers in told.values():
        assert tokens(answers) == tokens(alone)
    assert sum(one["kvstore"]["hits"].get("dram", 0) for one in told["after"]) > 0
    assert sum(one["kvstore"]["misses"].get("unreachable", 0) for one in told["killed"]) > 0
