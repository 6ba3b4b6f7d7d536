"""The transfer's device on CUDA, by way of torch.

Streams and events are torch's; runs are copied by one call that puts one asynchronous copy per run into the stream;
extents are page-locked in place. Must never be used while the engine captures a graph, and never copies from or to host
memory that is not page-locked: such a copy would block the thread without saying so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kv_kernels.device import Direction, Event, Lanes, Regions, Stream

_REGISTER_DEFAULT, _REGISTER_READ_ONLY = 0, 8
_HIGH = -1  # lower numbers go first


class CudaEvent:
    """A point in a CUDA stream. Waiting sleeps instead of spinning."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self) -> CudaEvent:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "an event of this device"
        self._stream.wait_event(event.event)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        # One call for all runs; between host and device it is one asynchronous copy for each.
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def launch(self, work: Callable[[], object], reads: Regions, writes: Regions) -> None:
        with torch.cuda.stream(self._stream):
            work()


class CudaHost:
    """Host memory as the CUDA driver knows it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, size_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def register(self, address: int, size_bytes: int, *, writable: bool) -> str:
        """Read-only mappings need a flag that not every GPU and driver supports; then they are refused."""
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()
            result = runtime.cudaHostRegister(
                address, size_bytes, _REGISTER_DEFAULT if writable else _REGISTER_READ_ONLY
            )
            if int(result) == 0:
                return ""
            return f"{runtime.cudaGetErrorString(result)} ({int(result)})"

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(targets), list(sources))


class CudaDevice:
    """One GPU."""

    def __init__(self, index: int) -> None:
        """Raises RuntimeError if there is no such GPU."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not 0 <= index < count:
            raise RuntimeError(
                f"there is no CUDA device {index}: torch {torch.__version__} sees {count}; install a build of torch "
                "for CUDA, or keep the pages in host memory and use kv_kernels.host"
            )
        self._device = torch.device("cuda", index)
        self.host = CudaHost(self._device)
        self._lanes = {
            direction: Lanes(
                CudaStream(torch.cuda.Stream(self._device, priority=_HIGH)),
                CudaStream(torch.cuda.Stream(self._device, priority=_HIGH)),
            )
            for direction in Direction
        }

    def lanes(self, direction: Direction) -> Lanes:
        return self._lanes[direction]

    def compute(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Waits for the whole device: the memory's last user may still be running on the compute stream."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        return memory

    def run(self, body: Callable[[], object]) -> None:
        body()


def local_cpus(index: int) -> frozenset[int]:
    """CPUs of the NUMA node that a GPU hangs on; empty if the system does not tell."""
    properties = torch.cuda.get_device_properties(index)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in numbers:
        return frozenset()
    domain, bus, device = numbers
    try:
        text = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/local_cpulist").read_text()
        return cpu_list(text)
    except (OSError, ValueError):
        return frozenset()


def cpu_list(text: str) -> frozenset[int]:
    """The kernel's form, such as 0-7,16,18-19. Raises ValueError."""
    cpus: set[int] = set()
    for piece in text.strip().split(","):
        first, _, last = piece.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
