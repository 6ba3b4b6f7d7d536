"""A load that a step waits for brings half of what was promised: nobody takes the other half for KV.

vLLM names a request's pages for others as soon as it has them, before the step that loads into them has run, and when
that load fails it leaves the names: the request computes those pages again. Whoever comes in between, or after the
request was given up, would read numbers that mean nothing.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

SEED = int(os.environ.get("ENGINE_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
PREFIX = 512


@pytest.mark.parametrize("arrives", ["with it", "after it"])
def test_nobody_shares_pages_that_a_failed_load_left_behind(arrives: str, pair: Any) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    prefix, first, second = ([rng.randrange(999) for _ in range(tokens)] for tokens in (PREFIX, 20, 20))
    ask = {"do": "generate", "prompts": [prefix + second], "max_tokens": 24}
    (alone,) = pair.alone([ask])
    _, _, _, _, shared, again = pair.with_store(
        [
            {"do": "become", "wrong": "HalvingConnector", "load": "sync"},
            {"do": "generate", "prompts": [prefix + first], "max_tokens": 1},
            {"do": "settle"},
            {"do": "reset"},
            {
                "do": "given_up",
                "prompt": prefix + first,
                "other": prefix + second,
                "together": arrives == "with it",
                "max_tokens": 24,
            },
            ask,
        ]
    )
    assert shared["tokens"] == alone[0]["tokens"]
    assert again[0]["tokens"] == alone[0]["tokens"]
