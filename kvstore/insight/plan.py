"""How much memory a store for a model needs, and what it saves: `kvstore plan`. Each number comes with its formula.

`plan` serves the command and the console's page. Bytes of blocks come from the store's own layout, codec and frame; a
trace, if given, runs through the store's own tables (`replay`). Prefill of n tokens is modelled as n / rate * (1 + n /
QUADRATIC_TOKENS) seconds. Pure: no clock, no file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from rich.table import Table
from rich.text import Text

from kvstore.block.errors import BadInput
from kvstore.block.layout import DTYPE_BYTES, Attention, KvGroup, Layout
from kvstore.block.pages import RAW, block_bytes, default_codec, payload_bytes
from kvstore.block.states import DEFAULT_SHARE, StatePolicy
from kvstore.config import format_size
from kvstore.insight.models import KvKind, KvLayers, ModelKv
from kvstore.insight.replay import MOST_BLOCKS, QUADRATIC_TOKENS, Progress, Replay, headed
from kvstore.insight.served import Engine, served
from kvstore.insight.trace import MOST_TOKENS, Column, Trace
from tiering.frame import frame_bytes
from tiering.policies.lru import LeafFirstLru

DAY_SECONDS = 86_400
MOST_BYTES = 1 << 62
LADDER = 7
"""DRAM sizes that a trace is tried with; each doubles the one before, and the last holds the whole trace."""
ENOUGH = 0.9
"""The recommended size has this share of an unlimited cache's hits."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """How fast a tier delivers KV. overhead_seconds: of any load. is_per_gpu: each GPU has its own link. is_assumed:
    not measured on this machine."""

    name: str
    bytes_per_second: float
    overhead_seconds: float
    is_per_gpu: bool = False
    is_assumed: bool = False

    def __post_init__(self) -> None:
        if not 1.0 <= self.bytes_per_second < MOST_BYTES:
            raise BadInput(f"{self.bytes_per_second:g} bytes per second of {self.name}; give 1 or more, such as 12GB")
        if not 0.0 <= self.overhead_seconds <= 3600.0:
            raise BadInput(f"{self.overhead_seconds:g} seconds before a load from {self.name}; give 0 to 3600")


ASSUMED_TIERS = (TierSpeed("dram", 12e9, 0.002, True, True), TierSpeed("nvme", 3e9, 0.005, False, True))


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Measures of a recorded trace. asked_tokens: of full blocks; new_tokens: those in blocks never asked for before.
    reused_in_window: share of asked blocks that had been asked for within the window before. ceiling: share that an
    unlimited cache finds. sizes: (bytes of DRAM, share found), with leaf-first LRU."""

    name: str
    requests: int
    seconds: float
    asked_tokens: int
    new_tokens: int
    reused_in_window: float
    ceiling: float
    sizes: tuple[tuple[int, float], ...]

    @property
    def new_tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Inputs of a plan, in bytes and seconds; 0 leaves a question out.

    dtype: of the engine's KV pool; empty for the model's. codec: of the store; empty for the adapters' default.
    gpu_memory_bytes, activation_bytes: of one GPU. weights_bytes: of the whole model, which tensor_parallel GPUs share.
    utilisation: share of the GPU's memory that the engine may take. new_tokens_per_second: tokens that no cache has
    yet. prefill_rate: tokens per second of a short prompt. state_share: of the KV's bytes (`StatePolicy`). Whole
    numbers are checked where they are read.
    """

    model: ModelKv
    dtype: str = ""
    codec: str = ""
    block_tokens: int = 64
    tensor_parallel: int = 1
    context_tokens: int = 8192
    gpu_memory_bytes: int = 0
    weights_bytes: int = 0
    activation_bytes: int = 1 << 30
    utilisation: float = 0.9
    users: int = 1
    window_seconds: float = 900.0
    new_tokens_per_second: float = 0.0
    dram_bytes: int = 0
    nvme_bytes: int = 0
    prefill_rate: float = 10_000.0
    tiers: tuple[TierSpeed, ...] = ASSUMED_TIERS
    trace: TraceFigures | None = None
    state_share: float = DEFAULT_SHARE

    def __post_init__(self) -> None:
        StatePolicy(1, 1, 1, self.state_share)  # raises for a share that cannot be
        if self.dtype and self.dtype not in DTYPE_BYTES:
            raise BadInput(f"--dtype {self.dtype[:40]!r}; allowed: {', '.join(DTYPE_BYTES)}")
        if not 0 < self.utilisation <= 1:
            raise BadInput(f"--utilisation {self.utilisation:g}; give a share of the GPU's memory, above 0 to 1")
        if not 0 < self.window_seconds <= 366 * DAY_SECONDS:
            raise BadInput(f"--window {self.window_seconds:g} seconds; give more than 0, at most a year")
        if not 0 <= self.new_tokens_per_second < 1e12:
            raise BadInput(f"--new-tokens-per-second {self.new_tokens_per_second:g}; give 0 or more")
        if not 1e-3 <= self.prefill_rate < 1e12:
            raise BadInput(f"--prefill-rate {self.prefill_rate:g}; give tokens per second, 0.001 or more")
        for flag, given in (
            ("--gpu-memory", self.gpu_memory_bytes),
            ("--weights", self.weights_bytes),
            ("--activations", self.activation_bytes),
            ("--dram", self.dram_bytes),
            ("--nvme", self.nvme_bytes),
        ):
            if not 0 <= given < MOST_BYTES:
                raise BadInput(f"{flag} {given} bytes; give 0 or more, such as 80GB")
        if self.gpu_memory_bytes and not self.weights_bytes:
            raise BadInput("--gpu-memory is shared with the weights; give --weights, such as 16GB for 8B in bfloat16")
        for layers in self.model.layers:
            shards = min(self.tensor_parallel, layers.kv_heads)
            if layers.kv_heads % shards or self.tensor_parallel % shards:
                raise BadInput(
                    f"--tensor-parallel {self.tensor_parallel} does not divide the {layers.kv_heads} KV heads of "
                    f"{self.model.name}; give a divisor of them, or a multiple, with which heads are copied"
                )


class Figure(msgspec.Struct, frozen=True):
    """value: None if there is none; the formula then says why. unit: bytes, tokens, blocks, users, seconds, share,
    ratio, or one of these per another."""

    key: str
    words: str
    value: float | None
    unit: str
    formula: str

    @property
    def text(self) -> str:
        if self.value is None:
            return "-"
        if self.unit == "bytes/second":
            return f"{self.value / 1e9:,.2f} GB/s"
        if self.unit == "seconds" and self.value < 1:
            return f"{1000 * self.value:,.1f} ms"
        if self.unit.startswith("bytes"):
            of = self.unit.removeprefix("bytes").replace("/", " per ")
            count = f"{self.value:,.0f} B" if self.value < 1 << 20 else format_size(self.value)
            return count + of
        if self.unit == "share":
            return f"{100 * self.value:.1f} %"
        digits = 0 if self.value == int(self.value) or self.value >= 1000 else 2
        unit = self.unit.removesuffix("s") if self.value == 1 else self.unit
        return f"{self.value:,.{digits}f} {unit.replace('/', ' per ')}".rstrip()


class PlanSection(msgspec.Struct, frozen=True):
    heading: str
    figures: list[Figure]


@dataclass(frozen=True, slots=True)
class SizePlan:
    """refusals: with which engines the model is not served, or not wholly. notes: what the numbers leave out."""

    request: PlanRequest
    codec: str
    refusals: list[str]
    notes: list[str]
    sections: list[PlanSection]

    def figure(self, key: str) -> Figure:
        """Raises `KeyError`."""
        return {one.key: one for section in self.sections for one in section.figures}[key]

    def to_dict(self) -> dict[str, object]:
        model = self.request.model
        return {
            "model": model.name,
            "source": model.source,
            "dtype": self.request.dtype or model.dtype,
            "codec": self.codec,
            "block_tokens": self.request.block_tokens,
            "tensor_parallel": self.request.tensor_parallel,
            "refusals": self.refusals,
            "notes": self.notes,
            "figures": {
                one.key: {"words": one.words, "value": one.value, "unit": one.unit, "formula": one.formula}
                for section in self.sections
                for one in section.figures
            },
        }

    def render(self, console: Any) -> None:
        request, model = self.request, self.request.model
        for refusal in self.refusals:
            console.print(Text(f"{refusal}."), soft_wrap=True)
        ranks = "" if request.tensor_parallel == 1 else f", {request.tensor_parallel} GPUs"
        console.print(
            Text(f"{model.name} ({model.source}): {request.dtype or model.dtype}{ranks}, codec {self.codec}"),
            soft_wrap=True,
        )
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for section in self.sections:
            table.add_row(Text(section.heading, style="bold"), "", "")
            for one in section.figures:
                table.add_row(Text(f"  {one.words}"), Text(one.text), Text(one.formula))
        console.print(table)
        for note in self.notes:
            console.print(Text(f"Note: {note}."), soft_wrap=True)


def plan(request: PlanRequest) -> SizePlan:
    """Compute all sections. Raises `BadInput` for a codec or block size that the store does not take."""
    parts = _Parts(request)
    sections = [
        ("KV of a token, in the engine", parts.engine()),
        (f"In the store, blocks of {request.block_tokens} tokens", parts.store()),
    ]
    if request.gpu_memory_bytes:
        sections.append((f"Beside the weights, {request.context_tokens:,} tokens each", parts.users()))
    if request.trace is not None:
        sections.append((f"From {request.trace.name}", parts.recorded(request.trace)))
    if parts.new_tokens_per_second:
        sections.append((f"To reuse what came within {_span(request.window_seconds)}", parts.tiers()))
    for tier in request.tiers:
        assumed = " (assumed speed)" if tier.is_assumed else ""
        sections.append((f"Load from {tier.name} or compute{assumed}", parts.break_even(tier)))
    notes, shown = [*request.model.notes, *parts.notes()], [PlanSection(one, list(of)) for one, of in sections]
    return SizePlan(request, parts.codec, refusals(request.model), notes, shown)


def refusals(model: ModelKv) -> list[str]:
    """What engines' adapters do not serve of it, a line for each."""
    answers = ((engine, served(model, engine)) for engine in Engine)
    return [f"With {engine} it is {one.verdict.words}: {one.line}" for engine, one in answers if one.line]


