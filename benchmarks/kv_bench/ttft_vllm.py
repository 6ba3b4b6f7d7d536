"""`kvstore bench ttft --engine vllm`: what a vLLM gains from our connector, and what it pays, in five parts.

Engines and the sidecar are processes started here, which take turns. The engines measure their times; this process
drives their steps and imports neither vLLM nor torch. Quotients are taken turn by turn, where both sides are adjacent.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kv_bench.llamas import LLAMAS, MID, ONE_B, TINY, kv_bytes_per_token, save_model
from kv_bench.measure import Say, in_turn, quantile, quartile_row
from kv_bench.process import Child, Sidecar
from kv_bench.script import one_of
from kvstore.block.errors import BadInput, StoreError
from kvstore.traffic.row import MS, SHARE, BenchResult, Row, Section, Target

TTFT, ITL, HOOKS, OVERHEAD, HAND_OVER = PARTS = ("ttft", "itl", "hooks", "overhead", "hand-over")
PLAIN, RAW, DEFAULT, BARE, AT_ONCE = ("no connector", "raw", "default codec", "bare copies", "saves at once")
COLD, OWN, EXTERNAL = ("cold", "own hit", "external hit")
TICKET, TOGETHER = HAND_OVERS = ("with a ticket", "both legs at once")
"""How decode gets what prefill stores: asked after prefill with its ticket, or at the same time."""
OWN_TO_OWN, COLD_TO_EXTERNAL, EXTERNAL_ITL_TO_OWN = 1.03, 30.0, 1.1
EXTERNAL_TO_OWN = {RAW: 1.25, DEFAULT: 1.35, BARE: 1.3}
HOOKS_SHARE, SLOWDOWN, DECODE_STEPS, HAND_OVER_TO_LIMIT = 0.015, 0.05, 3, 1.0
CONFIDENCE = 0.95

PAGE_TOKENS = 128
"""Of vLLM's pages on a CPU, and two stored blocks where its pages are of 16 tokens."""
CPU, CUDA = "cpu", "cuda"
GPU_SHARE = 0.3
"""Of a GPU's memory that each of its engines may take."""
MOST_COLD = 7
"""Prompts computed whole: each takes as long as many hits, whose ratios need many turns."""
HEADROOM, SPARE_BYTES = 1.25, 256 << 20
PREPARATIONS = 20
"""Attempts until a prefix comes from the store, which the engine's first requests precede."""
PREFILL, DECODE = "prefill", "decode"
DECODED_TOKENS = 17
"""Of an answer after a hand-over; its steps are measured."""
PATIENT: dict[str, Any] = {"match_deadline_ms": 10_000, "lease_deadline_ms": 10_000, "cost_model": False, "audit": 0.0}
"""Nothing is late, and every hit is loaded: none is judged too dear, none is audited."""
NO_STORE = frozenset({"unreachable", "warming", "disabled", "unsupported"})
"""Miss reasons of an engine whose connector has no store."""
SHARED_MEMORY = "/dev/shm"
CONNECTORS = "kv_bench.timed_connector"
LINK_FILE, FRAME_BYTES = "KVSTORE_BENCH_LINK", "KVSTORE_BENCH_FRAME_BYTES"
"""Settings of its link: a file with the speed; bytes of a token, its share of a frame's header and padding within."""
VLLM_SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ENGINE_SETTINGS: Mapping[str, str | None] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are driven from here, in the process of both connector halves
    "OMP_WAIT_POLICY": None,  # the engine's threads wait as they do in service, and not as this command line's
    **VLLM_SETTINGS,
}
at_most = partial(Target, is_least=False)
Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """prefix_tokens: stored; suffix_tokens: behind it, new in each request. load_*: of prompts that arrive while hooks
    are timed. pair_*: of new prompts with and without a store. kv_gib: of an engine's own pages."""

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
    device: str = CPU


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
ON_GPU = VllmOptions(ONE_B, parts=(TTFT,), prefix_tokens=32768, longest_tokens=40960, kv_gib=8, device=CUDA)
"""All engines are on one GPU."""


