"""A directory of secrets that nodes share: small files, one for each tenant, that are read and replaced as a whole.

It may be a read-only mount. In a mount of Kubernetes each name is a link to `..data/NAME`, and `..data` is a link to a
directory, a new one after each change: the store follows links, and ignores names that begin with a dot. A name may
stand for anything: the store does not wait for a FIFO, and reads no more of a file than a file of secrets may have.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from kvstore.block.errors import BadInput
from tiering.failpoint import Reach, go_on
from tiering.files import Unfit, make_directory, read_file, write_secret_file

SUFFIX = ".key"
MODE = 0o400
MOST_FILES, MOST_ENTRIES, MOST_FILE_BYTES = 4096, 65536, 64 << 10


class SecretDirectory:
    """One such directory. reach: told of failpoints."""

    def __init__(self, path: Path, reach: Reach = go_on) -> None:
        self.path = path
        self._reach = reach

    def names(self) -> list[str]:
        """The names of files of secrets, sorted. Raises `OSError`, and `Unfit` where there are too many."""
        found = []
        with os.scandir(self.path) as entries:
            for entry in islice(entries, MOST_ENTRIES):
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    found.append(entry.name)
            if len(found) > MOST_FILES or next(entries, None) is not None:
                raise Unfit(f"it has more than {MOST_FILES} files of keys, or {MOST_ENTRIES} of any kind")
        return sorted(found)

    def read(self, name: str) -> bytes:
        """A file's contents. Raises `OSError`; `PermissionError` where others could read it or change it, and `Unfit`
        where it is no file, or longer than one may be."""
        return read_file(self.path / name, MOST_FILE_BYTES, _refuse_shared)

    def stamp(self) -> object:
        """A value that changes when a file comes, goes or is replaced."""
        try:
            return tuple((name, *self._stamp_of(name)) for name in self.names())
        except OSError as error:
            return error.errno, str(error)

    def _stamp_of(self, name: str) -> tuple[int | None, ...]:
        try:
            status = os.stat(self.path / name)
        except OSError as error:
            return (error.errno,)
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context for one operator at a time to change files. Makes the directory. Raises `BadInput`, `OSError`."""
        make_directory(self.path)
        if os.path.lexists(self.path / "..data"):
            raise BadInput(f"{self.path} is a mounted secret; change that one, and it changes in every pod")
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise BadInput(f"another kvstore keys is at work on {self.path}; do it again when it is done") from None
        finally:
            os.close(descriptor)

    def write(self, name: str, contents: bytes) -> None:
        """Replace a file, durably, or leave it as it is. The directory is locked. Raises `OSError`."""
        assert len(contents) <= MOST_FILE_BYTES
        write_secret_file(self.path / name, contents, self._reach, MODE)


def _refuse_shared(status: os.stat_result) -> None:
    # A secret that Kubernetes mounts is root's, and its group may read it where the pod has an fsGroup.
    if status.st_mode & (0o037 if status.st_uid == 0 else 0o077):
        raise PermissionError(0, f"its mode is {stat.S_IMODE(status.st_mode):04o}, and not {MODE:04o}")
