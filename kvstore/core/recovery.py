"""Recovery after a restart: what an earlier run left on NVMe and in DRAM is taken in, while the store serves already.

    slabs   > recovery order (outside the lock) > slices of it under the lock, most recently stored first > recovered
    extents > ledgers say what was readable, headers name the blocks > the same order, and slices > recovered

NVMe comes first, since a block in DRAM may hang below one that only NVMe has. What the running store stores or drops
meanwhile takes precedence.

NVMe: a readable block also gets its copy from disk, unless NVMe has a newer one. The copy of a block that is just being
stored or written is undecided: it and its descendants are looked at again at the end, and left for the next start if
they are undecided even then. Nothing is evicted from NVMe before recovery is over: a block may lead to others that are
not recovered yet. If a crash took the index as well, a header does not tell whether its frame was written to its end.
Such frames are read and verified first: a put that finds its block on disk reports it as durable without reading it.

DRAM, which the supervisor kept mapped for this process: a frame is believed by its ledger and its header's MAC; its
payload is verified when it is first leased (`read_first`). One that fails a check, or has no way to it, is given up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvstore.block.errors import StoreError
from kvstore.block.identity import TenantKeys, root_key, unpack_about
from kvstore.config import MAX_NAMESPACES
from kvstore.core.index import NO_ROW, Column, OpenedNamespace, RowState
from kvstore.core.shared import Shared
from kvstore.core.table import BlockTable, Lower
from kvstore.status.tree import RecoveryStatus
from tiering.counts.tally import CheckedAt
from tiering.errors import BlockCorrupt, BlockMissing, TierError, TierUnavailable
from tiering.faults import SHORTAGES, kind_of
from tiering.frame import (
    HEADER_BYTES,
    KEY_BYTES,
    MAX_BLOCK_INDEX,
    MAX_NUMBER,
    FrameHeader,
    digest,
    open_header,
    verify_payload,
)
from tiering.nvme.slab import entry_of_header, split_entries
from tiering.nvme.slab_files import private_pages
from tiering.nvme.slab_recovery import Found
from tiering.nvme.tier import NvmeTier
from tiering.slab_header import SlabHeader
from tiering.tier import NO_PLACE, SlotClass

SLICE_BLOCKS, DRAM_SLICE_BLOCKS = 4096, 256
"""Taken in at a time: the lock is held for a few milliseconds."""
PAUSE_SECONDS = 1e-4
"""Between two slices: without it this thread takes the lock again before a waiting one wakes up, for seconds on end."""
LOOKS = 40
"""Times that undecided blocks are looked at again."""
LOOK_SECONDS = 0.05
"""Between two of these looks."""
VERIFIED_AT_ONCE = 64
"""Frames that a thread verifies between two reports of progress."""
AT_ROOT, ELSEWHERE = -1, -2
"""A parent's position where it has none: a first block; a parent that was not found."""

_WORDS = KEY_BYTES // 8
_WAITING = -2
"""In place of a row: the block is undecided."""
_DRAM_FAULTS = (TierError, StoreError, OSError, ValueError, LookupError, OverflowError, MemoryError)
"""What ledgers and headers that make no sense, or a machine that lacks memory, can end DRAM's recovery with."""

_log = logging.getLogger(__name__)


# The order ------------------------------------------------------------------------------------------------------------
#
# Frames are found in any order. A recovery order pairs the parts of each block, leaves out blocks without a way to
# them, and sorts the rest: the most recently stored chain first, an ancestor before its descendants. So a store can
# take it in piece by piece: at any moment it has complete chains, and the most recent prompts are served first. Pure
# but for `is_sound`, and columns throughout: a million blocks take part of a second.


@dataclass(frozen=True)
class RecoveryOrder:
    """Columns, one entry per block. parents: positions in this very order, each before its child, or one of the two
    above. parent_keys: of parents that are elsewhere. places: one column per part."""

    keys: Column
    parents: Column
    parent_keys: Column
    depths: Column
    generations: Column
    priorities: Column
    expires_at: Column
    places: list[Column]

    def __len__(self) -> int:
        return len(self.keys)


