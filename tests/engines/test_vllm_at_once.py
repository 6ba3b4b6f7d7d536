"""Two vLLMs that save prompts with common heads at the same moments: both tails are found afterwards."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines import models
from engines.session import named

pytestmark = pytest.mark.slow
COUNT = int(os.environ.get("ENGINE_PROMPTS", "100"))
SEED = int(os.environ.get("ENGINE_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
BLOCK, HEAD, TAIL = 64, 12, 4


def test_two_engines_that_save_one_head_at_once_find_every_tail(
    sidecar: Any, saved: Any, nursery: Any, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    heads = [[rng.randrange(999) for _ in range(BLOCK * HEAD)] for _ in range(COUNT)]
    tails = [[[rng.randrange(999) for _ in range(BLOCK * TAIL + 1)] for _ in heads] for _ in range(2)]
    asked = [[head + tail for head, tail in zip(heads, each, strict=True)] for each in tails]
    transfer, model = models.connector(sidecar.url, codec="raw", **models.PATIENT), saved()

    def plan(which: int) -> dict[str, Any]:
        here, there = (tmp_path / f"{side}" for side in (which, 1 - which))
        meet = f"touch {here}; for i in $(seq 3000); do [ -e {there} ] && exit 0; sleep 0.1; done; exit 1"
        return {
            "model": model,
            "transfer": transfer,
            "alone": True,
            "options": {"dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 2048},
            "steps": [
                {"do": "generate", "prompts": [[1, 2, 3]]},
                {"do": "run", "command": meet, "as": "met"},
                {"do": "generate", "prompts": asked[which]},
                {"do": "settle"},
                {"do": "generate", "prompts": asked[which], "as": "again", "reset_before_each": True},
            ],
        }

    with ThreadPoolExecutor(2) as pool:
        outcomes = [*pool.map(lambda which: named(plan(which)["steps"], nursery.run(plan(which))), range(2))]
    for told in outcomes:
        assert told["met"] == 0
        assert [one["kvstore"]["hits"] for one in told["again"]] == [{"dram": BLOCK * (HEAD + TAIL)}] * COUNT
