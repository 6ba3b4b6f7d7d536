"""The prefix index: which blocks exist, as chains.

One `dict[bytes, int]` per namespace from prefix key to row, and columns by row: neither bytes nor integers are tracked
by the garbage collector, so millions of blocks cost it nothing. A row is in one of three states:

    pending   being stored: invisible, but its parent has a child and cannot be evicted
    visible   readable; a match walks over visible rows only
    lost      quarantined: it keeps its children's place in the chain, a match ends there, a new put fills it again

The index knows which blocks exist. Bytes, places, pins and recency are the business of the floor below; callers hold a
lock. Behind it stands what chooses, changing nothing, which blocks go for a new one.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from kvstore.block.account import HitTier
from kvstore.block.identity import Namespace, pack_about
from tiering.counts.awaits import Awaits
from tiering.counts.changes import BlockChanges, BlockPlace
from tiering.dram.tier import DramExtent, DramTier
from tiering.frame import Sealer, Stamp
from tiering.policies.shares import Shares
from tiering.residency import Residency
from tiering.tier import LowerTier, SlotClass, TierMiss, extent_of

NO_ROW = -1

_AT_ONCE = 4096
"""Keys looked up in one go, before a missing one is noticed and other threads can get the interpreter."""

MOST_LOOKED_AT = 4096
"""Candidate blocks, after which the slab is chosen by what is known so far."""

_REMEMBERED_BYTES = 14
"""Of an evicted block's key: enough to tell it from all others, with the namespace in 16 bytes."""

Column = np.ndarray[Any, Any]


class RowState(IntEnum):
    FREE = 0
    PENDING = 1
    VISIBLE = 2
    LOST = 3


_STATES = tuple(RowState)  # by number: calling an enum takes five times as long
_PENDING, _VISIBLE, _LOST = int(RowState.PENDING), int(RowState.VISIBLE), int(RowState.LOST)  # so does comparing


@dataclass(frozen=True)
class OpenedNamespace:
    """A namespace in this store: one slot class, stamp (of `stamps_of`) and sealer per part."""

    number: int
    tenant: bytes
    namespace: Namespace
    classes: tuple[SlotClass, ...]
    stamps: tuple[Stamp, ...]
    sealers: tuple[Sealer, ...]

    @cached_property
    def block_bytes(self) -> int:
        """DRAM for one block: all its frames."""
        return sum(slot_class.frame_bytes for slot_class in self.classes)

    @property
    def about(self) -> bytes:
        """The record stored beside its blocks."""
        return pack_about(self.namespace, [stamp.payload_bytes for stamp in self.stamps])


class _Names:
    __slots__ = ("beside", "block_bytes", "forgotten", "hidden", "inserted", "mark", "tenant", "visible")

    def __init__(
        self, tenant: bytes, number: int, forgotten: OrderedDict[bytes, int], block_bytes: int, beside: str
    ) -> None:
        self.tenant, self.beside = tenant, beside
        self.block_bytes = block_bytes
        self.forgotten = forgotten  # per tenant: with a common table each tenant could count others' evictions
        self.mark = number.to_bytes(2, "little")  # suffix of remembered keys
        self.inserted = False  # whether any key was added other than by `load`
        self.visible: dict[bytes, int] = {}
        self.hidden: dict[bytes, int] = {}  # pending and lost


