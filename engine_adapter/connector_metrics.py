"""What a connector counts, as metrics of its engine's own page: `kvstore_vllm_*`, in seconds and tokens.

Maps what `PagedScheduler.take_counts` counted to series, as they are `declared`; knows neither vLLM nor the store, and
makes its metrics with the classes that the engine hands in. The names with a colon and in milliseconds are kept beside
these until the next release, since people's dashboards name them. docs/reference.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from engine_adapter.paged.requests import LOAD_SECONDS, SAVING
from kvstore.block.account import REASON_OF_FINDING, MissReason
from kvstore.status.declared import PREFIX, MetricFamily, MetricKind, counter, families, gauge, histogram, samples
from tiering.counts.histogram import WAIT_SECONDS

LOADS = "Loads that were begun, and of these those that failed."
DECISIONS = "How far to load: the cheapest way, explored beyond what is believed, or unlearned, all that was found."
TOKENS = "Found tokens that were loaded, or declined."
ENDED = "Loads that ended; of these, those judged beside computing."
FETCHES = "Look-ups that asked what is elsewhere; fetches from there that ended; of these, those that came short."
Count = float | None


class ConnectorNumbers(msgspec.Struct, frozen=True):
    """Those of some steps, by the names that `take_counts` has for them; what it has by tier, reason, verdict
    and statistic is a table here."""

    requests: Annotated[Count, counter("Requests that were accounted for.", "vllm_requests")] = None
    tokens: Annotated[
        dict[str, dict[str, float]],
        counter(
            "Prompt tokens, hit (by tier) or miss (by reason). Those of a load that failed are misses.",
            "vllm_prompt_tokens",
            "outcome origin",
        ),
    ] = {}
    loads: Annotated[Count, counter(LOADS, "vllm_loads", "result", result="begun")] = None
    failed_loads: Annotated[Count, counter(LOADS, "vllm_loads", "result", result="failed")] = None
    waits: Annotated[None, histogram("From a load's order until its last page was verified.", "vllm_load_wait")] = None
    saved_blocks: Annotated[Count, counter("Blocks that the store did not have before.", "vllm_saved_blocks")] = None
    dropped_saves: Annotated[
        Count, counter("Saves that were given up: the engine wanted its pages back.", "vllm_dropped_saves")
    ] = None
    cost_saved_ms: Annotated[
        Count,
        counter(
            "By how much loads took less than computing the same would have, by the learned speeds.",
            "vllm_prefill_saved_seconds",
            times=1e-3,
        ),
    ] = None
    cost_regret_ms: Annotated[
        Count, counter("By how much loads took longer than that.", "vllm_cost_regret_seconds", times=1e-3)
    ] = None
    cheapest: Annotated[Count, counter(DECISIONS, "vllm_cost_decisions", "choice", choice="cheapest")] = None
    cost_explored: Annotated[Count, counter(DECISIONS, "vllm_cost_decisions", "choice", choice="explored")] = None
    cost_unlearned: Annotated[Count, counter(DECISIONS, "vllm_cost_decisions", "choice", choice="unlearned")] = None
    cost_loaded_tokens: Annotated[Count, counter(TOKENS, "vllm_cost_tokens", "choice", choice="loaded")] = None
    cost_declined_tokens: Annotated[Count, counter(TOKENS, "vllm_cost_tokens", "choice", choice="declined")] = None
    cost_finished: Annotated[Count, counter(ENDED, "vllm_cost_loads", "result", result="finished")] = None
    cost_judged: Annotated[Count, counter(ENDED, "vllm_cost_loads", "result", result="judged")] = None
    cost_locates: Annotated[Count, counter(FETCHES, "vllm_fetches", "result", result="asked")] = None
    cost_fetches: Annotated[Count, counter(FETCHES, "vllm_fetches", "result", result="ended")] = None
    cost_short_fetches: Annotated[Count, counter(FETCHES, "vllm_fetches", "result", result="short")] = None
    saving: Annotated[
        dict[str, float],
        gauge("What a hit saves of the time to the first token.", "vllm_ttft_saved_seconds", "statistic", times=1e-3),
    ] = {}
    audited: Annotated[
        dict[str, float],
        counter("Hits that were computed all the same, and compared.", "vllm_audited_blocks", "verdict"),
    ] = {}
    is_up: Annotated[
        bool | None,
        gauge("Whether the store answered the last requests that asked it.", "vllm_sidecar_up", unit="0 or 1"),
    ] = None


CONNECTOR_METRICS = families(ConnectorNumbers)
_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE
FORMER_METRICS = (
    MetricFamily(
        "kvstore:prompt_tokens_total", _COUNTER, ("origin",), "tokens", "Now kvstore_vllm_prompt_tokens.", {}, 1
    ),
    MetricFamily(
        "kvstore:events_total", _COUNTER, ("event",), "events", "Now kvstore_vllm_*, each with its unit.", {}, 1
    ),
    MetricFamily("kvstore:ttft_saved_ms", _GAUGE, ("statistic",), "ms", "Now kvstore_vllm_ttft_saved_seconds.", {}, 1),
)
"""Kept for one release."""

_ANSWERED = {*REASON_OF_FINDING.values(), MissReason.DIVERGED, MissReason.OTHER_NAMESPACE} - {MissReason.DEADLINE}
"""Reasons that only the store can give."""

Observation = tuple[str, tuple[str, ...], float]
"""A family's name, the values of its labels, and the number to add, set or observe."""


