"""Slots that late readers may still have mapped, and how many readers each has.

A lease of a long prompt has a place for each block and part, so this counts in columns by extent: some 20 ns and four
bytes a place, where a dict takes 150 ns and a hundred bytes. A few places are walked in a plain loop: numpy's overhead
takes longer. No lock: the caller serialises.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from tiering.tier import NO_PLACE, SLOT_BITS, Column, extent_of, slot_of

_FEW = 64
"""Up to so many places are walked in a plain loop."""


class HeldPlaces:
    """A count for each place; 0 for most."""

    def __init__(self) -> None:
        self._counts: dict[int, array[int]] = {}  # by extent, then by slot
        self._held: Counter[int] = Counter()  # by extent: the sum of its counts

    def defer_reuse(self, places: Collection[int]) -> None:
        """Add a reader of each; they are distinct."""
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

    def allow_reuse(self, places: Collection[int]) -> list[int]:
        """Remove a reader of each; returns the places without a reader left."""
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
        """Whether any reader holds it."""
        counts, slot = self._counts.get(extent_of(place)), slot_of(place)
        return counts is not None and slot < len(counts) and counts[slot] > 0

    def __bool__(self) -> bool:
        """Whether any place is held."""
        return bool(self._counts)

    def extents(self) -> Iterable[int]:
        """Extents with a held place."""
        return self._counts.keys()

    def has_extent(self, extent: int) -> bool:
        return extent in self._counts

    def places(self) -> Column:
        found = [np.flatnonzero(counts) | (extent << SLOT_BITS) for extent, counts in self._counts.items()]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def counts(self) -> Counter[int]:
        """Readers of each held place; for checks."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Places of the frames of blocks with several parts, for the parts behind the first. A dense table for each number of
# parts: the last row moves into the slot of a removed one. So a block takes memory for its own parts only, whatever
# other namespaces' blocks have. A row is found by two numbers. The first slot of a table belongs to no row: a row in no
# table reads `NO_PLACE` there, without a check. No lock: the caller serialises. Returned columns must be dropped before
# a row is added or removed.


_DIGEST_BYTES = 16


