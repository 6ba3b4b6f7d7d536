"""The API sockets (*local door*): UNIX sockets, one per tenant, on which this host's engines talk to the sidecar.

One thread reads and writes all connections; requests that may block go to a few others, and large ones to one more.
Each round serves the least-served tenant first, however many connections another one has or makes anew, and of a
tenant's connections the one with the fewest recent requests, so a flooding client delays only itself. A client that
does not read its answers, or has too much in flight, is not read from; one that is silent in the middle of a message,
or never says hello, is disconnected. `DoorLimits` bounds what a connection can make the sidecar keep.

Possession of a tenant's socket is the credential, since pods share user ids; the peer's user id is checked as well. The
operator's socket and the observers' belong to no tenant: each has its own verbs, connections and threads, so an
operator gets in even while tenants and observers use all that they may.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from kvstore.block.identity import TenantKeys
from kvstore.protocol import messages as m
from kvstore.service.accounting import DoorFigures, Turns
from kvstore.service.connected import ConnectedClients
from kvstore.service.connections import (
    LARGE_BYTES,
    AdminVerbs,
    Connection,
    CourierGreeting,
    DoorLimits,
    DoorThreads,
    Listener,
    QueuedRequest,
    close_all,
    read_request,
)
from kvstore.service.descriptors import DescriptorsSent, share_of
from kvstore.service.dispatch import Handlers
from kvstore.service.parked import DoorAwaits, Response
from kvstore.service.sessions import ClientState, Sessions
from kvstore.status.tree import DoorStatus
from tiering.clock import Clock
from tiering.counts.histogram import Waits
from tiering.faults import SENT, FaultReports, RateLimitedLog, Unheard, kind_of
from tiering.files import listening_socket

_TOKEN_SECONDS = 0.001
"""How soon connections that wait for the rate are looked at again."""
ADMIN_THREADS = 4
ADMIN_MODE = 0o600
TURN_SECONDS = 0.001
SLOW_COST = 10
"""What a request served by a thread of the pool counts for, in messages."""
LOOK_COST = 1 / 8
"""Cost of each connection that the kernel is asked about."""
END_THREADS = 2
IDLE_LOOK_SECONDS = 0.5
"""Interval of an idle thread's checks, so that engines have the processor to themselves."""

_log = logging.getLogger(__name__)


