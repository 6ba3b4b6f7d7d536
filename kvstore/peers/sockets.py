"""Pulls over plain sockets, both ends.

The kernel copies frames straight from pinned memory, and straight into their slots. Every read and write is limited to
the rest of the deadline by the kernel, which fills a whole piece in one call: a peer that drips a byte at a time times
out like any other.

The data server has a thread for each connection: a puller that stalls, drips or is silent blocks its own and no other.
Connections, offers and the bytes read of a message are bounded; a connection that does not name its offer within a
second is closed, and if there are too many of those, the oldest is. Pins end when the kernel has the last byte, when
the puller is gone, and after 5 s in any case.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf

from kvstore.block.errors import BadInput
from kvstore.peers import sealed
from kvstore.peers import transport as t
from kvstore.peers.reader import FramePuller, Opening, PullTransport
from kvstore.peers.serving import Bell, FrameDoor, Serving
from tiering.clock import Clock

_TIMEVAL = struct.Struct("@ll")
_LEAST_SECONDS, _MOST_SECONDS = 0.001, 3600.0
"""Bounds of a limit passed to the kernel, where 0 means none."""
_BACKLOG = 256
_PAUSE_SECONDS = 0.1
"""Nothing is accepted for this long after the process ran out of descriptors."""


class _Stream:
    """A connected socket, used by one thread. Reads and writes raise `TimedOutPull`, `PeerFault` and `OSError`."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        sock.settimeout(None)  # the kernel keeps the limits
        with suppress(OSError):  # a closed connection is noticed with its next use
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._clock = sock, clock

    def fill(self, view: memoryview, deadline: float) -> None:
        while view:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if not count:
                raise t.PeerFault("the connection was closed in the middle of an answer")
            view = view[count:]

    def write(self, pieces: Sequence[memoryview | bytes], deadline: float) -> None:
        rest = [memoryview(piece) for piece in pieces]
        while rest:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._sock.sendmsg(rest)
            except BlockingIOError:
                continue
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def shut(self) -> None:
        """From any thread: a thread that reads or writes raises."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._sock.close()

    def _limit(self, option: int, deadline: float) -> None:
        left = min(max(t.seconds_left(self._clock, deadline), _LEAST_SECONDS), _MOST_SECONDS)
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))


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
        return SocketPullReader(_Stream(sock, self._clock), offer, secret, seal, self._clock)


class SocketPullReader(FramePuller):
    def __init__(
        self, stream: _Stream, offer: t.PullOffer, secret: bytes, seal: sealed.FrameSeal | None, clock: Clock
    ) -> None:
        super().__init__(offer, secret, seal, clock)
        self._stream = stream

    def free_slots(self, when_free: Callable[[], None]) -> bool:
        """At once: the kernel writes into them only while `pull` runs."""
        return True

    def _fill_slot(self, record: bytes, view: memoryview, deadline: float) -> Opening | None:
        self._fill(view, deadline)
        if self._seal is None:
            return None
        tag = bytearray(sealed.TAG_BYTES)
        self._fill(memoryview(tag), deadline)
        return partial(self._seal.opens, sealed.FRAMES, self._number, record, view, tag)

    def _fill(self, view: memoryview, deadline: float) -> None:
        self._stream.fill(view, deadline)

    def _write(self, said: bytes, deadline: float) -> None:
        self._stream.write([said], deadline)

    def _hang_up(self) -> None:
        self._stream.close()


class _Connection(Serving):
    """Of one thread, which serves it."""

    def __init__(self, stream: _Stream, deadline: float, serve: Callable[[_Connection], None]) -> None:
        super().__init__(deadline)
        self.stream = stream
        self.thread = threading.Thread(target=serve, args=(self,), name="kvstore-pull", daemon=True)

    def hear(self) -> bytes:
        """The puller's next message."""
        message = bytearray(self.needs)
        self.stream.fill(memoryview(message), self.deadline)
        return bytes(message)

    def send(self, record: bytes, frame: memoryview) -> None:
        """Sealed, it is sealed and sent piece by piece, while a piece is in the processor's cache."""
        if self.seal is None:
            self.stream.write([record, frame], self.deadline)
            return
        sealing = self.seal.sealing(sealed.FRAMES, self.number - 1, record)
        ring, head = memoryview(bytearray(min(len(frame), sealed.PIECE_BYTES))), [record]
        for at in range(0, len(frame), sealed.PIECE_BYTES):
            piece = frame[at : at + sealed.PIECE_BYTES]
            sealing.update_into(piece, ring)
            self.stream.write([*head, ring[: len(piece)]], self.deadline)
            head = []
        sealing.finalize()
        self.stream.write([sealing.tag], self.deadline)


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
        self._accepts_from = 0.0
        self._thread.start()

    def wake(self) -> None:
        self._bell.ring()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._bell.descriptor, select.POLLIN)
        try:
            while not self._is_over:
                now = self._clock.monotonic_seconds()
                due, accepts = self._offers.end_due(now), now >= self._accepts_from
                poll.register(self._listener, select.POLLIN if accepts else 0)
                due = due if accepts else min(due, self._accepts_from)
                poll.poll(None if due == inf else 1000 * max(0.0, due - now))
                self._bell.hear()
                self._accept()
        finally:
            self._listener.close()
            left: list[_Connection] = list(self._connections)
            for one in left:
                one.stream.shut()
            for one in left:
                one.thread.join()
            self._bell.close()

    def _accept(self) -> None:
        while not self._is_over:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor or memory: the next attempt would fail too
                self._accepts_from = self._clock.monotonic_seconds() + _PAUSE_SECONDS
                return
            if not self._has_room():
                sock.close()
                continue
            until = self._clock.monotonic_seconds() + t.HANDSHAKE_SECONDS
            one = _Connection(_Stream(sock, self._clock), until, self._serve)
            self._connections[one] = None
            try:
                one.thread.start()
            except RuntimeError:  # the system has no more threads
                del self._connections[one]
                one.stream.close()

    def _drop(self, one: _Connection) -> None:
        self._connections.pop(one, None)
        one.stream.shut()

    def _serve(self, one: _Connection) -> None:
        try:
            one.stream.write([one.greet(self._offers, one.hear(), self._clock.monotonic_seconds())], one.deadline)
            while one.offer is not None:
                one.note(one.hear())
                while (found := one.next_frame()) is not None:
                    one.send(*found)
                if one.has_all:
                    self._offers.end(one.offer)  # the kernel has all of it
        except (OSError, t.PullFault):
            pass
        finally:
            self._connections.pop(one, None)
            one.stream.close()
            if one.offer is not None:
                self._offers.end(one.offer)
