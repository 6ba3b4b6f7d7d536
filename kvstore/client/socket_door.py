"""A `Door` whose store is another process on this host: the sidecar.

Keys go out, places and digests come back; payloads are read and written in extents that are mapped here, readable ones
read-only. The handle verifies its own copies, as it does in the store's own process.

No fault here fails an engine's request. While the sidecar is away every request is a miss (`unreachable`), and every
late answer is one (`deadline`). A silent sidecar is sent nothing but a ping (see `breaker`); one that is gone is called
again after a growing pause, and namespaces are opened anew on each connection. Leases of a broken connection cannot be
read. A submit never connects: a background thread does, and pings. Must import without torch, and quickly.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar, cast

import msgspec

from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, NotReady, Rejected, StoreClosed, Unreachable
from kvstore.block.identity import key_difference
from kvstore.client.connection import (
    CallLimits,
    Exchange,
    PendingCall,
    SidecarConnection,
    Unavailable,
    VerbTime,
    matched_up_to,
    spans,
    taken,
)
from kvstore.client.framing import HANGS, FramedSocket, Silent, drained
from kvstore.client.pending import ReadyReply
from kvstore.protocol import messages as m
from kvstore.protocol.door import AttachLease, NamedLease, Request, ReservationLost, Submitted, missed
from kvstore.protocol.messages import Grant, LeaseReply
from kvstore.protocol.requests import Requests
from tiering.after_fork import close_in_children
from tiering.clock import Clock
from tiering.counts.awaits import MAX_AWAIT_SECONDS
from tiering.frame import epoch_in
from tiering.tier import FrameSpan

A = TypeVar("A")
MAX_DEADLINE_MS = 60_000.0
SENT_BLOCKS = 1024
"""A reservation of a longer chain names only its last so many blocks: earlier ones were stored already."""
MOVING_SHARE = 10
"""While memory moves to other clients, a sidecar without notifications is pinged this many times as often."""


PlainVerb = m.Changes | m.Which | m.Await | m.SealTicket | m.OpenTicket | m.Locate | m.Drop
"""Requests about a namespace with one answer."""
ManyKeys = m.MatchPrefix | m.LeasePrefix | m.Which
"""Requests that have more time the longer their chain is."""
SpaceVerb = m.MatchPrefix | m.LeasePrefix | m.Reserve | m.Persist | PlainVerb
"""Requests about a namespace."""


@dataclass(frozen=True, slots=True)
class _OpenedHere:
    """A namespace as this client opened it first."""

    request: m.OpenNamespace
    grant: Grant

    @property
    def fingerprint(self) -> bytes:
        """Of the keys that the namespace hashes with."""
        return epoch_in(memoryview(self.grant.stamps[0]))[0]


@dataclass(frozen=True, slots=True)
class _Held:
    """A lease of this process: its connection, and the sidecar's number of it."""

    run: SidecarConnection
    lease: int


