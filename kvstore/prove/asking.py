"""Asks an engine for completions of token ids, by OpenAI's API, and reads what it says of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import msgspec

from kvstore.block.errors import BadInput
from kvstore.openai.client import JSON_HEADERS, EngineAnswer, EngineClient, EngineFault, model_of, page_of, samples_of
from kvstore.prove.questions import Answer, Question, drawn_tokens, text_of

ANSWER_TOKENS = 8
REQUEST_SECONDS, HEALTH_SECONDS = 600.0, 5.0
RESET = "/reset_prefix_cache"
"""vLLM's route, where VLLM_SERVER_DEV_MODE=1 is set."""
RESETS = {"sglang": "/flush_cache"}
RESET_SECONDS, RESET_POLL_SECONDS = 30.0, 0.1
MOST_AT_ONCE = 64
MOST_TIERS, MOST_TIER_CHARACTERS = 8, 20
LEAST_DISTINCT = 32
"""Token ids in a text; fewer come of a tokenizer that does not know its words."""
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


class AskedEngine:
    """The engine at one address. model: what it calls its model. longest: tokens of prompt and answer. reset: the route
    that empties its own cache. An async context manager."""

    def __init__(self, url: str, headers: dict[str, str] | None = None, reset: str = RESET) -> None:
        self.url, self.reset = url, reset
        self._client = EngineClient(url)
        self._headers = {**JSON_HEADERS, **(headers or {})}
        self.model, self.longest = "", 0

    async def __aenter__(self) -> AskedEngine:
        try:
            told = await model_of(self._client, self._headers, None)
        except BaseException:
            await self._client.close()
            raise
        self.model, self.longest = told.id, told.max_model_len or 1 << 30
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def texts(self, count: int, tokens: int, vocabulary: int) -> list[list[int]]:
        """So many texts of so many tokens, which differ within their first two. vocabulary: of an engine that makes no
        tokens of texts."""
        found: list[list[int]] = []
        with suppress(EngineFault, msgspec.DecodeError, KeyError, TypeError):
            for seed in range(count):
                body = {"model": self.model, "prompt": text_of(tokens + 16, seed)}
                ids = msgspec.json.decode((await self._post("/tokenize", body)).body)["tokens"]
                known = sorted(set(ids))
                if len(known) < max(LEAST_DISTINCT, count) or len(ids) < tokens:
                    break
                found.append([*ids[:1], known[seed], *ids[1 : tokens - 1]])  # the first one may begin every prompt
        if len(found) == count:
            return found
        return [drawn_tokens(tokens, vocabulary, seed) for seed in range(count)]

    async def ask(self, question: Question, salt: str = "") -> Answer:
        """Raises `EngineFault`, and `BadInput` for an answer without what is compared."""
        began = perf_counter()
        answer = await self._post("/v1/completions", self._body(question, salt))
        seconds = perf_counter() - began
        if answer.status != 200:
            said = " ".join(answer.body.decode(errors="replace").split())[:200]
            raise BadInput(f"{self.url} answers {question.name} with status {answer.status}: {said}")
        return _answer_of(self.url, answer.body, seconds)

    async def ask_all(self, questions: Sequence[Question]) -> dict[str, Answer]:
        """All at once."""
        at_once = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(question: Question) -> Answer:
            async with at_once:
                return await self.ask(question)

        answers = await asyncio.gather(*map(one, questions))
        return {question.name: answer for question, answer in zip(questions, answers, strict=True)}

    async def abort(self, questions: Sequence[Question], seconds: float) -> None:
        """Ask at once, and leave after so long, whatever has come by then."""
        tasks = [asyncio.create_task(self.ask(question)) for question in questions[:MOST_AT_ONCE]]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def forget(self) -> None:
        """Empty the engine's own cache, once nothing uses it. Raises `BadInput` where it has no such route."""
        ends_at = perf_counter() + RESET_SECONDS
        while True:
            answer = await self._post(self.reset, None)
            if answer.status == 200 and b'"success":false' not in answer.body.replace(b" ", b""):
                return
            if answer.status != 200 or perf_counter() > ends_at:
                raise BadInput(
                    f"{self.url}{self.reset} answers with status {answer.status}; an engine's own cache has to be "
                    "emptied between questions: start vLLM with VLLM_SERVER_DEV_MODE=1, or name the route with --reset"
                )
            await asyncio.sleep(RESET_POLL_SECONDS)

    async def drafts(self) -> tuple[float, float]:
        """Draft tokens so far, and accepted ones."""
        counts = {_DRAFTS: 0.0, _ACCEPTED: 0.0}
        for sample in samples_of(await page_of(self._client)):
            if sample.name in counts:
                counts[sample.name] += sample.value
        return counts[_DRAFTS], counts[_ACCEPTED]

    def _body(self, question: Question, salt: str) -> dict[str, Any]:
        body = {"model": self.model, "prompt": question.tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0.0}
        body |= {"logprobs": 2, "ignore_eos": True, "return_tokens_as_token_ids": True, "seed": 0}
        return body | ({"cache_salt": salt} if salt else {})

    async def _post(self, path: str, body: object) -> EngineAnswer:
        content = b"" if body is None else msgspec.json.encode(body)
        return await self._client.ask("POST", path, content, self._headers, seconds=REQUEST_SECONDS)


async def answers_health(url: str) -> bool:
    client = EngineClient(url)
    try:
        return (await client.ask("GET", "/health", seconds=HEALTH_SECONDS)).status == 200
    except EngineFault:
        return False
    finally:
        await client.close()


def new_salt() -> str:
    """Of a request that is to find nothing."""
    return secrets.token_hex(16)


class _LogProbs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]]


class _ComparedChoice(msgspec.Struct):
    logprobs: _LogProbs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _CachedUsage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    choices: list[_ComparedChoice]
    usage: _CachedUsage | None = None
    kv_transfer_params: Any = None


def _answer_of(url: str, body: bytes, seconds: float) -> Answer:
    try:
        told = msgspec.json.decode(body, type=_Completion)
        (choice,) = told.choices
        found = choice.logprobs
        assert found is not None
        logprobs = [0.0 if one is None else one for one in found.token_logprobs]
    except (msgspec.DecodeError, ValueError, AssertionError, RecursionError):
        raise BadInput(f"{url} answers without log probabilities; give an engine whose completions have them") from None
    gaps = [
        mine - max([other for name, other in top.items() if name != token], default=mine - 1e3)
        for token, mine, top in zip(found.tokens, logprobs, found.top_logprobs, strict=False)
    ]
    details = told.usage.prompt_tokens_details if told.usage is not None else None
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Answer(found.tokens, logprobs, gaps, cached, _tiers_of(told.kv_transfer_params), seconds)


def _tiers_of(params: Any) -> dict[str, int]:
    """Of this store's account of a request."""
    account = params.get("kvstore") if isinstance(params, dict) else None
    hits = account.get("hits") if isinstance(account, dict) else None
    named = hits.items() if isinstance(hits, dict) else ()
    found = [(tier, count) for tier, count in named if isinstance(count, int) and str(tier).isidentifier()]
    return {str(tier)[:MOST_TIER_CHARACTERS]: count for tier, count in found[:MOST_TIERS]}
