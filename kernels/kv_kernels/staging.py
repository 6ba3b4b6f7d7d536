"""Staging memory: rings of segments between host slots and pages.

    load    host slots --copy--> segment --kernel--> pages        save    pages --kernel--> segment --copy--> host slots

`StagingRing` lies on the device. One stream fills a segment and the other empties it; the next fill waits, on the
device, for the event after which the segment was empty. `BounceRing` lies in pinned host memory, for slots that copies
cannot reach: there the host fills or empties, so the host waits. Must never hand a segment out without its last event.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kv_kernels.device import Device, Event, Stream


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
