"""Stops calls to a remote engine while it fails.

    CLOSED  calls go through    > the third failure in a row > OPEN
    OPEN    every call is a miss at once. After the pause the workers probe it in a call for which no request waits
                                > the probe failed > OPEN, for twice as long    > it succeeded > CLOSED, on trial
    CLOSED, on trial: one failure > OPEN    > a call succeeded > CLOSED

Only a successful call makes the pauses short again, so an engine that answers nothing but probes costs one request per
pause. Pure: times come in, and the caller has the lock.
"""

from __future__ import annotations

MOST_FAILURES = 3
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 8.0


class RemoteBreaker:
    """One engine's."""

    def __init__(self) -> None:
        self.is_open = False
        self.why = ""
        self._failures = 0  # in a row
        self._pause = FIRST_PAUSE_SECONDS
        self._probe_at = 0.0
        self._is_probing = False

    def worked(self) -> None:
        """A call succeeded. One that was in flight when the breaker opened counts for nothing."""
        if not self.is_open:
            self._failures, self._pause, self.why = 0, FIRST_PAUSE_SECONDS, ""

    def failed(self, now: float, why: str) -> None:
        """A call failed. why: for people."""
        if self.is_open:
            return
        self.why = why
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            self._open(now)

    def takes_probe(self, now: float) -> bool:
        """Whether to probe now; if so, `probed` must follow."""
        if not self.is_open or self._is_probing or now < self._probe_at:
            return False
        self._is_probing = True
        return True

    def probed(self, now: float, fault: str) -> None:
        """Result of the probe. fault: empty for success."""
        self._is_probing = False
        if fault:
            self.why = fault
            self._open(now)
        else:
            self.is_open, self._failures = False, MOST_FAILURES - 1

    def _open(self, now: float) -> None:
        self.is_open = True
        self._probe_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
