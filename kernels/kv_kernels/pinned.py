"""Memory of slots: which of it is page-locked, so that a device copies it by itself.

    adopt    the mapping of a slot that was seen, at most a GiB; a thread page-locks it with the device. Until then, or
             where the device refuses it, copies of its slots are slower (`cuda.CudaStream.copy`)
    hold     a transfer uses some of it: it stays as it is until the transfer lets go
    leave    the last view of a mapping is gone: it is unregistered by the thread, and only then unmapped

Page-locking leaves pages where they are: the first touch has decided which NUMA node an extent lies on. No memory
policy is set. Must never call a run page-locked that is not wholly inside one extent: a copy across two may be refused.
Must never register or unregister on a thread that launches kernels: a refusal by CUDA stays its last error.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from kv_kernels.compiled import compiled
from kv_kernels.cuda import CudaDevice, Rows

Addresses = np.ndarray[Any, np.dtype[np.int64]]
Runs = tuple[Rows, bool]
"""Slots in their order as few runs, int64 [3, runs], of each where it lies among them, its address, and its bytes; and
whether all of it is page-locked."""
Table = tuple[Addresses, np.ndarray[Any, np.dtype[np.bool_]]]
"""Of extents in order, int64 [extents, 2]: where each starts and ends; and whether it is page-locked."""
Leave = Callable[[Callable[[], object]], object]
"""Called by a finalizer in place of unmapping, with a function that unmaps."""

_log = logging.getLogger(__name__)


class _Extent:
    def __init__(self, address: int, end: int, writable: bool) -> None:
        self.address, self.end, self.writable = address, end, writable
        self.is_pinned, self.holds = False, 0


class PinnedExtents:
    """The extents of one process, for one device. Any thread may call, a finalizer too. Work is done by a thread
    (`run`), or where there is none by `step`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._changed = threading.Condition()  # of a reentrant lock: a finalizer may run while it is held
        self._extents: list[_Extent] = []  # by their addresses
        self._known: Table | None = None  # until something changes
        self._leaving: deque[Callable[[], object]] = deque()
        self._waiting: deque[_Extent] = deque()  # to be registered
        self._kept: list[Callable[[], object]] = []
        self._was_refused = self._is_closed = self._has_failed = self._is_ending = self._has_ended = False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kv-pins", daemon=True)
        self._thread.start()

    def step(self) -> bool:
        """Do the next piece of work, first for those that leave; False if there is none."""
        with self._changed:
            if self._leaving:
                work = self._leaving.popleft()
            elif self._waiting:
                work = partial(self._register, self._waiting.popleft())
            else:
                return False
        try:
            work()
        finally:
            with self._changed:
                self._changed.notify_all()
        return True

    def adopt(self, address: int, size_bytes: int, before_unmap: Callable[[Leave], object], *, writable: bool) -> None:
        """Memory of slots that stays mapped while the caller has views of it. before_unmap: takes what the finalizer
        of the last view calls. Memory that is known already is only looked up; what overlaps other memory is left out.
        """
        with self._changed:
            end = address + size_bytes
            if self._is_closed or any(one.address < end and address < one.end for one in self._extents):
                return
            extent = _Extent(address, end, writable)
            insort(self._extents, extent, key=attrgetter("address"))
            self._known = None
            self._waiting.append(extent)
            self._changed.notify_all()
        before_unmap(partial(self._leaves, extent))

    def fail(self) -> None:
        """The device has failed: what is held stays for ever, and nothing is held any more."""
        self._is_closed = self._has_failed = True

    def close(self, timeout_s: float) -> bool:
        """Adopt and hold no more, and unregister everything once no transfer holds any of it; returns whether that was
        in time. On a device that has failed it never is, and is not waited for."""
        if os.getpid() != self._process:
            return True
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            wait_s = 0.0 if self._has_failed else timeout_s
            if not self._changed.wait_for(lambda: not any([one.holds for one in self._extents]), wait_s):
                return False
            self._leaving.extend([partial(self._unregister, one) for one in self._extents])
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        else:
            while self.step():
                pass
            self._has_ended = True
        return not self._extents

    def hold(self, slots: Addresses, size_bytes: int) -> Hold | None:
        """Keep these slots' memory in place. The caller keeps memory that is in no extent. None after `close`; raises
        ValueError if a slot is only partly in an extent."""
        with self._changed:
            if self._is_closed:
                return None
            table, places = self._table(), np.empty(len(slots), np.int64)
            cut = _find(slots, size_bytes, table[0], places)
            if cut >= 0:
                raise ValueError(f"the slot at {slots[cut]:#x} of {size_bytes} bytes is not wholly inside its extent")
            extents = [self._extents[at] for at in set(places.tolist()) if at >= 0]
            for extent in extents:
                extent.holds += 1
        return Hold(self, extents, slots, places, table)

    def runs(self, slots: Addresses, size_bytes: int) -> Runs | None:
        """As they are now. None after `close`."""
        hold = self.hold(slots, size_bytes)
        if hold is None:
            return None
        hold.release()
        (runs,) = hold.runs(0, size_bytes)
        return runs

    def wait(self, slots: Addresses, size_bytes: int, timeout_s: float = 60.0) -> bool:
        """Until all of these slots are page-locked; returns whether that was in time."""

        def are_pinned() -> bool:
            runs = self.runs(slots, size_bytes)
            return runs is not None and runs[1]

        with self._changed:
            return self._changed.wait_for(are_pinned, timeout_s)

    def let_go(self, extents: Sequence[_Extent]) -> None:
        with self._changed:
            for extent in extents:
                assert extent.holds > 0, "held as often as let go"
                extent.holds -= 1
            if self._is_closed:
                self._changed.notify_all()

    def _table(self) -> Table:
        """As they are now. Under the lock."""
        if self._known is None:
            rows = [(one.address, one.end) for one in self._extents]
            pinned = np.array([one.is_pinned for one in self._extents], np.bool_)
            self._known = np.array(rows, np.int64).reshape(-1, 2), pinned
        return self._known

    def _leaves(self, extent: _Extent, unmap: Callable[[], object]) -> None:
        """The last view of an extent is gone. Does not block."""
        if os.getpid() != self._process:  # a forked child has neither the thread nor the device
            unmap()
            return
        with self._changed:
            self._waiting = deque([one for one in self._waiting if one is not extent])
            if not self._has_ended:
                self._leaving.append(partial(self._leave, extent, unmap))
                self._changed.notify_all()
                return
        self._leave(extent, unmap)

    def _leave(self, extent: _Extent, unmap: Callable[[], object]) -> None:
        if extent.holds:  # by a transfer whose device failed: it may still be running
            self._kept.append(unmap)
            return
        self._unregister(extent)
        unmap()

    def _register(self, extent: _Extent) -> None:
        size = extent.end - extent.address
        refusal = self._device.register(extent.address, size, writable=extent.writable)
        if not refusal:
            with self._changed:
                extent.is_pinned, self._known = True, None
        elif not self._was_refused:
            self._was_refused = True
            kind = "writable" if extent.writable else "read-only"
            _log.warning(
                "the device refused to page-lock %d bytes of %s shared memory: %s; the driver copies it through memory "
                "of its own, which is slower and costs CPU time (said once)",
                size,
                kind,
                refusal,
            )

    def _unregister(self, extent: _Extent) -> None:
        if extent not in self._extents:  # done by `close`
            return
        if extent.is_pinned:
            self._device.unregister(extent.address)
        with self._changed:
            self._extents.remove(extent)
            self._known = None

    def _run(self) -> None:
        while not self._has_ended:
            try:
                while self.step():
                    pass
            except Exception:
                _log.exception("page-locking failed")
            with self._changed:
                self._changed.wait_for(lambda: self._leaving or self._waiting or self._is_ending)
                self._has_ended = self._is_ending and not self._leaving


