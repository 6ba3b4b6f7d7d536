"""What would go if somebody made room for another one, before anything does (floor 2).

    DRAM   leaves, worst first > what would go with each > as many blocks of one namespace as an extent takes
    NVMe   the same > a slab that would be empty by then > its blocks, and what follows them

Frames move in DRAM, so whichever blocks go, there is an extent less. On NVMe they stay where they are, and blocks that
were used at the same time stand in many slabs: whoever gave up one leaf after the other until any slab is empty would
lose most of what it has. Pure: nothing is changed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kvstore.prefix_index import NO_ROW, PrefixIndex
from tiering.residency import Residency
from tiering.tier import LowerTier, extent_of

MOST_LOOKED_AT = 4096
"""Blocks that would go, before it is chosen by what is known so far."""
MOST_IN_VAIN = 4 * MOST_LOOKED_AT
"""The same, where nothing is known that could be chosen."""
MOST_LEAVES = 1 << 14
"""Leaves that are looked at, of those who have nothing to give, too."""


class Departures:
    """Blocks of a tier, one leaf after the other."""

    def __init__(self, index: PrefixIndex, residency: Residency, is_elsewhere: Callable[[int], bool]) -> None:
        """is_elsewhere: whether another tier has a block, too, so that it stays readable."""
        self._index = index
        self._residency = residency
        self._is_elsewhere = is_elsewhere
        self._left: dict[int, int] = {}  # children that a block would have left
        self.blocks = 0
        """How many would have gone so far."""

    def with_leaf(self, leaf: int) -> Iterator[int]:
        """This one would go next: it, and the ancestors that would lead to nothing else."""
        index, residency = self._index, self._residency
        row = leaf
        while not self.stays(row):
            self.blocks += 1
            yield row
            row = index.parent(row)
            if row == NO_ROW:
                return
            self._left[row] = self._left.get(row, residency.children(row)) - 1
            if self._left[row]:
                return

    def stays(self, row: int) -> bool:
        """Whether somebody is using a block here; or nothing but this tier has it, and it is the way to others that are
        not here."""
        index, residency = self._index, self._residency
        if residency.is_in_use(row):
            return True
        return index.children(row) > residency.children(row) and not self._is_elsewhere(row)

    def leading_to_what_stays(self) -> set[int]:
        """Blocks that stay, and all that they follow."""
        index, residency = self._index, self._residency
        staying = residency.all_in_use()
        ways_on = index.with_more_children(residency.child_counts)
        staying += [row for row in ways_on if residency.all_places(row) and self.stays(row)]
        ways: set[int] = set()
        for row in staying:
            while row != NO_ROW and row not in ways:
                ways.add(row)
                row = index.parent(row)
        return ways


class Extents(Protocol):
    """What is asked of whoever has the tables: `Blocks`."""

    index: PrefixIndex
    residency: Residency

    def is_below(self, row: int) -> bool:
        """Whether NVMe has the block."""
        ...

    def about_wanted_of(self, number: int) -> int:
        """About as many as `wanted_of` says; cheap."""
        ...

    def wanted_of(self, number: int) -> int | None:
        """Blocks that have to go until a namespace can do without an extent; None where it cannot."""
        ...


class ExtentChoice:
    """Which namespace gives an extent in DRAM, once: an extent that nobody is using, where there is one."""

    def __init__(self, extents: Extents) -> None:
        self._extents = extents
        self._departures = Departures(extents.index, extents.residency, extents.is_below)
        self._found: Counter[int] = Counter()  # by namespace, blocks that would go
        self._wanted: dict[int, int | None] = {}  # and how many have to; about, or as it is
        self._is_exact: set[int] = set()
        self._giver: int | None = None

    @property
    def blocks(self) -> int:
        """Blocks that would have gone so far."""
        return self._departures.blocks

    def look_at(self, leaf: int) -> bool:
        """This leaf would go next. Whether its namespace has an extent to give with what was looked at of it."""
        number = self._extents.index.namespace_of(leaf)
        if number not in self._wanted:
            self._wanted[number] = self._extents.about_wanted_of(number)
        if self._wanted[number] is None:
            return False
        self._found[number] += len(list(self._departures.with_leaf(leaf)))
        if self._has_enough(number):
            self._be_exact(number)
            if self._has_enough(number):
                self._giver = number
        return self._giver is not None

    def best(self) -> tuple[int, int] | None:
        """Who gives, and how many blocks of it go: of whom least is lacking where nobody has enough, and last of those
        whose extents are all in use, since nothing is refused while something may go. None where nothing may."""
        if self._giver is not None:
            return self._giver, self._wanted[self._giver] or 0
        lacking = []
        for number, found in self._found.items():
            self._be_exact(number)
            wanted = self._wanted[number]
            lacking.append((wanted is None, 0 if wanted is None else wanted - found, number))
        if not any(self._found.values()):
            return None
        _, _, number = min(one for one in lacking if self._found[one[2]])
        return number, min(self._found[number], self._wanted[number] or self._found[number])

    def _has_enough(self, number: int) -> bool:
        wanted = self._wanted[number]
        return wanted is not None and self._found[number] >= wanted

    def _be_exact(self, number: int) -> None:
        if number not in self._is_exact:
            self._is_exact.add(number)
            self._wanted[number] = self._extents.wanted_of(number)


class SlabChoice:
    """For one who asks, once."""

    def __init__(
        self, asker: int, index: PrefixIndex, residency: Residency, tier: LowerTier, is_above: Callable[[int], bool]
    ) -> None:
        """asker: its namespace. residency, tier: of NVMe. is_above: whether DRAM has a block."""
        self.asker = asker
        self._index = index
        self._residency = residency
        self._tier = tier
        self._departures = Departures(index, residency, is_above)
        self._going: Counter[int] = Counter()  # by slab, frames that would go
        self._rows: dict[int, list[int]] = {}  # by slab that may go, whose frames it has

    def look_at(self, leaf: int) -> bool:
        """This leaf would go next. Whether that is enough to choose by."""
        for row in self._departures.with_leaf(leaf):
            for place in self._residency.all_places(row):
                slab = extent_of(place)
                if slab not in self._going:
                    rows = self._tier.rows_in(slab)
                    if rows is not None and not any(self._departures.stays(one) for one in rows):
                        self._rows[slab] = rows
                self._going[slab] += 1
                if slab in self._rows and not self._remains(slab) and not self._is_any_wanted(self._rows[slab]):
                    return True
        looked_at = self._departures.blocks
        return looked_at >= MOST_LOOKED_AT and (bool(self._rows) or looked_at >= MOST_IN_VAIN)

    def blocks(self) -> list[int]:
        """Those that have to go for one slab, the deepest of each chain first; empty where nobody can do without one.
        What is kept for a time goes only where nothing else is found: whoever keeps a block keeps what it follows."""
        if not self._rows:
            return []
        ways = self._departures.leading_to_what_stays()
        free = [slab for slab, rows in self._rows.items() if ways.isdisjoint(rows)]
        slab = min(free, key=self._cost, default=None)
        if slab is None:
            return []
        return [row for row in self._index.families(self._rows[slab]) if self._residency.all_places(row)]

    def _cost(self, slab: int) -> tuple[bool, int, int]:
        return self._is_any_wanted(self._rows[slab]), self._remains(slab), slab

    def _remains(self, slab: int) -> int:
        return len(self._rows[slab]) - self._going[slab]

    def _is_any_wanted(self, rows: Iterable[int]) -> bool:
        retention = self._residency.retention
        return retention is not None and any(retention.holds(row) for row in rows)
