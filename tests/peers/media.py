"""The ways that frames take between hosts, for suites that run on each: a door, what pulls from it, and a holder that
lies, which has all secrets and does one thing wrong at its third frame."""

from __future__ import annotations

import contextlib
import enum
import functools
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvstore.peers import sealed, ucx
from kvstore.peers import transport as t
from kvstore.peers.sockets import SocketFrameDoor, SocketPullTransport
from kvstore.peers.tokens import proof_of, seal_key
from peers.frames import SECRET, Source, random_bytes
from tiering.clock import SystemClock

LIED_AT = 2
DRIP_SECONDS = 0.01
OPTIONS = {"TLS": "tcp"}


class Lie(enum.Enum):
    """What a holder does wrong."""

    NONE = enum.auto()
    FLIP = enum.auto()
    SIZE = enum.auto()
    REQUEST = enum.auto()
    NUMBER = enum.auto()
    MAGIC = enum.auto()
    CLOSE = enum.auto()
    RESET = enum.auto()
    STALL = enum.auto()
    DRIP = enum.auto()


@dataclass(frozen=True)
class SocketMedium:
    """Plain sockets."""

    name: str
    seal: str
    late_seconds: float = 0.3

    def door(self) -> SocketFrameDoor:
        return SocketFrameDoor("127.0.0.1:0", SystemClock(), random_bytes, seal=self.seal)

    def transport(self) -> SocketPullTransport:
        return SocketPullTransport(SystemClock(), seal=self.seal)

    @contextlib.contextmanager
    def lying_holder(self, source: Source, lie: Lie) -> Iterator[t.PullOffer]:
        token, is_sealed, is_over = bytes(range(32)), self.seal == "always", threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            work = threading.Thread(target=_lie, args=(listener, source, lie, token, is_sealed, is_over))
            work.start()
            address = t.written_address(*listener.getsockname())
            yield t.PullOffer(token, address, "sockets", len(source.keys), source.frame_bytes, is_sealed)
            is_over.set()
            work.join(10)
            assert not work.is_alive()


def _lie(
    listener: socket.socket, source: Source, lie: Lie, token: bytes, is_sealed: bool, is_over: threading.Event
) -> None:
    sock, _ = listener.accept()
    with sock, contextlib.suppress(OSError, EOFError):
        seal = sealed.FrameSeal(seal_key(token, SECRET)) if is_sealed else None
        hello = _read(sock, t.HELLO.size)
        sock.sendall(
            t.RECORD.pack(t.FRAME_MAGIC, t.VERSION, t.PullStatus.WELCOME, 0, 0, 0, 0) + proof_of(hello, SECRET)
        )
        number = 0
        while True:
            asked = t.checked_record(_read(sock, t.RECORD.size + 16 * is_sealed)[: t.RECORD.size], t.ASK_MAGIC)
            for left in reversed(range(asked.follow)):
                now = lie if number == LIED_AT else Lie.NONE
                if now in (Lie.CLOSE, Lie.RESET):
                    if now is Lie.RESET:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                if now is Lie.STALL:
                    is_over.wait(30)
                    return
                said = said_frame(source, number, asked.request, left, now, seal)
                if now is Lie.DRIP:
                    for at in range(len(said)):
                        sock.sendall(said[at : at + 1])
                        if is_over.wait(DRIP_SECONDS):
                            return
                sock.sendall(said)
                number += 1


