"""The result of `kvstore bench traffic`: figures for each endpoint and turn, and their spread over turns.

A figure's ratio is the median of its quotients to the first endpoint's in the same turn: a comparison that a drifting
machine disturbs least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from kvstore.traffic.replay import RequestOutcome
from kvstore.traffic.row import MS, SHARE, BenchResult, Row, Section, Target, quantile
from kvstore.traffic.workload import Workload

MISSED = "missed "
"""Begins the names of tokens that our connector missed; the reason follows."""
MOST_SHOWN_ERRORS = 3
_OF_A_WORKLOAD = "scale block_tokens prompt_tokens longest_tokens working_set_tokens shared_tokens".split()


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
