"""The one door to the disk, but for slabs (`tiering.nvme.slab_files`): a store's directory, its lock, its small files,
its sockets.

Small files are written whole or not at all (new file, sync, rename, sync of the directory).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tiering.failpoint import Reach, go_on

_BACKLOG = 128
_LOCK_BYTES = 16


class Unfit(FileExistsError):
    """Something else stands at the path, or a file that no store wrote: says what was found and what belongs there."""

    def __init__(self, found: str) -> None:
        super().__init__(errno.EEXIST, found)

    def __str__(self) -> str:
        return str(self.strerror)


class _LockFile:
    _descriptor = -1

    def release(self) -> None:
        """Unlock. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class DirectoryLock(_LockFile):
    """An exclusive lock on a directory, held by the kernel for as long as this process lives and has it open."""

    def __init__(self, directory: Path) -> None:
        self._owner = os.getpid()
        self._path = directory / "lock"
        self._descriptor = open_regular(directory / "lock", os.O_RDWR | os.O_CREAT)
        _take_lock(self._descriptor)
        with suppress(OSError):  # a full disk; the kernel knows the holder, too
            os.pwrite(self._descriptor, f"{self._owner}\n".ljust(_LOCK_BYTES).encode(), 0)

    def confirm(self) -> None:
        """Raises `OSError` unless the directory's name still leads to the one that is locked."""
        try:
            is_ours = os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            words = f"{self._path.parent} is not the directory that is in use; bring that back, or start again"
            raise FileNotFoundError(errno.ENOENT, words)

    def close_after_fork(self) -> None:
        """In a forked child: the lock is the parent's alone, and must not outlive it here."""
        super().release()

    def release(self) -> None:
        """Unlock. Safe to call twice."""
        if self._descriptor >= 0 and os.getpid() == self._owner:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child neither keeps it alive nor ends it
        super().release()


class ReadingLock(_LockFile):
    """Keeps every other process out of a directory that is only inspected: the same lock, and nothing is written for
    it.

    Without a lock file no process has the directory open, and nothing is locked. Raises `BlockingIOError` naming the
    process that has it.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._descriptor = open_regular(directory / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return
        _take_lock(self._descriptor)


def _take_lock(descriptor: int) -> None:
    """Lock the file, or close it and raise `BlockingIOError` with the holder's process number."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        holder = flock_holder(os.fstat(descriptor)) or written or "unknown"
        os.close(descriptor)
        raise BlockingIOError(holder) from None


def flock_holder(status: os.stat_result) -> int | None:
    """The process that has locked this file, as the kernel tells; None where none has, or it cannot be seen."""
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in "".join(read_text_files(["/proc/locks"]).values()).splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted and fields[4].isdigit():
            return int(fields[4])
    return None


def names_in(directory: Path) -> set[str]:
    """The names in a directory. Raises `OSError`."""
    return set(os.listdir(directory))


def make_directory(directory: Path) -> None:
    """Create a directory (and its parents) that only its owner can read; an existing one is left as it is. Raises
    `OSError`, and `Unfit` if something else has the name."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise Unfit(f"it is {what_stands_at(directory)}, where a directory is to be") from None


def read_text_files(paths: Iterable[str]) -> dict[str, str]:
    """The contents of those of the files that exist and can be read: facts about the machine."""
    found = {}
    for path in paths:
        try:
            found[path] = Path(path).read_text()
        except OSError:
            continue
    return found


def read_secret_file(path: Path, most_bytes: int) -> bytes | None:
    """The contents, or None without such a file. Raises `PermissionError` if others could read it, `Unfit` if it is no
    file or longer."""
    try:
        return read_file(path, most_bytes, _refuse_shared)
    except FileNotFoundError:
        return None


def _refuse_shared(status: os.stat_result) -> None:
    if status.st_mode & 0o077:
        raise PermissionError(f"mode {stat.S_IMODE(status.st_mode):04o}")


def read_file(path: Path, most_bytes: int, check: Callable[[os.stat_result], None] = lambda status: None) -> bytes:
    """The contents of a file. check: raises if it must not be read. Raises `OSError`, `Unfit` if no file or longer."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        status = os.fstat(file.fileno())
        check(status)
        raw = file.read(most_bytes + 1) if status.st_size <= most_bytes else b""
    size = max(status.st_size, len(raw))
    if size > most_bytes:
        raise Unfit(f"it has {size} bytes, and {most_bytes} are the most that it may have")
    return raw


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file; never waits for anything else that may stand there. Raises `OSError`."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # What a link leads to may just not be mounted: then there are keys, and no new ones are to be made.
        is_dangling = error.errno == errno.ENOENT and path.is_symlink()
        if is_dangling or error.errno in (errno.EISDIR, errno.ENXIO, errno.ELOOP, errno.ENODEV):
            refuse_other_than_file(path)
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            refuse_other_than_file(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_other_than_file(path: Path) -> None:
    found = what_stands_at(path)
    if found != "a file":
        raise Unfit(f"{path.name} is {found}, where a file is to be; move it away")


def what_stands_at(path: Path) -> str:
    is_link = False
    try:
        is_link = stat.S_ISLNK(path.lstat().st_mode)
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link that leads nowhere" if is_link else "nothing"
    except OSError as error:
        return "a link that leads back to itself" if error.errno == errno.ELOOP else f"unknown ({error.strerror})"
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return ("a link to " if is_link else "") + kinds.get(stat.S_IFMT(mode), "of an unknown kind")


def open_again(descriptor: int, *, writable: bool) -> int:
    """The file behind a descriptor as a new open file, with locks and a mode of its own. Raises `OSError`, also while
    another process has a lease on it: otherwise the kernel would have this one wait for the lease holder, for up to 45
    seconds."""
    access = os.O_RDWR if writable else os.O_RDONLY
    return os.open(f"/proc/self/fd/{descriptor}", access | os.O_NONBLOCK | os.O_CLOEXEC)


def listening_socket(path: Path, mode: int) -> socket.socket:
    """A UNIX socket that clients with the mode's permission can connect to. One left by a dead process is replaced.

    Raises `OSError`: `EADDRINUSE` if a process still listens there, and `Unfit` if something else has the name.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if is_left_socket(path):
            path.unlink()
        sock.bind(os.fspath(path))
        try:
            path.chmod(mode)
            sock.listen(_BACKLOG)  # from here on others can connect
        except BaseException:
            path.unlink()
            raise
    except BaseException:
        sock.close()
        raise
    return sock


def remove_socket(path: Path) -> None:
    path.unlink(missing_ok=True)


def is_left_socket(path: Path) -> bool:
    """Whether it is a UNIX socket at which no process listens. Raises `Unfit` for what is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise Unfit(f"it is {what_stands_at(path)}, where a socket is to be")
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # also where too many wait already to be let in: somebody listens
            return False
    return False


def write_secret_file(path: Path, contents: bytes, reach: Reach = go_on, mode: int = 0o600) -> None:
    """Replace a file that only its owner can read, durably: after this returns, the new contents survive a crash."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # of a process that was killed; or what is no file, which must not be waited for
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as draft:
        os.fchmod(descriptor, mode)
        reach("secret draft made")
        draft.write(contents)
        draft.flush()
        reach("secret written")
        os.fsync(descriptor)
    reach("secret synced")
    os.rename(temporary, path)
    reach("secret renamed")
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in it durable. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
