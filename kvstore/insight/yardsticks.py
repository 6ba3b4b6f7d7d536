"""Baselines for policies and admissions: the offline optimum, a coin, and an oracle.

The optimum is MIN with bypass: how many blocks a policy could have found, had it known the future. The block whose next
use is furthest away goes first, even if it just came. In a chain an ancestor's next use is never later than its
descendant's, and ties go to the deeper block, so whole prefixes are kept: the optimum for single blocks is the optimum
for prefixes. L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5
(2), 1966.

No store can use these admissions. The coin, thrown for each evicted block, takes ancestors along as every admission
does, so it favours the beginnings of prompts: it is a stronger baseline than it sounds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.insight.trace import Column, Trace
from tiering.policies.admission import AdmitAll

NEVER = 1 << 62
BISECTIONS = 8
"""Replays to tune the coin's writes to within some percent."""


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
    following = next_uses(trace).tolist()
    hits = np.zeros(trace.requests, np.int64)
    held: dict[int, int] = {}  # block -> its next use
    worst: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale if `held` has another next use
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


class CoinAdmission(AdmitAll):
    """Admits a random share of evicted blocks."""

    chooses = True

    def __init__(self, share: float, seed: int) -> None:
        self._least = int(share * (1 << 64))
        self._seed = seed
        self._throws = 0

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        self._throws += 1
        return xxh3_64_intdigest(self._throws.to_bytes(8, "little"), self._seed) < self._least


class OracleAdmission(AdmitAll):
    """Admits blocks that a later request asks for."""

    chooses = True

    def __init__(self, requests: Sequence[Sequence[int]], names: array[int], now: Callable[[], int]) -> None:
        """requests: for each block of the trace, the requests that ask for it. names: block of each row. now: the
        current request."""
        self._requests = requests
        self._names = names
        self._now = now

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        later = self._requests[self._names[way[0]]]
        return bisect_right(later, self._now()) < len(later)


def requests_of(trace: Trace) -> list[list[int]]:
    requests: list[list[int]] = [[] for _ in range(trace.distinct_blocks)]
    for number, chain in enumerate(trace.chains()):
        for block in chain:
            requests[block].append(number)
    return requests


def share_that_writes(wanted: int, written: Callable[[float], int]) -> float:
    """The coin's share with which about `wanted` blocks are written. written: blocks written with a given share."""
    low, high = -10.0, 0.0  # powers of two: ancestors come along, so even a small share writes much
    for _ in range(BISECTIONS - 1):
        middle = (low + high) / 2
        if written(2**middle) < wanted:
            low = middle
        else:
            high = middle
    return float(2 ** ((low + high) / 2))
