"""The NVMe rows of `kvstore bench tiers`: how near the NVMe tier comes to fio.

It measures the user's own calls on a store from `kvstore.open`:

    promote   `lease` of a prompt that only NVMe has: read, checked by MAC, name and every digest, readable in DRAM
    get       the same, and the copy into pages, which is verified once more
    persist   `put` with durability="disk" of a prompt that only DRAM has: checked there, written, acknowledged

Each prompt fills one slab. The limits read the same slabs in turn, so that equal times pass between two reads of a
slab. Each turn asserts that DRAM had evicted what it reads. The tier is full: a persisted block evicts another. Pages
and the limits' file hold random bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, cycle
from pathlib import Path
from shutil import rmtree
from time import sleep

import numpy as np
import torch

import kvstore
from kvstore.bench.disk import (
    DEPTH,
    IN_MEMORY,
    Amount,
    DiskFrames,
    DiskLimit,
    Loop,
    disk_read_bytes,
    file_system,
    lay_out,
    working_fio,
)
from kvstore.bench.measure import Against, Cost, Stopwatch, Turn, against_each, available_bytes
from kvstore.bench.rig import (
    EXTENT_BYTES,
    HEAD_MAJOR,
    NO_PAGES,
    NVME,
    TARGETED_BYTES,
    BlockShape,
    PagePool,
    row_of,
)
from kvstore.bench.row import Row
from kvstore.block.account import HitTier
from kvstore.block.errors import BadInput
from kvstore.client.handle import Match
from kvstore.config import format_size
from tiering.frame import frame_bytes
from tiering.nvme.slab_files import DirectFiles, disk_room
from tiering.slab_header import PAGE_BYTES

TARGETS = {"promote": 0.92, "persist": 0.88}
"""Share of fio's rate with direct I/O, frames of the same size and the same depth."""

PROMPTS = 5
"""On disk at a time."""
DRAM_PROMPTS = 2
"""Room in DRAM; it never holds more than one."""
LIMIT_TURNS = 2
"""In the file that the limit writes to."""
DEADLINE_MS = 60_000