def said_frame(source: Source, number: int, request: int, left: int, lie: Lie, seal: Any) -> bytes:
    """Record and frame, sealed where there is a seal, with that lie in it."""
    frame = bytearray(source.spans[number])
    if lie is Lie.FLIP:
        frame[len(frame) // 2] ^= 4
    magic = b"KVPX" if lie is Lie.MAGIC else t.FRAME_MAGIC
    size = len(frame) + 4096 * (lie is Lie.SIZE)
    request, number_said = request + (lie is Lie.REQUEST), number + (lie is Lie.NUMBER)
    record = t.RECORD.pack(magic, t.VERSION, t.PullStatus.FRAME, left, request, number_said, size)
    if seal is None:
        return record + frame
    sealing, into = seal.sealing(sealed.FRAMES, number, record), bytearray(len(frame))
    sealing.update_into(bytes(frame), into)
    sealing.finalize()
    return record + into + sealing.tag


def _read(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = sock.recv(count - len(found))
        if not more:
            raise EOFError
        found += more
    return found


@dataclass(frozen=True)
class UcxMedium:
    """UCX over TCP."""

    name: str
    seal: str
    late_seconds: float = 1.5  # its first frames take a while

    def door(self) -> Any:
        return ucx.UcxFrameDoor("127.0.0.1:0", SystemClock(), random_bytes, seal=self.seal, options=OPTIONS)

    def transport(self) -> Any:
        return ucx_transport(self.seal)

    @contextlib.contextmanager
    def lying_holder(self, source: Source, lie: Lie) -> Iterator[t.PullOffer]:
        token, is_over, port, is_there = bytes(range(32)), threading.Event(), [0], threading.Event()
        holder = _UcxLiar(source, lie, token, self.seal == "always", is_over)
        work = threading.Thread(target=holder.run, args=(port, is_there))
        work.start()
        assert is_there.wait(20)
        address = t.written_address("127.0.0.1", port[0])
        yield t.PullOffer(token, address, "ucx", len(source.keys), source.frame_bytes, self.seal == "always")
        is_over.set()
        work.join(10)
        assert not work.is_alive()


@functools.cache
def ucx_transport(seal: str) -> Any:
    """One for all tests: a context of UCX takes a while."""
    return ucx.UcxPullTransport(SystemClock(), seal=seal, options=OPTIONS)


class _UcxLiar:
    """A holder over UCX that has all secrets, and lies."""

    def __init__(self, source: Source, lie: Lie, token: bytes, is_sealed: bool, is_over: threading.Event) -> None:
        self.source, self.lie, self.token, self.is_sealed, self.is_over = source, lie, token, is_sealed, is_over
        self.endpoints: list[Any] = []
        self.kept: list[Any] = []

    def run(self, port: list[int], is_there: threading.Event) -> None:
        self.worker = ucx._Worker(ucx._context(OPTIONS))
        listener = ucx.ucx.UCXListener.create(self.worker.ucx, 0, self.endpoints.append, deliver_endpoint=True)
        port[0] = listener.port
        is_there.set()
        with contextlib.suppress(EOFError, ucx.ucx.UCXError):
            while not self.endpoints:
                self.turn()
            self.lies(self.endpoints[0])
            while not self.is_over.is_set():
                self.turn()
        for endpoint in self.endpoints:
            ucx._end(endpoint)

    def turn(self) -> None:
        if self.is_over.is_set():
            raise EOFError
        self.worker.turn(0.005)

    def turns(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def done(self, move: Any) -> None:
        while not move.is_over:
            self.turn()
        move.check()

    def read(self, endpoint: Any, count: int) -> bytes:
        into = bytearray(count)
        self.done(ucx._Underway(endpoint.stream_recv, into))
        return bytes(into)

    def send(self, endpoint: Any, said: bytes) -> None:
        self.done(ucx._Underway(endpoint.stream_send, said))

    def lies(self, endpoint: Any) -> None:
        seal = sealed.FrameSeal(seal_key(self.token, SECRET)) if self.is_sealed else None
        hello = self.read(endpoint, t.HELLO.size)
        welcome = t.RECORD.pack(t.FRAME_MAGIC, t.VERSION, t.PullStatus.WELCOME, 0, 0, 0, 0)
        self.send(endpoint, welcome + proof_of(hello, SECRET))
        tag, number = ucx._tag(self.token, SECRET), 0
        while True:
            message = self.read(endpoint, t.RECORD.size + 16 * self.is_sealed)
            asked = t.checked_record(message[: t.RECORD.size], t.ASK_MAGIC)
            for left in reversed(range(asked.follow)):
                now = self.lie if number == LIED_AT else Lie.NONE
                if now in (Lie.CLOSE, Lie.RESET):
                    for move in self.kept:
                        self.done(move)
                    self.turns(0.3)  # UCX drops what it has not sent, and does not say of all what it has
                    return ucx._end(endpoint)
                if now is Lie.STALL:
                    return None
                said = said_frame(self.source, number, asked.request, left, now, seal)
                record, frame = said[: t.RECORD.size], said[t.RECORD.size :]
                if now is Lie.DRIP:
                    for at in range(len(record)):
                        self.send(endpoint, record[at : at + 1])
                        self.turns(20 * DRIP_SECONDS)
                else:
                    self.send(endpoint, record)
                self.kept.append(ucx._Underway(endpoint.tag_send, frame, ucx._tag_of(tag, number)))
                number += 1


CLEAR = SocketMedium("sockets", "auto")
SEALED = SocketMedium("sockets, sealed", "always")
UCX, UCX_SEALED = UcxMedium("ucx", "auto"), UcxMedium("ucx, sealed", "always")
MEDIA = [CLEAR, *([UCX] if ucx._IS_HERE else [])]
FURTHER_MEDIA = [SEALED, *([UCX_SEALED] if ucx._IS_HERE else [])]
"""`make test-all` has these as well."""
