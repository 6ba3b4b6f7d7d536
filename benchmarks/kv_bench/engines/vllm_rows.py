"""What `benches.py ttft --engine vllm` is asked for and what it says: options, rows and their table.

A row is a median beside its reference. Quotients are taken turn by turn, where both sides are adjacent on a drifting
machine; the row's ratio is their median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import comb
from statistics import median
from typing import Any

from kvstore.bench.measure import quantile
from kvstore.bench.row import MS, SHARE, BenchResult, Row, Section, Target
from kvstore.bench.traffic.random_llama import MID, ONE_B, TINY

TTFT, ITL, HOOKS, OVERHEAD, HAND_OVER = PARTS = ("ttft", "itl", "hooks", "overhead", "hand-over")
PLAIN, RAW, DEFAULT, BARE, AT_ONCE = ENGINES = ("no connector", "raw", "default codec", "bare copies", "saves at once")
COLD, OWN, EXTERNAL = PATHS = ("cold", "own hit", "external hit")

TICKET, TOGETHER = HAND_OVERS = ("with a ticket", "both legs at once")
"""How decode gets what prefill stores: asked after prefill with its ticket, or at the same time."""

OWN_TO_OWN, RAW_TO_OWN, DEFAULT_TO_OWN, BARE_TO_OWN, COLD_TO_EXTERNAL = 1.03, 1.25, 1.35, 1.3, 30.0
EXTERNAL_ITL_TO_OWN = 1.1
HOOKS_SHARE = 0.015
SLOWDOWN = 0.05
DECODE_STEPS, HAND_OVER_TO_LIMIT = 3, 1.0
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """shape: the model's. prefix_tokens: stored; suffix_tokens: behind it, new in each request. turns: per median.
    streams: decoding, of stream_tokens each at first. arrivals: of each kind, with steps_between. load_prompts:
    arrivals while hooks are timed, of load_tokens, prefilled in chunks of chunk_tokens. pairs: with and without a
    store, each of pair_prompts new prompts of pair_tokens with answer_tokens. hand_overs: per way. kv_gib: of an
    engine's own pages. device: cpu or cuda."""

    shape: str = MID
    parts: tuple[str, ...] = PARTS
    prefix_tokens: int = 4096
    suffix_tokens: int = 16
    turns: int = 7
    streams: int = 8
    stream_tokens: int = 500
    arrivals: int = 64
    steps_between: int = 6
    own_prefixes: int = 4
    load_prompts: int = 40
    load_tokens: int = 1024
    load_steps_between: int = 12
    chunk_tokens: int = 512
    pairs: int = 40
    pair_prompts: int = 2
    pair_tokens: int = 1024
    answer_tokens: int = 16
    hand_overs: int = 12
    kv_gib: int = 2
    longest_tokens: int = 8192
    seed: int = 0
    device: str = "cpu"


SMALL = VllmOptions(
    TINY,
    prefix_tokens=512,
    turns=2,
    arrivals=2,
    own_prefixes=1,
    load_prompts=3,
    pairs=2,
    pair_tokens=300,
    hand_overs=2,
    kv_gib=1,
)
"""Only shows that it runs."""

ON_GPU = VllmOptions(ONE_B, parts=(TTFT,), prefix_tokens=32768, longest_tokens=40960, kv_gib=8, device="cuda")
"""All engines are on one GPU."""


at_most = partial(Target, is_least=False)


@dataclass
class VllmResult:
    """All rows and their conditions. faults: violated expectations, one line each."""

    options: VllmOptions
    versions: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def found(self) -> BenchResult:
        """A table, and what its words mean."""
        version, threads = (self.versions.get(name, "?") for name in ("vllm", "threads"))
        where = f"{threads} threads" if self.options.device == "cpu" else str(self.versions.get("device"))
        title = f"vLLM {version}, {where}, a random {self.options.shape} Llama"
        about = {"engine": "vllm", "versions": self.versions}
        return BenchResult("ttft", self.options, [Section(self.rows, title, WORDS)], about, self.faults)


