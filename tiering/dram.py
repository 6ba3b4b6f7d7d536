"""The DRAM tier: frames in extents of shared memory (floor 1).

Every extent belongs to one slot class (tenant, namespace, part) and is cut into that class's equal frames. This file
keeps slots and their states and hands out addresses; what to keep and whom to evict is decided in `residency`.

Calls are serialised by the caller (one lock above), except `new_extent`, which is slow and must run outside of it, and
the copies that people make through a `FrameSpan`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence

from tiering.errors import BlockMissing, TierFull
from tiering.extents import Extent, ExtentPool
from tiering.frame import HEADER_BYTES
from tiering.residency import FrameEvent, FrameState, SlotTable
from tiering.tier import SLOT_BITS, FrameSpan, SlotClass, Usage, extent_of, place_of, slot_of

_RESERVED = int(FrameState.RESERVED)


class DramExtent:
    """One extent in use: its memory, its class, and the states of its slots."""

    def __init__(self, number: int, slot_class: SlotClass, owner: _Class, memory: Extent) -> None:
        self.number = number
        self.slot_class = slot_class
        self.owner = owner
        self.frame_bytes = slot_class.frame_bytes
        self.memory = memory
        self.slots = SlotTable(memory.size_bytes // slot_class.frame_bytes)
        self.closing = False


class _Class:
    """The extents of one slot class, and which of them have free slots."""

    def __init__(self) -> None:
        self.extents: dict[int, DramExtent] = {}
        self.with_free: dict[int, DramExtent] = {}
        self.free = 0
        self.quarantined = 0


class DramTier:
    """`Tier` over extents. Also `TierFacts` for the decisions above."""

    name = "dram"

    def __init__(self, pool: ExtentPool) -> None:
        self._pool = pool
        self._extents: dict[int, DramExtent] = {}
        self._classes: dict[SlotClass, _Class] = {}
        self._next_number = 0
        self._closed = False

    @property
    def extent_bytes(self) -> int:
        """Bytes of every extent."""
        return self._pool.extent_bytes

    @property
    def budget_bytes(self) -> int:
        """Bytes of all extents that may be."""
        return self._pool.budget_bytes

    # The contract --------------------------------------------------------------------------------------------------

    def reserve(self, slot_class: SlotClass, count: int) -> list[int]:
        """Up to `count` places in extents of that class that have free slots."""
        owner = self._classes.get(slot_class)
        places: list[int] = []
        while owner is not None and owner.with_free and len(places) < count:
            extent = next(iter(owner.with_free.values()))
            slots = extent.slots
            take = min(count - len(places), slots.free)
            places += [place_of(extent.number, slot) for slot in slots.reserve(take)]
            owner.free -= take
            if not slots.free:
                del owner.with_free[extent.number]
        return places

    def commit(self, places: Sequence[int], headers: Sequence[bytes]) -> None:
        """Write the headers and make the frames readable."""
        extents = self._extents
        for place, header in zip(places, headers, strict=True):
            extent, slot = extents[extent_of(place)], slot_of(place)
            extent.slots.apply(slot, FrameEvent.COMMIT)  # first: it refuses a place that is not reserved
            start = slot * extent.frame_bytes
            extent.memory.view[start : start + HEADER_BYTES] = header

    def abort(self, places: Sequence[int]) -> None:
        """Give reserved places back."""
        self._step(places, FrameEvent.ABORT)

    def read(self, place: int) -> FrameSpan:
        """The bytes of a committed frame."""
        extent = self._extent(place)
        if extent.slots.states[slot_of(place)] != FrameState.RESIDENT:
            raise BlockMissing("no readable frame at that place")
        return extent.memory.frame(slot_of(place), extent.slot_class.frame_bytes)

    def delete(self, places: Sequence[int]) -> None:
        """Free committed frames at once: nothing here outlives the process."""
        self._step(places, FrameEvent.EVICT, FrameEvent.DELETED)

    def usage(self) -> Usage:
        """Slots by state over all extents, and bytes."""
        sums = [0] * len(FrameState)
        capacity = 0
        for extent in self._extents.values():
            capacity += extent.slots.capacity
            for state, count in enumerate(extent.slots.counts):
                sums[state] += count
        return Usage(
            free=sums[FrameState.FREE],
            reserved=sums[FrameState.RESERVED],
            used=sums[FrameState.RESIDENT],
            deleting=sums[FrameState.DELETING],
            quarantined=sums[FrameState.QUARANTINED],
            zombie=sums[FrameState.ZOMBIE],
            capacity=capacity,
            taken_bytes=self._pool.taken_bytes,
            budget_bytes=self._pool.budget_bytes,
        )

    # Beyond the contract: readers that are late, frames that are bad ------------------------------------------------

    def retain(self, places: Sequence[int]) -> None:
        """Evicted, but a reader may still have them mapped: not reused until `let_go`."""
        self._step(places, FrameEvent.RETAIN)

    def let_go(self, places: Sequence[int]) -> None:
        """The last late reader is done; a place that was not evicted meanwhile is left as it is."""
        for place in places:
            extent = self._extents.get(extent_of(place))
            if extent is not None and extent.slots.states[slot_of(place)] == FrameState.ZOMBIE:
                self._step([place], FrameEvent.LET_GO)

    def condemn(self, places: Sequence[int]) -> None:
        """A check failed: the slots are not used again before their extent is given back."""
        self._step(places, FrameEvent.CONDEMN)
        for place in places:
            self._extents[extent_of(place)].owner.quarantined += 1

    def reserved_span(self, place: int) -> FrameSpan:
        """The bytes of a reserved frame, for its producer to fill. Raises `BlockMissing` once the tier is closed."""
        extent = self._extent(place)
        assert extent.slots.states[slot_of(place)] == FrameState.RESERVED
        return extent.memory.frame(slot_of(place), extent.slot_class.frame_bytes)

    def own(self, places: Iterable[int], rows: Iterable[int]) -> None:
        """Note which block's frame stands at each place."""
        extents = self._extents
        for place, row in zip(places, rows, strict=True):
            extents[extent_of(place)].slots.owners[slot_of(place)] = row

    # Extents -------------------------------------------------------------------------------------------------------

    def new_extent(self) -> Extent:
        """Memory for one more extent, prefaulted. Slow: call it outside the lock. Raises `TierFull`."""
        return self._pool.create()

    def adopt(self, memory: Extent, slot_class: SlotClass) -> None:
        """Assign memory to a class. Memory that was still being made when the tier was closed goes back."""
        if self._closed:
            self._pool.destroy(memory)
            return
        number = self._next_number
        self._next_number += 1
        owner = self._classes.setdefault(slot_class, _Class())
        extent = DramExtent(number, slot_class, owner, memory)
        assert 0 < extent.slots.capacity < 1 << SLOT_BITS
        self._extents[number] = extent
        owner.extents[number] = extent
        owner.with_free[number] = extent
        owner.free += extent.slots.free

    def start_vacating(self, number: int, count: int) -> list[int]:
        """Take an extent's free slots out of use and reserve `count` places elsewhere in its class."""
        extent = self._extents[number]
        owner = self._classes[extent.slot_class]
        extent.closing = True
        if owner.with_free.pop(number, None) is not None:
            owner.free -= extent.slots.free
        places = self.reserve(extent.slot_class, count)
        if len(places) < count:
            self.abort(places)
            self.stop_vacating(number)
            raise TierFull("no slots to move the frames to")
        return places

    def stop_vacating(self, number: int) -> None:
        """Back into use, after a reader was faster."""
        extent = self._extents[number]
        owner = self._classes[extent.slot_class]
        extent.closing = False
        if extent.slots.free:
            owner.with_free[number] = extent
            owner.free += extent.slots.free

    def retire(self, number: int) -> None:
        """Give back an extent that holds nothing readable; its memory goes with the last mapping."""
        extent = self._extents[number]
        counts = extent.slots.counts
        assert counts[FrameState.FREE] + counts[FrameState.QUARANTINED] == extent.slots.capacity
        del self._extents[number]
        owner = self._classes[extent.slot_class]
        del owner.extents[number]
        if owner.with_free.pop(number, None) is not None:
            owner.free -= extent.slots.free
        owner.quarantined -= counts[FrameState.QUARANTINED]
        if not owner.extents:
            del self._classes[extent.slot_class]
        self._pool.destroy(extent.memory)

    def close(self) -> None:
        """Give all memory back; readers that still map an extent keep it until they let go."""
        for extent in self._extents.values():
            self._pool.destroy(extent.memory)
        self._closed = True
        self._extents.clear()
        self._classes.clear()
        self._pool.close()

    # Facts for decisions -------------------------------------------------------------------------------------------

    def free_slots(self, slot_class: SlotClass) -> int:
        """Free slots of a class, extents that are being emptied left out."""
        owner = self._classes.get(slot_class)
        return owner.free if owner is not None else 0

    def has_room(self) -> bool:
        """Whether the budget allows another extent."""
        return self._pool.has_room()

    def reclaimable_classes(self) -> Iterator[SlotClass]:
        """Classes that could do with one extent less."""
        for slot_class, owner in self._classes.items():
            if owner.free + owner.quarantined >= self.extent_bytes // slot_class.frame_bytes:
                yield slot_class

    def extents_of(self, slot_class: SlotClass) -> Iterable[DramExtent]:
        """The extents of a class that are not being emptied already."""
        owner = self._classes.get(slot_class)
        return [] if owner is None else [extent for extent in owner.extents.values() if not extent.closing]

    def all_extents(self, slot_class: SlotClass) -> Iterable[DramExtent]:
        """Every extent of a class."""
        owner = self._classes.get(slot_class)
        return [] if owner is None else list(owner.extents.values())

    def class_of(self, extent: int) -> SlotClass:
        """The class of an extent."""
        return self._extents[extent].slot_class

    def is_reserved(self, place: int) -> bool:
        """Whether a producer still owns the place."""
        return self._extents[extent_of(place)].slots.states[slot_of(place)] == _RESERVED

    def span_at(self, place: int) -> FrameSpan:
        """The bytes at a place whatever its state: for readers that hold a lease, and for producers.

        Raises `BlockMissing` where the extent was given back: under a lease, only a condemned frame can lose its.
        """
        extent = self._extents.get(place >> SLOT_BITS)  # spelled out: every block of every get comes through here
        slot = place & (1 << SLOT_BITS) - 1
        if extent is None or slot >= extent.slots.capacity:
            raise BlockMissing("no frame at that place")
        return extent.memory.frame(slot, extent.frame_bytes)

    def check(self) -> None:
        """Invariant 1, in every extent and in sum; the classes' counts are their extents' counts."""
        for extent in self._extents.values():
            extent.slots.check()
        for owner in self._classes.values():
            open_extents = [extent for extent in owner.extents.values() if not extent.closing]
            assert owner.free == sum(extent.slots.free for extent in open_extents)
            assert set(owner.with_free) == {extent.number for extent in open_extents if extent.slots.free}
            assert owner.quarantined == sum(
                extent.slots.counts[FrameState.QUARANTINED] for extent in owner.extents.values()
            )
        usage = self.usage()
        parts = (usage.free, usage.reserved, usage.used, usage.deleting, usage.quarantined, usage.zombie)
        assert sum(parts) == usage.capacity and min(parts) >= 0
        assert usage.taken_bytes >= len(self._extents) * self.extent_bytes
        assert usage.taken_bytes <= usage.budget_bytes

    def _extent(self, place: int) -> DramExtent:
        extent = self._extents.get(extent_of(place))
        if extent is None or slot_of(place) >= extent.slots.capacity:
            raise BlockMissing("no frame at that place")
        return extent

    def _step(self, places: Iterable[int], *events: FrameEvent) -> None:
        """One or more steps in the life of each frame."""
        extents = self._extents
        for place in places:
            extent = extents[extent_of(place)]
            slot = slot_of(place)
            for event in events:
                state = extent.slots.apply(slot, event)
            if not state and not extent.closing:  # it is free
                owner = extent.owner
                owner.free += 1
                owner.with_free[extent.number] = extent


def copy_frame(source: FrameSpan, target: FrameSpan) -> None:
    """All bytes of a frame, without the interpreter lock."""
    assert len(source.view) == len(target.view)
    ctypes.memmove(target.address, source.address, len(source.view))
