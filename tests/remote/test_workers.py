"""Calls that are abandoned at their deadline: what was lent to one is lent until it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

import pytest

from tiering.clock import Clock, SystemClock
from tiering.remote import workers as room
from tiering.remote.driver import (
    PROBE_KEY,
    Arrived,
    RemoteBusy,
    RemoteEngine,
    RemoteFault,
    RemoteTimedOut,
    RemoteUnreachable,
    WrongSize,
    ignored,
)
from tiering.remote.workers import FIRST_PAUSE_SECONDS, MOST_FAILURES, RemoteBreaker, RemoteCall, RemoteWorkers
from waiting import FakeClock, wait_until

CLOCK = SystemClock()
SOON, LONG = 0.05, 60.0


def standing_clock() -> FakeClock:
    """At the machine's time, which deadlines are of, until a test advances it."""
    return FakeClock(CLOCK.monotonic_seconds())


class Lagging:
    """A `RemoteEngine` in memory that may hang: it obeys no deadline, and fills a slot when it goes on."""

    name = "lagging"

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.fault: RemoteFault | None = None
        self.calls = self.probes = 0

    def _wait(self) -> None:
        self.calls += 1
        fault = self.fault
        self.goes_on.wait()
        if fault is not None:
            raise fault

    def exists(self, keys: Sequence[bytes], deadline: float = inf) -> list[bool]:
        self.probes += list(keys) == [PROBE_KEY]
        self._wait()
        return [key in self.values for key in keys]

    def read(self, key: bytes, slot: memoryview, deadline: float = inf, arrived: Arrived = ignored) -> bool:
        self._wait()
        value = self.values.get(key)
        if value is None:
            return False
        if len(value) != len(slot):
            raise WrongSize("another size")
        slot[:] = value
        arrived(len(slot))
        return True

    def write(
        self, key: bytes, header: bytes | memoryview, payload: bytes | memoryview, ttl_ms: int, deadline: float = inf
    ) -> bool:
        self._wait()
        self.values.setdefault(key, bytes(header) + bytes(payload))
        return True

    def delete(self, keys: Sequence[bytes], deadline: float = inf) -> int:
        self._wait()
        return sum(self.values.pop(key, None) is not None for key in keys)

    def close(self) -> None:
        self.goes_on.set()


@contextmanager
def on(engine: RemoteEngine, clock: Clock = CLOCK) -> Iterator[RemoteWorkers]:
    one = RemoteWorkers(engine, clock)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "THREADS", 1)


def exists(workers: RemoteWorkers, seconds: float = LONG) -> RemoteCall[list[bool]]:
    ends_at = soon(seconds)
    return workers.submit(lambda: workers._engine.exists([b"x"], ends_at), ends_at)


def soon(seconds: float = SOON) -> float:
    return CLOCK.monotonic_seconds() + seconds


def refused_at_once(workers: RemoteWorkers, work: Callable[[], object], said: str) -> None:
    """A call is refused before `submit` returns: no thread is asked, and its caller does not wait."""
    refused_by: list[int] = []
    call = workers.submit(work, soon(LONG), lambda: refused_by.append(threading.get_ident()))
    assert refused_by == [threading.get_ident()]
    with pytest.raises(RemoteUnreachable, match=f"not asked now: {said}"):
        call.result()


def fail(workers: RemoteWorkers, seconds: float = LONG) -> RemoteFault:
    with pytest.raises(RemoteFault) as caught:
        exists(workers, seconds).result()
    return caught.value


def read(workers: RemoteWorkers, slot: memoryview, seconds: float, on_return: Callable[[], None]) -> RemoteCall[bool]:
    ends_at = soon(seconds)
    return workers.submit(lambda: workers._engine.read(b"a", slot, ends_at), ends_at, on_return)


