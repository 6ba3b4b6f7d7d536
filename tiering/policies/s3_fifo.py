"""S3-FIFO for prefixes: three queues and no list that every use reorders.

A new block enters a small queue, a tenth of all that stands in queues. At its old end a block that was used twice since
it came goes on to the main queue; any other leaves, and its name alone is remembered in a ghost, which has nine tenths
as many names as there are blocks. A block that comes back while the ghost knows it goes to the main queue at once. At
the main queue's old end a block that was used since it last stood there goes to the new end with one use less, and one
that was not leaves. Uses are counted up to three.

For prefixes: only leaves stand in the queues, since a block with children is in use as their ancestor. A block whose
last child goes stands at the old end of its queue, for it came before that child.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

SMALL_SHARE = 0.1
MOST_USES = 3
USES_TO_STAY = 2
"""Uses after the first one that take a block from the small queue to the main one."""

_SMALL, _MAIN, _GONE = 0, 1, 2


class S3Fifo:
    """`EvictionPolicy`: quick demotion of blocks that are used once."""

    def __init__(self, names: Sequence[int], seed: int = 0) -> None:
        """names: by row, the block's name, the same whenever that block comes. The seed is unused."""
        self._names = names
        self._queues = (OrderedDict[int, None](), OrderedDict[int, None]())  # leaves, the oldest first
        self._blocks = 0  # of both queues, leaves or not
        self._queue_of = bytearray()
        self._uses = array("b")
        self._ghost = OrderedDict[int, None]()
        self._changes = 0

    def expect(self, blocks: int) -> None: ...

    def inserted(self, row: int) -> None:
        """Into the small queue, or into the main one if it was here not long ago."""
        self._grow(row)
        assert self._queue_of[row] == _GONE, "a row is inserted once"
        name = self._names[row]
        queue = _MAIN if name in self._ghost else _SMALL
        self._ghost.pop(name, None)
        self._join(row, queue)
        self._uses[row] = -1  # the use that brought it is counted next

    def loaded(self, rows: Sequence[int], are_leaves: Sequence[bool]) -> None:
        """Into the main queue, at its old end, one after the other: they were worth writing to NVMe."""
        for row, is_leaf in zip(rows, are_leaves, strict=True):
            self._grow(row)
            assert self._queue_of[row] == _GONE, "a row is inserted once"
            self._join(row, _MAIN)
            self._uses[row] = 0
            if is_leaf:
                self._queues[_MAIN].move_to_end(row, last=False)
            else:
                del self._queues[_MAIN][row]

    def used(self, chain: Sequence[int], count: int) -> None:
        """Counted, for those that are here."""
        uses, queue_of = self._uses, self._queue_of
        for row in chain[:count]:
            if row < len(queue_of) and queue_of[row] != _GONE and uses[row] < MOST_USES:
                uses[row] += 1

    def touched(self, rows: Sequence[int]) -> None:
        """The order does not change."""
        assert all(self._queue_of[row] != _GONE for row in rows), "only a listed row is touched"

    def became_leaf(self, row: int) -> None:
        """At the old end of its queue."""
        self._changes += 1
        queue = self._queues[self._queue_of[row]]
        queue[row] = None
        queue.move_to_end(row, last=False)
        self._uses[row] = min(self._uses[row], 0)

    def became_inner(self, row: int) -> None:
        """Out of its queue, of which it stays a member."""
        self._changes += 1
        del self._queues[self._queue_of[row]][row]

    def removed(self, row: int) -> None:
        """Gone; unless it was worth the main queue, its name is remembered for a while."""
        queue = self._queue_of[row]
        assert queue != _GONE, "only a listed row is removed"
        self._leave(row)
        if queue == _SMALL:
            self._ghost[self._names[row]] = None
            while len(self._ghost) > (1 - SMALL_SHARE) * (self._blocks + 1):
                self._ghost.popitem(last=False)

    def victims(self) -> Iterator[int]:
        """In the order in which the queues evict. Blocks that were passed over move on only when a victim really
        goes."""
        skipped: set[int] = set()
        while True:
            passed: list[int] = []
            changes = self._changes
            for row in self._walk(passed, skipped):
                yield row
                if self._changes != changes:
                    self._pass_over(passed)
                    break
                skipped.add(row)
            else:
                return

    def _walk(self, passed: list[int], skipped: set[int]) -> Iterator[int]:
        """All leaves but the skipped ones, in the order in which they would go; `passed` gets those that would be
        looked at and kept before."""
        small, main = self._queues
        excess = len(small) - int(SMALL_SHARE * (len(small) + len(main)))
        promoted, left = [], []
        for row in small:
            if excess <= 0:
                left.append(row)
            elif self._uses[row] >= USES_TO_STAY:
                promoted.append(row)
                passed.append(row)
                excess -= 1
            elif row not in skipped:
                yield row
        for turn in range(MOST_USES + 1):
            for row in main:
                if self._uses[row] > turn:
                    passed.append(row)
                elif max(0, self._uses[row]) == turn and row not in skipped:
                    yield row
            if not turn:
                yield from (row for row in promoted if row not in skipped)
        yield from (row for row in left if row not in skipped)

    def _pass_over(self, passed: Sequence[int]) -> None:
        for row in passed:
            queue = self._queue_of[row]
            if queue == _GONE or row not in self._queues[queue]:
                continue
            if queue == _SMALL:
                self._leave(row)
                self._join(row, _MAIN)
                self._uses[row] = 0
            else:
                self._uses[row] = max(0, self._uses[row] - 1)
                self._queues[_MAIN].move_to_end(row)

    def _join(self, row: int, queue: int) -> None:
        self._changes += 1
        self._queue_of[row] = queue
        self._queues[queue][row] = None
        self._blocks += 1

    def _leave(self, row: int) -> None:
        self._changes += 1
        queue = self._queue_of[row]
        self._queues[queue].pop(row, None)
        self._blocks -= 1
        self._queue_of[row] = _GONE

    def _grow(self, row: int) -> None:
        missing = row + 1 - len(self._queue_of)
        if missing > 0:
            more = max(missing, 1024, len(self._queue_of) >> 3)
            self._queue_of.extend(bytes([_GONE]) * more)
            self._uses.extend(array("b", bytes(more)))
