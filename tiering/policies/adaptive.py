"""The adaptive policy: least recently used, and better where it can prove it.

It learns how likely a block is to be used again. A key-only *history* remembers of many names when they were used last.
Each use is counted under the block's age then, in uses, and under its kind: how often it was used before (once, 2-3,
4-7, 8 times and more), and whether it was the last block of its request. For each use a few names are drawn from the
history and counted as looked at, at their ages: so it is known how many blocks reached an age without being used, not
only of those that were evicted. Uses over looks is the rate at which blocks of a kind and age are used. A block is
worth the best, over all horizons, of the chance of a use divided by the time that it takes up room for that: N.
Beckmann, H. Chen, A. Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018.

The victim is the block of least worth among 64 leaves drawn at random and the least recently used one.

What is learned may be wrong: the past of some loads says nothing of their future. Two *ghosts*, which have names and no
blocks, process the same uses with as much room, one evicting the least recently used leaf, the other the leaf of least
worth. Hits are counted in both, and decay. The tier begins as LRU, goes by worth once that ghost leads by more than
some requests explain, and returns to LRU when it falls behind.

All per-block work is compiled, on arrays (`adaptive_loops`). Events are collected in a buffer and passed on in one
call. A long request is learned, and told to the ghosts, in pieces, one before each victim and more within the next
requests, so that no request waits for all of it; the result is the same, some requests later. If more comes than is
done by then, whole requests are not learned: they only move to the recent end.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from tiering.policies import adaptive_loops as loops
from tiering.policies.lazy_memory import LazyRecords

HISTORY_PER_BLOCK, HISTORY_LEAST = 4, 1 << 16
"""Names in the history: per block that the tier has room for, and at least."""
HALF_LIFE_PER_NAME = 3
"""Half-life of what was learned, in uses per name of the history."""
SCORE_HALF_LIFE_PER_BLOCK, SCORE_HALF_LIFE_LEAST = 4, 20_000
"""Half-life of a ghost's hits, in uses: per block that the tier has room for, and at least."""
LEAD, FLOOR = 1.25, 0.0005
"""The lead that the learning ghost needs before the tier follows it: a multiple of the root of the sum of squares of
the requests' differences (1.25 are 1.8 standard deviations in the long run), and a share of all uses."""
SMALLEST = 256
GROWN = 4096
"""Rows, at least."""
EVENTS = 1024
"""Collected before they are passed on. One place stays free: the four methods called for each block write without a
check, and calling another method would take half as long again."""
LONGEST = 1 << 16
"""Blocks of a request: there is room for so many, which becomes memory when it is used; a longer one is not learned."""
ATTEMPTS = 4
"""Draws for a victim, if some of the drawn leaves may not be evicted."""
MOST_ROOM = 1 << 22
"""Ghosts have room for at most so many blocks; for a larger tier they model a part."""
WRONG_EVENT = "a row was inserted twice, or touched or removed where it is not"


