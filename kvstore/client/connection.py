"""One connection to the sidecar: the namespace numbers, leases and mapped memory that are valid on it.

A verb that takes several requests (a lease, then the memory it lies in) is a generator of them, an `Exchange`. `walk`
drives it and blocks; a caller that must not block polls a `PendingCall`, which advances as answers arrive. Must never
use an answer that does not fit its request.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isfinite
from operator import itemgetter
from typing import Generic, TypeVar

import msgspec

from kvstore.block.account import MissReason
from kvstore.block.errors import StoreError, Unreachable
from kvstore.client.framing import AnsweredCall, Backpressure, FramedSocket, TimedOut, TooLong, drained
from kvstore.client.pending import BLOCK_SECONDS, MAX_QUEUED_SECONDS, SHORT_BLOCKS
from kvstore.protocol import messages as m
from kvstore.protocol.messages import LeaseReply, MatchReply, ReserveReply
from kvstore.protocol.notify_pipe import NotifyPipeEnd
from kvstore.status.tree import SidecarStatus
from tiering.clock import Clock
from tiering.dram.extents import MappedExtent
from tiering.errors import TierError
from tiering.frame import DIGEST_BYTES, KEY_BYTES, STAMP_BYTES, frame_bytes
from tiering.tier import SLOT_BITS, SLOT_MASK, FrameSpan

A = TypeVar("A")
R = TypeVar("R")
Exchange = Generator[m.Verb, AnsweredCall, R]
"""The requests of one verb, each answered before the next is sent; returns the verb's result."""
_OTHER_KIND = "an answer of another kind"
QUICK_SECONDS = 0.04
"""A quick request that times out sooner than this does not open the breaker."""
SHARED_ASKS = 3
"""How often an exchange waits for another one that maps the same extents; that one may have been given up."""
QUICK_KEYS = 1000
"""A longer look-up may take a sidecar milliseconds, in its single thread for those."""


REASON_OF_FAULT = {
    m.RequestFault.VERSION: MissReason.UNREACHABLE,  # these two end the connection
    m.RequestFault.MALFORMED: MissReason.UNREACHABLE,
    m.RequestFault.BAD_INPUT: MissReason.UNSUPPORTED,
    m.RequestFault.UNSUPPORTED: MissReason.UNSUPPORTED,
    m.RequestFault.BUSY: MissReason.BUSY,
    m.RequestFault.CLOSED: MissReason.DISABLED,
}
"""The miss reason for each fault that a sidecar answers with. Total."""


