"""The names that engines give their models. They are shown to people; the store itself goes by fingerprints.

    an engine opens a namespace > its name, cut and printable, by tenant and namespace > DIR/names, in the background

No name is part of an identity: a store whose file is missing or damaged lacks only the names. It keeps at most
`MOST_NAMES` of a tenant, and drops the one noted longest ago for a new one.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from kvstore.block.errors import BadInput
from tiering.faults import MODEL_NAMES, FaultReports, Unheard, kind_of
from tiering.files import read_secret_file, write_secret_file

VERSION = 1
MOST_NAMES, MOST_TENANTS = 256, 1024
MOST_BYTES = 64 << 20
MOST_CHARACTERS = 128
_MOST_READ = 8 * MOST_CHARACTERS
CLOSE_SECONDS = PAUSE_SECONDS = 1.0
FAILED_PAUSE_SECONDS = 10.0

_log = logging.getLogger(__name__)


def shown(name: str) -> str:
    """A name cut to fit a terminal: of a long path its end, which tells models apart."""
    kept = "".join(one for one in name[-_MOST_READ:] if one.isprintable()).strip()
    return kept if len(kept) <= MOST_CHARACTERS else f"...{kept[3 - MOST_CHARACTERS :]}"


def checked_name(name: object) -> str:
    """A caller's name. Raises `BadInput`."""
    if not isinstance(name, str):
        raise BadInput(f"name={name!r:.60}; give the model's name or path as text, which people are shown")
    return shown(name)


class DisplayNames:
    """Names by tenant and digest. Thread-safe; noting a name never waits for the disk, and one tenant's names displace
    none of another's."""

    def __init__(self, path: Path, faults: FaultReports | None = None) -> None:
        """Read the names that the file has."""
        self._path = path
        self._faults = faults or Unheard()
        self._lock = threading.Lock()
        self._names = read_names(path)
        self._is_written = True
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None

    def get(self, tenant: bytes, digest: bytes) -> str:
        """The name; empty if none is known."""
        return self._names.get(tenant.hex(), {}).get(digest.hex(), "")

    def note(self, tenant: bytes, digest: bytes, name: str) -> None:
        """Record what the engine that opened a namespace calls its model."""
        name = shown(name)
        if not name or self.get(tenant, digest) == name:
            return
        with self._lock:
            mine = self._names.setdefault(tenant.hex(), {})
            mine.pop(digest.hex(), None)
            if len(mine) >= MOST_NAMES:
                del mine[next(iter(mine))]
            mine[digest.hex()] = name
            self._write_soon()

    def forget(self, tenant: bytes) -> None:
        with self._lock:
            if self._names.pop(tenant.hex(), None) is not None:
                self._write_soon()

    def close(self) -> None:
        """Wait until the noted names are written, for `CLOSE_SECONDS` at most."""
        self._closing.set()
        writer = self._writer
        if writer is not None:
            writer.join(CLOSE_SECONDS)

    def _write_soon(self) -> None:
        """Under the lock."""
        self._is_written = False
        if self._writer is not None:
            return
        writer = threading.Thread(target=self._write, name="kv-names", daemon=True)
        try:
            writer.start()
        except (RuntimeError, MemoryError) as error:  # the next name tries again
            self._faults.failed(MODEL_NAMES, kind_of(error), "no thread writes them")
            return
        self._writer = writer

    def _write(self) -> None:
        """Write until all names are on disk, at most once in `PAUSE_SECONDS`, whatever engines do. A failed write is
        tried again, so that the reported fault ends when its cause does."""
        while True:
            with self._lock:
                if self._is_written:
                    self._writer = None
                    return
                contents = json.dumps({"version": VERSION, "names": self._names}, indent=1).encode()
                self._is_written = True
            try:
                write_secret_file(self._path, contents)
                self._faults.worked(MODEL_NAMES)
                pause = PAUSE_SECONDS
            except OSError as error:
                self._faults.failed(MODEL_NAMES, kind_of(error), str(error))
                pause = FAILED_PAUSE_SECONDS
                with self._lock:
                    self._is_written = self._closing.is_set()  # else it is tried again, until it works
            self._closing.wait(pause)


def read_names(path: Path) -> dict[str, dict[str, str]]:
    """A directory's names, by tenant and namespace in hexadecimal; none if the file is missing or unreadable."""
    try:
        raw = read_secret_file(path, MOST_BYTES)
        if raw is None:
            return {}
        contents = json.loads(raw)
        if contents["version"] != VERSION:
            return {}
        return {
            tenant: {digest: shown(name) for digest, name in list(names.items())[-MOST_NAMES:] if isinstance(name, str)}
            for tenant, names in list(contents["names"].items())[-MOST_TENANTS:]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("what engines call their models is not known before they tell it: %s: %s", path, error)
        return {}
