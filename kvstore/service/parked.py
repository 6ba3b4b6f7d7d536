"""Requests answered later, by the event that ends them: waits for blocks that other clients store, and questions to
couriers.

They are parked in the store's table and at the couriers' desk, without a thread, and outside the limits of requests in
flight. A part of `dispatch`; `kvstore.elsewhere` has the parking of a sidecar with couriers, and `DoorAwaits` the
connections that such requests are answered on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from kvstore.block.errors import BadInput, StoreClosed, StoreError
from kvstore.core.store import Store
from kvstore.protocol import messages as m
from kvstore.service.sessions import ClientState
from kvstore.status.tree import ElsewhereStatus
from tiering.counts.awaits import AwaitEnd, ParkedAwait
from tiering.errors import TierError


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, and descriptors to be sent with it and closed."""

    answer: m.Answer
    descriptors: Sequence[int] = ()
    parked: ParkedLocate | None = None
    """Set in place of an answer that comes later."""


def refusal(error: TierError | StoreError) -> Response:
    """The answer to a request that ended with this error."""
    if isinstance(error, StoreClosed):
        return Response(m.Failed(m.RequestFault.CLOSED, "the sidecar is going down"))
    fault = m.RequestFault.BAD_INPUT if isinstance(error, BadInput) else m.RequestFault.BUSY
    return Response(m.failed(fault, str(error)))


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


class Parking:
    """Requests that wait without a thread, in the store's table. Without couriers, nothing is fetched from elsewhere;
    `kvstore.elsewhere` has the parking of a sidecar with couriers. Thread-safe."""

    has_couriers = False
    """Whether couriers are configured: then `tell_couriers` is to be called."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.verbs: Mapping[type, Callable[[ClientState, Any], Response | m.Answer]] = {}
        """Couriers' verbs; they raise what the handlers here do."""

    def awaited(self, one: Parked) -> Response:
        """The answer to a request that is over."""
        assert isinstance(one, ParkedAwait)
        return Response(self._store.awaited(one))

    def cancel(self, ones: Sequence[Parked]) -> None:
        self._store.awaits.end([one for one in ones if isinstance(one, ParkedAwait)], AwaitEnd.CANCELLED)

    def end_all(self) -> None:
        self._store.awaits.end_all(AwaitEnd.GONE)

    @property
    def due_at(self) -> float:
        """When to call `expire` next, in monotonic seconds; inf if nothing is parked."""
        return self._store.awaits.due_at

    def expire(self) -> None:
        """End those that have expired."""
        self._store.awaits.expire()

    def left(self, caller: ClientState) -> None:
        """A connection closed."""

    def park(
        self, caller: ClientState, number: int, verb: m.Await, tell: Callable[[ParkedAwait], object]
    ) -> ParkedAwait | Response:
        """As `Handlers.park`; number: of the namespace. Raises `BadInput`."""
        return self._store.park(number, verb.keys, verb.seconds, tell)

    # With couriers ---------------------------------------------------------------------------------------------------

    def greet(self, hello: m.Hello) -> tuple[ClientState | None, m.Answer]:
        """A courier's hello: its client state from now on, or why it is refused."""
        raise AssertionError("there is no socket for couriers")

    def is_served(self, tenant: bytes) -> bool:
        """Whether a tenant has a courier for `locate` to ask."""
        return False

    def locate(self, caller: ClientState, verb: m.Locate) -> Response | m.Answer:
        """Ask a courier. Raises `BadInput`."""
        return m.Located(0, self._store.readable(caller.named[verb.namespace], verb.keys))

    def tell_couriers(self) -> None:
        """Tell couriers which fetches were cancelled. Called often, by one thread."""

    def leased(self, lease: int) -> None:
        """An engine was granted this lease."""

    def forgetting(self, tenant: bytes, digest: bytes = b"") -> AbstractContextManager[LeftElsewhere]:
        """A context in which a namespace, or all of a tenant's, are dropped: for a purge couriers are asked before, for
        a drop after. It yields what others may still hold, complete when it ends."""
        return nullcontext(LeftElsewhere())

    def reasons(self) -> list[str]:
        """Why less is served than is stored elsewhere, a line each."""
        return []

    def status(self) -> ElsewhereStatus | None:
        """What couriers do; None without any."""
        return None
