"""Dirty blocks: those that DRAM alone holds, in the order in which the flusher looks at them.

    stored > waits > used: last in the order > its turn > written: leaves this table
                                                        > declined: stays, and waits again once it is used
           > a client asked to retain it: before all others, from then on until its turn

Kept by `BlockTable`; pure. A block that NVMe has too, or that left DRAM, is not here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class DirtyBlocks:
    """Rows, each with its bytes."""

    def __init__(self) -> None:
        self._prioritized: OrderedDict[int, int] = OrderedDict()
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._declined: dict[int, int] = {}
        self.waiting_bytes = 0
        self.missed = 0
        """How many left DRAM before their turn; the flusher resets this when it looks at the rest."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._prioritized) + len(self._waiting)

    def __contains__(self, row: int) -> bool:
        return self.waits(row) or row in self._declined

    def came(self, row: int, size_bytes: int) -> None:
        """A block is in DRAM alone; it is looked at after all others."""
        self.discard(row)
        self._waiting[row] = size_bytes
        self.waiting_bytes += size_bytes

    def discard(self, row: int) -> None:
        """NVMe has it too, or DRAM has it no more. Safe to call again."""
        if self.waits(row):
            self.waiting_bytes -= self._pop(row)
        else:
            self._declined.pop(row, None)

    def prioritize(self, row: int) -> None:
        """A block that is here is looked at before all others, even if it was declined."""
        if row in self._declined:
            self.came(row, self._declined[row])
        if row in self._waiting:
            self._prioritized[row] = self._waiting.pop(row)

    def requeue(self, row: int) -> None:
        """A waiting block is looked at after all others."""
        self._waiting[row] = self._pop(row)

    def used(self, rows: Iterable[int]) -> None:
        """Move these to the end of the order, in turn, except prioritized ones; declined ones wait again."""
        waiting, declined = self._waiting, self._declined
        for row in rows:
            if row in waiting:
                waiting.move_to_end(row)
            elif row in declined:
                self.came(row, declined[row])

    def waits(self, row: int) -> bool:
        """Whether the flusher has yet to look at it."""
        return row in self._waiting or row in self._prioritized

    @property
    def is_any_prioritized(self) -> bool:
        return bool(self._prioritized)

    def prioritized(self, count: int) -> list[int]:
        """Up to so many of the prioritized blocks, in order."""
        return [row for row, _ in zip(self._prioritized, range(count), strict=False)]

    def oldest(self, count: int) -> list[int]:
        """Up to so many of the other waiting blocks, in order."""
        return [row for row, _ in zip(self._waiting, range(count), strict=False)]

    def decline(self, row: int) -> None:
        """A waiting block is not to be written."""
        size_bytes = self._pop(row)
        self.waiting_bytes -= size_bytes
        self._declined[row] = size_bytes

    def was_declined(self, row: int) -> bool:
        return row in self._declined

    def declined(self) -> dict[int, int]:
        """Blocks that are not to be written, with the bytes of each."""
        return dict(self._declined)

    def check(self, rows: Sequence[int]) -> None:
        """Invariant: only these rows, which DRAM alone has, are here; bytes are the sum of those that wait. What NVMe
        has given up meanwhile is not written again, and not here."""
        all_here = [*self._prioritized, *self._waiting, *self._declined]
        assert len(set(all_here)) == len(all_here)
        assert set(all_here) <= set(rows)
        assert self.waiting_bytes == sum(self._prioritized.values()) + sum(self._waiting.values())

    def _pop(self, row: int) -> int:
        return (self._waiting if row in self._waiting else self._prioritized).pop(row)
