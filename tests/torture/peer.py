"""A bare connection to a sidecar, and a namespace to open on it. No torch is imported: its processes begin soon."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from kvstore.block.identity import Namespace
from kvstore.block.layout import Layout
from kvstore.protocol import messages as m

LONG_SECONDS = 60.0
"""For whatever must come in the end, on a busy machine."""


def packed_namespace() -> bytes:
    """An attacker's own: 8 KiB of payload a block, of two slices."""
    return Namespace("attacker", Layout.gqa(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16"), "raw").pack()


class Peer:
    """A bare connection, which reads frames."""

    def __init__(self, path: str, seconds: float = LONG_SECONDS) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(seconds)
        self.read = bytearray()
        try:
            self.socket.connect(path)
        except BaseException:
            self.socket.close()
            raise

    def ask(self, verb: m.Verb, number: int = 1) -> m.Answer:
        """One question, and its answer; descriptors are dropped."""
        self.socket.sendall(m.pack(m.Request(number, verb)))
        reply = self.reply()
        assert reply is not None, f"no answer to {m.name_of(verb)}"
        return reply.answer

    def reply(self) -> m.Reply | None:
        """The next answer, or None where the other side hung up. Raises `TimeoutError`."""
        while True:
            if len(self.read) >= m.LENGTH_BYTES:
                length = m.LENGTH_BYTES + int.from_bytes(self.read[: m.LENGTH_BYTES], "little")
                if len(self.read) >= length:
                    frame = bytes(self.read[:length])
                    del self.read[:length]
                    return reply_in(frame)
            try:
                piece, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 18, m.MAX_EXTENTS)
            except (ConnectionError, BrokenPipeError):
                return None
            for one in descriptors:
                os.close(one)
            if not piece:
                return None
            self.read += piece

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


def reply_in(frame: bytes) -> m.Reply:
    """The sidecar's message in a frame."""
    return msgspec.msgpack.decode(frame[m.LENGTH_BYTES :], type=m.Reply)


def come_in(path: Path | str, seconds: float = LONG_SECONDS, newest: int = 1) -> Peer:
    """A connection that has said hello."""
    peer = Peer(str(path), seconds)
    assert isinstance(peer.ask(m.Hello(1, newest, "test")), m.Welcome)
    return peer


def opened_by(peer: Peer, namespace: bytes | None = None, payload_bytes: int = 8192) -> int:
    """The number of a namespace that it opens."""
    granted = peer.ask(m.OpenNamespace(namespace or packed_namespace(), [payload_bytes]))
    assert isinstance(granted, m.Granted)
    return granted.grant.number
