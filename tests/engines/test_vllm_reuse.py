"""An engine that does not reuse a prefix itself: nothing that is stored reaches its answers, unless it is told to.

With latent attention (MLA) on CPUs vLLM 0.32 switches its prefix caching off: where a prompt has another length, KV of
the same tokens is another one there, and hits change answers. Told to cache all the same, the audit finds that out
before anything is loaded.
"""

from __future__ import annotations

from typing import Any

import pytest

from engines import models
from engines.session import FORGET, tokens

PROMPTS = {"count": 8, "seed": 5}
"""Not drawn anew: which hits come first decides what is compared."""
ASK = {"do": "generate", "prompts": PROMPTS}
OPTIONS = {"dtype": "float32"}


@pytest.fixture(scope="module")
def alone(saved: Any, run: Any) -> list[list[int]]:
    told = run({"model": saved("deepseek"), "options": OPTIONS, "steps": [{**ASK, "as": "alone"}]})
    return tokens(told["alone"])


def asked(sidecar: Any, model: str, run: Any, options: dict[str, Any] = OPTIONS, **extra: Any) -> dict[str, Any]:
    """The prompts, and the prompts again after the engine has forgotten them."""
    transfer = models.connector(sidecar.url, codec="auto", **extra)
    steps = [{**ASK, "as": "first"}, *FORGET, {**ASK, "as": "again"}, {"do": "report"}]
    steps.append({"do": "counted", "as": "counted"})
    return dict(run({"model": model, "transfer": transfer, "options": options, "steps": steps}))


def check_unused(told: dict[str, Any]) -> None:
    for one in told["first"] + told["again"]:
        assert one["cached"] == 0 and one["kvstore"]["saved_blocks"] == 0
        assert one["kvstore"]["misses"] == {"unsupported": one["prompt_tokens"]}
        assert "prefix caching is off" in one["kvstore"]["detail"]


def test_where_the_engine_does_not_reuse_a_prefix_the_store_does_not(
    sidecar: Any, saved: Any, run: Any, alone: list[list[int]]
) -> None:
    told = asked(sidecar, saved("deepseek"), run)
    check_unused(told)
    assert tokens(told["first"]) == tokens(told["again"]) == alone


@pytest.mark.parametrize("audit", [1.0, 0.001])
def test_told_to_cache_all_the_same_the_audit_finds_it_before_anything_is_loaded(
    sidecar: Any, saved: Any, run: Any, alone: list[list[int]], audit: float
) -> None:
    """Its pages are bytes to the store: these are compared too. Without the audit these are other answers."""
    told = asked(sidecar, saved("deepseek"), run, without_prefix_caching=True, audit=audit)
    assert tokens(told["first"]) == tokens(told["again"]) == alone
    for one in told["first"] + told["again"]:
        assert one["cached"] == 0 and one["kvstore"]["hits"] == {}
    assert told["counted"]["audited_drifted"] >= 1
    assert "is not what this engine computes" in told["again"][-1]["kvstore"]["detail"]


@pytest.mark.slow
def test_without_the_audit_its_answers_would_be_others(
    sidecar: Any, saved: Any, run: Any, alone: list[list[int]]
) -> None:
    """That what is refused above would have done harm."""
    told = asked(sidecar, saved("deepseek"), run, without_prefix_caching=True)
    changed = [one for one, right in zip(told["again"], alone, strict=True) if one["tokens"] != right]
    assert changed and all(one["kvstore"]["hits"] for one in changed)


def test_a_user_who_switches_prefix_caching_off_is_asked(sidecar: Any, saved: Any, run: Any) -> None:
    check_unused(asked(sidecar, saved(), run, {**OPTIONS, "enable_prefix_caching": False}))
