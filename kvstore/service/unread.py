"""Descriptors that the sidecar sent and its clients have not read: each tenant has a share of what may be (floor 2).

The kernel bounds how many descriptors a user has under way, by RLIMIT_NOFILE, unless the sender may exceed it
(CAP_SYS_RESOURCE). A client that reads none of its own would take them from all others, whose answers the kernel then
refuses to send. How much of what it was sent a client has not read, the kernel says (TIOCOUTQ): if that is no more than
what was sent behind descriptors, these have been read.

To hang up frees none of them: they are under way for as long as the other side keeps its end open. So a connection that
ends with some unread is only shut down, and counts for its tenant until the kernel says that none is left.
"""

from __future__ import annotations

import fcntl
import resource
import socket
import struct
import termios
from collections.abc import Callable

MOST_OF_CONNECTION = 64
"""Descriptors that a connection has not read: with so many, or more, nothing further is read of it."""
MOST_OF_ALL = 8192
"""In equal shares for the tenants, and at most half of RLIMIT_NOFILE; a share is never less than the number above."""
_COUNT = struct.Struct("i")


def share_of(tenants: int) -> int:
    """How many descriptors one of so many tenants may have under way before it is given no further ones."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OF_ALL if soft == resource.RLIM_INFINITY else min(MOST_OF_ALL, soft // 2)
    return max(MOST_OF_CONNECTION, most // max(1, tenants))


class Unread:
    """Of one connection. since: when the first of them was sent, in the door's seconds."""

    __slots__ = ("_behind", "_close", "_queued", "_sent", "_socket", "_unread_bytes", "is_ended", "since")

    def __init__(self, sock: socket.socket, close: Callable[[], None]) -> None:
        """close: of the socket."""
        self._socket = sock
        self._close = close
        self._queued = self._sent = 0
        self._behind = 0  # what the kernel keeps of what was sent behind the last of them
        self._unread_bytes = 0  # as of the last look
        self.since = 0.0
        self.is_ended = False

    def queued(self, count: int) -> None:
        """They wait to be sent, and are open until then."""
        self._queued += count

    def sent(self, count: int, now: float) -> None:
        """They wait no more."""
        self._queued -= count
        if not self._sent:
            self.since = now
        self._sent += count
        self._behind = 0

    def sent_behind(self) -> None:
        """Something else was sent, since `count` was asked."""
        if self._sent:
            self._behind += max(0, self._look() - self._unread_bytes)

    def count(self) -> int:
        """How many there may be now, those included that wait to be sent."""
        if self._sent:
            self._unread_bytes = self._look()
            if self._unread_bytes <= self._behind:
                self._sent = 0
        return self._queued + self._sent

    def count_since(self, since: float) -> int:
        """How many may have been sent and unread since before then."""
        return self.count() - self._queued if self.since < since else 0

    def _look(self) -> int:
        return _COUNT.unpack(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_COUNT.size)))[0]  # type: ignore[no-any-return]

    def is_full(self) -> bool:
        """Whether the client has to read before it may ask for anything."""
        return self._sent >= MOST_OF_CONNECTION and self.count() >= MOST_OF_CONNECTION

    def end(self) -> bool:
        """Hang up; whether the socket could be closed, since nothing is unread. What waited to be sent is not."""
        self._queued = 0
        self.is_ended = True
        if not self.count():
            self._close()
            return True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # as a rule the client has hung up
            pass
        return False

    def close(self) -> None:
        """Whatever is unread."""
        self._close()


class TenantUnread:
    """Of all connections of one tenant, those included that ended."""

    def __init__(self) -> None:
        self._holding: set[Unread] = set()

    def add(self, one: Unread) -> None:
        """A connection that is about to be sent some."""
        self._holding.add(one)

    def ended(self, one: Unread) -> None:
        """A connection has ended, of which some may be unread."""
        if one.end():
            self._holding.discard(one)
        else:
            self._holding.add(one)

    def __len__(self) -> int:
        """Of how many connections the kernel is asked for a count."""
        return len(self._holding)

    @property
    def ended_count(self) -> int:
        """Connections that ended and whose sockets are open still, since some are unread."""
        return sum(one.is_ended for one in self._holding)

    def count(self) -> int:
        """How many there may be now. Closes connections that ended and of which none is left."""
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
        """Those that ended, whatever is unread."""
        for one in self._holding:
            if one.is_ended:
                one.close()
        self._holding.clear()
