"""The thread of a client that pings its sidecar and calls it, so that nobody else waits for either.

It lets go of memory that the sidecar gave back, and undoes what came too late, also while nobody asks for anything. One
ping is under way at a time, however long it takes: a sidecar that hangs finds one when it goes on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from kvstore.block.errors import Unreachable
from kvstore.client.connection import CallLimits, SidecarConnection
from kvstore.client.framing import Backpressure, TimedOut
from kvstore.protocol import messages as m
from kvstore.protocol.notify_pipe import NotifyPipeEnd
from tiering.clock import Clock


class LookedAfter(Protocol):
    """What the thread looks after."""

    def look_after(self) -> float:
        """Returns the seconds until it is to be called again."""
        ...


class InTouch:
    """The thread, and what it is told. wanted: there is no connection, and somebody asked for one. is_moving: memory
    was let go of when it looked last, and more may follow."""

    def __init__(self, clock: Clock) -> None:
        self.wanted = False
        self.is_moving = False
        self._clock = clock
        self._ended = False
        self.nudge = threading.Event()
        """Set it, and the thread looks at once."""
        self._thread: threading.Thread | None = None
        self._pinging = threading.Lock()
        self._pinged: tuple[SidecarConnection, int] | None = None
        """The connection on which a ping is under way, and its number."""

    def start(self, door: LookedAfter, seconds: float) -> bool:
        """Have the thread, which begins after so many seconds, or as soon as it is nudged, and ends with the door.
        Returns whether there is one."""
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, args=(weakref.ref(door), seconds), name="kv-client", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the machine has none for it
                return False
            self._thread = thread
        return True

    def end(self) -> None:
        """Waits for nothing."""
        self._ended = True
        self.nudge.set()

    def _run(self, door: weakref.ref[LookedAfter], seconds: float) -> None:
        while not self._ended:
            self.nudge.wait(seconds)
            self.nudge.clear()
            there = door()
            if there is None or self._ended:
                return
            seconds = there.look_after()
            del there

    def ping(self, run: SidecarConnection, limits: CallLimits, settle: Callable[[SidecarConnection], None]) -> None:
        """Send a ping, or go on waiting for the one that was sent. settle: undoes what came too late."""
        if not self._pinging.acquire(blocking=False):
            return  # somebody waits for it
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
        except TimedOut:  # silent is who said nothing during this wait; other answers may have come since it was sent
            run.was_late(now, is_quick=True)
            return
        except Backpressure:  # it does not read what it is sent
            run.was_late(now - limits.connect, is_quick=True)
            self.nudge.wait(limits.ping)
            return
        except Unreachable:
            self._pinged = None
            self.nudge.set()  # it is gone: its memory is let go of at once
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
        """Ask at once whenever the sidecar has something to tell, from now on."""
        run.notify_pipe = notify_pipe = NotifyPipeEnd(descriptor)
        try:
            threading.Thread(target=_hear, args=(notify_pipe, self.nudge), name="kv-bell", daemon=True).start()
        except RuntimeError:  # no thread to be had: it is asked now and then
            notify_pipe.close()
            run.notify_pipe = None


def _hear(notify_pipe: NotifyPipeEnd, nudged: threading.Event) -> None:
    """Until the sidecar hangs up."""
    while notify_pipe.wait():
        nudged.set()
    notify_pipe.close()
    nudged.set()  # it may be gone
