"""Connections of the API sockets: what was read of each and not served, and answered and not sent.

Each has a token bucket, filled at the configured rate; every request takes some out. Tenants are served least-served
first, and of a tenant's connections the one with the fewest recent requests.
"""

from __future__ import annotations

import math
import os
import socket
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kvstore.block.errors import StoreError
from kvstore.block.identity import TenantKeys
from kvstore.protocol import messages as m
from kvstore.service import descriptors
from kvstore.service.descriptors import TenantUnread, Unread
from kvstore.service.dispatch import Handlers
from kvstore.service.parked import Parked, ParkedLocate, Response
from kvstore.service.sessions import ClientState
from tiering.clock import Clock
from tiering.counts.waits import Waits

_READ_BYTES = 256 << 10
COST_BYTES = 2 << 10
"""So many bytes of a message count as one more message."""
LARGE_BYTES = 64 << 10
"""A longer message takes milliseconds to decode, and goes to a thread that decodes one at a time."""
LARGE_BYTES_PER_SECOND, LARGE_BURST_BYTES = 1 << 20, 32 << 20
"""The rate of such messages for one connection, and how much it may save up: thirty prompts of a million tokens in
blocks of 64. They have their own bucket, since short messages behind them would otherwise wait until they are paid.
Decoding one holds the interpreter for up to 3 ms: their rate bounds what other clients wait."""
LATELY_SECONDS = 10.0
"""Requests of this age count for a third of present ones when connections of a tenant are ranked."""


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Named upper bounds. connections: at a time, in equal shares for the tenants. in_flight: unanswered requests of
    one connection, and in_flight_bytes, of their messages. running, long_running: how many of these run at a time;
    further ones wait, but a further long one, which may take many seconds, is refused. unread_bytes: answers that one
    connection has not read. rate: messages per second of one connection, and burst: how many it may save up; a long or
    slow one counts for several. silence_seconds: how long a message, or a hello, may be unfinished. threads,
    long_threads: for requests that may block, and for long ones. sweep_seconds: interval of checks on the mappings of
    disconnected clients."""

    connections: int = 256
    in_flight: int = 64
    in_flight_bytes: int = 4 << 20
    running: int = 4
    long_running: int = 2
    unread_bytes: int = 8 << 20
    rate: float = 20_000.0
    burst: int = 2_000
    silence_seconds: float = 10.0
    threads: int = 16
    long_threads: int = 8
    sweep_seconds: float = 0.05


CourierGreeting = Callable[[m.Hello], "tuple[ClientState | None, m.Answer]"]
"""Answers a courier's hello: the client state it works under, or why it is refused."""
ADMIN_CONNECTIONS, COURIER_CONNECTIONS = 8, 256
COURIER_BYTES_PER_SECOND = 64 << 20
"""The rate for one courier, whose large messages are headers that are used undecoded."""


class AdminCaller:
    """A connection of the admin or observers' socket; it holds nothing."""


class AdminVerbs(Protocol):
    """The verbs of a socket that belongs to no tenant; see `kvstore.service.admin`."""

    is_operator: bool
    """Whether its clients may use the descriptor that is reserved for the operator."""

    def greet(self, hello: m.Hello) -> tuple[AdminCaller | None, m.Answer]:
        """Answer a connection's first message."""
        ...

    def serve(self, verb: m.Verb) -> Response:
        """Serve a request. Never raises for what a client can cause."""
        ...


