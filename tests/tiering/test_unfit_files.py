"""What stands where a file or a directory is to be: nobody waits for it, nobody reads it to the end, and a line says
what it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.block.errors import BadInput, KeysUnusable, StoreError
from kvstore.service.settings import MOST_CONFIGURATION_BYTES, read_configuration
from tiering.files import (
    DirectoryLock,
    ReadingLock,
    Unfit,
    listening_socket,
    make_directory,
    read_file,
    read_secret_file,
    write_secret_file,
)
from tiering.nvme.lmdb_index import DIGEST_FILE, is_as_closed
from tiering.nvme.slab_files import DirectFiles

ROOT = Path(__file__).resolve().parents[2]
MOST = 1000


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


STANDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "a FIFO"),
    "directory": (os.mkdir, "a directory"),
    "socket": (bound_socket, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a link to a device"),
    "link to a fifo": (lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")), "a link to a FIFO"),
    "link to nothing": (lambda path: path.symlink_to("missing"), "a link that leads nowhere"),
    "loop": (lambda path: path.symlink_to(path), "a link that leads back to itself"),
}
NO_FILE = pytest.mark.parametrize("stands", STANDS)


def put_there(stands: str, path: Path) -> str:
    """Returns it in words."""
    make, words = STANDS[stands]
    make(path)
    return words


def soon(work: Callable[[], object]) -> object:
    """What it returns, or raises; a test fails where it waits."""
    result: list[object] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert result, "it waits"
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


@NO_FILE
@pytest.mark.parametrize("read", [read_secret_file, read_file])
def test_what_is_no_file_is_not_read(read: Callable[[Path, int], object], stands: str, tmp_path: Path) -> None:
    words = put_there(stands, tmp_path / "keys")
    with pytest.raises(Unfit) as refused:
        soon(lambda: read(tmp_path / "keys", MOST))
    assert str(refused.value) == f"keys is {words}, where a file is to be; move it away"


@pytest.mark.parametrize("read", [read_secret_file, read_file])
@pytest.mark.parametrize("size", [0, 1, MOST, MOST + 1, 1 << 34])
def test_no_more_is_read_than_a_file_may_have(read: Callable[[Path, int], object], size: int, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    os.truncate(path, size)
    if size <= MOST:
        assert read(path, MOST) == bytes(size)
        return
    with pytest.raises(Unfit, match=f"it has {size} bytes, and {MOST} are the most"):
        read(path, MOST)


def test_no_process_reads_more_of_a_file_than_it_may_have() -> None:
    """Also of one whose size the kernel does not say."""
    path = Path("/proc/self/smaps")
    assert path.stat().st_size == 0 and len(path.read_bytes()) > 3 << 16
    with pytest.raises(Unfit, match="it has") as refused:
        read_file(path, MOST)
    assert int(str(refused.value).split()[2]) <= MOST + (1 << 16), "and no more was read"


def test_a_secret_behind_a_link_is_read(tmp_path: Path) -> None:
    write_secret_file(tmp_path / "mounted", b"secret")
    (tmp_path / "keys").symlink_to("mounted")
    assert read_secret_file(tmp_path / "keys", MOST) == b"secret"


@NO_FILE
def test_what_stands_where_a_draft_is_written_holds_up_nobody(stands: str, tmp_path: Path) -> None:
    put_there(stands, tmp_path / "keys.new")
    if stands == "directory":
        with pytest.raises(OSError):
            soon(lambda: write_secret_file(tmp_path / "keys", b"secret"))
        return
    soon(lambda: write_secret_file(tmp_path / "keys", b"secret"))
    assert read_secret_file(tmp_path / "keys", MOST) == b"secret" and not (tmp_path / "keys").is_symlink()


@NO_FILE
@pytest.mark.parametrize("take", [DirectoryLock, ReadingLock])
def test_a_lock_that_is_no_file_is_refused(take: Callable[[Path], object], stands: str, tmp_path: Path) -> None:
    words = put_there(stands, tmp_path / "lock")
    if stands == "link to nothing" and take is DirectoryLock:
        DirectoryLock(tmp_path).release()  # it is made where the link leads
        assert (tmp_path / "missing").is_file()
        return
    with pytest.raises(Unfit, match=f"lock is {words}, where a file is to be"):
        soon(lambda: take(tmp_path))


@NO_FILE
def test_where_direct_io_is_tried_nothing_is_in_the_way(stands: str, tmp_path: Path) -> None:
    put_there(stands, tmp_path / "direct-io.probe")
    if stands == "directory":
        with pytest.raises(OSError):
            soon(lambda: DirectFiles(tmp_path))
        return
    files = soon(lambda: DirectFiles(tmp_path))
    assert isinstance(files, DirectFiles)
    files.close()


@NO_FILE
def test_a_note_that_is_no_file_says_nothing(stands: str, tmp_path: Path) -> None:
    put_there(stands, tmp_path / DIGEST_FILE)
    assert soon(lambda: is_as_closed(tmp_path / "data.mdb")) is False


@pytest.mark.parametrize("stands", [one for one in STANDS if one != "directory"])
def test_a_directory_that_is_none_is_refused(stands: str, tmp_path: Path) -> None:
    words = put_there(stands, tmp_path / "kv")
    with pytest.raises(Unfit, match=f"it is {words}, where a directory is to be"):
        make_directory(tmp_path / "kv")


@pytest.mark.parametrize("stands", [one for one in STANDS if one != "socket"])
def test_a_socket_that_is_none_is_refused(stands: str, tmp_path: Path) -> None:
    words = put_there(stands, tmp_path / "kv.sock")
    with pytest.raises(Unfit, match=f"it is {words}, where a socket is to be"):
        listening_socket(tmp_path / "kv.sock", 0o600)


@NO_FILE
@pytest.mark.parametrize("name", ["keys", "lock", "nvme", "nvme/index", "nvme/00000000.slab"])
def test_a_store_is_refused_by_one_line_that_says_what_was_found(name: str, stands: str, tmp_path: Path) -> None:
    options = {"dram": "8MiB", "nvme": "16MiB"}
    kvstore.open(f"embedded:{tmp_path}/kv", **options).close()
    path = tmp_path / "kv" / name
    path.rename(tmp_path / "moved")
    if (stands == "directory" and name in ("nvme", "nvme/index")) or (stands == "link to nothing" and name == "lock"):
        return  # there is one, and it is empty; it is made where the link leads
    words = put_there(stands, path)
    with pytest.raises(StoreError) as refused:
        soon(lambda: kvstore.open(f"embedded:{tmp_path}/kv", **options))
    line = str(refused.value)
    assert isinstance(refused.value, KeysUnusable if name == "keys" else BadInput)
    assert str(tmp_path / "kv") in line and "\n" not in line and "Errno" not in line, line
    if name != "nvme/index":
        assert words in line, line


@NO_FILE
def test_names_that_are_no_file_are_done_without(stands: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = put_there(stands, tmp_path / "names")
    soon(lambda: kvstore.open(f"embedded:{tmp_path}", dram="8MiB").close())
    (line,) = [one.getMessage() for one in caplog.records if one.name == "kvstore.block.display_names"]
    assert words in line and "\n" not in line


@NO_FILE
def test_a_configuration_that_is_no_file_is_refused(stands: str, tmp_path: Path) -> None:
    words = put_there(stands, tmp_path / "kv.toml")
    with pytest.raises(BadInput) as refused:
        soon(lambda: read_configuration(tmp_path / "kv.toml"))
    assert words in str(refused.value) and "give a TOML file" in str(refused.value)


def test_a_configuration_is_of_a_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "kv.toml"
    path.write_bytes(b"#" * MOST_CONFIGURATION_BYTES)
    assert len(read_configuration(path)) == MOST_CONFIGURATION_BYTES
    os.truncate(path, 1 << 34)
    with pytest.raises(BadInput, match="17179869184 bytes"):
        read_configuration(path)


STARTING = """
import socket, sys, time
from kvstore.service.serve import KeeperWire
KeeperWire(int(sys.argv[1]), bytes)
print("starting", flush=True)
time.sleep(60)
"""
KEEPER = f"""
import socket, subprocess, sys, time
ours, theirs = socket.socketpair()
subprocess.Popen([sys.executable, "-c", {STARTING!r}, str(theirs.fileno())], pass_fds=[theirs.fileno()])
time.sleep(60)
"""


def test_a_sidecar_that_is_held_up_at_the_start_goes_with_its_keeper() -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )
    assert keeper.stdout is not None and keeper.stdout.readline() == b"starting\n"
    keeper.kill()
    keeper.wait()
    assert soon(keeper.stdout.read) == b"", "the sidecar has its end of it still"
    keeper.stdout.close()
