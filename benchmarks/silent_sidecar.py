"""What a sidecar that hangs (SIGSTOP) costs an engine: time to the first token and between tokens, beside no store.

    python benchmarks/silent_sidecar.py hf [--turns 15]           with transformers
    python benchmarks/silent_sidecar.py vllm [--turns 15]         with a vLLM for CPUs

Two engines take turns with prompts that nobody has seen, one with a store and one without, in another order each time.
Printed: what the request lost in which the sidecar was found to hang, and medians of all later ones with their ratio;
with transformers also what the adapter spent in the store before the first token and after it, which is exact on a
machine that is busy with something else as well.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kv_bench.llamas import LLAMAS, MID, TINY
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

    bench = VllmBench(
        VllmOptions(MID, longest_tokens=4096, kv_gib=1), scratch, lambda line: print(line, file=sys.stderr)
    )
    with ExitStack() as stack:
        engines = bench.started(stack, {PLAIN: None, STORE: connector(socket)})
        yield {name: asking(engine) for name, engine in engines.items()}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(PROMPT_TOKENS))
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args()
    drawn, tokens = random.Random(0), PROMPT_TOKENS[given.engine]

    def prompt() -> list[int]:
        return [drawn.randrange(1000) for _ in range(tokens)]

    started = transformers_engines if given.engine == "hf" else vllm_engines
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sidecar = stack.enter_context(Sidecar({"dram": "1GiB", "nvme": "off"}))
        sidecar.greeted()
        stack.callback(sidecar.kill)  # it warns of clients that went away meanwhile
        engines = stack.enter_context(started(sidecar.socket, scratch))
        for _ in range(3):
            for ask in engines.values():
                ask(prompt())
        os.kill(sidecar.told["pid"], signal.SIGSTOP)
        first = engines[STORE](prompt())
        times: dict[str, list[tuple[float, ...]]] = {PLAIN: [], STORE: []}
        for turn in range(given.turns):
            for name in (PLAIN, STORE) if turn % 2 else (STORE, PLAIN):
                times[name].append(engines[name](prompt()))
        os.kill(sidecar.told["pid"], signal.SIGCONT)
    for column, what in enumerate(COLUMNS[: len(first)]):
        plain, silent = (statistics.median(one[column] for one in times[name]) for name in (PLAIN, STORE))
        ratio = f", ratio {silent / plain:.3f}" if plain else ""
        lost = f"{first[column] - plain:+.1f} in the request that found it"
        print(f"{what}: {PLAIN} {plain:.2f}, {STORE} {silent:.2f}{ratio}; {lost}")


if __name__ == "__main__":
    main()
