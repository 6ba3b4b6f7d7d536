"""`kvstore bench ttft`: the time to the first token, cold, from the pool on the device, and from DRAM.

A Llama with random weights answers prompts through `PrefixCache`. The limit of a hit is its bytes at the rate of this
run's plain copies and the forward pass over the tokens behind the prefix; the cold run's share of the device's matrix
rate (MFU) stands beside each speed-up.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

import kvstore
from engine_adapter.adapter import Report
from engine_adapter.hf_cache import CHUNK_TOKENS_CUDA, PrefixCache
from kv_bench.kernels import FAILURES, LOAD, RAW, PlainCopy, told
from kv_bench.llamas import EIGHT_B, TINY, TTFT_SHAPES, build, parse_tokens, peak_flops, prefill_flops
from kv_bench.measure import Say, available_bytes, quiet_collector, timed
from kv_bench.on_device import DeviceTimer, describe, device_named, give_memory_back
from kv_bench.script import enough, one_of
from kv_kernels.int8 import KC64
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput
from kvstore.block.layout import Layout
from kvstore.traffic.row import MS, BenchResult, Row, Section, Target
from tiering.frame import frame_bytes

ENGINES = HF, VLLM = ("hf", "vllm")
COLD, FILL, DRAM, HBM = ("cold", "fill", "dram", "hbm")
SPEEDUPS = {(32768, RAW): 14.0, (32768, KC64): 22.0}
"""(context, codec): to the cold run, from DRAM, of the 8B shape on a GPU."""
MOST_SECONDS = 20.0
"""A row's laps stop after this time."""
COPY_LAPS = 7
PINNED_SHARE = 0.8
"""Share of DRAM that leases may pin at once, as in `kvstore.config.Limits`."""
LEFT_OUT = ("laps", "ttft ms", "ttft ms low", "ttft ms high", "limit ms", "target speedup")
"""What other columns have as well."""


@dataclass(frozen=True, slots=True)
class TtftOptions:
    """shape: of the model. contexts: tokens of the prefix that is kept, whole chunks. suffix_tokens: behind it, always
    computed. chunk_tokens: of a prompt's cells. laps: of each row. copy_bytes: of the plain copies.
    """

    shape: str = EIGHT_B
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    codecs: tuple[str, ...] = (RAW, KC64)
    suffix_tokens: int = 64
    chunk_tokens: int = CHUNK_TOKENS_CUDA
    laps: int = 5
    copy_bytes: int = 1 << 30
    seconds: float = 1800.0


SMALL = TtftOptions(TINY, (256, 512), chunk_tokens=128, laps=3, copy_bytes=1 << 20)
"""What a CPU does in seconds."""


def options_for(device: str | None, contexts: str | None = None, **given: Any) -> TtftOptions:
    """The device's default options, with what was given in their place. contexts: such as "8k,32k". Raises
    `BadInput`."""
    usual = TtftOptions() if device_named(device).type == "cuda" else SMALL
    if contexts is not None:
        given["contexts"] = tuple(parse_tokens(part) for part in contexts.split(","))
    return replace(usual, **{name: value for name, value in given.items() if value is not None})


def run(options: TtftOptions, say: Say, device: str | None = None, engine: str = HF) -> BenchResult:
    """Measure all lengths. Raises `BadInput` for a missing device or engine, or too little memory for the model."""
    one_of("engine", engine, ENGINES)
    chosen = device_named(device)
    _check(options, chosen)
    say(f"a random {options.shape} Llama")
    # Beyond the longest context: room for what follows the prefix.
    try:
        model = build(TTFT_SHAPES[options.shape], chosen, max(options.contexts) + options.suffix_tokens + 64)
    except torch.OutOfMemoryError as error:
        raise BadInput(f"{told(error)}; end what uses the GPU, or take a smaller --shape") from None
    bench, rows = _Ttft(model, options, chosen), list[Row]()
    with quiet_collector():
        for context in options.contexts:
            try:
                give_memory_back(chosen)
                for row in _Length(bench, context).rows(say):
                    rows.append(row)
            except FAILURES as error:
                bench.faults.append(f"{context} tokens ended early: {told(error)}")
    facts = describe(chosen)
    title = f"on {facts['name']}, a random {options.shape} Llama, engine {engine}"
    section = Section(rows, title, "\n".join(bench.left_out), left_out=LEFT_OUT)
    about = {"engine": engine, "device": facts, "rates": bench.rates, "left_out": bench.left_out}
    return BenchResult("ttft", options, [section], about, bench.faults)


