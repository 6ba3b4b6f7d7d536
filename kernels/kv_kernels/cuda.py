"""Streams, copies and page-locked memory of one GPU, by way of torch and the CUDA driver.

The words are CUDA's: a stream runs its work in order; streams are ordered among each other, and with the host, by
events only. Nothing that is put into a stream blocks, but copies of host memory that is not page-locked. All others of
a call go into it by one call of the driver (`CopyBatch`).

`CudaDevice` and `CudaStream` are the one seam of transfers: the tests have another device of the same methods, which
runs on a CPU in any order that is legal and finds missing waits. Must never be used while the engine captures a graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

Rows = np.ndarray[Any, np.dtype[np.int64]]
"""Copies: int64 [3, copies], of each the target's address, the source's, and the bytes."""
Event = torch.cuda.Event
LANES = 2
"""Streams of a direction."""
_REGISTER_DEFAULT, _REGISTER_READ_ONLY = 0, 8
_HIGH = -1  # lower numbers go first
WITH_FAILED_INDEX, WITHOUT = 12_080, 13_000
"""Versions of the driver from which on a batch has one form, and the other."""
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_KERNELS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class Direction(Enum):
    """Of bytes, as the engine sees it."""

    LOAD = "load"
    SAVE = "save"


class CudaStream:
    """Work that is done in order. Its methods put work in; they may be called from any thread."""

    def __init__(self, stream: torch.cuda.Stream, copies: CopyBatch) -> None:
        self._stream = stream
        self._copies = copies

    def record(self) -> Event:
        """A new event at the end of what is in the stream now. Waiting for it sleeps instead of spinning."""
        event = Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        """What is put in from here on waits for the event. The host does not."""
        self._stream.wait_event(event)

    def copy(self, rows: Rows, is_pinned: bool = True) -> None:
        """Of each row one side may be host memory. Unless all of that is page-locked, the driver copies row by row,
        through memory of its own, and this may take as long as that. Rows are read before this returns."""
        with torch.cuda.stream(self._stream):
            self._copies(rows, self._stream.cuda_stream, is_pinned)

    def launch(self, work: Callable[[], object]) -> None:
        """Call `work`, whose kernels go into this stream."""
        with torch.cuda.stream(self._stream):
            work()


class CudaDevice:
    """One GPU, and host memory as its driver knows it."""

    def __init__(self, index: int) -> None:
        """Raises RuntimeError if there is no such GPU."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not 0 <= index < count:
            raise RuntimeError(
                f"there is no CUDA device {index}: torch {torch.__version__} sees {count}; install a build of torch "
                "for CUDA, or keep the pages in host memory and use kv_kernels.host"
            )
        self._device = torch.device("cuda", index)
        self._copies = CopyBatch(ctypes.CDLL("libcuda.so.1"))

    def lanes(self, direction: Direction) -> Sequence[CudaStream]:
        """`LANES` new streams of high priority."""
        return [CudaStream(torch.cuda.Stream(self._device, priority=_HIGH), self._copies) for _ in range(LANES)]

    def compute(self) -> CudaStream:
        """The stream into which the engine puts work now, as the calling thread sees it."""
        return CudaStream(torch.cuda.current_stream(self._device), self._copies)

    def memory(self, size_bytes: int) -> torch.Tensor:
        """New memory of the device, flat uint8, which any of its streams may use at once. Waits for the whole device:
        the memory's last user may still be running on the compute stream."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        return memory

    def tables(self, size_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New memory of the device and page-locked memory, flat uint8, from what torch keeps. The compute stream may
        still use the device's: the first work on it must wait for that stream. Both must be held until all work on them
        is over. Raises RuntimeError if there is none."""
        with torch.cuda.device(self._device):
            host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device), host

    def register(self, address: int, size_bytes: int, *, writable: bool) -> str:
        """Page-lock existing memory; returns nothing, or why it was refused. Read-only mappings need a flag that not
        every GPU and driver supports; then they are refused."""
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()
            flags = _REGISTER_DEFAULT if writable else _REGISTER_READ_ONLY
            result = runtime.cudaHostRegister(address, size_bytes, flags)
            return f"{runtime.cudaGetErrorString(result)} ({int(result)})" if int(result) else ""

    def unregister(self, address: int) -> None:
        """Undo `register`; no copy may be under way that touches the memory."""
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def copy(self, rows: Rows) -> None:
        """Copy between host memories, now, on the calling thread."""
        for target, source, size in rows.T.tolist():
            ctypes.memmove(target, source, size)


def host_tensor(address: int, size_bytes: int) -> torch.Tensor:
    """Memory of this process as flat uint8. Keeps nothing alive; not to be written where the mapping is read-only."""
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)


# All copies of a segment at once --------------------------------------------------------------------------------------


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The hints are for managed memory; 0: none."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CopyBatch:
    """Puts rows of copies into a stream by one call. Any thread may call, in the device's context.

    `cuMemcpyBatchAsync` came with CUDA 12.8 and lost a parameter with 13.0; a driver is asked for a form by version
    (CUDA driver API, sections Memory Management and Driver Entry Point Access). Where it has none, each copy is one
    call of `cuMemcpyAsync`.
    """

    def __init__(self, driver: Any) -> None:
        """driver: libcuda. Raises RuntimeError if it does not tell its version."""
        version = ctypes.c_int()
        _checked("cuDriverGetVersion", driver.cuDriverGetVersion(ctypes.byref(version)))
        self._has_failed_index = version.value < WITHOUT
        self._single = driver.cuMemcpyAsync
        self._single.argtypes = [ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER]
        self._batch = _batch_of(driver, WITH_FAILED_INDEX if self._has_failed_index else WITHOUT, version.value)
        self._attributes = _Attributes(_IN_STREAM_ORDER, flags=_BESIDE_KERNELS)
        self._first = _SIZE(0)  # all copies from this one on have the attributes

    def __call__(self, rows: Rows, stream: int, is_pinned: bool = True) -> None:
        """Raises RuntimeError where the driver refuses; some of the copies may be in the stream then."""
        assert stream, "no batch goes into the legacy stream"
        assert rows.strides[1] == rows.itemsize == 8 and len(rows) == 3
        if self._batch is None or not is_pinned:
            for row in rows.T.tolist():
                _checked("cuMemcpyAsync", self._single(*row, stream))
            return
        start, width, failed = rows.ctypes.data, rows.strides[0], _SIZE(0)
        told = [start, start + width, start + 2 * width, rows.shape[1], ctypes.byref(self._attributes)]
        more = [ctypes.byref(failed)] if self._has_failed_index else []
        result = self._batch(*told, ctypes.byref(self._first), 1, *more, stream)
        _checked(f"cuMemcpyBatchAsync of {rows.shape[1]} copies", result)


def _batch_of(driver: Any, form: int, version: int) -> Callable[..., int] | None:
    if version < form:
        return None
    found, status = _POINTER(), ctypes.c_int()
    name = ctypes.c_char_p(b"cuMemcpyBatchAsync")
    find = driver.cuGetProcAddress_v2
    find.argtypes = [ctypes.c_char_p, _POINTER, ctypes.c_int, ctypes.c_uint64, _POINTER]
    result = find(name, ctypes.byref(found), form, 0, ctypes.byref(status))
    if result or not found.value:
        return None
    failed = [_POINTER] if form == WITH_FAILED_INDEX else []
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, *failed, _POINTER
    )
    return kind(found.value)


def _checked(call: str, result: int) -> None:
    if result:
        raise RuntimeError(f"{call} was refused by the driver: CUDA error {result}")
