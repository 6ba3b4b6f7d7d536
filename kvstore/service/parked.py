"""What is answered later, by the event that ends it: waits for blocks that others store, and questions to couriers.

A part of `dispatch`, and the contract between it and what brings blocks from elsewhere (`kvstore.elsewhere`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from kvstore.core.store import Store
from kvstore.protocol import messages as m
from kvstore.service.sessions import ClientState
from tiering.counts.awaits import AwaitEnd, ParkedAwait


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, and descriptors to be sent beside it and closed."""

    answer: m.Answer
    descriptors: Sequence[int] = ()
    parked: ParkedLocate | None = None
    """In place of the answer, which comes later."""


@dataclass(eq=False, slots=True)
class ParkedLocate:
    """A `Locate` that a courier was asked about. answer: None until it is over, of which `tell` is told."""

    answer: m.Located | None = None
    tell: Callable[[ParkedLocate], object] = lambda one: None


Parked = ParkedAwait | ParkedLocate


class Elsewhere(Protocol):
    """What is brought here from other nodes and remote engines (`kvstore.elsewhere`). Thread-safe."""

    verbs: Mapping[type, Callable[[ClientState, Any], Response | m.Answer]]
    """What couriers may ask; raises what the handlers here do."""

    @property
    def due_at(self) -> float:
        """When to call `expire` next."""
        ...

    def is_served(self, tenant: bytes) -> bool:
        """Whether a courier of a tenant's is there, whom `locate` asks."""
        ...

    def locate(self, caller: ClientState, verb: m.Locate) -> Response | m.Answer:
        """Ask a courier. Raises `BadInput`."""
        ...

    def park(
        self, caller: ClientState, number: int, verb: m.Await, tell: Callable[[ParkedAwait], object]
    ) -> ParkedAwait | Response:
        """As `Handlers.park`, of blocks that are to be fetched; number: of their namespace. Raises `BadInput`."""
        ...

    def awaited(self, one: ParkedAwait, answer: m.Awaited) -> m.Awaited:
        """What is known of how such a wait ended."""
        ...

    def cancel(self, ones: Iterable[ParkedLocate]) -> None:
        """These are not wanted any more."""
        ...

    def expire(self) -> None:
        """Answer those whose time is over."""
        ...

    def tell_couriers(self) -> None:
        """What is not wanted any more. Called often, by one thread."""
        ...

    def leased(self, lease: int) -> None:
        """An engine was granted it."""
        ...

    def left(self, caller: ClientState) -> None:
        """A connection is gone."""
        ...

    def forgetting(self, tenant: bytes, digest: bytes) -> AbstractContextManager[list[str]]:
        """A namespace, or all of a tenant's, are dropped within: of a purge others are asked before, of a drop after.
        Then what they have still is in there, in a line."""
        ...


class Parking:
    """Requests that wait in no thread: awaits in the store's table, locates at the desk. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.elsewhere: Elsewhere | None = None

    def awaited(self, one: Parked) -> Response:
        """The answer to one that is over."""
        if isinstance(one, ParkedLocate):
            assert one.answer is not None
            return Response(one.answer)
        answer = self._store.awaited(one)
        return Response(answer if self.elsewhere is None else self.elsewhere.awaited(one, answer))

    def cancel(self, ones: Sequence[Parked]) -> None:
        """These are not waited for any more."""
        self._store.awaits.end([one for one in ones if isinstance(one, ParkedAwait)], AwaitEnd.CANCELLED)
        if self.elsewhere is not None:
            self.elsewhere.cancel([one for one in ones if isinstance(one, ParkedLocate)])

    def end_all(self) -> None:
        """No client is served any more."""
        self._store.awaits.end_all(AwaitEnd.GONE)

    @property
    def due_at(self) -> float:
        """When to call `expire` next, in monotonic seconds; inf where nothing is parked."""
        return min(self._store.awaits.due_at, self.elsewhere.due_at if self.elsewhere is not None else inf)

    def expire(self) -> None:
        """Those whose time is over are."""
        self._store.awaits.expire()
        if self.elsewhere is not None:
            self.elsewhere.expire()

    def left(self, caller: ClientState) -> None:
        """A connection is gone."""
        if self.elsewhere is not None:
            self.elsewhere.left(caller)
