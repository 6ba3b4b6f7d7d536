"""Connections of the API sockets: what was read of each and not served, and answered and not sent; and the threads that
some of their requests wait for (`DoorThreads`).

Each has a token bucket, filled at the configured rate; every request takes some out. Tenants are served least-served
first, and of a tenant's connections the one with the fewest recent requests.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import resource
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

from msgspec import Meta

from kvstore.block.errors import StoreError
from kvstore.block.identity import TenantKeys
from kvstore.config import LIVE, Count, Seconds, SettingsSection
from kvstore.protocol import messages as m
from kvstore.service.accounting import Line, Lines, ServiceShare, Turns
from kvstore.service.dispatch import Handlers, Parked, Parking, Response, version_in_common
from kvstore.service.sessions import ClientState
from tiering.clock import Clock
from tiering.counts.histogram import BOUNDS_MS, Histogram
from tiering.faults import DOOR_THREADS, FaultReports, RateLimitedLog, kind_of

_log = logging.getLogger(__name__)
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
MAX_SWEEP_SECONDS = 10
"""Memory of disconnected clients is freed no sooner than a sweep finds it."""


class DoorLimits(SettingsSection, frozen=True):
    """Named upper bounds. connections: at a time, in equal shares for the tenants. in_flight: unanswered requests of
    one connection, and in_flight_bytes, of their messages. running, long_running: how many of these run at a time;
    further ones wait, but a further long one, which may take many seconds, is refused. unread_bytes: answers that one
    connection has not read. rate: messages per second of one connection, and burst: how many it may save up; a long or
    slow one counts for several. silence_seconds: how long a message, or a hello, may be unfinished. threads,
    long_threads: for requests that may block, and for long ones. sweep_seconds: interval of checks on the mappings of
    disconnected clients."""

    connections: Count = 256
    in_flight: Count = 64
    in_flight_bytes: Count = 4 << 20
    running: Count = 4
    long_running: Count = 2
    unread_bytes: Count = 8 << 20
    rate: Annotated[float, LIVE, Meta(gt=0, le=1e300, description="a number above 0")] = 20_000.0
    burst: Annotated[Count, LIVE] = 2_000
    silence_seconds: Seconds = 10.0
    threads: Count = 16
    long_threads: Count = 8
    sweep_seconds: Annotated[float, Meta(gt=0, le=MAX_SWEEP_SECONDS)] = 0.05


ADMIN_CONNECTIONS, COURIER_CONNECTIONS = 8, 256
ADMIN_THREADS = 4
"""Of each socket that belongs to no tenant."""
LARGE_LINE = 2
"""Which of a listener's lines is of large messages; 0 and 1 are of requests that may block, and that may take long."""
COURIER_BYTES_PER_SECOND = 64 << 20
"""The rate for one courier, whose large messages are headers that are used undecoded."""


