"""Extents: sealed, touched, private, out of core files; never more than the budget; nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from descriptors import OpenFiles, open_files, opened_since
from kvstore.client.connection import spans
from small_disk import files_of_at_most
from tiering.dram.extents import Extent, ExtentPool, MappedExtent
from tiering.errors import TierFull, TierUnavailable
from tiering.tier import place_of
from waiting import together, wait_until

KIB, MIB = 1 << 10, 1 << 20


@contextlib.contextmanager
def extent_of(size_bytes: int) -> Iterator[Extent]:
    extent = Extent(size_bytes)
    try:
        yield extent
    finally:
        extent.close()


def mapping_of(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that starts at an address."""
    facts: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+\s*(.*)", line)
        if header:
            if facts:
                break
            if int(header[1], 16) == address:
                facts = {"bytes": str(int(header[2], 16) - address), "access": header[3], "name": header[4]}
        elif facts:
            name, _, value = line.partition(":")
            facts[name] = value.strip()
    assert facts, "there is no mapping at that address"
    return facts


def extents_alive_since(before: OpenFiles) -> int:
    return opened_since(before, "kv-extent").total()


# One extent -----------------------------------------------------------------------------------------------------------


def test_it_can_be_neither_shrunk_nor_grown_nor_unsealed() -> None:
    with extent_of(64 * KIB) as extent:
        for size in (0, 64 * KIB - 1, 64 * KIB + 1, 128 * KIB):
            with pytest.raises(PermissionError):
                os.ftruncate(extent.descriptor, size)
        with pytest.raises(PermissionError):
            os.pwrite(extent.descriptor, b"x", 64 * KIB)
        seals = fcntl.fcntl(extent.descriptor, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        with pytest.raises(PermissionError):
            fcntl.fcntl(extent.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.fstat(extent.descriptor).st_size == 64 * KIB


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_who_may_read_can_not_reopen_it_for_writing() -> None:
    """The same user always can: processes of one user are one domain of trust."""
    with extent_of(64 * KIB) as extent:
        descriptor = extent.share(1, writable=False)
        reopen = ["/bin/sh", "-c", f": <> /proc/self/fd/{descriptor}"]
        for mode, is_allowed in ((0o600, False), (0o666, True)):  # the latter is what a memfd has if nobody changes it
            os.fchmod(extent.descriptor, mode)
            done = subprocess.run(reopen, pass_fds=[descriptor], user=65534, stderr=subprocess.PIPE, cwd="/")
            assert (done.returncode == 0) is is_allowed and (b"Permission denied" in done.stderr) is not is_allowed
        os.close(descriptor)


def test_every_page_was_touched_and_none_goes_into_a_core_file() -> None:
    size = 4 * MIB
    with extent_of(size) as extent:
        mapping = mapping_of(extent.address)
        assert mapping["bytes"] == str(size)
        assert mapping["Rss"] == f"{size // KIB} kB", "untouched pages would cost the first copy ten times its time"
        assert "dd" in mapping["VmFlags"].split(), "KV is prompt text to whoever can invert it"
        assert mapping["access"] == "rw-s"


def makes_huge_pages() -> bool:
    """Whether this kernel makes some now, of private memory, and does not deny those of shared memory."""
    memory = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[::4096] = bytes(len(memory) // 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = ctypes.c_void_p(address + -address % (2 * MIB))
    made = ctypes.CDLL(None).madvise(first, ctypes.c_size_t(6 * MIB), 25) == 0  # MADV_COLLAPSE
    denied = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return made and denied.exists() and "[deny]" not in denied.read_text()


def test_its_pages_are_huge_ones_for_all_that_map_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.dram.extents.PREFAULT_STEP_BYTES", 2 * MIB)
    size = 4 * MIB + 64 * KIB  # more than one step, and a rest
    with extent_of(size) as extent:
        mapping = mapping_of(extent.address)
        if not extent.is_huge and not makes_huge_pages():
            pytest.skip("this kernel makes no huge pages of shared memory: older than 6.1, denied, or none are free")
        assert extent.is_huge and mapping["Rss"] == f"{size // KIB} kB"
        assert mapping["ShmemPmdMapped"] == "4096 kB"
        reader = MappedExtent(extent.share(1, writable=False), size, writable=False)
        assert bytes(reader.view) == bytes(size)
        assert mapping_of(reader.memory.address)["ShmemPmdMapped"] == "4096 kB"


def test_a_kernel_that_makes_no_huge_pages_touches_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.dram.extents._MADV_COLLAPSE", 12_345)  # it knows no such advice
    size = 4 * MIB
    with extent_of(size) as extent:
        mapping = mapping_of(extent.address)
        assert mapping["Rss"] == f"{size // KIB} kB" and mapping["ShmemPmdMapped"] == "0 kB" and not extent.is_huge
        assert bytes(extent.view) == bytes(size)


def test_of_the_address_space_nothing_is_left() -> None:
    """Memory is mapped within a larger reservation."""

    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0])

    with extent_of(64 * KIB), extent_of(4 * MIB):
        pass
    before = pages()
    for _ in range(16):
        with extent_of(64 * KIB), extent_of(4 * MIB):
            pass
    assert (pages() - before) * mmap.PAGESIZE < 8 * MIB, "a reservation is up to 2 MiB larger"


def test_it_has_no_name_in_any_file_system() -> None:
    shared = Path("/dev/shm")
    before = set(os.listdir(shared)) if shared.is_dir() else set()
    with extent_of(64 * KIB) as extent:
        link = os.readlink(f"/proc/self/fd/{extent.descriptor}")
        assert link.startswith("/memfd:") and link.endswith("(deleted)")
        assert os.fstat(extent.descriptor).st_nlink == 0
        assert mapping_of(extent.address)["name"].startswith("/memfd:")
        named = set(os.listdir(shared)) - before if shared.is_dir() else set()
        assert not [name for name in named if "kv" in name]


@pytest.mark.slow
def test_closing_gives_the_descriptor_back_and_leaves_readers_alone() -> None:
    before = open_files("kv-extent")
    extent = Extent(64 * KIB)
    span = extent.frame(0, 64 * KIB)
    span.view[:5] = b"bytes"
    extent.close()
    extent.close()
    assert extents_alive_since(before) == 0 and extent.descriptor == -1
    del extent
    assert bytes(span.view[:5]) == b"bytes", "the mapping lives as long as a view of it"
    address = span.address
    del span
    with pytest.raises(AssertionError):
        mapping_of(address)


def test_the_interpreter_runs_on_while_pages_are_touched() -> None:
    """256 MiB take tens of milliseconds to touch; a thread that wants to run every half of one must get to do so."""

    def ticks_during_prefault() -> int:
        ticks, stop = 0, threading.Event()

        def tick() -> None:
            nonlocal ticks
            while not stop.is_set():
                ticks += 1
                time.sleep(0.0005)

        ticker = threading.Thread(target=tick)
        ticker.start()
        while not ticks:
            time.sleep(0.0005)
        before = ticks
        with extent_of(256 * MIB):
            counted = ticks - before
        stop.set()
        ticker.join()
        return counted

    # With the interpreter locked there is one chance to run in each of the four steps.
    assert any(ticks_during_prefault() > 12 for _ in range(3))


# Shared with other processes ------------------------------------------------------------------------------------------

HOLD = """
import mmap, os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as given:
    _, (descriptor,), _, _ = socket.recv_fds(given, 1, 1)
    memory = mmap.mmap(descriptor, 65536, prot=mmap.PROT_READ)
    os.close(descriptor)
    given.send(memory[:5])
    given.recv(1)
"""


@contextlib.contextmanager
def another_process_that_maps(descriptor: int) -> Iterator[subprocess.Popen[bytes]]:
    """It has closed the descriptor again: the mapping alone is left."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        try:
            socket.send_fds(ours, [b"x"], [descriptor])
            assert ours.recv(5) == b"hello"
            yield process
        finally:
            process.kill()
            process.wait()


def test_what_is_shared_for_reading_can_not_be_written() -> None:
    with extent_of(64 * KIB) as extent:
        extent.view[:5] = b"hello"
        descriptor = extent.share(7, writable=False)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 64 * KIB)
        with mmap.mmap(descriptor, 64 * KIB, prot=mmap.PROT_READ) as memory:
            extent.view[:5] = b"later"
            assert memory[:5] == b"later"
        os.close(descriptor)
        descriptor = extent.share(7, writable=True)
        with mmap.mmap(descriptor, 64 * KIB) as memory:
            memory[5:6] = b"!"
        os.close(descriptor)
        assert bytes(extent.view[:6]) == b"later!"


def test_a_holder_is_known_by_what_it_maps() -> None:
    with extent_of(64 * KIB) as extent:
        assert not extent.is_shared()
        descriptor = extent.share(1 << 40, writable=True)
        assert extent.is_shared() and extent.is_shared(1 << 40, 1 << 40) and extent.is_shared(0, 1 << 41)
        assert not extent.is_shared(0, (1 << 40) - 1) and not extent.is_shared((1 << 40) + 1)
        memory = mmap.mmap(descriptor, 64 * KIB)
        os.close(descriptor)
        assert extent.is_shared(1 << 40, 1 << 40), "the mapping keeps the open file alive"
        other = extent.share(0, writable=False)
        assert extent.is_shared(0, 0)
        os.close(other)
        assert not extent.is_shared(0, 0) and extent.is_shared()
        memory.close()
        assert not extent.is_shared()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_holds_what_it_maps_until_it_is_gone(signal_number: int) -> None:
    with extent_of(64 * KIB) as extent:
        extent.view[:5] = b"hello"
        descriptor = extent.share(3, writable=False)
        with another_process_that_maps(descriptor) as process:
            os.close(descriptor)
            assert extent.is_shared(3, 3)
            process.send_signal(signal.SIGSTOP)
            assert extent.is_shared(3, 3), "a stopped process reads on when it is continued"
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal_number)
            process.wait()
            assert not extent.is_shared()


def test_a_descriptor_on_its_way_counts() -> None:
    """Sent and not received yet: whoever will receive it may map it."""
    ours, theirs = socket.socketpair()
    with extent_of(64 * KIB) as extent, ours, theirs:
        descriptor = extent.share(3, writable=False)
        socket.send_fds(ours, [b"x"], [descriptor])
        os.close(descriptor)
        assert extent.is_shared(3, 3)
        theirs.close()
        assert not extent.is_shared()


def test_memory_that_another_process_maps_stays_within_the_budget() -> None:
    pool = ExtentPool(2 * MIB, MIB)
    first, second = pool.create(), pool.create()
    descriptor = first.share(1, writable=False)
    pool.destroy(first)
    assert pool.taken_bytes == 2 * MIB and not pool.has_room()
    with pytest.raises(TierFull):
        pool.create()
    pool.destroy(second)
    assert pool.taken_bytes == MIB and pool.has_room()
    third = pool.create()
    assert not pool.has_room()
    os.close(descriptor)
    assert pool.has_room() and first.descriptor == -1
    pool.destroy(pool.create())
    pool.destroy(third)
    assert pool.taken_bytes == 0
    pool.close()


@pytest.mark.slow
def test_a_closed_pool_waits_for_no_other_process() -> None:
    before = open_files("kv-extent")
    pool = ExtentPool(2 * MIB, MIB)
    extents = [pool.create() for _ in range(2)]
    held = [extent.share(1, writable=False) for extent in extents]
    pool.destroy(extents[0])
    pool.close()
    pool.destroy(extents[1])
    assert pool.taken_bytes == 0
    for descriptor in held:
        os.close(descriptor)
    del extents
    assert extents_alive_since(before) == 0


# The pool -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_that_is_forgotten_gives_its_memory_back() -> None:
    before = open_files("kv-extent")
    extent: Extent | None = Extent(64 * KIB)
    assert extents_alive_since(before) == 1
    extent = None
    assert extent is None and extents_alive_since(before) == 0


@pytest.mark.slow
@pytest.mark.parametrize("prepares", [False, True])
def test_many_threads_never_exceed_the_budget(prepares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, rounds = 4, 40
    lock = threading.Lock()
    alive, most_alive = 0, 0

    class Counted(Extent):
        """Counts what there is at every moment: also what was made ahead and is nobody's."""

        def __init__(self, size_bytes: int) -> None:
            nonlocal alive, most_alive
            with lock:
                alive += 1
                most_alive = max(most_alive, alive)
            super().__init__(size_bytes)

        def close(self) -> None:
            nonlocal alive
            if self.descriptor >= 0:
                super().close()
                with lock:
                    alive -= 1

    monkeypatch.setattr("tiering.dram.extents.Extent", Counted)
    pool = ExtentPool(limit * 64 * KIB, 64 * KIB)
    before = open_files("kv-extent")
    if prepares:
        pool.prepare()
    live, most, made, refused, over = 0, 0, 0, 0, 0

    def work(number: int) -> None:
        nonlocal live, most, made, refused, over
        for _ in range(rounds):
            try:
                extent = pool.create()
            except TierFull:
                with lock:
                    refused += 1
                continue
            with lock:
                live, made = live + 1, made + 1
                most = max(most, live)
                over += pool.taken_bytes > limit * 64 * KIB
            time.sleep(0.0002)
            with lock:
                live -= 1
            pool.destroy(extent)

    together(work, 8)
    assert most <= most_alive <= limit and not over
    assert made + refused == 8 * rounds and made > limit
    assert pool.taken_bytes == 0
    pool.close()
    wait_until(lambda: alive == 0)  # one that was being made ahead is given back when it is there
    wait_until(lambda: extents_alive_since(before) == 0)


@pytest.mark.slow
def test_the_next_extent_is_ready_before_it_is_asked_for() -> None:
    before = open_files("kv-extent")
    pool = ExtentPool(3 * MIB, MIB)
    pool.prepare()
    wait_until(lambda: extents_alive_since(before) == 1)
    assert pool.taken_bytes == 0 and pool.has_room()
    extents = []
    for taken in (1, 2, 3):
        extents.append(pool.create())
        assert pool.taken_bytes == taken * MIB
        alive = min(taken + 1, 3)
        wait_until(lambda alive=alive: extents_alive_since(before) == alive)  # type: ignore[misc]
    with pytest.raises(TierFull):
        pool.create()
    for extent in extents:
        assert bytes(extent.view[:4096]) == bytes(4096)
        pool.destroy(extent)
    pool.close()
    assert extents_alive_since(before) == 0


@pytest.mark.slow
def test_several_may_be_ready_and_never_more_than_the_budget_allows() -> None:
    before = open_files("kv-extent")
    pool = ExtentPool(4 * MIB, MIB)
    pool.prepare(10)
    wait_until(lambda: extents_alive_since(before) == 4)
    assert pool.taken_bytes == 0
    extents = [pool.create() for _ in range(4)]
    with pytest.raises(TierFull):
        pool.create()
    assert extents_alive_since(before) == 4 and pool.taken_bytes == 4 * MIB
    for taken in (3, 2, 1, 0):
        pool.destroy(extents.pop())
        assert pool.taken_bytes == taken * MIB
    pool.destroy(pool.create())
    pool.prepare(10)  # three may have been ready before the one was given back
    wait_until(lambda: extents_alive_since(before) == 4)
    pool.close()
    wait_until(lambda: extents_alive_since(before) == 0)  # the last one may be in the making


def test_one_that_is_being_made_is_waited_for_and_comes_to_one_caller(monkeypatch: Any) -> None:
    goes_on = threading.Event()
    made: list[int] = []

    class Slow(Extent):
        def __init__(self, size_bytes: int) -> None:
            made.append(size_bytes)
            assert goes_on.wait(20)
            super().__init__(size_bytes)

    monkeypatch.setattr("tiering.dram.extents.Extent", Slow)
    pool = ExtentPool(2 * MIB, MIB)
    pool.prepare()
    threads = [threading.Thread(target=pool.create) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(made) == 2)  # the second caller begins its own, the first waits for the one under way
    assert pool.taken_bytes <= 2 * MIB
    goes_on.set()
    for thread in threads:
        thread.join()
    assert pool.taken_bytes == 2 * MIB and len(made) == 2
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while it is made", "before anybody asks"])
def test_a_closed_pool_keeps_no_extent_that_was_made_ahead(moment: str, monkeypatch: Any) -> None:
    before = open_files("kv-extent")
    goes_on = threading.Event()
    if moment == "before anybody asks":
        goes_on.set()

    class Slow(Extent):
        def __init__(self, size_bytes: int) -> None:
            assert goes_on.wait(20)
            super().__init__(size_bytes)

    monkeypatch.setattr("tiering.dram.extents.Extent", Slow)
    pool = ExtentPool(2 * MIB, MIB)
    pool.prepare()
    if goes_on.is_set():
        wait_until(lambda: extents_alive_since(before) == 1)
    closer = threading.Thread(target=pool.close)
    closer.start()
    closer.join(20)
    assert not closer.is_alive(), "nobody waits for it"
    goes_on.set()
    wait_until(lambda: extents_alive_since(before) == 0)


@pytest.mark.slow
def test_a_kernel_that_has_no_memory_leaves_no_trace() -> None:
    pool = ExtentPool(4 * MIB, MIB)
    before = open_files("kv-extent")
    with files_of_at_most(64 * KIB), pytest.raises(TierUnavailable, match="no shared memory: File too large"):
        pool.create()
    assert pool.taken_bytes == 0 and extents_alive_since(before) == 0
    pool.destroy(pool.create())


def test_an_extent_that_cannot_be_made_ahead_is_a_fault_of_whoever_asks() -> None:
    pool = ExtentPool(4 * MIB, MIB)
    with files_of_at_most(64 * KIB):
        pool.prepare()
        with pytest.raises(TierUnavailable, match="no shared memory"):
            pool.create()
    pool.destroy(pool.create())
    pool.close()


def test_who_asked_lets_go_before_it_is_unmapped() -> None:
    extent = Extent(64 * KIB)
    address, left = extent.address, list[tuple[str, Callable[[], object]]]()
    extent.memory.before_unmap(lambda unmap: left.append(("first", unmap)))
    extent.memory.before_unmap(lambda unmap: left.append(("second", unmap)))
    span = extent.frame(1, 4 * KIB)
    extent.close()
    del extent
    assert span.memory is not None and span.memory.writable and span.memory.size_bytes == 64 * KIB
    assert not left, "somebody has a view"
    del span
    for who in ("second", "first"):
        ((name, unmap),) = left
        assert name == who and mapping_of(address)["bytes"] == str(64 * KIB)
        left.clear()
        unmap()
    assert not left
    with pytest.raises(AssertionError, match="no mapping"):
        mapping_of(address)


def test_a_reader_tells_of_its_mapping_too() -> None:
    with extent_of(64 * KIB) as extent:
        mapped = MappedExtent(extent.share(1, writable=False), 64 * KIB, writable=False)
        left = list[Callable[[], object]]()
        (span,) = spans({1: (mapped, 4 * KIB)}, [place_of(1, 2)])
        assert span.memory is mapped.memory and span.address == mapped.memory.address + 8 * KIB
        assert not span.memory.writable
        mapped.memory.before_unmap(left.append)
        del mapped, span
        assert len(left) == 1 and extent.is_shared(), "it is mapped yet"
        left[0]()
        assert not extent.is_shared()
