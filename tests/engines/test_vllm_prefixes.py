"""What a sidecar tells of the prefixes that a real vLLM asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines import models
from engines.session import named
from kvstore.cli import ask
from kvstore.node import SystemClock
from waiting import wait_until

TOKENS, PLACE = 1500, 200
STEM = [(7 * one) % 899 for one in range(TOKENS)]


def timed(number: int) -> list[int]:
    """The same but for three tokens."""
    return [*STEM[:PLACE], *(900 + 3 * number + one for one in range(3)), *STEM[PLACE + 3 :]]


def test_what_is_hot_is_told(
    saved: Callable[..., str], run: Callable[[dict[str, Any]], list[Any]], sidecar: Any
) -> None:
    wait = [{"do": "settle"}, {"do": "generate", "prompts": [[1, 2, 3]]}]
    steps = [
        *({"do": "generate", "prompts": [timed(number)], "as": f"timed {number}"} for number in range(6)),
        *({"do": "generate", "prompts": [timed(0)], "salt": f"{number}"} for number in range(6)),
        *wait,
        {"do": "reset"},
        {"do": "generate", "prompts": [timed(0), [*timed(0)[:1400], 5, 6, 7], timed(0)[:1300]], "as": "again"},
        *wait,
    ]
    transfer = models.connector(sidecar.url, codec="raw", **models.PATIENT)
    options = {"dtype": "float32", "max_model_len": 2048}
    told = named(steps, run({"model": saved(), "transfer": transfer, "options": options, "steps": steps}))
    assert all(told[f"timed {number}"][0]["kvstore"]["misses"] for number in range(6))
    admin, clock = f"{sidecar.directory}/admin.sock", SystemClock()
    wait_until(lambda: any(one.saved_tokens_per_hour > 0 for one in ask.prefixes(admin, clock, "").hottest))
