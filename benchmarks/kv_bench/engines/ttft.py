"""`benches.py ttft`: the time to the first token, cold, from the pool on the device, and from DRAM.

A Llama with random weights answers prompts of a given length through an engine's adapter. For each length:

    cold   no store: prefill of everything; beside it, its share of the device's matrix rate (MFU)
    fill   the first request with a store: prefill; all blocks are saved behind its first token
    dram   the same prompt again: its prefix comes from the store in this process
    hbm    and again: its prefix comes from the pool of decoded blocks on the device

The limit of a hit is the time of its bytes at the rate of this run's plain copies (pinned memory to the device; for the
pool a copy on the device, which reads and writes), plus the forward pass over the tokens behind the prefix. A speed-up
depends on the cold run as much as on the store, so the MFU stands beside it.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

import kvstore
from engine_adapter.adapter import Report
from engine_adapter.hf.attention import ChunkMask
from engine_adapter.hf.buffers import BufferSet
from engine_adapter.hf.layers import even_cache
from engine_adapter.hf_cache import Generation, PrefixCache
from kv_bench.engines.on_device import DeviceTimer, device_named, give_memory_back, timer_of
from kv_bench.engines.paged_pool import FAILURES, told
from kv_bench.engines.random_llama import EIGHT_B, SHAPES, build, peak_flops, prefill_flops, weights_bytes
from kv_bench.engines.transfer_rows import LOAD, PlainCopy
from kv_bench.engines.ttft_rows import (
    COLD,
    DRAM,
    FILL,
    HBM,
    RAW,
    SMALL,
    SPEEDUPS,
    Rates,
    TtftOptions,
    TtftResult,
    parse_tokens,
)
from kvstore.bench.measure import Progress, available_bytes, quiet_collector, teller
from kvstore.bench.row import MS, Row, Target
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput
from kvstore.block.layout import Layout
from kvstore.config import format_size
from tiering.frame import frame_bytes

HF = "hf"
ENGINES = (HF, "vllm")
"""`ttft_vllm` measures the second."""
MOST_SECONDS = 20.0
"""A row's laps stop after this time."""
COPY_LAPS = 7
PINNED_SHARE = 0.8
"""Share of DRAM that leases may pin at once, as in `kvstore.config.Limits`."""


def run(
    options: TtftOptions | None = None, progress: Progress = None, device: str | None = None, engine: str = HF
) -> TtftResult:
    """Measure all lengths. Raises `BadInput` for a missing device or engine, or too little memory for the model."""
    if engine != HF:
        raise BadInput(f"engine={engine!r}; allowed: {', '.join(ENGINES)}")
    chosen = device_named(device)
    options = options or (TtftOptions() if chosen.type == "cuda" else SMALL)
    _check(options, chosen)
    say = teller(progress)
    budget = Budget(perf_counter() + options.seconds)
    say(f"a random {options.shape} Llama")
    # Beyond the longest context: room for what follows the prefix.
    model = build(options.shape, chosen, max(options.contexts) + options.suffix_tokens + 64)
    timer = timer_of(chosen)
    result = TtftResult(options, chosen, engine, _rates(model, options, chosen, timer))
    with quiet_collector():
        for context in options.contexts:
            try:
                give_memory_back(chosen)
                for row in _Length(model, context, timer, result, budget).rows(say):
                    result.rows.append(row)
            except FAILURES as error:
                result.faults.append(f"{context} tokens ended early: {told(error)}")
    return result


def _rates(model: Any, options: TtftOptions, device: torch.device, timer: DeviceTimer) -> Rates:
    copy = PlainCopy(options.copy_bytes, device, timer)
    there = torch.randint(0, 256, (2, options.copy_bytes), dtype=torch.uint8, device=device)
    on_device = timer.timed(lambda: there[0].copy_(there[1]))
    pinned = _median_seconds(lambda: copy.run(LOAD, options.copy_bytes), COPY_LAPS)
    on_device()
    copied = median(on_device().wall for _ in range(COPY_LAPS))
    dtype = next(model.parameters()).dtype
    return Rates(options.copy_bytes / pinned, 2 * options.copy_bytes / copied, peak_flops(device, dtype, timer))


class Budget:
    """Time left. A section is skipped if the seconds per token of a shorter context predict that it would not end in
    time: a killed bench loses all rows."""

    def __init__(self, end: float, clock: Callable[[], float] = perf_counter) -> None:
        self._end, self._clock = end, clock
        self._began = clock()
        self._seconds_per_token: dict[str, float] = {}

    def begin(self, section: str, tokens: int) -> bool:
        """Start a section's timer; returns whether it is expected to end in time."""
        self._began = self._clock()
        return self._began + self._seconds_per_token.get(section, 0.0) * tokens < self._end

    def spent(self, section: str, tokens: int) -> None:
        """Record the time of the section begun last."""
        self._seconds_per_token[section] = (self._clock() - self._began) / tokens


