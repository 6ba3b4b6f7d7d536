"""Descriptors that clients send to the sidecar: it wants none, and closing one must not delay other clients.

The kernel drops an unreceived descriptor in the thread that reads the bytes it came with, or that closes the socket it
lies unread in, a listening one included. If the sender has closed its own copy, that closes the file, which takes as
long as the sender likes: a TCP socket lingers. The socket thread serves every client and must never drop one.

Linux 6.16 and later refuse them to the sender (SO_PASSRIGHTS); connections inherit that from the listening socket. On
older kernels each piece is peeked at before it is read (`receive`), a client that sends descriptors is disconnected,
and a thread of its tenant closes the connection (`Closer`): a slow close delays that tenant alone.
"""

from __future__ import annotations

import fcntl
import logging
import resource
import socket
import struct
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

SO_PASSRIGHTS = 83
"""Of `SOL_SOCKET`; the `socket` module does not have it yet."""
MOST_UNCLOSED = 32
"""With so many sockets of a tenant still being closed, its next connections are not accepted."""

_log = logging.getLogger(__name__)


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


# ---------------------------------------------------------------------------------------------------------------------
# Tenants whose memory is slow to hand out. Handing out an extent locks a byte of it, for which the kernel walks all
# locks on the file, and a client may place as many as it likes. The socket thread does that for all tenants. So slow
# hand-overs of a tenant take no more than a hundredth of the thread's time, beyond an allowance: a virtual machine
# counts what its host took from it as a thread's own time, so that now and then a hand-over of a tenant that placed no
# lock looks slow. Only the thread's CPU time counts, so a busy machine makes no tenant wait.


SLOW_SECONDS = 0.001
RARELY = 100
ALLOWED_SECONDS = 0.02
"""Of slow hand-overs, before a tenant waits; refilled by a hundredth of the time that passes."""


class SlowExtents:
    """Not thread-safe."""

    def __init__(
        self, now: Callable[[], float] = lambda: 0.0, thread_seconds: Callable[[], float] = lambda: 0.0
    ) -> None:
        """now: seconds that never go back. thread_seconds: processor time of the calling thread."""
        self._now = now
        self.thread_seconds = thread_seconds
        self._settled_at: dict[bytes, float] = {}  # by tenant: when its slow hand-overs will be a hundredth of the time

    def waits(self, tenant: bytes) -> bool:
        """Whether a tenant gets no extent for now."""
        settled_at = self._settled_at.get(tenant)
        if settled_at is None:
            return False
        left = settled_at - self._now()
        if left <= 0:
            del self._settled_at[tenant]
        return left > RARELY * ALLOWED_SECONDS

    def waits_after(self, tenant: bytes, since: float) -> bool:
        """Count what a hand-over took since then, by `thread_seconds`; returns whether the tenant now waits."""
        took = self.thread_seconds() - since
        if took > SLOW_SECONDS:
            self._settled_at[tenant] = max(self._now(), self._settled_at.get(tenant, 0.0)) + RARELY * took
        return self.waits(tenant)
