"""`kvstore bench tiers`: how near put and get of the DRAM tier come to memcpy, and the NVMe tier to fio.

It measures the user's own calls on a store in this process, and on `kvstore serve` in another one, beside one thread's
`memmove` of whole payloads. A put always stores new blocks into a full store, so every block stored evicts one.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from math import ceil
from time import sleep
from typing import Any, cast

import torch

from engine_adapter.chunks import ChunkOutcomes, ChunkRun, ChunkSpace, chunk_layout
from engine_adapter.paged.step_plan import NamespaceSpec
from kv_bench import nvme
from kv_bench.measure import Against, Say, Together, Turn, against, available_bytes, rate_row
from kv_bench.process import LOOK_SECONDS, Sidecar
from kv_bench.rig import MODEL, PROMPTS, BlockShape, PagePool, PromptTraffic
from kv_bench.script import enough, one_of
from kv_kernels.copies import Digest
from kvstore.block.account import MissReason
from kvstore.block.codec import RawCodec
from kvstore.block.errors import StoreError
from kvstore.block.identity import KeyRing, Namespace, TenantKeys
from kvstore.block.layout import Layout
from kvstore.client.handle import NamespaceHandle, OpenStore
from kvstore.client.sidecar_store import SidecarStore
from kvstore.config import MIN_DRAM_BYTES, MIN_EXTENT_BYTES, DramConfig, Limits, format_size
from kvstore.node import EmbeddedDoor, build_store
from kvstore.traffic.row import BenchResult, Row, Section
from tiering.dram.extents import Extent
from tiering.frame import DIGEST_BYTES, digest, frame_bytes

DRAM, DOOR, NVME = TIERS = ("dram", "door", "nvme")
HEAD_MAJOR, TOKEN_MAJOR = "[head, token, dim]", "[token, head, dim]"
HOST_POOL, BATCH_PAGES, BATCHES = "get, host pool", 128, 4
"""A path; pages moved per turn; number of such batches."""
OPEN_SECONDS = 30.0
BUFFERS = 5
"""Working sets: two stores, the pages, and the limit's source and target."""
ROOM = 1.3
"""Of the sidecar, in prompts: leases may not pin all of it. Pages and each of the limit's buffers have room for one."""
MEMORY_SHARE = 0.8
"""Share of the available memory that the rows of a sidecar may take."""

TARGETS = {
    **dict.fromkeys([(DRAM, "get", True, 1), (DRAM, "put", True, 1)], 0.70),
    **dict.fromkeys([(DRAM, "get", True, 2), (DRAM, "put", True, 2)], 0.85),
    **dict.fromkeys([(DOOR, path, True, 1) for path in ("get", "put", HOST_POOL)], 0.68),
    **dict.fromkeys([(DOOR, "put", False, 1), (DOOR, HOST_POOL, False, 1)], 0.88),
    **dict.fromkeys([(DRAM, "put", False, 1), (DOOR, "get", False, 1)], 0.90),
    (DRAM, "get", False, 1): 0.92,
}
"""(tier, path, with verification, threads): share of one thread's memcpy, for pages in the payload's own order."""
TARGETED_BYTES = {HEAD_MAJOR: 2 << 20, HOST_POOL: 1 << 20}
"""Targets hold from this payload size on, by the order of pages."""

LEFT_OUT = ("tier", "prompt tokens")


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """shapes: of the frames. prompt_tokens: of a prompt, moved per turn; fewer where memory is short. laps: turns."""

    shapes: tuple[BlockShape, ...] = (BlockShape(8, 64), BlockShape(32, 64))
    prompt_tokens: int = 32768
    laps: int = 16


@dataclass(frozen=True, slots=True)
class TiersOptions:
    """shapes: of the frames. page_tokens: of the token-major pages; the head-major ones hold a whole block.

    working_set_bytes: of each of two stores, the pages and the limit's two buffers; less if five times as much is not
    available. A quarter of it is one prompt, which a thread moves per turn. laps: turns of each. door, nvme: for their
    rows.
    """

    shapes: tuple[BlockShape, ...] = (BlockShape(8, 64), BlockShape(32, 64), BlockShape(32, 256))
    page_tokens: int = 16
    working_set_bytes: int = 1 << 30
    laps: int = 16
    threads: tuple[int, ...] = (1, 2)
    door: DoorOptions = field(default_factory=DoorOptions)
    host_pages: tuple[BlockShape, ...] = (BlockShape(4, 64), BlockShape(16, 64))
    nvme: nvme.NvmeOptions = field(default_factory=nvme.NvmeOptions)


