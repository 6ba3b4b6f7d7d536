"""A data directory and its disk: room, direct I/O, who owns it, its keys, who uses it. Leaves nothing behind."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvstore.block.errors import StoreError
from kvstore.block.key_file import KeyFile
from kvstore.config import NvmeConfig, format_size
from kvstore.doctor.findings import Finding, lacks, note, ok, refused
from kvstore.keys.pool_keys import PoolKeys, SecretDirectory
from kvstore.keys.store_keys import refuse_new_keys
from tiering.files import read_text_files, what_stands_at
from tiering.nvme.slab_files import disk_room

PAGE_BYTES = 4096
WITHOUT_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""Errors of a file system that has no unnamed files."""


def directory_rights(path: Path) -> Iterator[Finding]:
    """Whether this user may have its store there."""
    if not path.is_dir():
        if os.path.lexists(path):
            yield lacks("directory", f"{path} is {what_stands_at(path)}", "give another --data, or move it away")
            return
        above = existing(path)
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            text = f"{path} cannot be made: user {os.geteuid()} may not write to {above}"
            yield lacks("directory", text, "make it, and give it to the user that runs kvstore serve")
        else:
            yield ok("directory", f"{path} is not there yet, and is made at the first start")
        return
    status = path.stat()
    if status.st_uid != os.geteuid():
        text = f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}"
        yield lacks("directory", text, f"ask as that user, or run: chown -R {os.geteuid()} {path}")
    elif not os.access(path, os.W_OK | os.X_OK):
        yield lacks("directory", f"{path} cannot be written to", f"run: chmod u+rwx {path}; or mount it for writing")
    elif status.st_mode & 0o022:
        text = f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: others may replace what is in it"
        yield lacks("directory", text, f"run: chmod go-w {path}")
    else:
        yield ok("directory", f"{path} belongs to this user, and others may not write to it")


def keys(path: Path, shared: str | None) -> Iterator[Finding]:
    """The store's own keys, and those of a pool. shared: `keys.directory`."""
    try:
        own = KeyFile(path / "keys")
        if own.is_there:
            yield ok(
                "keys", f"{path / 'keys'} can be read by this user alone, and has {len(own.by_name())} tenants' keys"
            )
        else:
            refuse_new_keys(path)
            yield ok("keys", f"{path / 'keys'} is not there yet, and nothing needs it")
    except StoreError as error:
        yield refused("keys", error)
    if shared is None:
        return
    there = PoolKeys.read(SecretDirectory(Path(shared)))
    for name, fault in sorted(there.faults.items()):
        yield lacks("keys", f"{Path(shared) / name} cannot be used: {fault}", "restore it, or move it away")
    if there.tenants:
        yield ok("keys", f"{shared} has keys of {len(there.tenants)} tenants")
    elif not there.faults:
        yield lacks("keys", f"{shared} has no keys", f"run: kvstore keys init {shared} default")


def holder_of(path: Path) -> int | None:
    """The process that has locked the directory, as the kernel tells; None where none has, or it cannot be seen."""
    try:
        status = os.stat(path / "lock")
    except OSError:
        return None
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in "".join(read_text_files(["/proc/locks"]).values()).splitlines():
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == wanted and words[4].isdigit():
            return int(words[4])
    return None


def use(path: Path, sidecar: int | None) -> Iterator[Finding]:
    """Whether another process has it. sidecar: the process that answers at its socket."""
    holder = holder_of(path)
    if holder is None:
        yield ok("use", f"no process has {path} open, as far as this one can see")
    elif holder == sidecar:
        yield ok("use", f"process {holder} serves {path}")
    else:
        text = f"process {holder} has {path} open, and no sidecar answers for it"
        yield lacks("use", text, f"see what it is (ps -fp {holder}), and end it, or give another --data")


def room(path: Path, nvme: NvmeConfig | str | None) -> Iterator[Finding]:
    """Whether the disk has room for NVMe. nvme: its sizes, or why they cannot be had; None without such a tier."""
    if nvme is None:
        yield ok("disk", "store.nvme is off, so no room is needed")
    elif isinstance(nvme, str):
        text, _, remedy = nvme.partition("; ")
        yield lacks("disk", text, remedy)
    else:
        free = disk_room(existing(path / "nvme"))
        yield ok("disk", f"nvme={format_size(nvme.budget_bytes)} fits the {format_size(free)} that {path} can have")


def direct_io(path: Path) -> Iterator[Finding]:
    """Whether direct I/O works: write a page past the page cache and read it again, in an unnamed file."""
    where = existing(path / "nvme")
    try:
        descriptor = os.open(where, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = "has no unnamed files to try it in" if error.errno in WITHOUT_UNNAMED else str(error.strerror)
        yield note("direct I/O", f"{where}: not tried ({why})", "see what the sidecar's log says when it starts")
        return
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            page = mmap.mmap(-1, PAGE_BYTES)
            page[:] = b"\x5a" * PAGE_BYTES
            os.pwritev(direct, [page], 0)
            page[:] = bytes(PAGE_BYTES)
            os.preadv(direct, [page], 0)
            came_back = page[:] == b"\x5a" * PAGE_BYTES
        finally:
            os.close(direct)
    except OSError as error:
        if error.errno == errno.EINVAL:
            text = f"the file system of {where} takes no direct I/O: blocks go through the page cache"
            yield lacks("direct I/O", text, "use XFS or ext4 on a local disk")
        else:
            text = f"a page cannot be written in {where} ({error.strerror})"
            yield lacks("direct I/O", text, "free some of the disk, or repair it")
        return
    finally:
        os.close(descriptor)
    if came_back:
        yield ok("direct I/O", f"the file system of {where} takes it")
    else:
        yield lacks("direct I/O", f"what was written in {where} did not come back", "use another disk")


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    return next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))
