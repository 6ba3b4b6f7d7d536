"""Finds hot prefixes: hierarchical heavy hitters over the chains that look-ups found.

    look-up > the blocks that it found, as a path in a tree whose edges are runs of blocks > counted at each node passed
    report  > from the leaves up: a node's own uses are those that no reported node below it explains; x its tokens

A prefix that a thousand conversations share is one node. The tree is bounded: when it has too many nodes or blocks, the
least used leaves go, and their uses stay counted above them. After G. Cormode, F. Korn, S. Muthukrishnan, D.
Srivastava, "Finding Hierarchical Heavy Hitters in Streaming Data", ACM TKDD 1 (4), 2008. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiering.frame import KEY_BYTES

KEPT_OF_LEAVES = 0.75
"""Share of leaves that a shrink keeps, the most used."""


class PrefixNode:
    """The end of a run of blocks. end: its depth in blocks. uses: look-ups that found all of it; leased: leases that
    granted it, skipped: blocks up to it that those leases left out in all, since the engine had them."""

    __slots__ = ("children", "edge", "end", "leased", "parent", "skipped", "used_at", "uses")

    def __init__(self, parent: PrefixNode | None, edge: bytes, end: int) -> None:
        self.parent, self.edge, self.end = parent, edge, end
        self.children: dict[bytes, PrefixNode] = {}
        self.uses = self.leased = self.skipped = self.used_at = 0.0

    def keys(self) -> bytes:
        """Keys of all blocks up to here, `KEY_BYTES` each."""
        edges = []
        node: PrefixNode | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return b"".join(reversed(edges))


@dataclass(slots=True)
class HotNode:
    """A reported node. uses: its own; leases, saved_blocks: of these uses, and what they granted."""

    node: PrefixNode
    uses: float
    leases: float
    saved_blocks: float


class PrefixTree:
    """One namespace's. Not thread-safe."""

    def __init__(self, block_tokens: int, block_bytes: int) -> None:
        self.block_tokens, self.block_bytes = block_tokens, block_bytes
        self.nodes = self.blocks = 0
        self._root = PrefixNode(None, b"", 0)

    def found(self, keys: bytes, weight: float, now: float) -> None:
        """Count a look-up that found these blocks, with a weight."""
        for node in self._path(keys):
            node.uses += weight
            node.used_at = now

    def granted(self, keys: bytes, first_block: int, weight: float) -> None:
        """Count a lease that granted these blocks from first_block on."""
        for node in self._path(keys):
            node.leased += weight
            node.skipped += weight * min(first_block, node.end)

    def fade(self, factor: float) -> None:
        for node in self._down():
            node.uses *= factor
            node.leased *= factor
            node.skipped *= factor

    def shrink(self, nodes: int, blocks: int) -> None:
        """Drop the least used leaves until both bounds hold."""
        while self.nodes > nodes or self.blocks > blocks:
            leaves = sorted((one for one in self._down() if not one.children), key=lambda one: (one.uses, one.used_at))
            for leaf in leaves[: max(1, len(leaves) - int(KEPT_OF_LEAVES * len(leaves)))]:
                assert leaf.parent is not None
                del leaf.parent.children[leaf.edge[:KEY_BYTES]]
                self.nodes -= 1
                self.blocks -= len(leaf.edge) // KEY_BYTES

    def found_tokens(self) -> float:
        return self.block_tokens * sum(one.uses * len(one.edge) for one in self._down()) / KEY_BYTES

    def hottest(self, least_tokens: float) -> list[HotNode]:
        """Nodes whose own uses found at least so many tokens."""
        found: list[HotNode] = []
        # Below a node, or itself: the nearest reported nodes, all of them, and leases in between that count for those.
        below: dict[PrefixNode, tuple[list[PrefixNode], list[HotNode], PrefixNode]] = {}
        for node in reversed(list(self._down())):
            parts = [below.pop(child) for child in node.children.values()]
            rows = [row for part in parts for row in part[1]]
            nearest, counted = [one for part in parts for one in part[0]], _shorter_leases(node, rows)
            counted.leased += sum(part[2].leased for part in parts)
            counted.skipped += sum(part[2].skipped for part in parts)
            explained = [*nearest, counted]
            uses = node.uses - sum(one.uses for one in explained)
            if uses > 0 and uses * node.end * self.block_tokens >= least_tokens:
                leases = max(0.0, node.leased - sum(one.leased for one in explained))
                skipped = node.skipped - sum(min(one.skipped, one.leased * node.end) for one in explained)
                row = HotNode(node, uses, leases, max(0.0, leases * node.end - max(0.0, skipped)))
                found.append(row)
                nearest, rows, counted = [node], [*rows, row], PrefixNode(None, b"", 0)
            below[node] = nearest, rows, counted
        return found

    def check(self) -> None:
        nodes = list(self._down())
        assert len(nodes) == self.nodes and sum(len(one.edge) for one in nodes) == self.blocks * KEY_BYTES
        for node in nodes:
            assert node.parent is not None and node.edge and len(node.edge) % KEY_BYTES == 0
            assert node.parent.children[node.edge[:KEY_BYTES]] is node
            assert node.end == node.parent.end + len(node.edge) // KEY_BYTES
            assert sum(one.uses for one in node.children.values()) <= node.uses * (1 + 1e-9) + 1e-9

    def _down(self) -> Iterator[PrefixNode]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _path(self, keys: bytes) -> Iterator[PrefixNode]:
        node, at = self._root, 0
        while at < len(keys):
            first = keys[at : at + KEY_BYTES]
            child = node.children.get(first)
            if child is None:
                child = self._new(node, keys[at:])
                node.children[first] = child
            elif not keys.startswith(child.edge, at):
                child = self._split(node, child, equal_start(child.edge, keys[at : at + len(child.edge)], KEY_BYTES))
            yield child
            node, at = child, at + len(child.edge)

    def _new(self, parent: PrefixNode, edge: bytes) -> PrefixNode:
        blocks = len(edge) // KEY_BYTES
        self.nodes += 1
        self.blocks += blocks
        return PrefixNode(parent, edge, parent.end + blocks)

    def _split(self, parent: PrefixNode, child: PrefixNode, size: int) -> PrefixNode:
        upper = self._new(parent, child.edge[:size])
        self.blocks -= size // KEY_BYTES
        upper.uses, upper.leased, upper.used_at = child.uses, child.leased, child.used_at
        upper.skipped = min(child.skipped, child.leased * upper.end)
        parent.children[child.edge[:KEY_BYTES]] = upper
        child.parent, child.edge = upper, child.edge[size:]
        upper.children[child.edge[:KEY_BYTES]] = child
        return upper


def _shorter_leases(node: PrefixNode, rows: list[HotNode]) -> PrefixNode:
    """An engine may lease less than its look-up found. Leases that ended at this node, beyond the look-ups that did,
    count for reported nodes below, in proportion to the look-ups there that no lease is known of. They are returned as
    a node of their own."""
    children, counted = node.children.values(), PrefixNode(None, b"", 0)
    leases = node.leased - sum(one.leased for one in children)
    more = leases - (node.uses - sum(one.uses for one in children))
    without = sum(one.uses - one.leased for one in children)
    if more <= 0 or without <= 0:
        return counted
    skipped = max(0.0, node.skipped - sum(min(one.skipped, one.leased * node.end) for one in children)) / leases
    for row in rows:
        given = max(0.0, row.uses - row.leases) * min(1.0, more / without)
        row.leases += given
        row.saved_blocks += given * max(0.0, node.end - skipped)
        counted.leased += given
        counted.skipped += given * skipped
    return counted


def equal_start(one: bytes, other: bytes, size: int) -> int:
    """Length in bytes of the equal start, in whole items of `size` bytes."""
    low, high = 0, min(len(one), len(other)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * size] == other[: middle * size]:
            low = middle
        else:
            high = middle - 1
    return low * size
