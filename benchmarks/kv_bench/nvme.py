"""The NVMe rows of `kvstore bench tiers`: a cold `lease`, a cold `get` and a durable `put` beside fio and a bare loop.

Each prompt fills one slab. The limits move whole frames, `DEPTH` at a time: they read the same slabs in turn with the
store, so that caches of the disk or its host help all alike, and write to an allocated file beside them. Each turn
asserts that DRAM had evicted what it reads. docs/limits-and-results.md says more.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from shutil import rmtree
from time import sleep
from typing import Any, NamedTuple

import numpy as np

import kvstore
from kv_bench.measure import Cost, Say, Stopwatch, Together, Turn, against_each, available_bytes, rate_row
from kv_bench.rig import MODEL, BlockShape, PagePool, prompt_of
from kv_bench.script import enough
from kvstore.block.account import HitTier
from kvstore.block.errors import BadInput, StoreError
from kvstore.client.handle import Match
from kvstore.config import format_size
from kvstore.node import MOVE_THREADS
from kvstore.traffic.row import Row
from tiering.frame import frame_bytes
from tiering.nvme.slab_files import DirectFiles, disk_room
from tiering.slab_header import PAGE_BYTES

TARGETS = {"promote": 0.92, "persist": 0.88}
"""Share of fio's rate with direct I/O, frames of the same size and the same depth."""
TARGETED_BYTES = 2 << 20
EXTENT_BYTES = 64 << 20
DEPTH = MOVE_THREADS
"""Frames in flight: as many as the store's threads move."""
PROMPTS = 5
"""On disk at a time."""
DRAM_PROMPTS = 2
"""Room in DRAM; it never holds more than one."""
LIMIT_TURNS = 2
"""In the file that the limit writes to."""
DEADLINE_MS = 60_000
LONGEST_SECONDS = 60.0
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


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


def row_names(
    tier: str, path: str, shape: BlockShape, blocks: int, order: str, verified: bool, threads: int
) -> dict[str, object]:
    names = {"tier": tier, "path": path, "payload_bytes": shape.payload_bytes}
    named = {"prompt_tokens": blocks * shape.block_tokens, "page_order": order}
    return {**names, **named, "verified": verified, "threads": threads}


def check(store: Any) -> dict[str, int]:
    store.check()
    counters: dict[str, int] = store.usage().counters
    assert not counters.get("quarantined_blocks") and not counters.get("reported_frames"), counters
    return counters


def check_directory(options: NvmeOptions) -> None:
    """Raises `BadInput` if the disk is missing or has no room, or there is too little memory."""
    if options.data is not None and not Path(options.data).is_dir():
        raise BadInput(f"{options.data} is not a directory; give one on the disk that is to be measured")
    largest = max(_blocks(shape, options) * frame_bytes(shape.payload_bytes) for shape in options.shapes)
    memory, disk = (DRAM_PROMPTS + 2) * largest, (PROMPTS + LIMIT_TURNS) * largest + (64 << 20)
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.data) as scratch:
            room = disk_room(Path(scratch))
    except OSError as error:
        raise BadInput(f"{options.data} cannot be used: {error.strerror}; give another directory") from None
    enough("a part on NVMe", memory, available_bytes() // 2)
    enough("a part on NVMe", disk, room, f"disk in {options.data or 'the folder of temporary files'}")


def run(options: NvmeOptions, say: Say) -> tuple[list[Row], dict[str, Any], str]:
    """Measure every shape: rows, facts about the disk and its limits, and the words for people. Raises `BadInput`."""
    check_directory(options)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.data) as scratch:
        measured = [_measured(shape, options, Path(scratch), say) for shape in options.shapes]
    disk = measured[0][1] | {"depth": DEPTH, "delivered_bytes": sum(one["delivered_bytes"] for _, one in measured)}
    how = "direct I/O" if disk["direct"] else "buffered, without targets"
    words = f"{disk['file_system']}, {how}. {disk['fio'] or disk['why_not_fio']}"
    return [row for rows, _ in measured for row in rows], disk, words


