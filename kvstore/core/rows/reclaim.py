"""Chooses which blocks to evict for a new one, before any of them goes.

    DRAM   leaves, worst first > what would go with each > as many blocks of one namespace as an extent takes
    NVMe   the same > a slab that would be empty by then > its blocks, and their descendants

Frames move in DRAM, so whichever blocks go, an extent comes free, provided that one is not in use: a reader may have
its memory mapped. On NVMe frames stay where they are, and blocks that were used at the same time lie in many slabs:
evicting one leaf after the other until any slab is empty would lose most of them. Pure: changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvstore.core.rows.index import NO_ROW, OpenedNamespace, PrefixIndex
from tiering.dram.tier import DramExtent, DramTier
from tiering.policies.shares import Shares
from tiering.residency import Residency
from tiering.tier import LowerTier, extent_of

MOST_LOOKED_AT = 4096
"""Candidate blocks, after which the slab is chosen by what is known so far."""


def givers(shares: Shares | None, number: int, residency: Residency, tier: DramTier | LowerTier) -> list[int] | None:
    """Groups of tenants that may lose blocks in a tier for a namespace, in order; None if no tenant has settings."""
    if shares is None or residency.groups is None:
        return None
    asker = shares.of_namespace[number]
    return shares.givers(asker, shares.held(tier.held()), tier.pieces(), residency.groups.idle())


class ReclaimPlan:
    """The blocks of a tier that would be evicted, leaf by leaf."""

    def __init__(self, index: PrefixIndex, residency: Residency, elsewhere: Residency | None) -> None:
        """elsewhere: the other tier's residency. Blocks it has stay readable, and need their ancestors."""
        self._index = index
        self._residency = residency
        self._elsewhere = elsewhere
        self._left: dict[int, int] = {}  # children that a block would keep
        self.blocks = 0
        """Blocks planned for eviction so far."""

    def with_leaf(self, leaf: int) -> Iterator[int]:
        """This leaf would go next: it, and the ancestors that would lead to nothing else."""
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
        """Whether a block is in use here; or is in this tier alone and leads to others that stay readable."""
        residency, elsewhere = self._residency, self._elsewhere
        if residency.is_in_use(row):
            return True
        if elsewhere is not None and elsewhere.is_listed(row):
            return False
        leads_on = elsewhere is not None and elsewhere.children(row) > 0
        return leads_on or self._index.children(row) > residency.children(row)

    def leading_to_what_stays(self) -> set[int]:
        """Blocks that stay, and all their ancestors."""
        ways: set[int] = set()
        for row in (*self._residency.all_in_use(), *self._ways_on()):
            while row != NO_ROW and row not in ways:
                ways.add(row)
                row = self._index.parent(row)
        return ways

    def _ways_on(self) -> list[int]:
        listed, children = self._residency.listed_column, self._residency.child_counts
        every = self._index.child_counts
        rows = min(len(listed), len(every))  # each column has all rows, and some spare
        leads_on = every[:rows] > children[:rows]
        if self._elsewhere is not None:
            listed_there, children_there = self._elsewhere.listed_column, self._elsewhere.child_counts
            rows = min(rows, len(listed_there))
            leads_on = (leads_on[:rows] | (children_there[:rows] > 0)) & (listed_there[:rows] == 0)
        found: list[int] = np.flatnonzero(leads_on & (listed[:rows] != 0)).tolist()
        return found


