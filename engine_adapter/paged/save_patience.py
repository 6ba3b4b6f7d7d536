"""How long a save waits for an engine that computes on the same processors.

    a step computes > it is over > QUIET_SECONDS without another one > saves go

Encoding and copying take the processors, the memory's bandwidth and the interpreter's lock from a step; behind it they
cost nobody anything. The wait is bounded, and ends where it loses anything: a save whose pages were wanted before it
was its turn, or that found no room behind those that wait, is lost. Pure: times come in. Under the lock of whoever has
it, but for `step_began`.
"""

from __future__ import annotations

QUIET_SECONDS = 0.03
"""Without a step, and the engine has nothing to do: between two steps of one that runs there is less."""
HURRIED_SECONDS = 10.0
"""After a save was given up, others do not wait for so long."""


class SavePatience:
    """Of one worker."""

    def __init__(self, seconds: float) -> None:
        """seconds: that a save waits at most; 0 for an engine that computes elsewhere."""
        self._seconds = seconds
        self._is_in_step = False
        self._stepped_at = 0.0
        self._hurried_until = 0.0

    def __bool__(self) -> bool:
        return self._seconds > 0

    def step_began(self) -> None:
        """The engine computes."""
        self._is_in_step = True

    def step_ended(self, now: float) -> None:
        """It does not any more. Of steps that compute nothing, only this is called."""
        if self._is_in_step:
            self._is_in_step = False
            self._stepped_at = now

    def gave_up(self, now: float) -> None:
        """A save was lost."""
        self._hurried_until = now + HURRIED_SECONDS

    def seconds_left(self, since: float, now: float) -> float:
        """For how long a save that was ordered at that time is not looked at again; 0 when it is its turn."""
        left = since + self._seconds - now
        if left <= 0 or now < self._hurried_until:
            return 0.0
        quiet = QUIET_SECONDS if self._is_in_step else self._stepped_at + QUIET_SECONDS - now
        return max(0.0, min(left, quiet))
