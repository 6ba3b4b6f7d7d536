"""Requests answered later, by the event that ends them: waits for blocks that other clients store, and questions to
couriers.

A part of `dispatch`, and its contract with the part that fetches blocks from elsewhere (`kvstore.elsewhere`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from kvstore.core.store import Store
from kvstore.protocol import messages as m
from kvstore.service.sessions import ClientState
from tiering.counts.awaits import AwaitEnd, ParkedAwait


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
