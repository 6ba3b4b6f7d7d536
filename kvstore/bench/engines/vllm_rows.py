"""`kvstore bench ttft --engine vllm`: options, rows and their table.

A row is a median beside its reference. Quotients are taken turn by turn, where both sides are adjacent on a drifting
machine; the row's ratio is their median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from statistics import median
from typing import Any

from rich.table import Table

from kvstore.bench.measure import machine, quantile

TTFT, ITL, HOOKS, OVERHEAD, HAND_OVER = PARTS = ("ttft", "itl", "hooks", "overhead", "hand-over")
TINY, MID = "tiny", "mid"
LLAMAS: Mapping[str, Mapping[str, Any]] = {
    TINY: {  # 3.5 million parameters
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    MID: {  # 98 million
        "vocab_size": 4000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
"""By shape. Run in bfloat16."""
PLAIN, RAW, DEFAULT, BARE, AT_ONCE = ENGINES = ("no connector", "raw", "default codec", "bare copies", "saves at once")
COLD, OWN, EXTERNAL = PATHS = ("cold", "own hit", "external hit")

TICKET, TOGETHER = HAND_OVERS = ("with a ticket", "both legs at once")
"""How decode gets what prefill stores: asked after prefill with its ticket, or at the same time."""

MS, SHARE = "ms", "share"

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
    engine's own pages."""

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


def kv_bytes_per_token(shape: str) -> int:
    """K and V of all layers."""
    llama = LLAMAS[shape]
    return 2 * 2 * int(llama["num_hidden_layers"] * llama["num_key_value_heads"] * llama["head_dim"])


@dataclass(frozen=True, slots=True)
class Target:
    """A wanted ratio or share."""

    value: float
    is_least: bool = False

    def met(self, found: float) -> bool:
        return found >= self.value if self.is_least else found <= self.value

    def __str__(self) -> str:
        return f"{'at least' if self.is_least else 'at most'} {self.value:g}"


@dataclass(frozen=True, slots=True)
class VllmRow:
    """One measured figure, in milliseconds or as a share. value: median over `count` turns, quartiles in low and high,
    unless the words below the table say otherwise. limit: the reference, which limit_of names. ratio: to it, see the
    file's head. judged: what the target applies to, if not the ratio. details: further figures by name."""

    part: str
    what: str
    count: int
    value: float
    low: float
    high: float
    unit: str = MS
    limit_of: str = ""
    limit: float | None = None
    ratio: float | None = None
    target: Target | None = None
    judged: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """None without a target."""
        found = self.ratio if self.judged is None else self.judged
        return None if self.target is None or found is None else self.target.met(found)

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}


@dataclass
class VllmResult:
    """All rows and their conditions. faults: violated expectations, one line each."""

    options: VllmOptions
    versions: dict[str, Any] = field(default_factory=dict)
    rows: list[VllmRow] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return {
            "bench": "ttft",
            "engine": "vllm",
            "machine": machine(),
            "versions": self.versions,
            "options": asdict(self.options),
            "rows": [row.to_dict() for row in self.rows],
            "faults": self.faults,
        }

    def render(self, console: Any) -> None:
        options = self.options
        version = self.versions.get("vllm", "?")
        console.print(f"vLLM {version}, {self.versions.get('threads', '?')} threads, a random {options.shape} Llama")
        table = Table("part", "what", "n", "median", "low .. high", "beside", "ratio", "target")
        for row in self.rows:
            table.add_row(*_cells(row))
        console.print(table)
        for row in self.rows:
            if row.details:
                shown = ", ".join(f"{name} {value:,.4g}" for name, value in row.details.items())
                console.print(f"{row.part}, {row.what}: {shown}")
        console.print(WORDS)


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