class SocketDoor:
    """`Door` to a sidecar. Thread-safe; a forked child gets its own connection, in the same session."""

    def __init__(self, path: str, engine: str, session: bytes, clock: Clock, limits: CallLimits) -> None:
        """session: the token of the engine's session."""
        self.session = session
        self.requests = Requests()
        self._path = path
        self._engine = engine
        self.clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._run: SidecarConnection | None = None
        self._opened: list[_OpenedHere] = []
        self._pause = limits.first_pause
        self._next_call_at = 0.0
        self._numbers = count(1)
        self._held: dict[int, _Held] = {}  # by this client's own numbers, which never name anything else
        self.forgotten: deque[int] = deque()
        self._forsaken: deque[PendingCall[Any]] = deque()
        self._touch = InTouch(self.look_after)
        self._why = ""  # why the last attempt to connect failed
        self._rejected = False
        self._is_silent = False  # the last attempt to connect timed out: only the background thread tries again
        self.closed = False
        close_in_children(self)

    # The contract --------------------------------------------------------------------------------------------------

    commits_early = True
    """The sidecar seals blocks while the client fills the next ones."""

    def call(self, request: Request, kind: type[A], seconds: float | None = None) -> A:
        answer: object
        match request:
            case m.OpenNamespace():
                answer = m.Granted(self._open_here(request))
            case m.Release():
                answer = self._release(request.leases)
            case m.Abort():
                answer = self._abort(request.reservation)
            case m.ReportFrame():
                answer = self._report(request)
            case _:
                usual = self._usual_seconds(request)
                time = VerbTime(self.clock, usual if seconds is None else min(usual, seconds))
                try:
                    answer = self._ask(request, kind, time)
                except Unavailable as away:
                    if isinstance(request, m.Drop):
                        raise Unreachable(f"{self._path}: {away.detail}") from None
                    answer = missed(request, away.reason, away.detail)
        assert isinstance(answer, kind), "each request has its kind of answer"
        return answer

    def submit(self, request: Request, kind: type[A], seconds: float) -> Submitted[A]:
        """Does not block: without a connection it is a miss, and the background thread connects."""
        run = self._run
        if isinstance(request, m.Commit):
            if run is not None and request.reservation in run.reservations:
                run.post(request)  # the sidecar takes the messages of a connection in their order
            return cast(Submitted[A], ReadyReply(m.Counted(0)))
        if isinstance(request, m.Tell):
            if run is not None and not run.wire.closed and not run.breaker.is_open:
                post = run.post_later if seconds > 0 else run.post
                named = run.namespaces.get(request.namespace, -1)
                post(msgspec.structs.replace(request, namespace=named))
            return cast(Submitted[A], ReadyReply(m.Done()))
        assert isinstance(request, ManyKeys | PlainVerb), "other requests are called"

        def late(reason: MissReason, detail: str) -> A:
            return cast(A, missed(request, reason, detail))

        if self.closed:
            return ReadyReply(late(MissReason.DISABLED, "the store is closed"))
        number = run.namespaces.get(request.namespace) if run is not None and not run.wire.closed else None
        if run is None or number is None:
            self._have_it_called()
            return ReadyReply(late(*self._why_not(run)))
        try:
            run.check()
            self._settle(run)
            most = seconds
            if isinstance(request, m.MatchPrefix | m.LeasePrefix):
                most = min(seconds, MAX_DEADLINE_MS / 1000)
                most += self._limits.lease if isinstance(request, m.LeasePrefix) else 0.0
            if isinstance(request, ManyKeys):
                most += run.allowance(len(request.keys), self.clock.monotonic_seconds())
            # A lease may still have to map its memory, which is done once per extent.
            steps = cast(Exchange[A], self._steps(run, request, kind, number))
            return PendingCall(run, steps, self.clock, most, self._limits.mapping, late, self._forsaken)
        except Unavailable as away:
            return ReadyReply(late(away.reason, away.detail))

    def memory(self, held: int, places: Sequence[int], *, writable: bool = False) -> list[FrameSpan]:
        run = self._run
        if writable:
            found = spans(run.writable, places) if run is not None and held in run.reservations else []
            if len(found) < len(places):  # or the sidecar went on without waiting
                reason = MissReason.DISABLED if self.closed else MissReason.UNREACHABLE
                raise ReservationLost(reason, "the memory of the reservation is gone")
            return found
        if self.closed:
            raise StoreClosed("the store is closed")
        lease = self._held.get(held)
        if lease is None or lease.run is not run or run.wire.closed:
            raise Unreachable("the connection on which it was leased is gone")
        return spans(run.readable, places)

    # One request ---------------------------------------------------------------------------------------------------

    def _usual_seconds(self, request: Request) -> float:
        limits = self._limits
        match request:
            case m.LeasePrefix():
                return min(request.deadline_ms, MAX_DEADLINE_MS) / 1000 + limits.lease
            case m.MatchPrefix() | m.Which() | AttachLease() | m.Locate():
                return limits.match
            case m.Await():
                return min(request.seconds, MAX_AWAIT_SECONDS) + limits.mapping
            case m.Drop():
                return limits.connect
            case _:
                return limits.fill

    def _ask(self, request: Request, kind: type[A], time: VerbTime) -> object:
        """Raises `Unavailable`."""
        if isinstance(request, m.Commit):
            return self._commit(request, time)
        assert isinstance(request, AttachLease | SpaceVerb), "it is asked by no handle"
        run, limits = self._running(time), self._limits
        if isinstance(request, AttachLease):
            return run.walk(self._attaching(run, request), time.left(), lambda: limits.mapping)
        if isinstance(request, ManyKeys):
            time.ends_at += run.allowance(len(request.keys), self.clock.monotonic_seconds())
        number = self._number(run, request.namespace, time)
        if isinstance(request, m.Persist):
            time = VerbTime(self.clock, request.seconds + limits.mapping)
        elif isinstance(request, m.Drop):
            request = msgspec.structs.replace(request, seconds=limits.drop)
            time = VerbTime(self.clock, limits.drop + limits.fill)
        further = (lambda: limits.mapping) if isinstance(request, m.LeasePrefix) else time.left
        return run.walk(self._steps(run, request, kind, number), time.left(), further)

    def _steps(self, run: SidecarConnection, request: SpaceVerb, kind: type[A], number: int) -> Exchange[object]:
        """kind: of the answer. number: the sidecar's of the request's namespace."""
        match request:
            case m.MatchPrefix():
                return self._matching(run, request, number)
            case m.LeasePrefix():
                return self._leasing(run, request, number)
            case m.Reserve():
                return self._reserving(run, request, number)
            case m.Persist():
                return self._persisting(run, request, number)
            case _:
                return self._plain(run, request, kind, number)

    def _matching(self, run: SidecarConnection, request: m.MatchPrefix, number: int) -> Exchange[m.Matched]:
        keys = request.keys[: run.max_keys]
        found = taken((yield msgspec.structs.replace(request, namespace=number, keys=keys)), m.Matched)
        return m.Matched(matched_up_to(found.reply, len(request.keys), run.max_keys), found.has_courier)

    def _leasing(self, run: SidecarConnection, request: m.LeasePrefix, number: int) -> Exchange[NamedLease]:
        _check_length(run, request)  # the match came from another connection
        first, wait_ms = int(request.first_block), min(float(request.deadline_ms), MAX_DEADLINE_MS)
        asked = msgspec.structs.replace(request, namespace=number, first_block=first, deadline_ms=wait_ms)
        leased = yield from run.leasing(asked)
        return self._hold(run, leased) if leased.lease else NamedLease(leased)

    def _plain(self, run: SidecarConnection, request: PlainVerb, kind: type[A], number: int) -> Exchange[A]:
        if isinstance(request, m.Locate | m.Which):
            request = msgspec.structs.replace(request, keys=request.keys[: run.max_keys])
        elif isinstance(request, m.SealTicket):
            _check_length(run, request)
        answered = yield msgspec.structs.replace(request, namespace=number)
        return taken(answered, kind)

    def _attaching(self, run: SidecarConnection, request: AttachLease) -> Exchange[NamedLease]:
        if run.name != request.run:
            raise Unavailable(MissReason.STALE_HINT, "it is of another run of the sidecar")
        yield from run.attaching(request.reply.lease, request.reply.places)
        return self._hold(run, request.reply)

    def _reserving(self, run: SidecarConnection, request: m.Reserve, number: int) -> Exchange[m.Reserved]:
        sent = list(request.keys[: run.max_keys])
        first = min(int(request.first_block), len(sent))
        verb = msgspec.structs.replace(request, namespace=number, keys=sent, first_block=first)
        skipped = len(sent) - SENT_BLOCKS
        is_plain = not request.collective and request.ttl_seconds is None and request.priority <= 0
        reply = None
        if run.may_skip and is_plain and skipped > 0:
            first = max(first, skipped)
            short = msgspec.structs.replace(verb, keys=sent[skipped:], first_block=first, skipped=skipped)
            reply = yield from run.reserving(short)
            if not reply.reservation and reply.present <= skipped:  # the skipped blocks were evicted meanwhile
                reply = None
        if reply is None:
            reply = yield from run.reserving(verb)
        if len(request.keys) > len(sent) and reply.reason is None:
            reply = msgspec.structs.replace(reply, stopped_at=len(sent), reason=MissReason.UNSUPPORTED)
        if reply.reservation:
            run.reservations[reply.reservation] = reply
        return m.Reserved(reply)

    def _commit(self, request: m.Commit, time: VerbTime) -> m.Counted:
        run = self._run
        reply = run.reservations.get(request.reservation) if run is not None else None
        if run is None or reply is None:
            raise Unavailable(MissReason.UNREACHABLE, "the connection on which it was reserved is gone")
        committed = min(run.ask(request, m.Counted, time.left()).blocks, len(reply.blocks))
        if committed == len(reply.blocks):  # it ended with its last block
            run.reservations.pop(request.reservation, None)
        return m.Counted(committed)

    def _persisting(self, run: SidecarConnection, request: m.Persist, number: int) -> Exchange[m.Persisted]:
        verb = msgspec.structs.replace(request, namespace=number, keys=request.keys[: run.max_keys])
        answer = taken((yield verb), m.Persisted)
        is_cut = answer.reason is None and len(request.keys) > run.max_keys
        return m.Persisted(answer.blocks, MissReason.UNSUPPORTED if is_cut else answer.reason)

    def _release(self, leases: Iterable[int]) -> m.Done:
        for lease in leases:
            held = self._held.pop(lease, None)
            if held is not None:
                held.run.let_go(held.lease)
        return m.Done()

    def _abort(self, reservation: int) -> m.Done:
        run = self._run
        if run is not None and run.reservations.pop(reservation, None) is not None:
            run.post(m.Abort(reservation))
        return m.Done()

    def _report(self, request: m.ReportFrame) -> m.Done:
        """Waits for the answer: the sidecar must look before the lease is released. Not sent to a silent sidecar."""
        held = self._held.get(request.lease)
        if held is not None:
            try:
                verb = msgspec.structs.replace(request, lease=held.lease)
                held.run.ask(verb, m.Done, self._limits.connect)
            except Unavailable:
                pass
        return m.Done()

    def _open_here(self, request: m.OpenNamespace) -> Grant:
        """Raises `Unreachable`, and the sidecar's refusal."""
        time = VerbTime(self.clock, self._limits.open)
        run = None
        try:
            run = self._running(time, waits=True)
            while run.breaker.is_open and time.left():
                self.clock.sleep(self._limits.first_pause)
                run = self._running(time, waits=True)  # it may be another sidecar's by now
            grant = self._open(run, request, max(self._limits.connect, time.left()))
        except Unavailable as away:
            if run is None and not self._rejected:
                mend = HANGS if self._is_silent else "start the sidecar (kvstore serve), or check the path"
                raise Unreachable(f"{away.detail}; {mend}") from None
            is_slow = run is not None and away.reason in (MissReason.DEADLINE, MissReason.BUSY)
            raise (NotReady if is_slow else Unreachable)(f"{self._path}: {away.detail}") from None
        payloads = tuple(request.payload_bytes)
        if grant.payload_bytes != payloads:
            raise BadInput(f"the sidecar knows this namespace with payloads of {grant.payload_bytes}, not {payloads}")
        with self._lock:
            number = len(self._opened)
            self._opened.append(_OpenedHere(request, grant))
            run.namespaces[number] = grant.number
            self._touch.start()
        return msgspec.structs.replace(grant, number=number)

    # Beyond it -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Hang up; every further request is a miss."""
        self._touch.end()
        with self._lock:
            self.closed = True
            run, self._run = self._run, None
        if run is not None:
            run.close()

    def close_after_fork(self) -> None:
        """In a forked child: connection and leases are the parent's, and the memory is unmapped here."""
        self._lock = threading.Lock()
        self._touch = InTouch(self.look_after)
        run, self._run = self._run, None
        self._held.clear()
        self.forgotten.clear()
        self._next_call_at = 0.0
        self._is_silent = False
        if run is not None:
            run.close_after_fork()
        self._forsaken.clear()

    # Inside --------------------------------------------------------------------------------------------------------

    def _running(self, time: VerbTime, *, waits: bool = False) -> SidecarConnection:
        """The connection; connects if there is none. Raises `Unavailable`."""
        if not time.left() and not waits:
            raise Unavailable(MissReason.DEADLINE, "its time was over before this was asked")
        run = self._run
        if run is None or run.wire.closed:
            run = self._connect(time, waits)
        if not waits:
            run.check()
        retired = run.wire.retired()
        if retired:
            run.unmap(retired)
        self._settle(run)
        return run

    def _settle(self, run: SidecarConnection) -> None:
        """Release what finalizers left, and undo late answers. Does not block."""
        if self.forgotten:
            self._release(drained(self.forgotten))
        for asked in drained(self._forsaken):
            asked.cancel()
        run.settle()

    def _hold(self, run: SidecarConnection, reply: LeaseReply) -> NamedLease:
        number = next(self._numbers)
        self._held[number] = _Held(run, reply.lease)
        return NamedLease(msgspec.structs.replace(reply, lease=number), run.name, reply.lease)

    def _have_it_called(self) -> bool:
        self._touch.wanted = True
        return self._touch.soon()

    def _why_not(self, run: SidecarConnection | None) -> tuple[MissReason, str]:
        if run is not None and not run.wire.closed:
            return MissReason.WARMING, "the namespace is being opened on a new connection"
        if run is None and not self._why:
            return MissReason.WARMING, "the sidecar is being called"
        because = f" ({self._why})" if self._why else ""
        return MissReason.UNREACHABLE, f"there is no connection to the sidecar; it is being called{because}"

    def _connect(self, time: VerbTime, waits: bool) -> SidecarConnection:
        limits = self._limits
        if self._is_silent and not waits and self._have_it_called():
            raise Unavailable(MissReason.UNREACHABLE, self._why)  # each query would wait as long for nothing
        while True:
            run = self._connect_once(limits.connect if waits else min(limits.match, time.left()))
            if run is not None:
                return run
            left = time.left() if waits else 0.0
            if not left:
                raise Unavailable(MissReason.UNREACHABLE, self._why or "it is being called")
            until_next = self._next_call_at - self.clock.monotonic_seconds()
            self.clock.sleep(max(limits.first_pause, min(until_next, left)))

    def _connect_once(self, seconds: float) -> SidecarConnection | None:
        """Connect, if the pause since the last failure is over. One thread connects; others wait at most `seconds`."""
        if self.closed:
            raise Unavailable(MissReason.DISABLED, "the store is closed")
        if not self._lock.acquire(timeout=seconds):
            return None
        try:
            run = self._run
            if run is not None and not run.wire.closed:
                return run  # another thread has connected
            if run is not None:
                self._run = None
                run.close()
            if self.clock.monotonic_seconds() < self._next_call_at:
                return None
            try:
                hashes_with = self._opened[-1].fingerprint if self._opened else b""
                wire = FramedSocket(self._path, self._engine, self.session, self.clock, seconds, hashes_with)
                self._run = run = SidecarConnection(wire, self.clock, self._touch.soon)
                self._why, self._is_silent = "", False
                self._pause = self._limits.first_pause
                self._touch.soon()  # its ping asks for notifications
                return run
            except Unreachable as error:
                self._why, self._is_silent = str(error), isinstance(error, Silent)
                self._rejected = isinstance(error, Rejected)
                self._next_call_at = self.clock.monotonic_seconds() + self._pause
                self._pause = min(2 * self._pause, self._limits.longest_pause)
                return None
        finally:
            self._lock.release()

    def _number(self, run: SidecarConnection, number: int, time: VerbTime) -> int:
        """The sidecar's number of a namespace; opens it on a new connection, within the time that is left.

        Raises `Unavailable`.
        """
        known = run.namespaces.get(number)
        if known is not None:
            return known
        opened = self._opened[number]
        theirs = run.wire.welcome.fingerprint or opened.fingerprint  # an earlier version sends none
        if difference := key_difference(opened.fingerprint, theirs):
            raise Unavailable(MissReason.KEY_MISMATCH, f"the sidecar has other keys than before: {difference}")
        try:
            seconds = min(time.left(), self._limits.connect)
            grant = self._open(run, opened.request, seconds)
        except Unavailable as away:
            if away.reason is MissReason.DEADLINE and not run.breaker.is_open:
                self._have_it_called()  # the background thread does it
            raise
        except BadInput as error:
            raise Unavailable(MissReason.UNSUPPORTED, str(error)) from None
        same = (grant.identity_key, grant.stamps, grant.payload_bytes)
        if same != (opened.grant.identity_key, opened.grant.stamps, opened.grant.payload_bytes):
            difference = key_difference(opened.fingerprint, _OpenedHere(opened.request, grant).fingerprint)
            raise Unavailable(MissReason.KEY_MISMATCH, f"the sidecar has other keys than before: {difference}")
        run.namespaces[number] = grant.number
        return grant.number

    def _open(self, run: SidecarConnection, request: m.OpenNamespace, seconds: float) -> Grant:
        answered = run.answer(request, seconds)
        if isinstance(answered.answer, m.Failed) and answered.answer.fault is m.RequestFault.BAD_INPUT:
            raise BadInput(answered.answer.text)
        return taken(answered, m.Granted).grant

    # In the background ---------------------------------------------------------------------------------------------

    def look_after(self) -> float:
        """One round of the background thread; returns the seconds until the next."""
        run = self._run
        if run is not None and run.wire.closed:
            # Unmap its memory also while the engine is idle: a sidecar that came back waits for that.
            self._hang_up(run)
            self._touch.wanted = not self.closed
        if self._touch.wanted:
            self._call_in_background()
            run = self._run
        if run is not None and not run.wire.closed:
            if not run.breaker.is_open:
                self._settle(run)
            if run.ping(self._limits, self._touch.nudge):
                self._settle(run)
            if run.breaker.is_open or run.breaker.is_suspected:
                return 0.0  # go on waiting for the ping's answer
        if not self._touch.wanted:
            is_moving = run is not None and run.is_moving
            return self._limits.ping / MOVING_SHARE if is_moving else self._limits.ping
        return min(
            self._limits.ping, max(self._limits.first_pause, self._next_call_at - self.clock.monotonic_seconds())
        )

    def _hang_up(self, run: SidecarConnection) -> None:
        with self._lock:
            if self._run is run:
                self._run = None
        run.wire.close()

    def _call_in_background(self) -> None:
        self._touch.wanted = False
        try:
            run = self._run
            if run is None or run.wire.closed:
                run = self._connect_once(self._limits.connect)
            for number in range(len(self._opened) if run is not None else 0):
                assert run is not None
                try:
                    self._number(run, number, VerbTime(self.clock, self._limits.connect))
                except Unavailable as away:
                    if away.reason not in (MissReason.UNSUPPORTED, MissReason.KEY_MISMATCH):
                        raise
            self._touch.wanted = run is None
        except Unavailable:  # closed, or it was gone again
            self._touch.wanted = not self.closed


