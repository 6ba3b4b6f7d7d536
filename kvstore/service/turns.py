"""Whose turn it is at a thread that all tenants share: whoever was served least of it comes first (floor 2).

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). A tenant's next piece of work starts where its last one
ended, or at the virtual time if that is later; the smallest start comes first, and the virtual time is the start of
the piece that was begun last. So a tenant waits for one piece of each other tenant, however many connections they
have; and whoever was away, or comes anew, has saved up nothing that others would have to wait for.
"""

from __future__ import annotations


class Turns:
    """Of one thread. now: the virtual time, in whatever is paid."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


class Share:
    """What one tenant was served of it: one number."""

    __slots__ = ("_ends_at", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._ends_at = 0.0

    @property
    def starts_at(self) -> float:
        """Of the next piece; the smallest of all tenants that want one is to be begun."""
        return max(self._ends_at, self._turns.now)

    def begin(self) -> None:
        """A piece; what it costs is paid before or while others are begun."""
        self._turns.now = self.starts_at

    def pay(self, cost: float) -> None:
        """For what was begun, or for what was done without a turn."""
        self._ends_at = self.starts_at + cost
