"""A vLLM that prefills and another one that decodes: what a proxy does between them, and what one engine would say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engines import models
from engines.conftest import Nursery
from engines.session import SEED
from openai_api.small_openai import FOR_PREFILL

BLOCK = 128
AT_ONCE = 4
LEAD = 1e-4
"""Where two tokens are as likely but for less than this, rounding may decide (`test_vllm`)."""
OPTIONS: dict[str, Any] = dict(dtype="float32", max_model_len=4224, max_num_batched_tokens=512)
MOST_TOKENS = 6


class Engines:
    """Two that run at a time, each with a role of its own."""

    def __init__(self, model: str, urls: dict[str, str], scratch: Path, **settings: Any) -> None:
        """urls: of the sidecars, by role. settings: of the connectors, in place of patient ones."""
        self.urls = urls
        self.settings: dict[str, Any] = {"codec": "raw", **models.PATIENT, **settings}
        self.model = model
        self._runs: dict[str, Nursery] = {}
        self._scratch = scratch

    def ask(self, role: str, steps: list[dict[str, Any]]) -> list[Any]:
        """An engine of that role, step by step."""
        if role not in self._runs:
            scratch = self._scratch / role
            scratch.mkdir(exist_ok=True)
            self._runs[role] = Nursery(scratch)
        transfer = models.connector(self.urls[role], **self.settings) | {"kv_role": role}
        plan = {"model": self.model, "transfer": transfer, "options": OPTIONS, "kept": True, "steps": steps}
        return self._runs[role].run(plan)

    def prefill(self, prompts: list[list[int]], hints: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """What the first one tells of each."""
        step = {"do": "generate", "max_tokens": 1, "hints": hints or FOR_PREFILL, "at_once": AT_ONCE}
        (told,) = self.ask("kv_producer", [{**step, "prompts": prompts}])
        return list(told)

    def decode(self, prompts: list[list[int]], hints: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
        """What the second one answers to each, and what it answers where it computes all of it."""
        ask = {"do": "generate", "max_tokens": MOST_TOKENS, "leads": True}
        steps = [{**ask, "prompts": [ids], "hints": one} for ids, one in zip(prompts, hints, strict=True)]
        alone = {**ask, "prompts": prompts, "skip_reading": True, "hints": {"kvstore": {"store": False}}}
        *told, truth = self.ask("kv_consumer", [*steps, alone])
        return [(one[0], right) for one, right in zip(told, truth, strict=True)]

    def end(self, role: str = "") -> None:
        """Kill it, or all."""
        for name in [role] if role else list(self._runs):
            self._runs.pop(name).end()


def killed(engines: Engines, ids: list[int]) -> None:
    """A prefill of which nothing is told."""
    try:
        engines.prefill([ids])
    except (AssertionError, AttributeError, OSError, ValueError, KeyError):
        pass


def drawn(count: int, *, shortest: int = 200, longest: int = 2000, salt: int = 0) -> list[list[int]]:
    print(f"seed {SEED}")
    draw = random.Random(SEED + salt)
    return [[draw.randrange(999) for _ in range(draw.randrange(shortest, longest))] for _ in range(count)]


def full(tokens: int, block: int = BLOCK) -> int:
    return (tokens - 1) // block * block


def is_right(told: dict[str, Any], truth: dict[str, Any]) -> bool:
    """Whether the tokens are the same, as far as one leads clearly."""
    return told["tokens"] == truth["tokens"] or truth["lead"] < LEAD
