"""How long a put waits for memory that others still map (floor 2).

    evicted > given back > whoever maps it is told > he unmaps it > it can be used

The last two steps are other processes', which take milliseconds, or stand still. So an extent is waited for once: what
is mapped after a wait in vain is waited for no more. And each tenant's puts may wait for so many seconds, which come
back at a tenth of the time's pace: whoever lets go slowly, or has many others ask with him, costs no more than that.
Pure: no lock, no clock.
"""

from __future__ import annotations

from collections.abc import Collection

LOOKS_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.064)
"""One wait: how long until it is looked again, each time."""
WAIT_SECONDS = sum(LOOKS_SECONDS)
TENANT_SECONDS = 1.0
"""That all puts of a tenant together may wait."""
REGAIN = 0.1
"""How much of that comes back each second."""


class Patience:
    """Of a store. Memory is named by numbers that are never used again."""

    def __init__(self) -> None:
        self._in_vain: set[int] = set()  # waited for, and mapped still
        self._spent: dict[bytes, tuple[float, float]] = {}  # by tenant: seconds, and as of when

    def begin(self, tenant: bytes, mapped: Collection[int], now: float) -> bool:
        """Whether a put of a tenant is to wait for memory that was given back and is mapped; `end` follows then."""
        self._in_vain.intersection_update(mapped)
        spent = self._spent_by(tenant, now)
        if len(self._in_vain) == len(mapped) or spent + WAIT_SECONDS > TENANT_SECONDS:
            return False
        self._spent[tenant] = spent + WAIT_SECONDS, now  # all of it: others may begin meanwhile
        return True

    def end(self, tenant: bytes, seconds: float, now: float) -> None:
        """It waited for so long."""
        self._spent[tenant] = max(0.0, self._spent_by(tenant, now) - WAIT_SECONDS + seconds), now

    def in_vain(self, mapped: Collection[int]) -> None:
        """A whole wait is over, and these were mapped from its beginning to its end."""
        self._in_vain.update(mapped)

    def _spent_by(self, tenant: bytes, now: float) -> float:
        spent, at = self._spent.get(tenant, (0.0, now))
        return max(0.0, spent - REGAIN * (now - at))
