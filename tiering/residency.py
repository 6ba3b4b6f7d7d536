"""Which block is where, in which state, and what must happen to make room.

Pure: events come in, decisions (`Move`) go out. No thread, no I/O, no randomness, and no decision by a clock; the
caller holds a lock.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from tiering.policies.by_group import ByGroup
from tiering.policies.policy import EvictionPolicy
from tiering.policies.retention import Retention
from tiering.slots import FrameState, Piece, SlotLedger
from tiering.tier import NO_PLACE, SLOT_BITS, Column, SlotClass, extent_of

_UNKNOWN = -1.0


@dataclass(frozen=True, slots=True)
class Grow:
    """Make one more extent for a slot class."""

    slot_class: SlotClass


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict blocks, all their frames: this one first, the worst of all."""

    row: int


@dataclass(frozen=True, slots=True)
class Vacate:
    """Move the live frames of an extent elsewhere in its class, then give the extent back."""

    extent: int
    rows: tuple[int, ...]


Move = Grow | Evict | Vacate


class Pins:
    """How many leases, reservations and moves pin each block, in every tier."""

    def __init__(self) -> None:
        self.counts = array("i")

    def pin(self, rows: Sequence[int]) -> int:
        """Pin distinct blocks once more; returns how many were not pinned before."""
        counts, fresh = self.counts, 0
        for row in rows:
            count = counts[row]
            counts[row] = count + 1
            if not count:
                fresh += 1
        return fresh

    def unpin(self, rows: Sequence[int]) -> int:
        """The mirror of `pin`; returns how many are not pinned any more."""
        if isinstance(rows, array):
            return self._unpin_column(np.frombuffer(rows, np.int32))
        counts, freed = self.counts, 0
        for row in rows:
            count = counts[row] - 1
            assert count >= 0, "unpinned more often than pinned"
            counts[row] = count
            if not count:
                freed += 1
        return freed

    def _unpin_column(self, rows: Column) -> int:
        column = np.frombuffer(self.counts, np.int32)
        left = column[rows] - 1
        assert not len(left) or left.min() >= 0, "unpinned more often than pinned"
        column[rows] = left
        return len(left) - int(np.count_nonzero(left))

    def affordable(self, rows: Sequence[int], new_pins: int) -> int:
        """How many leading blocks of these can be pinned with at most `new_pins` blocks that were unpinned before."""
        counts = self.counts
        for count, row in enumerate(rows):
            if not counts[row]:
                if not new_pins:
                    return count
                new_pins -= 1
        return len(rows)

    def grow_to(self, row: int) -> None:
        """Make a count up to this row."""
        missing = row + 1 - len(self.counts)
        if missing > 0:
            more = max(missing, 1024, len(self.counts) >> 3)
            self.counts.extend(array("i", bytes(4 * more)))

    def check(self, pins: dict[int, int]) -> None:
        """Invariant 2: pins are the sum of what pins, given as row -> count."""
        actual = {row: count for row, count in enumerate(self.counts) if count}
        assert actual == {row: count for row, count in pins.items() if count}, (actual, pins)


class LastUses:
    """When each block was last stored or asked for, whichever tier has it. Without a clock all of it is unknown."""

    def __init__(self, seconds: Callable[[], float] | None = None) -> None:
        """seconds: a clock that never goes back."""
        self._seconds = seconds
        self._began_at = seconds() if seconds is not None else 0.0
        self._used_at = array("f")  # by row, in seconds since the start

    def used(self, rows: Iterable[int]) -> None:
        """These blocks were stored, or asked for."""
        if self._seconds is None:
            return
        now = self._seconds() - self._began_at
        used_at = self._used_at
        for row in rows:
            used_at[row] = now

    def found(self, row: int) -> None:
        """The block is from an earlier run: its last use is unknown."""
        if self._seconds is not None:
            self._used_at[row] = _UNKNOWN

    def idle_seconds(self, row: int) -> float | None:
        """Since the block's last use; None if that is unknown."""
        if self._seconds is None or self._used_at[row] == _UNKNOWN:
            return None
        return self._seconds() - self._began_at - self._used_at[row]

    def grow_to(self, row: int) -> None:
        """Make a column up to this row."""
        missing = row + 1 - len(self._used_at)
        if missing > 0 and self._seconds is not None:
            self._used_at.extend([_UNKNOWN] * max(missing, 1024, len(self._used_at) >> 3))


