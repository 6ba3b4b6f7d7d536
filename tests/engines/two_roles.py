"""A vLLM that prefills and another one that decodes: what a proxy does between them, and what one engine would say."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engines import models
from engines.conftest import Nursery
from engines.session import SEED, account_of
from openai_api.small_openai import FOR_PREFILL
from waiting import wait_until

BLOCK = 128
AT_ONCE = 4
PREFILL, DECODE = "kv_producer", "kv_consumer"
LONGEST_SECONDS = 180.0
LEAD = 1e-4
"""Where two tokens are as likely but for less than this, rounding may decide (`test_vllm`)."""
OPTIONS: dict[str, Any] = dict(dtype="float32", max_model_len=4224, max_num_batched_tokens=512)
MOST_TOKENS = 6


class Engines:
    """Two that run at a time, each with a role of its own."""

    def __init__(self, model: str, urls: dict[str, str], scratch: Path, **settings: Any) -> None:
        """urls: of the sidecars, by role. settings: of the connectors, in place of patient ones."""
        self.urls = urls
        self.settings = settings
        self.model = model
        self._runs: dict[str, Nursery] = {}
        self._scratch = scratch

    def ask(self, role: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """An engine of that role; what the steps that have names told."""
        if role not in self._runs:
            scratch = self._scratch / role
            scratch.mkdir(exist_ok=True)
            self._runs[role] = Nursery(scratch)
        transfer = models.connector(self.urls[role], **self.settings) | {"kv_role": role}
        plan = {"model": self.model, "transfer": transfer, "options": OPTIONS, "kept": True, "steps": steps}
        return self._runs[role].run(plan)

    def prefill(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """What the first one tells of each."""
        step = {"do": "generate", "max_tokens": 1, "hints": FOR_PREFILL, "at_once": AT_ONCE}
        return list(self.ask(PREFILL, [{**step, "prompts": prompts, "as": "told"}])["told"])

    def prefill_fails(self, ids: list[int]) -> threading.Thread:
        """Begin a prefill that somebody will end: nothing is told of it."""

        def prefill() -> None:
            with suppress(AssertionError, AttributeError, OSError, ValueError, KeyError):
                self.prefill([ids])

        thread = threading.Thread(target=prefill)
        thread.start()
        return thread

    def decode(self, prompts: list[list[int]], hints: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The second one's accounts. Its tokens are those of an engine that computes all of it, as far as one leads
        clearly."""
        ask = {"do": "generate", "max_tokens": MOST_TOKENS, "leads": True}
        each = zip(prompts, hints, strict=True)
        steps = [{**ask, "prompts": [ids], "hints": one, "as": f"{at}"} for at, (ids, one) in enumerate(each)]
        alone = {**ask, "prompts": prompts, "skip_reading": True, "hints": {"kvstore": {"store": False}}}
        told = self.ask(DECODE, [*steps, {**alone, "as": "alone"}])
        answers = [told[f"{at}"][0] for at in range(len(prompts))]
        for one, truth in zip(answers, told["alone"], strict=True):
            assert one["tokens"] == truth["tokens"] or truth["lead"] < LEAD, (one, truth)
            assert truth["cached"] == 0
        return [account_of(one) for one in answers]

    @contextmanager
    def decoding(self, ids: list[int], hint: dict[str, Any], parked: Callable[[], int]) -> Iterator[dict[str, Any]]:
        """Once it waits for somebody who stores. The account is there afterwards. parked: how many a sidecar lets
        wait."""
        account: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: account.update(self.decode([ids], [{"kvstore": hint}])[0]))
        thread.start()
        try:
            wait_until(lambda: parked() == 1)
            yield account
        finally:
            thread.join(LONGEST_SECONDS)
        assert account and not thread.is_alive(), "it hangs"

    def end(self, role: str = "") -> None:
        """Kill it, or all."""
        for name in [role] if role else list(self._runs):
            self._runs.pop(name).end()


def drawn(count: int, *, shortest: int = 200, longest: int = 2000, salt: int = 0) -> list[list[int]]:
    print(f"seed {SEED}")
    draw = random.Random(SEED + salt)
    return [[draw.randrange(999) for _ in range(draw.randrange(shortest, longest))] for _ in range(count)]


def full(tokens: int, block: int = BLOCK) -> int:
    return (tokens - 1) // block * block