class Hold:
    """Slots whose extents stay where they are until `release`, which may be called again."""

    def __init__(
        self, extents: PinnedExtents, held: Sequence[_Extent], slots: Addresses, places: Addresses, table: Table
    ) -> None:
        """places: of each slot the number of its extent in the table, -1 for memory in none."""
        self._extents, self._held = extents, held
        self.is_known = bool((places >= 0).all())
        self._slots, self._places, self._table = slots, places, table

    def runs(self, offset_bytes: int, size_bytes: int, at_once: int = 1 << 40) -> list[Runs]:
        """So much of each slot, in batches of `at_once` slots, of each neighbours as one run. Memory in no extent is
        not page-locked, nor what became so since it is held."""
        count = len(self._slots)
        rows, cuts = np.empty((3, count), np.int64), np.empty((2, 1 - (-count // at_once)), np.int64)
        _put_together(self._slots + offset_bytes, size_bytes, at_once, self._places, self._table[1], rows, cuts)
        firsts, are_pinned = cuts.tolist()
        of_batch = zip(firsts, firsts[1:], are_pinned, strict=False)
        return [(rows[:, first:stop], is_pinned == 1) for first, stop, is_pinned in of_batch]

    def release(self) -> None:
        held, self._held = self._held, ()
        self._extents.let_go(held)


@compiled
def _find(slots: Any, size: int, extents: Any, places: Any) -> int:
    """Of each slot the number of its extent, or -1; returns the first slot that is only partly in one, or -1."""
    at = -1
    for number in range(len(slots)):
        low, high = slots[number], slots[number] + size
        if at < 0 or low < extents[at, 0] or high > extents[at, 1]:  # not in that of the slot before
            at = np.searchsorted(extents[:, 0], high - 1, side="right") - 1
            if at >= 0 and extents[at, 1] <= low:
                at = -1
            if at >= 0 and (low < extents[at, 0] or extents[at, 1] < high):
                return number
        places[number] = at
    return -1


@compiled
def _put_together(slots: Any, size: int, at_once: int, places: Any, pinned: Any, rows: Any, cuts: Any) -> None:
    """See `Hold.runs`; cuts: int64 [2, batches + 1], of each batch its first run, and whether all is page-locked."""
    runs, end, last = 0, -1, -1
    for number in range(len(slots)):
        batch, within, at = number // at_once, number % at_once, places[number]
        if within == 0:
            cuts[0, batch], cuts[1, batch], end = runs, 1, -1
        if slots[number] == end and at == last and at >= 0:
            rows[2, runs - 1] += size
        else:
            rows[0, runs], rows[1, runs], rows[2, runs] = within * size, slots[number], size
            runs += 1
        cuts[1, batch] &= at >= 0 and pinned[at]
        end, last = slots[number] + size, at
    cuts[0, -1] = runs
