"""Lines of log that say a thing once: when it begins, and when it is over."""

from __future__ import annotations

import logging
import threading

from tiering.clock import Clock

AGAIN_SECONDS = 60.0
MOST_KINDS = 1024

_log = logging.getLogger(__name__)


class OncePerKind:
    """What is wrong at the moment, by kind. Thread-safe. A kind is logged when it begins, again after a minute in which
    it went on, and when it ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, str]] = {}

    def say(self, kind: str, line: str) -> None:
        """It is so now. line: for people."""
        now = self._clock.monotonic_seconds()
        with self._lock:
            at, _ = self._said.get(kind, (float("-inf"), ""))
            if kind not in self._said and len(self._said) >= MOST_KINDS:
                return
            is_due = now - at >= AGAIN_SECONDS
            self._said[kind] = now if is_due else at, line
        if is_due:
            _log.warning("%s", line)

    def ended(self, kind: str, line: str) -> None:
        """It is so no more."""
        with self._lock:
            was_so = self._said.pop(kind, None) is not None
        if was_so:
            _log.info("%s", line)

    def reasons(self) -> list[str]:
        """What is wrong now."""
        with self._lock:
            return [line for _, line in self._said.values()]
