"""The contract between a user's handle and a store, wherever that runs: requests are data, a door carries them.

    in this process    call > Store.handle
    a sidecar          call > bytes on a socket > request > checks > Store.handle
    memory             of leased and reserved frames: the store's own, or the client's mapping of the same extents

Keys, places and digests cross a door; token ids, prompts and payload bytes never do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, StoreClosed
from kvstore.block.identity import TenantKeys
from kvstore.protocol import messages as m
from kvstore.protocol.messages import LeaseReply, MatchReply, ReserveReply
from kvstore.protocol.requests import Requests
from tiering.clock import Clock
from tiering.counts.awaits import AwaitEnd
from tiering.tier import FrameSpan

A = TypeVar("A")
R_co = TypeVar("R_co", covariant=True)


class ReservationLost(StoreClosed):
    """A reservation cannot be filled or committed any more. reason: the miss that it counts as."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Collective:
    """A put that several processes make together, each of its own parts.

    name: the same for all of them and for no other put of theirs; the store joins them by it. parts: those of the block
    that the caller fills. session: theirs; a client of a sidecar leaves it out, since the sidecar knows it.
    """

    name: str
    parts: tuple[int, ...]
    session: bytes = b""


class AttachLease(msgspec.Struct, frozen=True):
    """Share a lease that another process of the engine holds; it ends when its last holder releases it. run, reply: of
    the store that granted it, as a ticket names them."""

    run: bytes
    reply: LeaseReply


class NamedLease(msgspec.Struct, frozen=True):
    """Answers `LeasePrefix` and `AttachLease`. reply: its `lease` is the door's own number, 0 if nothing is pinned.
    run, number: the store's own name of the lease, for a ticket."""

    reply: LeaseReply
    run: bytes = b""
    number: int = 0


Request = m.Verb | AttachLease
"""What a door is asked."""


class Submitted(Protocol[R_co]):
    """An answer on its way. Nothing here blocks."""

    def poll(self) -> R_co | None:
        """The answer, once; None while it is not there. After the deadline it is a miss. Never raises."""
        ...

    def is_ready(self) -> bool:
        """Whether `poll` has an answer, judged without a lock or a look at the socket."""
        ...

    def cancel(self) -> None:
        """Give up; an answer that still comes is undone. Call nothing else afterwards."""
        ...

    def cancel_from_finalizer(self) -> None:
        """The same, called by a finalizer, at any point of any thread."""
        ...


class Door(Protocol):
    """A store as one tenant's client sees it. Thread-safe."""

    requests: Requests
    """What this process holds for each request of its engine."""

    clock: Clock
    """For the client's deadlines."""

    forgotten: deque[int]
    """Leases that were garbage-collected unreleased: a finalizer appends them, at any point of any thread, and the door
    releases them with a later call."""

    commits_early: bool
    """Whether a put gains by committing blocks while it fills the next ones."""

    def call(self, request: Request, kind: type[A], seconds: float | None = None) -> A:
        """The answer, of the request's kind: `Matched`, `NamedLease`, `Reserved`, `Counted`, ...

        seconds: the longest wait, if the caller has less time than the store would take. A store that cannot be asked,
        or is late, answers `missed`: a miss with its reason. `Release`, `Abort` and `ReportFrame` never fail. Raises
        `ReservationLost` for a `Commit` of a lost reservation, `Unreachable` for a namespace that cannot be opened or
        dropped, and `BadInput`.
        """
        ...

    def submit(self, request: Request, kind: type[A], seconds: float) -> Submitted[A]:
        """The same, without blocking: the caller polls for the answer, which is a miss after so many seconds. A
        submitted `Commit` has no answer of its own: that of the next `Commit` made with `call` counts its blocks."""
        ...

    def memory(self, held: int, places: Sequence[int], *, writable: bool = False) -> list[FrameSpan]:
        """The bytes of frames in this process: to be read under a lease, up to the first whose memory was given back,
        or to be filled under a reservation. held: the number of the lease or the reservation.

        Raises `StoreClosed` where the store was closed, `Unreachable` where the store that granted the lease is not the
        one behind this door any more, and `ReservationLost` where a reservation is not there.
        """
        ...


class StoreClient(Protocol):
    """The client whose request is handled. named: the namespaces that it opened, by its tenant's numbers for them.
    session_name: names its session among those of all tenants."""

    @property
    def named(self) -> dict[int, int]:
        """The store's number of each namespace, by the tenant's."""
        ...

    @property
    def keys(self) -> TenantKeys:
        """The tenant's keys."""
        ...

    @property
    def session_name(self) -> bytes:
        """Empty in the store's own process."""
        ...


@dataclass(frozen=True, slots=True)
class TenantClient:
    """A `StoreClient` without a session: one in the store's own process."""

    keys: TenantKeys
    session_name: bytes = b""
    named: dict[int, int] = field(default_factory=dict)


def missed(request: Request, reason: MissReason, detail: str) -> object:
    """The answer to a request that no store answered. Total over requests for which `Door.call` does not raise."""
    match request:
        case m.MatchPrefix():
            return m.Matched(MatchReply(0, reason=reason, detail=detail))
        case m.LeasePrefix():
            return NamedLease(LeaseReply(0, request.first_block, 0, reason=reason, detail=detail))
        case AttachLease():
            return NamedLease(LeaseReply(0, request.reply.first_block, 0, reason=reason, detail=detail))
        case m.Reserve():
            return m.Reserved(ReserveReply(0, 0, stopped_at=0, reason=reason, detail=detail))
        case m.Persist():
            return m.Persisted(0, reason)
        case m.Which():
            return m.Held(b"")
        case m.Changes():
            return m.Changed(b"", [], 0)
        case m.Await():
            return m.Awaited(0, AwaitEnd.GONE)
        case m.Locate():
            return m.Located(0, 0, reason=reason, detail=detail)
        case m.SealTicket():
            return m.Sealed("")
        case m.OpenTicket():
            return m.TicketOpened(b"", 0, 0.0, reason, detail)
        case m.Commit():
            raise ReservationLost(reason, detail)
        case _:
            return m.Done()


MAX_COLLECTIVE_CHARACTERS = 256
"""Of a collective put's name as a user gives it."""

WINDOW_CHARACTERS = 16
"""Of what is appended to it: the window of blocks that this part of the put fills."""


def check_collective(name: str) -> None:
    """Raise `BadInput` unless that can be the name of a collective put; empty is none."""
    if not isinstance(name, str) or len(name) > MAX_COLLECTIVE_CHARACTERS:
        raise BadInput(f"collective={name!r:.80}; give text of at most {MAX_COLLECTIVE_CHARACTERS} characters")


def check_participant(verb: m.Reserve, parts: int) -> None:
    """Check a participant's reservation. Raises `BadInput`."""
    most = MAX_COLLECTIVE_CHARACTERS + WINDOW_CHARACTERS
    if len(verb.collective) > most:
        raise BadInput(f"a collective put's name of {len(verb.collective)} characters; at most {most}")
    if verb.collective and (len(set(verb.parts)) != len(verb.parts) or not {*range(parts)}.issuperset(verb.parts)):
        raise BadInput(f"{len(verb.parts)} parts to fill; give distinct ones, from 0 to {parts - 1}")


def window_name(collective: str, stop: int, tries: int = 0) -> str:
    """The name of a collective put's window that ends before block `stop`, asked for again after so many `tries`."""
    return f"{collective}/{stop}.{tries}" if tries else f"{collective}/{stop}"


MAX_PRIORITY = 100
