"""What a sidecar that hangs (SIGSTOP) costs an engine: time to the first token and between tokens, beside no store.

    python benchmarks/silent_sidecar.py hf [--turns 15]           with transformers
    python benchmarks/silent_sidecar.py vllm [--turns 15]         with a vLLM for CPUs

Two engines take turns with prompts that no client has sent before, one with a store and one without.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from kv_bench import script
from kv_bench.llamas import LLAMAS, MID, TINY, build
from kv_bench.measure import in_turn
from kv_bench.process import Sidecar

PLAIN, STORE = "no store", "silent store"
ANSWER_TOKENS, LONGEST_TOKENS = 8, 4096
Ask = Callable[[list[int]], tuple[float, ...]]
"""Of a prompt: milliseconds to the first token, and between two tokens; and in the store before and after the first."""
COLUMNS = ("ttft_ms", "itl_ms", "store_ms before the first token", "store_ms after it")


def transformers_engines(socket: str, scratch: Path, stack: ExitStack) -> dict[str, Ask]:
    import torch

    import kvstore
    from engine_adapter.hf_cache import PrefixCache

    model = build(LLAMAS[TINY], torch.device("cpu"), LONGEST_TOKENS)

    def asking(cache: PrefixCache) -> Ask:
        def ask(prompt: list[int]) -> tuple[float, ...]:
            cache.generate(prompt, min_new_tokens=ANSWER_TOKENS, max_new_tokens=ANSWER_TOKENS, do_sample=False)
            report = cache.report
            return report.ttft_ms, fmean(report.itl_ms), report.lookup_ms, report.save_ms

        return ask

    store: Any = stack.enter_context(kvstore.open(f"unix:{socket}"))
    return {PLAIN: asking(PrefixCache(model)), STORE: asking(PrefixCache(model, store))}


def vllm_engines(socket: str, scratch: Path, stack: ExitStack) -> dict[str, Ask]:
    from kv_bench.ttft_vllm import Engine, VllmBench, VllmOptions, connector

    def asking(engine: Engine) -> Ask:
        def ask(prompt: list[int]) -> tuple[float, ...]:
            (answer,) = engine.do("ask", prompts=[prompt], max_tokens=ANSWER_TOKENS)
            return answer["ttft_ms"], (answer["total_ms"] - answer["ttft_ms"]) / (ANSWER_TOKENS - 1)

        return ask

    bench = VllmBench(VllmOptions(MID, longest_tokens=LONGEST_TOKENS, kv_gib=1), scratch, script.say)
    engines = bench.started(stack, {PLAIN: None, STORE: connector(socket)})
    return {name: asking(engine) for name, engine in engines.items()}


ENGINES = {"hf": (transformers_engines, 2048), "vllm": (vllm_engines, 1500)}
"""What starts them, and tokens of a prompt."""


def main() -> None:
    given = script.options(__doc__, "engine", turns=15)
    script.one_of("engine", given.engine, ENGINES, "")
    (start, tokens), drawn = ENGINES[given.engine], np.random.default_rng(0)

    def ask(name: str) -> tuple[float, ...]:
        return engines[name](drawn.integers(0, 1000, tokens).tolist())

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sidecar = stack.enter_context(Sidecar({"dram": "1GiB", "nvme": "off"}))
        sidecar.greeted()
        stack.callback(sidecar.kill)  # it warns of clients that went away meanwhile
        engines = start(sidecar.socket, scratch, stack)
        for name in [*engines] * 3:
            ask(name)
        os.kill(sidecar.told["pid"], signal.SIGSTOP)
        first, times = ask(STORE), {PLAIN: list[tuple[float, ...]](), STORE: list[tuple[float, ...]]()}
        for turn in range(given.turns):
            for name in in_turn([STORE, PLAIN], turn):
                times[name].append(ask(name))
        os.kill(sidecar.told["pid"], signal.SIGCONT)
    rows = []
    for column, what in enumerate(COLUMNS[: len(first)]):
        plain, silent = (median(one[column] for one in times[name]) for name in (PLAIN, STORE))
        figures = {PLAIN: plain, STORE: silent, "ratio": silent / plain if plain else None}
        rows.append({"of": what, **script.rounded(3, **figures, lost_when_found=first[column] - plain)})
    script.end(rows)


if __name__ == "__main__":
    script.run(main)
