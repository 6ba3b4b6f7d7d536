"""The table of frame states, the slots of an extent, and the decisions on what makes room."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.dram.extents import ExtentPool
from tiering.dram.tier import DramTier
from tiering.policies.lru import LeafFirstLru
from tiering.residency import Evict, Grow, Pins, Residency, Vacate
from tiering.slots import TRANSITIONS, FrameEvent, FrameState, IllegalTransition, SlotTable
from tiering.tier import SlotClass, extent_of, place_of, slot_of
from workbench import KIB, slot_class

A, B = slot_class(owner=b"a"), slot_class(owner=b"b")
SLOTS = 4  # of either class, in an extent of 64 KiB


# The table ------------------------------------------------------------------------------------------------------------


def slot_in(state: FrameState) -> SlotTable:
    """A table whose slot 0 was led to a state by legal events."""
    paths: dict[FrameState, list[FrameEvent]] = {
        FrameState.FREE: [],
        FrameState.RESERVED: [FrameEvent.RESERVE],
        FrameState.RESIDENT: [FrameEvent.RESERVE, FrameEvent.COMMIT],
        FrameState.DELETING: [FrameEvent.RESERVE, FrameEvent.COMMIT, FrameEvent.EVICT],
        FrameState.QUARANTINED: [FrameEvent.RESERVE, FrameEvent.COMMIT, FrameEvent.CONDEMN],
        FrameState.ZOMBIE: [FrameEvent.RESERVE, FrameEvent.COMMIT, FrameEvent.RETAIN],
    }
    table = SlotTable(1)
    for event in paths[state]:
        if event is FrameEvent.RESERVE:
            assert table.reserve(1) == [0]
        else:
            table.apply(0, event)
    assert table.states[0] == state
    return table


@pytest.mark.parametrize(("state", "event"), itertools.product(FrameState, FrameEvent))
def test_the_table_is_total(state: FrameState, event: FrameEvent) -> None:
    table = slot_in(state)
    if (state, event) in TRANSITIONS and event is not FrameEvent.RESERVE:
        table.apply(0, event)
        assert table.states[0] == TRANSITIONS[state, event]
    elif (state, event) not in TRANSITIONS:
        with pytest.raises(IllegalTransition, match=f"{state.name} does not allow {event.name}"):
            table.apply(0, event)
        assert table.states[0] == state, "a refused event changes nothing"
    table.check()


# Rows: places, pins, late readers -------------------------------------------------------------------------------------


def rows_of(count: int, parts: int = 1) -> Residency:
    residency = Residency(LeafFirstLru(), Pins())
    for row in range(count):
        residency.reserved([row], [[place_of(part, row)] for part in range(parts)])
    return residency


def test_pins_count_who_was_first_and_who_was_last() -> None:
    residency = rows_of(5)
    assert residency.pins.pin([0, 1, 2]) == 3
    assert residency.pins.pin([1, 2, 3]) == 1
    assert [residency.pins.counts[row] for row in range(5)] == [1, 2, 2, 1, 0]
    assert residency.pins.unpin([0, 1]) == 1
    assert residency.pins.unpin([1, 2, 3]) == 2
    assert residency.pins.pin([]) == residency.pins.unpin([]) == 0
    residency.pins.check({2: 1, 4: 0})
    for wrong in ({}, {2: 2}, {2: 1, 0: 1}):
        with pytest.raises(AssertionError):
            residency.pins.check(wrong)
    with pytest.raises(AssertionError, match="more often than pinned"):
        residency.pins.unpin([0])


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 12))
@settings(max_examples=80)
def test_what_is_affordable_counts_new_pins_only(pinned: list[bool], budget: int) -> None:
    residency = rows_of(len(pinned))
    residency.pins.pin([row for row, is_pinned in enumerate(pinned) if is_pinned])
    want = max(count for count in range(len(pinned) + 1) if pinned[:count].count(False) <= budget)
    assert residency.pins.affordable(range(len(pinned)), budget) == want


def test_a_slot_is_held_until_its_last_late_reader_is_done() -> None:
    residency = rows_of(2)
    one, two = place_of(3, 0), place_of(4, 0)
    residency.held.defer_reuse([one, two])
    residency.held.defer_reuse([one])
    assert one in residency.held and residency.held.has_extent(3) and residency.held.has_extent(4)
    assert residency.held.allow_reuse([one, two]) == [two]
    assert one in residency.held and not residency.held.has_extent(4)
    assert residency.held.allow_reuse([one]) == [one] and one not in residency.held
    with pytest.raises(AssertionError):
        residency.held.allow_reuse([one])


def test_the_worst_is_the_oldest_leaf_that_nobody_pins() -> None:
    residency = rows_of(3)
    assert list(residency.worst()) == []
    for row in range(3):
        residency.listed(row)
    assert list(residency.worst()) == [0, 1, 2]
    residency.pins.pin([0, 1])
    assert list(residency.worst()) == [2]
    residency.pins.pin([2])
    assert list(residency.worst()) == []
    residency.pins.unpin([1])
    assert list(residency.worst()) == [1]


# What makes room ------------------------------------------------------------------------------------------------------


class Setup:
    """A small tier whose frames stand for blocks: row numbers in the order in which they came."""

    def __init__(self, extents: int) -> None:
        self.tier = DramTier(ExtentPool(extents * 64 * KIB, 64 * KIB))
        self.residency = Residency(LeafFirstLru(), Pins())
        self.rows = 0

    def grow(self, slots: SlotClass) -> int:
        """One more extent; returns its number."""
        self.tier.adopt(self.tier.new_extent(), slots)
        return max(extent.number for extent in self.tier.extents_of(slots))

    def fill(self, slots: SlotClass, count: int) -> list[int]:
        """That many blocks; returns their rows."""
        rows = []
        for place in self.tier.reserve(slots, count):
            self.tier.own([place], [self.rows])
            self.tier.commit([place], [bytes(4096)])
            self.residency.reserved([self.rows], [[place]])
            self.residency.listed(self.rows)
            rows.append(self.rows)
            self.rows += 1
        assert len(rows) == count
        return rows

    def evict(self, rows: list[int]) -> None:
        for row in rows:
            self.residency.unlisted(row)
            self.tier.delete(self.residency.forget(row))

    def room(self, *wanted: SlotClass) -> Grow | Evict | Vacate | None:
        move = self.residency.room(wanted, self.tier.ledger, self.tier.extent_bytes, may_grow=self.tier.has_room())
        self.tier.check()
        return move


def test_without_budget_it_evicts_the_oldest() -> None:
    setup = Setup(extents=1)
    setup.grow(A)
    rows = setup.fill(A, SLOTS)
    assert setup.room(A) == Evict(rows[0])
    setup.residency.policy.touched([rows[0]])
    setup.residency.pins.pin([rows[1]])
    assert setup.room(A) == Evict(rows[2])


def test_an_empty_extent_of_another_class_is_given_back() -> None:
    setup = Setup(extents=2)
    setup.grow(A)
    full = setup.fill(A, SLOTS)
    empty = setup.grow(A)
    assert setup.room(B) == Vacate(empty, ())
    setup.evict(full)
    assert isinstance(setup.room(B), Vacate)


def test_a_cold_extent_is_emptied_into_the_free_slots_of_its_class() -> None:
    setup = Setup(extents=2)
    setup.grow(A)
    rows = setup.fill(A, SLOTS)
    second = setup.grow(A)
    rows += setup.fill(A, SLOTS)
    setup.evict(rows[:3])  # free: 3 in the first extent
    assert setup.room(B) == Evict(rows[3]), "4 live frames do not fit into 3 free slots"
    setup.evict(rows[7:])  # and 1 in the second, where 3 live ones fit into the 3 free slots of the first
    assert setup.room(B) == Vacate(extent_of(setup.residency.place(rows[3], 0)), (rows[3],)), "the cheaper one"
    setup.residency.pins.pin([rows[3]])
    assert setup.room(B) == Vacate(second, tuple(rows[4:7]))


@pytest.mark.parametrize("use", ["pinned", "reserved", "held", "zombie", "being emptied"])
def test_an_extent_in_use_is_left_alone(use: str) -> None:
    setup = Setup(extents=2)
    first = setup.grow(A)
    rows = setup.fill(A, 1)
    setup.grow(B)
    setup.residency.pins.pin(setup.fill(B, SLOTS))
    other = setup.fill(A, 1)
    assert slot_of(setup.residency.place(rows[0], 0)) != slot_of(setup.residency.place(other[0], 0))
    setup.evict(other)
    place = setup.residency.place(rows[0], 0)
    if use == "pinned":
        setup.residency.pins.pin(rows)
    elif use == "reserved":
        setup.evict(rows)
        setup.tier.reserve(A, 1)
    elif use == "held":
        setup.residency.held.defer_reuse([place])
    elif use == "zombie":
        setup.residency.unlisted(rows[0])
        setup.tier.retain(setup.residency.forget(rows[0]))
    else:
        setup.evict(rows)
        setup.tier.start_vacating(first, 0)
    move = setup.room(B)
    assert move == (Evict(rows[0]) if use == "held" else None)


def test_a_condemned_slot_does_not_keep_its_extent() -> None:
    """Quarantine costs memory only until the extent is wanted by somebody else."""
    setup = Setup(extents=2)
    bad = setup.grow(A)
    rows = setup.fill(A, SLOTS)
    setup.residency.unlisted(rows[0])
    setup.tier.quarantine(setup.residency.forget(rows[0]))
    setup.grow(A)
    assert setup.room(B) == Vacate(bad + 1, ()), "the empty one is the cheapest"
    setup.fill(A, 1)
    assert setup.room(B) == Vacate(bad, tuple(rows[1:])), "three live frames fit into three free slots"


# Who is listed --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from(["come", "list", "unlist", "go"]), st.integers(0, 9)), max_size=60),
    st.lists(st.integers(-1, 8), min_size=10, max_size=10),
)
@settings(max_examples=100)
def test_the_policy_knows_the_leaves_of_what_is_listed(steps: list[tuple[str, int]], parents: list[int]) -> None:
    """Blocks come to a tier and go in any order, their parents there or not: a tier need not hold whole chains."""
    residency = rows_of(10)
    here: dict[int, bool] = {}  # rows with a place, or about to have one -> listed
    for action, row in steps:
        parent = min(parents[row], row - 1)
        if action == "come" and row not in here:
            here[row] = False
            if parent >= 0:
                residency.child_came(parent)
        elif action == "list" and here.get(row) is False:
            here[row] = True
            residency.listed(row)
        elif action == "unlist" and row in here:
            here[row] = False
            residency.unlisted(row)
        elif action == "go" and here.get(row) is False:
            del here[row]
            if parent >= 0:
                residency.child_went(parent)
        inner = {min(parents[one], one - 1) for one in here}
        assert set(residency.policy.victims()) == {one for one, listed in here.items() if listed and one not in inner}
        residency.check()
