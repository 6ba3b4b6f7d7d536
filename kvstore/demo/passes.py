"""The demo from start to end: four passes over the same requests, what comes of them, and a dashboard of them.

    cold     the same code with a closed store: every token is computed; beside it, plain transformers
    fill     the store is empty at first; requests find what earlier ones stored
    warm     the same requests again, with everything stored
    restart  the store is opened anew on the same directory: memory is empty, and the disk has what was stored

Tokens are drawn by their probabilities with each request's own random numbers, equal in every pass: the likeliest
tokens would hardly depend on the prompt, as a small model repeats what is likely anywhere. Each request's account is
checked: hits by tier and misses by reason must add up to its prompt's tokens, or the demo stops.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from rich.table import Table
from rich.text import Text
from safetensors.torch import load
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import kvstore
from engine_adapter.adapter import Report
from engine_adapter.hf_cache import PrefixCache
from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import StoreError
from kvstore.client.connection import stat_at
from kvstore.client.framing import TimedOut
from kvstore.client.sidecar_store import SidecarStore
from kvstore.config import format_size
from kvstore.demo.questions import (
    MAX_ANSWER_TOKENS,
    MAX_PROMPT_TOKENS,
    DemoOptions,
    DemoRequest,
    Kind,
    prompt_of,
    twenty_requests,
    usable_cores,
)
from kvstore.node import EmbeddedStore
from kvstore.status.tree import SidecarStatus
from tiering.clock import SystemClock
from tiering.counts.tally import CopyKind

DRAWS: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}
MAX_PAIRS = 8
SHORTEST_PAIRED_PROMPT = 2048
SHOWN_ANSWER_BYTES = 12
WARM_SECONDS = 60.0
"""How long a store that is opened anew may take to take in what is on disk."""
PORT = 9798
"""As for `kvstore console`; if it is in use, any free one."""
END_SECONDS, ANSWER_SECONDS = 60.0, 5.0

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and steps done of how many."""