def test_a_slot_is_lent_until_the_abandoned_call_returns() -> None:
    engine = Lagging()
    engine.values[b"a"] = b"late!"
    with on(engine) as workers:
        engine.goes_on.clear()
        slot = bytearray(5)
        is_back = threading.Event()
        call = read(workers, memoryview(slot), SOON, is_back.set)
        with pytest.raises(RemoteTimedOut):
            call.result()
        assert not is_back.is_set() and bytes(slot) == bytes(5), "the engine may still write into it"
        engine.goes_on.set()
        assert is_back.wait(30) and bytes(slot) == b"late!"
        slot.clear()  # no view of it is left


def test_what_was_lent_is_back_before_the_result() -> None:
    engine = Lagging()
    engine.values[b"a"] = b"hello"
    back: list[str] = []
    with on(engine) as workers:
        for number in range(50):
            read(workers, memoryview(bytearray(5)), LONG, lambda: back.append("back")).result()
            assert len(back) == number + 1


def test_calls_that_hang_take_a_bounded_number_of_threads() -> None:
    engine, clock, back = Lagging(), standing_clock(), list[int]()
    with on(engine, clock) as workers:
        engine.goes_on.clear()
        deadline = clock.monotonic + room.SHORTEST_SECONDS / 2  # which opens no breaker
        calls = [
            workers.submit(lambda: engine.delete([b"x"]), deadline, lambda n=number: back.append(n))  # type: ignore[misc]
            for number in range(room.THREADS + 3)
        ]
        assert workers._threads == room.THREADS
        wait_until(lambda: engine.calls == room.THREADS)
        clock.monotonic = deadline + room.GRACE_SECONDS
        for number, call in enumerate(calls):
            with pytest.raises(RemoteTimedOut if number < room.THREADS else RemoteBusy):
                call.result()
        assert engine.calls == room.THREADS and sorted(back) == list(range(room.THREADS, room.THREADS + 3))
        engine.goes_on.set()
        wait_until(lambda: len(back) == len(calls))
        assert workers.submit(lambda: True, clock.monotonic + LONG).result()


def fault_of(workers: RemoteWorkers) -> RemoteFault | None:
    try:
        workers.submit(lambda: 1, soon(0.005)).result()
    except RemoteFault as fault:
        return fault
    return None


@pytest.mark.usefixtures("one_thread")
def test_a_call_that_never_began_gives_back_at_once_and_says_nothing_of_the_engine() -> None:
    engine = Lagging()
    with on(engine) as workers:
        engine.goes_on.clear()
        first = exists(workers)
        back: list[int] = []
        for number in range(5):
            call = workers.submit(lambda: engine.exists([b"b"]), soon(), lambda: back.append(0))
            with pytest.raises(RemoteBusy):
                call.result()
            assert len(back) == number + 1
        assert not workers.is_open and engine.calls == 1
        engine.goes_on.set()
        assert first.result() == [False]


@pytest.mark.usefixtures("one_thread")
def test_calls_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_WAITING", 3)
    engine = Lagging()
    with on(engine) as workers:
        engine.goes_on.clear()
        first = exists(workers)
        wait_until(lambda: engine.calls == 1)
        waiting = [exists(workers) for _ in range(3)]
        with pytest.raises(RemoteBusy, match="3 calls wait"):
            exists(workers).result()
        engine.goes_on.set()
        assert [call.result() for call in (first, *waiting)] == [[False]] * 4


# --- the breaker ---


def test_it_opens_at_the_third_failure_and_then_costs_nothing() -> None:
    engine = Lagging()
    with on(engine, standing_clock()) as workers:
        engine.fault = RemoteUnreachable("refused")
        for number in range(MOST_FAILURES):
            assert not workers.is_open, number
            assert str(fail(workers)) == "refused"
        for _ in range(200):
            refused_at_once(workers, lambda: pytest.fail("an engine that failed is asked"), "refused")
        assert engine.calls == MOST_FAILURES, "nor is there a probe before its time"
        figures = workers.figures()
        assert (figures.state, figures.failures, figures.detail) == ("open", MOST_FAILURES, "refused")


