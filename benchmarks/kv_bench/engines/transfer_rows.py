"""Rows of `benches.py kernels`: whole loads and saves beside a plain copy of pinned memory.

A load is `transfer.Loader` from page-locked extents into an engine's pages: copies, kernels, and the worker that awaits
the end; a save is the reverse. The limit is one copy of as many bytes between pinned memory and the device in the same
direction, right before and after; for both directions it is both copies, on two streams. All by wall time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from kv_bench.engines.on_device import DeviceTimer, near_cpus, transfer_device
from kv_bench.engines.paged_pool import HEADER, RAW, PagedPool, Route, is_loaded, is_saved, payload_bytes
from kv_kernels.device import Region, Stream, host_tensor
from kv_kernels.device_transfers import SEGMENTS
from kv_kernels.int8 import KC64
from kv_kernels.pinned import PinnedExtents
from kv_kernels.pools import PoolTable
from kv_kernels.transfer import Loader, Saver
from kv_kernels.transfer_state import LayerSlice, Transfer, TransferOutcome, layer_slices
from kv_kernels.worker import ThreadWorker
from kvstore.bench.measure import Against, against, timed
from kvstore.bench.rig import BlockShape
from kvstore.bench.row import Row, Target, rate_row
from tiering.dram.extents import Extent
from tiering.frame import frame_bytes

LOAD, SAVE, BOTH = DIRECTIONS = ("load", "save", "both")
TARGET = 0.90
"""Share of the plain copy's rate, on a GPU, from `TARGETED_BYTES` on the wire on."""
TARGETED_BYTES = 256 << 20
WAIT_SECONDS = 60.0
CLOSE_SECONDS = 10.0
_KEPT: list[Extent] = []
"""Extents that a failed transfer may still access."""


class PagedKernel:
    """`transfer.PageKernel` over a pool, in one direction: a route's kernels with their own page table."""

    def __init__(
        self, pool: PagedPool, slices: Iterable[LayerSlice], route: Route, codec: str, *, is_load: bool
    ) -> None:
        self._pools = {part.first: PoolTable.of(pool.planes[part.first : part.stop]) for part in slices}
        self._table = pool.table
        self._status = torch.zeros(len(pool.table), dtype=torch.int32, device=pool.table.device)
        self._route, self._codec, self._is_load = route, codec, is_load

    def __call__(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        pools, table = self._pools[layers.first], self._table[frames.start : frames.stop]
        if self._is_load:
            self._route.loader(pools, self._codec, table, staged, 0)()
        else:
            status = self._status[frames.start : frames.stop]
            self._route.saver(pools, self._codec, table, staged, 0, status)()

    def pages(self, frames: range, layers: LayerSlice) -> list[Region]:
        """Asked for by a device that checks accesses."""
        return []

    def tables(self) -> list[Region]:
        """Asked for by a device that checks accesses."""
        return []

    def findings(self) -> list[Region]:
        """Asked for by a device that checks accesses."""
        return []

    def end(self, kernels: Stream) -> None:
        """Statuses stay on the device."""


class Transfers:
    """A pool, page-locked frames for all of its blocks, and a loader and a saver between them. A context manager."""

    def __init__(
        self, shape: BlockShape, page_tokens: int, codec: str, kv_bytes: int, layers_at_once: int, segment_bytes: int,
        device: torch.device, route: Route,
    ) -> None:  # fmt: skip
        """kv_bytes: whole blocks. segment_bytes: least size of a staging segment, which fits a slice of a frame."""
        blocks = kv_bytes // shape.payload_bytes
        size = payload_bytes(shape, codec)
        self.codec, self.kv_bytes, self.wire_bytes = codec, blocks * shape.payload_bytes, blocks * size
        self.pool = PagedPool(shape, blocks, page_tokens, device, seed=1)
        self.target = PagedPool(shape, blocks, page_tokens, device, seed=2)
        self._device = transfer_device(device)
        self._frame_bytes = frame_bytes(size)
        self._stack = ExitStack()
        try:
            pin, load, save = (self._worker(name, near_cpus(device)) for name in ("pin", "load", "save"))
            extent = Extent(blocks * self._frame_bytes)
            self.slots = [extent.address + block * self._frame_bytes for block in range(blocks)]
            extents = PinnedExtents(self._device.host, pin)
            extents.add(extent.address, extent.size_bytes, extent, writable=True)
            self._stack.callback(_give_back, extents, extent)
            pin.wait(lambda: extents.runs(self.slots, self._frame_bytes).is_pinned, WAIT_SECONDS)
            self._slices = layer_slices(shape.layers, size // shape.layers, layers_at_once, HEADER)
            room = max(segment_bytes, *(part.size_bytes for part in self._slices))
            segment = -(-room // 256) * 256
            self._loader = Loader(self._device, extents, load, segment, SEGMENTS)
            self._saver = Saver(self._device, extents, save, segment, SEGMENTS)
            self._kernels = [
                PagedKernel(pool, self._slices, route, codec, is_load=is_load)
                for pool, is_load in ((self.target, True), (self.pool, False))
            ]
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, direction: str) -> list[Transfer]:
        """Start a load, a save, or one of each. Raises RuntimeError if refused."""
        started: list[Transfer | None] = []
        if direction in (LOAD, BOTH):
            started.append(self._loader.load(self.slots, self._slices, self._kernels[0], _nothing))
        if direction in (SAVE, BOTH):
            after = self._device.compute().record()
            started.append(self._saver.save(self.slots, self._slices, self._kernels[1], after, _yes, _nothing))
        if None in started:
            raise RuntimeError(f"a {direction} was refused: its worker has too much to do, or the device has failed")
        return [transfer for transfer in started if transfer is not None]

    def run(self, direction: str) -> list[Transfer]:
        """Start and wait. Raises RuntimeError on failure or timeout."""
        transfers = self.start(direction)
        for transfer in transfers:
            finish(transfer)
        return transfers

    def check(self) -> bool:
        """Whether the first block of a load's pages and of a save's frame equals the twins'."""
        payload = host_tensor(self.slots[0] + HEADER, self._frame_bytes - HEADER).clone()
        row = payload.to(self.pool.table.device)[None]
        table = self.pool.table
        is_right = is_loaded(self.target, self.codec, self.target.table, row.clone(), 0)
        return is_right and is_saved(self.pool, self.codec, table, row, 0)

    def _worker(self, name: str, cpus: frozenset[int]) -> ThreadWorker:
        worker = ThreadWorker(f"bench-{name}", cpus)
        self._stack.callback(worker.close, CLOSE_SECONDS)
        return worker


def finish(transfer: Transfer) -> None:
    """Wait for the end. Raises RuntimeError on failure or timeout."""
    if not transfer.wait(WAIT_SECONDS):
        raise RuntimeError(f"a transfer took longer than {WAIT_SECONDS:.0f} seconds")
    if transfer.outcome is not TransferOutcome.DONE:
        raise RuntimeError(f"a transfer ended as {transfer.outcome.value}: {transfer.error}")


class PlainCopy:
    """The limit: one copy of pinned host memory to the device, back, or both at once."""

    def __init__(self, size_bytes: int, device: torch.device, timer: DeviceTimer) -> None:
        is_cuda = device.type == "cuda"
        self._host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_cuda).random_() for _ in range(2)]
        self._there = [
            torch.empty_like(host, device=device).copy_(host) for host in self._host
        ]  # a copy of its own on a CPU too
        self._streams: list[Any] = [torch.cuda.Stream(device) if is_cuda else None for _ in range(2)]
        self._timer = timer

    def run(self, direction: str, size_bytes: int) -> None:
        """size_bytes: per direction."""
        if direction in (LOAD, BOTH):
            with self._on(0):
                self._there[0][:size_bytes].copy_(self._host[0][:size_bytes], non_blocking=True)
        if direction in (SAVE, BOTH):
            with self._on(1):
                self._host[1][:size_bytes].copy_(self._there[1][:size_bytes], non_blocking=True)
        self._timer.wait()

    def _on(self, number: int) -> Any:
        stream = self._streams[number]
        return nullcontext() if stream is None else torch.cuda.stream(stream)