def _measured(shape: BlockShape, options: NvmeOptions, scratch: Path, say: Say) -> tuple[list[Row], dict[str, Any]]:
    subject = f"{format_size(shape.payload_bytes)} frames on NVMe"
    say(f"{subject}: filling the disk")
    files = DirectFiles(scratch / "probe")
    files.close()
    blocks, kind = _blocks(shape, options), file_system(scratch)
    amount = Amount(frame_bytes(shape.payload_bytes), blocks, files.direct)
    regions = cycle(lay_out(scratch / "limit", amount, LIMIT_TURNS))
    side = NvmeSide(shape, blocks, scratch / "store")
    fio, loop = Fio(options.fio, amount, side.next_slab()), Loop(amount, side.dram_frames)

    def rested(turn: Turn) -> Turn:
        """The same turn after an idle time as long as fio takes to start and to end."""

        def after_a_rest() -> Cost:
            sleep(fio.pause_seconds)
            return turn()

        return after_a_rest

    def around(direction: str, region: Callable[[], DiskFrames]) -> dict[str, Turn]:
        turns: dict[str, Turn] = {} if fio.why_not else {"fio": lambda: fio.move(direction, region())}
        return turns | {"loop": rested(lambda: loop.move(direction, region()))}

    try:
        # No lap warms up: filling has written every slot and touched every page of DRAM.
        say(f"{subject}: cold lease and get")
        cold = {"promote": rested(side.promote), "get": rested(side.get)}
        found = against_each(around("read", side.next_slab), cold, options.laps, warm_up_laps=0)
        say(f"{subject}: durable put")
        durable = {"persist": rested(side.persist)}
        found |= against_each(around("write", lambda: next(regions)), durable, options.laps, warm_up_laps=0)
        promoted = check(side.store).get("promoted_blocks", 0)
        assert promoted == side.cold_blocks, f"{promoted} of {side.cold_blocks} cold blocks were read from disk"
    finally:
        loop.close()
        side.store.close()
        rmtree(scratch / "store")
        (scratch / "limit").unlink()
    is_judged = files.direct and kind not in IN_MEMORY and shape.payload_bytes >= TARGETED_BYTES
    rows = []
    for path, beside in found.items():
        what = row_names("nvme", path, shape, blocks, "[head, token, dim]" if path == "get" else "", True, 1)
        target = TARGETS.get(path) if is_judged else None
        for limit, one in beside.items():
            rows.append(rate_row(what, one, blocks * shape.payload_bytes, limit, target, cpu_ratio=one.cpu_ratio))
    disk = {"file_system": kind, "direct": files.direct, "fio": fio.version, "why_not_fio": fio.why_not}
    return rows, disk | {"delivered_bytes": side.cold_blocks * shape.payload_bytes}