WORDS = (
    "promote: a lease of blocks that only NVMe has, each frame checked by MAC, name and all digests; get: the same and "
    "the verified copy into pages. persist: put(durability='disk') of blocks that DRAM has: checked and written, group "
    "by group, into a full tier, so that each evicts one. Both limits move as many frames of the same size, "
    f"{DEPTH} at a time: they read the store's own slabs and write to a file beside them. They check nothing, evict "
    "nothing, keep no index and sync once, at the end of a turn; the store syncs slabs and index several times for "
    "every group. fio brings its own memory; loop is threads of preadv and pwritev on the very memory that the store "
    "uses, which decides how fast some disks are."
)


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """shapes: of the frames. turn_bytes: payload of a prompt, moved per turn. laps: turns of each.

    data: directory to measure in, made if missing; None for a temporary one. fio: the program, or None.
    """

    shapes: tuple[BlockShape, ...] = (BlockShape(8, 64), BlockShape(32, 64))
    turn_bytes: int = 192 << 20
    laps: int = 5
    data: str | None = None
    fio: str | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk and its limits.

    direct: direct I/O was used. limits: each one's commands, by payload and direction. fio: its version; if empty,
    why_not_fio says why. delivered_bytes: payload that cold turns delivered; read_bytes: bytes that disks delivered
    meanwhile, None if the kernel does not say.
    """

    file_system: str
    direct: bool
    depth: int
    limits: dict[str, dict[str, dict[str, str]]]
    fio: str
    why_not_fio: str
    delivered_bytes: int
    read_bytes: int | None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def describe(self) -> str:
        """For people, in one paragraph."""
        how = "direct I/O"
        if not self.direct:
            how = "buffered: it takes no direct I/O, so the page cache serves both sides, and no target is judged"
        elif self.file_system in IN_MEMORY:
            how = "in memory: there is no disk below, and no target is judged"
        fio = f"fio: {self.fio}, " + "; ".join(next(iter(self.limits["fio"].values())).values()) if self.fio else ""
        gave = "the kernel does not say what disks gave"
        if self.read_bytes is not None:
            gave = f"disks gave {format_size(self.read_bytes)} for them"
        return (
            f"nvme: {self.file_system}, {how}. {fio or self.why_not_fio}. Cold turns delivered "
            f"{format_size(self.delivered_bytes)}; {gave}."
        )


def check_directory(options: NvmeOptions) -> None:
    """Raises `BadInput` if the disk is missing or has no room."""
    if options.data is not None and not Path(options.data).is_dir():
        raise BadInput(f"{options.data} is not a directory; give one on the disk that is to be measured")
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.data) as scratch:
            _check_room(options, Path(scratch))
    except OSError as error:
        raise BadInput(f"{options.data} cannot be used: {error.strerror}; give another directory") from None


def run(options: NvmeOptions, say: Callable[[str], None]) -> tuple[list[Row], Disk]:
    """Measure every shape. Raises `BadInput` where there is too little memory or disk to measure in."""
    check_directory(options)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.data) as scratch:
        _check_room(options, Path(scratch))
        measured = [_Measured(shape, options, Path(scratch), say) for shape in options.shapes]
    first = measured[0]
    reads = [one.read_bytes for one in measured if one.read_bytes is not None]
    disk = Disk(
        first.file_system,
        first.direct,
        DEPTH,
        {
            limit.name: {format_size(one.payload_bytes): one.limits[limit.name].commands for one in measured}
            for limit in first.limits.values()
        },
        first.limits["fio"].version if "fio" in first.limits else "",
        first.why_not_fio,
        sum(one.delivered_bytes for one in measured),
        sum(reads) if reads else None,
    )
    return [row for one in measured for row in one.rows], disk


class _Measured:
    """One shape in a directory: its rows and their conditions."""

    def __init__(self, shape: BlockShape, options: NvmeOptions, scratch: Path, say: Callable[[str], None]) -> None:
        subject = f"{format_size(shape.payload_bytes)} frames on NVMe"
        say(f"{subject}: filling the disk")
        files = DirectFiles(scratch / "probe")
        files.close()
        self.direct = files.direct
        self.file_system = file_system(scratch)
        self.payload_bytes = shape.payload_bytes
        blocks = _blocks(shape, options)
        amount = Amount(frame_bytes(shape.payload_bytes), blocks, files.direct)
        regions = lay_out(scratch / "limit", amount, LIMIT_TURNS)
        side = NvmeSide(shape, blocks, scratch / "store")
        fio, self.why_not_fio = working_fio(options.fio, amount, side.next_slab())
        loop = Loop(amount, side.dram_frames)
        self.limits: dict[str, DiskLimit] = {limit.name: limit for limit in (fio, loop) if limit is not None}
        self._pause = lambda: fio.pause_seconds if fio is not None else 0.0
        try:
            say(f"{subject}: cold lease and get")
            found = against_each(
                {name: self._read(limit, side) for name, limit in self.limits.items()},
                {"promote": self._rested(side.promote), "get": self._rested(side.get)},
                options.laps,
                warm_up_laps=0,  # filling has written every slot and touched every page of DRAM
            )
            say(f"{subject}: durable put")
            found |= against_each(
                {name: self._write(limit, cycle(regions)) for name, limit in self.limits.items()},
                {"persist": self._rested(side.persist)},
                options.laps,
                warm_up_laps=0,
            )
            side.check()
        finally:
            loop.close()
            side.store.close()
            rmtree(scratch / "store")
            (scratch / "limit").unlink()
        self.delivered_bytes, self.read_bytes = side.cold_blocks * shape.payload_bytes, side.read_bytes
        self.rows = [
            self._row(path, limit, shape, blocks, one) for path, by in found.items() for limit, one in by.items()
        ]

    def _read(self, limit: DiskLimit, side: NvmeSide) -> Turn:
        turn = partial(_on_next, limit.read, side.next_slab)
        return turn if limit.starts_late else self._rested(turn)

    def _write(self, limit: DiskLimit, regions: Iterator[DiskFrames]) -> Turn:
        turn = partial(_on_next, limit.write, regions.__next__)
        return turn if limit.starts_late else self._rested(turn)

    def _rested(self, turn: Turn) -> Turn:
        """The same turn after an idle time as long as fio's."""

        def rested() -> Cost:
            sleep(self._pause())
            return turn()

        return rested

    def _row(self, path: str, limit: str, shape: BlockShape, blocks: int, found: Against) -> Row:
        is_targeted = self.direct and self.file_system not in IN_MEMORY and shape.payload_bytes >= TARGETED_BYTES
        return row_of(
            found,
            shape,
            blocks,
            tier=NVME,
            path=path,
            page_order=HEAD_MAJOR if path == "get" else NO_PAGES,
            verified=True,
            threads=1,
            limit=limit,
            target=TARGETS.get(path) if is_targeted else None,
        )


