"""Speculative decoding in a real vLLM: hits give the same tokens, and no KV of a draft that was turned down is stored.

Whatever of a draft had been stored would be found when a conversation goes on: its prompt is then the old prompt and
all that was generated.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines import models
from engines.session import SEED, named

BLOCK = 64
DRAFTED = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)


def long(count: int) -> list[list[int]]:
    """Prompts in which every second word was seen before: drafts are what followed a word there, and mostly wrong."""
    rng = random.Random(SEED)
    return [[rng.randrange(999) for _ in range(rng.randrange(400, 900))] for _ in range(count)]


PROMPTS = long(8)


@pytest.mark.slow
def test_a_conversation_goes_on_from_what_was_stored_of_it_with_drafts(sidecar: Any, saved: Any, run: Any) -> None:
    print(f"seed {SEED}")
    options = {"dtype": "float32", "block_size": 32}
    begin = {"do": "generate", "prompts": PROMPTS, "max_tokens": 100, "as": "begun"}
    go_on = {"do": "generate", "prompts": "begun", "max_tokens": 24}
    wait = [{"do": "settle"}, {"do": "reset"}]
    plan = {
        "model": saved(),
        "transfer": models.connector(sidecar.url, codec="raw", **models.PATIENT),
        "options": {**options, "speculative_config": DRAFTED},
        "steps": [
            begin,
            *wait,
            {**go_on, "as": "gone_on"},
            *wait,
            {**begin, "as": "again"},
            {"do": "reset"},
            {**go_on, "as": "gone_on_again"},
            {**go_on, "as": "own"},
            {"do": "metrics", "as": "metrics"},
        ],
    }
    told = named(plan["steps"], run(plan))
    plan = {"model": saved(), "options": options, "steps": [begin, {**go_on, "as": "gone_on"}]}
    alone = named(plan["steps"], run(plan))

    for name, reference in (
        ("begun", "begun"),
        ("again", "begun"),
        ("gone_on", "gone_on"),
        ("gone_on_again", "gone_on"),
        ("own", "gone_on"),
    ):
        assert [one["tokens"] for one in told[name]] == [one["tokens"] for one in alone[reference]], name
    for prompt, gone_on, again, further in zip(
        PROMPTS, told["gone_on"], told["again"], told["gone_on_again"], strict=True
    ):
        # Of a request with drafts its prompt is stored, and of the one that goes on all that was generated before.
        assert gone_on["kvstore"]["hits"] == {"dram": len(prompt) // BLOCK * BLOCK}
        assert again["kvstore"]["hits"] == {"dram": (len(prompt) - 1) // BLOCK * BLOCK}
        assert further["kvstore"]["hits"] == {"dram": (len(prompt) + 100 - 1) // BLOCK * BLOCK}
    metrics = told["metrics"]
    drafted, accepted = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert drafted - accepted > 100, "nothing was turned down, and nothing of it could have been stored"
