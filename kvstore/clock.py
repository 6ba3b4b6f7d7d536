"""The machine's clock (floor 2). Whoever needs time is handed one; this is the one that entrances hand in."""

from __future__ import annotations

import time


class SystemClock:
    """The machine's clock."""

    def monotonic_seconds(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def wall_seconds(self) -> float:
        """Unix time."""
        return time.time()

    def thread_seconds(self) -> float:
        """That the processor has worked for the calling thread."""
        return time.thread_time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
