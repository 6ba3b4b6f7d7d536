"""What engines tell of their requests, and what an operator is shown of one: parts of messages, for people.

Bounded where a message is read; nothing here decides anything.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.protocol.requests import MAX_REQUEST_CHARACTERS

MAX_TOLD = (1 << 53) - 1
MAX_TOLD_REQUESTS, MAX_TOLD_WORDS, MAX_TOLD_TEXT = 64, 48, 256
Word = Annotated[str, Meta(max_length=32)]
"""A tier, or a reason."""


class RequestTold(msgspec.Struct, frozen=True):
    """What became of a request, as its engine knows it. request: its name there. asked: tokens of its prompt; hits by
    tier and misses by reason add up to them. load_ms: that it waited for its load. put_reasons: saves that stored less
    than was offered, by reason."""

    request: Annotated[str, Meta(max_length=MAX_REQUEST_CHARACTERS)]
    asked: Annotated[int, Meta(ge=0, le=MAX_TOLD)]
    hits: Annotated[dict[Word, Annotated[int, Meta(ge=0, le=MAX_TOLD)]], Meta(max_length=MAX_TOLD_WORDS)]
    misses: Annotated[dict[Word, Annotated[int, Meta(ge=0, le=MAX_TOLD)]], Meta(max_length=MAX_TOLD_WORDS)]
    detail: Annotated[str, Meta(max_length=MAX_TOLD_TEXT)] = ""
    load_ms: float = 0.0
    saved_blocks: Annotated[int, Meta(ge=0, le=MAX_TOLD)] = 0
    put_reasons: Annotated[dict[Word, Annotated[int, Meta(ge=0, le=MAX_TOLD)]], Meta(max_length=MAX_TOLD_WORDS)] = {}


class SavingsTold(msgspec.Struct, array_like=True, frozen=True):
    """What loads brought an engine since it told it last, by the speeds that it has learned. saved_seconds,
    regret_seconds: by how much loads took less, and more, than computing the same would have, times its GPUs.
    ttft_saved_ms: what a hit saves of the time to the first token, from hits that were computed all the same, with its
    standard error; None where too few were."""

    saved_seconds: float = 0.0
    regret_seconds: float = 0.0
    ttft_saved_ms: float | None = None
    ttft_saved_error_ms: float | None = None


class LeaseNote(msgspec.Struct, frozen=True):
    """A lease that was taken for a request. at: Unix time, when it was answered; seconds: that the store took. blocks:
    granted, behind `first_block`; of `wanted`. tiers: where these lay. reason, detail: why it is not all, else ""."""

    at: float
    seconds: float
    first_block: int
    wanted: int
    blocks: int
    tiers: dict[str, int]
    reason: str
    detail: str


class RequestRecord(msgspec.Struct, frozen=True):
    """What is known of a request. told_at: when its engine told what became of it, None where it has not."""

    request: str
    tenant: str
    engine: str
    model: str
    leases: list[LeaseNote]
    told_at: float | None = None
    told: RequestTold | None = None
