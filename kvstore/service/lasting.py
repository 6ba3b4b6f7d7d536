"""What stays until the sidecar ends is left out of the interpreter's search for cycles (floor 2).

A part of a namespace is five objects, and a search of all of them, 1.2 million for 512 namespaces of 450 parts, has
everybody wait for a third of a second. So they are set aside when some are there, behind a search that has only what
came since to walk.
"""

from __future__ import annotations

import gc
import threading

SET_ASIDE_PARTS = 4096
"""Of namespaces that were opened: their objects are walked in some milliseconds."""


class Lasting:
    """Thread-safe."""

    def __init__(self) -> None:
        self._parts = 0
        self._lock = threading.Lock()

    def opened(self, parts: int) -> None:
        """A namespace of so many, which may have been there."""
        with self._lock:
            self._parts += parts
            if self._parts < SET_ASIDE_PARTS:
                return
            self._parts = 0
        set_aside()


def set_aside() -> None:
    """All objects that are there now, but garbage."""
    gc.collect()
    gc.freeze()
