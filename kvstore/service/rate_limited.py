"""Warnings that something outside causes as often as it likes: one line per kind and minute (floor 2).

A client that sends nonsense, or a disk that stays full, must fill no log. The first warning of a kind is written; those
that follow within the minute are counted, and the next line says how many they were.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from math import inf
from typing import Protocol

MOST_KINDS = 64
"""That are told apart at a time; further ones share one line per minute."""


class Clock(Protocol):
    """Time, handed in."""

    def monotonic_seconds(self) -> float:
        """Seconds that never go back."""
        ...


@dataclass(slots=True)
class _Told:
    """When a line was written, and how many were not since."""

    at: float
    suppressed: int = 0


class RateLimitedLog:
    """A logger for warnings, each of a kind: a cause, and whoever caused it. Thread-safe."""

    def __init__(self, logger: logging.Logger, clock: Clock, seconds: float = 60) -> None:
        """seconds: for which a kind has said enough with one line."""
        self._logger = logger
        self._clock = clock
        self._seconds = seconds
        self._lock = threading.Lock()
        self._kinds: OrderedDict[str, _Told] = OrderedDict()  # those that were told longest ago first
        self._others = _Told(-inf)

    def warn(self, kind: str, message: str, *args: object) -> bool:
        """Log a warning, if its kind has not had its line yet; whether it was."""
        return self._log(logging.WARNING, kind, message, args, None)

    def error(self, kind: str, message: str, *args: object, error: BaseException | None = None) -> bool:
        """The same for a fault of our own, with its traceback."""
        return self._log(logging.ERROR, kind, message, args, error)

    def _log(self, level: int, kind: str, message: str, args: tuple[object, ...], error: BaseException | None) -> bool:
        now = self._clock.monotonic_seconds()
        with self._lock:
            told = self._told(kind, now)
            if now - told.at < self._seconds:
                told.suppressed += 1
                return False
            suppressed, told.at, told.suppressed = told.suppressed, now, 0
            if told is not self._others:
                self._kinds.move_to_end(kind)
        if suppressed:
            message, args = message + " (%d more like this were not logged)", (*args, suppressed)
        self._logger.log(level, message, *args, exc_info=error)
        return True

    def _told(self, kind: str, now: float) -> _Told:
        """What was told of a kind, or of all together for which there is no place."""
        if kind not in self._kinds:
            if len(self._kinds) >= MOST_KINDS:
                oldest = next(iter(self._kinds))
                if now - self._kinds[oldest].at < self._seconds:
                    return self._others
                self._others.suppressed += self._kinds.pop(oldest).suppressed  # its next line may never come
            self._kinds[kind] = _Told(-inf)
        return self._kinds[kind]
