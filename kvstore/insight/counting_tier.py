"""A lower tier that keeps no bytes: it counts slots as a real tier would, so that a replay can run without payload.

It decides nothing and takes no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiering.slots import FrameEvent, Piece, SlotLedger
from tiering.tier import Column, SlotClass


class CountingTier:
    """A `LowerTier` with a single slot class."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._ledger: SlotLedger[Piece] = SlotLedger()

    def open(self, slot_class: SlotClass) -> None:
        """Give the whole budget to one slot class. Call it once."""
        self._ledger.add(Piece(0, slot_class, self.budget_bytes // slot_class.frame_bytes))

    def reserve(self, slot_class: SlotClass, count: int) -> list[int]:
        return self._ledger.reserve(slot_class, count)

    def commit(self, places: Sequence[int]) -> None:
        self._ledger.step(places, FrameEvent.COMMIT)

    def abort(self, places: Sequence[int]) -> None:
        self._ledger.step(places, FrameEvent.ABORT)

    def delete(self, places: Sequence[int], *, claim: bool = False) -> None:
        self._ledger.step(places, FrameEvent.EVICT, FrameEvent.DELETED)

    def quarantine(self, places: Sequence[int]) -> None:
        self._ledger.step(places, FrameEvent.CONDEMN)

    def own(self, places: Iterable[int], rows: Iterable[int]) -> None:
        self._ledger.own(places, rows)

    def own_many(self, places: Column, rows: Column) -> None:
        self._ledger.own_many(places, rows)

    def free_slots(self, slot_class: SlotClass) -> int:
        return self._ledger.free_slots(slot_class)

    def held(self) -> dict[bytes, int]:
        return self._ledger.held

    @property
    def piece_bytes(self) -> int:
        """The whole budget: it is a single piece."""
        return self.budget_bytes

    def pieces(self) -> int:
        return 1

    def frames_of(self, slot_class: SlotClass) -> int:
        return sum(piece.slots.live for piece in self._ledger.all_pieces(slot_class))

    def rows_in(self, piece: int) -> list[int] | None:
        return self._ledger.rows_in(piece)

    def check(self) -> None:
        """Verify invariant 1: slots of all states add up to the capacity."""
        self._ledger.check()
