"""What a disk is measured with moves the bytes that it says, in the region that it was given, and nothing else."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.bench.disk import (
    DEPTH,
    Amount,
    DiskFrames,
    FioFailed,
    Loop,
    disk_read_bytes,
    file_system,
    lay_out,
    working_fio,
)
from tiering.nvme.slab_files import DirectFiles

FRAME_BYTES = 12 << 10
FRAMES = 9
TURNS = 3
FIO = shutil.which("fio")
needs_fio = pytest.mark.skipif(FIO is None, reason="fio is not installed")


@pytest.fixture
def amount(tmp_path: Path) -> Amount:
    files = DirectFiles(tmp_path / "probe")
    files.close()
    return Amount(FRAME_BYTES, FRAMES, files.direct)


class Memory:
    """Pages that are lent to a turn, as a store lends its slots."""

    def __init__(self) -> None:
        self.frames = [memoryview(mmap.mmap(-1, FRAME_BYTES)) for _ in range(FRAMES)]
        self.lent = 0

    @contextmanager
    def lend(self) -> Iterator[list[memoryview]]:
        self.lent += 1
        yield self.frames
        self.lent -= 1

    def joined(self) -> bytes:
        return b"".join(bytes(frame) for frame in self.frames)


def pieces(path: Path, amount: Amount) -> list[bytes]:
    raw = path.read_bytes()
    return [raw[at : at + amount.turn_bytes] for at in range(0, len(raw), amount.turn_bytes)]


def test_a_file_is_laid_out_in_full(tmp_path: Path, amount: Amount) -> None:
    regions = lay_out(tmp_path / "limit", amount, TURNS)
    assert regions == [DiskFrames(tmp_path / "limit", turn * amount.turn_bytes) for turn in range(TURNS)]
    status = (tmp_path / "limit").stat()
    assert status.st_size == TURNS * FRAMES * FRAME_BYTES <= status.st_blocks * 512
    raw = (tmp_path / "limit").read_bytes()
    pages = {raw[at : at + 4096] for at in range(0, len(raw), 4096)}
    assert len(pages) == len(raw) // 4096, "random bits everywhere"


def test_the_loop_reads_the_frames_of_its_region_in_order(tmp_path: Path, amount: Amount) -> None:
    regions = lay_out(tmp_path / "limit", amount, TURNS)
    memory = Memory()
    loop = Loop(amount, memory.lend)
    try:
        for turn in (1, 0, 2):
            cost = loop.read(regions[turn])
            assert memory.joined() == pieces(tmp_path / "limit", amount)[turn]
            assert cost.wall > 0 and cost.cpu >= 0 and not memory.lent
    finally:
        loop.close()


def test_the_loop_writes_its_region_only_and_syncs_it_once(
    tmp_path: Path, amount: Amount, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = lay_out(tmp_path / "limit", amount, TURNS)
    before = pieces(tmp_path / "limit", amount)
    memory = Memory()
    synced: list[str] = []
    fdatasync = os.fdatasync

    def watched(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", watched)
    loop = Loop(amount, memory.lend)
    try:
        loop.read(regions[0])
        assert not synced
        for frame in memory.frames:
            frame[:] = os.urandom(FRAME_BYTES)
        loop.write(regions[1])
    finally:
        loop.close()
    assert synced == [str(tmp_path / "limit")]
    assert pieces(tmp_path / "limit", amount) == [before[0], memory.joined(), before[2]]


def test_a_disk_that_stops_half_way_is_no_measurement(tmp_path: Path, amount: Amount) -> None:
    (region,) = lay_out(tmp_path / "limit", amount, 1)
    os.truncate(region.path, amount.turn_bytes - FRAME_BYTES)
    loop = Loop(amount, Memory().lend)
    try:
        with pytest.raises(AssertionError, match="stopped at 0"):
            loop.read(region)
    finally:
        loop.close()


@needs_fio
def test_fio_reads_and_leaves_everything_as_it_was(tmp_path: Path, amount: Amount) -> None:
    regions = lay_out(tmp_path / "a:b", amount, TURNS)  # a colon means something to fio
    before = hashlib.sha256((tmp_path / "a:b").read_bytes()).digest()
    fio, reason = working_fio(FIO, amount, regions[0])
    assert fio is not None and not reason and fio.version.startswith("fio-")
    cost = fio.read(regions[2])
    assert 0 < cost.wall < 10 and cost.cpu >= 0 and 0 <= fio.pause_seconds <= 1
    assert hashlib.sha256((tmp_path / "a:b").read_bytes()).digest() == before
    assert f"--iodepth={DEPTH}" in fio.commands["read"] and "--readonly" in fio.commands["read"]


@needs_fio
def test_fio_writes_its_region_only(tmp_path: Path, amount: Amount) -> None:
    regions = lay_out(tmp_path / "limit", amount, TURNS)
    before = pieces(tmp_path / "limit", amount)
    fio, _ = working_fio(FIO, amount, regions[0])
    assert fio is not None
    assert fio.write(regions[1]).wall > 0
    after = pieces(tmp_path / "limit", amount)
    changed = [one != other for one, other in zip(before, after, strict=True)]
    assert changed == [False, True, False]
    assert "--end_fsync=1" in fio.commands["write"] and f"--bs={FRAME_BYTES}" in fio.commands["write"]


@needs_fio
def test_fio_that_moves_less_is_no_measurement(tmp_path: Path, amount: Amount) -> None:
    (region,) = lay_out(tmp_path / "limit", amount, 1)
    fio, _ = working_fio(FIO, amount, region)
    assert fio is not None
    with pytest.raises(FioFailed):
        fio.read(DiskFrames(region.path, FRAME_BYTES))


@pytest.mark.parametrize(
    ("program", "says"),
    [(None, "not installed"), ("/no/such/fio", "No such file"), ("/bin/false", "status 1"), ("/bin/echo", "status 0")],
)
def test_why_it_is_not_fio(program: str | None, says: str, tmp_path: Path, amount: Amount) -> None:
    (region,) = lay_out(tmp_path / "limit", amount, 1)
    fio, reason = working_fio(program, amount, region)
    assert fio is None and says in reason


def test_facts_about_the_disk(tmp_path: Path) -> None:
    kind = file_system(tmp_path)
    with open("/proc/self/mountinfo") as mounts:
        assert kind == "unknown" or any(line.partition(" - ")[2].split()[0] == kind for line in mounts)
    before = disk_read_bytes()
    assert before is None or before >= 0
