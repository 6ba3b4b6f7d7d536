"""The sidecar's clients, and what each holds.

A session is one engine: a scheduler and its workers, each with its own connection. A token that the engine makes joins
them: the first connection to name it begins the session, also after a restart of the sidecar. Tokens are valid within
their tenant only. A lease belongs to the session; every connection that took it or attached to it is one of its
holders, and it ends with the last. A reservation belongs to one connection; of a collective one each connection has a
share, under its own number.

A connection may have a *notification pipe*, which its client listens at. It is written to when memory that the client
may map was given back, since other clients wait for that, and not again before the client has asked for the list.

A connection that breaks says nothing about the process behind it, which may still be copying. Its leases then pin
nothing, and its places are not reused until the kernel reports that no mapping of that connection is left
(`Extent.is_shared`). The number of such connections per tenant is bounded (`DisconnectedClients.count_of`).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from kvstore.block.identity import NUMBER_KEY_BYTES, Numbers, TenantKeys
from kvstore.core.reservations import ABORTED_PLACES
from kvstore.core.store import Store
from kvstore.protocol.messages import MIN_SESSION_BYTES
from kvstore.protocol.notify_pipe import NotifyPipe, new_notify_pipe

MAX_LEASED_PLACES = 1 << 23
"""Blocks times parts of all leases of one tenant: 8 bytes each, and 4 for each block, at most 96 MiB of the sidecar's
memory."""
COURIERS = b"couriers"
CONNECTION_BITS = 24
"""One run's connection numbers, in no order: a client can ask the kernel for the numbers of its own."""


@dataclass(eq=False, slots=True)
class HeldLease:
    """request: the engine's name for the request it serves. holders: connections, by number. blocks: pinned ones.
    places: blocks times parts."""

    request: str
    holders: set[int]
    blocks: int
    places: int


@dataclass(eq=False, slots=True)
class Session:
    """One engine. token: by which its processes join it. connections: open ones. leased_places: of its leases, and of
    those being requested. departed: closed connections that may still have memory mapped. is_engine: it has opened a
    namespace; others only ask whether someone answers, as `kvstore doctor` does."""

    token: bytes
    tenant: TenantKeys
    engine: str
    connections: set[int] = field(default_factory=set)
    leases: dict[int, HeldLease] = field(default_factory=dict)
    leased_blocks: int = 0
    leased_places: int = 0
    since: float = 0.0  # Unix time, for people
    departed: int = 0
    is_engine: bool = False

    @property
    def name(self) -> bytes:
        """Its name among all tenants' sessions."""
        return self.tenant.tenant + self.token


@dataclass(slots=True)
class ReservationProgress:
    """A reservation in progress: its blocks, and how many are committed, by part. parts: those that the connection
    fills. began_at: when it was asked for, by the store's clock."""

    namespace: int
    blocks: int
    done: list[int]
    parts: frozenset[int]
    is_collective: bool = False
    began_at: float = 0.0


@dataclass(eq=False, slots=True)
class ClientState:
    """One connection. number: by which the kernel knows its mappings. namespaces: those it opened, with the layer
    slices of their parts. named: the same by the client's own numbers. extents: shared with it. shares: how often each
    was. retired_seen: up to where it was told what to unmap. is_rung: whether it was notified since it last asked.
    fingerprint: of the keys it hashes with, if not its tenant's. mapped: once it is closed, the extents that it may
    still have mapped."""

    number: int
    session: Session
    namespaces: dict[int, tuple[int, ...]] = field(default_factory=dict)
    named: dict[int, int] = field(default_factory=dict)
    reservations: dict[int, ReservationProgress] = field(default_factory=dict)
    extents: set[int] = field(default_factory=set)
    shares: Counter[int] = field(default_factory=Counter)
    retired_seen: int = 0
    notify_pipe: NotifyPipe | None = None
    is_rung: bool = False
    fingerprint: bytes = b""
    is_courier: bool = False
    mapped: list[int] = field(default_factory=list)

    @property
    def keys(self) -> TenantKeys:
        return self.session.tenant

    @property
    def session_name(self) -> bytes:
        return self.session.name

    @property
    def whose(self) -> bytes:
        """Its tenant; couriers count separately, so that they keep no engine out."""
        return self.session.tenant.tenant + COURIERS * self.is_courier

    def parts_of(self, named: int) -> int:
        """Layer slices of a namespace, by the client's number; 1 if there is none."""
        return len(self.namespaces.get(self.named.get(named, -1), (0,)))


