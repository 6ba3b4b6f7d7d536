"""Who is connected to the API sockets: whom the door lets in, looks after at intervals, and disconnects.

A tenant has a share of the connections. One that is rejected is told why. What a disconnected client held is given back
by threads of their own, since that may take long.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

from kvstore.protocol import messages as m
from kvstore.service.accounting import DoorFigures, Refusal
from kvstore.service.connections import Connection, DoorLimits, DoorThreads, Listener
from kvstore.service.descriptors import MOST_UNCLOSED
from kvstore.service.parked import DoorAwaits
from kvstore.service.sessions import ClientState, Sessions
from tiering.clock import Clock
from tiering.faults import CONNECTIONS, FaultReports, RateLimitedLog, kind_of
from tiering.files import remove_socket

_PEER = struct.Struct("iII")  # struct ucred
ACCEPT_COST = 5
"""Cost of a new connection to its tenant, in messages."""
TURNED_AWAY = 32
"""Rejected connections that are still being sent the reason; the oldest make room."""

UNREAD_SECONDS = 1.0
"""When the kernel sends no more descriptors, a client with some unread for longer may be disconnected."""
SHOW_OUT_SECONDS = 10.0


class Attempt(Protocol):
    """The guard of the door's threads, which serve all clients: does the work; False for a fault, which is logged."""

    def __call__(self, work: Callable[[], object], kind: str, message: str, *args: object) -> bool: ...