class Residency:
    """Places and generations of every block in one tier, by row; and the choice of victims.

    A block is *listed* when the policy knows it: once it is readable here, until it is gone. Columns grow with the
    highest row and are never shrunk: a row is one number in the index above, reused there. Rows are walked in plain
    loops: after a load has swept the caches, numpy's machinery alone takes longer than a lease.
    """

    def __init__(self, policy: EvictionPolicy, pins: Pins) -> None:
        self.policy = policy
        self.groups = policy if isinstance(policy, ByGroup) else None
        self.pins = pins
        self.retention: Retention | None = None
        """What is retained here; set by `node`, which composes the store."""
        self._listed = bytearray()
        self.blocks = 0  # that are listed
        self._children = array("i")  # that have a place here, or are about to
        self._generations = array("q")
        self._places = array("q")  # of the first part
        self._header_digests = bytearray()  # 16 bytes per row, of the first part
        self._further = FurtherParts()
        self.held = HeldPlaces()
        """Places that readers with expired leases may still read."""

    # What happened -------------------------------------------------------------------------------------------------

    def child_came(self, parent: int) -> None:
        """A child of `parent` is about to get a place here: the parent cannot be evicted before it. parent: a row, or a
        negative number."""
        if parent < 0:
            return
        self._children[parent] += 1
        if self._children[parent] == 1 and self._listed[parent]:
            self.policy.became_inner(parent)

    def child_went(self, parent: int) -> None:
        """The reverse of `child_came`."""
        self._children[parent] -= 1
        assert self._children[parent] >= 0
        if not self._children[parent] and self._listed[parent]:
            self.policy.became_leaf(parent)

    def listed(self, row: int) -> None:
        """The block is readable here: the policy knows it from now on."""
        self.blocks += not self._listed[row]
        self._listed[row] = 1
        self.policy.inserted(row)
        if self._children[row]:
            self.policy.became_inner(row)
        if self.retention is not None and self.retention.hints.has_hints:
            self.retention.came(row)

    def left(self, row: int, parent: int) -> list[int]:
        """The block is not here any more, if it was; returns its places. parent: a row, or a negative number."""
        places = self.forget(row)
        self.unlisted(row)
        if parent >= 0:
            self.child_went(parent)
        return places

    def unlisted(self, row: int) -> None:
        """The block is not here any more, if it was."""
        if self._listed[row]:
            self._listed[row] = 0
            self.blocks -= 1
            self.policy.removed(row)
            if self.retention is not None:
                self.retention.left(row)

    def loaded(self, rows: range, parents: Column, generations: Column, places: Sequence[Column]) -> None:
        """Blocks from before a restart are readable here, most recently used first; places: by part.

        parents: rows, which may be among these, or a negative number.
        """
        self.grow_to(rows.stop - 1)
        first, stop = rows.start, rows.stop
        self._listed[first:stop] = bytes([1]) * len(rows)
        self.blocks += len(rows)
        np.frombuffer(self._generations, "q")[first:stop] = generations
        self._place(rows, places)
        children = np.frombuffer(self._children, "i")
        known, counts = np.unique(parents[parents >= 0], return_counts=True)
        for parent in known[(children[known] == 0) & (known < first)].tolist():
            if self._listed[parent]:
                self.policy.became_inner(parent)
        children[known] += counts.astype(np.int32)
        self.policy.loaded(rows, children[first:stop] == 0)
        if self.retention is not None:
            self.retention.loaded(rows)

    def reserved(self, rows: Sequence[int], places: Sequence[Sequence[int]]) -> None:
        """Slots were found for all parts of blocks that are being stored; places: by part."""
        self.grow_to(max(rows))
        self._place(rows, places)

    def _place(self, rows: Sequence[int], places: Sequence[Sequence[int] | Column]) -> None:
        first, *further = places
        column = self._places
        if isinstance(rows, range) and isinstance(first, np.ndarray):
            mine = np.frombuffer(column, np.int64)[rows.start : rows.stop]
            assert (mine == NO_PLACE).all()
            mine[:] = first
        else:
            for row, place in zip(rows, first, strict=True):
                assert column[row] == NO_PLACE
                column[row] = place
        if further:
            self._further.add(rows, further)

    def part_sealed(self, row: int, part: int, header_digest: bytes) -> None:
        """A part's header was written; its digest travels with every lease."""
        if part:
            self._further.seal(row, part, header_digest)
        else:
            self._header_digests[16 * row : 16 * row + 16] = header_digest

    def published(self, row: int, generation: int) -> None:
        """The whole family is committed."""
        self._generations[row] = generation

    def moved(self, row: int, part: int, place: int) -> None:
        """A frame stands elsewhere now."""
        if part:
            self._further.move(row, part, place)
        else:
            self._places[row] = place

    def forget(self, row: int) -> list[int]:
        """The block has no frames any more; returns the places it had, in the order of its parts."""
        self._generations[row] = 0
        place = self._places[row]
        if place == NO_PLACE:
            return []
        self._places[row] = NO_PLACE
        return [place, *self._further.remove(row)] if self._further.counts[row] else [place]

    def defer_reuse_of_current(self, rows: array[int], part: int, places: Column) -> None:
        """A lease expired, but its reader may still be copying: one part's places are held, as far as the blocks still
        have them; the others become `NO_PLACE` in the argument."""
        column = np.frombuffer(rows, np.int32)
        now = self._further.places_column(column, part) if part else np.frombuffer(self._places, np.int64)[column]
        places[now != places] = NO_PLACE
        self.held.defer_reuse(places[places != NO_PLACE])

    # What is known -------------------------------------------------------------------------------------------------

    def is_listed(self, row: int) -> bool:
        return bool(self._listed[row])

    def retained_bytes(self) -> int:
        """Bytes retained here."""
        return sum(self.retention.kept_bytes()) if self.retention is not None else 0

    def children(self, row: int) -> int:
        """Its children that have a place here, or are about to."""
        return self._children[row]

    def place(self, row: int, part: int) -> int:
        """Where a part's frame stands, or `NO_PLACE`."""
        return self.places_of((row,), part)[0] if part else self._places[row]

    def all_places(self, row: int) -> list[int]:
        """Where a block's frames stand, for all parts that have one."""
        place = self._places[row]
        return [place, *self._further.all_places(row)] if place != NO_PLACE else []

    def places_of(self, rows: Sequence[int], part: int) -> list[int]:
        """One part's places of several blocks of one namespace."""
        if part:
            return self._further.places_of(rows, part)
        column = self._places
        return [column[row] for row in rows]

    def is_in_use(self, row: int) -> bool:
        """Whether the block is pinned, may still be read under an expired lease, or is not readable here yet."""
        return not self._listed[row] or bool(self.pins.counts[row]) or self.is_row_held(row)

    def is_row_held(self, row: int) -> bool:
        """Whether a reader with an expired lease may still have a slot of the block mapped."""
        return bool(self.held) and any(place in self.held for place in self.all_places(row))

    def all_in_use(self) -> list[int]:
        """Blocks with a place here that are in use."""
        listed = np.frombuffer(self._listed, np.uint8)
        is_used = (listed == 0) | (np.frombuffer(self.pins.counts, np.int32)[: len(listed)] != 0)
        first = np.frombuffer(self._places, np.int64)
        is_here = first != NO_PLACE
        if self.held:
            held = self.held.places()
            is_used |= np.isin(first, held)
            for owners, places in self._further.tables():
                is_used[owners] |= np.isin(places, held).any(axis=1)
        rows: list[int] = np.flatnonzero(is_used & is_here).tolist()
        return rows

    @property
    def listed_column(self) -> Column:
        """`is_listed`, by row: a view that must be dropped before the table changes."""
        return np.frombuffer(self._listed, np.uint8)

    @property
    def child_counts(self) -> Column:
        """`children`, by row; likewise."""
        return np.frombuffer(self._children, np.int32)

    def pieces_in_use(self) -> set[int]:
        """Pieces with a block that is pinned, or that a late reader may still have mapped."""
        pins = np.frombuffer(self.pins.counts, np.int32)[: len(self._listed)]
        first = np.frombuffer(self._places, np.int64)[pins != 0]
        pieces = {*self.held.extents(), *np.unique(first[first != NO_PLACE] >> SLOT_BITS).tolist()}
        for owners, places in self._further.tables():
            pieces.update(np.unique(places[pins[owners] != 0] >> SLOT_BITS).tolist())
        return pieces

    def generation(self, row: int) -> int:
        """The generation under which the block was committed."""
        return self._generations[row]

    def header_digest(self, row: int, part: int) -> bytes:
        """xxh3_128 of the part's 4 KiB header as it was written."""
        return self.header_digests_of((row,), part)[0]

    def header_digests_of(self, rows: Sequence[int], part: int) -> list[bytes]:
        """One part's header digests of several blocks of one namespace."""
        if part:
            return self._further.header_digests_of(rows, part)
        column = self._header_digests
        return [bytes(column[16 * row : 16 * row + 16]) for row in rows]

    def generations_of(self, rows: Sequence[int]) -> list[int]:
        """The generations of several blocks."""
        column = self._generations
        return [column[row] for row in rows]

    # What to do ----------------------------------------------------------------------------------------------------

    def room(
        self,
        wanted: Sequence[SlotClass],
        extents: SlotLedger[Any],
        extent_bytes: int,
        groups: Sequence[int] | None = None,
        *,
        may_grow: bool,
    ) -> Move | None:
        """The next step towards a free slot in every wanted class; None when nothing evictable is left.

        Call it while a class is short of slots. In this order: grow, where `may_grow`; give back an extent of
        another class that can be emptied without evicting anything; evict the worst leaf, of these groups if they are
        given. Evicting other namespaces' worst leaves until one of their extents can be emptied is how memory moves to
        where it is used.

        may_grow: whether the budget has room for another extent, and the machine memory for it.
        """
        short = [slot_class for slot_class in wanted if not extents.free_slots(slot_class)]
        assert short, "room is asked for only when it is short"
        if may_grow:
            return Grow(short[0])
        move = self._vacate(wanted, extents, extent_bytes)
        if move is not None:
            return move
        row = next(self.worst(groups), None)
        return Evict(row) if row is not None else None

    def worst(self, groups: Sequence[int] | None = None) -> Iterator[int]:
        """Unpinned leaves, worst first; of these groups, one after the other, if they are given. Each may be evicted
        before the next is asked for."""
        pins, retention = self.pins.counts, self.retention
        is_simple = retention is None or not len(retention)
        victims = self._victims(groups) if is_simple else self._victims_kept_last(groups)
        return (row for row in victims if not pins[row])

    def _victims(self, groups: Sequence[int] | None) -> Iterator[int]:
        if self.groups is None or groups is None:
            return self.policy.victims()
        return self.groups.victims_of(groups)

    def _victims_kept_last(self, groups: Sequence[int] | None) -> Iterator[int]:
        retention = self.retention
        assert retention is not None
        proposed: set[int] = set()
        passed: dict[int, None] = {}
        try:
            for row in self._victims(groups):
                if retention.holds(row):
                    passed[row] = None
                elif row not in proposed:
                    proposed.add(row)
                    yield row
        finally:  # not on the way: a policy goes on from where it is
            for row in passed:
                self.policy.touched(retention.way(row))
        while rest := [row for row in self._victims(groups) if row not in proposed]:
            for row in sorted(rest, key=retention.until):
                proposed.add(row)
                yield row

    def check(self) -> None:
        """The policy proposes exactly the leaves of what is listed."""
        if self.retention is not None:
            self.retention.check()
        self._further.check()
        leaves = {row for row, is_listed in enumerate(self._listed) if is_listed and not self._children[row]}
        assert self.blocks == sum(self._listed), "the count is of what is listed"
        assert set(self.policy.victims()) == leaves, "the policy proposes exactly the leaves"

    def _vacate(self, wanted: Sequence[SlotClass], extents: SlotLedger[Any], extent_bytes: int) -> Vacate | None:
        """Each wanted class keeps a free slot if it has one, or a block's parts would take extents from each other."""
        best: Piece | None = None
        for slot_class in extents.reclaimable_classes(extent_bytes):
            free = extents.free_slots(slot_class)
            spare = max(0, free - 1) if slot_class in wanted else free
            for extent in extents.open_pieces(slot_class):
                if best is not None and extent.slots.live >= best.slots.live:
                    continue
                if self._can_vacate(extent, spare):
                    best = extent
        if best is None:
            return None
        rows = tuple(
            best.slots.owners[slot] for slot, state in enumerate(best.slots.states) if state == FrameState.RESIDENT
        )
        return Vacate(best.number, rows)

    def _can_vacate(self, extent: Piece, spare_in_class: int) -> bool:
        return extent.slots.live <= spare_in_class - extent.slots.free and self.can_move(extent)

    def can_move(self, extent: Piece) -> bool:
        """Whether no block in an extent is in use."""
        slots = extent.slots
        if slots.counts[FrameState.RESERVED] or slots.counts[FrameState.ZOMBIE] or slots.counts[FrameState.DELETING]:
            return False
        owners = [slots.owners[slot] for slot, state in enumerate(slots.states) if state == FrameState.RESIDENT]
        return not any(row < 0 or self.pins.counts[row] for row in owners) and not self.held.has_extent(extent.number)

    def grow_to(self, row: int) -> None:
        """Make columns up to this row."""
        self.pins.grow_to(row)
        missing = row + 1 - len(self._listed)
        if missing <= 0:
            return
        more = max(missing, 1024, len(self._listed) >> 3)
        self._listed.extend(bytes(more))
        self._children.extend(array("i", bytes(4 * more)))
        self._generations.extend(array("q", bytes(8 * more)))
        self._places.extend(array("q", [NO_PLACE]) * more)
        self._header_digests.extend(bytes(16 * more))
        self._further.extend(more)


