"""Weights that a client changes in place in a real vLLM: KV of other weights is neither served nor stored."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines import models
from engines.conftest import started
from engines.session import FORGET, tokens

PROMPTS = [random.Random(first).choices(range(900), k=300) for first in range(3)]
ASK = {"do": "generate", "prompts": PROMPTS, "max_tokens": 6}
OPEN = [{"do": "generate", "prompts": [[1, 2, 3]], "max_tokens": 2}, {"do": "settle", "seconds": 3.0}]
"""The namespace of after a reset is opened beside an engine's steps."""


@pytest.fixture(scope="module")
def told(saved: Any, run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One engine with a store whose weights become others; and one without a store for each of them."""
    one, other = saved("llama"), saved("llama", seed=1)
    options = {"max_model_len": 1024}
    answers = dict(run({"model": other, "options": options, "steps": [{**ASK, "as": "other"}]}))
    steps = [
        ASK,
        *FORGET,
        {**ASK, "as": "before"},
        {"do": "reload", "path": other},
        {"do": "reset"},  # of vLLM's own cache alone
        {**ASK, "as": "reloaded"},
        *FORGET,
        {**ASK, "as": "still off"},
        {"do": "reset", "connector": True},
        *OPEN,
        ASK,
        *FORGET,
        {**ASK, "as": "reset"},
        {"do": "reset", "connector": True},
        {"do": "reload", "path": other},
        *OPEN,
        ASK,
        *FORGET,
        {**ASK, "as": "reset before"},
    ]
    with started(tmp_path_factory.mktemp("weights").name) as sidecar:
        transfer = models.connector(sidecar.url)
        return answers | run({"model": one, "options": options, "transfer": transfer, "steps": steps})


@pytest.mark.parametrize("step", ["reloaded", "still off"])
def test_after_a_reload_nothing_is_served_or_stored_before_a_reset(told: dict[str, Any], step: str) -> None:
    assert {one["cached"] for one in told["before"]} == {256}
    assert tokens(told[step]) == tokens(told["other"]) != tokens(told["before"])
    assert {one["cached"] for one in told[step]} == {0}
    for one in told[step]:
        assert one["kvstore"]["misses"].get("disabled") and "reset_connector=True" in one["kvstore"]["detail"]


@pytest.mark.parametrize("step", ["reset", "reset before"])
def test_a_reset_opens_a_namespace_of_these_weights_alone(told: dict[str, Any], step: str) -> None:
    assert tokens(told[step]) == tokens(told["other"])
    assert {one["cached"] for one in told[step]} == {256}
