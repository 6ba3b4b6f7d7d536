"""Requests answered later, by the event that ends them: waits for blocks that other clients store, and questions to
couriers.

They are parked in the store's table and at the couriers' desk, without a thread, and outside the limits of requests in
flight. A part of `dispatch`, and its contract with the part that fetches blocks from elsewhere (`kvstore.elsewhere`);
`DoorAwaits` has the connections that they are answered on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from kvstore.core.store import Store
from kvstore.protocol import messages as m
from kvstore.service.sessions import ClientState
from tiering.clock import Clock
from tiering.counts.awaits import AwaitEnd, ParkedAwait

AWAITS_SECONDS = 0.00025
"""How long the socket's thread answers ended awaits before it takes messages again."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, and descriptors to be sent with it and closed."""

    answer: m.Answer
    descriptors: Sequence[int] = ()
    parked: ParkedLocate | None = None
    """Set in place of an answer that comes later."""


@dataclass(eq=False, slots=True)
class ParkedLocate:
    """A `Locate` sent on to a courier. answer: None until it is over; then `tell` is called."""

    answer: m.Located | None = None
    tell: Callable[[ParkedLocate], object] = lambda one: None


@dataclass(eq=False, slots=True)
class LeftElsewhere:
    """What others may still hold of what was dropped here. line: for people, empty if it is nothing. not_reached: as in
    `Counted`."""

    line: str = ""
    not_reached: list[tuple[str, str]] = field(default_factory=list)

    def counted(self, blocks: int) -> m.Counted:
        """The answer to a drop or a purge of so many blocks here."""
        return m.Counted(blocks, self.line, self.not_reached)


Parked = ParkedAwait | ParkedLocate


class Elsewhere(Protocol):
    """Blocks from other nodes and remote engines (`kvstore.elsewhere`). Thread-safe."""

    verbs: Mapping[type, Callable[[ClientState, Any], Response | m.Answer]]
    """The couriers' verbs; they raise what the handlers here do."""

    @property
    def due_at(self) -> float:
        """When to call `expire` next."""
        ...

    def is_served(self, tenant: bytes) -> bool:
        """Whether a tenant has a courier for `locate` to ask."""
        ...

    def locate(self, caller: ClientState, verb: m.Locate) -> Response | m.Answer:
        """Ask a courier. Raises `BadInput`."""
        ...

    def park(
        self, caller: ClientState, number: int, verb: m.Await, tell: Callable[[ParkedAwait], object]
    ) -> ParkedAwait | Response:
        """As `Handlers.park`, for blocks to be fetched; number: of their namespace. Raises `BadInput`."""
        ...

    def awaited(self, one: ParkedAwait, answer: m.Awaited) -> m.Awaited:
        """The answer, with what is known about the fetch's end."""
        ...

    def cancel(self, ones: Iterable[ParkedLocate]) -> None:
        """End these waits."""
        ...

    def expire(self) -> None:
        """Answer the waits that have expired."""
        ...

    def tell_couriers(self) -> None:
        """Tell couriers which fetches were cancelled. Called often, by one thread."""
        ...

    def leased(self, lease: int) -> None:
        """An engine was granted this lease."""
        ...

    def left(self, caller: ClientState) -> None:
        """A connection closed."""
        ...

    def forgetting(self, tenant: bytes, digest: bytes) -> AbstractContextManager[LeftElsewhere]:
        """A context in which a namespace, or all of a tenant's, are dropped: for a purge couriers are asked before, for
        a drop after. It yields what others may still hold, complete when it ends."""
        ...


