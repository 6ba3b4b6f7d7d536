"""Slabs on a disk: the contract `Files`, and a directory of them that is read and written past the page cache.

The contract is there so that the tier above can run on a disk that loses power on purpose. Nothing here knows what a
slab holds, and no slab is ever mapped: a bad sector must be an `OSError`, never a signal.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from tiering.failpoint import Reach, go_on
from tiering.files import make_directory, open_regular, refuse_other_than_file, sync_directory
from tiering.tier import FrameSpan

_log = logging.getLogger(__name__)
_PAGE_BYTES = 4096
_COPY_BYTES = 1 << 20
_SLAB_SUFFIX = ".slab"
_DRAFT_SUFFIX = ".slab.new"


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
        """Make what was written durable, under the slab's name: one that others removed is written again from what is
        open, unless its directory is gone.

        When this fails, everything written since the last sync that succeeded must be treated as lost, even if it can
        still be read and even if a later sync succeeds: the kernel reports a failed write-back once, then forgets it.
        """
        ...

    def confirm(self, name: str) -> None:
        """Raises unless the name still leads to the slab, whole: a later start will find what was synced. Cheap."""
        ...

    def bring_back(self, name: str) -> None:
        """As `sync` does for a slab that others removed; raises where `confirm` still would."""
        ...

    def remove(self, name: str) -> None:
        """Give a slab's space back, durably. After a failure it may be there or not."""
        ...

    def close(self) -> None: ...


def private_pages(size_bytes: int) -> FrameSpan:
    """New private memory, aligned as a disk wants it; it goes when its last view does."""
    view = memoryview(mmap.mmap(-1, size_bytes))
    return FrameSpan(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), view)


