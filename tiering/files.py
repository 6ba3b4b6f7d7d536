"""The one door to the disk: a store's directory, its lock, its key file, and its slabs.

Small files are written whole or not at all (new file, sync, rename, sync of the directory). Slabs are behind the
contract `Files`, so that the tier above can run on a disk that loses power on purpose. Nothing here knows what a slab
holds, and no slab is ever mapped: a bad sector must be an `OSError`, never a signal.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from tiering.failpoint import Reach, go_on
from tiering.tier import FrameSpan

_BACKLOG = 128
_PAGE_BYTES = 4096
_SLAB_SUFFIX = ".slab"
_DRAFT_SUFFIX = ".slab.new"


class Unfit(FileExistsError):
    """Something else stands at the path, or a file that no store wrote: says what was found and what belongs there."""

    def __init__(self, found: str) -> None:
        super().__init__(errno.EEXIST, found)

    def __str__(self) -> str:
        return str(self.strerror)


class Files(Protocol):
    """A folder of slabs: files of a fixed size that are read and written in whole pages of 4 KiB.

    A slab's name is a plain file name that ends in `.slab`. Offsets and lengths are whole pages, in bytes, and lie
    inside the slab. Calls on different pages may run at the same time. Whatever goes wrong raises `OSError`; less than
    was asked for is an error too. What was written is durable when a later `sync` of the same file has returned; before
    that a crash may keep any part of it, down to single sectors, in any order. A file that is being removed must not be
    used any more. After `close` every call raises `OSError(EBADF)`, except another `close`.
    """

    def sizes(self) -> dict[str, int]:
        """Every slab's name and bytes."""
        ...

    def create(self, name: str, size_bytes: int) -> None:
        """A new slab of zeros, its space allocated and its name durable.

        After a failure it is not there; after a crash it is there as a whole or not at all. Raises `FileExistsError`
        for a name that is taken.
        """
        ...

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` from the slab. After a failure its contents are anything."""
        ...

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write all of `data`. After a failure any part of it may have been written."""
        ...

    def sync(self, name: str) -> None:
        """Make what was written durable.

        When this fails, everything written since the last sync that succeeded must be treated as lost, even if it can
        still be read and even if a later sync succeeds: the kernel reports a failed write-back once, then forgets it.
        """
        ...

    def remove(self, name: str) -> None:
        """Give a slab's space back, durably. After a failure it may be there or not."""
        ...

    def close(self) -> None: ...


class DirectFiles:
    """`Files` in a directory, past the page cache where the file system allows it.

    Direct I/O costs a sixth of the CPU of a buffered read and does not push other memory out. It needs memory, offset
    and length aligned to pages; memory that is not, as that of a `bytes`, is copied once more. Some file systems refuse
    it: `direct` says what this one does, and buffered I/O then serves the same calls.

    One object per directory at a time: its maker holds the `DirectoryLock`. Other files are left alone.

        1. `create` fills a draft, `name.new`, and renames it: a crash leaves no slab of half the size. Drafts left
           behind are removed when the directory is opened.
        2. The first use opens the slab; its descriptor is kept until `remove` or `close`.
        3. A descriptor that is let go while a call uses it is closed by that call: were it closed under it, its number
           could already mean another file.
    """

    _access = os.O_RDWR

    def __init__(self, directory: Path, reach: Reach = go_on) -> None:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        make_directory(directory)
        for path in missing:
            _sync_directory(path.parent)
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(_DRAFT_SUFFIX) and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)
        self._directory = directory
        self._reach = reach
        self._direct = _takes_direct_io(directory)
        self._lock = threading.Lock()  # guards the table; never held while bytes move
        self._slabs: dict[str, _OpenSlab] = {}
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether slabs are read and written past the page cache."""
        return self._direct

    def sizes(self) -> dict[str, int]:
        self._check_open()
        with os.scandir(self._directory) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if entry.name.endswith(_SLAB_SUFFIX) and entry.is_file(follow_symlinks=False)
            }

    def create(self, name: str, size_bytes: int) -> None:
        assert size_bytes > 0 and size_bytes % _PAGE_BYTES == 0, f"{size_bytes} bytes are not whole pages"
        path = self._path(name)
        self._check_open()
        draft = path.with_name(path.name + ".new")
        # Not for direct I/O: where a file system cannot allocate, libc writes single bytes instead.
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        made = draft
        try:
            try:
                self._reach("draft made")
                # Checked while the draft exists: until it is gone no other process can create this name.
                if os.path.lexists(path):
                    _refuse_other_than_file(path)
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
                os.posix_fallocate(descriptor, 0, size_bytes)
                self._reach("draft allocated")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._reach("draft synced")
            os.rename(draft, path)
            made = path
            self._reach("draft renamed")
            _sync_directory(self._directory)
        except BaseException:
            made.unlink(missing_ok=True)
            raise

    def read(self, name: str, offset: int, into: memoryview) -> None:
        with self._in_use(name, offset, into.nbytes) as descriptor:
            if not self._needs_copy(into):
                self._transfer(os.preadv, descriptor, offset, into)
            else:
                aligned = memoryview(mmap.mmap(-1, into.nbytes))
                self._transfer(os.preadv, descriptor, offset, aligned)
                into.cast("B")[:] = aligned

    def write(self, name: str, offset: int, data: memoryview) -> None:
        with self._in_use(name, offset, data.nbytes) as descriptor:
            if self._needs_copy(data):
                aligned = memoryview(mmap.mmap(-1, data.nbytes))
                aligned[:] = data.cast("B")
                data = aligned
            self._transfer(os.pwritev, descriptor, offset, data)

    def sync(self, name: str) -> None:
        with self._in_use(name) as descriptor:
            os.fdatasync(descriptor)
            if not self._direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the memory is better used by the tiers

    def remove(self, name: str) -> None:
        path = self._path(name)
        with self._lock:
            self._check_open()
            slab = self._slabs.pop(name, None)
            if slab is not None:
                slab.let_go()
        os.unlink(path)
        self._reach("slab unlinked")
        _sync_directory(self._directory)

    def close(self) -> None:
        """Let go of every descriptor. Safe to call twice."""
        with self._lock:
            self._closed = True
            for slab in self._slabs.values():
                slab.let_go()
            self._slabs.clear()

    def _path(self, name: str) -> Path:
        assert name.endswith(_SLAB_SUFFIX) and "/" not in name, f"{name!r} is no slab's name"
        return self._directory / name

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the folder is closed", str(self._directory))

    @contextmanager
    def _in_use(self, name: str, offset: int = 0, length: int = 0) -> Iterator[int]:
        """The slab's descriptor, open until the end of the block. The range must be pages of the slab."""
        assert offset >= 0 and offset % _PAGE_BYTES == 0, f"offset {offset} is no page's"
        assert length % _PAGE_BYTES == 0, f"{length} bytes are not whole pages"
        path = self._path(name)
        with self._lock:
            self._check_open()
            slab = self._slabs.get(name)
            if slab is None:
                slab = self._slabs[name] = _open_slab(path, self._access | (os.O_DIRECT if self._direct else 0))
            slab.users += 1
        try:
            if offset + length > slab.size_bytes:  # a write there would make the file longer
                raise OSError(errno.EIO, f"bytes {offset} to {offset + length} of {slab.size_bytes}", str(path))
            yield slab.descriptor
        finally:
            with self._lock:
                slab.users -= 1
                if slab.dropped:
                    slab.let_go()

    def _needs_copy(self, memory: memoryview) -> bool:
        if not self._direct or not memory.nbytes:
            return False
        address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        return address % _PAGE_BYTES != 0

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], descriptor: int, offset: int, memory: memoryview
    ) -> None:
        """Repeat a call until all of the memory is filled or written."""
        memory = memory.cast("B")
        # Direct I/O goes on from page to page only: of a page that was cut, nothing counts.
        grain = _PAGE_BYTES if self._direct else 1
        done = 0
        while done < len(memory):
            moved = call(descriptor, [memory[done:]], offset + done)
            moved -= moved % grain
            if moved <= 0:
                raise OSError(errno.EIO, f"the disk stopped at {done} of {len(memory)} bytes")
            done += moved


class ReadOnlyFiles(DirectFiles):
    """The slabs of a directory that is only inspected: nothing in it is made, changed or removed.

    Attempts to do so raise `OSError`, and so does a missing directory. A read-only file system will do.
    """

    _access = os.O_RDONLY

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._slabs: dict[str, _OpenSlab] = {}
        self._closed = False
        self._direct = any(_reads_directly(directory / name) for name in sorted(self.sizes())[:1])

    def create(self, name: str, size_bytes: int) -> None:
        raise OSError(errno.EROFS, "the folder is only looked at", str(self._path(name)))

    def remove(self, name: str) -> None:
        raise OSError(errno.EROFS, "the folder is only looked at", str(self._path(name)))


class DirectoryLock:
    """An exclusive lock on a directory, held by the kernel for as long as this process lives and has it open."""

    def __init__(self, directory: Path) -> None:
        self._owner = os.getpid()
        self._descriptor = _open_regular(directory / "lock", os.O_RDWR | os.O_CREAT)
        _take_lock(self._descriptor)
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{self._owner}\n".encode(), 0)
        except OSError:  # a full disk
            self.release()
            raise

    def close_after_fork(self) -> None:
        """In a forked child: the lock is the parent's alone, and must not outlive it here."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def release(self) -> None:
        """Unlock. Safe to call twice."""
        if self._descriptor >= 0:
            if os.getpid() == self._owner:  # a forked child shares the lock: it neither keeps it alive nor ends it
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


class ReadingLock:
    """Keeps every other process out of a directory that is only inspected: the same lock, and nothing is written for
    it.

    Without a lock file no process has the directory open, and nothing is locked. Raises `BlockingIOError` naming the
    process that has it.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = -1
        try:
            self._descriptor = _open_regular(directory / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return
        _take_lock(self._descriptor)

    def release(self) -> None:
        """Unlock. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _take_lock(descriptor: int) -> None:
    """Lock the file, or close it and raise `BlockingIOError` with the holder's process number."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _lock_holder(descriptor)
        os.close(descriptor)
        raise BlockingIOError(holder) from None


def _lock_holder(descriptor: int) -> str:
    """As the kernel has it, else as the file says, which does not tell of inspecting processes."""
    status = os.fstat(descriptor)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in "".join(read_text_files(["/proc/locks"]).values()).splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
            return fields[4]
    return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"


def names_in(directory: Path) -> set[str]:
    """The names in a directory. Raises `OSError`."""
    return set(os.listdir(directory))


def disk_room(directory: Path) -> int:
    """Bytes that a new file in this directory could have, its slabs' own bytes counted as free."""
    facts = os.statvfs(directory)
    taken = sum(
        entry.stat(follow_symlinks=False).st_blocks * 512
        for entry in os.scandir(directory)
        if entry.name.endswith(_SLAB_SUFFIX)
    )
    return facts.f_bavail * facts.f_frsize + taken


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
    descriptor = _open_regular(path, os.O_RDONLY)
    try:
        check(os.fstat(descriptor))
        return _read_whole(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _read_whole(descriptor: int, most_bytes: int) -> bytes:
    chunks, size = [], os.fstat(descriptor).st_size
    if size <= most_bytes:
        size = 0
        while size <= most_bytes and (chunk := os.read(descriptor, 1 << 16)):
            chunks.append(chunk)
            size += len(chunk)
    if size > most_bytes:
        raise Unfit(f"it has {size} bytes, and {most_bytes} are the most that it may have")
    return b"".join(chunks)


def _open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file; never waits for anything else that may stand there. Raises `OSError`."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # What a link leads to may just not be mounted: then there are keys, and no new ones are to be made.
        is_dangling = error.errno == errno.ENOENT and path.is_symlink()
        if is_dangling or error.errno in (errno.EISDIR, errno.ENXIO, errno.ELOOP, errno.ENODEV):
            _refuse_other_than_file(path)
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            _refuse_other_than_file(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_other_than_file(path: Path) -> None:
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
        if _is_left_socket(path):
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
    """Unlink a socket."""
    path.unlink(missing_ok=True)


def _is_left_socket(path: Path) -> bool:
    """Whether there is a socket without a listener."""
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
    try:
        os.fchmod(descriptor, mode)
        reach("secret draft made")
        written = 0
        while written < len(contents):
            written += os.write(descriptor, contents[written:])
        reach("secret written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    reach("secret synced")
    os.rename(temporary, path)
    reach("secret renamed")
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@dataclass
class _OpenSlab:
    """A slab's descriptor, and how many calls use it now. Guarded by the lock of its table."""

    descriptor: int
    size_bytes: int
    users: int = 0
    dropped: bool = False

    def let_go(self) -> None:
        """Close it, now or when its last user is done. No new user may come."""
        self.dropped = True
        if not self.users:
            os.close(self.descriptor)


def _open_slab(path: Path, flags: int) -> _OpenSlab:
    descriptor = _open_regular(path, os.O_NOFOLLOW | flags)
    try:
        return _OpenSlab(descriptor, os.fstat(descriptor).st_size)
    except BaseException:
        os.close(descriptor)
        raise


def _takes_direct_io(directory: Path) -> bool:
    """Write a page past the cache and read it again. A refusal is EINVAL, when the file is opened or used."""
    probe = directory / "direct-io.probe"
    probe.unlink(missing_ok=True)
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT, 0o600)
        try:
            page = mmap.mmap(-1, _PAGE_BYTES)
            os.pwritev(descriptor, [page], 0)
            os.preadv(descriptor, [page], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        # A full disk must not keep a store from what is on it; it said nothing about direct I/O, which is the rule.
        if error.errno not in (errno.EINVAL, errno.ENOSPC, errno.EDQUOT):
            raise
        return error.errno != errno.EINVAL
    finally:
        probe.unlink(missing_ok=True)  # some file systems make the file before they refuse it
    return True


def _reads_directly(path: Path) -> bool:
    """Whether a file can be read past the cache. A refusal is EINVAL; a bad sector is the reader's to find."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
        try:
            os.preadv(descriptor, [mmap.mmap(-1, _PAGE_BYTES)], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.errno != errno.EINVAL
    return True


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_pages(size_bytes: int) -> FrameSpan:
    """New private memory, aligned as a disk wants it; it goes when its last view does."""
    view = memoryview(mmap.mmap(-1, size_bytes))
    return FrameSpan(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), view)
