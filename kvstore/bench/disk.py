"""What a disk can do, measured beside the NVMe tier: by fio where there is one, and by a plain loop.

Both move whole frames, `DEPTH` at a time, past the page cache where the file system allows it. They read the very slabs
that the store reads, in turn with it, so that what a disk or its host keeps in a cache helps all alike; they write to a
laid-out file beside them, and end a turn of writes with one sync.

The loop moves bytes from and into the memory that it is given, the store's own; fio has memory of its own. Where a disk
is handed one piece of memory after the other, as behind a virtual machine, that alone can make one of them twice as
fast: pages that lie side by side are one piece, scattered ones are hundreds.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import time
from typing import NamedTuple, Protocol

from kvstore.bench.measure import Cost, Stopwatch, Together
from kvstore.node import MOVE_THREADS

DEPTH = MOVE_THREADS
"""Frames under way at a time: as many as the store's own threads move."""

LONGEST_SECONDS = 60.0
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_FILL_BYTES = 1 << 20


class DiskFrames(NamedTuple):
    """The frames of one turn: where they lie, one behind the other."""

    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class Amount:
    """What one turn moves, and how. direct: past the page cache."""

    frame_bytes: int
    frames: int
    direct: bool

    @property
    def turn_bytes(self) -> int:
        """All of it."""
        return self.frame_bytes * self.frames


class DiskLimit(Protocol):
    """Moves the frames of one turn per call.

    starts_late: the disk is idle for a while before a turn; what is compared with it should wait before its own turns.
    commands: what it does, by direction.
    """

    name: str
    version: str
    commands: dict[str, str]
    starts_late: bool

    def read(self, region: DiskFrames) -> Cost: ...

    def write(self, region: DiskFrames) -> Cost: ...

    def close(self) -> None: ...


def lay_out(path: Path, amount: Amount, turns: int) -> list[DiskFrames]:
    """Make a file of that many turns, every byte of it written once; returns their regions."""
    size = amount.turn_bytes * turns
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        for at in range(0, size, _FILL_BYTES):
            file.write(os.urandom(min(_FILL_BYTES, size - at)))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return [DiskFrames(path, at) for at in range(0, size, amount.turn_bytes)]


class FioFailed(Exception):
    """fio did not do what was asked; the message says what it said."""


class Fio:
    """fio with one job of libaio; its own clock counts, without its start and end."""

    name = "fio"
    starts_late = True

    def __init__(self, program: str, amount: Amount) -> None:
        self.version = ""
        self.commands = {
            direction: " ".join(["fio", *_fio_options(direction, amount)]) for direction in ("read", "write")
        }
        self._program = program
        self._amount = amount
        self._pauses: list[float] = []

    @property
    def pause_seconds(self) -> float:
        """From a start of fio to its first I/O."""
        return median(self._pauses[-9:]) if self._pauses else 0.0

    def read(self, region: DiskFrames) -> Cost:
        """Sequential reads. Raises `FioFailed`."""
        return self._run("read", region)

    def write(self, region: DiskFrames) -> Cost:
        """Sequential writes, and one sync. Raises `FioFailed`."""
        return self._run("write", region)

    def close(self) -> None:
        """Nothing is kept."""

    def _run(self, direction: str, region: DiskFrames) -> Cost:
        path = str(region.path.absolute()).replace(":", r"\:")  # fio takes a colon for the end of a name
        command = [
            self._program,
            "--name=limit",
            f"--filename={path}",
            f"--offset={region.offset}",
            *_fio_options(direction, self._amount),
            "--allow_file_create=0",
            "--eta=never",
            "--output-format=json",
        ]
        start = time()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FioFailed(str(error)) from None
        end = time()
        try:
            said = json.loads(done.stdout[done.stdout.index("{") :])  # notes may stand before it
            job = said["jobs"][0]
            moved, seconds = job[direction]["io_bytes"], max(1, job[direction]["runtime"]) / 1e3
            cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
        except (ValueError, KeyError, IndexError, TypeError):
            line = (done.stderr or done.stdout).strip().splitlines()[:1]
            raise FioFailed(f"status {done.returncode}: {''.join(line)}") from None
        if done.returncode or job.get("error") or moved != self._amount.turn_bytes:
            raise FioFailed(f"status {done.returncode}, {moved} of {self._amount.turn_bytes} bytes")
        self.version = str(said.get("fio version", "fio"))
        ending = end - said.get("timestamp_ms", end * 1e3) / 1e3
        self._pauses.append(min(1.0, max(0.0, end - start - seconds - ending)))
        return Cost(seconds, cpu)


