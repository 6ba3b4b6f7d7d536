"""What the adaptive policy costs: CPU for each block that a request asks for over what LRU costs, and its longest call.

    python benchmarks/policy_cost.py TRACE

CPU time of this thread, each lap with LRU right before it. Each call counts with its median over the laps: what takes
long by itself does so in each lap. Last: requests of a million tokens, and what it takes to read their list once.
"""

from __future__ import annotations

import json
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from kv_bench import script
from kv_bench.measure import quiet_collector
from kvstore.insight.trace import Trace, read_trace
from kvstore.node import build_replay
from tiering.policies.adaptive import Adaptive
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker

LAPS = 5
SIZES = (1_000, 10_000, 64_000)
LONG_REQUEST = 62_000  # blocks: a million tokens in blocks of 16
CALLS = ("used", "touched", "inserted", "removed", "became_leaf", "became_inner", "_first_victim")


def cpu_us(make: PolicyMaker, blocks: int, trace: Trace) -> float:
    replay = build_replay(make, blocks)
    began = time.thread_time()
    replay.run(trace)
    return 1e6 * (time.thread_time() - began) / len(trace.blocks)


def longest_ms(make: PolicyMaker, blocks: int, trace: Trace) -> float:
    """Of all calls, each with its median over the laps."""
    laps = [calls_s(make, blocks, trace) for _ in range(LAPS)]
    assert len({len(lap) for lap in laps}) == 1, "every lap makes the same calls"
    return 1e3 * float(np.median(laps, axis=0).max())


def calls_s(make: PolicyMaker, blocks: int, trace: Trace) -> Any:
    """CPU time of each call in one lap, in the order in which they ended."""
    replay = build_replay(make, blocks)
    policy: Any = replay._blocks.residency.policy
    taken = array("d")

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            began = time.thread_time()
            found = call(*given)
            taken.append(time.thread_time() - began)
            return found

        return run

    for name in CALLS:
        if hasattr(policy, name):
            setattr(policy, name, timed(getattr(policy, name)))
    with quiet_collector():
        replay.run(trace)
    return np.frombuffer(taken)


def reading_ms(blocks: int) -> float:
    rows = list(range(100_000, 100_000 + blocks))
    began = time.thread_time()
    array("i", rows)
    return 1e3 * (time.thread_time() - began)


def long_requests() -> Trace:
    """Five of `LONG_REQUEST` blocks each, of which the first half is the same."""
    half = list(range(LONG_REQUEST // 2))
    lines = []
    for number in range(5):
        first = LONG_REQUEST * (number + 1)
        ids = half + list(range(first, first + LONG_REQUEST // 2))
        request = {"timestamp": number, "input_length": 16 * len(ids), "output_length": 1, "hash_ids": ids}
        lines.append(json.dumps(request))
    return read_trace("long requests", lines, block_tokens=16)


def main() -> None:
    trace, rows = script.trace_of(script.options(__doc__, "trace").trace), []
    for blocks in SIZES:
        lru, over = [], []
        for _ in range(LAPS):
            lru.append(cpu_us(LeafFirstLru, blocks, trace))
            over.append(cpu_us(Adaptive, blocks, trace) - lru[-1])
        medians = {"lru_us": statistics.median(lru), "over_lru_us": statistics.median(over)}
        longest = longest_ms(Adaptive, blocks, trace)
        rows.append({"blocks": blocks, **script.rounded(2, **medians, longest_call_ms=longest)})
    long = long_requests()
    of_each = [longest_ms(make, 2 * LONG_REQUEST, long) for make in (Adaptive, LeafFirstLru)]
    last = dict(zip(("longest_call_ms", "lru_longest_call_ms"), of_each, strict=True))
    last["reading_ms"] = statistics.median(reading_ms(LONG_REQUEST) for _ in range(LAPS))
    script.end([*rows, {"request_blocks": LONG_REQUEST, **script.rounded(2, **last)}])


if __name__ == "__main__":
    script.run(main)