class Listener:
    """A tenant's socket, the couriers', or one without tenant. tenant: None without keys; `renew` makes them.
    closer: closes connections that may hold descriptors. share, large_share: service that its connections got
    from the socket's own thread, and from the one for large messages. line, long_line: requests that wait for a
    thread of the pool, and of the pool for long ones. unread: descriptors sent and not read. pool: its own
    threads, if it belongs to no tenant."""

    def __init__(
        self,
        path: Path,
        sock: socket.socket,
        tenant: TenantKeys | None,
        users: Collection[int] | None,
        renew: Callable[[], TenantKeys] | None = None,
        admin: AdminVerbs | None = None,
        turns: Turns | None = None,
        large_turns: Turns | None = None,
        pool: ThreadPoolExecutor | None = None,
        greet: CourierGreeting | None = None,
    ) -> None:
        """turns, large_turns: at the two threads, shared by all listeners. greet: for couriers."""
        self.greet, self.most = greet, ADMIN_CONNECTIONS if greet is None else COURIER_CONNECTIONS
        self.large_rate = LARGE_BYTES_PER_SECOND if greet is None else COURIER_BYTES_PER_SECOND
        self.path = path
        self.socket = sock
        self.tenant = tenant
        self.users = users
        self.renew = renew
        self.admin = admin
        self.is_operator = admin is not None and admin.is_operator
        self.pool = pool
        self.share = ServiceShare(turns or Turns())
        self.large_share = ServiceShare(large_turns or Turns())
        self.line: Line[QueuedRequest] = Line()
        self.long_line: Line[QueuedRequest] = Line()
        self._full_at = self._large_full_at = -math.inf
        self.unread = TenantUnread()
        self.closer = descriptors.Closer()
        descriptors.refuse_descriptors(sock)

    def tenant_keys(self) -> TenantKeys | m.Failed:
        """The tenant's keys, or why it is not served."""
        if self.tenant is None:
            assert self.renew is not None
            try:
                self.tenant = self.renew()
            except StoreError as error:
                return m.failed(m.RequestFault.CLOSED, str(error))
        return self.tenant

    def buckets(self, limits: DoorLimits, now: float) -> tuple[float, float]:
        """A new connection's bucket: as full as the emptiest bucket of closed connections would be by now, so that a
        client gains nothing by reconnecting."""
        tokens = limits.burst - max(0.0, self._full_at - now) * limits.rate
        return tokens, LARGE_BURST_BYTES - max(0.0, self._large_full_at - now) * self.large_rate

    def keep_buckets(self, limits: DoorLimits, now: float, tokens: float, large_bytes: float) -> None:
        """Remember a closed connection's buckets. Debts count up to a second's worth, so that a tenant's next process
        waits no longer."""
        tokens, large_bytes = max(tokens, -limits.rate), max(large_bytes, -self.large_rate)
        self._full_at = max(self._full_at, now + (limits.burst - tokens) / limits.rate)
        full_at = now + (LARGE_BURST_BYTES - large_bytes) / self.large_rate
        self._large_full_at = max(self._large_full_at, full_at)


class QueuedRequest:
    """A message from arrival to answer. body: until decoded. since: the earliest that it may have arrived. pool: the
    threads it is queued for; begun_at: when the thread for large messages took it. served: None before; waited: seconds
    until it was begun."""

    __slots__ = ("begun_at", "body", "connection", "is_long", "length", "pool", "request", "served", "since", "waited")

    def __init__(self, connection: Connection, body: bytes, since: float) -> None:
        self.connection = connection
        self.body: bytes | None = body
        self.length = len(body)
        self.request: m.Request | None = None
        self.is_long = False  # it may run for many seconds
        self.pool: ThreadPoolExecutor | None = None
        self.since = self.begun_at = since
        self.served: Response | None = None
        self.waited = 0.0


