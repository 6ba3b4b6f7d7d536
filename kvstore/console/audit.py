"""The audit log: operators' actions at the console, a line in a file at each one's begin and end.

An action whose first line cannot be written is not done. A line is on the disk once it is written, and no part of one
that could not be.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from kvstore.block.errors import BadInput, StoreError

MOST_SHOWN = 200
MOST_AUDIT_BYTES = 4 << 20
"""A full file becomes FILE.1, replacing the last of that name."""
LAST_AUDIT_BYTES = 256 << 10
"""Read from each file at the start."""
BEGUN = "begun"


class AuditEntry(msgspec.Struct, frozen=True):
    """An action. number: its name. at: Unix time of its begin. who: credential and address. what: drop, purge or warm.
    namespace: "" for a purge. result: begun, done, refused or failed; an old entry that is still `begun` is of a
    console that ended during the action. text: the outcome, one line."""

    number: str
    at: float
    who: str
    what: str
    tenant: str
    namespace: str
    result: str = BEGUN
    text: str = ""


class AuditLog:
    """Thread-safe."""

    def __init__(self, path: Path, most_bytes: int = MOST_AUDIT_BYTES) -> None:
        """Raises `BadInput` if it cannot be written."""
        self._path, self._before = path, path.with_name(f"{path.name}.1")
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, AuditEntry] = OrderedDict()
        try:
            os.close(self._open())
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; give another --audit-file (console.audit_file)") from None
        for line in self._last():
            with suppress(msgspec.DecodeError, ValueError):  # no entry
                self._take(msgspec.json.decode(line, type=AuditEntry))

    def write(self, entry: AuditEntry) -> None:
        """Raises `StoreError` if it cannot be written."""
        with self._lock:
            try:
                self._append(msgspec.json.encode(entry) + b"\n")
            except OSError as error:
                raise StoreError(f"the audit log cannot be written: {error.strerror}") from None
            self._take(entry)

    def entries(self) -> list[AuditEntry]:
        """Newest first, each in its latest state."""
        with self._lock:
            return list(reversed(self._entries.values()))

    def _take(self, entry: AuditEntry) -> None:
        self._entries[entry.number] = entry
        if len(self._entries) > MOST_SHOWN:
            self._entries.popitem(last=False)

    def _append(self, line: bytes) -> None:
        file = self._open()
        size = os.fstat(file).st_size
        if size and size + len(line) > self._most_bytes:
            os.close(file)
            os.replace(self._path, self._before)
            file, size = self._open(), 0
        try:
            is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # cut off by a crash, or edited by hand
            written = b"\n" + line if is_torn else line
            if os.write(file, written) < len(written):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise
        finally:
            os.close(file)

    def _last(self) -> Iterator[bytes]:
        for path in (self._before, self._path):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            with suppress(OSError), open(os.open(path, flags), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_AUDIT_BYTES))
                yield from file.read(LAST_AUDIT_BYTES).splitlines()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(self._path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a file")
        return file
