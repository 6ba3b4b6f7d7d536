"""Slots that late readers may still have mapped, and how many readers each has (floor 1).

A lease of a long prompt has a place for each block and part, so that this counts by extent in columns: some 20 ns and
four bytes for a place, where a dict takes 150 ns and a hundred bytes. Few places at a time are walked in a plain loop:
numpy's machinery alone takes longer. No lock: who calls serialises.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

import numpy as np

from tiering.tier import SLOT_BITS, Column, extent_of, slot_of

_FEW = 64
"""Places that are walked in a plain loop."""


class HeldPlaces:
    """A count for each place; of most it is 0."""

    def __init__(self) -> None:
        self._counts: dict[int, array[int]] = {}  # by extent, then by slot
        self._held: Counter[int] = Counter()  # by extent: the sum of its counts

    def hold(self, places: Collection[int]) -> None:
        """One more reader of each; they are distinct."""
        if len(places) <= _FEW:
            for place in places:
                extent, slot = extent_of(place), slot_of(place)
                self._counts_of(extent, slot)[slot] += 1
                self._held[extent] += 1
            return
        for extent, slots in _by_extent(places):
            column = np.frombuffer(self._counts_of(extent, int(slots.max())), np.int32)
            column[slots] += 1
            self._held[extent] += len(slots)

    def let_go(self, places: Collection[int]) -> list[int]:
        """One reader less of each; returns the places that no reader holds any more."""
        done: list[int] = []
        if len(places) <= _FEW:
            for place in places:
                extent, slot = extent_of(place), slot_of(place)
                counts = self._counts[extent]
                counts[slot] -= 1
                assert counts[slot] >= 0, "let go more often than held"
                if not counts[slot]:
                    done.append(place)
                self._went(extent, 1)
            return done
        for extent, slots in _by_extent(places):
            column = np.frombuffer(self._counts[extent], np.int32)
            left = column[slots] - 1
            assert left.min() >= 0, "let go more often than held"
            column[slots] = left
            done += ((extent << SLOT_BITS) | slots[left == 0]).tolist()
            self._went(extent, len(slots))
        return done

    def __contains__(self, place: int) -> bool:
        """Whether anybody holds it."""
        counts, slot = self._counts.get(extent_of(place)), slot_of(place)
        return counts is not None and slot < len(counts) and counts[slot] > 0

    def __bool__(self) -> bool:
        """Whether any place is held."""
        return bool(self._counts)

    def extents(self) -> Iterable[int]:
        """Those that have a held place."""
        return self._counts.keys()

    def has_extent(self, extent: int) -> bool:
        """Whether a place of it is held."""
        return extent in self._counts

    def places(self) -> Column:
        """All that are held."""
        found = [np.flatnonzero(counts) | (extent << SLOT_BITS) for extent, counts in self._counts.items()]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def counts(self) -> Counter[int]:
        """How many readers each held place has; for checks."""
        return Counter(
            {
                (extent << SLOT_BITS) | slot: count
                for extent, counts in self._counts.items()
                for slot, count in enumerate(counts)
                if count
            }
        )

    def _counts_of(self, extent: int, slot: int) -> array[int]:
        counts = self._counts.get(extent)
        if counts is None:
            counts = self._counts[extent] = array("i")
        if slot >= len(counts):
            counts.extend(array("i", bytes(4 * (max(slot + 1, 64, 2 * len(counts)) - len(counts)))))
        return counts

    def _went(self, extent: int, count: int) -> None:
        self._held[extent] -= count
        if not self._held[extent]:
            del self._held[extent], self._counts[extent]


def _by_extent(places: Collection[int]) -> Iterator[tuple[int, Column]]:
    """The slots in each extent that these places name."""
    column = np.fromiter(places, np.int64, len(places)) if not isinstance(places, np.ndarray) else places
    extents, slots = column >> SLOT_BITS, column & ((1 << SLOT_BITS) - 1)
    if (extents == extents[0]).all():
        yield int(extents[0]), slots
        return
    order = np.argsort(extents, kind="stable")
    extents, slots = extents[order], slots[order]
    starts = [0, *(np.flatnonzero(extents[1:] != extents[:-1]) + 1).tolist(), len(extents)]
    for start, stop in pairwise(starts):
        yield int(extents[start]), slots[start:stop]
