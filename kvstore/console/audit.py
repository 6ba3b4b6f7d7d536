"""What operators did at the console: a line when an action begins and one when it ends, on a disk that is handed in.

An action whose first line cannot be written is not done. What is kept is bounded by the file, and here by `MOST_SHOWN`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

import msgspec

from kvstore.block.errors import StoreError

MOST_SHOWN = 200
"""Actions."""
BEGUN = "begun"


class AuditLines(Protocol):
    """A file that is only appended to."""

    def append(self, line: bytes) -> None:
        """One line, on the disk when it returns. Raises `OSError`, and then nothing of it is there."""
        ...

    def last(self) -> Iterable[bytes]:
        """What was written last, the oldest first, also by earlier processes."""
        ...


class AuditEntry(msgspec.Struct, frozen=True):
    """An action. number: names it. at: Unix time, when it began. who: by which credential, and from which address.
    what: drop, purge or warm. namespace: "" for a purge. result: begun, done, refused or failed; what is still `begun`
    long after it is of a console that ended on the way. text: what came of it, one line."""

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

    def __init__(self, lines: AuditLines) -> None:
        """Takes in what was written before; what is no entry is skipped."""
        self._lines = lines
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, AuditEntry] = OrderedDict()
        for line in lines.last():
            try:
                self._take(msgspec.json.decode(line, type=AuditEntry))
            except (msgspec.DecodeError, ValueError):
                pass

    def write(self, entry: AuditEntry) -> None:
        """Raises `StoreError` where it cannot be written."""
        with self._lock:
            try:
                self._lines.append(msgspec.json.encode(entry) + b"\n")
            except OSError as error:
                raise StoreError(f"the audit log cannot be written: {error.strerror}") from None
            self._take(entry)

    def entries(self) -> list[AuditEntry]:
        """The newest first, each as it is by now."""
        with self._lock:
            return list(reversed(self._entries.values()))

    def _take(self, entry: AuditEntry) -> None:
        self._entries[entry.number] = entry
        if len(self._entries) > MOST_SHOWN:
            self._entries.popitem(last=False)
