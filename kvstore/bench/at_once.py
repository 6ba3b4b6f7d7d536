"""A device of the CPU whose streams do everything at once, so that transfers run where there is no GPU (floor 4).

It obeys the contract of `kv_kernels.device` in the strictest order that is legal: an operation is done when the call
that puts it in returns. It is for running a bench's code, not for its numbers; what finds missing waits is
`kv_kernels.chaos`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kv_kernels.device import Direction, Event, Lanes, Regions


class DoneEvent:
    """What it recorded was done before."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is left to wait for."""


class AtOnceStream:
    """Does what is put in on the calling thread."""

    def record(self) -> DoneEvent:
        return DoneEvent()

    def wait(self, event: Event) -> None:
        """Everything before is done."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def launch(self, work: Callable[[], object], reads: Regions, writes: Regions) -> None:
        work()


class AtOnceHost:
    """All host memory can be reached."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def register(self, address: int, size_bytes: int, *, writable: bool) -> str:
        return ""

    def unregister(self, address: int) -> None:
        """Nothing was locked."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


class AtOnceDevice:
    """The CPU as a device of its own."""

    def __init__(self) -> None:
        self._host = AtOnceHost()
        self._stream = AtOnceStream()

    @property
    def host(self) -> AtOnceHost:
        return self._host

    def lanes(self, direction: Direction) -> Lanes:
        return Lanes(self._stream, self._stream)

    def compute(self) -> AtOnceStream:
        return self._stream

    def memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def run(self, body: Callable[[], object]) -> None:
        body()
