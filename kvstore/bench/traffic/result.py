"""The result of `kvstore bench traffic`: figures for each endpoint and turn, and their spread over turns.

A figure's ratio is the median of its quotients to the first endpoint's in the same turn: a comparison that a drifting
machine disturbs least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

from kvstore.bench.measure import machine, quantile
from kvstore.bench.traffic.replay import RequestOutcome
from kvstore.bench.traffic.workload import Workload

MOST_SHOWN_ERRORS = 3


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
        for tier, count in tokens.items():
            if tier != "asked" and asked:
                figures[f"hit, {tier}"] = count / asked
        cached = [one.cached_tokens for one in whole if one.cached_tokens is not None]
        if cached:
            figures["hit, as answers say"] = sum(cached) / max(1, sum(one.prompt_tokens for one in whole))
        errors = sorted({one.error for one in outcomes if one.error})
        failed = len(outcomes) - len(whole)
        return TurnFigures(figures, tokens, len(outcomes), failed, seconds, errors[:MOST_SHOWN_ERRORS])


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over turns. ratio: to the first endpoint's, turn by turn; None for the first, and if it has none."""

    median: float
    low: float
    high: float
    ratio: float | None

    def __str__(self) -> str:
        shown = _short(self.median)
        if self.low != self.high:
            shown += f"  {_short(self.low)} .. {_short(self.high)}"
        return shown if self.ratio is None else f"{shown}  x{self.ratio:.2f}"


@dataclass
class TrafficResult:
    """turns: by endpoint, in the given order."""

    workload: Workload
    speed: float
    turns: dict[str, list[TurnFigures]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """Endpoints with a turn in which all requests failed."""
        return [
            f"{name}: all of {turn.requests} requests failed: {turn.errors[0]}"
            for name, turns in self.turns.items()
            for turn in turns
            if turn.failed == turn.requests
        ]

    def targets(self) -> list[dict[str, object]]:
        """No request failed: else the figures are not of the trace's requests."""
        failed = {name: sum(turn.failed for turn in turns) for name, turns in self.turns.items()}
        return [
            {"what": f"failed requests of {name}", "measured": count, "at_most": 0, "met": count == 0}
            for name, count in failed.items()
        ]

    def spreads(self) -> dict[str, dict[str, Spread]]:
        """By figure and endpoint."""
        first = next(iter(self.turns))
        names = dict.fromkeys(name for turns in self.turns.values() for turn in turns for name in turn.figures)
        return {
            name: {endpoint: found for endpoint in self.turns if (found := self._spread(name, endpoint, first))}
            for name in names
        }

    def _spread(self, name: str, endpoint: str, first: str) -> Spread | None:
        values = [turn.figures[name] for turn in self.turns[endpoint] if name in turn.figures]
        if not values:
            return None
        beside = [
            here.figures[name] / there.figures[name]
            for here, there in zip(self.turns[endpoint], self.turns[first], strict=True)
            if here.figures.get(name) is not None and there.figures.get(name)
        ]
        ratio = median(beside) if beside and endpoint != first else None
        return Spread(median(values), min(values), max(values), ratio)

    def to_dict(self) -> dict[str, object]:
        workload = self.workload
        return {
            "bench": "traffic",
            "trace": workload.name,
            "workload": {
                "requests": len(workload.requests),
                "seconds": workload.requests[-1].at,
                "speed": self.speed,
                "scale": workload.scale,
                "block_tokens": workload.block_tokens,
                "prompt_tokens": workload.prompt_tokens,
                "longest_tokens": workload.longest_tokens,
                "working_set_tokens": workload.working_set_tokens,
                "shared_tokens": workload.shared_tokens,
            },
            "machine": machine(),
            **self.about,
            "endpoints": [
                {
                    "name": name,
                    "turns": [
                        {
                            "requests": turn.requests,
                            "failed": turn.failed,
                            "errors": list(turn.errors),
                            "seconds": turn.seconds,
                            "tokens": dict(turn.tokens),
                            "figures": dict(turn.figures),
                        }
                        for turn in turns
                    ],
                }
                for name, turns in self.turns.items()
            ],
            "figures": {
                name: {
                    endpoint: {"median": one.median, "low": one.low, "high": one.high, "ratio": one.ratio}
                    for endpoint, one in of.items()
                }
                for name, of in self.spreads().items()
            },
            "targets": self.targets(),
            "faults": self.faults,
        }

    def render(self, console: Any) -> None:
        """A row for each figure, a column for each endpoint."""
        workload = self.workload
        shared = workload.shared_tokens / workload.prompt_tokens
        console.print(
            f"{workload.name}: {len(workload.requests)} requests in {workload.requests[-1].at:.0f} s, "
            f"{workload.prompt_tokens:,} prompt tokens, of which {shared:.0%} are in blocks seen before; "
            f"{workload.scale:.3g} tokens for one of the trace, {self.speed:g} times as fast"
        )
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("median  least .. most  x first")
        for name in self.turns:
            table.add_column(name, justify="right")
        for name, of in self.spreads().items():
            table.add_row(name, *(str(of[one]) if one in of else "" for one in self.turns))
        failed = [sum(turn.failed for turn in turns) for turns in self.turns.values()]
        table.add_row(
            "failed",
            *(
                f"{count} of {len(turns) * len(workload.requests)}"
                for count, turns in zip(failed, self.turns.values(), strict=True)
            ),
        )
        console.print(table)
        for name, turns in self.turns.items():
            for error in dict.fromkeys(error for turn in turns for error in turn.errors):
                console.print(f"{name}: {error}", markup=False)


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