class LocalDoor:
    """Serves until it is closed. `listen` first, then `start`."""

    def __init__(
        self,
        handlers: Handlers,
        sessions: Sessions,
        clock: Clock,
        limits: DoorLimits,
        failed: Callable[[], None] = lambda: None,
        faults: FaultReports | None = None,
    ) -> None:
        """failed: called, after logging, when an internal fault ends the service. faults: gets what the machine
        lacks."""
        self._handlers = handlers
        self._sessions = sessions
        self._clock, self._limits = clock, limits
        self._failed = failed
        self._log = RateLimitedLog(_log, clock)
        self._faults = faults or Unheard()
        self._selector = selectors.DefaultSelector()
        self._done: deque[QueuedRequest] = deque()  # by the threads
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._turns, self._large_turns = Turns(), Turns()
        self._is_watchful = True  # whether a client came, or needs attention, since the last look
        self._is_ending = False  # a thread of the pool unpins ended leases
        self._closing = False
        self._closes_at = 0.0
        self._swept_at = clock.monotonic_seconds()
        self._thread: threading.Thread | None = None
        self._end_pool = ThreadPoolExecutor(END_THREADS, "kv-door-end")  # frees what disconnected clients held
        self._figures = DoorFigures()
        self._awaits: DoorAwaits[Connection] = DoorAwaits(
            handlers.parking, handlers.park, clock, self._wake, self._answer, self._watch
        )
        self._threads = DoorThreads(
            clock, limits, self._faults, self._done, self._wake, self._serve_verb, self._is_done
        )
        self._clients = ConnectedClients(
            sessions,
            self._threads,
            self._awaits,
            self._end_pool,
            clock,
            limits,
            self._faults,
            self._log,
            self._figures,
            self._selector,
            self._woken.dup,
            self._attempt,
            self._watch,
            self._try_again,
            self._left,
            self._wake,
        )

    # Life ----------------------------------------------------------------------------------------------------------

    def listen(
        self,
        path: Path,
        tenant: TenantKeys | None,
        mode: int = 0o660,
        users: Collection[int] | None = None,
        renew: Callable[[], TenantKeys] | None = None,
    ) -> None:
        """Open a tenant's socket. users: user ids that may connect; None for every user who can open it. renew: makes
        new keys, once `disconnect` has taken these away, or if there were none. Raises `OSError`."""
        sock = listening_socket(path, mode)
        self._listen(Listener(path, sock, tenant, users, renew, None, self._turns, self._large_turns))

    def listen_admin(
        self, path: Path, admin: AdminVerbs, mode: int = ADMIN_MODE, users: Collection[int] | None = None
    ) -> None:
        """Open a socket without tenant: the operator's, or the observers'. Raises `OSError`."""
        sock, pool = listening_socket(path, mode), ThreadPoolExecutor(ADMIN_THREADS, "kv-door-admin")
        self._listen(Listener(path, sock, None, users, None, admin, self._turns, self._large_turns, pool))

    def listen_couriers(self, path: Path, greet: CourierGreeting) -> None:
        """Open the socket for couriers of all tenants; each names its tenant. Raises `OSError`."""
        sock, pool = listening_socket(path, ADMIN_MODE), ThreadPoolExecutor(ADMIN_THREADS, "kv-door-courier")
        self._listen(Listener(path, sock, None, None, None, None, self._turns, self._large_turns, pool, greet))

    def _listen(self, listener: Listener) -> None:
        if listener.pool is None:
            self._threads.add(listener)
        self._clients.add(listener)

    def disconnect(self, tenant: bytes) -> bool:
        """End a tenant's connections, and accept the next with other keys; returns whether that is done. For other
        threads."""
        return self._clients.disconnect_tenant(tenant)

    def usage(self) -> DoorStatus:
        """Connections now, and counts since the start."""
        return self._figures.status(*self._clients.there())

    def change_limits(self, limits: DoorLimits) -> None:
        """Change rates only, from the next message on."""
        self._limits = self._clients.limits = self._threads.limits = limits

    def waited(self) -> dict[int, Waits]:
        """By connection number, how long each open connection's requests waited to be begun."""
        there = [one for one in list(self._clients.all) if one.refusal is None]
        return {one.caller.number: one.waited for one in there if isinstance(one.caller, ClientState)}

    def start(self) -> None:
        self._sessions.watch_memory(self._wake)
        self._threads.start([self._end_pool, *self._clients.own_pools()])
        self._clients.start()
        thread = threading.Thread(target=self._serve, name="kv-local-door", daemon=True)
        thread.start()
        self._thread = thread

    def close(self, seconds: float) -> None:
        """Take no more requests, answer those in flight for at most that long, and disconnect every client."""
        self._closing = True
        self._clients.is_closing = self._threads.is_closing = True
        self._closes_at = self._clock.monotonic_seconds() + seconds
        self._wake()
        if self._thread is not None:
            self._thread.join(2 * seconds + 1)
        elif self._clients.listeners:
            self._end()

    @property
    def is_served(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def __len__(self) -> int:
        """Open connections, including rejected ones that are still being sent the reason."""
        return len(self._clients.all)

    # The loop ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        is_well = False
        try:
            is_well = self._attempt(self._take_turns, "door", "the door has failed")
        finally:
            if not is_well:  # also where there is no memory for the line
                self._failed()

    def _take_turns(self) -> None:
        ready: dict[Connection, None] = {}  # with a whole message, in order of arrival
        is_busy = False  # a client whose message was taken in the last round has more
        looked_at = self._clock.monotonic_seconds()
        awaits, parking = self._awaits, self._handlers.parking
        while not self._is_over():
            # Messages found at once arrived after the last look, and are taken to have come right after it; those that
            # end a wait have just come.
            came_at, looked_at = looked_at, self._clock.monotonic_seconds()
            found = self._selector.select(0)
            if not found and not is_busy:
                rest = _TOKEN_SECONDS if ready else self._rest_seconds()
                if awaits.parked:
                    rest = awaits.rest_seconds(rest)
                found = self._selector.select(rest)
                came_at = looked_at = self._clock.monotonic_seconds()
            self._is_watchful |= bool(found)
            for key, events in found:
                if isinstance(key.data, Listener):
                    self._clients.accept(key.data)
                elif key.data is None:
                    self._woken.recv(LARGE_BYTES)
                else:
                    exchange = partial(self._exchange, key.data, events)
                    self._or_disconnect(key.data, "a connection could not be read or written", exchange)
                    if key.data.closed or not key.data.has_message() or self._closing:
                        self._watch(key.data)
                    elif key.data not in ready:  # else its turn watches it: mostly as before, without a system call
                        key.data.ready_at = came_at
                        ready[key.data] = None
            self._safely("clients cannot be told that memory was given back", self._sessions.notify)
            self._deliver()
            is_busy = self._take_turn(ready) if not self._closing else False
            if awaits.parked or awaits.over or parking.elsewhere is not None:
                self._safely("awaits that are over cannot be answered", awaits.deliver)
                is_busy |= awaits.has_more
            self._have_leases_ended()
            self._safely("it cannot be looked after who is there and who is gone", lambda: self._look_around(ready))
        self._end()

    def _have_leases_ended(self) -> None:
        """Have a separate thread unpin the blocks of ended leases in pieces. Without it, each sweep does a piece."""
        if self._is_ending or self._closing or not self._sessions.is_ending:
            return
        self._is_ending = True
        try:
            self._end_pool.submit(self._end_leases)
        except RuntimeError:  # no further thread: the one started first does it
            pass
        except MemoryError:
            self._is_ending = False

    def _end_leases(self) -> None:
        try:
            self._safely("what leases that are over pinned cannot be given back", self._sessions.finish_ending)
        finally:
            self._is_ending = False

    def _attempt(self, work: Callable[[], object], kind: str, message: str, *args: object) -> bool:
        """The guard of the door's threads, which serve all clients: do it; False for a fault, which is logged."""
        try:
            work()
        except Exception as error:
            self._log.error(kind, message, *args, error=error)
            return False
        return True

    def _safely(self, what: str, work: Callable[[], object]) -> None:
        """Do work that concerns all clients: a fault in it is logged, and they are served on."""
        self._attempt(work, what, what)

    def _take_turn(self, ready: dict[Connection, None]) -> bool:
        """Take at most one message of each connection. If several tenants want a turn, they alternate, least-served
        first, whatever their number of connections. Returns whether any was taken, and more are left.

        A long round ends early: tenants that arrived meanwhile may have been served less than those left.
        """
        now = self._clock.monotonic_seconds()
        ends_at = now + TURN_SECONDS
        has_taken = False
        lines: dict[Listener, deque[Connection]] = {}
        for connection in sorted(ready, key=lambda one: one.asked_lately(now)):
            lines.setdefault(connection.listener, deque()).append(connection)
        while lines:
            listener = min(lines, key=lambda one: one.share.starts_at)
            connection = lines[listener].popleft()
            is_taken = False
            if connection.closed or connection.ending:
                pass
            elif connection.may_ask(self._limits, self._clock.monotonic_seconds()):
                take = partial(self._take_message, connection)
                self._or_disconnect(connection, "a message could not be served", take)
                has_taken = is_taken = True
            is_full = connection.unread.sent_count and connection.unread.is_full()
            if connection.closed or connection.ending or is_full or not connection.has_message():
                del ready[connection]  # a full one is looked at again in the next sweep
            elif is_taken and len(lines) > 1:
                lines[listener].append(connection)
            self._watch(connection)
            if not lines[listener]:
                del lines[listener]
            if has_taken and self._clock.monotonic_seconds() > ends_at:
                break
        for connection in chain.from_iterable(lines.values()):  # whose turn did not come
            self._watch(connection)
        return has_taken and bool(ready)

    def _is_over(self) -> bool:
        if not self._closing:
            return False
        self._awaits.close()
        is_idle = not any(one.in_flight or one.parked or one.unsent for one in self._clients.all)
        return is_idle or self._clock.monotonic_seconds() >= self._closes_at

    def _look_around(self, ready: dict[Connection, None]) -> None:
        """At intervals, look after disconnected clients and those silent for too long."""
        now = self._clock.monotonic_seconds()
        if now - self._swept_at < self._limits.sweep_seconds:
            return
        self._swept_at = now
        self._is_watchful = self._clients.look_around(ready, now)

    def _rest_seconds(self) -> float:
        often, is_watchful = self._limits.sweep_seconds, self._is_watchful or self._clients.is_paused
        return often if is_watchful or self._closing else max(often, IDLE_LOOK_SECONDS)

    def _exchange(self, connection: Connection, events: int) -> None:
        if connection.closed:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
                self._threads.begin(connection)
            if events & selectors.EVENT_READ and not connection.ending:
                connection.receive(self._clock.monotonic_seconds())
        except BlockingIOError:
            pass
        except DescriptorsSent:
            path = connection.listener.path
            self._log.warn(f"descriptors {path}", "a client sent descriptors to %s, and was hung up on", path)
            self._clients.disconnect(connection)
        except OSError:
            self._clients.disconnect(connection)

    def _or_disconnect(self, connection: Connection, what: str, work: Callable[[], object]) -> None:
        """Do what concerns one connection: a fault of it is logged, and ends this connection and no other."""
        if not self._is_done(connection, what, work):
            self._clients.disconnect(connection)

    def _is_done(self, connection: Connection, what: str, work: Callable[[], object]) -> bool:
        path = connection.listener.path
        return self._attempt(work, str(path), "%s; socket %s", what, path)  # one client, one line

    def _take_message(self, connection: Connection) -> None:
        try:
            asked = QueuedRequest(connection, connection.take_body(), connection.ready_at)
            is_large = asked.length > LARGE_BYTES
            if is_large and connection.caller is None:
                raise ValueError(f"a hello of {asked.length} bytes; at most {LARGE_BYTES}")
            if not is_large:
                read_request(asked)
        except ValueError as error:
            self._refuse(connection, str(error))
            return
        if is_large:
            self._threads.defer(asked, is_large=True)
        else:
            self._take(asked)

    def _take(self, asked: QueuedRequest) -> None:
        connection, request = asked.connection, asked.request
        assert request is not None
        if connection.refusal is not None:
            self._answer(connection, request.number, Response(connection.refusal))
            connection.ending = True
            return
        verb = request.verb
        self._figures.served[m.name_of(verb)] += 1
        if isinstance(connection.caller, ClientState):
            connection.pay(self._handlers.cost(connection.caller, verb))
        if isinstance(verb, m.Await | m.Cancel) and isinstance(connection.caller, ClientState):
            self._waited(connection, self._clock.monotonic_seconds() - asked.since)
            self._awaits.take(connection, connection.caller, request.number, verb)
            return
        wanted = m.descriptors_for(verb)
        if wanted:
            connection.pay(LOOK_COST * len(connection.listener.unread))
        if wanted and connection.listener.unread.count() + wanted > self._most_unread():
            if not isinstance(verb, m.Ping):
                self._say_unread(connection, request.number)
                return
            verb = m.Ping()  # without a notification pipe
        is_slow = self._is_slow(connection, verb)
        if is_slow:
            asked.is_long = connection.admin is None and self._handlers.is_long(verb)
            if asked.is_long and connection.long_running >= self._limits.long_running:
                text = f"{connection.long_running} requests that may take long are under way; wait for one of them"
                self._answer(connection, request.number, Response(m.Failed(m.RequestFault.BUSY, text)))
                return
        is_heavy = connection.admin is None and self._handlers.is_heavy(verb)
        if is_slow or is_heavy:
            connection.pay(SLOW_COST)
        begun_at = self._clock.monotonic_seconds()
        served = None
        if asked.length <= LARGE_BYTES and not is_heavy:
            served = self._serve_at_once(connection, verb) if is_slow else self._serve_verb(connection, verb)
        if served is None:
            self._threads.defer(asked, is_large=not is_slow)
            return
        self._waited(connection, begun_at - asked.since)
        connection.ending = connection.caller is None
        self._answer(connection, request.number, served, asks=isinstance(verb, m.Ping))

    def _most_unread(self) -> int:
        return share_of(sum(one.admin is None for one in self._clients.listeners))

    def _say_unread(self, connection: Connection, number: int) -> None:
        text = f"clients of this tenant have not read about {self._most_unread()} descriptors, which is its share"
        refusal = m.Failed(m.RequestFault.BUSY, f"{text}; read them, or end these clients")
        self._answer(connection, number, Response(refusal))

    def _refuse(self, connection: Connection, text: str) -> None:
        self._figures.malformed += 1
        self._answer(connection, m.NO_NUMBER, Response(m.failed(m.RequestFault.MALFORMED, text)))
        connection.ending = True

    def _is_slow(self, connection: Connection, verb: m.Verb) -> bool:
        if connection.admin is not None:
            return not isinstance(verb, m.Hello)
        return connection.listener.tenant is None if isinstance(verb, m.Hello) else self._handlers.is_slow(verb)

    def _serve_at_once(self, connection: Connection, verb: m.Verb) -> Response | None:
        caller = connection.caller
        return self._handlers.serve_at_once(caller, verb) if isinstance(caller, ClientState) else None

    def _serve_verb(self, connection: Connection, verb: m.Verb) -> Response:
        caller, listener = connection.caller, connection.listener
        if isinstance(verb, m.Hello):
            connection.caller, answer = listener.greeted(verb, self._handlers.greet)
            return Response(answer)
        if listener.admin is not None:
            return listener.admin.serve(verb)
        assert isinstance(caller, ClientState)
        return self._handlers.serve(caller, verb)

    def _deliver(self) -> None:
        while self._done:
            asked = self._done.popleft()
            connection = asked.connection
            self._threads.ended(asked)
            self._or_disconnect(connection, "an answer could not be given", partial(self._deliver_one, asked))
            self._threads.begin_next(connection)
            self._watch(connection)

    def _deliver_one(self, asked: QueuedRequest) -> None:
        connection, request, served = asked.connection, asked.request, asked.served
        if served is None:  # it was only decoded
            if not connection.closed:
                self._take(asked)
            return
        if request is None:
            assert isinstance(served.answer, m.Failed)
            self._refuse(connection, served.answer.text)
            return
        self._waited(connection, asked.waited)
        if isinstance(request.verb, m.Hello):
            connection.ending = connection.caller is None
            if connection.closed and isinstance(connection.caller, ClientState):
                self._sessions.left(connection.caller)  # the client was gone before its hello was answered
        self._answer(connection, request.number, served)

    def _waited(self, connection: Connection, seconds: float) -> None:
        self._figures.waited(seconds)
        connection.waited.add(seconds)

    def _answer(self, connection: Connection, number: int, served: Response, *, asks: bool = False) -> None:
        if served.parked is not None:
            self._awaits.hold(connection, number, served.parked)
            return
        if connection.closed:
            close_all(served.descriptors)
            return
        made: list[memoryview] = []
        path, name = connection.listener.path, type(served.answer).__name__
        line = "an answer of %s could not be made; socket %s", name, path
        if not self._attempt(lambda: made.append(self._frame(connection, number, served, asks)), str(path), *line):
            close_all(served.descriptors)
            self._clients.disconnect(connection)
            return
        connection.put(made[0], list(served.descriptors))
        try:
            self._flush(connection)
        except OSError:
            self._clients.disconnect(connection)

    def _frame(self, connection: Connection, number: int, served: Response, asks: bool) -> memoryview:
        caller = connection.caller
        retired = self._sessions.gone(caller) if isinstance(caller, ClientState) else ()
        if retired and not asks and isinstance(caller, ClientState):
            self._sessions.ring(caller)
        return memoryview(m.pack(m.Reply(number, served.answer, list(retired))))

    def _flush(self, connection: Connection) -> None:
        """Raises `OSError` if the client is gone. If too many descriptors are in flight, answers wait until there are
        fewer: a client that reads none is no reason to disconnect others."""
        if connection.is_refused:
            return
        has_descriptors = bool(connection.unsent and connection.unsent[0][1])
        try:
            connection.flush(self._clock)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            connection.is_refused = True
            self._faults.failed(SENT, kind_of(error), "too many are under way that no client has read")
            self._clients.hang_up_on_the_worst(connection)
            return
        if has_descriptors and not connection.unsent and SENT in self._faults.failing:
            self._faults.worked(SENT)

    def _try_again(self, connection: Connection) -> None:
        connection.is_refused, connection.heard_at = False, self._clock.monotonic_seconds()
        try:
            self._flush(connection)
        except OSError:
            self._clients.disconnect(connection)
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        if connection.closed:
            return
        if connection.ending and not connection.unsent and not connection.in_flight:
            self._clients.disconnect(connection)
            return
        interest = selectors.EVENT_WRITE if connection.unsent and not connection.is_refused else 0
        if not connection.ending and not self._closing and not connection.has_message():
            interest |= selectors.EVENT_READ
        if interest == connection.interest:
            return
        try:
            if not connection.interest:
                self._selector.register(connection.socket, interest, connection)
            elif not interest:
                self._selector.unregister(connection.socket)
            else:
                self._selector.modify(connection.socket, interest, connection)
        except (OSError, ValueError, KeyError, MemoryError) as error:  # the kernel watches no more sockets
            path = connection.listener.path
            self._log.error(str(path), "a connection cannot be watched; socket %s", path, error=error)
            self._clients.disconnect(connection)
            return
        connection.interest = interest

    def _left(self, caller: ClientState) -> None:
        _log.debug("client left", extra={"connection": caller.number})
        self._sessions.left(caller)
        self._handlers.parking.left(caller)

    def _end(self) -> None:
        self._clients.stop()
        self._threads.close()
        for pool in (self._end_pool, *self._clients.own_pools()):
            pool.shutdown(wait=False, cancel_futures=True)
        for connection in list(self._clients.all):
            self._clients.disconnect(connection)
        self._threads.close_long()
        self._sessions.end_notifying()
        self._clients.close()
        self._selector.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the thread has not read the last ones
            self._waker.send(b"x")
