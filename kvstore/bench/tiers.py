"""`kvstore bench tiers`: how near put and get of the DRAM tier come to memcpy, and the NVMe tier to fio.

The NVMe rows are in `nvme`, those through a sidecar in `rig`; here are those of DRAM in this process. It measures the
user's own calls: `put`, and `match`, `lease`, `get`, `release`, on the product's store and handle, prompt after prompt.
The reference is one thread's `memmove` of whole payloads between the same kinds of memory in the same direction, right
before and right after.

Stores, pages and the limit's buffers are each many times the last-level cache. A put always stores new blocks into a
full store, so every block stored evicts one: a cache's steady state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from time import sleep
from typing import Any

import torch

from engine_adapter.chunks.layout import ChunkRun, chunk_layout
from engine_adapter.chunks.space import ChunkOutcomes, ChunkSpace
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.bench import nvme
from kvstore.bench import rig as door
from kvstore.bench.measure import Progress, Together, against, available_bytes, teller
from kvstore.bench.nvme import WORDS
from kvstore.bench.rig import (
    DIGESTS,
    DOOR,
    DRAM,
    HEAD_MAJOR,
    NVME,
    PROMPTS,
    TIERS,
    TOKEN_MAJOR,
    BlockShape,
    Memcpy,
    PagePool,
    Side,
    memcpy_row,
    row_of,
    turn_of,
)
from kvstore.bench.row import BenchResult, Row, Section
from kvstore.bench.sidecar import LOOK_SECONDS, Sidecar
from kvstore.block.codec import RawCodec
from kvstore.block.errors import BadInput, StoreError
from kvstore.block.identity import Namespace
from kvstore.block.layout import Layout
from kvstore.block.pages import Digest
from kvstore.client.handle import NamespaceHandle
from kvstore.client.sidecar_store import SidecarStore
from kvstore.config import format_size

BUFFERS = 5
"""Working sets: two stores, the pages, and the limit's source and target."""

HOST_POOL, BATCH_PAGES, BATCHES = "get, host pool", 128, 4
"""A path; pages moved per turn; number of such batches."""
HOST_POOL_BYTES = 1 << 20
"""Targets hold from this page size on."""
HOST_POOL_TARGETS = {True: 0.68, False: 0.88}
"""By whether pages are verified."""
OPEN_SECONDS = 30.0

WITHOUT = (
    "without verification: put takes no xxh3_128 digests of the payload's layer slices and get compares none. The rest "
    "stays: prompts are hashed, put seals each header with its MAC, get compares each header's digest and its name."
)
RATIO = "ratio: to memcpy of whole payloads on one thread, median over samples, by wall time; cpu ratio: the same by"
DRAM_WORDS = f"{RATIO} processor time, summed over threads. {WITHOUT}"
DOOR_WORDS = (
    f"The sidecar is a process of its own. {RATIO} processor time, without the sidecar's. {HOST_POOL}: opaque pages of "
    f"an engine's host pool, K and V in one run each, {BATCH_PAGES} in a call, as SGLang's HiCache asks for them. "
    f"{WITHOUT}"
)
LEFT_OUT = {
    DRAM: ("tier", "prompt tokens"),
    DOOR: ("tier", "page order", "threads"),
    NVME: ("tier", "prompt tokens", "page order", "verified", "threads"),
}


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
    door: door.DoorOptions = field(default_factory=door.DoorOptions)
    host_pages: tuple[BlockShape, ...] = (BlockShape(4, 64), BlockShape(16, 64))
    nvme: nvme.NvmeOptions = field(default_factory=nvme.NvmeOptions)


def run(options: TiersOptions | None = None, progress: Progress = None, only: str | None = None) -> BenchResult:
    """Measure all rows, or those of `only` one tier. Raises `BadInput` where there is too little memory or disk."""
    options = options or TiersOptions()
    if only not in (None, *TIERS):
        raise BadInput(f"only={only!r}; allowed: {', '.join(TIERS)}, or leave it out for all")
    if only not in (None, NVME) and options.nvme.data is not None:
        raise BadInput(
            f"--data {options.nvme.data} names a disk, and --only {only} measures none; leave one of them out"
        )
    wanted = TIERS if only is None else (only,)
    if NVME in wanted:
        nvme.check_directory(options.nvme)  # before minutes are spent on other tiers
    say = teller(progress)
    sections = []
    if DRAM in wanted:
        options = _fitting(options)
        rows = _run_dram(options, say)
        sections.append(Section(rows, "DRAM, in this process", DRAM_WORDS, left_out=LEFT_OUT[DRAM]))
    if DOOR in wanted:
        rows = door.run(options.door, say)
        for shape in options.host_pages:
            rows += _measure_host_pool(shape, options.door.laps, say)
        sections.append(Section(rows, "DRAM, through a sidecar's socket", DOOR_WORDS, left_out=LEFT_OUT[DOOR]))
    about: dict[str, Any] = {"without_verification": WITHOUT, "disk": None}
    if NVME in wanted:
        rows, disk = nvme.run(options.nvme, say)
        about["disk"] = disk.to_dict()
        words = f"{disk.describe()}\nratio: to the limit of the same row, median over samples. {WORDS}"
        sections.append(Section(rows, "NVMe", words, left_out=LEFT_OUT[NVME]))
    return BenchResult("tiers", options, sections, about)


