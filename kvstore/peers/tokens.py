"""The right to pull: secrets that both sides derive, and tokens that are valid once.

ask_mac    keyed with the tenant's identity key, over the request: asking node, asked node, and blocks
secret     the same with a nonce of each side: makes a token usable by these two nodes only
token      32 random bytes for one connection within 5 s; useless without the secret
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf

from kvstore.block.errors import StoreError
from kvstore.block.identity import NODE_BYTES
from kvstore.peers import transport as t
from tiering.frame import KEY_BYTES, NAMESPACE_BYTES

NONCE_BYTES = 16
SECRET_BYTES = 32
log = logging.getLogger("kvstore.peers")
MOST_OFFERS = 256
"""Waiting for their puller, or being pulled."""


@dataclass(frozen=True, slots=True, repr=False)
class PullTerms:
    """The terms of one pull. nonce: the asking node's, 16 random bytes. namespace: its digest, 32 bytes."""

    nonce: bytes
    asking: bytes
    holding: bytes
    namespace: bytes
    first_block: int
    keys: Sequence[bytes]

    def packed(self) -> bytes:
        """Every field has a fixed length, so that different terms never have the same bytes. Raises `PeerFault` for
        impossible terms, which a peer may have sent."""
        lengths = tuple(map(len, (self.nonce, self.asking, self.holding, self.namespace)))
        if lengths != (NONCE_BYTES, NODE_BYTES, NODE_BYTES, NAMESPACE_BYTES):
            raise t.PeerFault("a pull whose nonce, nodes or namespace have another length")
        if not 0 < len(self.keys) <= t.MOST_BLOCKS or any(len(key) != KEY_BYTES for key in self.keys):
            raise t.PeerFault(f"a pull of {len(self.keys)} keys; allowed: 1 to {t.MOST_BLOCKS}, of {KEY_BYTES} bytes")
        if not 0 <= self.first_block < 1 << 32:
            raise t.PeerFault("a pull from a block on that cannot be")
        fixed = (self.nonce, self.asking, self.holding, self.namespace)
        return b"".join((*fixed, self.first_block.to_bytes(8, "little"), *self.keys))


PULL, HAS, OFFER = b"kv-pull-ask", b"kv-has-ask", b"kv-offer-ask"
"""What a node asks: to pull, how many it has, or to pull what is offered. The MAC of one is good for no other."""


def ask_mac(identity_key: bytes, terms: PullTerms, what: bytes = PULL) -> bytes:
    """Proves that the asking node has the tenant's key; compare it with `hmac.compare_digest`. Raises `PeerFault`."""
    return blake2b(terms.packed(), key=identity_key, digest_size=32, person=what).digest()


def pull_secret(identity_key: bytes, terms: PullTerms, nonce: bytes) -> bytes:
    """nonce: the holder's, 16 random bytes, sent with its offer."""
    if len(nonce) != NONCE_BYTES:
        raise t.PeerFault("a holder's nonce of another length")
    return blake2b(nonce + terms.packed(), key=identity_key, digest_size=SECRET_BYTES, person=b"kv-pull").digest()


def hello_for(token: bytes, secret: bytes, is_sealed: bool) -> bytes:
    """A puller's first message. The holder chooses no byte of it: it also chooses the address, and could otherwise make
    the message a command to another server."""
    said = t.HELLO.pack(t.HELLO_MAGIC, t.VERSION, is_sealed, 0, _spoken(token), bytes(32))[:-32]
    return said + blake2b(said, key=secret, digest_size=32, person=b"kv-pull-hello").digest()


def proof_of(hello: bytes, secret: bytes) -> bytes:
    """The data server's answer to a hello."""
    return blake2b(hello, key=secret, digest_size=t.PROOF_BYTES, person=b"kv-pull-door").digest()


def seal_key(token: bytes, secret: bytes) -> bytes:
    """For one connection: a token is used once."""
    return blake2b(token, key=secret, digest_size=32, person=b"kv-pull-seal").digest()


class HeldOffer:
    """Frames that are pinned until `end`. One thread reads its frames, and ends it."""

    def __init__(self, token: bytes, frames: t.OfferedFrames, secret: bytes, is_sealed: bool, until: float) -> None:
        self.token, self.secret, self.is_sealed, self.until = token, secret, is_sealed, until
        self.frames: t.OfferedFrames | None = frames


class Offers:
    """The offers of a data server. Thread-safe."""

    def __init__(self, random_bytes: Callable[[int], bytes], most: int = MOST_OFFERS) -> None:
        self._random, self._most = random_bytes, most
        self._lock = threading.Lock()
        self._waiting: dict[bytes, HeldOffer] = {}  # by a digest of the token: look-up times reveal no token
        self._taken: dict[bytes, HeldOffer] = {}

    def add(self, frames: t.OfferedFrames, secret: bytes, is_sealed: bool, now: float) -> HeldOffer:
        """Raises `PullBusy`."""
        offer = HeldOffer(self._random(t.TOKEN_BYTES), frames, secret, is_sealed, now + t.OFFER_SECONDS)
        with self._lock:
            if len(self._waiting) + len(self._taken) >= self._most:
                raise t.PullBusy(f"{self._most} pulls are offered or under way, or the door is closed")
            self._waiting[_name(offer.token)] = offer
        return offer

    def take(self, hello: bytes, now: float) -> HeldOffer | None:
        """The offer that a connection's first message names; no other connection can take it. None if there is none, or
        its MAC is by another secret. A peer that only knows the token cannot use it up."""
        magic, version, sealed, zero, spoken, mac = t.HELLO.unpack(hello)
        if (magic, version, zero) != (t.HELLO_MAGIC, t.VERSION, 0):
            return None
        name = _name_of(spoken)
        with self._lock:
            offer = self._waiting.get(name)
            if offer is None or now >= offer.until or sealed != offer.is_sealed:
                return None
            if not hmac.compare_digest(hello_for(offer.token, offer.secret, offer.is_sealed)[-32:], mac):
                return None
            self._taken[name] = self._waiting.pop(name)
        return offer

    def end(self, offer: HeldOffer) -> None:
        """End its pins, once: called by the thread that took it."""
        with self._lock:
            self._taken.pop(_name(offer.token), None)
        _release(offer)

    def end_due(self, now: float) -> float:
        """End the offers whose puller did not come in time; returns when the next one is due."""
        with self._lock:
            due = [name for name, offer in self._waiting.items() if now >= offer.until]
            ended = [self._waiting.pop(name) for name in due]
            next_one = min((offer.until for offer in self._waiting.values()), default=inf)
        for offer in ended:
            _release(offer)
        return next_one

    def end_all(self) -> None:
        """End the waiting offers, and refuse new ones; connections end their own."""
        with self._lock:
            self._most = 0
        self.end_due(inf)

    def pinned(self) -> int:
        with self._lock:
            return len(self._waiting) + len(self._taken)


def _release(offer: HeldOffer) -> None:
    frames, offer.frames = offer.frames, None
    if frames is not None:
        release, frames.spans = frames.release, ()
        try:
            release()
        except (StoreError, OSError):  # the sidecar is gone, and with it the pins
            log.exception("pinned frames could not be released")


def _spoken(token: bytes) -> bytes:
    return blake2b(token, digest_size=t.TOKEN_BYTES, person=b"kv-pull-token").digest()


def _name(token: bytes) -> bytes:
    return _name_of(_spoken(token))


def _name_of(spoken: bytes) -> bytes:
    return blake2b(spoken, digest_size=16).digest()
