"""Sends requests when they are due, without waiting for earlier ones, and records their times.

Times count from when a request was due, so waiting here for a free place counts too. Bounded are: requests in flight,
seconds per request, bytes per event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from kvstore.openai.api import EventSplitter, event_data
from kvstore.openai.client import JSON_HEADERS, EngineClient, EngineFault
from kvstore.traffic.workload import TrafficRequest, Workload

MOST_UNDER_WAY = 512
LONGEST_REASON = 200


class PromptForm(StrEnum):
    TOKENS = "tokens"  # token ids in completions: lengths are exact
    TEXT = "text"  # words
    CHAT = "chat"  # words, in a message


@dataclass(slots=True)
class RequestOutcome:
    """due, first, last: seconds since the replay's beginning. gaps: between events with tokens. cached: tokens that the
    engine reports as cached; None if it does not report."""

    due: float
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token, from when it was due."""
        return (self.first if self.first is not None else self.last) - self.due

    @property
    def mean_gap(self) -> float:
        """Seconds per token after the first."""
        return (self.last - self.first) / max(1, self.output_tokens - 1) if self.first is not None else 0.0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None


class _StreamChunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends one workload to one endpoint. model: the endpoint's name of it. request_seconds: timeout from sending."""

    client: EngineClient
    workload: Workload
    model: str
    form: PromptForm
    request_seconds: float
    headers: dict[str, str]

    async def replay(self, salt: int, ended: Callable[[int], None]) -> tuple[list[RequestOutcome], float]:
        """Every request's outcome, and seconds from the first due time to the last end. ended: called with the number
        ended."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        free = asyncio.Semaphore(MOST_UNDER_WAY)
        outcomes = [RequestOutcome(one.at) for one in self.workload.requests]
        done = 0

        async def sent(request: TrafficRequest, outcome: RequestOutcome) -> None:
            nonlocal done
            async with free:
                await self._asked(self._body(request, salt, is_streamed=True), outcome, lambda: loop.time() - began)
            done += 1
            ended(done)

        async with asyncio.TaskGroup() as group:
            for request, outcome in zip(self.workload.requests, outcomes, strict=True):
                await asyncio.sleep(began + request.at - loop.time())
                group.create_task(sent(request, outcome))
        return outcomes, loop.time() - began

    async def whole(self, request: TrafficRequest, salt: int) -> None:
        """One request, uncounted and in one piece. Raises `EngineFault`."""
        body = self._body(request, salt, is_streamed=False)
        answer = await self.client.ask("POST", self._path, body, self._headers, seconds=self.request_seconds)
        if answer.status != 200:
            said = answer.body.decode(errors="replace")[:200]
            raise EngineFault(f"a first request was answered with {answer.status}: {said}", has_begun=True)

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self.form is PromptForm.CHAT else "/v1/completions"

    @property
    def _headers(self) -> dict[str, str]:
        return {**JSON_HEADERS, **self.headers}

    def _body(self, request: TrafficRequest, salt: int, *, is_streamed: bool) -> bytes:
        tokens = self.workload.prompt(request, salt)
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.output, "temperature": 0}
        body |= {"ignore_eos": True, "stream": is_streamed}
        if is_streamed:
            body["stream_options"] = {"include_usage": True}
        words = "" if self.form is PromptForm.TOKENS else " ".join(f"w{token}" for token in tokens)
        if self.form is PromptForm.CHAT:
            body["messages"] = [{"role": "user", "content": words}]
        else:
            body["prompt"] = words or tokens
        return msgspec.json.encode(body)

    async def _asked(self, body: bytes, outcome: RequestOutcome, now: Callable[[], float]) -> None:
        try:
            async with (
                asyncio.timeout(self.request_seconds),
                self.client.asked("POST", self._path, body, self._headers) as answer,
            ):
                if answer.status != 200 or not answer.has_events:
                    said = (await answer.whole(1 << 20)).body
                    outcome.error = f"{answer.status}: {said.decode(errors='replace')}"[:LONGEST_REASON]
                else:
                    splitter = EventSplitter()
                    async for piece in answer.pieces():
                        at = now()
                        for event in splitter.fed(piece):
                            _noted(outcome, event_data(event), at)
                    if outcome.first is None and not outcome.error:
                        outcome.error = "no token came"
        except TimeoutError:
            outcome.error = f"it took more than {self.request_seconds:g} s"
        except (EngineFault, ValueError, msgspec.DecodeError, RecursionError) as error:
            outcome.error = " ".join(str(error).split())[:LONGEST_REASON]
        finally:
            outcome.last = outcome.last or now()


def _noted(outcome: RequestOutcome, data: bytes, at: float) -> None:
    if not data or data == b"[DONE]":
        return
    chunk = msgspec.json.decode(data, type=_StreamChunk)
    if chunk.error is not None:
        outcome.error = str(chunk.error)[:LONGEST_REASON]
    if any(_has_token(one) for one in chunk.choices):
        if outcome.first is None:
            outcome.first = at
        else:
            outcome.gaps.append(at - outcome.last)
        outcome.last = at
        outcome.output_tokens += 1
    if chunk.usage is not None:
        outcome.prompt_tokens = chunk.usage.prompt_tokens
        outcome.output_tokens = chunk.usage.completion_tokens
        cached = (chunk.usage.prompt_tokens_details or {}).get("cached_tokens")
        outcome.cached_tokens = cached if isinstance(cached, int) else None


def _has_token(choice: _Choice) -> bool:
    """A chat's first event has a role and no text."""
    if choice.delta is None:
        return choice.text is not None
    return any(value for name, value in choice.delta.items() if name != "role")
