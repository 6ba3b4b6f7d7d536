"""A tier of slots without bytes: for tables that are filled, and looked at, without a frame.

What a replay of recorded requests has below DRAM. It decides nothing and takes no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiering.slots import FrameEvent, Piece, SlotLedger
from tiering.tier import Column, SlotClass


class CountingTier:
    """`LowerTier`, of one slot class."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._ledger: SlotLedger[Piece] = SlotLedger()

    def open(self, slot_class: SlotClass) -> None:
        """All of it, once."""
        self._ledger.add(Piece(0, slot_class, self.budget_bytes // slot_class.frame_bytes))

    def reserve(self, slot_class: SlotClass, count: int) -> list[int]:
        """Up to `count` places."""
        return self._ledger.reserve(slot_class, count)

    def commit(self, places: Sequence[int]) -> None:
        """Frames are there."""
        self._ledger.step(places, FrameEvent.COMMIT)

    def abort(self, places: Sequence[int]) -> None:
        """Give reserved places back."""
        self._ledger.step(places, FrameEvent.ABORT)

    def delete(self, places: Sequence[int], *, claim: bool = False) -> None:
        """Free at once."""
        self._ledger.step(places, FrameEvent.EVICT, FrameEvent.DELETED)

    def quarantine(self, places: Sequence[int]) -> None:
        """Not used again."""
        self._ledger.step(places, FrameEvent.CONDEMN)

    def own(self, places: Iterable[int], rows: Iterable[int]) -> None:
        """Whose frame stands where."""
        self._ledger.own(places, rows)

    def own_many(self, places: Column, rows: Column) -> None:
        """The same for columns."""
        self._ledger.own_many(places, rows)

    def free_slots(self, slot_class: SlotClass) -> int:
        """Free slots."""
        return self._ledger.free_slots(slot_class)

    def held(self) -> dict[bytes, int]:
        """One piece, of one tenant."""
        return self._ledger.held

    @property
    def piece_bytes(self) -> int:
        """All of it."""
        return self.budget_bytes

    def pieces(self) -> int:
        """There is one."""
        return 1

    def frames_of(self, slot_class: SlotClass) -> int:
        """Frames that are there."""
        return sum(piece.slots.live for piece in self._ledger.all_pieces(slot_class))

    def rows_in(self, piece: int) -> list[int] | None:
        """Of all of it."""
        return self._ledger.rows_in(piece)

    def check(self) -> None:
        """Invariant 1."""
        self._ledger.check()
