"""Blocks that somebody asked to be kept, for a time and within a budget.

    ttl          kept until then
    priority     from 1 to 100: kept for as many times nine seconds since it was used last, so that it decays

It is a wish, not a lock. What is kept never takes more than a part of the tier: where more is wanted, those whose time
ends first go back among all others. Where nothing else may go, what is kept goes, too. A kept block keeps its
ancestors, which count as much: their time ends no earlier. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

SECONDS_PER_PRIORITY = 9.0
"""With the highest, a quarter of an hour: after that, hardly a conversation goes on."""
_SPARE_ENTRIES = 1024


class RetentionHints(Protocol):
    """What is known of blocks, by row."""

    @property
    def is_any(self) -> bool:
        """Whether anything was ever said of any block: until then nothing else is asked."""
        ...

    def hint(self, row: int) -> tuple[int, int]:
        """Its priority, and until when it is to be kept: in seconds of the clock, or 0 where nobody said."""
        ...

    def hinted(self, rows: range) -> Sequence[int]:
        """Those of these rows of which anything was said."""
        ...

    def parent(self, row: int) -> int:
        """Its parent's row, or a negative number."""
        ...

    def depth(self, row: int) -> int:
        """Blocks before it."""
        ...

    def size_bytes(self, row: int) -> int:
        """What it takes in the tier."""
        ...

    def group(self, row: int) -> int:
        """The group of tenants that it belongs to; one for all of a chain."""
        ...


class Retention:
    """What is kept in one tier, by row."""

    def __init__(
        self,
        hints: RetentionHints,
        is_here: Callable[[int], bool],
        seconds: Callable[[], float],
        budgets: Sequence[int],
    ) -> None:
        """is_here: whether a block is in this tier. seconds: the time. budgets: bytes that may be kept, by group."""
        self.hints = hints
        self._is_here = is_here
        self._seconds = seconds
        self._budgets = budgets
        self._was_asked = False
        self._until: dict[int, float] = {}
        self._kept_bytes = [0] * len(budgets)
        self._ends: list[list[tuple[float, int, int]]] = [[] for _ in budgets]  # heaps of until, minus depth, row

    def __len__(self) -> int:
        """How many blocks are kept, or were until their time ended."""
        return len(self._until)

    # What happens --------------------------------------------------------------------------------------------------

    def came(self, row: int) -> None:
        """A block is here from now on, or other things are wished of it; its ancestors came before."""
        priority, ends_at = self.hints.hint(row)
        if priority > 0 or ends_at:
            self._was_asked = True
            self._keep(row, max(ends_at, self._decayed_at(priority)))

    def loaded(self, rows: range) -> None:
        """Blocks from before a restart are here: as if they had been used now."""
        for row in self.hints.hinted(rows):
            self.came(row)

    def used(self, chain: Iterable[int]) -> None:
        """Blocks of one chain, the deepest first: those whose priority decays begin anew."""
        if not self._was_asked:
            return
        for row in chain:
            priority, _ = self.hints.hint(row)
            if priority > 0 and self._is_here(row):
                self._keep(row, self._decayed_at(priority))

    def left(self, row: int) -> None:
        """A block is not here any more."""
        if self._until.pop(row, None) is not None:
            self._kept_bytes[self.hints.group(row)] -= self.hints.size_bytes(row)

    # What is known -------------------------------------------------------------------------------------------------

    def holds(self, row: int) -> bool:
        """Whether a row is kept now."""
        until = self._until.get(row)
        if until is None:
            return False
        if until <= self._seconds():
            self.left(row)
            return False
        return True

    def has_room_for(self, row: int) -> bool:
        """Whether a row that is not here would be kept until its time ends if it came, and none went back for it. Of
        one that has a priority alone it is not known here when it was used."""
        _, ends_at = self.hints.hint(row)
        now = self._seconds()
        if ends_at <= now:
            return False
        group = self.hints.group(row)
        ends = self._ends[group]
        while ends and ends[0][0] <= now:
            ended, _, worst = heappop(ends)
            if self._until.get(worst) == ended:
                self.left(worst)
        return self._kept_bytes[group] + self.hints.size_bytes(row) <= self._budgets[group]

    def way(self, row: int) -> list[int]:
        """A row and its ancestors that are here, the deepest first."""
        rows = []
        while row >= 0:
            if self._is_here(row):
                rows.append(row)
            row = self.hints.parent(row)
        return rows

    def until(self, row: int) -> float:
        """When its time ends; 0 for one that is not kept."""
        return self._until.get(row, 0.0)

    def kept_bytes(self) -> list[int]:
        """What is kept of each group, or was until its time ended."""
        return list(self._kept_bytes)

    def budgets(self) -> list[int]:
        """Bytes that may be kept of each group."""
        return list(self._budgets)

    def resize(self, budgets: Sequence[int]) -> None:
        """Other budgets of the same groups. What one cannot hold is kept no longer, what ends first first."""
        assert len(budgets) == len(self._budgets)
        self._budgets = budgets
        for group in range(len(budgets)):
            self._shrink(group)

    def check(self) -> None:
        """Invariants: what is kept is here, is counted, and is within the budget of each group."""
        sums = [0] * len(self._budgets)
        for row in self._until:
            assert self._is_here(row), "what is kept is here"
            sums[self.hints.group(row)] += self.hints.size_bytes(row)
        assert sums == self._kept_bytes
        assert all(kept <= budget for kept, budget in zip(sums, self._budgets, strict=True)), (sums, self._budgets)

    # Inside --------------------------------------------------------------------------------------------------------

    def _decayed_at(self, priority: int) -> float:
        """In whole seconds: else each block of a chain would be kept a little longer than the one before, and its
        ancestors walked anew for it."""
        return int(self._seconds()) + SECONDS_PER_PRIORITY * max(0, priority)

    def _keep(self, row: int, until: float) -> None:
        """With its ancestors. If there is more than may be kept, those go back whose time ends first, of these the
        deepest first: a kept block's ancestors are always kept with it."""
        if until <= self._seconds():
            return
        wishes, group = self.hints, self.hints.group(row)
        ends = self._ends[group]
        while row >= 0 and self._until.get(row, 0.0) < until and self._is_here(row):
            if row not in self._until:
                self._kept_bytes[group] += wishes.size_bytes(row)
            self._until[row] = until
            heappush(ends, (until, -wishes.depth(row), row))
            row = wishes.parent(row)
        self._shrink(group)
        if len(ends) > 2 * len(self._until) + _SPARE_ENTRIES:
            ends[:] = {entry for entry in ends if self._until.get(entry[2]) == entry[0]}
            heapify(ends)

    def _shrink(self, group: int) -> None:
        while self._kept_bytes[group] > self._budgets[group]:
            ended, _, worst = heappop(self._ends[group])
            if self._until.get(worst) == ended:
                self.left(worst)
