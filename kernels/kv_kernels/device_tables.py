"""What a transfer passes to its kernels and gets from them, besides slots and pages.

    up      addresses of the pools | page table | status, zeroed       one copy, before the first launch
    down    status of a run of blocks | digests of their layer slices  one copy each, behind its last launch

Both lie in one piece of the device's memory and in one of page-locked host memory, laid out alike, and later transfers
reuse them: a launch has their addresses only. Must never be reused, or given back, before the host has waited for all
that was put in with them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_kernels.device import Device, Event, Region, Stream, region

_LEAST_BYTES = 1 << 18
_ALIGN_BYTES = 64
DIGEST_BYTES = 16


class Memory(NamedTuple):
    """flat uint8, of equal size"""

    device: torch.Tensor
    host: torch.Tensor


class TableMemory:
    """Memory for tables, taken at first use. Any thread may call."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: list[Memory] = []

    def take(self, size_bytes: int) -> Memory:
        """At least so much. New memory waits for the whole device, so it is allocated large. Raises RuntimeError."""
        with self._lock:
            for at, memory in enumerate(self._free):
                if len(memory.host) >= size_bytes:
                    return self._free.pop(at)
            if self._free:  # too small for what is done now
                self._free.pop(0)
        size = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
        return Memory(self._device.memory(size), self._device.host.pinned(size))

    def give_back(self, memory: Memory) -> None:
        with self._lock:
            self._free.append(memory)


class TableShape(NamedTuple):
    """addresses: of pools. rows, pages: of the page table, one row for each block. slices: layer slices of a block, in
    the runs of layers in which they are moved."""

    addresses: int
    rows: int
    pages: int
    slices: tuple[int, ...]


class Findings(NamedTuple):
    """Of a run of blocks, on the device: status int32 [blocks]; for each run of layers digests int64 [blocks, slices,
    2]; and all of it as bytes, there and on the host."""

    status: torch.Tensor
    digests: list[torch.Tensor]
    there: tuple[torch.Tensor, torch.Tensor]
    here: tuple[torch.Tensor, torch.Tensor]

    def regions(self) -> list[Region]:
        return [region(part) for part in self.there if len(part)]

    def bring(self, kernels: Stream) -> None:
        """Copy them to the host, in that stream's order."""
        kernels.copy(self.here, self.there)


class Tables:
    """Of one transfer, or of several that are put in together."""

    def __init__(self, device: Device, memory: TableMemory, shape: TableShape) -> None:
        """Raises RuntimeError if there is no memory."""
        self._device = device
        self._shape = shape
        self._table_at = _aligned(8 * shape.addresses)
        self._status_at = self._table_at + _aligned(8 * shape.rows * shape.pages)
        self._digests_at = self._status_at + _aligned(4 * shape.rows)
        self._row_bytes = DIGEST_BYTES * sum(shape.slices)
        self._memory = memory.take(self._digests_at + self._row_bytes * shape.rows)
        self._pool = memory
        self._uploaded: Event | None = None
        self.addresses = self._memory.device[: 8 * shape.addresses].view(torch.int64)
        stop = self._table_at + 8 * shape.rows * shape.pages
        self.table = self._memory.device[self._table_at : stop].view(torch.int64).view(shape.rows, shape.pages)

    def upload(self, addresses: np.ndarray[Any, Any], table: np.ndarray[Any, Any], kernels: Stream) -> None:
        """addresses: int64 [addresses]; table: int64 [rows, pages]. In that stream's order."""
        told = np.zeros(self._digests_at, np.uint8)
        told[: addresses.nbytes] = addresses.view(np.uint8)
        told[self._table_at : self._table_at + table.nbytes] = table.reshape(-1).view(np.uint8)
        self._device.host.copy([self._memory.host[: self._digests_at]], [torch.from_numpy(told)])
        kernels.copy([self._memory.device[: self._digests_at]], [self._memory.host[: self._digests_at]])
        self._uploaded = kernels.record()

    def regions(self) -> list[Region]:
        """What every launch reads."""
        return [region(self._memory.device[: self._status_at])]

    def findings(self, blocks: range) -> Findings:
        """Where these blocks' are."""
        status = slice(self._status_at + 4 * blocks.start, self._status_at + 4 * blocks.stop)
        start = self._digests_at + self._row_bytes * blocks.start
        digests = slice(start, start + self._row_bytes * len(blocks))
        pieces = []
        for slices in self._shape.slices:
            stop = start + DIGEST_BYTES * slices * len(blocks)
            pieces.append(self._memory.device[start:stop].view(torch.int64).view(len(blocks), slices, 2))
            start = stop
        there, here = [(memory[status], memory[digests]) for memory in self._memory]
        return Findings(there[0].view(torch.int32), pieces, there, here)

    def found(self, findings: Findings) -> tuple[list[int], bytes]:
        """On the host, once copied: of each block the status, and the digests of all its layer slices."""
        status, raw = [torch.empty_like(part) for part in findings.here]
        self._device.host.copy([status, raw], findings.here)
        words, at, runs = raw.numpy().view(np.int64), 0, []
        for piece in findings.digests:
            runs.append(words[at : at + piece.numel()].reshape(piece.shape))
            at += piece.numel()
        return status.numpy().view(np.int32).tolist(), canonical(runs)

    def close(self) -> None:
        """Once all transfers that use it are done."""
        if self._uploaded is not None:
            self._uploaded.wait()
        self._pool.give_back(self._memory)


def canonical(runs: Sequence[np.ndarray[Any, Any]]) -> bytes:
    """Digests of blocks, as frames have them. runs: int64 [blocks, slices, 2], the low and the high half."""
    words = np.concatenate(runs, axis=1) if len(runs) > 1 else runs[0]
    return words[..., ::-1].astype(">i8").tobytes()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