class Connection:
    """A client's connection: its bytes read and not served, and answers not sent."""

    def __init__(self, sock: socket.socket, listener: Listener, now: float, limits: DoorLimits) -> None:
        self.socket = sock
        self.listener = listener
        self.admin = listener.admin
        self.caller: ClientState | AdminCaller | None = None
        self.read = bytearray()
        self.unsent: deque[tuple[memoryview, list[int]]] = deque()
        self.unsent_bytes = 0
        self.in_flight = 0
        self.in_flight_bytes = 0
        self.running = self.long_running = 0
        self.large: QueuedRequest | None = None  # being decoded or served; messages behind it wait
        self.waiting: deque[QueuedRequest] = deque()
        self.parked: dict[int, Parked] = {}  # by the number of its request
        self.ready_at = now
        self.waited = Waits()
        self.refusal: m.Failed | None = None  # the answer to its hello, if rejected
        self.tokens, self.large_bytes = listener.buckets(limits, now)
        self.filled_at = now
        self._lately = 0.0  # as of `_lately_at`
        self._lately_at = now
        self.heard_at = now
        self.ending = False  # nothing more is read; it is closed when all is sent
        self.closed = False
        self.interest = 0
        self.is_refused = False  # the kernel refuses to send descriptors at the moment
        self._may_hold_descriptors = descriptors.may_hold_descriptors(sock)
        self.unread = Unread(sock, self._close)

    @property
    def tenant(self) -> bytes:
        """Its client's tenant; empty before hello."""
        return self.caller.keys.tenant if isinstance(self.caller, ClientState) else b""

    def next_length(self) -> int:
        """The length of the next message's body; 0 if it is not known yet."""
        return int.from_bytes(self.read[: m.LENGTH_BYTES], "little") if len(self.read) >= m.LENGTH_BYTES else 0

    def has_message(self) -> bool:
        """Whether a whole message was read, or the length of one that is too long."""
        if len(self.read) < m.LENGTH_BYTES:
            return False
        length = self.next_length()
        return length > m.MAX_BODY_BYTES or len(self.read) >= m.LENGTH_BYTES + length

    def take_body(self) -> bytes:
        """The next message's body; `has_message` must be true. Raises `ValueError`."""
        length = self.next_length()
        if length > m.MAX_BODY_BYTES:
            raise ValueError(f"a message of {length} bytes; at most {m.MAX_BODY_BYTES}")
        body = bytes(memoryview(self.read)[m.LENGTH_BYTES : m.LENGTH_BYTES + length])
        del self.read[: m.LENGTH_BYTES + length]
        return body

    def receive(self, now: float) -> None:
        """Read what has arrived. Raises `OSError`, also at the end of the stream, and `DescriptorsSent`."""
        if self._may_hold_descriptors:
            piece = descriptors.receive(self.socket, _READ_BYTES)
        else:
            piece = self.socket.recv(_READ_BYTES)
        if not piece:
            raise ConnectionResetError
        self.read += piece
        self.heard_at = now

    def put(self, frame: memoryview, held: list[int]) -> None:
        """Queue an answer, and the descriptors beside it."""
        self.unsent.append((frame, held))
        self.unsent_bytes += len(frame)
        if held:
            self.unread.queued(len(held))
            self.listener.unread.add(self.unread)

    def flush(self, clock: Clock) -> None:
        """Send as much as the socket takes. Raises `OSError`."""
        while self.unsent:
            frame, held = self.unsent[0]
            if self.unread.sent_count:
                self.unread.count()  # before more is sent behind the descriptors
            try:
                if held:
                    sent = socket.send_fds(self.socket, [frame], held)
                else:
                    sent = self.socket.send(frame)
            except BlockingIOError:
                return
            if held:
                self.unread.sent(len(held), clock.monotonic_seconds())
                close_all(held)
            elif self.unread.sent_count:
                self.unread.sent_behind()
            self.unsent_bytes -= sent
            self.heard_at = clock.monotonic_seconds()
            if sent < len(frame):
                self.unsent[0] = (frame[sent:], [])
            else:
                self.unsent.popleft()

    def may_ask(self, limits: DoorLimits, now: float) -> bool:
        """Whether the next message may be taken now; if so, it is paid for.

        A long message costs in proportion to its length; if the bucket has too little, the connection is in debt.
        """
        if self.large is not None or (self.caller is None and self.in_flight):  # or its hello waits for keys
            return False
        if self.in_flight >= limits.in_flight or self.in_flight_bytes >= limits.in_flight_bytes:
            return False
        if self.unsent_bytes >= limits.unread_bytes or any(held for _, held in self.unsent):
            return False
        if self.unread.sent_count and self.unread.is_full():
            return False
        self._fill(limits, now)
        length = min(self.next_length(), m.MAX_BODY_BYTES)
        is_large = length > LARGE_BYTES
        if self.tokens < 1 or (is_large and self.large_bytes < 0):
            return False
        self.listener.share.begin()
        self.pay(1 + min(length, LARGE_BYTES) / COST_BYTES)
        if is_large:
            self.large_bytes -= length
            self._lately += (length - LARGE_BYTES) / COST_BYTES
        return True

    def pay(self, cost: float) -> None:
        self.listener.share.pay(cost)
        self.tokens -= cost
        self._lately += cost

    def asked_lately(self, now: float) -> float:
        """What it paid, recent payments weighing more."""
        self._lately *= math.exp((self._lately_at - now) / LATELY_SECONDS)
        self._lately_at = now
        return self._lately

    def large_rank(self, now: float) -> tuple[float, float]:
        """Rank of its next large message."""
        return self.listener.large_share.starts_at, self.asked_lately(now)

    def _fill(self, limits: DoorLimits, now: float) -> None:
        seconds, self.filled_at = now - self.filled_at, now
        self.tokens = min(limits.burst, self.tokens + seconds * limits.rate)
        self.large_bytes = min(LARGE_BURST_BYTES, self.large_bytes + seconds * self.listener.large_rate)

    def discard(self, limits: DoorLimits, now: float) -> None:
        """Close it; unsent answers are dropped."""
        self.closed = True
        self._fill(limits, now)
        self.listener.keep_buckets(limits, now, self.tokens, self.large_bytes)
        for _, held in self.unsent:
            close_all(held)
        self.unsent.clear()
        self.listener.unread.ended(self.unread)

    def _close(self) -> None:
        if self._may_hold_descriptors:
            self.listener.closer.close(self.socket)
        else:
            with suppress(OSError):
                self.socket.close()


