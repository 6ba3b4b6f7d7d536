"""The door for data over plain sockets: sends frames straight from where they are pinned, to those who may have them.

One thread, or a few, each with a selector: a puller that stalls, drips or says nothing holds its own connection and no
thread. Connections, offers and the bytes that are read of a message are bounded; a connection that does not say in a
second which offer it is for is over, and the oldest of those makes room where there are too many. What is pinned is
released when the last byte was handed to the kernel, when the puller is gone, and after 5 s whatever happens.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

from kvstore.block.errors import BadInput
from kvstore.peers import sealed
from kvstore.peers import transport as t
from kvstore.peers.tokens import HeldOffer, Offers, proof_of, seal_key
from tiering.clock import Clock

MOST_CONNECTIONS = 512
MOST_STRANGERS = 128
"""Connections of a thread that have not said yet which offer they are for."""
_TURN_BYTES = 4 << 20
"""That one connection is sent before others have their turn."""
_BACKLOG = 256
_PAUSE_SECONDS = 0.1
"""In which nothing is accepted, where the process has no descriptor left."""


class SocketFrameDoor:
    """`FrameDoor` over TCP."""

    def __init__(
        self,
        listen: str,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        *,
        seal: str = "auto",
        threads: int = 1,
    ) -> None:
        """listen: HOST:PORT where peers reach this host, port 0 for any. Raises `BadInput`."""
        host, port = _listened(listen)
        self._is_sealed = t.must_seal(host, seal)
        if self._is_sealed:
            sealed.needs_sealing()
        try:
            listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
            )
        except OSError as error:
            raise BadInput(f"{listen} cannot be listened on: {error.strerror}; give another address") from None
        listener.setblocking(False)
        self.address = t.written_address(*listener.getsockname()[:2])
        self._clock = clock
        self._offers = Offers(random_bytes)
        self._loops = [_Loop(self._offers, clock, number) for number in range(threads)]
        self._loops[0].listen(listener, self._loops)
        for loop in self._loops:
            loop.start()

    def offer(self, frames: t.OfferedFrames, secret: bytes) -> t.PullOffer:
        """As the contract has it."""
        parts = len(frames.frame_bytes)
        offer = self._offers.add(frames, secret, self._is_sealed, self._clock.monotonic_seconds())
        self._loops[0].wake()  # it ends the offer, and waits for nothing where there was none
        blocks = len(frames.spans) // parts
        return t.PullOffer(offer.token, self.address, "sockets", blocks, frames.frame_bytes, self._is_sealed)

    def withdraw(self, token: bytes) -> None:
        """As the contract has it."""
        if self._offers.withdraw(token) is not None:
            for loop in self._loops:
                loop.wake()

    def pinned(self) -> int:
        """Offers whose frames are not released yet."""
        return self._offers.pinned()

    def close(self) -> None:
        """All pins are gone afterwards."""
        for loop in self._loops:
            loop.stop()
        self._offers.end_all()


class _Connection:
    """One puller, as far as it has come."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock, self.deadline = sock, deadline
        self.read = bytearray(t.HELLO.size)
        self.got = 0
        self.offer: HeldOffer | None = None
        self.seal: sealed.FrameSeal | None = None
        self.asked: deque[tuple[int, int]] = deque()  # request, frames
        self.number = 0  # of the next frame
        self.asked_to = 0  # frames that were asked for, up to here
        self.out: list[memoryview] = []  # handed to the kernel next
        self.frame: memoryview | None = None  # that is being sealed
        self.at = 0
        self.sealing: Any = None
        self.ring = bytearray()
        self.events = selectors.EVENT_READ
        self.is_last = False  # nothing comes behind what is in `out`

    @property
    def needs(self) -> int:
        """Bytes of the message that it sends next."""
        if self.offer is None:
            return t.HELLO.size
        return t.RECORD.size + (sealed.TAG_BYTES if self.seal is not None else 0)


class _Misbehaved(Exception):
    """What a puller does not do."""


