"""How long a put waits for memory that others still map.

    evicted > given back > whoever maps it is told > he unmaps it > it can be used

The last two steps are other processes', which take milliseconds, or stand still. So an extent is waited for in vain
once, and a put waits in vain once. What takes longer than a moment is charged to the tenant that waits: its puts may
wait for so many seconds in all, which come back at a tenth of the time's pace, so that whoever lets go slowly costs no
more than that. While a put waits it keeps a thread of the sidecar's: only so many do at a time, and one that other
processes wait for in turn (a collective put) waits for a moment only, and is charged for all of it. Pure: no lock, no
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiering.dram.extents import LOOK_SECONDS

LOOKS_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.064)
"""One wait: how long until it is looked again, each time."""
COLLECTIVE_LOOKS = 4
"""How many of these a collective put has."""
WAIT_SECONDS = sum(LOOKS_SECONDS)
PUT_SECONDS = 1.0
"""That one put may wait, for one extent after the other."""
MOMENT_SECONDS = sum(LOOKS_SECONDS[:COLLECTIVE_LOOKS])
"""What is waited for no longer costs a tenant nothing."""
TENANT_SECONDS = 1.0
"""That a tenant's puts together may have waited before another one waits."""
REGAIN = 0.1
"""How much of that comes back each second."""
MOST_WAITING = 12
"""Puts at a time, of all tenants: fewer than the sidecar has threads."""


class UnmapWait:
    """Of a store. Memory is named by numbers that are never used again."""

    def __init__(self) -> None:
        self._in_vain: set[int] = set()  # waited for, and mapped still
        self._spent: dict[bytes, tuple[float, float]] = {}  # by tenant: seconds, and as of when
        self._waiting = 0

    def may_wait(self, tenant: bytes, mapped: Collection[int], now: float) -> bool:
        """Whether a put of a tenant is to wait for memory that was given back and is mapped."""
        self._in_vain.intersection_update(mapped)
        if len(self._in_vain) == len(mapped) or self._waiting >= MOST_WAITING:
            return False
        return self._spent_by(tenant, now) < TENANT_SECONDS

    def begin(self, tenant: bytes, mapped: Collection[int], now: float) -> bool:
        """It waits, if it is to; `end` follows then."""
        waits = self.may_wait(tenant, mapped, now)
        self._waiting += waits
        return waits

    def end(self, tenant: bytes, seconds: float, now: float, *, is_collective: bool = False) -> None:
        """It waited for so long."""
        self._waiting -= 1
        charged = seconds if is_collective else max(0.0, seconds - MOMENT_SECONDS)
        self._spent[tenant] = self._spent_by(tenant, now) + charged, now

    def in_vain(self, mapped: Collection[int]) -> None:
        """A whole wait is over, and these were mapped from its beginning to its end."""
        self._in_vain.update(mapped)

    def _spent_by(self, tenant: bytes, now: float) -> float:
        spent, at = self._spent.get(tenant, (0.0, now))
        return max(0.0, spent - REGAIN * (now - at))


# ---------------------------------------------------------------------------------------------------------------------
# What a holder of shared memory has let go of, as far as it can be found out in a moment. Pure: it is handed
# the question to the kernel, and what the processor has worked: a busy machine makes no question slow.


@dataclass(frozen=True, slots=True)
class SharedExtent:
    """An extent that was opened for another process. Whoever is given the descriptor closes it."""

    descriptor: int
    size_bytes: int
    frame_bytes: int


class Unmapped(NamedTuple):
    """What was found out. unmapped: so many extents, from the first on, the holder has let go of. asked: so many
    questions that took. seconds: of the processor."""

    unmapped: int
    asked: int
    seconds: float


def look(extents: Sequence[int], is_mapped: Callable[[int], bool], thread_seconds: Callable[[], float]) -> Unmapped:
    """Up to the first that may be mapped still."""
    unmapped, began_at, seconds = 0, thread_seconds(), 0.0
    while unmapped < len(extents) and seconds <= LOOK_SECONDS:
        may_be_mapped = is_mapped(extents[unmapped])
        seconds = thread_seconds() - began_at
        if may_be_mapped:
            return Unmapped(unmapped, unmapped + 1, seconds)
        unmapped += 1
    return Unmapped(unmapped, unmapped, seconds)
