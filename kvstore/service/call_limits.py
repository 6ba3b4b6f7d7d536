"""How long a client of the sidecar waits, and for what (floor 2)."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.service import messages as m
from kvstore.service.wire import Clock


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How long a call may take, in seconds. connect: until the sidecar says welcome, or answers a ping. match: for a
    look-up, and for the ping of a sidecar that is suspected to be silent. lease: beyond the deadline of the lease
    itself. Look-ups and leases have more for long chains (`Run.allowance`). fill: for room, which may have to be made,
    and for commits, where a put says nothing else. drop: for a namespace to be forgotten. open: how long a new
    namespace waits for a sidecar that is not there yet. first_pause, longest_pause: before it is called again. ping:
    how often it is asked, by a thread, what memory is to be let go of, and undone what nobody waits for.
    """

    connect: float = 1.0
    match: float = 0.05
    lease: float = 0.05
    fill: float = 5.0
    drop: float = m.DROP_SECONDS
    open: float = 10.0
    first_pause: float = 0.02
    longest_pause: float = 1.0
    ping: float = 0.5

    @property
    def mapping(self) -> float:
        """For what a sidecar that runs answers soon, whatever the verb before it was for."""
        return max(self.connect, self.lease)


class VerbTime:
    """That a verb may take, all its questions together."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._ends_at = clock.monotonic_seconds() + seconds

    def extend(self, seconds: float) -> None:
        """It may take so much longer, as a long chain does."""
        self._ends_at += seconds

    def left(self) -> float:
        """Seconds, 0 where there are none."""
        return max(0.0, self._ends_at - self._clock.monotonic_seconds())
