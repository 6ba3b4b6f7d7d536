"""The slots of a tier: pieces of one slot class each, cut into equal slots, and which have free ones.

A piece is an extent of memory or a slab on disk. This file keeps numbers only: states, counts and owners. It never
touches a byte of a frame, decides nothing, and takes no lock: the caller serialises.

A frame's life, drawn from the table below:

    FREE --reserve--> RESERVED --commit--> RESIDENT --evict--> DELETING --deleted--> FREE
                         |                    |
                         +--abort--> FREE     |                 +--claim--> RESERVED   for a frame that goes there next
                                              +--retain---> ZOMBIE --allow_reuse--> FREE   a reader may still map it
                                              +--quarantine--> QUARANTINED             a check failed; never reused

Anything that is not in the table is a bug and raises.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Generic, TypeVar

import numpy as np

from tiering.tier import SLOT_BITS, SLOT_MASK, Column, SlotClass, Usage, extent_of, slot_of


class FrameState(IntEnum):
    """The state of a slot. Only RESIDENT is readable."""

    FREE = 0
    RESERVED = 1
    RESIDENT = 2
    DELETING = 3
    QUARANTINED = 4
    ZOMBIE = 5


class FrameEvent(IntEnum):
    """What may happen to a slot."""

    RESERVE = 0
    COMMIT = 1
    ABORT = 2
    EVICT = 3
    DELETED = 4
    RETAIN = 5
    LET_GO = 6
    CONDEMN = 7
    CLAIM = 8


TRANSITIONS: dict[tuple[FrameState, FrameEvent], FrameState] = {
    (FrameState.FREE, FrameEvent.RESERVE): FrameState.RESERVED,
    (FrameState.RESERVED, FrameEvent.COMMIT): FrameState.RESIDENT,
    (FrameState.RESERVED, FrameEvent.ABORT): FrameState.FREE,
    (FrameState.RESIDENT, FrameEvent.EVICT): FrameState.DELETING,
    (FrameState.DELETING, FrameEvent.DELETED): FrameState.FREE,
    (FrameState.DELETING, FrameEvent.CLAIM): FrameState.RESERVED,
    (FrameState.RESIDENT, FrameEvent.RETAIN): FrameState.ZOMBIE,
    (FrameState.ZOMBIE, FrameEvent.LET_GO): FrameState.FREE,
    (FrameState.RESIDENT, FrameEvent.CONDEMN): FrameState.QUARANTINED,
}


# The same by number, first the event and then the state: plain integers cost a third of what enum members do.
_NEXT = [
    [None if after is None else int(after) for after in (TRANSITIONS.get((state, event)) for state in FrameState)]
    for event in FrameEvent
]


class IllegalTransition(AssertionError):
    """An event that a slot's state does not allow: a bug above."""


class SlotTable:
    """The states of the equal slots of one extent or slab, with a count per state and a stack of free slots.

    `owners[slot]` is the row of the whole block whose frame stands there. A committed frame of an incomplete block, or
    of one that was given up while its producer still writes, has none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.states = bytearray(capacity)
        self.owners = array("i", [-1]) * capacity
        self.counts = [0] * len(FrameState)
        self.counts[FrameState.FREE] = capacity
        self._free = array("i", range(capacity - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that `reserve` can hand out."""
        return self.counts[FrameState.FREE]

    @property
    def live(self) -> int:
        """Slots that hold a readable frame."""
        return self.counts[FrameState.RESIDENT]

    @property
    def is_empty(self) -> bool:
        """Whether every slot is free, or will never be used again."""
        return self.counts[FrameState.FREE] + self.counts[FrameState.QUARANTINED] == self.capacity

    def reserve(self, count: int) -> list[int]:
        """Take so many free slots, now RESERVED; there must be as many."""
        free = self._free
        slots = [free.pop() for _ in range(count)]
        for slot in slots:
            self.apply(slot, FrameEvent.RESERVE)
        return slots

    def apply(self, slot: int, event: FrameEvent) -> int:
        """One step of the table; returns the slot's new `FrameState` as a plain number."""
        before = self.states[slot]
        after = _NEXT[event][before]
        if after is None:
            raise IllegalTransition(f"{FrameState(before).name} does not allow {FrameEvent(event).name}")
        self.states[slot] = after
        self.counts[before] -= 1
        self.counts[after] += 1
        if not after:
            self._free.append(slot)
            self.owners[slot] = -1
        return after

    def load(self, states: bytes) -> None:
        """Set the states that were found; the table must be new."""
        assert len(states) == self.capacity == self.counts[FrameState.FREE]
        self.states[:] = states
        self.counts = [states.count(state) for state in FrameState]
        self._free = array("i", [slot for slot in range(self.capacity - 1, -1, -1) if not states[slot]])

    def check(self) -> None:
        """Invariant 1: the counts are the states' counts and add up to the capacity."""
        for state in FrameState:
            assert self.counts[state] == self.states.count(state) >= 0, state.name
        assert sum(self.counts) == self.capacity
        assert sorted(self._free) == [slot for slot, state in enumerate(self.states) if state == FrameState.FREE]


