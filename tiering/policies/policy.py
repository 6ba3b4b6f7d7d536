"""The contract of an eviction policy (floor 1).

A policy orders blocks by what they are worth. It sees rows (small integers that stand for blocks) and what happens to
them; never bytes, pins or locks. Only leaves may be proposed as victims: a block that has children is the way to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """What happens to blocks in, victims out. Rows are reused after `removed`."""

    def inserted(self, row: int, depth: int, turn: int, cost: float) -> None:
        """A block became readable, as a leaf. depth: blocks before it; turn: of its conversation; cost: seconds."""
        ...

    def loaded(self, rows: Sequence[int], are_leaves: Sequence[bool]) -> None:
        """Blocks from before a restart, the one that was used last first: all are older than what is known here."""
        ...

    def touched(self, rows: Sequence[int]) -> None:
        """Blocks of one chain were used; the deepest comes first, so that an ancestor is always the more recent."""
        ...

    def became_leaf(self, row: int) -> None:
        """The block's last child went."""
        ...

    def became_inner(self, row: int) -> None:
        """The block got its first child."""
        ...

    def removed(self, row: int) -> None:
        """The block is gone."""
        ...

    def victims(self) -> Iterator[int]:
        """Leaves, worst first. The caller skips what is pinned.

        The leaf that was proposed last may be removed, and its parent become a leaf, before the next one is asked for;
        after any other change the caller starts again.
        """
        ...
