"""Faults of the machine are counted, said once a minute, and told for as long as they last.

Disks that are full or fail for real, a process without descriptors or threads: `tests/service/test_shortages.py`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.block.account import MissReason
from kvstore.config import Limits
from tiering.dram.extents import ExtentPool
from tiering.errors import TierUnavailable
from tiering.faults import (
    CONNECTIONS,
    EXTENTS,
    MOVE_THREADS,
    NEW_SLABS,
    NVME_READS,
    NVME_WRITES,
    FaultKind,
    Faults,
    kind_of,
)
from tiering.move_queue import MoveQueue, Priority, QueueLimits
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.nvme.slab_files import DirectFiles
from waiting import FakeClock
from workbench import MODEL, blank_pages, ids, open_at, random_pages, small_layout


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def faults(clock: FakeClock) -> Faults:
    return Faults(clock)


# What it is told ------------------------------------------------------------------------------------------------------


def test_a_fault_lasts_until_the_same_thing_works(faults: Faults, clock: FakeClock) -> None:
    assert faults.reasons() == [] and faults.counts() == {}
    for _ in range(25):
        faults.failed(NVME_WRITES, FaultKind.DISK_FULL, "no space left")
    clock.advance(3)
    faults.failed(CONNECTIONS, FaultKind.NO_DESCRIPTORS, "nobody is let in")
    assert faults.reasons() == [
        "no descriptors: 1 connections failed, last 0 s ago",
        "disk full: 25 nvme writes failed, last 3 s ago",
    ]
    faults.worked(NVME_READS)
    faults.worked(CONNECTIONS)
    assert faults.reasons() == ["disk full: 25 nvme writes failed, last 3 s ago"]
    faults.worked(NVME_WRITES)
    assert faults.reasons() == [] and faults.counts() == {"disk_full": 25, "no_descriptors": 1}


def test_one_line_per_kind_and_minute_and_one_when_it_is_over(
    faults: Faults, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(130):
        faults.failed(NVME_WRITES, FaultKind.DISK_FULL, "no space left")
        clock.advance(1)
    faults.worked(NVME_WRITES)
    assert caplog.messages == [
        "disk full: nvme writes failed: no space left",
        "disk full: nvme writes failed: no space left (59 more like this were not logged)",
        "disk full: nvme writes failed: no space left (59 more like this were not logged)",
        "nvme writes work again, after 2 min: disk full 130 times",
    ]


class NoMemory(logging.Handler):
    """A log that there is no memory for."""

    def emit(self, record: logging.LogRecord) -> None:
        raise MemoryError


def test_whoever_tells_of_memory_is_not_told_of_memory(faults: Faults) -> None:
    logger, handler = logging.getLogger("tiering.faults"), NoMemory()
    logger.addHandler(handler)
    try:
        faults.failed(EXTENTS, FaultKind.NO_MEMORY, "none left")
        assert len(faults.now()) == 1
        faults.worked(EXTENTS)
        assert faults.now() == []
    finally:
        logger.removeHandler(handler)


def raised_from(cause: BaseException) -> BaseException:
    try:
        try:
            raise cause
        except type(cause) as error:
            raise TierUnavailable("a slab cannot be written") from error
    except TierUnavailable as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, ""), FaultKind.DISK_FULL),
        (OSError(errno.EDQUOT, ""), FaultKind.DISK_FULL),
        (OSError(errno.EIO, ""), FaultKind.DISK_FAULT),
        (OSError(errno.EROFS, ""), FaultKind.DISK_FAULT),
        (OSError(errno.EMFILE, ""), FaultKind.NO_DESCRIPTORS),
        (OSError(errno.ENFILE, ""), FaultKind.NO_DESCRIPTORS),
        (OSError(errno.ENOMEM, ""), FaultKind.NO_MEMORY),
        (MemoryError(), FaultKind.NO_MEMORY),
        (RuntimeError("can't start new thread"), FaultKind.NO_THREADS),
        (RuntimeError("something else"), FaultKind.OTHER),
        (OSError(errno.EINVAL, ""), FaultKind.OTHER),
    ],
)
def test_what_ran_out_is_known_by_the_error_or_by_what_it_comes_from(error: BaseException, kind: FaultKind) -> None:
    assert kind_of(error) is kind
    assert kind_of(raised_from(error)) is kind


# Who tells ------------------------------------------------------------------------------------------------------------


class FailingFiles(DirectFiles):
    """Slabs on a disk on which calls of one name fail, while `number` says how."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.call, self.number = "", 0

    def _fail(self, call: str) -> None:
        if self.number and call == self.call:
            raise OSError(self.number, os.strerror(self.number))

    def create(self, name: str, size_bytes: int) -> None:
        self._fail("create")
        super().create(name, size_bytes)

    def read(self, name: str, offset: int, into: memoryview) -> None:
        self._fail("read")
        super().read(name, offset, into)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        self._fail("write")
        super().write(name, offset, data)

    def sync(self, name: str) -> None:
        self._fail("sync")
        super().sync(name)


