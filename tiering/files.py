"""The one door to the disk (floor 1): a store's directory, its lock, its key file, and its slabs.

Small files are written whole or not at all (new file, sync, rename, sync of the directory). Slabs are behind the
contract `Files`, so that the tier above can run on a disk that loses power on purpose.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """A folder of slabs: files of a fixed size that are read and written in whole pages of 4 KiB.

    Calls on different pages may run at the same time. Whatever goes wrong raises `OSError`; less than was asked for is
    an error too. What was written is durable when a later `sync` of the same file has returned; before that a crash may
    keep any part of it, down to single sectors, in any order. A file that is being removed must not be used any more.
    """

    def sizes(self) -> dict[str, int]:
        """Every slab's name and bytes."""
        ...

    def create(self, name: str, size_bytes: int) -> None:
        """A new slab of zeros, its space allocated and its name durable."""
        ...

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` from the slab."""
        ...

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write all of `data`."""
        ...

    def sync(self, name: str) -> None:
        """Make what was written durable."""
        ...

    def remove(self, name: str) -> None:
        """Give a slab's space back, durably."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class DirectoryLock:
    """An exclusive lock on a directory, held by the kernel for as long as this process lives and has it open."""

    def __init__(self, directory: Path) -> None:
        self._owner = os.getpid()
        self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise BlockingIOError(holder or "unknown") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{self._owner}\n".encode(), 0)

    def forget(self) -> None:
        """In a forked child: the lock is the parent's alone, and must not outlive it here."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def release(self) -> None:
        """Let others in. Safe to call twice."""
        if self._descriptor >= 0:
            if os.getpid() == self._owner:  # a forked child shares the lock: it neither keeps it alive nor ends it
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


def make_directory(directory: Path) -> None:
    """Create a directory (and its parents) that only its owner can read; one that exists is left as it is."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def read_text_files(paths: Iterable[str]) -> dict[str, str]:
    """The contents of those of the files that exist and can be read: facts about the machine."""
    found = {}
    for path in paths:
        try:
            found[path] = Path(path).read_text()
        except OSError:
            continue
    return found


def read_secret_file(path: Path) -> bytes | None:
    """The contents, or None where there is no such file. Raises `PermissionError` if others could read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & 0o077:
            raise PermissionError(f"mode {mode:04o}")
        chunks = []
        while chunk := os.read(descriptor, 1 << 16):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(descriptor)


def write_secret_file(path: Path, contents: bytes) -> None:
    """Replace a file that only its owner can read, durably: after this returns, the new contents survive a crash."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        written = 0
        while written < len(contents):
            written += os.write(descriptor, contents[written:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
