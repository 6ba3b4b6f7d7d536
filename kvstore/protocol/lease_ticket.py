"""A lease as bytes, by which another process of the same engine reads the leased blocks.

    ticket    version, 1 byte > MAC, 32 bytes > body, MessagePack

The MAC is keyed with the tenant's identity key, which the clients of that tenant have, and covers the namespace's
stamps: a process rejects damaged bytes, and a ticket of another tenant or namespace, before it decodes the body. What a
good ticket promises is checked where it is used: the sidecar knows the lease or does not, and the reader verifies
header and payload of every block as always. No payload, token or prompt is in it.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from kvstore.block.account import Account, HitTier, MissReason
from kvstore.protocol.messages import Grant, LeaseReply, decoded
from tiering.frame import DIGEST_BYTES, KEY_BYTES

TICKET_VERSION = 1
MAX_TICKET_BYTES = 64 << 20
MAX_BLOCKS, MAX_TOKENS = 1 << 22, 1 << 34
"""Of a prompt: as many blocks as a ticket has room to name, of the largest size."""
_MAC_BYTES = 32
_PERSON = b"kv-lease-ticket"


class LeaseTicket(msgspec.Struct, array_like=True, frozen=True):
    """run, lease: what the store behind the door knows it by. keys, header_digests: of the pinned blocks, joined, the
    digests one string per part. places: one list per part. hits, misses: the account, as (origin, tokens)."""

    run: bytes
    lease: int
    request: str
    first_block: int
    blocks: int
    keys: bytes
    places: tuple[list[int], ...]
    header_digests: tuple[bytes, ...]
    hits: list[tuple[HitTier, int]]
    misses: list[tuple[MissReason, int]]
    reason: MissReason | None
    detail: str

    @staticmethod
    def of(
        run: bytes, lease: int, reply: LeaseReply, keys: Sequence[bytes], account: Account, request: str
    ) -> LeaseTicket:
        """Of a lease as it was granted."""
        origins = [(one.origin, one.tokens) for one in account.segments]
        return LeaseTicket(
            run,
            lease,
            request,
            reply.first_block,
            reply.blocks,
            b"".join(keys[reply.first_block : reply.blocks]),
            reply.places,
            tuple(b"".join(digests) for digests in reply.header_digests),
            [(origin, tokens) for origin, tokens in origins if isinstance(origin, HitTier)],
            [(origin, tokens) for origin, tokens in origins if isinstance(origin, MissReason)],
            reply.reason,
            reply.detail,
        )

    def seal(self, grant: Grant) -> bytes:
        """The ticket as bytes, which a process with a grant for the same namespace can open."""
        body = _encoder.encode(self)
        return bytes([TICKET_VERSION]) + _mac(grant, body) + body

    @staticmethod
    def open(ticket: bytes, grant: Grant) -> LeaseTicket:
        """The mirror of `seal`. Raises `ValueError`, with what is wrong, for anything else."""
        if not isinstance(ticket, bytes | bytearray | memoryview):
            raise ValueError(f"a ticket of type {type(ticket).__name__}")
        raw = bytes(ticket) if len(ticket) <= MAX_TICKET_BYTES else b""
        body = raw[1 + _MAC_BYTES :]
        if not body or raw[0] != TICKET_VERSION:
            raise ValueError("not a ticket of this version")
        if not hmac.compare_digest(raw[1 : 1 + _MAC_BYTES], _mac(grant, body)):
            raise ValueError("a ticket that is damaged, or of another namespace, or of other keys")
        opened = decoded(_decoder, body, "a ticket of this version")
        if not opened._is_sound(len(grant.stamps)):
            raise ValueError("a ticket that contradicts itself")
        return opened

    def _is_sound(self, parts: int) -> bool:
        blocks = self.blocks - self.first_block if self.lease else 0
        tokens = [tokens for _, tokens in (*self.hits, *self.misses)]
        if not (0 <= self.first_block <= MAX_BLOCKS and 0 <= self.blocks <= MAX_BLOCKS and blocks >= 0):
            return False
        if any(not 0 <= count <= MAX_TOKENS for count in tokens):
            return False
        if not self.lease:
            return True
        return (
            len(self.keys) == blocks * KEY_BYTES
            and [len(column) for column in self.places] == [blocks] * parts
            and [len(digests) for digests in self.header_digests] == [blocks * DIGEST_BYTES] * parts
        )

    def reply(self) -> LeaseReply:
        """As the lease was granted."""
        return LeaseReply(
            self.lease,
            self.first_block,
            self.blocks,
            self.places,
            tuple(_cut(digests, DIGEST_BYTES) for digests in self.header_digests),
            reason=self.reason,
            detail=self.detail,
        )

    def prompt_keys(self) -> list[bytes]:
        """The prefix key of each block; empty for blocks before the first pinned one."""
        return [b""] * self.first_block + _cut(self.keys, KEY_BYTES)

    def account(self) -> Account:
        return Account.of([*self.hits, *self.misses])


def _cut(joined: bytes, size: int) -> list[bytes]:
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def _mac(grant: Grant, body: bytes) -> bytes:
    state = blake2b(digest_size=_MAC_BYTES, key=grant.identity_key, person=_PERSON)
    for stamp in grant.stamps:
        state.update(len(stamp).to_bytes(4, "little") + stamp)
    state.update(len(body).to_bytes(8, "little") + body)
    return state.digest()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LeaseTicket)
