"""The raw socket that rows of `benches.py network` are compared with: a process that sends and takes so many bytes.

It prints where it listens, then serves connections one after another. On each, `g` asks for the bytes; `s` announces
them, and is answered by a byte. It ends with its standard input.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.bench.child import Child

GET, SET = b"g", b"s"


@contextmanager
def raw_peer(size: int, path: str = "") -> Iterator[socket.socket]:
    """A connection to a new one, over TCP of loopback or a UNIX socket at `path`."""
    with Child("kv_bench.network.raw_peer", str(size), path) as peer:
        port = int(peer.hear())
        with socket.socket(socket.AF_UNIX if path else socket.AF_INET) as one:
            one.connect(path or ("127.0.0.1", port))
            if not path:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield one


def fill(one: socket.socket, view: memoryview) -> None:
    """Receive until the view is full."""
    while view:
        count = one.recv_into(view)
        if not count:
            raise ConnectionResetError("the raw peer ended")
        view = view[count:]


def main(size: int, path: str) -> None:
    """Serve until standard input ends."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    door = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    door.bind(path or ("127.0.0.1", 0))
    door.listen()
    print(0 if path else door.getsockname()[1], flush=True)
    given, taken = memoryview(bytearray(os.urandom(size))), memoryview(bytearray(size))
    while True:
        one, _ = door.accept()
        if not path:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := one.recv(1):
            if asked == GET:
                one.sendall(given)
            else:
                fill(one, taken)
                one.sendall(asked)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
