"""Which stored prefixes are hot: heavy hitters over the chains that look-ups found.

    look-up > the blocks that it found, as a path in a tree whose edges are runs of blocks > counted at each node passed
    report  > from the leaves up: a node has the uses that no reported node below it explains; uses x tokens of these

A prefix that a thousand conversations share is one node, whatever hangs below it. The tree is bounded: where it has too
many nodes, or blocks, leaves that were used least go, and their uses stay counted above them. After G. Cormode,
F. Korn, S. Muthukrishnan, D. Srivastava, "Finding Hierarchical Heavy Hitters in Streaming Data",
ACM TKDD 1 (4), 2008. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiering.frame import KEY_BYTES

KEPT_OF_LEAVES = 0.75
"""Where the tree is too large: of its leaves, those used most."""


class PrefixNode:
    """The end of a run of blocks. end: blocks from the prompt's start to there. uses: look-ups that found it all;
    leased: leases that granted it, skipped: blocks up to it that these left out in all, since the engine had them."""

    __slots__ = ("children", "edge", "end", "leased", "parent", "skipped", "used_at", "uses")

    def __init__(self, parent: PrefixNode | None, edge: bytes, end: int) -> None:
        self.parent, self.edge, self.end = parent, edge, end
        self.children: dict[bytes, PrefixNode] = {}
        self.uses = self.leased = self.skipped = self.used_at = 0.0

    def keys(self) -> bytes:
        """Of all blocks up to here, `KEY_BYTES` each."""
        edges = []
        node: PrefixNode | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return b"".join(reversed(edges))


@dataclass(frozen=True, slots=True)
class HotNode:
    """uses: that are its own. saved_blocks: that leases granted in these."""

    node: PrefixNode
    uses: float
    saved_blocks: float


class PrefixTree:
    """Of one namespace. One thread at a time."""

    def __init__(self, block_tokens: int, block_bytes: int) -> None:
        self.block_tokens, self.block_bytes = block_tokens, block_bytes
        self.nodes = self.blocks = 0
        self._root = PrefixNode(None, b"", 0)

    def found(self, keys: bytes, weight: float, now: float) -> None:
        """A look-up found these blocks, and stands for so many like it."""
        for node in self._path(keys):
            node.uses += weight
            node.used_at = now

    def granted(self, keys: bytes, first_block: int, weight: float) -> None:
        """A lease granted these, from first_block on."""
        for node in self._path(keys):
            node.leased += weight
            node.skipped += weight * min(first_block, node.end)

    def fade(self, factor: float) -> None:
        """What was counted so far counts less."""
        for node in self._down():
            node.uses *= factor
            node.leased *= factor
            node.skipped *= factor

    def shrink(self, nodes: int, blocks: int) -> None:
        """To at most so many, if there are more."""
        while self.nodes > nodes or self.blocks > blocks:
            leaves = sorted((one for one in self._down() if not one.children), key=lambda one: (one.uses, one.used_at))
            for leaf in leaves[: max(1, len(leaves) - int(KEPT_OF_LEAVES * len(leaves)))]:
                assert leaf.parent is not None
                del leaf.parent.children[leaf.edge[:KEY_BYTES]]
                self.nodes -= 1
                self.blocks -= len(leaf.edge) // KEY_BYTES

    def found_tokens(self) -> float:
        """By all look-ups."""
        return self.block_tokens * sum(one.uses * len(one.edge) for one in self._down()) / KEY_BYTES

    def hottest(self, least_tokens: float) -> list[HotNode]:
        """Nodes whose own uses found so many tokens."""
        found: list[HotNode] = []
        reported: dict[PrefixNode, list[PrefixNode]] = {}  # the nearest ones below, or itself
        for node in reversed(list(self._down())):
            below = [one for child in node.children.values() for one in reported.pop(child)]
            uses = node.uses - sum(one.uses for one in below)
            if uses > 0 and uses * node.end * self.block_tokens >= least_tokens:
                leased = node.leased - sum(one.leased for one in below)
                skipped = node.skipped - sum(min(one.skipped, one.leased * node.end) for one in below)
                found.append(HotNode(node, uses, max(0.0, leased * node.end - max(0.0, skipped))))
                below = [node]
            reported[node] = below
        return found

    def check(self) -> None:
        """What has to hold."""
        nodes = list(self._down())
        assert len(nodes) == self.nodes and sum(len(one.edge) for one in nodes) == self.blocks * KEY_BYTES
        for node in nodes:
            assert node.parent is not None and node.edge and len(node.edge) % KEY_BYTES == 0
            assert node.parent.children[node.edge[:KEY_BYTES]] is node
            assert node.end == node.parent.end + len(node.edge) // KEY_BYTES
            assert sum(one.uses for one in node.children.values()) <= node.uses * (1 + 1e-9) + 1e-9

    def _down(self) -> Iterator[PrefixNode]:
        """All but the root, a node before those below it."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _path(self, keys: bytes) -> Iterator[PrefixNode]:
        """The nodes of this chain, the last one at its end; those that are not there are made."""
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
        """At so many bytes of the child's edge: who passed it has passed the upper part, as far as is known."""
        upper = self._new(parent, child.edge[:size])
        self.blocks -= size // KEY_BYTES
        upper.uses, upper.leased, upper.used_at = child.uses, child.leased, child.used_at
        upper.skipped = min(child.skipped, child.leased * upper.end)
        parent.children[child.edge[:KEY_BYTES]] = upper
        child.parent, child.edge = upper, child.edge[size:]
        upper.children[child.edge[:KEY_BYTES]] = child
        return upper


def equal_start(one: bytes, other: bytes, size: int) -> int:
    """Bytes of items of so many bytes that are equal from the first one on."""
    low, high = 0, min(len(one), len(other)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * size] == other[: middle * size]:
            low = middle
        else:
            high = middle - 1
    return low * size
