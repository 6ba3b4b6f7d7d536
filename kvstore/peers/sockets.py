"""Pulls over plain sockets: the kernel copies frames straight into their slots.

Every read and write is limited to the rest of the deadline by the kernel, which fills a whole piece in one call: a peer
that drips a byte at a time times out like any other.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from functools import partial

from kvstore.peers import sealed
from kvstore.peers import transport as t
from kvstore.peers.reader import FramePuller, Opening, PullTransport
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
