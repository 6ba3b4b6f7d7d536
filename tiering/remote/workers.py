"""Threads that call a remote engine, so that nothing else waits for it beyond a deadline.

    waiting > running > returned                       the caller has its result, or the fault
       |         |
       |         +----> abandoned > returned           at the deadline: the caller goes on; the call still runs
       +--------------------------> returned           withdrawn at the deadline, or refused: it never ran

**What was lent to a call** (a slot, a payload) is the engine's until `on_return`, which is called exactly once whatever
happens to the call, and never after. A caller whose call passed its deadline therefore keeps the slot aside until then:
an abandoned call may still be writing into it.

An abandoned call keeps its thread; where all threads are kept, calls are withdrawn at their deadlines. The engine's own
deadline is the call's, so most late calls end by themselves right at it; abandoning is for those that do not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tiering.clock import Clock
from tiering.remote.driver import (
    PROBE_KEY,
    RemoteBusy,
    RemoteEngine,
    RemoteFault,
    RemoteTimedOut,
    RemoteUnreachable,
)

THREADS, MOST_WAITING = 8, 256
GRACE_SECONDS = 0.01
"""After the deadline, in which an engine that obeys it ends the call by itself."""
SHORTEST_SECONDS = 0.01
"""A call with less time says nothing about the engine: any machine lets a thread wait for that long."""
PROBE_SECONDS = 1.0

T = TypeVar("T")


def _nothing() -> None:
    pass


class RemoteCall(Generic[T]):
    """One call, made by `RemoteWorkers`."""

    def __init__(
        self, workers: RemoteWorkers, work: Callable[[], T], deadline: float, on_return: Callable[[], None]
    ) -> None:
        self.work: Callable[[], T] | None = work
        self.deadline = deadline
        self.on_return = on_return
        self.began: float | None = None  # when it began to run
        self.is_probe = False
        self.is_judged = False  # as the engine's: it returned, or was abandoned
        self._workers = workers
        self._settled = threading.Event()
        self._value: T | None = None
        self._fault: RemoteFault | None = None

    def result(self) -> T:
        """Wait a little longer than to the deadline. Raises `RemoteFault`: `RemoteTimedOut` if the call is abandoned
        now, `RemoteBusy` if it never ran."""
        if not self._settled.wait(self._workers.seconds_left(self)):
            self._workers.give_up(self)
            self._settled.wait()  # for a result that was on its way
        if self._fault is not None:
            raise self._fault
        return self._value  # type: ignore[return-value]

    def is_settled(self, within: float = 0.0) -> bool:
        """Whether `result` does not wait any more. within: seconds to wait for that; the call goes on."""
        return self._settled.wait(max(0.0, within))

    def settle(self, value: T | None, fault: RemoteFault | None) -> None:
        """The workers set the caller's result. The first time counts."""
        if not self._settled.is_set():
            self._value, self._fault = value, fault
            self._settled.set()


@dataclass(frozen=True, slots=True)
class RemoteFigures:
    """Status of an engine. state: `up`, or `open` (its breaker). failures: calls since the start that failed or were
    late. detail: the last fault, while it counts."""

    state: str
    failures: int
    detail: str