WORDS = (
    "ttft: prefix and suffix, one new token, an idle engine. own hit: the prefix is in the engine's own cache; "
    "external hit: it was forgotten there, and comes from the sidecar, or for bare copies from a file in shared "
    "memory. Ratios are medians of quotients within a turn. itl: the 99th percentile of gaps between a stream's tokens "
    "from an arrival to its first token; low and high are the median and the longest. hooks: time in all hooks to time "
    "of all steps. overhead: new prompts, slowdown with its 95 % interval, whose upper end the target is held against. "
    "As shipped a save waits for an engine that computes on the same processors; saves at once is what it costs one "
    "that always has something to do. hand-over: from the request to decode's first token, beside prefill's end, the "
    f"load and {DECODE_STEPS} of decode's own steps together, all of the same request."
)


# --- arithmetic ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the part ttft: of one engine on one path in one turn."""

    ttft_ms: float
    lookup_ms: float = 0.0
    lease_ms: float = 0.0
    load_ms: float = 0.0

    @property
    def rest_ms(self) -> float:
        """The engine's own time: without look-up, lease and load."""
        return self.ttft_ms - self.lookup_ms - self.lease_ms - self.load_ms


Samples = Mapping[tuple[str, str], Sequence[Sample]]
"""By engine and path, turn by turn."""


def ttft_rows(samples: Samples) -> list[Row]:
    """All paths of all engines, beside the hit without any connector."""
    own = _times(samples[PLAIN, OWN])
    cold, external = _times(samples[PLAIN, COLD]), _times(samples[RAW, EXTERNAL])
    rows = [
        _row(COLD, cold, f"{EXTERNAL}, {RAW}", external[: len(cold)], Target(COLD_TO_EXTERNAL)),
        _row(f"{OWN}, {PLAIN}", own),
    ]
    targets = {RAW: at_most(RAW_TO_OWN), DEFAULT: at_most(DEFAULT_TO_OWN), BARE: at_most(BARE_TO_OWN)}
    for engine in (RAW, DEFAULT, *([BARE] if (BARE, EXTERNAL) in samples else [])):  # bare copies are a CPU's
        target = at_most(OWN_TO_OWN) if engine == RAW else None  # the codec has no part in it: once is enough
        rows.append(_row(f"{OWN}, {engine}", _times(samples[engine, OWN]), OWN, own, target))
        found = samples[engine, EXTERNAL]
        parts = {
            f"{name}_ms": median(getattr(sample, f"{name}_ms") for sample in found)
            for name in ("lookup", "lease", "load", "rest")
        }
        same = _ratio(_times(found), _times(samples[engine, OWN]))
        details = {**(parts if engine != BARE else {}), "to its engine's own hit": same}
        rows.append(_row(f"{EXTERNAL}, {engine}", _times(found), OWN, own, targets.get(engine), details))
    return rows


def itl_rows(gaps: Mapping[str, Sequence[float]], arrivals: Mapping[str, Sequence[Sample]]) -> list[Row]:
    """gaps: between two tokens of a stream, in milliseconds, by what arrived meanwhile: "none", own or external hits.
    arrivals: how soon those had their first token."""
    rows = [_gap_row("no arrival", gaps["none"], None, None, {})]
    for path in (OWN, EXTERNAL):
        of = None if path == OWN else gaps[OWN]
        target = None if path == OWN else at_most(EXTERNAL_ITL_TO_OWN)
        details = {"arrivals": float(len(arrivals[path])), "their TTFT ms": median(_times(arrivals[path]))}
        rows.append(_gap_row(f"during {path}s", gaps[path], of, target, details))
    return rows


def hooks_row(steps: int, seconds: float, hooks: Mapping[str, tuple[float, int]]) -> Row:
    """The share that hooks have of the steps' time. hooks: seconds and calls of each."""
    spent, calls = sum(one for one, _ in hooks.values()), sum(count for _, count in hooks.values())
    share = spent / seconds
    details = {f"{name} us a step": 1e6 * one / steps for name, (one, _) in hooks.items()}
    return Row(
        {"part": HOOKS, "what": "all hooks in all steps"},
        share,
        SHARE,
        steps,
        share,
        share,
        "a step, ms",
        1e3 * seconds / steps,
        target=at_most(HOOKS_SHARE, of="value"),
        details={"ms a step": 1e3 * spent / steps, "calls a step": calls / steps, **details},
    )


