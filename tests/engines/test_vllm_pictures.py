"""Pictures in a real vLLM: what a client calls them says nothing of what they show."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines import models
from engines.session import SEED, named, tokens

pytestmark = pytest.mark.slow

PROMPTS = [[first, *random.Random(SEED + first).choices(range(900), k=150)] for first in range(40)]
ONE, OTHER, THIRD = 1, 2, 3
"""Whose pictures: each has one of each prompt's."""
ASK = {"do": "generate", "prompts": PROMPTS, "max_tokens": 4}
FORGET = [{"do": "settle"}, {"do": "reset"}]


@pytest.fixture(scope="module")
def told(saved: Any, run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engines with one sidecar, one after the other; and one without."""
    from engines.conftest import started

    print(f"seed {SEED}")
    engine = {"model": saved("blip"), "options": {"max_model_len": 1024, "limit_mm_per_prompt": {"image": 1}}}
    truth = [{**ASK, "pictures": whose, "as": f"truth {whose}"} for whose in (ONE, OTHER, THIRD)]
    first = [{**ASK, "pictures": ONE, "named": True}, *FORGET, {**ASK, "pictures": ONE, "named": True, "as": "again"}]
    second = [
        {**ASK, "pictures": OTHER, "named": True, "as": "restarted"},
        *FORGET,
        {**ASK, "pictures": OTHER, "named": True, "as": "restarted again"},
        *FORGET,
        {**ASK, "pictures": ONE, "as": "nameless"},
        {**ASK, "pictures": THIRD, "as": "never seen"},
    ]
    # Without a cache of processed pictures the engine gets other bytes under a name that its own caches know.
    options = {**engine["options"], "mm_processor_cache_gb": 0}
    third = [
        {**ASK, "pictures": THIRD, "named": True},
        {**ASK, "pictures": ONE, "named": True, "as": "two under one name"},
        *FORGET,
    ]
    fourth = [{**ASK, "pictures": ONE, "as": "after two under one name"}]
    with started(tmp_path_factory.mktemp("pictures").name) as sidecar:
        transfer = models.connector(sidecar.url, codec="raw", **models.PATIENT)
        plans = [(truth, {}), (first, {}), (second, {}), (third, {"options": options}), (fourth, {})]
        answers: dict[str, Any] = {}
        for steps, more in plans:
            plan = {**engine, **more, "steps": steps, **({"transfer": transfer} if steps is not truth else {})}
            answers |= named(steps, run(plan))
    return answers


def test_pictures_matter(told: dict[str, Any]) -> None:
    """Else the other tests would say nothing."""
    one, other = tokens(told["truth 1"]), tokens(told["truth 2"])
    assert sum(a != b for a, b in zip(one, other, strict=True)) > len(PROMPTS) * 3 / 4


def test_two_pictures_under_one_name_are_told_apart_after_a_restart(told: dict[str, Any]) -> None:
    assert tokens(told["restarted"]) == tokens(told["truth 2"])
    assert {one["cached"] for one in told["restarted"]} == {0}


@pytest.mark.parametrize(("step", "whose"), [("again", ONE), ("restarted again", OTHER), ("nameless", ONE)])
def test_a_picture_is_found_by_what_it_shows(told: dict[str, Any], step: str, whose: int) -> None:
    """With a name and without one, also where it was stored under a name."""
    assert tokens(told[step]) == tokens(told[f"truth {whose}"])
    assert {one["cached"] for one in told[step]} == {128}


def test_a_picture_that_was_never_seen_is_a_miss(told: dict[str, Any]) -> None:
    assert tokens(told["never seen"]) == tokens(told["truth 3"])
    assert {one["cached"] for one in told["never seen"]} == {0}


def test_what_an_engine_computed_under_a_name_of_two_pictures_is_not_stored(told: dict[str, Any]) -> None:
    """Its own caches go by the name: what it computes for the second picture is the first one's."""
    for one in told["two under one name"]:
        assert one["kvstore"]["misses"].get("unsupported") and "same name" in one["kvstore"]["detail"]
    assert tokens(told["after two under one name"]) == tokens(told["truth 1"])
