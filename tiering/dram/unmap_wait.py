"""Limits how long a put waits for memory that clients still map.

    evicted > returned > the clients that map it are notified > they unmap it > it can be used

The last two steps are other processes', which take milliseconds, or hang. So a put gives up after its first wait that
times out, and no later put waits for those extents alone. Longer waits are charged to the tenant: its puts may wait for
`TENANT_SECONDS` in all, regained at a tenth of real time, so a client that unmaps slowly costs no more than that. A
waiting put occupies a thread of the sidecar: at most `MOST_WAITING` do so at a time. A collective put, for which other
processes wait in turn, waits only a moment and is charged for all of it. Pure: no lock, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiering.dram.extents import LOOK_SECONDS

LOOKS_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.064)
"""One wait: the pauses between looks."""
COLLECTIVE_LOOKS = 4
"""How many of these looks a collective put gets."""
WAIT_SECONDS = sum(LOOKS_SECONDS)
PUT_SECONDS = 1.0
"""Limit of one put's waits for all extents."""
MOMENT_SECONDS = sum(LOOKS_SECONDS[:COLLECTIVE_LOOKS])
"""A shorter wait is not charged."""
TENANT_SECONDS = 1.0
"""A tenant with so many seconds of charged waits waits no more."""
REGAIN = 0.1
"""Charged seconds regained per second."""
MOST_WAITING = 12
"""Waiting puts of all tenants: fewer than the sidecar has threads."""


class UnmapWait:
    """One store's waits. Memory is named by numbers that are never reused."""

    def __init__(self) -> None:
        self._in_vain: set[int] = set()  # waited for, and still mapped
        self._spent: dict[bytes, tuple[float, float]] = {}  # by tenant: seconds, and as of when
        self._waiting = 0

    def may_wait(self, tenant: bytes, mapped: Collection[int], now: float) -> bool:
        """Whether a tenant's put may wait for memory that was given back and is still mapped."""
        self._in_vain.intersection_update(mapped)
        if len(self._in_vain) == len(mapped) or self._waiting >= MOST_WAITING:
            return False
        return self._spent_by(tenant, now) < TENANT_SECONDS

    def begin(self, tenant: bytes, mapped: Collection[int], now: float) -> bool:
        """Count the put as waiting if it may wait; `end` must follow then."""
        waits = self.may_wait(tenant, mapped, now)
        self._waiting += waits
        return waits

    def end(self, tenant: bytes, seconds: float, now: float, *, is_collective: bool = False) -> None:
        """The put has waited for this long."""
        self._waiting -= 1
        charged = seconds if is_collective else max(0.0, seconds - MOMENT_SECONDS)
        self._spent[tenant] = self._spent_by(tenant, now) + charged, now

    def in_vain(self, mapped: Collection[int]) -> None:
        """A whole wait timed out, and these stayed mapped throughout."""
        self._in_vain.update(mapped)

    def _spent_by(self, tenant: bytes, now: float) -> float:
        spent, at = self._spent.get(tenant, (0.0, now))
        return max(0.0, spent - REGAIN * (now - at))


# ---------------------------------------------------------------------------------------------------------------------
# Which extents a holder has unmapped, as far as a short inquiry at the kernel tells. Pure: the question and the
# thread's CPU clock are handed in, so a busy machine makes no question look slow.


@dataclass(frozen=True, slots=True)
class SharedExtent:
    """An extent opened for another process. The caller closes the descriptor."""

    descriptor: int
    size_bytes: int
    frame_bytes: int


class Unmapped(NamedTuple):
    """unmapped: how many leading extents the holder has unmapped. asked: kernel queries made. seconds: of CPU time."""

    unmapped: int
    asked: int
    seconds: float


def look(extents: Sequence[int], is_mapped: Callable[[int], bool], thread_seconds: Callable[[], float]) -> Unmapped:
    """How many extents are unmapped, up to the first that may still be mapped."""
    unmapped, began_at, seconds = 0, thread_seconds(), 0.0
    while unmapped < len(extents) and seconds <= LOOK_SECONDS:
        may_be_mapped = is_mapped(extents[unmapped])
        seconds = thread_seconds() - began_at
        if may_be_mapped:
            return Unmapped(unmapped, unmapped + 1, seconds)
        unmapped += 1
    return Unmapped(unmapped, unmapped, seconds)
