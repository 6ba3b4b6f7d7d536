"""Engines' reports on their requests, and what an operator is shown of one: parts of messages, for people.

Bounded where a message is read; nothing here decides anything.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstore.protocol.requests import MAX_REQUEST_CHARACTERS

MAX_TOLD = (1 << 53) - 1
MAX_TOLD_REQUESTS, MAX_TOLD_WORDS, MAX_TOLD_TEXT = 64, 48, 256
Word = Annotated[str, Meta(max_length=32)]
"""A tier, or a reason."""
MAX_TOLD_PROMPTS = 4


class RequestTold(msgspec.Struct, frozen=True):
    """What became of a request, as its engine knows it. request: its name there. asked: tokens of its prompt; hits by
    tier and misses by reason add up to them. load_ms: that it waited for its load. put_reasons: saves that stored less
    than was offered, by reason. counts: whether it counts as what the tenant asked for and got; the request's look-ups
    and leases, which say `is_told`, do not."""

    request: Annotated[str, Meta(max_length=MAX_REQUEST_CHARACTERS)]
    asked: Annotated[int, Meta(ge=0, le=MAX_TOLD)]
    hits: Annotated[dict[Word, Annotated[int, Meta(ge=0, le=MAX_TOLD)]], Meta(max_length=MAX_TOLD_WORDS)]
    misses: Annotated[dict[Word, Annotated[int, Meta(ge=0, le=MAX_TOLD)]], Meta(max_length=MAX_TOLD_WORDS)]
    detail: Annotated[str, Meta(max_length=MAX_TOLD_TEXT)] = ""
    load_ms: float = 0.0
    saved_blocks: Annotated[int, Meta(ge=0, le=MAX_TOLD)] = 0
    put_reasons: Annotated[dict[Word, Annotated[int, Meta(ge=0, le=MAX_TOLD)]], Meta(max_length=MAX_TOLD_WORDS)] = {}
    counts: bool = False


class SavingsTold(msgspec.Struct, array_like=True, frozen=True):
    """What loads saved an engine since its last report, by the speeds that it has learned. saved_seconds,
    regret_seconds: by how much loads took less, and more, than computing the same would have, times its GPUs.
    ttft_saved_ms: what a hit saves of the time to the first token, measured on hits that the engine computed all the
    same, to compare, with its standard error; None where too few were."""

    saved_seconds: float = 0.0
    regret_seconds: float = 0.0
    ttft_saved_ms: float | None = None
    ttft_saved_error_ms: float | None = None


def told_name(request: str) -> str:
    """An engine's name of a request, cut and made encodable, since clients may give long ones or invalid text."""
    return request.encode("utf-8", "replace").decode()[:MAX_REQUEST_CHARACTERS]


class GoneNote(msgspec.Struct, frozen=True):
    """How the first missed block was lost. at: Unix time, to a second. tier: the last one that had it. cause: room
    (evicted from that tier), declined (evicted from DRAM, and the policy did not write it to NVMe), ttl (evicted once
    its ttl was over, or because more was retained than may be), or drop."""

    at: float
    tier: str
    cause: str


class StoreNote(msgspec.Struct, frozen=True):
    """A look-up for a request, or a lease. at: Unix time, when it was answered; seconds: that the store took. blocks:
    found, or granted behind `first_block`, which look-ups have not; of `wanted`. tiers: where these lay: what was not
    in DRAM is promoted for a lease. reason, detail: why it is not all, else "". gone: where the reason is evicted, and
    it is still known."""

    at: float
    seconds: float
    wanted: int
    blocks: int
    tiers: dict[str, int]
    reason: str
    detail: str
    gone: GoneNote | None = None
    first_block: int | None = None


class RequestRecord(msgspec.Struct, frozen=True):
    """What is known of a request. told_at: when its engine told what became of it, None where it has not. reported: of
    its blocks, those that failed their reader's check. purged_at: when the tenant was purged last, in this run."""

    request: str
    tenant: str
    engine: str
    model: str
    leases: list[StoreNote]
    told_at: float | None = None
    told: RequestTold | None = None
    looked: list[StoreNote] = []
    reported: int = 0
    purged_at: float | None = None


class HotPrefix(msgspec.Struct, frozen=True):
    """A stored prefix that many look-ups found, and not only as the beginning of a longer hot one. id: the first digits
    of its key. tokens, bytes: of it. requests_per_hour: look-ups that ended at it, or further on where few others did.
    saved_tokens_per_hour: that leases granted of it. saved_seconds_per_hour: estimated from its engines' reports, None
    without any. stored_tokens, tiers: what of it can be read now, tiers in blocks. used_at: approximate.
    retained_until: None where no client asked for that."""

    id: str
    tenant: str
    namespace: str
    model: str
    tokens: int
    bytes: int
    requests_per_hour: float
    saved_tokens_per_hour: float
    saved_seconds_per_hour: float | None
    stored_tokens: int
    tiers: dict[str, int]
    used_at: float
    retained_until: float | None


class PrefixFigures(msgspec.Struct, frozen=True):
    """What was seen of prompts in about the last hour; the weight of each halves in half an hour. seconds: how long
    this has counted. lookups: all; sampled: those followed; dropped: those that came too fast. The others
    stay empty: `kvstore lint` finds where the prompts of a file part."""

    hottest: list[HotPrefix]
    seconds: float
    lookups: int
    sampled: int
    dropped: int
    partings: list[Any] = []
    prompts: int = 0
    sketches: int | None = None
    sketch_bytes: int | None = None