class Unavailable(Exception):
    """A request without a usable answer, and its miss reason."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class SidecarConnection:
    """Thread-safe."""

    def __init__(self, wire: FramedSocket, clock: Clock, silent: Callable[[], bool] = lambda: False) -> None:
        """silent: has the client's thread ping the sidecar soon, without waiting; returns whether that thread runs."""
        self.wire = wire
        self.breaker = Breaker()
        self._clock = clock
        self._silent = silent
        self.name = wire.welcome.run
        self.max_keys = min(m.MAX_KEYS, max(1, wire.welcome.max_keys))
        """Limit of the blocks of one chain in a request."""
        self.may_skip = wire.welcome.max_keys > m.OLDER_MAX_KEYS
        """Whether the sidecar knows `Reserve.skipped`."""
        self._long_until = 0.0  # when the sidecar should be done with all long chains asked for
        self.namespaces: dict[int, int] = {}  # this client's number -> the sidecar's
        self.frames: dict[int, tuple[int, ...]] = {}
        """By the sidecar's number of a namespace: bytes of a frame of each part."""
        self.readable: dict[int, tuple[MappedExtent, int]] = {}  # by number: the extent, and the bytes of its frames
        self.writable: dict[int, tuple[MappedExtent, int]] = {}
        self._asked = dict[int, list[int]](), dict[int, list[int]]()  # extents under way, to read and to write
        self.reservations: dict[int, ReserveReply] = {}
        self.notify_pipe: NotifyPipeEnd | None = None  # closed by the thread that listens at it
        self.is_moving = False
        """The last ping unmapped memory, and more may follow."""
        self.pinged: int | None = None
        """The number of a ping in flight."""
        self._pinging = threading.Lock()
        self._holding = threading.Lock()
        self._held: dict[int, int] = {}  # holds in this process, by the sidecar's number of a lease

    def close(self) -> None:
        """Hang up, and unmap all memory that no get is reading."""
        self.wire.close()
        self.readable.clear()
        self.writable.clear()

    def close_after_fork(self) -> None:
        """In a forked child: the connection stays the parent's."""
        self._holding = threading.Lock()
        self.readable.clear()
        self.writable.clear()
        if self.notify_pipe is not None:
            self.notify_pipe.close()
        self.wire.close_after_fork()

    def settle(self) -> None:
        """Send the releases and aborts that undo late answers. Does not block."""
        for undo in drained(self.wire.too_late):
            if not isinstance(undo, m.Release):
                self.post(undo)
                continue
            with self._holding:
                ended = [lease for lease in undo.leases if lease not in self._held]
                if ended:
                    self.post(m.Release(ended))

    def allowance(self, blocks: int, now: float) -> float:
        """Extra seconds to wait for an answer about so many blocks: the sidecar takes a connection's messages in order,
        and other threads may have asked for long chains before."""
        queued = min(max(0.0, self._long_until - now), MAX_QUEUED_SECONDS)
        if blocks > SHORT_BLOCKS:
            self._long_until = now + queued + BLOCK_SECONDS * blocks
        return queued + BLOCK_SECONDS * blocks

    # Asking --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `Unavailable` if the sidecar is silent."""
        if self.breaker.is_open:
            raise Unavailable(MissReason.UNREACHABLE, self.breaker.detail(self._clock.monotonic_seconds()))

    def was_late(self, asked_at: float, *, is_quick: bool) -> None:
        """A request timed out. A ping tells whether the request is slow or the sidecar is silent."""
        now, breaker = self._clock.monotonic_seconds(), self.breaker
        if breaker.was_late(asked_at, self.wire.heard_at, now, is_quick=is_quick) and not self._silent():
            breaker.answered()  # no thread pings, so an open breaker would stay open

    def answer(self, verb: m.Verb, seconds: float) -> AnsweredCall:
        """Send a request and wait for its answer. Raises `Unavailable`."""
        self.check()
        asked_at = self._clock.monotonic_seconds()
        try:
            answered = self.wire.call(verb, seconds, partial(self._look, asked_at))
        except _WIRE_FAULTS as error:
            if isinstance(error, TimedOut):
                self.was_late(asked_at, is_quick=is_quick(verb) and seconds >= QUICK_SECONDS)
            raise _named(error) from None
        return self.believed(verb, answered)

    def _look(self, asked_at: float) -> None:
        """Called while an answer is slow. Raises `Unavailable` once a ping finds the sidecar silent."""
        self.was_late(asked_at, is_quick=False)
        self.check()

    def believed(self, verb: m.Verb, answered: AnsweredCall) -> AnsweredCall:
        """The answer, if it fits the request; another one is undone. Raises `Unavailable`."""
        frames = self.frames.get(verb.namespace) if isinstance(verb, m.LeasePrefix | m.Reserve) else None
        try:
            check_answer(verb, answered.answer, len(frames) if frames is not None else None)
        except ValueError as error:
            self.wire.discard_answer(answered)
            self.settle()
            raise Unavailable(MissReason.UNREACHABLE, f"the sidecar answered what cannot be: {error}") from None
        if isinstance(verb, m.OpenNamespace) and isinstance(answered.answer, m.Granted):
            grant = answered.answer.grant
            self.frames[grant.number] = tuple(frame_bytes(max(0, size)) for size in grant.payload_bytes)
        return answered

    def ask(self, verb: m.Verb, kind: type[A], seconds: float) -> A:
        """As `answer`, for an answer of one kind. Raises `Unavailable`."""
        return taken(self.answer(verb, seconds), kind)

    def post(self, verb: m.Verb) -> None:
        """Send a request without waiting for an answer. Does not block."""
        with suppress(Unreachable):
            self.wire.post(verb)

    def post_later(self, verb: m.Verb) -> None:
        """The same, with the next request, or with the next ping."""
        with suppress(Unreachable):
            self.wire.post_later(verb)

    def walk(self, steps: Exchange[R], first_seconds: float, further_seconds: Callable[[], float]) -> R:
        """Drive an exchange to its end, waiting for each answer. Raises `Unavailable`."""
        seconds = first_seconds
        try:
            verb = next(steps)
            while True:
                verb = steps.send(self.answer(verb, seconds))
                seconds = further_seconds()
        except StopIteration as done:
            result: R = done.value
            return result
        finally:
            steps.close()

    # Leases --------------------------------------------------------------------------------------------------------

    def leasing(self, verb: m.LeasePrefix) -> Exchange[LeaseReply]:
        """Take a lease and map its memory. Closing the exchange half way releases the lease."""
        reply = taken((yield verb), m.Leased).reply
        if reply.lease:
            mapping = self.mapping(reply.places, writable=False, namespace=verb.namespace)
            yield from self._hold(reply.lease, mapping)
        return reply

    def attaching(self, lease: int, places: Sequence[Sequence[int]]) -> Exchange[None]:
        """Hold a lease that another process of the session took, and map its memory. Closing the exchange half way
        drops the hold."""

        def attach() -> Exchange[None]:
            if lease not in taken((yield m.Attach([lease])), m.Attached).leases:
                raise Unavailable(MissReason.STALE_HINT, "no process of this session holds it any more")
            yield from self.mapping(places, writable=False)

        return self._hold(lease, attach())  # held before it is asked for, so that no thread's release overtakes it

    def _hold(self, lease: int, steps: Exchange[None]) -> Exchange[None]:
        """Take these steps with one more hold of this process on a lease, which an error drops again."""
        with self._holding:
            self._held[lease] = self._held.get(lease, 0) + 1
        try:
            yield from steps
        except BaseException:
            self.let_go(lease)
            raise

    def let_go(self, lease: int) -> None:
        """Drop one of this process's holds on a lease; the last one releases it. Does not block."""
        with self._holding:
            left = self._held.pop(lease, 0) - 1
            if left > 0:
                self._held[lease] = left
            elif left == 0:
                self.post(m.Release([lease]))

    # Memory --------------------------------------------------------------------------------------------------------

    def reserving(self, verb: m.Reserve) -> Exchange[ReserveReply]:
        """Reserve slots and map them to be filled. Closing the exchange half way gives them up."""
        reply = taken((yield verb), m.Reserved).reply
        if reply.reservation:
            try:
                yield from self.mapping(reply.places, writable=True, namespace=verb.namespace)
            except BaseException:
                self.post(m.Abort(reply.reservation))
                raise
        return reply

    def mapping(
        self, places: Sequence[Sequence[int]], *, writable: bool, namespace: int | None = None
    ) -> Exchange[None]:
        """Map the extents of these places that exist and are not mapped yet, each asked for once by exchanges that run
        together. namespace: the sidecar's number of the one whose frame sizes they must have."""
        table, under_way = (self.writable, self._asked[1]) if writable else (self.readable, self._asked[0])
        wanted, asker, waits = {place >> SLOT_BITS for column in places for place in column}, list[int](), 0
        while other := next(filter(None, map(under_way.get, wanted - table.keys())), None):
            asker, waits = other, waits + 1 if other is asker else 0
            if waits == SHARED_ASKS:
                break
            taken((yield m.Ping()), m.Done)  # the other exchange's answer comes before this one
        missing = sorted(wanted - table.keys())
        for first in range(0, len(missing), m.MAX_EXTENTS):
            numbers = missing[first : first + m.MAX_EXTENTS]
            under_way.update(dict.fromkeys(numbers, numbers))
            try:
                answered = yield m.Extents(numbers, writable)
            finally:
                for number in numbers:
                    under_way.pop(number, None)
            left = deque(answered.descriptors)
            try:
                for extent in taken(answered, m.ExtentsReply).extents:
                    mapped = MappedExtent(left.popleft(), extent.size_bytes, writable=writable)
                    table[extent.number] = mapped, extent.frame_bytes
            except TierError as error:
                raise Unavailable(MissReason.UNREACHABLE, str(error)) from None
            finally:
                for descriptor in left:
                    os.close(descriptor)
        frames = self.frames.get(namespace, ()) if namespace is not None else ()
        for column, size in zip(places, frames, strict=False):
            if any(table[it][1] != size for it in {place >> SLOT_BITS for place in column} if it in table):
                raise Unavailable(MissReason.UNREACHABLE, "the sidecar answered what cannot be: frames of another size")

    def unmap(self, numbers: Iterable[int]) -> None:
        """Unmap extents that the sidecar gave back; a get that is reading one keeps its memory until it ends."""
        for number in numbers:
            self.readable.pop(number, None)
            self.writable.pop(number, None)

    # Pings ---------------------------------------------------------------------------------------------------------

    def ping(self, limits: CallLimits, nudge: threading.Event) -> bool:
        """Send a ping, or go on waiting for the one in flight; returns whether it was answered. One thread at a time.
        nudge: is set when the next ping is due at once."""
        with self._pinging:
            now = self._clock.monotonic_seconds()
            try:
                if self.pinged is None:
                    self.pinged = self.wire.submit(m.Ping(self.notify_pipe is None))
                answered = self.wire.wait(self.pinged, limits.connect)
            except TimedOut:  # silent only if nothing arrived meanwhile: other answers may have come since the ping
                self.was_late(now, is_quick=True)
                return False
            except Backpressure:  # the sidecar does not read
                self.was_late(now - limits.connect, is_quick=True)
                nudge.wait(limits.ping)
                return False
            except Unreachable:
                nudge.set()  # the sidecar is gone: its memory is unmapped at once
                return False
            self.pinged = None
            self.breaker.answered()
            for descriptor in answered.descriptors:
                self._listen(descriptor, nudge)
            retired = self.wire.retired()
            self.unmap(retired)
            self.is_moving = bool(retired) and self.notify_pipe is None
            return True

    def _listen(self, descriptor: int, nudge: threading.Event) -> None:
        self.notify_pipe = notify_pipe = NotifyPipeEnd(descriptor)
        try:
            threading.Thread(target=_hear, args=(notify_pipe, nudge), name="kv-bell", daemon=True).start()
        except RuntimeError:  # no thread available: pings find out instead
            notify_pipe.close()
            self.notify_pipe = None