def recovery_order(
    found: Sequence[Found], parts: int, root: bytes, is_sound: Callable[[Sequence[int]], bool]
) -> tuple[RecoveryOrder, list[int], list[int]]:
    """The blocks of one namespace in order; the places of superseded or incomplete frames; those of blocks without a
    way to them.

    A block is whole if all its parts are there with one generation; of several such generations the highest counts.
    root: the parent key of first blocks. is_sound: asked, where there are several generations, whether the frames at
    these places pass their checks.
    """
    found, impossible = _possible(found)
    places = np.concatenate([np.asarray(one.places, np.int64) for one in found])
    part_of = np.repeat([one.header.slot_class.part for one in found], [len(one.places) for one in found])
    keys, parent_keys = _words(found, "key"), _words(found, "parent")
    generations = _column(found, "generation", np.int64)
    chosen, useless = _pair(keys, generations, places, part_of, parts, is_sound)
    depths = _column(found, "block_index", np.int64)
    # From here on one entry per block, that of part 0, in their order on disk, where neighbours are often one chain.
    at = chosen[:, 0]
    parents = _parents(keys[at], parent_keys[at], depths[at], np.frombuffer(root, np.uint64))
    order, lost = _order(parents, depths[at], generations[at])
    position = np.full(len(at) + 2, -1, np.int64)
    position[order] = np.arange(len(order))
    position[AT_ROOT], position[ELSEWHERE] = AT_ROOT, ELSEWHERE
    at = at[order]
    blocks = RecoveryOrder(
        keys[at].view(f"V{KEY_BYTES}").ravel(),
        position[parents[order]],
        parent_keys[at].view(f"V{KEY_BYTES}").ravel(),
        depths[at],
        generations[at],
        _column(found, "priority", np.int64)[at],
        _column(found, "expires_at", np.int64)[at],
        [places[chosen[order, part]] for part in range(parts)],
    )
    return blocks, impossible + useless, places[chosen[lost]].ravel().tolist()


def _possible(found: Sequence[Found]) -> tuple[list[Found], list[int]]:
    kept, impossible = [], []
    for one in found:
        entries = one.entries
        wrong = (entries["generation"] > MAX_NUMBER) | (entries["expires_at"] > MAX_NUMBER)
        wrong |= entries["block_index"] > MAX_BLOCK_INDEX
        if wrong.any():
            at = np.asarray(one.places, np.int64)
            impossible += at[wrong].tolist()
            one = one._replace(places=at[~wrong].tolist(), entries=entries[~wrong])
        kept.append(one)
    return kept, impossible


def split_keys(column: Column) -> list[bytes]:
    """A column of keys, one by one."""
    keys: list[bytes] = column.tolist()
    return keys


def _column(found: Sequence[Found], name: str, kind: type[np.signedinteger[Any]]) -> Column:
    return np.concatenate([one.entries[name].astype(kind) for one in found])


def _words(found: Sequence[Found], name: str) -> Column:
    """Keys as rows of integers, which numpy compares much faster."""
    return np.concatenate([one.entries[name] for one in found]).view(np.uint64).reshape(-1, _WORDS)


def _pair(
    keys: Column,
    generations: Column,
    places: Column,
    part_of: Column,
    parts: int,
    is_sound: Callable[[Sequence[int]], bool],
) -> tuple[Column, list[int]]:
    """For each whole block the entries of its parts, one row per block; and the places of all other entries.

    Keys are outputs of a keyed hash, so their first word tells all but a few apart.
    """
    order = np.argsort(keys[:, 0])
    first = keys[order, 0]
    starts = np.flatnonzero(np.r_[True, first[1:] != first[:-1]]) if len(first) else np.empty(0, np.int64)
    sizes = np.diff(np.r_[starts, len(first)])
    groups = order[starts[sizes == parts][:, None] + np.arange(parts)]
    if parts > 1:
        groups = np.take_along_axis(groups, np.argsort(part_of[groups], axis=1), axis=1)
    plain = np.ones(len(groups), bool)
    for part in range(1, parts):
        mine = groups[:, part]
        plain &= (part_of[mine] == part) & _equal(keys, mine, keys, groups[:, 0])
        plain &= generations[mine] == generations[groups[:, 0]]
    plain &= part_of[groups[:, 0]] == 0
    chosen = groups[plain]
    if chosen.size == len(keys):
        return chosen[np.argsort(chosen[:, 0])], []
    rest = np.ones(len(keys), bool)
    rest[chosen.ravel()] = False
    more, useless = _pair_slowly(keys, generations, places, part_of, parts, np.flatnonzero(rest).tolist(), is_sound)
    chosen = np.concatenate([chosen, more])
    return chosen[np.argsort(chosen[:, 0])], places[useless].tolist()