def read_page(files: Files, name: str, offset: int) -> bytes:
    """One page of a slab. Raises `OSError`."""
    page = bytearray(_PAGE_BYTES)
    files.read(name, offset, memoryview(page))
    return bytes(page)


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
        4. A slab without a name is copied to a new draft by the next `sync`. Calls on it wait meanwhile.
    """

    _access = os.O_RDWR

    def __init__(self, directory: Path, reach: Reach = go_on) -> None:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        make_directory(directory)
        for path in missing:
            sync_directory(path.parent)
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(_DRAFT_SUFFIX) and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)
        self._directory = directory
        self._reach = reach
        self._direct = _takes_direct_io(directory)
        self._lock = threading.Lock()  # guards the table; never held while bytes move
        self._turn = threading.Condition(self._lock)
        self._slabs: dict[str, _OpenSlab] = {}
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether slabs are read and written past the page cache."""
        return self._direct

    def sizes(self) -> dict[str, int]:
        """Every slab's name and bytes."""
        self._check_open()
        with os.scandir(self._directory) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if entry.name.endswith(_SLAB_SUFFIX) and entry.is_file(follow_symlinks=False)
            }

    def create(self, name: str, size_bytes: int) -> None:
        """A new slab of zeros, or `OSError` and nothing left behind."""
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
                    refuse_other_than_file(path)
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
            sync_directory(self._directory)
        except BaseException:
            made.unlink(missing_ok=True)
            raise

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` from the slab."""
        with self._in_use(name, offset, into.nbytes) as descriptor:
            if not self._needs_copy(into):
                self._transfer(os.preadv, descriptor, offset, into)
            else:
                aligned = memoryview(mmap.mmap(-1, into.nbytes))
                self._transfer(os.preadv, descriptor, offset, aligned)
                into.cast("B")[:] = aligned

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write all of `data`."""
        with self._in_use(name, offset, data.nbytes) as descriptor:
            if self._needs_copy(data):
                aligned = memoryview(mmap.mmap(-1, data.nbytes))
                aligned[:] = data.cast("B")
                data = aligned
            self._transfer(os.pwritev, descriptor, offset, data)

    def sync(self, name: str) -> None:
        """Make what was written durable, and write a slab again that others removed."""
        with self._in_use(name) as descriptor:
            os.fdatasync(descriptor)
            if not self._direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the memory is better spent on the tiers
        self.bring_back(name)

    def bring_back(self, name: str) -> None:
        """Write a slab again that others removed, durably."""
        is_back = False
        while not is_back:
            try:
                return self.confirm(name)
            except FileNotFoundError:
                is_back = self._write_again(name)

    def confirm(self, name: str) -> None:
        """Raises unless the name leads to the open slab, in its size."""
        slab = self._slabs.get(name)
        if slab is None:
            with self._in_use(name):
                slab = self._slabs[name]
        there = os.stat(f"{self._directory}/{name}", follow_symlinks=False)
        is_another = (there.st_dev, there.st_ino) != slab.identity
        with self._turn:
            while is_another and slab.is_copied:  # the copy has the name before it has the slab's place
                self._turn.wait()
        if self._slabs.get(name) is not slab:
            return self.confirm(name)  # it was written again meanwhile
        if is_another:
            raise _another(name)
        if there.st_size != slab.size_bytes:
            words = f"{name} was cut while it was in use, to {there.st_size} of {slab.size_bytes} bytes; start again"
            raise OSError(errno.ESTALE, words)

    def _write_again(self, name: str) -> bool:
        """False where a file has the name by now: the slab's, which another thread wrote again, or another one."""
        path = self._path(name)
        with self._turn:
            self._check_open()
            slab = self._slabs[name]
            while slab.users or slab.is_copied:
                self._turn.wait()
            if self._slabs.get(name) is not slab or os.path.lexists(path):
                return False
            slab.is_copied = True
        try:
            copy = self._copy_of(slab, path)
            with self._lock:
                self._slabs[name] = copy
                slab.let_go()
            _log.warning("%s was removed while it was in use, and is written again from what is open", path)
            return True
        finally:
            with self._turn:
                slab.is_copied = False
                self._turn.notify_all()

    def _copy_of(self, slab: _OpenSlab, path: Path) -> _OpenSlab:
        draft = path.with_name(path.name + ".new")
        try:
            descriptor = os.open(draft, self._flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            words = f"{self._directory} was removed while it was in use; bring it back, or start again"
            raise FileNotFoundError(errno.ENOENT, words) from None
        try:
            if os.fstat(descriptor).st_dev != slab.identity[0]:
                raise OSError(errno.ESTALE, f"{self._directory} leads to another disk than the slabs that are in use")
            piece = memoryview(mmap.mmap(-1, _COPY_BYTES))
            for offset in range(0, slab.size_bytes, _COPY_BYTES):
                piece = piece[: slab.size_bytes - offset]
                self._transfer(os.preadv, slab.descriptor, offset, piece)
                self._transfer(os.pwritev, descriptor, offset, piece)
            os.fsync(descriptor)
            if os.path.lexists(path):
                raise _another(path.name)
            os.rename(draft, path)
            sync_directory(self._directory)
            return _OpenSlab.of(descriptor)
        except BaseException:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        """Give a slab's space back, durably."""
        path = self._path(name)
        with self._lock:
            self._check_open()
            slab = self._slabs.pop(name, None)
            if slab is not None:
                slab.let_go()
        os.unlink(path)
        self._reach("slab unlinked")
        sync_directory(self._directory)

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
        with self._turn:
            self._check_open()
            while (slab := self._slabs.get(name)) is not None and slab.is_copied:
                self._turn.wait()
            if slab is None:
                slab = self._slabs[name] = _open_slab(path, self._flags)
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
                if not slab.users:
                    self._turn.notify_all()

    @property
    def _flags(self) -> int:
        return self._access | (os.O_DIRECT if self._direct else 0)

    def _needs_copy(self, memory: memoryview) -> bool:
        if not self._direct or not memory.nbytes:
            return False
        address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        return address % _PAGE_BYTES != 0

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], descriptor: int, offset: int, memory: memoryview
    ) -> None:
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
        self._turn = threading.Condition(self._lock)
        self._slabs: dict[str, _OpenSlab] = {}
        self._closed = False
        self._direct = any(_reads_directly(directory / name) for name in sorted(self.sizes())[:1])

    def create(self, name: str, size_bytes: int) -> None:
        """Refused."""
        raise OSError(errno.EROFS, "the folder is only looked at", str(self._path(name)))

    def remove(self, name: str) -> None:
        """Refused."""
        raise OSError(errno.EROFS, "the folder is only looked at", str(self._path(name)))


@dataclass
class _OpenSlab:
    """A slab's descriptor, and how many calls use it now. identity: device and inode. is_copied: another file is about
    to take its place. Guarded by the lock of its table."""

    descriptor: int
    size_bytes: int
    identity: tuple[int, int]
    users: int = 0
    dropped: bool = False
    is_copied: bool = False

    @staticmethod
    def of(descriptor: int) -> _OpenSlab:
        status = os.fstat(descriptor)
        return _OpenSlab(descriptor, status.st_size, (status.st_dev, status.st_ino))

    def let_go(self) -> None:
        """Close it, now or when its last user is done. No new user may come."""
        self.dropped = True
        if not self.users:
            os.close(self.descriptor)


def _open_slab(path: Path, flags: int) -> _OpenSlab:
    descriptor = open_regular(path, os.O_NOFOLLOW | flags)
    try:
        return _OpenSlab.of(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _another(name: str) -> OSError:
    return OSError(errno.ESTALE, f"another file has the name {name} of a slab in use; move it away")


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


def disk_room(directory: Path) -> int:
    """Bytes that a new file in this directory could have, its slabs' own bytes counted as free."""
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize + slab_bytes(directory)


def slab_bytes(directory: Path) -> int:
    """What the slabs in this directory take of its disk; 0 before a store was opened there."""
    return sum(
        entry.stat(follow_symlinks=False).st_blocks * 512
        for entry in os.scandir(directory)
        if entry.name.endswith(_SLAB_SUFFIX)
    )
