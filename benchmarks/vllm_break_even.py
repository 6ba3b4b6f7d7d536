"""From which prefix on loading is sooner than computing: as `kvstore plan` says, and as measured on a vLLM for CPUs.

    .venv-engines/bin/python benchmarks/vllm_break_even.py

Loads go through links of known speed (`LinkedConnector`), chosen so that both ways cross at some blocks' length. The
plan is told the prefill rate and the overhead of a load from before the turns; both ways cross where the medians of
their times to the first token do, between two lengths of whole blocks. At most 10 % apart.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kv_bench import script
from kv_bench.llamas import LLAMAS, MID
from kv_bench.ttft_vllm import (
    COLD,
    CONNECTORS,
    EXTERNAL,
    FRAME_BYTES,
    LINK_FILE,
    PAGE_TOKENS,
    PATIENT,
    RAW,
    Engine,
    VllmBench,
    VllmOptions,
    connector,
)
from kvstore.insight.models import described
from kvstore.insight.plan import PlanRequest, SizePlan, TierSpeed, plan
from kvstore.insight.replay import QUADRATIC_TOKENS

ALLOWED = 0.1
CROSSINGS = (1.5, 2.5, 3.5)
"""In blocks: where links are chosen to have them."""
OVERHEAD_SHARE = 0.7
LEARNED_AT = (1, 3, 5)
TURNS, LEARNING_TURNS = 9, 2
UNTHROTTLED = (1e15, 0.0)
_MID = LLAMAS[MID]
MODEL = described(_MID["num_hidden_layers"], _MID["num_key_value_heads"], _MID["head_dim"], "bfloat16")
Times = Mapping[int, Sequence[float]]
"""Seconds to the first token, by blocks of the prefix."""


def planned(rate: float, speed: float, overhead: float) -> SizePlan:
    tier = TierSpeed("link", speed, overhead)
    return plan(PlanRequest(MODEL, codec="raw", block_tokens=PAGE_TOKENS, prefill_rate=rate, tiers=(tier,)))


def rate_of(computed: Times, fixed: float) -> float:
    """Of a short prompt: the plan's n / rate * (1 + n / Q), through what was measured."""
    tokens = {blocks: blocks * PAGE_TOKENS for blocks in computed}
    return statistics.median(
        tokens[blocks] * (1 + tokens[blocks] / QUADRATIC_TOKENS) / (statistics.median(times) - fixed)
        for blocks, times in computed.items()
    )


def crossing(computed: Times, loaded: Times) -> float | None:
    """Tokens at which both take as long; None where they do not cross between the lengths that were tried."""
    lengths = sorted(loaded)
    more = [statistics.median(loaded[one]) - statistics.median(computed[one]) for one in lengths]
    for at in range(len(lengths) - 1):
        if more[at] > 0 >= more[at + 1]:
            share = more[at] / (more[at] - more[at + 1])
            return PAGE_TOKENS * (lengths[at] + share * (lengths[at + 1] - lengths[at]))
    return None


class Measured:
    """An engine behind a link, and prompts of each length that its sidecar has."""

    def __init__(self, bench: VllmBench, engine: Engine, link: Path) -> None:
        self._bench, self._engine, self._link = bench, engine, link
        self._stored: dict[int, list[int]] = {}

    def compute(self, blocks: int) -> float:
        answer = self._bench.ask(self._engine, self._bench.tokens(blocks * PAGE_TOKENS))
        self._bench.check(self._engine.name, COLD, answer, 0)
        self._engine.do("settle")
        return float(answer["ttft_ms"]) / 1e3

    def load(self, blocks: int, speed: float, overhead: float) -> float:
        if blocks not in self._stored:
            prompt = self._stored[blocks] = self._bench.tokens(blocks * PAGE_TOKENS)
            self._bench.ask(self._engine, prompt)
            self._engine.do("settle")
        self._link.write_text(f"{speed} {overhead}")
        self._engine.do("forget")
        answer = self._bench.ask(self._engine, self._stored[blocks])
        self._bench.check(self._engine.name, EXTERNAL, answer, blocks * PAGE_TOKENS)
        return float(answer["ttft_ms"]) / 1e3

    def reuse(self, blocks: int) -> float:
        return float(self._bench.ask(self._engine, self._stored[blocks])["ttft_ms"]) / 1e3


