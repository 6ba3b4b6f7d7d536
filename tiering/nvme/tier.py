"""The NVMe tier: frames in slabs, durable, behind an index that can always be rebuilt.

A frame becomes durable in this order, and many do so together, for one sync of each kind:

    1  its place is put in doubt in the index      (after a crash from here on, the place is voided at the next start)
    2  the frame is written, header and payload in one piece
    3  slabs are synced
    4  one index batch: the record names the frame, the doubt goes; the index is synced          > acknowledged
    -  evicted: one index batch: the record forgets it, the place is in doubt; the index is synced
    5  the header is overwritten with zeros; slabs are synced with the next batch
    6  one index batch: the doubt goes                                                            > the slot is free

So a header that could be taken for a frame stands only where a record or a doubt says so, and an index that is rebuilt
from headers brings back nothing that was given up. The caller verifies whatever a read returns.

Thread-safe. The lock guards tables only; disk calls run outside of it, and batches one after the other, each led by one
of the threads that wait for it. Must never overwrite a slab whose header it cannot confirm.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from tiering.errors import BlockCorrupt, BlockMissing, IndexDoubtful, TierError, TierFull, TierUnavailable
from tiering.faults import NEW_SLABS, NVME_READS, NVME_WRITES, FaultReports, Unheard, kind_of
from tiering.files import private_pages
from tiering.frame import HEADER_BYTES, MacKeys, Stamp, parse_header
from tiering.nvme.frame_index import Change, FrameIndex
from tiering.nvme.header_scan import HeaderScan, entry_of_header
from tiering.nvme.slab import (
    BAD,
    DOUBTS,
    EMPTY,
    ENTRY,
    META,
    SLOTS_PER_RECORD,
    STAMP_PAGES,
    STAMP_SLAB,
    UNPROVEN,
    UNREAD,
    Entries,
    StoreStamp,
    doubt_key,
    latest_stamp,
    open_meta,
    open_record,
    pack_meta,
    pack_record,
    record_key,
    split_doubt_key,
    split_entries,
    unproven_key,
    unread_key,
)
from tiering.nvme.slab_files import Files
from tiering.slab_header import PAGE_BYTES, KeyAbsent, SlabHeader, read_slab_header
from tiering.slots import FrameEvent, FrameState, Piece, SlotLedger
from tiering.tier import Column, SlotClass, Usage, extent_of, place_of, slot_of

_ZERO_PAGE = private_pages(PAGE_BYTES).view
_RESERVED, _RESIDENT = int(FrameState.RESERVED), int(FrameState.RESIDENT)
_STATE_OF_ENTRY = bytes([FrameState.FREE, FrameState.RESIDENT, FrameState.QUARANTINED])
_STATE_AT = int(ENTRY.fields["state"][1])  # type: ignore[index]
_NO_ENTRIES = bytes(SLOTS_PER_RECORD * ENTRY.itemsize)
SCAN_BYTES = 1 << 20
PARALLEL_BYTES = 1 << 20
"""So many bytes of frames are worth several threads."""
MAX_NUMBER = (1 << 32) - 1
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
HEADERS_PER_STEP = 1024
"""A rebuild reports its progress, and writes what it found, after this many slots."""


class IndexMaker(Protocol):
    """Opens the index that belongs to a directory, or begins a new one."""

    def open(self, *, clean: bool) -> FrameIndex:
        """The index as it was left; clean: closed in order by its owner. Raises `IndexDoubtful`."""
        ...

    def discard(self) -> None:
        """Remove it, so that the next `open` begins an empty one."""
        ...


class NvmeSlab(Piece):
    """A slab in use."""

    def __init__(self, header: SlabHeader, mac_key: bytes) -> None:
        super().__init__(header.number, header.slot_class, header.slots)
        self.header = header
        self.mac_key = mac_key
        self.name = slab_name(header.number)
        self.evictions = 0


class Found(NamedTuple):
    """Frames of one slab that were there at the start: places and entries, in the same order.

    is_proven: whether all of them were written to their end. If not, only a header says that a frame is there, and a
    crash may have cut it short, since the index that knew is lost. They stay unproven, over restarts, until `proved`.
    """

    header: SlabHeader
    places: list[int]
    entries: Entries
    is_proven: bool = True


class Resident(NamedTuple):
    """A readable frame. evictions: of its slab so far; while they and the row stay, it is the same frame."""

    place: int
    row: int
    part: int
    frame_bytes: int
    evictions: int


class LeftAlone(NamedTuple):
    """A slab that cannot be used, and why; its bytes are kept and count against the budget.

    needs_keys: it was written under a key that is not at hand, and can be used once that is. unread: the disk did not
    give its header, and may in a later run.
    """

    name: str
    size_bytes: int
    reason: str
    needs_keys: bool = False
    unread: bool = False


@dataclass(slots=True)
class _Request:
    """A thread's part of the next batch. edits: place -> an entry, or the new state of its entry.

    doubts: places to put in doubt. committed: places whose frames were written, `failed_syncs` syncs having failed
    before. changes: anything else in the index.
    """

    doubts: Sequence[int] = ()
    edits: dict[int, bytes | int] = field(default_factory=dict)
    committed: Sequence[int] = ()
    failed_syncs: int = 0
    changes: Sequence[Change] = ()
    done: bool = False
    fault: Exception | None = None


class NvmeTier:
    """`Tier` over slabs. Also `TierFacts` for the decisions above."""

    name = "nvme"

    def __init__(
        self,
        files: Files,
        maker: IndexMaker,
        keys: MacKeys,
        budget_bytes: int,
        slab_bytes: int,
        new_uid: Callable[[], bytes],
        threads: int = 1,
        faults: FaultReports | None = None,
    ) -> None:
        """Reads the stamp and the slab headers and opens the index; `load` brings the frames.

        threads: how many read headers, or write large frames, at once. faults: told of the disk's faults.

        Raises `OtherFormat`, and `TierUnavailable` if the disk fails.
        """
        self.slab_bytes = slab_bytes
        self.budget_bytes = budget_bytes
        self.left_alone: list[LeftAlone] = []
        self.rebuilds = False  # the index is not trusted: `load` reads every header
        self._rebuilding = False  # until it has, the index has no uid: the next start would begin again
        self._files = files
        self._maker = maker
        self._keys = keys
        self._new_uid = new_uid
        self._scanner = HeaderScan(files, keys, threads)
        self.threads = threads
        self._faults = faults or Unheard()
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._index_lock = threading.Lock()  # one call to the index at a time
        self._ledger: SlotLedger[NvmeSlab] = SlotLedger()
        self._taken_bytes = 0
        self._leading = False
        self._waiting: list[_Request] = []
        self._edits: dict[int, bytes | int] = {}  # evicted and quarantined frames, for the next batch
        self._doubted: set[int] = set()  # places that the index holds in doubt
        self._given_back: set[int] = set()  # aborted, but in doubt
        self._claimed: set[int] = set()  # evicted for a caller that waits for them
        self._to_void: list[int] = []
        self._voided: list[int] = []  # their headers are zeros, but not durably yet
        self._failed_syncs = 0
        self._broken: Exception | None = None  # a batch may be half done in the index: no more writes
        self._closed = False
        self._to_load: list[NvmeSlab] = []
        self._unproven: set[int] = set()  # slabs
        self._ended_clean = False  # the last run ended in order: none of its writes was cut short
        self._changes = 0
        self._index_uid = b""
        try:
            self._next_number = 1 + max([0, *map(slab_number, files.sizes())])
            last = self._read_stamp()
            self._ended_clean = last is not None and last.clean
            if last is not None and last.clean:
                # A file that rotted since may end this process when it is mapped; the next start has to be careful.
                self._put_stamp(replace(last, sequence=last.sequence + 1, clean=False))
            self._index = self._open_index(last)
            try:
                self._open_slabs()
                self._stamp = self._begin_session(last)
            except BaseException:
                self._index.close()
                raise
        except (OSError, IndexDoubtful) as error:
            raise TierUnavailable(f"the directory cannot be opened: {error}") from error

    @property
    def session(self) -> int:
        """At least the number of times this directory was opened; durable, so numbers made from it are never used
        twice."""
        return self._stamp.session

    def raise_session(self, session: int) -> None:
        """Frames to be written here are of that session, or of an earlier one: the next session is above it, durably
        when this returns. Raises `TierUnavailable`."""
        stamp = self._stamp
        stamp = stamp.next(index_uid=self._index_uid, changes=stamp.changes, clean=False, session=session)
        try:
            self._put_stamp(stamp)
        except OSError as error:
            raise TierUnavailable(f"the directory cannot be written: {error}") from error
        self._stamp = stamp

    # The contract --------------------------------------------------------------------------------------------------

    def reserve(self, slot_class: SlotClass, count: int) -> list[int]:
        with self._lock:
            return self._ledger.reserve(slot_class, count)

    def commit(
        self,
        places: Sequence[int],
        frames: Sequence[bytes | memoryview],
        meanwhile: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Write whole frames; when this returns they are durable and readable.

        meanwhile: work for the calling thread while others write; it returns the places to be committed, and the others
        are left as they were, to be aborted.

        Raises `TierUnavailable`: none of them is committed, and all are to be aborted.
        """
        with self._lock:
            doubts = [place for place in places if place not in self._doubted]
            for place, frame in zip(places, frames, strict=True):
                assert self._ledger.state(place) == _RESERVED and place not in self._given_back
                assert len(frame) == self._slab(place).frame_bytes
        if doubts:
            self._settle(_Request(doubts=doubts))
        failed_syncs = self._failed_syncs
        try:
            chosen = self._write(places, frames, meanwhile)
        except OSError as error:
            self._say(NVME_WRITES, error)
            raise TierUnavailable(f"a slab cannot be written: {error.strerror}") from error
        if chosen:
            wanted = set(chosen)
            edits: dict[int, bytes | int] = {
                place: entry_of_header(parse_header(bytes(frame[:HEADER_BYTES])))
                for place, frame in zip(places, frames, strict=True)
                if place in wanted
            }
            self._settle(_Request(edits=edits, committed=chosen, failed_syncs=failed_syncs))
            self._faults.worked(NVME_WRITES)

    def abort(self, places: Sequence[int]) -> None:
        """Give reserved places back: at once, or, if something may have been written there, once it is void."""
        with self._lock:
            for place in places:
                if place in self._doubted:
                    assert self._ledger.state(place) == _RESERVED and place not in self._given_back
                    self._given_back.add(place)
                    self._to_void.append(place)
                else:
                    self._ledger.step([place], FrameEvent.ABORT)

    def read(self, place: int, into: memoryview) -> None:
        """Copy a committed frame. Raises `BlockMissing`, and `TierUnavailable` if the disk fails."""
        with self._lock:
            if self._ledger.state(place) != _RESIDENT:
                raise BlockMissing("no readable frame at that place")
            slab = self._slab(place)
        try:
            self._files.read(slab.name, slab.header.offset(slot_of(place)), into)
            self._faults.worked(NVME_READS)
        except OSError as error:
            self._say(NVME_READS, error)
            raise TierUnavailable(f"a slab cannot be read: {error.strerror}") from error

    def delete(self, places: Sequence[int], *, claim: bool = False) -> None:
        """Evict committed frames. Their slots are free some batches later, or after `settle`.

        claim: they are for the next caller of `await_claims` only.
        """
        with self._lock:
            self._ledger.step(places, FrameEvent.EVICT)
            for place in places:
                self._edits[place] = EMPTY
                self._slab(place).evictions += 1
            if claim:
                self._claimed.update(places)

    def await_claims(self, places: Sequence[int]) -> None:
        """Make claimed places durably forgotten, reserved, and in doubt, so that they need not be void before other
        frames are written there. Raises `TierUnavailable`: the claim is then lost."""
        try:
            while any([place in self._claimed for place in places]):
                self._settle(_Request())
        except BaseException:
            with self._lock:
                mine = [place for place in places if place not in self._claimed]
                self._claimed.difference_update(places)
            self.abort(mine)
            raise

    def usage(self) -> Usage:
        with self._lock:
            return self._ledger.usage(self._taken_bytes, self.budget_bytes)

    # Beyond the contract -------------------------------------------------------------------------------------------

    def quarantine(self, places: Sequence[int]) -> None:
        """A check failed: the slots are not reused before their slab is given back, not even after a restart."""
        with self._lock:
            self._ledger.step(places, FrameEvent.CONDEMN)
            for place in places:
                self._edits[place] = BAD

    def own(self, places: Iterable[int], rows: Iterable[int]) -> None:
        """Record which block's frame stands at each place."""
        with self._lock:
            self._ledger.own(places, rows)

    def own_many(self, places: Column, rows: Column) -> None:
        """The same for columns."""
        with self._lock:
            self._ledger.own_many(places, rows)

    def settle(self, *, under_way: bool = True) -> None:
        """Finish evictions: slots given up before are free, durably, when this returns.

        under_way: also those that another batch has taken up, which a caller that only needs room can skip. Raises
        `TierUnavailable`.
        """
        for _ in range(2):  # the first batch forgets frames and voids their headers, the second one frees the slots
            if not self._is_unsettled(under_way):
                return
            self._settle(_Request())

    def close(self) -> None:
        """Finish what was begun and record it in the stamp; if that fails, the next start finds out what is true."""
        with self._lock:
            if self._closed:
                return
        try:
            while self._is_unsettled():
                self.settle()
            self._write_stamp(clean=not self._to_load and not self._unproven)
        except (TierUnavailable, OSError):
            pass  # the stamp says that this session has not ended
        with self._lock:
            self._closed = True
        with self._index_lock:
            self._index.close()
        self._files.close()

    # Slabs ---------------------------------------------------------------------------------------------------------

    def new_slab(self, stamp: Stamp, mac_key: bytes, about: bytes) -> None:
        """One more slab for a slot class. Slow.

        Raises `TierFull` at the budget and on a full disk, `TierUnavailable` on a faulty one.
        """
        slot_class = SlotClass(stamp.tenant, stamp.namespace, stamp.part, stamp.frame_bytes)
        slots = (self.slab_bytes - 2 * PAGE_BYTES) // stamp.frame_bytes
        assert slots > 0, "a slab holds at least one frame"
        with self._lock:
            number = self._next_number
            header = SlabHeader(number, slot_class, slots, stamp.key_id, stamp.epoch, self._new_uid(), about)
            if number > MAX_NUMBER:
                raise TierFull("there is no number left for another slab")
            if self._taken_bytes + header.size_bytes > self.budget_bytes:
                raise TierFull(f"all {self.budget_bytes} bytes of the NVMe budget are taken")
            self._next_number += 1
            self._taken_bytes += header.size_bytes
        slab = NvmeSlab(header, mac_key)
        is_there = False
        try:
            self._files.create(slab.name, header.size_bytes)
            is_there = True
            page = memoryview(header.pack(mac_key))
            for offset in (0, header.size_bytes - PAGE_BYTES):
                self._files.write(slab.name, offset, page)
            self._files.sync(slab.name)
        except OSError as error:
            try:
                if is_there:
                    self._files.remove(slab.name)
                with self._lock:
                    self._taken_bytes -= header.size_bytes
            except OSError:
                pass  # its bytes stay charged
            self._say(NEW_SLABS, error)
            if error.errno in _NO_SPACE:
                raise TierFull(f"the disk has no room for a slab of {header.size_bytes} bytes") from error
            raise TierUnavailable(f"no new slab: {error.strerror}") from error
        self._faults.worked(NEW_SLABS)
        with self._lock:
            self._ledger.add(slab)

    def retire(self, number: int) -> None:
        """Give back a slab without readable frames. Raises `TierUnavailable`."""
        self.settle()
        with self._lock:
            slab = self._ledger.remove(number)
        records = range(-(-slab.slots.capacity // SLOTS_PER_RECORD))
        names = [unproven_key(number), *(record_key(number, record) for record in records)]
        self._settle(_Request(changes=[(name, None) for name in names]))
        self._unproven.discard(number)
        try:
            self._files.remove(slab.name)
        except OSError as error:
            raise TierUnavailable(f"a slab cannot be given back: {error.strerror}") from error
        with self._lock:
            self._taken_bytes -= slab.header.size_bytes

    # Facts for decisions -------------------------------------------------------------------------------------------

    def free_slots(self, slot_class: SlotClass) -> int:
        return self._ledger.free_slots(slot_class)

    def frames_of(self, slot_class: SlotClass) -> int:
        """Readable frames of a class."""
        with self._lock:
            return sum(slab.slots.live for slab in self._ledger.all_pieces(slot_class))

    def slabs_of(self, tenant: bytes) -> list[int]:
        """Every slab in use of a tenant's frames, lowest first."""
        with self._lock:
            return sorted(number for number, slab in self._ledger.pieces.items() if slab.slot_class.tenant == tenant)

    def slab_numbers(self) -> list[int]:
        """Every slab in use, lowest first."""
        with self._lock:
            return sorted(self._ledger.pieces)

    def residents(self, first: int, stop: int, most_bytes: int) -> list[Resident]:
        """Readable frames at the places first .. stop - 1, lowest first: at least one, then as many as make up
        `most_bytes`. A row of -1: the frame is not listed yet."""
        found: list[Resident] = []
        left = most_bytes
        with self._lock:
            pieces = self._ledger.pieces
            for number in sorted(number for number in pieces if extent_of(first) <= number <= extent_of(stop)):
                slab = pieces[number]
                slot = slot_of(first) if number == extent_of(first) else 0
                while (slot := slab.slots.states.find(_RESIDENT, slot)) >= 0:
                    place = place_of(number, slot)
                    if place >= stop or (found and left < slab.frame_bytes):
                        return found
                    row, part = slab.slots.owners[slot], slab.slot_class.part
                    found.append(Resident(place, row, part, slab.frame_bytes, slab.evictions))
                    left -= slab.frame_bytes
                    slot += 1
        return found

    def empty_slabs(self) -> list[int]:
        """Slabs without frames that nothing waits for."""
        with self._lock:
            return [
                number
                for number, slab in self._ledger.pieces.items()
                if slab.slots.free + slab.slots.counts[FrameState.QUARANTINED] == slab.slots.capacity
            ]

    def spare_slab(self, wanted: Collection[SlotClass]) -> int | None:
        """An empty slab that can be given back: one of another class, or one whose free slots its class can spare."""
        with self._lock:
            for number, slab in self._ledger.pieces.items():
                free = slab.slots.free
                if free + slab.slots.counts[FrameState.QUARANTINED] < slab.slots.capacity:
                    continue
                if slab.slot_class not in wanted or not free or self._ledger.free_slots(slab.slot_class) > free:
                    return number
        return None

    def rows_in(self, piece: int) -> list[int] | None:
        with self._lock:
            return self._ledger.rows_in(piece)

    def held(self) -> dict[bytes, int]:
        """How many slabs each tenant has."""
        with self._lock:
            return dict(self._ledger.held)

    @property
    def piece_bytes(self) -> int:
        return self.slab_bytes

    def pieces(self) -> int:
        return self.budget_bytes // self.slab_bytes

    def has_room(self) -> bool:
        """Whether the budget allows another slab."""
        return self._taken_bytes + self.slab_bytes <= self.budget_bytes

    def check(self) -> None:
        """Invariant 1; every place in doubt is reserved, deleting, or about to be void."""
        with self._lock:
            self._ledger.check()
            for place in self._doubted:
                assert self._ledger.state(place) in (FrameState.RESERVED, FrameState.DELETING), place

    # Loading -------------------------------------------------------------------------------------------------------

    def load(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Found]:
        """Recover what is there, slab by slab. progress: slots done, slots in all. Raises `TierUnavailable`.

        A slab can be used once it was handed out; before that it is neither read nor written. After a rebuild a block
        may be there twice, with two generations: the lower one was given up.
        """
        total = sum(slab.slots.capacity for slab in self._to_load)
        done = 0
        try:
            doubts, unread = self._read_doubts(), self._listed(UNREAD, unread_key)
            self._unproven = self._listed(UNPROVEN, unproven_key)
        except IndexDoubtful as error:
            raise TierUnavailable(f"the index cannot be loaded: {error}") from error
        while self._to_load:
            slab = self._to_load[0]
            is_unread = self.rebuilds or slab.number in unread
            try:
                damaged: set[int] = set()
                entries = self._scan(slab, progress, done, total) if is_unread else self._records(slab, damaged)
            except (OSError, TierError) as error:
                raise TierUnavailable(f"{slab.name} cannot be loaded: {error}") from error
            is_proven = slab.number not in self._unproven
            yield self._take_in(slab, entries, doubts, damaged)._replace(is_proven=is_proven)
            self._to_load.pop(0)
            done += slab.slots.capacity
            if progress is not None:
                progress(done, total)
        if self._rebuilding:
            self._rebuilding = False
            # Slabs that could not be read may be readable in a later run.
            numbers = [slab_number(one.name) for one in self.left_alone]
            try:
                self._settle(_Request(changes=[(unread_key(number), b"") for number in numbers if number > 0]))
            except TierUnavailable:
                self._rebuilding = True
                raise
        elif unread:
            self._settle(_Request())

    def proved(self, slabs: Iterable[int]) -> None:
        """All incomplete frames of these slabs were given up; this is durable on return. Raises `TierUnavailable`."""
        numbers = [number for number in slabs if number in self._unproven]
        if numbers:
            self._settle(_Request(changes=[(unproven_key(number), None) for number in numbers]))
            self._unproven.difference_update(numbers)

    def _take_in(
        self, slab: NvmeSlab, entries: Entries, doubts: dict[int, list[int]], damaged: Collection[int]
    ) -> Found:
        states = bytearray(entries["state"].tobytes().translate(_STATE_OF_ENTRY.ljust(256, b"\x00")))
        mine = [place_of(slab.number, slot) for slot in doubts.get(slab.number, ()) if slot < slab.slots.capacity]
        for place in mine:
            state = states[slot_of(place)]
            # A record that verifies overrides a doubt, which has no MAC; a header read in its place does not.
            if state == FrameState.FREE or (state == _RESIDENT and slot_of(place) // SLOTS_PER_RECORD in damaged):
                states[slot_of(place)] = FrameState.RESERVED
        slab.slots.load(bytes(states))
        with self._lock:
            self._ledger.add(slab)
            for place in mine:
                if states[slot_of(place)] == FrameState.RESERVED:
                    self._doubted.add(place)
                    self._given_back.add(place)
                    self._to_void.append(place)
        held = np.flatnonzero(np.frombuffer(states, np.uint8) == _RESIDENT)
        chosen = entries if len(held) == len(entries) else entries[held]
        return Found(slab.header, (held + place_of(slab.number, 0)).tolist(), chosen)

    def _records(self, slab: NvmeSlab, damaged: set[int]) -> Entries:
        """A slab's index records; runs of slots whose record is damaged are read from their headers."""
        with self._index_lock:
            values = dict(self._index.iterate(record_key(slab.number, 0)[:5]))
        header, mac_key, pieces = slab.header, slab.mac_key, []
        for first in range(0, slab.slots.capacity, SLOTS_PER_RECORD):
            record = first // SLOTS_PER_RECORD
            value = values.get(record_key(slab.number, record))
            try:
                pieces.append(_NO_ENTRIES if value is None else open_record(header, record, value, mac_key))
            except BlockCorrupt:
                damaged.add(record)
                last = min(first + SLOTS_PER_RECORD, slab.slots.capacity)
                pieces.append(self._headers(slab, range(first, last)).tobytes())
        return split_entries(b"".join(pieces)[: slab.slots.capacity * ENTRY.itemsize])

    def _scan(self, slab: NvmeSlab, progress: Callable[[int, int], None] | None, done: int, total: int) -> Entries:
        """Every header of a slab; the entries are written to the new index."""
        found = []
        for first in range(0, slab.slots.capacity, HEADERS_PER_STEP):
            last = min(first + HEADERS_PER_STEP, slab.slots.capacity)
            found.append(self._headers(slab, range(first, last)).tobytes())
            if progress is not None:
                progress(done + first, total)
        entries = split_entries(b"".join(found))
        with self._index_lock:
            self._write_records(slab, entries)  # durable with the batch that ends the rebuild
        return entries

    def _headers(self, slab: NvmeSlab, slots: range) -> Entries:
        """The entries by these slots' headers; a header that fails any check is no frame."""
        return self._scanner.entries(slab.name, slab.header, slots)

    def _write_records(self, slab: NvmeSlab, entries: Entries) -> None:
        whole = entries.tobytes()
        size = SLOTS_PER_RECORD * ENTRY.itemsize
        changes: list[Change] = [(unread_key(slab.number), None)]
        if not (self.rebuilds and self._ended_clean):
            changes.append((unproven_key(slab.number), b""))
            self._unproven.add(slab.number)
        for record in range(-(-slab.slots.capacity // SLOTS_PER_RECORD)):
            piece = whole[record * size : (record + 1) * size].ljust(size, b"\x00")
            if piece.strip(b"\x00"):
                key = record_key(slab.number, record)
                changes.append((key, pack_record(slab.header, record, piece, slab.mac_key)))
        self._apply(changes)

    def _read_doubts(self) -> dict[int, list[int]]:
        """Slots in doubt, by slab."""
        doubts: dict[int, list[int]] = {}
        with self._index_lock:
            keys = [key for key, _ in self._index.iterate(DOUBTS)]
        for key in keys:
            try:
                place = split_doubt_key(key)
            except BlockCorrupt:
                continue
            doubts.setdefault(extent_of(place), []).append(slot_of(place))
        return doubts

    def _listed(self, prefix: bytes, name: Callable[[int], bytes]) -> set[int]:
        """Slabs that the index lists under that name, to be read or to be proved."""
        slabs = {slab.number for slab in self._to_load}
        with self._index_lock:
            keys = {key for key, _ in self._index.iterate(prefix)}
        return {number for number in slabs if name(number) in keys}

    # Opening -------------------------------------------------------------------------------------------------------

    def _read_stamp(self) -> StoreStamp | None:
        """The newest whole stamp; a directory without slabs gets its first one with the session."""
        name = slab_name(STAMP_SLAB)
        if name not in self._files.sizes():
            return None
        pages = []
        for page in range(STAMP_PAGES):
            buffer = bytearray(PAGE_BYTES)
            self._files.read(name, page * PAGE_BYTES, memoryview(buffer))
            pages.append(bytes(buffer))
        last = latest_stamp(pages)
        if last is not None and latest_stamp(pages, besides=last) is None:
            last = replace(last, session=last.session + 1)  # the page that is not whole may have been a later session's
        return last

    def _open_index(self, stamp: StoreStamp | None) -> FrameIndex:
        """The index that belongs to these slabs, or a new one that `load` fills from their headers."""
        if stamp is not None:
            index = None
            try:
                index = self._maker.open(clean=stamp.clean)
                meta = open_meta(index.get([META])[0])
                if meta is not None and stamp.knows(*meta):
                    self._index_uid, self._changes = meta
                    return index
            except IndexDoubtful:
                pass
            if index is not None:
                index.close()
        self.rebuilds = self._rebuilding = self._next_number > 1
        self._maker.discard()
        self._index_uid, self._changes = self._new_uid(), 0
        return self._maker.open(clean=True)

    def _open_slabs(self) -> None:
        for name, size in sorted(self._files.sizes().items()):
            number = slab_number(name)
            if number == STAMP_SLAB:
                continue
            try:
                if number < 0:
                    raise BlockCorrupt("not the name of a slab")
                if self._is_unfinished(name, size):
                    self._files.remove(name)
                    continue
                header = self._slab_header(name, size)
            except (BlockCorrupt, OSError) as error:
                needs_keys, unread = isinstance(error, KeyAbsent), isinstance(error, OSError)
                self.left_alone.append(LeftAlone(name, size, str(error), needs_keys, unread))
                self._taken_bytes += size
                continue
            self._taken_bytes += size
            key = self._keys.slab_key(header.slot_class.tenant, header.key_id, header.epoch)
            assert key is not None
            self._to_load.append(NvmeSlab(header, key))

    def _is_unfinished(self, name: str, size: int) -> bool:
        """Whether making a slab was cut short: it has no header, and never had a frame."""
        try:
            self._slab_header(name, size)
            return False
        except KeyAbsent:
            return False
        except BlockCorrupt:
            pass
        if size < 2 * PAGE_BYTES or size % PAGE_BYTES:
            return False  # slabs are created in full size
        buffer = memoryview(bytearray(SCAN_BYTES))
        for offset in range(PAGE_BYTES, size - PAGE_BYTES, SCAN_BYTES):
            piece = buffer[: min(SCAN_BYTES, size - PAGE_BYTES - offset)]
            self._files.read(name, offset, piece)
            if bytes(piece).strip(b"\x00"):
                return False
        return True

    def _slab_header(self, name: str, size: int) -> SlabHeader:
        """From the first page, or from its copy on the last one."""
        fault: Exception = BlockCorrupt("not the size of a slab")
        doubt: Exception | None = None
        for offset in (0, size - PAGE_BYTES) if size >= 2 * PAGE_BYTES and size % PAGE_BYTES == 0 else ():
            page = bytearray(PAGE_BYTES)
            try:
                self._files.read(name, offset, memoryview(page))
                header = read_slab_header(bytes(page), self._keys)
            except (KeyAbsent, OSError) as error:  # a damaged page may name any key
                doubt = error
                continue
            except BlockCorrupt as error:
                fault = error
                continue
            if header.number == slab_number(name) and header.size_bytes == size:
                return header
            fault = BlockCorrupt("the header of another slab")
        raise doubt or fault

    def _begin_session(self, last: StoreStamp | None) -> StoreStamp:
        name = slab_name(STAMP_SLAB)
        if name not in self._files.sizes():
            self._files.create(name, STAMP_PAGES * PAGE_BYTES)
        if last is None:  # so that the first of a directory whose stamps are gone is the newest there
            last = StoreStamp(0, 0, self._index_uid, 0, clean=False)
        elif last.clean:
            last = replace(last, sequence=last.sequence + 1)
        stamp = last.next(index_uid=self._index_uid, changes=self._changes, clean=False, session=last.session + 1)
        self._put_stamp(stamp)
        if not self._changes and not self._rebuilding:  # a new index gets its uid
            self._apply([])
            self._index.sync()
        return stamp

    def _put_stamp(self, stamp: StoreStamp) -> None:
        name = slab_name(STAMP_SLAB)
        self._files.write(name, stamp.page * PAGE_BYTES, memoryview(stamp.pack()))
        self._files.sync(name)

    # Batches -------------------------------------------------------------------------------------------------------

    def _is_unsettled(self, under_way: bool = True) -> bool:
        with self._lock:  # the changes of a running batch are not durable yet
            return bool((under_way and self._leading) or self._broken or self._edits or self._to_void or self._voided)

    def _settle(self, request: _Request) -> None:
        """Join the next batch, and lead it if no other thread does. Raises `TierUnavailable`."""
        with self._lock:
            self._waiting.append(request)
            while self._leading and not request.done:
                self._turn.wait()
            if not request.done:
                self._leading = True
        while not request.done:
            with self._lock:
                batch, self._waiting = self._waiting, []
            fault: Exception | None = TierUnavailable("the batch was interrupted")
            try:
                self._run(batch)
                fault = None
            except (OSError, TierError) as error:
                fault = error
            finally:
                with self._lock:
                    for one in batch:
                        one.done, one.fault = True, fault or one.fault
                    self._leading = False
                    self._turn.notify_all()
        if request.fault is not None:
            self._say(NVME_WRITES, request.fault)
            raise TierUnavailable(f"the NVMe tier cannot make anything durable: {request.fault}") from request.fault

    def _say(self, what: str, error: Exception) -> None:
        if not self._closed:
            self._faults.failed(what, kind_of(error), str(error))

    def _run(self, batch: Sequence[_Request]) -> None:
        """One sync of the slabs, one index batch, one sync of the index; then void the headers of evicted frames."""
        with self._lock:
            if self._broken is not None:
                raise TierUnavailable(str(self._broken))
            for request in batch:
                if request.committed and request.failed_syncs != self._failed_syncs:
                    # The kernel reports a failed write-back once: the next sync does not cover what was lost then.
                    request.fault = TierUnavailable("a sync failed after these frames were written")
            batch = [request for request in batch if request.fault is None]
            given_up, self._edits = self._edits, {}
            voided, self._voided = self._voided, []
            doubts = [place for request in batch for place in request.doubts]
        edits = dict(given_up)
        committed = [place for request in batch for place in request.committed]
        for request in batch:
            edits.update(request.edits)
        forgotten = [place for place, edit in given_up.items() if edit == EMPTY]
        try:
            for name in sorted({self._slab(place).name for place in (*committed, *voided)}):
                self._files.sync(name)
            changes = [change for request in batch for change in request.changes]
            with self._index_lock:
                changes += self._edited(edits)
            changes += [(doubt_key(place), b"") for place in (*doubts, *forgotten)]
            changes += [(doubt_key(place), None) for place in (*committed, *voided)]
        except BaseException:
            with self._lock:  # a sync that failed may have lost what it covered: the zeros are written again
                self._failed_syncs += 1
                self._to_void += voided
                self._edits = {**given_up, **self._edits}
            raise
        try:
            with self._index_lock:
                self._apply(changes)
                self._index.sync()
        except BaseException as error:
            is_as_before = not isinstance(error, IndexDoubtful) and self._has_refused()
            with self._lock:
                if is_as_before:  # as on a full disk: the next batch may succeed
                    self._voided += voided
                    self._edits = {**given_up, **self._edits}
                else:  # it is unknown whether the batch is in the index: only the next start can tell
                    self._broken = TierUnavailable(f"the index could not be written ({error})")
            raise
        with self._lock:
            self._doubted.update(doubts, forgotten)
            self._doubted.difference_update(committed, voided)
            self._ledger.step(committed, FrameEvent.COMMIT)
            for place in voided:
                was_read = self._ledger.state(place) == FrameState.DELETING
                self._ledger.step([place], FrameEvent.DELETED if was_read else FrameEvent.ABORT)
            self._given_back.difference_update(voided)
            claimed = [place for place in forgotten if place in self._claimed]
            self._claimed.difference_update(claimed)
            self._ledger.step(claimed, FrameEvent.CLAIM)
            self._ledger.own(claimed, [-1] * len(claimed))
            taken = set(claimed)
            to_void = [*self._to_void, *(place for place in forgotten if place not in taken)]
            self._to_void = []
        try:
            self._void(to_void)
        except OSError as error:
            for request in batch:  # the batch is durable: only requests that wait for the zeros fail
                if not (request.doubts or request.committed or request.changes):
                    request.fault = error

    def _write(
        self,
        places: Sequence[int],
        frames: Sequence[bytes | memoryview],
        meanwhile: Callable[[], Sequence[int]] | None,
    ) -> Sequence[int]:
        """Write all frames, several at once if they are large; returns the result of `meanwhile`. No write is in flight
        any more when it returns or raises."""
        at_once = min(self.threads, len(places)) if sum(map(len, frames)) >= PARALLEL_BYTES else 1
        faults: list[OSError] = []
        chosen: Sequence[int] = places

        def write(first: int) -> None:
            try:
                for at in range(first, len(places), at_once):
                    slab = self._slab(places[at])
                    self._files.write(slab.name, slab.header.offset(slot_of(places[at])), memoryview(frames[at]))
            except OSError as error:
                faults.append(error)

        others = range(0 if at_once > 1 and meanwhile is not None else 1, at_once)
        threads = [threading.Thread(target=write, args=(first,), daemon=True) for first in others]
        begun = []
        try:
            for thread in threads:
                thread.start()
                begun.append(thread)
            if 0 not in others:
                write(0)
            if meanwhile is not None:
                chosen = meanwhile()
        except RuntimeError as error:  # no more threads
            raise OSError(errno.EAGAIN, str(error)) from error
        finally:
            for thread in begun:
                thread.join()
        if faults:
            raise faults[0]
        return chosen

    def _void(self, places: list[int]) -> None:
        for position, place in enumerate(places):
            slab = self._slab(place)
            try:
                self._files.write(slab.name, slab.header.offset(slot_of(place)), _ZERO_PAGE)
            except OSError:
                with self._lock:
                    self._to_void += places[position:]
                raise
            with self._lock:
                self._voided.append(place)

    def _edited(self, edits: dict[int, bytes | int]) -> list[Change]:
        """The changed records that hold these places."""
        runs: dict[tuple[int, int], list[int]] = {}
        for place in edits:
            runs.setdefault((extent_of(place), slot_of(place) // SLOTS_PER_RECORD), []).append(place)
        values = self._index.get([record_key(*run) for run in runs])
        changes: list[Change] = []
        for (number, record), value in zip(runs, values, strict=True):
            slab = self._ledger.pieces[number]
            entries = bytearray(self._entries(slab, record, value))
            for place in runs[number, record]:
                at = slot_of(place) % SLOTS_PER_RECORD * ENTRY.itemsize
                edit = edits[place]
                if isinstance(edit, bytes):
                    entries[at : at + ENTRY.itemsize] = edit
                elif edit == EMPTY:
                    entries[at : at + ENTRY.itemsize] = bytes(ENTRY.itemsize)
                else:
                    entries[at + _STATE_AT] = edit
            key = record_key(number, record)
            empty = not entries.strip(b"\x00")
            changes.append((key, None if empty else pack_record(slab.header, record, bytes(entries), slab.mac_key)))
        return changes

    def _entries(self, slab: NvmeSlab, record: int, value: bytes | None) -> bytes:
        """A record's present entries; if it is damaged, those by the headers of readable frames."""
        if value is None:
            return bytes(SLOTS_PER_RECORD * ENTRY.itemsize)
        try:
            return open_record(slab.header, record, value, slab.mac_key)
        except BlockCorrupt:
            first = record * SLOTS_PER_RECORD
            slots = range(first, min(first + SLOTS_PER_RECORD, slab.slots.capacity))
            entries = bytearray(self._headers(slab, slots).tobytes().ljust(SLOTS_PER_RECORD * ENTRY.itemsize, b"\x00"))
            for at, slot in enumerate(slots):
                state = slab.slots.states[slot]
                if state == FrameState.QUARANTINED:
                    entries[at * ENTRY.itemsize + _STATE_AT] = BAD
                elif state != _RESIDENT:  # a frame that is being written, or whose zeros are not written yet
                    entries[at * ENTRY.itemsize : (at + 1) * ENTRY.itemsize] = bytes(ENTRY.itemsize)
            return bytes(entries)

    def _apply(self, changes: list[Change]) -> None:
        if not self._rebuilding:
            self._changes += 1
            changes = [*changes, (META, pack_meta(self._index_uid, self._changes))]
        if changes:
            self._index.apply(changes)

    def _has_refused(self) -> bool:
        """After a batch failed: whether the index is as it was before, by its count of batches."""
        try:
            with self._index_lock:
                meta = open_meta(self._index.get([META])[0])
        except (OSError, TierError):
            return False
        if self._rebuilding or meta != (self._index_uid, self._changes - 1):
            return False
        self._changes -= 1
        return True

    def _write_stamp(self, *, clean: bool) -> None:
        self._stamp = self._stamp.next(index_uid=self._index_uid, changes=self._changes, clean=clean)
        self._put_stamp(self._stamp)

    def _slab(self, place: int) -> NvmeSlab:
        return self._ledger.pieces[extent_of(place)]


def slab_name(number: int) -> str:
    """The file of a slab."""
    return f"{number:08x}.slab"


def slab_number(name: str) -> int:
    """The slab of a file; for any other name, a number that no slab has."""
    try:
        number = int(name.removesuffix(".slab"), 16)
    except ValueError:
        return -1
    return number if 0 <= number <= MAX_NUMBER and slab_name(number) == name else -1