def observations(counts: Mapping[str, Any]) -> Iterator[Observation]:
    """One step's counts as observations, each under its new name and its former one."""

    def those(begin: str) -> dict[str, float]:
        return {name.removeprefix(begin): count for name, count in counts.items() if name.startswith(begin)}

    tables = {"tokens": {"hit": those("hit_"), "miss": those("miss_")}, "saving": those(SAVING)}
    cheapest = counts.get("cost_decisions", 0) - counts.get("cost_explored", 0) - counts.get("cost_unlearned", 0)
    more = {"audited": those("audited_"), "cheapest": cheapest if cheapest > 0 else None, "is_up": _is_up(counts)}
    for one in samples(msgspec.convert({**counts, **tables, **more}, ConnectorNumbers, strict=False)):
        assert isinstance(one.value, int | float)
        yield one.family.name, one.values, one.value
    for name, count in counts.items():
        if name == LOAD_SECONDS:
            yield from ((f"{PREFIX}vllm_load_wait_seconds", (), seconds) for seconds in count)
        elif name.startswith(SAVING):
            yield "kvstore:ttft_saved_ms", (name.removeprefix(SAVING),), count
        else:
            former = "kvstore:prompt_tokens_total" if name.startswith(("hit_", "miss_")) else "kvstore:events_total"
            yield former, (name,), count


def _is_up(counts: Mapping[str, Any]) -> bool | None:
    """Whether the store answered; None if no request asked it. A store that was asked what is elsewhere is up:
    `unreachable` then means other nodes."""
    if counts.get("cost_locates"):
        return True
    if counts.get(f"miss_{MissReason.UNREACHABLE}"):
        return False
    is_hit = any(name.startswith("hit_") and not name.endswith("_engine") for name in counts)
    return True if is_hit or any(counts.get(f"miss_{reason}") for reason in _ANSWERED) else None


class ConnectorSeries:
    """The metrics of one process of the engine, made once."""

    def __init__(self, counter: Any, gauge: Any, histogram: Any, labels: Sequence[str]) -> None:
        """counter, gauge, histogram: classes as prometheus_client's. labels: names of those that the engine puts on all
        of its metrics."""
        made: dict[MetricKind, tuple[Any, str, dict[str, Any]]] = {
            MetricKind.COUNTER: (counter, "inc", {}),
            MetricKind.GAUGE: (gauge, "set", {"multiprocess_mode": "mostrecent"}),
            MetricKind.HISTOGRAM: (histogram, "observe", {"buckets": WAIT_SECONDS}),
        }
        self._families: dict[str, tuple[Any, str]] = {}
        """Each with the name of its method that takes an observation."""
        for one in (*CONNECTOR_METRICS, *FORMER_METRICS):
            kind, takes, given = made[one.kind]
            series = kind(name=one.name, documentation=one.text, labelnames=[*labels, *one.labels], **given)
            self._families[one.name] = series, takes

    def observe(self, counts: Mapping[str, Any], labels: Sequence[Any]) -> None:
        """Add one step's counts. labels: values of the engine's own."""
        for name, values, amount in observations(counts):
            family, takes = self._families[name]
            getattr(family.labels(*labels, *values), takes)(amount)