class Listener:
    """A tenant's socket, the couriers', or one without tenant. tenant: None without keys; `renew` makes them.
    closer: closes connections that may hold descriptors. share: service that its connections got from the socket's own
    thread. lines: requests that wait for a thread, as `LARGE_LINE` says. unread: descriptors sent and not read.
    is_operator: whether its clients may use the descriptor that is reserved for the operator."""

    def __init__(
        self,
        path: Path,
        sock: socket.socket,
        host: TenantKeys | Callable[[m.Verb], Response] | Parking | None,
        users: Collection[int] | None,
        renew: Callable[[], TenantKeys] | None = None,
        turns: Turns | None = None,
    ) -> None:
        """host: the tenant's keys; or what serves the operator's or the observers' requests, or greets couriers. turns:
        at the socket's own thread, shared by all listeners."""
        self.tenant = host if isinstance(host, TenantKeys) else None
        self.couriers = host if isinstance(host, Parking) else None
        self.admin = host if not isinstance(host, TenantKeys | Parking) else None
        self.is_operator = False
        self.most = ADMIN_CONNECTIONS if self.couriers is None else COURIER_CONNECTIONS
        self.large_rate = LARGE_BYTES_PER_SECOND if self.couriers is None else COURIER_BYTES_PER_SECOND
        self.path = path
        self.socket = sock
        self.users = users
        self.renew = renew
        self.share = ServiceShare(turns or Turns())
        self.lines: tuple[Line[QueuedRequest], ...] = ()
        self._full_at = self._large_full_at = -math.inf
        self.unread = TenantUnread()
        self.closer = Closer()
        refuse_descriptors(sock)

    @property
    def is_tenants(self) -> bool:
        return self.admin is None and self.couriers is None

    def tenant_keys(self) -> TenantKeys | m.Failed:
        """The tenant's keys, or why it is not served."""
        if self.tenant is None:
            assert self.renew is not None
            try:
                self.tenant = self.renew()
            except StoreError as error:
                return m.failed(m.RequestFault.CLOSED, str(error))
        return self.tenant

    def greeted(self, hello: m.Hello, handlers: Handlers) -> tuple[ClientState | None, m.Answer]:
        """Answer a hello: who the client is, unless it is an operator or an observer; or why it is refused."""
        if self.admin is not None:
            version = version_in_common(hello)
            return None, version if isinstance(version, m.Failed) else m.Welcome(version, handlers.run, b"")
        if self.couriers is not None:
            return self.couriers.greet(hello)
        tenant = self.tenant_keys()
        return (None, tenant) if isinstance(tenant, m.Failed) else handlers.greet(tenant, hello)

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


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A message from arrival to answer. body: until decoded. since: the earliest that it may have arrived. is_long: it
    may run for many seconds. line: its tenant's, for the threads that it needs; begun_at: when one took it. served:
    None before; waited: seconds until it was begun."""

    connection: Connection
    body: bytes | None
    length: int
    since: float
    request: m.Request | None = None
    is_long: bool = False
    line: Line[QueuedRequest] | None = None
    begun_at: float = 0.0
    served: Response | None = None
    waited: float = 0.0


class Connection:
    """A client's connection: its bytes read and not served, and answers not sent."""

    def __init__(self, sock: socket.socket, listener: Listener, now: float, limits: DoorLimits) -> None:
        self.socket = sock
        self.listener = listener
        self.admin = listener.admin
        self.caller: ClientState | None = None
        self.is_greeted = False
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
        self.waited = Histogram(BOUNDS_MS)
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
        self._may_hold_descriptors = may_hold_descriptors(sock)
        self.unread = Unread(sock, listener.closer if self._may_hold_descriptors else None)

    @property
    def tenant(self) -> bytes:
        """Its client's tenant; empty before hello."""
        return self.caller.keys.tenant if self.caller is not None else b""

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
            piece = receive(self.socket, _READ_BYTES)
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
                self.unread.sent(len(held))
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
        if self.large is not None or (not self.is_greeted and self.in_flight):  # or its hello waits for keys
            return False
        if self.in_flight >= limits.in_flight or self.in_flight_bytes >= limits.in_flight_bytes:
            return False
        if self.unsent_bytes >= limits.unread_bytes or (self.unsent and any(held for _, held in self.unsent)):
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

    def serve(self, handlers: Handlers, verb: m.Verb) -> Response:
        """Serve a request of its client."""
        if isinstance(verb, m.Hello):
            self.caller, answer = self.listener.greeted(verb, handlers)
            self.is_greeted = isinstance(answer, m.Welcome)
            return Response(answer)
        if self.admin is not None:
            return self.admin(verb)
        assert self.caller is not None
        return handlers.serve(self.caller, verb)

    def attempt(self, log: RateLimitedLog, what: str, work: Callable[[], object]) -> bool:
        """Do what concerns this connection alone; False for a fault, which is logged, one line a client."""
        path = self.listener.path
        return attempt(log, work, str(path), "%s; socket %s", what, path)


def attempt(log: RateLimitedLog, work: Callable[[], object], kind: str, message: str, *args: object) -> bool:
    """The guard of the door's threads, which serve all clients: do it; False for a fault, which is logged."""
    try:
        work()
    except Exception as error:
        log.error(kind, message, *args, error=error)
        return False
    return True


def submitted(pool: ThreadPoolExecutor, work: Callable[[], object]) -> Exception | None:
    """Have a thread of the pool do it; returns why none does. If the machine has no new thread, the pool may have
    queued it for an old one all the same: either that thread or the caller takes it, not both."""
    unbegun = [work]

    def begin() -> None:
        try:
            begun = unbegun.pop()
        except IndexError:
            return
        begun()

    try:
        pool.submit(begin)
    except (RuntimeError, MemoryError) as error:
        with suppress(IndexError):
            unbegun.pop()
            return error
    return None


def wake(waker: socket.socket) -> None:
    """Wake the door's thread, which reads from the other end. waker: does not block."""
    with suppress(BlockingIOError):  # the thread has not read the last ones
        waker.send(b"x")


def read_request(asked: QueuedRequest) -> None:
    """Decode a body. Raises `ValueError`."""
    assert asked.body is not None
    request = m.unpack_request(asked.body)
    if asked.connection.is_greeted is isinstance(request.verb, m.Hello):
        raise ValueError("a connection begins with one hello")
    asked.request, asked.body = request, None