class RemoteWorkers:
    """Calls one engine. Thread-safe."""

    def __init__(self, engine: RemoteEngine, clock: Clock) -> None:
        """Threads start with the calls."""
        self._engine = engine
        self._clock = clock
        self._breaker = RemoteBreaker()
        self._lock = threading.Condition()
        self._waiting: deque[RemoteCall[Any]] = deque()
        self._threads = self._idle = 0
        self._is_closed = False
        self._failures = 0

    # --- the verbs ---

    def submit(self, work: Callable[[], T], deadline: float, on_return: Callable[[], None] = _nothing) -> RemoteCall[T]:
        """Any work with the engine that raises only `RemoteFault`. Returns at once.

        deadline: monotonic seconds. on_return: see above; called from any thread, must be quick and never raise.
        """
        call = RemoteCall(self, work, deadline, on_return)
        with self._lock:
            now = self._clock.monotonic_seconds()
            if self._breaker.takes_probe(now):
                self._probe(now)
            fault = self._refusal() or self._enqueue(call)
        if fault is not None:
            self._end(call, None, fault)
        return call

    def figures(self) -> RemoteFigures:
        with self._lock:
            return RemoteFigures("open" if self._breaker.is_open else "up", self._failures, self._breaker.why)

    @property
    def is_open(self) -> bool:
        """Whether calls are misses at once: the engine failed, and no probe has succeeded since."""
        return self._breaker.is_open

    def close(self) -> None:
        """Close the engine too. Waiting calls are refused; running ones end soon, or are abandoned."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = list(self._waiting), deque()
            self._lock.notify_all()
        for call in waiting:
            self._end(call, None, RemoteUnreachable(f"{self._engine.name} was closed"))
        self._engine.close()

    # --- of calls ---

    def seconds_left(self, call: RemoteCall[Any]) -> float:
        """How long its caller waits."""
        left = call.deadline + GRACE_SECONDS - self._clock.monotonic_seconds()
        return min(max(0.0, left), threading.TIMEOUT_MAX)

    def give_up(self, call: RemoteCall[Any]) -> None:
        """Its caller stops waiting."""
        with self._lock:
            is_withdrawn = call in self._waiting
            if is_withdrawn:
                self._waiting.remove(call)
            elif call.began is not None and not call.is_judged:
                fault = RemoteTimedOut(f"{self._engine.name} did not answer in time")
                self._judge(call, fault)
                call.settle(None, fault)
        if is_withdrawn:
            self._end(call, None, RemoteBusy(f"no worker of {self._engine.name} was free in time"))

    def _refusal(self) -> RemoteFault | None:
        name = self._engine.name
        if self._is_closed:
            return RemoteUnreachable(f"{name} was closed")
        if self._breaker.is_open:
            return RemoteUnreachable(f"{name} is not asked now: {self._breaker.why}")
        return None

    def _enqueue(self, call: RemoteCall[Any]) -> RemoteFault | None:
        if len(self._waiting) >= self._idle and self._threads < THREADS:
            with suppress(RuntimeError):  # the machine has no more threads
                threading.Thread(target=self._serve, name="kvstore-remote", daemon=True).start()
                self._threads += 1
        if not self._threads:
            return RemoteBusy(f"no thread can be started for {self._engine.name}")
        if len(self._waiting) >= MOST_WAITING:
            return RemoteBusy(f"{len(self._waiting)} calls wait for {self._engine.name}")
        self._waiting.append(call)
        self._lock.notify()
        return None

    def _probe(self, now: float) -> None:
        deadline = now + PROBE_SECONDS
        probe = RemoteCall(self, lambda: self._engine.exists([PROBE_KEY], deadline), deadline, _nothing)
        probe.is_probe = True
        fault = self._enqueue(probe)
        if fault is not None:
            self._breaker.probed(now, str(fault))

    def _judge(self, call: RemoteCall[Any], fault: RemoteFault | None) -> None:
        call.is_judged, now = True, self._clock.monotonic_seconds()
        if call.is_probe:
            self._breaker.probed(now, "" if fault is None else str(fault))
        elif fault is None:
            self._breaker.worked()
        elif not fault.is_of_engine:
            pass
        elif not isinstance(fault, RemoteTimedOut) or call.deadline - (call.began or 0.0) >= SHORTEST_SECONDS:
            self._failures += 1
            self._breaker.failed(now, str(fault))

    # --- of threads ---

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            self._run(call)

    def _next(self) -> RemoteCall[Any] | None:
        """The next call to run; None once the workers are closed."""
        with self._lock:
            while not self._waiting:
                if self._is_closed:
                    self._threads -= 1
                    return None
                self._idle += 1
                self._lock.wait()
                self._idle -= 1
            call = self._waiting.popleft()
            call.began = self._clock.monotonic_seconds()
            return call

    def _run(self, call: RemoteCall[Any]) -> None:
        bug = RemoteFault(f"the driver of {self._engine.name} failed")
        value, fault = None, bug
        try:
            assert call.work is not None and call.began is not None
            if call.deadline <= call.began:
                raise RemoteBusy(f"no worker of {self._engine.name} was free in time")
            value, fault = call.work(), None  # type: ignore[assignment]
        except RemoteFault as error:
            fault = error
        finally:
            with self._lock:
                if not call.is_judged:
                    self._judge(call, fault)
                self._threads -= fault is bug  # which ends this thread
            self._end(call, value, fault)

    def _end(self, call: RemoteCall[Any], value: Any, fault: RemoteFault | None) -> None:
        """The call returned, or never ran: what was lent comes back before its caller knows."""
        call.work = None  # it may hold the slot
        call.on_return()
        call.settle(value, fault)


# Stops calls to a remote engine while it fails ---------------------------------------------------------------------


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
