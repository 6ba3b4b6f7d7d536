"""Whether what the store says it saved is what it saved, on a vLLM for CPUs.

    .venv-engines/bin/python benchmarks/vllm_savings.py [--pairs 20] [--tokens 512] [--json]

A pair is one new prompt: an engine without a store computes it, another one computes and stores it,
forgets it, and is asked again, when it comes from the sidecar. Saved by the clock: time to the first token without the
store less that with a hit. Saved as told: what `kvstore stat` and the dashboard show (`savings.saved_seconds` less
`regret_seconds`), by the speeds that the engine's connector has learned. It has to be inside the 95 % interval of the
mean of the pairs. The engine whose turn is first changes from pair to pair. Each request's own saving, as its engine
reckons it, must have the sign that the clock has, in 95 of 100 pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kv_bench.engines import ttft_vllm
from kv_bench.engines.ttft_vllm import PATIENT, PLAIN, RAW
from kv_bench.engines.vllm_rows import VllmOptions
from kvstore.cli import ask
from kvstore.node import SystemClock

LEARNING = 10
"""Prompts before the first pair: speeds are told once they are learned."""
STUDENT_975 = {5: 2.571, 9: 2.262, 19: 2.093, 29: 2.045, 39: 2.023}
"""By degrees of freedom: how many standard errors the interval reaches to either side."""
SIGNS_RIGHT = 0.95
TELLS, TELL_SECONDS = 3, 1.1
"""Short prompts behind the last pair, more than a second apart: engines tell at most once a second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20, choices=[count + 1 for count in STUDENT_975])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = VllmOptions(prefix_tokens=given.tokens)
    with tempfile.TemporaryDirectory(prefix="kvstore-savings-") as folder, ExitStack() as stack:
        bench = ttft_vllm._Bench(options, Path(folder), lambda what: print(what, file=sys.stderr))
        bench.save_model()
        sidecar = stack.enter_context(bench._sidecar((given.pairs + LEARNING + 4) * given.tokens))
        admin = str(sidecar.folder / "kv" / "admin.sock")
        settings = {**PATIENT, "cost_model": True}  # as shipped, but that late is not a miss, and no hit is audited
        transfers = {PLAIN: None, RAW: ttft_vllm._connector(sidecar.socket, RAW, settings)}
        engines = bench._started(stack, transfers)
        for engine in engines.values():
            bench._warm_up(engine)
        for number in range(LEARNING):
            print(f"learning, {number + 1} of {LEARNING}", file=sys.stderr)
            with_hit(bench, engines[RAW], bench._tokens(given.tokens))
            bench._ask(engines[PLAIN], bench._tokens(128))
        before = told(bench, engines[RAW], admin)
        pairs, signs = [], 0
        for pair in range(given.pairs):
            prompt = bench._tokens(given.tokens)
            turns = {
                PLAIN: lambda prompt=prompt: bench._ask(engines[PLAIN], prompt),
                RAW: lambda prompt=prompt: with_hit(bench, engines[RAW], prompt),
            }
            answers = {name: turns[name]() for name in ((PLAIN, RAW) if pair % 2 else (RAW, PLAIN))}
            took = {name: answer["ttft_ms"] / 1e3 for name, answer in answers.items()}
            pairs.append(took[PLAIN] - took[RAW])
            signs += answers[RAW]["saved_ms"] * pairs[-1] > 0
            print(f"pair {pair + 1}: {took[PLAIN]:.3f} s and {took[RAW]:.3f} s", file=sys.stderr)
        said = (told(bench, engines[RAW], admin) - before) / given.pairs
        faults = bench.result.faults
    mean, error = statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    reach = STUDENT_975[len(pairs) - 1] * error
    inside = abs(said - mean) <= reach
    result = {
        "pairs": given.pairs,
        "tokens": given.tokens,
        "saved_seconds_by_the_clock": round(mean, 4),
        "interval": [round(mean - reach, 4), round(mean + reach, 4)],
        "saved_seconds_as_told": round(said, 4),
        "told_over_clock": round(said / mean, 4),
        "inside": inside,
        "signs_right": signs,
        "faults": faults,
    }
    if given.json:
        print(json.dumps(result))
    else:
        print(
            f"a hit of {given.tokens} tokens saved {mean:.3f} s ({mean - reach:.3f} to {mean + reach:.3f}, 95 %, "
            f"{given.pairs} pairs) by the clock, and {said:.3f} s as told: {said / mean:.3f} of it, "
            f"{'inside' if inside else 'OUTSIDE'} the interval; the sign is right in {signs} of {given.pairs} requests"
        )
        print(*faults, sep="\n")
    raise SystemExit(not inside or signs < SIGNS_RIGHT * given.pairs or bool(faults))


def with_hit(bench: ttft_vllm._Bench, engine: ttft_vllm.EngineProcess, prompt: list[int]) -> Mapping[str, Any]:
    """A prompt that comes from the sidecar, once it was computed and stored."""
    bench._ask(engine, prompt)
    engine.do("settle")
    engine.do("forget")
    answer = bench._ask(engine, prompt)
    bench._check(engine.name, "external hit", answer, len(prompt))
    return answer


def told(bench: ttft_vllm._Bench, engine: ttft_vllm.EngineProcess, admin: str) -> float:
    """Seconds that hits saved so far, less those that they cost."""
    for _ in range(TELLS):
        bench._ask(engine, bench._tokens(128))
        engine.do("settle")
        time.sleep(TELL_SECONDS)
    savings = ask.stat(admin, SystemClock()).savings
    if savings is None:
        raise SystemExit("the sidecar was told no savings")
    return savings.saved_seconds - savings.regret_seconds


if __name__ == "__main__":
    main()
