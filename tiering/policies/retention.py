"""Retained blocks: those that a client asked to keep, for a time and within a budget.

    ttl          kept until then
    priority     from 1 to 100: kept for as many times nine seconds since it was used last, so that it decays

It is a wish, not a lock. Retained blocks never take more than a part of the tier: beyond that, those that expire first
lose their retention. If nothing else can be evicted, retained blocks are. A retained block retains its ancestors, which
count too: they expire no earlier. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

SECONDS_PER_PRIORITY = 9.0
"""The highest priority lasts a quarter of an hour: few conversations go on after that."""
_SPARE_ENTRIES = 1024


class RetentionHints(Protocol):
    """Clients' requests for retention, by row."""

    has_hints: bool
    """Whether any block ever had a hint: until then nothing else is asked."""

    def hint(self, row: int) -> tuple[int, int]:
        """Its priority, and when its ttl ends: in seconds of the clock, or 0 without one."""
        ...

    def hinted(self, rows: range) -> Sequence[int]:
        """Those of these rows that have a hint."""
        ...

    def parent(self, row: int) -> int:
        """Its parent's row, or a negative number."""
        ...

    def depth(self, row: int) -> int:
        """Blocks before it."""
        ...

    def size_bytes(self, row: int) -> int:
        """Its size in the tier."""
        ...

    def group(self, row: int) -> int:
        """Its group of tenants; one for all of a chain."""
        ...


class Retention:
    """The retained blocks of one tier, by row."""

    def __init__(
        self,
        hints: RetentionHints,
        is_here: Callable[[int], bool],
        seconds: Callable[[], float],
        budgets: Sequence[int],
    ) -> None:
        """is_here: whether a block is in this tier. seconds: the time. budgets: bytes that may be retained, by
        group."""
        self.hints = hints
        self._is_here = is_here
        self._seconds = seconds
        self._budgets = budgets
        self._was_asked = False
        self._until: dict[int, float] = {}
        self._kept_bytes = [0] * len(budgets)
        self._ends: list[list[tuple[float, int, int]]] = [[] for _ in budgets]  # heaps of until, minus depth, row

    def __len__(self) -> int:
        """Retained blocks, including expired ones that were not looked at yet."""
        return len(self._until)

    # What happens --------------------------------------------------------------------------------------------------

    def came(self, row: int) -> None:
        """A block is here from now on, or its hint has changed; its ancestors came before."""
        priority, ends_at = self.hints.hint(row)
        if priority > 0 or ends_at:
            self._was_asked = True
            self._keep(row, max(ends_at, self._decayed_at(priority)))

    def loaded(self, rows: range) -> None:
        """Blocks from before a restart are here: as if they had been used now."""
        for row in self.hints.hinted(rows):
            self.came(row)

    def used(self, chain: Iterable[int]) -> None:
        """A chain was used, deepest block first: decaying priorities begin anew."""
        if not self._was_asked:
            return
        for row in chain:
            priority, _ = self.hints.hint(row)
            if priority > 0 and self._is_here(row):
                self._keep(row, self._decayed_at(priority))

    def left(self, row: int) -> None:
        if self._until.pop(row, None) is not None:
            self._kept_bytes[self.hints.group(row)] -= self.hints.size_bytes(row)

    # What is known -------------------------------------------------------------------------------------------------

    def holds(self, row: int) -> bool:
        """Whether a row is retained now."""
        until = self._until.get(row)
        if until is None:
            return False
        if until <= self._seconds():
            self.left(row)
            return False
        return True

    def has_room_for(self, row: int) -> bool:
        """Whether a row that is not here would be retained until it expires if it came, without displacing another. For
        one with a priority alone, its last use is not known here."""
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
        """When it expires; 0 for one that is not retained."""
        return self._until.get(row, 0.0)

    def kept_bytes(self) -> list[int]:
        """Retained bytes of each group, including expired blocks that were not looked at yet."""
        return list(self._kept_bytes)

    def budgets(self) -> list[int]:
        """Bytes that each group may have retained."""
        return list(self._budgets)

    def resize(self, budgets: Sequence[int]) -> None:
        """Change the groups' budgets. Blocks beyond a smaller one lose their retention, the earliest to expire
        first."""
        assert len(budgets) == len(self._budgets)
        self._budgets = budgets
        for group in range(len(budgets)):
            self._shrink(group)

    def check(self) -> None:
        """Invariants: retained blocks are here, are counted, and are within the budget of each group."""
        sums = [0] * len(self._budgets)
        for row in self._until:
            assert self._is_here(row), "what is kept is here"
            sums[self.hints.group(row)] += self.hints.size_bytes(row)
        assert sums == self._kept_bytes
        assert all(kept <= budget for kept, budget in zip(sums, self._budgets, strict=True)), (sums, self._budgets)

    # Inside --------------------------------------------------------------------------------------------------------

    def _decayed_at(self, priority: int) -> float:
        """In whole seconds: else each block of a chain would expire a little later than the one before, and its
        ancestors be walked anew for it."""
        return int(self._seconds()) + SECONDS_PER_PRIORITY * max(0, priority)

    def _keep(self, row: int, until: float) -> None:
        """Retain a row with its ancestors. Beyond the budget, those that expire first lose their retention, of these
        the deepest first: a retained block's ancestors are always retained with it."""
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
