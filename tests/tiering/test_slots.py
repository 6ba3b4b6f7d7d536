"""The books of a tier's slots, against a model that keeps them the slow way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiering.slots import FrameEvent, FrameState, IllegalTransition, Piece, SlotLedger
from tiering.tier import extent_of, place_of, slot_of
from workbench import KIB, slot_class

CLASSES = [slot_class(), slot_class(1), slot_class(owner=b"b", frame_bytes=8 * KIB)]
PIECE_BYTES = 64 * KIB
FREE, RESERVED, RESIDENT = FrameState.FREE, FrameState.RESERVED, FrameState.RESIDENT
QUARANTINED = FrameState.QUARANTINED


def ledger_of(*capacities: int) -> SlotLedger[Piece]:
    """Pieces of the first class, numbered from 1."""
    ledger: SlotLedger[Piece] = SlotLedger()
    for number, capacity in enumerate(capacities, 1):
        ledger.add(Piece(number, CLASSES[0], capacity))
    return ledger


def resident(ledger: SlotLedger[Piece], count: int) -> list[int]:
    places = ledger.reserve(CLASSES[0], count)
    ledger.step(places, FrameEvent.COMMIT)
    return places


class Books(RuleBasedStateMachine):
    """Every slot as an entry of a dictionary: place -> state; pieces that are closing as a set."""

    EVENTS = (
        (FrameEvent.COMMIT, RESERVED, RESIDENT),
        (FrameEvent.ABORT, RESERVED, FREE),
        (FrameEvent.EVICT, RESIDENT, FrameState.DELETING),
        (FrameEvent.DELETED, FrameState.DELETING, FREE),
        (FrameEvent.RETAIN, RESIDENT, FrameState.ZOMBIE),
        (FrameEvent.LET_GO, FrameState.ZOMBIE, FREE),
        (FrameEvent.CONDEMN, RESIDENT, QUARANTINED),
    )

    @initialize()
    def begin(self) -> None:
        self.ledger: SlotLedger[Piece] = SlotLedger()
        self.states: dict[int, FrameState] = {}
        self.classes: dict[int, int] = {}
        self.closing: set[int] = set()
        self.rows: dict[int, int] = {}
        self.next = 1

    def of(self, number: int) -> list[int]:
        return [place for place in self.states if extent_of(place) == number]

    @rule(which=st.integers(0, 2), states=st.lists(st.sampled_from(sorted(FrameState)), min_size=1, max_size=8))
    def add_as_found(self, which: int, states: list[FrameState]) -> None:
        piece = Piece(self.next, CLASSES[which], len(states))
        piece.slots.load(bytes(states))
        self._add(piece, which, states)

    @rule(which=st.integers(0, 2), capacity=st.integers(1, 8))
    def add_new(self, which: int, capacity: int) -> None:
        self._add(Piece(self.next, CLASSES[which], capacity), which, [FREE] * capacity)

    def _add(self, piece: Piece, which: int, states: list[FrameState]) -> None:
        self.ledger.add(piece)
        self.classes[piece.number] = which
        self.states.update((place_of(piece.number, slot), state) for slot, state in enumerate(states))
        self.next += 1

    @rule(which=st.integers(0, 2), count=st.integers(0, 12))
    def reserve(self, which: int, count: int) -> None:
        free = self.free(which)
        places = self.ledger.reserve(CLASSES[which], count)
        assert len(places) == len(set(places)) == min(count, len(free)) and set(places) <= set(free)
        self.states.update(dict.fromkeys(places, RESERVED))

    def free(self, which: int) -> list[int]:
        return [
            place
            for place, state in self.states.items()
            if state == FREE and self.classes[extent_of(place)] == which and extent_of(place) not in self.closing
        ]

    @precondition(lambda self: self.states)
    @rule(event=st.sampled_from(EVENTS), data=st.data())
    def step(self, event: tuple[FrameEvent, FrameState, FrameState], data: st.DataObject) -> None:
        what, before, after = event
        place = data.draw(st.sampled_from(sorted(self.states)))
        if self.states[place] != before:
            with pytest.raises(IllegalTransition):
                self.ledger.step([place], what)
            return
        self.ledger.step([place], what)
        self.states[place] = after
        if after == FREE:
            self.rows.pop(place, None)

    @precondition(lambda self: any(state == RESERVED for state in self.states.values()))
    @rule(data=st.data())
    def commit_and_evict_at_once(self, data: st.DataObject) -> None:
        reserved = sorted(place for place, state in self.states.items() if state == RESERVED)
        places = data.draw(st.lists(st.sampled_from(reserved), unique=True, min_size=1))
        self.ledger.step(places, FrameEvent.COMMIT, FrameEvent.EVICT, FrameEvent.DELETED)
        for place in places:
            self.states[place] = FREE
            self.rows.pop(place, None)

    @precondition(lambda self: any(state == RESIDENT for state in self.states.values()))
    @rule(data=st.data(), row=st.integers(0, 1000))
    def own(self, data: st.DataObject, row: int) -> None:
        held = sorted(place for place, state in self.states.items() if state == RESIDENT)
        place = data.draw(st.sampled_from(held))
        self.ledger.own([place], [row])
        self.rows[place] = row

    @precondition(lambda self: self.classes.keys() - self.closing)
    @rule(data=st.data())
    def start_closing(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.classes.keys() - self.closing)))
        self.ledger.start_closing(number)
        self.closing.add(number)

    @precondition(lambda self: self.closing)
    @rule(data=st.data())
    def stop_closing(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.closing)))
        self.ledger.stop_closing(number)
        self.closing.remove(number)

    @precondition(lambda self: self.classes)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.classes)))
        if any(self.states[place] not in (FREE, QUARANTINED) for place in self.of(number)):
            with pytest.raises(AssertionError):
                self.ledger.remove(number)
            return
        assert self.ledger.remove(number).number == number
        for place in self.of(number):
            del self.states[place]
            self.rows.pop(place, None)
        del self.classes[number]
        self.closing.discard(number)

    @invariant()
    def books_agree(self) -> None:
        ledger = self.ledger
        ledger.check()
        assert ledger.pieces.keys() == self.classes.keys()
        assert all(ledger.state(place) == state for place, state in self.states.items())
        states = list(self.states.values())
        assert ledger.sums() == [states.count(state) for state in FrameState]
        for which, slots in enumerate(CLASSES):
            mine = {number for number, one in self.classes.items() if one == which}
            assert ledger.free_slots(slots) == len(self.free(which))
            assert {piece.number for piece in ledger.all_pieces(slots)} == mine
            assert {piece.number for piece in ledger.open_pieces(slots)} == mine - self.closing
        spare = [self._spare(which) * CLASSES[which].frame_bytes >= PIECE_BYTES for which in range(3)]
        known = set(self.classes.values())
        assert set(ledger.reclaimable_classes(PIECE_BYTES)) == {CLASSES[one] for one in known if spare[one]}
        for place, row in self.rows.items():
            assert ledger.pieces[extent_of(place)].slots.owners[slot_of(place)] == row

    def _spare(self, which: int) -> int:
        bad = [
            place
            for place, state in self.states.items()
            if state == QUARANTINED and self.classes[extent_of(place)] == which
        ]
        return len(self.free(which)) + len(bad)


TestBooks = Books.TestCase
TestBooks.pytestmark = [pytest.mark.slow]
TestBooks.settings = settings(max_examples=60, stateful_step_count=40)


# One by one -----------------------------------------------------------------------------------------------------------


def test_the_pieces_of_a_class_fill_one_after_the_other() -> None:
    ledger = ledger_of(2, 3)
    places = ledger.reserve(CLASSES[0], 9)
    assert [extent_of(place) for place in places] == [1, 1, 2, 2, 2]
    ledger.step(places[:1], FrameEvent.ABORT)
    assert ledger.reserve(CLASSES[0], 9) == places[:1]


Damage = Callable[[SlotLedger[Piece]], object]
DAMAGES: dict[str, Damage] = {
    "a state": lambda ledger: ledger.pieces[1].slots.states.__setitem__(0, FrameState.ZOMBIE),
    "a count": lambda ledger: ledger.pieces[1].slots.counts.__setitem__(RESIDENT, 9),
    "a free slot lost": lambda ledger: ledger.pieces[1].slots._free.pop(),
    "a free slot twice": lambda ledger: ledger.pieces[1].slots._free.append(3),
    "free slots of a class": lambda ledger: setattr(ledger._classes[CLASSES[0]], "free", 2),
    "bad slots of a class": lambda ledger: setattr(ledger._classes[CLASSES[0]], "quarantined", 0),
    "pieces with free slots": lambda ledger: ledger._classes[CLASSES[0]].with_free.clear(),
    "a piece that closes unnoticed": lambda ledger: setattr(ledger.pieces[1], "closing", True),
    "a piece of no class": lambda ledger: ledger._classes[CLASSES[0]].pieces.pop(2),
    "a piece that is not listed": lambda ledger: ledger.pieces.pop(2),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_check_notices(damage: Damage) -> None:
    ledger = ledger_of(4, 1)
    places = resident(ledger, 2)
    ledger.step(places[:1], FrameEvent.CONDEMN)
    ledger.check()
    damage(ledger)
    with pytest.raises(AssertionError):
        ledger.check()


def test_a_piece_that_is_being_written_to_is_nothing_to_evict_as_a_whole() -> None:
    ledger = ledger_of(3)
    places = resident(ledger, 2)
    ledger.own(places, [7, 8])
    assert ledger.rows_in(1) == [7, 8]
    writing = ledger.reserve(CLASSES[0], 1)
    assert ledger.rows_in(1) is None
    ledger.step(writing, FrameEvent.COMMIT)
    assert ledger.rows_in(1) is None, "its block is not whole yet"
    ledger.own(writing, [9])
    assert ledger.rows_in(1) == [7, 8, 9]
