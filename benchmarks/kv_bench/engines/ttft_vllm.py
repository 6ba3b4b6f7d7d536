"""`benches.py ttft --engine vllm`: what a vLLM gains from our connector, and what it pays.

    ttft      one request on an idle engine: cold, from the engine's own cache, from a sidecar in another process, and
              through a connector that only copies pages out of shared memory
    itl       eight streams decode, hits arrive: gaps between tokens during external hits and during own ones
    hooks     eight streams decode, new prompts are prefilled in chunks: the share of our hooks in the steps' time
    overhead  prompts never seen before, with the store and without
    hand-over one engine prefills, another decodes, over one sidecar: decode's first token against prefill's end

Engines and the sidecar are processes started here, which take turns. The engines measure their times; this process
drives their steps and imports neither vLLM nor torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kv_bench.engines.ttft_rows import parse_tokens
from kv_bench.engines.vllm_rows import (
    AT_ONCE,
    BARE,
    COLD,
    DEFAULT,
    EXTERNAL,
    HAND_OVER,
    HAND_OVERS,
    HOOKS,
    ITL,
    ON_GPU,
    OVERHEAD,
    OWN,
    PARTS,
    PLAIN,
    RAW,
    SMALL,
    TICKET,
    TTFT,
    HandOver,
    Sample,
    VllmOptions,
    VllmResult,
    hand_over_row,
    hooks_row,
    itl_rows,
    overhead_row,
    ttft_rows,
)
from kvstore.bench.measure import Progress, teller
from kvstore.bench.sidecar import Sidecar
from kvstore.bench.traffic.random_llama import LLAMAS, TINY, kv_bytes_per_token, save_model
from kvstore.block.errors import BadInput, StoreError

PAGE_TOKENS = 128
"""Of vLLM's pages on a CPU, and two stored blocks where its pages are of 16 tokens."""
CPU, CUDA = "cpu", "cuda"
GPU_SHARE = 0.3
"""Of a GPU's memory that each of its engines may take."""
MOST_COLD = 7
"""Prompts computed whole: each takes as long as many hits, whose ratios need many turns."""
HEADROOM = 1.25
SPARE_BYTES = 256 << 20
PREPARATIONS = 20
"""Attempts until a prefix comes from the store, which the engine's first requests precede."""
PREFILL, DECODE = "prefill", "decode"
DECODED_TOKENS = 17
"""Of an answer after a hand-over; its steps are measured."""
PATIENT = {"match_deadline_ms": 10_000, "lease_deadline_ms": 10_000, "cost_model": False, "audit": 0.0}
"""Nothing is late, and every hit is loaded: none is judged too dear, none is audited."""
AS_SHIPPED: dict[str, Any] = {}
NO_STORE = frozenset({"unreachable", "warming", "disabled", "unsupported"})
"""Miss reasons of an engine whose connector has no store."""
SHARED_MEMORY = "/dev/shm"
Answers = Sequence[Mapping[str, Any]]


