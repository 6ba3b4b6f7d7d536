"""Blocks that are kept for a time: never more than the budget, and never one without the way to it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiering.policies.lru import LeafFirstLru
from tiering.policies.retention import SECONDS_PER_PRIORITY, Retention
from tiering.residency import Pins, Residency

BLOCK = 10


class Tree:
    """Blocks of a tier, and what is wished of each."""

    def __init__(self, budgets: list[int]) -> None:
        self.now = 1000.0
        self.hints: dict[int, tuple[int, int]] = {}
        self.parents: dict[int, int] = {}
        self.groups: dict[int, int] = {}
        self.residency = Residency(LeafFirstLru(), Pins())
        self.retention = Retention(self, self.residency.is_listed, lambda: self.now, budgets)
        self.residency.retention = self.retention
        self.rows = 0

    has_hints = True

    def hint(self, row: int) -> tuple[int, int]:
        return self.hints[row]

    def hinted(self, rows: range) -> list[int]:
        return [row for row in rows if self.hints[row] != (0, 0)]

    def parent(self, row: int) -> int:
        return self.parents[row]

    def depth(self, row: int) -> int:
        return 0 if self.parents[row] < 0 else 1 + self.depth(self.parents[row])

    def size_bytes(self, row: int) -> int:
        return BLOCK

    def group(self, row: int) -> int:
        return self.groups[row]

    def put(self, blocks: int, parent: int = -1, priority: int = 0, ttl: int = 0, group: int = 0) -> list[int]:
        """So many blocks below another one; their rows, the first one first."""
        rows = []
        for _ in range(blocks):
            row, self.rows = self.rows, self.rows + 1
            self.parents[row], self.groups[row] = parent, group
            self.hints[row] = (priority, int(self.now) + ttl if ttl else 0)
            self.residency.grow_to(row)
            if parent >= 0:
                self.residency.child_came(parent)
            self.residency.listed(row)
            rows.append(row)
            parent = row
        self.use(rows[-1])
        return rows

    def use(self, row: int) -> None:
        chain = self.retention.way(row)
        self.residency.policy.touched(chain)
        self.retention.used(chain)

    def evict(self, count: int) -> list[int]:
        gone = []
        for row in self.residency.worst():
            if len(gone) == count:
                break
            self.residency.left(row, self.parents[row])
            gone.append(row)
        return gone


def test_what_is_kept_outlives_what_is_not_until_its_time_ends() -> None:
    tree = Tree([100])
    kept = tree.put(3, ttl=60)
    others = tree.put(4)
    assert tree.evict(2) == [others[3], others[2]]
    tree.now += 61
    assert tree.evict(9) == [*reversed(others[:2]), *reversed(kept)]


def test_a_priority_decays_and_begins_anew_with_each_use() -> None:
    tree = Tree([100])
    kept = tree.put(2, priority=10)
    tree.now += 10 * SECONDS_PER_PRIORITY - 1
    assert tree.retention.holds(kept[1])
    tree.use(kept[0])
    tree.now += 2
    assert tree.retention.holds(kept[0]) and not tree.retention.holds(kept[1])


def test_what_is_kept_keeps_the_way_to_it_which_counts() -> None:
    tree = Tree([5 * BLOCK])
    way = tree.put(4)
    (leaf,) = tree.put(1, way[-1], ttl=60)
    assert tree.retention.kept_bytes() == [5 * BLOCK]
    other = tree.put(1)
    assert tree.evict(1) == other
    (newer,) = tree.put(1, way[-1], ttl=90)
    assert not tree.retention.holds(leaf) and all(tree.retention.holds(row) for row in [*way, newer])


def test_a_budget_that_shrinks_keeps_what_ends_last() -> None:
    tree = Tree([4 * BLOCK, BLOCK])
    soon, late = tree.put(2, ttl=30), tree.put(2, ttl=60)
    tree.retention.resize([3 * BLOCK, BLOCK])
    assert [tree.retention.holds(row) for row in (*soon, *late)] == [True, False, True, True]
    tree.retention.resize([0, 5 * BLOCK])
    assert tree.retention.kept_bytes() == [0, 0] and tree.retention.budgets() == [0, 5 * BLOCK]
    tree.retention.check()


def test_there_is_room_for_one_from_elsewhere_while_its_time_goes_on_and_nobody_goes_back_for_it() -> None:
    tree = Tree([3 * BLOCK, 0])
    tree.put(2, ttl=60)
    for row, ttl, priority, group in ((90, 100, 0, 0), (91, 10, 0, 0), (92, 0, 100, 0), (93, 0, 0, 0), (94, 100, 0, 1)):
        tree.hints[row], tree.groups[row] = (priority, int(tree.now) + ttl if ttl else 0), group
    assert [tree.retention.has_room_for(row) for row in range(90, 95)] == [True, True, False, False, False]
    tree.put(1, ttl=60)
    assert not tree.retention.has_room_for(90), "its time ends last, but there is no room"
    tree.now += 60
    assert tree.retention.has_room_for(90) and not tree.retention.has_room_for(91)
    assert tree.retention.kept_bytes() == [0, 0], "what was kept until its time ended takes no room"
    tree.retention.check()


def test_what_is_kept_is_not_walked_past_twice() -> None:
    """Where eviction comes upon it it becomes recent."""
    tree = Tree([1000 * BLOCK])
    for _ in range(100):
        tree.put(3, ttl=60)
    others = [tree.put(1)[0] for _ in range(50)]
    assert tree.evict(1) == others[:1]
    policy = tree.residency.policy
    assert next(policy.victims()) == others[1]


def test_looking_at_all_costs_by_how_many_there_are() -> None:
    """Nobody goes, since somebody only looks: each one is asked for a few times, however many are kept."""
    tree = Tree([1000 * BLOCK])
    for _ in range(100):
        tree.put(3, ttl=60)
        tree.put(1)
    asked, holds = 0, tree.retention.holds

    def counted(row: int) -> bool:
        nonlocal asked
        asked += 1
        return holds(row)

    tree.retention.holds = counted  # type: ignore[method-assign]
    for _ in range(3):
        asked = 0
        assert len(list(tree.residency.worst())) == 200
        assert asked <= 3 * 200


def test_a_chain_costs_by_its_length() -> None:
    """Also on a clock that goes on while its blocks are told of."""
    tree = Tree([10_000 * BLOCK])
    steps, parent = 0, tree.parent

    def seconds() -> float:
        tree.now += 1e-6
        return tree.now

    def counted(row: int) -> int:
        nonlocal steps
        steps += 1
        return parent(row)

    tree.retention._seconds = seconds
    tree.parent = counted  # type: ignore[method-assign]
    rows = tree.put(300, priority=50)
    tree.retention.used(rows[::-1])
    for row in rows:
        tree.retention.came(row)
    assert steps < 10 * len(rows), steps


class Lives(RuleBasedStateMachine):
    """Whatever happens, no group keeps more than its budget, and nothing is kept without its ancestors."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree([7 * BLOCK, 3 * BLOCK])

    def here(self) -> list[int]:
        return [row for row in range(self.tree.rows) if self.tree.residency.is_listed(row)]

    @rule(
        blocks=st.integers(1, 6),
        behind=st.integers(0, 99),
        priority=st.sampled_from([-5, 0, 0, 1, 10, 100]),
        ttl=st.sampled_from([0, 0, 5, 100]),
        group=st.integers(0, 1),
    )
    def put(self, blocks: int, behind: int, priority: int, ttl: int, group: int) -> None:
        rows = [row for row in self.here() if self.tree.groups[row] == group]
        parent = rows[behind % len(rows)] if rows and behind % 3 else -1
        self.tree.put(blocks, parent, priority, ttl, group)

    @rule(at=st.integers(0, 99))
    def use(self, at: int) -> None:
        if rows := self.here():
            self.tree.use(rows[at % len(rows)])

    @rule(at=st.integers(0, 99), priority=st.sampled_from([0, 50]), ttl=st.sampled_from([0, 40]))
    def renew(self, at: int, priority: int, ttl: int) -> None:
        if rows := self.here():
            row = rows[at % len(rows)]
            self.tree.hints[row] = (priority, int(self.tree.now) + ttl if ttl else 0)
            self.tree.retention.came(row)

    @rule(seconds=st.sampled_from([1, 10, 100]))
    def wait(self, seconds: float) -> None:
        self.tree.now += seconds

    @rule(blocks=st.lists(st.integers(0, 12), min_size=2, max_size=2))
    def resize(self, blocks: list[int]) -> None:
        self.tree.retention.resize([BLOCK * one for one in blocks])
        self.tree.retention.check()

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        """What is kept goes only when nothing else is left."""
        tree = self.tree
        loose = {row for row in self.here() if not tree.retention.holds(row)}
        gone = tree.evict(min(count, len(self.here())))
        assert set(gone) <= loose or loose <= set(gone)

    @invariant()
    def is_right(self) -> None:
        tree = self.tree
        tree.residency.check()
        for row in self.here():
            if tree.retention.holds(row) and tree.parents[row] >= 0:
                assert tree.retention.until(tree.parents[row]) >= tree.retention.until(row)


TestLives = Lives.TestCase
TestLives.pytestmark = [pytest.mark.slow]
TestLives.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
