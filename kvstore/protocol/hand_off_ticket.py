"""A ticket by which one engine hands the KV of a prompt over to another: it names keys, never places.

    text    "kv1." > urlsafe base64 of: body, MessagePack > MAC, 16 bytes

The MAC is keyed with the tenant's identity key, and only sidecars make and check it. The head depends on every token
before it, so a ticket that is stale, forged or of another prompt can only end in a miss: no ticket leads to KV that its
prompt does not have. A ticket that does not open is a miss with a reason. No token, place or generation is in it.
"""

from __future__ import annotations

import base64
import hmac
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.block.account import MissReason
from kvstore.block.identity import INCARNATION_BYTES, NODE_BYTES, Identity
from kvstore.protocol import messages as m
from tiering.frame import KEY_BYTES, KEY_ID_BYTES

PREFIX = "kv1."
MAX_DOOR_CHARACTERS = 256
NAMESPACE_BYTES = 16
"""The first bytes of its digest."""
_MAC_BYTES = 16
_PERSON = b"kv-hand-off"


class HandOff(msgspec.Struct, array_like=True, frozen=True):
    """key_id: the tenant's fingerprint. namespace: the beginning of its digest. head: the prefix key of the last block
    promised, which names every token before it; blocks: how many there are. owner, incarnation: the node, and its run.
    door: where peers reach the node, a hint. until_ms: Unix time at which the ticket is over, so that others give up
    sooner."""

    key_id: Annotated[bytes, Meta(min_length=KEY_ID_BYTES, max_length=KEY_ID_BYTES)]
    namespace: Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
    head: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    blocks: Annotated[int, Meta(ge=1, le=m.MAX_KEYS)]
    block_tokens: Annotated[int, Meta(ge=1)]
    owner: Annotated[bytes, Meta(min_length=NODE_BYTES, max_length=NODE_BYTES)]
    incarnation: Annotated[bytes, Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)]
    door: Annotated[str, Meta(max_length=MAX_DOOR_CHARACTERS)]
    until_ms: int

    def seal(self, identity: Identity) -> str:
        """The ticket's text, with its MAC."""
        body = _encoder.encode(self)
        return PREFIX + base64.urlsafe_b64encode(body + _mac(identity, body)).decode()


def sealed(
    request: m.SealTicket, identity: Identity, namespace: bytes, block_tokens: int, now: float, door: str = ""
) -> m.Sealed:
    """A ticket for the chain that ends with the last key. now: Unix time. door: where peers reach this node."""
    until_ms = int(1000 * (now + request.seconds))
    head, blocks = request.keys[-1], len(request.keys)
    owner, run = identity.node, identity.incarnation
    hand_off = HandOff(
        identity.key_id, namespace[:NAMESPACE_BYTES], head, blocks, block_tokens, owner, run, door, until_ms
    )
    return m.Sealed(hand_off.seal(identity))


def opened(
    text: str, identity: Identity, namespace: bytes, block_tokens: int, now: float, *, of_others: bool = False
) -> m.TicketOpened:
    """What a ticket promises to that tenant in that namespace, or the miss that it counts as. of_others: whether
    tickets of other nodes are useful here."""
    found = hand_off_in(text, identity, namespace, block_tokens, now)
    if isinstance(found, m.TicketOpened):
        return found
    if found.owner != identity.node and not of_others:
        return _refused(MissReason.STALE_HINT, "the ticket is of another node")
    left = found.until_ms / 1000 - now
    return m.TicketOpened(found.head, found.blocks, min(max(0.0, left), m.MAX_TICKET_SECONDS))


def hand_off_in(
    text: str, identity: Identity, namespace: bytes, block_tokens: int, now: float
) -> HandOff | m.TicketOpened:
    """A ticket's content, whichever node's it is; or why it is of no use. Another node's time limit is by that node's
    clock, and is not compared with this one's: if its blocks are gone, that node says so."""
    body, mac = _split(text)
    hand_off = _decoded(body)
    if not hmac.compare_digest(mac, _mac(identity, body)) or hand_off is None:
        key = f"key {hand_off.key_id.hex()}" if hand_off is not None else "another key"
        here = f"this tenant's key here is {identity.key_id.hex()}"
        return _refused(MissReason.KEY_MISMATCH, f"the ticket was altered, or sealed with {key}; {here}")
    if hand_off.namespace != namespace[:NAMESPACE_BYTES] or hand_off.block_tokens != block_tokens:
        return _refused(
            MissReason.OTHER_NAMESPACE, "the ticket is of another model, layout or codec than this engine's"
        )
    if hand_off.owner != identity.node:
        return hand_off
    if hand_off.incarnation != identity.incarnation:
        return _refused(MissReason.STALE_HINT, "the ticket is of an earlier run of the sidecar")
    if hand_off.until_ms / 1000 <= now:
        return _refused(MissReason.STALE_HINT, "the ticket's time is over")
    return hand_off


def _refused(reason: MissReason, detail: str) -> m.TicketOpened:
    return m.TicketOpened(b"", 0, 0.0, reason, detail)


def _split(text: str) -> tuple[bytes, bytes]:
    try:
        plain = text.removeprefix(PREFIX).encode("ascii") if len(text) <= m.MAX_TICKET_CHARACTERS else b""
        raw = base64.b64decode(plain, b"-_", validate=True)
    except (ValueError, UnicodeEncodeError):
        return b"", b""
    if not text.startswith(PREFIX) or base64.urlsafe_b64encode(raw) != plain:
        return b"", b""
    return raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]


def _decoded(body: bytes) -> HandOff | None:
    try:
        return _decoder.decode(body)
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None


def _mac(identity: Identity, body: bytes) -> bytes:
    return blake2b(body, key=identity.key, digest_size=_MAC_BYTES, person=_PERSON).digest()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(HandOff)