class _Loop:
    """A thread, and the connections that it has."""

    def __init__(self, offers: Offers, clock: Clock, number: int) -> None:
        self._offers, self._clock = offers, clock
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self._accepts_from = 0.0
        self._due = inf
        self._others: list[_Loop] = []
        self._given: deque[socket.socket] = deque()
        self._connections: dict[_Connection, None] = {}  # in the order in which they came
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"kvstore-data-door-{number}", daemon=True)

    def listen(self, listener: socket.socket, loops: list[_Loop]) -> None:
        """Accept for all of these."""
        self._listener, self._others = listener, loops
        self._selector.register(listener, selectors.EVENT_READ)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """From any thread."""
        os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """Its connections are over afterwards."""
        self._is_over = True
        if self._thread.is_alive():
            self.wake()
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over:
                for key, events in self._selector.select(self._patience()):
                    if isinstance(key.data, _Connection):
                        self._handle(key.data, events)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._hear_bell()
                while self._given:
                    self._take_in(self._given.popleft())
                if self._clock.monotonic_seconds() >= self._due:
                    self._end_due()
        finally:
            for one in list(self._connections):
                self._drop(one)
            for sock in (*self._given, *([self._listener] if self._listener is not None else [])):
                sock.close()
            self._selector.close()
            os.close(self._bell)

    def _patience(self) -> float | None:
        """Seconds until something is due."""
        return max(0.0, self._due - self._clock.monotonic_seconds()) if self._due < inf else None

    def _hear_bell(self) -> None:
        os.eventfd_read(self._bell)
        for one in [one for one in self._connections if one.offer is not None and one.offer.is_withdrawn]:
            self._handle(one, selectors.EVENT_WRITE)
        self._due = 0.0  # there may be an offer more

    def _end_due(self) -> None:
        """End what had its time, and note when the next of them is due."""
        now = self._clock.monotonic_seconds()
        for one in [one for one in self._connections if now >= one.deadline]:
            self._drop(one)
        self._due = min((one.deadline for one in self._connections), default=inf)
        if self._listener is None:
            return
        if 0 < self._accepts_from <= now:
            self._accepts_from = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._due = min(self._due, self._offers.end_due(now), self._accepts_from or inf)

    # --- those who come ---

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_BACKLOG):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor, or no memory: the same would be so at once again
                self._selector.unregister(self._listener)
                self._accepts_from = self._clock.monotonic_seconds() + _PAUSE_SECONDS
                self._due = min(self._due, self._accepts_from)
                return
            loop = min(self._others, key=_Loop.load)
            if loop is self:
                self._take_in(sock)
            else:
                loop._given.append(sock)
                loop.wake()

    def load(self) -> int:
        return len(self._connections) + len(self._given)

    def _take_in(self, sock: socket.socket) -> None:
        strangers = [one for one in self._connections if one.offer is None]
        if len(strangers) >= MOST_STRANGERS:
            self._drop(strangers[0])
        elif len(self._connections) >= MOST_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one = _Connection(sock, self._clock.monotonic_seconds() + t.HANDSHAKE_SECONDS)
        self._connections[one] = None
        self._due = min(self._due, one.deadline)
        self._selector.register(sock, one.events, one)
        self._handle(one, selectors.EVENT_READ)  # its first message is there, as a rule

    def _drop(self, one: _Connection) -> None:
        """The connection, and its pins."""
        if self._connections.pop(one, self) is self:
            return
        self._selector.unregister(one.sock)
        one.sock.close()
        self._release(one)

    def _release(self, one: _Connection) -> None:
        one.out, one.frame = [], None
        if one.offer is not None:
            self._offers.end(one.offer)

    # --- what one of them says, and is sent ---

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
        except (OSError, _Misbehaved, t.PeerFault):
            self._drop(one)

    def _hear(self, one: _Connection) -> None:
        """Read what it says, a message at a time, and never more than the messages that it may send."""
        while True:
            try:
                count = one.sock.recv_into(memoryview(one.read)[one.got : one.needs])
            except BlockingIOError:
                return
            if not count:
                raise _Misbehaved
            one.got += count
            if one.got < one.needs:
                continue
            message, one.got = bytes(memoryview(one.read)[: one.needs]), 0
            if one.offer is None:
                self._greet(one, message)
            else:
                _note_request(one, message)

    def _greet(self, one: _Connection, hello: bytes) -> None:
        offer = self._offers.take(hello, self._clock.monotonic_seconds())
        if offer is None:
            one.sock.send(_record(t.PullStatus.REFUSED, 0, 0, 0, 0))  # all the same to it why
            raise _Misbehaved
        one.offer, one.deadline = offer, offer.until
        if offer.is_sealed:
            one.seal = sealed.FrameSeal(seal_key(offer.token, offer.secret))
            one.ring = bytearray(sealed.PIECE_BYTES)
        one.out = [memoryview(_record(t.PullStatus.WELCOME, 0, 0, 0, 0) + proof_of(hello, offer.secret))]

    def _send(self, one: _Connection) -> None:
        """Hand the kernel what it takes."""
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
        offer = one.offer
        assert offer is not None
        if not one.out and offer.frames is not None and one.number == len(offer.frames.spans) and one.frame is None:
            self._offers.end(offer)  # the kernel has all of it

    def _next(self, one: _Connection) -> bool:
        """Put what is to be sent next into `out`, if there is something."""
        offer = one.offer
        assert offer is not None
        if one.frame is not None:
            _seal_piece(one)
            return True
        if one.is_last:
            return False
        if offer.is_withdrawn:
            record = _record(t.PullStatus.GONE, 0, 0, one.number, 0)
            tag = one.seal.tag(sealed.TOLD, one.number, record) if one.seal is not None else b""
            one.out, one.is_last = [memoryview(record + tag)], True
            self._offers.end(offer)
            return True
        if not one.asked:
            return False
        assert offer.frames is not None
        request, follow = one.asked[0]
        one.asked[0] = (request, follow - 1)
        if follow == 1:
            one.asked.popleft()
        frame = offer.frames.spans[one.number].cast("B")
        record = _record(t.PullStatus.FRAME, follow - 1, request, one.number, len(frame))
        if one.seal is None:
            one.out = [memoryview(record), frame]
        else:
            one.sealing = one.seal.sealing(sealed.FRAMES, one.number, record)
            one.out, one.frame, one.at = [memoryview(record)], frame, 0
            _seal_piece(one)
        one.number += 1
        return True


