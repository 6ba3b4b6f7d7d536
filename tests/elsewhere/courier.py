"""A courier as a raw client: it comes in at courier.sock, fills slots, and has headers looked at."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from kvstore.block.account import HitTier
from kvstore.block.identity import Namespace, TenantKeys, root_key, sealers_of, stamps_of
from kvstore.protocol import courier as c
from kvstore.protocol import messages as m
from kvstore.protocol.messages import ReserveReply
from kvstore.service.connections import DoorLimits
from service.sidecar import Sidecar
from tiering.frame import HEADER_BYTES, digest, frame_bytes
from tiering.tier import extent_of, slot_of
from torture.peer import Peer, packed_namespace, reply_in
from waiting import wait_until

SPACE = Namespace.unpack(packed_namespace())
PAYLOAD = [8192]


def chain(blocks: int) -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(blocks)]


@pytest.fixture
def sidecar_with_couriers(tmp_path: Path) -> Iterator[Sidecar]:
    """Under whichever name a module gives it."""
    with Sidecar(tmp_path, DoorLimits(connections=64), couriers=True, dram="16MiB") as sidecar:
        yield sidecar
        wait_until(lambda: sidecar.core.awaits.counts().parked == 0)


class RawCourier(Peer):
    """One connection. Requests are numbered; descriptors are mapped where extents are asked for."""

    def __init__(self, path: Path, tenant: str = "default", session: bytes = b"") -> None:
        super().__init__(str(path))
        self.numbers = count(2)
        self.welcome = self.ask(m.Hello(m.OLDEST_VERSION, m.NEWEST_VERSION, "courier", session, tenant=tenant))
        self.extents: dict[int, tuple[mmap.mmap, int]] = {}

    def call(self, verb: m.Verb) -> m.Answer:
        """One question, and its answer."""
        return self.ask(verb, next(self.numbers))

    def open(self, namespace: Namespace, payload_bytes: Sequence[int]) -> int:
        """A namespace, by its number."""
        granted = self.call(m.OpenNamespace(namespace.pack(), list(payload_bytes)))
        assert isinstance(granted, m.Granted), granted
        return granted.grant.number

    def reserve(self, namespace: int, keys: Sequence[bytes], skipped: int = 0) -> ReserveReply:
        """Slots for what is missing."""
        reserved = self.call(m.Reserve(namespace, list(keys), skipped, skipped=skipped))
        assert isinstance(reserved, m.Reserved), reserved
        return reserved.reply

    def fill(self, places: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Payloads into slots."""
        for place, payload in zip(places, payloads, strict=True):
            number = extent_of(place)
            if number not in self.extents:
                self._map(number)
            memory, slot_bytes = self.extents[number]
            at = slot_of(place) * slot_bytes + HEADER_BYTES
            memory[at : at + len(payload)] = payload

    def _map(self, number: int) -> None:
        self.socket.sendall(m.pack(m.Request(next(self.numbers), m.Extents([number], True))))
        body, held = bytearray(), list[int]()
        while len(body) < m.LENGTH_BYTES or len(body) < m.LENGTH_BYTES + int.from_bytes(body[:4], "little"):
            piece, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 32)
            body += piece
            held += descriptors
        answer = reply_in(body).answer
        assert isinstance(answer, m.ExtentsReply), answer
        for one, descriptor in zip(answer.extents, held, strict=True):
            self.extents[one.number] = mmap.mmap(descriptor, one.size_bytes), one.frame_bytes
            os.close(descriptor)

    def adopt(
        self, reservation: int, part: int, first: int, headers: Sequence[bytes], tier: HitTier = HitTier.PEER
    ) -> m.Answer:
        """Have headers looked at."""
        return self.call(m.Adopt(reservation, part, first, list(headers), tier))

    def questions(self, *answers: c.QuestionAnswered, told: c.CourierFigures | None = None) -> c.QuestionsReply:
        """What is asked now."""
        reply = self.call(m.Questions(list(answers), told))
        assert isinstance(reply, m.QuestionsReply), reply
        return reply

    def close(self) -> None:
        for memory, _ in self.extents.values():
            with suppress(BufferError):
                memory.close()
        super().close()


class OtherNode:
    """Frames as another store of the same tenant seals them."""

    def __init__(self, keys: TenantKeys, namespace: Namespace, payload_bytes: Sequence[int]) -> None:
        self.stamps = stamps_of(keys, namespace, list(payload_bytes))
        self.sealers = sealers_of(keys, self.stamps)
        self.root = root_key(namespace.layout.block_tokens)

    def header(self, part: int, keys: Sequence[bytes], at: int, payload: bytes, generation: int = 77) -> bytes:
        """Of a part of block `at` of that chain."""
        stamp = self.stamps[part]
        size = stamp.slice_bytes
        digests = [digest(payload[one * size : (one + 1) * size]) for one in range(stamp.slices)]
        return self.sealers[part].seal(keys[at], keys[at - 1] if at else self.root, at, generation, digests)


def block_bytes(payload_bytes: Sequence[int]) -> int:
    return sum(map(frame_bytes, payload_bytes))