class _Table:
    """Rows of equally many parts. places, digests: `parts` of each slot, one slot after the other."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.owners = array("i", [-1])
        self.places = array("q", [NO_PLACE]) * parts
        self.digests = bytearray(_DIGEST_BYTES * parts)

    def add(self, rows: Sequence[int], columns: Sequence[Sequence[int] | Column]) -> range:
        """New rows at the end, which have no digests yet; returns their slots."""
        first = len(self.owners)
        if isinstance(columns[0], np.ndarray):
            self.places.frombytes(np.stack(columns, axis=1).astype(np.int64, copy=False).tobytes())
        else:
            self.places.extend(chain.from_iterable(zip(*columns, strict=True)))
        self.owners.extend(rows)
        self.digests.extend(bytes(_DIGEST_BYTES * self.parts * len(rows)))
        assert len(self.places) == self.parts * len(self.owners)
        return range(first, len(self.owners))

    def remove(self, slot: int) -> tuple[list[int], int]:
        """Returns the slot's places, and the row that the slot belongs to now: the last one of the table, or the
        removed one."""
        places, digests, parts = self.places, self.digests, self.parts
        start, last = slot * parts, (len(self.owners) - 1) * parts
        gone = places[start : start + parts].tolist()
        moved = self.owners.pop()
        if start != last:
            self.owners[slot] = moved
            places[start : start + parts] = places[last:]
            digests[_DIGEST_BYTES * start : _DIGEST_BYTES * (start + parts)] = digests[_DIGEST_BYTES * last :]
        del places[last:], digests[_DIGEST_BYTES * last :]
        return gone, moved


class FurtherParts:
    """Places and header digests by row and part, for parts from 1 on."""

    def __init__(self) -> None:
        self.counts = array("H")
        """Parts behind the first, by row; 0 for a row in no table."""
        self._slots = array("i")
        self._tables: dict[int, _Table] = {}

    def extend(self, rows: int) -> None:
        self.counts.extend(array("H", bytes(2 * rows)))
        self._slots.extend(array("i", bytes(4 * rows)))

    def add(self, rows: Sequence[int], columns: Sequence[Sequence[int] | Column]) -> None:
        """Rows that have no further parts yet; columns: their places, by part."""
        parts = len(columns)
        assert not any([self.counts[row] for row in rows]), "a row has the places of one block"
        table = self._tables.get(parts)
        if table is None:
            table = self._tables[parts] = _Table(parts)
        for row, slot in zip(rows, table.add(rows, columns), strict=True):
            self.counts[row], self._slots[row] = parts, slot

    def remove(self, row: int) -> list[int]:
        """Remove a row's further parts; returns their places."""
        parts, slot = self.counts[row], self._slots[row]
        table = self._tables[parts]
        places, moved = table.remove(slot)
        self._slots[moved] = slot
        self.counts[row] = self._slots[row] = 0
        if len(table.owners) == 1:
            del self._tables[parts]
        return places

    def move(self, row: int, part: int, place: int) -> None:
        """A frame stands elsewhere now."""
        table = self._tables[self.counts[row]]
        table.places[self._slots[row] * table.parts + part - 1] = place

    def seal(self, row: int, part: int, header_digest: bytes) -> None:
        """Note the digest of a part's header."""
        table = self._tables[self.counts[row]]
        assert len(header_digest) == _DIGEST_BYTES
        at = _DIGEST_BYTES * (self._slots[row] * table.parts + part - 1)
        table.digests[at : at + _DIGEST_BYTES] = header_digest

    def all_places(self, row: int) -> list[int]:
        """Of all further parts of a row."""
        parts = self.counts[row]
        if not parts:
            return []
        start = self._slots[row] * parts
        return self._tables[parts].places[start : start + parts].tolist()

    def places_of(self, rows: Sequence[int], part: int) -> list[int]:
        """One part's places of rows of one namespace; `NO_PLACE` where a row has none."""
        table, slots = self._table_of(rows, part), self._slots
        if table is None:
            return [NO_PLACE] * len(rows)
        places, step, first = table.places, table.parts, part - 1
        return [places[slots[row] * step + first] for row in rows]

    def places_column(self, rows: Column, part: int) -> Column:
        """The same as a column of its own."""
        parts = int(np.frombuffer(self.counts, np.uint16)[rows].max(initial=0))
        if parts < part:
            return np.full(len(rows), NO_PLACE)
        slots = np.frombuffer(self._slots, np.int32)[rows]
        places: Column = np.frombuffer(self._tables[parts].places, np.int64).reshape(-1, parts)[slots, part - 1]
        return places

    def header_digests_of(self, rows: Sequence[int], part: int) -> list[bytes]:
        """One part's header digests of rows of one namespace."""
        table, slots, size = self._table_of(rows, part), self._slots, _DIGEST_BYTES
        if table is None:
            return [bytes(size)] * len(rows)
        digests, step, first = table.digests, size * table.parts, size * (part - 1)
        return [bytes(digests[(at := slots[row] * step + first) : at + size]) for row in rows]

    def tables(self) -> Iterator[tuple[Column, Column]]:
        """Each table's rows, and their places by row and part."""
        for table in self._tables.values():
            owners = np.frombuffer(table.owners, np.int32)[1:]
            yield owners, np.frombuffer(table.places, np.int64).reshape(-1, table.parts)[1:]

    def entries(self) -> int:
        """Parts of rows that have memory."""
        return sum(len(table.places) for table in self._tables.values())

    def check(self) -> None:
        """Each row with further parts is once in the table for that number, at the slot that it knows."""
        found = 0
        for parts, table in self._tables.items():
            assert len(table.owners) > 1, "an empty table goes"
            assert len(table.places) * _DIGEST_BYTES == len(table.digests) == len(table.owners) * parts * _DIGEST_BYTES
            assert table.places[:parts].tolist() == [NO_PLACE] * parts
            for slot, row in enumerate(table.owners[1:], 1):
                assert self.counts[row] == parts and self._slots[row] == slot
            found += len(table.owners) - 1
        assert found == sum(map(bool, self.counts)), "a row is in the table that it names"

    def _table_of(self, rows: Sequence[int], part: int) -> _Table | None:
        """The table of all these rows: rows of one namespace have equally many parts, or none any more. None also if
        they have no such part."""
        parts = next((parts for row in rows if (parts := self.counts[row])), 0)
        return self._tables[parts] if parts >= part else None