def overhead_row(without: Sequence[float], with_store: Sequence[float], engine: str = DEFAULT) -> Row:
    """Milliseconds of the same prompts, pair by pair. low, high: the interval of the slowdown's median."""
    slowdowns = [there / not_there - 1 for there, not_there in zip(with_store, without, strict=True)]
    low, high = interval_of_median(slowdowns)
    return Row(
        {"part": OVERHEAD, "what": "slowdown with nothing to find" + ("" if engine == DEFAULT else f", {engine}")},
        median(slowdowns),
        SHARE,
        len(slowdowns),
        low,
        high,
        f"{PLAIN}, ms",
        median(without),
        1 + median(slowdowns),
        target=at_most(SLOWDOWN, of="high") if engine == DEFAULT else None,
    )


@dataclass(frozen=True, slots=True)
class HandOver:
    """One request, in milliseconds from its arrival at prefill: decode's first token, prefill's end; the load; one of
    decode's later steps."""

    ttft_ms: float
    prefill_ms: float
    load_ms: float
    step_ms: float

    @property
    def limit_ms(self) -> float:
        """The reference for the first token."""
        return self.prefill_ms + self.load_ms + DECODE_STEPS * self.step_ms


def hand_over_row(way: str, found: Sequence[HandOver]) -> Row:
    """way: of `HAND_OVERS`. ratio: of the first token's time to its own request's limit, the median."""
    times = [one.ttft_ms for one in found]
    names = ("prefill_ms", "load_ms", "step_ms")
    details = {name: median(getattr(one, name) for one in found) for name in names}
    behind = [one.ttft_ms - one.prefill_ms for one in found]
    details |= {"behind prefill's end, ms": median(behind), "p99 of it, ms": quantile(behind, 0.99)}
    details |= {"ttft p99, ms": quantile(times, 0.99), "ratio p99": quantile(_quotients(found), 0.99)}
    return Row(
        {"part": HAND_OVER, "what": f"decode's TTFT, {way}"},
        median(times),
        MS,
        len(times),
        quantile(times, 0.25),
        quantile(times, 0.75),
        limit_of=f"prefill, load, {DECODE_STEPS} steps",
        limit=median(one.limit_ms for one in found),
        ratio=median(_quotients(found)),
        target=at_most(HAND_OVER_TO_LIMIT),
        details=details,
    )


def _quotients(found: Sequence[HandOver]) -> list[float]:
    return [one.ttft_ms / one.limit_ms for one in found]


def interval_of_median(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two of the values that enclose the distribution's median with at least that probability, whatever the
    distribution (order statistics: each value is above the median with probability one half). With fewer than six
    values at 0.95 they are the extremes, and the probability is less."""
    ordered, count = sorted(values), len(values)
    outside = (1 - confidence) / 2
    rank, below = 0, 0.5**count  # probability that at most `rank` values are below the median
    while rank + 1 < count // 2 and below + comb(count, rank + 1) * 0.5**count <= outside:
        rank += 1
        below += comb(count, rank) * 0.5**count
    return ordered[rank], ordered[count - 1 - rank]


def _gap_row(
    what: str, gaps: Sequence[float], of: Sequence[float] | None, target: Target | None, details: Mapping[str, float]
) -> Row:
    high = quantile(gaps, 0.99)
    limit = None if of is None else quantile(of, 0.99)
    return Row(
        {"part": ITL, "what": f"p99 {what}"},
        high,
        MS,
        len(gaps),
        quantile(gaps, 0.5),
        max(gaps),
        limit_of="" if limit is None else f"{OWN}s",
        limit=limit,
        ratio=None if limit is None else high / limit,
        target=target,
        details=details,
    )


def _row(
    what: str,
    times: Sequence[float],
    limit_of: str = "",
    limits: Sequence[float] | None = None,
    target: Target | None = None,
    details: Mapping[str, float] | None = None,
) -> Row:
    return Row(
        {"part": TTFT, "what": what},
        median(times),
        MS,
        len(times),
        quantile(times, 0.25),
        quantile(times, 0.75),
        limit_of=limit_of,
        limit=None if limits is None else median(limits),
        ratio=None if limits is None else _ratio(times, limits),
        target=target,
        details=details or {},
    )


def _times(samples: Sequence[Sample]) -> list[float]:
    return [sample.ttft_ms for sample in samples]


def _ratio(times: Sequence[float], limits: Sequence[float]) -> float:
    return median(time / limit for time, limit in zip(times, limits, strict=True))
