"""The engines behind the proxy: which of them are up, and which one decodes a prompt.

Health is polled, and an engine that a request cannot reach counts as down at once. Decode goes to the engine whose
sidecar knows most of the prompt, if its `POST /query` answers in time; among equals to the one with the fewest
requests, round robin. The sidecar's answer is a hint: if it is wrong or late, a prefix is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from kvstore.openai.api import Body, prompt_tokens
from kvstore.openai.client import JSON_HEADERS, EngineClient, EngineFault

HEALTH_SECONDS = 2.0
"""Interval and timeout of health polls."""
SCORE_SECONDS = 0.5
"""Time for tokenizing a prompt and asking sidecars about it; prefill runs meanwhile."""
MOST_SCORED_BYTES = 2 << 20
"""Larger bodies are not looked up; also bounds the answer."""
Say = Callable[[str], None]
_OF_CHATS = "model messages tools chat_template add_generation_prompt continue_final_message".split()
_OF_PROMPTS = "model prompt add_special_tokens".split()


class ProxiedEngine:
    """score: address of the sidecar beside it, None if that is not asked."""

    def __init__(self, name: str, url: str, score: str | None, say: Say) -> None:
        self.name = name
        self.client = EngineClient(url, name)
        self.scorer = EngineClient(score, f"the score of {name}") if score is not None else None
        self.is_up = True
        self.under_way = 0
        self.served = 0
        self.failed = 0
        self._say = say

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Count a request as in flight while the context is open."""
        self.under_way += 1
        self.served += 1
        try:
            yield
        finally:
            self.under_way -= 1

    def unreached(self, fault: EngineFault) -> None:
        """Record a failed request. If the engine could not be reached, it counts as down."""
        self.failed += 1
        if not fault.has_begun:
            self._now(False, str(fault))

    async def look(self) -> None:
        try:
            answer = await self.client.ask("GET", "/health", seconds=HEALTH_SECONDS, most_bytes=1 << 16)
        except EngineFault as fault:
            self._now(False, str(fault))
        else:
            self._now(answer.status == 200, f"its health is {answer.status}")

    def _now(self, is_up: bool, why: str) -> None:
        if is_up != self.is_up:
            self._say(f"{self.name} is up" if is_up else f"{self.name} is down: {why}")
        self.is_up = is_up

    def told(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "up": self.is_up,
            "under_way": self.under_way,
            "served": self.served,
            "failed": self.failed,
        }

    async def close(self) -> None:
        await self.client.close()
        if self.scorer is not None:
            await self.scorer.close()


class Fleet:
    """One prefill engine and the decode engines. For one event loop."""

    def __init__(
        self, prefill: ProxiedEngine, decodes: list[ProxiedEngine], score_token: str, score_model: str
    ) -> None:
        """score_token: of the tenant whose blocks are looked up. score_model: the sidecars' name of the model, if
        requests use another. Both may be empty."""
        self.prefill, self.decodes = prefill, decodes
        self._score_model = score_model
        self._score_headers = {**JSON_HEADERS, **({"authorization": f"Bearer {score_token}"} if score_token else {})}
        self._turn = 0

    async def watch(self) -> None:
        while True:
            await asyncio.gather(*(one.look() for one in (self.prefill, *self.decodes)))
            await asyncio.sleep(HEALTH_SECONDS)

    async def order(self, path: str, body: Body, content: bytes, headers: Mapping[str, str]) -> list[ProxiedEngine]:
        """Decode engines in the order to try them; those that are down come last."""
        known: dict[str, int] = {}
        if len(self.decodes) > 1 and any(one.scorer for one in self.decodes) and len(content) <= MOST_SCORED_BYTES:
            try:
                async with asyncio.timeout(SCORE_SECONDS):
                    known = await self._known(path, body, content, headers)
            except (TimeoutError, EngineFault, msgspec.DecodeError, RecursionError):
                pass  # without the hint, order by load
        self._turn += 1
        turn = self._turn % len(self.decodes)
        in_turn = self.decodes[turn:] + self.decodes[:turn]
        return sorted(in_turn, key=lambda one: (not one.is_up, -known.get(one.name, 0), one.under_way))

    async def _known(self, path: str, body: Body, content: bytes, headers: Mapping[str, str]) -> dict[str, int]:
        tokens = prompt_tokens(content)
        if tokens is None:
            tokens = await self._tokens(path, body, headers)
        asked = msgspec.json.encode(
            {
                "model": self._score_model or body.get("model", ""),
                "token_ids": tokens,
                **{name: body[name] for name in ("cache_salt",) if name in body},
            }
        )
        scored = [one for one in self.decodes if one.scorer is not None and one.is_up]
        found = await asyncio.gather(*(_score(one, asked, self._score_headers) for one in scored))
        return {one.name: tokens for one, tokens in zip(scored, found, strict=True)}

    async def _tokens(self, path: str, body: Body, headers: Mapping[str, str]) -> list[int]:
        names = _OF_CHATS if path.endswith("/chat/completions") else _OF_PROMPTS
        asked = msgspec.json.encode({name: body[name] for name in names if name in body})
        engine = next((one for one in self.decodes if one.is_up), self.decodes[0])
        answer = await engine.client.ask(
            "POST", "/tokenize", asked, headers, seconds=SCORE_SECONDS, most_bytes=4 * MOST_SCORED_BYTES
        )
        return msgspec.json.decode(answer.body, type=_Tokens).tokens


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Matched(msgspec.Struct):
    """is_asked: it is of the node that was asked, and not of another one of its pool."""

    longest_matched: int = 0
    is_asked: bool = True


async def _score(engine: ProxiedEngine, asked: bytes, headers: Mapping[str, str]) -> int:
    assert engine.scorer is not None
    try:
        answer = await engine.scorer.ask(
            "POST", "/query", asked, headers, seconds=SCORE_SECONDS, most_bytes=MOST_SCORED_BYTES
        )
        tenants = msgspec.json.decode(answer.body, type=dict[str, dict[str, _Matched]])
    except (EngineFault, msgspec.DecodeError, RecursionError):
        return 0
    matched = [one for instances in tenants.values() for one in instances.values() if one.is_asked]
    return max((one.longest_matched for one in matched), default=0)
