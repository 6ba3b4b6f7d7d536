"""The NVMe tier: frames in slabs, durable, behind an index that can always be rebuilt.

    start    the stamp (`session`) > the index it knows (`index_records`) > slabs and their frames (`recovery`)
    frames   reserved > written, synced, acknowledged > read > evicted, forgotten, void > free      (`group_commit`)
    slabs    made within the budget, and given back once no frame is in them

The caller verifies whatever a read returns. Thread-safe. The lock guards tables only; disk calls run outside of it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from tiering.errors import BlockMissing, IndexDoubtful, TierFull, TierUnavailable
from tiering.faults import NEW_SLABS, NVME_READS, NVME_WRITES, FaultReports, Unheard, kind_of
from tiering.frame import MacKeys, Stamp
from tiering.nvme.frame_index import IndexMaker
from tiering.nvme.group_commit import BatchRequest, GroupCommit
from tiering.nvme.index_records import IndexRecords, NvmeSlab
from tiering.nvme.slab import (
    MAX_NUMBER,
    SLOTS_PER_RECORD,
    STAMP_PAGES,
    STAMP_SLAB,
    UNPROVEN,
    StoreStamp,
    latest_stamp,
    mark_key,
    record_key,
    slab_name,
    slab_number,
)
from tiering.nvme.slab_files import Files, read_page
from tiering.nvme.slab_recovery import Found, Progress, SlabRecovery
from tiering.nvme.slab_scan import SlabScan
from tiering.slab_header import PAGE_BYTES, SlabHeader, SlabSizes
from tiering.slots import FrameState, SlotLedger
from tiering.tier import Column, SlotClass, Usage, extent_of, place_of, slot_of

_RESIDENT = int(FrameState.RESIDENT)
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class Resident(NamedTuple):
    """A readable frame. evictions: of its slab so far; while they and the row stay, it is the same frame."""

    place: int
    row: int
    part: int
    frame_bytes: int
    evictions: int


class NvmeTier:
    """`Tier` over slabs. Also a `LowerTier`, for the decisions above."""

    def __init__(
        self,
        files: Files,
        maker: IndexMaker,
        keys: MacKeys,
        sizes: SlabSizes,
        new_uid: Callable[[], bytes],
        threads: int = 1,
        faults: FaultReports | None = None,
    ) -> None:
        """Reads the stamp and the slab headers and opens the index; `load` brings the frames.

        threads: how many read headers, or write large frames, at once. faults: told of the disk's faults.

        Raises `OtherFormat`, and `TierUnavailable` if the disk fails.
        """
        self.slab_bytes = self.piece_bytes = sizes.slab_bytes
        self.budget_bytes = sizes.budget_bytes
        self.threads = threads
        self._files = files
        self._new_uid = new_uid
        self._faults = faults or Unheard()
        self._lock = threading.Lock()
        self._ledger: SlotLedger[NvmeSlab] = SlotLedger()
        self._closed = False
        try:
            self._next_number = 1 + max([0, *map(slab_number, files.sizes())])
            last = take_up(files)
            scanner = SlabScan(files, keys, threads)
            has_slabs = self._next_number > 1
            self._records = IndexRecords(maker, last, new_uid, scanner, self._ledger, has_slabs=has_slabs)
            try:
                self._commits = GroupCommit(files, self._records, self._ledger, self._lock, self._faults, threads)
                ended_clean = last is not None and last.clean
                self._recovery = SlabRecovery(files, keys, self._records, self._commits, ended_clean=ended_clean)
                self.session = StoreSession(files, last, self._records)
            except BaseException:
                self._records.close()
                raise
        except (OSError, IndexDoubtful) as error:
            raise TierUnavailable(f"the directory cannot be opened: {error}") from error
        commits = self._commits
        self.commit, self.abort, self.delete, self.settle = (
            commits.commit,
            commits.abort,
            commits.delete,
            commits.settle,
        )
        self.quarantine, self.await_claims = commits.quarantine, commits.await_claims
        self.proved = self._recovery.proved
        self.rebuilds = self._records.rebuilds
        """The index is not trusted: `load` reads every header."""
        self.beside: Callable[[], None] = lambda: None
        """Raises `OSError` where a start would lack what else it needs to find frames: the directory, its keys."""
        self.left_alone = self._recovery.left_alone
        """Slabs that cannot be used."""
        self._taken_bytes = self._recovery.taken_bytes

    # The contract --------------------------------------------------------------------------------------------------

    def reserve(self, slot_class: SlotClass, count: int) -> list[int]:
        with self._lock:
            return self._ledger.reserve(slot_class, count)

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

    def usage(self) -> Usage:
        with self._lock:
            return self._ledger.usage(self._taken_bytes, self.budget_bytes)

    # Beyond the contract -------------------------------------------------------------------------------------------

    def own(self, places: Iterable[int], rows: Iterable[int]) -> None:
        """Record which block's frame stands at each place."""
        with self._lock:
            self._ledger.own(places, rows)

    def own_many(self, places: Column, rows: Column) -> None:
        """The same for columns."""
        with self._lock:
            self._ledger.own_many(places, rows)

    def confirm(self, places: Iterable[int]) -> None:
        """A later start will find the frames at these places by their files' names. Cheap. Raises `TierUnavailable`:
        `bring_back` may help."""
        self._each_file(self._files.confirm, places)

    def bring_back(self, places: Iterable[int]) -> None:
        """Write slabs of these places again that others removed. Slow. Raises `TierUnavailable` if `confirm` still
        would."""
        try:
            self._each_file(self._files.bring_back, places)
        except TierUnavailable as error:
            self._say(NVME_WRITES, error)
            raise
        self._faults.worked(NVME_WRITES)

    def _each_file(self, act: Callable[[str], None], places: Iterable[int]) -> None:
        try:
            for number in {extent_of(place) for place in places}:
                act(slab_name(number))
            self.beside()
        except OSError as error:
            raise TierUnavailable(f"files are gone: {error}") from error

    def close(self) -> None:
        """Finish what was begun and record it in the stamp; if that fails, the next start finds out what is true."""
        with self._lock:
            if self._closed:
                return
        for number in self.slab_numbers():
            with suppress(OSError):
                self._files.bring_back(slab_name(number))
        try:
            self._commits.finish()
            self.session.end(clean=self._recovery.is_complete)
        except (TierUnavailable, OSError):
            pass  # the stamp says that this session has not ended
        with self._lock:
            self._closed = True
        self._commits.close()
        self._records.close()
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
        names = [mark_key(UNPROVEN, number), *(record_key(number, record) for record in records)]
        self._commits.join(BatchRequest(changes=[(name, None) for name in names]))
        self._recovery.retired(number)
        try:
            self._files.remove(slab.name)
        except FileNotFoundError:
            pass  # others removed it
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
            return [number for number, slab in self._ledger.pieces.items() if slab.slots.is_empty]

    def spare_slab(self, wanted: Collection[SlotClass]) -> int | None:
        """An empty slab that can be given back: one of another class, or one whose free slots its class can spare."""
        with self._lock:
            for number, slab in self._ledger.pieces.items():
                if not slab.slots.is_empty:
                    continue
                free = slab.slots.free
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

    def pieces(self) -> int:
        return self.budget_bytes // self.slab_bytes

    def has_room(self) -> bool:
        """Whether the budget allows another slab."""
        return self._taken_bytes + self.slab_bytes <= self.budget_bytes

    def check(self) -> None:
        """Invariant 1; every place in doubt is reserved, deleting, or about to be void."""
        with self._lock:
            self._ledger.check()
            self._commits.check()

    # Recovery ------------------------------------------------------------------------------------------------------

    def load(self, progress: Progress = lambda done, total: None) -> Iterator[Found]:
        """Recover what is there, slab by slab. progress: slots done, slots in all. Raises `TierUnavailable`.

        A slab can be used once it was handed out; before that it is neither read nor written. After a rebuild a block
        may be there twice, with two generations: the lower one was given up.
        """
        return self._recovery.load(progress)

    def _say(self, what: str, error: Exception) -> None:
        if not self._closed:
            self._faults.failed(what, kind_of(error), str(error))

    def _slab(self, place: int) -> NvmeSlab:
        return self._ledger.pieces[extent_of(place)]


