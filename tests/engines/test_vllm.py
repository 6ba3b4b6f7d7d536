"""The connector in a real vLLM, through a real sidecar: the tokens are those that the engine's own cache gives."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines import models
from engines.session import SEED, prompts

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
    asked = {"count": COUNT, "seed": SEED}
    extra = {"codec": "raw", **models.PATIENT, **case.get("extra", {})}
    cold, again, outside = "cold", "again", "outside"
    # What is compared is asked one by one. Where pages leave a window, what is stored late is lost, so that is, too.
    together = 1 if "windows" in name else 8
    plan = {
        "model": saved(**case.get("shape", {}), kind=case.get("model", "llama")),
        "transfer": models.connector(sidecar.url, **extra),
        "options": case["options"],
        "multiprocessing": case.get("multiprocessing", False),
        "steps": [
            {"do": "generate", "prompts": asked, "at_once": together},
            {"do": "settle"},
            {"do": "generate", "prompts": asked},
            {"do": "generate", "prompts": asked, "reset_before_each": True},
        ],
    }
    steps = dict(zip([cold, "settled", again, outside], run(plan), strict=True))
    if "windows" in name and not models.takes_windows():
        for one in steps[outside]:
            assert one["kvstore"]["misses"] == {"unsupported": one["prompt_tokens"]} and one["cached"] == 0
        return
    for own, external in zip(steps[again], steps[outside], strict=True):
        account = external["kvstore"]
        assert account["asked"] == external["prompt_tokens"]
        assert sum(account["hits"].values()) + sum(account["misses"].values()) == account["asked"]
        assert account["hits"].get("dram", 0) == external["cached"], external
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
    "late": dict(connector="SlowConnector"),
    "late and in the steps": dict(connector="SlowConnector", extra=dict(load="sync")),
    "no cache of its own": dict(options=dict(enable_prefix_caching=False), extra=dict(without_prefix_caching=True)),
    "half of it": dict(connector="FailingConnector"),
    "half of it, in the steps": dict(connector="FailingConnector", extra=dict(load="sync")),
    "large pages": dict(options=dict(block_size=128, num_gpu_blocks_override=40)),
    "windows, half of it": dict(
        connector="FailingConnector", model="windowed", options=dict(num_gpu_blocks_override=None)
    ),
    "nothing but windows, half of it": dict(
        connector="FailingConnector", model="mistral", options=dict(num_gpu_blocks_override=50)
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


def transfer(url: str, case: dict[str, Any]) -> dict[str, Any]:
    """The connector of a case."""
    made = models.connector(url, codec="raw", **models.PATIENT, **case.get("extra", {}))
    if "connector" in case:
        made |= {"kv_connector": case["connector"], "kv_connector_module_path": "engines.wrong_connectors"}
    return made


@pytest.fixture(scope="module")
def alone(saved: Any, run: Any, pair: Any) -> Any:
    """Prompts, and what a model answers to them without a connector."""
    asked = drawn(CROWD)
    steps = [{"do": "generate", "prompts": asked, "at_once": 8, "max_tokens": TOKENS, "leads": True}]

    @cache
    def answers(kind: str, **shape: Any) -> tuple[list[list[int]], list[Any]]:
        if kind == "llama":
            told = pair.alone(steps)[0]
        else:
            told = run({"model": saved(kind=kind, **shape), "options": {"dtype": "float32"}, "steps": steps})[0]
        return clear(CROWD, asked, told)

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
    steps = [
        {"do": "generate", "prompts": asked, "at_once": 8, "max_tokens": TOKENS},
        {"do": "settle"},
        {"do": "reset"},
        {"do": "generate", "prompts": asked, "at_once": 8, "max_tokens": TOKENS},
        {"do": "reset"},
        {"do": "churn", "prompts": asked, "at_once": 8, "max_tokens": TOKENS, "aborts": 0.004, "seed": SEED},
        {"do": "metrics"},
    ]
    if set(case) <= {"connector"}:  # these share an engine
        wrong = {"do": "become", "wrong": case.get("connector")}
        _, first, _, _, second, _, churned, metrics = pair.with_store([wrong, *steps], CROWDED)
    else:
        plan = {
            "model": saved(kind=kind, **shape),
            "transfer": transfer(request.getfixturevalue("sidecar").url, case),
            "options": options,
            "steps": steps,
        }
        first, _, _, second, _, churned, metrics = run(plan)
    for told in (first, second, churned):
        for number, (mine, theirs) in enumerate(zip(told, answers, strict=True)):
            assert mine.get("aborted") or mine["tokens"] == theirs["tokens"], (name, number, mine, theirs)
    if kind != "llama" and not models.takes_windows():
        return
    external = [
        sum(one["kvstore"]["hits"].get("dram", 0) for one in told if "kvstore" in one) for told in (second, churned)
    ]
    assert min(external) > 0, external
    print(f"{metrics['vllm:num_preemptions']:.0f} preempted, {external} tokens from the store")
    assert metrics["vllm:num_preemptions"] > 0 or kind != "llama", "with windows pages are free soon"
    for one in (*first, *second):
        account = one["kvstore"]
        assert sum(account["hits"].values()) + sum(account["misses"].values()) == account["asked"]


def test_other_numbers_give_other_tokens(pair: Any) -> None:
    """What is compared above would show it if the store's bytes were not those that are used."""
    asked = {"count": COUNT, "seed": SEED}
    _, _, _, own, outside = pair.with_store(
        [
            {"do": "become", "wrong": "ReversingConnector"},
            {"do": "generate", "prompts": asked},
            {"do": "settle"},
            {"do": "generate", "prompts": asked},
            {"do": "generate", "prompts": asked, "reset_before_each": True},
        ]
    )
    differ = [mine["tokens"] != theirs["tokens"] for mine, theirs in zip(outside, own, strict=True) if mine["cached"]]
    assert len(differ) > COUNT // 2 and all(differ), differ


