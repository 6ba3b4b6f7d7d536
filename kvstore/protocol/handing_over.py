"""The messages by which engines wait for each other's blocks, and hand them over: a part of `messages`.

Await > Awaited      Cancel > Done, and each `Await` that it ends is answered
SealTicket > Sealed      OpenTicket > TicketOpened
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.block.account import MissReason
from tiering.counts.awaits import AwaitEnd

MAX_KEYS = 1 << 16
"""Blocks of one chain: a million tokens in blocks of 16."""
MAX_AWAITED_KEYS, MAX_CANCELLED = 256, 4096
MAX_TICKET_CHARACTERS = 1024
"""Of a hand-off's ticket; a usual one has about 200."""
MAX_TICKET_SECONDS = 3600.0


class Await(msgspec.Struct, array_like=True, frozen=True, tag="await"):
    """The sidecar answers when the last of these keys is readable, or will not be for now: see `tiering.counts.awaits`.
    keys: consecutive in a chain; one is enough. Does not count against the connection's requests in flight. seconds: at
    most 30. located: of a `Located`, whose blocks up to the last key are fetched meanwhile. From version 3 on."""

    namespace: int
    keys: Annotated[list[Annotated[bytes, Meta(max_length=32)]], Meta(min_length=1, max_length=MAX_AWAITED_KEYS)]
    seconds: float
    located: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag="cancel"):
    """Give up these requests of the connection: those of them that are `Await` are answered."""

    numbers: Annotated[list[int], Meta(max_length=MAX_CANCELLED)]


class SealTicket(msgspec.Struct, array_like=True, frozen=True, tag="seal_ticket"):
    """Ask for a ticket for a chain, from its first block on, by which another engine waits for it
    (`hand_off_ticket`). The sidecar retains the stored blocks for `seconds`, as with a put's `ttl`."""

    namespace: int
    keys: Annotated[list[Annotated[bytes, Meta(max_length=32)]], Meta(min_length=1, max_length=MAX_KEYS)]
    seconds: float


class OpenTicket(msgspec.Struct, array_like=True, frozen=True, tag="open_ticket"):
    """Ask what a ticket promises in a namespace."""

    namespace: int
    ticket: str


class Awaited(msgspec.Struct, array_like=True, frozen=True, tag="awaited"):
    """To `Await`. blocks: how many leading keys of it are readable now. end: why it ended. reason: the miss that a
    failed fetch counts as, if known."""

    blocks: int
    end: AwaitEnd
    reason: MissReason | None = None
    detail: str = ""


class Sealed(msgspec.Struct, array_like=True, frozen=True, tag="sealed"):
    """To `SealTicket`."""

    ticket: str


class TicketOpened(msgspec.Struct, array_like=True, frozen=True, tag="ticket_opened"):
    """To `OpenTicket`. head: the prefix key of the last of `blocks` blocks. seconds: for how long it is still good.
    reason: why it is of no use, else None."""

    head: bytes
    blocks: int
    seconds: float
    reason: MissReason | None = None
    detail: str = ""
