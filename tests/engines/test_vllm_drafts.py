"""Speculative decoding in a real vLLM: hits give the same tokens, and no KV of a draft that was turned down is stored.

Whatever of a draft had been stored would be found when a conversation goes on: its prompt is then the old prompt and
all that was generated.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines import models
from engines.session import FORGET, SEED, tokens

BLOCK = 64
DRAFTED = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)


@pytest.mark.slow
def test_a_conversation_goes_on_from_what_was_stored_of_it_with_drafts(sidecar: Any, saved: Any, run: Any) -> None:
    print(f"seed {SEED}")
    # Every second word was seen before: drafts are what followed a word there, and mostly wrong.
    rng = random.Random(SEED)
    prompts = [[rng.randrange(999) for _ in range(rng.randrange(400, 900))] for _ in range(8)]
    options = {"dtype": "float32", "block_size": 32}
    begin = {"do": "generate", "prompts": prompts, "max_tokens": 100, "as": "begun"}
    go_on = {"do": "generate", "prompts": "begun", "max_tokens": 24, "as": "gone on"}
    plan = {
        "model": saved(),
        "transfer": models.connector(sidecar.url),
        "options": {**options, "speculative_config": DRAFTED},
        "steps": [
            begin,
            *FORGET,
            go_on,
            *FORGET,
            {**begin, "as": "begun again"},
            {"do": "reset"},
            {**go_on, "as": "gone on again"},
            {**go_on, "as": "gone on, its own"},
            {"do": "metrics", "as": "metrics"},
        ],
    }
    told = run(plan)
    alone = run({"model": saved(), "options": options, "steps": [begin, go_on]})
    metrics = told.pop("metrics")
    for name, answers in told.items():
        assert tokens(answers) == tokens(alone["begun" if "begun" in name else "gone on"]), name
    for prompt, gone_on, again, further in zip(
        prompts, told["gone on"], told["begun again"], told["gone on again"], strict=True
    ):
        # Of a request with drafts its prompt is stored, and of the one that goes on all that was generated before.
        assert gone_on["kvstore"]["hits"] == {"dram": len(prompt) // BLOCK * BLOCK}
        assert again["kvstore"]["hits"] == {"dram": (len(prompt) - 1) // BLOCK * BLOCK}
        assert further["kvstore"]["hits"] == {"dram": (len(prompt) + 100 - 1) // BLOCK * BLOCK}
    drafted, accepted = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert drafted - accepted > 100, "nothing was turned down, and nothing of it could have been stored"