def _check_length(run: SidecarConnection, request: m.LeasePrefix | m.SealTicket) -> None:
    if len(request.keys) > run.max_keys:
        raise Unavailable(MissReason.UNSUPPORTED, f"{len(request.keys)} blocks; this sidecar takes {run.max_keys}")


# A background thread that pings and reconnects, so that no engine thread waits for either -----------------------------


class InTouch:
    """A thread that calls a method as soon as it is nudged, and again after as many seconds as that returned. It ends
    with the method's object. wanted: there is no connection, and a verb asked for one."""

    def __init__(self, look_after: Callable[[], float]) -> None:
        self.wanted = False
        self.nudge = threading.Event()
        """Set it to have the thread check at once."""
        self._look_after = weakref.WeakMethod(look_after)
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Start the thread unless it runs; returns whether it does."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kv-client", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread available
                return False
            self._thread = thread
        return True

    def soon(self) -> bool:
        """Have the thread check at once; returns whether it runs."""
        is_there = self.start()
        self.nudge.set()
        return is_there

    def end(self) -> None:
        """End the thread, without waiting."""
        self._ended = True
        self.nudge.set()

    def _run(self) -> None:
        seconds = 0.0
        while not self._ended:
            self.nudge.wait(seconds)
            self.nudge.clear()
            look_after = self._look_after()
            if look_after is None or self._ended:
                return
            seconds = look_after()
            del look_after
