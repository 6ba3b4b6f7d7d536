"""Runs `kvstore bench traffic`: endpoints take turns, with the same requests within a turn and new tokens in each.

    warm-up > turn 1: A, B, C > turn 2: B, C, A > ...

In a turn each endpoint gets the same requests at the same moments; each turn has other tokens, so that a cache finds
what the trace shares and nothing of the turn before. Endpoints run one after another, never at once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field

from kvstore.block.errors import StoreError
from kvstore.insight.trace import Trace
from kvstore.openai.client import EngineClient, EngineFault, EngineModel, model_of, page_of, samples_of
from kvstore.traffic.replay import PromptForm, Sender
from kvstore.traffic.result import MISSED, Slo, TrafficResult, TurnFigures
from kvstore.traffic.workload import Load, TrafficRequest, Workload

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions(Load):
    """What of a trace is sent in each turn, and how. model: None for an endpoint's first. slos: for goodput."""

    turns: int = 2
    form: PromptForm = PromptForm.TOKENS
    model: str | None = None
    request_seconds: float = 120.0
    slos: tuple[Slo, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)


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
            how = options.form, options.request_seconds, options.headers
            senders[one.name] = Sender(client, workload, models[one.name].id, *how)
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