class Sessions:
    """All sessions of a store. Thread-safe."""

    def __init__(self, store: Store, first_number: int, new_token: Callable[[int], bytes]) -> None:
        """first_number: of a connection; above those of every earlier run. new_token: returns so many random bytes."""
        self.store, self._new_token, self._first_number = store, new_token, first_number
        self._lock = threading.Lock()
        self._numbers = Numbers(new_token(NUMBER_KEY_BYTES), CONNECTION_BITS)
        self._sessions: dict[tuple[bytes, bytes], Session] = {}  # by tenant and token
        self._callers: dict[int, ClientState] = {}
        self.departed = DisconnectedClients(store)
        """Clients that may still have memory mapped."""
        self._leased_places: Counter[bytes] = Counter()  # of all sessions of a tenant
        self._mapped: deque[int] = deque()  # extents given back, whose clients are not notified yet

    # Coming --------------------------------------------------------------------------------------------------------

    def open(self, tenant: TenantKeys, engine: str) -> ClientState:
        """Begin a session with its first connection."""
        return self.join(tenant, self._new_token(MIN_SESSION_BYTES), engine)

    def join(self, tenant: TenantKeys, token: bytes, engine: str) -> ClientState:
        """Join the session with that token, or begin it if the tenant has none."""
        with self._lock:
            session = self._sessions.get((tenant.tenant, token))
            if session is None:
                session = self._sessions[tenant.tenant, token] = Session(token, tenant, engine)
            caller = ClientState(self._first_number + self._numbers(), session)
            session.connections.add(caller.number)
            self._callers[caller.number] = caller
            return caller

    def callers(self) -> list[ClientState]:
        with self._lock:
            return list(self._callers.values())

    # Leases --------------------------------------------------------------------------------------------------------

    @contextmanager
    def asking(self, caller: ClientState, places: int) -> Iterator[bool]:
        """A context for a lease request of so many blocks times parts; yields whether it may be granted, and reserves
        the places meanwhile. A session may hold as much as is left to its tenant: one alone gets half of
        `MAX_LEASED_PLACES`, two a third each, and there is always some for the next."""
        session, tenant = caller.session, caller.session.tenant.tenant
        with self._lock:
            taken = self._leased_places[tenant] + self.store.leases.ending_places[tenant] + places
            is_granted = session.leased_places + places <= MAX_LEASED_PLACES - taken
            if is_granted:
                self._count(session, places)
        try:
            yield is_granted
        finally:
            if is_granted:
                with self._lock:
                    self._count(session, -places)

    def _count(self, session: Session, places: int) -> None:
        session.leased_places += places
        self._leased_places[session.tenant.tenant] += places
        if not self._leased_places[session.tenant.tenant]:
            del self._leased_places[session.tenant.tenant]

    def took(self, caller: ClientState, lease: int, request: str, blocks: int, parts: int) -> None:
        """A connection was granted a lease. If it has closed meanwhile, the lease ends at once."""
        with self._lock:
            caller.session.leases[lease] = HeldLease(request, {caller.number}, blocks, blocks * parts)
            caller.session.leased_blocks += blocks
            self._count(caller.session, blocks * parts)
            if caller.number in self._callers:
                return
            self._depart(caller)
        self.store.begin_ending((), (lease,))

    def places_named(self, caller: ClientState, leases: Iterable[int]) -> int:
        """Blocks times parts of these leases of the session."""
        with self._lock:
            held = caller.session.leases
            return sum(held[lease].places for lease in set(leases) if lease in held)

    def places_of(self, caller: ClientState, request: str) -> int:
        """Blocks times parts of the leases that the session took for a request."""
        with self._lock:
            return sum(held.places for held in caller.session.leases.values() if held.request == request)

    def attach(self, caller: ClientState, leases: Iterable[int]) -> list[int]:
        """Make the connection a holder of these leases of its session; returns those that still pin."""
        with self._lock:
            held = [lease for lease in leases if lease in caller.session.leases and self.store.is_leased(lease)]
            for lease in held:
                caller.session.leases[lease].holders.add(caller.number)
            return held

    def request_of(self, caller: ClientState, lease: int) -> str | None:
        """What the lease is for; None if the connection does not hold it."""
        with self._lock:
            held = caller.session.leases.get(lease)
            return held.request if held is not None and caller.number in held.holders else None

    def release(self, caller: ClientState, leases: Iterable[int]) -> None:
        """The connection releases leases; those that it does not hold are ignored."""
        with self._lock:
            ended, expired = self._let_go(caller, leases)
        self.store.begin_ending(ended, expired)

    def release_request(self, caller: ClientState, request: str) -> None:
        """The connection releases all leases that the session took for a request of the engine's."""
        with self._lock:
            leases = [lease for lease, held in caller.session.leases.items() if held.request == request]
        self.release(caller, leases)

    def _let_go(self, caller: ClientState, leases: Iterable[int]) -> tuple[list[int], list[int]]:
        ended, expired = [], []
        for lease in leases:
            held = caller.session.leases.get(lease)
            if held is None or caller.number not in held.holders:
                continue
            held.holders.remove(caller.number)
            if not held.holders:
                del caller.session.leases[lease]
                caller.session.leased_blocks -= held.blocks
                self._count(caller.session, -held.places)
                ended.append(lease)
            elif not held.holders & self._callers.keys():
                expired.append(lease)
        return ended, expired

    # Reservations --------------------------------------------------------------------------------------------------

    def reserved(self, caller: ClientState, reservation: int, progress: ReservationProgress) -> None:
        """A connection was granted a reservation; see `took`."""
        with self._lock:
            caller.reservations[reservation] = progress
            if caller.number in self._callers:
                return
            self._depart(caller)
        self.store.cancel(reservation)

    def claim(self, progress: ReservationProgress, part: int, first: int, blocks: int) -> bool:
        """Whether so many blocks of a part are the next ones to commit; then they count as committed."""
        with self._lock:
            is_there = first == progress.done[part] and first + blocks <= progress.blocks
            progress.done[part] += blocks if is_there else 0
            return is_there

    def ended(self, caller: ClientState, reservation: int) -> None:
        """A reservation was aborted or committed completely."""
        with self._lock:
            caller.reservations.pop(reservation, None)

    # Going ---------------------------------------------------------------------------------------------------------

    def left(self, caller: ClientState) -> None:
        """A connection closed. Leases that no other holds pin nothing any more; `sweep` frees their places."""
        with self._lock:
            if self._callers.pop(caller.number, None) is None:
                return
            self._take_notify_pipe(caller)
            caller.session.connections.discard(caller.number)
            is_new = self._depart(caller)
            leases, there = caller.session.leases.items(), self._callers.keys()
            expired = [lease for lease, held in leases if not held.holders & there]
            cancelled = list(caller.reservations)
        self.store.begin_ending((), expired)
        for reservation in cancelled:
            self.store.cancel(reservation)
        if is_new:  # usually its process has ended, and nothing is mapped
            self._look(caller, LOOKS)

    def _depart(self, caller: ClientState) -> bool:
        """Note that the connection closed; returns whether that is new. Under the lock."""
        is_new = self.departed.add(caller)
        caller.session.departed += is_new
        return is_new

    def sweep(self) -> int:
        """Free what disconnected clients held, once they map nothing; returns how many are left. Looks at some of them
        per call, in turn. Also expires collective puts, and ends a piece of the ended leases."""
        self.store.expire_due()
        with self._lock:
            turns = self.departed.turns()
        left = LOOKS
        for gone in turns:
            if left:
                left -= self._look(gone, left)
        return len(self.departed)

    def _look(self, caller: ClientState, most: int) -> int:
        is_mapped, looks = self.departed.look(caller, most)
        if is_mapped:
            return looks
        session = caller.session
        with self._lock:
            if not self.departed.remove(caller):
                return looks
            session.departed -= 1
            ended, expired = self._let_go(caller, list(session.leases))
            aborted, caller.reservations = caller.reservations, {}
            if not session.connections and not session.departed:
                name = session.tenant.tenant, session.token
                if self._sessions.get(name) is session:  # a later session may have the same name
                    del self._sessions[name]
        self.store.begin_ending(ended, expired)
        places = 0
        for reservation, progress in aborted.items():
            places += progress.blocks * len(progress.done)
            abort = self.store.abort if places <= ABORTED_PLACES else self.store.begin_abort
            abort(reservation)
        return looks

    @property
    def is_waited_for(self) -> bool:
        """Whether `sweep` has work: disconnected clients, collective puts in progress, leases that end."""
        return bool(self.departed) or self.store.runs_out_at != inf or self.store.is_ending

    # Telling -------------------------------------------------------------------------------------------------------

    def watch_memory(self, wake: Callable[[], None]) -> None:
        """From now on notify clients that may map memory when it is given back. wake: called, by any thread and under
        the store's lock, when `notify` is due; it must neither wait nor call the store."""

        def is_mapped(extent: int) -> None:
            self._mapped.append(extent)
            wake()

        self.store.blocks.dram.mapped_still = is_mapped

    def notify(self) -> None:
        """Notify every client that may map memory which was given back since the last call."""
        given_back: set[int] = set()
        while self._mapped:
            given_back.add(self._mapped.popleft())
        if given_back:
            with self._lock:
                for caller in self._callers.values():
                    if (
                        caller.notify_pipe is not None
                        and not caller.is_rung
                        and not given_back.isdisjoint(caller.extents)
                    ):
                        self._notify(caller)

    def end_notifying(self) -> None:
        """Close all notification pipes."""
        with self._lock:
            for caller in self._callers.values():
                self._take_notify_pipe(caller)

    def ring(self, caller: ClientState) -> None:
        """Notify a client of a new list, or that an answer, perhaps unread, has brought it."""
        with self._lock:
            self._notify(caller)

    def asked(self, caller: ClientState) -> None:
        """A client asks for the list, and is about to get it."""
        with self._lock:
            caller.is_rung = False

    def new_notify_pipe(self, caller: ClientState) -> int | None:
        """The client's end of a new notification pipe; None without descriptors."""
        try:
            ours, theirs = new_notify_pipe()
        except OSError:  # no descriptors left
            return None
        with self._lock:
            self._take_notify_pipe(caller)
            caller.notify_pipe = ours
            if caller.number not in self._callers:  # gone meanwhile
                self._take_notify_pipe(caller)
        return theirs

    def _notify(self, caller: ClientState) -> None:
        if caller.notify_pipe is None or caller.is_rung:
            return
        caller.is_rung = True
        if not caller.notify_pipe.notify():
            self._take_notify_pipe(caller)

    def _take_notify_pipe(self, caller: ClientState) -> None:
        if caller.notify_pipe is not None:
            caller.notify_pipe.close()
            caller.notify_pipe = None

    # Facts ---------------------------------------------------------------------------------------------------------

    def gone(self, caller: ClientState) -> Sequence[int]:
        """Extents shared with a connection that were given back since it was last told."""
        retired = self.store.blocks.dram.retired
        if caller.retired_seen == retired:
            return ()
        gone = self.store.gone(list(caller.extents))
        caller.retired_seen = retired
        caller.extents.difference_update(gone)
        for extent in gone:
            del caller.shares[extent]
        return gone

    def __len__(self) -> int:
        return len(self._callers)

    def sessions(self) -> Iterator[Session]:
        """Every session, with or without open connections."""
        with self._lock:
            return iter(list(self._sessions.values()))

    def reservations(self) -> dict[bytes, int]:
        """Reservations in progress of each session, by its token. A collective one counts once."""
        collective = self.store.collective_puts()
        with self._lock:
            counts = Counter({one.token: collective.get(one.name, 0) for one in self._sessions.values()})
            for caller in (*self._callers.values(), *self.departed.callers()):
                counts[caller.session.token] += sum(not one.is_collective for one in caller.reservations.values())
            return counts

    @property
    def open_sessions(self) -> int:
        """The number of engines' sessions, with or without open connections."""
        return sum(one.is_engine for one in self.sessions())


