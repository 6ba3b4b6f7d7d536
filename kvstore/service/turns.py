"""Whose turn it is at a thread that all tenants share: the tenant that was served least comes first (floor 2).

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). A tenant's next piece of work starts where its last one
ended, or at the virtual time if that is later; the smallest start comes first, and the virtual time is the start of
the piece that was begun last. So a tenant waits for one piece of each other tenant, however many connections they
have; and a tenant that was away, or comes anew, has saved up nothing that others would have to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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


class Line(Generic[T]):
    """What one tenant has for a pool of threads: pieces that wait, and how many are worked on."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.running = 0
        self.waiting: deque[T] = deque()

    def leave_out(self, is_gone: Callable[[T], bool]) -> None:
        """Pieces that are not wanted any more."""
        self.waiting = deque(one for one in self.waiting if not is_gone(one))


class Lines(Generic[T]):
    """A pool of threads, with one line for each tenant: the next free thread is for the one with fewest at work, and of
    several tenants each leaves some to the others, for as long as a piece may take."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._running = 0
        self._lines: list[Line[T]] = []

    def new_line(self) -> Line[T]:
        """For one more tenant."""
        self._lines.append(Line())
        return self._lines[-1]

    def begin(self) -> T | None:
        """The next piece, which is worked on from now on; None where none waits, or all threads are at work."""
        if self._running >= self._threads:
            return None
        most = self._threads if len(self._lines) == 1 else max(1, self._threads * 3 // 4)
        wanting = [one for one in self._lines if one.waiting and one.running < most]
        if not wanting:
            return None
        line = min(wanting, key=lambda one: one.running)
        line.running += 1
        self._running += 1
        return line.waiting.popleft()

    def end(self, line: Line[T]) -> None:
        """A piece of that line is done."""
        line.running -= 1
        self._running -= 1
