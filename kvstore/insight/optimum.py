"""The offline optimum: how many blocks any policy could have found, had it known the future.

MIN with bypass: the block whose next use is furthest away goes first, also if it is the one that just came. In a chain
an ancestor's next use is never later than its descendant's, and ties go to the deeper block, so what is kept is always
whole prefixes: the optimum for single blocks is the optimum for prefixes. L. A. Belady, "A study of replacement
algorithms for a virtual-storage computer", IBM Systems Journal 5 (2), 1966. Pure.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from kvstore.insight.trace import Column, Trace

NEVER = 1 << 62


def next_uses(trace: Trace) -> Column:
    """For each block of each request, the number of the next request that has it, or `NEVER`."""
    count = len(trace.blocks)
    requests = np.repeat(np.arange(trace.requests), np.diff(trace.starts))
    order = np.argsort(trace.blocks, kind="stable")
    sorted_blocks = trace.blocks[order]
    following = np.full(count, NEVER, np.int64)
    is_same = sorted_blocks[1:] == sorted_blocks[:-1]
    following[order[:-1][is_same]] = requests[order[1:][is_same]]
    return following


def optimal_hits(trace: Trace, capacity_blocks: int) -> Column:
    """How many blocks of each request, from the first on, that optimum finds."""
    following = next_uses(trace).tolist()
    hits = np.zeros(trace.requests, np.int64)
    held: dict[int, int] = {}  # block -> its next use
    worst: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale where `held` says another next use
    at = 0
    for request, chain in enumerate(trace.chains()):
        is_prefix = True
        for depth, block in enumerate(chain):
            found = block in held
            is_prefix = is_prefix and found
            hits[request] += is_prefix
            use = following[at]
            at += 1
            if use == NEVER:
                held.pop(block, None)
                continue
            held[block] = use
            heappush(worst, (-use, -depth, block))
            if found or len(held) <= capacity_blocks:
                continue
            while True:
                next_use, _, gone = heappop(worst)
                if held.get(gone) == -next_use:
                    del held[gone]
                    break
        if len(worst) > 4 * capacity_blocks + 1024:
            worst = [one for one in worst if held.get(one[2]) == -one[0]]
            heapify(worst)
    return hits