# Slots that late readers may still have mapped, and how many readers each has --------------------------------------


class HeldPlaces:
    """A count for each place; 0 for most."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._extents: Counter[int] = Counter()  # the sums of their counts

    def defer_reuse(self, places: Collection[int]) -> None:
        """Add a reader of each."""
        listed = _listed(places)
        self._counts.update(listed)
        self._extents.update(map(extent_of, listed))

    def allow_reuse(self, places: Collection[int]) -> list[int]:
        """Remove a reader of each; returns the places without a reader left."""
        done, counts, listed = list[int](), self._counts, _listed(places)
        for place in listed:
            left = counts.pop(place, 0) - 1
            assert left >= 0, "let go more often than held"
            if left:
                counts[place] = left
            else:
                done.append(place)
        for extent, readers in Counter(map(extent_of, listed)).items():
            self._extents[extent] -= readers
            if not self._extents[extent]:
                del self._extents[extent]
        return done

    def __contains__(self, place: int) -> bool:
        """Whether any reader holds it."""
        return place in self._counts

    def __bool__(self) -> bool:
        """Whether any place is held."""
        return bool(self._counts)

    def extents(self) -> Iterable[int]:
        """Extents with a held place."""
        return self._extents.keys()

    def has_extent(self, extent: int) -> bool:
        return extent in self._extents

    def places(self) -> Column:
        return np.fromiter(self._counts, np.int64, len(self._counts))

    def counts(self) -> Counter[int]:
        """Readers of each held place; for checks."""
        return self._counts.copy()


def _listed(places: Collection[int]) -> Collection[int]:
    """As integers of Python, which a dictionary finds sooner than those of numpy."""
    return places.tolist() if isinstance(places, np.ndarray) else places


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