def _pair_slowly(
    keys: Column,
    generations: Column,
    places: Column,
    part_of: Column,
    parts: int,
    at: list[int],
    is_sound: Callable[[Sequence[int]], bool],
) -> tuple[Column, list[int]]:
    """The same for entries that do not pair at first sight: a part is missing, or a block was stored twice.

    A generation that is not whole, or not sound, does not hide older ones: its write may have been cut short, and the
    index that knew so may be gone. Returns entries in both cases.
    """
    frames: list[dict[bytes, dict[int, int]]] = [{} for _ in range(parts)]  # of each part: key -> generation -> entry
    for one in at:
        frames[part_of[one]].setdefault(keys[one].tobytes(), {})[int(generations[one])] = one
    whole = []
    for key, mine in frames[0].items():
        common = sorted(set(mine).intersection(*(part.get(key, ()) for part in frames[1:])), reverse=True)
        families = [[part[key][generation] for part in frames] for generation in common]
        if len(families) > 1:
            families = [next((one for one in families if is_sound(places[one].tolist())), families[0])]
        whole += families
    used = {entry for family in whole for entry in family}
    useless = [entry for entry in at if entry not in used]
    return np.array(whole, np.int64).reshape(-1, parts), useless


def _parents(keys: Column, parent_keys: Column, depths: Column, root: Column) -> Column:
    if not len(keys):
        return np.empty(0, np.int64)
    by_word = np.argsort(keys[:, 0])
    words, sought = keys[by_word, 0], np.ascontiguousarray(parent_keys[:, 0])
    order = np.argsort(sought)  # sorted, so that successive searches hit nearby memory
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = np.searchsorted(words, sought[order])
    ranks[ranks == len(keys)] = 0
    parents = by_word[ranks]
    same = _equal(keys, parents, parent_keys, slice(None))
    for child in np.flatnonzero(~same & (depths > 0)).tolist():  # several keys share that first word, or none has it
        rank = int(ranks[child]) + 1
        while rank < len(keys) and words[rank] == sought[child] and not same[child]:
            parents[child] = by_word[rank]
            same[child] = (keys[by_word[rank]] == parent_keys[child]).all()
            rank += 1
    parents[~same | (depths[parents] + 1 != depths)] = ELSEWHERE
    first = np.flatnonzero(depths == 0)
    parents[first[(parent_keys[first] == root).all(axis=1)]] = AT_ROOT
    return parents


def _equal(keys: Column, at: Column, others: Column, others_at: Column | slice) -> Column:
    differ = keys[at] ^ others[others_at]
    same: Column = (differ[:, 0] | differ[:, 1] | differ[:, 2] | differ[:, 3]) == 0
    return same


def _order(parents: Column, depths: Column, generations: Column) -> tuple[Column, Column]:
    """Positions sorted into the recovery order, and those without a way to them.

    A first block whose parent is another key, or a later one whose parent is the root, has no way to it; nor have its
    descendants. A parent that is elsewhere may be known to the store already.
    """
    by_depth = np.argsort(depths)
    edges = np.flatnonzero(np.diff(depths[by_depth], prepend=-1, append=-1)) if len(depths) else np.empty(0, np.int64)
    levels = [by_depth[start:stop] for start, stop in pairwise(edges)]
    lost = (parents == ELSEWHERE) & (depths == 0)
    newest = generations.copy()
    for level in levels:
        mine = parents[level]
        inner = mine >= 0
        lost[level[inner]] |= lost[mine[inner]]
    for level in reversed(levels):
        mine = parents[level]
        inner = mine >= 0
        np.maximum.at(newest, mine[inner], newest[level[inner]])
    kept = by_depth[~lost[by_depth]]
    return kept[np.argsort(-newest[kept], kind="stable")], np.flatnonzero(lost)


# NVMe -----------------------------------------------------------------------------------------------------------------


class _RecoveryCheck(IntEnum):
    WHOLE = 0
    TORN = 1
    UNREAD = 2


class _Proof(NamedTuple):
    """What reading whole frames has shown. torn, unread: places of frames that must never count, or not in this run."""

    whole: list[Found]
    torn: list[int]
    unread: list[int]


@dataclass(frozen=True, slots=True)
class _Undecided:
    """What was found of a namespace, each block's row, and the blocks that are undecided."""

    space: OpenedNamespace
    found: RecoveryOrder
    rows: Column
    blocks: list[int]


