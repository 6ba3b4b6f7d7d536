"""Leaf-first LRU: the yardstick.

All blocks stand in one list in the order of their last use. A chain is always touched from its tail to its head, so an
ancestor stands nearer to the recent end than any of its descendants, and the block at the old end is a leaf unless a
chain is being extended at this moment. The victim is the oldest leaf. Every step is O(1); the list is two columns of
row numbers, so a million blocks are no work for the garbage collector.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

_END = 0  # the list's both ends; row r is node r + 1
_UNLISTED = -1


class LeafFirstLru:
    """`EvictionPolicy`: the leaf that was used longest ago goes first."""

    def __init__(self, names: Sequence[int] = (), seed: int = 0) -> None:
        """Uses neither names nor seed."""
        self._newer = array("i", [_END])
        self._older = array("i", [_END])
        self._is_leaf = bytearray(1)

    def expect(self, blocks: int) -> None: ...

    def inserted(self, row: int) -> None:
        """At the recent end, as a leaf."""
        node = row + 1
        if node >= len(self._newer):
            self._grow(node)
        assert self._newer[node] == _UNLISTED, "a row is inserted once"
        self._is_leaf[node] = 1
        newest = self._older[_END]
        self._newer[newest], self._older[node] = node, newest
        self._newer[node], self._older[_END] = _END, node

    def loaded(self, rows: Sequence[int], are_leaves: Sequence[bool]) -> None:
        """At the old end, one after the other."""
        if not len(rows):
            return
        nodes = np.asarray(rows, np.int64) + 1
        self._grow(int(nodes.max()))
        newer, older = (np.frombuffer(column, column.typecode) for column in (self._newer, self._older))
        assert (newer[nodes] == _UNLISTED).all(), "a row is inserted once"
        np.frombuffer(self._is_leaf, np.uint8)[nodes] = are_leaves
        # Towards the old end: what was the oldest so far, the rows in their order, and the end.
        row_of_nodes = np.concatenate([[newer[_END]], nodes, [_END]])
        older[row_of_nodes[:-1]] = row_of_nodes[1:]
        newer[row_of_nodes[1:]] = row_of_nodes[:-1]

    def used(self, chain: Sequence[int], count: int) -> None: ...

    def touched(self, rows: Sequence[int]) -> None:
        """To the recent end, one after the other."""
        newer, older = self._newer, self._older
        newest = older[_END]
        for row in rows:
            node = row + 1
            if node == newest:
                continue
            after, before = newer[node], older[node]
            assert after != _UNLISTED, "only a listed row is touched"
            older[after], newer[before] = before, after
            newer[newest], older[node], newer[node] = node, newest, _END
            newest = older[_END] = node

    def became_leaf(self, row: int) -> None:
        self._is_leaf[row + 1] = 1

    def became_inner(self, row: int) -> None:
        self._is_leaf[row + 1] = 0

    def removed(self, row: int) -> None:
        """Out of the list."""
        node = row + 1
        after, before = self._newer[node], self._older[node]
        assert after != _UNLISTED, "only a listed row is removed"
        self._older[after], self._newer[before] = before, after
        self._newer[node] = self._older[node] = _UNLISTED
        self._is_leaf[node] = 0

    def _grow(self, node: int) -> None:
        missing = node + 1 - len(self._newer)
        if missing > 0:
            more = max(missing, 1024, len(self._newer) >> 3)
            self._newer.extend(array("i", [_UNLISTED]) * more)
            self._older.extend(array("i", [_UNLISTED]) * more)
            self._is_leaf.extend(bytes(more))

    def victims(self) -> Iterator[int]:
        """From the old end to the recent end, leaves only."""
        newer, older, is_leaf = self._newer, self._older, self._is_leaf
        node = newer[_END]
        while node != _END:
            if is_leaf[node]:
                before = older[node]
                yield node - 1
                node = node if newer[node] != _UNLISTED else before
            node = newer[node]
