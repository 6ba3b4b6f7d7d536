"""A tenant that counts: whatever it can see of a store is the same whether another tenant did nothing or a lot.

One tenant walks through a script and notes down every field of every answer, every header in the memory that it maps,
and what the kernel tells of its mappings. The other one is busy in between: 0, 1, 10 or 100 times. What is noted down
must be equal, but for numbers that are drawn under a key, and for the start of a count, which is random.

Memory is ample here: that another tenant's blocks push out one's own can be seen, and is no secret.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_digest

from asking import Asking
from kvstore.block.identity import Namespace
from kvstore.block.layout import Layout
from kvstore.client.framing import FramedSocket
from kvstore.config import Limits
from kvstore.protocol import messages as m
from kvstore.protocol.messages import Grant, LeaseReply, ReserveReply
from service.sidecar import Sidecar
from tiering.clock import SystemClock
from tiering.dram.extents import MAX_HOLDER, MappedExtent
from tiering.frame import HEADER_BYTES, parse_header
from tiering.tier import extent_of, slot_of
from workbench import open_at

LAYOUT = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")
PAYLOAD_BYTES = 2048
DIGEST = xxh3_128_digest(bytes(PAYLOAD_BYTES))
BUSY = (0, 1, 10, 100)
ROUNDS = 3
SECONDS = 30.0
FAR = 1 << 12
"""Above whatever could be counted here: two numbers as near as that would be neighbours in a count."""
_LOCK = struct.Struct("@hhqqi4x")


@dataclass
class Seen:
    """What was noted down. plain: all that is to be equal. drawn: numbers under a key, by what they are of."""

    plain: list[Any] = field(default_factory=list)
    drawn: dict[str, list[int]] = field(default_factory=dict)
    first_generation: int = 0

    def draw(self, kind: str, number: int) -> int:
        """How many others of its kind were seen before it; 0 stays 0."""
        known = self.drawn.setdefault(kind, [])
        if number and number not in known:
            known.append(number)
        return 1 + known.index(number) if number else 0

    def generation(self, number: int) -> int:
        self.first_generation = self.first_generation or number
        return number - self.first_generation

    def place(self, place: int) -> tuple[int, int]:
        return self.draw("extent", extent_of(place)), slot_of(place)


class Eyes(Asking):
    """A tenant's side of a store, and all that it shows: in the store's own process."""

    def open(self, name: str) -> Grant:
        return self.open_namespace(Namespace(name, LAYOUT, "raw"), [PAYLOAD_BYTES])

    def fill(self, reply: ReserveReply) -> int:
        return self.commit(reply.reservation, 0, 0, [[DIGEST]] * len(reply.blocks))

    def take(self, number: int, keys: Sequence[bytes]) -> LeaseReply:
        return self.lease(number, keys, 0, 1000)

    def headers(self, reply: LeaseReply) -> list[bytes]:
        places = reply.places[0] if reply.places else []
        return [bytes(span.view[:HEADER_BYTES]) for span in self.door.memory(0, places)]

    def more(self, seen: Seen) -> None:
        """There is nothing else."""

    def close(self) -> None:
        """Nor is there a connection."""


class WireEyes(Eyes):
    """At a socket, message by message, with memory as the kernel maps it."""

    def __init__(self, path: Path) -> None:
        super().__init__(self)  # type: ignore[arg-type]
        self._path = path
        self._session = secrets.token_bytes(16)
        self._wires = [self._connected()]
        self._mapped: dict[int, MappedExtent] = {}
        self._retired: list[int] = []
        self._known: set[int] = set()

    def _connected(self) -> FramedSocket:
        return FramedSocket(str(self._path), "eyes", self._session, SystemClock(), SECONDS)

    def call(self, verb: m.Verb, kind: Any = None, seconds: float | None = None) -> Any:
        """As a door's."""
        answer = self._wires[0].call(verb, SECONDS).answer
        self._retired += self._wires[0].retired()
        return answer

    def headers(self, reply: LeaseReply) -> list[bytes]:
        places = reply.places[0] if reply.places else []
        found = []
        for place in places:
            number = extent_of(place)
            if number not in self._mapped:
                answered = self._wires[0].call(m.Extents([number], writable=False), SECONDS)
                assert isinstance(answered.answer, m.ExtentsReply)
                (extent,), (descriptor,) = answered.answer.extents, answered.descriptors
                assert extent.number == number
                self._mapped[number] = MappedExtent(descriptor, extent.size_bytes, writable=False)
            start = slot_of(place) * (HEADER_BYTES + 4096)
            found.append(bytes(self._mapped[number].view[start : start + HEADER_BYTES]))
        return found

    def more(self, seen: Seen) -> None:
        """What was given back; the list of namespaces; and, of one more connection, the lock that stands for it."""
        self.call(m.Ping())
        seen.plain.append(("retired", sorted(seen.draw("extent", number) for number in self._retired)))
        self._retired.clear()
        listed = self.call(m.Namespaces())
        seen.plain.append([(one.id, one.blocks) for one in listed.namespaces] + [listed.next])
        self._wires.append(self._connected())
        number = next(iter(self._mapped), None)
        if number is None:
            return
        descriptors = []
        for wire in self._wires:
            answered = wire.call(m.Extents([number], writable=False), SECONDS)
            descriptors += answered.descriptors
        seen.plain.append(("descriptors", len(descriptors)))
        for holder in sorted({holder for one in descriptors for holder in _holders(one)} - self._known):
            self._known.add(holder)
            seen.draw("holder", holder)
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


