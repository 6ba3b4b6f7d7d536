"""The messages about blocks that are elsewhere: on other nodes, or in a remote engine. A part of `messages`.

An engine asks how much of a chain is elsewhere, decides, and waits for what it wants:

    Locate > Located      Await(located=...) > Awaited      then a lease, as ever

A courier is a process of this host that fetches such blocks. It connects to a socket of its own, where its `Hello`
names the tenant that it works for and few verbs are allowed: it reserves slots, fills them, and has the sidecar check
the headers that came with the payloads. It can lose bytes, but cannot forge them.

    Questions > QuestionsReply      Reserve > Reserved > (the slots are filled) > Adopt > Counted
    Holdings > HoldingsReply, and then Changes > Changed: the blocks that it may announce to others
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.block.account import HitTier, MissReason
from kvstore.status.tree import MAX_WHERE_CHARACTERS, SourceStatus
from tiering.frame import HEADER_BYTES, KEY_BYTES

MAX_KEYS = 1 << 16
"""Blocks of one chain: a million tokens in blocks of 16."""
MAX_TICKET_CHARACTERS = 1024
"""Of a hand-off's ticket; a usual one has about 200."""
MAX_ADOPTED = 512
"""Headers in one message."""
MAX_QUESTIONS = 1024
"""Open questions of one tenant; and answers to them in one message."""
LOCATE_SECONDS = 0.0036
"""Without an answer by then, the engine is told that nothing is elsewhere. It waits 5 ms for that: a timer is late by
up to a millisecond, and the way here and back takes up to half of one."""
MAX_SOURCES = 256
"""Nodes and engines that a courier reports on."""
MAX_NOT_REACHED = 256

_Keys = Annotated[list[Annotated[bytes, Meta(max_length=KEY_BYTES)]], Meta(max_length=MAX_KEYS)]
_Where = Annotated[str, Meta(max_length=MAX_WHERE_CHARACTERS)]
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Locate(msgspec.Struct, array_like=True, frozen=True, tag="locate"):
    """An engine asks how many leading blocks of a chain could be here soon. ticket: of a hand-off; its node is then
    taken to have them. The sidecar answers after `LOCATE_SECONDS`."""

    namespace: int
    keys: _Keys
    ticket: Annotated[str, Meta(max_length=MAX_TICKET_CHARACTERS)] = ""


class Located(msgspec.Struct, array_like=True, frozen=True, tag="located"):
    """To `Locate`. number: for `Await.located`, good for some seconds; 0 if no more is elsewhere than here. blocks:
    leading blocks of the chain, those that are here included. tier, where: of those that are not. milliseconds:
    expected for fetching them, infinite if unknown. reason: why there are none."""

    number: int
    blocks: int
    tier: HitTier | None = None
    milliseconds: float = 0.0
    where: str = ""
    reason: MissReason | None = None
    detail: str = ""


class Adopt(msgspec.Struct, array_like=True, frozen=True, tag="adopt"):
    """As `Commit`, for payloads that a courier put into a reservation's slots and checked against the digests in their
    headers. headers: of these frames as they came, for the part's blocks from `first` on. tier: where they came from,
    `peer` or `remote`. Answered by `Counted`; if any header fails the sidecar's check, no block is adopted."""

    reservation: int
    part: int
    first: int
    headers: Annotated[list[Annotated[bytes, Meta(max_length=HEADER_BYTES)]], Meta(max_length=MAX_ADOPTED)]
    tier: HitTier


class Holdings(msgspec.Struct, array_like=True, frozen=True, tag="holdings"):
    """A courier lists a namespace's readable blocks. after: `HoldingsReply.next` of the answer before. A block that
    moves while it is listed may be left out: begin with `Changes`, which reports it."""

    namespace: int
    after: _Count = 0


ReadableBlock = tuple[bytes, int, int]
"""Prefix key, blocks before it in its chain, and its fastest tier, as in `Changed`."""


class HoldingsReply(msgspec.Struct, array_like=True, frozen=True, tag="holdings"):
    """To `Holdings`: some of them, perhaps none. next: where to go on, 0 at the end."""

    blocks: list[ReadableBlock]
    next: int


class LocateQuestion(msgspec.Struct, array_like=True, frozen=True):
    """Asks a courier how many leading blocks of a chain it could fetch. number: for the answer. namespace: by the
    tenant's number. present: leading blocks that are here. door, node, incarnation: of a ticket, or empty."""

    number: int
    namespace: int
    keys: list[bytes]
    present: int
    door: str = ""
    node: bytes = b""
    incarnation: bytes = b""


class FetchQuestion(msgspec.Struct, array_like=True, frozen=True):
    """Fetch the blocks of the chain behind the first `present`. located: the `LocateQuestion` that found them, whose
    places can be used. seconds: that an engine waits for them."""

    number: int
    located: int
    namespace: int
    keys: list[bytes]
    present: int
    seconds: float
    door: str = ""
    node: bytes = b""
    incarnation: bytes = b""


class Forget(msgspec.Struct, array_like=True, frozen=True):
    """The operator drops a namespace, or purges the tenant (its digest is empty then): its blocks elsewhere are to be
    forgotten."""

    number: int
    namespace: bytes


class QuestionAnswered(msgspec.Struct, array_like=True, frozen=True):
    """A courier's answer. number: the question's. blocks: leading blocks of the chain that could be fetched (to a
    `LocateQuestion`), that are here now (to a `FetchQuestion`), or blocks that could not be forgotten (to a `Forget`).
    reason: why there are no more.
    not_reached: to a `Forget`, the other nodes that may have copies: the id of each, in hexadecimal, empty if it is not
    known, and its address."""

    number: int
    blocks: _Count
    tier: HitTier | None = None
    milliseconds: float = 0.0
    where: _Where = ""
    reason: MissReason | None = None
    detail: Annotated[str, Meta(max_length=2000)] = ""
    not_reached: Annotated[list[tuple[_Where, _Where]], Meta(max_length=MAX_NOT_REACHED)] = []


class SourceFigures(SourceStatus, array_like=True, frozen=True):
    """Another node, a remote engine or the directory, as a courier sees it."""


class CourierFigures(msgspec.Struct, array_like=True, frozen=True):
    """A courier's report on what is elsewhere, for people. reasons: why it serves less than it has, a line each."""

    sources: Annotated[list[SourceFigures], Meta(max_length=MAX_SOURCES)]
    reasons: Annotated[list[_Where], Meta(max_length=16)] = []
    fetching: _Count = 0
    fetched_blocks: _Count = 0
    fetched_bytes: _Count = 0
    dropped_hints: _Count = 0


class Questions(msgspec.Struct, array_like=True, frozen=True, tag="questions"):
    """A courier sends answers, and asks for new questions. The sidecar replies at once; the notification pipe tells the
    courier when there are more. told: its figures for people, sent now and then."""

    answers: Annotated[list[QuestionAnswered], Meta(max_length=MAX_QUESTIONS)] = []
    told: CourierFigures | None = None


class QuestionsReply(msgspec.Struct, array_like=True, frozen=True, tag="questions"):
    """To `Questions`: each question once. over: fetches that no engine waits for any more. more: whether to ask again
    at once."""

    locates: list[LocateQuestion] = []
    fetches: list[FetchQuestion] = []
    forgets: list[Forget] = []
    over: list[int] = []
    more: bool = False