class NvmeRecovery:
    """Takes in a directory once. The lock is the store's."""

    def __init__(self, shared: Shared, lower: Lower[NvmeTier]) -> None:
        assert shared.blocks.below is not None
        self._blocks, self._below, self._lower = shared.blocks, shared.blocks.below, lower
        self._keys, self._lock = shared.blocks.keys, shared.lock
        self.succeeded = False
        """Whether all blocks on disk were taken in; others cannot be found before the next start."""
        self.closing = threading.Event()
        """Set it to end it early."""
        self.progress = RecoveryStatus()
        self._left: dict[int, list[int]] = {}  # by namespace: places left undecided for the next start
        self._below.is_loading, self._below.all_known = True, False

    def run(self, tenants: Mapping[bytes, TenantKeys]) -> None:
        """`load`, once; what is on disk and cannot be taken in is logged."""
        try:
            self.load(tenants)
            self.succeeded = not (any(one.unread for one in self._lower.tier.left_alone) or self.closing.is_set())
        except TierError as error:
            _log.error("what is on disk cannot be taken in: %s", error)
        except (MemoryError, RuntimeError) as error:
            if kind_of(error) not in SHORTAGES:
                raise
            _log.error("what is on disk cannot be taken in: %s (%s)", kind_of(error), error)
        finally:
            with self._lock:
                self._below.is_loading = False

    def forget(self, number: int) -> None:
        """Drop a namespace's blocks that were left for the next start. Under the lock, after loading."""
        self._lower.tier.delete(self._left.pop(number, []))
        for owner, key in [one for one in self._below.older if one[0] == number]:
            self._lower.tier.delete(self._below.older.pop((owner, key)))

    # Loading -------------------------------------------------------------------------------------------------------

    def load(self, tenants: Mapping[bytes, TenantKeys]) -> None:
        """Take in what is on disk; matches find it when this returns. Raises `TierUnavailable`."""

        def slots_done(done: int, total: int) -> None:
            self.progress = replace(self.progress, slots=done, all_slots=total)

        groups: dict[tuple[bytes, bytes], list[Found]] = {}
        for found in self._lower.tier.load(slots_done):
            owner = found.header.slot_class
            groups.setdefault((owner.tenant, owner.namespace), []).append(found)
            if self.closing.is_set():
                return
        unproven = [one for group in groups.values() for one in group if not one.is_proven]
        if unproven:
            owed = sum(len(one.places) * one.header.slot_class.frame_bytes for one in unproven)
            self.progress = replace(self.progress, to_verify_bytes=owed)
            _log.warning(
                "the index was lost in a crash: %.1f GiB of frames are verified before they count", owed / 2**30
            )
        undecided = []
        for (tenant, namespace), group in groups.items():
            with self._lock:
                space = space_of(self._blocks, tenants.get(tenant), namespace, group[0].header.about)
            mine = [one for one in group if space is not None and is_of(space, one.header.slot_class)]
            if space is not None and mine:
                undecided.append(self._take_in(space, mine))
        self._look_again([one for one in undecided if one is not None and one.blocks])
        with self._lock:
            self._below.all_known = not self.closing.is_set()

    def _take_in(self, space: OpenedNamespace, group: Sequence[Found]) -> _Undecided | None:
        root = root_key(space.namespace.layout.block_tokens)
        proof = self._proven(group)
        if self.closing.is_set():
            return None
        found, useless, lost = recovery_order(proof.whole, len(space.classes), root, partial(self._is_sound, space))
        rows = np.full(len(found), NO_ROW, np.int64)
        undecided = _Undecided(space, found, rows, [])
        with self._lock:
            self._blocks.expect(len(found))
        for first in range(0, len(found), SLICE_BLOCKS):
            if self.closing.wait(PAUSE_SECONDS):
                return undecided
            with self._lock:
                lost += self._insert(undecided, first, min(first + SLICE_BLOCKS, len(found)))
        if self.closing.is_set():
            return undecided
        self._lower.tier.delete(proof.torn)
        self._void(space, useless + lost, proof.unread)
        if not proof.unread:
            self._lower.tier.proved(one.header.number for one in group)
        return undecided

    def _proven(self, group: Sequence[Found]) -> _Proof:
        proof = _Proof([], [], [])
        with ThreadPoolExecutor(self._lower.tier.threads, "kv-verify") as pool:
            for one in group:
                if one.is_proven:
                    proof.whole.append(one)
                    continue
                firsts = range(0, len(one.places), VERIFIED_AT_ONCE)
                shares = [one.places[first : first + VERIFIED_AT_ONCE] for first in firsts]
                verdicts = list(chain(*pool.map(partial(self._verdicts, one.header.slot_class), shares)))
                if self.closing.is_set():
                    return _Proof([], [], [])
                at = [position for position, verdict in enumerate(verdicts) if verdict is _RecoveryCheck.WHOLE]
                proof.whole.append(Found(one.header, [one.places[position] for position in at], one.entries[at]))
                for place, verdict in zip(one.places, verdicts, strict=True):
                    if verdict is not _RecoveryCheck.WHOLE:
                        (proof.torn if verdict is _RecoveryCheck.TORN else proof.unread).append(place)
        return proof

    def _verdicts(self, slot_class: SlotClass, places: Sequence[int]) -> list[_RecoveryCheck]:
        if self.closing.is_set():
            return []
        frame = private_pages(slot_class.frame_bytes).view
        verdicts = [self._verdict(place, frame) for place in places]
        with self._lock:
            done = self.progress.verified_bytes + len(places) * slot_class.frame_bytes
            self.progress = replace(self.progress, verified_bytes=done)
        return verdicts

    def _void(self, space: OpenedNamespace, useless: list[int], unread: Sequence[int] = ()) -> None:
        """Free frames without a way to them; unless some frames or slabs could not be read: those may hold their other
        parts or ancestors, and be readable in the next run."""
        if self._lower.tier.left_alone or unread:
            self._left.setdefault(space.number, []).extend((*useless, *unread))
        else:
            self._lower.tier.delete(useless)

    def _look_again(self, undecided: list[_Undecided]) -> None:
        for _ in range(LOOKS):
            undecided = [one for one in undecided if one.blocks]
            if not undecided or self.closing.wait(LOOK_SECONDS):
                break
            for one in undecided:
                looked_at, one.blocks[:] = one.blocks[:], []
                useless: list[int] = []
                for first in range(0, len(looked_at), SLICE_BLOCKS):
                    self.closing.wait(PAUSE_SECONDS)
                    with self._lock:
                        for at in looked_at[first : first + SLICE_BLOCKS]:
                            useless += self._insert_one(one, at, one.found.keys[at].tobytes())
                self._void(one.space, useless)
        with self._lock:
            for one in undecided:
                for at in one.blocks:
                    name = one.space.number, one.found.keys[at].tobytes()
                    self._below.older[name] = [int(column[at]) for column in one.found.places]

    def _is_sound(self, space: OpenedNamespace, places: Sequence[int]) -> bool:
        frames = [memoryview(bytearray(slot_class.frame_bytes)) for slot_class in space.classes]
        return all(self._verdict(*one) is _RecoveryCheck.WHOLE for one in zip(places, frames, strict=True))

    def _verdict(self, place: int, frame: memoryview) -> _RecoveryCheck:
        try:
            self._lower.tier.read(place, frame)
            verify_payload(open_header(bytes(frame[:HEADER_BYTES]), self._keys), frame[HEADER_BYTES:])
        except BlockCorrupt:
            return _RecoveryCheck.TORN
        except TierUnavailable:
            return _RecoveryCheck.UNREAD
        return _RecoveryCheck.WHOLE

    def _insert(self, into: _Undecided, first: int, stop: int) -> list[int]:
        """Returns the places of blocks without a way to them. Under the lock."""
        space, found, rows = into.space, into.found, into.rows
        keys = split_keys(found.keys[first:stop])
        parents = found.parents[first:stop]
        if not self._is_plain(space, found, first, keys, parents, rows):
            if stop - first == 1:
                return self._insert_one(into, first, keys[0])
            middle = (first + stop) // 2
            return self._insert(into, first, middle) + self._insert(into, middle, stop)
        slice_ = slice(first, stop)
        columns = found.depths[slice_], found.priorities[slice_], found.expires_at[slice_]
        new = self._blocks.index.load(space.number, keys, *columns)
        rows[slice_] = new
        self._hang(space, found, slice_, new, np.where(parents == AT_ROOT, NO_ROW, rows[parents]))
        return []

    def _is_plain(
        self, space: OpenedNamespace, found: RecoveryOrder, first: int, keys: list[bytes], parents: Column, rows: Column
    ) -> bool:
        """Whether no block of a slice is known yet, and each one's parent is in the slice or was taken in and stays."""
        index = self._blocks.index
        if index.knows_any(space.number, keys) or (parents == ELSEWHERE).any():
            return False
        for parent in np.unique(parents[(parents >= 0) & (parents < first)]).tolist():
            row = int(rows[parent])
            if row < 0 or not _can_lead(index.state(row)) or index.namespace_of(row) != space.number:
                return False
            if index.key(row) != found.keys[parent].tobytes():
                return False
        return True

    def _insert_one(self, into: _Undecided, at: int, key: bytes) -> list[int]:
        """As `_insert` for one block, whatever is known of it already."""
        space, found, rows = into.space, into.found, into.rows
        index, below = self._blocks.index, self._lower.residency
        places = [int(column[at]) for column in found.places]
        rows[at] = NO_ROW
        row = index.find(space.number, key)
        parent = int(found.parents[at])
        if row != NO_ROW:  # stored anew, or being stored
            rows[at] = row if _can_lead(index.state(row)) else _WAITING
            if below.is_listed(row):  # NVMe has a newer copy
                assert below.place(row, 0) not in places, "a block is taken in once"
                self._lower.tier.delete(places)
                return []
            is_moving = row in self._blocks.demoting or below.place(row, 0) != NO_PLACE
            if index.state(row) is RowState.VISIBLE and not is_moving:
                self._below.adopt(row, int(found.generations[at]), places)
            else:
                into.blocks.append(at)
            return []
        parent_row = NO_ROW
        if parent != AT_ROOT:
            parent_row = index.find(space.number, found.parent_keys[at].tobytes())
            if (parent >= 0 and rows[parent] == _WAITING) or (
                parent_row != NO_ROW and not _can_lead(index.state(parent_row))
            ):
                rows[at] = _WAITING
                into.blocks.append(at)
                return []
            if parent_row == NO_ROW or index.depth(parent_row) + 1 != int(found.depths[at]):
                self._below.give_up_unread(space.number, key)  # its ancestor was evicted meanwhile
                return places
        slice_ = slice(at, at + 1)
        columns = found.depths[slice_], found.priorities[slice_], found.expires_at[slice_]
        new = index.load(space.number, [key], *columns)
        rows[at] = new.start
        self._hang(space, found, slice_, new, np.array([parent_row]))
        return []

    def _hang(self, space: OpenedNamespace, found: RecoveryOrder, slice_: slice, rows: range, parents: Column) -> None:
        places = [column[slice_] for column in found.places]
        self._blocks.grow_to(rows.stop - 1)
        self._below.loaded(rows, parents, found.generations[slice_], places)
        self.progress = replace(self.progress, blocks=self.progress.blocks + len(rows))


