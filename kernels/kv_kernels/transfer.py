"""Loads and saves: host slots to an engine's pages and back, on streams of their own.

    load    1  the kernels' stream waits for the compute stream as it is now: pages may still be read, or zeroed, there
            2  slots > staging segment (copies) > pages (kernels), layer slice by layer slice
    save    1  the kernels' stream waits for the event after which the pages are valid
            2  pages > staging segment (kernels) > slots (copies)
    both    3  the worker waits for the last copy and the last kernel, then `outcome`: slots and pages are the caller's

All of it is put into the streams at once, on the caller's thread, a few calls per segment. A segment's slots that are
not page-locked yet cannot be reached by a copy: such a transfer is put in by the worker instead, through a bounce ring,
and `is_direct` says so.

The page tables belong to the kernel, which is kept until its last launch is done. Where the device fails so that the
end of the work cannot be learnt, the transfer is stranded: only the end of the process ends it. Must never block the
caller but in `wait`, and there no longer than it is told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import torch

from kv_kernels.device import Device, Direction, Event, Region, Regions, Stream, region
from kv_kernels.pinned import PinnedExtents
from kv_kernels.transfer_state import LayerSlice, Transfer
from kv_kernels.worker import Worker

_log = logging.getLogger(__name__)


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

    def findings(self) -> Iterable[Region]:
        """What else it writes. Asked for by a device that checks accesses."""
        ...

    def end(self, kernels: Stream) -> None:
        """Behind the last launch, in its stream: copy to the host what must be there when the transfer is done."""
        ...


class _Batch(NamedTuple):
    layers: LayerSlice
    frames: range
    slots: list[torch.Tensor]
    is_pinned: bool


class _Mover:
    """One direction of one device: its streams, its rings, and the worker that waits for ends."""

    direction: Direction

    def __init__(
        self,
        device: Device,
        extents: PinnedExtents,
        worker: Worker,
        segment_bytes: int,
        segments: int,
        bounce_segments: int = 2,
    ) -> None:
        """worker: of this direction alone.

        segments, bounce_segments: of `segment_bytes`, on the device and, once a slot is not page-locked, in pinned host
        memory.
        """
        self._device = device
        self._extents = extents
        self._worker = worker
        self._copies, self._kernels = device.lanes(self.direction)
        self._ring = StagingRing(device, segment_bytes, segments)
        self._bounce = BounceRing(device, segment_bytes, bounce_segments)
        self._stranded: list[Transfer] = []  # with their kernels and tables, which the device may still read

    def _check(self, addresses: Sequence[int], slices: Sequence[LayerSlice]) -> None:
        if not addresses or not slices:
            raise ValueError(f"{len(addresses)} slots and {len(slices)} layer slices are nothing to transfer")
        largest, room = max(part.size_bytes for part in slices), self._ring.segment_bytes
        if largest > room or min(part.size_bytes for part in slices) < 1:
            raise ValueError(
                f"a layer slice of {largest} bytes does not go into a staging segment of {room}: give slices of fewer "
                "layers, or larger segments"
            )
        first = min(part.offset_bytes for part in slices)
        if first < 0:
            raise ValueError(f"a layer slice at byte {first} of its frame; give offsets of 0 or more")

    def _batches(self, addresses: Sequence[int], slices: Sequence[LayerSlice]) -> list[_Batch]:
        batches = []
        for part in slices:
            count = self._ring.segment_bytes // part.size_bytes
            for start in range(0, len(addresses), count):
                frames = range(start, min(start + count, len(addresses)))
                runs = self._extents.runs(
                    [address + part.offset_bytes for address in addresses[start : frames.stop]], part.size_bytes
                )
                batches.append(_Batch(part, frames, runs.tensors, runs.is_pinned))
        return batches

    def _begin(
        self, addresses: Sequence[int], slices: Sequence[LayerSlice], kernel: PageKernel, after: Event
    ) -> Transfer | None:
        self._check(addresses, slices)
        hold = self._extents.hold(addresses, max(part.offset_bytes + part.size_bytes for part in slices))
        batches = self._batches(addresses, slices)
        transfer = Transfer(self._worker, kernel, hold, all(batch.is_pinned for batch in batches))
        put_in = partial(self._put_in, transfer, kernel, after, batches)

        def later() -> None:
            if transfer.is_direct:
                self._worker.wait(lambda: transfer.is_put_in, None)  # being done by the caller, at this moment
            else:
                self._put_in_all(transfer, put_in)
            transfer.settle()
            if transfer.is_stranded:
                self._stranded.append(transfer)

        if self._stranded or not self._worker.submit(later):
            hold.release()
            return None
        if transfer.is_direct:
            self._put_in_all(transfer, put_in)
        return transfer

    def _put_in(self, transfer: Transfer, kernel: PageKernel, after: Event, batches: Sequence[_Batch]) -> None:
        raise NotImplementedError

    def _put_in_all(self, transfer: Transfer, put_in: Callable[[], None]) -> None:
        """If this fails half-way, or the caller's thread is interrupted, the work that is in the streams by then is
        done, and is waited for."""
        try:
            put_in()
        except Exception as error:
            transfer.failed(error)
        except BaseException:
            transfer.cancel()
            raise
        finally:
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        """The worker waits for this, and all later transfers behind it."""
        copied = launched = None
        try:
            copied, launched = self._copies.record(), self._kernels.record()
        except RuntimeError as error:  # the device has failed
            transfer.failed(error)
        finally:
            transfer.put_in(copied, launched)


class Loader(_Mover):
    """Loads into one device's pages."""

    direction = Direction.LOAD

    def load(self, addresses: Sequence[int], slices: Sequence[LayerSlice], kernel: PageKernel) -> Transfer | None:
        """Load frames from slots, the slices in their order. The slots must stay as they are until the outcome.

        addresses: of the slots, in the order in which the kernel counts frames. Called from the engine's thread, whose
        compute stream the pages belong to now; not while it captures a graph. None where the worker has too much to do,
        or the device has failed; raises ValueError where the slots or the slices do not fit. Nothing is begun in either
        case.
        """
        try:
            began = self._device.compute().record()
        except RuntimeError as error:
            _log.warning("no load is begun, the device has failed: %s", error)
            return None
        return self._begin(addresses, slices, kernel, began)

    def _put_in(self, transfer: Transfer, kernel: PageKernel, after: Event, batches: Sequence[_Batch]) -> None:
        self._kernels.wait(after)
        for batch in batches:
            if transfer.is_cancelled:
                return
            sources = batch.slots if batch.is_pinned else self._bounced(batch)
            with self._ring.segment(self._copies, self._kernels) as segment:
                staged = _staged(segment, batch)
                self._copies.copy(_pieces(staged, batch.slots), sources)
                copied = self._copies.record()
                if not batch.is_pinned:
                    self._bounce.used_until(copied)
                self._kernels.wait(copied)
                self._kernels.launch(*_launch(kernel, staged, batch, Direction.LOAD))
        kernel.end(self._kernels)

    def _bounced(self, batch: _Batch) -> Sequence[torch.Tensor]:
        """The slots' bytes where copies reach them. Blocks until there is room."""
        pieces = _pieces(self._bounce.take(), batch.slots)
        self._device.host.copy(pieces, batch.slots)
        return pieces


