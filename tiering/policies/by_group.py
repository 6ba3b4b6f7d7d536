"""A policy for each group of tenants: one group's behaviour says nothing about the worth of another's blocks.

All blocks of a chain are of one group. `tiering.policies.shares` says which group gives way; the group's own policy
says which of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tiering.policies.policy import EvictionPolicy


class ByGroup:
    """`EvictionPolicy`, and the victims of single groups."""

    def __init__(self, policies: Sequence[EvictionPolicy], group_of: Callable[[int], int]) -> None:
        """policies: by group. group_of: the group of a row's block."""
        self._policies = policies
        self._group_of = group_of
        self._blocks = 0
        self._came = 0
        self._seen = [0] * len(policies)

    def expect(self, blocks: int) -> None:
        """Any group may come to hold all of the tier."""
        for policy in self._policies:
            policy.expect(blocks)

    def inserted(self, row: int) -> None:
        group = self._group_of(row)
        self._blocks += 1
        self._came += 1
        self._seen[group] = self._came
        self._policies[group].inserted(row)

    def loaded(self, rows: Sequence[int], are_leaves: Sequence[bool]) -> None:
        if len(rows):
            self._blocks += len(rows)
            self._policies[self._group_of(rows[0])].loaded(rows, are_leaves)

    def used(self, chain: Sequence[int], count: int) -> None:
        if chain:
            group = self._group_of(chain[0])
            self._seen[group] = self._came
            self._policies[group].used(chain, count)

    def touched(self, rows: Sequence[int]) -> None:
        if rows:
            self._policies[self._group_of(rows[0])].touched(rows)

    def became_leaf(self, row: int) -> None:
        self._policies[self._group_of(row)].became_leaf(row)

    def became_inner(self, row: int) -> None:
        self._policies[self._group_of(row)].became_inner(row)

    def removed(self, row: int) -> None:
        self._blocks -= 1
        self._policies[self._group_of(row)].removed(row)

    def victims(self) -> Iterator[int]:
        """Of all groups, one after another."""
        return self.victims_of(range(len(self._policies)))

    def victims_of(self, groups: Sequence[int]) -> Iterator[int]:
        """Of these groups, one after another; each one's worst first."""
        for group in groups:
            yield from self._policies[group].victims()

    def idle(self) -> list[bool]:
        """Groups without a request while as many blocks came as the tier holds."""
        return [self._came - seen > self._blocks for seen in self._seen]