def options_for(
    parts: Sequence[str] = (), shape: str | None = None, device: str | None = None, **given: int | None
) -> VllmOptions:
    """The default options of the shape and the device, with what was given in their place. Raises `BadInput`."""
    one_of("shape", shape, LLAMAS)
    one_of("device", device, (CPU, CUDA))
    for part in parts:
        one_of("only", part, PARTS)
    usual = ON_GPU if device == CUDA else SMALL if shape == TINY else VllmOptions()
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    chosen |= {} if shape is None else {"shape": shape}
    options = replace(usual, **chosen, parts=tuple(part for part in PARTS if part in (parts or usual.parts)))
    longest = options.longest_tokens - options.suffix_tokens - 1
    if options.prefix_tokens % PAGE_TOKENS or not 0 < options.prefix_tokens <= longest:
        raise BadInput(
            f"context={options.prefix_tokens} is not a number of whole pages of {PAGE_TOKENS} tokens; use "
            f"{min(longest, max(PAGE_TOKENS, options.prefix_tokens)) // PAGE_TOKENS * PAGE_TOKENS}"
        )
    return options


def run(options: VllmOptions, say: Say) -> BenchResult:
    """Measure the parts; one that fails is a fault. Raises `BadInput` without vLLM."""
    if find_spec("vllm") is None:
        raise BadInput(
            f"engine='vllm' needs vLLM, which {sys.executable} does not have; make engines makes .venv-engines, "
            "which has it: .venv-engines/bin/python -m kvstore bench ttft --engine vllm"
        )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as scratch:
        bench = VllmBench(options, Path(scratch), say)
        measured = {TTFT: ttft, ITL: itl, HOOKS: hooks, OVERHEAD: overhead, HAND_OVER: hand_over}
        for part in options.parts:
            try:
                rows += measured[part](bench)
            except StoreError as error:  # keep the other parts' results
                bench.faults.append(f"{part} ended early: {error}")
    about = {"engine": "vllm", "versions": bench.versions}
    title = f"vLLM {bench.versions.get('vllm', '?')} on {options.device}, a random {options.shape} Llama"
    return BenchResult("ttft", options, [Section(rows, title)], about, bench.faults)


def connector(
    socket: str, name: str = "KvStoreConnector", module: str = "engine_adapter.vllm_connector", **settings: Any
) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": f"unix:{socket}", **settings},
    }


timed_connector = partial(connector, name="TimedConnector", module=CONNECTORS)
"""With clocks on its hooks."""


class Engine(Child):
    """A vLLM in another process, see `vllm_engine`."""

    def do(self, verb: str, **given: Any) -> Any:
        """Call a verb. Raises `StoreError` on failure or timeout."""
        return self.ask({"do": verb, **given})