def _holders(descriptor: int) -> Iterator[int]:
    """Bytes that others have locked in a file, as fcntl(2) tells whoever has a descriptor of it: any one in a range."""
    ranges = [(0, MAX_HOLDER)]
    while ranges:
        start, stop = ranges.pop()
        if start == stop:
            continue
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
        kind, _, found, length, _ = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
        if kind != fcntl.F_UNLCK:
            yield found
            ranges += [(start, found), (found + length, stop)]


_names = count()


class Tenant:
    """Puts, hits, misses, namespaces and connections."""

    def __init__(self, eyes: Eyes, name: str) -> None:
        self.eyes = eyes
        self._name = name
        self.number = eyes.open(name).number
        self._keys = count()

    def key(self) -> bytes:
        return f"{self._name} {next(self._keys)}".encode().ljust(32)

    def be_busy(self, times: int) -> None:
        stored = [self.key()]
        self.eyes.fill(self.eyes.reserve(self.number, stored))
        for at in range(times):
            reserved = self.eyes.reserve(self.number, [stored[0], self.key()])
            if at % 2:
                assert self.eyes.fill(reserved)
            else:
                self.eyes.abort(reserved.reservation)
            lease = self.eyes.take(self.number, [self.key()] if at % 3 == 0 else stored).lease
            if lease:
                self.eyes.release(lease)
            if at % 10 == 0:
                self.eyes.open(f"{self._name} {at} {next(self._keys)}")
        if times >= 10:
            assert self.eyes.drop(self.number)
            self.eyes.more(Seen())

    def walk(self, seen: Seen, at: int) -> None:
        """One round of the script: all that comes back is noted down."""
        eyes = self.eyes
        grant = eyes.open(f"{self._name} {at}")
        seen.plain.append((grant.number, grant.payload_bytes, grant.stamps, grant.durable))
        keys = [self.key(), self.key()]
        for number in (self.number, grant.number):
            reserved = eyes.reserve(number, keys)
            places = [[seen.place(place) for place in column] for column in reserved.places]
            told = (reserved.present, reserved.blocks, reserved.stopped_at, reserved.reason)
            seen.plain.append((seen.draw("reservation", reserved.reservation), places, told))
            seen.plain.append(eyes.fill(reserved))
        for asked in (keys, keys[:1], [*keys, self.key()], [self.key()]):
            seen.plain.append(eyes.match(self.number, asked))
            lease = eyes.take(self.number, asked)
            places = [[seen.place(place) for place in column] for column in lease.places]
            generations = [seen.generation(one) for one in lease.generations]
            told = (lease.first_block, lease.blocks, lease.tiers, lease.reason, lease.detail)
            seen.plain.append((seen.draw("lease", lease.lease), places, generations, told))
            for raw in eyes.headers(lease):
                header = parse_header(raw)
                rest = (header.stamp, header.prefix_key, header.parent, header.block_index, header.digests)
                seen.plain.append((rest, header.priority, header.expires_at, seen.generation(header.generation)))
            if lease.lease:
                eyes.release(lease.lease)
        eyes.more(seen)
        if at % 2:
            seen.plain.append(eyes.drop(grant.number))


