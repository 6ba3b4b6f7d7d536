"""How long a put waits for memory that clients still map.

    evicted > given back > the clients that map it are notified > they unmap it > it can be used

The last two steps are other processes', which take milliseconds, or hang. So each extent is waited for in vain once at
most, and a put gives up after its first wait in vain. A wait of more than a moment is charged to the tenant: its puts
may wait for `TENANT_SECONDS` in all, which come back at a tenth of real time, so a client that unmaps slowly costs no
more than that. A waiting put occupies a thread of the sidecar's: `MOST_WAITING` do so at a time, and a collective put,
for which other processes wait in turn, waits for a moment only, and is charged for all of it. Pure: no lock, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiering.dram.extents import LOOK_SECONDS

LOOKS_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.064)
"""One wait: the pauses between looks."""
COLLECTIVE_LOOKS = 4
"""How many of these looks a collective put has."""
WAIT_SECONDS = sum(LOOKS_SECONDS)
PUT_SECONDS = 1.0
"""The most that one put may wait, for all extents."""
MOMENT_SECONDS = sum(LOOKS_SECONDS[:COLLECTIVE_LOOKS])
"""A shorter wait is not charged."""
TENANT_SECONDS = 1.0
"""Seconds of waiting that a tenant may have run up; above it, its puts do not wait."""
REGAIN = 0.1
"""Seconds of these that come back each second."""
MOST_WAITING = 12
"""Waiting puts of all tenants: fewer than the sidecar has threads."""


class UnmapWait:
    """One store's waits. Memory is named by numbers that are never reused."""

    def __init__(self) -> None:
        self._in_vain: set[int] = set()  # waited for, and mapped still
        self._spent: dict[bytes, tuple[float, float]] = {}  # by tenant: seconds, and as of when
        self._waiting = 0

    def may_wait(self, tenant: bytes, mapped: Collection[int], now: float) -> bool:
        """Whether a tenant's put is to wait for memory that was given back and is still mapped."""
        self._in_vain.intersection_update(mapped)
        if len(self._in_vain) == len(mapped) or self._waiting >= MOST_WAITING:
            return False
        return self._spent_by(tenant, now) < TENANT_SECONDS

    def begin(self, tenant: bytes, mapped: Collection[int], now: float) -> bool:
        """If the put is to wait, count it as waiting; `end` follows then."""
        waits = self.may_wait(tenant, mapped, now)
        self._waiting += waits
        return waits

    def end(self, tenant: bytes, seconds: float, now: float, *, is_collective: bool = False) -> None:
        """The put waited for so long."""
        self._waiting -= 1
        charged = seconds if is_collective else max(0.0, seconds - MOMENT_SECONDS)
        self._spent[tenant] = self._spent_by(tenant, now) + charged, now

    def in_vain(self, mapped: Collection[int]) -> None:
        """A whole wait is over, and these stayed mapped throughout."""
        self._in_vain.update(mapped)

    def _spent_by(self, tenant: bytes, now: float) -> float:
        spent, at = self._spent.get(tenant, (0.0, now))
        return max(0.0, spent - REGAIN * (now - at))


# ---------------------------------------------------------------------------------------------------------------------
# Which extents a holder has unmapped, as far as a moment's questions to the kernel tell. Pure: the question and a clock
# of the thread's processor time are handed in, so a busy machine makes no question look slow.


@dataclass(frozen=True, slots=True)
class SharedExtent:
    """An extent that was opened for another process. The caller closes the descriptor."""

    descriptor: int
    size_bytes: int
    frame_bytes: int


class Unmapped(NamedTuple):
    """unmapped: how many leading extents the holder has unmapped. asked: questions to the kernel that this took.
    seconds: of processor time."""

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
