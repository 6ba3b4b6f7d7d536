"""`kvstore bench kernels`: what moves KV on and off a device, beside copies of the same run, and what decoding notices.

Written for one GPU. On a CPU the same code runs on small shapes, with plain torch in place of the kernels and a
synchronous device: that shows that it runs, and its figures mean nothing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import DynamicCache

from kv_bench.llamas import ONE_B, TINY, TTFT_SHAPES, build
from kv_bench.measure import Say, against, quantile, rate_row, timed
from kv_bench.on_device import CountingDevice, DeviceTimer, describe, device_named, give_memory_back, transfer_device
from kv_bench.rig import BlockShape
from kv_bench.script import one_of
from kv_kernels import gpu, plain, triton_digest, triton_pools
from kv_kernels.cuda import Direction, host_tensor
from kv_kernels.device_copy import SEGMENT_BYTES, DeviceTransfers, Moving
from kv_kernels.host import Paged
from kv_kernels.int8_form import KC64, SliceForm
from kv_kernels.pinned import PinnedExtents
from kv_kernels.plain import PoolTable
from kv_kernels.transfer import LayerSlice, PageMover, Transfer, layer_slices
from kvstore.block.codec import codec_named
from kvstore.block.pages import RAW, int8_form
from kvstore.config import format_size
from kvstore.traffic.row import MS, BenchResult, Row, Section, Target
from tiering.dram.extents import Extent
from tiering.frame import HEADER_BYTES, digest, frame_bytes
from tiering.tier import FrameSpan

CODECS = (RAW, KC64)
TRITON, TWINS = ROUTES = ("triton", "twins")
FAILURES: tuple[type[Exception], ...] = (RuntimeError, OSError, ValueError, triton_pools.triton.TritonError)
"""What work on a device can raise: by torch and CUDA (out of memory included), the system, triton."""
PLAN, KERNELS, WAYS, TRANSFERS, DECODE = STAGES = ("plan", "kernels", "ways", "transfers", "decode")
KERNEL_TARGETS = {"gather_quantize": 0.70, "dequantize_scatter": 0.70}
"""Share of the copy's byte rate, on a GPU, from `TARGETED_BYTES` of KV on."""
TRANSFER_TARGET = 0.90
"""Share of the plain copy's rate, on a GPU, from `TARGETED_BYTES` on the wire on."""
TARGETED_BYTES = 256 << 20
PLAN_SHAPE = BlockShape(32, 64, kv_heads=2)  # 512 such blocks are a GiB
MOST_SLOWDOWN = 1.05
"""Of the median step beside loads, on a GPU."""
LOAD, SAVE, BOTH = DIRECTIONS = ("load", "save", "both")
ALONE = "nothing"
UNDER_WAY = 2
"""Transfers in each direction beside steps."""
WAIT_SECONDS, CLOSE_SECONDS = 60.0, 10.0
LEFT_OUT = ("bytes moved", "gb per second", "copy gb per second", "limit gb per second", "steps", "step ms p50")
"""What other columns have as well."""


@dataclass(frozen=True, slots=True)
class KernelsOptions:
    """shape: of a block. kv_bytes: sizes of KV for the kernels. transfer_bytes: KV per load or save. segment_bytes: of
    a staging segment. laps: turns of each. route: triton or twins; None to choose by device. model: decodes `streams`
    streams behind `context_tokens`, in `decode_laps` laps of `steps` steps."""

    shape: BlockShape = field(default_factory=lambda: BlockShape(32, 64))
    page_tokens: int = 16
    kv_bytes: tuple[int, ...] = (256 << 20, 1 << 30)
    transfer_bytes: int = 1 << 30
    segment_bytes: int = SEGMENT_BYTES
    laps: int = 9
    route: str | None = None
    model: str = ONE_B
    streams: int = 8
    context_tokens: int = 2048
    decode_laps: int = 8
    steps: int = 50


