"""A `Door` whose store is another process on this host: the sidecar.

Keys go out, places and digests come back; payloads are read and written in extents that are mapped here, readable ones
read-only. The handle above verifies its own copies, as it does in the store's own process.

Nothing here fails an engine's request. While the sidecar is away every question is a miss (`unreachable`), every answer
that is late is one (`deadline`). While it is silent nothing is asked of it but a ping (see `breaker`); while it is gone
it is called again after a pause that grows, and namespaces are opened anew on each connection. What was leased on one
that broke is not readable any more. What is submitted asks no question of a sidecar that is away: a thread calls and
pings it in the background. Must import without torch, and quickly.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec

from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, NotReady, Rejected, StoreClosed, Unreachable
from kvstore.block.identity import Namespace
from kvstore.client.connection import (
    CallLimits,
    Exchange,
    PendingCall,
    SidecarConnection,
    Unavailable,
    VerbTime,
    matched_up_to,
    no_lease,
    no_match,
    spans,
    taken,
)
from kvstore.client.framing import FramedSocket, Silent, drained
from kvstore.client.in_touch import InTouch
from kvstore.client.pending import ReadyReply
from kvstore.protocol import messages as m
from kvstore.protocol.door import Collective, Grant, LeaseReply, MatchReply, ReservationLost, ReserveReply, Submitted
from kvstore.protocol.requests import Requests
from tiering.after_fork import close_in_children
from tiering.clock import Clock
from tiering.tier import FrameSpan

R = TypeVar("R")
MAX_DEADLINE_MS = 60_000.0
SENT_BLOCKS = 1024
"""Of a longer chain that is put in pieces, a message names so many blocks, the last ones: those before are there."""
MOVING_SHARE = 10
"""While memory moves to other clients, a sidecar that rings no bell is asked so many times as often."""


@dataclass(frozen=True, slots=True)
class _OpenedHere:
    """A namespace as this client opened it first."""

    namespace: Namespace
    payload_bytes: tuple[int, ...]
    grant: Grant
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Held:
    """A lease of this process: the connection that it holds it on, and the sidecar's number of it."""

    run: SidecarConnection
    lease: int