def read_request(asked: QueuedRequest) -> None:
    """Decode a body. Raises `ValueError`."""
    assert asked.body is not None
    request = m.unpack_request(asked.body)
    if (asked.connection.caller is None) is not isinstance(request.verb, m.Hello):
        raise ValueError("a connection begins with one hello")
    asked.request, asked.body = request, None


def close_all(held: Collection[int]) -> None:
    """Close descriptors that will not be sent."""
    for descriptor in held:
        with suppress(OSError):  # close the others all the same
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# Awaits: parked in the store's table, without a thread, and outside the limits of requests in flight.


AWAITS_SECONDS = 0.00025
"""How long the socket's thread answers ended awaits before it takes messages again."""


class DoorAwaits:
    """The awaits of all connections. Only the socket's thread calls it, except `_told`. The least-served tenant is
    answered first, and pays as for a message."""

    def __init__(
        self,
        handlers: Handlers,
        clock: Clock,
        wake: Callable[[], None],
        answer: Callable[..., object],
        watch: Callable[[Connection], object],
    ) -> None:
        """answer: sends (connection, number of the request, response). watch: called with each answered connection."""
        self._handlers = handlers
        self._clock = clock
        self._wake = wake
        self._answer, self._watch = answer, watch
        self._of: dict[Parked, tuple[Connection, int]] = {}
        self._over: deque[Parked] = deque()
        self._lines: dict[Listener, deque[Parked]] = {}

    def take(self, connection: Connection, caller: ClientState, number: int, verb: m.Await | m.Cancel) -> None:
        """Park a connection's request."""
        if isinstance(verb, m.Cancel):
            self._handlers.parking.cancel([connection.parked[one] for one in verb.numbers if one in connection.parked])
            self._answer(connection, number, Response(m.Done()))
            return
        if number in connection.parked:
            self._refuse(connection, number)
            return
        one = self._handlers.park(caller, verb, self._told)
        if isinstance(one, Response):
            self._answer(connection, number, one)
            return
        self._of[one] = connection, number
        connection.parked[number] = one

    def hold(self, connection: Connection, number: int, one: ParkedLocate) -> None:
        """Keep a request that was asked, perhaps by another thread, until it is answered."""
        one.tell = self._told  # from now on; the answer may have come already
        if number in connection.parked or connection.closed:
            self._handlers.parking.cancel([one])
            self._refuse(connection, number)
        elif one.answer is not None:
            self._answer(connection, number, Response(one.answer))
        else:
            self._of[one] = connection, number
            connection.parked[number] = one

    def _refuse(self, connection: Connection, number: int) -> None:
        text = f"request {number} waits already; number requests anew"
        self._answer(connection, number, Response(m.Failed(m.RequestFault.BAD_INPUT, text)))

    def gone(self, connection: Connection) -> None:
        """End a closed connection's awaits."""
        parked, connection.parked = list(connection.parked.values()), {}
        for one in parked:
            del self._of[one]
        self._handlers.parking.cancel(parked)

    def close(self) -> None:
        """End all awaits."""
        self._handlers.parking.end_all()

    def rest_seconds(self, most: float) -> float:
        """Seconds until one is due, at most `most`."""
        if not self._of:
            return most
        return max(0.0, min(most, self._handlers.parking.due_at - self._clock.monotonic_seconds()))

    def deliver(self) -> None:
        """Answer ended awaits, for `AWAITS_SECONDS` at most."""
        if (elsewhere := self._handlers.parking.elsewhere) is not None:
            elsewhere.tell_couriers()
        if not self._of:
            self._over.clear()
            self._lines.clear()
            return
        now = self._clock.monotonic_seconds()
        if self._handlers.parking.due_at <= now:
            self._handlers.parking.expire()
        while self._over:
            one = self._over.popleft()
            if one in self._of:
                self._lines.setdefault(self._of[one][0].listener, deque()).append(one)
        while self._lines and self._clock.monotonic_seconds() - now < AWAITS_SECONDS:
            listener = min(self._lines, key=lambda of: of.share.starts_at)
            one = self._lines[listener].popleft()
            if not self._lines[listener]:
                del self._lines[listener]
            connection, number = self._of.pop(one, (None, 0))
            if connection is not None:  # else the client disconnected meanwhile
                del connection.parked[number]
                listener.share.begin()
                listener.share.pay(1)
                self._answer(connection, number, self._handlers.parking.awaited(one))
                self._watch(connection)

    @property
    def has_more(self) -> bool:
        """Whether `deliver` left some."""
        return bool(self._lines)

    def _told(self, one: Parked) -> None:
        """Called by any thread, under the table's lock."""
        self._over.append(one)
        if len(self._over) == 1:
            self._wake()