SMALL = KernelsOptions(
    shape=BlockShape(2, 64, 2, 16),
    kv_bytes=(64 << 10,),
    transfer_bytes=64 << 10,
    segment_bytes=16 << 10,
    laps=2,
    model=TINY,
    context_tokens=64,
    decode_laps=2,
    steps=4,
)
"""Takes seconds on a CPU."""


def options_for(device: str | None, laps: int | None = None) -> KernelsOptions:
    """The device's default options, with what was given in their place. Raises `BadInput`."""
    usual = KernelsOptions() if device_named(device).type == "cuda" else SMALL
    return usual if laps is None else replace(usual, laps=laps)


class DeviceBench:
    """What the stages share. faults: what failed, one line each."""

    def __init__(self, options: KernelsOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.is_gpu = device.type == "cuda"
        self.route, self.timer = route_named(options.route, device), DeviceTimer(device)
        self.faults: list[str] = []


def run(options: KernelsOptions, say: Say, device: str | None = None, stages: Sequence[str] = ()) -> BenchResult:
    """Measure the given stages, or all. Raises `BadInput` for a missing device, or a size without a whole block."""
    chosen = device_named(device)
    for stage in stages:
        one_of("stage", stage, STAGES)
    bench, rows = DeviceBench(options, chosen), {stage: list[Row]() for stage in STAGES}
    measured = {PLAN: plan_rows, KERNELS: kernel_rows, WAYS: way_rows, TRANSFERS: transfer_rows, DECODE: decode_rows}
    for stage in STAGES:
        if stages and stage not in stages:
            continue
        try:
            give_memory_back(chosen)
            rows[stage].extend(measured[stage](bench, say))
        except FAILURES as error:  # the next stage is measured
            bench.faults.append(f"the stage {stage} ended early: {told(error)}")
    facts = describe(chosen)
    titles = {KERNELS: f"on {facts['name']}, kernels: {bench.route.name}", TRANSFERS: "loads and saves, over the wire"}
    titles[WAYS] = "blocks by a kernel that reaches into host memory, beside copies"
    titles |= {PLAN: "a load, without triton's launches", DECODE: f"steps of a random {options.model} Llama"}
    sections = [Section(rows[stage], titles[stage], name=stage, left_out=LEFT_OUT) for stage in STAGES]
    return BenchResult("kernels", options, sections, {"device": facts, "route": bench.route.name}, bench.faults)


# --- kernels, and an engine's paged pools ----------------------------------------------------------------------------


class Route(NamedTuple):
    """The kernels, called as those of `kv_kernels`."""

    name: str
    save: Callable[..., None]
    load: Callable[..., None]
    digest: Callable[..., None]


def route_named(given: str | None, device: torch.device) -> Route:
    """None: triton on a GPU, the twins on a CPU. Raises `BadInput` for another name."""
    name = given or (TRITON if device.type == "cuda" else TWINS)
    one_of("route", name, ROUTES)
    if name == TWINS:
        return Route(name, plain.save, plain.load, _digest)
    return Route(name, triton_pools.save, triton_pools.load, triton_digest.digest_slices)


def told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no more is known'}"


def _digest(payloads: torch.Tensor, slice_bytes: int, into: torch.Tensor, keys: torch.Tensor) -> None:
    for row, digests in zip(payloads.cpu().numpy(), into, strict=True):
        for number in range(into.shape[1]):
            high, low = struct.unpack(">qq", digest(row[number * slice_bytes : (number + 1) * slice_bytes]))
            digests[number, 0], digests[number, 1] = low, high


class PagedPool:
    """K and V of every layer, [pages, page_tokens, heads, width] in bfloat16, random.

    table: int64 [blocks, pages of a block], a permutation of all pages.
    """

    def __init__(self, shape: BlockShape, blocks: int, page_tokens: int, device: torch.device, seed: int) -> None:
        pages = blocks * shape.block_tokens // page_tokens
        generator = torch.Generator(device).manual_seed(seed)
        size = (pages, page_tokens, shape.kv_heads, shape.head_dim)
        self.planes = [
            [torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2)]
            for _ in range(shape.layers)
        ]
        self.pools = PoolTable.of(self.planes)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.table = order.view(blocks, -1).to(device)

    def is_saved(self, form: SliceForm | None, row: torch.Tensor) -> bool:
        """Whether a payload, uint8 [1, bytes], equals the twin's of the first block."""
        before, status = row.clone(), torch.zeros(1, dtype=torch.int64, device=row.device)
        plain.save(self.pools, form, self.table[:1], row, status)
        return torch.equal(before, row)

    def is_loaded(self, form: SliceForm | None, row: torch.Tensor) -> bool:
        def first_block() -> torch.Tensor:
            return torch.cat([plane[self.table[0]].view(torch.int16) for layer in self.planes for plane in layer])

        before = first_block()
        plain.load(self.pools, form, self.table[:1], row)
        return torch.equal(before, first_block())