# The session of a directory: begun, raised and ended in the stamp, which says how the directory was left -----------


_NAME = slab_name(STAMP_SLAB)


def take_up(files: Files) -> StoreStamp | None:
    """The newest whole stamp, as the last session left it; from now on the directory counts as in use. A directory
    without slabs gets its first stamp with the session. Raises `OtherFormat`."""
    if _NAME not in files.sizes():
        return None
    pages = [read_page(files, _NAME, page * PAGE_BYTES) for page in range(STAMP_PAGES)]
    last = latest_stamp(pages)
    if last is not None and latest_stamp(pages, besides=last) is None:
        last = replace(last, session=last.session + 1)  # the page that is not whole may have been a later session's
    if last is not None and last.clean:
        # A file that rotted since may end this process when it is mapped; the next start has to be careful.
        _put(files, replace(last, sequence=last.sequence + 1, clean=False))
    return last


class StoreSession:
    """The session that is under way."""

    def __init__(self, files: Files, last: StoreStamp | None, records: IndexRecords) -> None:
        """Begins it. last: as `take_up` returned it. A new index gets its uid."""
        self._files = files
        self._records = records
        if _NAME not in files.sizes():
            files.create(_NAME, STAMP_PAGES * PAGE_BYTES)
        if last is None:  # so that the first of a directory whose stamps are gone is the newest there
            last = StoreStamp(0, 0, records.uid, 0, clean=False)
        elif last.clean:
            last = replace(last, sequence=last.sequence + 1)
        uid, changes = records.uid, records.changes
        self._stamp = last.next(index_uid=uid, changes=changes, clean=False, session=last.session + 1)
        _put(files, self._stamp)
        if not records.changes and not records.is_rebuilding:
            records.write([])

    @property
    def number(self) -> int:
        """At least the number of times this directory was opened; durable, so numbers made from it are never used
        twice."""
        return self._stamp.session

    def raise_to(self, session: int) -> None:
        """Frames to be written here are of that session, or of an earlier one: the next session is above it, durably
        when this returns. Raises `TierUnavailable`."""
        stamp = self._stamp
        stamp = stamp.next(index_uid=self._records.uid, changes=stamp.changes, clean=False, session=session)
        try:
            _put(self._files, stamp)
        except OSError as error:
            raise TierUnavailable(f"the directory cannot be written: {error}") from error
        self._stamp = stamp

    def end(self, *, clean: bool) -> None:
        """clean: all was recovered, and what was begun is finished."""
        records = self._records
        self._stamp = self._stamp.next(index_uid=records.uid, changes=records.changes, clean=clean)
        _put(self._files, self._stamp)


def _put(files: Files, stamp: StoreStamp) -> None:
    files.write(_NAME, stamp.page * PAGE_BYTES, memoryview(stamp.pack()))
    files.sync(_NAME)