def _check(options: TtftOptions, device: torch.device) -> None:
    one_of("shape", options.shape, TTFT_SHAPES)
    for context in options.contexts:
        if context < 1 or context % options.chunk_tokens:
            raise BadInput(
                f"context={context} is not a multiple of the prefill chunk of {options.chunk_tokens} tokens; use "
                f"{max(1, context // options.chunk_tokens) * options.chunk_tokens}"
            )


class _Ttft:
    """What all lengths share. faults: what failed, one line each. left_out: for what there was no time or no memory,
    and why."""

    def __init__(self, model: Any, options: TtftOptions, device: torch.device) -> None:
        self.model, self.options, self.device = model, options, device
        self._end, self._began = perf_counter() + options.seconds, 0.0
        self._seconds_per_token: dict[str, float] = {}
        self.faults: list[str] = []
        self.left_out: list[str] = []
        timer = DeviceTimer(device)
        copy = PlainCopy(options.copy_bytes, device, timer)
        there = torch.randint(0, 256, (2, options.copy_bytes), dtype=torch.uint8, device=device)
        on_device = timer.timed(lambda: there[0].copy_(there[1]))
        pinned = _median_seconds(lambda: copy.run(LOAD, options.copy_bytes), COPY_LAPS)
        on_device()
        copied = median(on_device().wall for _ in range(COPY_LAPS))
        peak = peak_flops(device, next(model.parameters()).dtype, timer)
        self.rates = {"pinned_bytes_per_second": options.copy_bytes / pinned, "peak_flops": peak}
        self.rates["device_bytes_per_second"] = 2 * options.copy_bytes / copied

    def has_time(self, section: str, context: int, what: str) -> bool:
        """Whether a section, which begins now, ends in time, by the seconds per token of a shorter context."""
        self._began = perf_counter()
        if self._began + self._seconds_per_token.get(section, 0.0) * context < self._end:
            return True
        self.left_out.append(f"{what}: no time for it in {self.options.seconds:.0f} seconds")
        return False

    def spent(self, section: str, context: int) -> None:
        self._seconds_per_token[section] = (perf_counter() - self._began) / context


