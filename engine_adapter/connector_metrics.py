"""What a connector counts, as metrics of its engine's own page: `kvstore_vllm_*`, in seconds and tokens.

Maps the flat counts of `RequestCounts.to_dict` to series; knows neither vLLM nor the store, and makes its metrics with
the classes that the engine hands in. The names with a colon and in milliseconds are kept beside these until the next
release, since people's dashboards name them. docs/reference.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_adapter.paged.requests import LOAD_SECONDS, SAVING
from kvstore.block.account import MissReason

PREFIX = "kvstore_vllm_"
WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Bounds of the histogram; the sidecar's are the same."""
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclass(frozen=True, slots=True)
class ConnectorFamily:
    """One metric. labels: those besides the engine's, which are on all metrics. text: what is counted, in one line."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    text: str


def _family(kind: str, name: str, labels: str, unit: str, text: str) -> ConnectorFamily:
    return ConnectorFamily(f"{PREFIX}{name}", kind, tuple(labels.split()), unit, text)


CONNECTOR_METRICS = (
    _family(COUNTER, "requests_total", "", "requests", "Requests that were accounted for."),
    _family(
        COUNTER,
        "prompt_tokens_total",
        "outcome origin",
        "tokens",
        "Prompt tokens, hit (by tier) or miss (by reason). Those of a load that failed are misses.",
    ),
    _family(COUNTER, "loads_total", "result", "loads", "Loads that were begun, and of these those that failed."),
    _family(HISTOGRAM, "load_wait_seconds", "", "seconds", "From a load's order until its last page was verified."),
    _family(COUNTER, "saved_blocks_total", "", "blocks", "Blocks that the store did not have before."),
    _family(COUNTER, "dropped_saves_total", "", "saves", "Saves that were given up: the engine wanted its pages back."),
    _family(
        COUNTER,
        "prefill_saved_seconds_total",
        "",
        "seconds",
        "By how much loads took less than computing the same would have, by the learned speeds.",
    ),
    _family(COUNTER, "cost_regret_seconds_total", "", "seconds", "By how much loads took longer than that."),
    _family(
        COUNTER,
        "cost_decisions_total",
        "choice",
        "decisions",
        "How far to load: the cheapest way, explored beyond what is believed, or unlearned, all that was found.",
    ),
    _family(COUNTER, "cost_tokens_total", "choice", "tokens", "Found tokens that were loaded, or declined."),
    _family(
        COUNTER, "cost_loads_total", "result", "loads", "Loads that ended; of these, those judged beside computing."
    ),
    _family(
        COUNTER,
        "fetches_total",
        "result",
        "fetches",
        "Look-ups that asked what is elsewhere; fetches from there that ended; of these, those that came short.",
    ),
    _family(GAUGE, "ttft_saved_seconds", "statistic", "seconds", "What a hit saves of the time to the first token."),
    _family(
        COUNTER, "audited_blocks_total", "verdict", "blocks", "Hits that were computed all the same, and compared."
    ),
    _family(GAUGE, "sidecar_up", "", "0 or 1", "Whether the store answered the last requests that asked it."),
)
FORMER_METRICS = (
    ConnectorFamily("kvstore:prompt_tokens_total", COUNTER, ("origin",), "tokens", "Now kvstore_vllm_prompt_tokens."),
    ConnectorFamily("kvstore:events_total", COUNTER, ("event",), "events", "Now kvstore_vllm_*, each with its unit."),
    ConnectorFamily("kvstore:ttft_saved_ms", GAUGE, ("statistic",), "ms", "Now kvstore_vllm_ttft_saved_seconds."),
)
"""Kept for one release."""

_ANSWERED = frozenset(
    {
        MissReason.ABSENT,
        MissReason.EVICTED,
        MissReason.DIVERGED,
        MissReason.OTHER_NAMESPACE,
        MissReason.IN_FLIGHT,
        MissReason.PINNED_FULL,
        MissReason.TIER_DOWN,
        MissReason.CORRUPT,
        MissReason.KEY_MISMATCH,
    }
)
"""Reasons that only the store can give."""
_PLAIN = {"requests": "requests_total", "saved_blocks": "saved_blocks_total", "dropped_saves": "dropped_saves_total"}
_LABELLED = {
    "failed_loads": ("loads_total", "failed"),
    "cost_explored": ("cost_decisions_total", "explored"),
    "cost_unlearned": ("cost_decisions_total", "unlearned"),
    "cost_loaded_tokens": ("cost_tokens_total", "loaded"),
    "cost_declined_tokens": ("cost_tokens_total", "declined"),
    "cost_finished": ("cost_loads_total", "finished"),
    "cost_judged": ("cost_loads_total", "judged"),
    "cost_locates": ("fetches_total", "asked"),
    "cost_fetches": ("fetches_total", "ended"),
    "cost_short_fetches": ("fetches_total", "short"),
}
_MILLISECONDS = {"cost_saved_ms": "prefill_saved_seconds_total", "cost_regret_ms": "cost_regret_seconds_total"}

Observation = tuple[str, tuple[str, ...], float]
"""A family's name, the values of its labels, and the number to add, set or observe."""


