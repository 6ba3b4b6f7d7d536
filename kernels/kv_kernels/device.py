"""What a transfer needs of a device: streams, events, copies, and host memory that they can reach.

One implementation: `cuda`. The tests have another one, which runs on a CPU in any order that is legal and finds missing
waits. The words are CUDA's: a stream runs its work in order; streams are ordered among each other, and with the host,
by events only. Nothing here blocks but `Event.wait`.

Copies are passed as rows of addresses, so that one call moves any number of them; regions are for a device that checks.
Must never know blocks, tiers or keys.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

Rows = np.ndarray[Any, np.dtype[np.int64]]
"""Copies: int64 [3, copies], of each the target's address, the source's, and the bytes."""


class Region(NamedTuple):
    """Bytes of memory, the device's or the host's."""

    address: int
    size_bytes: int


LANES = 2
"""Streams of a direction."""
Regions = Callable[[], Iterable[Region]]
"""The regions that a launch touches: asked for by the device that checks, never by CUDA."""


class Direction(Enum):
    """Of bytes, as the engine sees it."""

    LOAD = "load"
    SAVE = "save"


class Event(Protocol):
    """A point in a stream: done when everything put into the stream before it is done."""

    def wait(self) -> None:
        """Block the calling thread, without the interpreter lock. Raises RuntimeError if the device has failed and the
        state of its work is unknown."""
        ...


class Stream(Protocol):
    """Work that is done in order. Its methods put work in and return; they may be called from any thread."""

    def record(self) -> Event:
        """A new event at the end of what is in the stream now."""
        ...

    def wait(self, event: Event) -> None:
        """What is put in from here on waits for the event. The host does not."""
        ...

    def copy(self, rows: Rows) -> None:
        """Of each row one side may be host memory that is page-locked. Read before this returns."""
        ...

    def launch(self, work: Callable[[], object], reads: Regions, writes: Regions) -> None:
        """Call `work`, whose kernels go into this stream. reads, writes: all that they touch."""
        ...


class Host(Protocol):
    """Host memory that copies can reach without a detour."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """New page-locked memory, flat uint8. Raises RuntimeError if there is none."""
        ...

    def register(self, address: int, size_bytes: int, *, writable: bool) -> str:
        """Page-lock existing memory; returns nothing, or why it was refused."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`; no copy may be under way that touches the memory."""
        ...

    def copy(self, rows: Rows) -> None:
        """Copy between host memories, now, on the calling thread."""
        ...


class Device(Protocol):
    """Where an engine's pages are."""

    @property
    def host(self) -> Host: ...

    def lanes(self, direction: Direction) -> Sequence[Stream]:
        """`LANES` streams of high priority, the same each time."""
        ...

    def compute(self) -> Stream:
        """The stream into which the engine puts work now, as the calling thread sees it."""
        ...

    def memory(self, size_bytes: int) -> torch.Tensor:
        """New memory of the device, flat uint8, which any of its streams may use at once."""
        ...

    def run(self, body: Callable[[], object]) -> None:
        """Inside of a launch's work: start kernels, in the launch's stream."""
        ...


def rows_of(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Rows:
    """Copies between contiguous tensors of uint8, pair by pair."""
    pairs = zip(targets, sources, strict=True)
    return np.array([(to.data_ptr(), of.data_ptr(), to.numel()) for to, of in pairs], np.int64).T.copy()


def region(tensor: torch.Tensor) -> Region:
    """Of a contiguous tensor."""
    assert tensor.is_contiguous(), "a region is one run of bytes"
    return Region(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def host_tensor(address: int, size_bytes: int) -> torch.Tensor:
    """Memory of this process as flat uint8. Keeps nothing alive; not to be written where the mapping is read-only."""
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)
