"""Leases that a store of this process is asked for without waiting: deadlines, limits, and what nobody wants."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from kvstore.block.account import MissReason
from kvstore.client.pending import (
    BLOCK_SECONDS,
    GRACE_SECONDS,
    LEASE_THREADS,
    MAX_SUBMITTED,
    LeaseThreads,
    PendingReply,
)
from kvstore.protocol import messages as m
from kvstore.protocol.door import NamedLease, Submitted
from kvstore.protocol.messages import LeaseReply
from kvstore.protocol.requests import SWEEP_REQUESTS, Requests
from waiting import FakeClock, wait_until


class SlowStore:
    """A `Door` that grants leases, numbered from 1 on, when it is let."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.threads = LeaseThreads()
        self.may_grant = threading.Event()
        self.granted: list[int] = []
        self.forgotten: list[int] = []
        self.released = self.forgotten
        self.given_ms: list[float] = []

    def call(self, request: Any, kind: type, seconds: float | None = None) -> Any:
        if isinstance(request, m.Release):
            self.released += request.leases
            return m.Done()
        self.given_ms.append(request.deadline_ms)
        assert self.may_grant.wait(20)
        self.granted.append(len(self.granted) + 1)
        return NamedLease(LeaseReply(self.granted[-1], 0, 1))

    def submit(self, deadline_ms: float = 10, blocks: int = 0) -> Submitted[NamedLease]:
        return self.threads.submit(self, m.LeasePrefix(0, [bytes(32)] * blocks, 0, deadline_ms))  # type: ignore[arg-type]


def test_a_lease_that_is_late_is_a_miss_and_given_back() -> None:
    store = SlowStore()
    asked = store.submit()
    assert asked.poll() is None
    store.clock.advance(0.01 + GRACE_SECONDS / 2)
    assert asked.poll() is None, "the store may be about to cut it short"
    store.clock.advance(GRACE_SECONDS)
    late = asked.poll()
    assert late is not None and (late.reply.lease, late.reply.reason) == (0, MissReason.DEADLINE)
    store.may_grant.set()
    wait_until(lambda: store.released == [1])


def test_who_waited_for_a_thread_has_less_time_left() -> None:
    store = SlowStore()
    asked = [store.submit(100) for _ in range(LEASE_THREADS + 1)]
    wait_until(lambda: len(store.given_ms) == LEASE_THREADS)
    store.clock.advance(0.06)
    store.may_grant.set()
    wait_until(lambda: all(one.poll() is not None for one in asked))
    assert [round(ms) for ms in store.given_ms] == [100] * LEASE_THREADS + [40] and not store.released


def test_a_submitted_lease_has_more_time_the_longer_it_is() -> None:
    """The deadline is for what has to be brought up; what is there takes as long as it takes."""
    store = SlowStore()
    short, long = store.submit(50), store.submit(50, blocks=15_625)
    store.clock.advance(0.05 + GRACE_SECONDS + 0.001)
    late = short.poll()
    assert late is not None and late.reply.reason is MissReason.DEADLINE and long.poll() is None
    store.clock.advance(BLOCK_SECONDS * 15_625)
    late = long.poll()
    assert late is not None and late.reply.reason is MissReason.DEADLINE
    store.may_grant.set()
    store.threads.close()


@pytest.mark.slow
def test_what_is_cancelled_or_forgotten_is_given_back_before_and_after_it_is_granted() -> None:
    for is_granted_first in (False, True):
        store = SlowStore()
        cancelled, forsaken = store.submit(), store.submit()
        pending = PendingReply(store.submit(), lambda reply: reply, lambda: None)
        if is_granted_first:
            store.may_grant.set()
            wait_until(lambda store=store: len(store.granted) == 3)  # type: ignore[misc]
        cancelled.cancel()
        forsaken.cancel_from_finalizer()
        del pending
        gc.collect()
        store.may_grant.set()
        wait_until(lambda store=store: sorted(set(store.released)) == store.granted)  # type: ignore[misc]
        store.threads.close()


def test_so_many_at_a_time_and_none_when_it_is_closed() -> None:
    store = SlowStore()
    asked = [store.submit() for _ in range(MAX_SUBMITTED)]
    refused = store.submit().poll()
    assert (
        refused is not None and refused.reply.reason is MissReason.BUSY and str(MAX_SUBMITTED) in refused.reply.detail
    )
    store.may_grant.set()
    wait_until(lambda: all(one.poll() is not None for one in asked))
    wait_until(lambda: store.submit().poll() is None)
    store.threads.close()
    closed = store.submit().poll()
    assert closed is not None and closed.reply.reason is MissReason.DISABLED


def test_where_the_machine_has_no_thread_it_is_busy_and_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SlowStore()
    store.may_grant.set()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        for _ in range(MAX_SUBMITTED + 1):  # and none of them counts as under way
            refused = store.submit().poll()
            assert refused is not None and refused.reply.reason is MissReason.BUSY
            assert "no thread" in refused.reply.detail
    asked = [store.submit() for _ in range(10)]
    wait_until(lambda: all(one.poll() is not None for one in asked))
    assert len(store.granted) == 10 and not store.released, "what was refused is not asked for later"
    store.threads.close()


def _no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_books_of_requests_keep_nothing_alive() -> None:
    class Held:
        ended = False

        def end(self) -> None:
            self.ended = True

    requests, kept = Requests(), Held()
    requests.add("kept", kept)
    requests.add("", Held())
    for number in range(10 * SWEEP_REQUESTS):
        requests.add(str(number), Held())
    assert len(requests) <= 2 * SWEEP_REQUESTS
    requests.release("kept")
    assert kept.ended and not requests._held.get("kept")