class NvmeSide:
    """A store with prompts on disk, DRAM for fewer, and a handle."""

    def __init__(self, shape: BlockShape, blocks: int, directory: Path) -> None:
        """blocks: of a prompt."""
        size = frame_bytes(shape.payload_bytes)
        slots = DRAM_PROMPTS * blocks
        extent = size * max(1, min(blocks, EXTENT_BYTES // size))
        slab = blocks * size + 2 * PAGE_BYTES
        self.store = kvstore.embedded(
            str(directory),
            dram=-(-slots * size // extent) * extent,
            extent=extent,
            nvme=PROMPTS * slab,
            slab=slab,
            scrub="off",
        )
        self._handle = self.store.namespace(model="0" * 40, layout=shape.layout)
        self._pool = PagePool(shape, blocks, 0, prompts=1)
        for planes in self._pool.planes.values():
            for plane in planes:
                plane.view(torch.int16).random_(-(1 << 15), 1 << 15)
        self._blocks = blocks
        self._tokens = blocks * shape.block_tokens
        self._numbers = count()
        self._turns = count()
        self.cold_blocks = 0
        self.read_bytes: int | None = 0
        self._stored = [self._persisted() for _ in range(PROMPTS)]
        slabs = sorted((directory / "nvme").glob("*.slab"))[1:]  # the first is the stamp
        assert len(slabs) == PROMPTS, slabs
        self._slabs = [DiskFrames(path, PAGE_BYTES) for path in slabs]

    def next_slab(self) -> DiskFrames:
        """The frames of the next prompt; takes its turn."""
        return self._slabs[next(self._turns) % PROMPTS]

    def promote(self) -> Cost:
        """Lease the next cold prompt; matching and releasing are not timed."""
        match = self._cold_match()
        with self._counted():
            watch = Stopwatch()
            lease = self._handle.lease(match, deadline_ms=DEADLINE_MS)
            cost = watch.cost()
        with lease:
            assert lease.blocks == self._blocks, f"{lease.blocks} of {self._blocks} blocks came up: {lease.reason}"
        return cost

    def get(self) -> Cost:
        """Lease the next cold prompt, and load it into pages."""
        match, pages = self._cold_match(), self._pool.take()
        with self._counted():
            watch = Stopwatch()
            with self._handle.lease(match, deadline_ms=DEADLINE_MS) as lease:
                loaded = self._handle.get(lease, pages)
            cost = watch.cost()
        assert loaded.tokens == self._tokens, f"{loaded.tokens} of {self._tokens} tokens loaded: {loaded.reason}"
        return cost

    def persist(self) -> Cost:
        """Make a prompt durable that only DRAM has; putting it is not timed."""
        prompt = self._in_dram_only()
        pages = self._pool.take()
        watch = Stopwatch()
        result = self._handle.put(prompt, pages, durability="disk")
        cost = watch.cost()
        assert (result.present, result.reason) == (self._blocks, None), result
        return cost

    def check(self) -> None:
        """Assert that nothing failed, and that every cold block was read from disk and checked."""
        self.store.check()
        counters = self.store.usage().counters
        assert not counters.get("quarantined_blocks") and not counters.get("reported_frames"), counters
        assert counters.get("promoted_blocks", 0) == self.cold_blocks, counters

    def _cold_match(self) -> Match:
        self._make_cold()
        match = self._handle.match(self._stored[next(self._turns) % PROMPTS])
        assert match.tiers == ((HitTier.NVME, self._blocks),), f"not cold: {match.tiers}"
        self.cold_blocks += self._blocks
        return match

    @contextmanager
    def dram_frames(self) -> Iterator[list[memoryview]]:
        """The DRAM slots that the next prompt would be read into: the same memory, without the store."""
        self._make_cold()
        store = self.store._store
        dram, slot_class = store.blocks.dram, store.blocks.spaces[self._handle.number].classes[0]
        with store.lock:
            places = dram.reserve(slot_class, self._blocks)
        assert len(places) == self._blocks, f"{len(places)} slots"
        try:
            yield [dram.reserved_span(place).view for place in places]
        finally:
            with store.lock:
                dram.abort(places)

    def _make_cold(self) -> None:
        """Evict everything from DRAM; it is on disk too."""
        self.store.evict(DRAM_PROMPTS * self._blocks)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Add up what disks deliver meanwhile."""
        before = disk_read_bytes()
        yield
        after = disk_read_bytes()
        if before is None or after is None:
            self.read_bytes = None
        elif self.read_bytes is not None:
            self.read_bytes += after - before

    def _in_dram_only(self) -> np.ndarray:
        """Put a new prompt, after emptying DRAM so that the store does not start writing by itself."""
        prompt = np.arange(self._tokens, dtype=np.uint32)
        prompt[0] = next(self._numbers)  # the first token is part of every key
        self._make_cold()
        result = self._handle.put(prompt, self._pool.take())
        assert result.stored == self._blocks, result
        assert self._handle.match(prompt).tiers == ((HitTier.DRAM, self._blocks),)
        return prompt

    def _persisted(self) -> np.ndarray:
        prompt = self._in_dram_only()
        result = self._handle.put(prompt, self._pool.take(), durability="disk")
        assert result.reason is None, result
        return prompt


def _check_room(options: NvmeOptions, directory: Path) -> None:
    largest = max(_blocks(shape, options) * frame_bytes(shape.payload_bytes) for shape in options.shapes)
    memory, disk = (DRAM_PROMPTS + 2) * largest, (PROMPTS + LIMIT_TURNS) * largest + (64 << 20)
    if memory > available_bytes() // 2:
        raise BadInput(
            f"the NVMe rows need {format_size(memory)} of memory and may take {format_size(available_bytes() // 2)}, "
            "half of what is available; free some, or measure with --only dram"
        )
    if disk > disk_room(directory):
        raise BadInput(
            f"the NVMe rows need {format_size(disk)} of disk and {directory.parent} has "
            f"{format_size(disk_room(directory))}; free some, give another directory with --data, or measure with "
            "--only dram"
        )


def _blocks(shape: BlockShape, options: NvmeOptions) -> int:
    """Of a prompt."""
    return max(1, options.turn_bytes // shape.payload_bytes)


def _on_next(turn: Callable[[DiskFrames], Cost], next_region: Callable[[], DiskFrames]) -> Cost:
    return turn(next_region())
