"""Blocks that DRAM alone holds: in which order they are looked at, and which of them are not to be written.

    stored > waits > used: last in the order > its turn > written: goes from here
                                                        > declined: stays, and waits again once it is used
           > somebody asked to keep it: before all these, from then on until its turn

Kept by `Blocks`; pure. What NVMe has as well, or DRAM has no more, is not here.
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
        """How many left DRAM before it was their turn; whoever looks at the others begins anew."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._prioritized) + len(self._waiting)

    def __contains__(self, row: int) -> bool:
        return self.waits(row) or row in self._declined

    def came(self, row: int, size_bytes: int) -> None:
        """It is in DRAM alone, and is looked at after all others."""
        self.discard(row)
        self._waiting[row] = size_bytes
        self.waiting_bytes += size_bytes

    def discard(self, row: int) -> None:
        """It is on NVMe too, or in DRAM no more. Safe to call again."""
        if self.waits(row):
            self.waiting_bytes -= self._pop(row)
        else:
            self._declined.pop(row, None)

    def prioritize(self, row: int) -> None:
        """If it is here, it is looked at before all others, also if it was declined."""
        if row in self._declined:
            self.came(row, self._declined[row])
        if row in self._waiting:
            self._prioritized[row] = self._waiting.pop(row)

    def requeue(self, row: int) -> None:
        """One that waits is looked at after all others."""
        self._waiting[row] = self._pop(row)

    def used(self, rows: Iterable[int]) -> None:
        """These go to the end of the order, one after the other, but for those that are preferred; those that were
        declined wait again."""
        waiting, declined = self._waiting, self._declined
        for row in rows:
            if row in waiting:
                waiting.move_to_end(row)
            elif row in declined:
                self.came(row, declined[row])

    def waits(self, row: int) -> bool:
        """Whether it is to be looked at."""
        return row in self._waiting or row in self._prioritized

    @property
    def is_any_prioritized(self) -> bool:
        """Whether some come before all others."""
        return bool(self._prioritized)

    def prioritized(self, count: int) -> list[int]:
        """Up to so many of those that come before all others, in their order."""
        return [row for row, _ in zip(self._prioritized, range(count), strict=False)]

    def oldest(self, count: int) -> list[int]:
        """Up to so many of the others that wait, in their order."""
        return [row for row, _ in zip(self._waiting, range(count), strict=False)]

    def decline(self, row: int) -> None:
        """One that waits is not to be written."""
        size_bytes = self._pop(row)
        self.waiting_bytes -= size_bytes
        self._declined[row] = size_bytes

    def was_declined(self, row: int) -> bool:
        """Whether it is not to be written."""
        return row in self._declined

    def declined(self) -> dict[int, int]:
        """Those that are not to be written, with the bytes of each."""
        return dict(self._declined)

    def check(self, rows: Sequence[int]) -> None:
        """Invariant: none but these, which DRAM alone has, are here; bytes are the sum of those that wait. What NVMe
        has given up meanwhile is not written again, and not here."""
        all_here = [*self._prioritized, *self._waiting, *self._declined]
        assert len(set(all_here)) == len(all_here)
        assert set(all_here) <= set(rows)
        assert self.waiting_bytes == sum(self._prioritized.values()) + sum(self._waiting.values())

    def _pop(self, row: int) -> int:
        return (self._waiting if row in self._waiting else self._prioritized).pop(row)
