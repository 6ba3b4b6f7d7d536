"""The disk: one process per directory, secrets for their owner's eyes, files that are whole or not there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tiering.files import DirectoryLock, make_directory, read_secret_file, read_text_files, write_secret_file

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


def test_the_same_process_is_refused_too(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(BlockingIOError, match=str(os.getpid())):
        DirectoryLock(tmp_path)
    lock.release()
    lock.release()
    DirectoryLock(tmp_path).release()


def test_a_refused_lock_leaves_no_descriptor(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            DirectoryLock(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before
    lock.release()


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


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError):
        make_directory(tmp_path / "file")
    with pytest.raises(OSError):
        make_directory(tmp_path / "file" / "store")
    assert (tmp_path / "file").read_text() == "kept"


# Secrets --------------------------------------------------------------------------------------------------------------


def test_a_secret_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    before = os.umask(0)
    try:
        write_secret_file(path, b"secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret_file(path) == b"secret"
    assert os.listdir(tmp_path) == ["keys"], "no draft is left"


@pytest.mark.parametrize("contents", [b"", b"x", b"long" * 100_000])
def test_secrets_of_any_length(tmp_path: Path, contents: bytes) -> None:
    write_secret_file(tmp_path / "keys", contents)
    assert read_secret_file(tmp_path / "keys") == contents


def test_no_file_is_no_secret(tmp_path: Path) -> None:
    assert read_secret_file(tmp_path / "keys") is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_a_secret_that_others_could_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    write_secret_file(path, b"secret")
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"{mode:04o}"):
        read_secret_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode and path.read_bytes() == b"secret"


def test_a_draft_of_a_crash_is_overwritten_and_closed_to_others(tmp_path: Path) -> None:
    draft = tmp_path / "keys.new"
    draft.write_bytes(b"half a file of somebody, longer than the new one")
    draft.chmod(0o666)
    write_secret_file(tmp_path / "keys", b"secret")
    assert read_secret_file(tmp_path / "keys") == b"secret" and not draft.exists()


def test_a_write_that_fails_leaves_the_old_contents(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_secret_file(path, b"old")
    (tmp_path / "keys.new").mkdir()
    with pytest.raises(OSError):
        write_secret_file(path, b"new")
    assert read_secret_file(path) == b"old"


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    versions = [bytes([number]) * 50_000 for number in range(1, 30)]
    write_secret_file(path, versions[0])
    seen: set[bytes | None] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(read_secret_file(path))

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
