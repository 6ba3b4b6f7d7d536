"""A `Door` whose store is another process on this host: the sidecar (floor 2).

Keys go out, places and digests come back; payloads are read and written in extents that are mapped here, readable ones
read-only. The handle above verifies its own copies, as it does in the store's own process.

Nothing here fails an engine's request. While the sidecar is away every question is a miss (`unreachable`), every answer
that is late is one (`deadline`); it is called again after a pause that grows, and namespaces are opened anew on each
connection. What was leased on one that broke is not readable any more. What is submitted asks no question of a sidecar
that is away: a thread calls it in the background. Must import without torch, and quickly.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec

from kvstore.door import Grant, Joint, LeaseReply, MatchReply, ReserveReply, Submitted
from kvstore.errors import BadInput, StoreClosed, TurnedAway, Unreachable
from kvstore.identity import Namespace
from kvstore.miss import MissReason
from kvstore.pending import Answered
from kvstore.requests import Requests
from kvstore.service import messages as m
from kvstore.service.bell import BellEnd
from kvstore.service.run import Asked, Away, Run, Steps, spans, taken
from kvstore.service.wire import Clock, TooLate, Wire, drained
from tiering.tier import FrameSpan

R = TypeVar("R")
MAX_DEADLINE_MS = 60_000.0
SENT_BLOCKS = 1024
"""Of a longer chain that is put in pieces, a message names so many blocks, the last ones: those before are there."""
MOVING_SHARE = 10
"""While memory moves to other clients, a sidecar that rings no bell is asked so many times as often."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How long a call may take, in seconds. connect: until the sidecar says welcome. match: for a look-up. lease:
    beyond the deadline of the lease itself; both are longer for long chains (`Run.allowance`). fill: for
    room, which may have to be made, and for commits. drop: for a namespace to be forgotten. open: how long a new
    namespace waits for a sidecar that is not there yet. first_pause, longest_pause: before it is called again. ping:
    how often it is asked, by a thread, what memory is to be let go of, and undone what nobody waits for.
    """

    connect: float = 1.0
    match: float = 0.05
    lease: float = 0.05
    fill: float = 5.0
    drop: float = m.DROP_SECONDS
    open: float = 10.0
    first_pause: float = 0.02
    longest_pause: float = 1.0
    ping: float = 0.5


@dataclass(frozen=True, slots=True)
class _Opened:
    """A namespace as this client opened it first."""

    namespace: Namespace
    payload_bytes: tuple[int, ...]
    grant: Grant


@dataclass(frozen=True, slots=True)
class _Held:
    """A lease of this process: the connection that it holds it on, and the sidecar's number of it."""

    run: Run
    lease: int


class _Touch:
    """What the thread in the background is told. wanted: there is no connection, and somebody asked for one. is_moving:
    memory was let go of when it looked last, and more may follow."""

    def __init__(self) -> None:
        self.ended = False
        self.wanted = False
        self.is_moving = False
        self.nudge = threading.Event()


