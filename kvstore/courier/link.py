"""What a tenant's connection to `courier.sock` has: namespaces' numbers, mapped memory. It ends with the connection."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.block.account import MissReason
from kvstore.block.identity import Namespace
from kvstore.client.connection import SidecarConnection, Unavailable, spans
from kvstore.protocol import messages as m
from kvstore.protocol.courier import QuestionAnswered
from kvstore.protocol.messages import Grant, LeaseReply, ReserveReply

MOST_NAMES = 1 << 17
"""In one generation: when it is full, the previous one is forgotten."""
NAME_BYTES = 8
MOST_WANTED, MOST_CAME = 1 << 14, 1 << 16
MOST_CHAINS, MOST_CHAIN_KEYS = 256, 1024
"""The most recent chains, and how many leading blocks of each."""


class Uses:
    """Of one tenant. Thread-safe. wanted: blocks that have become worth writing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._came: OrderedDict[bytes, None] = OrderedDict()
        self._chains: OrderedDict[tuple[bytes, bytes], list[bytes]] = OrderedDict()
        self.wanted: deque[tuple[bytes, bytes]] = deque(maxlen=MOST_WANTED)

    def note_chain(self, space: bytes, keys: Sequence[bytes]) -> None:
        """A request named this chain of that namespace, from its first block on."""
        leading = list(keys[:MOST_CHAIN_KEYS])
        with self._lock:
            for key in keys:
                name = key[:NAME_BYTES]
                if name not in self._new and len(self._new) >= MOST_NAMES:
                    self._old, self._new = self._new, {}
                self._new[name] = self.of(key) + 1
            if leading:
                self._chains[space, leading[-1]] = leading
                self._chains.move_to_end((space, leading[-1]))
                while len(self._chains) > MOST_CHAINS:
                    self._chains.popitem(last=False)

    def chains(self) -> list[tuple[bytes, list[bytes]]]:
        """Namespace and leading keys of the most recent chains."""
        with self._lock:
            return [(space, keys) for (space, _), keys in self._chains.items()]

    def of(self, key: bytes) -> int:
        """How often a block was named."""
        name = key[:NAME_BYTES]
        return max(self._new.get(name, 0), self._old.get(name, 0))

    def came(self, keys: Iterable[bytes]) -> None:
        """The remote tier has these: they are not written to it."""
        with self._lock:
            for key in keys:
                self._came[key[:NAME_BYTES]] = None
            while len(self._came) > MOST_CAME:
                self._came.popitem(last=False)

    def did_not_come(self, keys: Iterable[bytes]) -> None:
        """The remote tier turned out to lack these, or to have them damaged."""
        with self._lock:
            for key in keys:
                self._came.pop(key[:NAME_BYTES], None)

    def has_come(self, key: bytes) -> bool:
        """Whether the remote tier has it, as far as is known."""
        return key[:NAME_BYTES] in self._came


ENGINE = "kvstore courier"
ANSWER_SECONDS = 5.0
"""For requests that a running sidecar answers at once."""
CONNECT_SECONDS = 2.0
MOST_PAGES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class CourierSpace:
    """A tenant's namespace on a connection. id: its digest. frames: bytes of a frame of each part."""

    run: CourierRun
    number: int
    id: bytes
    grant: Grant
    frames: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        return sum(self.frames)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks are readable. Raises `Unavailable`."""
        connection = self.run.connection
        verb = m.MatchPrefix(self.number, list(keys[: connection.max_keys]), counts=False)
        return connection.ask(verb, m.Matched, ANSWER_SECONDS).reply.blocks

    def lease(self, keys: Sequence[bytes], seconds: float) -> LeaseReply:
        """Pin the readable prefix, promoted to DRAM within that time, and map it. Raises `Unavailable`."""
        connection = self.run.connection
        verb = m.LeasePrefix(self.number, list(keys), 0, 1000 * seconds, counts=False)
        return connection.walk(connection.leasing(verb), seconds + ANSWER_SECONDS, lambda: ANSWER_SECONDS)

    def reserve(self, before: bytes | None, keys: Sequence[bytes], first: int) -> ReserveReply:
        """Reserve and map slots for blocks of a chain from its block `first` on. before: the key of the preceding
        block, which is readable; None without one. Raises `Unavailable`."""
        connection = self.run.connection
        known = [before] if before is not None else []
        verb = m.Reserve(self.number, [*known, *keys], first, skipped=first - len(known))
        return connection.walk(connection.reserving(verb), ANSWER_SECONDS, lambda: ANSWER_SECONDS)


@dataclass(eq=False)
class CourierRun:
    """One connection, and what was learned on it. node, incarnation: the sidecar's. by_id: its namespaces by their
    digests, as far as they are known; listed anew by `list_spaces` alone, since any peer may ask."""

    tenant: str
    connection: SidecarConnection
    by_number: dict[int, CourierSpace] = field(default_factory=dict)
    by_id: dict[bytes, CourierSpace] = field(default_factory=dict)
    uses: Uses = field(default_factory=Uses)
    answers: deque[QuestionAnswered] = field(default_factory=deque)
    """To the sidecar's questions, not sent yet."""
    _listing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def fingerprint(self) -> bytes:
        """Of the tenant's keys."""
        return self.connection.wire.welcome.fingerprint

    @property
    def node(self) -> bytes:
        return self.connection.wire.welcome.node

    @property
    def incarnation(self) -> bytes:
        return self.connection.wire.welcome.incarnation

    @property
    def is_over(self) -> bool:
        return self.connection.wire.closed

    def space(self, number: int) -> CourierSpace:
        """The namespace of that number. Raises `Unavailable`."""
        if number not in self.by_number:
            self.list_spaces()
        found = self.by_number.get(number)
        if found is None:
            raise Unavailable(MissReason.UNREACHABLE, "the sidecar names a namespace that it does not list")
        return found

    def list_spaces(self) -> list[CourierSpace]:
        """Open the namespaces that are new since the last call. Raises `Unavailable`."""
        with self._listing:
            first = 0
            for _ in range(MOST_PAGES):
                page = self.connection.ask(m.Namespaces(first), m.NamespacesReply, ANSWER_SECONDS)
                for one in page.namespaces:
                    self._open(one)
                first = page.next
                if not first:
                    break
            return list(self.by_id.values())

    def _open(self, listed: m.Opened) -> None:
        try:
            digest = bytes.fromhex(listed.id)
            if digest in self.by_id:
                return
            Namespace.unpack(listed.packed)  # raises for one of another version
        except ValueError as error:
            raise Unavailable(MissReason.UNREACHABLE, f"a namespace of another version: {error}") from None
        verb = m.OpenNamespace(listed.packed, listed.payload_bytes)
        grant = self.connection.ask(verb, m.Granted, ANSWER_SECONDS).grant
        opened = CourierSpace(self, grant.number, digest, grant, self.connection.frames[grant.number])
        self.by_number[grant.number] = self.by_id[digest] = opened

    def frames(self, places: Sequence[Sequence[int]], *, writable: bool) -> list[list[memoryview]]:
        """The bytes at places of a lease or a reservation, by part; as many as are mapped."""
        table = self.connection.writable if writable else self.connection.readable
        return [[span.view for span in spans(table, column)] for column in places]

    def abort(self, reservation: int) -> None:
        self.connection.post(m.Abort(reservation))

    def close(self) -> None:
        self.by_number, self.by_id = {}, {}  # they know this connection, which is unmapped with the last use of it
        self.connection.close()