def _cells(row: VllmRow) -> tuple[str, ...]:
    is_share = row.unit == SHARE
    number = (lambda value: f"{100 * value:.2f}") if is_share else (lambda value: f"{value:,.2f}")
    mark = {None: "", True: " met", False: " missed"}[row.met]
    return (
        row.part,
        row.what,
        str(row.count),
        f"{number(row.value)} {'%' if is_share else row.unit}",
        f"{number(row.low)} .. {number(row.high)}",
        "" if row.limit is None else f"{row.limit_of} {row.limit:,.2f}",
        "" if row.ratio is None else f"{row.ratio:.3f}",
        "" if row.target is None else f"{row.target}{mark}",
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


def ttft_rows(samples: Samples) -> list[VllmRow]:
    """All paths of all engines, beside the hit without any connector."""
    own = _times(samples[PLAIN, OWN])
    cold, external = _times(samples[PLAIN, COLD]), _times(samples[RAW, EXTERNAL])
    rows = [
        _row(COLD, cold, f"{EXTERNAL}, {RAW}", external[: len(cold)], Target(COLD_TO_EXTERNAL, is_least=True)),
        _row(f"{OWN}, {PLAIN}", own),
    ]
    targets = {RAW: Target(RAW_TO_OWN), DEFAULT: Target(DEFAULT_TO_OWN), BARE: Target(BARE_TO_OWN)}
    for engine in (RAW, DEFAULT, BARE):
        target = Target(OWN_TO_OWN) if engine == RAW else None  # the codec plays no part in it
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


def itl_rows(gaps: Mapping[str, Sequence[float]], arrivals: Mapping[str, Sequence[Sample]]) -> list[VllmRow]:
    """gaps: milliseconds between tokens of a stream, by what arrived meanwhile: "none", own or external hits. arrivals:
    these hits' times to first token."""
    rows = [_gap_row("no arrival", gaps["none"], None, None, {})]
    for path in (OWN, EXTERNAL):
        of = None if path == OWN else gaps[OWN]
        target = None if path == OWN else Target(EXTERNAL_ITL_TO_OWN)
        details = {"arrivals": float(len(arrivals[path])), "their TTFT ms": median(_times(arrivals[path]))}
        rows.append(_gap_row(f"during {path}s", gaps[path], of, target, details))
    return rows


def hooks_row(steps: int, seconds: float, hooks: Mapping[str, tuple[float, int]]) -> VllmRow:
    """The hooks' share of the steps' time. hooks: seconds and calls of each."""
    spent, calls = sum(one for one, _ in hooks.values()), sum(count for _, count in hooks.values())
    share = spent / seconds
    details = {f"{name} us a step": 1e6 * one / steps for name, (one, _) in hooks.items()}
    return VllmRow(
        HOOKS,
        "all hooks in all steps",
        steps,
        share,
        share,
        share,
        SHARE,
        "a step, ms",
        1e3 * seconds / steps,
        target=Target(HOOKS_SHARE),
        judged=share,
        details={"ms a step": 1e3 * spent / steps, "calls a step": calls / steps, **details},
    )


def overhead_row(without: Sequence[float], with_store: Sequence[float], engine: str = DEFAULT) -> VllmRow:
    """Milliseconds of the same prompts, in pairs. low, high: interval of the slowdown's median."""
    slowdowns = [there / not_there - 1 for there, not_there in zip(with_store, without, strict=True)]
    low, high = interval_of_median(slowdowns)
    return VllmRow(
        OVERHEAD,
        "slowdown with nothing to find" + ("" if engine == DEFAULT else f", {engine}"),
        len(slowdowns),
        median(slowdowns),
        low,
        high,
        SHARE,
        f"{PLAIN}, ms",
        median(without),
        1 + median(slowdowns),
        Target(SLOWDOWN) if engine == DEFAULT else None,
        high,
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


def hand_over_row(way: str, found: Sequence[HandOver]) -> VllmRow:
    """way: of `HAND_OVERS`. ratio: median of each first token's time to its own request's limit."""
    times = [one.ttft_ms for one in found]
    names = ("prefill_ms", "load_ms", "step_ms")
    details = {name: median(getattr(one, name) for one in found) for name in names}
    behind = [one.ttft_ms - one.prefill_ms for one in found]
    details |= {"behind prefill's end, ms": median(behind), "p99 of it, ms": quantile(behind, 0.99)}
    details |= {"ttft p99, ms": quantile(times, 0.99), "ratio p99": quantile(_quotients(found), 0.99)}
    return VllmRow(
        HAND_OVER,
        f"decode's TTFT, {way}",
        len(times),
        median(times),
        quantile(times, 0.25),
        quantile(times, 0.75),
        limit_of=f"prefill, load, {DECODE_STEPS} steps",
        limit=median(one.limit_ms for one in found),
        ratio=median(_quotients(found)),
        target=Target(HAND_OVER_TO_LIMIT),
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
) -> VllmRow:
    high = quantile(gaps, 0.99)
    limit = None if of is None else quantile(of, 0.99)
    return VllmRow(
        ITL,
        f"p99 {what}",
        len(gaps),
        high,
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
) -> VllmRow:
    return VllmRow(
        TTFT,
        what,
        len(times),
        median(times),
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