class PrefixIndex:
    """Chains of blocks over all namespaces. forgotten_limit: how many evicted keys of each tenant are remembered.
    shares: of tenants, if any has settings; policies are then by group. It is the `RetentionHints` of both tiers."""

    def __init__(self, forgotten_limit: int = 65536, shares: Shares | None = None) -> None:
        self.shares = shares
        self._names: list[_Names] = []
        self._keys = np.empty(0, dtype=object)
        self.names = array("q")  # by row: a hash of the block's key, by which policies know it again after eviction
        self._parents = array("i")
        self._children = array("i")
        self._depths = array("i")
        self._owners = array("h")
        self._states = bytearray()
        self._expires = array("q")
        self._priorities = array("b")
        self._why_lost: dict[int, TierMiss] = {}  # except damaged ones
        self.has_hints = False  # whether any block ever had a ttl or priority
        self._free_rows = array("i")
        self._next_row = 0
        # By tenant, in ordered dictionaries: a dict would walk over the entries removed at its front. A value is twice
        # the eviction's stamp, plus 1 if the block had a ttl; negative once the block was asked for again.
        self._forgotten: dict[bytes, OrderedDict[bytes, int]] = {}
        self._forgotten_limit = forgotten_limit
        self.changes = BlockChanges()
        """Told which readable blocks come, move and go."""
        self.awaits = Awaits()
        """Told which blocks become readable, and which will not for now."""

    def add_namespace(self, tenant: bytes, block_bytes: int = 0, beside: str = "") -> int:
        """A number for a new namespace of a tenant, whose blocks take so much. beside: `Namespace.beside`."""
        forgotten = self._forgotten.setdefault(tenant, OrderedDict())
        self._names.append(_Names(tenant, len(self._names), forgotten, block_bytes, beside))
        if self.shares is not None:
            self.shares.add_namespace(tenant)
        assert len(self._names) < 1 << 15
        return len(self._names) - 1

    # Looking up ----------------------------------------------------------------------------------------------------

    def match(self, namespace: int, keys: Sequence[bytes]) -> list[int]:
        """Rows of the longest visible prefix of `keys`. Changes nothing."""
        get = self._names[namespace].visible.get
        rows: list[int | None] = []
        for first in range(0, len(keys), _AT_ONCE):
            rows += map(get, keys[first : first + _AT_ONCE])
            try:
                del rows[rows.index(None, first) :]
                break
            except ValueError:
                pass
        return rows  # type: ignore[return-value]

    def matched(self, namespace: int, keys: Sequence[bytes]) -> int:
        """How many rows `match` finds, without the rows: in a large index each costs one more cache miss."""
        contains = self._names[namespace].visible.__contains__
        for first in range(0, len(keys), _AT_ONCE):
            found = list(map(contains, keys[first : first + _AT_ONCE]))
            try:
                return first + found.index(False)
            except ValueError:
                pass
        return len(keys)

    def which(self, namespace: int, keys: Sequence[bytes]) -> bytes:
        """Which of these keys are visible, each for itself, as a bit each from the lowest of the first byte on."""
        contains = self._names[namespace].visible.__contains__
        runs = [keys[first : first + _AT_ONCE] for first in range(0, len(keys), _AT_ONCE)]
        found = (np.fromiter(map(contains, run), bool) for run in runs)
        return b"".join([np.packbits(some, bitorder="little").tobytes() for some in found])

    def why_not(self, namespace: int, key: bytes, parent: int) -> TierMiss | None:
        """Why a key is not visible; None if its parent goes on with other children only."""
        names = self._names[namespace]
        hidden = names.hidden.get(key, NO_ROW)
        if hidden != NO_ROW:
            return TierMiss.IN_FLIGHT if self._states[hidden] == RowState.PENDING else self.why_lost(hidden)
        if key[:_REMEMBERED_BYTES] + names.mark in names.forgotten:
            return TierMiss.EVICTED
        if parent != NO_ROW and self._children[parent]:
            return None
        return TierMiss.NEVER_SEEN

    def stamp_of_eviction(self, namespace: int, key: bytes) -> int:
        """The stamp that `remove` was given with an evicted key, at the first call for it; 0 later, or without one."""
        names = self._names[namespace]
        name = key[:_REMEMBERED_BYTES] + names.mark
        known = names.forgotten.get(name, 0)
        if known <= 0:
            return 0
        names.forgotten[name] = -known  # keeps its place in the order
        return known >> 1

    def eviction(self, namespace: int, key: bytes) -> tuple[int, bool]:
        """The stamp that `remove` was given with an evicted key, or 0; and whether the block had a ttl."""
        names = self._names[namespace]
        known = abs(names.forgotten.get(key[:_REMEMBERED_BYTES] + names.mark, 0))
        return known >> 1, bool(known & 1)

    def elsewhere(self, namespace: int, key: bytes) -> int:
        """Another namespace of the same tenant where this key is visible, beside the same one or none, or -1. Never
        another tenant's."""
        mine = self._names[namespace]
        for number, names in enumerate(self._names):
            is_there = names.tenant == mine.tenant and key in names.visible
            if is_there and number != namespace and names.beside == mine.beside:
                return number
        return -1

    def find(self, namespace: int, key: bytes) -> int:
        """The row of a key in any state, or `NO_ROW`."""
        names = self._names[namespace]
        row = names.visible.get(key, NO_ROW)
        return row if row != NO_ROW else names.hidden.get(key, NO_ROW)

    def knows_any(self, namespace: int, keys: Sequence[bytes]) -> bool:
        """Whether any of these keys, each of which was loaded at most once, has a row."""
        names = self._names[namespace]
        if not names.inserted:
            return False
        return any(map(names.visible.__contains__, keys)) or not names.hidden.keys().isdisjoint(keys)

    def state(self, row: int) -> RowState:
        return _STATES[self._states[row]]

    def key(self, row: int) -> bytes:
        key: bytes = self._keys[row]
        return key

    def parent(self, row: int) -> int:
        """The row of the parent block, or `NO_ROW` for a first block."""
        return self._parents[row]

    def depth(self, row: int) -> int:
        """Number of ancestors."""
        return self._depths[row]

    def namespace_of(self, row: int) -> int:
        return self._owners[row]

    def group(self, row: int) -> int:
        """Its tenant's group in the shares; 0 where all tenants are one."""
        return self.shares.of_namespace[self._owners[row]] if self.shares is not None else 0

    def size_bytes(self, row: int) -> int:
        """Of its block."""
        return self._names[self._owners[row]].block_bytes

    def children(self, row: int) -> int:
        """Children in any state."""
        return self._children[row]

    def hint(self, row: int) -> tuple[int, int]:
        """(priority, expires at in Unix seconds or 0), as given when the block was stored, or renewed."""
        return self._priorities[row], self._expires[row]

    def renew(self, row: int, priority: int, expires_at: int) -> None:
        """Raise either to these values; neither is lowered."""
        self._priorities[row] = max(priority, self._priorities[row])
        self._expires[row] = max(expires_at, self._expires[row])
        self.has_hints = True

    def hinted(self, rows: range) -> list[int]:
        """Those of these rows that have a priority or a ttl."""
        columns = (self._priorities, self._expires)
        said = [np.frombuffer(one, one.typecode)[rows.start : rows.stop] != 0 for one in columns]
        return (np.flatnonzero(said[0] | said[1]) + rows.start).tolist()

    def chain(self, row: int) -> list[int]:
        """The row and all its ancestors: the deepest first."""
        rows = []
        while row != NO_ROW:
            rows.append(row)
            row = self._parents[row]
        return rows

    @property
    def child_counts(self) -> Column:
        """`children`, by row: a view that must be dropped before the index grows."""
        return np.frombuffer(self._children, np.int32)

    def families(self, rows: Sequence[int]) -> list[int]:
        """These rows and all their descendants: the deepest first."""
        live = np.frombuffer(self._states, np.uint8)[: self._next_row] != 0
        up = np.append(np.frombuffer(self._parents, np.int32)[: self._next_row], NO_ROW)
        up[:-1][~live] = NO_ROW
        found = np.zeros(len(up), bool)  # the last one is of `NO_ROW`
        found[np.asarray(rows, np.int64)] = True
        while (up != NO_ROW).any():  # twice as far in each round
            found |= found[up]
            up = up[up]
        members = np.flatnonzero(found)
        depths = np.frombuffer(self._depths, np.int32)[members]
        order: list[int] = members[np.argsort(-depths, kind="stable")].tolist()
        return order

    def rows(self, namespace: int) -> Iterator[int]:
        names = self._names[namespace]
        yield from names.visible.values()
        yield from names.hidden.values()

    @property
    def rows_end(self) -> int:
        return self._next_row

    def rows_and_depths(self, namespace: int, first: int, stop: int) -> tuple[Column, Column]:
        """Rows of a namespace from `first` to before `stop`, in any state."""
        states = np.frombuffer(self._states, np.uint8)[first : min(stop, self._next_row)]
        owners = np.frombuffer(self._owners, np.int16)[first : first + len(states)]
        rows = np.flatnonzero((owners == namespace) & (states != 0)) + first
        return rows, np.frombuffer(self._depths, np.int32)[rows]

    def is_row_of(self, row: int, namespace: int) -> bool:
        """Whether it is a row of that namespace, in any state."""
        return self._states[row] != 0 and self._owners[row] == namespace

    def visible_blocks(self, namespace: int | None = None) -> int:
        """Blocks that a match can find, in one namespace or in all."""
        chosen = self._names if namespace is None else [self._names[namespace]]
        return sum(len(names.visible) for names in chosen)

    # Changing ------------------------------------------------------------------------------------------------------

    def insert(self, namespace: int, key: bytes, parent: int, priority: int = 0, expires_at: int = 0) -> int:
        """A pending row below `parent` (`NO_ROW` for a first block). The key must be new to the namespace."""
        names = self._names[namespace]
        assert key not in names.visible and key not in names.hidden
        row = self._new_row()
        self._keys[row] = key
        self.names[row] = int.from_bytes(key[:8], "little", signed=True) ^ namespace << 48
        self._parents[row] = parent
        self._children[row] = 0
        self._depths[row] = self._depths[parent] + 1 if parent != NO_ROW else 0
        self._owners[row] = namespace
        self._states[row] = _PENDING
        self._priorities[row] = priority
        self._expires[row] = expires_at
        if priority or expires_at:
            self.has_hints = True
        names.hidden[key] = row
        names.inserted = True
        if parent != NO_ROW:
            self._children[parent] += 1
        return row

    def publish(self, row: int) -> bool:
        """A pending or refilled row becomes visible; whether it was pending. Its parent is visible, or lost."""
        before = self._states[row]
        assert before in (_PENDING, _LOST)
        namespace, key = self._owners[row], self._keys[row]
        names = self._names[namespace]
        del names.hidden[key]
        names.visible[key] = row
        self._states[row] = _VISIBLE
        self._why_lost.pop(row, None)
        if self.changes.is_watching:
            self.changes.note(namespace, key, BlockPlace.DRAM, self._depths[row])
        if self.awaits.heads:
            self.awaits.published(namespace, key)
        names.forgotten.pop(key[:_REMEMBERED_BYTES] + names.mark, None)
        return before == _PENDING

    def mark_lost(self, row: int, why: TierMiss = TierMiss.CORRUPT) -> None:
        """A visible row's frames failed a check, or their epoch was retired; its children keep their place."""
        assert self._states[row] == RowState.VISIBLE
        names, key = self._names[self._owners[row]], self.key(row)
        del names.visible[key]
        names.hidden[key] = row
        self._states[row] = RowState.LOST
        if why is not TierMiss.CORRUPT:
            self._why_lost[row] = why
        if self.changes.is_watching:
            self.changes.note(self._owners[row], key, BlockPlace.NOWHERE, self._depths[row])

    def why_lost(self, row: int) -> TierMiss:
        """Of a row that is lost, or was a moment ago."""
        return self._why_lost.get(row, TierMiss.CORRUPT)

    def not_refilled(self, row: int) -> None:
        """A lost row that a put began to refill stays lost."""
        self.awaits.gave_up(self._owners[row], self.key(row))

    def moved_above(self, row: int) -> None:
        """DRAM has a visible row's block again."""
        if self.changes.is_watching:
            self.changes.note(self._owners[row], self.key(row), BlockPlace.DRAM, self._depths[row])

    def moved_below(self, row: int) -> None:
        """NVMe alone has a visible row's block from now on."""
        if self.changes.is_watching:
            self.changes.note(self._owners[row], self.key(row), BlockPlace.NVME, self._depths[row])

    def remove(self, row: int, *, remember: bool = False, stamp: int = 0) -> int:
        """Take a childless row out; returns its parent. remember: it was evicted, so that a miss can say so. stamp: for
        `stamp_of_eviction`."""
        assert self._children[row] == 0, "a block goes before its parent"
        namespace, key, parent = self._owners[row], self._keys[row], self._parents[row]
        names = self._names[namespace]
        is_visible = self._states[row] == _VISIBLE
        del (names.visible if is_visible else names.hidden)[key]
        if is_visible and self.changes.is_watching:
            self.changes.note(namespace, key, BlockPlace.NOWHERE, self._depths[row])
        if self.awaits.heads and self._states[row] == _PENDING:
            self.awaits.gave_up(namespace, key)
        self._states[row] = 0
        self._why_lost.pop(row, None)
        self._keys[row] = None
        self._free_rows.append(row)
        if parent != NO_ROW:
            self._children[parent] -= 1
        if remember:
            names.forgotten[key[:_REMEMBERED_BYTES] + names.mark] = stamp << 1 | (self._expires[row] > 0)
            if len(names.forgotten) > self._forgotten_limit:
                names.forgotten.popitem(last=False)
        return parent

    def forget(self, tenant: bytes) -> None:
        """Drop the remembered evictions of a purged tenant."""
        self._forgotten.pop(tenant, OrderedDict()).clear()

    @property
    def remembered(self) -> dict[bytes, int]:
        """Remembered evictions, by tenant."""
        return {tenant: len(keys) for tenant, keys in self._forgotten.items()}

    # Many at once, after a restart ---------------------------------------------------------------------------------

    def load(
        self, namespace: int, keys: Sequence[bytes], depths: Column, priorities: Column, expires_at: Column
    ) -> range:
        """Visible rows for blocks that were found on disk, each key new to the namespace. `link` follows at once."""
        names = self._names[namespace]
        heads = np.frombuffer(b"".join([key[:8] for key in keys]), np.int64)
        first = self._next_row
        stop = first + len(keys)
        self._grow(stop)
        self._next_row = stop
        self._keys[first:stop] = keys
        np.frombuffer(self.names, np.int64)[first:stop] = heads ^ namespace << 48
        for column, values in (
            (self._children, 0),
            (self._depths, depths),
            (self._owners, namespace),
            (self._expires, expires_at),
            (self._priorities, priorities),
        ):
            np.frombuffer(column, column.typecode)[first:stop] = values
        self._states[first:stop] = bytes([_VISIBLE]) * len(keys)
        self.has_hints = self.has_hints or bool(np.any(priorities)) or bool(np.any(expires_at))
        rows = range(first, stop)
        before = len(names.visible)
        names.visible.update(zip(keys, rows, strict=True))
        assert len(names.visible) == before + len(keys) and not names.hidden.keys() & keys, "a key is loaded once"
        if self.awaits.heads:
            self.awaits.appeared(namespace, names.visible)
        return rows

    def link(self, rows: range, parents: Column) -> None:
        """Give loaded rows their parents: rows one block less deep, or `NO_ROW`; none of them pending."""
        np.frombuffer(self._parents, self._parents.typecode)[rows.start : rows.stop] = parents
        children = np.frombuffer(self._children, self._children.typecode)
        np.add.at(children, parents[parents != NO_ROW], 1)

    def check(self) -> None:
        """The columns, the dictionaries and the chains agree."""
        children = [0] * self._next_row
        live = 0
        self.awaits.check(lambda number, key: key in self._names[number].visible)
        assert max(self.remembered.values(), default=0) <= self._forgotten_limit
        for number, names in enumerate(self._names):
            for table, states in (
                (names.visible, {RowState.VISIBLE}),
                (names.hidden, {RowState.PENDING, RowState.LOST}),
            ):
                for key, row in table.items():
                    live += 1
                    assert self._states[row] in states and self._keys[row] == key and self._owners[row] == number
                    parent = self._parents[row]
                    if parent != NO_ROW:
                        children[parent] += 1
                        assert self._states[parent] != RowState.FREE and self._owners[parent] == number
                        assert self._depths[row] == self._depths[parent] + 1
                        if self._states[row] == RowState.VISIBLE:
                            assert self._states[parent] in (RowState.VISIBLE, RowState.LOST)
                    else:
                        assert self._depths[row] == 0
        assert live + len(self._free_rows) == self._next_row
        for row in range(self._next_row):
            if self._states[row] != RowState.FREE:
                assert self._children[row] == children[row]

    def _new_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        row = self._next_row
        self._grow(row + 1)
        self._next_row += 1
        return row

    def expect(self, rows: int) -> int:
        """Make columns for so many more rows; returns the last row's number."""
        self._grow(self._next_row + rows)
        return self._next_row + rows - 1

    def _grow(self, rows: int) -> None:
        missing = rows - len(self._states)
        if missing <= 0:
            return
        more = max(missing, 1024, len(self._states) >> 3)
        self._keys = np.concatenate([self._keys, np.empty(more, dtype=object)])
        columns = self._parents, self._children, self._depths, self._owners, self._expires, self._priorities, self.names
        for column in columns:
            column.frombytes(bytes(column.itemsize * more))
        self._states.extend(bytes(more))