class Adaptive:
    """`EvictionPolicy`: learned worth under the guard of LRU."""

    def __init__(self, names: array[int], seed: int = 0, thinned: float = 1.0) -> None:
        """names: by row, the block's name, the same whenever that block comes; it may grow. seed: for random draws.
        thinned: the share of all blocks that it sees, if a tier is modelled by a part of its blocks; figures in uses or
        names, not in room, are scaled by it."""
        self._names = names
        self._thinned = thinned
        self._loops = loops.prepare()
        self._stop = self._flushed = 0
        self._events = array("q", bytes(8 * EVENTS))
        self._requests = np.zeros(loops.REQUESTS, loops.REQUEST)
        shape = (loops.REQUESTS, loops.TOLD, LONGEST)
        self._told = LazyRecords(prod(shape), np.dtype(np.int64)).array.reshape(shape)
        self._waiting = 0  # requests not yet fully learned and told to the ghosts
        self._draws = seed << 16  # random draws for a victim depend on it and on the number of evictions
        self._records = LazyRecords(SMALLEST, loops.ORDER)
        self._order: Any = self._records.array
        self._leaf_records = LazyRecords(SMALLEST, loops.LEAF_ENTRY)
        self._learned = np.zeros((loops.TABLES, loops.KINDS, loops.AGES))
        self._numbers = np.zeros(loops.NUMBERS, np.int64)
        self._numbers[loops.DUE] = loops.RECKON_USES
        self._numbers[loops.DRAWS] = seed * 2 + 0x2545F4914F6CDD1D
        self._numbers[loops.OWN_DRAWS] = (1 << 60) + (seed << 16)  # not the tier's draws
        self._scores = np.zeros(loops.SCORES)
        self._scores[loops.WEIGHT] = 1.0
        self._at_once, self._most_learned = loops.AT_ONCE, loops.STEP
        self._ghosts: list[Any] = [np.zeros(1, loops.GHOST), None] * 2
        self._own_leaves: Any = np.zeros(1, loops.LEAF_ENTRY)
        self._history: list[Any] = [np.zeros(1, loops.HISTORY), None]
        for nodes in (self._ghosts[0], self._ghosts[2], self._history[0]):
            nodes["name"][0] = seed * 2 + 0x1E3779B97F4A7C15
        self.expect(1)

    def expect(self, blocks: int) -> None:
        """There is room for so many blocks. More room keeps what was learned."""
        blocks = min(blocks, MOST_ROOM)
        if blocks <= self._numbers[loops.NODES]:
            return
        self._catch_up(blocks=1 << 62)
        names = max(HISTORY_PER_BLOCK * blocks, int(HISTORY_LEAST * self._thinned))
        ghosts = [part for at in (0, 2) for part in self._grown(self._ghosts[at], blocks)]
        history = self._grown(self._history[0], names)
        own_leaves = LazyRecords(blocks + 1, loops.LEAF_ENTRY).array
        own_leaves[: len(self._own_leaves)] = self._own_leaves
        self._point_at(None)
        self._ghosts, self._history, self._own_leaves = ghosts, history, own_leaves
        self._numbers[[loops.NODES, loops.ROOM]] = blocks
        self._numbers[loops.NAMES + loops.MOST] = names
        half_life = max(SCORE_HALF_LIFE_PER_BLOCK * blocks, SCORE_HALF_LIFE_LEAST * self._thinned)
        self._settings = np.array(
            [HALF_LIFE_PER_NAME * names, half_life, LEAD, FLOOR, self._at_once, self._most_learned]
        )
        self._place()

    def _grown(self, nodes: Any, names: int) -> list[Any]:
        more = LazyRecords(names + 1, nodes.dtype).array
        more[: len(nodes)] = nodes
        heads = LazyRecords(1 << max(names - 1, 1).bit_length(), np.dtype(np.int32)).array
        self._loops.enter_all(more, heads)
        return [more, heads]

    @property
    def goes_by_worth(self) -> bool:
        """Whether victims are currently chosen by learned worth."""
        return bool(self._numbers[loops.RULE])

    def inserted(self, row: int) -> None:
        """At the recent end, as a leaf."""
        if row + 1 >= len(self._order):
            self._grow(row)
        at = self._stop
        self._events[at] = row << loops.EVENT_BITS | loops.INSERTED
        self._stop = at + 1
        if at >= EVENTS - 1:
            self._flush()

    def loaded(self, rows: Sequence[int], are_leaves: Sequence[bool]) -> None:
        """At the old end, one after the other, as if used once, long ago."""
        if not len(rows):
            return
        self._flush()
        self._flushed += 1
        nodes = np.asarray(rows, np.int64) + 1
        if int(nodes.max()) >= len(self._order):
            self._grow(int(nodes.max()))
        order = self._order
        assert ((order["newer"][nodes] == 0) & (order["older"][0] != nodes)).all(), "a row is inserted once"
        ring = np.concatenate([[order["newer"][0]], nodes, [0]])
        order["older"][ring[:-1]] = ring[1:]
        order["newer"][ring[1:]] = ring[:-1]
        order["kind"][nodes] = order["when"][nodes] = 0
        leaves, first = nodes[np.asarray(are_leaves, bool)], self._numbers[loops.LEAVES]
        listed = self._leaf_records.array[first : first + len(leaves)]
        listed["node"], listed["when"], listed["kind"] = leaves, 0, 0
        order["leaf_at"][nodes] = 0
        order["leaf_at"][leaves] = first + 1 + np.arange(len(leaves))
        self._numbers[loops.LEAVES] += len(leaves)
        self._numbers[loops.SIZE] += len(nodes)

    def used(self, chain: Sequence[int], count: int) -> None:
        """Counted, for the history and both ghosts."""
        if not len(chain):
            return
        if len(self._names) >= len(self._order):  # of another tier
            self._grow(len(self._names))
        if len(chain) > LONGEST:
            is_right = self._loops.passed_over(self._address, self._take(), chain[0])
            assert is_right, WRONG_EVENT
            return
        waiting = self._loops.learn(
            self._address,
            self._take(),
            np.frombuffer(array("i", chain), np.int32),
            count,
            np.frombuffer(self._names, np.int64),
        )
        assert waiting >= 0, WRONG_EVENT
        self._waiting = waiting

    def touched(self, rows: Sequence[int]) -> None:
        """To the recent end, one after the other."""
        length = len(rows)
        if not length:
            return
        if self._stop + 1 + length >= EVENTS:
            self._flush()
            if 1 + length >= EVENTS:
                for first in range(0, length, EVENTS // 2):
                    self.touched(rows[first : first + EVENTS // 2])
                return
        at = self._stop
        self._stop = stop = at + 1 + length
        self._events[at] = length << loops.EVENT_BITS | loops.TOUCHED
        self._events[at + 1 : stop] = array("q", rows)

    def became_leaf(self, row: int) -> None:
        at = self._stop
        self._events[at] = row << loops.EVENT_BITS | loops.LEAF
        self._stop = at + 1
        if at >= EVENTS - 1:
            self._flush()

    def became_inner(self, row: int) -> None:
        at = self._stop
        self._events[at] = row << loops.EVENT_BITS | loops.INNER
        self._stop = at + 1
        if at >= EVENTS - 1:
            self._flush()

    def removed(self, row: int) -> None:
        """Out of the order; the history and the ghosts keep it."""
        self._draws += 1
        at = self._stop
        self._events[at] = row << loops.EVENT_BITS | loops.REMOVED
        self._stop = at + 1
        if at >= EVENTS - 1:
            self._flush()

    def victims(self) -> Iterator[int]:
        """The leaf of least worth of some, repeatedly, as long as each is evicted; after some that were not, all by
        age."""
        skipped: set[int] = set()
        for attempt in range(ATTEMPTS):
            node = self._first_victim(attempt)
            while node and node not in skipped:
                changes = self._flushed  # no event since
                yield node - 1
                if self._flushed + self._stop == changes:
                    skipped.add(node)
                    break
                node = self._first_victim(attempt)
            if not self.goes_by_worth:
                break
        node = self._loops.next_leaf(self._address, 0)
        while node:
            before = node
            if node not in skipped:
                before, changes = int(self._order[node]["older"]), self._changes()
                yield node - 1
                if self._changes() == changes:
                    before = node
                self._flush()
            node = self._loops.next_leaf(self._address, before)

    def _catch_up(self, blocks: int) -> None:
        if self._waiting:
            waiting = self._loops.catch_up(self._address, self._take(), blocks, np.frombuffer(self._names, np.int64))
            assert waiting >= 0, WRONG_EVENT
            self._waiting = waiting

    def _first_victim(self, attempt: int) -> int:
        if self._waiting:
            self._catch_up(loops.PIECE)
        stop, self._stop = self._stop, 0  # as `_take` does; inlined, since the call is a tenth of the work per victim
        self._flushed += stop
        node: int = self._loops.first_victim(self._address, stop, self._draws + (attempt << 50))
        assert node >= 0, WRONG_EVENT
        return node

    # Inside ---------------------------------------------------------------------------------------------------------

    def _take(self) -> int:
        stop, self._stop = self._stop, 0
        self._flushed += stop
        return stop

    def _changes(self) -> int:
        return self._flushed + self._stop

    def _flush(self) -> None:
        is_right = self._loops.follow(self._address, self._take())
        assert is_right, WRONG_EVENT

    def _place(self) -> None:
        """Call it whenever an array was replaced."""
        placed = [np.frombuffer(self._events, np.int64), self._order, self._leaf_records.array, *self._ghosts]
        placed += [self._own_leaves, *self._history, self._requests, self._told, self._learned, self._numbers]
        placed += [self._scores, self._settings]
        self._point_at(loops.Arrays._make(placed))

    def _point_at(self, placed: Any) -> None:
        """Set to `None` before an array is replaced: if that is interrupted, no call gets the address of an array that
        is gone, or that does not fit the others."""
        places = placed.places() if placed is not None else None
        self._address: int | None = None
        self._arrays, self._places = placed, places
        if places is not None:
            self._address = places.ctypes.data

    def _grow(self, row: int) -> None:
        self._flush()
        rows = max(row + 2, len(self._order) + GROWN, len(self._order) * 9 // 8)
        self._point_at(None)
        self._order = None
        try:
            self._leaf_records.grow_to(rows)
            self._records.grow_to(rows)
        finally:
            self._order = self._records.array
            self._place()
