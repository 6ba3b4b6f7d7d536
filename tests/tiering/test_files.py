"""The disk: one process per directory, secrets for their owner's eyes, files that are whole or not there.

What slabs share with every other implementation of `Files` is in contract/test_files.py; here is what they do on a
real disk: direct I/O and its refusal, full disks, transfers that stop half-way, descriptors.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descriptors import open_files, opened_since
from small_disk import files_of_at_most
from tiering.files import (
    DirectoryLock,
    ReadingLock,
    listening_socket,
    make_directory,
    read_secret_file,
    read_text_files,
    write_secret_file,
)
from tiering.nvme.slab_files import DirectFiles, ReadOnlyFiles
from waiting import together

MOST = 1 << 20
ROOT = Path(__file__).resolve().parents[2]

HOLD = """
import sys
from pathlib import Path
from tiering.files import DirectoryLock
try:
    lock = DirectoryLock(Path(sys.argv[1]))
except BlockingIOError as error:
    print("refused", error, flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
"""


def another_process(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str], *, kill: bool = False) -> None:
    if kill:
        process.kill()
    process.communicate("\n" if not kill else None, timeout=30)


# The lock -------------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    other = another_process(tmp_path)
    assert said(other) == f"refused {os.getpid()}"
    finish(other)
    lock.release()
    later = another_process(tmp_path)
    assert said(later) == "held"
    with pytest.raises(BlockingIOError, match=str(later.pid)):
        DirectoryLock(tmp_path)
    finish(later)
    DirectoryLock(tmp_path).release()


def test_a_process_that_is_killed_lets_go(tmp_path: Path) -> None:
    other = another_process(tmp_path)
    assert said(other) == "held"
    finish(other, kill=True)
    DirectoryLock(tmp_path).release()


def test_a_lock_is_held_also_where_a_full_disk_takes_no_name_of_its_holder(tmp_path: Path) -> None:
    with files_of_at_most(0):
        lock = DirectoryLock(tmp_path)
        with pytest.raises(BlockingIOError):
            DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


def test_a_socket_whose_owner_is_stuck_is_in_use(tmp_path: Path) -> None:
    """So many wait to be let in that one more would wait for ever."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.bind(str(path))
        stuck.listen(0)
        waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(4)]
        for one in waiting:
            one.connect_ex(str(path))
        with pytest.raises(OSError, match="in use"):
            listening_socket(path, 0o600)
        for one in waiting:
            one.close()
    with listening_socket(path, 0o640) as mine:
        assert stat.S_IMODE(path.stat().st_mode) == 0o640 and mine.getsockname() == str(path)
    path.unlink()
    path.write_text("no socket")
    with pytest.raises(OSError, match="it is a file, where a socket is to be"):
        listening_socket(path, 0o600)
    assert path.read_text() == "no socket"


def test_the_lock_is_for_its_owner_and_is_not_inherited(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    lock.release()
    DirectoryLock(tmp_path).release()
    child.communicate(b"\n", timeout=30)


FORK = """
import os, sys
from pathlib import Path
from tiering.files import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
go, come = os.pipe(), os.pipe()
child = os.fork()
if not child:
    lock.release()
    os.write(come[1], b"released")
    os.read(go[0], 1)
    os._exit(0)
os.read(come[0], 8)
try:
    DirectoryLock(Path(sys.argv[1]))
except BlockingIOError:
    print("still held")
second = os.fork()
if not second:
    os.read(go[0], 1)
    os._exit(0)
lock.release()
DirectoryLock(Path(sys.argv[1])).release()
print("free")
os.write(go[1], b"..")
os.waitpid(child, 0), os.waitpid(second, 0)
"""


def test_a_forked_child_neither_ends_the_lock_nor_keeps_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.split("\n") == ["still held", "free", ""], done.stderr


# Directories ----------------------------------------------------------------------------------------------------------


def test_a_new_directory_is_for_its_owner(tmp_path: Path) -> None:
    make_directory(tmp_path / "deep" / "store")
    assert stat.S_IMODE((tmp_path / "deep" / "store").stat().st_mode) == 0o700


def test_one_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o755)
    (tmp_path / "store" / "file").write_text("kept")
    make_directory(tmp_path / "store")
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o755
    assert (tmp_path / "store" / "file").read_text() == "kept"


# Secrets --------------------------------------------------------------------------------------------------------------


