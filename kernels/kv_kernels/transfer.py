"""Loads and saves: host slots to an engine's pages and back, on streams of their own.

    load    copy: slots > staging segment; kernel: segment > pages          both in one stream, segment after segment
    save    kernel: pages > staging segment; copy: segment > slots          likewise
    either  a kernel that reaches into the slots itself, with a segment as its scratch, where they are page-locked
    both    the worker waits for the last of it, then `outcome`: slots and pages are the caller's

A direction has two streams and each of them a segment, used in turn, so that a copy goes on beside a kernel. Since one
stream does all work on a segment, in order, nothing else has to order it: a stream waits once, for the event after
which the pages may be used.

All of it is put into the streams at once, on the caller's thread, one copy and one kernel a segment whatever the number
of blocks. A segment's slots that are not page-locked yet cannot be reached by a copy: such a transfer is put in by the
worker instead, through a bounce ring, and `is_direct` says so.

The page tables belong to the kernel, which is kept until its last launch is done. Where the device fails so that the
end of the work cannot be learnt, the transfer is stranded: only the end of the process ends it. Must never block the
caller but in `wait`, and there no longer than it is told; never call a transfer done while any of its work may still
touch pages, slots or tables.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kv_kernels.cuda import CudaDevice, CudaStream, Direction, Event, Rows
from kv_kernels.pinned import Addresses, Hold, PinnedExtents
from kv_kernels.worker import Worker

_log = logging.getLogger(__name__)


class LayerSlice(NamedTuple):
    """Layers first .. stop - 1, and where they lie in every frame: bytes from the address that the slot is told by."""

    first: int
    stop: int
    offset_bytes: int
    size_bytes: int


def layer_slices(layers: int, layer_bytes: int, layers_at_once: int, offset_bytes: int = 0) -> list[LayerSlice]:
    """Slices of a payload of equal layers, which begins `offset_bytes` into the slot.

    layers_at_once: few let the engine begin early, and make small copies (below about 1 MiB a copy engine idles); all
    make one slice, and neighbouring slots one copy, where a slot is told with its header.
    """
    return [
        LayerSlice(first, stop, offset_bytes + first * layer_bytes, (stop - first) * layer_bytes)
        for first in range(0, layers, layers_at_once)
        for stop in [min(first + layers_at_once, layers)]
    ]


class TransferOutcome(Enum):
    PENDING = "pending"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"  # `error` says why


class Transfer:
    """One load or save. With any outcome but PENDING, none of its work touches pages, slots or tables any more.

    The exception is a FAILED one that `is_stranded`: the device may still be running it.
    """

    def __init__(self, worker: Worker, kernel: PageKernel, hold: Hold, is_direct: bool) -> None:
        self.is_direct = is_direct
        self.is_stranded = False
        self.error: BaseException | None = None
        self.outcome = TransferOutcome.PENDING
        self._worker = worker
        self._kernel: PageKernel | None = kernel
        self._hold = hold
        self.is_cancelled = False
        self.is_put_in = False
        self._ends: Sequence[Event | None] = ()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the outcome is known; False if that takes longer."""
        return self._worker.wait(lambda: self.outcome is not TransferOutcome.PENDING, timeout_s)

    def cancel(self) -> None:
        """Put in no more of it, and do not call it done. Work in the streams is still done."""
        self.is_cancelled = True

    def put_in(self, ends: Sequence[Event | None]) -> None:
        """All of it is in the streams, or no more will be; it is done with these events. None: the device failed."""
        self._ends = ends
        self.is_put_in = True
        self._worker.notify()

    def failed(self, error: BaseException) -> None:
        """The first one is kept, without its traceback: the frames in it would keep tables and tensors alive."""
        _log.debug("in a transfer", exc_info=error)
        self.error = self.error or error.with_traceback(None)

    def settle(self) -> None:
        """On the worker, once all of it is in the streams: wait for the ends."""
        try:
            for event in self._ends:
                if event is None:
                    raise RuntimeError("the device took no event")
                event.synchronize()
            self._hold.release()
            self._kernel = None
        except Exception as error:  # the end cannot be learnt
            self.failed(error)
            self.is_stranded = True
        outcome = TransferOutcome.CANCELLED if self.is_cancelled else TransferOutcome.DONE
        if self.error is not None:
            outcome = TransferOutcome.FAILED
            _log.warning("a transfer failed: %s: %s", type(self.error).__name__, self.error)
        self.outcome = outcome
        self._worker.notify()


