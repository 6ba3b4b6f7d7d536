"""Descriptors that clients send to the sidecar: it wants none, and closing one must hold up no other client (floor 2).

The kernel drops a descriptor that was not received in the thread that reads the bytes it came with, or that closes the
socket it lies unread in, a listening one included. If the sender has closed its own copy, that closes the file, which
takes as long as the sender likes: a TCP socket lingers. The door's thread serves everybody and must never drop one.

Linux 6.16 and later refuse them to the sender (SO_PASSRIGHTS); a connection inherits that from the socket that it was
made to. On older kernels each piece is looked at before it is read (`receive`), a client that sends descriptors is hung
up on, and its connection is closed by a thread of its tenant (`Closer`): what takes long holds up that tenant alone.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from contextlib import suppress

SO_PASSRIGHTS = 83
"""Of `SOL_SOCKET`; the `socket` module does not have it yet."""
MOST_UNCLOSED = 32
"""Sockets of one tenant that are not closed yet: with so many its next connections wait to be let in."""

_log = logging.getLogger(__name__)


class DescriptorsSent(OSError):
    """A client sent descriptors; nothing of what came with them was read."""


def refuse_descriptors(listening: socket.socket) -> None:
    """Have the kernel refuse them to clients that connect from now on, if it can."""
    with suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def may_hold_descriptors(sock: socket.socket) -> bool:
    """Whether an accepted socket may hold any: it is for `receive` and `Closer` then. Out-of-band bytes are read in
    their place from now on, since the kernel drops them otherwise, with the descriptors that came with them."""
    with suppress(OSError):
        if not sock.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS):
            return False
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
    return True


def receive(sock: socket.socket, most: int) -> bytes:
    """As `recv`, of a socket that may hold descriptors. A look at the bytes, without room for descriptors, says whether
    any came with them; then these bytes are read, and no more. Raises `DescriptorsSent`, `OSError`."""
    piece, _, flags, _ = sock.recvmsg(most, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise DescriptorsSent
    return sock.recv(len(piece)) if piece else piece


class Closer:
    """Closes sockets that may hold descriptors, one after the other, in a thread that the first one starts."""

    def __init__(self) -> None:
        self._waiting: deque[socket.socket] = deque()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = 0
        self._ended = False

    def close(self, sock: socket.socket) -> None:
        """Hang up now, and have it closed; waits for nothing."""
        with suppress(OSError):  # as a rule the client has hung up
            sock.shutdown(socket.SHUT_RDWR)
        with self._condition:
            self._waiting.append(sock)
            self._condition.notify()
        self.look()

    def look(self) -> None:
        """Start the thread where the machine had none for it before."""
        with self._condition:
            if not self._waiting or self._thread is not None:
                return
            thread = threading.Thread(target=self._close_all, name="kv-door-close", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                return
            self._thread = thread

    def end(self) -> None:
        """The thread ends when all are closed. Waits for nothing."""
        with self._condition:
            self._ended = True
            self._condition.notify()

    def __len__(self) -> int:
        """Sockets that are not closed yet."""
        with self._condition:
            return len(self._waiting) + self._closing

    def _close_all(self) -> None:
        while True:
            with self._condition:
                self._closing = 0
                while not self._waiting:
                    if self._ended:
                        return
                    self._condition.wait()
                sock = self._waiting.popleft()
                self._closing = 1
            try:
                sock.close()
            except OSError as error:
                _log.debug("a connection was closed with an error", extra={"reason": error.strerror})
            del sock
