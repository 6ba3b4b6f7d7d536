"""The client's background thread: it pings the sidecar and reconnects, so that no engine thread waits for either.

It also unmaps memory that the sidecar gave back and undoes late answers while the engine is idle. One ping is in flight
at a time, however long it takes: a sidecar that resumes after a hang finds a single one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from kvstore.block.errors import Unreachable
from kvstore.client.connection import CallLimits, SidecarConnection
from kvstore.client.framing import Backpressure, TimedOut
from kvstore.protocol import messages as m
from kvstore.protocol.notify_pipe import NotifyPipeEnd
from tiering.clock import Clock


class InTouch:
    """wanted: there is no connection, and a verb asked for one. is_moving: the last ping unmapped memory, and more may
    follow."""

    def __init__(self, clock: Clock) -> None:
        self.wanted = False
        self.is_moving = False
        self._clock = clock
        self._ended = False
        self.nudge = threading.Event()
        """Set it to have the thread check at once."""
        self._thread: threading.Thread | None = None
        self._pinging = threading.Lock()
        self._pinged: tuple[SidecarConnection, int] | None = None
        """The connection with a ping in flight, and the ping's number."""

    def start(self, look_after: Callable[[], float], seconds: float) -> bool:
        """Start the thread unless it runs; returns whether it does. look_after: a method, called after so many seconds,
        or when nudged; it returns the seconds until the next time. The thread ends with its object."""
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, args=(weakref.WeakMethod(look_after), seconds), name="kv-client", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no thread available
                return False
            self._thread = thread
        return True

    def end(self) -> None:
        """End the thread, without waiting."""
        self._ended = True
        self.nudge.set()

    def _run(self, method: weakref.WeakMethod[Callable[[], float]], seconds: float) -> None:
        while not self._ended:
            self.nudge.wait(seconds)
            self.nudge.clear()
            look_after = method()
            if look_after is None or self._ended:
                return
            seconds = look_after()
            del look_after

    def ping(self, run: SidecarConnection, limits: CallLimits, settle: Callable[[SidecarConnection], None]) -> None:
        """Send a ping, or go on waiting for the one in flight. settle: undoes late answers."""
        if not self._pinging.acquire(blocking=False):
            return  # another thread is waiting for the answer
        try:
            self._ping(run, limits, settle)
        finally:
            self._pinging.release()

    def _ping(self, run: SidecarConnection, limits: CallLimits, settle: Callable[[SidecarConnection], None]) -> None:
        breaker, now = run.breaker, self._clock.monotonic_seconds()
        if not breaker.is_open:
            settle(run)
        try:
            if self._pinged is None or self._pinged[0] is not run:
                self._pinged = run, run.wire.submit(m.Ping(run.notify_pipe is None))
            _, number = self._pinged
            answered = run.wire.await_answer(number, limits.connect)
        except TimedOut:  # silent only if nothing arrived during this wait: other answers may have come since the ping
            run.was_late(now, is_quick=True)
            return
        except Backpressure:  # the sidecar does not read
            run.was_late(now - limits.connect, is_quick=True)
            self.nudge.wait(limits.ping)
            return
        except Unreachable:
            self._pinged = None
            self.nudge.set()  # the sidecar is gone: its memory is unmapped at once
            return
        self._pinged = None
        breaker.answered()
        for descriptor in answered.descriptors:
            self._listen(run, descriptor)
        retired = run.wire.retired()
        run.unmap(retired)
        settle(run)
        self.is_moving = bool(retired) and run.notify_pipe is None

    def _listen(self, run: SidecarConnection, descriptor: int) -> None:
        run.notify_pipe = notify_pipe = NotifyPipeEnd(descriptor)
        try:
            threading.Thread(target=_hear, args=(notify_pipe, self.nudge), name="kv-bell", daemon=True).start()
        except RuntimeError:  # no thread available: pings find out instead
            notify_pipe.close()
            run.notify_pipe = None


def _hear(notify_pipe: NotifyPipeEnd, nudged: threading.Event) -> None:
    while notify_pipe.wait():
        nudged.set()
    notify_pipe.close()
    nudged.set()  # the sidecar may be gone
