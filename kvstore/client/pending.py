"""Look-ups and leases that are submitted and polled for, so that the engine's thread never blocks.

    submit > poll, poll, ... > the blocking verb's result
           > cancel, or drop it: a later answer is undone

A poll never blocks: not on a socket, a disk, another thread, or a lock held across either. In a store of this process a
lease may wait for the disk, so `LeaseThreads` has a few threads; a store behind a socket needs none.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import msgspec

from kvstore.block.account import MissReason
from kvstore.client.lease import Lease
from kvstore.protocol import messages as m
from kvstore.protocol.door import Door, NamedLease, Submitted
from kvstore.protocol.messages import LeaseReply
from tiering.counts.awaits import AwaitEnd, Awaits, ParkedAwait

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")
LEASE_THREADS = 4
MAX_SUBMITTED = 1024
"""Leases in progress or queued in a store of this process."""
GRACE_SECONDS = 0.05
"""How long a lease's answer may take beyond its deadline."""
AWAIT_GRACE_SECONDS = 0.25
"""How long an await's answer may take beyond its deadline."""
BLOCK_SECONDS = 2e-5
"""Added for each block of the request: ten times what one takes on an idle machine."""
SHORT_BLOCKS = 1024
"""Chains up to this length do not delay the requests behind them."""
MAX_QUEUED_SECONDS = 3.0
"""Limit of what is added for long chains submitted before."""


class PendingReply(Generic[T]):
    """An answer on its way. One thread polls; any thread may cancel."""

    def __init__(self, submitted: Submitted[R], finish: Callable[[R], T], cancelled: Callable[[], T]) -> None:
        """finish: makes the answer of a reply. cancelled: makes the answer of a cancelled call."""
        self._lock = threading.Lock()
        self._result: T | None = None
        self._poll: Callable[[], T | None] = lambda: _finished(submitted.poll(), finish)
        self._is_ready = submitted.is_ready
        self._cancel = submitted.cancel
        self._cancelled = cancelled
        self._cancel_from_finalizer = weakref.finalize(self, submitted.cancel_from_finalizer)
        self._cancel_from_finalizer.atexit = False

    def poll(self) -> T | None:
        """The answer, the same one each time, or None if it is not there yet. Never waits, and never raises."""
        if self._result is None and self._lock.acquire(blocking=False):
            try:
                if self._result is None:
                    self._result = self._poll()
                    if self._result is not None:
                        self._cancel_from_finalizer.detach()
            finally:
                self._lock.release()
        return self._result

    def is_ready(self) -> bool:
        """Whether `poll` has an answer, judged without a lock or the socket: a thread that waits for many polls one of
        them, then those for which this is true."""
        return self._result is not None or self._is_ready()

    def cancel(self) -> None:
        """Undo a later answer; `poll` then returns a miss, `disabled`. An answer polled before stays its owner's."""
        with self._lock:
            if self._result is None:
                self._cancel_from_finalizer.detach()
                self._cancel()
                self._result = self._cancelled()

    def end(self) -> None:
        """Cancel it because its request has ended; a lease that it led to ends too."""
        self.cancel()
        if isinstance(self._result, Lease):
            self._result.end()


def _finished(reply: R | None, finish: Callable[[R], T]) -> T | None:
    return finish(reply) if reply is not None else None


class ReadyReply(Generic[R]):
    """`Submitted`: an answer that was there at once."""

    def __init__(self, reply: R) -> None:
        self._reply = reply

    def poll(self) -> R | None:
        return self._reply

    def is_ready(self) -> bool:
        return True

    def cancel(self) -> None: ...

    def cancel_from_finalizer(self) -> None: ...