def test_a_secret_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    before = os.umask(0)
    try:
        write_secret_file(path, b"secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret_file(path, MOST) == b"secret"
    assert os.listdir(tmp_path) == ["keys"], "no draft is left"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_a_secret_that_others_could_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    write_secret_file(path, b"secret")
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"{mode:04o}"):
        read_secret_file(path, MOST)
    assert stat.S_IMODE(path.stat().st_mode) == mode and path.read_bytes() == b"secret"


def test_a_draft_of_a_crash_is_overwritten_and_closed_to_others(tmp_path: Path) -> None:
    draft = tmp_path / "keys.new"
    draft.write_bytes(b"half a file of somebody, longer than the new one")
    draft.chmod(0o666)
    write_secret_file(tmp_path / "keys", b"secret")
    assert read_secret_file(tmp_path / "keys", MOST) == b"secret" and not draft.exists()


def test_a_write_that_fails_leaves_the_old_contents(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_secret_file(path, b"old")
    (tmp_path / "keys.new").mkdir()
    with pytest.raises(OSError):
        write_secret_file(path, b"new")
    assert read_secret_file(path, MOST) == b"old"


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    versions = [bytes([number]) * 50_000 for number in range(1, 30)]
    write_secret_file(path, versions[0])
    seen: set[bytes | None] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(read_secret_file(path, MOST))

    reader = threading.Thread(target=read)
    reader.start()
    for version in versions:
        write_secret_file(path, version)
    done.set()
    reader.join()
    assert seen <= set(versions) and seen


def test_facts_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "fact").write_text("7\n")
    found = read_text_files([str(tmp_path / "fact"), str(tmp_path / "missing"), str(tmp_path)])
    assert found == {str(tmp_path / "fact"): "7\n"}


# A look without a trace -----------------------------------------------------------------------------------------------


def traces(directory: Path) -> dict[str, tuple[int, int]]:
    """When each file and the directory itself was last changed in any way."""
    found = {str(path): path.stat() for path in [directory, *directory.rglob("*")]}
    return {path: (facts.st_mtime_ns, facts.st_ctime_ns) for path, facts in found.items()}


@pytest.mark.slow
def test_a_lock_for_reading_keeps_others_out_and_writes_nothing(tmp_path: Path) -> None:
    DirectoryLock(tmp_path).release()
    (tmp_path / "lock").write_text("999999\n")
    before = traces(tmp_path)
    lock = ReadingLock(tmp_path)
    assert traces(tmp_path) == before
    other = another_process(tmp_path)
    assert said(other) == f"refused {os.getpid()}", "not the number that the file still says"
    finish(other)
    with pytest.raises(BlockingIOError, match=str(os.getpid())):
        ReadingLock(tmp_path)
    lock.release()
    lock.release()
    held = another_process(tmp_path)
    assert said(held) == "held"
    open_before = open_files()
    with pytest.raises(BlockingIOError, match=str(held.pid)):
        ReadingLock(tmp_path)
    assert not opened_since(open_before)
    finish(held)


def test_files_that_are_only_read(tmp_path: Path) -> None:
    files = DirectFiles(tmp_path)
    store(files)
    files.close()
    (tmp_path / "b.slab.new").write_bytes(b"a draft")
    before = traces(tmp_path)
    looked = ReadOnlyFiles(tmp_path)
    assert looked.sizes() == {"a.slab": len(DATA)} and looked.direct is files.direct
    assert contents(looked, "a.slab") == DATA
    for act in (
        lambda: looked.write("a.slab", 0, aligned(DATA[:PAGE])),
        lambda: looked.create("c.slab", PAGE),
        lambda: looked.remove("a.slab"),
    ):
        with pytest.raises(OSError):
            act()
    assert contents(looked, "a.slab") == DATA
    looked.close()
    assert traces(tmp_path) == before and descriptors(tmp_path) == 0


def test_files_on_a_file_system_that_cannot_be_written(mounted: Callable[..., Path]) -> None:
    place = mounted("tmpfs", "size=1m")
    files = DirectFiles(place)
    store(files)
    files.close()
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True, timeout=30)
    looked = ReadOnlyFiles(place)
    assert contents(looked, "a.slab") == DATA
    looked.close()


# Slabs ----------------------------------------------------------------------------------------------------------------

PAGE = 4096
DATA = b"".join(bytes([number]) * PAGE for number in range(1, 9))


def aligned(contents: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(contents))
    memory[:] = contents
    return memoryview(memory)


def store(files: DirectFiles) -> None:
    files.create("a.slab", len(DATA))
    files.write("a.slab", 0, aligned(DATA))