def test_a_probe_closes_it_and_no_request_waits_for_one() -> None:
    engine, clock = Lagging(), standing_clock()
    with on(engine, clock) as workers:
        engine.fault = RemoteUnreachable("refused")
        for _ in range(MOST_FAILURES):
            fail(workers)
        engine.fault = None
        engine.goes_on.clear()  # the probe hangs
        clock.advance(FIRST_PAUSE_SECONDS)
        for _ in range(2):
            refused_at_once(workers, lambda: pytest.fail("an engine that failed is asked"), "refused")
        wait_until(lambda: engine.probes == 1)
        assert engine.calls == MOST_FAILURES + 1
        engine.goes_on.set()
        wait_until(lambda: not workers.is_open)
        assert exists(workers).result() == [False]


def test_failures_between_successes_do_not_open_it() -> None:
    engine = Lagging()
    with on(engine) as workers:
        for _ in range(4):
            engine.fault = RemoteTimedOut("late")
            fail(workers)
            fail(workers)
            engine.fault = None
            exists(workers).result()
        assert not workers.is_open and workers.figures().failures == 8


def test_a_value_that_is_not_ours_says_nothing_of_the_engine() -> None:
    engine = Lagging()
    engine.values[b"a"] = b"x"
    with on(engine) as workers:
        for _ in range(2 * MOST_FAILURES):
            with pytest.raises(WrongSize):
                read(workers, memoryview(bytearray(5)), LONG, list).result()
        assert not workers.is_open


def test_a_deadline_that_no_engine_could_meet_says_nothing_of_it() -> None:
    engine = Lagging()
    with on(engine) as workers:
        exists(workers).result()
        engine.fault = RemoteTimedOut("late")
        for _ in range(2 * MOST_FAILURES):
            fail(workers, seconds=room.SHORTEST_SECONDS / 2)
        assert not workers.is_open


def test_a_hanging_engine_opens_it() -> None:
    engine = Lagging()
    with on(engine) as workers:
        engine.goes_on.clear()
        for _ in range(MOST_FAILURES):
            assert isinstance(fail(workers, SOON), RemoteTimedOut)
        assert workers.is_open
        engine.goes_on.set()
        wait_until(lambda: fault_of(workers) is None)
        assert FIRST_PAUSE_SECONDS > 0


def test_pauses_before_a_probe_grow_to_a_bound() -> None:
    one, now, pauses = RemoteBreaker(), 0.0, []
    for _ in range(MOST_FAILURES):
        one.failed(now, "silent")
    for _ in range(10):
        began = now
        while not one.takes_probe(now):
            now += 0.125
        pauses.append(now - began)
        one.probed(now, "silent")
        assert one.is_open
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 8.0] and set(pauses[4:]) == {room.LONGEST_PAUSE_SECONDS}


# --- ends ---


@pytest.mark.usefixtures("one_thread")
def test_closing_refuses_what_waits_and_gives_back() -> None:
    engine = Lagging()
    workers = RemoteWorkers(engine, CLOCK)
    engine.goes_on.clear()
    exists(workers)
    wait_until(lambda: engine.calls == 1)
    back: list[int] = []
    waiting = workers.submit(lambda: 1, soon(LONG), lambda: back.append(0))
    workers.close()
    workers.close()
    for call in (waiting, workers.submit(lambda: 1, soon(LONG), lambda: back.append(0))):
        with pytest.raises(RemoteUnreachable, match="closed"):
            call.result()
    assert len(back) == 2
    wait_until(lambda: not any(one.name == "kvstore-remote" for one in threading.enumerate()))


@pytest.mark.usefixtures("one_thread")
def test_a_driver_with_a_bug_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its thread, which says so, and the next call has another one."""
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def bug() -> int:
        raise ZeroDivisionError

    with on(Lagging()) as workers:
        for _ in range(2):
            is_back = threading.Event()
            with pytest.raises(RemoteFault, match="the driver of lagging failed"):
                workers.submit(bug, soon(LONG), is_back.set).result()
            assert is_back.is_set()
        assert workers.submit(lambda: 1, soon(LONG)).result() == 1
        wait_until(lambda: len(told) == 2)
