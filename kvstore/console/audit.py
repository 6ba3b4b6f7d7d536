"""The audit log: operators' actions at the console, a line at each one's begin and end, on a disk that is handed in.

An action whose first line cannot be written is not done. The file bounds what is kept; here `MOST_SHOWN` does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from kvstore.block.errors import StoreError

MOST_SHOWN = 200
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

    def __init__(self, append: Callable[[bytes], None], last: Iterable[bytes]) -> None:
        """append: a line to a file; it is on the disk on return, or `OSError` is raised and no part of it is there.
        last: the file's last lines, oldest first; those that are no entry are skipped."""
        self._append = append
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, AuditEntry] = OrderedDict()
        for line in last:
            try:
                self._take(msgspec.json.decode(line, type=AuditEntry))
            except (msgspec.DecodeError, ValueError):
                pass

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
