"""The DRAM tier: frames in extents of shared memory.

Every extent belongs to one slot class (tenant, namespace, part) and is cut into that class's equal frames. This file
keeps slots and their states and hands out addresses; `residency` decides what to keep and what to evict.

Callers serialise their calls (one lock above), except those that can be slow and should run outside of it
(`new_extent`, `share`, `is_shared`), and the copies that clients make through a `FrameSpan`.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

from tiering.dram.extents import Extent, ExtentPool, MemoryKeeper, found_extent
from tiering.dram.keeping import KeptExtent, Ledger
from tiering.errors import BlockCorrupt, BlockMissing, EpochRetired, TierUnavailable
from tiering.faults import HANDED_OVER, KEPT, kind_of
from tiering.frame import HEADER_BYTES, MacKeys, generation_in, open_header, verify_payload
from tiering.slots import FrameEvent, FrameState, Piece, SlotLedger
from tiering.tier import SLOT_BITS, SLOT_MASK, FrameSpan, SlotClass, Usage, extent_of, place_of, slot_of

_FREE = int(FrameState.FREE)
_RESERVED, _RESIDENT, _ZOMBIE = int(FrameState.RESERVED), int(FrameState.RESIDENT), int(FrameState.ZOMBIE)


class DramExtent(Piece):
    """One extent in use, and its memory."""

    def __init__(self, number: int, slot_class: SlotClass, memory: Extent) -> None:
        super().__init__(number, slot_class, memory.size_bytes // slot_class.frame_bytes)
        self.memory = memory
        self.ledger: Ledger | None = None


class DramTier:
    """`Tier` over extents. ledger: their slots, as the decisions above read them."""

    def __init__(
        self, pool: ExtentPool, new_number: Callable[[], int] | None = None, keeper: MemoryKeeper | None = None
    ) -> None:
        """new_number: below 2**`EXTENT_BITS`, unique for each extent. keeper: holds them for the next process."""
        self._pool = pool
        self.extent_bytes = self.piece_bytes = pool.extent_bytes
        self.budget_bytes = pool.budget_bytes
        self.prepare, self.new_extent, self.has_room = pool.prepare, pool.create, pool.has_room
        self.awaited = pool.awaited
        self._keeper = keeper
        # Guarded extents (mapped by clients of an earlier process): when each is next asked about.
        self._guarded: dict[int, float] = {}
        self._guard = 0
        self._left: dict[int, bytes] = {}  # by taken-over extent, the states of its slots at that time
        self.ledger: SlotLedger[DramExtent] = SlotLedger()
        self._extents = self.ledger.pieces
        self.reserve, self.own, self.free_slots = self.ledger.reserve, self.ledger.own, self.ledger.free_slots
        self.extents_of, self.all_extents = self.ledger.open_pieces, self.ledger.all_pieces
        self.stop_vacating = self.ledger.stop_closing
        self._new_number = new_number or count().__next__
        self.taken_over: list[int] = []  # extents of an earlier process, by number
        self.retired = 0  # extents that were given back, since the start
        self.mapped_still: Callable[[int], object] = lambda number: None
        """Called with each extent that is given back while other processes map it."""
        self._closed = False

    # The contract --------------------------------------------------------------------------------------------------

    def commit(self, places: Sequence[int], frames: Sequence[bytes | memoryview]) -> None:
        """Write what is not in place yet, usually the headers, and make the frames readable."""
        extents = self._extents
        for place, frame in zip(places, frames, strict=True):
            extent, slot = extents[place >> SLOT_BITS], place & SLOT_MASK
            extent.slots.apply(slot, FrameEvent.COMMIT)  # first: it refuses a place that is not reserved
            start = slot * extent.frame_bytes
            extent.memory.view[start : start + len(frame)] = frame
            if extent.ledger is not None:
                extent.ledger.write(slot, generation_in(extent.memory.view[start : start + HEADER_BYTES]))

    def abort(self, places: Sequence[int]) -> None:
        self.ledger.step(places, FrameEvent.ABORT)

    def read(self, place: int, into: memoryview) -> None:
        """Copy a committed frame."""
        into[:] = self.committed_span(place).view

    def delete(self, places: Sequence[int]) -> None:
        """Free committed frames at once."""
        self._strike(places)
        self.ledger.step(places, FrameEvent.EVICT, FrameEvent.DELETED)

    def usage(self) -> Usage:
        """Slots by state over all extents, and bytes."""
        return self.ledger.usage(self._pool.taken_bytes, self._pool.budget_bytes)

    # Beyond the contract: readers that are late, frames that are bad ------------------------------------------------

    def retain(self, places: Sequence[int]) -> None:
        """Evicted, but a reader may still have them mapped: not reused until `allow_reuse`."""
        self._strike(places)
        self.ledger.step(places, FrameEvent.RETAIN)

    def allow_reuse(self, places: Sequence[int]) -> None:
        """The last late reader is done; a place that was not evicted meanwhile stays unchanged."""
        extents = self._extents
        for place in places:  # spelled out: a lease may have had many thousand blocks
            extent = extents.get(place >> SLOT_BITS)
            if extent is not None and extent.slots.states[place & SLOT_MASK] == _ZOMBIE:
                self.ledger.step([place], FrameEvent.LET_GO)

    def quarantine(self, places: Sequence[int]) -> None:
        """A check failed: the slots are not reused before their extent is given back."""
        self._strike(places)
        self.ledger.step(places, FrameEvent.CONDEMN)

    def committed_span(self, place: int) -> FrameSpan:
        """A committed frame's bytes in place. Raises `BlockMissing`."""
        extent = self._extent(place)
        if extent.slots.states[slot_of(place)] != FrameState.RESIDENT:
            raise BlockMissing("no readable frame at that place")
        return extent.memory.frame(slot_of(place), extent.slot_class.frame_bytes)

    def reserved_span(self, place: int) -> FrameSpan:
        """A reserved frame's bytes, for its producer to fill. Raises `BlockMissing` once the tier is closed."""
        extent = self._extent(place)
        assert extent.slots.states[slot_of(place)] == FrameState.RESERVED
        return extent.memory.frame(slot_of(place), extent.slot_class.frame_bytes)

    # Extents -------------------------------------------------------------------------------------------------------

    def adopt(self, memory: Extent, slot_class: SlotClass, about: bytes = b"") -> None:
        """Assign memory to a class. Memory that was still being made when the tier was closed is given back.

        about: the record by which the next process names the namespace.
        """
        if self._closed:
            self._pool.destroy(memory)
            return
        extent = DramExtent(self._new_number(), slot_class, memory)
        if self._keeper is not None:
            self._have_kept(extent, about, self._keeper)
        self.ledger.add(extent)

    def _have_kept(self, extent: DramExtent, about: bytes, keeper: MemoryKeeper) -> None:
        name = keeper.new_name()
        try:
            extent.ledger = Ledger.new(extent.slot_class, extent.slots.capacity, about, name)
        except OSError as error:  # no memory for it: this extent goes with this process
            self._pool.faults.failed(KEPT, kind_of(error), str(error))
            return
        extent.memory.name = name
        self._pool.faults.worked(KEPT)
        keeper.keep(name, extent.memory.descriptor, extent.ledger.descriptor)

    def take_over(self, kept: Iterable[KeptExtent], guard: int) -> None:
        """Take over extents of an earlier process; `taken_over` has the usable ones then, their frames readable.

        An extent that its clients, holders below `guard`, may still map is not used for other frames before they unmap
        it.
        """
        self._guard = guard
        for one in kept:
            extent = self._taken_over(one)
            if extent is None:
                continue
            if extent.memory.is_shared(0, guard - 1):
                extent.closing = True
                self._guarded[extent.number] = 0.0
            self.ledger.add(extent)
            self.taken_over.append(extent.number)

    def _taken_over(self, kept: KeptExtent) -> DramExtent | None:
        """None if it cannot be used; it is given back then."""
        memory, books = found_extent(kept.extent), found_extent(kept.ledger)
        if memory is not None:
            memory.name = kept.name
            if not self._pool.take_over(memory):
                memory = None
        if memory is None or books is None:
            if memory is not None:
                self._pool.destroy(memory)
            if books is not None:
                books.close()
            return None
        try:
            ledger = Ledger.found(books, kept.name, memory.size_bytes)
        except BlockCorrupt:
            books.close()
            self._pool.destroy(memory)
            return None
        extent = DramExtent(self._new_number(), ledger.slot_class, memory)
        extent.ledger = ledger
        states = bytes([_RESIDENT if generation else _FREE for generation in ledger.generations])
        self._left[extent.number] = states
        extent.slots.load(states)
        return extent

    def found_in(self, number: int) -> Iterator[tuple[int, int, bytes]]:
        """Place, ledger generation and header of every frame that an extent had when it was taken over; once, since its
        free slots are in use from then on. An extent without frames may be gone."""
        for slot, state in enumerate(self._left.pop(number, b"")):
            if state == _RESIDENT:
                extent = self._extents[number]
                assert extent.ledger is not None
                view = extent.memory.frame(slot, extent.frame_bytes).view
                yield place_of(number, slot), extent.ledger.generations[slot], bytes(view[:HEADER_BYTES])

    def newest_generation(self) -> int:
        """The highest of all frames that were taken over, or 0."""
        ledgers = [extent.ledger for extent in self._extents.values() if extent.ledger is not None]
        return max((max(ledger.generations, default=0) for ledger in ledgers), default=0)

    def about(self, number: int) -> bytes:
        """The namespace record that was kept with an extent."""
        ledger = self._extents[number].ledger
        return ledger.about if ledger is not None else b""

    def is_guarded(self, place: int) -> bool:
        """Whether freeing a slot is useless for now, since clients of an earlier process may still map it."""
        return bool(self._guarded) and extent_of(place) in self._guarded

    def guarded_bytes(self) -> int:
        """Bytes of guarded extents, readable and not reusable; as of the last look."""
        return len(self._guarded) * self.extent_bytes

    def look_at_guarded(self) -> None:
        """Release guarded extents that the earlier process's clients have unmapped. If clients made the question slow,
        it is asked more rarely."""
        for number in self._pool.let_go(self._guarded, self._is_guarded_mapped):
            if number in self._extents:
                self.ledger.stop_closing(number)

    def _is_guarded_mapped(self, number: int) -> bool:
        extent = self._extents.get(number)
        return extent is not None and extent.memory.is_shared(0, self._guard - 1)

    def start_vacating(self, number: int, count: int) -> list[int]:
        """Take an extent's free slots out of use and reserve `count` places elsewhere in its class, which has them."""
        slot_class = self.class_of(number)
        self.ledger.start_closing(number)
        places = self.reserve(slot_class, count)
        assert len(places) == count, "an extent is emptied into free slots"
        return places

    def retire(self, number: int) -> Extent:
        """Give back an extent without readable frames; its memory goes with the last mapping, and the returned
        object."""
        extent = self.ledger.remove(number)
        self._left.pop(number, None)
        is_free = self._pool.destroy(extent.memory, extent.slot_class.tenant)
        if extent.ledger is not None:
            extent.ledger.close()
        self.retired += 1
        if not is_free:
            self.mapped_still(number)
        return extent.memory

    def share(self, number: int, holder: int, *, writable: bool) -> int:
        """A descriptor of an extent for another process; see `Extent.share`. Raises `BlockMissing`. Needs no lock."""
        extent = self._extents.get(number)
        if extent is None:
            raise BlockMissing("no extent of that number")
        faults = self._pool.faults
        try:
            descriptor = extent.memory.share(holder, writable=writable)
        except TierUnavailable as error:
            if number not in self._extents:  # given back in between
                raise BlockMissing("no extent of that number") from error
            faults.failed(HANDED_OVER, kind_of(error), str(error))
            raise
        faults.worked(HANDED_OVER)
        return descriptor

    def is_shared(self, number: int, holder: int) -> bool:
        """Whether that holder may still have an extent mapped. Needs no lock, and can be slow."""
        extent = self._extents.get(number)
        return extent is not None and extent.memory.is_shared(holder, holder)

    def gone(self, numbers: Iterable[int]) -> list[int]:
        """Which of these extents were given back."""
        return [number for number in numbers if number not in self._extents]

    def close(self) -> None:
        """Give all memory back; readers that still map an extent keep it until they unmap it."""
        self._pool.close()  # first: pages that a supervisor holds for the next process stay unchanged
        for extent in self._extents.values():
            self._pool.destroy(extent.memory)
        self._closed = True
        self.ledger.clear()

    # Facts for decisions -------------------------------------------------------------------------------------------

    def held(self) -> dict[bytes, int]:
        """Extents of each tenant, including those taken back that clients still have open."""
        lingering = self._pool.lingering()
        return Counter(self.ledger.held) + lingering if lingering else self.ledger.held

    def pieces(self) -> int:
        """The most extents there may be."""
        return self.budget_bytes // self.extent_bytes

    def class_of(self, extent: int) -> SlotClass:
        """The class of an extent."""
        return self._extents[extent].slot_class

    def is_reserved(self, place: int) -> bool:
        """Whether a producer still owns the place."""
        return self.ledger.state(place) == _RESERVED

    def spans_at(self, places: Iterable[int]) -> list[FrameSpan]:
        """The bytes at places in any state, for readers with a lease and for producers; up to the first whose extent
        was given back: under a lease, only a quarantined frame can lose its extent."""
        extents, spans = self._extents, []
        for place in places:  # spelled out, `frame` too: every block of every put and get comes through here
            extent = extents.get(place >> SLOT_BITS)
            slot = place & SLOT_MASK
            if extent is None or slot >= extent.slots.capacity:
                break
            size, mapped = extent.frame_bytes, extent.memory
            start = slot * size
            spans.append(FrameSpan(mapped.memory.address + start, mapped.view[start : start + size], mapped.memory))
        return spans

    def span_at(self, place: int) -> FrameSpan:
        """The bytes at one place in any state. Raises `BlockMissing` if its extent was given back."""
        spans = self.spans_at([place])
        if not spans:
            raise BlockMissing("no frame at that place")
        return spans[0]

    def check(self) -> None:
        """Invariant 1, in every extent and in sum; the classes' counts are their extents' counts."""
        self.ledger.check()
        usage = self.usage()
        parts = (usage.free, usage.reserved, usage.used, usage.deleting, usage.quarantined, usage.zombie)
        assert sum(parts) == usage.capacity and min(parts) >= 0
        assert usage.taken_bytes >= len(self._extents) * self.extent_bytes
        assert len(self._extents) * self.extent_bytes <= usage.budget_bytes
        for extent in self._extents.values():
            self._check_ledger(extent)

    def _check_ledger(self, extent: DramExtent) -> None:
        if extent.ledger is None:
            return
        for slot, generation in enumerate(extent.ledger.generations.tolist()):
            assert (extent.slots.states[slot] == _RESIDENT) == bool(generation), slot

    def _strike(self, places: Iterable[int]) -> None:
        """Call it before anything else: the next process must not find these frames."""
        if self._keeper is None:
            return
        for place in places:
            extent = self._extents[extent_of(place)]
            if extent.ledger is not None:
                extent.ledger.strike(slot_of(place))

    def _extent(self, place: int) -> DramExtent:
        extent = self._extents.get(extent_of(place))
        if extent is None or slot_of(place) >= extent.slots.capacity:
            raise BlockMissing("no frame at that place")
        return extent


