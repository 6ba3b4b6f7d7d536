"""The contract of an eviction policy.

A policy orders the blocks of one tier by what they are worth. It sees rows (small integers that stand for blocks) and
what happens to them; never bytes, pins or locks. Only leaves may be proposed as victims: other blocks lead to their
children.

    a request finds blocks     used: the chain that it was given        touched: those that this tier has
    it computes the others     inserted, one by one, then became_inner for those that got a child
    and stores them            used: the same chain, of which the new ones count        touched
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """What happens to blocks in, victims out. Rows are reused after `removed`."""

    def expect(self, blocks: int) -> None:
        """The tier has room for so many blocks, as far as is known now; called before any of them comes."""
        ...

    def inserted(self, row: int) -> None:
        """A block became readable here, as a leaf; the row may have been another block's before."""
        ...

    def loaded(self, rows: Sequence[int], are_leaves: Sequence[bool]) -> None:
        """Blocks of one namespace from before a restart, most recently used first: all are older than what is known
        here."""
        ...

    def used(self, chain: Sequence[int], count: int) -> None:
        """Record one use of a chain, deepest block first, regardless of the blocks' tiers. The first `count` entries
        are new uses; the rest were counted by an earlier call."""
        ...

    def touched(self, rows: Sequence[int]) -> None:
        """Make these blocks of one chain the most recent; the deepest comes first, so that an ancestor is more
        recent."""
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


PolicyMaker = Callable[["array[int]", int], EvictionPolicy]
"""Makes a policy from a column of names by row, each the same whenever that block comes, which may grow; and a seed."""
