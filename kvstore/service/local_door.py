"""The API sockets (*local door*): UNIX sockets, one per tenant, on which this host's engines talk to the sidecar.

One thread reads and writes all connections; requests that may block go to a few others, and large ones to one more.
Each round serves the least-served tenant first, however many connections another one has or makes anew, and of a
tenant's connections the one with the fewest recent requests, so a flooding client delays only itself. A client that
does not read its answers, or has too much in flight, is not read from; one that is silent in the middle of a message,
or never says hello, is disconnected. `DoorLimits` bounds what a connection can make the sidecar keep.

Possession of a tenant's socket is the credential, since pods share user ids; the peer's user id is checked as well. The
operator's socket and the observers' belong to no tenant: each has its own verbs, connections and threads, so an
operator gets in even while tenants and observers use all that they may. A tenant has a share of the connections; one
that is rejected is told why. What a disconnected client held is given back by threads of their own, since that may take
long.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path

from kvstore.block.identity import TenantKeys
from kvstore.protocol import messages as m
from kvstore.service.accounting import Turns
from kvstore.service.connections import (
    LARGE_BYTES,
    MOST_UNCLOSED,
    Connection,
    DescriptorsSent,
    DoorLimits,
    DoorThreads,
    Listener,
    QueuedRequest,
    attempt,
    close_all,
    read_request,
    share_of,
    submitted,
    wake,
)
from kvstore.service.dispatch import LONG, SLOW, Handlers, Parked, ParkedLocate, Parking, Response
from kvstore.service.sessions import ClientState
from kvstore.status.tree import DoorStatus
from tiering.counts.histogram import Histogram
from tiering.faults import CONNECTIONS, SENT, FaultReports, RateLimitedLog, kind_of
from tiering.files import listening_socket, remove_socket

_PEER = struct.Struct("iII")  # struct ucred
ACCEPT_COST = 5
"""Cost of a new connection to its tenant, in messages."""
TURNED_AWAY = 32
"""Rejected connections that are still being sent the reason; the oldest make room."""
SHOW_OUT_SECONDS = 10.0
_TOKEN_SECONDS = 0.001
"""How soon connections that wait for the rate are looked at again."""
ADMIN_MODE = 0o600
TURN_SECONDS = 0.001
AWAITS_SECONDS = 0.00025
"""How long ended awaits are answered before messages are taken again."""
SLOW_COST = 10
"""What a request served by a thread of the pool counts for, in messages."""
LOOK_COST = 1 / 8
"""Cost of each connection that the kernel is asked about."""
END_THREADS = 3
IDLE_LOOK_SECONDS = 0.5
"""Interval of an idle thread's checks, so that engines have the processor to themselves."""

WAITS_KEPT = 4096
"""How many of the last requests' queueing times are kept."""

_log = logging.getLogger(__name__)


class Refusal(StrEnum):
    """Why a connection was rejected. `DEPARTED`: too many of its tenant's disconnected clients may still have memory
    mapped."""

    USER = "user"
    FULL = "full"
    DEPARTED = "departed"
    CLOSING = "closing"


