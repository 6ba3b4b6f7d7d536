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
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_kernels.device import Host, host_tensor
from kv_kernels.worker import Worker

CHUNK_BYTES = 1 << 30
"""At most so much is registered at once: the driver takes long, and other calls wait for it."""

Addresses = np.ndarray[Any, np.dtype[np.int64]]
Leave = Callable[[Callable[[], object]], object]
"""Called by a finalizer in place of unmapping, with a function that unmaps."""

_log = logging.getLogger(__name__)


class Runs(NamedTuple):
    """Slots as few runs in the order of the slots: addresses and sizes, int64 [runs]. is_pinned: all of them."""

    addresses: Addresses
    sizes: Addresses
    is_pinned: bool


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


class _ChunkTable(NamedTuple):
    """Of each extent: where it starts and ends, and the number of its first chunk; of each chunk: whether it is
    page-locked."""

    starts: Addresses
    ends: Addresses
    chunks: Addresses
    pinned: np.ndarray[Any, np.dtype[np.bool_]]


class PinnedExtents:
    """The extents of one process, for one device. Any thread may call; `worker` is its own."""

    def __init__(self, host: Host, worker: Worker, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._host = host
        self._worker = worker
        self._chunk_bytes = chunk_bytes
        self._starts: list[int] = []
        self._known: _ChunkTable | None = None  # until something changes
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

    def hold(self, addresses: Sequence[int], size_bytes: int) -> Hold:
        """Keep these slots' memory in place. The caller keeps memory that is in no extent. Raises ValueError if a slot
        is in an extent that is being removed, or only partly in one."""
        slots = np.array(addresses, np.int64)
        with self._lock:
            extents = [self._extents[at] for at in np.unique(self._places_of(slots, size_bytes)).tolist() if at >= 0]
            for extent in extents:
                if extent.is_going:
                    raise ValueError(f"slots are in the extent at {extent.address:#x}, which is being removed")
            for extent in extents:
                extent.holds += 1
        return Hold(self, extents)

    def runs(self, addresses: Addresses, size_bytes: int, at_once: int = 1 << 62) -> list[Runs]:
        """These slots, of equal size, for each `at_once` of them neighbours as one run. They must be held. Memory in no
        extent is not pinned."""
        with self._lock:
            at, table = self._places_of(addresses, size_bytes), self._table()
        slots, lows, highs = np.arange(len(addresses)), addresses, addresses + size_bytes
        starts, are_known = table.starts[at], at >= 0
        first, last = ((there - starts) // self._chunk_bytes for there in (lows, highs - 1))
        pieces = np.where(are_known, last - first + 1, 1)
        if pieces.max() > 1:  # cut where a chunk ends
            slots = np.repeat(slots, pieces)
            first = first[slots] + np.arange(len(slots)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            at, are_known, lows, highs = at[slots], are_known[slots], lows[slots], highs[slots]
            chunk_at = starts[slots] + first * self._chunk_bytes
            lows = np.where(are_known, np.maximum(lows, chunk_at), lows)
            highs = np.where(are_known, np.minimum(highs, chunk_at + self._chunk_bytes), highs)
        chunks, batch = np.where(are_known, table.chunks[at] + first, -1), slots // at_once
        are_pinned = are_known & table.pinned[chunks]
        goes_on = (lows[1:] == highs[:-1]) & (np.diff(chunks) == 0) & (chunks[1:] >= 0) & (np.diff(batch) == 0)
        begins = np.flatnonzero(np.append(True, ~goes_on))
        sizes = np.add.reduceat(highs - lows, begins)
        cuts = np.searchsorted(batch[begins], np.arange(batch[-1] + 2))
        return [
            Runs(lows[begins[low:high]], sizes[low:high], bool(are_pinned[begins[low:high]].all()))
            for low, high in pairwise(cuts.tolist())
        ]

    def let_go(self, extents: Sequence[_Extent]) -> None:
        with self._lock:
            for extent in extents:
                assert extent.holds > 0, "held as often as let go"
                extent.holds -= 1
        self._worker.notify()

    def _places_of(self, addresses: Addresses, size_bytes: int) -> Addresses:
        """The number of each slot's extent; -1 for one in none."""
        table = self._table()
        at = np.searchsorted(table.starts[:-1], addresses + (size_bytes - 1), "right") - 1
        at[table.ends[at] <= addresses] = -1
        are_cut = (at >= 0) & ((addresses < table.starts[at]) | (table.ends[at] < addresses + size_bytes))
        if are_cut.any():
            slot = int(addresses[are_cut][0])
            raise ValueError(f"the slot at {slot:#x} of {size_bytes} bytes is not wholly inside its extent")
        return at

    def _table(self) -> _ChunkTable:
        """Of the extents as they are now, and at the end one of none. Under the lock."""
        if self._known is None:
            rows = [(extent.address, extent.end, len(extent.pinned)) for extent in self._extents]
            starts, ends, chunks = np.array([*rows, (0, 0, 0)], np.int64).T
            pinned = [is_pinned for extent in self._extents for is_pinned in extent.pinned]
            self._known = _ChunkTable(starts, ends, np.cumsum(chunks) - chunks, np.array([*pinned, False]))
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
        chunks = -(-size_bytes // self._chunk_bytes)
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
        start = chunk * self._chunk_bytes
        size = min(self._chunk_bytes, extent.memory.numel() - start)
        refusal = self._host.register(extent.address + start, size, writable=extent.writable)
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
                self._host.unregister(extent.address + chunk * self._chunk_bytes)
                self._note_pinned(extent, chunk, False)  # where the next one fails, another call does the rest
        with self._lock:
            at = self._extents.index(extent)
            del self._starts[at], self._extents[at]
            self._known = None
            self._waiting = deque([one for one in self._waiting if one[0] is not extent])
        gone.set()


class Hold:
    """Extents that stay where they are until `release`, which may be called again."""

    def __init__(self, extents: PinnedExtents, held: Sequence[_Extent]) -> None:
        self._extents = extents
        self._held = held

    def release(self) -> None:
        held, self._held = self._held, ()
        self._extents.let_go(held)
