"""The device that a bench runs on: its name, the time of work on it, and the rates of its copies.

Work on a GPU is timed by events around several calls, behind copies that keep the GPU busy until the host has queued
all of it; if the host was too slow, the figure is marked as the host's.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch

from kv_bench.measure import Cost, timed
from kv_bench.script import one_of
from kv_kernels.cuda import LANES, CudaDevice, Direction
from kvstore.block.errors import BadInput

CUDA, CPU = DEVICES = ("cuda", "cpu")
CALLS = 8
"""Calls between two events."""
PLUG_BYTES, PLUG_COPIES = 256 << 20, 24
"""Copies before the first event: some 3 ms of a GPU that moves 4 TB/s."""


def device_named(given: str | None) -> torch.device:
    """cuda or cpu; None for a GPU if there is one. Raises `BadInput` if it is missing."""
    there = torch.cuda.is_available()
    if given is None:
        return torch.device(CUDA, 0) if there else torch.device(CPU)
    one_of("device", given, DEVICES)
    if given == CUDA and not there:
        raise BadInput(
            f"device='cuda': torch {torch.__version__} sees no GPU; use a CUDA build of torch, or device cpu"
        )
    return torch.device(given, 0) if given == CUDA else torch.device(given)


def transfer_device(device: torch.device) -> Any:
    return CudaDevice(device.index or 0) if device.type == CUDA else AtOnceDevice()


def give_memory_back(device: torch.device) -> None:
    """Free torch's cached memory. Raises RuntimeError if the GPU has failed before."""
    gc.collect()
    if device.type == CUDA:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def describe(device: torch.device) -> dict[str, object]:
    facts: dict[str, object] = {"type": device.type, "name": "cpu", "torch": torch.__version__}
    if device.type == CUDA:
        properties = torch.cuda.get_device_properties(device)
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory}
        facts |= {"processors": properties.multi_processor_count, "cuda": torch.version.cuda}
    for package in ("triton", "transformers"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    return facts


class DeviceTimer:
    """Times work on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plug: torch.Tensor | None = None
        if device.type == CUDA:
            self._plug = torch.randint(0, 256, (2, PLUG_BYTES), dtype=torch.uint8, device=device)

    def timed(self, work: Callable[[], object]) -> TimedWork:
        return TimedWork(work, self._plug)

    def wait(self) -> None:
        if self._device.type == CUDA:
            torch.cuda.synchronize(self._device)


class TimedWork:
    """A turn, see `measure.Turn`: one call on a CPU, one of `CALLS` between two events on a GPU. is_late: for each turn
    so far, whether the host was slower than the device."""

    def __init__(self, work: Callable[[], object], plug: torch.Tensor | None) -> None:
        self.is_late: list[bool] = []
        self._work, self._plug = work, plug

    def __call__(self) -> Cost:
        if self._plug is None:
            self.is_late.append(False)
            return timed(self._work)()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(PLUG_COPIES):
            self._plug[0].copy_(self._plug[1])
        start.record()
        for _ in range(CALLS):
            self._work()
        end.record()
        self.is_late.append(bool(start.query()))
        end.synchronize()
        seconds = start.elapsed_time(end) / 1e3 / CALLS
        return Cost(seconds, seconds)


class AtOnceDevice:
    """A device of the CPU, with its stream and event in one, so that transfers run where there is no GPU.

    It has the methods of `kv_kernels.cuda`, in the strictest order that is legal: an operation is done when the call
    that puts it in returns. It is for running a bench's code, not for its numbers.
    """

    def compute(self) -> Any:
        return self

    record = compute

    def lanes(self, direction: Direction) -> Sequence[Any]:
        return [self] * LANES

    def wait(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def copy(self, rows: Any, is_pinned: bool = True) -> None:
        for target, source, size in rows.T.tolist():
            ctypes.memmove(target, source, size)

    def launch(self, work: Any) -> None:
        work()

    def memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def tables(self, size_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.memory(size_bytes), self.memory(size_bytes)

    def register(self, address: int, size_bytes: int, *, writable: bool) -> str:
        return ""

    def unregister(self, address: int) -> None: ...


class CountingStream:
    """Does nothing, and counts what is put into it."""

    calls = 0

    def record(self) -> CountingStream:
        self.calls += 1
        return self

    def wait(self, what: Any, is_pinned: bool = True) -> None:
        self.calls += 1

    copy = launch = wait

    def synchronize(self) -> None: ...


class CountingDevice(AtOnceDevice):
    """Knows the calls of its streams, which do nothing."""

    def __init__(self) -> None:
        self.streams = [CountingStream() for _ in range(1 + LANES)]

    @property
    def calls(self) -> int:
        return sum([stream.calls for stream in self.streams])

    def compute(self) -> Any:
        return self.streams[LANES]

    def lanes(self, direction: Direction) -> Sequence[Any]:
        return self.streams[:LANES]


if __name__ == "__main__":
    try:
        print(json.dumps(describe(device_named(sys.argv[1]))))
    except BadInput as error:
        sys.exit(str(error))
