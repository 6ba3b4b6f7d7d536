"""Between a client and its server, for tests: a proxy that does harm, and a server that says what it is told."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum, auto

GREETING = b"*4\r\n$6\r\nserver\r\n$6\r\nvalkey\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n"
DRIP_SECONDS = 0.01


class Harm(StrEnum):
    """To what the server sends, from its byte `after` on."""

    FLIP = auto()
    DRIP = auto()
    STALL = auto()
    CUT = auto()
    RESET = auto()
    INSERT = auto()


@dataclass
class _Planned:
    harm: Harm
    after: int
    bit: int


@dataclass
class Proxy:
    """Before a server at a port of loopback. tls: of its own side."""

    target: int
    tls: ssl.SSLContext | None = None
    connections: int = 0
    _planned: _Planned | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _sockets: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def plan(self, harm: Harm, after: int, bit: int = 0) -> None:
        """Once, to the bytes that come from now on. bit: that is flipped."""
        self._planned = _Planned(harm, after, bit)

    def well(self) -> None:
        """No more harm, but for connections that stall already."""
        self._planned = None

    def close(self) -> None:
        self._over.set()
        for one in (self._door, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        try:
            if self.tls is not None:
                near = self.tls.wrap_socket(near, server_side=True)
            far = socket.create_connection(("127.0.0.1", self.target))
            for one in (near, far):  # or a second small write waits 40 ms for the acknowledgement of the first
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            near.close()
            return
        self._sockets += [near, far]
        with suppress(OSError, ValueError):  # ValueError: of a socket that was closed
            self._carry(near, far)
        for one in (near, far):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        while True:
            held = isinstance(near, ssl.SSLSocket) and near.pending()
            readable = [near] if held else select.select([near, far], [], [])[0]
            for one in readable:
                data = one.recv(1 << 16)
                if not data:
                    return
                if one is near:
                    far.sendall(data)
                else:
                    self._down(near, data)

    def _down(self, near: socket.socket, data: bytes) -> None:
        planned = self._planned
        if planned is None or len(data) <= planned.after:
            if planned is not None:
                planned.after -= len(data)
            near.sendall(data)
            return
        self._planned = None
        near.sendall(data[: planned.after])
        rest = data[planned.after :]
        match planned.harm:
            case Harm.FLIP:
                near.sendall(bytes([rest[0] ^ 1 << planned.bit]) + rest[1:])
            case Harm.INSERT:
                near.sendall(b"$3\r\nabc\r\n" + rest)
            case Harm.DRIP:
                for at in range(len(rest)):
                    near.sendall(rest[at : at + 1])
                    if self._over.wait(DRIP_SECONDS):
                        return
            case Harm.STALL:
                self._over.wait()
            case Harm.RESET:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raise ConnectionResetError
            case Harm.CUT:
                raise ConnectionResetError


@contextmanager
def proxy(target: int, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    one = Proxy(target, tls)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def saying(answer: bytes, greeting: bytes = GREETING, *, then_closes: bool = False) -> Iterator[int]:
    """A server that greets, and answers each command with these bytes; its port."""
    over = threading.Event()
    held: list[socket.socket] = []

    def serve(one: socket.socket) -> None:
        with suppress(OSError), one:
            for said in (greeting, *[answer] * 1000):
                if not one.recv(1 << 20):
                    return
                one.sendall(said)
                if said is answer and then_closes:
                    return
            over.wait()

    def accept() -> None:
        while True:
            try:
                one, _ = door.accept()
            except OSError:
                return
            held.append(one)
            threading.Thread(target=serve, args=(one,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield int(door.getsockname()[1])
        finally:
            over.set()
            for one in (door, *held):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
