"""The connector in a real vLLM, through a real sidecar: the tokens are those that the engine's own cache gives."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines import models

COUNT = int(os.environ.get("ENGINE_PROMPTS", "20"))
SEED = int(os.environ.get("ENGINE_SEED", "0")) or random.SystemRandom().randrange(1 << 30)

DTYPES = {
    "bf16": dict(options=dict(dtype="bfloat16")),
    "fp32": dict(options=dict(dtype="float32")),
    "fp8": dict(options=dict(dtype="bfloat16", kv_cache_dtype="fp8")),
    "small pages": dict(options=dict(dtype="bfloat16", block_size=32)),
    "head_dim 80": dict(options=dict(dtype="float32"), shape=dict(hidden=320, heads=4, kv_heads=2)),
    "head_dim 64": dict(options=dict(dtype="bfloat16"), shape=dict(hidden=256, heads=4, kv_heads=2)),
    "async": dict(options=dict(dtype="bfloat16"), extra=dict(load="async")),
    "two processes": dict(options=dict(dtype="bfloat16"), multiprocessing=True),
}


@pytest.mark.parametrize("name", DTYPES)
def test_an_external_hit_gives_the_tokens_of_the_engines_own(name: str, sidecar: Any, saved: Any, run: Any) -> None:
    print(f"seed {SEED}")
    case: dict[str, Any] = DTYPES[name]
    asked = {"count": COUNT, "seed": SEED}
    extra = {"codec": "raw", **case.get("extra", {})}
    cold, again, outside = "cold", "again", "outside"
    plan = {
        "model": saved(**case.get("shape", {})),
        "transfer": models.connector(sidecar.url, **extra),
        "options": case["options"],
        "multiprocessing": case.get("multiprocessing", False),
        "steps": [
            {"do": "generate", "prompts": asked},
            {"do": "settle"},
            {"do": "generate", "prompts": asked},
            {"do": "generate", "prompts": asked, "reset_before_each": True},
        ],
    }
    steps = dict(zip([cold, "settled", again, outside], run(plan), strict=True))
    for own, external in zip(steps[again], steps[outside], strict=True):
        account = external["kvstore"]
        assert account["asked"] == external["prompt_tokens"]
        assert account["hits"].get("dram", 0) == external["cached"] == own["cached"] > 0, (own, external)
        assert sum(account["hits"].values()) + sum(account["misses"].values()) == account["asked"]
        assert own["tokens"] == external["tokens"]
