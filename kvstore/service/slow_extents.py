"""Tenants that have made their memory slow to hand out (floor 2).

To hand out an extent is to lock a byte of it, for which the kernel looks through all locks on it, and a client may
place as many as it likes. The door's thread does that for all tenants. So a tenant whose extent took long waits for the
next one: it can spend no more than a hundredth of the thread's time. What counts is the processor's time of the thread,
so that a busy machine makes no tenant wait.
"""

from __future__ import annotations

from collections.abc import Callable

SLOW_SECONDS = 0.001
RARELY = 100


class SlowExtents:
    """Who they are. Not thread-safe."""

    def __init__(
        self, now: Callable[[], float] = lambda: 0.0, thread_seconds: Callable[[], float] = lambda: 0.0
    ) -> None:
        """now: seconds that never go back. thread_seconds: that the processor has worked for the calling thread."""
        self._now = now
        self.thread_seconds = thread_seconds
        self._not_before: dict[bytes, float] = {}

    def waits(self, tenant: bytes) -> bool:
        """Whether a tenant is given none for now."""
        not_before = self._not_before.get(tenant)
        if not_before is None:
            return False
        if self._now() < not_before:
            return True
        del self._not_before[tenant]
        return False

    def is_slow(self, tenant: bytes, since: float) -> bool:
        """Whether what was done for a tenant since then, by `thread_seconds`, took long: then it waits."""
        took = self.thread_seconds() - since
        if took <= SLOW_SECONDS:
            return False
        self._not_before[tenant] = self._now() + RARELY * took
        return True
