"""Whether what the store says it saved is what it saved, on a vLLM for CPUs.

    .venv-engines/bin/python benchmarks/vllm_savings.py [--tokens 512]

A pair is one new prompt: an engine without a store computes it, another one gets it from the sidecar. What `kvstore
stat` says was saved has to be inside the 95 % interval of the pairs' mean by the clock, and each request's own saving
must have the sign that the clock has, in 95 of 100 pairs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from kv_bench import script
from kv_bench.ttft_vllm import EXTERNAL, PATIENT, PLAIN, RAW, Answer, Engine, VllmBench, VllmOptions, timed_connector
from kvstore.cli import ask
from kvstore.node import SystemClock

LEARNING = 10
"""Prompts before the first pair: speeds are told once they are learned."""
PAIRS, STUDENT_975 = 20, 2.093
"""How many standard errors of so many pairs the interval reaches to either side."""
SIGNS_RIGHT = 0.95
TELLS, TELL_SECONDS = 3, 1.1
"""Short prompts behind the last pair, more than a second apart: engines tell at most once a second."""


def with_hit(bench: VllmBench, engine: Engine, prompt: list[int]) -> Answer:
    bench.ask(engine, prompt)
    engine.do("settle")
    engine.do("forget")
    answer = bench.ask(engine, prompt)
    bench.check(engine.name, EXTERNAL, answer, len(prompt))
    return answer


def told(bench: VllmBench, engine: Engine, admin: str) -> float:
    """Seconds that hits saved so far, less those that they cost."""
    for _ in range(TELLS):
        bench.ask(engine, bench.tokens(128))
        engine.do("settle")
        time.sleep(TELL_SECONDS)
    savings = ask.stat(admin, SystemClock()).savings
    if savings is None:
        raise SystemExit("the sidecar was told no savings")
    return savings.saved_seconds - savings.regret_seconds


def main() -> None:
    given = script.options(__doc__, tokens=512)
    with tempfile.TemporaryDirectory(prefix="kvstore-savings-") as folder, ExitStack() as stack:
        options = VllmOptions(prefix_tokens=given.tokens)
        bench = VllmBench(options, Path(folder), script.say)
        sidecar = stack.enter_context(bench.sidecar((PAIRS + LEARNING + 4) * given.tokens))
        admin = str(sidecar.folder / "kv" / "admin.sock")
        settings = {**PATIENT, "cost_model": True}  # as shipped, but that late is not a miss, and no hit is audited
        transfer = timed_connector(sidecar.socket, codec=RAW, **settings)
        engines = bench.started(stack, {PLAIN: None, RAW: transfer})
        for name, engine in engines.items():
            bench.warm_up(name, engine)
        for number in range(LEARNING):
            bench.say(f"learning, {number + 1} of {LEARNING}")
            with_hit(bench, engines[RAW], bench.tokens(given.tokens))
            bench.ask(engines[PLAIN], bench.tokens(128))
        before, pairs, signs = told(bench, engines[RAW], admin), list[float](), 0
        for pair in range(PAIRS):
            prompt, answers = bench.tokens(given.tokens), dict[str, Answer]()
            for name in (PLAIN, RAW) if pair % 2 else (RAW, PLAIN):
                asked = bench.ask if name == PLAIN else lambda engine, prompt: with_hit(bench, engine, prompt)
                answers[name] = asked(engines[name], prompt)
            pairs.append((answers[PLAIN]["ttft_ms"] - answers[RAW]["ttft_ms"]) / 1e3)
            signs += answers[RAW]["saved_ms"] * pairs[-1] > 0
            bench.say(f"pair {pair + 1}: {pairs[-1]:.3f} s saved")
        said = (told(bench, engines[RAW], admin) - before) / PAIRS
    mean, error = statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    reach = STUDENT_975 * error
    figures = {"saved_seconds_by_the_clock": mean, "saved_seconds_as_told": said, "told_over_clock": said / mean}
    result = {"pairs": PAIRS, "tokens": given.tokens, **script.rounded(4, **figures)}
    result["interval"] = [round(mean - reach, 4), round(mean + reach, 4)]
    result |= {"inside": abs(said - mean) <= reach, "signs_right": signs, "faults": bench.faults}
    script.end(result, result["inside"] and signs >= SIGNS_RIGHT * PAIRS and not bench.faults)


if __name__ == "__main__":
    script.run(main)