class RemoteDoor:
    """`Door` to a sidecar. Thread-safe; a forked child gets a connection of its own, in the same session."""

    direct = None

    def __init__(self, path: str, engine: str, session: bytes, clock: Clock, limits: CallLimits) -> None:
        """session: the token of the engine's session."""
        self.session = session
        self.requests = Requests()
        self._path = path
        self._engine = engine
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._run: Run | None = None
        self._opened: list[_Opened] = []
        self._pause = limits.first_pause
        self._next_call_at = 0.0
        self._numbers = count(1)
        self._held: dict[int, _Held] = {}  # by this client's own numbers, which never name anything else
        self._abandoned: deque[int] = deque()
        self._forsaken: deque[Asked[Any]] = deque()
        self._touch = _Touch()
        self._touching: threading.Thread | None = None
        self._why = "it was not called yet"
        self._turned_away = False
        self.closed = False
        _doors.add(self)

    # The contract --------------------------------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace, payload_bytes: Sequence[int]) -> Grant:
        """Raises `Unreachable` and what the sidecar says of it."""
        payloads = tuple(payload_bytes)
        try:
            run = self._running(waits=True)
            grant = self._open(run, namespace, payloads, self._limits.connect)
        except Away as away:
            hint = "" if self._turned_away else "; start the sidecar (kvstore serve), or check the path"
            raise Unreachable(f"{away.detail}{hint}") from None
        if grant.payload_bytes != payloads:
            raise BadInput(f"the sidecar knows this namespace with payloads of {grant.payload_bytes}, not {payloads}")
        with self._lock:
            number = len(self._opened)
            self._opened.append(_Opened(namespace, payloads, grant))
            run.namespaces[number] = grant.number
            self._keep_in_touch()
        return Grant(number, grant.identity_key, grant.stamps, grant.payload_bytes, grant.durable)

    commits_early = True
    """The sidecar seals them while the next ones are being filled."""

    def match(self, number: int, keys: Sequence[bytes]) -> MatchReply:
        """As `Door.match`; a sidecar that does not answer has nothing."""
        try:
            run = self._running()
            seconds = self._limits.match + self._allowance(run, keys)
            verb = m.Match(self._number(run, number, seconds), list(keys[: run.max_keys]))
            return _matched(run.ask(verb, m.Matched, seconds).reply, len(keys), run.max_keys)
        except Away as away:
            return MatchReply(0, reason=away.reason, detail=away.detail)

    def present(self, number: int, keys: Sequence[bytes]) -> int:
        """As `Door.present`."""
        try:
            run = self._running()
            seconds = self._limits.match + self._allowance(run, keys)
            verb = m.Match(self._number(run, number, seconds), list(keys[: run.max_keys]), counts=False)
            return run.ask(verb, m.Matched, seconds).reply.blocks
        except Away:
            return 0

    def lease(
        self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float, request: str = ""
    ) -> LeaseReply:
        """As `Door.lease`."""
        try:
            run = self._running()
            wait_ms = min(float(deadline_ms), MAX_DEADLINE_MS)
            seconds = wait_ms / 1000 + self._limits.lease + self._allowance(run, keys)
            known = self._number(run, number, seconds)
            verb = m.Lease(known, list(keys), int(first_block), wait_ms, request)
            return run.walk(self._leasing(run, verb), seconds, self._limits.fill)
        except Away as away:
            return _no_lease(first_block, away.reason, away.detail)

    def submit_match(self, number: int, keys: Sequence[bytes], deadline_ms: float) -> Submitted[MatchReply]:
        """As `Door.submit_match`. Waits for nothing: without a connection it is a miss, and one is made meanwhile."""

        def steps(run: Run, known: int) -> Steps[MatchReply]:
            reply = taken((yield m.Match(known, list(keys[: run.max_keys]))), m.Matched).reply
            return _matched(reply, len(keys), run.max_keys)

        seconds = min(float(deadline_ms), MAX_DEADLINE_MS) / 1000
        return self._submit(number, keys, steps, seconds, _no_match)

    def submit_lease(
        self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float, request: str = ""
    ) -> Submitted[LeaseReply]:
        """As `Door.submit_lease`; see `submit_match`."""
        wait_ms = min(float(deadline_ms), MAX_DEADLINE_MS)

        def steps(run: Run, known: int) -> Steps[LeaseReply]:
            return self._leasing(run, m.Lease(known, list(keys), int(first_block), wait_ms, request))

        seconds = wait_ms / 1000 + self._limits.lease
        return self._submit(number, keys, steps, seconds, partial(_no_lease, first_block))

    def named(self, lease: int) -> tuple[bytes, int]:
        """As `Door.named`."""
        held = self._held.get(lease)
        return (held.run.name, held.lease) if held is not None else (b"", 0)

    def attach(self, run: bytes, reply: LeaseReply) -> LeaseReply:
        """As `Door.attach`."""
        try:
            here = self._running()
            if here.name != run:
                return _no_lease(reply.first_block, MissReason.STALE_HINT, "it is of another run of the sidecar")
            if not here.attach(reply.lease, reply.places, self._limits.match, self._limits.fill):
                return _no_lease(reply.first_block, MissReason.STALE_HINT, "nobody of this session holds it any more")
            return self._hold(here, reply)
        except Away as away:
            return _no_lease(reply.first_block, away.reason, away.detail)

    def release(self, lease: int) -> None:
        """As `Door.release`; nobody waits for it."""
        held = self._held.pop(lease, None)
        if held is not None:
            held.run.let_go(held.lease)

    def abandon(self, lease: int) -> None:
        """As `Door.abandon`."""
        self._abandoned.append(lease)

    def is_within_reach(self, lease: int) -> bool:
        """As `Door.is_within_reach`: whether the connection on which it was leased is there."""
        held = self._held.get(lease)
        return held is not None and held.run is self._run and not held.run.wire.closed

    def report(self, lease: int, block: int, part: int) -> None:
        """As `Door.report`. Waits for the answer: the lease must not be released before it is looked at."""
        held = self._held.get(lease)
        if held is not None:
            try:
                held.run.ask(m.Report(held.lease, block, part), m.Done, self._limits.connect)
            except Away:
                pass

    def reserve(
        self,
        number: int,
        keys: Sequence[bytes],
        first_block: int,
        priority: int,
        ttl_seconds: float | None,
        joint: Joint | None = None,
    ) -> ReserveReply:
        """As `Door.reserve`."""
        try:
            run = self._running()
            ttl = float(ttl_seconds) if ttl_seconds is not None else None
            known = self._number(run, number, self._limits.fill)
            name, parts = (joint.name, list(joint.parts)) if joint is not None else ("", [])
            sent = list(keys[: run.max_keys])
            first = min(int(first_block), len(sent))
            verb = m.Reserve(known, sent, first, int(priority), ttl, name, parts)
            skipped = len(sent) - SENT_BLOCKS
            is_plain = joint is None and ttl is None and priority <= 0
            if run.may_skip and is_plain and skipped > 0:
                first = max(first, skipped)
                short = msgspec.structs.replace(verb, keys=sent[skipped:], first_block=first, skipped=skipped)
                reply = run.ask(short, m.Reserved, self._limits.fill).reply
                if not reply.reservation and reply.present <= skipped:  # what was skipped is not there any more
                    reply = run.ask(verb, m.Reserved, self._limits.fill).reply
            else:
                reply = run.ask(verb, m.Reserved, self._limits.fill).reply
            if len(keys) > len(sent) and reply.reason is None:
                reason = MissReason.UNSUPPORTED
                reply = msgspec.structs.replace(reply, stopped_at=len(sent), reason=reason)
            if reply.reservation:
                run.reservations[reply.reservation] = reply
                try:
                    run.walk(run.mapping(reply.places, writable=True), self._limits.fill, self._limits.fill)
                except BaseException:
                    self.abort(reply.reservation)
                    raise
            return reply
        except Away as away:
            return ReserveReply(0, 0, stopped_at=0, reason=away.reason)

    def commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> int:
        """As `Door.commit`."""
        run = self._run
        reply = run.reservations.get(reservation) if run is not None else None
        if run is None or reply is None:
            return 0
        try:
            verb = m.Commit(reservation, part, first, [list(block) for block in digests])
            committed = run.ask(verb, m.Counted, self._limits.fill).blocks
        except Away:
            return 0
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
            run = self._running()
            verb = m.Persist(self._number(run, number, self._limits.fill), list(keys[: run.max_keys]), seconds)
            answer = run.ask(verb, m.Persisted, seconds + self._limits.fill)
            is_cut = answer.reason is None and len(keys) > run.max_keys
            return answer.blocks, MissReason.UNSUPPORTED if is_cut else answer.reason
        except Away as away:
            return 0, away.reason

    def abort(self, reservation: int) -> None:
        """As `Door.abort`."""
        run = self._run
        if run is not None and reservation in run.reservations:
            del run.reservations[reservation]
            run.post(m.Abort(reservation))

    def spans(self, places: Sequence[int]) -> list[FrameSpan]:
        """As `Door.spans`. Raises `StoreClosed` where the connection on which they were leased is gone."""
        run = self._run
        if run is None:
            raise StoreClosed("the connection is gone")
        return spans(run.readable, places)

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
            raise StoreClosed("the memory of the reservation is gone")
        return found

    # Beyond it -----------------------------------------------------------------------------------------------------

    def drop(self, number: int) -> int:
        """Forget every block of a namespace. Raises `Unreachable`, also where that was not over in time."""
        try:
            run = self._running()
            verb = m.Drop(self._number(run, number, self._limits.connect), self._limits.drop)
            return run.ask(verb, m.Counted, self._limits.drop + self._limits.fill).blocks
        except Away as away:
            raise Unreachable(f"{self._path}: {away.detail}") from None

    def close(self) -> None:
        """Hang up; every further question is a miss."""
        self._touch.ended = True
        self._touch.nudge.set()
        with self._lock:
            self.closed = True
            run, self._run = self._run, None
        if run is not None:
            run.close()

    def forget(self) -> None:
        """In a forked child: connection and leases are the parent's, memory is let go of."""
        self._lock = threading.Lock()
        self._touch, self._touching = _Touch(), None
        run, self._run = self._run, None
        self._held.clear()
        self._abandoned.clear()
        self._next_call_at = 0.0
        if run is not None:
            run.forget()
        self._forsaken.clear()

    # Inside --------------------------------------------------------------------------------------------------------

    def _running(self, *, waits: bool = False) -> Run:
        """The connection, made anew if need be. Raises `Away`."""
        run = self._run
        if run is None or run.wire.closed:
            run = self._connect(waits)
        retired = run.wire.retired()
        if retired:
            run.unmap(retired)
        self._settle(run)
        return run

    def _settle(self, run: Run) -> None:
        """Give back what was forgotten, or came too late. Waits for nothing."""
        for lease in drained(self._abandoned):
            self.release(lease)
        for asked in drained(self._forsaken):
            asked.cancel()
        run.settle()

    def _submit(
        self,
        number: int,
        keys: Sequence[bytes],
        steps: Callable[[Run, int], Steps[R]],
        seconds: float,
        missed: Callable[[MissReason, str], R],
    ) -> Submitted[R]:
        """Ask without waiting for anything."""
        run = self._run
        if self.closed:
            return Answered(missed(MissReason.DISABLED, "the store is closed"))
        known = run.namespaces.get(number) if run is not None and not run.wire.closed else None
        if run is None or known is None:
            self._touch.wanted = True
            self._keep_in_touch()
            self._touch.nudge.set()
            return Answered(missed(MissReason.UNREACHABLE, "there is no connection to the sidecar; it is being called"))
        self._settle(run)
        seconds += self._allowance(run, keys)
        try:
            # What is leased is there; only its memory has to be mapped here, which is done once.
            return Asked(run, steps(run, known), self._clock, seconds, self._limits.connect, missed, self._forsaken)
        except Away as away:
            return Answered(missed(away.reason, away.detail))

    def _allowance(self, run: Run, keys: Sequence[bytes]) -> float:
        """Seconds more, for a chain of that many blocks."""
        return run.allowance(len(keys), self._clock.monotonic_seconds())

    def _leasing(self, run: Run, verb: m.Lease) -> Steps[LeaseReply]:
        if len(verb.keys) > run.max_keys:  # they were found on another connection
            raise Away(MissReason.UNSUPPORTED, f"{len(verb.keys)} blocks; this sidecar takes {run.max_keys}")
        reply = yield from run.leasing(verb)
        return self._hold(run, reply) if reply.lease else reply

    def _hold(self, run: Run, reply: LeaseReply) -> LeaseReply:
        """A lease that the connection holds, as one of this client's."""
        number = next(self._numbers)
        self._held[number] = _Held(run, reply.lease)
        return msgspec.structs.replace(reply, lease=number)

    def _connect(self, waits: bool) -> Run:
        limits = self._limits
        give_up_at = self._clock.monotonic_seconds() + (limits.open if waits else 0.0)
        while True:
            run = self._connect_once(limits.connect if waits else limits.match)
            if run is not None:
                return run
            now = self._clock.monotonic_seconds()
            if now >= give_up_at:
                raise Away(MissReason.UNREACHABLE, self._why)
            self._clock.sleep(max(limits.first_pause, min(self._next_call_at, give_up_at) - now))

    def _connect_once(self, seconds: float) -> Run | None:
        """The connection, called for at most that long if it is time for it. One thread calls, others do not wait."""
        if self.closed:
            raise Away(MissReason.DISABLED, "the store is closed")
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
                self._run = run = Run(Wire(self._path, self._engine, self.session, self._clock, seconds))
                self._pause = self._limits.first_pause
                self._keep_in_touch()
                self._touch.nudge.set()  # it asks for a bell
                return run
            except Unreachable as error:
                self._why = str(error)
                self._turned_away = isinstance(error, TurnedAway)
                self._next_call_at = self._clock.monotonic_seconds() + self._pause
                self._pause = min(2 * self._pause, self._limits.longest_pause)
                return None
        finally:
            self._lock.release()

    def _number(self, run: Run, number: int, seconds: float) -> int:
        """The sidecar's number of a namespace, which is opened first on a new connection, in that time at most.

        Raises `Away`.
        """
        known = run.namespaces.get(number)
        if known is not None:
            return known
        opened = self._opened[number]
        try:
            grant = self._open(run, opened.namespace, opened.payload_bytes, min(seconds, self._limits.connect))
        except BadInput as error:
            raise Away(MissReason.UNSUPPORTED, str(error)) from None
        same = (grant.identity_key, grant.stamps, grant.payload_bytes)
        if same != (opened.grant.identity_key, opened.grant.stamps, opened.grant.payload_bytes):
            raise Away(MissReason.KEY_MISMATCH, "the sidecar has other keys than before")
        run.namespaces[number] = grant.number
        return grant.number

    def _open(self, run: Run, namespace: Namespace, payload_bytes: Sequence[int], seconds: float) -> Grant:
        verb = m.OpenNamespace(namespace.pack(), list(payload_bytes))
        answered = run.answer(verb, seconds)
        if isinstance(answered.answer, m.Failed) and answered.answer.fault is m.Fault.BAD_INPUT:
            raise BadInput(answered.answer.text)
        return taken(answered, m.Granted).grant

    # In the background ---------------------------------------------------------------------------------------------

    def _keep_in_touch(self) -> None:
        """Have a thread that asks now and then, and calls the sidecar where somebody wants it and must not wait."""
        if self._touching is None:
            given = weakref.ref(self), self._touch, self._limits
            self._touching = threading.Thread(target=_touch, args=given, name="kv-client", daemon=True)
            self._touching.start()

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
            self._ping(run)
        if not self._touch.wanted:
            return self._limits.ping / MOVING_SHARE if self._touch.is_moving else self._limits.ping
        return min(
            self._limits.ping, max(self._limits.first_pause, self._next_call_at - self._clock.monotonic_seconds())
        )

    def _hang_up(self, run: Run) -> None:
        with self._lock:
            if self._run is run:
                self._run = None
        run.wire.close()

    def _ping(self, run: Run) -> None:
        """Let go of memory also while nobody asks for anything: others may be waiting for it."""
        self._settle(run)
        try:
            answered = run.wire.call(m.Ping(run.bell is None), self._limits.connect)
        except TooLate:
            return
        except Unreachable:
            self._touch.nudge.set()  # it is gone: its memory is let go of at once
            return
        for descriptor in answered.descriptors:
            self._listen(run, descriptor)
        retired = run.wire.retired()
        run.unmap(retired)
        self._settle(run)
        self._touch.is_moving = bool(retired) and run.bell is None

    def _listen(self, run: Run, descriptor: int) -> None:
        """Ask at once whenever the sidecar has something to tell, from now on."""
        run.bell = bell = BellEnd(descriptor)
        try:
            threading.Thread(target=_hear, args=(bell, self._touch.nudge), name="kv-bell", daemon=True).start()
        except RuntimeError:  # no thread to be had: it is asked now and then
            bell.close()
            run.bell = None

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
                    self._number(run, number, self._limits.connect)
                except Away as away:
                    if away.reason not in (MissReason.UNSUPPORTED, MissReason.KEY_MISMATCH):
                        raise
            self._touch.wanted = run is None
        except Away:  # closed, or it was gone again
            self._touch.wanted = not self.closed