class Saver(_Mover):
    """Saves one device's pages."""

    direction = Direction.SAVE

    def save(
        self, addresses: Sequence[int], slices: Sequence[LayerSlice], kernel: PageKernel, after: Event
    ) -> Transfer | None:
        """Save pages into slots that were reserved. Pages and slots are the transfer's until the outcome.

        after: when the pages are valid. None where the worker has too much to do, or the device has failed; raises
        ValueError where the slots or the slices do not fit. Nothing is begun in either case.
        """
        return self._begin(addresses, slices, kernel, after)

    def _put_in(self, transfer: Transfer, kernel: PageKernel, after: Event, batches: Sequence[_Batch]) -> None:
        self._kernels.wait(after)
        bounced: list[tuple[Event, torch.Tensor, _Batch]] = []
        for batch in batches:
            if transfer.is_cancelled:
                break
            if not batch.is_pinned and len(bounced) == self._bounce.segments:
                self._unbounce(*bounced.pop(0))
            with self._ring.segment(self._kernels, self._copies) as segment:
                staged = _staged(segment, batch)
                self._kernels.launch(*_launch(kernel, staged, batch, Direction.SAVE))
                self._copies.wait(self._kernels.record())
                if batch.is_pinned:
                    self._copies.copy(batch.slots, _pieces(staged, batch.slots))
                    continue
                room = self._bounce.take()
                self._copies.copy(_pieces(room, batch.slots), _pieces(staged, batch.slots))
                bounced.append((self._copies.record(), room, batch))
        if not transfer.is_cancelled:
            kernel.end(self._kernels)
        for copied, room, batch in bounced:
            self._unbounce(copied, room, batch)

    def _unbounce(self, copied: Event, room: torch.Tensor, batch: _Batch) -> None:
        copied.wait()
        self._device.host.copy(batch.slots, _pieces(room, batch.slots))


