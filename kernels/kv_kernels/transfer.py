"""Loads and saves: host slots to an engine's pages and back, on streams of their own.

    load    copy: slots > staging segment; kernel: segment > pages          both in one stream, segment after segment
    save    kernel: pages > staging segment; copy: segment > slots          likewise
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kv_kernels.device import Device, Direction, Event, Host, Region, Regions, Rows, Stream, region
from kv_kernels.pinned import Hold, PinnedExtents, Runs
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

    def __init__(self, worker: Worker, kernel: object, hold: Hold, is_direct: bool) -> None:
        self.is_direct = is_direct
        self.is_stranded = False
        self.error: BaseException | None = None
        self.outcome = TransferOutcome.PENDING
        self._worker = worker
        self._kernel: object | None = kernel
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
        if all([self._landed(end) for end in self._ends]):
            self._hold.release()
            self._kernel = None
        outcome = TransferOutcome.CANCELLED if self.is_cancelled else TransferOutcome.DONE
        if self.error is not None:
            outcome = TransferOutcome.FAILED
            _log.warning("a transfer failed: %s: %s", type(self.error).__name__, self.error)
        self.outcome = outcome
        self._worker.notify()

    def _landed(self, event: Event | None) -> bool:
        """Wait for the end of a stream's part; False if it cannot be learnt."""
        try:
            if event is None:
                raise RuntimeError("the device took no event")
            event.wait()
        except RuntimeError as error:
            self.failed(error)
            self.is_stranded = True
        return not self.is_stranded


