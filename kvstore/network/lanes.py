"""Threads for calls: each caller has a few of its own, so a flooding caller delays only itself.

A call waits for its client twice: until its message is there, and until its answer was taken. Both waits may be
cancelled: when it is late, and, in a lane full of waiting calls, when another call comes, the oldest first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from tiering.clock import Clock

T = TypeVar("T")
CLIENT_SECONDS, ROOM_SECONDS = 5.0, 0.25
"""How long a call may wait for its client; and how long if all other calls of its lane wait for theirs."""
DELAYED_APART_SECONDS = 0.002
SHORT_LANE, LONG_LANE = (2, 64), (1, 8)
"""Of a caller: threads, and calls that wait and run."""


class Lane:
    """Runs work in order, some of it at a time. Thread-safe."""

    def __init__(self, name: str, threads: int, most: int, clock: Clock, room_seconds: float = ROOM_SECONDS) -> None:
        """most: waiting and running calls together. room_seconds: how long a call may wait for its client if all others
        do and another comes; 0 if callers are unauthenticated, so that none can fill the lane."""
        self._pool = ThreadPoolExecutor(threads, f"kv-lane-{name}")
        self._threads = threads
        self._most = most
        self._clock = clock
        self._room_seconds = room_seconds
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: dict[Callable[[], object], float] = {}  # cancels: begun at; the oldest first

    def submit(self, work: Callable[[], T]) -> Future[T] | None:
        """Queue work; None if the lane is full."""
        with self._lock:
            if self._count >= self._most:
                return None
            self._count += 1
            patient = self._clock.monotonic_seconds() - self._room_seconds
            oldest, since = next(iter(self._waiting.items()), (None, patient))
            if len(self._waiting) < self._threads or since > patient:
                oldest = None
        if oldest is not None:
            oldest()
        try:
            done = self._pool.submit(work)
        except RuntimeError:  # closed, or the system has no more threads
            self._leave()
            return None
        done.add_done_callback(self._leave)
        return done

    @contextmanager
    def waiting(self, give_up: Callable[[], object]) -> Iterator[None]:
        """A context while its client is waited for. give_up: cancels the wait; may be called late."""
        with self._lock:
            self._waiting[give_up] = self._clock.monotonic_seconds()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(give_up, None)

    def give_up_late(self) -> None:
        """Cancel calls that have waited for their client too long. Call it every second."""
        with self._lock:
            is_full = self._threads <= len(self._waiting) < self._count
            late = self._clock.monotonic_seconds() - (self._room_seconds if is_full else CLIENT_SECONDS)
            found = [give_up for give_up, since in self._waiting.items() if since < late]
        for give_up in found:
            give_up()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def finish(self) -> None:
        """Run all that is queued, and close."""
        self._pool.shutdown()

    def _leave(self, _: object = None) -> None:
        with self._lock:
            self._count -= 1


class AtOnce(ThreadPoolExecutor):
    """Runs work at once, in the calling thread: for work that does not block."""

    def submit(self, work: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        """Returns a future that is done."""
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **named))
        except BaseException as error:  # like every executor
            done.set_exception(error)
        return done


class Delayed:
    """Runs work a little later, in order, spread over time. One thread hands it work."""

    def __init__(self, seconds: float, most: int, clock: Clock) -> None:
        """most: waiting work; beyond it, work runs at once."""
        self._seconds, self._clock = seconds, clock
        self._lane = Lane("delay", 1, most, clock)
        self._last = 0.0
        self._ends = threading.Event()

    def do(self, work: Callable[[], object]) -> None:
        """work: must not raise."""
        at = max(self._clock.monotonic_seconds() + self._seconds, self._last + DELAYED_APART_SECONDS)
        if self._lane.submit(lambda: self._run(at, work)) is None:
            work()
            return
        self._last = at

    def close(self) -> None:
        """Run all waiting work now."""
        self._ends.set()
        self._lane.finish()

    def _run(self, at: float, work: Callable[[], object]) -> None:
        self._ends.wait(max(0.0, at - self._clock.monotonic_seconds()))
        work()


class CallerLanes:
    """Two lanes for each caller: for calls that are answered at once, and for those that may take an hour."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lanes: dict[tuple[object, bool], Lane] = {}

    def of(self, caller: object, is_long: bool = False) -> Lane:
        """caller: one of the configured ones, so the number of lanes is bounded."""
        with self._lock:
            found = self._lanes.get((caller, is_long))
            if found is None:
                name, (threads, most) = str(len(self._lanes)), LONG_LANE if is_long else SHORT_LANE
                found = self._lanes[caller, is_long] = Lane(name, threads, most, self._clock)
            return found

    def all(self) -> list[Lane]:
        with self._lock:
            return list(self._lanes.values())