class ExtentReclaim:
    """Which namespace gives an extent in DRAM, once."""

    def __init__(
        self,
        asker: int,
        index: PrefixIndex,
        residency: Residency,
        below: Residency | None,
        dram: DramTier,
        spaces: Sequence[OpenedNamespace],
    ) -> None:
        """asker: its namespace. below: NVMe's residency. spaces: of all namespaces."""
        self._asker = asker
        self._index, self._residency, self._dram, self._spaces = index, residency, dram, spaces
        self._departures = ReclaimPlan(index, residency, below)
        self._found: Counter[int] = Counter()  # by namespace, blocks that would go
        self._offers: dict[int, list[tuple[int, DramExtent]]] = {}
        self._in_use: set[int] | None = None
        self.giver: tuple[int, int] | None = None
        """Set once `own` is exhausted: the namespace that gives an extent, and how many of its blocks; or None."""

    def own(self, worst: Iterable[int]) -> Iterator[int]:
        """Leaves of the asking namespace, as long as they are worse than an extent that another one has to give."""
        namespace_of = self._index.namespace_of
        for row in worst:
            number = namespace_of(row)
            if number == self._asker:
                yield row
            elif self._look_at(row, number):
                return

    def _look_at(self, leaf: int, number: int) -> bool:
        if number not in self._offers:
            if self._in_use is None:
                self._in_use = self._residency.pieces_in_use()
            self._offers[number] = self._offers_of(number, self._in_use)
        offers = self._offers[number]
        if not offers:
            return False
        self._found[number] += sum(1 for _ in self._departures.with_leaf(leaf))
        while offers and self._found[number] >= offers[-1][0]:
            blocks, extent = offers[-1]
            if self._residency.can_move(extent):
                self.giver = number, blocks
                return True
            offers.pop()
        return False

    def _offers_of(self, number: int, in_use: set[int]) -> list[tuple[int, DramExtent]]:
        """How many blocks of a namespace must go to free an extent, for each extent not in use; the fewest last."""
        dram = self._dram
        offers = [
            (max(1, extent.slots.live + extent.slots.free - dram.free_slots(one)), extent)
            for one in self._spaces[number].classes
            for extent in dram.extents_of(one)
            if extent.number not in in_use
        ]
        offers.reverse()  # at equal cost, the newest extent
        return sorted(offers, key=lambda offer: -offer[0])


class SlabReclaim:
    """Which slab is freed on NVMe, once."""

    def __init__(self, asker: int, index: PrefixIndex, residency: Residency, tier: LowerTier, above: Residency) -> None:
        """asker: its namespace. residency, tier: of NVMe. above: DRAM's residency."""
        self.asker = asker
        self._index = index
        self._residency = residency
        self._tier = tier
        self._departures = ReclaimPlan(index, residency, above)
        self._ways: set[int] | None = None
        self._going: Counter[int] = Counter()  # by slab, frames that would go
        self._rows: dict[int, list[int]] = {}  # by slab that may go, whose frames it has
        self._wanted: set[int] = set()  # of these, slabs with a retained block

    def look_at(self, leaf: int) -> bool:
        """This leaf would go next; returns whether a slab can be chosen now."""
        for row in self._departures.with_leaf(leaf):
            for place in self._residency.all_places(row):
                slab = extent_of(place)
                if slab not in self._going:
                    self._meet(slab)
                self._going[slab] += 1
                if slab in self._rows and slab not in self._wanted and not self._remains(slab):
                    return True
        return self._departures.blocks >= MOST_LOOKED_AT and len(self._rows) > len(self._wanted)

    def blocks(self) -> list[int]:
        """The blocks that go for one slab, the deepest of each chain first; empty if no slab can be freed. A slab with
        retained blocks is chosen only if there is no other."""
        cost = {slab: (slab in self._wanted, self._remains(slab), slab) for slab in self._rows}
        slab = min(cost, key=lambda one: cost[one], default=None)
        if slab is None:
            return []
        return [row for row in self._index.families(self._rows[slab]) if self._residency.all_places(row)]

    def _meet(self, slab: int) -> None:
        """Retained blocks retain their ancestors: a slab's own blocks tell whether anything in it is retained."""
        if self._ways is None:
            self._ways = self._departures.leading_to_what_stays()
        rows = self._tier.rows_in(slab)
        if rows is None or not self._ways.isdisjoint(rows):
            return
        self._rows[slab] = rows
        retention = self._residency.retention
        if retention is not None and any(retention.holds(row) for row in rows):
            self._wanted.add(slab)

    def _remains(self, slab: int) -> int:
        return len(self._rows[slab]) - self._going[slab]