def measure(
    shape: BlockShape, page_tokens: int, kv_bytes: int, segment_bytes: int, laps: int,
    device: torch.device, route: Route, timer: DeviceTimer,
) -> Iterator[Row]:  # fmt: skip
    """The rows, one by one: raw and int8-kc64, whole frames and a few layers at a time, all directions."""
    limit = PlainCopy(kv_bytes, device, timer)
    few = max(1, shape.layers // 8)
    for codec in (RAW, KC64):
        for layers_at_once in dict.fromkeys((shape.layers, few)):
            with Transfers(
                shape, page_tokens, codec, kv_bytes, layers_at_once, segment_bytes, device, route
            ) as transfers:
                transfers.run(SAVE)  # so that loads find frames
                is_direct = all(transfer.is_direct for transfer in transfers.run(LOAD))
                timer.wait()
                matches = transfers.check()
                for direction in DIRECTIONS:
                    plain = partial(limit.run, direction, transfers.wire_bytes)
                    turns = {direction: timed(partial(transfers.run, direction))}
                    found = against(timed(plain), turns, laps)[direction]
                    is_targeted = device.type == "cuda" and transfers.wire_bytes >= TARGETED_BYTES
                    target = TARGET if is_targeted else None
                    yield _row(transfers, direction, layers_at_once, found, target, is_direct, matches)


def _row(
    transfers: Transfers,
    direction: str,
    layers_at_once: int,
    found: Against,
    target: float | None,
    is_direct: bool,
    matches: bool,
) -> Row:
    """GB/s on the wire, both directions together, beside a plain copy. kv_bytes: of the pages, as numbers of 16 bits.
    is_direct: whether the extents were page-locked; else everything went through a small pinned ring. matches_twin:
    whether the first block is what the twins make of it, bit for bit."""
    times = 2 if direction == BOTH else 1
    wire, kv = times * transfers.wire_bytes, times * transfers.kv_bytes
    return rate_row(
        {"direction": direction, "codec": transfers.codec, "layers_at_once": layers_at_once, "kv_bytes": kv},
        found,
        wire,
        "pinned copy",
        None if target is None else Target(target),
        wire_bytes=wire,
        seconds=found.seconds,
        gb_per_second=wire / found.seconds / 1e9,
        kv_gb_per_second=kv / found.seconds / 1e9,
        limit_gb_per_second=wire / found.limit_seconds / 1e9,
        is_direct=is_direct,
        matches_twin=matches,
    )


def _give_back(extents: PinnedExtents, extent: Extent) -> None:
    """If the device failed, it may still be copying: then the memory stays until the process ends."""
    if extents.remove(extent.address, CLOSE_SECONDS):
        extent.close()
    else:
        _KEPT.append(extent)


def _nothing() -> None: ...


def _yes() -> bool:
    return True
