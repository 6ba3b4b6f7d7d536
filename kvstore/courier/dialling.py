"""Calls to the `Peer` service of other nodes: a channel for each address and node, renewed when credentials change; and
the nodes that the configuration names.

If nodes have certificates, only the intended node can answer: its certificate has the DNS name `ID.node.kvstore` beside
the URI for its own calls, and TLS refuses any other. Without certificates, which is possible on loopback alone,
requests bear a MAC, and answers about blocks are checked before they are used.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from kvstore.block.errors import StoreError
from kvstore.block.identity import INCARNATION_BYTES, NODE_BYTES, NodeIdentity
from kvstore.config import is_loopback
from kvstore.courier.figures import OncePerKind
from kvstore.pool.directory import MAX_FINGERPRINTS, NODE_SECONDS, AliveTable, NodeEntry
from kvstore.wire import peer_pb2
from kvstore.wire.peer_pb2_grpc import PeerStub
from tiering.clock import Clock

VERSION = 1
"""Of the `Peer` service."""
MOST_CHANNELS = 256
OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
NODE_DOMAIN = ".node.kvstore"
"""Behind a node's id, the DNS name in its certificate."""


class PeerAway(Exception):
    """A node that does not answer; the text is one line for people. is_late: it may still answer."""

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.is_late = is_late


@dataclass(frozen=True, slots=True)
class Dialled:
    """A node to call: HOST:PORT of its gRPC, and the id that its certificate must have; empty if the id is the
    question."""

    address: str
    node: bytes


def channel_credentials(contents: list[bytes]) -> Any:
    certificate, key, authority = contents
    return grpc.ssl_channel_credentials(authority, key, certificate)


class GrpcPeers:
    """Thread-safe. Each call ends within its seconds; those to one node raise `PeerAway`."""

    def __init__(self, credentials: Callable[[], Any] | None, clock: Clock) -> None:
        """credentials: the present `channel_credentials`; None on loopback."""
        self._credentials = credentials
        self._clock = clock
        self._lock = threading.Lock()
        self._channels: OrderedDict[Dialled, tuple[Any, Any, PeerStub]] = OrderedDict()

    def ask(self, verb: str, peer: Dialled, request: Any, seconds: float) -> Any:
        """The answer of one node to any verb of the service but `Has`."""
        try:
            return getattr(self._stub(peer), verb)(request, timeout=seconds)
        except grpc.RpcError as error:
            code, details = error.code(), " ".join((error.details() or "").split())[:200]
            is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED
            raise PeerAway(f"{code.name.lower()}: {details}", is_late=is_late) from None
        except ValueError as error:  # its channel was closed meanwhile
            raise PeerAway(str(error)) from None

    def has(self, peer: Dialled, request: peer_pb2.HasRequest, seconds: float) -> Any:
        """Ask a node, for that long; returns the call for `answer_of`."""
        with suppress(PeerAway, ValueError):  # ValueError: its channel was closed meanwhile
            return self._stub(peer).Has.future(request, timeout=seconds)
        return None

    def answer_of(self, call: Any, ends_at: float) -> peer_pb2.HasResponse | None:
        """The answer to `has`, if it is there by then; may be called again."""
        answer: peer_pb2.HasResponse | None = None
        if call is None:
            return None
        with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
            answer = call.result(timeout=max(0.0, ends_at - self._clock.monotonic_seconds()))
        return answer

    def close(self) -> None:
        with self._lock:
            channels, self._channels = list(self._channels.values()), OrderedDict()
        for _, channel, _ in channels:
            channel.close()

    def _stub(self, peer: Dialled) -> PeerStub:
        credentials = self._credentials() if self._credentials is not None else None
        if credentials is None and not is_loopback(peer.address.rpartition(":")[0].strip("[]")):
            raise PeerAway("it is on another host, and this node has no certificate; see network.certificate")
        closing = []
        with self._lock:
            known = self._channels.pop(peer, None)
            if known is not None and known[0] is not credentials:
                closing.append(known[1])
                known = None
            if known is None:
                target = f"dns:///{peer.address}"  # for gRPC, a host named `unix` would be a scheme
                if credentials is None:
                    channel = grpc.insecure_channel(target, OPTIONS)
                else:
                    name = [("grpc.ssl_target_name_override", peer.node.hex() + NODE_DOMAIN)] if peer.node else []
                    channel = grpc.secure_channel(target, credentials, [*OPTIONS, *name])
                known = credentials, channel, PeerStub(channel)
            self._channels[peer] = known
            while len(self._channels) > MOST_CHANNELS:
                closing.append(self._channels.popitem(last=False)[1][1])
        for one in closing:
            one.close()
        return known[2]


