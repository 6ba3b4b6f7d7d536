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
from contextlib import ExitStack
from pathlib import Path

from kv_bench.ttft_vllm import EXTERNAL, PATIENT, PLAIN, RAW, Answer, Engine, VllmBench, VllmOptions, timed_connector
from kvstore.cli import ask
from kvstore.node import SystemClock

LEARNING = 10
"""Prompts before the first pair: speeds are told once they are learned."""
STUDENT_975 = {5: 2.571, 9: 2.262, 19: 2.093, 29: 2.045, 39: 2.023}
"""By degrees of freedom: how many standard errors the interval reaches to either side."""
SIGNS_RIGHT = 0.95
TELLS, TELL_SECONDS = 3, 1.1
"""Short prompts behind the last pair, more than a second apart: engines tell at most once a second."""


def with_hit(bench: VllmBench, engine: Engine, prompt: list[int]) -> Answer:
    """A prompt that comes from the sidecar, once it was computed and stored."""
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20, choices=[count + 1 for count in STUDENT_975])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-savings-") as folder, ExitStack() as stack:
        options = VllmOptions(prefix_tokens=given.tokens)
        bench = VllmBench(options, Path(folder), lambda what: print(what, file=sys.stderr))
        sidecar = stack.enter_context(bench.sidecar((given.pairs + LEARNING + 4) * given.tokens))
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
        for pair in range(given.pairs):
            prompt, answers = bench.tokens(given.tokens), dict[str, Answer]()
            for name in (PLAIN, RAW) if pair % 2 else (RAW, PLAIN):
                asked = bench.ask if name == PLAIN else lambda engine, prompt: with_hit(bench, engine, prompt)
                answers[name] = asked(engines[name], prompt)
            pairs.append((answers[PLAIN]["ttft_ms"] - answers[RAW]["ttft_ms"]) / 1e3)
            signs += answers[RAW]["saved_ms"] * pairs[-1] > 0
            bench.say(f"pair {pair + 1}: {pairs[-1]:.3f} s saved")
        said = (told(bench, engines[RAW], admin) - before) / given.pairs
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
        "faults": bench.faults,
    }
    if given.json:
        print(json.dumps(result))
    else:
        print(
            f"a hit of {given.tokens} tokens saved {mean:.3f} s ({mean - reach:.3f} to {mean + reach:.3f}, 95 %, "
            f"{given.pairs} pairs) by the clock, and {said:.3f} s as told: {said / mean:.3f} of it, "
            f"{'inside' if inside else 'OUTSIDE'} the interval; the sign is right in {signs} of {given.pairs} requests"
        )
        print(*bench.faults, sep="\n")
    raise SystemExit(not inside or signs < SIGNS_RIGHT * given.pairs or bool(bench.faults))


if __name__ == "__main__":
    main()