class _Length:
    """One context length: all paths, each after those that it depends on."""

    def __init__(self, bench: _Ttft, context: int) -> None:
        self._bench, self._context, self._options = bench, context, bench.options
        vocabulary, tokens = bench.model.config.vocab_size, context + self._options.suffix_tokens
        self._prompt = np.random.default_rng(context).integers(0, vocabulary, tokens, dtype=np.uint32)
        self._cold_ms, self._mfu, self._suffix_ms = 0.0, 0.0, 0.0

    def rows(self, say: Say) -> Iterator[Row]:
        bench, options, context = self._bench, self._options, self._context
        if not bench.has_time(COLD, context, f"{context} tokens"):
            return
        say(f"{context:,} tokens, cold")
        cache = PrefixCache(bench.model, None, chunk_tokens=options.chunk_tokens)
        few = min(context, 2 * options.chunk_tokens) + options.suffix_tokens
        cache.generate(self._prompt[:few], max_new_tokens=2, do_sample=False)  # compiles and loads everything
        answers = self._laps(cache, options.laps)
        self._cold_ms = median(report.ttft_ms for report in answers)
        flops = prefill_flops(bench.model, len(self._prompt))
        self._mfu = flops / (self._cold_ms / 1e3) / bench.rates["peak_flops"]
        self._suffix_ms = 1e3 * self._suffix_seconds(cache)
        layout = cache.layout
        del cache
        bench.spent(COLD, context)
        yield self._row(COLD, "", answers, 0, None)
        for codec in options.codecs:
            if not bench.has_time(codec, context, f"{context} tokens, {codec}"):
                continue
            with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory, ExitStack() as stack:
                try:
                    dram = _dram_bytes(layout, codec, len(self._prompt))
                    store = stack.enter_context(kvstore.open(f"embedded:{directory}", dram=dram))
                except BadInput as error:
                    bench.left_out.append(f"{context} tokens, {codec}: {error}")
                    continue
                yield from self._through(store, layout, codec, say)

    def _through(self, store: Any, layout: Layout, codec: str, say: Say) -> Iterator[Row]:
        bench, options, context = self._bench, self._options, self._context
        blocks = context // layout.block_tokens
        (part,) = layout.parts
        size, raw = blocks * codec_named(codec).payload_bytes(part), blocks * layout.raw_bytes
        say(f"{context:,} tokens, filling a store, {codec}")
        cache = self._cache(store, codec)
        yield self._row(FILL, codec, self._laps(cache, 1), size, None)
        say(f"{context:,} tokens, from DRAM, {codec}")
        limit = 1e3 * size / bench.rates["pinned_bytes_per_second"] + self._suffix_ms
        yield self._row(DRAM, codec, self._laps(cache, options.laps, DRAM), size, limit)
        bench.spent(codec, context)
        if codec != RAW or not bench.has_time(HBM, context, f"{context} tokens, from the pool"):
            return
        del cache
        say(f"{context:,} tokens, from the pool")
        cache = self._cache(store, codec, hbm=raw + 2 * options.suffix_tokens * raw // context)
        self._laps(cache, 1, DRAM)  # fills the pool
        limit = 1e3 * 2 * raw / bench.rates["device_bytes_per_second"] + self._suffix_ms
        yield self._row(HBM, codec, self._laps(cache, options.laps, HBM), 2 * raw, limit)
        bench.spent(HBM, context)

    def _cache(self, store: Any, codec: str, hbm: int = 0) -> PrefixCache:
        gc.collect()  # frees the buffers of the one before
        how: dict[str, Any] = {"codec": codec, "chunk_tokens": self._options.chunk_tokens, "hbm": hbm}
        return PrefixCache(self._bench.model, store, **how, deadline_ms=10_000)

    def _laps(self, cache: PrefixCache, laps: int, tier: str | None = None) -> list[Report]:
        answers: list[Report] = []
        start = perf_counter()
        while len(answers) < laps and (not answers or perf_counter() - start < MOST_SECONDS):
            cache.generate(self._prompt, max_new_tokens=1, do_sample=False)
            report = cache.report
            answers.append(report)
            shown = _origins(report)
            if tier is not None and shown.get(tier) != self._context:
                self._bench.faults.append(f"{self._context} tokens were to come from {tier}: {shown}")
            if report.faults:
                self._bench.faults.append(f"{self._context} tokens: {report.fault}")
        return answers

    def _suffix_seconds(self, cache: PrefixCache) -> float:
        suffix, context, device = self._options.suffix_tokens, self._context, self._bench.device
        (group,) = cache.layout.groups
        shape = (1, group.kv_heads, context, group.plane_widths[0])
        keys = torch.randn(shape, dtype=getattr(torch, group.dtype), device=device)
        tokens = torch.from_numpy(self._prompt[-suffix:].astype(np.int64)).to(device)[None]

        @torch.inference_mode()
        def forward() -> None:
            known = DynamicCache()
            for layer in group.layers:
                known.update(keys, keys, layer)
            output = self._bench.model(input_ids=tokens, past_key_values=known, use_cache=True, logits_to_keep=1)
            output.logits.argmax(-1).tolist()

        forward()
        return _median_seconds(forward, max(5, self._options.laps))

    def _row(self, path: str, codec: str, answers: Sequence[Report], bytes_moved: int, limit_ms: float | None) -> Row:
        def middle(name: str) -> float:
            return float(median(getattr(report, name) for report in answers))

        times = [report.ttft_ms for report in answers]
        p50, low, high = median(times), min(times), max(times)
        is_judged = path == DRAM and self._bench.device.type == "cuda" and self._options.shape == EIGHT_B
        target = SPEEDUPS.get((self._context, codec)) if is_judged else None
        details: dict[str, Any] = {"laps": len(times), "ttft_ms": p50, "ttft_ms_low": low, "ttft_ms_high": high}
        details |= {name: middle(name) for name in ("lookup_ms", "restored_ms", "save_ms")}
        details |= {"bytes_moved": bytes_moved, "suffix_ms": self._suffix_ms, "limit_ms": limit_ms}
        details |= {"speedup": self._cold_ms / p50, "cold_mfu": self._mfu, "target_speedup": target}
        details["tokens"] = _origins(answers[-1])
        what = {"context_tokens": self._context, "path": path, "codec": codec}
        row = Row(what, p50, MS, len(times), low, high, details=details)
        if limit_ms is None:
            return row
        wanted = None if target is None else Target(target, of="speedup")
        return replace(row, limit_of="bytes and suffix", limit=limit_ms, ratio=limit_ms / p50, target=wanted)


def _origins(report: Report) -> dict[str, int]:
    account: Any = report.account.to_dict()
    return {str(name): count for part in ("hits", "misses") for name, count in account[part].items()}


def _dram_bytes(layout: Layout, codec: str, tokens: int) -> int:
    (part,) = layout.parts
    frames = -(-tokens // layout.block_tokens) * frame_bytes(codec_named(codec).payload_bytes(part))
    wanted = max(8 << 20, int(frames / PINNED_SHARE * 1.1) + (64 << 20))
    enough(f"a store for {tokens} tokens (--context), codec {codec},", wanted, available_bytes())
    return wanted


def _median_seconds(work: Callable[[], object], laps: int) -> float:
    work()
    return median(timed(work)().wall for _ in range(laps))