def _blocks(shape: BlockShape, options: NvmeOptions) -> int:
    return max(1, options.turn_bytes // shape.payload_bytes)


class NvmeSide:
    """A store with prompts on disk, DRAM for fewer, and a handle."""

    def __init__(self, shape: BlockShape, blocks: int, directory: Path) -> None:
        """blocks: of a prompt."""
        size = frame_bytes(shape.payload_bytes)
        extent = size * max(1, min(blocks, EXTENT_BYTES // size))
        dram, slab = -(-DRAM_PROMPTS * blocks * size // extent) * extent, blocks * size + 2 * PAGE_BYTES
        sizes: dict[str, Any] = {"dram": dram, "extent": extent, "nvme": PROMPTS * slab, "slab": slab}
        self.store = kvstore.embedded(str(directory), **sizes, scrub="off")
        self._handle = self.store.namespace(model=MODEL, layout=shape.layout)
        self._pool = PagePool(shape, blocks)
        self._pool.fill_randomly()
        self._blocks, self._tokens = blocks, blocks * shape.block_tokens
        self._numbers, self._turns = count(), count()
        self.cold_blocks = 0
        self._stored = [self._persisted()[0] for _ in range(PROMPTS)]
        slabs = sorted((directory / "nvme").glob("*.slab"))[1:]  # the first is the stamp
        assert len(slabs) == PROMPTS, slabs
        self._slabs = [DiskFrames(path, PAGE_BYTES) for path in slabs]

    def next_slab(self) -> DiskFrames:
        return self._slabs[next(self._turns) % PROMPTS]

    def promote(self) -> Cost:
        """Lease the next cold prompt; matching and releasing are not timed."""
        match = self._cold_match()
        watch = Stopwatch()
        lease = self._handle.lease(match, deadline_ms=DEADLINE_MS)
        cost = watch.cost()
        with lease:
            assert lease.blocks == self._blocks, f"{lease.blocks} of {self._blocks} blocks came up: {lease.reason}"
        return cost

    def get(self) -> Cost:
        match, pages = self._cold_match(), self._pool.take()
        watch = Stopwatch()
        with self._handle.lease(match, deadline_ms=DEADLINE_MS) as lease:
            loaded = self._handle.get(lease, pages)
        cost = watch.cost()
        assert loaded.tokens == self._tokens, f"{loaded.tokens} of {self._tokens} tokens loaded: {loaded.reason}"
        return cost

    def persist(self) -> Cost:
        """Make a prompt durable that only DRAM has; putting it is not timed."""
        return self._persisted()[1]

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

    def _cold_match(self) -> Match:
        self._make_cold()
        match = self._handle.match(self._stored[next(self._turns) % PROMPTS])
        assert match.tiers == ((HitTier.NVME, self._blocks),), f"not cold: {match.tiers}"
        self.cold_blocks += self._blocks
        return match

    def _make_cold(self) -> None:
        self.store.evict(DRAM_PROMPTS * self._blocks)

    def _persisted(self) -> tuple[np.ndarray, Cost]:
        prompt = prompt_of(next(self._numbers), self._tokens)
        self._make_cold()
        result = self._handle.put(prompt, self._pool.take())
        assert result.stored == self._blocks, result
        assert self._handle.match(prompt).tiers == ((HitTier.DRAM, self._blocks),)
        pages, watch = self._pool.take(), Stopwatch()
        result = self._handle.put(prompt, pages, durability="disk")
        cost = watch.cost()
        assert (result.present, result.reason) == (self._blocks, None), result
        return prompt, cost


# --- limits of the disk ----------------------------------------------------------------------------------------------


class DiskFrames(NamedTuple):
    """Consecutive frames of one turn."""

    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class Amount:
    """What one turn moves. direct: with direct I/O."""

    frame_bytes: int
    frames: int
    direct: bool

    @property
    def turn_bytes(self) -> int:
        return self.frame_bytes * self.frames


def lay_out(path: Path, amount: Amount, turns: int) -> list[DiskFrames]:
    """Make a file for so many turns and write every byte once; returns their regions."""
    size = amount.turn_bytes * turns
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        for at in range(0, size, 1 << 20):
            file.write(os.urandom(min(1 << 20, size - at)))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return [DiskFrames(path, at) for at in range(0, size, amount.turn_bytes)]


class Fio:
    """fio with one libaio job; only its own clock counts, without start and end. why_not: if it cannot be the limit.
    pause_seconds: what its last turn took besides that clock."""

    def __init__(self, program: str | None, amount: Amount, probe: DiskFrames) -> None:
        self.version, self.why_not, self.pause_seconds = "", "", 0.0
        sizes = f"--bs={amount.frame_bytes} --size={amount.turn_bytes} --direct={int(amount.direct)}"
        how = [*sizes.split(), "--ioengine=libaio", f"--iodepth={DEPTH}", "--thread", "--eta=never"]
        self._command = [program or "", "--name=limit", *how, "--output-format=json", "--allow_file_create=0"]
        self._amount = amount
        if program is None:
            self.why_not = "fio is not installed"
            return
        try:
            self.move("read", probe)
        except StoreError as error:
            self.why_not = str(error)

    def move(self, direction: str, region: DiskFrames) -> Cost:
        """Sequential reads, or writes and then one sync. Raises `StoreError` with what fio says."""
        path = str(region.path.absolute()).replace(":", r"\:")  # fio ends a name at a colon
        how = ["--rw=read", "--readonly"] if direction == "read" else ["--rw=write", "--end_fsync=1"]
        command = [*self._command, *how, f"--filename={path}", f"--offset={region.offset}"]
        watch = Stopwatch()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StoreError(f"fio failed: {error}") from None
        took = watch.cost().wall
        try:
            said = json.loads(done.stdout[done.stdout.index("{") :])  # notes may come before it
            job = said["jobs"][0]
            moved, seconds = job[direction]["io_bytes"], max(1, job[direction]["runtime"]) / 1e3
            cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
        except (ValueError, KeyError, IndexError, TypeError):
            line = (done.stderr or done.stdout).strip().splitlines()[:1]
            raise StoreError(f"fio failed: status {done.returncode}: {''.join(line)}") from None
        if done.returncode or job.get("error") or moved != self._amount.turn_bytes:
            raise StoreError(f"fio failed: status {done.returncode}, {moved} of {self._amount.turn_bytes} bytes")
        self.version = str(said.get("fio version", "fio"))
        self.pause_seconds = min(1.0, max(0.0, took - seconds))
        return Cost(seconds, cpu)


class Loop:
    """`DEPTH` threads of preadv and pwritev; each takes the next frame when one is done."""

    def __init__(self, amount: Amount, memory: Callable[[], Any]) -> None:
        """memory: lends a turn's memory, frame by frame, as a context."""
        self._amount, self._memory, self._team = amount, memory, Together(DEPTH)

    def move(self, direction: str, region: DiskFrames) -> Cost:
        is_read, size = direction == "read", self._amount.frame_bytes
        call, mode = (os.preadv, "rb") if is_read else (os.pwritev, "r+b")
        how = os.O_DIRECT if self._amount.direct else 0
        offsets = range(region.offset, region.offset + self._amount.turn_bytes, size)

        def work() -> None:
            with suppress(IndexError):  # none is left
                while True:
                    offset, frame = left.popleft()
                    moved = call(file.fileno(), [frame], offset)
                    assert moved == size, f"the disk stopped at {moved} of {size} bytes"

        with (
            open(region.path, mode, buffering=0, opener=lambda path, flags: os.open(path, flags | how)) as file,
            self._memory() as frames,
        ):
            left = deque(zip(offsets, frames, strict=True))
            watch = Stopwatch()
            self._team.run([work] * DEPTH)
            if not is_read:
                os.fdatasync(file.fileno())
            return watch.cost()

    def close(self) -> None:
        self._team.__exit__()


def file_system(directory: Path) -> str:
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0]
    return "unknown"
