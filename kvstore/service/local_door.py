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
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvstore.block.errors import StoreError
from kvstore.block.identity import TenantKeys
from kvstore.protocol import messages as m
from kvstore.protocol.status import DoorStatus
from kvstore.service.accounting import DoorCounts, DoorFigures, Refusal
from kvstore.service.connections import (
    LARGE_BYTES,
    AdminVerbs,
    Connection,
    CourierGreeting,
    DoorAwaits,
    DoorLimits,
    Lines,
    Listener,
    QueuedRequest,
    Turns,
    close_all,
    read_request,
)
from kvstore.service.descriptors import MOST_UNCLOSED, DescriptorsSent, share_of
from kvstore.service.dispatch import Handlers
from kvstore.service.parked import Response
from kvstore.service.sessions import ClientState, Sessions
from tiering.clock import Clock
from tiering.counts.waits import Waits
from tiering.faults import CONNECTIONS, DOOR_THREADS, SENT, FaultReports, RateLimitedLog, Unheard, kind_of
from tiering.files import listening_socket, remove_socket

_TOKEN_SECONDS = 0.001
"""How soon connections that wait for the rate are looked at again."""
_PEER = struct.Struct("iII")  # struct ucred
ADMIN_THREADS = 4
ADMIN_MODE = 0o600
TURN_SECONDS = 0.001
SLOW_COST = 10
"""What a request served by a thread of the pool counts for, in messages."""
ACCEPT_COST, LOOK_COST = 5, 1 / 8
"""Cost of a new connection to its tenant, and of each connection that the kernel is asked about."""
END_THREADS = 2
TURNED_AWAY = 32
"""Rejected connections that are still being sent the reason; the oldest make room."""
SHOW_OUT_SECONDS = 10.0
UNREAD_SECONDS = 1.0
"""When the kernel sends no more descriptors, a client with some unread for longer may be disconnected."""
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
        self._listeners: list[Listener] = []
        self._connections: set[Connection] = set()
        self._rejected: deque[Connection] = deque()
        self._leaving: set[ClientState] = set()  # disconnected clients that `Sessions` does not know of yet
        self._done: deque[QueuedRequest] = deque()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._spare: socket.socket | None = self._woken.dup()  # reserves a descriptor for the operator
        self._pool = ThreadPoolExecutor(limits.threads, "kv-door")
        self._large_pool = ThreadPoolExecutor(1, "kv-door-large")
        self._turns, self._large_turns = Turns(), Turns()
        self._lines: Lines[QueuedRequest] = Lines(limits.threads)
        self._long_lines: Lines[QueuedRequest] = Lines(limits.long_threads)
        self._large: list[QueuedRequest] = []  # waiting for the thread
        self._large_now: QueuedRequest | None = None
        self._long_pool = ThreadPoolExecutor(limits.long_threads, "kv-door-long")
        self._is_watchful = True  # whether a client came, or needs attention, since the last look
        self._accept_paused: list[Listener] = []  # listeners without a descriptor for a new connection
        self._is_ending = False  # a thread of the pool unpins ended leases
        self._closing = False
        self._closes_at = 0.0
        self._swept_at = clock.monotonic_seconds()
        self._thread: threading.Thread | None = None
        self._sweep_pool = ThreadPoolExecutor(1, "kv-door-sweep")
        self._end_pool = ThreadPoolExecutor(END_THREADS, "kv-door-end")  # frees what disconnected clients held
        self._is_sweeping = False
        self._to_show_out: deque[tuple[bytes, threading.Event]] = deque()
        self._awaits = DoorAwaits(handlers, clock, self._wake, self._answer, self._watch)
        self._figures = DoorFigures()

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
            listener.line, listener.long_line = self._lines.new_line(), self._long_lines.new_line()
        self._listeners.append(listener)
        self._selector.register(listener.socket, selectors.EVENT_READ, listener)

    def disconnect(self, tenant: bytes) -> bool:
        """End a tenant's connections, and accept the next with other keys; returns whether that is done. For other
        threads."""
        done = threading.Event()
        self._to_show_out.append((tenant, done))
        self._wake()
        return done.wait(SHOW_OUT_SECONDS)

    def usage(self) -> DoorStatus:
        """Connections now, and counts since the start."""
        return self._figures.status(*self._there())

    def change_limits(self, limits: DoorLimits) -> None:
        """Change rates only, from the next message on."""
        self._limits = limits

    def waited(self) -> dict[int, Waits]:
        """By connection number, how long each open connection's requests waited to be begun."""
        there = [one for one in list(self._connections) if one.refusal is None]
        return {one.caller.number: one.waited for one in there if isinstance(one.caller, ClientState)}

    def counts(self) -> DoorCounts:
        """`usage` without single connections: cheap for any number of them."""
        return self._figures.counts(*self._there())

    def _there(self) -> tuple[int, int]:
        """Connections of tenants, and of the admin and observers' sockets; couriers' are in neither."""
        there = [one for one in list(self._connections) if one.refusal is None and one.listener.greet is None]
        admin = sum(one.admin is not None for one in there)
        return len(there) - admin, admin

    def start(self) -> None:
        self._sessions.watch_memory(self._wake)
        # Start one of each now: if the machine has no more threads later, every client is still served.
        own = [one.pool for one in self._listeners if one.pool is not None]
        for pool in (self._pool, self._large_pool, self._long_pool, self._sweep_pool, self._end_pool, *own):
            pool.submit(lambda: None)
        thread = threading.Thread(target=self._serve, name="kv-local-door", daemon=True)
        thread.start()
        self._thread = thread

    def close(self, seconds: float) -> None:
        """Take no more requests, answer those in flight for at most that long, and disconnect every client."""
        self._closing = True
        self._closes_at = self._clock.monotonic_seconds() + seconds
        self._wake()
        if self._thread is not None:
            self._thread.join(2 * seconds + 1)
        elif self._listeners:
            self._end()

    @property
    def is_served(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def __len__(self) -> int:
        """Open connections, including rejected ones that are still being sent the reason."""
        return len(self._connections)

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
        while not self._is_over():
            # Messages found at once arrived after the last look, and are taken to have come right after it; those that
            # end a wait have just come.
            came_at, looked_at = looked_at, self._clock.monotonic_seconds()
            found = self._selector.select(0)
            if not found and not is_busy:
                rest = self._awaits.rest_seconds(_TOKEN_SECONDS if ready else self._rest_seconds())
                found = self._selector.select(rest)
                came_at = looked_at = self._clock.monotonic_seconds()
            self._is_watchful |= bool(found)
            for key, events in found:
                if isinstance(key.data, Listener):
                    self._accept_safely(key.data)
                elif key.data is None:
                    self._woken.recv(LARGE_BYTES)
                else:
                    exchange = partial(self._exchange, key.data, events)
                    self._or_disconnect(key.data, "a connection could not be read or written", exchange)
                    if not key.data.closed and key.data.has_message() and key.data not in ready:
                        key.data.ready_at = came_at
                        ready[key.data] = None
            self._safely("clients cannot be told that memory was given back", self._sessions.notify)
            self._deliver()
            is_busy = self._take_turn(ready) if not self._closing else False
            self._safely("awaits that are over cannot be answered", self._awaits.deliver)
            is_busy |= self._awaits.has_more
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
        first, whatever their number of connections. Returns whether any was taken.

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
        return has_taken

    def _is_over(self) -> bool:
        if not self._closing:
            return False
        self._awaits.close()
        is_idle = not any(one.in_flight or one.parked or one.unsent for one in self._connections)
        return is_idle or self._clock.monotonic_seconds() >= self._closes_at

    def _look_around(self, ready: dict[Connection, None]) -> None:
        """At intervals, look after disconnected clients and those silent for too long."""
        now = self._clock.monotonic_seconds()
        if now - self._swept_at < self._limits.sweep_seconds:
            return
        self._swept_at = now
        while self._to_show_out:
            self._disconnect_tenant(*self._to_show_out.popleft())
        for listener in self._accept_paused:
            self._selector.register(listener.socket, selectors.EVENT_READ, listener)
        self._accept_paused.clear()
        for listener in self._listeners:
            listener.closer.look()
            listener.unread.count()  # closes what has been read meanwhile
        if self._spare is None:
            with suppress(OSError):
                self._spare = self._woken.dup()
        self._begin_sweep()
        self._is_watchful = self._sessions.is_waited_for
        for one in list(self._connections):
            if one.is_refused:
                self._try_again(one)
            waits_for_him = (
                one.caller is None
                or (one.unsent and not one.is_refused)
                or (one.read and one not in ready and not one.in_flight)
            )
            self._is_watchful |= bool(waits_for_him or one.in_flight or one.is_refused)
            if waits_for_him and now - one.heard_at > self._limits.silence_seconds:
                self._disconnect(one)
            elif one.has_message() and not one.ending:
                ready.setdefault(one)

    def _begin_sweep(self) -> None:
        """In a separate thread, one sweep at a time: kernel queries can take long."""
        if self._is_sweeping:
            return
        self._is_sweeping = True

        def sweep() -> None:
            try:
                self._safely("what those who are gone left behind cannot be given back", self._sessions.sweep)
            finally:
                self._is_sweeping = False

        try:
            self._sweep_pool.submit(sweep)
        except (RuntimeError, MemoryError):  # the machine has no thread for it
            sweep()

    def _rest_seconds(self) -> float:
        often = self._limits.sweep_seconds
        return often if self._is_watchful or self._accept_paused or self._closing else max(often, IDLE_LOOK_SECONDS)

    def _disconnect_tenant(self, tenant: bytes, done: threading.Event) -> None:
        for listener in self._listeners:
            is_theirs = listener.tenant is not None and listener.tenant.tenant == tenant
            listener.tenant = None if is_theirs else listener.tenant
            for one in [one for one in self._connections if one.listener is listener]:
                if is_theirs or (listener.greet is not None and one.tenant in (b"", tenant)):
                    self._disconnect(one)
        done.set()

    def _accept_safely(self, listener: Listener) -> None:
        path, accept = listener.path, partial(self._accept, listener)
        if not self._attempt(accept, f"accept {path}", "no connection is accepted at %s", path):
            self._pause_accept(listener)

    def _pause_accept(self, listener: Listener) -> None:
        if listener not in self._accept_paused:
            self._selector.unregister(listener.socket)
            self._accept_paused.append(listener)

    def _accept(self, listener: Listener) -> None:
        if len(listener.closer) >= MOST_UNCLOSED:
            self._pause_accept(listener)
            return
        try:
            sock = self._accepted(listener)
        except BlockingIOError:  # gone again
            return
        except OSError as error:  # no descriptors left: the others are served, and this client is let in later
            self._faults.failed(CONNECTIONS, kind_of(error), f"no client is let in: {error.strerror}")
            self._pause_accept(listener)
            return
        if not listener.is_operator or self._spare is not None:
            self._tell_worked(CONNECTIONS)
        listener.share.pay(ACCEPT_COST)
        sock.setblocking(False)
        _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        most = self._most(listener)
        if len(self._like(listener)) >= most:
            nameless = [one for one in self._like(listener) if one.caller is None]
            if nameless:  # connections before their hello make room first
                self._disconnect(min(nameless, key=lambda one: one.heard_at))
        refusal, why = None, Refusal.FULL
        if listener.users is not None and user not in listener.users:
            why, text = Refusal.USER, f"user {user} may not use this socket; name it in its `users`, or use another one"
            refusal = m.Failed(m.RequestFault.BAD_INPUT, text)
        elif len(self._like(listener)) >= most or self._closing:
            why = Refusal.CLOSING if self._closing else Refusal.FULL
            refusal = m.Failed(
                m.RequestFault.BUSY, "there are as many connections as may be; end some, or raise door.connections"
            )
        elif self._departed_of(listener) + listener.unread.ended_count >= most:
            why = Refusal.DEPARTED
            text = f"{most} connections of this tenant are gone whose processes still map memory, or have not read all"
            refusal = m.Failed(m.RequestFault.BUSY, f"{text}; end these processes, or raise door.connections")
        connection = Connection(sock, listener, self._clock.monotonic_seconds(), self._limits)
        connection.refusal = refusal
        self._connections.add(connection)
        if refusal is not None:
            self._figures.refused[why] += 1
            self._rejected.append(connection)
            if len(self._rejected) > TURNED_AWAY:
                self._disconnect(self._rejected[0])
        self._watch(connection)

    def _accepted(self, listener: Listener) -> socket.socket:
        try:
            return listener.socket.accept()[0]
        except OSError as error:
            if not listener.is_operator or self._spare is None or error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._faults.failed(CONNECTIONS, kind_of(error), "only the operator is let in")
            self._spare.close()
            self._spare = None
            return listener.socket.accept()[0]

    def _departed_of(self, listener: Listener) -> int:
        if listener.tenant is None:
            return 0
        tenant = listener.tenant.tenant
        leaving = sum(one.keys.tenant == tenant and not one.is_courier for one in list(self._leaving))
        return leaving + self._sessions.departed_of(tenant)

    def _like(self, listener: Listener) -> list[Connection]:
        return [one for one in self._connections if one.refusal is None and one.listener is listener]

    def _most(self, listener: Listener) -> int:
        if listener.pool is not None:
            return listener.most
        return max(1, self._limits.connections // sum(one.pool is None for one in self._listeners))

    def _exchange(self, connection: Connection, events: int) -> None:
        if connection.closed:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
                self._begin(connection)
            if events & selectors.EVENT_READ and not connection.ending:
                connection.receive(self._clock.monotonic_seconds())
        except BlockingIOError:
            pass
        except DescriptorsSent:
            path = connection.listener.path
            self._log.warn(f"descriptors {path}", "a client sent descriptors to %s, and was hung up on", path)
            self._disconnect(connection)
        except OSError:
            self._disconnect(connection)
        self._watch(connection)

    def _or_disconnect(self, connection: Connection, what: str, work: Callable[[], object]) -> None:
        """Do what concerns one connection: a fault of it is logged, and ends this connection and no other."""
        if not self._is_done(connection, what, work):
            self._disconnect(connection)

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
            self._put_off(asked, self._large_pool)
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
            self._put_off(asked, self._pool_for(asked) if is_slow else self._large_pool)
            return
        self._waited(connection, begun_at - asked.since)
        connection.ending = connection.caller is None
        self._answer(connection, request.number, served, asks=isinstance(verb, m.Ping))

    def _most_unread(self) -> int:
        return share_of(sum(one.admin is None for one in self._listeners))

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
            if listener.admin is not None:
                connection.caller, answer = listener.admin.greet(verb)
            elif listener.greet is not None:
                connection.caller, answer = listener.greet(verb)
            else:
                tenant = listener.tenant_keys()
                if isinstance(tenant, m.Failed):
                    return Response(tenant)
                connection.caller, answer = self._handlers.greet(tenant, verb)
            return Response(answer)
        if listener.admin is not None:
            return listener.admin.serve(verb)
        assert isinstance(caller, ClientState)
        return self._handlers.serve(caller, verb)

    def _pool_for(self, asked: QueuedRequest) -> ThreadPoolExecutor:
        return asked.connection.listener.pool or (self._long_pool if asked.is_long else self._pool)

    def _put_off(self, asked: QueuedRequest, pool: ThreadPoolExecutor) -> None:
        connection = asked.connection
        asked.pool = pool
        connection.in_flight += 1
        connection.in_flight_bytes += asked.length
        if pool is self._large_pool:
            connection.large = asked
            self._large.append(asked)
            self._begin_large()
            return
        connection.waiting.append(asked)
        self._begin(connection)

    def _begin_large(self) -> None:
        """Begin the next large message, least-served tenant first, which the executor's own queue would not do."""
        while self._large_now is None and self._large:
            now = self._clock.monotonic_seconds()
            asked = min(self._large, key=lambda one: one.connection.large_rank(now))
            asked.connection.listener.large_share.begin()
            asked.begun_at = now
            self._large.remove(asked)
            self._large_now = asked
            work = self._read_slowly if asked.request is None else self._serve_slowly
            if self._submitted(self._large_pool, work, asked):
                return
            if asked.request is None:
                self._read_slowly(asked)
            else:
                self._say_busy(asked)

    def _begin(self, connection: Connection) -> None:
        """Begin a connection's next deferred messages, within its limit, and none while its answers are unread."""
        while connection.waiting and not connection.closed:
            asked = connection.waiting[0]
            if not asked.is_long and connection.running >= self._limits.running:
                break
            if connection.unsent_bytes >= self._limits.unread_bytes:
                break
            connection.waiting.popleft()
            if asked.is_long:
                connection.long_running += 1
            else:
                connection.running += 1
            assert asked.pool is not None
            if asked.pool is self._pool:
                connection.listener.line.waiting.append(asked)
            elif asked.pool is self._long_pool:
                connection.listener.long_line.waiting.append(asked)
            elif not self._submitted(asked.pool, self._serve_slowly, asked):
                self._say_busy(asked)
        self._begin_pooled()

    def _begin_pooled(self) -> None:
        """Here and not in the executor's queue, where each would wait behind a flooding client's."""
        for lines, pool in ((self._lines, self._pool), (self._long_lines, self._long_pool)):
            while (asked := lines.begin()) is not None:
                if not self._submitted(pool, self._serve_slowly, asked):
                    self._say_busy(asked)

    def _submitted(self, pool: ThreadPoolExecutor, work: Callable[[QueuedRequest], None], asked: QueuedRequest) -> bool:
        """Whether a thread of the pool does it. If the machine has no new thread, the pool may have queued it for an
        old one all the same: either that thread or this method takes it, not both."""
        unbegun = [asked]

        def begin() -> None:
            try:
                one = unbegun.pop()
            except IndexError:
                return
            work(one)

        try:
            pool.submit(begin)
            self._tell_worked(DOOR_THREADS)
        except (RuntimeError, MemoryError) as error:
            if not self._closing:
                self._faults.failed(DOOR_THREADS, kind_of(error), "a request has no thread")
            try:
                unbegun.pop()
            except IndexError:
                return True
            return False
        return True

    def _say_busy(self, asked: QueuedRequest) -> None:
        asked.served = Response(m.Failed(m.RequestFault.BUSY, "no thread is free"))
        self._done.append(asked)
        self._wake()

    def _read_slowly(self, asked: QueuedRequest) -> None:
        """In the thread for large messages, one at a time: decoding one holds the interpreter."""

        def read() -> None:
            try:
                read_request(asked)
            except ValueError as error:
                asked.served = Response(m.Failed(m.RequestFault.MALFORMED, str(error)))

        self._finish(asked, m.RequestFault.MALFORMED, "a message could not be read", read)

    def _serve_slowly(self, asked: QueuedRequest) -> None:
        asked.waited = self._clock.monotonic_seconds() - asked.since
        assert asked.request is not None
        verb = asked.request.verb

        def serve() -> None:
            try:
                asked.served = self._serve_verb(asked.connection, verb)
            except StoreError as error:  # no keys for him
                asked.served = Response(m.failed(m.RequestFault.BUSY, str(error)))

        self._finish(asked, m.RequestFault.BUSY, "a request could not be served", serve)

    def _finish(self, asked: QueuedRequest, fault: m.RequestFault, what: str, work: Callable[[], None]) -> None:
        """Do it, and hand the outcome to the door's thread; a fault of the work is the answer."""
        if not self._is_done(asked.connection, what, work):
            asked.served = Response(m.Failed(fault, "a fault of the sidecar; it is in its log"))
        self._done.append(asked)
        self._wake()

    def _deliver(self) -> None:
        while self._done:
            asked = self._done.popleft()
            connection = asked.connection
            connection.in_flight -= 1
            connection.in_flight_bytes -= asked.length
            if asked.pool is self._pool:
                self._lines.end(connection.listener.line)
            elif asked.pool is self._long_pool:
                self._long_lines.end(connection.listener.long_line)
            if connection.large is asked:
                connection.large = self._large_now = None
                connection.listener.large_share.pay(self._clock.monotonic_seconds() - asked.begun_at)
            elif asked.is_long:
                connection.long_running -= 1
            else:
                connection.running -= 1
            self._or_disconnect(connection, "an answer could not be given", partial(self._deliver_one, asked))
            self._begin_large()
            self._begin(connection)
            self._begin_pooled()
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
            self._disconnect(connection)
            return
        connection.put(made[0], list(served.descriptors))
        try:
            self._flush(connection)
        except OSError:
            self._disconnect(connection)

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
            self._hang_up_on_the_worst(connection)
            return
        if has_descriptors and not connection.unsent:
            self._tell_worked(SENT)

    def _tell_worked(self, what: str) -> None:
        if what in self._faults.failing:
            self._faults.worked(what)

    def _try_again(self, connection: Connection) -> None:
        connection.is_refused, connection.heard_at = False, self._clock.monotonic_seconds()
        try:
            self._flush(connection)
        except OSError:
            self._disconnect(connection)
        self._watch(connection)

    def _hang_up_on_the_worst(self, beside: Connection) -> None:
        """Disconnect the client with the most descriptors unread for a while, other than the one that waits."""
        since = self._clock.monotonic_seconds() - UNREAD_SECONDS
        counts = {one: one.unread.count_since(since) for one in self._connections}
        worst = max(counts, key=lambda one: counts[one], default=beside)
        if worst is beside or not counts[worst]:
            return
        path = worst.listener.path
        self._log.warn(f"unread {path}", "a client of %s did not read %d descriptors for long", path, counts[worst])
        self._disconnect(worst)

    def _watch(self, connection: Connection) -> None:
        if connection.closed:
            return
        if connection.ending and not connection.unsent and not connection.in_flight:
            self._disconnect(connection)
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
            self._disconnect(connection)
            return
        connection.interest = interest

    def _disconnect(self, connection: Connection) -> None:
        if connection.closed:
            return
        self._connections.discard(connection)
        if connection.interest:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection.socket)
        connection.discard(self._limits, self._clock.monotonic_seconds())
        if connection.large in self._large:
            self._large.remove(connection.large)
        for line in (connection.listener.line, connection.listener.long_line):
            line.leave_out(lambda one: one.connection is connection)
        if connection.refusal is not None:
            self._rejected.remove(connection)
        if not isinstance(connection.caller, ClientState):
            return
        self._awaits.gone(connection)
        self._leaving.add(connection.caller)
        try:  # it may have held much
            self._end_pool.submit(self._left, connection.caller)
        except (RuntimeError, MemoryError):  # the pool is closed, or has no thread for it
            self._left(connection.caller)

    def _left(self, caller: ClientState) -> None:
        _log.debug("client left", extra={"connection": caller.number})
        try:
            self._sessions.left(caller)
            self._handlers.parking.left(caller)
        finally:
            self._leaving.discard(caller)
        with suppress(OSError):  # closed meanwhile
            self._wake()

    def _end(self) -> None:
        for listener in self._listeners:
            remove_socket(listener.path)  # first: the next process makes a new one
            if listener not in self._accept_paused:
                self._selector.unregister(listener.socket)
            listener.closer.close(listener.socket)  # with the connections in its backlog
        while self._to_show_out:
            self._to_show_out.popleft()[1].set()
        own = [one.pool for one in self._listeners if one.pool is not None]
        for pool in (self._pool, self._large_pool, self._sweep_pool, self._end_pool, *own):
            pool.shutdown(wait=False, cancel_futures=True)
        for connection in list(self._connections):
            self._disconnect(connection)
        self._long_pool.shutdown(wait=False, cancel_futures=True)
        self._sessions.end_notifying()
        for listener in self._listeners:
            listener.unread.close()
            listener.closer.end()
        if self._spare is not None:
            self._spare.close()
        self._selector.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the thread has not read the last ones
            self._waker.send(b"x")
