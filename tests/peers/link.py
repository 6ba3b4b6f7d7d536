"""A link between two hosts that goes wrong: a proxy of one TCP connection, which spoils what comes back at a byte."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from dataclasses import dataclass

from kvstore.peers.transport import numeric_address, written_address


@dataclass(frozen=True)
class Spoil:
    """kind: flip (a bit), cut, reset, stall, drip (a byte each 5 ms from there on), or nothing. at: which byte."""

    kind: str
    at: int = 0
    bit: int = 0


class Link:
    """Use it as a context; `address` is dialled in place of the door's."""

    def __init__(self, door: str, spoil: Spoil) -> None:
        self._door, self._spoil = numeric_address(door), spoil
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = written_address(*self._listener.getsockname())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        with near, socket.create_connection(self._door) as far, contextlib.suppress(OSError):
            self._forward(near, far)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        passed = 0
        with selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ)
            selector.register(far, selectors.EVENT_READ)
            while not self._is_over.is_set():
                for key, _ in selector.select(0.02):
                    taken = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    if not taken:
                        return
                    if key.fileobj is near:
                        far.sendall(taken)
                        continue
                    at = self._spoil.at - passed
                    passed += len(taken)
                    if self._spoil.kind == "nothing" or at >= len(taken):
                        near.sendall(taken)
                    elif self._spoil.kind == "flip":
                        spoiled = bytearray(taken)
                        if at >= 0:
                            spoiled[at] ^= 1 << self._spoil.bit
                        near.sendall(spoiled)
                    else:
                        near.sendall(taken[: max(0, at)])
                        self._end(near, taken[max(0, at) :])
                        return

    def _end(self, near: socket.socket, rest: bytes) -> None:
        if self._spoil.kind == "reset":
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif self._spoil.kind == "stall":
            self._is_over.wait(30)
        elif self._spoil.kind == "drip":
            for byte in rest:
                near.sendall(bytes([byte]))
                if self._is_over.wait(0.005):
                    return
