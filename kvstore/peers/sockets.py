"""Pulls over plain sockets, both ends.

The puller's kernel copies frames straight into their slots. Every read and write is limited to the rest of the deadline
by the kernel, which fills a whole piece in one call: a peer that drips a byte at a time times out like any other.

The data server sends frames straight from pinned memory, to pullers with an offer, in one thread with a selector: a
puller that stalls, drips or is silent blocks its own connection and no other. Connections, offers and the bytes read of
a message are bounded; a connection that does not name its offer within a second is closed, and if there are too many of
those, the oldest is. Pins end when the kernel has the last byte, when the puller is gone, and after 5 s in any case.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from kvstore.block.errors import BadInput
from kvstore.peers import sealed
from kvstore.peers import transport as t
from kvstore.peers.reader import FramePuller, Opening, PullTransport
from kvstore.peers.serving import Bell, FrameDoor, Serving
from tiering.clock import Clock

_TIMEVAL = struct.Struct("@ll")
_LEAST_SECONDS, _MOST_SECONDS = 0.001, 3600.0
"""Bounds of a limit passed to the kernel, where 0 means none."""


class SocketPullTransport(PullTransport):
    """Over TCP."""

    name = "sockets"

    def _dialled(
        self, offer: t.PullOffer, secret: bytes, seal: sealed.FrameSeal | None, deadline: float
    ) -> SocketPullReader:
        left = deadline - self._clock.monotonic_seconds()
        try:
            sock = socket.create_connection(t.numeric_address(offer.address), max(_LEAST_SECONDS, left))
        except TimeoutError:
            raise t.TimedOutPull(f"{offer.address} did not answer in time") from None
        except OSError as error:
            raise t.PeerFault(f"{offer.address} cannot be reached: {error.strerror or error}") from None
        return SocketPullReader(sock, offer, secret, seal, self._clock)


class SocketPullReader(FramePuller):
    def __init__(
        self, sock: socket.socket, offer: t.PullOffer, secret: bytes, seal: sealed.FrameSeal | None, clock: Clock
    ) -> None:
        super().__init__(offer, secret, seal, clock)
        sock.settimeout(None)  # the kernel keeps the limits
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def free_slots(self, when_free: Callable[[], None]) -> bool:
        """At once: the kernel writes into them only while `pull` runs."""
        return True

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._sock.close()

    def _fill_slot(self, record: bytes, view: memoryview, deadline: float) -> Opening | None:
        self._fill(view, deadline)
        if self._seal is None:
            return None
        tag = bytearray(sealed.TAG_BYTES)
        self._fill(memoryview(tag), deadline)
        return partial(self._seal.opens, sealed.FRAMES, self._number, record, view, tag)

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if not count:
                raise t.PeerFault("the connection was closed in the middle of an answer")
            view = view[count:]

    def _write(self, said: bytes, deadline: float) -> None:
        view = memoryview(said)
        while view:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                continue

    def _limit(self, option: int, deadline: float) -> None:
        left = min(max(self._left(deadline), _LEAST_SECONDS), _MOST_SECONDS)
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))


_TURN_BYTES = 4 << 20
"""Sent on a connection before the thread turns to the next."""
_BACKLOG = 256
_PAUSE_SECONDS = 0.1
"""Nothing is accepted for this long after the process ran out of descriptors."""


class _Connection(Serving):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__(deadline)
        self.sock = sock
        self.read = bytearray(t.HELLO.size)
        self.got = 0
        self.out: list[memoryview] = []  # for the kernel next
        self.frame: memoryview | None = None  # being sealed
        self.at = 0
        self.sealing: Any = None
        self.ring = bytearray()
        self.events = selectors.EVENT_READ


class SocketFrameDoor(FrameDoor):
    """Over TCP."""

    transport = "sockets"

    def __init__(self, listen: str, clock: Clock, random_bytes: Callable[[int], bytes], *, seal: str = "auto") -> None:
        """listen: HOST:PORT where peers reach this host, port 0 for any. Raises `BadInput`."""
        super().__init__(listen, clock, random_bytes, seal)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listener = socket.create_server((self._host, self._port), family=family, backlog=_BACKLOG)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise BadInput(f"{listen} cannot be listened on: {why}; give another address") from None
        self._listener.setblocking(False)
        self.address = t.written_address(*self._listener.getsockname()[:2])
        self._bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell.descriptor, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._accepts_from = 0.0
        self._due = inf
        self._thread.start()

    def wake(self) -> None:
        self._bell.ring()

    def _run(self) -> None:
        try:
            while not self._is_over:
                for key, events in self._selector.select(self._patience()):
                    if isinstance(key.data, _Connection):
                        self._handle(key.data, events)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._bell.hear()
                        self._due = 0.0  # an offer may be new
                if self._clock.monotonic_seconds() >= self._due:
                    self._end_due()
        finally:
            for one in list(self._connections):
                self._drop(one)
            self._listener.close()
            self._selector.close()
            self._bell.close()

    def _patience(self) -> float | None:
        return max(0.0, self._due - self._clock.monotonic_seconds()) if self._due < inf else None

    def _end_due(self) -> None:
        now = self._clock.monotonic_seconds()
        for one in [one for one in self._connections if now >= one.deadline]:
            self._drop(one)
        if 0 < self._accepts_from <= now:
            self._accepts_from = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        ends = min((one.deadline for one in self._connections), default=inf)
        self._due = min(ends, self._offers.end_due(now), self._accepts_from or inf)

    # --- new connections ---

    def _accept(self) -> None:
        for _ in range(_BACKLOG):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor or memory: the next attempt would fail too
                self._selector.unregister(self._listener)
                self._accepts_from = self._clock.monotonic_seconds() + _PAUSE_SECONDS
                self._due = min(self._due, self._accepts_from)
                return
            self._take_in(sock)

    def _take_in(self, sock: socket.socket) -> None:
        if not self._has_room():
            sock.close()
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # a closed connection is noticed below
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one = _Connection(sock, self._clock.monotonic_seconds() + t.HANDSHAKE_SECONDS)
        self._connections[one] = None
        self._due = min(self._due, one.deadline)
        self._selector.register(sock, one.events, one)
        self._handle(one, selectors.EVENT_READ)  # its first message is usually there

    def _drop(self, one: _Connection) -> None:
        if self._connections.pop(one, self) is self:
            return
        self._selector.unregister(one.sock)
        one.sock.close()
        one.out, one.frame = [], None
        if one.offer is not None:
            self._offers.end(one.offer)

    # --- messages and frames ---

    def _handle(self, one: _Connection, events: int) -> None:
        if one not in self._connections:
            return
        try:
            if events & selectors.EVENT_READ:
                self._hear(one)
            if one.offer is not None:
                self._send(one)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.out or one.frame is not None else 0)
            if wanted != one.events:
                one.events = wanted
                self._selector.modify(one.sock, wanted, one)
        except (OSError, t.PeerFault):
            self._drop(one)

    def _hear(self, one: _Connection) -> None:
        """Read a message at a time, and never more than the messages that it may send."""
        while True:
            try:
                count = one.sock.recv_into(memoryview(one.read)[one.got : one.needs])
            except BlockingIOError:
                return
            if not count:
                raise t.PeerFault("the puller is gone")
            one.got += count
            if one.got < one.needs:
                continue
            message, one.got = bytes(memoryview(one.read)[: one.needs]), 0
            if one.offer is None:
                self._greet(one, message)
            else:
                one.note(message)

    def _greet(self, one: _Connection, hello: bytes) -> None:
        answer = one.greet(self._offers, hello, self._clock.monotonic_seconds())
        if one.offer is None:
            one.sock.send(answer)
            raise t.PeerFault("a token that is not good here")
        one.ring = bytearray(sealed.PIECE_BYTES if one.seal is not None else 0)
        one.out = [memoryview(answer)]

    def _send(self, one: _Connection) -> None:
        left = _TURN_BYTES
        while left > 0 and (one.out or self._next(one)):
            try:
                sent = one.sock.sendmsg(one.out)
            except BlockingIOError:
                return
            left -= sent
            while one.out and sent >= len(one.out[0]):
                sent -= len(one.out.pop(0))
            if sent:
                one.out[0] = one.out[0][sent:]
        if left <= 0 and not one.out:
            self._next(one)  # so that the selector watches for room
        if not one.out and one.frame is None and one.has_all and one.offer is not None:
            self._offers.end(one.offer)  # the kernel has all of it

    def _next(self, one: _Connection) -> bool:
        if one.frame is not None:
            _seal_piece(one)
            return True
        if (found := one.next_frame()) is None:
            return False
        record, frame = found
        if one.seal is None:
            one.out = [memoryview(record), frame]
        else:
            one.sealing = one.seal.sealing(sealed.FRAMES, one.number - 1, record)
            one.out, one.frame, one.at = [memoryview(record)], frame, 0
            _seal_piece(one)
        return True


def _seal_piece(one: _Connection) -> None:
    assert one.frame is not None
    piece = one.frame[one.at : one.at + sealed.PIECE_BYTES]
    one.sealing.update_into(piece, one.ring)
    one.out.append(memoryview(one.ring)[: len(piece)])
    one.at += len(piece)
    if one.at == len(one.frame):
        one.sealing.finalize()
        one.out.append(memoryview(one.sealing.tag))
        one.frame = one.sealing = None