def payload_bytes(shape: BlockShape, codec: str) -> int:
    return codec_named(codec).payload_bytes(*shape.layout.parts)


def form_of(shape: BlockShape, codec: str) -> SliceForm | None:
    return None if codec == RAW else int8_form(codec, *shape.layout.parts)


def are_digests(row: torch.Tensor, slice_bytes: int, found: torch.Tensor) -> bool:
    """Whether `found`, int64 [1, slices, 2], are the digests of a payload, uint8 [1, bytes]."""
    want = torch.zeros(found.shape, dtype=torch.int64)
    _digest(row, slice_bytes, want, want)
    return torch.equal(found.cpu(), want)


class Kernel(NamedTuple):
    """launch: one call. bytes_moved: per call. check: whether it wrote what the twin writes."""

    name: str
    launch: Callable[[], None]
    bytes_moved: int
    check: Callable[[], bool]


def kernel_rows(bench: DeviceBench, say: Say) -> Iterator[Row]:
    """One by one. A kernel that cannot be launched has no row and is a fault, one that does not write what its twin
    writes is a fault."""
    options, device, timer = bench.options, bench.device, bench.timer
    for size in options.kv_bytes:
        say(f"kernels on {format_size(size)} of KV")
        blocks = size // options.shape.payload_bytes
        kv_bytes = blocks * options.shape.payload_bytes
        pool, target = (PagedPool(options.shape, blocks, options.page_tokens, device, seed) for seed in (1, 2))
        source, copied = (torch.randint(0, 256, (kv_bytes,), dtype=torch.uint8, device=device) for _ in range(2))
        limit = timer.timed(partial(copied.copy_, source))
        for codec in CODECS:
            launched: dict[Kernel, bool] = {}
            for kernel in _kernels(options.shape, codec, pool, target, bench.route):
                name = f"{kernel.name} of {codec}"
                try:
                    kernel.launch()  # compiles
                    timer.wait()
                    launched[kernel] = kernel.check()
                except FAILURES as error:
                    bench.faults.append(f"{name} failed: {told(error)}")
                    continue
                if not launched[kernel]:
                    bench.faults.append(f"{name} did not write what its twin in plain torch writes")
            turns = {kernel: timer.timed(kernel.launch) for kernel in launched}
            for kernel, found in against(limit, turns, options.laps).items():
                is_targeted = bench.is_gpu and kv_bytes >= TARGETED_BYTES
                wanted = KERNEL_TARGETS.get(kernel.name) if is_targeted else None
                what, moved = {"kernel": kernel.name, "codec": codec, "kv_bytes": kv_bytes}, kernel.bytes_moved
                rates = {"bytes_moved": moved, "seconds": found.seconds, "gb_per_second": moved / found.seconds / 1e9}
                rates["copy_gb_per_second"] = 2 * kv_bytes / found.limit_seconds / 1e9
                is_late = sum(turns[kernel].is_late[-options.laps :]) * 2 > options.laps
                facts: dict[str, Any] = {"is_host_bound": is_late, "matches_twin": launched[kernel]}
                yield rate_row(what, found, moved, "copy", wanted, limit_bytes=2 * kv_bytes, **rates, **facts)


