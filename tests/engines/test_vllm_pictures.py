"""Pictures in a real vLLM: what a client calls them says nothing of what they show."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines import models
from engines.conftest import started
from engines.session import FORGET, SEED, tokens

pytestmark = pytest.mark.slow

PROMPTS = [[first, *random.Random(SEED + first).choices(range(900), k=150)] for first in range(40)]
ONE, OTHER, THIRD = 1, 2, 3
"""Whose pictures: each has one of each prompt's."""
ASK = {"do": "generate", "prompts": PROMPTS, "max_tokens": 4}


@pytest.fixture(scope="module")
def told(saved: Any, run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engines with one sidecar, one after the other; and one without."""
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
        answers = dict(run({**engine, "steps": truth}))
        engine["transfer"] = models.connector(sidecar.url)
        for steps, more in ((first, {}), (second, {}), (third, {"options": options}), (fourth, {})):
            answers |= run({**engine, **more, "steps": steps})
    return answers


def test_pictures_matter(told: dict[str, Any]) -> None:
    """Else the other tests would say nothing."""
    one, other = tokens(told["truth 1"]), tokens(told["truth 2"])
    assert sum(a != b for a, b in zip(one, other, strict=True)) > len(PROMPTS) * 3 / 4


@pytest.mark.parametrize(
    ("step", "whose", "cached"),
    [
        ("again", ONE, 128),
        ("restarted", OTHER, 0),  # what is stored under these names is the first ones'
        ("restarted again", OTHER, 128),
        ("nameless", ONE, 128),
        ("never seen", THIRD, 0),
    ],
)
def test_a_picture_is_found_by_what_it_shows_and_by_nothing_else(
    told: dict[str, Any], step: str, whose: int, cached: int
) -> None:
    """With a name and without one, also where it was stored under a name."""
    assert tokens(told[step]) == tokens(told[f"truth {whose}"])
    assert {one["cached"] for one in told[step]} == {cached}


def test_what_an_engine_computed_under_a_name_of_two_pictures_is_not_stored(told: dict[str, Any]) -> None:
    """Its own caches go by the name: what it computes for the second picture is the first one's."""
    for one in told["two under one name"]:
        assert one["kvstore"]["misses"].get("unsupported") and "same name" in one["kvstore"]["detail"]
    assert tokens(told["after two under one name"]) == tokens(told["truth 1"])