def _can_lead(state: RowState) -> bool:
    """Whether a row may have readable children. A pending one may still go, and would orphan them."""
    return state in (RowState.VISIBLE, RowState.LOST)


def space_of(
    blocks: BlockTable[NvmeTier], keys: TenantKeys | None, digest_of_namespace: bytes, about: bytes
) -> OpenedNamespace | None:
    """The namespace that stored frames belong to, added if unknown. about: the record stored with them.

    None if its keys are missing, if the record is another namespace's, or if it cannot be opened.
    """
    if keys is None:
        return None
    if (space := blocks.find_space(keys.tenant, digest_of_namespace)) is not None:
        return space
    try:
        payloads, namespace = unpack_about(about)
        if len(blocks.spaces) >= MAX_NAMESPACES:
            raise ValueError(f"{len(blocks.spaces)} others are there, and no further one has a place")
    except ValueError as error:
        _log.warning("blocks of namespace %s are left out: %s", digest_of_namespace.hex(), error)
        return None
    if namespace.digest() != digest_of_namespace:
        return None
    return blocks.add_space(keys, namespace, payloads)


def is_of(space: OpenedNamespace, slot_class: SlotClass) -> bool:
    """Whether frames of such slots are parts of a namespace's blocks."""
    return slot_class.part < len(space.classes) and space.classes[slot_class.part] == slot_class