def close_all(held: Collection[int]) -> None:
    """Close descriptors that will not be sent."""
    for descriptor in held:
        with suppress(OSError):  # close the others all the same
            os.close(descriptor)


class DoorThreads:
    """The threads that requests wait for which may block, which may take long, or whose messages are large. Each serves
    the tenants in turn, however much one of them asks for. Only the door's thread calls it."""

    def __init__(
        self,
        handlers: Handlers,
        clock: Clock,
        limits: DoorLimits,
        faults: FaultReports,
        log: RateLimitedLog,
        waker: socket.socket,
    ) -> None:
        """waker: as for `wake`."""
        self.limits = limits
        self.is_closing = False
        self.done: deque[QueuedRequest] = deque()
        """Gets requests that were served, or decoded; then the door's thread is woken."""
        self._handlers, self._clock, self._faults, self._log, self._waker = handlers, clock, faults, log, waker
        self._pool: Lines[QueuedRequest] = Lines(limits.threads, "kv-door")
        self._long_pool: Lines[QueuedRequest] = Lines(limits.long_threads, "kv-door-long")
        self._large_pool: Lines[QueuedRequest] = Lines(
            1, "kv-door-large", lambda one: one.connection.asked_lately(clock.monotonic_seconds())
        )
        self._pools = [self._pool, self._long_pool, self._large_pool]

    def add(self, listener: Listener) -> None:
        """Its requests wait in lines of its own; a socket that belongs to no tenant has threads of its own, too."""
        if listener.is_tenants:
            lines = self._pool.new_line(), self._long_pool.new_line()
        else:
            self._pools.append(Lines(ADMIN_THREADS, "kv-door-admin"))
            lines = (self._pools[-1].new_line(),) * 2
        listener.lines = *lines, self._large_pool.new_line()

    def start(self, other: ThreadPoolExecutor) -> None:
        """Start a thread of each pool, and of the other one: if the machine has no more threads later, every client is
        still served."""
        for pool in (*(one.executor for one in self._pools), other):
            pool.submit(lambda: None)

    def close(self) -> None:
        """Begin nothing more."""
        for one in self._pools:
            one.executor.shutdown(wait=False, cancel_futures=True)

    # Requests --------------------------------------------------------------------------------------------------------

    def defer(self, asked: QueuedRequest, *, is_large: bool) -> None:
        """Have a thread serve a request. is_large: the one for large messages, which decodes it first."""
        connection = asked.connection
        connection.in_flight += 1
        connection.in_flight_bytes += asked.length
        asked.line = connection.listener.lines[LARGE_LINE if is_large else asked.is_long]
        if is_large:
            connection.large = asked
            asked.line.waiting.append(asked)
        else:
            connection.waiting.append(asked)
        self.begin(connection)

    def ended(self, asked: QueuedRequest) -> None:
        """A request in `done` was taken out of it."""
        connection = asked.connection
        connection.in_flight -= 1
        connection.in_flight_bytes -= asked.length
        assert asked.line is not None
        asked.line.end(self._clock.monotonic_seconds() - asked.begun_at)
        if connection.large is asked:
            connection.large = None
        elif asked.is_long:
            connection.long_running -= 1
        else:
            connection.running -= 1

    def leave_out(self, connection: Connection) -> None:
        """Drop the requests of a closed connection that have not begun."""
        for line in connection.listener.lines:
            line.leave_out(lambda one: one.connection is connection)

    def begin(self, connection: Connection) -> None:
        """Begin a connection's next deferred messages, within its limit, and none while its answers are unread; and
        whatever free threads can take."""
        while connection.waiting and not connection.closed:
            asked = connection.waiting[0]
            if not asked.is_long and connection.running >= self.limits.running:
                break
            if connection.unsent_bytes >= self.limits.unread_bytes:
                break
            connection.waiting.popleft()
            if asked.is_long:
                connection.long_running += 1
            else:
                connection.running += 1
            assert asked.line is not None
            asked.line.waiting.append(asked)
        # Here and not in the executors' queues, where each would wait behind a flooding client's.
        for pool in self._pools:
            while (one := pool.begin()) is not None:
                self._begin_in(pool.executor, one)

    def _begin_in(self, pool: ThreadPoolExecutor, asked: QueuedRequest) -> None:
        asked.begun_at = self._clock.monotonic_seconds()
        work = self._serve if asked.request is not None else self._read
        error = submitted(pool, partial(work, asked))
        if error is None:
            if DOOR_THREADS in self._faults.failing:
                self._faults.worked(DOOR_THREADS)
            return
        if not self.is_closing:
            self._faults.failed(DOOR_THREADS, kind_of(error), "a request has no thread")
        if asked.request is None:
            self._read(asked)
            return
        asked.served = Response(m.Failed(m.RequestFault.BUSY, "no thread is free"))
        self.done.append(asked)
        wake(self._waker)

    # In a thread of a pool -------------------------------------------------------------------------------------------

    def _read(self, asked: QueuedRequest) -> None:
        """In the thread for large messages, one at a time: decoding one holds the interpreter."""

        def read() -> None:
            try:
                read_request(asked)
            except ValueError as error:
                asked.served = Response(m.Failed(m.RequestFault.MALFORMED, str(error)))

        self._finish(asked, m.RequestFault.MALFORMED, "a message could not be read", read)

    def _serve(self, asked: QueuedRequest) -> None:
        asked.waited = self._clock.monotonic_seconds() - asked.since
        assert asked.request is not None
        verb = asked.request.verb

        def serve() -> None:
            asked.served = asked.connection.serve(self._handlers, verb)

        self._finish(asked, m.RequestFault.BUSY, "a request could not be served", serve)

    def _finish(self, asked: QueuedRequest, fault: m.RequestFault, what: str, work: Callable[[], None]) -> None:
        if not asked.connection.attempt(self._log, what, work):
            asked.served = Response(m.Failed(fault, "a fault of the sidecar; it is in its log"))
        self.done.append(asked)
        wake(self._waker)


