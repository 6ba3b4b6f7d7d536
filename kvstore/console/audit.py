"""The audit log: operators' actions at the console, a line at each one's begin and end.

An action whose first line cannot be written is not done. The file bounds what is kept; here `MOST_SHOWN` does.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvstore.block.errors import BadInput, StoreError

MOST_SHOWN = 200
BEGUN = "begun"
MOST_AUDIT_BYTES = 4 << 20
"""A full file becomes FILE.1, replacing the last of that name."""
LAST_AUDIT_BYTES = 256 << 10
"""Read from each file at the start."""


class AuditFile:
    """An append-only file of lines. Not thread-safe."""

    def __init__(self, path: Path, most_bytes: int = MOST_AUDIT_BYTES) -> None:
        """Raises `BadInput` if it cannot be written."""
        self._path = path
        self._before = path.with_name(f"{path.name}.1")
        self._most_bytes = most_bytes
        try:
            os.close(self._open())
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; give another --audit-file (console.audit_file)") from None

    def append(self, line: bytes) -> None:
        """It is on the disk on return. Raises `OSError`, after which no part of it is there."""
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

    def last(self) -> Iterator[bytes]:
        """The last lines, oldest first, those of earlier processes included."""
        for path in (self._before, self._path):
            try:
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_AUDIT_BYTES))
                    yield from file.read(LAST_AUDIT_BYTES).splitlines()
            except OSError:
                pass

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(self._path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a file")
        return file


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

    def __init__(self, lines: AuditFile) -> None:
        """Reads earlier entries; lines that are no entry are skipped."""
        self._lines = lines
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, AuditEntry] = OrderedDict()
        for line in lines.last():
            try:
                self._take(msgspec.json.decode(line, type=AuditEntry))
            except (msgspec.DecodeError, ValueError):
                pass

    def write(self, entry: AuditEntry) -> None:
        """Raises `StoreError` if it cannot be written."""
        with self._lock:
            try:
                self._lines.append(msgspec.json.encode(entry) + b"\n")
            except OSError as error:
                raise StoreError(f"the audit log cannot be written: {error.strerror}") from None
            self._take(entry)

    def entries(self) -> list[AuditEntry]:
        with self._lock:
            return list(reversed(self._entries.values()))

    def _take(self, entry: AuditEntry) -> None:
        self._entries[entry.number] = entry
        if len(self._entries) > MOST_SHOWN:
            self._entries.popitem(last=False)
