"""What a sidecar that hangs (SIGSTOP) costs an engine: time to the first token and between tokens, beside no store.

    python benchmarks/silent_sidecar.py hf [--turns 15]           with transformers
    python benchmarks/silent_sidecar.py vllm [--turns 15]         with a vLLM for CPUs

Two engines take turns with prompts that no client has sent before, one with a store and one without.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kv_bench import script
from kv_bench.llamas import LLAMAS, MID, TINY
from kv_bench.measure import in_turn
from kv_bench.process import Sidecar

PLAIN, STORE = "no store", "silent store"
PROMPT_TOKENS, ANSWER_TOKENS = {"hf": 2048, "vllm": 1500}, 8
Ask = Callable[[list[int]], tuple[float, ...]]
"""Of a prompt: milliseconds to the first token, and between two tokens; and in the store before and after the first."""
COLUMNS = ("ttft_ms", "itl_ms", "store_ms before the first token", "store_ms after it")


@contextmanager
def transformers_engines(socket: str, scratch: Path) -> Iterator[dict[str, Ask]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import kvstore
    from engine_adapter.hf_cache import PrefixCache

    torch.manual_seed(0)
    sizes: dict[str, Any] = {**LLAMAS[TINY]}
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=4096)).eval()

    def asking(cache: PrefixCache) -> Ask:
        def ask(prompt: list[int]) -> tuple[float, ...]:
            report = cache.generate(prompt, max_new_tokens=ANSWER_TOKENS, stop_tokens=()).report
            return report.ttft_ms, statistics.fmean(report.itl_ms), report.lookup_ms, report.save_ms

        return ask

    with kvstore.open(f"unix:{socket}") as store:
        yield {PLAIN: asking(PrefixCache(model)), STORE: asking(PrefixCache(model, store))}


@contextmanager
def vllm_engines(socket: str, scratch: Path) -> Iterator[dict[str, Ask]]:
    from kv_bench.ttft_vllm import Engine, VllmBench, VllmOptions, connector

    def asking(engine: Engine) -> Ask:
        def ask(prompt: list[int]) -> tuple[float, ...]:
            (answer,) = engine.do("ask", prompts=[prompt], max_tokens=ANSWER_TOKENS)
            return answer["ttft_ms"], (answer["total_ms"] - answer["ttft_ms"]) / (ANSWER_TOKENS - 1)

        return ask

    bench = VllmBench(VllmOptions(MID, longest_tokens=4096, kv_gib=1), scratch, script.say)
    with ExitStack() as stack:
        engines = bench.started(stack, {PLAIN: None, STORE: connector(socket)})
        yield {name: asking(engine) for name, engine in engines.items()}


def main() -> None:
    given = script.options(__doc__, "engine", turns=15)
    drawn, tokens = random.Random(0), PROMPT_TOKENS[given.engine]

    def prompt() -> list[int]:
        return [drawn.randrange(1000) for _ in range(tokens)]

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sidecar = stack.enter_context(Sidecar({"dram": "1GiB", "nvme": "off"}))
        sidecar.greeted()
        stack.callback(sidecar.kill)  # it warns of clients that went away meanwhile
        started = transformers_engines if given.engine == "hf" else vllm_engines
        engines = stack.enter_context(started(sidecar.socket, scratch))
        for ask in [*engines.values()] * 3:
            ask(prompt())
        os.kill(sidecar.told["pid"], signal.SIGSTOP)
        first = engines[STORE](prompt())
        times: dict[str, list[tuple[float, ...]]] = {PLAIN: [], STORE: []}
        for turn in range(given.turns):
            for name in in_turn([STORE, PLAIN], turn):
                times[name].append(engines[name](prompt()))
        os.kill(sidecar.told["pid"], signal.SIGCONT)
    rows = []
    for column, what in enumerate(COLUMNS[: len(first)]):
        plain, silent = (statistics.median(one[column] for one in times[name]) for name in (PLAIN, STORE))
        figures = {PLAIN: plain, STORE: silent, "ratio": silent / plain if plain else None}
        rows.append({"of": what, **script.rounded(3, **figures, lost_when_found=first[column] - plain)})
    script.end(rows)


if __name__ == "__main__":
    main()