# DRAM -----------------------------------------------------------------------------------------------------------------


class DramRecovery:
    """Runs once. The lock is the store's."""

    def __init__(self, shared: Shared) -> None:
        self._blocks, self._extents = shared.blocks, shared.blocks.dram.taken_over
        self._keys, self._lock = shared.blocks.keys, shared.lock
        self.closing = threading.Event()
        """Set it to end it early."""
        self.taken = 0
        self.given_up = 0

    def run(self, tenants: Mapping[bytes, TenantKeys]) -> None:
        """Take over what is sound. Nothing that the process before left makes this raise."""
        try:
            for space, found, digests in self._found(tenants):
                self._take_over(space, found, digests)
            if self._extents:
                _log.info(
                    "memory of the process before was taken over",
                    extra={"extents": len(self._extents), "blocks": self.taken, "frames_given_up": self.given_up},
                )
        except _DRAM_FAULTS:  # blocks that were not taken over are misses
            _log.exception("memory of the process before could not be taken over")

    def _found(
        self, tenants: Mapping[bytes, TenantKeys]
    ) -> Iterator[tuple[OpenedNamespace, list[Found], dict[int, bytes]]]:
        """Of each namespace its frames, as if extents were slabs, and the digests of their headers by place."""
        dram = self._blocks.dram
        groups: dict[tuple[bytes, bytes], list[tuple[int, SlotClass]]] = {}
        abouts: dict[tuple[bytes, bytes], bytes] = {}
        with self._lock:
            gone = set(dram.gone(self._extents))  # given back meanwhile because they were empty
            for number in [one for one in self._extents if one not in gone]:
                slot_class = dram.class_of(number)
                name = slot_class.tenant, slot_class.namespace
                groups.setdefault(name, []).append((number, slot_class))
                abouts[name] = dram.about(number)
        for (tenant, namespace), extents in groups.items():
            with self._lock:
                space = space_of(self._blocks, tenants.get(tenant), namespace, abouts[tenant, namespace])
            digests: dict[int, bytes] = {}
            read = [self._read(number, slot_class, digests) for number, slot_class in extents]
            found = [one for one in read if one is not None]
            if space is None or not all(is_of(space, slot_class) for _, slot_class in extents):
                self._give_up(digests)  # its tenant's keys are gone
            elif found:
                yield space, found, digests

    def _read(self, number: int, slot_class: SlotClass, digests: dict[int, bytes]) -> Found | None:
        places: list[int] = []
        entries, useless = [], []
        for place, generation, raw in self._blocks.dram.found_in(number):
            header = self._header(raw, generation, slot_class)
            if header is None:
                useless.append(place)
                continue
            places.append(place)
            entries.append(entry_of_header(header))
            digests[place] = digest(raw)
        self._give_up(useless)
        as_slab = SlabHeader(number, slot_class, len(places), b"", 0, b"", b"")
        return Found(as_slab, places, split_entries(b"".join(entries))) if places else None

    def _header(self, raw: bytes, generation: int, slot_class: SlotClass) -> FrameHeader | None:
        try:
            header = open_header(raw, self._keys)
        except BlockCorrupt:
            return None
        stamp = header.stamp
        is_here = SlotClass(stamp.tenant, stamp.namespace, stamp.part, stamp.frame_bytes) == slot_class
        return header if is_here and header.generation == generation else None

    def _give_up(self, places: Iterable[int]) -> None:
        gone = list(places)
        with self._lock:
            self._blocks.dram.delete(gone)
        self.given_up += len(gone)

    def _take_over(self, space: OpenedNamespace, found: list[Found], digests: Mapping[int, bytes]) -> None:
        root = root_key(space.namespace.layout.block_tokens)
        order, useless, lost = recovery_order(found, len(space.classes), root, lambda places: True)
        self._give_up(useless + lost)
        for first in range(0, len(order), DRAM_SLICE_BLOCKS):
            if self.closing.wait(PAUSE_SECONDS):
                return
            gone: list[int] = []
            with self._lock:
                for at in range(first, min(first + DRAM_SLICE_BLOCKS, len(order))):
                    places = [int(column[at]) for column in order.places]
                    if self._insert(space, order, at, places, [digests[place] for place in places]):
                        self.taken += 1
                    else:
                        gone += places
            self._give_up(gone)

    def _insert(
        self, space: OpenedNamespace, order: RecoveryOrder, at: int, places: list[int], digests: list[bytes]
    ) -> bool:
        """Whether a block's parent is known, and the block is not. Under the lock."""
        blocks, key, generation = self._blocks, order.keys[at].tobytes(), int(order.generations[at])
        row = blocks.index.find(space.number, key)
        if row == NO_ROW:
            parent = NO_ROW
            if order.parents[at] != AT_ROOT:
                parent = blocks.index.find(space.number, order.parent_keys[at].tobytes())
                if parent == NO_ROW or blocks.index.state(parent) is RowState.PENDING:
                    return False
                if blocks.index.depth(parent) + 1 != order.depths[at]:
                    return False
            row = blocks.begin(space.number, key, parent, int(order.priorities[at]), int(order.expires_at[at]))
        elif not self._is_below_alone(row, generation):
            return False
        blocks.taken_over(row, generation, places, digests)
        return True

    def _is_below_alone(self, row: int, generation: int) -> bool:
        blocks = self._blocks
        if blocks.lower is None or blocks.index.state(row) is not RowState.VISIBLE or blocks.is_above(row):
            return False
        return blocks.residency.place(row, 0) == NO_PLACE and blocks.lower.residency.generation(row) == generation