def run(options: TiersOptions, say: Say, only: str | None = None) -> BenchResult:
    """Measure all rows, or those of `only` one tier. Raises `BadInput` where there is too little memory or disk."""
    one_of("only", only, TIERS)
    wanted = TIERS if only is None else (only,)
    if NVME in wanted:
        nvme.check_directory(options.nvme)  # before minutes are spent on other tiers
    sections = []
    if DRAM in wanted:
        smallest = BUFFERS * PROMPTS * max(shape.payload_bytes for shape in options.shapes)
        spare = enough("this bench", smallest, available_bytes() // 2)
        options = replace(options, working_set_bytes=min(options.working_set_bytes, spare // BUFFERS))
        rows = [row for shape in options.shapes for row in _dram(shape, options, say)]
        sections.append(Section(rows, "DRAM, in this process", left_out=LEFT_OUT))
    if DOOR in wanted:
        rows = [row for shape in options.door.shapes for row in _door(shape, options.door, say)]
        rows += [row for shape in options.host_pages for row in _host_pool(shape, options.door.laps, say)]
        sections.append(Section(rows, "DRAM, through a sidecar's socket", left_out=LEFT_OUT))
    about: dict[str, Any] = {"disk": None}
    if NVME in wanted:
        rows, about["disk"], words = nvme.run(options.nvme, say)
        sections.append(Section(rows, "NVMe", words, left_out=LEFT_OUT))
    return BenchResult("tiers", options, sections, about)


def no_digest(*_: object) -> bytes:
    return bytes(DIGEST_BYTES)


DIGESTS: dict[bool, Digest] = {True: digest, False: no_digest}
"""With verification, and without."""


def memcpy_row(
    tier: str, path: str, shape: BlockShape, blocks: int, order: str, found: Against, verified: bool, threads: int = 1
) -> Row:
    """One path at one frame size beside memcpy, in GB/s of payload, with its target where there is one. blocks: that
    one thread moves in one turn, which are the row's prompt_tokens."""
    is_targeted = shape.payload_bytes >= TARGETED_BYTES.get(order, 1 << 62)
    target = TARGETS.get((tier, path, verified, threads)) if is_targeted else None
    what = nvme.row_names(tier, path, shape, blocks, order, verified, threads)
    return rate_row(what, found, blocks * shape.payload_bytes, "memcpy", target, cpu_ratio=found.cpu_ratio)


class Memcpy:
    """The limit: one thread's `memmove` of whole payloads between an extent of shared memory and private memory."""

    def __init__(self, shape: BlockShape, blocks: int, prompts: int = PROMPTS) -> None:
        """blocks: of a prompt. prompts: in each of the two memories."""
        self._payload, self._next = shape.payload_bytes, count()
        self._turn_bytes = blocks * self._payload
        self._bytes = prompts * self._turn_bytes
        self._extent = Extent(self._bytes)
        self._private = torch.ones(self._bytes, dtype=torch.uint8)

    def get(self, _: int) -> None:
        self._move(self._private.data_ptr(), self._extent.address)

    def put(self, _: int) -> None:
        self._move(self._extent.address, self._private.data_ptr())

    def close(self) -> None:
        self._extent.close()

    def _move(self, target: int, source: int) -> None:
        first = next(self._next) * self._turn_bytes % self._bytes
        for at in range(first, first + self._turn_bytes, self._payload):
            ctypes.memmove(target + at, source + at, self._payload)


def turn_of(team: Together, work: Callable[[int], object], threads: int) -> Turn:
    pieces = [partial(work, thread) for thread in range(threads)]
    return lambda: team.run(pieces)


def _beside(limit: Callable[[int], object], work: Callable[[int], object], laps: int) -> Against:
    with Together(1) as alone:
        return against(turn_of(alone, limit, 1), {"": turn_of(alone, work, 1)}, laps)[""]


# --- a store in this process -----------------------------------------------------------------------------------------


class EmbeddedSide(PromptTraffic):
    """A store as `node` builds it, without a directory, filled to its last slot, with digests or without."""

    def __init__(self, shape: BlockShape, blocks: int, pool: PagePool, threads: int, digest: Digest) -> None:
        """blocks: of a prompt."""
        keys = TenantKeys.derive(secrets.token_bytes(32))
        size = frame_bytes(shape.payload_bytes)
        extent = size * max(1, nvme.EXTENT_BYTES // size)
        extents = -(-PROMPTS * blocks * size // extent)
        self.store = build_store(DramConfig(extents * extent, extent), Limits(), KeyRing([keys]))
        named = Namespace(MODEL, shape.layout, RawCodec.name), RawCodec(), digest
        handles = [NamespaceHandle(EmbeddedDoor(self.store, keys), *named) for _ in range(threads)]
        super().__init__(shape, blocks, pool, handles)
        while not self.store.usage().counters.get("evicted_blocks"):
            self.put(0)
        self.stock(PROMPTS)


def _dram(shape: BlockShape, options: TiersOptions, say: Say) -> list[Row]:
    blocks = max(1, options.working_set_bytes // (PROMPTS * shape.payload_bytes))
    rows = []
    for order, page_tokens in ((HEAD_MAJOR, 0), (TOKEN_MAJOR, options.page_tokens)):
        subject = f"{format_size(shape.payload_bytes)} frames, pages {order}"
        say(f"{subject}: filling memory")
        pool, most = PagePool(shape, blocks, page_tokens, PROMPTS), max(options.threads)
        sides = {checked: EmbeddedSide(shape, blocks, pool, most, taken) for checked, taken in DIGESTS.items()}
        limit = Memcpy(shape, blocks)
        with ExitStack() as stack:
            stack.callback(limit.close)
            for side in sides.values():
                stack.callback(side.store.close)
            for path, threads in product(("get", "put"), options.threads):
                say(f"{subject}: {path}, threads: {threads}")
                moved = getattr(limit, path)
                with Together(1) as alone, Together(threads) as team:
                    turns = {(path, side): turn_of(team, getattr(sides[side], path), threads) for side in sides}
                    if threads > 1:  # what memory gives to that many threads
                        turns["memcpy", False] = turn_of(team, moved, threads)
                    measured = against(turn_of(alone, moved, 1), turns, options.laps)
                for (what, verified), found in measured.items():
                    rows.append(memcpy_row(DRAM, what, shape, blocks, order, found, verified, threads))
            for side in sides.values():
                nvme.check(side.store)
    return rows


# --- a sidecar -------------------------------------------------------------------------------------------------------


class DoorSide(PromptTraffic):
    """A sidecar filled to its last slot, and a handle behind its socket, with digests or without."""

    def __init__(self, shape: BlockShape, blocks: int, client: SidecarStore, digest: Digest, pool: PagePool) -> None:
        """blocks: of a prompt. client: of a sidecar with memory as by `memory_of`."""
        namespace = Namespace(MODEL, shape.layout, RawCodec.name)
        handle = NamespaceHandle(client._door, namespace, RawCodec(), digest)
        super().__init__(shape, blocks, pool, [handle])
        dram, extent = memory_of(shape, blocks)
        slots = dram // extent * (extent // frame_bytes(shape.payload_bytes))
        first, *_ = (self.put(0) for _ in range(slots // blocks + 1))
        found = handle.match(first)
        assert found.blocks < blocks and found.reason is MissReason.EVICTED, f"not full: {found.reason}"
        self.stock(1)
        self.get(0)  # touches the mapped pages


def memory_of(shape: BlockShape, blocks: int) -> tuple[int, int]:
    size = frame_bytes(shape.payload_bytes)
    wanted = ceil(ROOM * blocks)
    frames = max(min(wanted, nvme.EXTENT_BYTES // size), -(-MIN_EXTENT_BYTES // size), 1)
    extent = frames * size
    return -(-max(wanted * size, MIN_DRAM_BYTES) // extent) * extent, extent


def _door(shape: BlockShape, options: DoorOptions, say: Say) -> list[Row]:
    subject = f"{format_size(shape.payload_bytes)} frames through the door"
    say(f"{subject}: filling memory")
    each = int((ROOM + 3) * frame_bytes(shape.payload_bytes))
    spare = enough("the rows of the door", each, int(MEMORY_SHARE * available_bytes()))
    blocks = min(options.prompt_tokens // shape.block_tokens, spare // each)
    pool, limit = PagePool(shape, blocks), Memcpy(shape, blocks, prompts=1)
    rows = []
    for verified, client in _sidecars(shape, blocks, f"{subject}: filling a sidecar", say):
        side = DoorSide(shape, blocks, client, DIGESTS[verified], pool)
        for path in ("get", "put"):
            say(f"{subject}: {path}, {'verified' if verified else 'without verification'}")
            found = _beside(getattr(limit, path), getattr(side, path), options.laps)
            rows.append(memcpy_row(DOOR, path, shape, blocks, HEAD_MAJOR, found, verified))
    limit.close()
    return rows


def _sidecars(shape: BlockShape, blocks: int, subject: str, say: Say) -> Iterator[tuple[bool, SidecarStore]]:
    """One after the other, whether its client is to verify, and that client."""
    dram, extent = memory_of(shape, blocks)
    for verified in DIGESTS:
        say(subject)
        with Sidecar({"dram": dram, "extent": extent, "nvme": "off"}) as sidecar, sidecar.client() as client:
            yield verified, client


class HostPool:
    """Pages of an engine's host pool, [K or V, page, bytes], and as many in a sidecar, with digests or without."""

    def __init__(self, shape: BlockShape, client: SidecarStore, digest: Digest) -> None:
        self._client, self._digest = client, digest
        pages, half = BATCHES * BATCH_PAGES, shape.payload_bytes // 2
        self._memory = torch.ones(2, pages, half, dtype=torch.uint8)
        runs = [ChunkRun(plane.data_ptr(), half, half) for plane in self._memory]
        layout = chunk_layout("kv", shape.block_tokens, [half, half])
        spec = NamespaceSpec(1, "", MODEL, layout, RawCodec.name, 0, {})
        store = cast(OpenStore, self)  # of which it has what is used here
        self._space = ChunkSpace(spec, runs, pages, (store, store), ChunkOutcomes())
        self._names = [b"%064x" % number for number in range(pages)]
        self._turns = count()
        held, _ = self._space.store([], self._names, self._space.pages(range(pages)), 1000 * OPEN_SECONDS)
        assert all(held), "a sidecar did not take them"
        for _ in range(int(OPEN_SECONDS / LOOK_SECONDS)):
            if self._space.handle is not None:
                return
            sleep(LOOK_SECONDS)
        raise StoreError(f"a namespace of the sidecar was not opened in {OPEN_SECONDS:.0f} s")

    def get(self, _: int) -> None:
        first = next(self._turns) % BATCHES * BATCH_PAGES
        names = self._names[first : first + BATCH_PAGES]
        loaded = self._space.load(names, self._space.pages(range(first, first + BATCH_PAGES)), 1000.0)
        assert loaded == BATCH_PAGES, f"{loaded} of {BATCH_PAGES} pages loaded"

    def namespace(self, *, model: str, layout: Layout, codec: str = "", **more: Any) -> NamespaceHandle:
        return NamespaceHandle(self._client._door, Namespace(model, layout, codec), RawCodec(), self._digest)

    def close(self) -> None:
        self._space.close()


def _host_pool(shape: BlockShape, laps: int, say: Say) -> list[Row]:
    limit, rows = Memcpy(shape, BATCH_PAGES, BATCHES), []
    subject = f"{format_size(shape.payload_bytes)} pages of a host pool"
    for verified, client in _sidecars(shape, BATCHES * BATCH_PAGES, subject, say):
        side = HostPool(shape, client, DIGESTS[verified])
        found = _beside(limit.get, side.get, laps)
        rows.append(memcpy_row(DOOR, HOST_POOL, shape, BATCH_PAGES, HOST_POOL, found, verified))
        side.close()
    limit.close()
    return rows