# The copies that `residency` decided on ------------------------------------------------------------------------------


class MoveOutcome(Enum):
    """Of a copy. Unless `MOVED`, the target holds nothing and is still reserved."""

    MOVED = "moved"
    CORRUPT = "corrupt"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class FrameCopy:
    """One frame from its place to a reserved one of the same class."""

    row: int
    source: int
    target: int


class Mover:
    """Copies frames between places of the DRAM tier. It changes no table, and runs outside the store's lock, so the
    caller pins its frames."""

    def __init__(self, dram: DramTier, keys: MacKeys) -> None:
        self._dram = dram
        self._keys = keys

    def run(self, copies: Sequence[FrameCopy]) -> list[MoveOutcome]:
        """Copy each frame and verify it at the target. Bytes that fail a check are never reported as moved."""
        return [self._copy(copy) for copy in copies]

    def _copy(self, copy: FrameCopy) -> MoveOutcome:
        try:
            source = self._dram.committed_span(copy.source)
            target = self._dram.reserved_span(copy.target)
            ctypes.memmove(target.address, source.address, len(source.view))  # without the interpreter lock
            header = open_header(bytes(target.view[:HEADER_BYTES]), self._keys)
            verify_payload(header, target.view[HEADER_BYTES:])
        except (BlockMissing, EpochRetired):  # the frame of a retired epoch is left to be evicted where it is
            return MoveOutcome.GONE
        except BlockCorrupt:
            return MoveOutcome.CORRUPT
        return MoveOutcome.MOVED