def _note_request(one: _Connection, message: bytes) -> None:
    """It asks for frames in order, eight at a time, and for no more than it was offered."""
    record = t.checked_record(message[: t.RECORD.size], t.ASK_MAGIC)
    if one.seal is not None:
        opening = one.seal.opening(sealed.ASKED, record.request, message[: t.RECORD.size])
        sealed.opened(opening, message[t.RECORD.size :])
    offer = one.offer
    assert offer is not None
    if offer.is_withdrawn:
        return
    most = len(offer.frames.spans) if offer.frames is not None else one.asked_to
    is_next = record.number == one.asked_to and 0 < record.follow <= t.FRAMES_ASKED
    if not is_next or record.number + record.follow > most or len(one.asked) >= t.REQUESTS_UNDER_WAY:
        raise _Misbehaved
    one.asked_to += record.follow
    one.asked.append((record.request, record.follow))


def _seal_piece(one: _Connection) -> None:
    """The next piece of the frame that is under way, and the tag behind the last one."""
    assert one.frame is not None
    piece = one.frame[one.at : one.at + sealed.PIECE_BYTES]
    one.sealing.update_into(piece, one.ring)
    one.out.append(memoryview(one.ring)[: len(piece)])
    one.at += len(piece)
    if one.at == len(one.frame):
        one.sealing.finalize()
        one.out.append(memoryview(one.sealing.tag))
        one.frame = one.sealing = None


def _record(status: t.PullStatus, follow: int, request: int, number: int, frame_bytes: int) -> bytes:
    return t.RECORD.pack(t.FRAME_MAGIC, t.VERSION, status, follow, request, number, frame_bytes)


def _listened(listen: str) -> tuple[str, int]:
    """Raises `BadInput`."""
    host, _, port = listen.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        raise BadInput(f"{listen!r} is no address to listen at; give HOST:PORT, such as 10.0.0.7:7472") from None
    bare: str = infos[0][4][0]  # type: ignore[assignment]
    if not host or bare in ("0.0.0.0", "::"):
        raise BadInput(f"{listen!r} is not where peers reach this host; give its own address, such as 10.0.0.7:7472")
    return bare, int(port)