class Parking:
    """Requests that wait without a thread: awaits in the store's table, locates at the couriers' desk. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.elsewhere: Elsewhere | None = None

    def awaited(self, one: Parked) -> Response:
        """The answer to a request that is over."""
        if isinstance(one, ParkedLocate):
            assert one.answer is not None
            return Response(one.answer)
        answer = self._store.awaited(one)
        return Response(answer if self.elsewhere is None else self.elsewhere.awaited(one, answer))

    def cancel(self, ones: Sequence[Parked]) -> None:
        """End these waits."""
        self._store.awaits.end([one for one in ones if isinstance(one, ParkedAwait)], AwaitEnd.CANCELLED)
        if self.elsewhere is not None:
            self.elsewhere.cancel([one for one in ones if isinstance(one, ParkedLocate)])

    def end_all(self) -> None:
        self._store.awaits.end_all(AwaitEnd.GONE)

    @property
    def due_at(self) -> float:
        """When to call `expire` next, in monotonic seconds; inf if nothing is parked."""
        return min(self._store.awaits.due_at, self.elsewhere.due_at if self.elsewhere is not None else inf)

    def expire(self) -> None:
        """End those that have expired."""
        self._store.awaits.expire()
        if self.elsewhere is not None:
            self.elsewhere.expire()

    def left(self, caller: ClientState) -> None:
        if self.elsewhere is not None:
            self.elsewhere.left(caller)


class TenantShare(Protocol):
    """A tenant's service by the socket's thread."""

    @property
    def starts_at(self) -> float: ...

    def begin(self) -> None: ...

    def pay(self, cost: float) -> None: ...


class AwaitingSocket(Protocol):
    """A tenant's socket, or the couriers'."""

    @property
    def share(self) -> TenantShare: ...


class AwaitingConnection(Protocol):
    """A connection that parked requests are answered on. parked: by the number of the request."""

    parked: dict[int, Parked]
    closed: bool

    @property
    def listener(self) -> AwaitingSocket: ...


W = TypeVar("W", bound=AwaitingConnection)
Park = Callable[[ClientState, m.Await, Callable[[ParkedAwait], object]], ParkedAwait | Response]
"""`Handlers.park`."""


class DoorAwaits(Generic[W]):
    """The awaits of all connections. Only the socket's thread calls it, except `_told`. The least-served tenant is
    answered first, and pays as for a message."""

    def __init__(
        self,
        parking: Parking,
        park: Park,
        clock: Clock,
        wake: Callable[[], None],
        answer: Callable[..., object],
        watch: Callable[[W], object],
    ) -> None:
        """answer: sends (connection, number of the request, response). watch: called with each answered connection."""
        self._parking, self._park = parking, park
        self._clock = clock
        self._wake = wake
        self._answer, self._watch = answer, watch
        self.parked: dict[Parked, tuple[W, int]] = {}
        self.over: deque[Parked] = deque()
        """Ended ones that `deliver` has not seen."""
        self._lines: dict[AwaitingSocket, deque[Parked]] = {}

    def take(self, connection: W, caller: ClientState, number: int, verb: m.Await | m.Cancel) -> None:
        """Park a connection's request."""
        if isinstance(verb, m.Cancel):
            self._parking.cancel([connection.parked[one] for one in verb.numbers if one in connection.parked])
            self._answer(connection, number, Response(m.Done()))
            return
        if number in connection.parked:
            self._refuse(connection, number)
            return
        one = self._park(caller, verb, self._told)
        if isinstance(one, Response):
            self._answer(connection, number, one)
            return
        self.parked[one] = connection, number
        connection.parked[number] = one

    def hold(self, connection: W, number: int, one: ParkedLocate) -> None:
        """Keep a request that was asked, perhaps by another thread, until it is answered."""
        one.tell = self._told  # from now on; the answer may have come already
        if number in connection.parked or connection.closed:
            self._parking.cancel([one])
            self._refuse(connection, number)
        elif one.answer is not None:
            self._answer(connection, number, Response(one.answer))
        else:
            self.parked[one] = connection, number
            connection.parked[number] = one

    def _refuse(self, connection: W, number: int) -> None:
        text = f"request {number} waits already; number requests anew"
        self._answer(connection, number, Response(m.Failed(m.RequestFault.BAD_INPUT, text)))

    def gone(self, connection: W) -> None:
        """End a closed connection's awaits."""
        parked, connection.parked = list(connection.parked.values()), {}
        for one in parked:
            del self.parked[one]
        self._parking.cancel(parked)

    def close(self) -> None:
        """End all awaits."""
        self._parking.end_all()

    def rest_seconds(self, most: float) -> float:
        """Seconds until one is due, at most `most`."""
        if not self.parked:
            return most
        return max(0.0, min(most, self._parking.due_at - self._clock.monotonic_seconds()))

    def deliver(self) -> None:
        """Answer ended awaits, for `AWAITS_SECONDS` at most."""
        if (elsewhere := self._parking.elsewhere) is not None:
            elsewhere.tell_couriers()
        if not self.parked:
            self.over.clear()
            self._lines.clear()
            return
        now = self._clock.monotonic_seconds()
        if self._parking.due_at <= now:
            self._parking.expire()
        while self.over:
            one = self.over.popleft()
            if one in self.parked:
                self._lines.setdefault(self.parked[one][0].listener, deque()).append(one)
        while self._lines and self._clock.monotonic_seconds() - now < AWAITS_SECONDS:
            listener = min(self._lines, key=lambda of: of.share.starts_at)
            one = self._lines[listener].popleft()
            if not self._lines[listener]:
                del self._lines[listener]
            connection, number = self.parked.pop(one, (None, 0))
            if connection is not None:  # else the client disconnected meanwhile
                del connection.parked[number]
                listener.share.begin()
                listener.share.pay(1)
                self._answer(connection, number, self._parking.awaited(one))
                self._watch(connection)

    @property
    def has_more(self) -> bool:
        """Whether `deliver` left some."""
        return bool(self._lines)

    def _told(self, one: Parked) -> None:
        """Called by any thread, under the table's lock."""
        self.over.append(one)
        if len(self.over) == 1:
            self._wake()