_ATTENTION = {KvKind.WINDOW: Attention.SLIDING, KvKind.CHUNK: Attention.CHUNKED}


def layout_of(request: PlanRequest) -> Layout:
    """A model's block layout: one group per kind of layers. Chunked layers store all tokens, as windowed ones do."""
    groups: list[KvGroup] = []
    first = 0
    for layers in request.model.layers:
        attention = _ATTENTION.get(layers.kind, Attention.FULL)
        groups.append(
            KvGroup(
                f"{layers.kind}{len(groups)}",
                tuple(range(first, first + layers.layers)),
                layers.kv_heads,
                layers.widths,
                layers.dtype or request.dtype or request.model.dtype,
                attention,
                layers.tokens,
            )
        )
        first += layers.layers
    return Layout(tuple(groups), request.block_tokens, head_shards=request.tensor_parallel)


def measure(request: PlanRequest, trace: Trace, progress: Progress) -> TraceFigures:
    """Measure a trace, and replay it through LRU in DRAM at the request's sizes or at a ladder of sizes.

    Raises `BadInput` for a trace without a full block, or without duration.
    """
    used = trace.without_partial()
    seconds = float(np.ptp(trace.timestamps_ms)) / 1000
    if not len(used.blocks):
        raise BadInput(f"{trace.name} has no full block of {trace.block_tokens} tokens, so nothing in it is reused")
    if seconds <= 0:
        raise BadInput(f"{trace.name}: all its requests came at once, so there is no rate; give a longer recording")
    block = trace.block_tokens * stored_bytes_per_token(request)
    given = [request.dram_bytes, request.dram_bytes + request.nvme_bytes] if request.dram_bytes else []
    wanted = [int(size / block) for size in given] or [used.distinct_blocks >> down for down in range(LADDER)]
    rows = []
    for blocks in sorted({min(max(one, 1), MOST_BLOCKS) for one in wanted}):
        words = f"{trace.name}: {format_size(blocks * block)}"

        def told(done: int, words: str = words) -> None:
            progress(words, done, used.requests)

        done = Replay(LeafFirstLru, blocks).run(used, told)
        rows.append((int(blocks * block), float(done.dram_hits.sum()) / len(used.blocks)))
    return TraceFigures(
        trace.name,
        used.requests,
        seconds,
        len(used.blocks) * trace.block_tokens,
        used.distinct_blocks * trace.block_tokens,
        float((_ages(used) <= request.window_seconds).mean()),
        1 - used.distinct_blocks / len(used.blocks),
        tuple(rows),
    )