def observations(counts: Mapping[str, Any]) -> Iterator[Observation]:
    """One step's counts as observations, each under its new name and its former one."""
    for name, count in counts.items():
        if name == LOAD_SECONDS:
            yield from ((f"{PREFIX}load_wait_seconds", (), seconds) for seconds in count)
        elif name.startswith(SAVING):
            statistic = name.removeprefix(SAVING)
            yield f"{PREFIX}ttft_saved_seconds", (statistic,), count / 1000
            yield "kvstore:ttft_saved_ms", (statistic,), count
        else:
            yield from _counted(name, count)
            former = "kvstore:prompt_tokens_total" if name.startswith(("hit_", "miss_")) else "kvstore:events_total"
            yield former, (name,), count
    cheapest = counts.get("cost_decisions", 0) - counts.get("cost_explored", 0) - counts.get("cost_unlearned", 0)
    if cheapest > 0:
        yield f"{PREFIX}cost_decisions_total", ("cheapest",), cheapest
    if counts.get("loads"):
        yield f"{PREFIX}loads_total", ("begun",), counts["loads"]
    is_up = _is_up(counts)
    if is_up is not None:
        yield f"{PREFIX}sidecar_up", (), float(is_up)


def _counted(name: str, count: float) -> Iterator[Observation]:
    kind, _, rest = name.partition("_")
    if kind in ("hit", "miss"):
        yield f"{PREFIX}prompt_tokens_total", (kind, rest), count
    elif kind == "audited":
        yield f"{PREFIX}audited_blocks_total", (rest,), count
    elif name in _PLAIN:
        yield f"{PREFIX}{_PLAIN[name]}", (), count
    elif name in _LABELLED:
        family, label = _LABELLED[name]
        yield f"{PREFIX}{family}", (label,), count
    elif name in _MILLISECONDS:
        yield f"{PREFIX}{_MILLISECONDS[name]}", (), count / 1000


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
        self._families: dict[str, tuple[str, Any]] = {}
        for one in (*CONNECTOR_METRICS, *FORMER_METRICS):
            given: dict[str, Any] = {"name": one.name, "documentation": one.text, "labelnames": [*labels, *one.labels]}
            if one.kind == HISTOGRAM:
                made = histogram(**given, buckets=WAIT_SECONDS)
            elif one.kind == GAUGE:
                made = gauge(**given, multiprocess_mode="mostrecent")
            else:
                made = counter(**given)
            self._families[one.name] = one.kind, made

    def observe(self, counts: Mapping[str, Any], labels: Sequence[Any]) -> None:
        """Add one step's counts. labels: values of the engine's own."""
        for name, values, amount in observations(counts):
            kind, family = self._families[name]
            series = family.labels(*labels, *values)
            if kind == COUNTER:
                series.inc(amount)
            elif kind == GAUGE:
                series.set(amount)
            else:
                series.observe(amount)