def _fitting(options: TiersOptions) -> TiersOptions:
    """With working sets of DRAM that fit into half of the memory. Raises `BadInput`."""
    smallest = BUFFERS * PROMPTS * max(shape.payload_bytes for shape in options.shapes)
    spare = available_bytes() // 2
    if spare < smallest:
        raise BadInput(
            f"this bench needs {format_size(smallest)} of memory and may take {format_size(spare)}, half of what is "
            "available; free some, or measure smaller frames"
        )
    return replace(options, working_set_bytes=min(options.working_set_bytes, spare // BUFFERS))


def _run_dram(options: TiersOptions, say: Callable[[str], None]) -> list[Row]:
    """Every shape in both orders of pages."""
    rows = []
    for shape in options.shapes:
        blocks = max(1, options.working_set_bytes // (PROMPTS * shape.payload_bytes))
        for order, page_tokens in ((HEAD_MAJOR, 0), (TOKEN_MAJOR, options.page_tokens)):
            rows += _measure(shape, blocks, order, page_tokens, options, say)
    return rows


def _measure(
    shape: BlockShape, blocks: int, order: str, page_tokens: int, options: TiersOptions, say: Callable[[str], None]
) -> list[Row]:
    subject = f"{format_size(shape.payload_bytes)} frames, pages {order}"
    say(f"{subject}: filling memory")
    pool = PagePool(shape, blocks, page_tokens)
    threads = max(options.threads)
    sides = {checked: Side(shape, blocks, pool, threads, taken) for checked, taken in DIGESTS.items()}
    limit = Memcpy(shape, blocks)
    rows = []
    try:
        for path in ("get", "put"):
            for threads in options.threads:
                say(f"{subject}: {path}, threads: {threads}")
                moved = getattr(limit, path)
                with Together(1) as alone, Together(threads) as team:
                    turns = {(path, side): turn_of(team, getattr(sides[side], path), threads) for side in sides}
                    if threads > 1:  # what memory gives to that many threads
                        turns["memcpy", False] = turn_of(team, moved, threads)
                    measured = against(turn_of(alone, moved, 1), turns, options.laps)
                for (what, verified), found in measured.items():
                    rows.append(memcpy_row(DRAM, what, shape, order, verified, threads, blocks, found))
        for side in sides.values():
            side.check()
    finally:
        limit.close()
        for side in sides.values():
            side.store.close()
    return rows


class HostPool:
    """Pages of an engine's host pool, [K or V, page, bytes], and as many in a sidecar, with digests or without."""

    def __init__(self, shape: BlockShape, client: SidecarStore, digest: Digest) -> None:
        self._client, self._digest = client, digest
        self.pages, half = BATCHES * BATCH_PAGES, shape.payload_bytes // 2
        self._memory = torch.ones(2, self.pages, half, dtype=torch.uint8)
        runs = [ChunkRun(plane.data_ptr(), half, half) for plane in self._memory]
        layout = chunk_layout("kv", shape.block_tokens, [half, half])
        spec = NamespaceSpec(1, "", "0" * 40, layout, RawCodec.name, 0, {})
        self._space = ChunkSpace(spec, runs, self.pages, (self, self), ChunkOutcomes())
        self._names = [b"%064x" % number for number in range(self.pages)]
        self._turns = count()
        held, _ = self._space.store([], self._names, self._space.pages(range(self.pages)), 1000 * OPEN_SECONDS)
        assert all(held), "a sidecar did not take them"
        for _ in range(int(OPEN_SECONDS / LOOK_SECONDS)):
            if self._space.handle is not None:
                return
            sleep(LOOK_SECONDS)
        raise StoreError(f"a namespace of the sidecar was not opened in {OPEN_SECONDS:.0f} s")

    def get(self, _: int) -> None:
        """Load the next batch."""
        first = next(self._turns) % BATCHES * BATCH_PAGES
        names = self._names[first : first + BATCH_PAGES]
        loaded = self._space.load(names, self._space.pages(range(first, first + BATCH_PAGES)), 1000.0)
        assert loaded == BATCH_PAGES, f"{loaded} of {BATCH_PAGES} pages loaded"

    def namespace(self, *, model: str, layout: Layout, codec: str = "", **more: Any) -> NamespaceHandle:
        """As a store's, with this side's digest."""
        return NamespaceHandle(self._client._door, Namespace(model, layout, codec), RawCodec(), self._digest)

    def close(self) -> None:
        self._space.close()


def _measure_host_pool(shape: BlockShape, laps: int, say: Callable[[str], None]) -> list[Row]:
    limit = Memcpy(shape, BATCH_PAGES, BATCHES)
    dram, extent = door.memory_of(shape, BATCHES * BATCH_PAGES)
    rows = []
    try:
        for verified, digest in DIGESTS.items():
            say(f"{format_size(shape.payload_bytes)} pages of a host pool, verified: {'yes' if verified else 'no'}")
            with Sidecar({"dram": dram, "extent": extent, "nvme": "off"}) as sidecar, sidecar.client() as client:
                side = HostPool(shape, client, digest)
                with Together(1) as alone:
                    turns = {HOST_POOL: turn_of(alone, side.get, 1)}
                    found = against(turn_of(alone, limit.get, 1), turns, laps)[HOST_POOL]
                target = HOST_POOL_TARGETS[verified] if shape.payload_bytes >= HOST_POOL_BYTES else None
                about = dict(tier=DOOR, path=HOST_POOL, page_order=HOST_POOL, limit="memcpy")
                rows.append(row_of(found, shape, BATCH_PAGES, **about, verified=verified, threads=1, target=target))
                side.close()
    finally:
        limit.close()
    return rows
