"""Stops asking a silent sidecar.

    CLOSED     verbs are asked            > one timed out, and nothing arrived since it was sent > OPEN, or SUSPECTED
    SUSPECTED  verbs are asked, and a ping                     > it times out, and nothing arrived > OPEN
    OPEN       every verb is a miss at once; a ping is in flight           > it is answered > CLOSED

Any answer is a sign of life: a sidecar that is slow with one request and answers others is still asked. A request that
may be slow for its own reasons (a long prompt, eviction, a disk) only makes it SUSPECTED: a machine short of memory
holds everything up for some tenths of a second. A look-up that is late then opens it.

Pure: times come in. A few threads may call at once: each reads or writes one field.
"""

from __future__ import annotations

SILENCE_SECONDS = 0.01
"""A shorter timeout says nothing about the sidecar: any machine may leave a process waiting for this long."""


class Breaker:
    """One connection's."""

    def __init__(self) -> None:
        self.is_open = False
        self.is_suspected = False
        self._silent_since = 0.0

    def was_late(self, asked_at: float, heard_at: float, now: float, *, is_quick: bool) -> bool:
        """A request timed out; returns whether to ping the sidecar now.

        asked_at: when it was sent. heard_at: when the last bytes arrived. is_quick: whether a running sidecar answers
        it at once.
        """
        if heard_at >= asked_at or now - asked_at < SILENCE_SECONDS or self.is_open:
            return False
        self._silent_since = asked_at
        if is_quick:
            self.is_open = True
        else:
            self.is_suspected = True
        return True

    def answered(self) -> None:
        """A ping was answered: verbs are asked again."""
        self.is_open = self.is_suspected = False

    def detail(self, now: float) -> str:
        """Why it is open, for people."""
        silent = max(0.0, now - self._silent_since)
        return f"the sidecar has not answered for {silent:.1f} s; it is pinged, and asked again once it answers"