ASK_SECONDS = 1.5
ANSWER_SECONDS = 1.0


class NamedPeers:
    """`network.peers`: asked for their ids at intervals. Thread-safe."""

    def __init__(
        self,
        addresses: Sequence[str],
        here: NodeIdentity,
        table: AliveTable,
        calls: GrpcPeers,
        faults: OncePerKind,
        clock: Clock,
    ) -> None:
        """table: receives them, beside those that a directory names."""
        self._nodes: dict[str, bytes | None] = dict.fromkeys(addresses, b"")
        """By address, the node that answered there last: empty if none has, None for this one."""
        self._here = here
        self._calls = calls
        self._faults = faults
        self._clock = clock
        self._table = table
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(one,), name="kv-courier-peer", daemon=True) for one in addresses
        ]

    def start(self) -> None:
        for one in self._threads:
            one.start()

    def nodes(self) -> set[bytes]:
        return {node for node in self._nodes.values() if node}

    def addresses(self) -> list[tuple[bytes, str]]:
        """All but this node's own; with the id of the node that answered there last, empty if none has."""
        return [(node, address) for address, node in self._nodes.items() if node is not None]

    def close(self) -> None:
        self._ends.set()

    def _follow(self, address: str) -> None:
        kind = f"peer {address}"
        while not self._ends.is_set():
            try:
                entry = self._asked(address)
                self._nodes[address] = entry.node if entry is not None else None
                if entry is None:
                    self._faults.say(kind, f"network.peers: {address} is this node itself; leave it out")
                else:
                    self._table.saw([entry], self._clock.monotonic_seconds(), NODE_SECONDS)
                    self._faults.ended(kind, f"peer {address} answers")
            except (PeerAway, StoreError, ValueError) as error:
                self._faults.say(kind, f"peer {address} does not answer: {error}")
            self._ends.wait(ASK_SECONDS)

    def _asked(self, address: str) -> NodeEntry | None:
        """The node at an address; if nodes have certificates, its certificate must have the same id. None for this
        node."""
        request = peer_pb2.WhoAreYouRequest(node=self._here.node)
        first: peer_pb2.WhoAreYouResponse = self._calls.ask("WhoAreYou", Dialled(address, b""), request, ANSWER_SECONDS)
        if first.node == self._here.node:
            return None
        found = self._calls.ask("WhoAreYou", Dialled(address, first.node), request, ANSWER_SECONDS)
        return entry_of(found, address)


def entry_of(found: peer_pb2.WhoAreYouResponse, address: str) -> NodeEntry:
    """Raises `ValueError` for an impossible answer."""
    if len(found.node) != NODE_BYTES or len(found.incarnation) != INCARNATION_BYTES:
        raise ValueError("it names no node")
    if VERSION not in found.versions:
        raise ValueError(f"it speaks versions {list(found.versions)[:8]} of the protocol between nodes, not {VERSION}")
    fingerprints = tuple(found.fingerprints[:MAX_FINGERPRINTS])
    return NodeEntry(found.node, found.incarnation, address, fingerprints, (VERSION,), tuple(found.transports[:8]))