def _hear(notify_pipe: NotifyPipeEnd, nudge: threading.Event) -> None:
    while notify_pipe.wait():
        nudge.set()
    notify_pipe.close()
    nudge.set()  # the sidecar may be gone


class PendingCall(Generic[R]):
    """`Submitted`: a verb whose answers are polled for. Not thread-safe."""

    def __init__(
        self,
        run: SidecarConnection,
        steps: Exchange[R],
        clock: Clock,
        seconds: float,
        further_seconds: float,
        missed: Callable[[MissReason, str], R],
        forsaken: deque[PendingCall[R]],
    ) -> None:
        """Send the first request. further_seconds: for each later one, from the poll that sends it. missed: makes a
        miss. forsaken: calls that a finalizer left for another thread to cancel. Raises `Unavailable`."""
        self._run = run
        self._steps = steps
        self._clock = clock
        self._deadline = clock.monotonic_seconds() + seconds
        self._further_seconds = further_seconds
        self._missed = missed
        self._forsaken = forsaken
        self._number = self._submit(next(steps))

    def poll(self) -> R | None:
        """The result once its answers are there; a miss after the deadline."""
        try:
            while True:
                answered = self._run.wire.poll(self._number)
                if answered is None:
                    if self._clock.monotonic_seconds() < self._deadline:
                        return None
                    self._run.was_late(self._asked_at, is_quick=self._is_quick)
                    raise Unavailable(MissReason.DEADLINE, "the sidecar did not answer in time")
                answered = self._run.believed(self._verb, answered)
                self._number = self._submit(self._steps.send(answered))
                self._deadline = max(self._deadline, self._clock.monotonic_seconds() + self._further_seconds)
        except StopIteration as done:
            result: R = done.value
            return result
        except (Unavailable, *_WIRE_FAULTS) as error:
            self.cancel()
            away = error if isinstance(error, Unavailable) else _named(error)
            return self._missed(away.reason, away.detail)

    def is_ready(self) -> bool:
        return self._run.wire.has(self._number) or self._clock.monotonic_seconds() >= self._deadline

    def cancel(self) -> None:
        """End the wait; an answer that still comes is undone."""
        self._run.wire.cancel(self._number)
        if isinstance(self._verb, m.Await):
            self._run.post(m.Cancel([self._number]))
        self._steps.close()
        self._run.settle()

    def cancel_from_finalizer(self) -> None:
        """Leave it to the next verb or ping to cancel this: a finalizer must not take locks."""
        self._forsaken.append(self)

    def _submit(self, verb: m.Verb) -> int:
        self._run.check()
        self._asked_at, self._is_quick, self._verb = self._clock.monotonic_seconds(), is_quick(verb), verb
        try:
            return self._run.wire.submit(verb)
        except _WIRE_FAULTS as error:
            raise _named(error) from None


