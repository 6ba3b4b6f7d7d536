"""Room in DRAM: slots for puts and promotions, by eviction, new extents and emptied ones; and what clients map of it.

The lock is the store's; it is not held while extents are made, frames are copied or clients are waited for. Memory that
clients still map is waited for, by puts alone, as `UnmapWait` allows.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput
from kvstore.core.shared import GIVE_WAY_SECONDS, Shared, SlotRequest
from tiering.counts.tally import CheckedAt
from tiering.dram.extents import Extent
from tiering.dram.tier import FrameCopy, MoveOutcome, Mover
from tiering.dram.unmap_wait import (
    COLLECTIVE_LOOKS,
    LOOKS_SECONDS,
    PUT_SECONDS,
    SharedExtent,
    Unmapped,
    UnmapWait,
    look,
)
from tiering.errors import BlockMissing, TierFull, TierUnavailable
from tiering.residency import Evict, Grow, Vacate
from tiering.tier import SlotClass, extent_of

EVICTED_BLOCKS = 512
"""Blocks evicted by an operator under one hold of the lock."""
RETIRED_BYTES = 16 << 20
"""The same for memory given back to the system; at least one extent."""


@dataclass(frozen=True, slots=True)
class ExtentMove:
    """An extent being emptied: copies to make, outside the lock."""

    extent: int
    copies: list[FrameCopy]


class Room:
    """Finds slots in one store's DRAM, shares extents with clients, and gives empty ones back. Thread-safe."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._blocks, self._lower = shared, shared.blocks, shared.lower
        self._clock, self._leases, self._reservations = shared.clock, shared.leases, shared.reservations
        self._mover = Mover(shared.blocks.dram, shared.blocks.keys)
        self._unmapping = threading.Condition(shared.lock)
        self._unmap_wait = UnmapWait()
        self.vacating: dict[int, ExtentMove] = {}
        """Extents that are being emptied, by number."""
        self.emptied: dict[int, None] = {}
        """Namespaces that may have empty extents."""

    def find_slots(self, record: SlotRequest) -> MissReason | None:
        """Slots for all of these rows, as far as there is room or can be made; returns why it stopped before. Not under
        the lock."""
        scarce = refused = False  # the machine had no memory for another extent: now, and at the last attempt
        unmap_wait = PUT_SECONDS if record.is_put else 0.0  # a lease has an engine's deadline
        has_waited = False
        for taken in range(self._shared.limits.room_steps):
            ends_at = record.room_until
            if taken and ends_at is not None and self._clock.monotonic_seconds() >= ends_at:
                return MissReason.DEADLINE
            with self._shared.lock:
                step: SlotClass | ExtentMove | list[int] | MissReason | None = MissReason.DISABLED
                if not record.cancelled and not self._shared.closed:
                    step = self._take_slots(record, scarce, unmap_wait > 0)
                if step is None:
                    return None
                if isinstance(step, MissReason):
                    is_wanted = not (record.is_fetched or record.cancelled or self._shared.closed)
                    if is_wanted and self._shared.fetched.give_way():
                        continue
                    if not self._leases.ending or has_waited or self._shared.closed:
                        return step
                    has_waited = True  # ended leases pinned what could make room
                    self._leases.finish_all()
                    continue
            if isinstance(step, ExtentMove):
                self._vacate(step)
                scarce = False
            elif isinstance(step, list):
                waited, has_come = self._await_memory(record, step)
                unmap_wait = unmap_wait - waited if has_come else 0.0
            elif self._grow(step):
                refused = False
            else:
                if refused:  # not even after one was given back
                    return MissReason.TIER_DOWN
                scarce = refused = True
        return MissReason.DEADLINE

    def _await_memory(self, record: SlotRequest, awaited: list[int]) -> tuple[float, bool]:
        """awaited: memory that was given back and that clients still map. Returns how long it waited, and whether to
        look for slots again."""
        tenant, dram = self._blocks.spaces[record.namespace].tenant, self._blocks.dram
        mapped = set(awaited)
        waited = 0.0
        with self._shared.lock:
            began_at = self._clock.monotonic_seconds()
            if not self._unmap_wait.begin(tenant, awaited, began_at):
                return 0.0, True  # others began in between: look again
            try:
                for seconds in LOOKS_SECONDS[:COLLECTIVE_LOOKS] if record.is_collective else LOOKS_SECONDS:
                    if record.cancelled or self._shared.closed:
                        return waited, False
                    self._unmapping.wait(seconds)  # unmapping sends no notification
                    waited += seconds
                    now_mapped = dram.awaited()
                    mapped.intersection_update(now_mapped)
                    if not mapped or not now_mapped:
                        return waited, True
                if not record.is_collective:
                    self._unmap_wait.in_vain(mapped)
                return waited, False
            finally:
                now = self._clock.monotonic_seconds()
                self._unmap_wait.end(tenant, now - began_at, now, is_collective=record.is_collective)

    def _take_slots(
        self, record: SlotRequest, scarce: bool, is_patient: bool
    ) -> SlotClass | ExtentMove | list[int] | MissReason | None:
        blocks = self._blocks
        take_places = blocks.place if record.is_put else blocks.make_place_above
        classes = blocks.spaces[record.namespace].classes
        while record.filled < len(record.rows):
            missing = record.rows[record.filled :]
            free = min([blocks.dram.free_slots(slot_class) for slot_class in classes])
            if free:
                taken = missing[:free]
                for column, places in zip(record.places, take_places(record.namespace, taken), strict=True):
                    column += places
                record.filled += len(taken)
                continue
            blocks.dram.look_at_guarded()
            if all([blocks.dram.free_slots(slot_class) for slot_class in classes]):
                continue
            mapped = blocks.dram.awaited()
            if mapped:  # giving back more frees nothing before clients unmap this
                tenant, now = blocks.spaces[record.namespace].tenant, self._clock.monotonic_seconds()
                if is_patient and self._unmap_wait.may_wait(tenant, mapped, now):
                    return mapped
                if not blocks.evict_own(len(missing), record.namespace):
                    return self._no_room(record)
                continue
            groups = blocks.givers(record.namespace)
            dram = blocks.dram
            may_grow = not scarce and dram.has_room()
            move = blocks.residency.room(classes, dram.ledger, dram.extent_bytes, groups, may_grow=may_grow)
            if isinstance(move, Evict):
                if not blocks.evict_for(record.namespace, len(missing)):
                    return self._no_room(record)  # the rest frees no extent, or leads to blocks that stay
            elif isinstance(move, Grow):
                return move.slot_class
            elif isinstance(move, Vacate):
                return self._start_vacating(move)
            elif scarce:
                return MissReason.TIER_DOWN
            else:  # no block may be evicted at all, or none for this tenant
                has_evictable = next(blocks.residency.worst(), None) is not None
                return MissReason.QUOTA if has_evictable else self._no_room(record)
        return None

    def _no_room(self, record: SlotRequest) -> MissReason:
        if not record.is_put:
            return MissReason.PINNED_FULL  # the lease's answer has the details
        reason, record.detail = self.why_full(record)
        return reason

    def evict(self, blocks: int) -> int:
        """Evict up to that many of the worst leaves; returns how many went. Raises `BadInput`."""
        if not isinstance(blocks, Integral) or blocks < 0:
            raise BadInput(f"blocks={blocks!r}; give a whole number, 0 or more")
        with self._shared.lock:
            self._shared.check_open()
            self._shared.end_due()
            self._leases.finish_all()
            gone = 0
            while True:
                self._shared.check_open()
                most = min(EVICTED_BLOCKS, blocks - gone)
                evicted = self._blocks.evict_worst(most)
                gone += evicted
                if evicted < most or gone == blocks:
                    return gone
                self._shared.moves_done.wait(GIVE_WAY_SECONDS)

    def why_full(self, asker: SlotRequest | None = None) -> tuple[MissReason, str]:
        """Why DRAM can evict nothing. `pinned_full` only if a client must release something first. Under the lock."""
        dram = self._blocks.dram
        if dram.awaited() or dram.guarded_bytes():
            return MissReason.DEADLINE, "memory that changes hands is still mapped by clients; try again"
        if self._shared.fetched.has_slots:
            return MissReason.DEADLINE, "blocks from elsewhere are on their way into what could make room; try again"
        if len(self._leases):
            return MissReason.PINNED_FULL, "what could make room is leased, or being stored or moved"
        is_moving = self.vacating or self._leases.promoting or self._blocks.promoting or self._blocks.demoting
        if is_moving or any(one is not asker for one in self._reservations.values()):
            return MissReason.DEADLINE, "what could make room is being stored or moved; try again"
        return MissReason.QUOTA, "the prompt alone takes all the memory that it may; its first blocks are kept"

    def why_full_below(self) -> MissReason:
        """The same for NVMe. Under the lock."""
        lower = self._lower
        assert lower is not None
        if lower.tier.has_room():  # but the disk has no room for another slab
            return MissReason.TIER_DOWN
        if len(self._leases):
            return MissReason.PINNED_FULL
        may_go = next(lower.residency.worst(), None) is not None
        return MissReason.QUOTA if self._blocks.shares is not None and may_go else MissReason.DEADLINE

    def _grow(self, slot_class: SlotClass) -> bool:
        try:
            memory = self._blocks.dram.new_extent()
        except TierFull:
            return True  # another thread took the last of the budget: look again
        except TierUnavailable:
            return False
        self._blocks.dram.prepare()
        with self._shared.lock:
            space = next(space for space in self._blocks.spaces if slot_class in space.classes)
            self._blocks.dram.adopt(memory, slot_class, space.about)
        return True

    def _start_vacating(self, move: Vacate) -> ExtentMove:
        dram, residency = self._blocks.dram, self._blocks.residency
        part = dram.class_of(move.extent).part
        targets = dram.start_vacating(move.extent, len(move.rows))
        if move.rows:  # one extent is one slot class, which is one namespace
            self._blocks.pin(self._blocks.index.namespace_of(move.rows[0]), move.rows)
        copies = [
            FrameCopy(row, residency.place(row, part), target) for row, target in zip(move.rows, targets, strict=True)
        ]
        job = ExtentMove(move.extent, copies)
        self.vacating[move.extent] = job
        return job

    def _vacate(self, job: ExtentMove) -> None:
        results = [MoveOutcome.GONE] * len(job.copies)  # if the mover is interrupted
        try:
            results = self._mover.run(job.copies)
        finally:
            with self._shared.lock:
                self._end_job(job, results)

    def _end_job(self, job: ExtentMove, results: Sequence[MoveOutcome]) -> None:
        del self.vacating[job.extent]
        emptied = not self._shared.closed
        for copy, outcome in zip(job.copies, results, strict=True):
            emptied = self._settle(copy, outcome) and emptied
        if emptied:
            self._blocks.dram.retire(job.extent)
            self._blocks.counters["reclaimed_extents"] += 1
        elif not self._shared.closed:
            self._blocks.dram.stop_vacating(job.extent)
        self._shared.moves_done.notify_all()

    def _settle(self, copy: FrameCopy, outcome: MoveOutcome) -> bool:
        blocks, residency = self._blocks, self._blocks.residency
        if self._shared.closed:
            return False
        blocks.unpin(blocks.index.namespace_of(copy.row), [copy.row])
        place_extent = extent_of(copy.source)
        part = blocks.dram.class_of(place_extent).part
        here = residency.place(copy.row, part) == copy.source
        in_use = residency.pins.counts[copy.row] or copy.source in residency.held
        if outcome is not MoveOutcome.GONE and here and not in_use:
            is_sound = outcome is MoveOutcome.MOVED
            blocks.tally.checked(CheckedAt.MOVE, blocks.dram.class_of(place_extent).frame_bytes, is_sound=is_sound)
            if outcome is MoveOutcome.MOVED and blocks.relocate(copy.row, part, copy.target):
                blocks.counters["moved_frames"] += 1
                return True
            blocks.quarantine(copy.row)
            here = False
        blocks.dram.abort([copy.target])
        return not here

    def retire_emptied(self) -> None:
        """Give back empty extents. Not under the lock: unmapping is slow."""
        most = max(1, RETIRED_BYTES // self._blocks.dram.extent_bytes)
        gone: list[Extent] = []
        while self.emptied:
            with self._shared.lock:
                number = next(iter(self.emptied), None)
                if number is None or self._shared.closed:
                    return
                gone = self._blocks.retire_empty(number, most)
                if len(gone) < most:
                    self.emptied.pop(number, None)
                else:
                    self._shared.moves_done.wait(GIVE_WAY_SECONDS)
            gone.clear()

    # Extents as other processes map them -----------------------------------------------------------------------------

    def share(self, extent: int, tenant: bytes, holder: int, fills: Collection[int] | None = None) -> SharedExtent:
        """Open an extent for another process: to read, or with `fills`, the namespaces it stores into, to write.

        Raises `BlockMissing` if the extent is gone, is another tenant's, or is to be written and belongs to none of
        these.
        """
        with self._shared.lock:
            self._shared.check_open()
            dram = self._blocks.dram
            if dram.gone([extent]) or dram.class_of(extent).tenant != tenant:
                raise BlockMissing("no extent of that number")
            spaces = self._blocks.spaces
            namespaces = {spaces[number].classes[0].namespace for number in fills or ()}
            if fills is not None and dram.class_of(extent).namespace not in namespaces:
                raise BlockMissing("no extent of a namespace that is being stored into")
            frame_bytes = dram.class_of(extent).frame_bytes
        # Without the lock: a client can make this slow by what it did to an extent.
        descriptor = dram.share(extent, holder, writable=fills is not None)
        return SharedExtent(descriptor, dram.extent_bytes, frame_bytes)

    def is_mapped(self, extent: int, holder: int) -> bool:
        """Whether a holder still has an extent mapped or open. Takes no lock; it can be slow."""
        return self._blocks.dram.is_shared(extent, holder)

    def unmapped(self, extents: Sequence[int], holder: int) -> Unmapped:
        """How many leading extents a holder has unmapped, as far as a short inquiry tells. Takes no lock."""
        is_shared = self._blocks.dram.is_shared
        return look(extents, lambda extent: is_shared(extent, holder), self._clock.thread_seconds)

    def gone(self, extents: Iterable[int]) -> list[int]:
        """Which of these extents were given back; clients that share them must unmap them."""
        with self._shared.lock:
            return self._blocks.dram.gone(extents)