def _kernels(shape: BlockShape, codec: str, pool: PagedPool, target: PagedPool, route: Route) -> Iterator[Kernel]:
    table, blocks, device = pool.table, len(pool.table), pool.table.device
    size, form = payload_bytes(shape, codec), form_of(shape, codec)
    payloads = torch.zeros(blocks, frame_bytes(size), dtype=torch.uint8, device=device)[:, HEADER_BYTES:]
    raw, small = blocks * shape.payload_bytes, blocks * size
    status = torch.zeros(blocks, dtype=torch.int64, device=device)
    names = ("gather", "scatter") if codec == RAW else ("gather_quantize", "dequantize_scatter")
    save = partial(route.save, pool.pools, form, table, payloads, status)
    yield Kernel(names[0], save, raw + small, lambda: pool.is_saved(form, payloads[:1]))
    load = partial(route.load, target.pools, form, target.table, payloads)
    yield Kernel(names[1], load, raw + small, lambda: target.is_loaded(form, payloads[:1]))
    keys, slice_bytes = triton_digest.digest_keys(device), size // shape.layers
    into = torch.zeros(blocks, shape.layers, 2, dtype=torch.int64, device=device)
    digests = partial(route.digest, payloads, slice_bytes, into, keys)
    right = partial(are_digests, payloads[:1], slice_bytes, into[:1])
    yield Kernel("digest_slices", digests, small + into.nbytes, right)


# --- plan ------------------------------------------------------------------------------------------------------------


def plan_rows(bench: DeviceBench, say: Say) -> Iterator[Row]:
    """Loads of 1 and 4 GiB in whole blocks, and of 1 GiB layer by layer, put into streams that do nothing and count."""
    say("plans")
    for codec in CODECS:
        for load, blocks, layers_at_once in (("whole", 512, 0), ("whole", 2048, 0), ("by layers", 512, 1)):
            seconds, calls = _planned(codec, blocks, bench.options, layers_at_once)
            found, ends = 1e6 * median(seconds), (1e6 * min(seconds), 1e6 * max(seconds))
            target = Target(200, is_least=False, of="value") if (blocks, layers_at_once) == (512, 0) else None
            what = {"load": load, "codec": codec, "blocks": blocks}
            details = {"calls": calls, "ns_a_piece": 1e3 * found / blocks / PLAN_SHAPE.layers}
            yield Row(what, found, "us", len(seconds), *ends, target=target, details=details)


def _planned(codec: str, blocks: int, options: KernelsOptions, layers_at_once: int) -> tuple[list[float], int]:
    """Seconds of each load until all of it is in the streams, and the calls of one. layers_at_once: 0 for all."""
    shape, device, page_tokens = PLAN_SHAPE, CountingDevice(), options.page_tokens
    size, pages = frame_bytes(payload_bytes(shape, codec)), blocks * shape.block_tokens // page_tokens
    ways = DeviceTransfers(cast(Any, device))
    plane = torch.empty(pages, page_tokens, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16)
    paged = Paged([[plane, plane]] * shape.layers, range(pages), page_tokens, shape.block_tokens)
    copy: Any = ways.bind(form_of(shape, codec), paged)
    if layers_at_once:
        copy.layers = layer_slices(shape.layers, copy.slice_bytes, layers_at_once)
    order = np.random.default_rng(1).permutation(blocks)
    extent = torch.empty(blocks * size, dtype=torch.uint8)  # never touched
    ways.extents.adopt(extent.data_ptr(), len(extent), lambda leave: None, writable=True)
    spans = [FrameSpan(at, memoryview(b"")) for at in (extent.data_ptr() + size * order + HEADER_BYTES).tolist()]
    tokens, seconds, calls = (shape.block_tokens * order).tolist(), list[float](), 0
    ways.extents.run()
    ways.extents.wait(copy.addresses_of(spans), 1)
    for _ in range(25 * options.laps):
        start, calls = perf_counter(), device.calls
        with Moving(copy, copy.page_table(tokens, 0), copy.addresses_of(spans), Direction.LOAD) as moving:
            assert moving.start()
            seconds.append(perf_counter() - start)
            moving.found(0)
        calls = device.calls - calls
    assert ways.close(CLOSE_SECONDS)
    return seconds, calls


