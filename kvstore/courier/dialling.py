"""Calls to the `Peer` service of other nodes: a channel for each address and node, renewed when credentials change.

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
from typing import Any, TypeAlias

import grpc

from kvstore.config import is_loopback
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


Answers: TypeAlias = Callable[[float], list[peer_pb2.HasResponse | None]]
"""The answers that are there after so many seconds at most; None for the others. May be called again."""


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

    def has(self, asked: Sequence[tuple[Dialled, peer_pb2.HasRequest]], seconds: float) -> Answers:
        """Ask all nodes at once, each for that long."""
        calls: list[Any] = []
        for peer, request in asked:
            call = None
            with suppress(PeerAway, ValueError):  # ValueError: its channel was closed meanwhile
                call = self._stub(peer).Has.future(request, timeout=seconds)
            calls.append(call)

        def answers(within: float) -> list[peer_pb2.HasResponse | None]:
            ends_at = self._clock.monotonic_seconds() + within
            return [self._taken(call, ends_at) if call is not None else None for call in calls]

        return answers

    def _taken(self, call: Any, ends_at: float) -> peer_pb2.HasResponse | None:
        answer: peer_pb2.HasResponse | None = None
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