class Recovery:
    """Recovery of the tiers that a store has: NVMe first, then DRAM, in a thread."""

    def __init__(self, shared: Shared) -> None:
        self._dram = shared.blocks.dram
        self.of_nvme = NvmeRecovery(shared, shared.lower) if shared.lower is not None else None
        self._of_dram = DramRecovery(shared) if shared.blocks.dram.taken_over else None
        self._nvme_over, self._over = threading.Event(), threading.Event()
        if self.of_nvme is None:
            self._nvme_over.set()
            if self._of_dram is None:
                self._over.set()
        self._thread: threading.Thread | None = None

    def start(self, tenants: Mapping[bytes, TenantKeys]) -> None:
        if self._over.is_set():
            return
        if self.of_nvme is not None:
            self._dram.prepare()  # blocks on disk will be promoted
        self._thread = threading.Thread(target=self._run, args=(tenants,), name="kv-load", daemon=True)
        self._thread.start()

    def _run(self, tenants: Mapping[bytes, TenantKeys]) -> None:
        try:
            if self.of_nvme is not None:
                self.of_nvme.run(tenants)
        finally:
            self._nvme_over.set()
            if self._of_dram is not None:
                self._of_dram.run(tenants)
            self._over.set()

    @property
    def is_under_way(self) -> bool:
        return not self._over.is_set()

    @property
    def is_nvme_under_way(self) -> bool:
        return not self._nvme_over.is_set()

    @property
    def failed(self) -> bool:
        """Whether some of what is on disk could not be recovered."""
        return self.of_nvme is not None and self._nvme_over.is_set() and not self.of_nvme.succeeded

    @property
    def progress(self) -> RecoveryStatus | None:
        """Of NVMe; None without that tier."""
        return self.of_nvme.progress if self.of_nvme is not None else None

    def wait(self, seconds: float) -> bool:
        """Whether it is over after at most that long, and went well."""
        return self._over.wait(seconds) and not self.failed

    def stop(self, seconds: float) -> None:
        """End it early; NVMe's end is waited for at most that long."""
        if self._of_dram is not None:
            self._of_dram.closing.set()
        if self.of_nvme is not None:
            self.of_nvme.closing.set()
            if self._thread is not None:
                self._thread.join(seconds)

    def forget(self, number: int) -> None:
        """A namespace is dropped. Under the lock."""
        if self.of_nvme is not None:
            self.of_nvme.forget(number)


def read_first(shared: Shared, rows: Sequence[int], deadline: float) -> bool:
    """Verify taken-over blocks before their first lease, while they are pinned; bad ones are quarantined.

    False if there was no time for all of them: all but the first ones stay unverified.
    """
    blocks = shared.blocks
    for position, row in enumerate(rows):
        if position and shared.clock.monotonic_seconds() > deadline:
            return False
        space = blocks.spaces[blocks.index.namespace_of(row)]
        try:
            is_sound = all(blocks.verify(row, part) for part in range(len(space.classes)))
        except BlockMissing:  # quarantined by another reader, and its extent given back
            is_sound = False
        with shared.lock:
            if row not in blocks.unverified:
                continue  # another reader was faster
            blocks.tally.checked(CheckedAt.LEASE, space.block_bytes, is_sound=is_sound)
            blocks.unverified.discard(row)
            if not is_sound and blocks.is_above(row) and blocks.quarantine(row):
                blocks.unverified.add(row)
    return True
