"""The client of the sidecar: a `Door` whose store is another process on this host (floor 2).

Keys go out, places and digests come back; payloads are read and written in extents that are mapped here, readable ones
read-only. The handle above verifies its own copies, as it does in the store's own process.

Nothing here fails an engine's request. While the sidecar is away every question is a miss (`unreachable`), every answer
that is late is one (`deadline`); it is called again after a pause that grows, and namespaces are opened anew on each
connection. What was leased on one that broke is not readable any more. Must import without torch, and quickly.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from kvstore.door import Grant, LeaseReply, MatchReply, ReserveReply
from kvstore.errors import BadInput, StoreClosed, Unreachable
from kvstore.handle import NamespaceHandle
from kvstore.identity import Namespace
from kvstore.layout import Layout
from kvstore.miss import MissReason
from kvstore.pages import Codec
from kvstore.service import messages as m
from kvstore.service.wire import Answered, Clock, TooLate, TooLong, Wire
from tiering.errors import TierError
from tiering.extents import MappedExtent
from tiering.tier import SLOT_BITS, FrameSpan

A = TypeVar("A")
MAX_DEADLINE_MS = 60_000.0
_OTHER_KIND = "an answer of another kind"


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How long a call may take, in seconds. connect: until the sidecar says welcome. match: for a look-up. lease:
    beyond the deadline of the lease itself. fill: for room, which may have to be made, and for commits. drop: for a
    namespace to be forgotten. open: how long
    a new namespace waits for a sidecar that is not there yet. first_pause, longest_pause: before it is called again.
    ping: how often it is asked, by a thread, what memory is to be let go of.
    """

    connect: float = 1.0
    match: float = 0.05
    lease: float = 0.05
    fill: float = 5.0
    drop: float = m.DROP_SECONDS
    open: float = 10.0
    first_pause: float = 0.02
    longest_pause: float = 1.0
    ping: float = 0.25


class _Away(Exception):
    """A question that was not answered, and as what miss that counts."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class _Opened:
    """A namespace as this client opened it first."""

    namespace: Namespace
    payload_bytes: tuple[int, ...]
    grant: Grant


class _Run:
    """What holds on one connection: the numbers that the sidecar gave, and its memory as it is mapped here."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.namespaces: dict[int, int] = {}  # this client's number -> the sidecar's
        self.readable: dict[int, tuple[MappedExtent, int]] = {}  # by number: the extent, and the bytes of its frames
        self.writable: dict[int, tuple[MappedExtent, int]] = {}
        self.leases: set[int] = set()  # what was granted on this very connection; other numbers mean nothing to it
        self.reservations: set[int] = set()

    def unmap(self, numbers: Iterable[int]) -> None:
        """These were given back; who still reads in one keeps it for as long."""
        for number in numbers:
            self.readable.pop(number, None)
            self.writable.pop(number, None)