IN_COLUMNS = 2048
"""Blocks of a chain from which on numpy is faster."""
TierRuns = tuple[tuple[HitTier, int], ...]
"""The tiers of a chain's blocks: runs of (tier, blocks)."""


def tier_runs(rows: Sequence[int], is_above: Callable[[int], bool], above: Callable[[], Column]) -> TierRuns:
    """The fastest tier of each readable block, as runs. above: `is_above`, by row."""
    if len(rows) <= IN_COLUMNS:
        runs = groupby(HitTier.DRAM if is_above(row) else HitTier.NVME for row in rows)
        return tuple((tier, len(list(run))) for tier, run in runs)
    is_here = above()[np.array(rows, np.int64)] != 0
    ends = [0, *(np.flatnonzero(is_here[1:] != is_here[:-1]) + 1).tolist(), len(rows)]
    return tuple((HitTier.DRAM if is_here[at] else HitTier.NVME, stop - at) for at, stop in pairwise(ends))


# Which blocks go for a new one, before any of them does ---------------------------------------------------------------
#
#     DRAM   leaves, worst first > what would go with each > as many blocks of one namespace as an extent takes
#     NVMe   the same > a slab that would be empty by then > its blocks, and their descendants
#
# Frames move in DRAM, so whichever blocks go, an extent comes free, provided that one is not in use: a reader may have
# its memory mapped. On NVMe frames stay where they are, and blocks that were used at the same time lie in many slabs:
# evicting one leaf after the other until any slab is empty would lose most of them.


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
