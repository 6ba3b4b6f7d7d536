"""A process that asks a sidecar as fast as it can until it is killed: `python -m torture.flooder SOCKET SEED KIND...`

Each kind has a connection of its own, on which it sends valid messages that are good for nothing, reads all answers,
and never waits; `connections` comes in and goes, or comes and says nothing.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable
from random import Random

from kvstore.protocol import messages as m
from torture.peer import come_in, opened_by

_BATCH_BYTES = 64 << 10


def _batch(verbs: list[m.Verb]) -> bytes:
    """Verbs over and over, as many as make a batch."""
    frames = b"".join(m.pack(m.Request(number, verb)) for number, verb in enumerate(verbs, 2))
    return frames * max(1, _BATCH_BYTES // len(frames))


def _batches(random: Random, number: int, keys: list[bytes]) -> dict[str, Callable[[], bytes]]:
    def large() -> list[bytes]:
        return [random.randbytes(32) for _ in range(m.MAX_KEYS)]

    return {
        "pings": lambda: _batch([m.Ping()]),
        "matches": lambda: _batch([m.MatchPrefix(number, [random.randbytes(32) for _ in range(64)])]),
        "large matches": lambda: _batch([m.MatchPrefix(number, large())]),
        "leases": lambda: _batch([m.LeasePrefix(number, keys, 0, 0.0)] * 4 + [m.ReleaseRequest("")]),
        "stores": lambda: _batch([m.Reserve(number, [random.randbytes(32)], 0), m.Persist(number, keys, 0.0)]),
        "commits": lambda: _batch([m.Commit(1 << 40, 0, 0, [[bytes(16)] * 60] * 900)]),
        "lists": lambda: _batch([m.Namespaces(), m.Extents(list(range(32)), False), m.Attach([7] * 4096)]),
    }


class Stream:
    """One connection that is always full."""

    def __init__(self, path: str, random: Random, kind: str) -> None:
        self.peer = come_in(path)
        number, keys = opened_by(self.peer), [random.randbytes(32) for _ in range(4)]
        reserved = self.peer.ask(m.Reserve(number, keys, 0))
        if isinstance(reserved, m.Reserved) and reserved.reply.reservation:
            self.peer.ask(m.Commit(reserved.reply.reservation, 0, 0, [[bytes(16)] * 2] * len(reserved.reply.blocks)))
        self.batch = memoryview(_batches(random, number, keys)[kind]())
        self.left = self.batch
        self.peer.socket.setblocking(False)

    def go_on(self, events: int) -> None:
        """Send what the socket takes, and drop what there is to be read."""
        if events & (select.POLLHUP | select.POLLERR):
            raise ConnectionResetError
        if events & select.POLLIN:
            room = socket.CMSG_SPACE(m.MAX_EXTENTS * 4)
            _, beside, _, _ = self.peer.socket.recvmsg(1 << 18, room)
            for _, _, data in beside:
                for at in range(0, len(data), 4):
                    os.close(int.from_bytes(data[at : at + 4], "little"))
        if events & select.POLLOUT:
            self.left = self.left[self.peer.socket.send(self.left) :] or self.batch


def call(path: str, random: Random) -> None:
    """Come, and go again."""
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(1.0)
    try:
        one.connect(path)
        if random.random() < 0.5:
            one.sendall(m.pack(m.Request(1, m.Hello(1, 1, "caller"))))
            if random.random() < 0.5:
                one.recv(100)
    except OSError:
        pass
    finally:
        one.close()


def main() -> None:
    path, random, kinds = sys.argv[1], Random(int(sys.argv[2])), sys.argv[3:]
    streams: dict[int, Stream] = {}
    poll = select.poll()
    for kind in kinds:
        if kind != "connections":
            stream = Stream(path, random, kind)
            streams[stream.peer.socket.fileno()] = stream
            poll.register(stream.peer.socket, select.POLLIN | select.POLLOUT)
    os.write(1, b"x")  # it begins
    while True:
        for number, events in poll.poll(0 if "connections" in kinds else None):
            try:
                streams[number].go_on(events)
            except BlockingIOError:
                pass
        if "connections" in kinds:
            call(path, random)


if __name__ == "__main__":
    main()