class VllmBench:
    """Engines with one model, and what they are asked. faults: violated expectations, one line each."""

    def __init__(self, options: VllmOptions, scratch: Path, say: Say) -> None:
        self.options, self.say = options, say
        self.faults: list[str] = []
        self.versions: dict[str, Any] = {}
        self._model = scratch / "model"
        self._vocabulary = LLAMAS[options.shape]["vocab_size"]
        self._random = np.random.default_rng(options.seed)
        say(f"making a random {options.shape} Llama")
        save_model(options.shape, self._model)

    def started(
        self, stack: ExitStack, transfers: Mapping[str, Mapping[str, Any] | None], **more: Any
    ) -> dict[str, Engine]:
        options, engines = self.options, {}
        more |= {"max_model_len": options.longest_tokens}
        if options.device == CUDA:  # shared by the engines, and used as in service: with graphs, and planning ahead
            # Pages of their own size, and not by what is free, which engines that start beside each other change.
            more |= {"gpu_memory_utilization": GPU_SHARE, "kv_cache_memory_bytes": options.kv_gib << 30}
        else:
            more["enforce_eager"] = True
        for name, transfer in transfers.items():
            self.say(f"starting an engine: {name}")
            plan = {"model": str(self._model), "device": options.device, "options": more, "transfer": transfer}
            settings = {**ENGINE_SETTINGS, "VLLM_CPU_KVCACHE_SPACE": str(options.kv_gib)}
            engines[name] = stack.enter_context(Engine("kv_bench.vllm_engine", plan, f"the engine '{name}'", settings))
        for engine in engines.values():
            self.versions = engine.hear()
        return engines

    @contextmanager
    def sidecar(self, tokens: int) -> Iterator[Sidecar]:
        """A sidecar with room for the KV of so many tokens, and some more."""
        dram = int(HEADROOM * tokens) * kv_bytes_per_token(self.options.shape) + SPARE_BYTES
        with Sidecar({"dram": dram, "nvme": "off"}) as sidecar:
            sidecar.greeted()
            yield sidecar

    def prepare(self, name: str, engine: Engine, prefix: Sequence[int]) -> None:
        """Repeat until the prefix is in the engine's cache and, with a connector, in the store. Raises `StoreError`."""
        self.say(f"{name}: a first prompt")
        for _ in range(PREPARATIONS):
            self.ask(engine, prefix)
            engine.do("settle")
            if name == PLAIN:
                return
            engine.do("forget")
            if self.ask(engine, prefix)["cached_tokens"] == len(prefix):
                return
            engine.do("forget")
        raise StoreError(f"{engine.name} does not find again what it has stored")

    def warm_up(self, name: str, engine: Engine) -> None:
        """Send new prompts until the connector, if any, has its store. Raises `StoreError`."""
        self.say(f"{name}: first prompts")
        for _ in range(PREPARATIONS):
            answer = self.ask(engine, self.tokens(self.options.prefix_tokens))
            engine.do("settle")
            if answer["kvstore"] is None or not NO_STORE & answer["kvstore"]["misses"].keys():
                return
        raise StoreError(f"{engine.name} did not get at its store: {answer['kvstore']}")

    def ask(self, engine: Engine, prefix: Sequence[int]) -> Answer:
        (answer,) = engine.do("ask", prompts=[self.with_suffix(prefix)], max_tokens=1)
        return answer  # type: ignore[no-any-return]

    def check(self, who: str, path: str, answer: Answer, tokens: int) -> None:
        wanted = 0 if path == COLD else tokens
        account, found = answer["kvstore"], answer["cached_tokens"]
        if account is not None:
            hits = account["hits"]
            found = sum(hits.values()) if path == COLD else hits.get("engine" if path == OWN else "dram", 0)
            if sum(hits.values()) + sum(account["misses"].values()) != answer["prompt_tokens"]:
                self.faults.append(f"{who}, {path}: hits and misses are not the prompt: {account}")
            if NO_STORE & account["misses"].keys():
                self.faults.append(f"{who}, {path}: there was no store: {account['misses']}")
        if found != wanted or answer["cached_tokens"] != wanted:
            origin = {} if account is None else {**account["hits"], **account["misses"]}
            self.faults.append(f"{who}, {path}: {found} tokens and not {wanted} were found: {origin}")

    def check_saved(self, engine: Engine, prompt: Sequence[int]) -> None:
        """Note a fault unless new prompts were saved: the store must find them once the engine has forgotten them."""
        engine.do("settle")
        engine.do("forget")
        misses = self.ask(engine, prompt)["kvstore"]["misses"]
        if "absent" in misses or NO_STORE & misses.keys():
            self.faults.append(f"{engine.name}: new prompts were not saved: {misses}")

    def among_streams(self, engine: Engine, verb: str, arrivals: list[list[int]], steps_between: int) -> Any:
        """Note a fault unless all streams ran to the end."""
        streams = [self.tokens(self.options.stream_tokens) for _ in range(self.options.streams)]
        told = engine.do(verb, streams=streams, arrivals=arrivals, steps_between=steps_between)
        if told["streams"] != len(streams):
            self.faults.append(f"{verb}: {told['streams']} of {len(streams)} streams ran to its end")
        return told

    def tokens(self, count: int) -> list[int]:
        numbers: list[int] = self._random.integers(0, self._vocabulary, count).tolist()
        return numbers

    def with_suffix(self, prefix: Sequence[int]) -> list[int]:
        return [*prefix, *self.tokens(self.options.suffix_tokens)]