# ---------------------------------------------------------------------------------------------------------------------
# Descriptors that clients send to the sidecar: it wants none, and closing one must not delay other clients.
#
# The kernel drops an unreceived descriptor in the thread that reads the bytes it came with, or that closes the socket
# it lies unread in, a listening one included. If the sender has closed its own copy, that closes the file, which takes
# as long as the sender likes: a TCP socket lingers. The socket thread serves every client and must never drop one.
#
# Linux 6.16 and later refuse them to the sender (SO_PASSRIGHTS); connections inherit that from the listening socket. On
# older kernels each piece is peeked at before it is read (`receive`), a client that sends descriptors is disconnected,
# and a thread of its tenant closes the connection (`Closer`): a slow close delays that tenant alone.


SO_PASSRIGHTS = 83
"""Of `SOL_SOCKET`; the `socket` module does not have it yet."""
MOST_UNCLOSED = 32
"""With so many sockets of a tenant still being closed, its next connections are not accepted."""


class DescriptorsSent(OSError):
    """A client sent descriptors; the bytes they came with were not used."""


def refuse_descriptors(listening: socket.socket) -> None:
    """Have the kernel refuse descriptors from clients that connect from now on, if it can."""
    with suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def may_hold_descriptors(sock: socket.socket) -> bool:
    """Whether an accepted socket may hold any, and so needs `receive` and `Closer`. Sets SO_OOBINLINE then: the kernel
    would otherwise drop out-of-band bytes, with their descriptors."""
    with suppress(OSError):
        if not sock.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS):
            return False
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
    return True