class PageKernel(Protocol):
    """Moves blocks between staged slices and the engine's pages; holds the page table and the pointers to the pools."""

    def __call__(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        """Launch into the current stream. staged: uint8 [frames, size_bytes]; frames: which of the transfer's."""
        ...

    def pages(self, frames: range, layers: LayerSlice) -> Iterable[Region]:
        """What it reads (save) or writes (load) of the pools. Asked for by a device that checks accesses."""
        ...

    def tables(self) -> Iterable[Region]:
        """What else it reads. Asked for by a device that checks accesses."""
        ...

    def findings(self, frames: range, layers: LayerSlice) -> Iterable[Region]:
        """What else it writes. Asked for by a device that checks accesses."""
        ...

    def end(self, stream: Stream) -> None:
        """After the last launch: copy to the host what must be there when the transfer is done."""
        ...


class _Batch(NamedTuple):
    layers: LayerSlice
    frames: range
    runs: Runs


class _Mover:
    """One direction of one device: its lanes, its bounce ring, and the worker that waits for ends."""

    direction: Direction

    def __init__(
        self, device: Device, extents: PinnedExtents, worker: Worker, segment_bytes: int, bounce_segments: int = 2
    ) -> None:
        """worker: of this direction alone. segment_bytes: of each lane's segment, and of each of the bounce segments,
        which are taken in pinned host memory once a slot is not page-locked."""
        if segment_bytes < 1:
            raise ValueError(f"staging segments of {segment_bytes} bytes; give room for a layer slice of a frame")
        self._device = device
        self._extents = extents
        self._worker = worker
        streams = device.lanes(self.direction)
        memory = device.memory(segment_bytes * len(streams)).split(segment_bytes)
        self._lanes = [(*lane, threading.Lock()) for lane in zip(streams, memory, strict=True)]
        self._segment_bytes = segment_bytes
        self._turn = 0
        self._bounce = BounceRing(device, segment_bytes, bounce_segments)
        self._stranded: list[Transfer] = []  # with their kernels and tables, which the device may still read

    def _check(self, addresses: Sequence[int], slices: Sequence[LayerSlice]) -> None:
        if not addresses or not slices:
            raise ValueError(f"{len(addresses)} slots and {len(slices)} layer slices are nothing to transfer")
        largest, room = max(part.size_bytes for part in slices), self._segment_bytes
        if largest > room or min(part.size_bytes for part in slices) < 1:
            raise ValueError(
                f"a layer slice of {largest} bytes does not go into a staging segment of {room}: give slices of fewer "
                "layers, or larger segments"
            )
        first = min(part.offset_bytes for part in slices)
        if first < 0:
            raise ValueError(f"a layer slice at byte {first} of its frame; give offsets of 0 or more")

    def _batches(self, addresses: Sequence[int], slices: Sequence[LayerSlice]) -> list[_Batch]:
        slots, batches = np.array(addresses, np.int64), []
        for part in slices:
            count = self._segment_bytes // part.size_bytes
            for number, runs in enumerate(self._extents.runs(slots + part.offset_bytes, part.size_bytes, count)):
                frames = range(number * count, min((number + 1) * count, len(slots)))
                batches.append(_Batch(part, frames, runs))
        return batches

    def _begin(
        self, addresses: Sequence[int], slices: Sequence[LayerSlice], kernel: PageKernel, after: Sequence[Event]
    ) -> Transfer | None:
        self._check(addresses, slices)
        hold = self._extents.hold(addresses, max(part.offset_bytes + part.size_bytes for part in slices))
        batches = self._batches(addresses, slices)
        transfer = Transfer(self._worker, kernel, hold, all(batch.runs.is_pinned for batch in batches))
        put_in = partial(self._put_in_all, transfer, kernel, after, batches)

        def later() -> None:
            if transfer.is_direct:
                self._worker.wait(lambda: transfer.is_put_in, None)  # being done by the caller, at this moment
            else:
                put_in()
            transfer.settle()
            if transfer.is_stranded:
                self._stranded.append(transfer)

        if self._stranded or not self._worker.submit(later):
            hold.release()
            return None
        if transfer.is_direct:
            try:
                put_in()
            except BaseException:  # an interrupt: the caller does not get this transfer, and may use its pages next
                transfer.wait(None)
                raise
        return transfer

    def _put_in_all(
        self, transfer: Transfer, kernel: PageKernel, after: Sequence[Event], batches: Sequence[_Batch]
    ) -> None:
        """If this fails half-way, or the caller's thread is interrupted, the work that is in the streams by then is
        done, and is waited for."""
        used: list[Stream] = []
        try:
            self._put_in(transfer, kernel, after, batches, used)
        except Exception as error:
            transfer.failed(error)
        except BaseException:
            transfer.cancel()
            raise
        finally:
            self._end(transfer, used)

    def _put_in(
        self,
        transfer: Transfer,
        kernel: PageKernel,
        after: Sequence[Event],
        batches: Sequence[_Batch],
        used: list[Stream],
    ) -> None:
        """used: gets the streams that have work of it, the last one last."""
        loads, host = self.direction is Direction.LOAD, self._device.host
        landed: list[tuple[Event, Rows]] = []  # in the bounce ring, to be copied on by the host
        for batch in batches:
            if transfer.is_cancelled:
                break
            reachable, room = batch.runs, 0
            if not batch.runs.is_pinned:
                if len(landed) == self._bounce.segments:
                    _copy_on(host, *landed.pop(0))
                room = self._bounce.take()
                reachable = Runs(np.array([room]), batch.runs.sizes.sum(keepdims=True), True)
                if loads:
                    host.copy(_rows(room, batch.runs, loads))
            with self._lane() as (stream, segment):
                if stream in used:
                    used.remove(stream)
                else:
                    for event in after:
                        stream.wait(event)
                used.append(stream)
                copies = _rows(segment.data_ptr(), reachable, loads)
                launch = _launch(kernel, segment, batch, self.direction)
                if loads:
                    stream.copy(copies)
                    if room:
                        self._bounce.used_until(stream.record())
                    stream.launch(*launch)
                else:
                    stream.launch(*launch)
                    stream.copy(copies)
                    if room:
                        landed.append((stream.record(), _rows(room, batch.runs, loads)))
        if not transfer.is_cancelled:
            for stream in used[:-1]:
                used[-1].wait(stream.record())
            kernel.end(used[-1])
        for one in landed:
            _copy_on(host, *one)

    @contextmanager
    def _lane(self) -> Iterator[tuple[Stream, torch.Tensor]]:
        """A stream and its segment, which one thread at a time fills and empties."""
        self._turn += 1  # two threads may get the same one
        stream, segment, lock = self._lanes[self._turn % len(self._lanes)]
        with lock:
            yield stream, segment

    def _end(self, transfer: Transfer, used: Sequence[Stream]) -> None:
        """The worker waits for this, and all later transfers behind it."""
        ends: list[Event | None] = [None]
        try:
            ends = [stream.record() for stream in used]
        except RuntimeError as error:  # the device has failed
            transfer.failed(error)
        finally:
            transfer.put_in(ends)


class Loader(_Mover):
    """Loads into one device's pages."""

    direction = Direction.LOAD

    def load(
        self, addresses: Sequence[int], slices: Sequence[LayerSlice], kernel: PageKernel, *after: Event
    ) -> Transfer | None:
        """Load frames from slots, the slices in their order. The slots must stay as they are until the outcome.

        addresses: of the slots, in the order in which the kernel counts frames. after: when its tables are there.
        Called from the engine's thread, whose compute stream the pages belong to now; not while it captures a graph.
        None where the worker has too much to do, or the device has failed; raises ValueError where the slots or the
        slices do not fit. Nothing is begun in either case.
        """
        try:
            began = self._device.compute().record()
        except RuntimeError as error:
            _log.warning("no load is begun, the device has failed: %s", error)
            return None
        return self._begin(addresses, slices, kernel, (began, *after))


class Saver(_Mover):
    """Saves one device's pages."""

    direction = Direction.SAVE

    def save(
        self, addresses: Sequence[int], slices: Sequence[LayerSlice], kernel: PageKernel, *after: Event
    ) -> Transfer | None:
        """Save pages into slots that were reserved. Pages and slots are the transfer's until the outcome.

        after: when the pages are valid, and the kernel's tables there. None where the worker has too much to do, or the
        device has failed; raises ValueError where the slots or the slices do not fit. Nothing is begun in either case.
        """
        return self._begin(addresses, slices, kernel, after)


def _rows(start: int, runs: Runs, gathers: bool) -> Rows:
    """Copies between these runs and memory at `start`, where they lie one after another. gathers: into it."""
    packed = start + np.cumsum(runs.sizes) - runs.sizes
    return np.stack([packed, runs.addresses, runs.sizes] if gathers else [runs.addresses, packed, runs.sizes])


def _copy_on(host: Host, copied: Event, rows: Rows) -> None:
    copied.wait()
    host.copy(rows)


def _launch(
    kernel: PageKernel, segment: torch.Tensor, batch: _Batch, direction: Direction
) -> tuple[Callable[[], object], Regions, Regions]:
    count, size = len(batch.frames), batch.layers.size_bytes
    staged = segment[: count * size].view(count, size)

    def bytes_of_segment() -> Iterable[Region]:
        return [region(staged)]

    def pages() -> Iterable[Region]:
        return kernel.pages(batch.frames, batch.layers)

    sources, targets = (bytes_of_segment, pages) if direction is Direction.LOAD else (pages, bytes_of_segment)
    return (
        lambda: kernel(staged, batch.frames, batch.layers),
        lambda: [*sources(), *kernel.tables()],
        lambda: [*targets(), *kernel.findings(batch.frames, batch.layers)],
    )


class BounceRing:
    """Pinned host memory, taken at first use, by the one thread that uses it."""

    def __init__(self, device: Device, segment_bytes: int, segments: int) -> None:
        self.segments = segments
        self._device = device
        self._segment_bytes = segment_bytes
        self._memory: torch.Tensor | None = None
        self._used: list[Event | None] = [None] * segments
        self._taken = -1

    def take(self) -> int:
        """The next segment's address; waits until no copy touches it any more. Raises RuntimeError."""
        if self._memory is None:
            self._memory = self._device.host.pinned(self._segment_bytes * self.segments)
        index = (self._taken + 1) % self.segments
        used = self._used[index]
        if used is not None:
            used.wait()
        self._taken = index
        return self._memory.data_ptr() + index * self._segment_bytes

    def used_until(self, event: Event) -> None:
        """Copies use the last taken segment until this event; one that they write is emptied before its turn."""
        self._used[self._taken] = event
