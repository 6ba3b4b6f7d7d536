"""Runs `kvstore bench traffic`: endpoints take turns, with the same requests within a turn and new tokens in each.

    started or given endpoints > warm-up > turn 1: A, B, C > turn 2: B, C, A > ...

In a turn each endpoint gets the same requests at the same moments; each turn has other tokens, so that a cache finds
what the trace shares and nothing of the turn before. Endpoints run one after another, never at once.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.bench.traffic.counters import engine_tokens, grown, sidecar_tokens
from kvstore.bench.traffic.engines import PAGE_TOKENS, Endpoint, EngineOptions, started
from kvstore.bench.traffic.replay import PromptForm, SendOptions, path_of, replay, request_body
from kvstore.bench.traffic.result import Slo, TrafficResult, TurnFigures
from kvstore.bench.traffic.workload import TrafficRequest, Workload
from kvstore.block.errors import StoreError
from kvstore.insight.trace import Trace
from kvstore.openai.client import JSON_HEADERS, EngineClient, EngineFault, EngineModel, model_of
from kvstore.openai.metrics import page_of

LONGEST_TOKENS = 8192
"""Of a prompt and its answer, if an endpoint does not tell its limit."""
WARM_UP_REQUESTS = 4
WARM_UP_SALT = 1 << 40
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """seconds, requests: limits of a turn. speed, scale: see `Workload.of`. model: None for an endpoint's first. slos:
    for goodput. engines: to start here, on this machine's CPUs."""

    seconds: float = 60.0
    requests: int = 1000
    turns: int = 2
    speed: float = 1.0
    scale: float | None = None
    form: PromptForm = PromptForm.TOKENS
    vocabulary: int = 1000
    model: str | None = None
    request_seconds: float = 120.0
    slos: tuple[Slo, ...] = ()
    seed: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    engines: EngineOptions | None = None

    def workload(self, trace: Trace, longest: int) -> Workload:
        """What of a trace is sent; longest, and what it raises: as in `Workload.of`."""
        return Workload.of(
            trace,
            longest=longest,
            seconds=self.seconds,
            requests=self.requests,
            speed=self.speed,
            scale=self.scale,
            vocabulary=self.vocabulary,
            seed=self.seed,
        )


def run(trace: Trace, endpoints: Sequence[Endpoint], options: TrafficOptions, progress: Progress) -> TrafficResult:
    """Raises `BadInput`, and `StoreError` if an engine does not start or no endpoint answers."""
    with ExitStack() as stack:
        models = {} if options.engines is not None else asyncio.run(_models(endpoints, options))
        longest = min((one.max_model_len or LONGEST_TOKENS for one in models.values()), default=LONGEST_TOKENS)
        workload = options.workload(trace, longest)
        result = TrafficResult(workload, options.speed)
        if options.engines is not None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
            endpoints = started(options.engines, workload, options.turns, scratch, stack, progress)
            models = asyncio.run(_models(endpoints, options))
            result.about = options.engines.to_dict() | {"findable_tokens": workload.findable_tokens(PAGE_TOKENS)}
        asyncio.run(_turns(endpoints, models, workload, options, result, progress))
    return result


async def _models(endpoints: Sequence[Endpoint], options: TrafficOptions) -> dict[str, EngineModel]:
    """Each endpoint's model. Raises `BadInput` and `EngineFault`."""
    found = {}
    for one in endpoints:
        async with EngineClient(one.url, one.name) as client:
            found[one.name] = await model_of(client, options.headers, options.model)
    return found


async def _turns(
    endpoints: Sequence[Endpoint],
    models: dict[str, EngineModel],
    workload: Workload,
    options: TrafficOptions,
    result: TrafficResult,
    progress: Progress,
) -> None:
    async with AsyncExitStack() as stack:
        clients = {one.name: await stack.enter_async_context(EngineClient(one.url, one.name)) for one in endpoints}
        replays = {
            one.name: SendOptions(models[one.name].id, options.form, options.request_seconds, options.headers)
            for one in endpoints
        }
        result.turns = {one.name: [] for one in endpoints}
        for one in endpoints:
            progress(f"warming up {one.name}", 0, 0)
            await _warm_up(clients[one.name], workload, replays[one.name], one)
        for turn in range(options.turns):
            first = turn % len(endpoints)
            for one in [*endpoints[first:], *endpoints[:first]]:
                what = f"turn {turn + 1} of {options.turns}, {one.name}"

                def ended(done: int, what: str = what) -> None:
                    progress(what, done, len(workload.requests))

                ended(0)
                before = await _counted(one)
                outcomes, seconds = await replay(clients[one.name], workload, turn, replays[one.name], ended)
                await _one_more(clients[one.name], workload, replays[one.name])
                tokens = grown(before, await _counted(one))
                result.turns[one.name].append(TurnFigures.of(outcomes, seconds, tokens, options.slos))


async def _warm_up(client: EngineClient, workload: Workload, options: SendOptions, endpoint: Endpoint) -> None:
    """Some uncounted requests, which pay for first-time work. Raises `StoreError`."""
    for number in range(WARM_UP_REQUESTS):
        request = workload.requests[number % len(workload.requests)]
        try:
            await _whole(client, workload, request, WARM_UP_SALT + number // 2, options)
        except EngineFault as fault:
            raise StoreError(f"{endpoint.name}: {fault}") from None


async def _one_more(client: EngineClient, workload: Workload, options: SendOptions) -> None:
    """One more token: an engine updates its counters when it computes."""
    try:
        await _whole(client, workload, TrafficRequest(0.0, (0,), 1, 1), WARM_UP_SALT - 1, options)
    except EngineFault:
        pass  # the counters stay as they are


async def _whole(
    client: EngineClient, workload: Workload, request: TrafficRequest, salt: int, options: SendOptions
) -> None:
    body = request_body(workload, request, salt, options, is_streamed=False)
    headers = {**JSON_HEADERS, **options.headers}
    answer = await client.ask("POST", path_of(options.form), body, headers, seconds=options.request_seconds)
    if answer.status != 200:
        said = answer.body.decode(errors="replace")[:200]
        raise EngineFault(f"a first request was answered with {answer.status}: {said}", has_begun=True)


async def _counted(endpoint: Endpoint) -> dict[str, float]:
    """Token counters so far, summed over the engines behind an endpoint."""
    found: dict[str, float] = {}
    for url in endpoint.metrics or (endpoint.url,):
        async with EngineClient(url) as client:
            for name, value in engine_tokens(await page_of(client)).items():
                found[name] = found.get(name, 0.0) + value
    if endpoint.sidecar is not None:
        async with EngineClient(endpoint.sidecar) as client:
            found |= sidecar_tokens(await page_of(client))
    return found
