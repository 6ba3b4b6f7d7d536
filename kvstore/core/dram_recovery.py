"""DRAM recovery: takes over the blocks that an earlier process left in DRAM, which the supervisor kept mapped for this
one.

    ledgers say what was readable > headers name the blocks > parents before children, in slices under the lock > found

It runs once NVMe is known, since a block in DRAM may hang below one that only NVMe has. Blocks that this process has
stored meanwhile take precedence. A frame is believed by its ledger and its header's MAC; its payload is verified when
it is first leased (`Leasing.lease`). A frame that fails a check, or has no way to it, is given up. `Recovery` runs both
tiers' recovery in that order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.block.errors import StoreError
from kvstore.block.identity import TenantKeys, root_key
from kvstore.core.nvme_recovery import NvmeRecovery, is_of, space_of
from kvstore.core.rows.index import NO_ROW, OpenedNamespace, RowState
from kvstore.core.shared import Shared
from kvstore.status.tree import RecoveryStatus
from tiering.counts.tally import CheckedAt
from tiering.errors import BlockCorrupt, BlockMissing, TierError
from tiering.frame import FrameHeader, digest, open_header
from tiering.tier import NO_PLACE, SlotClass

SLICE_BLOCKS = 256
"""Taken over at a time: the lock is held for a few milliseconds."""
PAUSE_SECONDS = 1e-4
"""Between two slices, so that other threads get the lock."""

_FAULTS = (TierError, StoreError, OSError, ValueError, LookupError, OverflowError, MemoryError)
"""What ledgers and headers that make no sense, or a machine that lacks memory, can end it with."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _FoundFrame:
    place: int
    header: FrameHeader
    header_digest: bytes


@dataclass(slots=True)
class _Family:
    """The frames of one block and generation, by part."""

    header: FrameHeader
    frames: dict[int, _FoundFrame] = field(default_factory=dict)


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
            for space, families in self._found(tenants):
                self._take_over(space, families)
            if self._extents:
                _log.info(
                    "memory of the process before was taken over",
                    extra={"extents": len(self._extents), "blocks": self.taken, "frames_given_up": self.given_up},
                )
        except _FAULTS:  # blocks that were not taken over are misses
            _log.exception("memory of the process before could not be taken over")

    # What is there -------------------------------------------------------------------------------------------------

    def _found(self, tenants: Mapping[bytes, TenantKeys]) -> Iterator[tuple[OpenedNamespace, list[_Family]]]:
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
            families: dict[tuple[bytes, int], _Family] = {}
            for number, slot_class in extents:
                self._read(number, slot_class, families)
            is_known = space is not None and all(is_of(space, slot_class) for _, slot_class in extents)
            if space is None or not is_known:  # its tenant's keys are gone
                self._give_up(frame.place for family in families.values() for frame in family.frames.values())
                continue
            yield space, list(families.values())

    def _read(self, number: int, slot_class: SlotClass, families: dict[tuple[bytes, int], _Family]) -> None:
        useless = []
        for place, generation, raw in self._blocks.dram.found_in(number):
            header = self._header(raw, generation, slot_class)
            if header is None:
                useless.append(place)
                continue
            family = families.setdefault((header.prefix_key, generation), _Family(header))
            if slot_class.part in family.frames:  # a copy that was being moved
                useless.append(place)
            else:
                family.frames[slot_class.part] = _FoundFrame(place, header, digest(raw))
        self._give_up(useless)

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

    # Into the tables -----------------------------------------------------------------------------------------------

    def _take_over(self, space: OpenedNamespace, families: list[_Family]) -> None:
        root = root_key(space.namespace.layout.block_tokens)
        by_key = {
            family.header.prefix_key: family for family in sorted(families, key=lambda one: one.header.generation)
        }
        order: list[_Family] = []
        seen: set[bytes] = set()
        for family in by_key.values():
            chain = []
            current: _Family | None = family
            while current is not None and current.header.prefix_key not in seen:
                seen.add(current.header.prefix_key)
                chain.append(current)
                current = by_key.get(current.header.parent)
            order += reversed(chain)
        older = [family for family in families if by_key[family.header.prefix_key] is not family]
        self._give_up(frame.place for family in older for frame in family.frames.values())
        for first in range(0, len(order), SLICE_BLOCKS):
            if self.closing.wait(PAUSE_SECONDS):
                return
            useless: list[int] = []
            with self._lock:
                for family in order[first : first + SLICE_BLOCKS]:
                    if self._insert(space, family, root):
                        self.taken += 1
                    else:
                        useless += [frame.place for frame in family.frames.values()]
            self._give_up(useless)

    def _insert(self, space: OpenedNamespace, family: _Family, root: bytes) -> bool:
        """Whether a block is whole and its parent known. Under the lock."""
        blocks, header = self._blocks, family.header
        parts = range(len(space.classes))
        if any(part not in family.frames for part in parts):
            return False
        row = blocks.index.find(space.number, header.prefix_key)
        if row == NO_ROW:
            parent = NO_ROW
            if header.block_index or header.parent != root:
                parent = blocks.index.find(space.number, header.parent)
                if parent == NO_ROW or blocks.index.state(parent) is RowState.PENDING:
                    return False
                if blocks.index.depth(parent) + 1 != header.block_index:
                    return False
            row = blocks.begin(space.number, header.prefix_key, parent, header.priority, header.expires_at)
        elif not self._is_below_alone(row, header.generation):
            return False
        frames = [family.frames[part] for part in parts]
        places, digests = [frame.place for frame in frames], [frame.header_digest for frame in frames]
        blocks.taken_over(row, header.generation, places, digests)
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