def _matched(reply: MatchReply, blocks: int, most: int) -> MatchReply:
    """What a look-up found of a chain of so many blocks, of which no more than `most` were asked for."""
    if reply.reason is not None or blocks <= most:
        return reply
    text = f"a prompt of {blocks} blocks; the sidecar keeps and finds the first {most}: use larger blocks"
    return msgspec.structs.replace(reply, reason=MissReason.UNSUPPORTED, detail=text)


def _no_match(reason: MissReason, detail: str) -> MatchReply:
    return MatchReply(0, reason=reason, detail=detail)


def _no_lease(first_block: int, reason: MissReason, detail: str) -> LeaseReply:
    return LeaseReply(0, first_block, 0, reason=reason, detail=detail)


def _touch(door: weakref.ref[RemoteDoor], touch: _Touch, limits: CallLimits) -> None:
    """Until the door is closed or forgotten."""
    seconds = limits.ping
    while not touch.ended:
        touch.nudge.wait(seconds)
        touch.nudge.clear()
        there = door()
        if there is None or touch.ended:
            return
        seconds = there.look_after()
        del there


def _hear(bell: BellEnd, nudge: threading.Event) -> None:
    """Until the sidecar hangs up."""
    while bell.wait():
        nudge.set()
    bell.close()
    nudge.set()  # it may be gone


_doors: weakref.WeakSet[RemoteDoor] = weakref.WeakSet()


def _forget_all() -> None:
    for door in list(_doors):
        door.forget()


os.register_at_fork(after_in_child=_forget_all)