def is_quick(verb: m.Verb) -> bool:
    """Whether a running sidecar answers this at once, however busy it is."""
    if isinstance(verb, m.MatchPrefix | m.Which):
        return len(verb.keys) <= QUICK_KEYS
    return isinstance(verb, m.Ping | m.Attach)


def taken(answered: AnsweredCall, kind: type[A]) -> A:
    """The answer, if it is of that kind. Raises `Unavailable`."""
    answer = answered.answer
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, m.Failed):
        raise Unavailable(REASON_OF_FAULT[answer.fault], answer.text)
    raise Unavailable(MissReason.UNREACHABLE, _OTHER_KIND)


def spans(table: Mapping[int, tuple[MappedExtent, int]], places: Sequence[int]) -> list[FrameSpan]:
    """The bytes at places, up to the first whose extent is not mapped, or has no such slot."""
    found = []
    for place in places:  # spelled out: every block of every put and get comes through here
        known = table.get(place >> SLOT_BITS)
        if known is None:
            break
        extent, size = known
        start = (place & SLOT_MASK) * size
        if start + size > len(extent.view):
            break
        found.append(FrameSpan(extent.memory.address + start, extent.view[start : start + size], extent.memory))
    return found


_WIRE_FAULTS = (TimedOut, TooLong, Backpressure, Unreachable)