class LocalDoor:
    """Serves until it is closed. `listen` first, then `start`."""

    def __init__(self, handlers: Handlers, limits: DoorLimits, faults: FaultReports) -> None:
        """faults: gets what the machine lacks."""
        self._handlers, self._sessions, self._store = handlers, handlers.sessions, handlers.sessions.store
        self._clock = clock = self._store.clock
        self._limits = limits
        self._log = RateLimitedLog(_log, clock)
        self._faults = faults
        self._refused = dict.fromkeys(Refusal, 0)  # this and the next ones are read by any thread
        self._served, self._malformed = Counter[str](), 0
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)
        self._wait_counts = Histogram()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._turns = Turns()
        self._is_watchful = True  # whether a client came, or needs attention, since the last look
        self._under_way: set[str] = set()  # what `_do_behind` has a thread at
        self._closing = False
        self._closes_at = 0.0
        self._swept_at = clock.monotonic_seconds()
        self._thread: threading.Thread | None = None
        self._end_pool = ThreadPoolExecutor(END_THREADS, "kv-door-end")  # frees what disconnected clients held
        self._parked: dict[Parked, tuple[Connection, int]] = {}  # requests that are answered later
        self._over: deque[Parked] = deque()  # ended ones
        self._over_lines: dict[Listener, deque[Parked]] = {}  # the same, by socket
        self._threads = DoorThreads(handlers, clock, limits, self._faults, self._log, self._waker)
        self._listeners: list[Listener] = []
        self._paused: list[Listener] = []  # without a descriptor for a new connection
        self._spare: socket.socket | None = self._woken.dup()  # a descriptor that is kept for the operator
        self._connections: set[Connection] = set()  # open ones, including rejected ones that are being sent the reason
        self._rejected: deque[Connection] = deque()
        self._leaving: set[ClientState] = set()  # disconnected clients that `Sessions` does not know of yet
        self._to_show_out: deque[tuple[bytes, threading.Event]] = deque()

    # Life ----------------------------------------------------------------------------------------------------------

    def listen(
        self,
        path: Path,
        host: TenantKeys | Callable[[m.Verb], Response] | Parking | None,
        mode: int = 0o660,
        users: Collection[int] | None = None,
        renew: Callable[[], TenantKeys] | None = None,
        *,
        is_operator: bool = False,
    ) -> None:
        """Open a socket: a tenant's; the operator's or the observers', whose requests the host serves; or couriers',
        each of whom names its tenant. users: user ids that may connect; None for every user who can open it. renew:
        makes new keys of the tenant, once `disconnect` has taken these away, or if there were none. Raises `OSError`.
        """
        listener = Listener(path, listening_socket(path, mode), host, users, renew, self._turns)
        listener.is_operator = is_operator
        self._threads.add(listener)
        self._listeners.append(listener)
        self._selector.register(listener.socket, selectors.EVENT_READ, listener)

    def disconnect(self, tenant: bytes) -> bool:
        """End a tenant's connections, and accept the next with other keys; returns whether that is done. For other
        threads."""
        done = threading.Event()
        self._to_show_out.append((tenant, done))
        wake(self._waker)
        return done.wait(SHOW_OUT_SECONDS)

    def usage(self) -> DoorStatus:
        """Connections now, and counts since the start."""
        there = [one for one in list(self._connections) if one.refusal is None and one.listener.couriers is None]
        admin = sum(one.admin is not None for one in there)
        waits, refused = sorted(self._waits), {str(why): count for why, count in self._refused.items()}
        p50, p99 = [round(1000 * waits[len(waits) * one // 100], 3) for one in (50, 99)] if waits else (None, None)
        counts = sum(refused.values()), self._malformed, dict(self._served)
        return DoorStatus(len(there) - admin, admin, *counts, p50, p99, refused, self._wait_counts.now())

    def change_limits(self, limits: DoorLimits) -> None:
        """Change rates only, from the next message on."""
        self._limits = self._threads.limits = limits

    def waited(self) -> dict[int, Histogram]:
        """By connection number, how long each open connection's requests waited to be begun."""
        there = [one for one in list(self._connections) if one.refusal is None]
        return {one.caller.number: one.waited for one in there if one.caller is not None}

    def start(self, failed: Callable[[], None] = lambda: None) -> None:
        """failed: called, after logging, when an internal fault ends the service."""
        self._failed = failed
        self._sessions.watch_memory(lambda: wake(self._waker))
        self._threads.start(self._end_pool)
        thread = threading.Thread(target=self._serve, name="kv-local-door", daemon=True)
        thread.start()
        self._thread = thread

    def close(self, seconds: float) -> None:
        """Take no more requests, answer those in flight for at most that long, and disconnect every client."""
        self._closing = True
        self._threads.is_closing = True
        self._closes_at = self._clock.monotonic_seconds() + seconds
        wake(self._waker)
        if self._thread is not None:
            self._thread.join(2 * seconds + 1)
        elif self._listeners:
            self._end()

    def __len__(self) -> int:
        """Open connections, including rejected ones that are still being sent the reason."""
        return len(self._connections)

    # The loop ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        is_well = False
        try:
            is_well = attempt(self._log, self._take_turns, "door", "the door has failed")
        finally:
            if not is_well:  # also where there is no memory for the line
                self._failed()

    def _take_turns(self) -> None:
        ready: dict[Connection, None] = {}  # with a whole message, in order of arrival
        is_busy = False  # a client whose message was taken in the last round has more
        looked_at = self._clock.monotonic_seconds()
        while not (self._closing and self._is_over()):
            # Messages found at once arrived after the last look, and are taken to have come right after it; those that
            # end a wait have just come.
            came_at, looked_at = looked_at, self._clock.monotonic_seconds()
            found = self._selector.select(0)
            if not found and not is_busy:
                rest = _TOKEN_SECONDS if ready else self._rest_seconds()
                if self._parked:
                    due = self._handlers.parking.due_at - self._clock.monotonic_seconds()
                    rest = max(0.0, min(rest, due))
                found = self._selector.select(rest)
                came_at = looked_at = self._clock.monotonic_seconds()
            self._is_watchful |= bool(found)
            for key, events in found:
                if isinstance(key.data, Listener):
                    self._let_in(key.data)
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
            if self._parked or self._over or self._handlers.parking.has_couriers:
                self._safely("awaits that are over cannot be answered", self._answer_awaits)
                is_busy |= bool(self._over_lines)
            self._have_leases_ended()
            self._safely("it cannot be looked after who is there and who is gone", lambda: self._look_around(ready))
        self._end()

    def _have_leases_ended(self) -> None:
        """Have a separate thread unpin the blocks of ended leases in pieces. Without it, each sweep does a piece."""
        if not self._closing and self._store.is_ending:
            self._do_behind("what leases that are over pinned cannot be given back", self._store.finish_ending)

    def _do_behind(self, what: str, work: Callable[[], object]) -> None:
        """Have another thread do it, unless one is at it. If the machine has none, a later call may."""
        if what in self._under_way:
            return
        self._under_way.add(what)

        def run() -> None:
            try:
                self._safely(what, work)
            finally:
                self._under_way.discard(what)

        if submitted(self._end_pool, run) is not None:
            self._under_way.discard(what)

    def _safely(self, what: str, work: Callable[[], object]) -> None:
        attempt(self._log, work, what, what)

    def _take_turn(self, ready: dict[Connection, None]) -> bool:
        """At most one message of each connection; tenants alternate, least-served first, whatever their number of
        connections. Returns whether any was taken, and more are left. A long round ends early: tenants that arrived
        meanwhile may have been served less than those left."""
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
        self._handlers.parking.end_all()
        is_idle = not any(one.in_flight or one.parked or one.unsent for one in self._connections)
        return is_idle or self._clock.monotonic_seconds() >= self._closes_at

    def _rest_seconds(self) -> float:
        often, is_watchful = self._limits.sweep_seconds, self._is_watchful or bool(self._paused)
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
            self._disconnect(connection)
        except OSError:
            self._disconnect(connection)

    def _or_disconnect(self, connection: Connection, what: str, work: Callable[[], object]) -> None:
        if not connection.attempt(self._log, what, work):
            self._disconnect(connection)

    def _take_message(self, connection: Connection) -> None:
        try:
            body = connection.take_body()
            asked = QueuedRequest(connection, body, len(body), connection.ready_at)
            is_large = asked.length > LARGE_BYTES
            if is_large and not connection.is_greeted:
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
        self._served[m.name_of(verb)] += 1
        if connection.caller is not None:
            connection.pay(self._handlers.cost(connection.caller, verb))
        if isinstance(verb, m.Await | m.Cancel) and connection.caller is not None:
            self._waited(connection, self._clock.monotonic_seconds() - asked.since)
            answer = self._park(connection, connection.caller, request.number, verb)
            if answer is not None:
                self._answer(connection, request.number, answer)
            return
        wanted = m.descriptors_for(verb)
        if wanted:
            connection.pay(LOOK_COST * len(connection.listener.unread))
        if wanted and connection.listener.unread.count() + wanted > self._most_unread():
            if not isinstance(verb, m.Ping):
                self._say_unread(connection, request.number)
                return
            verb = m.Ping()  # without a notification pipe
        if connection.admin is not None:
            is_slow = not isinstance(verb, m.Hello)
        else:
            is_slow = connection.listener.tenant is None if isinstance(verb, m.Hello) else isinstance(verb, SLOW)
        if is_slow:
            asked.is_long = connection.admin is None and isinstance(verb, LONG)
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
            if not is_slow:
                served = connection.serve(self._handlers, verb)
            elif isinstance(verb, m.LeasePrefix) and connection.caller is not None:
                served = self._handlers.serve_at_once(connection.caller, verb)
        if served is None:
            self._threads.defer(asked, is_large=not is_slow)
            return
        self._waited(connection, begun_at - asked.since)
        connection.ending = not connection.is_greeted
        self._answer(connection, request.number, served, asks=isinstance(verb, m.Ping))

    def _most_unread(self) -> int:
        return share_of(sum(one.admin is None for one in self._listeners))

    def _say_unread(self, connection: Connection, number: int) -> None:
        text = f"clients of this tenant have not read about {self._most_unread()} descriptors, which is its share"
        refusal = m.Failed(m.RequestFault.BUSY, f"{text}; read them, or end these clients")
        self._answer(connection, number, Response(refusal))

    def _refuse(self, connection: Connection, text: str) -> None:
        self._malformed += 1
        self._answer(connection, m.NO_NUMBER, Response(m.failed(m.RequestFault.MALFORMED, text)))
        connection.ending = True

    def _deliver(self) -> None:
        while self._threads.done:
            asked = self._threads.done.popleft()
            connection = asked.connection
            self._threads.ended(asked)
            self._or_disconnect(connection, "an answer could not be given", partial(self._deliver_one, asked))
            self._threads.begin(connection)
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
            connection.ending = not connection.is_greeted
            if connection.closed and connection.caller is not None:
                self._sessions.left(connection.caller)  # the client was gone before its hello was answered
        self._answer(connection, request.number, served)

    def _waited(self, connection: Connection, seconds: float) -> None:
        self._waits.append(seconds)
        self._wait_counts.add(seconds)
        connection.waited.add(1000 * seconds)

    def _answer(self, connection: Connection, number: int, served: Response, *, asks: bool = False) -> None:
        if served.parked is not None:
            answer = self._hold(connection, number, served.parked)
            if answer is not None:
                self._answer(connection, number, answer)
            return
        if connection.closed:
            close_all(served.descriptors)
            return
        made: list[memoryview] = []
        what = f"an answer of {type(served.answer).__name__} could not be made"
        if not connection.attempt(self._log, what, lambda: made.append(self._frame(connection, number, served, asks))):
            close_all(served.descriptors)
            self._disconnect(connection)
            return
        connection.put(made[0], list(served.descriptors))
        try:
            self._flush(connection)
        except OSError:
            self._disconnect(connection)

    def _frame(self, connection: Connection, number: int, served: Response, asks: bool) -> memoryview:
        retired: Sequence[int] = ()
        if connection.caller is not None:
            retired = self._sessions.gone(connection.caller)
            if retired and not asks:
                self._sessions.ring(connection.caller)
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
            return
        if has_descriptors and not connection.unsent and SENT in self._faults.failing:
            self._faults.worked(SENT)

    def _try_again(self, connection: Connection) -> None:
        connection.is_refused, connection.heard_at = False, self._clock.monotonic_seconds()
        try:
            self._flush(connection)
        except OSError:
            self._disconnect(connection)
        self._watch(connection)

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

    # Answering later -------------------------------------------------------------------------------------------------

    def _park(
        self, connection: Connection, caller: ClientState, number: int, verb: m.Await | m.Cancel
    ) -> Response | None:
        """Returns the answer if there is one already."""
        if isinstance(verb, m.Cancel):
            self._handlers.parking.cancel([connection.parked[one] for one in verb.numbers if one in connection.parked])
            return Response(m.Done())
        if number in connection.parked:
            return _waits_already(number)
        one = self._handlers.park(caller, verb, self._told)
        if isinstance(one, Response):
            return one
        self._parked[one], connection.parked[number] = (connection, number), one
        return None

    def _hold(self, connection: Connection, number: int, one: ParkedLocate) -> Response | None:
        """The same for a request that was asked already, perhaps by another thread."""
        one.tell = self._told  # from now on; the answer may have come already
        if number in connection.parked or connection.closed:
            self._handlers.parking.cancel([one])
            return _waits_already(number)
        if one.answer is not None:
            return Response(one.answer)
        self._parked[one], connection.parked[number] = (connection, number), one
        return None

    def _told(self, one: Parked) -> None:
        """Called by any thread, under the table's lock."""
        self._over.append(one)
        if len(self._over) == 1:
            wake(self._waker)

    def _answer_awaits(self) -> None:
        """For `AWAITS_SECONDS` at most. The least-served tenant is answered first, and pays as for a message."""
        parking = self._handlers.parking
        parking.tell_couriers()
        if not self._parked:
            self._over.clear()
            self._over_lines.clear()
            return
        now = self._clock.monotonic_seconds()
        if parking.due_at <= now:
            parking.expire()
        while self._over:
            one = self._over.popleft()
            if one in self._parked:
                self._over_lines.setdefault(self._parked[one][0].listener, deque()).append(one)
        while self._over_lines and self._clock.monotonic_seconds() - now < AWAITS_SECONDS:
            listener = min(self._over_lines, key=lambda of: of.share.starts_at)
            one = self._over_lines[listener].popleft()
            if not self._over_lines[listener]:
                del self._over_lines[listener]
            connection, number = self._parked.pop(one, (None, 0))
            if connection is not None:  # else the client disconnected meanwhile
                del connection.parked[number]
                listener.share.begin()
                listener.share.pay(1)
                self._answer(connection, number, parking.awaited(one))
                self._watch(connection)

    # Letting in ------------------------------------------------------------------------------------------------------

    def _let_in(self, listener: Listener) -> None:
        path = listener.path
        line = f"accept {path}", "no connection is accepted at %s", path
        if not attempt(self._log, partial(self._accept, listener), *line):
            self._pause(listener)

    def _most(self, listener: Listener) -> int:
        if not listener.is_tenants:
            return listener.most
        return max(1, self._limits.connections // sum(one.is_tenants for one in self._listeners))

    def _pause(self, listener: Listener) -> None:
        if listener not in self._paused:
            self._selector.unregister(listener.socket)
            self._paused.append(listener)

    def _accept(self, listener: Listener) -> None:
        if len(listener.closer) >= MOST_UNCLOSED:
            self._pause(listener)
            return
        try:
            sock = self._accepted(listener)
        except BlockingIOError:  # gone again
            return
        except OSError as error:  # no descriptors left: the others are served, and this client is let in later
            self._faults.failed(CONNECTIONS, kind_of(error), f"no client is let in: {error.strerror}")
            self._pause(listener)
            return
        if (not listener.is_operator or self._spare is not None) and CONNECTIONS in self._faults.failing:
            self._faults.worked(CONNECTIONS)
        listener.share.pay(ACCEPT_COST)
        sock.setblocking(False)
        _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        most = self._most(listener)
        if len(self._like(listener)) >= most:
            # Connections before their hello make room first; then, at a socket of no tenant, where a connection holds
            # nothing, those with no request under way.
            there = self._like(listener)
            idle = [one for one in there if listener.admin is not None and not one.in_flight and not one.unsent]
            silent = [one for one in there if not one.is_greeted] or idle
            if silent:
                self._disconnect(min(silent, key=lambda one: one.heard_at))
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
            self._refused[why] += 1
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
        return leaving + self._sessions.departed.count_of(tenant)

    def _like(self, listener: Listener) -> list[Connection]:
        return [one for one in self._connections if one.refusal is None and one.listener is listener]

    # Looking after them ----------------------------------------------------------------------------------------------

    def _look_around(self, ready: dict[Connection, None]) -> None:
        """At intervals, look after disconnected clients and those silent for too long. ready: gets connections with a
        message that were left out of it."""
        now = self._clock.monotonic_seconds()
        if now - self._swept_at < self._limits.sweep_seconds:
            return
        self._swept_at = now
        while self._to_show_out:
            self._disconnect_tenant(*self._to_show_out.popleft())
        for listener in self._paused:
            self._selector.register(listener.socket, selectors.EVENT_READ, listener)
        self._paused.clear()
        for listener in self._listeners:
            listener.closer.look()
            listener.unread.count()  # closes what has been read meanwhile
        if self._spare is None:
            with suppress(OSError):
                self._spare = self._woken.dup()
        # In a separate thread: kernel queries can take long.
        self._do_behind("what those who are gone left behind cannot be given back", self._sessions.sweep)
        is_watchful = self._sessions.is_waited_for
        for one in list(self._connections):
            if one.is_refused:
                self._try_again(one)
            waits_for_him = (
                not one.is_greeted
                or (one.unsent and not one.is_refused)
                or (one.read and one not in ready and not one.in_flight)
            )
            is_watchful |= bool(waits_for_him or one.in_flight or one.is_refused)
            if waits_for_him and now - one.heard_at > self._limits.silence_seconds:
                self._disconnect(one)
            elif one.has_message() and not one.ending:
                ready.setdefault(one)
        self._is_watchful = is_watchful

    # Disconnecting ---------------------------------------------------------------------------------------------------

    def _disconnect(self, connection: Connection) -> None:
        if connection.closed:
            return
        self._connections.discard(connection)
        if connection.interest:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection.socket)
        connection.discard(self._limits, self._clock.monotonic_seconds())
        self._threads.leave_out(connection)
        if connection.refusal is not None:
            self._rejected.remove(connection)
        if connection.caller is None:
            return
        parked, connection.parked = list(connection.parked.values()), {}
        for one in parked:
            del self._parked[one]
        self._handlers.parking.cancel(parked)
        self._leaving.add(connection.caller)
        left = partial(self._gone, connection.caller)  # it may have held much
        if submitted(self._end_pool, left) is not None:  # the pool is closed, or has no thread for it
            left()

    def _disconnect_tenant(self, tenant: bytes, done: threading.Event) -> None:
        for listener in self._listeners:
            is_theirs = listener.tenant is not None and listener.tenant.tenant == tenant
            listener.tenant = None if is_theirs else listener.tenant
            for one in [one for one in self._connections if one.listener is listener]:
                if is_theirs or (listener.couriers is not None and one.tenant in (b"", tenant)):
                    self._disconnect(one)
        done.set()

    def _gone(self, caller: ClientState) -> None:
        try:
            _log.debug("client left", extra={"connection": caller.number})
            self._sessions.left(caller)
            self._handlers.parking.left(caller)
        finally:
            self._leaving.discard(caller)
        with suppress(OSError):  # closed meanwhile
            wake(self._waker)

    def _end(self) -> None:
        for listener in self._listeners:
            remove_socket(listener.path)  # first: the next process makes a new one
            if listener not in self._paused:
                self._selector.unregister(listener.socket)
            listener.closer.close(listener.socket)  # with the connections in its backlog
        while self._to_show_out:
            self._to_show_out.popleft()[1].set()
        self._threads.close()
        self._end_pool.shutdown(wait=False, cancel_futures=True)
        for connection in list(self._connections):
            self._disconnect(connection)
        self._sessions.end_notifying()
        for listener in self._listeners:
            listener.unread.close()
            listener.closer.end()
        if self._spare is not None:
            self._spare.close()
        self._selector.close()


def _waits_already(number: int) -> Response:
    text = f"request {number} waits already; number requests anew"
    return Response(m.Failed(m.RequestFault.BAD_INPUT, text))
