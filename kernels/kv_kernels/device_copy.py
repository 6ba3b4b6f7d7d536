"""Blocks between pages on a device and payloads in host memory, many at a time.

    decode    payloads > segments: digests of what is staged, then from there into the pages     the digests come back
              in one copy and are compared here; only then is anything called good
    encode    pages > segments: digests of what is staged, before it crosses to the host > payloads; yielded in order
              as they land

All segments are put into the streams at once; the calling thread waits without the interpreter lock. A payload is moved
without its frame's header: neighbouring slots are then separate copies, which costs nothing if a payload is larger than
about 64 KiB, and a copy never writes a header. Must never say that a block is good, or has landed, before the host has
waited for it; pages of a block that is not good hold garbage.

What all copies of one device share is made once, by the store's codecs, when pages on that device are first seen:
streams, segments, tables' memory, page-locked extents and the threads behind them; 512 MiB of the device's memory.
Must never be made when a module is imported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_kernels import int8_plain, reference, triton_int8, triton_raw
from kv_kernels.copies import BlockCopy, Digest, Encoded, Flaw
from kv_kernels.cuda import CudaDevice, local_cpus
from kv_kernels.device import Device, Direction, Event, Region, Stream, region, rows_of
from kv_kernels.int8 import ALIGN_BYTES, GROUP, KC64, SliceForm
from kv_kernels.pinned import PinnedExtents
from kv_kernels.pools import RAW_BYTES, PoolTable
from kv_kernels.transfer import LayerSlice, Loader, Saver, Transfer, TransferOutcome, layer_slices
from kv_kernels.triton_digest import SHORTEST_BYTES, digest_keys, digest_slices
from kv_kernels.worker import Worker

_Rows = np.ndarray[Any, Any]
SEGMENT_BYTES = 128 << 20
"""Of each stream. The engine's thread takes 0.3 ms for a segment, which PCIe 5 moves in 2.4 ms; with segments of 32
MiB a GiB takes that thread two to four times as long (measured beside an H100)."""
SHORT_ROW = 128
"""Numbers: what a program moves at a time."""
DIGEST_BYTES = 16
_LEAST_TABLES_BYTES, _TABLE_ALIGN_BYTES = 1 << 18, 64

_log = logging.getLogger(__name__)


class DeviceCopy:
    """Bound to pages, as `copies.BlockCopy`. Holds their tensors for as long as it lives."""

    def __init__(
        self,
        ways: DeviceTransfers,
        planes: Sequence[Sequence[torch.Tensor]],
        table: Sequence[int],
        block_tokens: int,
        slice_bytes: int,
        codec: str | None,
        plain: Callable[[], BlockCopy],
    ) -> None:
        """planes: per layer slice, per plane, [pages, page_tokens, heads, width] on the device; table: physical pages.
        codec: `int8.KC64`, None for bytes as they are. plain: another route, for when this one takes no
        more. Raises `ValueError` with the reason where these pages are not for this route."""
        self._page_tokens = planes[0][0].shape[1]
        if codec is None and self._page_tokens == block_tokens:
            planes = _in_rows(planes)
        self._pools = PoolTable.of(planes, torch.empty(len(planes), len(planes[0]), dtype=torch.int64, device="meta"))
        if codec is None and self._pools.dtype.itemsize not in RAW_BYTES:
            raise ValueError(f"numbers of {self._pools.dtype.itemsize} bytes")
        if slice_bytes % 16 or (codec is not None and block_tokens % GROUP):
            raise ValueError(f"blocks of {block_tokens} tokens, layer slices of {slice_bytes} bytes")
        if not SHORTEST_BYTES <= slice_bytes <= ways.segment_bytes:
            raise ValueError(
                f"layer slices of {slice_bytes} bytes, where {SHORTEST_BYTES} to {ways.segment_bytes} are possible"
            )
        self._ways = ways
        self._codec = codec
        self._plain = plain
        self._table = np.array(table, np.int64)
        self._addresses = np.array([[plane.data_ptr() for plane in layer] for layer in planes], np.int64).reshape(-1)
        self._block_pages = block_tokens // self._page_tokens
        self._slice_bytes = slice_bytes
        self._block_digests_bytes = DIGEST_BYTES * len(planes)
        at_once = min(len(planes), ways.segment_bytes // slice_bytes)
        self._layers = layer_slices(len(planes), slice_bytes, at_once)
        self._blocks_at_once = max(1, ways.segment_bytes // (slice_bytes * len(planes)))

    def encode(self, tokens: Sequence[int], into: Sequence[Any], digest: Digest) -> Encoded:
        """As `BlockCopy.encode`. digest: XXH3-128, which the device takes by itself."""
        count = len(tokens)
        if not count:
            return
        runs = [
            range(first, min(first + self._blocks_at_once, count)) for first in range(0, count, self._blocks_at_once)
        ]
        self._adopt(into)
        after = self._ways.device.compute().record()
        with self._told(tokens, 0, Direction.SAVE) as (tables, uploaded, rows, pools, started):
            savings: list[tuple[range, _Gather, Transfer]] = []
            for run in runs:
                kernel = _Gather(self._move_of(tables, rows, pools, run))
                addresses = [payload.address for payload in into[run.start : run.stop]]
                saving = self._ways.saver.save(addresses, self._layers, kernel, after, uploaded)
                if saving is None:
                    break
                started.append(saving)
                savings.append((run, kernel, saving))
            for _, kernel, saving in savings:
                _wait(saving)
                for encoded in self._encoded(*tables.found(kernel.move.findings)):
                    yield encoded
                    if isinstance(encoded, Flaw):
                        return
        put_in = savings[-1][0].stop if savings else 0
        if put_in < count:
            yield from self._plain().encode(tokens[put_in:], into[put_in:], digest)

    def decode(
        self,
        payloads: Sequence[Any],
        tokens: Sequence[int],
        skip: int,
        expected: Sequence[Sequence[bytes]],
        digest: Digest,
    ) -> int:
        """As `BlockCopy.decode`. digest: XXH3-128, which the device takes by itself."""
        if not tokens:
            return 0
        self._adopt(payloads)
        with self._told(tokens, skip, Direction.LOAD) as (tables, uploaded, rows, pools, started):
            kernel = _Scatter(self._move_of(tables, rows, pools, range(len(tokens))))
            addresses = [payload.address for payload in payloads]
            loading = self._ways.loader.load(addresses, self._layers, kernel, uploaded)
            if loading is not None:
                started.append(loading)
                _wait(loading)
                _, found = tables.found(kernel.move.findings)
                return _good(found, expected, self._block_digests_bytes)
        return self._plain().decode(payloads, tokens, skip, expected, digest)

    def _adopt(self, payloads: Sequence[Any]) -> None:
        """Have the payloads' memory page-locked soon; these blocks may still go through the bounce ring."""
        for memory in {payload.memory for payload in payloads}:
            if memory is not None:
                self._ways.extents.adopt(
                    memory.address, memory.size_bytes, memory.before_unmap, writable=memory.writable
                )

    @contextmanager
    def _told(
        self, tokens: Sequence[int], skip: int, direction: Direction
    ) -> Iterator[tuple[Tables, Event, _Rows, list[PoolTable], list[Transfer]]]:
        """The tables, when they are uploaded, the page table on the host, the pools of each run of layers, and a list
        for the transfers started with them; these have ended when the context ends."""
        table = self._rows(tokens, skip)
        slices = tuple([part.stop - part.first for part in self._layers])
        shape = TableShape(len(self._addresses), len(table), self._block_pages, slices)
        tables = Tables(self._ways.device, self._ways.tables, shape)
        started: list[Transfer] = []
        try:
            uploaded = tables.upload(self._addresses, table, self._ways.device.lanes(direction)[0])
            addresses = tables.addresses.view(self._pools.layers, -1)
            pools = [self._pools.part(part.first, part.stop, addresses) for part in self._layers]
            yield tables, uploaded, table, pools, started
        finally:
            for transfer in started:
                transfer.cancel()
            for transfer in started:
                transfer.wait(None)
            if not any([transfer.is_stranded for transfer in started]):
                tables.close()

    def _move_of(self, tables: Tables, rows: _Rows, pools: Sequence[PoolTable], blocks: range) -> _Move:
        here, there = rows[blocks.start : blocks.stop], tables.table[blocks.start : blocks.stop]
        form = self._ways.device, self._codec, self._slice_bytes, self._ways.keys
        return _Move(*form, pools, self._layers, here, there, tables, tables.findings(blocks))

    def _rows(self, tokens: Sequence[int], skip: int) -> _Rows:
        """The page table: int64 [blocks, pages of a block], -1 for those that are left out."""
        first, rest = np.divmod(np.array(tokens, np.int64), self._page_tokens)
        at = first[:, None] + np.arange(self._block_pages)
        left_out = skip // self._page_tokens
        at[0, :left_out] = len(self._table) - 1
        is_inside = not rest.any() and at.min() >= 0 and at.max() < len(self._table)
        assert is_inside and not skip % self._page_tokens, "the block is not inside the pages"
        rows: _Rows = self._table[at]
        rows[0, :left_out] = -1
        return rows

    def _encoded(self, status: Sequence[int], digests: bytes) -> Iterator[list[bytes] | Flaw]:
        size = self._block_digests_bytes
        for block, found in enumerate(status):
            if found:
                yield Flaw(found)
                continue
            ends = range(block * size, (block + 1) * size, DIGEST_BYTES)
            yield [digests[at : at + DIGEST_BYTES] for at in ends]


