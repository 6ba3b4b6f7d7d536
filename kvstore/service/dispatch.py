"""What the sidecar does for each request, on any socket.

Arguments come from other processes: each is checked here before the store sees it, since the store asserts what its own
callers can be trusted with. A number that belongs to another client is treated as one that does not exist.

Some requests are answered later, by the event that ends them: waits for blocks that other clients store, and questions
to couriers. They are parked in the store's table and at the couriers' desk (`Parking`), without a thread, and outside
the limits of requests in flight.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvstore.block.account import MissReason
from kvstore.block.display_names import DisplayNames
from kvstore.block.errors import BadInput, StoreClosed, StoreError
from kvstore.block.identity import TenantKeys, check_keys
from kvstore.core.reservations import SEALED_BLOCKS
from kvstore.core.store import Store
from kvstore.insight.curve import WhatIf
from kvstore.insight.prefixes import PrefixBook
from kvstore.insight.recording import Recording
from kvstore.protocol import messages as m
from kvstore.protocol.door import MAX_PRIORITY, TenantClient, check_participant
from kvstore.protocol.messages import MAX_TICKET_SECONDS, LeaseReply, MatchReply
from kvstore.protocol.requests import check_request
from kvstore.protocol.words import checked_seconds, printable
from kvstore.service.accounting import SET_ASIDE_PARTS, Counting, NamespaceInfo, ToldRequests, set_aside
from kvstore.service.sessions import (
    COURIERS,
    MAX_LEASED_PLACES,
    ClientState,
    ReservationProgress,
    Sessions,
    SlowTenants,
)
from kvstore.status.tree import ElsewhereStatus
from tiering.counts.awaits import AwaitEnd, ParkedAwait
from tiering.counts.tally import Eviction
from tiering.dram.unmap_wait import SharedExtent
from tiering.errors import BlockMissing, TierError, TierUnavailable
from tiering.frame import DIGEST_BYTES, frame_bytes

RUN_BYTES, SALT_BYTES = 16, 8
MAX_ENGINE_CHARACTERS = 128
MAX_LEASES = 4096
"""Of one session."""
MAX_LEASED_FRAMES = 1 << 21
"""Of one lease: its answer has some 27 bytes a frame, and a client takes at most 64 MiB."""
MAX_LEASED_BLOCKS = 1 << 19
"""Of one session, in all its leases."""
EXTENT_COST, NUMBER_COST, LEASED_COST, ENDED_COST = 10, 1 / 16, 1 / 64, 1 / 512
"""In messages, against the rate: for each extent handed over, each lease named, each block and part that a lease asks
for, and each that a release ends."""
MAX_RESERVATIONS = 64
"""Of one connection at a time."""
MAX_SHARES = 16
"""Of one extent with one connection, while it is mapped: the kernel walks all of them when asked about mappings."""
RARELY, ALLOWED_SECONDS = 100, 0.02
"""To hand out a tenant's extents takes no more than a hundredth of the time where that is slow, beyond an allowance: a
virtual machine counts what its host took from it as a thread's own time, so that now and then it looks slow where the
tenant placed no lock."""
MAX_DEADLINE_MS = 60_000.0
MAX_SKIPPED = 1 << 30
"""Blocks of a chain."""
MAX_LISTED, MAX_LISTED_BYTES = 64, 256 << 10
"""Namespaces in one answer; it also ends with the first one that makes it this long."""

_OF_COURIERS = m.Adopt | m.Holdings
SLOW = m.LeasePrefix | m.Reserve | m.ReportFrame | m.Persist | m.Drop | m.Namespaces | m.SealTicket | _OF_COURIERS
"""They may wait for memory, a disk or other clients."""
LONG = m.Persist | m.Drop
"""They may wait for many seconds."""

_log = logging.getLogger(__name__)


UNKNOWN = m.Failed(m.RequestFault.UNSUPPORTED, "this sidecar does not know that verb: it is of an earlier version")


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


class Handlers:
    """Checks requests, has the store serve them, and counts. Thread-safe."""

    def __init__(
        self, store: Store, first_number: int, new_token: Callable[[int], bytes], names: DisplayNames | None = None
    ) -> None:
        """first_number: of a connection, above those of every earlier run. new_token: returns so many random bytes.
        names: records engines' names of their models."""
        self._store, self._names, clock = store, names, store.clock
        self.run = new_token(RUN_BYTES)
        """The name of this run of the sidecar."""
        self.sessions = Sessions(store, first_number, new_token)
        self.counting = Counting(clock)
        self.recording = Recording(clock, new_token)
        self.whatif = WhatIf(clock, int.from_bytes(new_token(SALT_BYTES)))
        self.told, self.prefixes = ToldRequests(clock), PrefixBook(clock)
        self.parking = Parking(store)
        # The door's thread hands extents out, for all tenants. Only its processor's time counts, so that a busy machine
        # makes no tenant wait.
        self._slow = SlowTenants(clock.monotonic_seconds, RARELY, ALLOWED_SECONDS)
        self._thread_seconds = clock.thread_seconds
        self._new_parts = 0  # of opened namespaces, since objects were set aside
        self._verbs: dict[type, Callable[[ClientState, Any], Response | m.Answer]] = {
            m.OpenNamespace: self._open_namespace,
            m.MatchPrefix: self._match,
            m.LeasePrefix: self._lease,
            m.Attach: self._attach,
            m.Release: self._release,
            m.ReleaseRequest: self._release_request,
            m.ReportFrame: self._report,
            m.Reserve: self.reserve,
            m.Commit: self._commit,
            m.Abort: self._abort,
            m.Persist: self._persist,
            m.Extents: self._extents,
            m.Changes: self._looked_at,
            m.Which: self._looked_at,
            m.Tell: self._tell,
            m.Drop: self._drop,
            m.Namespaces: self._namespaces,
            m.Ping: self._ping,
            m.SealTicket: self._ticket,
            m.OpenTicket: self._ticket,
            m.Locate: self._locate,
        }

    def greet(
        self, tenant: TenantKeys, hello: m.Hello, *, is_courier: bool = False
    ) -> tuple[ClientState | None, m.Answer]:
        """Answer a hello: the connection's client state, or why it is refused."""
        version = version_in_common(hello)
        if isinstance(version, m.Failed):
            return None, version
        engine = "".join(one for one in hello.engine[:MAX_ENGINE_CHARACTERS] if one.isprintable())
        if not hello.session:
            caller = self.sessions.open(tenant, engine)
        elif m.MIN_SESSION_BYTES <= len(hello.session) <= m.MAX_SESSION_BYTES:
            caller = self.sessions.join(tenant, COURIERS * is_courier + hello.session, engine)
        else:
            text = f"a session's token of {len(hello.session)} bytes"
            return None, m.Failed(
                m.RequestFault.BAD_INPUT, f"{text}; give {m.MIN_SESSION_BYTES} to {m.MAX_SESSION_BYTES}"
            )
        caller.is_courier = is_courier
        caller.fingerprint = hello.fingerprint if hello.fingerprint != tenant.fingerprint else b""
        caller.session.since = caller.session.since or self.counting.now()
        _log.debug("client let in", extra={"connection": caller.number, "engine": engine})
        here = tenant.fingerprint, self._store.node.node, self._store.node.incarnation
        token = caller.session.token.removeprefix(COURIERS)
        return caller, m.Welcome(version, self.run, token, m.MAX_KEYS, *here)

    def shared(self, *verbs: type) -> dict[type, Callable[[ClientState, Any], Response | m.Answer]]:
        """The handlers of these verbs, for callers that serve some of them themselves."""
        return {verb: self._verbs[verb] for verb in verbs}

    def cost(self, caller: ClientState, verb: m.Verb) -> float:
        """Messages that a request counts for beyond its length, against the rate."""
        if isinstance(verb, m.Extents):
            return EXTENT_COST * len(verb.numbers)
        if isinstance(verb, m.LeasePrefix):
            return LEASED_COST * len(verb.keys) * caller.parts_of(verb.namespace)
        if isinstance(verb, m.Release):
            return NUMBER_COST * len(verb.leases) + ENDED_COST * self.sessions.places_named(caller, verb.leases)
        if isinstance(verb, m.ReleaseRequest):
            return ENDED_COST * self.sessions.places_of(caller, verb.request)
        return NUMBER_COST * len(verb.leases) if isinstance(verb, m.Attach) else 0.0

    def is_heavy(self, verb: m.Verb) -> bool:
        """Whether serving it computes for milliseconds, and later requests may depend on it."""
        if isinstance(verb, m.Commit):
            return len(verb.digests) > SEALED_BLOCKS
        return isinstance(verb, m.OpenNamespace | m.Abort)

    def serve(self, caller: ClientState, verb: m.Verb) -> Response:
        """Serve a request. Never raises for what a client can cause."""
        verbs = self.parking.verbs if caller.is_courier else self._verbs
        handler = verbs.get(type(verb))
        if handler is None:  # a second hello: the first was served elsewhere
            text = "this is a tenant's socket; that is a verb of the admin socket, admin.sock in the sidecar's --data"
            if isinstance(verb, m.Questions | _OF_COURIERS):
                text = "this is a tenant's socket; that is a verb of couriers, at courier.sock in the sidecar's --data"
            if isinstance(verb, m.UnknownVerb):
                return Response(UNKNOWN)
            if caller.is_courier:
                text = f"couriers ask for {', '.join(sorted(one.__name__ for one in verbs))}; that is none of these"
            return Response(m.Failed(m.RequestFault.BAD_INPUT, text))
        served = self._served(handler, caller, verb)
        assert served is not None
        return served

    def park(self, caller: ClientState, verb: m.Await, tell: Callable[[ParkedAwait], object]) -> ParkedAwait | Response:
        """Park a request; or return why not. Never raises for what a client can cause."""
        try:
            number, _ = _check_asked(caller, verb.namespace, verb.keys)
            if caller.is_courier or not verb.seconds >= 0:
                text = "couriers wait for no blocks" if caller.is_courier else f"seconds={verb.seconds}; give 0 or more"
                raise BadInput(text)
            return self.parking.park(caller, number, verb, tell)
        except BadInput as error:
            return refusal(error)

    def serve_at_once(self, caller: ClientState, verb: m.LeasePrefix) -> Response | None:
        """As `serve` if a lease need not wait this time; else None, without effect."""
        return self._served(self._lease_by, caller, verb)

    def _served(
        self, handler: Callable[[ClientState, Any], Response | m.Answer | None], caller: ClientState, verb: m.Verb
    ) -> Response | None:
        try:
            answer = handler(caller, verb)
        except (TierError, StoreError) as error:
            return refusal(error)
        return answer if isinstance(answer, Response) or answer is None else Response(answer)

    # Looking up ----------------------------------------------------------------------------------------------------

    def _open_namespace(self, caller: ClientState, verb: m.OpenNamespace) -> m.Answer:
        opening = TenantClient(caller.keys)  # entered for the caller only once it is complete
        granted = self._store.handle(opening, verb)
        assert isinstance(granted, m.Granted)
        own = granted.grant.number
        number = opening.named[own]
        namespace = self._store.namespace_of(number)
        if verb.name and self._names is not None:
            self._names.note(caller.keys.tenant, namespace.digest(), verb.name)
        tenant, digest, tokens = caller.keys.tenant, namespace.digest(), namespace.layout.block_tokens
        model, codec = printable(namespace.model), printable(namespace.codec)
        if number not in caller.namespaces:
            named = {"namespace": number, "model": model, "codec": codec}
            _log.debug("namespace opened", extra={"connection": caller.number, **named})
        slices = tuple(len(part.layers) for part in namespace.layout.parts)
        caller.namespaces[number] = slices
        self._new_parts += len(slices)  # by one thread at a time, which opens all
        if self._new_parts >= SET_ASIDE_PARTS:
            self._new_parts = 0
            set_aside()
        name = self._names.get(tenant, digest) if self._names is not None else ""
        self.counting.opened(number, tokens, NamespaceInfo(digest, tenant, printable(name) or model, codec, tokens))
        block_bytes = sum(map(frame_bytes, granted.grant.payload_bytes))
        self.whatif.opened(number, block_bytes, tokens)
        self.prefixes.opened(tenant, number, block_bytes, tokens)
        caller.named[own], caller.session.is_engine = number, True
        caller.fingerprint = b""  # its keys are the right ones now
        return granted

    def _match(self, caller: ClientState, verb: m.MatchPrefix) -> m.Answer:
        number, _ = _check_asked(caller, verb.namespace, (), verb.request)
        began_at = self._store.clock.monotonic_seconds()
        matched = self._store.handle(caller, verb)
        assert isinstance(matched, m.Matched)
        seconds = self._store.clock.monotonic_seconds() - began_at
        check_keys(verb.keys[matched.reply.blocks :])  # what was found is a key of the store; nothing is counted yet
        if verb.counts and not caller.is_courier and (verb.counts_short or matched.reply.blocks == len(verb.keys)):
            self.counting.looked_up(number, verb.keys, matched.reply, seconds, verb.is_told)
            if verb.request:
                gone = self._gone(number, verb, matched.reply)
                self.told.answered(caller, verb, number, matched.reply, seconds, gone)
            if self.recording.token:
                self.recording.looked_up(number, verb.keys)
            self.whatif.looked_up(number, verb.keys)
            self.prefixes.looked_up(caller.session.tenant.tenant, number, verb.keys, matched.reply.blocks)
        if not self.parking.has_couriers:
            return matched
        return m.Matched(matched.reply, self.parking.is_served(caller.keys.tenant))

    def _lease(self, caller: ClientState, verb: m.LeasePrefix) -> m.Answer:
        answer = self._lease_by(caller, verb, waits=True)
        assert answer is not None
        return answer

    def _lease_by(self, caller: ClientState, verb: m.LeasePrefix, *, waits: bool = False) -> m.Answer | None:
        """waits: else None where the store would have to. Raises `BadInput`."""
        number, slices = _check_asked(caller, verb.namespace, verb.keys, verb.request)
        refused = self._check_lease(caller, number, verb)
        if refused is not None:
            return refused
        fits, detail = _as_fits_an_answer(verb, len(slices))  # the account covers all that was asked for
        with self.sessions.asking(caller, (len(fits.keys) - fits.first_block) * len(slices)) as is_granted:
            if not is_granted:
                text = (
                    f"the session's leases name {caller.session.leased_places} places (blocks times parts), and its "
                    f"tenant's may name {MAX_LEASED_PLACES}, which its sessions share; release some first"
                )
                full = LeaseReply(0, verb.first_block, 0, reason=MissReason.PINNED_FULL, detail=text)
                return self._leased(caller, number, verb, full)
            began_at = self._store.clock.monotonic_seconds()
            reply: LeaseReply | None
            if waits:
                reply = self._store.lease(number, fits.keys, fits.first_block, fits.deadline_ms)
            else:
                reply = self._store.lease_at_once(number, fits.keys, fits.first_block)
            seconds = self._store.clock.monotonic_seconds() - began_at
            return self._leased(caller, number, verb, _ended_by(reply, detail), seconds) if reply is not None else None

    def _check_lease(self, caller: ClientState, number: int, verb: m.LeasePrefix) -> m.Answer | None:
        if not 0 <= verb.first_block <= len(verb.keys) or not verb.deadline_ms >= 0:
            raise BadInput(
                f"first_block={verb.first_block}, deadline_ms={verb.deadline_ms}: give a block of the chain, 0 or more"
            )
        held = caller.session.leased_blocks
        if len(caller.session.leases) >= MAX_LEASES or held + len(verb.keys) > MAX_LEASED_BLOCKS:
            text = f"the session holds {len(caller.session.leases)} leases of {held} blocks; release some first"
            text = f"{text} (at most {MAX_LEASES}, of {MAX_LEASED_BLOCKS})"
            full = LeaseReply(0, verb.first_block, 0, reason=MissReason.PINNED_FULL, detail=text)
            return self._leased(caller, number, verb, full)
        return None

    def _leased(
        self, caller: ClientState, number: int, verb: m.LeasePrefix, reply: LeaseReply, seconds: float = 0.0
    ) -> m.Answer:
        if verb.counts and not caller.is_courier:
            self.counting.leased(number, verb.keys, reply, seconds, verb.found, verb.is_told)
            self.prefixes.granted(caller.keys.tenant, number, verb.keys, verb.first_block, reply.blocks)
            if verb.request:
                self.told.answered(caller, verb, number, reply, seconds, self._gone(number, verb, reply))
        if reply.lease:
            parts = len(caller.namespaces[number])
            self.sessions.took(caller, reply.lease, verb.request, len(reply.generations), parts)
            if self.parking.has_couriers and not caller.is_courier:
                self.parking.leased(reply.lease)
        return m.Leased(reply)

    def _gone(
        self, number: int, verb: m.MatchPrefix | m.LeasePrefix, reply: MatchReply | LeaseReply
    ) -> tuple[Eviction, bool] | None:
        if reply.reason is not MissReason.EVICTED or not 0 <= reply.blocks < len(verb.keys):
            return None
        eviction, had_ttl = self._store.eviction_of(number, verb.keys[reply.blocks])
        return (eviction, had_ttl) if eviction is not None else None

    def _attach(self, caller: ClientState, verb: m.Attach) -> m.Answer:
        return m.Attached(self.sessions.attach(caller, verb.leases))

    def _release(self, caller: ClientState, verb: m.Release) -> m.Answer:
        self.sessions.release(caller, verb.leases)
        return m.Done()

    def _release_request(self, caller: ClientState, verb: m.ReleaseRequest) -> m.Answer:
        self.sessions.release_request(caller, verb.request)
        return m.Done()

    def _report(self, caller: ClientState, verb: m.ReportFrame) -> m.Answer:
        request = self.sessions.request_of(caller, verb.lease)
        if request is not None:
            self.counting.reported(verb.lease, verb.block)
            self.told.reported(caller, request)
            self._store.handle(caller, verb)
        return m.Done()

    # Storing -------------------------------------------------------------------------------------------------------

    def reserve(self, caller: ClientState, verb: m.Reserve, couriers: int = 0) -> m.Answer:
        """Reserve slots. couriers: if a courier asks, how many tenants have couriers. Raises `BadInput`."""
        number, slices = _check_asked(caller, verb.namespace, verb.keys)
        ttl, skipped = verb.ttl_seconds, verb.skipped
        if not 0 <= skipped <= MAX_SKIPPED or (skipped and (verb.collective or not verb.keys)):
            raise BadInput(
                f"skipped={skipped}; give 0 to {MAX_SKIPPED}, with keys that follow, and 0 in a collective put"
            )
        if (
            not skipped <= verb.first_block <= skipped + len(verb.keys)
            or not -MAX_PRIORITY <= verb.priority <= MAX_PRIORITY
        ):
            raise BadInput(
                f"first_block={verb.first_block}, priority={verb.priority}: give a block of the chain, and from "
                f"{-MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        if ttl is not None and not 0 < ttl < 1 << 40:
            raise BadInput(f"ttl_seconds={ttl}; give seconds above 0 and below 2**40, or nothing")
        if len(caller.reservations) >= MAX_RESERVATIONS:
            return m.Failed(m.RequestFault.BUSY, f"{MAX_RESERVATIONS} reservations are under way, which is the limit")
        if verb.collective:
            check_participant(verb, len(slices))
        began_at = self._store.clock.monotonic_seconds()
        if couriers:
            first = verb.first_block
            reply = self._store.reserve(number, verb.keys, first, 0, None, skipped=skipped, couriers=couriers)
            reserved = m.Reserved(reply)
        else:
            answer = self._store.handle(caller, verb)
            assert isinstance(answer, m.Reserved)
            reserved, reply = answer, answer.reply
            self.counting.offered(number, len(verb.keys), skipped, reply, waits=verb.waits and reply.in_flight > 0)
        if reply.reservation:
            parts = frozenset(part for part, places in enumerate(reply.places) if places)
            done, is_collective = [0] * len(slices), bool(verb.collective)
            progress = ReservationProgress(number, len(reply.blocks), done, parts, is_collective, began_at)
            self.sessions.reserved(caller, reply.reservation, progress)
        return reserved

    def _commit(self, caller: ClientState, verb: m.Commit) -> m.Answer:
        progress = caller.reservations.get(verb.reservation)
        if progress is None:
            return m.Counted(0)
        slices = caller.namespaces[progress.namespace]
        wrong = BadInput(
            f"part {verb.part}, blocks from {verb.first} on, {len(verb.digests)} of them: give those that follow the "
            f"last ones, no more than the {progress.blocks} that were reserved, of a part that is the caller's to fill"
        )
        if verb.part not in progress.parts:
            raise wrong
        wanted = slices[verb.part]
        if any(len(block) != wanted or any(len(one) != DIGEST_BYTES for one in block) for block in verb.digests):
            raise BadInput(
                f"digests of another form; give {wanted} of {DIGEST_BYTES} bytes for each block of that part"
            )
        if not self.sessions.claim(progress, verb.part, verb.first, len(verb.digests)):
            raise wrong
        committed = self._store.handle(caller, verb)
        assert isinstance(committed, m.Counted)
        if committed.blocks == progress.blocks:
            self.sessions.ended(caller, verb.reservation)
            self.counting.filled(self._store.clock.monotonic_seconds() - progress.began_at)
        return committed

    def _abort(self, caller: ClientState, verb: m.Abort) -> m.Answer:
        if verb.reservation in caller.reservations:
            self._store.handle(caller, verb)
            self.sessions.ended(caller, verb.reservation)
        return m.Done()

    def _persist(self, caller: ClientState, verb: m.Persist) -> m.Answer:
        _check_asked(caller, verb.namespace, verb.keys)
        return self._store.handle(caller, msgspec.structs.replace(verb, seconds=_within_bounds(verb.seconds)))

    # Memory and the rest -------------------------------------------------------------------------------------------

    def _extents(self, caller: ClientState, verb: m.Extents) -> Response:
        tenant, extents, descriptors = caller.session.tenant.tenant, [], []
        if self._slow.waits(tenant):
            raise TierUnavailable(
                "clients of this tenant have placed so many locks on its memory that handing it out takes long; "
                "let go of them, and try again in a moment"
            )
        fills = {one.namespace for one in list(caller.reservations.values())} if verb.writable else None
        try:
            for number in dict.fromkeys(verb.numbers):
                began_at = self._thread_seconds()
                shared = self._share(caller, number, fills)
                if shared is not None:
                    extents.append(m.ExtentEntry(number, shared.size_bytes, shared.frame_bytes))
                    descriptors.append(shared.descriptor)
                if self._slow.took(tenant, self._thread_seconds() - began_at):
                    break
        except BaseException:
            for one in descriptors:
                os.close(one)
            raise
        return Response(m.ExtentsReply(extents), descriptors)

    def _share(self, caller: ClientState, number: int, fills: set[int] | None) -> SharedExtent | None:
        self._check_shares(caller, number)
        was_shared = number in caller.extents
        caller.extents.add(number)  # before it is shared: from then on the client may map it
        try:
            shared = self._store.share(number, caller.session.tenant.tenant, caller.number, fills)
        except BlockMissing:
            if not was_shared:
                caller.extents.discard(number)
            return None
        caller.shares[number] += 1
        return shared

    def _check_shares(self, caller: ClientState, extent: int) -> None:
        if caller.shares[extent] < MAX_SHARES:
            return
        if self._store.is_mapped(extent, caller.number):
            raise BadInput(
                f"an extent that this connection has mapped up to {MAX_SHARES} times, which is the limit; use the "
                "mapping that is there, or let go of it first"
            )
        del caller.shares[extent]

    def _ping(self, caller: ClientState, verb: m.Ping) -> Response | m.Answer:
        self.sessions.asked(caller)
        notify_pipe = self.sessions.new_notify_pipe(caller) if verb.wants_bell else None
        return Response(m.NotifyPipeReply(), [notify_pipe]) if notify_pipe is not None else m.Done()

    def _tell(self, caller: ClientState, verb: m.Tell) -> m.Answer:
        if verb.namespace >= 0:
            self.counting.told(_check_asked(caller, verb.namespace, ())[0], verb.requests)
        self.told.tell(caller, verb)
        self.prefixes.told(caller.keys.tenant, verb)
        return m.Done()

    def _looked_at(self, caller: ClientState, verb: m.Changes | m.Which) -> m.Answer:
        _check_asked(caller, verb.namespace, ())  # a key that cannot be is a block that is not there
        return self._store.handle(caller, verb)

    def _ticket(self, caller: ClientState, verb: m.SealTicket | m.OpenTicket) -> m.Answer:
        _check_asked(caller, verb.namespace, verb.keys if isinstance(verb, m.SealTicket) else ())
        if isinstance(verb, m.SealTicket) and not 0 < verb.seconds <= MAX_TICKET_SECONDS:
            raise BadInput(f"seconds={verb.seconds}; give seconds above 0, up to {MAX_TICKET_SECONDS:g}")
        return self._store.handle(caller, verb)

    def _drop(self, caller: ClientState, verb: m.Drop) -> m.Answer:
        number, _ = _check_asked(caller, verb.namespace, ())
        verb = msgspec.structs.replace(verb, seconds=_within_bounds(verb.seconds))
        with self.parking.forgetting(caller.keys.tenant, self._store.namespace_of(number).digest()) as left:
            dropped = self._store.handle(caller, verb)
        assert isinstance(dropped, m.Counted)
        return left.counted(dropped.blocks)

    def _locate(self, caller: ClientState, verb: m.Locate) -> Response | m.Answer:
        _check_asked(caller, verb.namespace, verb.keys)
        return self.parking.locate(caller, verb)

    def _namespaces(self, caller: ClientState, verb: m.Namespaces) -> m.Answer:
        mine = [one for one in self._store.namespaces() if one.tenant == caller.session.tenant.tenant]
        listed: list[m.Opened] = []
        size = 0
        for one in mine[max(0, verb.first) :]:
            packed = one.namespace.pack()
            if len(listed) == MAX_LISTED or (listed and size + len(packed) > MAX_LISTED_BYTES):
                return m.NamespacesReply(listed, max(0, verb.first) + len(listed))
            listed.append(m.Opened(one.digest.hex(), packed, list(one.payload_bytes), one.blocks))
            size += len(packed)
        return m.NamespacesReply(listed, 0)


def version_in_common(hello: m.Hello) -> int | m.Failed:
    """The highest version that both support."""
    version = min(hello.newest, m.NEWEST_VERSION)
    if version >= max(hello.oldest, m.OLDEST_VERSION):
        return version
    spoken = f"this sidecar speaks {m.OLDEST_VERSION} to {m.NEWEST_VERSION}"
    return m.Failed(m.RequestFault.VERSION, f"versions {hello.oldest} to {hello.newest}; {spoken}")


def _within_bounds(seconds: float) -> float:
    return min(checked_seconds(seconds), MAX_DEADLINE_MS / 1000)


def _as_fits_an_answer(verb: m.LeasePrefix, parts: int) -> tuple[m.LeasePrefix, str]:
    most = MAX_LEASED_FRAMES // parts
    if verb.deadline_ms > MAX_DEADLINE_MS:
        verb = msgspec.structs.replace(verb, deadline_ms=MAX_DEADLINE_MS)
    if len(verb.keys) - verb.first_block <= most:
        return verb, ""
    text = f"one lease names at most {MAX_LEASED_FRAMES} frames, {most} blocks of this namespace; lease the rest then"
    return msgspec.structs.replace(verb, keys=verb.keys[: verb.first_block + most]), text


def _ended_by(reply: LeaseReply, detail: str) -> LeaseReply:
    if not detail or reply.reason is not None:
        return reply
    return msgspec.structs.replace(reply, reason=MissReason.PINNED_FULL, detail=detail)


def _check_asked(
    caller: ClientState, namespace: int, keys: Sequence[bytes], request: str = ""
) -> tuple[int, tuple[int, ...]]:
    """namespace: by the client's number. request: the engine's name for what it serves. Returns the store's number and
    the layer slices of each part. Raises `BadInput`."""
    number = caller.named.get(namespace)
    if number is None:
        raise BadInput(f"namespace {namespace} was not opened on this connection; open it first")
    if request != "":
        check_request(request)
    check_keys(keys)
    return number, caller.namespaces[number]
