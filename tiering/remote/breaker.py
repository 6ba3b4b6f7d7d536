"""Whether a remote engine is asked at all: not while it fails.

    CLOSED  calls go through    > the third failure in a row > OPEN
    OPEN    every call is a miss at once. The pause over, the workers probe it in a call of their own, in which no
            request waits    > the probe failed > OPEN, for twice as long    > it went well > CLOSED, on trial
    CLOSED, on trial: one failure > OPEN    > a call went well > CLOSED

Only a call that goes well makes the pauses short again, so an engine that answers probes and nothing else costs one
request for each pause. Pure: times come in, and the caller has the lock.
"""

from __future__ import annotations

MOST_FAILURES = 3
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 8.0


class RemoteBreaker:
    """Of one engine."""

    def __init__(self) -> None:
        self.is_open = False
        self.why = ""
        self._failures = 0  # in a row
        self._pause = FIRST_PAUSE_SECONDS
        self._probe_at = 0.0
        self._is_probing = False

    def worked(self) -> None:
        """A call went well. One that was under way when it opened says nothing."""
        if not self.is_open:
            self._failures, self._pause, self.why = 0, FIRST_PAUSE_SECONDS, ""

    def failed(self, now: float, why: str) -> None:
        """A call did not. why: for people."""
        if self.is_open:
            return
        self.why = why
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            self._open(now)

    def takes_probe(self, now: float) -> bool:
        """Whether to probe now; then `probed` follows."""
        if not self.is_open or self._is_probing or now < self._probe_at:
            return False
        self._is_probing = True
        return True

    def probed(self, now: float, fault: str) -> None:
        """How the probe went: fault, or nothing."""
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