# ---------------------------------------------------------------------------------------------------------------------
# Closed connections whose memory may still be mapped. What such a connection held is not reused until the kernel
# reports for every extent shared with it that no mapping is left. An unmapped extent is not asked about again, since
# nothing is shared with a closed connection. So each look costs one query while a mapping stays, and `LOOKS` bounds the
# cost of a sweep, however many connections there are: the next sweep goes on where the last ended. A tenant with a slow
# query skips so many sweeps that its queries take a fiftieth of a processor: only its own memory waits for that. Not
# thread-safe, except `look`, which asks the kernel and is to be called without a lock.


LOOKS = 64
"""Kernel queries per sweep."""
SELDOM = 50
"""A tenant's slow queries take this part of the time."""
SLOW_SECONDS = 0.001


class SlowTenants:
    """Tenants whose memory the kernel is slow to answer for: it walks all locks on it, of which a client may place as
    many as it likes. What takes long for a tenant is done so seldom that it takes a fixed part of the time."""

    def __init__(self, now: Callable[[], float], seldom: float, allowed_seconds: float = 0.0) -> None:
        """now: seconds that never go back. seldom: the time for each second that is taken. allowed_seconds: before a
        tenant waits; refilled by that part of the time that passes."""
        self._now, self._seldom, self._allowed = now, seldom, seldom * allowed_seconds
        self._settled_at: dict[bytes, float] = {}  # by tenant: when what it took will be that part of the time

    def waits(self, tenant: bytes) -> bool:
        settled_at = self._settled_at.get(tenant)
        if settled_at is None:
            return False
        left = settled_at - self._now()
        if left <= 0:
            self._settled_at.pop(tenant, None)
        return left > self._allowed

    def took(self, tenant: bytes, seconds: float) -> bool:
        """Count what something took; returns whether the tenant now waits."""
        if seconds > SLOW_SECONDS:
            self._settled_at[tenant] = max(self._now(), self._settled_at.get(tenant, 0.0)) + self._seldom * seconds
        return self.waits(tenant)