# --- both ways -------------------------------------------------------------------------------------------------------


def way_rows(bench: DeviceBench, say: Say) -> Iterator[Row]:
    """Of each direction, codec and size what an engine decides by; on a CPU where triton's interpreter is on."""
    if not (bench.is_gpu or os.environ.get("TRITON_INTERPRET") == "1"):
        return
    say("both ways")
    ways = DeviceTransfers(transfer_device(bench.device), bench.options.segment_bytes)
    ways.extents.run()
    ways.programs = ways.programs if bench.is_gpu else 2
    sizes: Any = {} if bench.is_gpu else {"kv_bytes": 1 << 13, "heads": 1, "width": 8, "layers": (1,)}
    found = list(gpu.measured(ways, **sizes))
    ways.close(CLOSE_SECONDS)
    for one in found:
        reached, copied = one.reached_gb_per_second, one.copied_gb_per_second
        what = {"direction": one.direction, "codec": one.codec, "payload_bytes": one.payload_bytes}
        if not reached:
            bench.faults.append(f"{one.direction} of {one.codec}: a kernel moved other bytes, or could not be tried")
        yield Row(what, reached, "GB/s", gpu.LAPS, None, None, "copies", copied, reached / copied)


# --- transfers -------------------------------------------------------------------------------------------------------