# When the store fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_with_the_policy_fail_a_request_ends_with_an_error_or_is_right(
    load: str, sidecar: Any, saved: Any, run: Any
) -> None:
    print(f"seed {SEED}")
    asked = {"count": COUNT, "seed": SEED}
    own, _, _, outside = run(
        {
            "model": saved(),
            "transfer": transfer(sidecar.url, dict(connector="FailingConnector", extra=dict(load=load)))
            | {"kv_load_failure_policy": "fail"},
            "options": {"dtype": "float32"},
            "steps": [
                {"do": "generate", "prompts": asked},
                {"do": "settle"},
                {"do": "reset"},
                {"do": "generate", "prompts": asked, "reset_before_each": True},
            ],
        }
    )
    ends = [one["finish"] for one in outside]
    assert "error" in ends and "length" in ends, ends
    for mine, theirs in zip(outside, own, strict=True):
        assert mine["finish"] == "error" or mine["tokens"] == theirs["tokens"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_sidecar_is_killed_under_a_hundred_requests(
    processes: int, sidecar: Any, saved: Any, run: Any, pair: Any
) -> None:
    """Also where the engine's core is a process of its own."""
    print(f"seed {SEED}")
    more = drawn(100, longest=500)
    options = {"dtype": "float32", "block_size": 32, "max_num_seqs": 100, "max_num_batched_tokens": 1024}
    (told,) = pair.alone([{"do": "generate", "prompts": more, "at_once": 100, "max_tokens": 24, "leads": True}])
    asked, alone = clear(100, more, told)
    churn = {"do": "churn", "prompts": asked, "at_once": 100, "max_tokens": 24, "seed": SEED}
    first, _, _, killed, _, _, after = run(
        {
            "model": saved(),
            "transfer": transfer(sidecar.url, {}),
            "options": options,
            "multiprocessing": processes > 1,
            "steps": [
                {"do": "generate", "prompts": asked, "at_once": 100, "max_tokens": 24},
                {"do": "settle"},
                {"do": "reset"},
                {**churn, "kill": sidecar.said["pid"], "kill_at": 10},
                {"do": "settle", "seconds": 3.0},
                {"do": "reset"},
                churn,
            ],
        }
    )
    for told in (first, killed, after):
        assert [one["tokens"] for one in told] == [one["tokens"] for one in alone]
    found = [sum(one["kvstore"]["hits"].get("dram", 0) for one in told) for told in (killed, after)]
    assert found[1] > 0, found
    assert sum(one["kvstore"]["misses"].get("unreachable", 0) for one in killed) > 0
