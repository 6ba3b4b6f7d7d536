"""What queries between nodes have in common: whom they go to, how they fail, who asks, and the MACs of the requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from kvstore.peers.tokens import PullTerms
from kvstore.wire import peer_pb2

VERSION = 1
"""Of the `Peer` service."""
UNREACHED_SECONDS, LONGEST_UNREACHED_SECONDS = 60.0, 3600.0
"""How long a transport is left out after it failed to reach a node: at first, and at most; failures double it."""
MOST_UNREACHED = 1024


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

AskedBy: TypeAlias = tuple[bytes, Callable[[], float]]
"""The asking node's id, by its certificate, empty if it has none (on loopback); and for how many seconds it still
waits, which raises `TimedOut` once it does not."""


class UsableTransports:
    """The transports for pulls from a node, the best first, without those that recently failed to reach it; the last
    one is always tried. Thread-safe."""

    def __init__(self, names: Sequence[str]) -> None:
        """names: the best first."""
        self._names = list(names)
        self._lock = threading.Lock()
        self._unreached: OrderedDict[tuple[bytes, str], tuple[float, float]] = OrderedDict()  # until when, and how long
        self._worked: OrderedDict[bytes, str] = OrderedDict()

    def names(self, node: bytes, now: float) -> list[str]:
        with self._lock:
            return [name for name in self._names[:-1] if self._is_usable(node, name, now)] + self._names[-1:]

    def is_last(self, name: str) -> bool:
        """Whether there is no other transport to fall back to."""
        return name not in self._names[:-1]

    def failed(self, node: bytes, name: str, now: float) -> None:
        """The node offered a pull over this transport, which did not reach it."""
        with self._lock:
            _, before = self._unreached.pop((node, name), (0.0, UNREACHED_SECONDS / 2))
            seconds = min(2 * before, LONGEST_UNREACHED_SECONDS)
            self._unreached[node, name] = now + seconds, seconds
            while len(self._unreached) > MOST_UNREACHED:
                self._unreached.popitem(last=False)

    def worked(self, node: bytes, name: str) -> None:
        with self._lock:
            self._unreached.pop((node, name), None)
            self._worked[node] = name
            self._worked.move_to_end(node)
            while len(self._worked) > MOST_UNREACHED:
                self._worked.popitem(last=False)

    def told(self, node: bytes, now: float) -> str:
        """For people; empty with a single transport."""
        with self._lock:
            if len(self._names) < 2:
                return ""
            lacking = [name for name in self._names[:-1] if not self._is_usable(node, name, now)]
            worked = [f"over {self._worked[node]}"] if node in self._worked else []
        return "; ".join(worked + [f"not reached over {name}" for name in lacking])

    def _is_usable(self, node: bytes, name: str, now: float) -> bool:
        return now >= self._unreached.get((node, name), (0.0, 0.0))[0]


def has_mac(identity_key: bytes, terms: PullTerms) -> bytes:
    """The MAC of `Has`. `OpenPull` has another, `ask_mac`, so that neither can replace the other. Raises
    `PeerFault`."""
    return blake2b(terms.packed(), key=identity_key, digest_size=32, person=b"kv-has-ask").digest()


def offer_mac(identity_key: bytes, terms: PullTerms) -> bytes:
    """The MAC of `Offer`, different again. Raises `PeerFault`."""
    return blake2b(terms.packed(), key=identity_key, digest_size=32, person=b"kv-offer-ask").digest()