def watch(mine: Tenant, theirs: Tenant, busy: int) -> Seen:
    seen = Seen()
    seen.plain.append(mine.number)
    for at in range(ROUNDS):
        if busy:
            theirs.be_busy(busy)
        mine.walk(seen, at)
    return seen


LIMITS = Limits(namespaces=4096, leases=1 << 16)


@contextmanager
def embedded(directory: Path) -> Iterator[tuple[Eyes, Eyes]]:
    with open_at(directory, dram="32MiB", extent="64KiB", limits=LIMITS, numbers_key=bytes(16)) as store:
        yield Eyes(store.for_tenant("mine")._door_for_handle()), Eyes(store.for_tenant("theirs")._door())
        store.check()


@contextmanager
def sidecar(directory: Path) -> Iterator[tuple[Eyes, Eyes]]:
    directory.mkdir()
    with Sidecar(directory, dram="32MiB", extent="64KiB", limits=LIMITS, numbers_key=bytes(16)) as running:
        path = directory / "theirs.sock"
        running.door.listen(path, running.store.tenant_keys("theirs"))
        eyes = WireEyes(running.path), WireEyes(path)
        yield eyes
        for one in eyes:
            one.close()


@pytest.mark.slow
@pytest.mark.parametrize("opened", [embedded, sidecar])
def test_all_that_a_tenant_sees_is_the_same_whatever_another_one_does(opened: Any, tmp_path: Path) -> None:
    all_seen = []
    for busy in BUSY:
        with opened(tmp_path / str(busy)) as (mine, theirs):
            other = Tenant(theirs, "theirs")  # it comes first: neither its coming is to be seen
            all_seen.append(watch(Tenant(mine, "mine"), other, busy))
    stamps = "stamps name the tenant, whose keys are others in each store"
    for seen, busy in zip(all_seen, BUSY, strict=True):
        assert _without_keys(seen.plain) == _without_keys(all_seen[0].plain), (busy, stamps)
        for kind, numbers in seen.drawn.items():
            assert len(numbers) == len(all_seen[0].drawn[kind]) > 2, kind
            near = [(one, two) for one, two in pairwise(numbers) if abs(one - two) < FAR]
            # A connection's number has 24 bits, under a key of its own: one pair may be as near by chance, not two.
            assert len(near) <= (kind == "holder"), (kind, busy, near)
    kinds = {"lease", "reservation", "extent"} | ({"holder"} if opened is sidecar else set())
    assert set(all_seen[0].drawn) == kinds


def _without_keys(plain: Sequence[Any]) -> list[str]:
    """Bytes that are derived from the tenant's secret are others each time; their length stays."""
    return [repr(_bare(one)) for one in plain]


def _bare(one: Any) -> Any:
    if isinstance(one, bytes):
        return len(one)
    if isinstance(one, list | tuple):
        return [_bare(each) for each in one]
    stamp = getattr(one, "payload_bytes", None)
    return stamp if stamp is not None and not isinstance(one, int) else one


def test_what_is_remembered_of_evicted_blocks_is_each_tenants_own(tmp_path: Path) -> None:
    limits = Limits(forgotten=8)
    with open_at(tmp_path, dram="1MiB", extent="64KiB", limits=limits) as store:
        mine, theirs = (Tenant(Eyes(store.for_tenant(name)._door_for_handle()), name) for name in ("mine", "theirs"))
        keys = [mine.key() for _ in range(4)]
        mine.eyes.fill(mine.eyes.reserve(mine.number, keys))
        assert store.evict(4) == 4
        before = [mine.eyes.match(mine.number, [key]).reason for key in keys]
        for _ in range(20):
            reserved = theirs.eyes.reserve(theirs.number, [theirs.key()])
            assert theirs.eyes.fill(reserved) == 1 and store.evict(1) == 1
        assert [mine.eyes.match(mine.number, [key]).reason for key in keys] == before == ["evicted"] * 4


def test_a_limit_of_all_tenants_does_not_say_how_much_the_others_have(tmp_path: Path) -> None:
    texts = []
    for others in (2, 5):
        limits = Limits(namespaces=8)
        with open_at(tmp_path / str(others), dram="4MiB", limits=limits) as store:
            mine, theirs = (Eyes(store.for_tenant(name)._door_for_handle()) for name in ("mine", "theirs"))
            for at in range(others):
                theirs.open(f"{at}")
            with pytest.raises(ValueError) as refused:
                for at in range(9):
                    mine.open(f"{at}")
            texts.append(str(refused.value))
    assert texts[0] == texts[1]
