"""The digests of LoRA adapters that an engine has loaded, for a thread that must not wait.

An engine reads an adapter's files once, under a number that it gives the adapter, and keeps the weights; the files at
the path may change later. So a digest belongs to a number and to the files as they were then. If the files change and
the engine reads them anew, the adapter gets a new digest; if it does not, the adapter's weights are in doubt, and
nothing is cached for it any more. Must never put a path or a name into an identity.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MAX_ADAPTERS = 4096
"""With more, the adapter that was seen first is forgotten, and read again when it is next used."""

Signature = tuple[tuple[str, int, int, int], ...]


UNREADABLE = "the adapter's files cannot be read"


@dataclass(slots=True)
class _Known:
    signature: Signature
    digest: str = ""
    detail: str = "the adapter's files are being read"


class AdapterDigests:
    """Digests by the engine's number of each adapter. One thread asks."""

    def __init__(self, digest: Callable[[Path], str | None]) -> None:
        """digest: of an adapter's folder; None if it cannot be read. Called in threads."""
        self._digest = digest
        self._known: dict[int, _Known] = {}

    def of(self, number: int, path: str, *, reads_anew: bool) -> tuple[str, str]:
        """An adapter's digest, or why there is none: ("", detail). reads_anew: the engine loads it for this request."""
        signature, known = _signature(Path(path)), self._known.get(number)
        if known is None or (known.signature != signature and reads_anew):
            known = self._known[number] = _Known(signature)
            if len(self._known) > MAX_ADAPTERS:
                del self._known[next(iter(self._known))]
            if signature:
                threading.Thread(target=self._read, args=(known, Path(path)), name="kv-adapter", daemon=True).start()
            else:
                known.detail = UNREADABLE
        elif known.signature != signature:
            known.digest, known.detail = "", "the adapter's files have changed since the engine read them"
            return "", known.detail
        return known.digest, known.detail

    def _read(self, known: _Known, path: Path) -> None:
        digest = self._digest(path)
        if digest is None:
            known.detail = UNREADABLE
        elif _signature(path) != known.signature:
            known.detail = "the adapter's files changed while they were read"
        else:
            known.digest = digest


def _signature(path: Path) -> Signature:
    try:
        files = sorted(one for one in path.iterdir() if one.is_file())
        stats = [(one.name, one.stat()) for one in files]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
