"""What nodes ask each other, as a contract that the network process fulfils with gRPC; and the MACs of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from kvstore.peers.tokens import PullTerms
from kvstore.wire import peer_pb2

VERSION = 1
"""Of the `Peer` service."""


class PeerAway(Exception):
    """A node that does not answer; one line for people. is_late: it may still answer."""

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.is_late = is_late


@dataclass(frozen=True, slots=True)
class Dialled:
    """A node: HOST:PORT of its gRPC, and the id of the node that must answer there; empty if that is what is asked."""

    address: str
    node: bytes


class PeerCalls(Protocol):
    """Thread-safe. Each call ends within its seconds."""

    def who_are_you(
        self, peer: Dialled, request: peer_pb2.WhoAreYouRequest, seconds: float
    ) -> peer_pb2.WhoAreYouResponse:
        """Raises `PeerAway`."""
        ...

    def has(
        self, asked: Sequence[tuple[Dialled, peer_pb2.HasRequest]], seconds: float
    ) -> list[peer_pb2.HasResponse | None]:
        """Ask all at once; None for those that do not answer."""
        ...

    def open_pull(self, peer: Dialled, request: peer_pb2.OpenPullRequest, seconds: float) -> peer_pb2.OpenPullResponse:
        """Raises `PeerAway`."""
        ...

    def offer(self, peer: Dialled, request: peer_pb2.OfferRequest, seconds: float) -> peer_pb2.OfferResponse:
        """Raises `PeerAway`."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class AskedBy(Protocol):
    """The asking node: by its certificate, or, on loopback without certificates, unknown."""

    @property
    def node(self) -> bytes:
        """Its id."""
        ...

    def seconds_left(self) -> float:
        """How long it still waits."""
        ...


def has_mac(identity_key: bytes, terms: PullTerms) -> bytes:
    """The MAC of `Has`; `OpenPull`'s is `ask_mac`, so that neither can stand for the other. Raises `PeerFault`."""
    return blake2b(terms.packed(), key=identity_key, digest_size=32, person=b"kv-has-ask").digest()


def offer_mac(identity_key: bytes, terms: PullTerms) -> bytes:
    """The MAC of `Offer`, likewise. Raises `PeerFault`."""
    return blake2b(terms.packed(), key=identity_key, digest_size=32, person=b"kv-offer-ask").digest()