@pytest.mark.parametrize(
    ("call", "number", "what", "kind"),
    [
        ("write", errno.ENOSPC, NVME_WRITES, FaultKind.DISK_FULL),
        ("write", errno.EIO, NVME_WRITES, FaultKind.DISK_FAULT),
        ("sync", errno.EIO, NVME_WRITES, FaultKind.DISK_FAULT),
        ("write", errno.EMFILE, NVME_WRITES, FaultKind.NO_DESCRIPTORS),
        ("write", errno.ENOMEM, NVME_WRITES, FaultKind.NO_MEMORY),
        ("create", errno.ENOSPC, NEW_SLABS, FaultKind.DISK_FULL),
        ("create", errno.EMFILE, NEW_SLABS, FaultKind.NO_DESCRIPTORS),
        ("read", errno.EIO, NVME_READS, FaultKind.DISK_FAULT),
        ("read", errno.EMFILE, NVME_READS, FaultKind.NO_DESCRIPTORS),
    ],
)
def test_a_disk_that_fails_is_told_and_so_is_that_it_works_again(
    tmp_path: Path, call: str, number: int, what: str, kind: FaultKind
) -> None:
    """The whole store on it: what a put or a load runs into, without anybody who looks for it."""
    made: list[FailingFiles] = []

    def files(directory: Path) -> FailingFiles:
        made.append(FailingFiles(directory))
        return made[0]

    layout = small_layout()
    with open_at(
        tmp_path / "kv",
        dram="1MiB",
        nvme="4MiB",
        slab="1MiB",
        files=files,
        indexes=LmdbMaker,
        limits=Limits(close_seconds=5),
    ) as store:
        assert store.warmed(60)
        space = store.namespace(model=MODEL, layout=layout)

        def put(first: int) -> MissReason | None:
            tokens = ids(128 + first)[first:]
            return space.put(tokens, random_pages(layout, 2, seed=first), durability="disk").reason

        def load(first: int) -> int:
            tokens = ids(128 + first)[first:]
            with space.lease(space.match(tokens), deadline_ms=10_000) as lease:
                return space.get(lease, blank_pages(layout, 2)).tokens

        if call != "create":
            assert put(1) is None
        if call == "read":
            store.evict(1000)
        made[0].call, made[0].number = call, number
        assert load(1) == 0 if call == "read" else put(7) is not None
        told = store.faults.now()
        assert {(one.what, one.kind) for one in told} == {(what, kind)}
        assert all(one.count >= 1 and one.last_seconds_ago < 60 for one in told)
        assert store.faults.counts() == {kind.replace(" ", "_"): told[0].count}
        made[0].number = 0
        assert load(1) == 128 if call == "read" else put(13) is None
        assert store.faults.now() == [] and store.faults.reasons() == []
        store.check()


def test_memory_that_cannot_be_had_is_told(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ExtentPool(1 << 20, 1 << 18, faults=faults)

    def refused(*_: object) -> int:
        raise OSError(errno.ENOMEM, "no")

    with monkeypatch.context() as patched:
        patched.setattr("os.memfd_create", refused)
        with pytest.raises(TierUnavailable):
            pool.create()
        assert [one.kind for one in faults.now()] == [FaultKind.NO_MEMORY]
        assert faults.now()[0].what == EXTENTS
    pool.create().close()
    assert faults.now() == []
    pool.close()


def test_a_thread_that_cannot_be_started_is_told(
    faults: Faults, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = MoveQueue(clock, QueueLimits(), 2, faults=faults)

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        assert queue.submit("a", NVME_READS, Priority.WAITING, lambda: None).done
        assert [(one.what, one.kind) for one in faults.now()] == [(MOVE_THREADS, FaultKind.NO_THREADS)]
    assert queue.submit("b", NVME_READS, Priority.WAITING, lambda: None).wait(20)
    assert faults.now() == []
    queue.close(20)


@pytest.mark.parametrize("error", [MemoryError, lambda: RuntimeError("a bug")])
def test_a_move_without_memory_is_no_bug_and_is_told(
    faults: Faults, clock: FakeClock, error: Callable[[], Exception]
) -> None:
    queue = MoveQueue(clock, QueueLimits(), 1, faults=faults)

    def work() -> None:
        raise error()

    assert queue.submit("a", NVME_READS, Priority.WAITING, work).wait(20)
    is_memory = error is MemoryError
    assert [one.kind for one in faults.now()] == [FaultKind.NO_MEMORY] * is_memory
    assert len(queue.bugs) == (not is_memory)
    queue.close(20)


def test_a_disk_that_hangs_is_told(faults: Faults, clock: FakeClock) -> None:
    queue = MoveQueue(clock, QueueLimits(stall_seconds=5), 1, faults=faults)
    begun, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        goes_on.wait(20)

    queue.submit("a", NVME_READS, Priority.WAITING, hang)
    assert begun.wait(20)
    clock.advance(6)
    assert queue.submit("b", NVME_READS, Priority.WAITING, lambda: None).done
    assert [(one.what, one.kind) for one in faults.now()] == [(NVME_READS, FaultKind.DISK_HANGS)]
    goes_on.set()
    queue.close(20)