class Loop:
    """`DEPTH` threads of preadv and pwritev, each taking the next frame when it is done with one."""

    name = "loop"
    version = ""
    starts_late = False

    def __init__(self, amount: Amount, memory: Callable[[], AbstractContextManager[Sequence[memoryview]]]) -> None:
        """memory: lends as much of it as a turn needs, frame by frame."""
        self.commands = {
            "read": f"{DEPTH} threads of preadv",
            "write": f"{DEPTH} threads of pwritev, then fdatasync",
        }
        self._amount = amount
        self._memory = memory
        self._team = Together(DEPTH)
        self._lock = threading.Lock()

    def read(self, region: DiskFrames) -> Cost:
        """Reads in the order of the file."""
        return self._run(os.preadv, region, os.O_RDONLY)

    def write(self, region: DiskFrames) -> Cost:
        """Writes, and one sync."""
        return self._run(os.pwritev, region, os.O_RDWR)

    def close(self) -> None:
        """End the threads."""
        self._team.__exit__()

    def _run(self, call: Callable[[int, list[memoryview], int], int], region: DiskFrames, flags: int) -> Cost:
        size = self._amount.frame_bytes
        offsets = range(region.offset, region.offset + self._amount.turn_bytes, size)
        descriptor = os.open(region.path, flags | os.O_CLOEXEC | (os.O_DIRECT if self._amount.direct else 0))
        try:
            with self._memory() as frames:
                pairs = iter(zip(offsets, frames, strict=True))

                def work() -> None:
                    while True:
                        with self._lock:
                            pair = next(pairs, None)
                        if pair is None:
                            return
                        moved = call(descriptor, [pair[1]], pair[0])
                        assert moved == size, f"the disk stopped at {moved} of {size} bytes"

                watch = Stopwatch()
                self._team.run([work] * DEPTH)
                if flags == os.O_RDWR:
                    os.fdatasync(descriptor)
                return watch.cost()
        finally:
            os.close(descriptor)


def working_fio(program: str | None, amount: Amount, probe: DiskFrames) -> tuple[Fio | None, str]:
    """fio, if there is such a program and it can read the probe; else why not."""
    if program is None:
        return None, "fio is not installed"
    fio = Fio(program, amount)
    try:
        fio.read(probe)
        return fio, ""
    except FioFailed as error:
        return None, f"fio failed: {error}"


def file_system(directory: Path) -> str:
    """The type of the file system that a directory is on, as the kernel calls it."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                left, _, right = line.partition(" - ")
                if left.split()[2] == wanted:
                    return right.split()[0]
    except OSError:
        pass
    return "unknown"


def disk_read_bytes() -> int | None:
    """What the disks have given to this process so far, the page cache left out; None where the kernel does not say."""
    try:
        with open("/proc/self/io") as counts:
            return next(int(line.split()[1]) for line in counts if line.startswith("read_bytes:"))
    except (OSError, StopIteration):
        return None


def _fio_options(direction: str, amount: Amount) -> list[str]:
    options = [
        f"--rw={direction}",
        f"--bs={amount.frame_bytes}",
        f"--size={amount.turn_bytes}",
        f"--direct={int(amount.direct)}",
        "--ioengine=libaio",
        f"--iodepth={DEPTH}",
        "--thread",
    ]
    return [*options, "--end_fsync=1"] if direction == "write" else [*options, "--readonly"]