def main() -> None:
    script.options(__doc__)
    token_bytes = planned(1e3, 1e9, 0.0).figure("stored_bytes_per_token").value
    assert token_bytes is not None
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-break-even-") as folder, ExitStack() as stack:
        link = Path(folder, "link")
        os.environ |= {LINK_FILE: str(link), FRAME_BYTES: str(token_bytes)}
        options = VllmOptions(prefix_tokens=2 * PAGE_TOKENS)
        bench = VllmBench(options, Path(folder), script.say)
        sidecar = stack.enter_context(bench.sidecar((TURNS + LEARNING_TURNS) * 50 * PAGE_TOKENS))
        settings = {**PATIENT, "codec": RAW, "load": "sync"}
        transfer = connector(sidecar.socket, "LinkedConnector", CONNECTORS, **settings)
        link.write_text(" ".join(map(str, UNTHROTTLED)))
        engine = bench.started(stack, {RAW: transfer})[RAW]
        bench.warm_up(RAW, engine)
        one = Measured(bench, engine, link)
        first_computed, first_loaded = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
        fixed = []
        for turn in range(LEARNING_TURNS + 1):
            for blocks in LEARNED_AT:
                times = one.compute(blocks), one.load(blocks, *UNTHROTTLED), one.reuse(blocks)
                if turn:  # the first one warms up
                    first_computed[blocks].append(times[0])
                    first_loaded[blocks].append(times[1])
                    fixed.append(times[2])
        besides = statistics.median(fixed)
        rate = rate_of(first_computed, besides)
        overheads = [statistics.median(times) - besides for times in first_loaded.values()]
        links = []
        for crossed in CROSSINGS:
            seconds = crossed * PAGE_TOKENS / rate
            speed = token_bytes * rate / (1 - OVERHEAD_SHARE)
            links.append((float(f"{speed:.2g}"), float(f"{OVERHEAD_SHARE * seconds:.2g}"), int(crossed)))
        computed = defaultdict[int, list[float]](list)
        loaded = [defaultdict[int, list[float]](list) for _ in links]
        lengths = range(1, max(at for *_, at in links) + 3)
        for turn in range(TURNS):
            for blocks in lengths if turn % 2 else reversed(lengths):
                bench.say(f"turn {turn + 1} of {TURNS}, {blocks} blocks")
                computed[blocks].append(one.compute(blocks))
                for number, (speed, overhead, at) in enumerate(links):
                    if at <= blocks <= at + 1 or blocks == at - 1 or blocks == at + 2:
                        loaded[number][blocks].append(one.load(blocks, speed, overhead))
        for (speed, overhead, _), of_link in zip(links, loaded, strict=True):
            told = planned(rate, speed, overhead + min(overheads)).figure("link_shortest_prefix").value
            found = crossing(computed, of_link)
            ratio = None if found is None or told is None else round(told / found, 3)
            row = {"link_bytes_per_second": speed, "link_overhead_seconds": overhead, "planned_tokens": told}
            measured = None if found is None else round(found, 1)
            rows.append({**row, "measured_tokens": measured, "planned_over_measured": ratio})
    direct = planned(rate, token_bytes * PAGE_TOKENS / max(1e-6, np.ptp(overheads) / 4), min(overheads))
    result = {
        "prefill_tokens_per_second": round(rate, 1),
        "one_block": {
            "computed_seconds": round(statistics.median(first_computed[1]), 4),
            "loaded_seconds": round(statistics.median(first_loaded[1]), 4),
            "planned_shortest_tokens": direct.figure("link_shortest_prefix").value,
        },
        "computed_seconds": {one * PAGE_TOKENS: round(statistics.median(computed[one]), 4) for one in computed},
        "load_seconds_without_link": round(min(overheads), 4),
        "links": rows,
        "faults": bench.faults,
    }
    near = [row["planned_over_measured"] for row in rows]
    is_near = all(isinstance(one, float) and abs(one - 1) <= ALLOWED for one in near)
    script.end(result, is_near and not bench.faults)


if __name__ == "__main__":
    script.run(main)
