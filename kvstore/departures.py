"""What would go if somebody made room for another one, before anything does (floor 2).

    DRAM   leaves, worst first > what would go with each > as many blocks of one namespace as an extent takes
    NVMe   the same > a slab that would be empty by then > its blocks, and what follows them

Frames move in DRAM, so whichever blocks go, there is an extent less. On NVMe they stay where they are, and blocks that
were used at the same time stand in many slabs: whoever gave up one leaf after the other until any slab is empty would
lose most of what it has. Pure: nothing is changed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvstore.prefix_index import NO_ROW, PrefixIndex
from tiering.residency import Residency
from tiering.tier import LowerTier, extent_of

MOST_LOOKED_AT = 4096
"""Blocks that would go, before it is chosen by what is known so far."""
MOST_LEAVES = 1 << 16
"""Leaves that are looked at, of those who have nothing to give, too."""
MOST_TRIED = 16
"""Slabs, where what follows their blocks is in use."""


class Departures:
    """Blocks of a tier, one leaf after the other."""

    def __init__(self, index: PrefixIndex, residency: Residency) -> None:
        self._index = index
        self._residency = residency
        self._left: dict[int, int] = {}  # children that a block would have left
        self.blocks = 0
        """How many would have gone so far."""

    def with_leaf(self, leaf: int) -> Iterator[int]:
        """This one would go next: it, and the ancestors that would lead to nothing else."""
        index, residency = self._index, self._residency
        row = leaf
        while True:
            self.blocks += 1
            yield row
            parent = index.parent(row)
            if parent == NO_ROW:
                return
            left = self._left[parent] = self._left.get(parent, residency.children(parent)) - 1
            if left or is_in_use(residency, parent):
                return
            row = parent


def is_in_use(residency: Residency, row: int) -> bool:
    """Whether somebody needs the block here, or it is not readable here yet."""
    return not residency.is_listed(row) or bool(residency.pins.counts[row]) or row in residency.kept


class SlabChoice:
    """For one who asks, once."""

    def __init__(self, asker: int, index: PrefixIndex, residency: Residency, tier: LowerTier) -> None:
        """asker: its namespace. residency, tier: of NVMe."""
        self.asker = asker
        self._index = index
        self._residency = residency
        self._tier = tier
        self._departures = Departures(index, residency)
        self._going: Counter[int] = Counter()  # by slab, frames that would go
        self._rows: dict[int, list[int] | None] = {}  # by slab, whose frames it has

    def look_at(self, leaf: int) -> bool:
        """This leaf would go next. Whether that is enough to choose by."""
        for row in self._departures.with_leaf(leaf):
            for place in self._residency.all_places(row):
                slab = extent_of(place)
                if slab not in self._rows:
                    self._rows[slab] = self._tier.rows_in(slab)
                self._going[slab] += 1
                if self._remains(slab) == 0 and not self._is_any_wanted(self._rows[slab] or ()):
                    return True
        return self._departures.blocks >= MOST_LOOKED_AT

    def blocks(self) -> list[int]:
        """Those that have to go for one slab, the deepest of each chain first; empty where nobody can do without one.
        What is kept for a time goes only where nothing else is left."""
        spared: list[int] = []
        for lost in self._families():
            if not self._is_any_wanted(lost):
                return lost
            spared = spared or lost
        return spared

    def _families(self) -> Iterator[list[int]]:
        free = {slab: rows for slab, rows in self._rows.items() if rows is not None and not self._is_any_in_use(rows)}
        for slab in sorted(free, key=lambda slab: (self._remains(slab), slab))[:MOST_TRIED]:
            family = self._index.families(free[slab])
            if not any(self._residency.pins.counts[row] for row in family):
                lost = [row for row in family if self._residency.all_places(row)]
                if not self._is_any_in_use(lost):
                    yield lost

    def _is_any_wanted(self, rows: Iterable[int]) -> bool:
        retention = self._residency.retention
        return retention is not None and any(retention.holds(row) for row in rows)

    def _is_any_in_use(self, rows: Iterable[int]) -> bool:
        return any(is_in_use(self._residency, row) for row in rows)

    def _remains(self, slab: int) -> int | None:
        rows = self._rows[slab]
        return None if rows is None else len(rows) - self._going[slab]