@dataclass(frozen=True)
class PassResult:
    """Prompts, answers and reports of a pass, by request number. plain: of plain transformers, milliseconds to the
    first token and that token."""

    name: str
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    plain: dict[int, tuple[float, int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Sums in tokens, times in milliseconds."""
        gaps = [gap for report in self.reports for gap in report.itl_ms]
        return {
            "prompt_tokens": sum(map(len, self.prompts)),
            "hits": _sums(report.account.hits for report in self.reports),
            "misses": _sums(report.account.misses for report in self.reports),
            "ttft_ms": percentiles([report.ttft_ms for report in self.reports]),
            "itl_ms": percentiles(gaps),
            "tokens_per_second": 1e3 * len(gaps) / sum(gaps) if gaps else 0.0,
            "saved_blocks": sum(report.saved_blocks for report in self.reports),
            "faults": sum(report.faults for report in self.reports),
        }

    def against_plain(self) -> dict[str, float] | None:
        """Medians, and the median of the pairs' quotients, as a shared machine drifts; None if no prompt was long
        enough. same_first_token: pairs in which both chose the same token."""
        if not self.plain:
            return None
        ours = [self.reports[number].ttft_ms for number in self.plain]
        plain = [milliseconds for milliseconds, _ in self.plain.values()]
        return {
            "cold_ms": median(ours),
            "generate_ms": median(plain),
            "ratio": median(one / other for one, other in zip(ours, plain, strict=True)),
            "pairs": len(plain),
            "same_first_token": sum(self.answers[number][0] == token for number, (_, token) in self.plain.items()),
        }

    def restored_answer_tokens(self, requests: Sequence[DemoRequest], block_tokens: int) -> int:
        """Tokens of earlier answers in a chat's prompts that came from the store, although decoding had made them.

        Decoding fills blocks one token at a time. The KV of an answer's last token is not computed, so the blocks that
        decoding completed end before it.
        """
        restored = 0
        for number, report in enumerate(self.reports):
            earlier = requests[number].follows
            while earlier is not None:
                start = len(self.prompts[earlier])
                decoded = start + len(self.answers[earlier]) - 1
                restored += max(0, min(decoded - decoded % block_tokens, report.account.hit_tokens) - start)
                earlier = requests[earlier].follows
        return restored


@dataclass(frozen=True)
class DemoResult:
    """passes: cold, fill, warm, restart. stored: blocks and bytes in the store at the end, a recurrent model's states
    included. read_bytes: from disk after the restart. seconds: of the whole demo."""

    options: DemoOptions
    requests: list[DemoRequest]
    passes: list[PassResult]
    model: dict[str, object]
    threads: int
    block_tokens: int
    has_states: bool
    stored: dict[str, int]
    read_bytes: int
    seconds: float

    @property
    def differing(self) -> list[int]:
        """Requests whose answers are not the same in all passes."""
        answers = zip(*(result.answers for result in self.passes), strict=True)
        return [number for number, given in enumerate(answers) if any(answer != given[0] for answer in given)]

    @property
    def failures(self) -> list[str]:
        if not self.differing:
            return []
        numbers = ", ".join(str(number + 1) for number in self.differing)
        return [f"{len(self.differing)} of {len(self.requests)} answers differ between passes: {numbers}"]

    def to_dict(self) -> dict[str, Any]:
        """Tokens, bytes, milliseconds, and ratios that are better when larger, except cold_vs_generate: cold's time /
        plain `generate`'s."""
        against, passes = self.passes[0].against_plain(), {result.name: result.to_dict() for result in self.passes}
        times = {name: one["ttft_ms"] for name, one in passes.items()}
        kinds = Counter(request.kind for request in self.requests)
        return {
            "versions": {
                "kvstore": kvstore.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "model": self.model,
            "seed": self.options.seed,
            "threads": self.threads,
            "requests": len(self.requests),
            "requests_by_kind": {str(kind): kinds[kind] for kind in Kind},
            "answer_tokens": self.options.tokens,
            "grid_tokens": self.passes[0].reports[0].grid_tokens,
            "block_tokens": self.block_tokens,
            "passes": passes,
            "ttft_ratio": times["cold"]["p50"] / times["warm"]["p50"],
            "ttft_ratio_p99": times["cold"]["p99"] / times["warm"]["p99"],
            "ttft_ratio_restart": times["cold"]["p50"] / times["restart"]["p50"],
            "cold_vs_generate": against["ratio"] if against else None,
            "cold_vs_generate_pairs": against,
            "stored": self.stored,
            "restart": {"read_bytes": self.read_bytes},
            "restored_answer_tokens": {
                result.name: result.restored_answer_tokens(self.requests, self.block_tokens) for result in self.passes
            },
            "identical": len(self.requests) - len(self.differing),
            "failures": self.failures,
            "seconds": self.seconds,
        }

    def render(self, console: Any) -> None:
        found = self.to_dict()
        console.print(_table(found))
        for line in self._lines(found):
            console.print(Text(line), soft_wrap=True)

    def _lines(self, found: dict[str, Any]) -> Iterator[str]:
        yield (
            "cold: the store is closed. fill: it is empty at first. warm: it holds all prompts. "
            "restart: it is opened anew, its memory is empty."
        )
        yield (
            f"Warm, the first token comes {found['ttft_ratio']:.1f} times sooner than cold (p50; "
            f"{found['ttft_ratio_p99']:.1f} times at p99)."
        )
        yield (
            f"After the restart it comes {found['ttft_ratio_restart']:.1f} times sooner than cold (p50); "
            f"{format_size(self.read_bytes)} were read from the disk."
        )
        yield f"Identical answers in all passes: {found['identical']} of {found['requests']}."
        yield (
            f"Stored: {self.stored['blocks']:,} blocks of {self.block_tokens} tokens"
            f"{' and states of recurrent layers' if self.has_states else ''}, {format_size(self.stored['bytes'])}."
        )
        yield f"Reused in the chat: {found['restored_answer_tokens']['warm']} tokens of its own earlier answers."
        if against := found["cold_vs_generate_pairs"]:
            yield (
                f"Cold takes {against['ratio']:.2f} times as long as plain transformers generate, to the first token "
                f"(median of {against['pairs']} pairs; by themselves, medians of {against['cold_ms']:.0f} ms and "
                f"{against['generate_ms']:.0f} ms)."
            )
        if self.options.seed is None:
            yield (
                "The model is too small to answer: what it writes reads like Python's documentation and means nothing."
            )
        else:
            first = bytes(self.passes[0].answers[0][:SHOWN_ANSWER_BYTES])
            yield f"The model's weights are random, so its answers mean nothing; the first one begins {first!r}."


def _table(found: dict[str, Any]) -> Table:
    passes = found["passes"]
    table = Table(title=f"{found['requests']} requests, four times", title_justify="left")
    table.add_column("")
    for name in passes:
        table.add_column(name, justify="right")

    def row(words: str, values: Iterable[float]) -> None:
        cells = [f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if value else "" for value in values]
        table.add_row(words, *cells)

    row("prompt tokens", [one["prompt_tokens"] for one in passes.values()])
    for words, part, names in (("  reused from", "hits", HitTier), ("  missed:", "misses", MissReason)):
        counts = [one[part] for one in passes.values()]
        for name in names:
            if any(name in count for count in counts):
                row(f"{words} {name}", [count.get(name, 0) for count in counts])
    row("blocks stored", [one["saved_blocks"] for one in passes.values()])
    table.add_section()
    for words, part in (("first token", "ttft_ms"), ("each next token", "itl_ms")):
        for percent in ("p50", "p99"):
            row(f"{words}, {percent}, ms", [one[part][percent] for one in passes.values()])
    return table


def run(
    options: DemoOptions,
    progress: Progress = lambda doing, done, steps: None,
    requests: Sequence[DemoRequest] | None = None,
    model: torch.nn.Module | None = None,
    sidecar: DemoSidecar | None = None,
) -> DemoResult:
    """Run everything; prints nothing. requests, model: in place of the demo's own. sidecar: a running one to answer
    from, restarted for the last pass; `options` then do not configure the store. Raises `StoreError` if the store
    cannot open."""
    asked = list((requests or twenty_requests(options.tokens))[: options.requests])
    start = time.perf_counter()
    with ExitStack() as stack:
        most = 1 if options.seed is None else min(usable_cores(), torch.get_num_threads())
        threads = options.threads or most
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")))
        directory = options.data if options.data is not None else str(scratch / "store")

        def opened() -> EmbeddedStore | SidecarStore:
            if sidecar is not None:
                return sidecar.open()
            return kvstore.embedded(directory, dram=options.dram, nvme=options.nvme)

        store = opened()
        stack.callback(store.close)
        progress("making a model", 0, 1)
        if model is None:
            seed, positions = options.seed, MAX_PROMPT_TOKENS + MAX_ANSWER_TOKENS
            model = load_trained() if seed is None else build_model(seed, positions, is_hybrid=options.hybrid)
        with kvstore.embedded(str(scratch / "closed"), dram="64MiB") as closed:
            cold_cache = PrefixCache(model, closed, codec="raw")
        warm_cache = PrefixCache(model, store, codec="raw")
        _generate_plainly(model, 0, list(asked[0].text))  # both pay for first-time work
        cold_cache.generate(list(asked[0].text), max_new_tokens=2)
        progress("making a model", 1, 1)

        cold = run_pass("cold", cold_cache, asked, options.tokens, progress)
        fill = run_pass("fill", warm_cache, asked, options.tokens, progress, cold)
        warm = run_pass("warm", warm_cache, asked, options.tokens, progress, cold)
        layout = warm_cache.layout
        blocks = fill.to_dict()["saved_blocks"]
        stored = {"blocks": blocks, "bytes": blocks * layout.raw_bytes}
        if isinstance(store, EmbeddedStore):
            size = sum(one.blocks * sum(one.payload_bytes) for one in store.core.namespaces())
            stored = {"blocks": store.usage().blocks, "bytes": size}

        progress("restart", 0, 1)
        store.close()
        if sidecar is not None:
            sidecar.restart()
        with opened() as store:
            if isinstance(store, EmbeddedStore) and not store.warmed(WARM_SECONDS):
                raise StoreError("what is on disk could not be taken in")
            restarted = run_pass(
                "restart", PrefixCache(model, store, codec="raw"), asked, options.tokens, progress, cold
            )
            read_bytes = restarted.to_dict()["hits"].get(HitTier.NVME, 0) // layout.block_tokens * layout.raw_bytes
            if isinstance(store, EmbeddedStore):
                read_bytes = store.core.blocks.tally.now().copied_bytes[CopyKind.PROMOTE]
        progress("restart", 1, 1)
    return DemoResult(
        options,
        asked,
        [cold, fill, warm, restarted],
        describe_model(model, is_trained=options.seed is None),
        threads,
        layout.block_tokens,
        warm_cache.states is not None,
        stored,
        read_bytes,
        time.perf_counter() - start,
    )


def run_pass(
    name: str,
    cache: PrefixCache,
    requests: Sequence[DemoRequest],
    answer_tokens: int,
    progress: Progress,
    cold: PassResult | None = None,
) -> PassResult:
    """Answer the requests. cold: the first pass, whose answers are in the chat's prompts; the first pass itself has
    none, and times plain transformers right beside its own longer requests, the two in turns ahead of each other."""
    done = PassResult(name)
    for number in range(len(requests)):
        progress(name, number, len(requests))
        prompt = cold.prompts[number] if cold else prompt_of(number, requests, done.prompts, done.answers)
        is_paired = cold is None and len(prompt) >= SHORTEST_PAIRED_PROMPT and len(done.plain) < MAX_PAIRS
        if is_paired and number % 2:
            done.plain[number] = _generate_plainly(cache.model, number, prompt)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            output = cache.generate(prompt, max_new_tokens=answer_tokens, **DRAWS)
        account = cache.report.account
        assert account.hit_tokens + sum(account.misses.values()) == account.asked == len(prompt), "unexplained tokens"
        done.prompts.append(prompt)
        done.answers.append(output[0, len(prompt) :].tolist())
        done.reports.append(cache.report)
        if is_paired and not number % 2:
            done.plain[number] = _generate_plainly(cache.model, number, prompt)
    progress(name, len(requests), len(requests))
    return done


def _generate_plainly(model: Any, number: int, prompt: list[int]) -> tuple[float, int]:
    tokens = torch.tensor([prompt])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=1, **DRAWS)
        return 1e3 * (time.perf_counter() - start), int(output[0, -1])


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By nearest rank: of twenty values the 99th percentile is the largest. 0 without values."""
    p50, p99 = np.percentile(values or [0.0], [50, 99], method="inverted_cdf").tolist()
    return {"p50": p50, "p99": p99}


def _sums(counts: Iterable[Mapping[Any, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for count in counts:
        sums.update({str(origin): tokens for origin, tokens in count.items()})
    return dict(sums)


class DemoSidecar:
    """The demo's store as a sidecar, and a console that shows it in a browser: two processes that end with its context.
    The console stays where the sidecar is restarted, and shows the restart."""

    def __init__(self, directory: Path, dram: str, nvme: str) -> None:
        """directory: the store's, with its sockets. dram, nvme: budgets, such as "512MiB"."""
        self._directory, self._observed = directory, str(directory / "observe.sock")
        self._serve = ["serve", "--data", str(directory), "--dram", dram, "--nvme", nvme]
        self._sidecar: subprocess.Popen[str] | None = None
        self._console: subprocess.Popen[str] | None = None
        self.url = ""
        """Of the dashboard, once it runs."""

    def __enter__(self) -> DemoSidecar:
        command = ["console", "--socket", self._observed, "--keeper", str(os.getpid()), "--listen"]
        try:
            self._sidecar, _ = _start(self._serve)
            try:
                self._console, said = _start([*command, f"127.0.0.1:{PORT}"])
            except StoreError:
                self._console, said = _start([*command, "127.0.0.1:0"])
        except BaseException:
            self.__exit__()
            raise
        self.url = str(said["console"])
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._console)
        _end(self._sidecar)

    def open(self) -> EmbeddedStore | SidecarStore:
        return kvstore.open(f"unix:{self._directory / 'kvstore.sock'}", engine="kvstore demo")

    def status(self) -> SidecarStatus:
        """Raises `StoreError`."""
        try:
            return stat_at(self._observed, "kvstore demo", SystemClock(), ANSWER_SECONDS)
        except (StoreError, TimedOut, ValueError, OSError) as error:
            raise StoreError(f"{self._observed}: {error}") from None

    def restart(self) -> None:
        """End the sidecar in order, which flushes dirty blocks, and start another that has recovered the disk. Raises
        `StoreError`."""
        _end(self._sidecar)
        self._sidecar, _ = _start(self._serve)
        until = time.monotonic() + WARM_SECONDS
        while self.status().state == "warming":
            if time.monotonic() > until:
                raise StoreError("what is on disk could not be taken in")
            time.sleep(0.1)

    def wait(self) -> None:
        assert self._console is not None
        self._console.wait()


def _start(arguments: Sequence[str]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start one of our commands; returns it and the line that it prints. It gets no signals from the terminal. Raises
    `StoreError`."""
    with tempfile.TemporaryFile("w+") as log:  # not a pipe: it would fill up
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore", *arguments, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            return process, json.loads(line)
        process.wait()
        log.seek(0)
        lines = log.read().strip().splitlines() or [f"status {process.returncode}"]
    raise StoreError(f"kvstore {arguments[0]} does not run: {lines[-1].removeprefix('kvstore: ')}")


def _end(process: subprocess.Popen[str] | None) -> None:
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


# The model: a small Llama over bytes, trained by us, or a model with random weights from a config.json ---------------


FOLDER = "trained"
VOCABULARY = 256
INITIALIZER_RANGE = 0.08


LINEAR: dict[str, Any] = {f"linear_num_{one}_heads": 4 for one in ("key", "value")} | {
    f"linear_{one}_head_dim": 64 for one in ("key", "value")
}
"""The hybrid's recurrent layers."""


def load_trained() -> torch.nn.Module:
    """The model in `trained/`, ready to run. Raises `StoreError` if its files are damaged."""
    folder = resources.files("kvstore.demo").joinpath(FOLDER)
    weights = folder.joinpath("model.safetensors").read_bytes()
    expected, found = trained_origin()["sha256"], sha256(weights).hexdigest()
    if found != expected:
        raise StoreError(
            f"{folder.joinpath('model.safetensors')} is damaged: SHA-256 {found[:16]}..., expected {expected[:16]}...; "
            "install kvstore again"
        )
    config = json.loads(folder.joinpath("config.json").read_text("utf-8"))
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    missing = model.load_state_dict(load(weights), strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys, (
        "embeddings are tied, nothing else"
    )
    return _ready(model)


def trained_origin() -> dict[str, Any]:
    """The trained model's sources, its digest, and its loss on held-out text."""
    text = resources.files("kvstore.demo").joinpath(FOLDER, "ORIGIN.json").read_text("utf-8")
    origin: dict[str, Any] = json.loads(text)
    return origin


def build_model(seed: int, positions: int, layers: int = 3, *, is_hybrid: bool = False) -> torch.nn.Module:
    """The random model of this seed, ready to run. Torch's global generator is left as it was.

    positions: tokens of the longest prompt and answer. layers: of a Llama; a hybrid has four.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4 if is_hybrid else layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": positions,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = (
            Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, **LINEAR))
            if is_hybrid
            else LlamaForCausalLM(LlamaConfig(**shape))
        )
    return _ready(model)


def _ready(model: torch.nn.Module) -> torch.nn.Module:
    return model.to(torch.float32).eval()


def describe_model(model: torch.nn.Module, is_trained: bool) -> dict[str, object]:
    config: Any = model.config
    return {
        "type": config.model_type,
        "weights": "trained" if is_trained else "random",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