class _Move(NamedTuple):
    """A run of blocks: what their kernels are told. pools: of each run of layers. rows: the page table on the host."""

    device: Device
    codec: str | None
    slice_bytes: int
    keys: torch.Tensor
    pools: Sequence[PoolTable]
    layers: Sequence[LayerSlice]
    rows: _Rows
    table: torch.Tensor
    tables: Tables
    findings: Findings


class _Kernel:
    """`PageKernel`: one run of blocks. The tables stay until the transfer is waited for."""

    def __init__(self, move: _Move) -> None:
        self.move = move

    def __call__(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        at = self.move.layers.index(layers)
        self.move.device.run(partial(self._launch, staged, frames, at))

    def _launch(self, staged: torch.Tensor, frames: range, at: int) -> None:
        raise NotImplementedError

    def _digest(self, staged: torch.Tensor, frames: range, at: int) -> None:
        digests = self.move.findings.digests[at][frames.start : frames.stop]
        digest_slices(staged, 0, self.move.slice_bytes, digests, self.move.keys)

    def pages(self, frames: range, layers: LayerSlice) -> Iterable[Region]:
        pools = self.move.pools[self.move.layers.index(layers)]
        named = {page for page in self.move.rows[frames.start : frames.stop].flatten().tolist() if page >= 0}
        return [_page(plane, page) for planes in pools.planes for plane in planes for page in sorted(named)]

    def tables(self) -> Iterable[Region]:
        return self.move.tables.regions()

    def findings(self, frames: range, layers: LayerSlice) -> Iterable[Region]:
        return self.move.findings.regions(self.move.layers.index(layers), frames)

    def end(self, stream: Stream) -> None:
        self.move.findings.bring(stream)


class _Gather(_Kernel):
    def _launch(self, staged: torch.Tensor, frames: range, at: int) -> None:
        move = self.move
        table = move.table[frames.start : frames.stop]
        if move.codec is None:
            triton_raw.gather(move.pools[at], table, staged)
        else:
            status = move.findings.status[at][frames.start : frames.stop]
            triton_int8.gather_quantize(move.pools[at], move.codec, table, staged, status)
        self._digest(staged, frames, at)


class _Scatter(_Kernel):
    def _launch(self, staged: torch.Tensor, frames: range, at: int) -> None:
        move = self.move
        table = move.table[frames.start : frames.stop]
        self._digest(staged, frames, at)
        if move.codec is None:
            triton_raw.scatter(move.pools[at], table, staged)
        else:
            triton_int8.dequantize_scatter(move.pools[at], move.codec, table, staged)


def _in_rows(planes: Sequence[Sequence[torch.Tensor]]) -> Sequence[Sequence[torch.Tensor]]:
    """Pages that are blocks of few rows, as states are, seen as many short rows, one program for 64 of them. As they
    are where they differ, or a page is not one run in the payload's order."""
    shapes = [plane.shape[1:] for plane in planes[0]]
    are_runs = all(
        [plane.shape[1:] for plane in layer] == shapes
        and all(plane[:1].transpose(1, 2).is_contiguous() for plane in layer)
        for layer in planes
    )
    if shapes[0][0] >= GROUP or not are_runs:
        return planes
    sizes = [shape.numel() for shape in shapes]
    rows = gcd(*sizes)
    while rows % 2 == 0 and max(sizes) // rows < SHORT_ROW:
        rows //= 2
    return [
        [
            plane.as_strided((len(plane), rows, 1, size // rows), (plane.stride(0), size // rows, size // rows, 1))
            for plane, size in zip(layer, sizes, strict=True)
        ]
        for layer in planes
    ]


def _page(plane: torch.Tensor, page: int) -> Region:
    reach = sum([(size - 1) * stride for size, stride in zip(plane.shape[1:], plane.stride()[1:], strict=True)])
    size = plane.element_size()
    return Region(plane.data_ptr() + page * plane.stride(0) * size, (reach + 1) * size)


def _wait(transfer: Transfer) -> None:
    transfer.wait(None)
    if transfer.outcome is not TransferOutcome.DONE:
        raise transfer.error or RuntimeError(f"a transfer ended as {transfer.outcome.value}")


def _good(found: bytes, expected: Sequence[Sequence[bytes]], block_bytes: int) -> int:
    if found == b"".join([one for digests in expected for one in digests]):
        return len(expected)
    wanted = [b"".join(digests) for digests in expected]
    return next(
        (at for at, want in enumerate(wanted) if found[at * block_bytes : (at + 1) * block_bytes] != want), len(wanted)
    )


# Tables: what a transfer passes to its kernels and gets from them, besides slots and pages ----------------------------
#
#    up      addresses of the pools | page table | status, zeroed       one copy, before the first launch
#    down    status of a run of blocks | digests of their layer slices  one copy, after its last launch
#
# Both lie in one piece of the device's memory and in one of page-locked host memory, laid out alike, and later
# transfers reuse them: a launch has their addresses only. Must never be reused, or given back, before the host has
# waited for all that was put in with them.


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
        size = max(_LEAST_TABLES_BYTES, 1 << (size_bytes - 1).bit_length())
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
    """Of a run of blocks, on the device, for each run of layers: status int32 [blocks] and digests int64 [blocks,
    slices, 2]; and all of it as bytes, there and on the host."""

    status: list[torch.Tensor]
    digests: list[torch.Tensor]
    there: tuple[torch.Tensor, torch.Tensor]
    here: tuple[torch.Tensor, torch.Tensor]

    def regions(self, layers: int, frames: range) -> list[Region]:
        """Of some of the blocks, for one run of layers."""
        parts = self.status[layers], self.digests[layers]
        return [region(part[frames.start : frames.stop]) for part in parts]

    def bring(self, stream: Stream) -> None:
        """Copy them to the host, in that stream's order."""
        stream.copy(rows_of(self.here, self.there))


class Tables:
    """Of one transfer, or of several that are put in together."""

    def __init__(self, device: Device, memory: TableMemory, shape: TableShape) -> None:
        """Raises RuntimeError if there is no memory."""
        self._device = device
        self._shape = shape
        self._table_at = _aligned(8 * shape.addresses)
        self._status_at = self._table_at + _aligned(8 * shape.rows * shape.pages)
        self._digests_at = self._status_at + _aligned(4 * shape.rows * len(shape.slices))
        self._row_bytes = DIGEST_BYTES * sum(shape.slices)
        self._memory = memory.take(self._digests_at + self._row_bytes * shape.rows)
        self._pool = memory
        self._uploaded: Event | None = None
        self.addresses = self._memory.device[: 8 * shape.addresses].view(torch.int64)
        stop = self._table_at + 8 * shape.rows * shape.pages
        self.table = self._memory.device[self._table_at : stop].view(torch.int64).view(shape.rows, shape.pages)

    def upload(self, addresses: np.ndarray[Any, Any], table: np.ndarray[Any, Any], stream: Stream) -> Event:
        """addresses: int64 [addresses]; table: int64 [rows, pages]. In that stream's order."""
        told = np.zeros(self._digests_at, np.uint8)
        told[: addresses.nbytes] = addresses.view(np.uint8)
        told[self._table_at : self._table_at + table.nbytes] = table.reshape(-1).view(np.uint8)
        there, here = (memory[: self._digests_at] for memory in self._memory)
        self._device.host.copy(rows_of([here], [torch.from_numpy(told)]))
        stream.copy(rows_of([there], [here]))
        self._uploaded = stream.record()
        return self._uploaded

    def regions(self) -> list[Region]:
        """What every launch reads."""
        return [region(self._memory.device[: self._status_at])]

    def findings(self, blocks: range) -> Findings:
        """Where these blocks' are."""
        count, runs = len(blocks), len(self._shape.slices)
        at = self._status_at + 4 * runs * blocks.start
        status = slice(at, at + 4 * runs * count)
        start = self._digests_at + self._row_bytes * blocks.start
        digests = slice(start, start + self._row_bytes * count)
        pieces = []
        for slices in self._shape.slices:
            stop = start + DIGEST_BYTES * slices * count
            pieces.append(self._memory.device[start:stop].view(torch.int64).view(count, slices, 2))
            start = stop
        there, here = [(memory[status], memory[digests]) for memory in self._memory]
        return Findings(list(there[0].view(torch.int32).view(runs, count)), pieces, there, here)

    def found(self, findings: Findings) -> tuple[list[int], bytes]:
        """On the host, once copied: of each block the status, and the digests of all its layer slices."""
        status, raw = [torch.empty_like(part) for part in findings.here]
        self._device.host.copy(rows_of([status, raw], findings.here))
        words, at, runs = raw.numpy().view(np.int64), 0, []
        for piece in findings.digests:
            runs.append(words[at : at + piece.numel()].reshape(piece.shape))
            at += piece.numel()
        of_runs = status.numpy().view(np.int32).reshape(len(runs), -1)
        return of_runs.max(0).tolist(), canonical(runs)

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
    return -(-size_bytes // _TABLE_ALIGN_BYTES) * _TABLE_ALIGN_BYTES


# What the copies of a device share ------------------------------------------------------------------------------------


class Workers(NamedTuple):
    """Threads: one that page-locks, and one that waits for the ends of each direction."""

    pins: Worker
    loads: Worker
    saves: Worker


class DeviceTransfers:
    """The route of one device, with threads and memory of its own. Any thread may call."""

    def __init__(self, device: Device, workers: Workers, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises RuntimeError where the device has no memory for it. segment_bytes: a multiple of 16."""
        assert segment_bytes % ALIGN_BYTES == 0, "rows of a segment are aligned"
        self.device = device
        self.segment_bytes = segment_bytes
        self.extents = PinnedExtents(device.host, workers.pins)
        self.loader = Loader(device, self.extents, workers.loads, segment_bytes)
        self.saver = Saver(device, self.extents, workers.saves, segment_bytes)
        self.tables = TableMemory(device)
        self.keys = digest_keys(device.memory(ALIGN_BYTES).device)
        self._workers = workers
        self._refused: set[str] = set()

    def raw_copy(
        self, planes: Sequence[Sequence[torch.Tensor]], table: Sequence[int], page_tokens: int, block_tokens: int
    ) -> BlockCopy | None:
        """Bit for bit; None where these pages are not for this route."""
        plain = partial(reference.ReferenceRawCopy, planes, table, page_tokens, block_tokens)
        numbers = sum([plane.shape[2] * plane.shape[3] for plane in planes[0]])
        slice_bytes = numbers * block_tokens * planes[0][0].element_size()
        return self._unless_refused(partial(DeviceCopy, self, planes, table, block_tokens, slice_bytes, None, plain))

    def int8_copy(
        self, form: SliceForm, planes: Sequence[Sequence[torch.Tensor]], table: Sequence[int], page_tokens: int
    ) -> BlockCopy | None:
        """planes: of the dtype that is quantized. None where these pages are not for this route."""
        plain = partial(int8_plain.PlainInt8Copy, form, planes, table, page_tokens)
        how = form.tokens, form.size_bytes, KC64
        return self._unless_refused(partial(DeviceCopy, self, planes, table, *how, plain))

    def close(self, timeout_s: float) -> bool:
        """Take no more transfers, finish those under way, and end the threads; returns whether that was in time."""
        workers = self._workers
        have_ended = [workers.loads.close(timeout_s), workers.saves.close(timeout_s), self.extents.close(timeout_s)]
        return workers.pins.close(timeout_s) and all(have_ended)

    def _unless_refused(self, copy: Callable[[], DeviceCopy]) -> DeviceCopy | None:
        try:
            return copy()
        except ValueError as error:
            if str(error) not in self._refused:
                self._refused.add(str(error))
                _log.warning(
                    "pages go block by block through plain torch, which is slow: %s (said once)",
                    " ".join(str(error).split()),
                )
            return None


def on_cuda(index: int) -> DeviceTransfers:
    """The transfers of a GPU. Raises RuntimeError if there is none, or no memory on it."""
    cpus = local_cpus(index)
    names = [f"kv-{name}-{index}" for name in Workers._fields]
    device = CudaDevice(index)
    return DeviceTransfers(device, Workers(*[Worker(name, cpus) for name in names]))
