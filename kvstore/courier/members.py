"""The other nodes: those of the directory, and those of the configuration."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.block.errors import StoreError
from kvstore.block.identity import INCARNATION_BYTES, NODE_BYTES, NodeIdentity
from kvstore.courier.dialling import VERSION, Dialled, GrpcPeers, PeerAway
from kvstore.courier.figures import OncePerKind
from kvstore.pool.directory import MAX_FINGERPRINTS, NODE_SECONDS, NodeEntry
from kvstore.pool.members import AliveTable
from kvstore.wire import peer_pb2
from tiering.clock import Clock

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
        self._addresses = dict.fromkeys(addresses, True)  # whether another node may be there
        self._named: dict[str, bytes] = {}
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
        return set(self._named.values())

    def addresses(self) -> list[tuple[bytes, str]]:
        """All but this node's own; with the id of the node that answered there last, empty if none has."""
        return [(self._named.get(one, b""), one) for one, is_another in self._addresses.items() if is_another]

    def close(self) -> None:
        self._ends.set()

    def _follow(self, address: str) -> None:
        kind = f"peer {address}"
        while not self._ends.is_set():
            try:
                entry = self._asked(address)
                self._addresses[address] = entry is not None
                if entry is None:
                    self._faults.say(kind, f"network.peers: {address} is this node itself; leave it out")
                else:
                    self._named[address] = entry.node
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