class _Length:
    """One context length: all paths, each after those that it depends on."""

    def __init__(self, model: Any, context: int, timer: DeviceTimer, result: TtftResult, budget: Budget) -> None:
        self._model, self._context, self._timer, self._budget = model, context, timer, budget
        self._result, self._options, self._device = result, result.options, result.device
        self._rates, self._faults = result.rates, result.faults
        generator = np.random.default_rng(context)
        self._prompt = generator.integers(
            0, model.config.vocab_size, context + self._options.suffix_tokens, dtype=np.uint32
        )
        self._cold_ms, self._mfu, self._suffix_ms = 0.0, 0.0, 0.0

    def rows(self, say: Callable[[str], None]) -> Iterator[Row]:
        options, context = self._options, self._context
        if not self._has_time(COLD, f"{context} tokens"):
            return
        say(f"{context:,} tokens, cold")
        cache = PrefixCache(self._model, None, chunk_tokens=options.chunk_tokens)
        self._warm_up(cache)
        answers = self._laps(cache, options.laps)
        self._cold_ms = median(answer.report.ttft_ms for answer in answers)
        flops = prefill_flops(self._model, len(self._prompt))
        self._mfu = flops / (self._cold_ms / 1e3) / self._rates.peak_flops
        self._suffix_ms = 1e3 * self._suffix_seconds(cache)
        layout = cache.layout
        del cache
        self._budget.spent(COLD, context)
        yield self._row(COLD, "", answers, 0, None)
        for codec in options.codecs:
            if not self._has_time(codec, f"{context} tokens, {codec}"):
                continue
            with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory, ExitStack() as stack:
                try:
                    dram = _dram_bytes(layout, codec, len(self._prompt))
                    store = stack.enter_context(kvstore.open(f"embedded:{directory}", dram=dram))
                except BadInput as error:
                    self._result.left_out.append(f"{context} tokens, {codec}: {error}")
                    continue
                yield from self._through(store, layout, codec, say)

    def _through(self, store: Any, layout: Layout, codec: str, say: Callable[[str], None]) -> Iterator[Row]:
        options, context = self._options, self._context
        blocks = context // layout.block_tokens
        (part,) = layout.parts
        size, raw = blocks * codec_named(codec).payload_bytes(part), blocks * layout.raw_bytes
        say(f"{context:,} tokens, filling a store, {codec}")
        cache = self._cache(store, codec)
        yield self._row(FILL, codec, self._laps(cache, 1), size, None)
        say(f"{context:,} tokens, from DRAM, {codec}")
        limit = 1e3 * size / self._rates.pinned_bytes_per_second + self._suffix_ms
        yield self._row(DRAM, codec, self._laps(cache, options.laps, DRAM), size, limit)
        self._budget.spent(codec, context)
        if codec != RAW or not self._has_time(HBM, f"{context} tokens, from the pool"):
            return
        del cache
        say(f"{context:,} tokens, from the pool")
        cache = self._cache(store, codec, hbm=raw + 2 * options.suffix_tokens * raw // context)
        self._laps(cache, 1, DRAM)  # fills the pool
        limit = 1e3 * 2 * raw / self._rates.device_bytes_per_second + self._suffix_ms
        yield self._row(HBM, codec, self._laps(cache, options.laps, HBM), 2 * raw, limit)
        self._budget.spent(HBM, context)

    def _has_time(self, section: str, what: str) -> bool:
        """Begin a section, or note that there is no time for it."""
        if self._budget.begin(section, self._context):
            return True
        self._result.left_out.append(f"{what}: no time for it in {self._options.seconds:.0f} seconds")
        return False

    def _cache(self, store: Any, codec: str, hbm: int = 0) -> PrefixCache:
        gc.collect()  # frees the buffers of the one before
        chunk = self._options.chunk_tokens
        return PrefixCache(self._model, store, codec=codec, chunk_tokens=chunk, hbm=hbm, deadline_ms=10_000)

    def _warm_up(self, cache: PrefixCache) -> None:
        """Compile and load everything, at a short length."""
        few = min(self._context, 2 * self._options.chunk_tokens) + self._options.suffix_tokens
        cache.generate(self._prompt[:few], max_new_tokens=2, stop_tokens=())

    def _laps(self, cache: PrefixCache, laps: int, tier: str | None = None) -> list[Generation]:
        """Until there are enough, or time is up. tier: where the whole prefix must come from."""
        answers: list[Generation] = []
        start = perf_counter()
        while len(answers) < laps and (not answers or perf_counter() - start < MOST_SECONDS):
            answers.append(cache.generate(self._prompt, max_new_tokens=1, stop_tokens=()))
            report = answers[-1].report
            hits: Any = report.account.to_dict()["hits"]
            if tier is not None and hits.get(tier) != self._context:
                self._faults.append(f"{self._context} tokens were to come from {tier}: {_shown(report)}")
            if report.faults:
                self._faults.append(f"{self._context} tokens: {report.fault}")
        return answers

    def _suffix_seconds(self, cache: PrefixCache) -> float:
        """Time of the forward pass over the suffix, behind random KV."""
        suffix, context = self._options.suffix_tokens, self._context
        block = cache.layout.block_tokens
        capacity = -(-(context + suffix) // block) * block
        planes = BufferSet(cache.layout, 1, capacity, self._device).of_rows(0, 1)
        for pair in planes:
            for plane in pair:
                plane.normal_()
        tokens = torch.from_numpy(self._prompt[-suffix:].astype(np.int64)).to(self._device)[None]
        mask = None
        if self._device.type == "cpu":  # a CPU's kernels need a mask behind a prefix
            mask = ChunkMask(self._options.chunk_tokens, planes[0][0].dtype).of(suffix, context + suffix)

        def forward() -> None:
            cache.call(tokens, even_cache(planes, context), mask).argmax(-1).tolist()

        forward()
        return _median_seconds(forward, max(5, self._options.laps))

    def _row(
        self, path: str, codec: str, answers: Sequence[Generation], bytes_moved: int, limit_ms: float | None
    ) -> Row:
        reports = [answer.report for answer in answers]
        times = [report.ttft_ms for report in reports]
        is_judged = path == DRAM and self._device.type == "cuda" and self._options.shape == EIGHT_B
        target = SPEEDUPS.get((self._context, codec)) if is_judged else None
        return Row(
            {"context_tokens": self._context, "path": path, "codec": codec},
            median(times),
            MS,
            len(times),
            min(times),
            max(times),
            "" if limit_ms is None else "bytes and suffix",
            limit_ms,
            None if limit_ms is None else limit_ms / median(times),
            target=None if target is None else Target(target, of="speedup"),
            details={
                "laps": len(times),
                "ttft_ms": median(times),
                "ttft_ms_low": min(times),
                "ttft_ms_high": max(times),
                "lookup_ms": median(report.lookup_ms for report in reports),
                "restored_ms": median(report.restored_ms for report in reports),
                "save_ms": median(report.save_ms for report in reports),
                "bytes_moved": bytes_moved,
                "suffix_ms": self._suffix_ms,
                "limit_ms": limit_ms,
                "speedup": self._cold_ms / median(times),
                "cold_mfu": self._mfu,
                "target_speedup": target,
                "tokens": _shown(reports[-1]),
            },
        )


def _shown(report: Report) -> dict[str, int]:
    """Tokens of a prompt, by tier or miss reason."""
    account: Any = report.account.to_dict()
    return {str(name): count for part in ("hits", "misses") for name, count in account[part].items()}


def options_for(
    device: str | None,
    *,
    shape: str | None = None,
    contexts: str | None = None,
    chunk_tokens: int | None = None,
    laps: int | None = None,
    seconds: float | None = None,
) -> TtftOptions:
    """The device's default options, with what was given in their place. contexts: such as "8k,32k". Raises
    `BadInput`."""
    usual = TtftOptions() if device_named(device).type == "cuda" else SMALL
    given: dict[str, Any] = {"shape": shape, "chunk_tokens": chunk_tokens, "laps": laps, "seconds": seconds}
    if contexts is not None:
        given["contexts"] = tuple(parse_tokens(part) for part in contexts.split(","))
    return replace(usual, **{name: value for name, value in given.items() if value is not None})


def _check(options: TtftOptions, device: torch.device) -> None:
    if options.shape not in SHAPES:
        raise BadInput(f"shape={options.shape!r}; allowed: {', '.join(SHAPES)}")
    for context in options.contexts:
        if context < 1 or context % options.chunk_tokens:
            raise BadInput(
                f"context={context} is not a multiple of the prefill chunk of {options.chunk_tokens} tokens; use "
                f"{max(1, context // options.chunk_tokens) * options.chunk_tokens}"
            )
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < weights_bytes(options.shape):
            raise BadInput(
                f"a {options.shape} Llama has {format_size(weights_bytes(options.shape))} of weights, and the GPU has "
                f"{format_size(free)} free; end what uses it, or take a smaller shape: {', '.join(SHAPES)}"
            )


def _dram_bytes(layout: Layout, codec: str, tokens: int) -> int:
    """Size of a store that can pin so many tokens at once. Raises `BadInput` if memory is too small."""
    (part,) = layout.parts
    frames = -(-tokens // layout.block_tokens) * frame_bytes(codec_named(codec).payload_bytes(part))
    wanted = max(8 << 20, int(frames / PINNED_SHARE * 1.1) + (64 << 20))
    if wanted > available_bytes():
        raise BadInput(
            f"{tokens} tokens need a store of {format_size(wanted)} of memory with codec {codec}, and "
            f"{format_size(available_bytes())} are available; give a shorter --context"
        )
    return wanted


def _median_seconds(work: Callable[[], object], laps: int) -> float:
    """Wall time, after one uncounted turn."""
    work()
    times = []
    for _ in range(laps):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)