def _named(error: BaseException) -> Unavailable:
    match error:
        case TimedOut():
            return Unavailable(MissReason.DEADLINE, "the sidecar did not answer in time")
        case TooLong():
            return Unavailable(MissReason.UNSUPPORTED, f"a message of {error} bytes, which is too long")
        case Backpressure():
            return Unavailable(MissReason.BUSY, "the sidecar has not read yet what was asked before")
    return Unavailable(MissReason.UNREACHABLE, str(error))


# ---------------------------------------------------------------------------------------------------------------------
# Stops asking a silent sidecar.
#
#     CLOSED     verbs are asked            > one timed out, and nothing arrived since it was sent > OPEN, or SUSPECTED
#     SUSPECTED  verbs are asked, and a ping                     > it times out, and nothing arrived > OPEN
#     OPEN       every verb is a miss at once; a ping is in flight           > it is answered > CLOSED
#
# Any answer is a sign of life: a sidecar that is slow with one request and answers others is still asked. A request
# that may be slow for its own reasons (a long prompt, eviction, a disk) only makes it SUSPECTED: a machine short of
# memory holds everything up for some tenths of a second. A look-up that is late then opens it.
#
# Pure: times come in. A few threads may call at once: each reads or writes one field.


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


# ---------------------------------------------------------------------------------------------------------------------
# Timeouts of a sidecar's client.


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of calls, in seconds. connect: until the sidecar says welcome, or answers a ping. match: for a look-up.
    lease: beyond the lease's own deadline. Look-ups and leases of long chains have more
    (`SidecarConnection.allowance`). fill: for a reservation, which may have to evict, and for commits, unless the put
    sets a deadline. drop: for dropping a namespace. open: how long a new namespace waits for a sidecar that is not
    running yet. first_pause, longest_pause: between attempts to connect. ping: interval at which the client's thread
    pings, unmaps what was given back, and undoes late answers."""

    connect: float = 1.0
    match: float = 0.05
    lease: float = 0.05
    fill: float = 5.0
    drop: float = m.DROP_SECONDS
    open: float = 10.0
    first_pause: float = 0.02
    longest_pause: float = 0.5
    ping: float = 0.5

    @property
    def mapping(self) -> float:
        """For requests that any running sidecar answers soon, regardless of the verb."""
        return max(self.connect, self.lease)


class VerbTime:
    """The time that all requests of one verb have together."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self.ends_at = clock.monotonic_seconds() + seconds

    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.ends_at - self._clock.monotonic_seconds())