# ---------------------------------------------------------------------------------------------------------------------
# Turns at a thread that all tenants share: the least-served tenant comes first. Start-time fair queueing (Goyal, Vin,
# Cheng, SIGCOMM 1996). A tenant's next piece of work starts where its last one ended, or at the virtual time if that is
# later; the smallest start comes first, and the virtual time is the start of the piece begun last. So a tenant waits
# for one piece of each other tenant, however many connections they have; and a tenant that was idle, or is new, has no
# credit that others would have to wait for.


T = TypeVar("T")


class Turns:
    """The turns at one thread. now: the virtual time, in the unit of costs."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


class ServiceShare:
    """One tenant's service at the thread."""

    __slots__ = ("_ends_at", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._ends_at = 0.0

    @property
    def starts_at(self) -> float:
        """Start of its next piece; the tenant with the smallest is served next."""
        return max(self._ends_at, self._turns.now)

    def begin(self) -> None:
        """Begin a piece; pay its cost before or while others are begun."""
        self._turns.now = self.starts_at

    def pay(self, cost: float) -> None:
        """Pay for the begun piece, or for service without a turn."""
        self._ends_at = self.starts_at + cost


class Line(Generic[T]):
    """One tenant's work for a pool of threads: waiting pieces, and how many run."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.running = 0
        self.waiting: deque[T] = deque()

    def leave_out(self, is_gone: Callable[[T], bool]) -> None:
        """Drop pieces of clients that are gone."""
        self.waiting = deque(one for one in self.waiting if not is_gone(one))


class Lines(Generic[T]):
    """A pool of threads with a line per tenant: the next free thread goes to the tenant with the fewest running, and
    while several tenants have work, each leaves some threads to the others."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._running = 0
        self._lines: list[Line[T]] = []

    def new_line(self) -> Line[T]:
        self._lines.append(Line())
        return self._lines[-1]

    def begin(self) -> T | None:
        """Begin the next piece; None if none waits, or all threads are busy."""
        if self._running >= self._threads:
            return None
        most = self._threads if len(self._lines) == 1 else max(1, self._threads * 3 // 4)
        wanting = [one for one in self._lines if one.waiting and one.running < most]
        if not wanting:
            return None
        line = min(wanting, key=lambda one: one.running)
        line.running += 1
        self._running += 1
        return line.waiting.popleft()

    def end(self, line: Line[T]) -> None:
        """A piece of that line has ended."""
        line.running -= 1
        self._running -= 1
