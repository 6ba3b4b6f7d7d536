"""Which blocks NVMe has, and in which order those that DRAM alone holds are written to it.

    stored > waits > used: last in the order > its turn > written: NVMe has it
                                                        > declined: stays, and waits again once it is used
           > a client asked to retain it: before all others, from then on until its turn

What `BlockTable` has of a tier below DRAM. No lock, clock or leases: callers hold the store's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tiering.move_queue import Move, MoveQueue
from tiering.policies.admission import Admission
from tiering.residency import Residency
from tiering.tier import LowerTier


class DirtyBlocks:
    """Blocks that DRAM alone holds: rows, each with its bytes. Pure.

    One that NVMe has too, or that left DRAM, is not here.
    """

    def __init__(self) -> None:
        self._prioritized: OrderedDict[int, int] = OrderedDict()
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._declined: dict[int, int] = {}
        self.waiting_bytes = 0
        self.missed = 0
        """Dirty blocks that left DRAM before their turn; the flusher resets it when it looks at the rest."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._prioritized) + len(self._waiting)

    def __contains__(self, row: int) -> bool:
        return self.waits(row) or row in self._declined

    def came(self, row: int, size_bytes: int) -> None:
        """DRAM alone has the block: it is looked at after all others."""
        self.discard(row)
        self._waiting[row] = size_bytes
        self.waiting_bytes += size_bytes

    def discard(self, row: int) -> None:
        """NVMe has it too, or DRAM has it no more. Idempotent."""
        if self.waits(row):
            self.waiting_bytes -= self._pop(row)
        else:
            self._declined.pop(row, None)

    def prioritize(self, row: int) -> None:
        """Move a block to the front of the order, even if it was declined."""
        if row in self._declined:
            self.came(row, self._declined[row])
        if row in self._waiting:
            self._prioritized[row] = self._waiting.pop(row)

    def requeue(self, row: int) -> None:
        """Move a waiting block to the end of the order."""
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
        return [row for row, _ in zip(self._prioritized, range(count), strict=False)]

    def oldest(self, count: int) -> list[int]:
        return [row for row, _ in zip(self._waiting, range(count), strict=False)]

    def decline(self, row: int) -> None:
        """The admission policy declines a waiting block."""
        size_bytes = self._pop(row)
        self.waiting_bytes -= size_bytes
        self._declined[row] = size_bytes

    def was_declined(self, row: int) -> bool:
        return row in self._declined

    def declined(self) -> dict[int, int]:
        """Declined blocks, with the bytes of each."""
        return dict(self._declined)

    def check(self, rows: Sequence[int]) -> None:
        """Verify that only these rows, which DRAM alone has, are here, and that bytes are the sum of those that wait. A
        block that NVMe gave up again is not here."""
        all_here = [*self._prioritized, *self._waiting, *self._declined]
        assert len(set(all_here)) == len(all_here)
        assert set(all_here) <= set(rows)
        assert self.waiting_bytes == sum(self._prioritized.values()) + sum(self._waiting.values())

    def _pop(self, row: int) -> int:
        return (self._waiting if row in self._waiting else self._prioritized).pop(row)


TierBelow = TypeVar("TierBelow", bound=LowerTier, covariant=True)


@dataclass
class Lower(Generic[TierBelow]):
    """NVMe: its tier, the blocks in it, and the policy that admits blocks to it. queue: runs the moves between it and
    DRAM; None where there are none, as in a replay.

    gone: called with namespace number and prefix key of each block that NVMe gives up, before its frames go; it runs
    under the lock and must not call the store. Blocks whose frames failed a check are not reported.
    """

    tier: TierBelow
    residency: Residency
    admission: Admission
    queue: MoveQueue | None = None
    gone: Callable[[int, bytes], None] | None = None


@dataclass(slots=True)
class Promotion:
    """A block being promoted. waiting: leases that wait for it. settled: its slots are in use or were freed."""

    number: int
    row: int
    move: Move | None = None
    waiting: int = 1
    settled: bool = False
