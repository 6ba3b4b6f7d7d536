"""Time. Code that needs it is handed a `Clock`; `SystemClock` is the machine's own, which the entry points hand in."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time, handed in. Seconds, as floats."""

    def monotonic_seconds(self) -> float:
        """Never goes back: for leases, deadlines and rates."""
        ...

    def wall_seconds(self) -> float:
        """Unix time: for retention, and for people."""
        ...

    def thread_seconds(self) -> float:
        """CPU time of the calling thread."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    monotonic_seconds = staticmethod(time.monotonic)
    wall_seconds = staticmethod(time.time)
    thread_seconds = staticmethod(time.thread_time)
    sleep = staticmethod(time.sleep)