class DisconnectedClients:
    """By tenant, and in the order of their looks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._gone: OrderedDict[int, ClientState] = OrderedDict()  # by number, in the order of their turns
        self._of: Counter[bytes] = Counter()
        self._slow = SlowTenants(store.clock.monotonic_seconds, SELDOM)
        self._looked_at: dict[bytes, object] = {}  # by tenant: the look that some thread is at
        self._asked: list[int] = []  # connections asked about since the last sweep began
        self.looks = 0
        """Kernel queries since the start."""

    def add(self, gone: ClientState) -> bool:
        """Add a disconnected client; returns whether it was not here yet."""
        if gone.number in self._gone:
            return False
        self._gone[gone.number], gone.mapped = gone, list(gone.extents)
        self._of[gone.whose] += 1
        return True

    def remove(self, gone: ClientState) -> bool:
        """It maps nothing any more; returns whether it was here."""
        if self._gone.pop(gone.number, None) is None:
            return False
        self._of[gone.whose] -= 1
        self._of += Counter()  # without tenants that have none
        return True

    def turns(self) -> list[ClientState]:
        """Those to look at in this sweep; those looked at since the last one go to the end."""
        asked, self._asked = self._asked, []
        for number in asked:
            if number in self._gone:
                self._gone.move_to_end(number)
        return list(islice((gone for gone in self._gone.values() if not self._slow.waits(gone.whose)), LOOKS))

    def look(self, gone: ClientState, most: int = LOOKS) -> tuple[bool, int]:
        """Whether it may still have memory mapped, and the queries made: at most `most`, and none while its tenant
        skips sweeps or another thread asks about one of its connections: many threads asking at once would take the
        socket thread's processor."""
        extents = gone.mapped  # another thread's findings meanwhile are as valid
        if not extents or self._slow.waits(gone.whose):
            return bool(extents), 0
        look = object()
        if self._looked_at.setdefault(gone.whose, look) is not look:
            return True, 0
        try:
            unmapped, asked, seconds = self._store.unmapped(extents[:most], gone.number)
        finally:
            del self._looked_at[gone.whose]
        gone.mapped = extents[unmapped:]
        self.looks += asked
        self._asked.append(gone.number)
        self._slow.took(gone.whose, seconds)
        return bool(gone.mapped), asked

    def count_of(self, tenant: bytes) -> int:
        """How many a tenant has; its couriers count under its id followed by `COURIERS`."""
        return self._of[tenant]

    def callers(self) -> list[ClientState]:
        return list(self._gone.values())

    def __len__(self) -> int:
        return len(self._gone)
