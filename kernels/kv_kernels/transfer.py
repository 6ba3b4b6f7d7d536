"""Loads and saves: host slots to an engine's pages and back, on streams of their own.

    load    copy: slots > segment; kernel: segment > pages          both in one stream, segment after segment
    save    kernel: pages > segment; copy: segment > slots          likewise
    either  a kernel that reaches into the slots itself, with a segment as its scratch, where they are page-locked

A direction has two streams with a segment each, used in turn, so that a copy goes on beside a kernel. One stream does
all work on a segment, so nothing else has to order it: each waits once, until the pages may be used and the tables are
there. The calling thread puts everything in, one copy and one kernel a segment whatever the number of blocks, and waits
for the ends later, without the interpreter lock. Slots that are not page-locked yet are copied by the driver, through
memory of its own: `start` takes as long as that.

Where the device fails so that the end of the work cannot be learnt, slots and tables are kept until the process ends,
and no transfer is begun any more. Must never call a transfer done while any of its work may still touch pages, slots or
tables.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch

from kv_kernels.cuda import CudaDevice, CudaStream, Direction, Event, Rows
from kv_kernels.pinned import Addresses, Hold, PinnedExtents

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


class _Batch(NamedTuple):
    """What goes through a segment at once. end: the number of those that end together. rows: its copies, to or from
    byte 0 of the segment; none where the kernel reaches the slots itself."""

    end: int
    layers: LayerSlice
    frames: range
    rows: Rows
    is_pinned: bool


class PageMover:
    """What the transfers of one direction of one device share: streams, and of each a segment of the device's memory.
    under_way: transfers that were begun and not waited for, with their slots and tables."""

    def __init__(self, device: CudaDevice, direction: Direction, extents: PinnedExtents, segment_bytes: int) -> None:
        self.device = device
        self.loads = direction is Direction.LOAD
        self.extents = extents
        self.streams = device.lanes(direction)
        self.segment_bytes = segment_bytes
        self.under_way: set[Transfer] = set()
        memory = device.memory(segment_bytes * len(self.streams)).split(segment_bytes)
        self._lanes = [(*lane, threading.Lock()) for lane in zip(self.streams, memory, strict=True)]
        self._turn = 0

    def lane(self) -> tuple[CudaStream, torch.Tensor, threading.Lock]:
        """A stream and its segment; one thread at a time may fill and empty it."""
        self._turn += 1  # two threads may get the same one
        return self._lanes[self._turn % len(self._lanes)]


class Transfer:
    """One load or save of frames. A subclass knows their pages and holds the tables, which its kernels read.

    Once begun it has to be waited for before pages, slots or tables are used for anything else, also where `start`
    raises. is_known: whether all slots are in extents. reaches: whether kernels read and write page-locked slots
    themselves, and need no copies.
    """

    reaches = False

    def __init__(
        self, mover: PageMover, addresses: Addresses, slices: Sequence[LayerSlice], frames_at_once: int = 1 << 40
    ) -> None:
        """addresses: int64, of the slots, in the order in which kernels count frames. slices: in the order in which
        they are moved. frames_at_once: so many end together, before any of the next is begun."""
        sizes = [part.size_bytes for part in slices]
        assert len(addresses) and min(sizes) > 0, "there is something to do"
        is_whole = frames_at_once >= len(addresses)
        assert max(sizes) * (1 if is_whole else frames_at_once) <= mover.segment_bytes, "it goes into a segment"
        self.mover, self.slices = mover, slices
        self.is_known = True
        self.error: RuntimeError | None = None
        self.ends: list[tuple[range, Event]] = []
        self._addresses, self._frames_at_once = addresses, min(frames_at_once, len(addresses))
        self._hold: Hold | None = None
        self._is_put_in = False

    def launch(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        """Launch a kernel into the current stream. staged: uint8 [frames, size_bytes], or flat, a scratch for kernels
        that reach the slots."""
        raise NotImplementedError

    def tell(self, stream: CudaStream) -> None:
        """Before the first launch: bring the tables to the device."""

    def bring(self, frames: range, stream: CudaStream) -> None:
        """After the last launch for these frames: copy to the host what must be there when they are done."""

    def start(self) -> bool:
        """Move the frames, behind what is in the engine's stream now, which must not be captured into a graph.

        False where the device has failed or the extents are closed; raises ValueError where a slot is not wholly
        inside its extent: nothing is begun then. Raises what `launch` raises, and RuntimeError where the device fails.
        """
        mover = self.mover
        reach = max(part.offset_bytes + part.size_bytes for part in self.slices)
        self._hold = mover.extents.hold(self._addresses, reach)
        if self._hold is None:
            return False
        mover.under_way.add(self)
        self.is_known = self._hold.is_known
        batches = list(self._batches(self._hold))
        first = mover.streams[0]
        first.wait(mover.device.compute().record())
        self.tell(first)
        ready, waiting, of_end = first.record(), set(mover.streams[1:]), attrgetter("end")
        for _, together in groupby(sorted(batches, key=of_end), of_end):
            self._put_in(list(together), ready, waiting)
        self._is_put_in = True
        return True

    def wait(self, number: int | None = None) -> bool:
        """Until the frames of an end are done, or all of them. False if the device fails, with the `error`."""
        if not self.is_held:
            return self.error is None
        assert self._hold is not None
        ends = self.ends if number is None else self.ends[number : number + 1]
        try:
            if not self._is_put_in:  # wait for what ends behind all that was put in before `start` raised
                ends = [(range(0), stream.record()) for stream in self.mover.streams]
            for _, event in ends:
                event.synchronize()
        except RuntimeError as error:  # its traceback would keep other transfers' tables
            self.error = error.with_traceback(None)
            self.mover.extents.fail()
            _log.warning("the device failed in a transfer: %s", error)
            return False
        if number is None:
            self._hold.release()
            self.mover.under_way.discard(self)
            self._hold = None
        return True

    @property
    def is_held(self) -> bool:
        """Whether slots are still its own: it was begun, has not been waited for, and the device has not failed."""
        return self._hold is not None and self.error is None

    def _batches(self, hold: Hold) -> Iterator[_Batch]:
        room, count = self.mover.segment_bytes, len(self._addresses)
        for part in self.slices:
            at_once, size = self._frames_at_once, part.size_bytes
            runs = hold.runs(part.offset_bytes, size, at_once)
            reaches = self.reaches and all([is_pinned for _, is_pinned in runs])
            if not reaches and at_once > room // size:
                at_once = room // size
                runs = hold.runs(part.offset_bytes, size, at_once)
            for start, (rows, is_pinned) in zip(range(0, count, at_once), runs, strict=True):
                if reaches:
                    rows = rows[:, :0]
                elif not self.mover.loads:  # out of the segment, into slots
                    rows = rows[[1, 0, 2]]
                frames = range(start, min(start + at_once, count))
                yield _Batch(start // self._frames_at_once, part, frames, rows, is_pinned)

    def _put_in(self, batches: Sequence[_Batch], ready: Event, waiting: set[CudaStream]) -> None:
        """Batches that end together. waiting: streams that have not waited yet until all is ready."""
        packed = 0 if self.mover.loads else 1  # the row of addresses in a segment
        used: dict[CudaStream, None] = {}  # the one of the last batch last
        for _, layers, frames, rows, is_pinned in batches:
            stream, segment, lock = self.mover.lane()
            used.pop(stream, None)
            used[stream] = None
            with lock:
                if stream in waiting:
                    stream.wait(ready)
                    waiting.remove(stream)
                rows[packed] += segment.data_ptr()
                is_staged, size = rows.size > 0, layers.size_bytes
                staged = segment.as_strided((len(frames), size), (size, 1)) if is_staged else segment
                if is_staged and self.mover.loads:
                    stream.copy(rows, is_pinned)
                stream.launch(partial(self.launch, staged, frames, layers))
                if is_staged and not self.mover.loads:
                    stream.copy(rows, is_pinned)
        *others, last = used
        for stream in others:
            last.wait(stream.record())
        moved = range(batches[0].frames.start, batches[-1].frames.stop)
        self.bring(moved, last)
        self.ends.append((moved, last.record()))