def options_for(
    *,
    shape: str | None = None,
    context: str | None = None,
    parts: Sequence[str] = (),
    turns: int | None = None,
    arrivals: int | None = None,
    pairs: int | None = None,
    device: str | None = None,
) -> VllmOptions:
    """The default options of the shape and the device, with what was given in their place. context: the prefix, such as
    "4k". device: cpu or cuda. Raises `BadInput`."""
    if shape is not None and shape not in LLAMAS:
        raise BadInput(f"shape={shape!r}; allowed with --engine vllm: {', '.join(LLAMAS)}")
    for part in parts:
        if part not in PARTS:
            raise BadInput(f"only={part!r}; allowed: {', '.join(PARTS)}")
    if device not in (None, CPU, CUDA):
        raise BadInput(f"device={device!r}; allowed with --engine vllm: {CPU}, {CUDA}")
    usual = ON_GPU if device == CUDA else SMALL if shape == TINY else VllmOptions()
    prefix_tokens = None if context is None else parse_tokens(context)
    given = {
        "shape": shape,
        "prefix_tokens": prefix_tokens,
        "turns": turns,
        "hand_overs": turns,
        "arrivals": arrivals,
        "pairs": pairs,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options = replace(usual, **chosen, parts=tuple(part for part in PARTS if part in (parts or usual.parts)))
    longest = options.longest_tokens - options.suffix_tokens - 1
    if options.prefix_tokens % PAGE_TOKENS or not 0 < options.prefix_tokens <= longest:
        raise BadInput(
            f"context={options.prefix_tokens} is not a number of whole pages of {PAGE_TOKENS} tokens; use "
            f"{min(longest, max(PAGE_TOKENS, options.prefix_tokens)) // PAGE_TOKENS * PAGE_TOKENS}"
        )
    return options


def run(options: VllmOptions | None = None, progress: Progress = None) -> VllmResult:
    """Measure the parts; one that fails is a fault. Raises `BadInput` without vLLM."""
    if find_spec("vllm") is None:
        raise BadInput(
            f"engine='vllm' needs vLLM, which {sys.executable} does not have; make engines makes .venv-engines, "
            "which has it: .venv-engines/bin/python -m kvstore bench ttft --engine vllm"
        )
    options = options or VllmOptions()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as scratch:
        bench = _Bench(options, Path(scratch), teller(progress))
        bench.save_model()
        steps = {
            TTFT: bench.ttft,
            ITL: bench.itl,
            HOOKS: bench.hooks,
            OVERHEAD: bench.overhead,
            HAND_OVER: bench.hand_over,
        }
        for part in options.parts:
            try:
                steps[part]()
            except StoreError as error:  # keep the other parts' results
                bench.result.faults.append(f"{part} ended early: {error}")
        return bench.result


class _Bench:
    """All parts, on one model."""

    def __init__(self, options: VllmOptions, scratch: Path, say: Callable[[str], None]) -> None:
        self.result = VllmResult(options)
        self._options, self._scratch, self._say = options, scratch, say
        self._model = str(scratch / "model")
        self._vocabulary = int(LLAMAS[options.shape]["vocab_size"])
        self._random = np.random.default_rng(options.seed)
        self._processes = 0

    def save_model(self) -> None:
        self._say(f"making a random {self._options.shape} Llama")
        save_model(self._options.shape, Path(self._model))

    # Parts -----------------------------------------------------------------------------------------------------------

    def ttft(self) -> None:
        """Each turn visits all engines and paths in another order. Cold prompts come after all hits: each takes as long
        as a hundred hits and would evict what hits read from every cache."""
        options = self._options
        prefix = self._tokens(options.prefix_tokens)
        with ExitStack() as stack:
            sidecar = stack.enter_context(self._sidecar(4 * options.prefix_tokens))
            transfers: dict[str, dict[str, Any] | None] = {
                PLAIN: None,
                RAW: _connector(sidecar.socket, RAW, PATIENT),
                DEFAULT: _connector(sidecar.socket, "auto", PATIENT),
            }
            if options.device != CUDA:
                transfers[BARE] = self._bare(stack, 4 * options.prefix_tokens)
            engines = self._started(stack, transfers)
            for engine in engines.values():
                self._prepare(engine, prefix)
            samples: dict[tuple[str, str], list[Sample]] = {}
            for turn in range(-1, options.turns):
                self._say(f"TTFT, turn {turn + 1} of {options.turns}")
                order = list(engines.values())
                first = turn % len(order)
                for engine in order[first:] + order[:first]:
                    self._ask(engine, prefix)  # reload its weights into the CPU's caches
                    for path, answer in self._ttft_turn(engine, prefix, is_own_first=bool(turn % 2)):
                        self._check(engine.name, path, answer, options.prefix_tokens)
                        if turn >= 0:
                            samples.setdefault((engine.name, path), []).append(_sample(answer))
            cold = min(options.turns, MOST_COLD)
            for turn in range(cold):
                self._say(f"TTFT, cold, turn {turn + 1} of {cold}")
                answer = self._ask(engines[PLAIN], self._tokens(options.prefix_tokens))
                self._check(PLAIN, COLD, answer, options.prefix_tokens)
                samples.setdefault((PLAIN, COLD), []).append(_sample(answer))
        self.result.rows += ttft_rows(samples)

    def itl(self) -> None:
        """Hits arrive in turn, on prefixes stored by another engine and on this engine's own."""
        options = self._options
        stored = [self._tokens(options.prefix_tokens) for _ in range(options.arrivals)]
        own = [self._tokens(options.prefix_tokens) for _ in range(min(options.own_prefixes, options.arrivals))]
        with ExitStack() as stack:
            kept = (len(stored) + len(own)) * options.prefix_tokens + 8 * options.longest_tokens
            sidecar = stack.enter_context(self._sidecar(kept))
            with ExitStack() as earlier:
                filler = self._started(earlier, {"filler": _connector(sidecar.socket, RAW, PATIENT)})["filler"]
                self._prepare(filler, stored[0])
                for number, prefix in enumerate(stored[1:], 2):
                    self._say(f"ITL, an earlier engine stores prefix {number} of {len(stored)}")
                    self._ask(filler, prefix)
                filler.do("settle")
            engine = self._started(stack, {RAW: _connector(sidecar.socket, RAW, PATIENT)})[RAW]
            self._prepare(engine, own[0])
            for prefix in own:  # fills the engine's cache last, so none is evicted
                self._ask(engine, prefix)
            engine.do("settle")
            self._say("ITL, hits arrive among streams")
            arrivals = []
            for number, prefix in enumerate(stored):
                pair = [(OWN, own[number % len(own)]), (EXTERNAL, prefix)]
                for kind, known in pair if number % 2 else reversed(pair):
                    arrivals.append({"kind": kind, "prompt": self._with_suffix(known)})
            told = engine.do(
                "among_streams",
                streams=self._streams(),
                arrivals=arrivals,
                steps_between=options.steps_between,
            )
        self._all_ran(told["streams"], ITL)
        gaps: dict[str, list[float]] = {"none": told["alone"]["gaps_ms"], OWN: [], EXTERNAL: []}
        answered: dict[str, list[Sample]] = {OWN: [], EXTERNAL: []}
        for window in told["arrivals"]:
            self._check("among streams", window["kind"], window["answer"], options.prefix_tokens)
            gaps[window["kind"]] += window["gaps_ms"]
            answered[window["kind"]].append(_sample(window["answer"]))
        self.result.rows += itl_rows(gaps, answered)

    def hooks(self) -> None:
        """Decode beside chunked prefill; everything is saved, and nothing is found."""
        options = self._options
        with ExitStack() as stack:
            sidecar = stack.enter_context(self._sidecar(options.load_prompts * options.load_tokens))
            transfer = _connector(sidecar.socket, "auto", AS_SHIPPED)
            engine = self._started(stack, {DEFAULT: transfer}, max_num_batched_tokens=options.chunk_tokens)[DEFAULT]
            self._warm_up(engine)
            self._say("hooks, streams and new prompts")
            fresh = [self._tokens(options.load_tokens) for _ in range(options.load_prompts)]
            told = engine.do(
                "under_load", streams=self._streams(), fresh=fresh, steps_between=options.load_steps_between
            )
            self._check_saved(engine, fresh[0])
        self._all_ran(told["streams"], HOOKS)
        self.result.rows.append(hooks_row(told["steps"], told["seconds"], told["hooks"]))

    def overhead(self) -> None:
        """Engines take turns with the same new prompts, each first equally often. Each has its own store, so that none
        finds what another saved."""
        options = self._options
        times: dict[str, list[float]] = {PLAIN: [], DEFAULT: [], AT_ONCE: []}
        with ExitStack() as stack:
            transfers: dict[str, dict[str, Any] | None] = {PLAIN: None}
            for name, settings in ((DEFAULT, AS_SHIPPED), (AT_ONCE, {"save_patience_ms": 0})):
                sidecar = stack.enter_context(self._sidecar(8 * options.prefix_tokens))
                transfers[name] = _connector(sidecar.socket, "auto", settings)
            engines = self._started(stack, transfers)
            for engine in engines.values():
                self._warm_up(engine)
            for pair in range(-1, options.pairs):
                self._say(f"overhead, pair {pair + 1} of {options.pairs}")
                prompts = [self._tokens(options.pair_tokens) for _ in range(options.pair_prompts)]
                first = pair % len(engines)
                order = [*engines.values()][first:] + [*engines.values()][:first]
                for engine in order if pair // len(engines) % 2 else reversed(order):
                    answers = engine.do("ask", prompts=prompts, max_tokens=options.answer_tokens)
                    engine.do("settle")
                    for answer in answers:
                        self._check(engine.name, COLD, answer, 0)
                    if pair >= 0:
                        times[engine.name].append(sum(answer["total_ms"] for answer in answers))
            for name in (DEFAULT, AT_ONCE):
                self._check_saved(engines[name], prompts[0])
                self.result.rows.append(overhead_row(times[PLAIN], times[name], name))

    def hand_over(self) -> None:
        """New prompts one at a time, both ways in turn. Each engine has its own role."""
        options = self._options
        samples: dict[str, list[HandOver]] = {way: [] for way in HAND_OVERS}
        with ExitStack() as stack:
            sidecar = stack.enter_context(
                self._sidecar(2 * (options.hand_overs + PREPARATIONS) * options.prefix_tokens)
            )
            roles = {PREFILL: "kv_producer", DECODE: "kv_consumer"}
            transfers = {
                name: _connector(sidecar.socket, RAW, PATIENT) | {"kv_role": role} for name, role in roles.items()
            }
            engines = self._started(stack, transfers, max_num_batched_tokens=options.chunk_tokens)
            for engine in engines.values():
                self._warm_up(engine)
            for turn in range(-1, options.hand_overs):
                self._say(f"hand-over, turn {turn + 1} of {options.hand_overs}")
                for way in HAND_OVERS if turn % 2 else reversed(HAND_OVERS):
                    found = self._handed_over(engines[PREFILL], engines[DECODE], way)
                    if turn >= 0:
                        samples[way].append(found)
        self.result.rows += [hand_over_row(way, samples[way]) for way in HAND_OVERS]

    def _handed_over(self, prefill: EngineProcess, decode: EngineProcess, way: str) -> HandOver:
        prompts = [self._with_suffix(self._tokens(self._options.prefix_tokens))]
        hints: dict[str, Any] = {"kvstore": {"await": True}}
        prefill.begin("ask", prompts=prompts, max_tokens=1, hints={"do_remote_decode": True})
        if way == TICKET:
            (prefilled,) = prefill.ended()
            hints = {"kvstore": prefilled["kvstore"]}
        decode.begin("ask", prompts=prompts, max_tokens=DECODED_TOKENS, hints=hints)
        (decoded,) = decode.ended()
        if way != TICKET:
            (prefilled,) = prefill.ended()
        self._check(DECODE, EXTERNAL, decoded, self._options.prefix_tokens)
        behind_ms = 1e3 * (decoded["began"] - prefilled["began"])
        step_ms = (decoded["total_ms"] - decoded["ttft_ms"]) / (decoded["generated"] - 1)
        return HandOver(behind_ms + decoded["ttft_ms"], prefilled["total_ms"], _sample(decoded).load_ms, step_ms)

    # Engines ---------------------------------------------------------------------------------------------------------

    def _started(
        self, stack: ExitStack, transfers: Mapping[str, Mapping[str, Any] | None], **more: Any
    ) -> dict[str, EngineProcess]:
        """Start engines; returns them by name once all are up."""
        options = self._options
        engines = {}
        for name, transfer in transfers.items():
            self._say(f"starting an engine: {name}")
            self._processes += 1
            plan = {
                "model": self._model,
                "device": options.device,
                "options": {"max_model_len": options.longest_tokens, **self._device_options(), **more},
                "transfer": transfer,
            }
            logs = self._scratch / f"engine-{self._processes}"
            logs.mkdir()
            engines[name] = stack.enter_context(EngineProcess(name, plan, options.kv_gib, logs))
        for engine in engines.values():
            self.result.versions = engine.started()
        return engines

    def _device_options(self) -> dict[str, Any]:
        """A GPU is shared by the engines, and used as in service: with graphs, and planning ahead."""
        if self._options.device != CUDA:
            return {"enforce_eager": True}
        # Pages of their own size, and not by what is free, which engines that start beside each other change.
        return {"gpu_memory_utilization": GPU_SHARE, "kv_cache_memory_bytes": self._options.kv_gib << 30}

    @contextmanager
    def _sidecar(self, tokens: int) -> Iterator[Sidecar]:
        """A sidecar with room for the KV of so many tokens, and some more."""
        dram = int(HEADROOM * tokens) * kv_bytes_per_token(self._options.shape) + SPARE_BYTES
        with Sidecar({"dram": dram, "nvme": "off"}) as sidecar:
            sidecar.greeted()
            yield sidecar

    def _bare(self, stack: ExitStack, tokens: int) -> dict[str, Any]:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=_shared_memory()))
        return {
            "kv_connector": "BareConnector",
            "kv_connector_module_path": "kv_bench.engines.timed_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"path": os.path.join(folder, "pages"), "slots": tokens // PAGE_TOKENS},
        }

    def _prepare(self, engine: EngineProcess, prefix: Sequence[int]) -> None:
        """Repeat until the prefix is in the engine's cache and, with a connector, in the store. Raises `StoreError`."""
        self._say(f"{engine.name}: a first prompt")
        for _ in range(PREPARATIONS):
            self._ask(engine, prefix)
            engine.do("settle")
            if engine.name == PLAIN:
                return
            engine.do("forget")
            if self._ask(engine, prefix)["cached_tokens"] == len(prefix):
                return
            engine.do("forget")
        raise StoreError(f"the engine '{engine.name}' does not find again what it has stored")

    def _warm_up(self, engine: EngineProcess) -> None:
        """Send new prompts until the connector, if any, has its store. Raises `StoreError`."""
        self._say(f"{engine.name}: first prompts")
        for _ in range(PREPARATIONS):
            answer = self._ask(engine, self._tokens(self._options.prefix_tokens))
            engine.do("settle")
            if engine.name == PLAIN or not NO_STORE & answer["kvstore"]["misses"].keys():
                return
        raise StoreError(f"the engine '{engine.name}' did not get at its store: {answer['kvstore']}")

    def _ttft_turn(
        self, engine: EngineProcess, prefix: Sequence[int], *, is_own_first: bool
    ) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """The prefix is in the engine's cache before and after."""
        if engine.name == PLAIN:
            yield OWN, self._ask(engine, prefix)
            return
        for path in (OWN, EXTERNAL) if is_own_first else (EXTERNAL, OWN):
            if path == EXTERNAL and not engine.do("forget"):
                self.result.faults.append(f"{engine.name}: its own cache was not forgotten")
            yield path, self._ask(engine, prefix)
            engine.do("settle")

    def _ask(self, engine: EngineProcess, prefix: Sequence[int]) -> Mapping[str, Any]:
        """Generate one token for the prefix and a new suffix."""
        (answer,) = engine.do("ask", prompts=[self._with_suffix(prefix)], max_tokens=1)
        return answer  # type: ignore[no-any-return]

    # What comes of it ------------------------------------------------------------------------------------------------

    def _check(self, who: str, path: str, answer: Mapping[str, Any], tokens: int) -> None:
        """Note a fault unless the whole prefix came from the expected place."""
        wanted = 0 if path == COLD else tokens
        account = answer["kvstore"]
        found = answer["cached_tokens"]
        if account is not None:
            hits = account["hits"]
            found = sum(hits.values()) if path == COLD else hits.get("engine" if path == OWN else "dram", 0)
            if sum(hits.values()) + sum(account["misses"].values()) != answer["prompt_tokens"]:
                self.result.faults.append(f"{who}, {path}: hits and misses are not the prompt: {account}")
            if NO_STORE & account["misses"].keys():
                self.result.faults.append(f"{who}, {path}: there was no store: {account['misses']}")
        if found != wanted or answer["cached_tokens"] != wanted:
            origin = {} if account is None else {**account["hits"], **account["misses"]}
            self.result.faults.append(f"{who}, {path}: {found} tokens and not {wanted} were found: {origin}")

    def _check_saved(self, engine: EngineProcess, prompt: Sequence[int]) -> None:
        """Note a fault unless new prompts were saved: the store must find them once the engine has forgotten them."""
        engine.do("settle")
        engine.do("forget")
        misses = self._ask(engine, prompt)["kvstore"]["misses"]
        if "absent" in misses or NO_STORE & misses.keys():
            self.result.faults.append(f"{engine.name}: new prompts were not saved: {misses}")

    def _all_ran(self, running: int, part: str) -> None:
        if running != self._options.streams:
            self.result.faults.append(f"{part}: {running} of {self._options.streams} streams ran to its end")

    def _streams(self) -> list[list[int]]:
        return [self._tokens(self._options.stream_tokens) for _ in range(self._options.streams)]

    def _tokens(self, count: int) -> list[int]:
        """Random tokens, almost certainly never seen before."""
        numbers: list[int] = self._random.integers(0, self._vocabulary, count).tolist()
        return numbers

    def _with_suffix(self, prefix: Sequence[int]) -> list[int]:
        return [*prefix, *self._tokens(self._options.suffix_tokens)]


