"""NVMe recovery: takes in the blocks that an earlier run left on NVMe, while the store serves already.

    slabs > recovery order (outside the lock) > slices of it under the lock, most recently stored first > recovered

Whatever the running store stores or drops meanwhile takes precedence. A readable block also gets its copy from disk,
unless NVMe has a newer one. The copy of a block that is just being stored or written is undecided: it and its
descendants are looked at again at the end, and left for the next start if they are undecided even then. Nothing is
evicted from NVMe before recovery is over: a block may lead to others that are not recovered yet.

If a crash took the index as well, a header does not tell whether its frame was written to its end. Such frames are read
and verified first: a put that finds its block on disk reports it as durable without reading it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvstore.block.about import unpack_about
from kvstore.block.identity import TenantKeys, root_key
from kvstore.config import MAX_NAMESPACES
from kvstore.core.rows.below import Lower
from kvstore.core.rows.index import NO_ROW, Column, OpenedNamespace, RowState
from kvstore.core.rows.recovery_order import AT_ROOT, ELSEWHERE, RecoveryOrder, recovery_order, split_keys
from kvstore.core.shared import Shared
from kvstore.core.table import BlockTable
from kvstore.status.tree import RecoveryStatus
from tiering.errors import BlockCorrupt, TierError, TierUnavailable
from tiering.faults import SHORTAGES, kind_of
from tiering.frame import HEADER_BYTES, open_header, verify_payload
from tiering.nvme.slab_files import private_pages
from tiering.nvme.slab_recovery import Found
from tiering.nvme.tier import NvmeTier
from tiering.tier import NO_PLACE, SlotClass

SLICE_BLOCKS = 4096
"""Taken in at a time: the lock is held for a few milliseconds."""
PAUSE_SECONDS = 1e-4
"""Between two slices: without it this thread takes the lock again before a waiting one wakes up, for seconds on end."""
LOOKS = 40
"""Times that undecided blocks are looked at again."""
LOOK_SECONDS = 0.05
"""Between two of these looks."""
VERIFIED_AT_ONCE = 64
"""Frames that a thread verifies between two reports of progress."""

_log = logging.getLogger(__name__)


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


_WAITING = -2
"""In place of a row: the block is undecided."""


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
