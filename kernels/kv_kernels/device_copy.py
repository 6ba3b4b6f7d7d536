"""Blocks between pages on a device and payloads in host memory, many at a time, by `transfer`.

    decode    digests of what is staged, then from there into the pages; the digests come back in one copy and are
              compared here
    encode    digests of what is staged, before it crosses to the host; blocks are yielded in order as they land

A payload is moved without its frame's header: neighbouring slots are then separate copies, which costs nothing if a
payload is larger than about 64 KiB, and a copy never writes a header. What all copies of one device share is made by
the store's codecs when pages there are first seen, never on import. Must never say that a block is good, or has landed,
before the host has waited for it; pages of a block that is not good hold garbage.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from math import gcd
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from kv_kernels import plain, triton_pools
from kv_kernels.compiled import IS_USABLE, compiled
from kv_kernels.copies import BlockCopy, Digest, Digests, Encoded, Flaw, Spans
from kv_kernels.cuda import CudaDevice, CudaStream, Direction, Rows
from kv_kernels.host import Paged, Planes
from kv_kernels.int8_form import ALIGN_BYTES, GROUP, Form
from kv_kernels.pinned import PinnedExtents
from kv_kernels.plain import PoolTable
from kv_kernels.transfer import LayerSlice, PageMover, Transfer, layer_slices
from kv_kernels.triton_digest import SHORTEST_BYTES, digest_keys, digest_slices
from kv_kernels.triton_pools import REACHING

SEGMENT_BYTES = 160 << 20
"""Of each stream; a GiB is seven of them, which take 23 calls. With segments of 32 MiB it takes the engine's thread two
to four times as long as with 128 (measured beside an H100)."""
LARGE_BYTES = 512 << 10
"""Payloads from here on are measured apart from smaller ones."""
SHORT_ROW = 128
"""Numbers: what a program moves at a time."""
DIGEST_BYTES = 16
_ALIGN_NUMBERS = 8

_address_of, _memory_of = attrgetter("address"), attrgetter("memory")
_log = logging.getLogger(__name__)


class DeviceCopy:
    """Bound to pages, as `copies.BlockCopy`. Holds their tensors for as long as it lives."""

    def __init__(self, ways: DeviceTransfers, form: Form, paged: Paged) -> None:
        """Raises ValueError with the reason where these pages are not for this route."""
        planes, table, page_tokens, block_tokens = paged
        self._other = partial(plain.PlainCopy, form, paged)
        self.slice_bytes = plain.slice_bytes(planes[0], block_tokens, form)
        if form is None and page_tokens == block_tokens:
            planes = _in_rows(planes)
        self.pools = PoolTable.of(planes, torch.empty(len(planes), len(planes[0]), dtype=torch.int64, device="meta"))
        if self.pools.dtype.itemsize not in triton_pools.INTEGERS:
            raise ValueError(f"numbers of {self.pools.dtype.itemsize} bytes")
        if self.slice_bytes % ALIGN_BYTES or (form is not None and block_tokens % GROUP):
            raise ValueError(f"blocks of {block_tokens} tokens, layer slices of {self.slice_bytes} bytes")
        if not SHORTEST_BYTES <= self.slice_bytes <= ways.segment_bytes:
            room = f"{SHORTEST_BYTES} to {ways.segment_bytes} are possible"
            raise ValueError(f"layer slices of {self.slice_bytes} bytes, where {room}")
        self.ways, self.form = ways, form
        self._table, self._page_tokens = np.array(table, np.int64), page_tokens
        self.addresses = np.array([[plane.data_ptr() for plane in layer] for layer in planes], np.int64)
        self._block_pages = block_tokens // page_tokens
        at_once = min(len(planes), ways.segment_bytes // self.slice_bytes)
        self.layers = layer_slices(len(planes), self.slice_bytes, at_once)
        self.blocks_at_once = max(1, ways.segment_bytes // (self.slice_bytes * len(planes)))

    def encode(self, tokens: Sequence[int], into: Spans, digest: Digest) -> Encoded:
        """As `BlockCopy.encode`. digest: XXH3-128, which the device takes by itself."""
        if not tokens:
            return
        with Moving(self, self.page_table(tokens, 0), self.addresses_of(into), Direction.SAVE) as moving:
            is_begun, size = self._begins(moving, into), DIGEST_BYTES * self.pools.layers
            for number in range(len(moving.ends)):
                statuses, digests = moving.found(number)
                for start, status in zip(range(0, len(digests), size), statuses, strict=True):
                    if status:
                        yield Flaw(status)
                        return
                    yield [digests[at : at + DIGEST_BYTES] for at in range(start, start + size, DIGEST_BYTES)]
        if not is_begun:
            yield from self._other().encode(tokens, into, digest)

    def decode(self, payloads: Spans, tokens: Sequence[int], skip: int, expected: Digests, digest: Digest) -> int:
        """As `BlockCopy.decode`. digest: XXH3-128, which the device takes by itself."""
        if not tokens:
            return 0
        with Moving(self, self.page_table(tokens, skip), self.addresses_of(payloads), Direction.LOAD) as moving:
            if self._begins(moving, payloads):
                wanted = b"".join(chain.from_iterable(expected))  # while the device is at work
                _, found = moving.found(0)
                if found == wanted:
                    return len(tokens)
                size = DIGEST_BYTES * self.pools.layers
                cuts = range(0, len(found), size)
                return next(
                    (at for at, cut in enumerate(cuts) if found[cut : cut + size] != wanted[cut : cut + size]), 0
                )
        return self._other().decode(payloads, tokens, skip, expected, digest)

    def addresses_of(self, payloads: Spans) -> Rows:
        """int64 [payloads]."""
        return np.fromiter(map(_address_of, payloads), np.int64, len(payloads))

    def _begins(self, moving: Moving, payloads: Spans) -> bool:
        """Start it. Memory of payloads that is new is page-locked soon, for the transfers after this one."""
        is_begun = moving.start()
        for memory in () if moving.is_known else set(map(_memory_of, payloads)):
            if memory is not None:
                place = memory.address, memory.size_bytes, memory.before_unmap
                self.ways.extents.adopt(*place, writable=memory.writable)
        return is_begun

    def page_table(self, tokens: Sequence[int], skip: int) -> Rows:
        """int64 [blocks, pages of a block], -1 for those that are left out."""
        rows = np.empty((len(tokens), self._block_pages), np.int64)
        is_inside = _pages_of(
            np.array(tokens, np.int64), self._page_tokens, skip // self._page_tokens, self._table, rows
        )
        assert is_inside and not skip % self._page_tokens, "the block is not inside the pages"
        return rows


@compiled
def _pages_of(tokens: Any, page_tokens: int, left_out: int, table: Any, rows: Any) -> bool:
    for block in range(len(tokens)):
        first = tokens[block] // page_tokens
        if tokens[block] % page_tokens or first + rows.shape[1] > len(table):
            return False
        for page in range(rows.shape[1]):
            if block == 0 and page < left_out:
                rows[block, page] = -1
            elif first + page < 0:
                return False
            else:
                rows[block, page] = table[first + page]
    return True


class Moving(Transfer):
    """Blocks on their way in one direction, and what their kernels are told and find. All has ended when the context
    ends.

        up      addresses of pools | page table | of payloads | status, zeroed     one copy, before the first launch
        down    status and digests of some blocks                                  one call, after their last launch

    All of it lies in one piece of the device's memory and in one of page-locked host memory, laid out alike: a launch
    has their addresses only.
    """

    def __init__(self, copy: DeviceCopy, rows: Rows, payloads: Rows, direction: Direction) -> None:
        """rows: the page table. payloads: addresses of the blocks' payloads, int64 [blocks]. Raises RuntimeError if
        there is no memory, or the device has failed."""
        blocks, pools = len(rows), copy.pools
        # What is saved is used segment by segment.
        at_once = blocks if direction is Direction.LOAD else copy.blocks_at_once
        super().__init__(copy.ways.movers[direction], payloads, copy.layers, at_once)
        self.copy, self.pages, self.payloads = copy, rows, payloads
        takes = copy.ways.reaches(direction, copy.form is not None, copy.slice_bytes * pools.layers)
        programs = copy.ways.programs
        have_work = min(blocks, at_once) * pools.layers >= programs
        have_work &= copy.slice_bytes * programs <= copy.ways.segment_bytes
        self.reaches = takes and have_work and not (payloads % ALIGN_BYTES).any()
        shapes = copy.addresses.shape, rows.shape, (blocks, 1), (blocks, len(copy.layers)), (blocks, 2 * pools.layers)
        starts = [0, *accumulate([-(-high * wide // _ALIGN_NUMBERS) * _ALIGN_NUMBERS for high, wide in shapes])]
        self._tables, self._host_tables = copy.ways.device.tables(8 * starts[5])
        self._places = self._tables.data_ptr(), self._host_tables.data_ptr()
        numbers = self._tables.view(torch.int64)
        addresses, self.table, self.places, self.status, digests = (
            numbers.as_strided(shape, (shape[1], 1), start) for start, shape in zip(starts[:5], shapes, strict=True)
        )
        self.digests = digests.view(blocks, pools.layers, 2)
        told = np.empty(starts[4], np.int64)
        told[: copy.addresses.size] = copy.addresses.reshape(-1)
        told[starts[1] : starts[1] + rows.size] = rows.reshape(-1)
        told[starts[2] : starts[2] + blocks] = payloads
        told[starts[3] :] = 0
        copy.ways.device.copy(np.array([[self._places[1]], [told.ctypes.data], [told.nbytes]]))
        cuts = [slice(part.first, part.stop) for part in copy.layers]
        self.pools = [pools._replace(planes=pools.planes[cut], addresses=addresses[cut]) for cut in cuts]
        self._told_bytes = told.nbytes
        self._found = [(8 * start, 8 * shape[1]) for start, shape in zip(starts[3:5], shapes[3:], strict=True)]

    def __enter__(self) -> Moving:
        return self

    def __exit__(self, *_: object) -> None:
        interrupt = None
        while self.is_held:
            try:
                self.wait()
            except KeyboardInterrupt as error:  # slots and pages are the caller's next
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def tell(self, stream: CudaStream) -> None:
        stream.copy(np.array([*self._places, self._told_bytes]).reshape(3, 1))

    def launch(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        copy, at, rows = self.copy, self.copy.layers.index(layers), slice(frames.start, frames.stop)
        how = self.pools[at], copy.form, self.table[rows], staged
        digests, status = self.digests[rows, layers.first : layers.stop], self.status[rows, at]
        reached = None
        if staged.dim() == 1:
            reached = triton_pools.Reached(self.places[rows], layers.offset_bytes, digests, copy.ways.keys)
        if not self.mover.loads:
            triton_pools.save(*how, status, reached)
        if reached is None:
            digest_slices(staged, copy.slice_bytes, digests, copy.ways.keys)
        if self.mover.loads:
            triton_pools.load(*how, reached)

    def bring(self, frames: range, stream: CudaStream) -> None:
        stream.copy(self._found_rows(frames))

    def found(self, number: int) -> tuple[list[int], bytes]:
        """Of each block of an end, once it is there: the status, and the digests of all its layer slices."""
        if not self.wait(number):
            raise RuntimeError("the device failed") from self.error
        blocks = self.ends[number][0]
        status = np.empty((len(blocks), len(self.copy.layers)), np.int64)
        digests = np.empty((len(blocks), self.copy.pools.layers, 2), np.int64)
        rows = self._found_rows(blocks)
        rows[:2] = [[status.ctypes.data, digests.ctypes.data], rows[0].tolist()]
        self.copy.ways.device.copy(rows)
        halves = digests[..., ::-1].astype(">i8")  # as frames have them: the high one first
        return status.max(1).tolist(), halves.tobytes()

    def _found_rows(self, blocks: range) -> Rows:
        """From the device's tables to the host's."""
        device_at, host_at = self._places
        rows = [(start + row_bytes * blocks.start, row_bytes * len(blocks)) for start, row_bytes in self._found]
        return np.array([(host_at + at, device_at + at, size) for at, size in rows], np.int64).T.copy()


def _in_rows(planes: Planes) -> Planes:
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


class DeviceTransfers:
    """The route of one device, with memory of its own. Any thread may call."""

    def __init__(self, device: CudaDevice, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises RuntimeError where the device has no memory for it. segment_bytes: a multiple of 16."""
        assert segment_bytes % ALIGN_BYTES == 0, "rows of a segment are aligned"
        self.device = device
        self.segment_bytes = segment_bytes
        self.extents = PinnedExtents(device)
        self.movers = {direction: PageMover(device, direction, self.extents, segment_bytes) for direction in Direction}
        self.keys = digest_keys(device.memory(ALIGN_BYTES).device)
        if not IS_USABLE:
            _log.warning(
                "loads and saves on a GPU are planned by Python, which is slow: install numba, or let it compile"
            )
        none = np.zeros(1, np.int64)
        self.extents.runs(none, 1), _pages_of(none, 1, 0, none, none[None])  # compiled now, not by the first load
        self.programs = REACHING  # with less to do for each, copies are faster
        self._reaching: dict[tuple[Direction, bool, bool], bool] = {}
        self._refused: set[str] = set()

    def take(self, direction: Direction, is_int8: bool, payload_bytes: int, *, reaches: bool) -> None:
        """From here on let kernels reach such payloads' slots themselves, or copies bring them, as at first."""
        self._reaching[direction, is_int8, payload_bytes >= LARGE_BYTES] = reaches

    def reaches(self, direction: Direction, is_int8: bool, payload_bytes: int) -> bool:
        return self._reaching.get((direction, is_int8, payload_bytes >= LARGE_BYTES), False)

    def bind(self, form: Form, paged: Paged) -> BlockCopy | None:
        """None where these pages are not for this route."""
        try:
            return DeviceCopy(self, form, paged)
        except ValueError as error:
            reason = " ".join(str(error).split())
        if reason not in self._refused:
            self._refused.add(reason)
            _log.warning("pages go block by block through plain torch, which is slow: %s (said once)", reason)
        return None

    def close(self, timeout_s: float) -> bool:
        """Begin no more transfers; returns whether those under way were over in time."""
        return self.extents.close(timeout_s)
