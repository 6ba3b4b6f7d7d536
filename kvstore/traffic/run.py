"""`kvstore bench traffic`: a trace's requests, sent at their times to engines behind OpenAI's HTTP API.

    warm-up > turn 1: A, B, C > turn 2: B, C, A > ...

Arrivals, length ratios and shared prefixes are the trace's, scaled to an engine; tokens are made up. Each block of the
trace becomes `block_tokens` random tokens drawn from its number, so prompts share exactly the prefixes that they shared
when recorded. In a turn each endpoint gets the same requests at the same moments; each turn has other tokens, so that a
cache finds what the trace shares and nothing of the turn before. Endpoints run one after another, never at once.
Neither a trace nor this workload has natural text.

Times count from when a request was due, so waiting here for a free place counts too. Bounded are: requests in flight,
seconds per request, bytes per event. A figure's ratio is the median of its quotients to the first endpoint's in the
same turn: a comparison that a drifting machine disturbs least.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
import numpy as np

from kvstore.block.errors import BadInput, StoreError
from kvstore.insight.trace import Trace
from kvstore.openai.api import EventSplitter, event_data
from kvstore.openai.client import JSON_HEADERS, EngineClient, EngineFault, EngineModel, model_of, page_of, samples_of
from kvstore.traffic.row import MS, SHARE, BenchResult, Row, Section, Target, quantile

FIRST_TOKEN = 5
"""Lower ids have special meanings in tokenizers."""
UNKNOWN_OUTPUT = 16
"""Tokens of an answer whose length the recording does not have."""
MOST_TOKENS = 1 << 20
"""Of one prompt, scaled."""


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """at: seconds since the first. chain: its blocks' numbers; the last block has `tail` tokens, the others all.
    output: tokens of the answer."""

    at: float
    chain: tuple[int, ...]
    tail: int
    output: int


class PromptForm(StrEnum):
    TOKENS = "tokens"  # token ids in completions: lengths are exact
    TEXT = "text"  # words
    CHAT = "chat"  # words, in a message


@dataclass(frozen=True, slots=True)
class Slo:
    """An answer is good if its first token came within ttft_ms, and the others within itl_ms on average."""

    ttft_ms: float
    itl_ms: float

    @property
    def name(self) -> str:
        return f"good, TTFT {self.ttft_ms:g} ms, ITL {self.itl_ms:g} ms"

    def is_met(self, outcome: RequestOutcome) -> bool:
        """A failed answer never meets it."""
        return not outcome.error and 1e3 * outcome.ttft <= self.ttft_ms and 1e3 * outcome.mean_gap <= self.itl_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """What of a trace is sent in each turn, and how. seconds, requests: limits, from its beginning. speed: factor of
    arrivals. scale: tokens per token of the trace, None for the largest, up to 1, by which the longest request fits.
    vocabulary: tokens are drawn below it. model: None for an endpoint's first. request_seconds: timeout from sending.
    slos: for goodput."""

    seconds: float = 60.0
    requests: int = 1000
    speed: float = 1.0
    scale: float | None = None
    vocabulary: int = 1000
    seed: int = 0
    turns: int = 2
    form: PromptForm = PromptForm.TOKENS
    model: str | None = None
    request_seconds: float = 120.0
    slos: tuple[Slo, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """block_tokens: of a trace's block, scaled. vocabulary: tokens are drawn below it. scale: tokens per token of the
    trace."""

    name: str
    requests: tuple[TrafficRequest, ...]
    block_tokens: int
    scale: float
    vocabulary: int
    seed: int

    @staticmethod
    def of(trace: Trace, options: TrafficOptions, longest: int) -> Workload:
        """longest: the engine's limit for a prompt and its answer, in tokens. Raises `BadInput`."""
        outputs = np.where(trace.output_tokens > 0, trace.output_tokens, UNKNOWN_OUTPUT)
        scale = options.scale
        if scale is None:
            scale = min(1.0, longest / int((trace.input_tokens + outputs).max()))
        block_tokens = int(trace.block_tokens * scale)
        if block_tokens < 1:
            raise BadInput(
                f"{trace.name}: blocks of {trace.block_tokens} tokens are less than one at a scale of {scale:.2g}; "
                "give a larger --scale, or an engine that takes longer prompts"
            )
        found: list[TrafficRequest] = []
        first = int(trace.timestamps_ms[0])
        for (start, stop), stamp, tokens, output in zip(
            pairwise(trace.starts.tolist()),
            trace.timestamps_ms.tolist(),
            trace.input_tokens.tolist(),
            outputs.tolist(),
            strict=True,
        ):
            at = (stamp - first) / 1000 / options.speed
            if at >= options.seconds or len(found) == options.requests:
                break
            if stop == start:
                continue
            answer = min(max(1, round(output * scale)), longest - 1)
            last = tokens - (stop - start - 1) * trace.block_tokens
            tail = min(block_tokens, max(1, round(last * block_tokens / trace.block_tokens)))
            chain, room = trace.blocks[start:stop].tolist(), longest - answer
            if (len(chain) - 1) * block_tokens + tail > room:
                whole, rest = divmod(min(room, MOST_TOKENS), block_tokens)
                chain, tail = (chain[: whole + 1], rest) if rest else (chain[:whole], block_tokens)
            found.append(TrafficRequest(at, tuple(chain), tail, answer))
        if not found:
            covered = options.seconds * options.speed
            raise BadInput(f"{trace.name} has no request in its first {covered:g} s; give more --seconds")
        scale = block_tokens / trace.block_tokens
        return Workload(trace.name, tuple(found), block_tokens, scale, options.vocabulary, options.seed)

    @property
    def longest_tokens(self) -> int:
        """Of a prompt and its answer."""
        return max(self.tokens_of(one) + one.output for one in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(map(self.tokens_of, self.requests))

    @property
    def working_set_tokens(self) -> int:
        """Of distinct blocks."""
        return self.block_tokens * len({block for one in self.requests for block in one.chain})

    @property
    def shared_tokens(self) -> int:
        """In whole blocks that an unlimited cache finds."""
        seen: set[int] = set()
        found = 0
        for one in self.requests:
            whole = one.chain if one.tail == self.block_tokens else one.chain[:-1]
            found += self.block_tokens * sum(block in seen for block in whole)
            seen.update(whole)
        return found

    def tokens_of(self, request: TrafficRequest) -> int:
        """Of its prompt."""
        return (len(request.chain) - 1) * self.block_tokens + request.tail

    def prompt(self, request: TrafficRequest, salt: int) -> list[int]:
        found: list[int] = []
        for block in request.chain:
            found += self._block(block, salt)
        return found[: self.tokens_of(request)]

    def _block(self, block: int, salt: int) -> Sequence[int]:
        drawn = np.random.default_rng([self.seed, salt, block])
        numbers: list[int] = drawn.integers(FIRST_TOKEN, self.vocabulary, self.block_tokens).tolist()
        return numbers


# Sending ------------------------------------------------------------------------------------------------------------

MOST_UNDER_WAY = 512
LONGEST_REASON = 200


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
    """Sends one workload to one endpoint. model: the endpoint's name of it."""

    client: EngineClient
    workload: Workload
    model: str
    options: TrafficOptions

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
        answer = await self.client.ask("POST", self._path, body, self._headers, seconds=self.options.request_seconds)
        if answer.status != 200:
            said = answer.body.decode(errors="replace")[:200]
            raise EngineFault(f"a first request was answered with {answer.status}: {said}", has_begun=True)

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self.options.form is PromptForm.CHAT else "/v1/completions"

    @property
    def _headers(self) -> dict[str, str]:
        return {**JSON_HEADERS, **self.options.headers}

    def _body(self, request: TrafficRequest, salt: int, *, is_streamed: bool) -> bytes:
        tokens = self.workload.prompt(request, salt)
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.output, "temperature": 0}
        body |= {"ignore_eos": True, "stream": is_streamed}
        if is_streamed:
            body["stream_options"] = {"include_usage": True}
        words = "" if self.options.form is PromptForm.TOKENS else " ".join(f"w{token}" for token in tokens)
        if self.options.form is PromptForm.CHAT:
            body["messages"] = [{"role": "user", "content": words}]
        else:
            body["prompt"] = words or tokens
        return msgspec.json.encode(body)

    async def _asked(self, body: bytes, outcome: RequestOutcome, now: Callable[[], float]) -> None:
        try:
            async with (
                asyncio.timeout(self.options.request_seconds),
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
            outcome.error = f"it took more than {self.options.request_seconds:g} s"
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


# Figures ------------------------------------------------------------------------------------------------------------

MISSED = "missed "
"""Begins the names of tokens that our connector missed; the reason follows."""
MOST_SHOWN_ERRORS = 3
_OF_A_WORKLOAD = "scale block_tokens prompt_tokens longest_tokens working_set_tokens shared_tokens".split()


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """One replay of an endpoint. figures: by name; unknown ones are missing. tokens: asked and hit, by the engine's and
    sidecar's counters. errors: the first ones."""

    figures: Mapping[str, float]
    tokens: Mapping[str, int]
    requests: int
    failed: int
    seconds: float
    errors: Sequence[str] = ()

    @staticmethod
    def of(
        outcomes: Sequence[RequestOutcome], seconds: float, tokens: Mapping[str, int], slos: Sequence[Slo]
    ) -> TurnFigures:
        """Figures of a replay; a failed request is not good, and its times are left out."""
        whole = [one for one in outcomes if not one.error]
        figures: dict[str, float] = {}
        for name, values in (
            ("TTFT", [1e3 * one.ttft for one in whole]),
            ("ITL", [1e3 * gap for one in whole for gap in one.gaps]),
        ):
            if values:
                figures |= {f"{name} p{100 * share:g}, ms": quantile(values, share) for share in (0.5, 0.99)}
        figures["output tokens/s"] = sum(one.output_tokens for one in whole) / seconds
        figures["prompt tokens/s"] = sum(one.prompt_tokens for one in whole) / seconds
        figures |= {slo.name: sum(map(slo.is_met, outcomes)) / len(outcomes) for slo in slos}
        asked = tokens.get("asked") or sum(one.prompt_tokens for one in whole)
        for origin, count in tokens.items():
            if origin != "asked" and asked:
                is_missed = origin.startswith(MISSED)
                figures[f"miss, {origin.removeprefix(MISSED)}" if is_missed else f"hit, {origin}"] = count / asked
        cached = [one.cached_tokens for one in whole if one.cached_tokens is not None]
        if cached:
            figures["hit, as answers say"] = sum(cached) / max(1, sum(one.prompt_tokens for one in whole))
        errors = sorted({one.error for one in outcomes if one.error})
        failed = len(outcomes) - len(whole)
        return TurnFigures(figures, tokens, len(outcomes), failed, seconds, errors[:MOST_SHOWN_ERRORS])


@dataclass
class TrafficResult:
    """turns: by endpoint, in the given order."""

    workload: Workload
    speed: float
    turns: dict[str, list[TurnFigures]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def found(self) -> BenchResult:
        """What is printed. No request is to fail: where one did, the figures are of others than the trace asked for."""
        workload = self.workload
        shared = workload.shared_tokens / workload.prompt_tokens
        findable = self.about.get("findable_tokens")
        title = (
            f"{workload.name}: {len(workload.requests)} requests in {workload.requests[-1].at:.0f} s, "
            f"{workload.prompt_tokens:,} prompt tokens, of which {shared:.0%} are in blocks seen before"
            f"{'' if findable is None else f' and {findable / workload.prompt_tokens:.1%} in pages of an engine'}; "
            f"{workload.scale:.3g} tokens for one of the trace, {self.speed:g} times as fast"
        )
        words = [
            f"{name}: {error}"
            for name, turns in self.turns.items()
            for error in dict.fromkeys(error for turn in turns for error in turn.errors)
        ]
        faults = [
            f"{name}: all of {turn.requests} requests failed: {turn.errors[0]}"
            for name, turns in self.turns.items()
            for turn in turns
            if turn.failed == turn.requests
        ]
        section = Section(self._rows(), title, "\n".join(words))
        return BenchResult("traffic", None, [section], {**self._described(), **self.about}, faults)

    def _rows(self) -> list[Row]:
        names = dict.fromkeys(name for turns in self.turns.values() for turn in turns for name in turn.figures)
        rows = [self._row(name, endpoint) for name in names for endpoint in self.turns]
        failed = [
            Row(
                {"figure": "failed", "endpoint": endpoint},
                sum(turn.failed for turn in turns),
                "requests",
                len(turns),
                target=Target(0, is_least=False, of="value"),
            )
            for endpoint, turns in self.turns.items()
        ]
        return [row for row in rows if row is not None] + failed

    def _row(self, name: str, endpoint: str) -> Row | None:
        """Of one figure over turns; low, high: the least and the most. Beside the first endpoint's, turn by turn."""
        first = next(iter(self.turns))
        values, limits = (
            [turn.figures[name] for turn in self.turns[one] if name in turn.figures] for one in (endpoint, first)
        )
        if not values:
            return None
        beside = [
            here.figures[name] / there.figures[name]
            for here, there in zip(self.turns[endpoint], self.turns[first], strict=True)
            if here.figures.get(name) is not None and there.figures.get(name)
        ]
        is_beside = bool(beside) and endpoint != first
        return Row(
            {"figure": name, "endpoint": endpoint},
            median(values),
            _unit_of(name),
            len(values),
            min(values),
            max(values),
            limit_of=first if is_beside else "",
            limit=median(limits) if is_beside else None,
            ratio=median(beside) if is_beside else None,
        )

    def _described(self) -> dict[str, object]:
        workload, requests = self.workload, self.workload.requests
        told = {"requests": len(requests), "seconds": requests[-1].at, "speed": self.speed}
        told |= {name: getattr(workload, name) for name in _OF_A_WORKLOAD}
        turns = [{"name": name, "turns": [asdict(turn) for turn in turns]} for name, turns in self.turns.items()]
        return {"trace": workload.name, "workload": told, "endpoints": turns}


def _unit_of(figure: str) -> str:
    """Of a figure by its name; "good, TTFT 200 ms, ITL 100 ms" is a share, whatever its last word is."""
    if figure.endswith(f", {MS}"):
        return MS
    return "tokens/s" if figure.endswith(" tokens/s") else SHARE


# Turns --------------------------------------------------------------------------------------------------------------

LONGEST_TOKENS = 8192
"""Of a prompt and its answer, if an endpoint does not tell its limit."""
WARM_UP_REQUESTS = 4
WARM_UP_SALT = 1 << 40
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """metrics: engines whose counters are read; `url` if empty. sidecar: likewise."""

    name: str
    url: str
    metrics: tuple[str, ...] = ()
    sidecar: str | None = None


EngineStarter = Callable[[Workload, int, ExitStack, Progress], tuple[list[Endpoint], dict[str, object]]]
"""Starts engines for a workload and so many turns, which end with the stack; returns them and facts for the result."""


def run(
    trace: Trace,
    endpoints: Sequence[Endpoint],
    options: TrafficOptions,
    progress: Progress,
    starter: EngineStarter | None = None,
) -> TrafficResult:
    """starter: in place of endpoints. Raises `BadInput`, and `StoreError` if an engine does not start or no endpoint
    answers."""
    with ExitStack() as stack:
        models = asyncio.run(_models(endpoints, options))
        longest = min((one.max_model_len or LONGEST_TOKENS for one in models.values()), default=LONGEST_TOKENS)
        workload = Workload.of(trace, options, longest)
        result = TrafficResult(workload, options.speed)
        if starter is not None:
            endpoints, result.about = starter(workload, options.turns, stack, progress)
            models = asyncio.run(_models(endpoints, options))
        asyncio.run(_turns(endpoints, models, options, result, progress))
    return result


async def _models(endpoints: Sequence[Endpoint], options: TrafficOptions) -> dict[str, EngineModel]:
    found = {}
    for one in endpoints:
        async with EngineClient(one.url, one.name) as client:
            found[one.name] = await model_of(client, options.headers, options.model)
    return found


async def _turns(
    endpoints: Sequence[Endpoint],
    models: dict[str, EngineModel],
    options: TrafficOptions,
    result: TrafficResult,
    progress: Progress,
) -> None:
    workload, senders = result.workload, {}
    async with AsyncExitStack() as stack:
        for one in endpoints:
            client = await stack.enter_async_context(EngineClient(one.url, one.name))
            senders[one.name] = Sender(client, workload, models[one.name].id, options)
        result.turns = {one.name: [] for one in endpoints}
        for name, sender in senders.items():
            progress(f"warming up {name}", 0, 0)
            await _warm_up(name, sender)
        for turn in range(options.turns):
            first = turn % len(endpoints)
            for one in [*endpoints[first:], *endpoints[:first]]:
                what = f"turn {turn + 1} of {options.turns}, {one.name}"

                def ended(done: int, what: str = what) -> None:
                    progress(what, done, len(workload.requests))

                ended(0)
                before = await _counted(one)
                outcomes, seconds = await senders[one.name].replay(turn, ended)
                await _one_more(senders[one.name])
                tokens = grown(before, await _counted(one))
                result.turns[one.name].append(TurnFigures.of(outcomes, seconds, tokens, options.slos))


async def _warm_up(name: str, sender: Sender) -> None:
    """Some uncounted requests, which pay for first-time work. Raises `StoreError`."""
    requests = sender.workload.requests
    for number in range(WARM_UP_REQUESTS):
        try:
            await sender.whole(requests[number % len(requests)], WARM_UP_SALT + number // 2)
        except EngineFault as fault:
            raise StoreError(f"{name}: {fault}") from None


async def _one_more(sender: Sender) -> None:
    """One more token: an engine updates its counters when it computes."""
    try:
        await sender.whole(TrafficRequest(0.0, (0,), 1, 1), WARM_UP_SALT - 1)
    except EngineFault:
        pass  # the counters stay as they are


async def _counted(endpoint: Endpoint) -> Mapping[str, float]:
    """Token counters so far, summed over the engines behind an endpoint."""
    found = defaultdict[str, float](float)
    for url in endpoint.metrics or (endpoint.url,):
        async with EngineClient(url) as client:
            for name, value in engine_tokens(await page_of(client)).items():
                found[name] += value
    if endpoint.sidecar is not None:
        async with EngineClient(endpoint.sidecar) as client:
            found.update(sidecar_tokens(await page_of(client)))
    return found


# Counters, read before and after a turn --------------------------------------------------------------------------

# Our connector counts a prompt's tokens by tier, and those missed by reason; a plain vLLM counts its own cache's hits
# and a connector's; a sidecar counts what its leases granted. Without any of these, the result has no hits.
_OURS = "kvstore_vllm_prompt_tokens_total"
_VLLMS = {
    "vllm:prefix_cache_queries_total": "asked",
    "vllm:prefix_cache_hits_total": "engine",
    "vllm:external_prefix_cache_hits_total": "external",
}
_SIDECARS = {"kvstore_granted_tokens_total": 1, "kvstore_revoked_tokens_total": -1}


def engine_tokens(page: str) -> Mapping[str, float]:
    """From an engine's page: tokens asked, hits by tier, and what was missed by reason if it is told."""
    ours, vllms = defaultdict[str, float](float), defaultdict[str, float](float)
    for one in samples_of(page):
        if one.name == _OURS:
            origin, is_hit = one.labels.get("origin", ""), one.labels.get("outcome") == "hit"
            ours["asked"] += one.value
            ours[origin if is_hit else MISSED + origin] += one.value
        elif one.name in _VLLMS:
            vllms[_VLLMS[one.name]] += one.value
    return ours or vllms


def sidecar_tokens(page: str) -> Mapping[str, float]:
    """From a sidecar's page: tokens granted by tier, less those that failed a check."""
    found = defaultdict[str, float](float)
    for one in samples_of(page):
        if one.name in _SIDECARS:
            found[f"sidecar {one.labels.get('tier', '')}"] += _SIDECARS[one.name] * one.value
    return found


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """Growth of each counter."""
    return {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
