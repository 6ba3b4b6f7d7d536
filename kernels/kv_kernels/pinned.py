"""Extents that copies may read and write, and which of their bytes are page-locked.

    adopt    the mapping of a slot that was seen: added, for as long as it is mapped; the worker unmaps it, after it was
             unregistered
    add      known at once; a worker registers it with the device in chunks, and until a chunk is in, copies of its
             slots go through a bounce ring
    hold     a transfer uses some of it: the memory stays, registered or not as it is; any other memory bounces
    remove   once no transfer holds it, it is unregistered, and only then may the memory go

Registering page-locks pages where they are and moves none: the first touch of its pages has decided which NUMA node an
extent lies on. The bounce rings, which this process touches first, lie near the CPUs of the thread that uses them
(`worker.Worker`, `cuda.local_cpus`). No memory policy is set.

A reader's mapping is read-only; a device that cannot page-lock such memory refuses it, and everything bounces. Must
never call a run page-locked that is not wholly inside one registered chunk: a copy across two may be refused.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_kernels.compiled import compiled
from kv_kernels.cuda import CudaDevice, host_tensor
from kv_kernels.worker import Worker

CHUNK_BYTES = 1 << 30
"""At most so much is registered at once: the driver takes long, and other calls wait for it."""

Addresses = np.ndarray[Any, np.dtype[np.int64]]
Table = tuple[Addresses, np.ndarray[Any, np.dtype[np.bool_]]]
"""Of extents, int64 [extents, 3]: where each starts and ends, and the number of its first chunk; and of each chunk
whether it is page-locked."""
Leave = Callable[[Callable[[], object]], object]
"""Called by a finalizer in place of unmapping, with a function that unmaps."""

_log = logging.getLogger(__name__)


class Runs(NamedTuple):
    """Slots in their order as few runs. rows: int64 [3, runs], of each where it lies in its batch, its address, and its
    bytes. Batch i has the runs cuts[i] to cuts[i + 1]; are_pinned: of each batch, whether all of it is."""

    rows: np.ndarray[Any, np.dtype[np.int64]]
    cuts: list[int]
    are_pinned: list[bool]


@dataclass(eq=False)
class _Extent:
    address: int
    memory: torch.Tensor
    keep: object
    writable: bool
    pinned: list[bool]
    holds: int = 0
    is_going: bool = False
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.address + self.memory.numel()


class PinnedExtents:
    """The extents of one process, for one device. Any thread may call; `worker` is its own."""

    def __init__(self, device: CudaDevice, worker: Worker, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._worker = worker
        self.chunk_bytes = chunk_bytes
        self._starts: list[int] = []
        self._known: Table | None = None  # until something changes
        self._extents: list[_Extent] = []
        self._lock = threading.RLock()  # reentrant: a finalizer may run while it is held
        self._was_refused = False
        self._is_closed = False
        self._process = os.getpid()
        self._kept: list[Callable[[], object]] = []
        self._waiting: deque[tuple[_Extent, int]] = deque()  # to be registered
        self._is_registering = False

    def adopt(self, address: int, size_bytes: int, before_unmap: Callable[[Leave], object], *, writable: bool) -> None:
        """Memory of slots that stays mapped while the caller has views of it. before_unmap: takes what the finalizer
        of the last view calls. Memory that is known already is only looked up."""
        with self._lock:
            at = bisect_right(self._starts, address) - 1
            if self._is_closed or (at >= 0 and address < self._extents[at].end):
                return
        if self._insert(address, size_bytes, None, writable):
            before_unmap(partial(self._leaves, address))

    def close(self, timeout_s: float) -> bool:
        """Unregister all that no transfer holds, and adopt no more; returns whether that was done in time."""
        if os.getpid() != self._process:
            return True
        with self._lock:
            self._is_closed = True
            addresses = [extent.address for extent in self._extents if not extent.holds]
        return all([self.remove(address, timeout_s) for address in addresses])

    def add(self, address: int, size_bytes: int, keep: object, *, writable: bool) -> None:
        """keep: what keeps the memory mapped, until after `remove`. writable: whether the mapping is.

        Raises ValueError if it overlaps a known extent.
        """
        if not self._insert(address, size_bytes, keep, writable):
            raise ValueError(f"memory at {address:#x} of {size_bytes} bytes is here already: remove it first")

    def remove(self, address: int, timeout_s: float) -> bool:
        """Unregister an added extent, once no transfer holds it; until then the memory must stay.

        False if that takes longer than the timeout, or the worker has too much to do: it is still here then, to be
        removed by another call.
        """
        with self._lock:
            extent = next((known for known in self._extents if known.address == address), None)
            if extent is None:
                return True
            extent.is_going = True
        if not self._worker.wait(lambda: not extent.holds, timeout_s):
            with self._lock:
                extent.is_going = False
            return False
        gone = threading.Event()
        if not self._worker.submit(lambda: self._unregister(extent, gone)):
            with self._lock:
                extent.is_going = False
            return False
        return self._worker.wait(gone.is_set, timeout_s)

    def hold(self, slots: Addresses, size_bytes: int) -> Hold:
        """Keep these slots' memory in place. The caller keeps memory that is in no extent. Raises ValueError if a slot
        is in an extent that is being removed, or only partly in one."""
        with self._lock:
            table, places = self._table(), np.empty(len(slots), np.int64)
            cut = _find(slots, size_bytes, table[0], places)
            if cut >= 0:
                raise ValueError(f"the slot at {slots[cut]:#x} of {size_bytes} bytes is not wholly inside its extent")
            extents = [self._extents[at] for at in set(places.tolist()) if at >= 0]
            for extent in extents:
                if extent.is_going:
                    raise ValueError(f"slots are in the extent at {extent.address:#x}, which is being removed")
            for extent in extents:
                extent.holds += 1
        return Hold(self, extents, slots, places, table)

    def runs(self, slots: Addresses, size_bytes: int) -> Runs:
        """As they are now."""
        hold = self.hold(slots, size_bytes)
        hold.release()
        return hold.runs(0, size_bytes)

    def wait(self, slots: Addresses, size_bytes: int, timeout_s: float = 60.0) -> bool:
        """Until all of these slots are page-locked; returns whether that was in time."""
        return self._worker.wait(lambda: all(self.runs(slots, size_bytes).are_pinned), timeout_s)

    def let_go(self, extents: Sequence[_Extent]) -> None:
        with self._lock:
            for extent in extents:
                assert extent.holds > 0, "held as often as let go"
                extent.holds -= 1
        self._worker.notify()

    def _table(self) -> Table:
        """As they are now. Under the lock."""
        if self._known is None:
            chunks = [0, *accumulate([len(extent.pinned) for extent in self._extents])]
            rows = [(one.address, one.end, first) for one, first in zip(self._extents, chunks, strict=False)]
            pinned = np.array([is_pinned for extent in self._extents for is_pinned in extent.pinned], np.bool_)
            self._known = np.array(rows, np.int64).reshape(-1, 3), pinned
        return self._known

    def _leaves(self, address: int, unmap: Callable[[], object]) -> None:
        """The last view of an adopted extent is gone. Does not block."""
        if os.getpid() != self._process:  # a forked child has neither the worker nor the device
            unmap()
            return
        with self._lock:
            self._waiting = deque([one for one in self._waiting if one[0].address != address])
        if not self._worker.submit(partial(self._leave, address, unmap)):
            self._leave(address, unmap)

    def _leave(self, address: int, unmap: Callable[[], object]) -> None:
        with self._lock:
            extent = next((known for known in self._extents if known.address == address), None)
        if extent is not None:
            if extent.holds:  # by a transfer whose device failed: it may still be running
                self._kept.append(unmap)
                return
            self._unregister(extent, threading.Event())
        unmap()

    def _insert(self, address: int, size_bytes: int, keep: object, writable: bool) -> bool:
        chunks = -(-size_bytes // self.chunk_bytes)
        extent = _Extent(address, host_tensor(address, size_bytes), keep, writable, [False] * chunks)
        with self._lock:
            at = bisect_right(self._starts, address)
            neighbours = self._extents[max(0, at - 1) : at + 1]
            if any(other.address < extent.end and address < other.end for other in neighbours):
                return False
            self._starts.insert(at, address)
            self._extents.insert(at, extent)
            self._known = None
            self._waiting.extend((extent, chunk) for chunk in range(chunks))
            is_idle, self._is_registering = not self._is_registering, True
        if is_idle:
            self._go_on()
        return True

    def _go_on(self) -> None:
        """Register one chunk at a time: a removal waits for one at most. Not under the lock: the worker has its own."""
        with self._lock:
            self._is_registering = bool(self._waiting)
        if self._is_registering and not self._worker.submit(self._register_next):
            self._is_registering = False

    def _register_next(self) -> None:
        with self._lock:
            extent, chunk = self._waiting.popleft() if self._waiting else (None, 0)
        if extent is not None:
            self._register(extent, chunk)
        self._go_on()

    def _register(self, extent: _Extent, chunk: int) -> None:
        start = chunk * self.chunk_bytes
        size = min(self.chunk_bytes, extent.memory.numel() - start)
        refusal = self._device.register(extent.address + start, size, writable=extent.writable)
        if not refusal:
            self._note_pinned(extent, chunk, True)
        elif not self._was_refused:
            self._was_refused = True
            kind = "writable" if extent.writable else "read-only"
            _log.warning(
                "the device refused to page-lock %d bytes of %s shared memory: %s; their copies take a detour through "
                "a small pinned buffer and cost CPU time (said once)",
                size,
                kind,
                refusal,
            )

    def _note_pinned(self, extent: _Extent, chunk: int, is_pinned: bool) -> None:
        with self._lock:
            extent.pinned[chunk], self._known = is_pinned, None

    def _unregister(self, extent: _Extent, gone: threading.Event) -> None:
        if extent not in self._extents:  # a call before this one was slow, and did it
            gone.set()
            return
        for chunk, is_pinned in enumerate(extent.pinned):
            if is_pinned:
                self._device.unregister(extent.address + chunk * self.chunk_bytes)
                self._note_pinned(extent, chunk, False)  # where the next one fails, another call does the rest
        with self._lock:
            at = self._extents.index(extent)
            del self._starts[at], self._extents[at]
            self._known = None
            self._waiting = deque([one for one in self._waiting if one[0] is not extent])
        gone.set()


class Hold:
    """Slots whose extents stay where they are until `release`, which may be called again."""

    def __init__(
        self, extents: PinnedExtents, held: Sequence[_Extent], slots: Addresses, places: Addresses, table: Table
    ) -> None:
        """places: of each slot the number of its extent in the table, -1 for memory in none."""
        self._extents, self._held = extents, held
        self._slots, self._places, self._table = slots, places, table

    def runs(self, offset_bytes: int, size_bytes: int, at_once: int = 1 << 40) -> Runs:
        """So much of each slot, in batches of `at_once` slots, of each neighbours as one run. Memory in no extent is
        not page-locked, nor what became so since it is held."""
        count, chunk_bytes = len(self._slots), self._extents.chunk_bytes
        rows = np.empty((3, count * (2 + size_bytes // chunk_bytes)), np.int64)
        cuts, slots = np.empty((2, 1 - (-count // at_once)), np.int64), self._slots + offset_bytes
        _put_together(slots, size_bytes, at_once, self._places, *self._table, chunk_bytes, rows, cuts)
        firsts, are_pinned = cuts.tolist()
        return Runs(rows[:, : firsts[-1]], firsts, [is_pinned == 1 for is_pinned in are_pinned[:-1]])

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
def _put_together(
    slots: Any, size: int, at_once: int, places: Any, extents: Any, pinned: Any, chunk_bytes: int, rows: Any, cuts: Any
) -> None:
    """See `Runs`; cuts: int64 [2, batches + 1], of each batch its first run, and whether all is page-locked. A run ends
    where a chunk does."""
    runs, place, end, last = 0, 0, -1, -1
    for number in range(len(slots)):
        batch, low, at = number // at_once, slots[number], places[number]
        high = low + size
        if number % at_once == 0:
            cuts[0, batch], cuts[1, batch], place, end = runs, 1, 0, -1
        while low < high:
            chunk, stop, is_pinned = -1, high, False
            if at >= 0:
                own = (low - extents[at, 0]) // chunk_bytes
                chunk, stop = extents[at, 2] + own, min(high, extents[at, 0] + (own + 1) * chunk_bytes)
                is_pinned = pinned[chunk]
            if low == end and chunk == last and chunk >= 0:
                rows[2, runs - 1] += stop - low
            else:
                rows[0, runs], rows[1, runs], rows[2, runs] = place, low, stop - low
                runs += 1
            cuts[1, batch] &= is_pinned
            place, end, last, low = place + stop - low, stop, chunk, stop
    cuts[0, -1] = runs