class RemoteDoor:
    """`Door` to a sidecar. Thread-safe; a forked child gets a connection of its own."""

    direct = None

    def __init__(self, path: str, engine: str, clock: Clock, limits: CallLimits) -> None:
        self._path = path
        self._engine = engine
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self._opened: list[_Opened] = []
        self._pause = limits.first_pause
        self._next_call_at = 0.0
        self._abandoned: deque[int] = deque()
        self._ended = threading.Event()
        self._pinging: threading.Thread | None = None
        self._why = "it was not called yet"
        self.closed = False
        _doors.add(self)

    # The contract --------------------------------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace, payload_bytes: Sequence[int]) -> Grant:
        """Raises `Unreachable` and what the sidecar says of it."""
        payloads = tuple(payload_bytes)
        try:
            run = self._running(waits=True)
            grant = self._open(run, namespace, payloads)
        except _Away as away:
            raise Unreachable(f"{away.detail}; start the sidecar (kvstore serve), or check the path") from None
        if grant.payload_bytes != payloads:
            raise BadInput(f"the sidecar knows this namespace with payloads of {grant.payload_bytes}, not {payloads}")
        with self._lock:
            number = len(self._opened)
            self._opened.append(_Opened(namespace, payloads, grant))
            run.namespaces[number] = grant.number
        return Grant(number, grant.identity_key, grant.stamps, grant.payload_bytes, grant.durable)

    def match(self, number: int, keys: Sequence[bytes]) -> MatchReply:
        """As `Door.match`; a sidecar that does not answer has nothing."""
        try:
            run = self._running()
            return self._ask(run, m.Match(self._number(run, number), list(keys)), m.Matched, self._limits.match).reply
        except _Away as away:
            return MatchReply(0, reason=away.reason, detail=away.detail)

    def present(self, number: int, keys: Sequence[bytes]) -> int:
        """As `Door.present`."""
        try:
            run = self._running()
            verb = m.Match(self._number(run, number), list(keys), counts=False)
            return self._ask(run, verb, m.Matched, self._limits.match).reply.blocks
        except _Away:
            return 0

    def lease(self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float) -> LeaseReply:
        """As `Door.lease`."""
        try:
            run = self._running()
            wait_ms = min(float(deadline_ms), MAX_DEADLINE_MS)
            verb = m.Lease(self._number(run, number), list(keys), int(first_block), wait_ms)
            reply = self._ask(run, verb, m.Leased, wait_ms / 1000 + self._limits.lease).reply
            if reply.lease:
                run.leases.add(reply.lease)
                try:
                    self._map(run, reply.places, writable=False)
                except BaseException:
                    self.release(reply.lease)
                    raise
            return reply
        except _Away as away:
            return LeaseReply(0, first_block, 0, reason=away.reason, detail=away.detail)

    def release(self, lease: int) -> None:
        """As `Door.release`; nobody waits for it."""
        run = self._run
        if run is not None and lease in run.leases:
            run.leases.discard(lease)
            self._post(run, m.Release([lease]))

    def abandon(self, lease: int) -> None:
        """As `Door.abandon`."""
        self._abandoned.append(lease)

    def report(self, lease: int, block: int, part: int) -> None:
        """As `Door.report`. Waits for the answer: the lease must not be released before it is looked at."""
        run = self._run
        if run is not None and lease in run.leases:
            try:
                self._ask(run, m.Report(lease, block, part), m.Done, self._limits.connect)
            except _Away:
                pass

    def reserve(
        self, number: int, keys: Sequence[bytes], first_block: int, priority: int, ttl_seconds: float | None
    ) -> ReserveReply:
        """As `Door.reserve`."""
        try:
            run = self._running()
            ttl = float(ttl_seconds) if ttl_seconds is not None else None
            verb = m.Reserve(self._number(run, number), list(keys), int(first_block), int(priority), ttl)
            reply = self._ask(run, verb, m.Reserved, self._limits.fill).reply
            if reply.reservation:
                run.reservations.add(reply.reservation)
                try:
                    self._map(run, reply.places, writable=True)
                except BaseException:
                    self.abort(reply.reservation)
                    raise
            return reply
        except _Away as away:
            return ReserveReply(0, 0, stopped_at=0, reason=away.reason)

    def commit(self, reservation: int, part: int, digests: Sequence[Sequence[bytes]]) -> int:
        """As `Door.commit`."""
        run = self._run
        if run is None or reservation not in run.reservations:
            return 0
        try:
            verb = m.Commit(reservation, part, [list(block) for block in digests])
            return self._ask(run, verb, m.Counted, self._limits.fill).blocks
        except _Away:
            return 0

    def persist(self, number: int, keys: Sequence[bytes], seconds: float) -> tuple[int, MissReason | None]:
        """As `Door.persist`."""
        try:
            run = self._running()
            verb = m.Persist(self._number(run, number), list(keys), seconds)
            answer = self._ask(run, verb, m.Persisted, seconds + self._limits.fill)
            return answer.blocks, answer.reason
        except _Away as away:
            return 0, away.reason

    def abort(self, reservation: int) -> None:
        """As `Door.abort`."""
        run = self._run
        if run is not None and reservation in run.reservations:
            run.reservations.discard(reservation)
            self._post(run, m.Abort(reservation))

    def spans(self, places: Sequence[int]) -> list[FrameSpan]:
        """As `Door.spans`. Raises `StoreClosed` where the connection on which they were leased is gone."""
        run = self._run
        return self._spans(run.readable if run is not None else {}, places)

    def spans_to_fill(self, places: Sequence[int]) -> list[FrameSpan]:
        """As `Door.spans_to_fill`; see `spans`."""
        run = self._run
        spans = self._spans(run.writable if run is not None else {}, places)
        if len(spans) < len(places):  # reserved on another connection, or the sidecar went on without waiting
            raise StoreClosed("the memory of the reservation is gone")
        return spans

    # Beyond it -----------------------------------------------------------------------------------------------------

    def drop(self, number: int) -> int:
        """Forget every block of a namespace. Raises `Unreachable`, also where that was not over in time."""
        try:
            run = self._running()
            verb = m.Drop(self._number(run, number), self._limits.drop)
            return self._ask(run, verb, m.Counted, self._limits.drop + self._limits.fill).blocks
        except _Away as away:
            raise Unreachable(f"{self._path}: {away.detail}") from None

    def close(self) -> None:
        """Hang up; every further question is a miss."""
        self._ended.set()
        with self._lock:
            self.closed = True
            run, self._run = self._run, None
        if run is not None:
            run.wire.close()

    def forget(self) -> None:
        """In a forked child: connection and leases are the parent's, memory is let go of."""
        self._lock = threading.Lock()
        self._ended, self._pinging = threading.Event(), None
        run, self._run = self._run, None
        self._abandoned.clear()
        self._next_call_at = 0.0
        if run is not None:
            run.wire.forget()

    # Inside --------------------------------------------------------------------------------------------------------

    def _running(self, *, waits: bool = False) -> _Run:
        """The connection, made anew if need be. Raises `_Away`."""
        run = self._run
        if run is None or run.wire.closed:
            run = self._connect(waits)
        retired = run.wire.retired()
        if retired:
            run.unmap(retired)
        while self._abandoned:
            self.release(self._abandoned.popleft())
        for undo in run.wire.too_late():
            self._post(run, undo)
        return run

    def _connect(self, waits: bool) -> _Run:
        limits = self._limits
        give_up_at = self._clock.monotonic_seconds() + (limits.open if waits else 0.0)
        while True:
            run = self._connect_once(limits.connect if waits else limits.match)
            if run is not None:
                return run
            now = self._clock.monotonic_seconds()
            if now >= give_up_at:
                raise _Away(MissReason.UNREACHABLE, self._why)
            self._clock.sleep(max(limits.first_pause, min(self._next_call_at, give_up_at) - now))

    def _connect_once(self, seconds: float) -> _Run | None:
        """The connection, called for at most that long if it is time for it. One thread calls, others do not wait."""
        if self.closed:
            raise _Away(MissReason.DISABLED, "the store is closed")
        if not self._lock.acquire(timeout=seconds):
            return None
        try:
            run = self._run
            if run is not None and not run.wire.closed:
                return run  # somebody else was faster
            if run is not None:
                self._run = None
                run.wire.close()
            if self._clock.monotonic_seconds() < self._next_call_at:
                return None
            try:
                self._run = run = _Run(Wire(self._path, self._engine, b"", self._clock, seconds))
                self._pause = self._limits.first_pause
                return run
            except Unreachable as error:
                self._why = str(error)
                self._next_call_at = self._clock.monotonic_seconds() + self._pause
                self._pause = min(2 * self._pause, self._limits.longest_pause)
                return None
        finally:
            self._lock.release()

    def _number(self, run: _Run, number: int) -> int:
        """The sidecar's number of a namespace, which is opened first on a new connection. Raises `_Away`."""
        known = run.namespaces.get(number)
        if known is not None:
            return known
        opened = self._opened[number]
        try:
            grant = self._open(run, opened.namespace, opened.payload_bytes)
        except BadInput as error:
            raise _Away(MissReason.UNSUPPORTED, str(error)) from None
        same = (grant.identity_key, grant.stamps, grant.payload_bytes)
        if same != (opened.grant.identity_key, opened.grant.stamps, opened.grant.payload_bytes):
            raise _Away(MissReason.KEY_MISMATCH, "the sidecar has other keys than before")
        run.namespaces[number] = grant.number
        return grant.number

    def _open(self, run: _Run, namespace: Namespace, payload_bytes: Sequence[int]) -> Grant:
        verb = m.OpenNamespace(namespace.pack(), list(payload_bytes))
        answer = self._answer(run, verb, self._limits.connect).answer
        if isinstance(answer, m.Failed) and answer.fault is m.Fault.BAD_INPUT:
            raise BadInput(answer.text)
        if not isinstance(answer, m.Granted):
            raise _Away(MissReason.UNREACHABLE, answer.text if isinstance(answer, m.Failed) else _OTHER_KIND)
        return answer.grant

    def _ask(self, run: _Run, verb: m.Verb, kind: type[A], seconds: float) -> A:
        """Raises `_Away`."""
        answer = self._answer(run, verb, seconds).answer
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, m.Failed):
            reason = MissReason.DISABLED if answer.fault is m.Fault.CLOSED else MissReason.UNREACHABLE
            raise _Away(reason, answer.text)
        raise _Away(MissReason.UNREACHABLE, _OTHER_KIND)

    def _answer(self, run: _Run, verb: m.Verb, seconds: float) -> Answered:
        try:
            return run.wire.call(verb, seconds)
        except TooLate:
            raise _Away(MissReason.DEADLINE, "the sidecar did not answer in time") from None
        except TooLong as error:
            raise _Away(MissReason.UNSUPPORTED, f"a message of {error} bytes, which is too long") from None
        except Unreachable as error:
            raise _Away(MissReason.UNREACHABLE, str(error)) from None

    def _post(self, run: _Run, verb: m.Verb) -> None:
        try:
            run.wire.post(verb)
        except Unreachable:
            pass

    def _ping(self) -> None:
        """Let go of memory also while nobody asks for anything: others may be waiting for it."""
        run = self._run
        if run is None or run.wire.closed:
            return
        try:
            run.wire.call(m.Ping(), self._limits.connect)
            run.unmap(run.wire.retired())
        except (TooLate, Unreachable):
            pass

    def _map(self, run: _Run, places: Sequence[Sequence[int]], *, writable: bool) -> None:
        """Have the extents of these places mapped. Raises `_Away`."""
        table = run.writable if writable else run.readable
        missing = sorted({place >> SLOT_BITS for column in places for place in column} - table.keys())
        if missing and self._pinging is None:
            with self._lock:
                if self._pinging is None:
                    given = weakref.ref(self), self._ended, self._limits.ping
                    self._pinging = threading.Thread(target=_keep_in_touch, args=given, name="kv-client", daemon=True)
                    self._pinging.start()
        for first in range(0, len(missing), m.MAX_EXTENTS):
            answered = self._answer(run, m.Extents(missing[first : first + m.MAX_EXTENTS], writable), self._limits.fill)
            if not isinstance(answered.answer, m.ExtentsReply):
                raise _Away(MissReason.UNREACHABLE, "no memory was handed over")
            left = deque(answered.descriptors)
            try:
                for extent in answered.answer.extents:
                    mapped = MappedExtent(left.popleft(), extent.size_bytes, writable=writable)
                    table[extent.number] = mapped, extent.frame_bytes
            except TierError as error:
                raise _Away(MissReason.UNREACHABLE, str(error)) from None
            finally:
                for descriptor in left:
                    os.close(descriptor)

    def _spans(self, table: Mapping[int, tuple[MappedExtent, int]], places: Sequence[int]) -> list[FrameSpan]:
        if self._run is None:
            raise StoreClosed("the connection is gone")
        spans = []
        for place in places:
            known = table.get(place >> SLOT_BITS)
            if known is None:
                break
            extent, frame_bytes = known
            spans.append(extent.frame(place & (1 << SLOT_BITS) - 1, frame_bytes))
        return spans