class PageKernel(Protocol):
    """Moves blocks between staged slices and the engine's pages; holds the page table and the pointers to the pools.

    reaches: where all slots are page-locked, it reads and writes them itself, and needs no copies.
    """

    reaches: bool

    def __call__(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        """Launch into the current stream. staged: uint8 [frames, size_bytes], or flat, a scratch for who reaches the
        slots; frames: which of the transfer's."""
        ...

    def end(self, stream: CudaStream) -> None:
        """After the last launch: copy to the host what must be there when the transfer is done."""
        ...


class _Batch(NamedTuple):
    """What goes through a segment at once. rows: its copies, to or from byte 0 of the segment; none where the kernel
    reaches the slots itself."""

    layers: LayerSlice
    frames: range
    rows: Rows
    is_pinned: bool


class PageMover:
    """The transfers of one direction of one device: its lanes, its bounce ring, and the worker that waits for ends."""

    def __init__(
        self,
        device: CudaDevice,
        direction: Direction,
        extents: PinnedExtents,
        worker: Worker,
        segment_bytes: int,
        bounce_segments: int = 2,
    ) -> None:
        """worker: of this direction alone. segment_bytes: of each lane's segment, and of each of the bounce segments,
        which are taken in pinned host memory once a slot is not page-locked."""
        self._device = device
        self._loads = direction is Direction.LOAD
        self._extents = extents
        self._worker = worker
        streams = device.lanes(direction)
        memory = device.memory(segment_bytes * len(streams)).split(segment_bytes)
        self._lanes = [(*lane, threading.Lock()) for lane in zip(streams, memory, strict=True)]
        self._segment_bytes = segment_bytes
        self._turn = 0
        self._bounce = BounceRing(device, segment_bytes, bounce_segments)
        self._stranded: list[Transfer] = []  # with their kernels and tables, which the device may still read

    def start(
        self, addresses: Addresses, slices: Sequence[LayerSlice], kernel: PageKernel, *after: Event
    ) -> Transfer | None:
        """Move frames between slots and pages, the slices in their order. Pages and slots are the transfer's until the
        outcome. addresses: int64, of the slots, in the order in which the kernel counts frames. after: when the
        kernel's tables are there, and the pages are the transfer's; never while the engine captures a graph.

        None where the worker has too much to do, or the device has failed; raises ValueError where a slot is not wholly
        inside its extent. Nothing is begun in either case.
        """
        sizes = [part.size_bytes for part in slices]
        assert len(addresses) and min(sizes) > 0 and max(sizes) <= self._segment_bytes, "a slice goes into a segment"
        hold = self._extents.hold(addresses, max(part.offset_bytes + part.size_bytes for part in slices))
        transfer, is_submitted = None, False
        try:
            batches = self._batches(hold, len(addresses), slices, kernel.reaches)
            transfer = Transfer(self._worker, kernel, hold, all([batch.is_pinned for batch in batches]))
            put_in = partial(self._put_in, transfer, kernel, after, batches)
            job, wakes = partial(self._later, transfer, put_in), not transfer.is_direct
            is_submitted = not self._stranded and self._worker.submit(job, wakes=wakes)
            if is_submitted and transfer.is_direct:
                put_in()
        except BaseException:  # an interrupt: the caller does not get this transfer, and may use its pages next
            if transfer is None:
                hold.release()
            else:  # the worker may have it, or not, and may settle it once more
                self._give_up(transfer)
                self._settle(transfer)
            raise
        if not is_submitted:
            hold.release()
            return None
        return transfer

    def _later(self, transfer: Transfer, put_in: Callable[[], None]) -> None:
        """On the worker."""
        try:
            if transfer.is_direct:
                self._worker.wait(lambda: transfer.is_put_in, None)  # being done by the caller, at this moment
            else:
                put_in()
        except BaseException:
            self._give_up(transfer)
            raise
        finally:
            self._settle(transfer)

    def _settle(self, transfer: Transfer) -> None:
        transfer.settle()
        if transfer.is_stranded:  # its slots, kernel and tables stay
            self._stranded.append(transfer)

    def _give_up(self, transfer: Transfer) -> None:
        """Half-way: what is in the streams by then is done, and waited for, as by all later transfers behind it."""
        transfer.cancel()
        if not transfer.is_put_in:
            transfer.put_in(self._ends(transfer, [stream for stream, _, _ in self._lanes]))

    def _batches(self, hold: Hold, count: int, slices: Sequence[LayerSlice], reaches: bool) -> list[_Batch]:
        batches: list[_Batch] = []
        for part in slices:
            at_once = self._segment_bytes // part.size_bytes
            rows, cuts, are_pinned = hold.runs(part.offset_bytes, part.size_bytes, at_once)
            if reaches and all(are_pinned):
                batches.append(_Batch(part, range(count), rows[:, :0], True))
                continue
            if not self._loads:  # out of the segment, into slots
                rows = rows[[1, 0, 2]]
            for number, is_pinned in enumerate(are_pinned):
                frames = range(number * at_once, min((number + 1) * at_once, count))
                batches.append(_Batch(part, frames, rows[:, cuts[number] : cuts[number + 1]], is_pinned))
        return batches

    def _put_in(
        self, transfer: Transfer, kernel: PageKernel, after: Sequence[Event], batches: Sequence[_Batch]
    ) -> None:
        used: list[CudaStream] = []
        try:
            self._fill(transfer, kernel, after, batches, used)
        except Exception as error:
            transfer.failed(error)
        transfer.put_in(self._ends(transfer, used))

    def _ends(self, transfer: Transfer, used: Sequence[CudaStream]) -> Sequence[Event | None]:
        try:
            return [stream.record() for stream in used]
        except RuntimeError as error:  # the device has failed
            transfer.failed(error)
            return [None]

    def _fill(
        self,
        transfer: Transfer,
        kernel: PageKernel,
        after: Sequence[Event],
        batches: Sequence[_Batch],
        used: list[CudaStream],
    ) -> None:
        """used: gets the streams that have work of it, the last one last."""
        packed = 0 if self._loads else 1  # the row of addresses in a segment
        landed: list[tuple[Event, Rows]] = []  # in the bounce ring, to be copied on by the host
        for layers, frames, rows, is_pinned in batches:
            if transfer.is_cancelled:
                break
            room = 0
            if not is_pinned:
                if len(landed) == self._bounce.segments:
                    self._copy_on(*landed.pop(0))
                room, size = self._bounce.take(), len(frames) * layers.size_bytes
                rows[packed] += room
                bounced, rows = rows, np.array([[0], [room], [size]] if self._loads else [[room], [0], [size]])
                if self._loads:
                    self._device.copy(bounced)
            self._turn += 1  # two threads may get the same one
            stream, segment, lock = self._lanes[self._turn % len(self._lanes)]
            with lock:  # one thread at a time fills and empties a segment
                for event in () if stream in used else after:
                    stream.wait(event)
                used.append(stream)
                if used.count(stream) > 1:
                    used.remove(stream)  # the earlier one
                rows[packed] += segment.data_ptr()
                is_staged, size = rows.size > 0, layers.size_bytes
                staged = segment.as_strided((len(frames), size), (size, 1)) if is_staged else segment
                launch = partial(kernel, staged, frames, layers)
                if not is_staged:
                    stream.launch(launch)
                elif self._loads:
                    stream.copy(rows)
                    if room:
                        self._bounce.used_until(stream.record())
                    stream.launch(launch)
                else:
                    stream.launch(launch)
                    stream.copy(rows)
                    if room:
                        landed.append((stream.record(), bounced))
        if not transfer.is_cancelled:
            for stream in used[:-1]:
                used[-1].wait(stream.record())
            kernel.end(used[-1])
            del used[:-1]  # the last one ends behind them
        for one in landed:
            self._copy_on(*one)

    def _copy_on(self, copied: Event, rows: Rows) -> None:
        copied.synchronize()
        self._device.copy(rows)


class BounceRing:
    """Pinned host memory, taken at first use, by the one thread that uses it."""

    def __init__(self, device: CudaDevice, segment_bytes: int, segments: int) -> None:
        self.segments = segments
        self._device = device
        self._segment_bytes = segment_bytes
        self._memory: torch.Tensor | None = None
        self._used: list[Event | None] = [None] * segments
        self._taken = -1

    def take(self) -> int:
        """The next segment's address; waits until no copy touches it any more. Raises RuntimeError."""
        if self._memory is None:
            self._memory = self._device.pinned(self._segment_bytes * self.segments)
        index = (self._taken + 1) % self.segments
        used = self._used[index]
        if used is not None:
            used.synchronize()
        self._taken = index
        return self._memory.data_ptr() + index * self._segment_bytes

    def used_until(self, event: Event) -> None:
        """Copies use the last taken segment until this event; one that they write is emptied before its turn."""
        self._used[self._taken] = event