def contents(files: DirectFiles, name: str, length: int = len(DATA)) -> bytes:
    into = aligned(bytes(length))
    files.read(name, 0, into)
    return bytes(into)


def descriptors(directory: Path) -> int:
    """How many descriptors of this process are of files in the directory."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the one that the listing itself used
            continue
    return sum(link.startswith(f"{directory}/") for link in links)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DirectFiles]:
    files = DirectFiles(tmp_path / "slabs")
    yield files
    files.close()


@pytest.fixture
def direct_folder(folder: DirectFiles, tmp_path: Path) -> DirectFiles:
    if not folder.direct:
        pytest.skip(f"{tmp_path} is on a file system without direct I/O")
    return folder


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system that lives in memory, for as long as the test runs."""
    places: list[Path] = []

    def mount(kind: str, options: str = "rw") -> Path:
        place = tmp_path / kind
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", kind, "-o", options, kind, str(place)], capture_output=True, text=True, timeout=30
        )
        if done.returncode:
            pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", str(place)], check=True, timeout=30)


def fail(monkeypatch: pytest.MonkeyPatch, call: str, nth: int, number: int) -> None:
    """From now on the nth call of this function of `os` in the disk's file fails; the others are real."""
    really, calls = getattr(os, call), [0]

    def failing(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise OSError(number, os.strerror(number))
        return really(*arguments, **named)

    monkeypatch.setattr(f"tiering.files.os.{call}", failing)


def test_slabs_are_for_their_owner_and_outlive_the_process(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = DirectFiles(tmp_path / "deep" / "slabs")
        files.create("a.slab", len(DATA))
    finally:
        os.umask(before)
    files.write("a.slab", 0, aligned(DATA))
    files.close()
    assert stat.S_IMODE((tmp_path / "deep" / "slabs").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "deep" / "slabs" / "a.slab").stat().st_mode) == 0o600
    again = DirectFiles(tmp_path / "deep" / "slabs")
    assert again.sizes() == {"a.slab": len(DATA)} and contents(again, "a.slab") == DATA
    again.close()


def test_the_space_of_a_slab_is_allocated(folder: DirectFiles, tmp_path: Path) -> None:
    folder.create("a.slab", 64 * PAGE)
    assert (tmp_path / "slabs" / "a.slab").stat().st_blocks * 512 >= 64 * PAGE


def test_what_is_no_slab_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "data.mdb").write_text("kept")
    (tmp_path / "lock").write_text("kept" * PAGE)
    (tmp_path / "folder.slab").mkdir()
    (tmp_path / "link.slab").symlink_to(tmp_path / "lock")
    (tmp_path / "folder.slab.new").mkdir()
    before = sorted(tmp_path.rglob("*"))
    files = DirectFiles(tmp_path)
    assert files.sizes() == {}
    for name in ("folder.slab", "link.slab"):
        with pytest.raises(OSError):
            files.read(name, 0, aligned(bytes(PAGE)))
        with pytest.raises(FileExistsError):
            files.create(name, PAGE)
    files.close()
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "lock").read_text() == "kept" * PAGE
    assert (tmp_path / "index" / "data.mdb").read_text() == "kept"


def test_a_draft_of_a_crash_is_no_slab_and_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.slab.new").write_bytes(bytes(3 * PAGE))
    (tmp_path / "direct-io.probe").write_bytes(b"x")
    files = DirectFiles(tmp_path)
    assert os.listdir(tmp_path) == []
    files.create("a.slab", PAGE)
    assert files.sizes() == {"a.slab": PAGE}
    files.close()


@pytest.mark.parametrize(
    ("call", "nth"), [("open", 1), ("posix_fallocate", 1), ("fsync", 1), ("rename", 1), ("open", 2), ("fsync", 2)]
)
def test_a_create_that_fails_leaves_nothing(
    call: str, nth: int, folder: DirectFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, call, nth, errno.EIO)
    with pytest.raises(OSError) as caught:
        folder.create("a.slab", len(DATA))
    assert caught.value.errno == errno.EIO
    assert os.listdir(tmp_path / "slabs") == [] and folder.sizes() == {} and descriptors(tmp_path) == 0
    folder.create("a.slab", len(DATA))
    assert contents(folder, "a.slab") == bytes(len(DATA))


