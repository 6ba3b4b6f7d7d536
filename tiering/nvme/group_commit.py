"""Makes frames durable, and durably forgotten: batches of what many threads wait for, one after the other.

A frame becomes durable in this order, and many do so together, for one sync of each kind:

    1  its place is put in doubt in the index      (after a crash from here on, the place is voided at the next start)
    2  the frame is written, header and payload in one piece
    3  slabs are synced, and found under their names
    4  one index batch: the record names the frame, the doubt goes; the index is synced          > acknowledged
    -  evicted: one index batch: the record forgets it, the place is in doubt; the index is synced
    5  the header is overwritten with zeros; slabs are synced with the next batch
    6  one index batch: the doubt goes                                                            > the slot is free

So a header that could be taken for a frame stands only where a record or a doubt says so, and an index that is rebuilt
from headers brings back nothing that was given up.

Thread-safe. The lock, which is the tier's, guards tables only; disk calls run outside of it. Each batch is led by one
of the threads that wait for it. Must never acknowledge what a crash could take back.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tiering.errors import IndexDoubtful, TierError, TierUnavailable
from tiering.faults import NVME_WRITES, FaultReports, kind_of
from tiering.frame import HEADER_BYTES, parse_header
from tiering.nvme.frame_index import Change
from tiering.nvme.index_records import IndexRecords, NvmeSlab
from tiering.nvme.slab import BAD, EMPTY, STAMP_SLAB, doubt_key, entry_of_header, slab_name
from tiering.nvme.slab_files import Files, private_pages
from tiering.slab_header import PAGE_BYTES
from tiering.slots import FrameEvent, FrameState, SlotLedger
from tiering.tier import extent_of, slot_of

_STAMP = slab_name(STAMP_SLAB)
_ZERO_PAGE = private_pages(PAGE_BYTES).view
_RESERVED = int(FrameState.RESERVED)
PARALLEL_BYTES = 1 << 20
"""So many bytes of frames are worth several threads."""


@dataclass(slots=True)
class BatchRequest:
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


class GroupCommit:
    """The way of frames into slabs and index, and out of them."""

    def __init__(
        self,
        files: Files,
        records: IndexRecords,
        ledger: SlotLedger[NvmeSlab],
        lock: threading.Lock,
        faults: FaultReports,
        threads: int,
    ) -> None:
        """ledger: the slabs in use; the lock guards it. threads: how many write large frames at once."""
        self._files = files
        self._records = records
        self._ledger = ledger
        self._lock = lock
        self._faults = faults
        self._threads = threads
        self._turn = threading.Condition(lock)
        self._leading = False
        self._waiting: list[BatchRequest] = []
        self._edits: dict[int, bytes | int] = {}  # evicted and quarantined frames, for the next batch
        self._doubted: set[int] = set()  # places that the index holds in doubt
        self._given_back: set[int] = set()  # aborted, but in doubt
        self._claimed: set[int] = set()  # evicted for a caller that waits for them
        self._to_void: list[int] = []
        self._voided: list[int] = []  # their headers are zeros, but not durably yet
        self._failed_syncs = 0
        self._broken: Exception | None = None  # a batch may be half done in the index: no more writes
        self._closed = False

    # Frames --------------------------------------------------------------------------------------------------------

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
            self.join(BatchRequest(doubts=doubts))
        failed_syncs = self._failed_syncs
        try:
            chosen = self._write(places, frames, meanwhile)
        except OSError as error:
            self._say(error)
            raise TierUnavailable(f"a slab cannot be written: {error.strerror}") from error
        if chosen:
            wanted = set(chosen)
            edits: dict[int, bytes | int] = {
                place: entry_of_header(parse_header(bytes(frame[:HEADER_BYTES])))
                for place, frame in zip(places, frames, strict=True)
                if place in wanted
            }
            self.join(BatchRequest(edits=edits, committed=chosen, failed_syncs=failed_syncs))
            if NVME_WRITES in self._faults.failing:
                self._faults.worked(NVME_WRITES)

    def _write(
        self,
        places: Sequence[int],
        frames: Sequence[bytes | memoryview],
        meanwhile: Callable[[], Sequence[int]] | None,
    ) -> Sequence[int]:
        """Returns the result of `meanwhile`. No write is in flight any more when it returns or raises."""
        at_once = min(self._threads, len(places)) if sum(map(len, frames)) >= PARALLEL_BYTES else 1
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

    def abort(self, places: Sequence[int]) -> None:
        """Give reserved places back: at once, or, if something may have been written there, once it is void."""
        with self._lock:
            for place in places:
                if place in self._doubted:
                    assert self._ledger.state(place) == _RESERVED and place not in self._given_back
                    self._void_later(place)
                else:
                    self._ledger.step([place], FrameEvent.ABORT)

    def delete(self, places: Sequence[int], *, claim: bool = False) -> None:
        """Evict committed frames. Their slots are free some batches later, or after `settle`. claim: they are for the
        next caller of `await_claims` only."""
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
                self.join(BatchRequest())
        except BaseException:
            with self._lock:
                mine = [place for place in places if place not in self._claimed]
                self._claimed.difference_update(places)
            self.abort(mine)
            raise

    def quarantine(self, places: Iterable[int]) -> None:
        """A check failed: the slots are not reused before their slab is given back, not even after a restart."""
        with self._lock:
            self._ledger.step(places, FrameEvent.CONDEMN)
            for place in places:
                self._edits[place] = BAD

    def take_in(self, slab: NvmeSlab, in_doubt: Iterable[int]) -> None:
        """A slab from before is in use from now on. in_doubt: its reserved places, which are voided."""
        with self._lock:
            self._ledger.add(slab)
            for place in in_doubt:
                self._doubted.add(place)
                self._void_later(place)

    def _void_later(self, place: int) -> None:
        self._given_back.add(place)
        self._to_void.append(place)

    def check(self) -> None:
        """Every place in doubt is reserved, deleting, or about to be void. Under the lock."""
        for place in self._doubted:
            assert self._ledger.state(place) in (FrameState.RESERVED, FrameState.DELETING), place

    # Batches -------------------------------------------------------------------------------------------------------

    def settle(self, *, under_way: bool = True) -> None:
        """Finish evictions: slots given up before are free, durably, when this returns. under_way: also those that
        another batch has taken up, which a caller that only needs room can skip. Raises `TierUnavailable`."""
        for _ in range(2):  # the first batch forgets frames and voids their headers, the second one frees the slots
            if not self.is_unsettled(under_way):
                return
            self.join(BatchRequest())

    def is_unsettled(self, under_way: bool = True) -> bool:
        """Whether anything that was given up is not free yet."""
        with self._lock:  # the changes of a running batch are not durable yet
            return bool((under_way and self._leading) or self._broken or self._edits or self._to_void or self._voided)

    def finish(self) -> None:
        """Settle until nothing is left, before the tier closes. Raises `TierUnavailable`."""
        while self.is_unsettled():
            self.settle()

    def close(self) -> None:
        """What fails from now on is no fault of the disk."""
        self._closed = True

    def join(self, request: BatchRequest) -> None:
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
            self._say(request.fault)
            raise TierUnavailable(f"the NVMe tier cannot make anything durable: {request.fault}") from request.fault

    def _say(self, error: Exception) -> None:
        if not self._closed:
            self._faults.failed(NVME_WRITES, kind_of(error), str(error))

    def _run(self, batch: Sequence[BatchRequest]) -> None:
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
            if committed:
                self._files.bring_back(_STAMP)  # without it a start would number frames as earlier ones were
            changes = [change for request in batch for change in request.changes]
            changes += self._records.edited(edits)
            changes += [(doubt_key(place), b"") for place in (*doubts, *forgotten)]
            changes += [(doubt_key(place), None) for place in (*committed, *voided)]
        except BaseException:
            with self._lock:  # a sync that failed may have lost what it covered: the zeros are written again
                self._failed_syncs += 1
                self._to_void += voided
                self._edits = {**given_up, **self._edits}
            raise
        try:
            self._records.write(changes)
        except BaseException as error:
            is_as_before = not isinstance(error, IndexDoubtful) and self._records.has_refused()
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

    def _slab(self, place: int) -> NvmeSlab:
        return self._ledger.pieces[extent_of(place)]
