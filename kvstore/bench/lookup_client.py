"""One of the client processes of `kvstore bench lookup` that match at once.

It prints `ready` once its namespace is open. Each line that it reads is a turn, and each line that it writes its
result:

    > {"work": "match" or "hash", "start": seconds, "end": seconds}      by the host-wide clock
    < {"seconds": [of each match or chain that ended in time], "cpu": seconds}

It ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import cycle
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np

from kvstore.bench.rig import BlockShape, Chain, LookupOptions, Prompts
from kvstore.bench.sidecar import open_patiently

READY = "ready"
MODEL = "0" * 40


def shape_of(options: LookupOptions) -> BlockShape:
    """Blocks with at most a page of payload: matches do not look at it."""
    return BlockShape(layers=1, block_tokens=options.block_tokens, kv_heads=1, head_dim=8)


def main(job: dict[str, Any]) -> None:
    """job: `socket`, `number` of this client, stored `prompts`, and the `options`."""
    options = LookupOptions(**job["options"])
    order = np.random.default_rng(job["number"]).permutation(job["prompts"])
    prompts = Prompts(options)
    with open_patiently(job["socket"]) as store:
        handle = store.namespace(model=MODEL, layout=shape_of(options).layout)
        wanted = cycle([prompts[number] for number in order.tolist()])

        def match() -> None:
            found = handle.match(next(wanted))
            assert found.blocks == options.prompt_blocks and found.reason is None, found

        work = {"match": match, "hash": Chain(options).turn}
        print(READY, flush=True)
        for line in sys.stdin:
            turn = json.loads(line)
            print(json.dumps(_turn(work[turn["work"]], turn["start"], turn["end"])), flush=True)


def _turn(work: Callable[[], object], start: float, end: float) -> dict[str, object]:
    seconds: list[float] = []
    sleep(max(0.0, start - perf_counter()))
    cpu, before = process_time(), perf_counter()
    while True:
        work()
        now = perf_counter()
        if now > end:
            return {"seconds": seconds, "cpu": process_time() - cpu}
        seconds.append(now - before)
        before = now


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
