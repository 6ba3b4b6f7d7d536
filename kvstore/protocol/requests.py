"""The leases that a process holds for each request of its engine.

Kept in the engine's process, and not by the store: a request that is aborted in one process ends that process's leases
at once, and none that another process is still reading.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from kvstore.block.errors import BadInput

MAX_REQUEST_CHARACTERS = 256
"""Of a request's name."""
SWEEP_REQUESTS = 256
"""Names of requests that may be kept after their last lease is gone."""


class Ends(Protocol):
    """A lease, or a pending one."""

    def end(self) -> None:
        """The request is over: release it."""
        ...


class Requests:
    """A process's leases by the engine's own name of the request. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, weakref.WeakSet[Ends]] = {}
        self._sweep_at = SWEEP_REQUESTS

    def add(self, request: str, held: Ends) -> None:
        """A lease, or a pending one, for a request. Without a name nothing is kept."""
        if not request:
            return
        with self._lock:
            if len(self._held) >= self._sweep_at:
                self._held = {name: ones for name, ones in self._held.items() if ones}
                self._sweep_at = 2 * len(self._held) + SWEEP_REQUESTS
            self._held.setdefault(request, weakref.WeakSet()).add(held)

    def release(self, request: str) -> None:
        """End all that is held for a request. Raises `BadInput` for an impossible name."""
        check_request(request)
        with self._lock:
            held = self._held.pop(request, None)
        for one in list(held) if held is not None else ():
            one.end()

    def __len__(self) -> int:
        return len(self._held)


def check_request(request: str) -> None:
    """Raises `BadInput` for an impossible name of a request."""
    if not isinstance(request, str) or len(request) > MAX_REQUEST_CHARACTERS:
        raise BadInput(f"request={str(request)[:40]!r}; give text of at most {MAX_REQUEST_CHARACTERS} characters")