class Piece:
    """An extent or a slab. closing: it is being emptied, and its free slots are out of use."""

    def __init__(self, number: int, slot_class: SlotClass, capacity: int) -> None:
        assert 0 < capacity < 1 << SLOT_BITS
        self.number = number
        self.slot_class = slot_class
        self.frame_bytes = slot_class.frame_bytes
        self.slots = SlotTable(capacity)
        self.closing = False


P = TypeVar("P", bound=Piece)


class _Class(Generic[P]):
    """The pieces of one slot class, and which of them have free slots."""

    def __init__(self) -> None:
        self.pieces: dict[int, P] = {}
        self.with_free: dict[int, P] = {}
        self.free = 0
        self.quarantined = 0


class SlotLedger(Generic[P]):
    """All pieces of a tier. A place names a piece in its upper bits and a slot in its lower ones."""

    def __init__(self) -> None:
        self.pieces: dict[int, P] = {}
        self.held: Counter[bytes] = Counter()
        """How many pieces each tenant has."""
        self._classes: dict[SlotClass, _Class[P]] = {}
        self._class_of: dict[int, _Class[P]] = {}  # by piece: hashing a slot class costs more than a step

    # Pieces --------------------------------------------------------------------------------------------------------

    def add(self, piece: P) -> None:
        """A new piece, its slots in whatever states they are."""
        owner = self._classes.setdefault(piece.slot_class, _Class())
        self.pieces[piece.number] = piece
        self.held[piece.slot_class.tenant] += 1
        self._class_of[piece.number] = owner
        owner.pieces[piece.number] = piece
        owner.quarantined += piece.slots.counts[FrameState.QUARANTINED]
        self._use(piece)

    def remove(self, number: int) -> P:
        """Take out a piece without readable frames; returns it."""
        piece = self.pieces[number]
        counts = piece.slots.counts
        assert counts[FrameState.FREE] + counts[FrameState.QUARANTINED] == piece.slots.capacity
        del self.pieces[number]
        self.held[piece.slot_class.tenant] -= 1
        owner = self._class_of.pop(number)
        del owner.pieces[number]
        if owner.with_free.pop(number, None) is not None:
            owner.free -= piece.slots.free
        owner.quarantined -= counts[FrameState.QUARANTINED]
        if not owner.pieces:
            del self._classes[piece.slot_class]
        return piece

    def clear(self) -> None:
        self.pieces.clear()
        self.held.clear()
        self._classes.clear()
        self._class_of.clear()

    def start_closing(self, number: int) -> None:
        """Take a piece's free slots out of use."""
        piece = self.pieces[number]
        owner = self._class_of[piece.number]
        piece.closing = True
        if owner.with_free.pop(number, None) is not None:
            owner.free -= piece.slots.free

    def stop_closing(self, number: int) -> None:
        """Put them back into use."""
        piece = self.pieces[number]
        piece.closing = False
        self._use(piece)

    # Slots ---------------------------------------------------------------------------------------------------------

    def reserve(self, slot_class: SlotClass, count: int) -> list[int]:
        """Up to `count` places in pieces of that class that have free slots, now RESERVED."""
        owner = self._classes.get(slot_class)
        places: list[int] = []
        while owner is not None and owner.with_free and len(places) < count:
            piece = next(iter(owner.with_free.values()))
            take = min(count - len(places), piece.slots.free)
            first = piece.number << SLOT_BITS  # inlined, here and below: every frame comes through here
            places += [first | slot for slot in piece.slots.reserve(take)]
            owner.free -= take
            if not piece.slots.free:
                del owner.with_free[piece.number]
        return places

    def step(self, places: Iterable[int], *events: FrameEvent) -> None:
        """One or more steps in the life of each frame. Raises `IllegalTransition`."""
        pieces = self.pieces
        for place in places:
            piece = pieces[place >> SLOT_BITS]
            slot = place & SLOT_MASK
            for event in events:
                state = piece.slots.apply(slot, event)
            if state == FrameState.QUARANTINED:
                self._class_of[piece.number].quarantined += 1
            elif not state and not piece.closing:  # it is free
                owner = self._class_of[piece.number]
                owner.free += 1
                owner.with_free[piece.number] = piece

    def own(self, places: Iterable[int], rows: Iterable[int]) -> None:
        """Record which block's frame stands at each place."""
        pieces = self.pieces
        for place, row in zip(places, rows, strict=True):
            pieces[place >> SLOT_BITS].slots.owners[place & SLOT_MASK] = row

    def own_many(self, places: Column, rows: Column) -> None:
        """The same for columns, an extent at a time: a start has hundreds of thousands of places."""
        order = np.argsort(places, kind="stable")
        places, rows = places[order], rows[order]
        numbers, starts = np.unique(places >> SLOT_BITS, return_index=True)
        slots = places & SLOT_MASK
        for number, mine, own in zip(
            numbers.tolist(), np.split(slots, starts[1:]), np.split(rows, starts[1:]), strict=True
        ):
            np.frombuffer(self.pieces[number].slots.owners, "i")[mine] = own

    def state(self, place: int) -> int | None:
        """The `FrameState` of a slot as a number; None if there is no such slot."""
        piece = self.pieces.get(extent_of(place))
        if piece is None or slot_of(place) >= piece.slots.capacity:
            return None
        return piece.slots.states[slot_of(place)]

    # Facts for decisions -------------------------------------------------------------------------------------------

    def free_slots(self, slot_class: SlotClass) -> int:
        """Free slots of a class, without pieces that are being emptied."""
        owner = self._classes.get(slot_class)
        return owner.free if owner is not None else 0

    def reclaimable_classes(self, piece_bytes: int) -> Iterator[SlotClass]:
        """Classes that can spare a piece of that size."""
        for slot_class, owner in self._classes.items():
            if owner.free + owner.quarantined >= piece_bytes // slot_class.frame_bytes:
                yield slot_class

    def open_pieces(self, slot_class: SlotClass) -> list[P]:
        """The pieces of a class that are not being emptied already."""
        return [piece for piece in self.all_pieces(slot_class) if not piece.closing]

    def all_pieces(self, slot_class: SlotClass) -> Sequence[P]:
        """Every piece of a class."""
        owner = self._classes.get(slot_class)
        return [] if owner is None else list(owner.pieces.values())

    def rows_in(self, number: int) -> list[int] | None:
        """The rows of the frames in a piece; None if one is being written, or has no known owner."""
        slots = self.pieces[number].slots
        rows = [slots.owners[slot] for slot, state in enumerate(slots.states) if state == FrameState.RESIDENT]
        return rows if not slots.counts[FrameState.RESERVED] and min(rows, default=0) >= 0 else None

    def sums(self) -> list[int]:
        """Slots by state, over all pieces."""
        columns = zip(*[piece.slots.counts for piece in self.pieces.values()], strict=True)
        return [sum(column) for column in columns] or [0] * len(FrameState)

    def usage(self, taken_bytes: int, budget_bytes: int) -> Usage:
        """Slots by state, and the bytes that the tier has taken."""
        sums = self.sums()
        return Usage(
            free=sums[FrameState.FREE],
            reserved=sums[FrameState.RESERVED],
            used=sums[FrameState.RESIDENT],
            deleting=sums[FrameState.DELETING],
            quarantined=sums[FrameState.QUARANTINED],
            zombie=sums[FrameState.ZOMBIE],
            capacity=sum(sums),
            taken_bytes=taken_bytes,
            budget_bytes=budget_bytes,
        )

    def check(self) -> None:
        """Invariant 1 in every piece; the classes' counts are their pieces' counts."""
        for piece in self.pieces.values():
            piece.slots.check()
        for owner in self._classes.values():
            open_pieces = [piece for piece in owner.pieces.values() if not piece.closing]
            assert owner.free == sum(piece.slots.free for piece in open_pieces)
            assert set(owner.with_free) == {piece.number for piece in open_pieces if piece.slots.free}
            quarantined = sum(piece.slots.counts[FrameState.QUARANTINED] for piece in owner.pieces.values())
            assert owner.quarantined == quarantined
        assert sum(len(owner.pieces) for owner in self._classes.values()) == len(self.pieces)
        held = Counter(piece.slot_class.tenant for piece in self.pieces.values())
        assert held == Counter({tenant: pieces for tenant, pieces in self.held.items() if pieces})

    def _use(self, piece: P) -> None:
        if piece.slots.free and not piece.closing:
            owner = self._class_of[piece.number]
            owner.with_free[piece.number] = piece
            owner.free += piece.slots.free