class SocketDoor:
    """`Door` to a sidecar. Thread-safe; a forked child gets a connection of its own, in the same session."""

    def __init__(self, path: str, engine: str, session: bytes, clock: Clock, limits: CallLimits) -> None:
        """session: the token of the engine's session."""
        self.session = session
        self.requests = Requests()
        self._path = path
        self._engine = engine
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._run: SidecarConnection | None = None
        self._opened: list[_OpenedHere] = []
        self._pause = limits.first_pause
        self._next_call_at = 0.0
        self._numbers = count(1)
        self._held: dict[int, _Held] = {}  # by this client's own numbers, which never name anything else
        self._released_later: deque[int] = deque()
        self._forsaken: deque[PendingCall[Any]] = deque()
        self._touch = InTouch(clock)
        self._why = ""  # the last call failed, if it did
        self._rejected = False
        self._is_silent = False  # it was called, and nobody said a word: the thread in the background calls on
        self.closed = False
        close_in_children(self)

    # The contract --------------------------------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace, payload_bytes: Sequence[int], name: str = "") -> Grant:
        """Raises `Unreachable` and what the sidecar says of it."""
        payloads = tuple(payload_bytes)
        time = self._time(self._limits.open)
        run = None
        try:
            run = self._running(time, waits=True)
            while run.breaker.is_open and time.left():
                self._clock.sleep(self._limits.first_pause)
                run = self._running(time, waits=True)  # it may be another sidecar's by now
            grant = self._open(run, namespace, payloads, max(self._limits.connect, time.left()), name)
        except Unavailable as away:
            if run is None and not self._rejected:
                raise Unreachable(f"{away.detail}; start the sidecar (kvstore serve), or check the path") from None
            is_slow = run is not None and away.reason in (MissReason.DEADLINE, MissReason.BUSY)
            raise (NotReady if is_slow else Unreachable)(f"{self._path}: {away.detail}") from None
        if grant.payload_bytes != payloads:
            raise BadInput(f"the sidecar knows this namespace with payloads of {grant.payload_bytes}, not {payloads}")
        with self._lock:
            number = len(self._opened)
            self._opened.append(_OpenedHere(namespace, payloads, grant, name))
            run.namespaces[number] = grant.number
            self._keep_in_touch()
        return Grant(number, grant.identity_key, grant.stamps, grant.payload_bytes, grant.durable)

    def now(self) -> float:
        """As `Door.now`."""
        return self._clock.monotonic_seconds()

    commits_early = True
    """The sidecar seals them while the next ones are being filled."""

    def match(self, number: int, keys: Sequence[bytes]) -> MatchReply:
        """As `Door.match`; a sidecar that does not answer has nothing."""
        time = self._time(self._limits.match)
        try:
            run = self._running(time)
            time.extend(self._allowance(run, keys))
            verb = m.MatchPrefix(self._number(run, number, time), list(keys[: run.max_keys]))
            return matched_up_to(run.ask(verb, m.Matched, time.left()).reply, len(keys), run.max_keys)
        except Unavailable as away:
            return MatchReply(0, reason=away.reason, detail=away.detail)

    def present(self, number: int, keys: Sequence[bytes], seconds: float | None = None) -> int:
        """As `Door.present`."""
        time = self._time(self._limits.match, seconds)
        try:
            run = self._running(time)
            if seconds is None:
                time.extend(self._allowance(run, keys))
            verb = m.MatchPrefix(self._number(run, number, time), list(keys[: run.max_keys]), counts=False)
            return run.ask(verb, m.Matched, time.left()).reply.blocks
        except Unavailable:
            return 0

    def lease(
        self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float, request: str = ""
    ) -> LeaseReply:
        """As `Door.lease`."""
        wait_ms = min(float(deadline_ms), MAX_DEADLINE_MS)
        time = self._time(wait_ms / 1000 + self._limits.lease)
        try:
            run = self._running(time)
            time.extend(self._allowance(run, keys))
            verb = m.LeasePrefix(self._number(run, number, time), list(keys), int(first_block), wait_ms, request)
            return run.walk(self._leasing(run, verb), time.left(), self._limits.mapping)
        except Unavailable as away:
            return no_lease(first_block, away.reason, away.detail)

    def submit_match(self, number: int, keys: Sequence[bytes], deadline_ms: float) -> Submitted[MatchReply]:
        """As `Door.submit_match`. Waits for nothing: without a connection it is a miss, and one is made meanwhile."""

        def steps(run: SidecarConnection, known: int) -> Exchange[MatchReply]:
            reply = taken((yield m.MatchPrefix(known, list(keys[: run.max_keys]))), m.Matched).reply
            return matched_up_to(reply, len(keys), run.max_keys)

        seconds = min(float(deadline_ms), MAX_DEADLINE_MS) / 1000
        return self._submit(number, keys, steps, seconds, no_match)

    def submit_lease(
        self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float, request: str = ""
    ) -> Submitted[LeaseReply]:
        """As `Door.submit_lease`; see `submit_match`."""
        wait_ms = min(float(deadline_ms), MAX_DEADLINE_MS)

        def steps(run: SidecarConnection, known: int) -> Exchange[LeaseReply]:
            return self._leasing(run, m.LeasePrefix(known, list(keys), int(first_block), wait_ms, request))

        seconds = wait_ms / 1000 + self._limits.lease
        return self._submit(number, keys, steps, seconds, partial(no_lease, first_block))

    def named(self, lease: int) -> tuple[bytes, int]:
        """As `Door.named`."""
        held = self._held.get(lease)
        return (held.run.name, held.lease) if held is not None else (b"", 0)

    def attach(self, run: bytes, reply: LeaseReply) -> LeaseReply:
        """As `Door.attach`."""
        time = self._time(self._limits.match)
        try:
            here = self._running(time)
            if here.name != run:
                return no_lease(reply.first_block, MissReason.STALE_HINT, "it is of another run of the sidecar")
            if not here.attach(reply.lease, reply.places, time.left(), self._limits.mapping):
                return no_lease(reply.first_block, MissReason.STALE_HINT, "nobody of this session holds it any more")
            return self._hold(here, reply)
        except Unavailable as away:
            return no_lease(reply.first_block, away.reason, away.detail)

    def release(self, lease: int) -> None:
        """As `Door.release`; nobody waits for it."""
        held = self._held.pop(lease, None)
        if held is not None:
            held.run.let_go(held.lease)

    def release_later(self, lease: int) -> None:
        """As `Door.release_later`."""
        self._released_later.append(lease)

    def is_within_reach(self, lease: int) -> bool:
        """As `Door.is_within_reach`: whether the connection on which it was leased is there."""
        held = self._held.get(lease)
        return held is not None and held.run is self._run and not held.run.wire.closed

    def report(self, lease: int, block: int, part: int) -> None:
        """As `Door.report`. Waits for the answer: the lease must not be released before it is looked at. A sidecar that
        is silent is not told."""
        held = self._held.get(lease)
        if held is not None:
            try:
                held.run.ask(m.ReportFrame(held.lease, block, part), m.Done, self._limits.connect)
            except Unavailable:
                pass

    def reserve(
        self,
        number: int,
        keys: Sequence[bytes],
        first_block: int,
        priority: int,
        ttl_seconds: float | None,
        collective: Collective | None = None,
        seconds: float | None = None,
    ) -> ReserveReply:
        """As `Door.reserve`."""
        time = self._time(self._limits.fill, seconds)
        try:
            run = self._running(time)
            ttl = float(ttl_seconds) if ttl_seconds is not None else None
            known = self._number(run, number, time)
            name, parts = (collective.name, list(collective.parts)) if collective is not None else ("", [])
            sent = list(keys[: run.max_keys])
            first = min(int(first_block), len(sent))
            verb = m.Reserve(known, sent, first, int(priority), ttl, name, parts)
            skipped = len(sent) - SENT_BLOCKS
            is_plain = collective is None and ttl is None and priority <= 0
            if run.may_skip and is_plain and skipped > 0:
                first = max(first, skipped)
                short = msgspec.structs.replace(verb, keys=sent[skipped:], first_block=first, skipped=skipped)
                reply = run.ask(short, m.Reserved, time.left()).reply
                if not reply.reservation and reply.present <= skipped:  # what was skipped is not there any more
                    reply = run.ask(verb, m.Reserved, time.left()).reply
            else:
                reply = run.ask(verb, m.Reserved, time.left()).reply
            if len(keys) > len(sent) and reply.reason is None:
                reason = MissReason.UNSUPPORTED
                reply = msgspec.structs.replace(reply, stopped_at=len(sent), reason=reason)
            if reply.reservation:
                run.reservations[reply.reservation] = reply
                try:
                    mapping = run.mapping(reply.places, writable=True, namespace=known)
                    run.walk(mapping, time.left(), time.left())
                except BaseException:
                    self.abort(reply.reservation)
                    raise
            return reply
        except Unavailable as away:
            return ReserveReply(0, 0, stopped_at=0, reason=away.reason)

    def commit(
        self,
        reservation: int,
        part: int,
        first: int,
        digests: Sequence[Sequence[bytes]],
        seconds: float | None = None,
    ) -> int:
        """As `Door.commit`."""
        run = self._run
        reply = run.reservations.get(reservation) if run is not None else None
        if run is None or reply is None:
            raise ReservationLost(MissReason.UNREACHABLE, "the connection on which it was reserved is gone")
        time = self._time(self._limits.fill, seconds)
        try:
            verb = m.Commit(reservation, part, first, [list(block) for block in digests])
            committed = min(run.ask(verb, m.Counted, time.left()).blocks, len(reply.blocks))
        except Unavailable as away:
            raise ReservationLost(away.reason, away.detail) from None
        if committed == len(reply.blocks):  # it ended with its last block
            run.reservations.pop(reservation, None)
        return committed

    def post_commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> None:
        """As `Door.post_commit`. The sidecar takes the messages of a connection in their order."""
        run = self._run
        if run is not None and reservation in run.reservations:
            run.post(m.Commit(reservation, part, first, [list(block) for block in digests]))

    def persist(self, number: int, keys: Sequence[bytes], seconds: float) -> tuple[int, MissReason | None]:
        """As `Door.persist`."""
        try:
            run = self._running(self._time(self._limits.fill))
            known = self._number(run, number, self._time(self._limits.fill))
            verb = m.Persist(known, list(keys[: run.max_keys]), seconds)
            answer = run.ask(verb, m.Persisted, seconds + self._limits.mapping)
            is_cut = answer.reason is None and len(keys) > run.max_keys
            return answer.blocks, MissReason.UNSUPPORTED if is_cut else answer.reason
        except Unavailable as away:
            return 0, away.reason

    def abort(self, reservation: int) -> None:
        """As `Door.abort`."""
        run = self._run
        if run is not None and reservation in run.reservations:
            del run.reservations[reservation]
            run.post(m.Abort(reservation))

    def spans(self, places: Sequence[int]) -> list[FrameSpan]:
        """As `Door.spans`; none where the connection is gone. Raises `StoreClosed` where this door was closed."""
        run = self._run
        if self.closed:
            raise StoreClosed("the store is closed")
        return spans(run.readable, places) if run is not None else []

    def spans_to_fill(self, places: Sequence[int]) -> list[FrameSpan]:
        """As `Door.spans_to_fill`; see `spans`."""
        run = self._run
        held = (
            [column for reply in list(run.reservations.values()) for column in reply.places] if run is not None else []
        )
        # Those very lists: what was reserved on another connection may be another put's by now, with the same places.
        is_held = any(places is column for column in held)
        found = spans(run.writable, places) if run is not None and is_held else []
        if len(found) < len(places):  # or the sidecar went on without waiting
            reason = MissReason.DISABLED if self.closed else MissReason.UNREACHABLE
            raise ReservationLost(reason, "the memory of the reservation is gone")
        return found

    # Beyond it -----------------------------------------------------------------------------------------------------

    def drop(self, number: int) -> int:
        """Forget every block of a namespace. Raises `Unreachable`, also where that was not over in time."""
        time = self._time(self._limits.connect)
        try:
            run = self._running(time)
            verb = m.Drop(self._number(run, number, time), self._limits.drop)
            return run.ask(verb, m.Counted, self._limits.drop + self._limits.fill).blocks
        except Unavailable as away:
            raise Unreachable(f"{self._path}: {away.detail}") from None

    def close(self) -> None:
        """Hang up; every further question is a miss."""
        self._touch.end()
        with self._lock:
            self.closed = True
            run, self._run = self._run, None
        if run is not None:
            run.close()

    def close_after_fork(self) -> None:
        """In a forked child: connection and leases are the parent's, memory is let go of."""
        self._lock = threading.Lock()
        self._touch = InTouch(self._clock)
        run, self._run = self._run, None
        self._held.clear()
        self._released_later.clear()
        self._next_call_at = 0.0
        self._is_silent = False
        if run is not None:
            run.close_after_fork()
        self._forsaken.clear()

    # Inside --------------------------------------------------------------------------------------------------------

    def _time(self, most: float, given: float | None = None) -> VerbTime:
        """Of a verb that may take so long, or as long as its caller says."""
        return VerbTime(self._clock, most if given is None else min(most, given))

    def _running(self, time: VerbTime, *, waits: bool = False) -> SidecarConnection:
        """The connection, made anew if need be. Raises `Unavailable`."""
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
        """Give back what was forgotten, or came too late. Waits for nothing."""
        for lease in drained(self._released_later):
            self.release(lease)
        for asked in drained(self._forsaken):
            asked.cancel()
        run.settle()

    def _submit(
        self,
        number: int,
        keys: Sequence[bytes],
        steps: Callable[[SidecarConnection, int], Exchange[R]],
        seconds: float,
        missed: Callable[[MissReason, str], R],
    ) -> Submitted[R]:
        """Ask without waiting for anything."""
        run = self._run
        if self.closed:
            return ReadyReply(missed(MissReason.DISABLED, "the store is closed"))
        known = run.namespaces.get(number) if run is not None and not run.wire.closed else None
        if run is None or known is None:
            self._have_it_called()
            return ReadyReply(missed(*self._why_not(run)))
        try:
            run.check()
            self._settle(run)
            seconds += self._allowance(run, keys)
            # What is leased is there; only its memory has to be mapped here, which is done once.
            return PendingCall(
                run, steps(run, known), self._clock, seconds, self._limits.mapping, missed, self._forsaken
            )
        except Unavailable as away:
            return ReadyReply(missed(away.reason, away.detail))

    def _allowance(self, run: SidecarConnection, keys: Sequence[bytes]) -> float:
        """Seconds more, for a chain of that many blocks."""
        return run.allowance(len(keys), self._clock.monotonic_seconds())

    def _leasing(self, run: SidecarConnection, verb: m.LeasePrefix) -> Exchange[LeaseReply]:
        if len(verb.keys) > run.max_keys:  # they were found on another connection
            raise Unavailable(MissReason.UNSUPPORTED, f"{len(verb.keys)} blocks; this sidecar takes {run.max_keys}")
        reply = yield from run.leasing(verb)
        return self._hold(run, reply) if reply.lease else reply

    def _hold(self, run: SidecarConnection, reply: LeaseReply) -> LeaseReply:
        """A lease that the connection holds, as one of this client's."""
        number = next(self._numbers)
        self._held[number] = _Held(run, reply.lease)
        return msgspec.structs.replace(reply, lease=number)

    def _have_it_called(self) -> bool:
        """By the thread in the background; whether there is one."""
        self._touch.wanted = True
        is_there = self._keep_in_touch()
        self._touch.nudge.set()
        return is_there

    def _ping_soon(self) -> bool:
        """See `_have_it_called`."""
        is_there = self._keep_in_touch()
        self._touch.nudge.set()
        return is_there

    def _why_not(self, run: SidecarConnection | None) -> tuple[MissReason, str]:
        """Why nothing was asked, where nobody waits for a connection."""
        if run is not None and not run.wire.closed:
            return MissReason.WARMING, "the namespace is being opened on a new connection"
        if run is None and not self._why:
            return MissReason.WARMING, "the sidecar is being called"
        return MissReason.UNREACHABLE, f"there is no connection to the sidecar; it is being called{self._because()}"

    def _because(self) -> str:
        return f" ({self._why})" if self._why else ""

    def _connect(self, time: VerbTime, waits: bool) -> SidecarConnection:
        limits = self._limits
        if self._is_silent and not waits and self._have_it_called():
            raise Unavailable(MissReason.UNREACHABLE, self._why)  # calling it would cost each verb as much again
        while True:
            run = self._connect_once(limits.connect if waits else min(limits.match, time.left()))
            if run is not None:
                return run
            left = time.left() if waits else 0.0
            if not left:
                raise Unavailable(MissReason.UNREACHABLE, self._why or "it is being called")
            until_next = self._next_call_at - self._clock.monotonic_seconds()
            self._clock.sleep(max(limits.first_pause, min(until_next, left)))

    def _connect_once(self, seconds: float) -> SidecarConnection | None:
        """The connection, called for at most that long if it is time for it. One thread calls, others do not wait."""
        if self.closed:
            raise Unavailable(MissReason.DISABLED, "the store is closed")
        if not self._lock.acquire(timeout=seconds):
            return None
        try:
            run = self._run
            if run is not None and not run.wire.closed:
                return run  # somebody else was faster
            if run is not None:
                self._run = None
                run.close()
            if self._clock.monotonic_seconds() < self._next_call_at:
                return None
            try:
                wire = FramedSocket(self._path, self._engine, self.session, self._clock, seconds)
                self._run = run = SidecarConnection(wire, self._clock, self._ping_soon)
                self._why, self._is_silent = "", False
                self._pause = self._limits.first_pause
                self._keep_in_touch()
                self._touch.nudge.set()  # it asks for a bell
                return run
            except Unreachable as error:
                self._why, self._is_silent = str(error), isinstance(error, Silent)
                self._rejected = isinstance(error, Rejected)
                self._next_call_at = self._clock.monotonic_seconds() + self._pause
                self._pause = min(2 * self._pause, self._limits.longest_pause)
                return None
        finally:
            self._lock.release()

    def _number(self, run: SidecarConnection, number: int, time: VerbTime) -> int:
        """The sidecar's number of a namespace, which is opened first on a new connection, in that time at most.

        Raises `Unavailable`.
        """
        known = run.namespaces.get(number)
        if known is not None:
            return known
        opened = self._opened[number]
        try:
            seconds = min(time.left(), self._limits.connect)
            grant = self._open(run, opened.namespace, opened.payload_bytes, seconds, opened.name)
        except Unavailable as away:
            if away.reason is MissReason.DEADLINE and not run.breaker.is_open:
                self._have_it_called()  # which takes the time that there is not here
            raise
        except BadInput as error:
            raise Unavailable(MissReason.UNSUPPORTED, str(error)) from None
        same = (grant.identity_key, grant.stamps, grant.payload_bytes)
        if same != (opened.grant.identity_key, opened.grant.stamps, opened.grant.payload_bytes):
            raise Unavailable(MissReason.KEY_MISMATCH, "the sidecar has other keys than before")
        run.namespaces[number] = grant.number
        return grant.number

    def _open(
        self, run: SidecarConnection, namespace: Namespace, payload_bytes: Sequence[int], seconds: float, name: str
    ) -> Grant:
        verb = m.OpenNamespace(namespace.pack(), list(payload_bytes), name)
        answered = run.answer(verb, seconds)
        if isinstance(answered.answer, m.Failed) and answered.answer.fault is m.RequestFault.BAD_INPUT:
            raise BadInput(answered.answer.text)
        return taken(answered, m.Granted).grant

    # In the background ---------------------------------------------------------------------------------------------

    def _keep_in_touch(self) -> bool:
        """Have a thread that asks now and then, and calls the sidecar where somebody wants it and must not wait.
        Returns whether there is one."""
        return self._touch.start(self, self._limits.ping)

    def look_after(self) -> float:
        """What the thread does each time; returns the seconds until it is called again."""
        run = self._run
        if run is not None and run.wire.closed:
            # Its memory is let go of also while nobody asks: a sidecar that came back waits for that.
            self._hang_up(run)
            self._touch.wanted = not self.closed
        if self._touch.wanted:
            self._call_in_background()
            run = self._run
        if run is not None and not run.wire.closed:
            self._touch.ping(run, self._limits, self._settle)
            if run.breaker.is_open or run.breaker.is_suspected:
                return 0.0  # its answer is waited for
        if not self._touch.wanted:
            return self._limits.ping / MOVING_SHARE if self._touch.is_moving else self._limits.ping
        return min(
            self._limits.ping, max(self._limits.first_pause, self._next_call_at - self._clock.monotonic_seconds())
        )

    def _hang_up(self, run: SidecarConnection) -> None:
        with self._lock:
            if self._run is run:
                self._run = None
        run.wire.close()

    def _call_in_background(self) -> None:
        """A connection on which every namespace is open, for those who must not wait."""
        self._touch.wanted = False
        try:
            run = self._run
            if run is None or run.wire.closed:
                run = self._connect_once(self._limits.connect)
            for number in range(len(self._opened) if run is not None else 0):
                assert run is not None
                try:
                    self._number(run, number, self._time(self._limits.connect))
                except Unavailable as away:
                    if away.reason not in (MissReason.UNSUPPORTED, MissReason.KEY_MISMATCH):
                        raise
            self._touch.wanted = run is None
        except Unavailable:  # closed, or it was gone again
            self._touch.wanted = not self.closed
