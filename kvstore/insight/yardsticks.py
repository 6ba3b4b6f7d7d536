"""Admissions to hold others against: a coin, and one that knows what is asked for later.

Neither is of use in a store. A coin that is thrown for each block which leaves takes its ancestors along, as every
admission does; so it writes the beginnings of prompts more often than their ends, which is better than it sounds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from kvstore.insight.trace import Trace
from tiering.policies.admission import AdmitAll

BISECTIONS = 8
"""Replays until a coin writes as much as it is to, within some percent."""


class CoinAdmission(AdmitAll):
    """A share of those that leave."""

    chooses = True

    def __init__(self, share: float, seed: int) -> None:
        self._least = int(share * (1 << 64))
        self._seed = seed
        self._throws = 0

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        """Whatever it is."""
        self._throws += 1
        return xxh3_64_intdigest(self._throws.to_bytes(8, "little"), self._seed) < self._least


class OracleAdmission(AdmitAll):
    """Those that a later request of the trace asks for."""

    chooses = True

    def __init__(self, requests: Sequence[Sequence[int]], names: array[int], now: Callable[[], int]) -> None:
        """requests: of each block of the trace, those that ask for it. names: of each row, its block in the trace.
        now: the request that runs."""
        self._requests = requests
        self._names = names
        self._now = now

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        """It knows."""
        later = self._requests[self._names[way[0]]]
        return bisect_right(later, self._now()) < len(later)


def requests_of(trace: Trace) -> list[list[int]]:
    """Of each block, the requests that ask for it."""
    requests: list[list[int]] = [[] for _ in range(trace.distinct_blocks)]
    for number, chain in enumerate(trace.chains()):
        for block in chain:
            requests[block].append(number)
    return requests


def share_that_writes(wanted: int, written: Callable[[float], int]) -> float:
    """Of a coin, the share with which about so many blocks are written. written: by one with a given share."""
    low, high = -10.0, 0.0  # powers of two: blocks take their ancestors along, so a small share writes much
    for _ in range(BISECTIONS - 1):
        middle = (low + high) / 2
        if written(2**middle) < wanted:
            low = middle
        else:
            high = middle
    return float(2 ** ((low + high) / 2))