class ConnectedClients:
    """Only the door's thread calls it, once that has started, but for `disconnect_tenant` and `there`."""

    def __init__(
        self,
        sessions: Sessions,
        threads: DoorThreads,
        awaits: DoorAwaits[Connection],
        end_pool: ThreadPoolExecutor,
        clock: Clock,
        limits: DoorLimits,
        faults: FaultReports,
        log: RateLimitedLog,
        figures: DoorFigures,
        selector: selectors.BaseSelector,
        spare: Callable[[], socket.socket],
        attempt: Attempt,
        watch: Callable[[Connection], None],
        try_again: Callable[[Connection], None],
        left: Callable[[ClientState], None],
        wake: Callable[[], None],
    ) -> None:
        """end_pool: its threads free what disconnected clients held. spare: makes a descriptor to be reserved for the
        operator. watch: called with each connection that is let in or rejected; try_again: with each whose answers the
        kernel refused to send. left: called with each disconnected client, in a thread of the pool; frees what it
        held."""
        self.limits = limits
        self.listeners: list[Listener] = []
        self.all: set[Connection] = set()
        """Open connections, including rejected ones that are still being sent the reason."""
        self.is_closing = False
        self._sessions, self._threads, self._awaits = sessions, threads, awaits
        self._clock, self._faults, self._log, self._figures = clock, faults, log, figures
        self._selector = selector
        self._make_spare = spare
        self._spare: socket.socket | None = spare()
        self._attempt, self._watch, self._try_again = attempt, watch, try_again
        self._left, self._wake = left, wake
        self._paused: list[Listener] = []  # without a descriptor for a new connection
        self._rejected: deque[Connection] = deque()
        self._leaving: set[ClientState] = set()  # disconnected clients that `Sessions` does not know of yet
        self._to_show_out: deque[tuple[bytes, threading.Event]] = deque()
        self._end_pool = end_pool
        self._sweep_pool = ThreadPoolExecutor(1, "kv-door-sweep")
        self._is_sweeping = False

    # Letting in ------------------------------------------------------------------------------------------------------

    def add(self, listener: Listener) -> None:
        """Accept connections at this socket from now on."""
        self.listeners.append(listener)
        self._selector.register(listener.socket, selectors.EVENT_READ, listener)

    @property
    def is_paused(self) -> bool:
        """Whether a socket waits for a descriptor."""
        return bool(self._paused)

    def accept(self, listener: Listener) -> None:
        """A client connects: let it in, or reject it with the reason."""
        path = listener.path
        if not self._attempt(
            partial(self._accept, listener), f"accept {path}", "no connection is accepted at %s", path
        ):
            self._pause(listener)

    def own_pools(self) -> list[ThreadPoolExecutor]:
        """Of the sockets that belong to no tenant."""
        return [one.pool for one in self.listeners if one.pool is not None]

    def most(self, listener: Listener) -> int:
        """How many connections a socket may have."""
        if listener.pool is not None:
            return listener.most
        return max(1, self.limits.connections // sum(one.pool is None for one in self.listeners))

    def there(self) -> tuple[int, int]:
        """Connections of tenants, and of the admin and observers' sockets; couriers' are in neither."""
        there = [one for one in list(self.all) if one.refusal is None and one.listener.greet is None]
        admin = sum(one.admin is not None for one in there)
        return len(there) - admin, admin

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
        most = self.most(listener)
        if len(self._like(listener)) >= most:
            # Connections before their hello make room first; then, at a socket of no tenant, where a connection holds
            # nothing, those with no request under way.
            there = self._like(listener)
            idle = [one for one in there if listener.admin is not None and not one.in_flight and not one.unsent]
            silent = [one for one in there if one.caller is None] or idle
            if silent:
                self.disconnect(min(silent, key=lambda one: one.heard_at))
        refusal, why = None, Refusal.FULL
        if listener.users is not None and user not in listener.users:
            why, text = Refusal.USER, f"user {user} may not use this socket; name it in its `users`, or use another one"
            refusal = m.Failed(m.RequestFault.BAD_INPUT, text)
        elif len(self._like(listener)) >= most or self.is_closing:
            why = Refusal.CLOSING if self.is_closing else Refusal.FULL
            refusal = m.Failed(
                m.RequestFault.BUSY, "there are as many connections as may be; end some, or raise door.connections"
            )
        elif self._departed_of(listener) + listener.unread.ended_count >= most:
            why = Refusal.DEPARTED
            text = f"{most} connections of this tenant are gone whose processes still map memory, or have not read all"
            refusal = m.Failed(m.RequestFault.BUSY, f"{text}; end these processes, or raise door.connections")
        connection = Connection(sock, listener, self._clock.monotonic_seconds(), self.limits)
        connection.refusal = refusal
        self.all.add(connection)
        if refusal is not None:
            self._figures.refused[why] += 1
            self._rejected.append(connection)
            if len(self._rejected) > TURNED_AWAY:
                self.disconnect(self._rejected[0])
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
        return [one for one in self.all if one.refusal is None and one.listener is listener]

    # Looking after them ----------------------------------------------------------------------------------------------

    def look_around(self, ready: dict[Connection, None], now: float) -> bool:
        """At intervals, look after disconnected clients and those silent for too long. ready: gets connections with a
        message that were left out of it. Returns whether any needs attention soon."""
        while self._to_show_out:
            self._disconnect_tenant(*self._to_show_out.popleft())
        for listener in self._paused:
            self._selector.register(listener.socket, selectors.EVENT_READ, listener)
        self._paused.clear()
        for listener in self.listeners:
            listener.closer.look()
            listener.unread.count()  # closes what has been read meanwhile
        if self._spare is None:
            with suppress(OSError):
                self._spare = self._make_spare()
        self._sweep()
        is_watchful = self._sessions.is_waited_for
        for one in list(self.all):
            if one.is_refused:
                self._try_again(one)
            waits_for_him = (
                one.caller is None
                or (one.unsent and not one.is_refused)
                or (one.read and one not in ready and not one.in_flight)
            )
            is_watchful |= bool(waits_for_him or one.in_flight or one.is_refused)
            if waits_for_him and now - one.heard_at > self.limits.silence_seconds:
                self.disconnect(one)
            elif one.has_message() and not one.ending:
                ready.setdefault(one)
        return is_watchful

    def _sweep(self) -> None:
        """In a separate thread, one sweep at a time: kernel queries can take long."""
        if self._is_sweeping:
            return
        self._is_sweeping = True
        what = "what those who are gone left behind cannot be given back"

        def sweep() -> None:
            try:
                self._attempt(self._sessions.sweep, what, what)
            finally:
                self._is_sweeping = False

        try:
            self._sweep_pool.submit(sweep)
        except (RuntimeError, MemoryError):  # the machine has no thread for it
            sweep()

    # Disconnecting ---------------------------------------------------------------------------------------------------

    def disconnect(self, connection: Connection) -> None:
        """Close a connection; what it held is given back."""
        if connection.closed:
            return
        self.all.discard(connection)
        if connection.interest:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection.socket)
        connection.discard(self.limits, self._clock.monotonic_seconds())
        self._threads.leave_out(connection)
        if connection.refusal is not None:
            self._rejected.remove(connection)
        if not isinstance(connection.caller, ClientState):
            return
        self._awaits.gone(connection)
        self._leaving.add(connection.caller)
        try:  # it may have held much
            self._end_pool.submit(self._gone, connection.caller)
        except (RuntimeError, MemoryError):  # the pool is closed, or has no thread for it
            self._gone(connection.caller)

    def disconnect_tenant(self, tenant: bytes) -> bool:
        """End a tenant's connections, and accept the next with other keys; returns whether that is done. For other
        threads."""
        done = threading.Event()
        self._to_show_out.append((tenant, done))
        self._wake()
        return done.wait(SHOW_OUT_SECONDS)

    def hang_up_on_the_worst(self, beside: Connection) -> None:
        """Disconnect the client with the most descriptors unread for a while, other than the one that waits."""
        since = self._clock.monotonic_seconds() - UNREAD_SECONDS
        counts = {one: one.unread.count_since(since) for one in self.all}
        worst = max(counts, key=lambda one: counts[one], default=beside)
        if worst is beside or not counts[worst]:
            return
        path = worst.listener.path
        self._log.warn(f"unread {path}", "a client of %s did not read %d descriptors for long", path, counts[worst])
        self.disconnect(worst)

    def _disconnect_tenant(self, tenant: bytes, done: threading.Event) -> None:
        for listener in self.listeners:
            is_theirs = listener.tenant is not None and listener.tenant.tenant == tenant
            listener.tenant = None if is_theirs else listener.tenant
            for one in [one for one in self.all if one.listener is listener]:
                if is_theirs or (listener.greet is not None and one.tenant in (b"", tenant)):
                    self.disconnect(one)
        done.set()

    def _gone(self, caller: ClientState) -> None:
        try:
            self._left(caller)
        finally:
            self._leaving.discard(caller)
        with suppress(OSError):  # closed meanwhile
            self._wake()

    # Their end -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a thread for sweeps, while the machine has one."""
        self._sweep_pool.submit(lambda: None)

    def stop(self) -> None:
        """Accept no more, and sweep no more."""
        for listener in self.listeners:
            remove_socket(listener.path)  # first: the next process makes a new one
            if listener not in self._paused:
                self._selector.unregister(listener.socket)
            listener.closer.close(listener.socket)  # with the connections in its backlog
        while self._to_show_out:
            self._to_show_out.popleft()[1].set()
        self._sweep_pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Close what is left, once all connections are closed."""
        for listener in self.listeners:
            listener.unread.close()
            listener.closer.end()
        if self._spare is not None:
            self._spare.close()