def load_ms(answer: Answer) -> float:
    # A load that its step waited for is part of a hook's time; for others the connector's own figure counts.
    return float(answer["load_ms"] or (answer["kvstore"] or {}).get("load_ms", 0.0))


# --- ttft ------------------------------------------------------------------------------------------------------------


Samples = dict[tuple[str, str], list[Answer]]
"""By engine and path, turn by turn."""


def ttft(bench: VllmBench) -> list[Row]:
    """Each turn visits all engines and paths in another order. Cold prompts come after all hits: each takes as long as
    a hundred hits and would evict what hits read from every cache."""
    options, samples = bench.options, Samples()
    prefix = bench.tokens(options.prefix_tokens)
    with ExitStack() as stack:
        sidecar = stack.enter_context(bench.sidecar(4 * options.prefix_tokens))
        transfers: dict[str, dict[str, Any] | None] = {
            PLAIN: None,
            RAW: timed_connector(sidecar.socket, codec=RAW, **PATIENT),
            DEFAULT: timed_connector(sidecar.socket, codec="auto", **PATIENT),
        }
        if options.device != CUDA:
            is_there = os.path.isdir(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK)
            shared = tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=SHARED_MEMORY if is_there else None)
            kept = {"path": f"{stack.enter_context(shared)}/pages", "slots": 4 * options.prefix_tokens // PAGE_TOKENS}
            transfers[BARE] = connector("", "BareConnector", CONNECTORS) | {"kv_connector_extra_config": kept}
        engines = bench.started(stack, transfers)
        for name, engine in engines.items():
            bench.prepare(name, engine, prefix)
        for turn in range(-1, options.turns):
            bench.say(f"TTFT, turn {turn + 1} of {options.turns}")
            for name in in_turn(list(engines), turn):
                bench.ask(engines[name], prefix)  # reload its weights into the CPU's caches
                for path, answer in _ttft_turn(bench, name, engines[name], prefix, turn):
                    bench.check(name, path, answer, options.prefix_tokens)
                    if turn >= 0:
                        samples.setdefault((name, path), []).append(answer)
        cold = min(options.turns, MOST_COLD)
        for turn in range(cold):
            bench.say(f"TTFT, cold, turn {turn + 1} of {cold}")
            answer = bench.ask(engines[PLAIN], bench.tokens(options.prefix_tokens))
            bench.check(PLAIN, COLD, answer, options.prefix_tokens)
            samples.setdefault((PLAIN, COLD), []).append(answer)
    return ttft_rows(samples)


def _ttft_turn(
    bench: VllmBench, name: str, engine: Engine, prefix: Sequence[int], turn: int
) -> Iterable[tuple[str, Answer]]:
    if name == PLAIN:
        yield OWN, bench.ask(engine, prefix)
        return
    for path in (OWN, EXTERNAL) if turn % 2 else (EXTERNAL, OWN):
        if path == EXTERNAL and not engine.do("forget"):
            bench.faults.append(f"{name}: its own cache was not forgotten")
        yield path, bench.ask(engine, prefix)
        engine.do("settle")


def ttft_rows(samples: Mapping[tuple[str, str], Sequence[Answer]]) -> list[Row]:
    def times(engine: str, path: str) -> list[float]:
        return [one["ttft_ms"] for one in samples[engine, path]]

    def row(what: str, found: Sequence[float], limit_of: str, limits: Sequence[float], target: Any, **more: Any) -> Row:
        return quartile_row({"part": TTFT, "what": what}, found, MS, limit_of, limits, target, **more)

    own, cold = times(PLAIN, OWN), times(PLAIN, COLD)
    rows = [
        row(COLD, cold, f"{EXTERNAL}, {RAW}", times(RAW, EXTERNAL)[: len(cold)], Target(COLD_TO_EXTERNAL)),
        row(f"{OWN}, {PLAIN}", own, "", (), None),
    ]
    for engine in (RAW, DEFAULT, *([BARE] if (BARE, EXTERNAL) in samples else [])):  # bare copies are a CPU's
        target = at_most(OWN_TO_OWN) if engine == RAW else None  # the codec has no part in it: once is enough
        rows.append(row(f"{OWN}, {engine}", times(engine, OWN), OWN, own, target))
        found, external = samples[engine, EXTERNAL], times(engine, EXTERNAL)
        parts: dict[str, list[float]] = {}
        if engine != BARE:
            parts = {name: [one[name] for one in found] for name in ("lookup_ms", "lease_ms")}
            parts["load_ms"] = list(map(load_ms, found))
            # The engine's own time.
            parts["rest_ms"] = [ms - sum(of) for ms, *of in zip(external, *parts.values(), strict=True)]
        details = {name: median(values) for name, values in parts.items()}
        same = [ms / hit for ms, hit in zip(external, times(engine, OWN), strict=True)]
        details["to its engine's own hit"] = median(same)
        limit = at_most(EXTERNAL_TO_OWN[engine])
        rows.append(row(f"{EXTERNAL}, {engine}", external, OWN, own, limit, **details))
    return rows


# --- itl -------------------------------------------------------------------------------------------------------------


def itl(bench: VllmBench) -> list[Row]:
    options = bench.options
    stored = [bench.tokens(options.prefix_tokens) for _ in range(options.arrivals)]
    own = [bench.tokens(options.prefix_tokens) for _ in range(min(options.own_prefixes, options.arrivals))]
    with ExitStack() as stack:
        kept = (len(stored) + len(own)) * options.prefix_tokens + 8 * options.longest_tokens
        sidecar = stack.enter_context(bench.sidecar(kept))
        transfer = timed_connector(sidecar.socket, codec=RAW, **PATIENT)
        with ExitStack() as earlier:
            filler = bench.started(earlier, {"filler": transfer})["filler"]
            bench.prepare("filler", filler, stored[0])
            for number, prefix in enumerate(stored[1:], 2):
                bench.say(f"ITL, an earlier engine stores prefix {number} of {len(stored)}")
                bench.ask(filler, prefix)
            filler.do("settle")
        engine = bench.started(stack, {RAW: transfer})[RAW]
        bench.prepare(RAW, engine, own[0])
        for prefix in own:  # fills the engine's cache last, so none is evicted
            bench.ask(engine, prefix)
        engine.do("settle")
        bench.say("ITL, hits arrive among streams")
        kinds, arrivals = list[str](), list[list[int]]()
        for number, prefix in enumerate(stored):
            pair = [(OWN, own[number % len(own)]), (EXTERNAL, prefix)]
            for kind, known in pair if number % 2 else reversed(pair):
                kinds.append(kind)
                arrivals.append(bench.with_suffix(known))
        told = bench.among_streams(engine, "among_streams", arrivals, options.steps_between)
    gaps: dict[str, list[float]] = {"none": told["alone_ms"], OWN: [], EXTERNAL: []}
    answered: dict[str, list[float]] = {OWN: [], EXTERNAL: []}
    for kind, found in zip(kinds, told["arrivals"], strict=True):
        bench.check("among streams", kind, found["answer"], options.prefix_tokens)
        gaps[kind] += found["gaps_ms"]
        answered[kind].append(found["answer"]["ttft_ms"])
    return itl_rows(gaps, answered)


def itl_rows(gaps: Mapping[str, Sequence[float]], arrivals: Mapping[str, Sequence[float]]) -> list[Row]:
    """gaps: between two tokens of a stream, in milliseconds, by what arrived meanwhile: "none", own or external hits.
    arrivals: how soon those had their first token."""
    rows, limit = [], quantile(gaps[OWN], 0.99)
    for kind, found in gaps.items():
        high, what = quantile(found, 0.99), "p99 no arrival" if kind == "none" else f"p99 during {kind}s"
        row = Row({"part": ITL, "what": what}, high, MS, len(found), quantile(found, 0.5), max(found))
        if kind in arrivals:
            details = {"arrivals": float(len(arrivals[kind])), "their TTFT ms": median(arrivals[kind])}
            row = replace(row, details=details)
        if kind == EXTERNAL:
            target = at_most(EXTERNAL_ITL_TO_OWN)
            row = replace(row, limit_of=f"{OWN}s", limit=limit, ratio=high / limit, target=target)
        rows.append(row)
    return rows


# --- hooks and overhead ----------------------------------------------------------------------------------------------


def hooks(bench: VllmBench) -> list[Row]:
    options = bench.options
    with ExitStack() as stack:
        sidecar = stack.enter_context(bench.sidecar(options.load_prompts * options.load_tokens))
        transfer = timed_connector(sidecar.socket, codec="auto")
        engine = bench.started(stack, {DEFAULT: transfer}, max_num_batched_tokens=options.chunk_tokens)[DEFAULT]
        bench.warm_up(DEFAULT, engine)
        bench.say("hooks, streams and new prompts")
        fresh = [bench.tokens(options.load_tokens) for _ in range(options.load_prompts)]
        told = bench.among_streams(engine, "under_load", fresh, options.load_steps_between)
        bench.check_saved(engine, fresh[0])
    return [hooks_row(told["steps"], told["seconds"], told["hooks"])]


def hooks_row(steps: int, seconds: float, hooks: Mapping[str, tuple[float, int]]) -> Row:
    spent, calls = sum(one for one, _ in hooks.values()), sum(count for _, count in hooks.values())
    share, target = spent / seconds, at_most(HOOKS_SHARE, of="value")
    details = {"ms a step": 1e3 * spent / steps, "calls a step": calls / steps}
    details |= {f"{name} us a step": 1e6 * one / steps for name, (one, _) in hooks.items()}
    beside = share, share, "a step, ms", 1e3 * seconds / steps
    what = {"part": HOOKS, "what": "all hooks in all steps"}
    return Row(what, share, SHARE, steps, *beside, target=target, details=details)


def overhead(bench: VllmBench) -> list[Row]:
    """Engines take turns with the same new prompts, each first equally often. Each has its own store, so that none
    finds what another saved."""
    options, names = bench.options, [PLAIN, DEFAULT, AT_ONCE]
    times: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        transfers: dict[str, dict[str, Any] | None] = {PLAIN: None}
        more: dict[str, Any] = {"save_patience_ms": 0}
        for name, settings in ((DEFAULT, {}), (AT_ONCE, more)):
            sidecar = stack.enter_context(bench.sidecar(8 * options.prefix_tokens))
            transfers[name] = timed_connector(sidecar.socket, codec="auto", **settings)
        engines = bench.started(stack, transfers)
        for name, engine in engines.items():
            bench.warm_up(name, engine)
        for pair in range(-1, options.pairs):
            bench.say(f"overhead, pair {pair + 1} of {options.pairs}")
            prompts = [bench.tokens(options.pair_tokens) for _ in range(options.pair_prompts)]
            order = in_turn(names, pair)
            for name in order if pair // len(names) % 2 else reversed(order):
                answers = engines[name].do("ask", prompts=prompts, max_tokens=options.answer_tokens)
                engines[name].do("settle")
                for answer in answers:
                    bench.check(name, COLD, answer, 0)
                if pair >= 0:
                    times[name].append(sum(answer["total_ms"] for answer in answers))
        for name in names[1:]:
            bench.check_saved(engines[name], prompts[0])
    return [overhead_row(times[PLAIN], times[name], name) for name in names[1:]]


def overhead_row(without: Sequence[float], with_store: Sequence[float], engine: str = DEFAULT) -> Row:
    slowdowns = [there / not_there - 1 for there, not_there in zip(with_store, without, strict=True)]
    middle, (low, high) = median(slowdowns), interval_of_median(slowdowns)
    what = "slowdown with nothing to find" + ("" if engine == DEFAULT else f", {engine}")
    target = at_most(SLOWDOWN, of="high") if engine == DEFAULT else None
    beside = low, high, f"{PLAIN}, ms", median(without), 1 + middle
    return Row({"part": OVERHEAD, "what": what}, middle, SHARE, len(slowdowns), *beside, target=target)


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


# --- hand-over -------------------------------------------------------------------------------------------------------


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
        return self.prefill_ms + self.load_ms + DECODE_STEPS * self.step_ms


def hand_over(bench: VllmBench) -> list[Row]:
    options = bench.options
    samples: dict[str, list[HandOver]] = {way: [] for way in HAND_OVERS}
    with ExitStack() as stack:
        prompts = 2 * (options.hand_overs + PREPARATIONS)
        sidecar = stack.enter_context(bench.sidecar(prompts * options.prefix_tokens))
        transfer = timed_connector(sidecar.socket, codec=RAW, **PATIENT)
        roles = {PREFILL: {"kv_role": "kv_producer"}, DECODE: {"kv_role": "kv_consumer"}}
        transfers = {name: transfer | role for name, role in roles.items()}
        engines = bench.started(stack, transfers, max_num_batched_tokens=options.chunk_tokens)
        for name, engine in engines.items():
            bench.warm_up(name, engine)
        for turn in range(-1, options.hand_overs):
            bench.say(f"hand-over, turn {turn + 1} of {options.hand_overs}")
            for way in HAND_OVERS if turn % 2 else reversed(HAND_OVERS):
                found = _handed_over(bench, engines[PREFILL], engines[DECODE], way)
                if turn >= 0:
                    samples[way].append(found)
    return [hand_over_row(way, samples[way]) for way in HAND_OVERS]


def _handed_over(bench: VllmBench, prefill: Engine, decode: Engine, way: str) -> HandOver:
    prompts = [bench.with_suffix(bench.tokens(bench.options.prefix_tokens))]
    hints: dict[str, Any] = {"kvstore": {"await": True}}
    prefill.say({"do": "ask", "prompts": prompts, "max_tokens": 1, "hints": {"do_remote_decode": True}})
    if way == TICKET:
        (prefilled,) = prefill.hear()
        hints = {"kvstore": prefilled["kvstore"]}
    (decoded,) = decode.do("ask", prompts=prompts, max_tokens=DECODED_TOKENS, hints=hints)
    if way != TICKET:
        (prefilled,) = prefill.hear()
    bench.check(DECODE, EXTERNAL, decoded, bench.options.prefix_tokens)
    behind_ms = 1e3 * (decoded["began"] - prefilled["began"])
    step_ms = (decoded["total_ms"] - decoded["ttft_ms"]) / (decoded["generated"] - 1)
    return HandOver(behind_ms + decoded["ttft_ms"], prefilled["total_ms"], load_ms(decoded), step_ms)


def hand_over_row(way: str, found: Sequence[HandOver]) -> Row:
    times, limits = [one.ttft_ms for one in found], [one.limit_ms for one in found]
    details = {name: median(getattr(one, name) for one in found) for name in ("prefill_ms", "load_ms", "step_ms")}
    behind, ratios = [one.ttft_ms - one.prefill_ms for one in found], [one.ttft_ms / one.limit_ms for one in found]
    details |= {"behind prefill's end, ms": median(behind), "p99 of it, ms": quantile(behind, 0.99)}
    details |= {"ttft p99, ms": quantile(times, 0.99), "ratio p99": quantile(ratios, 0.99)}
    what, limit_of = {"part": HAND_OVER, "what": f"decode's TTFT, {way}"}, f"prefill, load, {DECODE_STEPS} steps"
    return quartile_row(what, times, MS, limit_of, limits, at_most(HAND_OVER_TO_LIMIT), **details)
