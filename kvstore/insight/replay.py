"""Replay: a trace through the store's own index, tables and policies, without payload and without a clock (floor 2).

    request   match > what is found counts as a hit > used
              slots for the rest: free ones, else the worst leaves go > readable > used

These are the steps of a lease and a put that nobody disturbs, in the order in which `store` takes them. A request is
over when the next one begins. Nothing is drawn but what a policy draws from its seed, so equal traces give equal
figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.blocks import Blocks
from kvstore.insight.trace import Column, Trace
from kvstore.prefix_index import NO_ROW

REQUESTS_PER_LOOK = 200
"""How often whoever waits is told how far it is."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of each request: blocks that were found in DRAM, and blocks that were written there."""

    dram_hits: Column
    dram_writes: Column


class Replay:
    """One store's tables. `run` once."""

    def __init__(self, blocks: Blocks, number: int) -> None:
        """number: of the namespace that all requests are of."""
        self._blocks = blocks
        self._number = number
        self._dram_hits: list[int] = []
        self._dram_writes: list[int] = []

    def run(self, trace: Trace, progress: Callable[[int], object] = lambda done: None) -> Replayed:
        """All requests, in their order. progress: told from time to time how many are done."""
        names = [number.to_bytes(32, "little") for number in range(trace.distinct_blocks)]
        for done, chain in enumerate(trace.chains()):
            if done % REQUESTS_PER_LOOK == 0:
                progress(done)
            self._request([names[block] for block in chain])
        progress(trace.requests)
        return Replayed(np.array(self._dram_hits, np.int64), np.array(self._dram_writes, np.int64))

    def check(self) -> None:
        """Verify every invariant of the tables."""
        self._blocks.index.check()
        self._blocks.dram.check()
        self._blocks.residency.check()

    def _request(self, keys: Sequence[bytes]) -> None:
        rows = self._blocks.index.match(self._number, keys)
        if rows:
            self._blocks.used(rows[::-1], len(rows))
        self._dram_hits.append(len(rows))
        self._dram_writes.append(self._store(keys[len(rows) :], rows[-1] if rows else NO_ROW))

    def _store(self, keys: Sequence[bytes], parent: int) -> int:
        """Blocks behind `parent`, as far as there is room; returns how many there were."""
        blocks, number = self._blocks, self._number
        rows: list[int] = []
        for key in keys:
            rows.append(blocks.begin(number, key, rows[-1] if rows else parent, 0, 0))
        filled = 0
        (slot_class,) = blocks.spaces[number].classes
        while filled < len(rows):
            free = blocks.dram.free_slots(slot_class)
            if free:
                taken = rows[filled : filled + free]
                (places,) = blocks.place(number, taken)
                blocks.dram.commit(places, [b""] * len(places))
                filled += len(taken)
            elif not blocks.evict_worst(len(rows) - filled, number):
                break  # all that is left is the way to this request's own blocks
        for row in reversed(rows[filled:]):
            blocks.give_up(row)
        if filled:
            blocks.publish(number, rows[:filled], blocks.next_generations(filled))
            blocks.used(blocks.index.chain(rows[filled - 1]), filled)
        return filled