def test_a_slab_for_which_there_is_no_space(mounted: Callable[..., Path]) -> None:
    place = mounted("tmpfs", "size=1m")
    files = DirectFiles(place)
    with pytest.raises(OSError) as caught:
        files.create("large.slab", 2 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(place) == [] and files.sizes() == {}
    files.create("small.slab", 1 << 19)
    files.write("small.slab", 0, aligned(DATA))
    files.sync("small.slab")
    files.remove("small.slab")
    files.create("whole.slab", 1 << 20)
    files.close()


def test_a_full_disk_is_opened_and_its_slabs_are_used(mounted: Callable[..., Path]) -> None:
    place = mounted("tmpfs", "size=1m")
    files = DirectFiles(place)
    files.create("a.slab", 1 << 20)
    direct = files.direct
    files.close()
    files = DirectFiles(place)
    assert files.direct == direct and os.listdir(place) == ["a.slab"]
    files.write("a.slab", 0, aligned(DATA))
    assert contents(files, "a.slab") == DATA
    files.close()


# Direct I/O -----------------------------------------------------------------------------------------------------------


def test_direct_io_is_used_where_it_can_be(direct_folder: DirectFiles, tmp_path: Path) -> None:
    assert os.listdir(tmp_path / "slabs") == [], "the probe is gone"
    store(direct_folder)
    (flags,) = [
        int(line.split()[1], 8)
        for number in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{number}") == str(tmp_path / "slabs" / "a.slab")
        for line in Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
        if line.startswith("flags:")
    ]
    assert flags & os.O_DIRECT and flags & os.O_CLOEXEC


def test_a_file_system_that_refuses_direct_io(mounted: Callable[..., Path]) -> None:
    place = mounted("ramfs")
    files = DirectFiles(place)
    assert not files.direct and os.listdir(place) == []
    files.create("a.slab", len(DATA))
    files.write("a.slab", PAGE, memoryview(DATA)[: 2 * PAGE])
    files.sync("a.slab")
    assert contents(files, "a.slab") == bytes(PAGE) + DATA[: 2 * PAGE] + bytes(5 * PAGE)
    files.close()


@pytest.mark.parametrize("call", ["open", "pwritev", "preadv"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_refusal_may_come_late_and_a_broken_disk_is_none(
    number: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, call, 1, number)
    if number == errno.EIO:
        with pytest.raises(OSError):
            DirectFiles(tmp_path)
    else:
        files = DirectFiles(tmp_path)
        assert not files.direct
        files.close()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [] and descriptors(tmp_path) == 0


@pytest.mark.parametrize("shift", [0, 1, 8, 512, PAGE - 1])
def test_memory_that_begins_at_no_page(shift: int, direct_folder: DirectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    unaligned: list[int] = []
    for call in ("preadv", "pwritev"):
        really = getattr(os, call)

        def watch(descriptor: int, buffers: list[memoryview], offset: int, really: Callable[..., int] = really) -> int:
            address = np.frombuffer(buffers[0], np.uint8).ctypes.data
            unaligned.extend([address] if address % PAGE else [])
            return really(descriptor, buffers, offset)

        monkeypatch.setattr(f"tiering.files.os.{call}", watch)
    direct_folder.create("a.slab", len(DATA))
    direct_folder.write("a.slab", 0, aligned(bytes(shift) + DATA)[shift:])
    memory = aligned(b"x" * (shift + len(DATA) + 1))
    direct_folder.read("a.slab", 0, memory[shift:-1])
    assert bytes(memory) == b"x" * shift + DATA + b"x", "not a byte beside it is touched"
    header = DATA[:PAGE]
    direct_folder.write("a.slab", PAGE, memoryview(header))
    assert contents(direct_folder, "a.slab") == header * 2 + DATA[2 * PAGE :]
    assert unaligned == []


def test_after_a_sync_a_buffered_slab_leaves_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "open", 1, errno.EINVAL)
    files = DirectFiles(tmp_path)
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr("tiering.files.os.posix_fadvise", lambda _, *arguments: asked.append(arguments))
    store(files)
    assert asked == []
    files.sync("a.slab")
    assert asked == [(0, 0, os.POSIX_FADV_DONTNEED)] and contents(files, "a.slab") == DATA
    files.close()


# Transfers that stop --------------------------------------------------------------------------------------------------


def shorten(monkeypatch: pytest.MonkeyPatch, call: str, limit: Callable[[int], int]) -> list[int]:
    """Let a call move no more than `limit` of the bytes that it was asked for. Returns the offsets it is called at."""
    really, offsets = getattr(os, call), []

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        moved = limit(len(buffers[0]))
        whole_pages = -(-moved // PAGE) * PAGE  # the call itself may be a direct one
        return min(moved, really(descriptor, [buffers[0][:whole_pages]], offset)) if moved else 0

    monkeypatch.setattr(f"tiering.files.os.{call}", short)
    return offsets


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize(
    ("kind", "most", "step"),
    [
        *(("either", pages * PAGE, pages * PAGE) for pages in (1, 3, 7)),
        ("direct", 2 * PAGE + 512, 2 * PAGE),
        ("buffered", 10_001, 10_001),
    ],
)
def test_a_short_transfer_goes_on_where_it_stopped(
    kind: str, most: int, step: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A direct one that stops inside a page repeats the page; a buffered one may stop anywhere."""
    if kind == "buffered":
        fail(monkeypatch, "open", 1, errno.EINVAL)
    files = DirectFiles(tmp_path)
    if kind == "direct" and not files.direct:
        pytest.skip(f"{tmp_path} is on a file system without direct I/O")
    files.create("a.slab", len(DATA))
    offsets = shorten(monkeypatch, call, lambda asked: min(asked, most))
    files.write("a.slab", 0, memoryview(DATA) if kind == "buffered" else aligned(DATA))
    assert contents(files, "a.slab") == DATA
    assert offsets == list(range(0, len(DATA), step))
    files.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("before_bytes", [0, PAGE])
def test_a_transfer_that_moves_nothing_is_an_error(
    call: str, before_bytes: int, folder: DirectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.create("a.slab", len(DATA))
    offsets = shorten(monkeypatch, call, lambda asked: before_bytes if asked == len(DATA) else 0)
    with pytest.raises(OSError) as caught:
        folder.write("a.slab", 0, aligned(DATA))
        contents(folder, "a.slab")
    assert caught.value.errno == errno.EIO and len(offsets) == (2 if before_bytes else 1)


@pytest.mark.parametrize("left", [0, PAGE, PAGE + 100])
def test_a_slab_that_was_cut_short_is_not_read_past_its_end(left: int, folder: DirectFiles, tmp_path: Path) -> None:
    store(folder)
    os.truncate(tmp_path / "slabs" / "a.slab", left)
    with pytest.raises(OSError) as caught:
        contents(folder, "a.slab")
    assert caught.value.errno == errno.EIO
    folder.close()
    again = DirectFiles(tmp_path / "slabs")
    assert again.sizes() == {"a.slab": left}
    with pytest.raises(OSError):
        again.write("a.slab", PAGE, aligned(DATA[:PAGE]))
    again.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev", "fdatasync", "unlink"])
def test_what_the_disk_says_is_raised(call: str, folder: DirectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.create("a.slab", len(DATA))
    fail(monkeypatch, call, 1, errno.EIO)
    with pytest.raises(OSError) as caught:
        folder.write("a.slab", 0, aligned(DATA))
        folder.sync("a.slab")
        contents(folder, "a.slab")
        folder.remove("a.slab")
    assert caught.value.errno == errno.EIO
    folder.write("a.slab", 0, aligned(DATA))
    assert contents(folder, "a.slab") == DATA, "the slab can be used again"


# Descriptors ----------------------------------------------------------------------------------------------------------


def test_a_slab_has_one_descriptor_until_it_is_let_go(folder: DirectFiles, tmp_path: Path) -> None:
    names = [f"{number}.slab" for number in range(5)]
    for name in names:
        folder.create(name, PAGE)
    together(lambda number: contents(folder, names[number % 5], PAGE), 20)
    assert descriptors(tmp_path) == 5
    folder.remove(names[0])
    assert descriptors(tmp_path) == 4 and not (tmp_path / "slabs" / names[0]).exists()
    folder.close()
    folder.close()
    assert descriptors(tmp_path) == 0


def test_close_does_not_take_a_descriptor_from_a_call_that_uses_it(
    folder: DirectFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(folder)
    begun, closed, really = threading.Event(), threading.Event(), os.preadv

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        begun.set()
        assert closed.wait(30)
        return really(descriptor, buffers, offset)

    monkeypatch.setattr("tiering.files.os.preadv", slow)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(contents(folder, "a.slab")))
    reader.start()
    assert begun.wait(30)
    folder.close()
    assert descriptors(tmp_path) == 1
    closed.set()
    reader.join()
    assert found == [DATA] and descriptors(tmp_path) == 0