def stored_bytes_per_token(request: PlanRequest) -> float:
    """Bytes in a tier, headers and padding included."""
    layout = layout_of(request)
    return block_bytes(request.codec or default_codec(layout), layout) / layout.block_tokens


def _ages(trace: Trace) -> Column:
    """For each block asked for, the seconds since it was last asked for; infinite the first time."""
    seconds = (trace.timestamps_ms / 1000)[trace.request_numbers()]
    earlier, later = trace.repeats()
    ages = np.full(len(trace.blocks), np.inf)
    ages[later] = seconds[later] - seconds[earlier]
    return ages


class _Parts:
    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._model = request.model
        self._dtype = request.dtype or request.model.dtype
        self._layout = layout_of(request)
        self.codec = request.codec or default_codec(self._layout)
        self._block = block_bytes(self.codec, self._layout)
        self._token = self._block / self._layout.block_tokens
        states = self._model.state_bytes
        policy = StatePolicy(
            request.block_tokens, max(1, states), self._model.bytes_per_token(self._dtype), request.state_share
        )
        self._state_every = policy.every_tokens
        self._state_token = states / self._state_every if self._state_every else 0.0
        trace = request.trace
        self.new_tokens_per_second = trace.new_tokens_per_second if trace else request.new_tokens_per_second

    def engine(self) -> Iterator[Figure]:
        model, dtype = self._model, self._dtype
        total = model.bytes_per_token(dtype)
        formula = " + ".join(one.formula(dtype) for one in model.layers)
        yield Figure("bytes_per_token", "all layers", total, "bytes/token", formula)
        for kind, words in (
            (KvKind.WINDOW, "of layers with a window"),
            (KvKind.CHUNK, "of layers with chunks"),
            (KvKind.INDEX, "of an indexer"),
        ):
            found = [one for one in model.layers if one.kind is kind]
            if found:
                tokens = f", an engine keeps the last {found[0].tokens:,}" if found[0].tokens else ""
                formula = " + ".join(one.formula(dtype) for one in found) + tokens
                yield Figure(
                    f"{kind}_bytes_per_token", words, model.bytes_per_token(dtype, kind), "bytes/token", formula
                )
        if self._request.tensor_parallel > 1:
            ranks = self._request.tensor_parallel
            value = sum(_on_gpu(one, dtype, ranks) for one in model.layers)
            formula = f"heads are divided among {ranks} GPUs, and copied where there are fewer; a latent is on each"
            yield Figure("bytes_per_token_and_gpu", "on each GPU", value, "bytes/token", formula)
        if model.states:
            formula = " + ".join(one.formula for one in model.states)
            yield Figure("state_bytes", "state of a sequence", model.state_bytes, "bytes", formula)
            formula = f"state / {total:,} B: as much as the KV of so many tokens"
            yield Figure("state_tokens", "in tokens of KV", model.state_bytes / total, "tokens", formula)

    def store(self) -> Iterator[Figure]:
        parts, tokens = self._layout.parts, self._layout.block_tokens
        payload = sum(payload_bytes(self.codec, part) for part in parts)
        raw = self._layout.raw_bytes
        yield Figure(
            "payload_bytes_per_token",
            "payload",
            payload / tokens,
            "bytes/token",
            f"{len(parts)} part{'s' * (len(parts) > 1)} in {self.codec}: {payload:,} B / {tokens} tokens",
        )
        overhead = sum(frame_bytes(payload_bytes(self.codec, part)) - payload_bytes(self.codec, part) for part in parts)
        formula = f"a header of 4 KiB and padding to 4 KiB for each part: {overhead:,} B / {tokens} tokens"
        yield Figure("overhead_bytes_per_token", "frames", overhead / tokens, "bytes/token", formula)
        formula = f"payload + frames; a block is {self._block:,} B"
        yield Figure("stored_bytes_per_token", "in a tier", self._token, "bytes/token", formula)
        if self.codec != RAW:
            yield Figure("codec_ratio", "smaller by codec", raw / payload, "", f"{raw:,} B / {payload:,} B")
        if self._model.states:
            total = self._model.bytes_per_token(self._dtype)
            formula = f"multiple of a block, from state / ({self._request.state_share:g} x {total:,} B)"
            yield Figure("state_every_tokens", "a state kept every", self._state_every or None, "tokens", formula)
            formula = "state / that"
            yield Figure("state_bytes_per_token", "these states", self._state_token, "bytes/token", formula)
        context = self._request.context_tokens
        formula = f"{context:,} tokens x {self._token:,.0f} B, in full blocks"
        size = context // tokens * self._block
        yield Figure("context_bytes", f"a prompt of {context:,} tokens", size, "bytes", formula)

    def users(self) -> Iterator[Figure]:
        request = self._request
        ranks = request.tensor_parallel
        usable = int(request.gpu_memory_bytes * request.utilisation)
        free = usable - -(-request.weights_bytes // ranks) - request.activation_bytes
        formula = (
            f"{format_size(request.gpu_memory_bytes)} x {request.utilisation:g} - weights "
            f"{format_size(request.weights_bytes)} / {ranks} - activations {format_size(request.activation_bytes)}"
        )
        yield Figure("kv_pool_bytes", "room for KV, each GPU", max(free, 0), "bytes", formula)
        context = request.context_tokens
        each = self._user_bytes(context)
        states = f" + state / {ranks}" if self._model.states else ""
        windows = ", of windows and chunks the last tokens" if any(one.tokens for one in self._model.layers) else ""
        each_token = sum(_on_gpu(one, self._dtype, ranks) for one in self._model.layers)
        formula = f"{context:,} tokens x {each_token:,} B{windows}{states}"
        yield Figure("user_bytes", "KV of a user, each GPU", each, "bytes", formula)
        yield Figure("users", "users at a time", max(free, 0) // each, "users", "room / KV of a user, rounded down")
        longest = _last(lambda tokens: request.users * self._user_bytes(tokens) <= free, MOST_TOKENS - 1)
        formula = f"the most tokens with which {request.users:,} x KV of a user <= room"
        words = "longest context" + (f" of {request.users:,} users" if request.users > 1 else " of one user")
        yield Figure("longest_context", words, longest, "tokens", formula)

    def recorded(self, trace: TraceFigures) -> Iterator[Figure]:
        count = f"{trace.requests:,} requests in {trace.seconds:,.0f} s, full blocks alone"
        asked = trace.asked_tokens / trace.seconds
        yield Figure("asked_tokens_per_second", "asked for", asked, "tokens/second", count)
        formula = f"{trace.new_tokens:,} tokens / {trace.seconds:,.0f} s"
        yield Figure("new_tokens_per_second", "of that new", trace.new_tokens_per_second, "tokens/second", formula)
        formula = "blocks asked for that were asked for before / all: no cache finds more"
        yield Figure("ceiling", "found without an end", trace.ceiling, "share", formula)
        formula = f"blocks that were asked for within {_span(self._request.window_seconds)} before / all"
        yield Figure("reused_in_window", "found in the window", trace.reused_in_window, "share", formula)
        for at, (size, found) in enumerate(trace.sizes):
            words = f"with {format_size(size)} of DRAM"
            yield Figure(f"found_with_{at}", words, found, "share", f"replayed, lru, {size:,} B")
        enough = next((size for size, found in trace.sizes if found >= ENOUGH * trace.ceiling), None)
        formula = f"the least of these that finds {100 * ENOUGH:g} % of what is found without an end"
        if enough is None:
            formula = f"none of these finds {100 * ENOUGH:g} % of what is found without an end: give more"
        yield Figure("enough_bytes", "enough", enough, "bytes", formula)

    def tiers(self) -> Iterator[Figure]:
        """DRAM and NVMe for a window, and the writes to a drive."""
        request, rate = self._request, self.new_tokens_per_second
        token = self._token + self._state_token
        flow = rate * token
        formula = f"{rate:,.0f} new tokens per second x {token:,.0f} B"
        yield Figure("new_bytes_per_second", "new KV", flow, "bytes/second", formula)
        total = flow * request.window_seconds
        formula = f"new KV x {request.window_seconds:,.0f} s"
        yield Figure("window_bytes", "DRAM and NVMe together", total, "bytes", formula)
        nvme = request.nvme_bytes
        if request.dram_bytes or nvme:
            both = request.dram_bytes + nvme
            formula = f"(DRAM {format_size(request.dram_bytes)} + NVMe {format_size(nvme)}) / new KV"
            yield Figure("covered_seconds", "window of what is given", both / flow, "seconds", formula)
        if request.dram_bytes and not nvme:
            nvme = max(0, int(total) - request.dram_bytes)
            formula = f"together - DRAM {format_size(request.dram_bytes)}"
            yield Figure("nvme_bytes", "NVMe for the window", nvme, "bytes", formula)
        if nvme:
            formula = f"new KV x {DAY_SECONDS:,} s / NVMe, if all of it is written (nvme_writes = all)"
            yield Figure("drive_writes_per_day", "drive writes per day", flow * DAY_SECONDS / nvme, "", formula)

    def break_even(self, tier: TierSpeed) -> Iterator[Figure]:
        """The prefix length from which loading is faster than computing."""
        request, speed = self._request, tier.bytes_per_second
        rate, quadratic = request.prefill_rate, QUADRATIC_TOKENS
        token = self._loaded_bytes(1, tier)
        depth = request.context_tokens
        formula = f"{token:,.0f} B per token x {rate:,.0f} tokens per second of prefill"
        yield Figure(
            f"{tier.name}_least_bandwidth", "pays from, at a prompt's start", token * rate, "bytes/second", formula
        )
        behind = self._loaded_bytes(depth + 1, tier) - self._loaded_bytes(depth, tier)
        deep = behind * rate / (1 + 2 * depth / quadratic)
        formula = f"{behind:,.0f} B per token x {rate:,.0f} / (1 + 2 x {depth:,} / {quadratic:,})"
        yield Figure(
            f"{tier.name}_least_bandwidth_deep", f"pays from, behind {depth:,} tokens", deep, "bytes/second", formula
        )

        state = self._model.state_bytes / (request.tensor_parallel if tier.is_per_gpu else 1)
        before = tier.overhead_seconds + state / speed
        first = f"{1000 * tier.overhead_seconds:g} ms"
        if state:
            first += f" + {format_size(state)} of state / {speed / 1e9:g} GB/s"

        def pays(tokens: int) -> bool:
            load = before + self._loaded_bytes(tokens, tier) / speed
            return load < tokens / rate * (1 + tokens / quadratic)

        # Per token, loading gets cheaper with length (windows) and computing dearer: once loading pays, it pays from
        # there on.
        never = _last(lambda tokens: not pays(tokens), MOST_TOKENS - 1)
        shortest = never + 1 if never < MOST_TOKENS - 1 else None
        formula = (
            f"least n with {first} + n x {token:,.0f} B / {speed / 1e9:g} GB/s "
            f"< n / {rate:,.0f} x (1 + n / {quadratic:,})"
        )
        yield Figure(f"{tier.name}_shortest_prefix", "shortest prefix worth it", shortest, "tokens", formula)
        blocks = None if shortest is None else -(-shortest // self._layout.block_tokens)
        formula = f"that / {self._layout.block_tokens} tokens, rounded up"
        yield Figure(f"{tier.name}_shortest_blocks", "in blocks", blocks, "blocks", formula)
        load = before + self._loaded_bytes(depth, tier) / speed
        compute = depth / rate * (1 + depth / quadratic)
        size = format_size(self._loaded_bytes(depth, tier))
        formula = f"{first} + {size} / {speed / 1e9:g} GB/s"
        yield Figure(f"{tier.name}_load_seconds", f"loading {depth:,} tokens", load, "seconds", formula)
        formula = f"{depth:,} / {rate:,.0f} x (1 + {depth:,} / {quadratic:,})"
        yield Figure(f"{tier.name}_compute_seconds", f"computing {depth:,} tokens", compute, "seconds", formula)

    def notes(self) -> Iterator[str]:
        if self._model.states:
            size = format_size(self._model.state_bytes)
            yield (
                f"states at the ends of prompts and answers, up to two of {size} a request, are no part of the sizes: "
                "kvstore replay --model says what they take and find"
            )
        if any(one.is_assumed for one in self._request.tiers):
            yield "speeds of tiers are assumed ones: measure with kvstore bench tiers, and give them"
        if self._request.trace is None:
            yield "no formula knows your hit rate: record what engines ask for (kvstore record), and give --trace"

    def _user_bytes(self, tokens: int) -> int:
        ranks = self._request.tensor_parallel
        kept = sum(_on_gpu(one, self._dtype, ranks) * one.kept_tokens(tokens) for one in self._model.layers)
        return max(1, kept + -(-self._model.state_bytes // ranks))

    def _loaded_bytes(self, tokens: int, tier: TierSpeed) -> float:
        total = 0.0
        for group, layers in zip(self._layout.groups, self._model.layers, strict=True):
            stored = sum(
                frame_bytes(payload_bytes(self.codec, part)) for part in self._layout.parts if part.group is group
            )
            kept = layers.kept_tokens(tokens) if layers.kind is KvKind.WINDOW else tokens
            shards = _shards(layers, self._request.tensor_parallel) if tier.is_per_gpu else 1
            total += stored / self._layout.block_tokens * kept / shards
        return total


def _shards(layers: KvLayers, ranks: int) -> int:
    return min(ranks, layers.kv_heads)


def _on_gpu(layers: KvLayers, dtype: str, ranks: int) -> int:
    return layers.bytes_per_token(dtype) // _shards(layers, ranks)


def _last(holds: Callable[[int], bool], most: int) -> int:
    return bisect_left(range(1, most + 1), True, key=lambda number: not holds(number))


def _span(seconds: float) -> str:
    for unit, size in (("d", DAY_SECONDS), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def models_table(models: Iterable[ModelKv]) -> Table:
    table = headed("model|*B per token|*in windows|*state|*in tokens|from")
    for one in models:
        short = one.bytes_per_token(one.dtype, KvKind.WINDOW, KvKind.CHUNK)
        state = format_size(one.state_bytes) if one.states else "-"
        total = one.bytes_per_token(one.dtype)
        tokens = f"{one.state_bytes / total:,.0f}" if one.states else "-"
        table.add_row(one.name, f"{total:,}", f"{short:,}" if short else "-", state, tokens, Text(one.source))
    return table