def _staged(segment: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """[frames, size_bytes]"""
    size = batch.layers.size_bytes
    return segment[: len(batch.frames) * size].view(len(batch.frames), size)


def _pieces(memory: torch.Tensor, slots: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    sizes = [run.numel() for run in slots]
    pieces: Sequence[torch.Tensor] = memory.view(-1)[: sum(sizes)].split(sizes)
    return pieces


def _launch(
    kernel: PageKernel, staged: torch.Tensor, batch: _Batch, direction: Direction
) -> tuple[Callable[[], object], Regions, Regions]:
    def segment() -> Iterable[Region]:
        return [region(staged)]

    def pages() -> Iterable[Region]:
        return kernel.pages(batch.frames, batch.layers)

    sources, targets = (segment, pages) if direction is Direction.LOAD else (pages, segment)
    return (
        lambda: kernel(staged, batch.frames, batch.layers),
        lambda: [*sources(), *kernel.tables()],
        lambda: [*targets(), *kernel.findings()],
    )


# Staging memory: rings of segments between host slots and pages ----------------------------------------------------


class StagingRing:
    """`segments` pieces of `segment_bytes` of the device's memory, used in turn. Any thread may put work in."""

    def __init__(self, device: Device, segment_bytes: int, segments: int) -> None:
        if segment_bytes < 1 or segments < 2:
            raise ValueError(
                f"{segments} segments of {segment_bytes} bytes are no staging ring: give two segments or more, each "
                "with room for a layer slice of a frame"
            )
        self.segment_bytes = segment_bytes
        self._segments = device.memory(segment_bytes * segments).split(segment_bytes)
        self._emptied: list[Event | None] = [None] * segments
        self._next = 0
        self._lock = threading.Lock()

    @contextmanager
    def segment(self, fills: Stream, empties: Stream) -> Iterator[torch.Tensor]:
        """The next segment. All work on it is put into these two streams before the block ends.

        If that fails half-way the segment is safe all the same: the same stream always fills it.
        """
        with self._lock:
            index = self._next
            self._next = (index + 1) % len(self._segments)
            emptied = self._emptied[index]
            if emptied is not None:
                fills.wait(emptied)
            try:
                yield self._segments[index]
            finally:
                self._emptied[index] = empties.record()


class BounceRing:
    """Pinned host memory, taken at first use, by the one thread that uses it."""

    def __init__(self, device: Device, segment_bytes: int, segments: int) -> None:
        self.segments = segments
        self._device = device
        self._segment_bytes = segment_bytes
        self._memory: tuple[torch.Tensor, ...] = ()
        self._used: list[Event | None] = [None] * segments
        self._taken = -1

    def take(self) -> torch.Tensor:
        """The next segment; waits until no copy touches it any more. Raises RuntimeError."""
        if not self._memory:
            self._memory = self._device.host.pinned(self._segment_bytes * self.segments).split(self._segment_bytes)
        index = (self._taken + 1) % self.segments
        used = self._used[index]
        if used is not None:
            used.wait()
        self._taken = index
        return self._memory[index]

    def used_until(self, event: Event) -> None:
        """Copies use the last taken segment until this event; one that they write is emptied before its turn."""
        self._used[self._taken] = event
