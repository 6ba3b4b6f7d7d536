"""Who is connected to gRPC. grpc lets in what comes up to a bound of its own, and ends none of it for a newcomer: as
many clients that say nothing would keep all others out.

So the process looks at its own sockets at that port. A connection is a stranger's until a call on it had a credential;
beyond `KEPT` the rule of `kvstore.listeners.places` says which are shut down.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Hashable
from contextlib import suppress
from functools import partial
from urllib.parse import unquote

from kvstore.listeners.places import Place, TakenPlaces

KEPT = 512
"""A quarter of what grpc lets in: the others are for those that come between two looks."""
MOST_NAMED = 4096

Peer = tuple[str, int]


class GrpcCallers:
    """`introduce` is for grpc's threads, `make_room` for one of the program's own."""

    def __init__(self, kept: int = KEPT) -> None:
        self._places = TakenPlaces(kept)
        self._by_peer: dict[Peer, Place] = {}
        self._leaving: list[Peer] = []
        self._named: dict[Peer, Hashable] = {}  # the last ones, also of connections not looked at yet

    def introduce(self, peer: str, caller: Hashable) -> None:
        """A call with a credential came. peer: as grpc writes it, `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        if not port.isdigit():  # a UNIX socket's
            return
        at = host.strip("[]"), int(port)
        if at not in self._named and len(self._named) >= MOST_NAMED:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread's turn
                del self._named[next(iter(self._named))]
        self._named[at] = caller

    def make_room(self, socks: Collection[socket.socket]) -> bool:
        """Look at the connections that are there; returns whether there are many, so that the next look is due soon.
        socks: duplicates, closed here."""
        there: dict[Peer, socket.socket] = {}
        for sock in socks:
            with suppress(OSError):  # it listens, or its client is gone
                host, port = sock.getpeername()[:2]
                there[str(host).removeprefix("::ffff:"), int(port)] = sock
        for at in self._by_peer.keys() - there.keys():
            self._places.leave(self._by_peer.pop(at))
            self._named.pop(at, None)
        self._leaving.clear()
        for at in there:
            if at not in self._by_peer and self._places.make_room():
                self._by_peer[at] = Place(partial(self._leaving.append, at))
                self._places.take(self._by_peer[at])
            if at in self._by_peer:
                self._by_peer[at].caller = self._named.get(at)
            else:
                self._leaving.append(at)
        for at in self._leaving:
            self._by_peer.pop(at, None)
            with suppress(OSError):
                there[at].shutdown(socket.SHUT_RDWR)
        for sock in socks:
            sock.close()
        return 2 * len(there) > KEPT


def own_sockets_at(port: int) -> list[socket.socket]:
    """Duplicates of this process's sockets at a port, for the caller to close."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(name)))
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port:
                    found.append(sock)
                else:
                    sock.close()
        except OSError:  # closed meanwhile, or no descriptor is left
            pass
    return found
