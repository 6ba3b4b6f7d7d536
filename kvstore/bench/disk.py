"""Disk limits for the NVMe tier: fio, if installed, and a plain loop.

Both move whole frames, `DEPTH` at a time, with direct I/O if the file system allows it. They read the slabs that the
store reads, in turn with it, so that caches of the disk or its host help all alike; they write to an allocated file
beside them, and end a turn of writes with one sync.

The loop uses the store's own memory; fio has its own. Where a disk gets memory piece by piece, as in a virtual machine,
that alone can make one twice as fast: contiguous pages are one piece, scattered ones are hundreds.
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
"""Frames in flight: as many as the store's threads move."""

LONGEST_SECONDS = 60.0
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_FILL_BYTES = 1 << 20


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


class DiskLimit(Protocol):
    """Moves the frames of one turn per call.

    starts_late: the disk idles before its turn; the contender should wait as long before its own. commands: what it
    runs, by direction.
    """

    name: str
    version: str
    commands: dict[str, str]
    starts_late: bool

    def read(self, region: DiskFrames) -> Cost: ...

    def write(self, region: DiskFrames) -> Cost: ...

    def close(self) -> None: ...


def lay_out(path: Path, amount: Amount, turns: int) -> list[DiskFrames]:
    """Make a file for so many turns and write every byte once; returns their regions."""
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
    """The message is fio's own."""


class Fio:
    """fio with one libaio job; only its own clock counts, without start and end."""

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
        """Time from fio's start to its first I/O."""
        return median(self._pauses[-9:]) if self._pauses else 0.0

    def read(self, region: DiskFrames) -> Cost:
        """Sequential reads. Raises `FioFailed`."""
        return self._run("read", region)

    def write(self, region: DiskFrames) -> Cost:
        """Sequential writes, then one sync. Raises `FioFailed`."""
        return self._run("write", region)

    def close(self) -> None: ...

    def _run(self, direction: str, region: DiskFrames) -> Cost:
        path = str(region.path.absolute()).replace(":", r"\:")  # fio ends a name at a colon
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
            said = json.loads(done.stdout[done.stdout.index("{") :])  # notes may come before it
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
    """`DEPTH` threads of preadv and pwritev; each takes the next frame when one is done."""

    name = "loop"
    version = ""
    starts_late = False

    def __init__(self, amount: Amount, memory: Callable[[], AbstractContextManager[Sequence[memoryview]]]) -> None:
        """memory: lends a turn's memory, frame by frame."""
        self.commands = {
            "read": f"{DEPTH} threads of preadv",
            "write": f"{DEPTH} threads of pwritev, then fdatasync",
        }
        self._amount = amount
        self._memory = memory
        self._team = Together(DEPTH)
        self._lock = threading.Lock()

    def read(self, region: DiskFrames) -> Cost:
        """In the file's order."""
        return self._run(os.preadv, region, os.O_RDONLY)

    def write(self, region: DiskFrames) -> Cost:
        """Writes, then one sync."""
        return self._run(os.pwritev, region, os.O_RDWR)

    def close(self) -> None:
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
    """fio, if it is installed and can read the probe; else None and why."""
    if program is None:
        return None, "fio is not installed"
    fio = Fio(program, amount)
    try:
        fio.read(probe)
        return fio, ""
    except FioFailed as error:
        return None, f"fio failed: {error}"


def file_system(directory: Path) -> str:
    """Type of the file system under a directory, in the kernel's words."""
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
    """Bytes that disks delivered to this process so far, page cache excluded; None if the kernel does not say."""
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