class PagedTransfer(Transfer):
    """All blocks of a pool, in one direction, by a route's kernels. Statuses stay on the device."""

    def __init__(self, transfers: Transfers, mover: PageMover, pools: dict[int, PoolTable], *tables: Any) -> None:
        """pools: of each slice, by its first layer. tables: page table and statuses."""
        super().__init__(mover, transfers.slots, transfers.slices)
        self._pools, (self._table, self._status) = pools, tables
        self._route, self._form = transfers.route, transfers.form

    def launch(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        rows = slice(frames.start, frames.stop)
        moved = self._pools[layers.first], self._form, self._table[rows], staged
        if self.mover.loads:
            self._route.load(*moved)
        else:
            self._route.save(*moved, self._status[rows])


class Transfers:
    """A pool, page-locked frames for all of its blocks, and transfers between them. To be closed."""

    def __init__(self, bench: DeviceBench, codec: str, layers_at_once: int) -> None:
        options, device, shape = bench.options, bench.device, bench.options.shape
        blocks, size = options.transfer_bytes // shape.payload_bytes, payload_bytes(shape, codec)
        self.form, self.kv_bytes, self.wire_bytes = form_of(shape, codec), blocks * shape.payload_bytes, blocks * size
        self.pool, self.target = (PagedPool(shape, blocks, options.page_tokens, device, seed) for seed in (1, 2))
        self.route, self._frame_bytes = bench.route, frame_bytes(size)
        there = transfer_device(device)
        self._extent = Extent(blocks * self._frame_bytes)
        memory, self.slots = self._extent.memory, self._extent.address + self._frame_bytes * np.arange(blocks)
        self._extents = PinnedExtents(there)
        self._extents.adopt(memory.address, memory.size_bytes, memory.before_unmap, writable=True)
        self._extents.run()
        self.are_pinned = self._extents.wait(self.slots, self._frame_bytes, WAIT_SECONDS)
        self.slices = layer_slices(shape.layers, size // shape.layers, layers_at_once, HEADER_BYTES)
        room = max(options.segment_bytes, *(part.size_bytes for part in self.slices))
        self._ways = {}
        for direction, pool in ((Direction.LOAD, self.target), (Direction.SAVE, self.pool)):
            pools = {part.first: PoolTable.of(pool.planes[part.first : part.stop]) for part in self.slices}
            mover = PageMover(there, direction, self._extents, -(-room // 256) * 256)
            status = torch.zeros(blocks, dtype=torch.int64, device=device)
            self._ways[direction.value] = mover, pools, pool.table, status

    def close(self) -> None:
        self._extents.close(CLOSE_SECONDS)
        self._extent.close()  # of its descriptor; the memory goes with its last view

    def start(self, direction: str) -> list[PagedTransfer]:
        """Start a load, a save, or one of each. Raises RuntimeError if the device has failed."""
        started = [PagedTransfer(self, *way) for one, way in self._ways.items() if direction in (one, BOTH)]
        if not all([transfer.start() for transfer in started]):
            raise RuntimeError(f"a {direction} was refused: the device has failed")
        return started

    def run(self, direction: str) -> list[PagedTransfer]:
        """Start and wait. Raises RuntimeError on failure."""
        return [finished(transfer) for transfer in self.start(direction)]

    def check(self) -> bool:
        payload = host_tensor(int(self.slots[0]) + HEADER_BYTES, self._frame_bytes - HEADER_BYTES).clone()
        row = payload.to(self.pool.table.device)[None]
        return self.target.is_loaded(self.form, row.clone()) and self.pool.is_saved(self.form, row)


def finished(transfer: PagedTransfer) -> PagedTransfer:
    """Wait for the end. Raises RuntimeError on failure."""
    if not transfer.wait():
        raise RuntimeError("a transfer failed") from transfer.error
    return transfer


class PlainCopy:
    """The limit: one copy of pinned host memory to the device, back, or both at once, on two streams."""

    def __init__(self, size_bytes: int, device: torch.device, timer: DeviceTimer) -> None:
        is_cuda = device.type == "cuda"
        self._host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_cuda).random_() for _ in range(2)]
        self._there = [torch.empty_like(host, device=device).copy_(host) for host in self._host]
        self._streams: list[Any] = [torch.cuda.Stream(device) if is_cuda else None for _ in range(2)]
        self._timer = timer

    def run(self, direction: str, size_bytes: int) -> None:
        pairs = ((LOAD, self._there[0], self._host[0]), (SAVE, self._host[1], self._there[1]))
        for (one, target, source), stream in zip(pairs, self._streams, strict=True):
            if direction in (one, BOTH):
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    target[:size_bytes].copy_(source[:size_bytes], non_blocking=True)
        self._timer.wait()


def transfer_rows(bench: DeviceBench, say: Say) -> Iterator[Row]:
    """One by one: raw and int8-kc64, whole frames and a few layers at a time, all directions. kv_bytes: of the pages,
    as numbers of 16 bits. is_direct: whether the extents were page-locked; else the driver copied them through its own
    memory. matches_twin: whether the first block is what the twins make of it, bit for bit."""
    options, layers = bench.options, bench.options.shape.layers
    say(f"transfers of {format_size(options.transfer_bytes)} of KV")
    limit = PlainCopy(options.transfer_bytes, bench.device, bench.timer)
    for codec in (RAW, KC64):
        for layers_at_once in dict.fromkeys((layers, max(1, layers // 8))):
            with closing(Transfers(bench, codec, layers_at_once)) as transfers:
                transfers.run(SAVE)  # so that loads find frames
                transfers.run(LOAD)
                is_direct = transfers.are_pinned
                bench.timer.wait()
                matches = transfers.check()
                wrong = [] if matches else ["did not move what its twin in plain torch moves"]
                wrong += [] if is_direct else ["was copied by the driver: its extents could not be page-locked"]
                for direction in DIRECTIONS:
                    bench.faults += [f"{direction} of {codec} {what}" for what in wrong]
                    plain = timed(partial(limit.run, direction, transfers.wire_bytes))
                    turn = timed(partial(transfers.run, direction))
                    found = against(plain, {direction: turn}, options.laps)[direction]
                    times = 2 if direction == BOTH else 1
                    wire, kv = times * transfers.wire_bytes, times * transfers.kv_bytes
                    is_targeted = bench.is_gpu and transfers.wire_bytes >= TARGETED_BYTES
                    target = TRANSFER_TARGET if is_targeted else None
                    what = {"direction": direction, "codec": codec, "layers_at_once": layers_at_once, "kv_bytes": kv}
                    rates = {"gb_per_second": wire / found.seconds / 1e9, "kv_gb_per_second": kv / found.seconds / 1e9}
                    rates |= {"seconds": found.seconds, "limit_gb_per_second": wire / found.limit_seconds / 1e9}
                    facts = {"wire_bytes": wire, "is_direct": is_direct, "matches_twin": matches}
                    yield rate_row(what, found, wire, "pinned copy", target, **rates, **facts)


# --- decode ----------------------------------------------------------------------------------------------------------


class BesideTransfers:
    """Keeps transfers in flight, in one direction or both; none if `direction` is `nothing`."""

    def __init__(self, transfers: Transfers, direction: str) -> None:
        self._transfers = transfers
        directions = {ALONE: (), BOTH: (LOAD, SAVE)}.get(direction, (direction,))
        self._under_way: dict[str, list[PagedTransfer]] = {direction: [] for direction in directions}
        self.finished = 0

    def keep_going(self, most: int = UNDER_WAY) -> None:
        for direction, under_way in self._under_way.items():
            for transfer in [one for one in under_way if not most or all(event.query() for _, event in one.ends)]:
                under_way.remove(finished(transfer))
                self.finished += 1
            while len(under_way) < most:
                under_way.extend(self._transfers.start(direction))


def decode_rows(bench: DeviceBench, say: Say) -> Iterator[Row]:
    """One for each kind of transfers, held against the steps beside nothing. Before each step the engine's thread
    starts new ones; that time counts as part of the step."""
    options, device = bench.options, bench.device
    count, context, steps = options.streams, options.context_tokens, options.steps
    say(f"{count} streams of a random {options.model} Llama")
    model = build(TTFT_SHAPES[options.model], device, context + steps)
    config, kept = model.config, {"dtype": model.dtype, "device": device}
    keys = torch.randn(count, config.num_key_value_heads, context, config.head_dim, **kept)

    def lap(beside: BesideTransfers) -> list[float]:
        cache, times = DynamicCache(), []
        for layer in range(config.num_hidden_layers):
            cache.update(keys, keys, layer)
        newest = torch.zeros(count, 1, dtype=torch.int64, device=device)
        for _ in range(steps):
            start = perf_counter()
            beside.keep_going()
            with torch.inference_mode():
                newest = model(input_ids=newest, past_key_values=cache, use_cache=True).logits.argmax(-1)
            newest.tolist()  # as an engine hands tokens out
            times.append(perf_counter() - start)
        return times

    names = (ALONE, *DIRECTIONS)
    times: dict[str, list[float]] = {name: [] for name in names}
    moved, spent = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    with closing(Transfers(bench, KC64, options.shape.layers)) as transfers:
        transfers.run(SAVE)  # so that what is loaded are frames
        lap(BesideTransfers(transfers, ALONE))
        for _ in range(options.decode_laps):
            for name in names:
                beside, start = BesideTransfers(transfers, name), perf_counter()
                times[name].extend(lap(beside))
                beside.keep_going(0)  # which waits for all
                spent[name] += perf_counter() - start
                moved[name] += beside.finished * transfers.wire_bytes
    alone_p50, alone_p99 = 1e3 * median(times[ALONE]), 1e3 * quantile(times[ALONE], 0.99)
    for name in names:
        p50, p99 = 1e3 * median(times[name]), 1e3 * quantile(times[name], 0.99)
        most = MOST_SLOWDOWN if bench.is_gpu and name == LOAD else None
        details: dict[str, Any] = {"steps": len(times[name]), "step_ms_p50": p50, "step_ms_p99": p99}
        details |= {"slowdown_p50": p50 / alone_p50, "slowdown_p99": p99 / alone_p99}
        details |= {"transfer_gb_per_second": moved[name] / spent[name] / 1e9, "most_slowdown": most}
        target = None if most is None else Target(most, is_least=False)
        beside_alone = ALONE, alone_p50, p50 / alone_p50, None, None, target
        what = {"beside": name, "streams": count, "context_tokens": context}
        yield Row(what, p50, MS, len(times[name]), None, None, *beside_alone, details)