class SidecarStore:
    """A store in another process on this host. Close it, or use it as a context."""

    def __init__(self, door: RemoteDoor, codecs: Callable[[str], Codec]) -> None:
        self._door = door
        self._codecs = codecs

    def namespace(
        self,
        *,
        model: str,
        layout: Layout,
        codec: str = "raw",
        weights_epoch: int = 0,
        config: Mapping[str, str] | None = None,
    ) -> NamespaceHandle:
        """As in an embedded store. Raises `Unreachable` where there is no sidecar, after some time."""
        namespace = Namespace(model, layout, codec, weights_epoch, dict(config or {}))
        return NamespaceHandle(self._door, namespace, self._codecs(codec))

    def drop(self, namespace: NamespaceHandle) -> int:
        """Evict a namespace from every tier; returns how many blocks it had."""
        if not isinstance(namespace, NamespaceHandle) or namespace.door is not self._door:
            raise BadInput("give a namespace that this store opened; drop others where they are from")
        return self._door.drop(namespace.number)

    def close(self) -> None:
        """Hang up. What is leased ends. Safe to call again."""
        self._door.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._door.closed

    def __enter__(self) -> SidecarStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_sidecar(path: str, *, codecs: Callable[[str], Codec], clock: Clock, engine: str = "") -> SidecarStore:
    """The store behind a socket. Nothing is asked of it before a namespace is opened."""
    return SidecarStore(RemoteDoor(path, engine, clock, CallLimits()), codecs)


def _keep_in_touch(door: weakref.ref[RemoteDoor], ended: threading.Event, seconds: float) -> None:
    """Until the door is closed or forgotten."""
    while not ended.wait(seconds):
        there = door()
        if there is None:
            return
        there._ping()
        del there


_doors: weakref.WeakSet[RemoteDoor] = weakref.WeakSet()


def _forget_all() -> None:
    for door in list(_doors):
        door.forget()


os.register_at_fork(after_in_child=_forget_all)