# ---------------------------------------------------------------------------------------------------------------------
# Checks answers before the client computes with them. A sidecar of another version, or a broken one, must cost its
# clients misses and no exceptions. Decoding checks types; here counts, places and sizes are compared with the request.
# Bytes of KV are not looked at: `get` compares their digests.


MAX_PLACE = (1 << 63) - 1
MOST_SECONDS = 1e15


def check_answer(verb: m.Verb, answer: m.Answer, parts: int | None) -> None:
    """Raise `ValueError`, with what is wrong, unless the answer fits the request. parts: of the request's namespace;
    None if unknown.

    An answer of another kind than the verb's is left to `taken`.
    """
    match verb, answer:
        case m.OpenNamespace(), m.Granted():
            grant = answer.grant
            count = len(verb.payload_bytes)
            _hold(len(grant.identity_key) == KEY_BYTES, "a key of another length")
            _hold(len(grant.stamps) == len(grant.payload_bytes) == count, "another number of parts")
            _hold(all(len(stamp) == STAMP_BYTES for stamp in grant.stamps), "a stamp of another length")
        case m.MatchPrefix(), m.Matched():
            _check_match(answer.reply, len(verb.keys))
        case m.Which(), m.Held():
            _hold(len(answer.bits) in (0, -(-len(verb.keys) // 8)), "bits of other blocks")
        case m.LeasePrefix(), m.Leased():
            _check_lease(answer.reply, verb.first_block, len(verb.keys), parts)
        case m.Reserve(), m.Reserved():
            _check_reserve(answer.reply, verb.skipped + len(verb.keys), parts)
        case m.Commit(), m.Counted():
            _hold(0 <= answer.blocks <= m.MAX_COMMITTED * m.MAX_PARTS, "a count that cannot be")
        case m.Persist(), m.Persisted():
            _hold(0 <= answer.blocks <= len(verb.keys), "more blocks than were asked for")
            _hold(answer.reason is not None or answer.blocks == len(verb.keys), "fewer blocks, and no reason")
        case m.Changes(), m.Changed():
            _hold(0 < answer.next <= MAX_PLACE and len(answer.changes) <= m.MAX_KEYS, "changes that cannot be")
            _hold(all(len(key) == KEY_BYTES and 0 <= at <= 2 for key, at in answer.changes), "a change that cannot be")
        case m.Await(), m.Awaited():
            _hold(0 <= answer.blocks <= len(verb.keys), "more blocks than were asked for")
        case m.Locate(), m.Located():
            _hold(0 <= answer.blocks <= len(verb.keys), "more blocks than were asked for")
            _hold(0 <= answer.number <= MAX_PLACE and answer.milliseconds >= 0, "numbers that are none")
            _hold(not answer.number or answer.tier is not None, "blocks that are nowhere")
        case m.OpenTicket(), m.TicketOpened():
            _hold(0 <= answer.blocks <= m.MAX_KEYS and 0 <= answer.seconds <= MOST_SECONDS, "a ticket that cannot be")
        case m.Extents(), m.ExtentsReply():
            numbers = [one.number for one in answer.extents]
            _hold(
                len(set(numbers)) == len(numbers) and set(numbers) <= set(verb.numbers), "memory that was not asked for"
            )
            _hold(all(0 < one.frame_bytes <= one.size_bytes for one in answer.extents), "frames of impossible sizes")
        case _:
            pass


def asked_stat(wire: FramedSocket, seconds: float, *, numbers_only: bool = False) -> SidecarStatus:
    """A sidecar's status, from its operator's or observers' socket. Raises `StoreError`, `TimedOut`, `ValueError`."""
    answer = wire.call(m.Stat(numbers_only), seconds).answer
    if isinstance(answer, m.StatReply):
        return checked_facts(answer.facts, numbers_only=numbers_only)
    raise StoreError(answer.text if isinstance(answer, m.Failed) else "an answer of another kind; another version?")


def stat_at(path: str, name: str, clock: Clock, seconds: float) -> SidecarStatus:
    """The same, over a connection of its own."""
    with closing(FramedSocket(path, name, b"", clock, seconds)) as wire:
        return asked_stat(wire, seconds)


def checked_facts(facts: SidecarStatus, *, numbers_only: bool = False) -> SidecarStatus:
    """Check that a status can be printed. numbers_only: it counts in tokens alone. Raises `ValueError`."""
    check_numbers(msgspec.to_builtins(facts))
    for looked in () if numbers_only else (facts.looked, *(one.looked for one in facts.namespaces)):
        _hold(looked.hit_tokens.keys() == looked.hit_blocks.keys(), "hits in tokens, and others in blocks")
        _hold(looked.miss_tokens.keys() == looked.miss_blocks.keys(), "misses in tokens, and others in blocks")
    _hold(not facts.policy or facts.retained_fraction is not None, "a policy, and no fraction that is retained")
    return facts


def check_numbers(value: object) -> None:
    """Raise `ValueError` for a number that a sound sidecar cannot report."""
    if isinstance(value, dict):
        for one in value.values():
            check_numbers(one)
    elif isinstance(value, list):
        for one in value:
            check_numbers(one)
    elif isinstance(value, float):
        _hold(isfinite(value) and abs(value) <= MOST_SECONDS, "a number that cannot be")


def _check_match(reply: MatchReply, asked: int) -> None:
    counts = [*map(itemgetter(1), reply.tiers)]
    _hold(0 <= reply.blocks <= asked, "more blocks than were asked for")
    _hold(min(counts, default=0) >= 0, "fewer than no blocks")
    _hold(sum(counts) == reply.blocks, "tiers that do not add up")
    _hold(reply.reason is not None or reply.blocks == asked, "fewer blocks, and no reason")


def _check_lease(reply: LeaseReply, first_block: int, asked: int, parts: int | None) -> None:
    _hold(0 <= reply.lease < 1 << 64, "a number that is none")
    _hold(0 <= reply.first_block <= asked and 0 <= reply.blocks <= asked, "more blocks than were asked for")
    _hold(all(count >= 0 for _, count in reply.tiers), "fewer than no blocks")
    _hold(sum(count for _, count in reply.tiers) <= asked, "tiers that do not add up")
    _hold(reply.first_block == first_block, "other blocks than were asked for")
    pinned = reply.blocks - reply.first_block
    if not reply.lease:
        _hold(pinned <= 0, "blocks without a lease")
        return
    _hold(pinned >= 0, "other blocks than were asked for")
    _hold(len(reply.places) == len(reply.header_digests) == (parts or len(reply.places)), "another number of parts")
    lengths = {*map(len, reply.places), *map(len, reply.header_digests)}
    _hold(lengths <= {pinned}, "columns of other lengths")
    _check_places(reply.places)
    digests = (digest for column in reply.header_digests for digest in column)
    _hold({DIGEST_BYTES}.issuperset(map(len, digests)), "digests of another length")


def _check_reserve(reply: ReserveReply, asked: int, parts: int | None) -> None:
    _hold(0 <= reply.reservation < 1 << 64, "a number that is none")
    _hold(0 <= reply.present <= asked, "more blocks than were asked for")
    _hold(reply.stopped_at is None or 0 <= reply.stopped_at <= asked, "a block that was not asked for")
    _hold(0 <= reply.in_flight <= asked - (reply.stopped_at or 0), "more blocks in flight than were asked for")
    blocks = reply.blocks
    _hold(all(one < other for one, other in pairwise(blocks)), "blocks that do not ascend")
    _hold(not blocks or (blocks[0] >= 0 and blocks[-1] < asked), "blocks that were not asked for")
    if reply.reservation:
        _hold(len(reply.places) == (parts or len(reply.places)), "another number of parts")
        _hold(all(len(column) in (0, len(blocks)) for column in reply.places), "columns of other lengths")
        _check_places(reply.places)


def _check_places(columns: Sequence[Sequence[int]]) -> None:
    _hold(all(min(column) >= 0 and max(column) <= MAX_PLACE for column in columns if column), "places that are none")


def _hold(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(what)


def matched_up_to(reply: MatchReply, blocks: int, most: int) -> MatchReply:
    """The reply to a look-up of `blocks` blocks, of which only the first `most` were sent."""
    if reply.reason is not None or blocks <= most:
        return reply
    text = f"a prompt of {blocks} blocks; the sidecar keeps and finds the first {most}: use larger blocks"
    return msgspec.structs.replace(reply, reason=MissReason.UNSUPPORTED, detail=text)