class LeaseThreads:
    """A few threads that wait for the leases of a store in this process. Thread-safe."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(LEASE_THREADS, "kv-lease")
        self._is_closed = False
        self._under_way = threading.BoundedSemaphore(MAX_SUBMITTED)

    def submit(self, door: Door, request: m.LeasePrefix) -> Submitted[NamedLease]:
        """door: of the store in this process, which a thread asks."""
        asked = ThreadedReply(door, request)
        if not self._under_way.acquire(blocking=False):
            return ReadyReply(_no_lease(request, MissReason.BUSY, f"{MAX_SUBMITTED} leases are under way, the limit"))
        try:
            self._pool.submit(self._run, asked)
        except RuntimeError:  # closed, or no new thread; in the latter case the pool may have queued it all the same
            if not asked.is_taken():
                return asked
            self._under_way.release()
            if self._is_closed:
                return ReadyReply(_no_lease(request, MissReason.DISABLED, "the store is closed"))
            return ReadyReply(_no_lease(request, MissReason.BUSY, "the machine has no thread for it"))
        return asked

    def _run(self, asked: ThreadedReply) -> None:
        if asked.is_taken():
            try:
                asked.run()
            finally:
                self._under_way.release()

    def close(self) -> None:
        """Start no more leases; those in progress end with the store."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


class ThreadedReply:
    """`Submitted`: one lease. Each side records its action before it reads the other's record, so without a lock at
    least one of them releases a cancelled lease; a second release does nothing."""

    def __init__(self, door: Door, request: m.LeasePrefix) -> None:
        self._door = door
        self._request = request
        self._clock = door.clock
        self._deadline = door.clock.monotonic_seconds() + request.deadline_ms / 1000
        self._given_up_at = self._deadline + GRACE_SECONDS + BLOCK_SECONDS * len(request.keys)
        self._reply: NamedLease | None = None
        self._is_unwanted = False
        self._taken = threading.Lock()

    def is_taken(self) -> bool:
        """Whether the caller is the one that is to run it, or to refuse it: the first to ask."""
        return self._taken.acquire(blocking=False)

    def run(self) -> None:
        if self._is_unwanted:
            return
        remaining = self._deadline - self._clock.monotonic_seconds()
        wanted = msgspec.structs.replace(self._request, deadline_ms=max(0.0, remaining) * 1000)
        self._reply = self._door.call(wanted, NamedLease)
        if self._is_unwanted:
            self._release()

    def poll(self) -> NamedLease | None:
        if self._reply is not None or self._clock.monotonic_seconds() < self._given_up_at:
            return self._reply
        self.cancel()
        return _no_lease(self._request, MissReason.DEADLINE, "it was not there in time")

    def is_ready(self) -> bool:
        return self._reply is not None or self._clock.monotonic_seconds() >= self._given_up_at

    def cancel(self) -> None:
        self._is_unwanted = True
        self._release()

    def cancel_from_finalizer(self) -> None:
        self._is_unwanted = True
        if self._reply is not None:
            self._door.forgotten.append(self._reply.reply.lease)

    def _release(self) -> None:
        if self._reply is not None:
            self._door.call(m.Release([self._reply.reply.lease]), m.Done)


class ParkedReply:
    """`Submitted`: an await of a store in this process."""

    def __init__(
        self,
        park: Callable[[Callable[[ParkedAwait], None]], ParkedAwait],
        awaited: Callable[[ParkedAwait], m.Awaited],
        awaits: Awaits,
    ) -> None:
        self._one = park(lambda _: None)
        self._awaited = awaited
        self._awaits = awaits

    def is_ready(self) -> bool:
        return self._one.end is not None or self._awaits.now() >= self._one.since + self._one.seconds

    def poll(self) -> m.Awaited | None:
        if not self.is_ready():
            return None
        self._awaits.end([self._one], AwaitEnd.DEADLINE)
        return self._awaited(self._one)

    def cancel(self) -> None:
        self._awaits.end([self._one], AwaitEnd.CANCELLED)

    def cancel_from_finalizer(self) -> None:
        """Does nothing: a finalizer may run under the table's lock, and the await ends at its deadline."""


def _no_lease(request: m.LeasePrefix, reason: MissReason, detail: str) -> NamedLease:
    return NamedLease(LeaseReply(0, request.first_block, 0, reason=reason, detail=detail))