def _connector(socket: str, codec: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration of our connector with clocks on its hooks."""
    return {
        "kv_connector": "TimedConnector",
        "kv_connector_module_path": "kv_bench.engines.timed_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": f"unix:{socket}", "codec": codec, **settings},
    }


def _sample(answer: Mapping[str, Any]) -> Sample:
    # A load that its step waited for is part of a hook's time; for others the connector's own figure counts.
    load_ms = answer["load_ms"] or (answer["kvstore"] or {}).get("load_ms", 0.0)
    return Sample(answer["ttft_ms"], answer["lookup_ms"], answer["lease_ms"], load_ms)


def _shared_memory() -> str | None:
    """A directory in memory, if there is one; else None for temporary files."""
    return SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK) else None


# ---------------------------------------------------------------------------------------------------------------------
# This bench's side of an engine in another process; the other side is `vllm_engine`.


START_SECONDS = 300.0
LONGEST_SECONDS = 900.0
"""Of one verb."""
END_SECONDS = 30.0
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are driven from here, in the process of both connector halves
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class EngineProcess:
    """An engine that is starting. A context manager: ends it, or kills it after a failure."""

    def __init__(self, name: str, plan: Mapping[str, Any], kv_gib: int, scratch: Path) -> None:
        """name: for messages, and of its log in `scratch`. kv_gib: memory of the engine's own pages."""
        self.name = name
        self._log = scratch / f"{name.replace(' ', '-')}.log"
        settings = [f"{key}={value}" for key, value in {**SETTINGS, "VLLM_CPU_KVCACHE_SPACE": kv_gib}.items()]
        # The engine's threads wait as they do in service, and not as this command line's.
        command = [
            "env",
            "-u",
            "OMP_WAIT_POLICY",
            *settings,
            sys.executable,
            "-P",
            "-m",
            "kv_bench.engines.vllm_engine",
        ]
        answers, theirs = os.pipe()  # on its standard output vLLM logs, from its import on
        self._answers = os.fdopen(answers)
        with self._log.open("wb") as log, os.fdopen(theirs, "w"):
            self._process = subprocess.Popen(
                [*command, str(theirs)], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=(theirs,)
            )
        self._send(plan)

    def started(self) -> dict[str, Any]:
        """Wait until it is up; returns its versions. Raises `StoreError` if it cannot start."""
        return self._answer(START_SECONDS)  # type: ignore[no-any-return]

    def do(self, verb: str, **given: Any) -> Any:
        """Call a verb. Raises `StoreError` on failure or timeout."""
        self.begin(verb, **given)
        return self.ended()

    def begin(self, verb: str, **given: Any) -> None:
        """Call a verb without waiting."""
        self._send({"do": verb, **given})

    def ended(self) -> Any:
        """The answer to `begin`. Raises `StoreError` on failure or timeout."""
        return self._answer(LONGEST_SECONDS)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        try:
            if kind is None:
                self._process.stdin.close()
                self._process.wait(END_SECONDS)
        except (subprocess.TimeoutExpired, OSError):
            pass  # it is measured already
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._answers.close()

    def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure("it is gone") from None

    def _answer(self, seconds: float) -> Any:
        watch = threading.Timer(seconds, self._process.kill)
        watch.start()
        try:
            line = self._answers.readline()
        finally:
            watch.cancel()
        if not line:
            raise self._failure(f"no answer within {seconds:.0f} s, or it ended")
        return json.loads(line)

    def _failure(self, what: str) -> StoreError:
        """One line: the last of its log that names an error."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line] or lines
        return StoreError(f"the engine '{self.name}': {what}: {named[-1].strip()[-300:] if named else 'no log'}")
