"""What every `EvictionPolicy` keeps, whatever it thinks of a block's worth.

An implementation is a subclass of `EvictionPolicyContract` that makes one. The histories are those of a real index:
chains grow at their ends, are touched from a block up to its root, and lose leaves only.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learned_policy import by_worth
from tiering.policies.adaptive import Adaptive
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import EvictionPolicy

STEPS = st.lists(st.tuples(st.sampled_from("grow grow root touch evict worst refill".split()), st.integers(0, 10**6)),
                 max_size=60)  # fmt: skip


class Forest:
    """Chains of rows as the index above keeps them, told step by step to a policy, and to a list in order of use."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.parents: dict[int, int] = {}
        self.order: list[int] = []  # the row that was used longest ago comes first
        self.free: list[int] = []

    def step(self, action: str, choice: int) -> None:
        rows = sorted(self.parents)
        leaves = sorted(self.leaves())
        if action == "root" or not rows:
            self._insert(-1)
        elif action == "grow":
            self._insert(rows[choice % len(rows)])
        elif action == "touch":
            self._touch(rows[choice % len(rows)])
        elif action == "worst":
            self.remove(next(iter(self.policy.victims())))
        else:
            leaf = leaves[choice % len(leaves)]
            parent = self.parents[leaf]
            self.remove(leaf)
            if action == "refill":
                self._insert(parent)

    def leaves(self) -> set[int]:
        return set(self.parents) - set(self.parents.values())

    def chain(self, row: int) -> list[int]:
        rows = []
        while row != -1:
            rows.append(row)
            row = self.parents[row]
        return rows

    def _insert(self, parent: int) -> None:
        """As a put does it: the parent gets a child, the block is readable, its chain was used."""
        row = self.free.pop() if self.free else len(self.parents)
        if parent != -1 and parent not in self.parents.values():
            self.policy.became_inner(parent)
        self.parents[row] = parent
        self.policy.inserted(row)
        self.order.append(row)
        self._touch(row, 1)

    def _touch(self, row: int, count: int | None = None) -> None:
        chain = self.chain(row)
        self.policy.used(chain, len(chain) if count is None else count)
        self.policy.touched(chain)
        for one in chain:
            self.order.remove(one)
            self.order.append(one)

    def remove(self, row: int) -> None:
        self.policy.removed(row)
        parent = self.parents.pop(row)
        self.order.remove(row)
        self.free.append(row)
        if parent != -1 and parent not in self.parents.values():
            self.policy.became_leaf(parent)


