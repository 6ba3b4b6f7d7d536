"""Blocks between pages on a device and payloads in host memory, many at a time.

    decode    payloads > segments: digests of what is staged, then from there into the pages     the digests come back
              in one copy and are compared here; only then is anything called good
    encode    pages > segments: digests of what is staged, before it crosses to the host > payloads; yielded in order
              as they land

All segments are put into the streams at once; the calling thread waits without the interpreter lock. A payload is moved
without its frame's header: neighbouring slots are then separate copies, which costs nothing if a payload is larger than
about 64 KiB, and a copy never writes a header. Must never say that a block is good, or has landed, before the host has
waited for it; pages of a block that is not good hold garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_kernels import triton_int8, triton_raw
from kv_kernels.copies import BlockCopy, Digest, Encoded, Flaw
from kv_kernels.device import Device, Direction, Region, Stream
from kv_kernels.device_tables import DIGEST_BYTES, Findings, TableMemory, Tables, TableShape
from kv_kernels.int8 import GROUP
from kv_kernels.pinned import PinnedExtents
from kv_kernels.pools import RAW_BYTES, PoolTable
from kv_kernels.transfer import Loader, Saver
from kv_kernels.transfer_state import LayerSlice, Transfer, TransferOutcome, layer_slices
from kv_kernels.triton_digest import SHORTEST_BYTES, digest_slices

_Rows = np.ndarray[Any, Any]
SHORT_ROW = 128
"""Numbers: what a program moves at a time."""


class DeviceContext(NamedTuple):
    """What all copies of a device share. segment_bytes: of staging memory. keys: `triton_digest.digest_keys`."""

    device: Device
    loader: Loader
    saver: Saver
    extents: PinnedExtents
    tables: TableMemory
    segment_bytes: int
    keys: torch.Tensor


class DeviceCopy:
    """Bound to pages, as `copies.BlockCopy`. Holds their tensors for as long as it lives."""

    def __init__(
        self,
        ways: DeviceContext,
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
        with self._told(tokens, 0, Direction.SAVE) as (tables, rows, pools, started):
            savings: list[tuple[range, _Gather, Transfer]] = []
            for run in runs:
                kernel = _Gather(self._move_of(tables, rows, pools, run))
                addresses = [payload.address for payload in into[run.start : run.stop]]
                saving = self._ways.saver.save(addresses, self._layers, kernel, after)
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
        with self._told(tokens, skip, Direction.LOAD) as (tables, rows, pools, started):
            kernel = _Scatter(self._move_of(tables, rows, pools, range(len(tokens))))
            addresses = [payload.address for payload in payloads]
            loading = self._ways.loader.load(addresses, self._layers, kernel)
            if loading is not None:
                started.append(loading)
                _wait(loading)
                _, found = tables.found(kernel.move.findings)
                return _good(found, expected, self._block_digests_bytes)
        return self._plain().decode(payloads, tokens, skip, expected, digest)

    def _adopt(self, payloads: Sequence[Any]) -> None:
        """Have the payloads' memory page-locked soon; these blocks may still go through the bounce ring."""
        for memory in {id(payload.memory): payload.memory for payload in payloads}.values():
            if memory is not None:
                self._ways.extents.adopt(
                    memory.address, memory.size_bytes, memory.before_unmap, writable=memory.writable
                )

    @contextmanager
    def _told(
        self, tokens: Sequence[int], skip: int, direction: Direction
    ) -> Iterator[tuple[Tables, _Rows, list[PoolTable], list[Transfer]]]:
        """The uploaded tables, the page table on the host, the pools of each run of layers, and a list for the
        transfers started with them; these have ended when the context ends."""
        table = self._rows(tokens, skip)
        slices = tuple([part.stop - part.first for part in self._layers])
        shape = TableShape(len(self._addresses), len(table), self._block_pages, slices)
        tables = Tables(self._ways.device, self._ways.tables, shape)
        started: list[Transfer] = []
        try:
            tables.upload(self._addresses, table, self._ways.device.lanes(direction).kernels)
            addresses = tables.addresses.view(self._pools.layers, -1)
            yield tables, table, [self._pools.part(part.first, part.stop, addresses) for part in self._layers], started
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

    def findings(self) -> Iterable[Region]:
        return self.move.findings.regions()

    def end(self, kernels: Stream) -> None:
        self.move.findings.bring(kernels)


class _Gather(_Kernel):
    def _launch(self, staged: torch.Tensor, frames: range, at: int) -> None:
        move = self.move
        table = move.table[frames.start : frames.stop]
        if move.codec is None:
            triton_raw.gather(move.pools[at], table, staged)
        else:
            status = move.findings.status[frames.start : frames.stop]
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