def receive(sock: socket.socket, most: int) -> bytes:
    """As `recv`, for a socket that may hold descriptors. A peek without room for descriptors tells whether any came
    with the bytes; if none did, exactly these bytes are read. Raises `DescriptorsSent`, `OSError`."""
    piece, _, flags, _ = sock.recvmsg(most, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise DescriptorsSent
    return sock.recv(len(piece)) if piece else piece


class Closer:
    """Closes sockets that may hold descriptors, one after another, in a thread that starts with the first."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[socket.socket | None] = SimpleQueue()
        self._given = self._closed = 0  # sockets: by the caller's thread, and by its own
        self._thread: threading.Thread | None = None

    def close(self, sock: socket.socket) -> None:
        """Disconnect now; the thread closes the socket. Does not block."""
        with suppress(OSError):  # usually the client has disconnected
            sock.shutdown(socket.SHUT_RDWR)
        self._given += 1
        self._waiting.put(sock)
        self.look()

    def look(self) -> None:
        """Start the thread if the machine had none before."""
        if not self._given or self._thread is not None:
            return
        thread = threading.Thread(target=self._close_all, name="kv-door-close", daemon=True)
        with suppress(RuntimeError, MemoryError):
            thread.start()
            self._thread = thread

    def end(self) -> None:
        """Have the thread end once all are closed. Does not block."""
        self._waiting.put(None)

    def __len__(self) -> int:
        """Sockets that are not closed yet."""
        return self._given - self._closed

    def _close_all(self) -> None:
        while (sock := self._waiting.get()) is not None:
            try:
                sock.close()
            except OSError as error:
                _log.debug("a connection was closed with an error", extra={"reason": error.strerror})
            self._closed += 1


# ---------------------------------------------------------------------------------------------------------------------
# Descriptors that the sidecar sent and its clients have not read: each tenant may have a share of the maximum. The
# kernel bounds how many descriptors a user has in flight, by RLIMIT_NOFILE, unless the sender may exceed it
# (CAP_SYS_RESOURCE). A client that reads none of its own would use them up for all others, whose answers the kernel
# then refuses to send. The kernel tells how many bytes a client has not read (TIOCOUTQ): if that is no more than were
# sent behind descriptors, these have been read. Hanging up frees none of them: they are in flight for as long as the
# other side keeps its end open. So a connection that ends with some unread is only shut down, and counts for its tenant
# until the kernel reports that none is left.


MOST_OF_CONNECTION = 64
"""With so many unread descriptors, a connection is not read from."""
MOST_OF_ALL = 8192
"""In equal shares for the tenants, and at most half of RLIMIT_NOFILE; a share is never less than the number above."""
_COUNT = struct.Struct("i")


def share_of(tenants: int) -> int:
    """How many descriptors each of so many tenants may have in flight before it is sent no more."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OF_ALL if soft == resource.RLIM_INFINITY else min(MOST_OF_ALL, soft // 2)
    return max(MOST_OF_CONNECTION, most // max(1, tenants))


class Unread:
    """Of one connection."""

    __slots__ = ("_behind", "_closer", "_queued", "_socket", "_unread_bytes", "is_ended", "sent_count")

    def __init__(self, sock: socket.socket, closer: Closer | None) -> None:
        """closer: closes the socket, if it may hold descriptors."""
        self._socket = sock
        self._closer = closer
        self._queued = self.sent_count = 0
        self._behind = 0  # unread bytes that were sent behind the last of them
        self._unread_bytes = 0  # as of the last look
        self.is_ended = False

    def queued(self, count: int) -> None:
        """These wait to be sent, and stay open until then."""
        self._queued += count

    def sent(self, count: int) -> None:
        """These were sent."""
        self._queued -= count
        self.sent_count += count
        self._behind = 0

    def sent_behind(self) -> None:
        """Other bytes were sent since `count` was called."""
        if self.sent_count:
            self._behind += max(0, self._look() - self._unread_bytes)

    def count(self) -> int:
        """The most that may be unread now, those that wait to be sent included."""
        if self.sent_count:
            self._unread_bytes = self._look()
            if self._unread_bytes <= self._behind:
                self.sent_count = 0
        return self._queued + self.sent_count

    def _look(self) -> int:
        return _COUNT.unpack(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_COUNT.size)))[0]  # type: ignore[no-any-return]

    def is_full(self) -> bool:
        """Whether the client must read before it may ask for anything."""
        return self.sent_count >= MOST_OF_CONNECTION and self.count() >= MOST_OF_CONNECTION

    def end(self) -> bool:
        """Hang up; waiting descriptors are not sent. Returns whether the socket was closed: if none is unread."""
        self._queued = 0
        self.is_ended = True
        if not self.count():
            self.close()
            return True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # usually the client has disconnected
            pass
        return False

    def close(self) -> None:
        """Close it whatever is unread."""
        if self._closer is not None:
            self._closer.close(self._socket)
        else:
            with suppress(OSError):
                self._socket.close()


class TenantUnread:
    """Of all connections of a tenant, ended ones included."""

    def __init__(self) -> None:
        self._holding: set[Unread] = set()

    def add(self, one: Unread) -> None:
        """Add a connection that is about to be sent some."""
        self._holding.add(one)

    def ended(self, one: Unread) -> None:
        """End a connection that may have some unread."""
        if one.end():
            self._holding.discard(one)
        else:
            self._holding.add(one)

    def __len__(self) -> int:
        """Connections that the kernel is asked about."""
        return len(self._holding)

    @property
    def ended_count(self) -> int:
        """Ended connections whose sockets stay open, since some are unread."""
        return sum(one.is_ended for one in self._holding)

    def count(self) -> int:
        """The most that may be unread now. Closes ended connections that have none left."""
        total = 0
        for one in list(self._holding):
            count = one.count()
            total += count
            if not count:
                self._holding.discard(one)
                if one.is_ended:
                    one.close()
        return total

    def close(self) -> None:
        """Close the ended ones, even with some unread."""
        for one in self._holding:
            if one.is_ended:
                one.close()
        self._holding.clear()