class EvictionPolicyContract:
    """What a policy must do; `make` gives a new one."""

    def make(self) -> EvictionPolicy:
        raise NotImplementedError

    @given(steps=STEPS)
    @settings(max_examples=80)
    def test_the_victims_are_the_leaves_each_once(self, steps: list[tuple[str, int]]) -> None:
        forest = Forest(self.make())
        for action, choice in steps:
            forest.step(action, choice)
            victims = list(forest.policy.victims())
            assert len(victims) == len(set(victims)) and set(victims) == forest.leaves()

    @given(steps=STEPS)
    @settings(max_examples=40)
    def test_asking_changes_nothing(self, steps: list[tuple[str, int]]) -> None:
        asked, quiet = Forest(self.make()), Forest(self.make())
        for action, choice in steps:
            list(asked.policy.victims())
            asked.step(action, choice)
            quiet.step(action, choice)
        assert list(asked.policy.victims()) == list(quiet.policy.victims())

    @given(steps=STEPS)
    @settings(max_examples=40)
    def test_following_its_advice_empties_everything(self, steps: list[tuple[str, int]]) -> None:
        forest = Forest(self.make())
        for action, choice in steps:
            forest.step(action, choice)
        for _ in range(len(forest.parents)):
            forest.step("worst", 0)
        assert not forest.parents and list(forest.policy.victims()) == []

    @given(steps=STEPS, spare=st.sets(st.integers(0, 30)))
    @settings(max_examples=80)
    def test_what_is_proposed_may_go_during_the_walk(self, steps: list[tuple[str, int]], spare: set[int]) -> None:
        """As an eviction of many blocks does it: all but a few, which somebody pins."""
        forest = Forest(self.make())
        for action, choice in steps:
            forest.step(action, choice)
        leaves, seen = forest.leaves(), set[int]()
        for row in forest.policy.victims():
            assert row in forest.leaves() and row not in seen
            seen.add(row)
            if row not in spare:
                forest.remove(row)
        assert set(forest.policy.victims()) == forest.leaves()
        assert seen >= leaves, "the walk came to an end too early"

    @given(steps=STEPS, before=st.lists(st.integers(-1, 20), max_size=20))
    @settings(max_examples=60)
    def test_what_was_there_before_a_restart_is_in_step(self, steps: list[tuple[str, int]], before: list[int]) -> None:
        """Blocks of an earlier life, an ancestor before its descendants, come in while new ones are there already."""
        policy = self.make()
        forest = Forest(policy)
        for action, choice in steps:
            forest.step(action, choice)
        new = set(forest.parents)
        old = {1000 + at: 1000 + min(parent, at - 1) if parent >= 0 and at else -1 for at, parent in enumerate(before)}
        leaves = set(old) - set(old.values())
        policy.loaded(list(old), [row in leaves for row in old])
        forest.parents.update(old)
        victims = list(policy.victims())
        assert set(victims) == forest.leaves() and len(victims) == len(set(victims))
        self.check_loaded(victims, leaves)
        for row in reversed(old):
            policy.removed(row)
            parent = forest.parents.pop(row)
            if parent != -1 and parent not in forest.parents.values():
                policy.became_leaf(parent)
            assert set(policy.victims()) == forest.leaves()
        assert set(forest.parents) == new

    def check_loaded(self, victims: list[int], leaves: set[int]) -> None:
        """What is asked of the order of those that came in; the highest row came last."""

    def test_what_stays_is_passed_over_once(self) -> None:
        """Tens of thousands of leaves that somebody pins are no work for minutes."""
        policy = self.make()
        rows = range(20_000)
        for row in rows:
            policy.inserted(row)
        taken = []
        for row in policy.victims():
            if row % 1000 == 999:
                policy.removed(row)
                taken.append(row)
        assert sorted(taken) == list(rows)[999::1000]

    def test_an_empty_policy_has_no_victims(self) -> None:
        assert list(self.make().victims()) == []

    def test_rows_may_come_in_any_order_and_come_again(self) -> None:
        policy = self.make()
        for row in (100_000, 3, 0):
            policy.inserted(row)
        assert set(policy.victims()) == {100_000, 3, 0}
        policy.removed(3)
        policy.inserted(3)
        assert set(policy.victims()) == {100_000, 3, 0}

    @pytest.mark.parametrize("event", ["inserted twice", "removed twice", "touched after its end"])
    def test_events_that_cannot_be_are_bugs(self, event: str) -> None:
        policy = self.make()
        policy.inserted(0)
        policy.inserted(1)
        with pytest.raises(AssertionError):
            if event == "inserted twice":
                policy.inserted(0)
            policy.removed(0)
            if event == "removed twice":
                policy.removed(0)
            policy.touched([0])
            list(policy.victims())


class GoesByAge(EvictionPolicyContract):
    """Those that do as LRU does, as long as they know no better."""

    def check_loaded(self, victims: list[int], leaves: set[int]) -> None:
        assert victims[: len(leaves)] == sorted(leaves, reverse=True), "the last of those that came in goes first"

    @given(steps=STEPS)
    @settings(max_examples=100)
    def test_the_order_is_that_of_last_use(self, steps: list[tuple[str, int]]) -> None:
        forest = Forest(self.make())
        for action, choice in steps:
            forest.step(action, choice)
            leaves = forest.leaves()
            assert list(forest.policy.victims()) == [row for row in forest.order if row in leaves]

    def test_touching_nothing_and_the_newest(self) -> None:
        policy = self.make()
        for row in range(3):
            policy.inserted(row)
        policy.touched([])
        policy.touched([2, 2, 0])
        assert list(policy.victims()) == [1, 2, 0]


class TestLeafFirstLru(GoesByAge):
    def make(self) -> EvictionPolicy:
        return LeafFirstLru()

    def test_a_long_list_is_no_work_for_the_garbage_collector(self) -> None:
        def tracked(policy: Any) -> int:
            seen: set[int] = set()
            reached: list[Any] = [policy]
            while reached:
                thing = reached.pop()
                if id(thing) in seen or not gc.is_tracked(thing) or isinstance(thing, type):
                    continue
                seen.add(id(thing))
                reached.extend(gc.get_referents(thing))
            return len(seen)

        small, large = LeafFirstLru(), LeafFirstLru()
        for row in range(20_000):
            large.inserted(row)
        assert tracked(large) == tracked(small)

    def test_the_first_victims_of_many_come_at_once(self) -> None:
        policy = self.make()
        for row in range(20_000):
            policy.inserted(row)
        victims: Iterator[int] = policy.victims()
        assert [next(victims) for _ in range(3)] == [0, 1, 2]


NAMES = array("q", range(1, 200_000))


class TestAdaptive(GoesByAge):
    def make(self) -> EvictionPolicy:
        return Adaptive(NAMES, 3)


class TestAdaptiveThatGoesByWorth(EvictionPolicyContract):
    """Whatever the guard says."""

    def make(self) -> EvictionPolicy:
        return by_worth(NAMES, 3)
