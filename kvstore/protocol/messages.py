"""What clients and the sidecar say to each other on its socket, as bytes.

    frame     length of the body, 4 bytes little-endian > body, MessagePack
    body      [number, [verb, arguments ...]]; a reply has the number of its request

A connection begins with `Hello`, which names the versions that the client speaks; the answer is `Welcome` with the one
that both will, or `Failed`. Fields are only ever appended, with defaults: an older program leaves out what it does not
know and skips what it does not expect. A verb that the sidecar does not know is answered `unsupported`. Descriptors
travel beside the frame of an `ExtentsReply`, in its order, and of a `NotifyPipeReply`.

Must never carry token ids or payload bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from kvstore.block.account import HitTier, MissReason
from kvstore.block.layout import MAX_PARTS
from kvstore.protocol.courier import MAX_KEYS as MAX_KEYS
from kvstore.protocol.courier import MAX_TICKET_CHARACTERS as MAX_TICKET_CHARACTERS
from kvstore.protocol.courier import Adopt as Adopt
from kvstore.protocol.courier import Holdings as Holdings
from kvstore.protocol.courier import HoldingsReply as HoldingsReply
from kvstore.protocol.courier import Locate as Locate
from kvstore.protocol.courier import Located as Located
from kvstore.protocol.courier import Questions as Questions
from kvstore.protocol.courier import QuestionsReply as QuestionsReply
from kvstore.protocol.requests import MAX_REQUEST_CHARACTERS
from kvstore.protocol.told import (
    MAX_TOLD_PROMPTS,
    MAX_TOLD_REQUESTS,
    PrefixFigures,
    RequestRecord,
    RequestTold,
    SavingsTold,
)
from kvstore.status.tree import SidecarStatus
from tiering.counts.awaits import AwaitEnd
from tiering.frame import KEY_ID_BYTES

T = TypeVar("T")


class Grant(msgspec.Struct, frozen=True):
    """A namespace as opened: its number in this store, the tenant's identity key, and the packed stamp of each part.

    durable: whether there is a disk to keep blocks on.
    """

    number: int
    identity_key: bytes
    stamps: tuple[bytes, ...]
    payload_bytes: tuple[int, ...]
    durable: bool = False

    def __repr__(self) -> str:
        return f"Grant(number={self.number})"  # the key must not reach a log


class MatchReply(msgspec.Struct, frozen=True):
    """How many leading blocks are readable, in which tiers (runs of blocks), and why the match ended there."""

    blocks: int
    tiers: tuple[tuple[HitTier, int], ...] = ()
    reason: MissReason | None = None
    detail: str = ""


class LeaseReply(msgspec.Struct, frozen=True):
    """Pinned frames of the blocks first_block .. blocks - 1, each list in that order, one list per part.

    `lease` is 0 where nothing was pinned. header_digests: xxh3_128 of each frame's header as it was committed.
    lacks_room: whether it ended because DRAM had no room for more.
    """

    lease: int
    first_block: int
    blocks: int
    places: tuple[list[int], ...] = ()
    header_digests: tuple[list[bytes], ...] = ()
    generations: list[int] = []
    tiers: tuple[tuple[HitTier, int], ...] = ()
    reason: MissReason | None = None
    detail: str = ""
    lacks_room: bool = False


class ReserveReply(msgspec.Struct, frozen=True):
    """Which blocks of the offered chain are to be filled (`blocks`, ascending) and where, one list of places per part.

    present: offered blocks that were stored before. stopped_at: the first block that the store will not take. reason:
    why. detail: of the reason, for people. in_flight: how many blocks from there on another put is storing, so that it
    is worth waiting for the last of them; 0 for any other reason.
    """

    reservation: int
    present: int
    blocks: list[int] = []
    places: tuple[list[int], ...] = ()
    stopped_at: int | None = None
    reason: MissReason | None = None
    detail: str = ""
    in_flight: int = 0


OLDEST_VERSION, NEWEST_VERSION = 1, 4
OLDEST_SIDECAR_VERSION = 3
"""A client is refused by sidecars before that one, which end a connection for a verb that they do not know."""
MAX_RECORDS = 16

LENGTH_BYTES = 4
MAX_BODY_BYTES = 9 << 18
"""Of one message: keys of 65,536 blocks."""

NO_NUMBER = 0
"""The number of an answer to a malformed request, with which the sidecar ends the connection."""

MAX_EXTENTS = 32
"""Descriptors beside one frame; the kernel takes at most 253."""

MIN_SESSION_BYTES, MAX_SESSION_BYTES = 16, 64
"""Of a session's token."""

OLDER_MAX_KEYS = 30_000
"""Assumed of a sidecar that does not say how many keys it takes."""
MAX_LEASES = 4096
MAX_COMMITTED = 8192
DROP_SECONDS = 30.0
MAX_NAME = 128
"""Characters of a tenant's name, or of a namespace's id."""
RECORDING_BYTES = 16
"""Of a recording's name."""

MAX_AWAITED_KEYS, MAX_CANCELLED = 256, 4096
MAX_TICKET_SECONDS = 3600.0

Key = Annotated[bytes, Meta(max_length=32)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Numbers = Annotated[list[int], Meta(max_length=MAX_LEASES)]
Digests = Annotated[Sequence[Annotated[bytes, Meta(max_length=16)]], Meta(max_length=1024)]


class RequestFault(StrEnum):
    """Why a request was not served. Reveals nothing about other clients."""

    VERSION = "version"  # no version in common
    MALFORMED = "malformed"  # not a message, too long, or out of turn; the connection ends
    BAD_INPUT = "bad_input"  # the arguments cannot be right; the text says which
    UNSUPPORTED = "unsupported"  # a verb that this sidecar does not know
    BUSY = "busy"  # a limit of this connection or of the sidecar
    CLOSED = "closed"  # the sidecar is going down


# Requests -------------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """The first message. session: a token that the engine makes, 16 to 64 random bytes, by which all its connections
    join one session, in any order; without it the connection is a session of its own. engine: name and version, for
    people. fingerprint: of the keys that its open namespaces hash with; nothing while none is open. tenant: that a
    courier works for; nothing on any other socket than the couriers'."""

    oldest: int
    newest: int
    engine: str = ""
    session: bytes = b""
    fingerprint: Annotated[bytes, Meta(max_length=KEY_ID_BYTES)] = b""
    tenant: Annotated[str, Meta(max_length=MAX_NAME)] = ""


MAX_NAME_CHARACTERS = 4096
"""Of a model's name or path; a few are kept."""


class OpenNamespace(msgspec.Struct, array_like=True, frozen=True, tag="namespace"):
    """packed: `identity.Namespace.pack`. payload_bytes: of each part, after the codec. name: of the model, for
    people."""

    packed: bytes
    payload_bytes: Annotated[list[int], Meta(max_length=MAX_PARTS)]
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] = ""


class MatchPrefix(msgspec.Struct, array_like=True, frozen=True, tag="match"):
    """Look up the longest readable prefix. counts: whether it is for an engine's request, and so to be counted as a
    look-up. request: the engine's name for that, for people. counts_short: whether it counts even if not all blocks are
    here; a client that may have the rest fetched sends false, and asks again. is_told: whether the engine reports the
    request's tokens (`RequestTold.counts`), which this look-up then does not count."""

    namespace: int
    keys: Keys
    counts: bool = True
    request: str = ""
    counts_short: bool = True
    is_told: bool = False


class LeasePrefix(msgspec.Struct, array_like=True, frozen=True, tag="lease"):
    """Pin the longest readable prefix; the sidecar promotes blocks from lower tiers until the deadline. request: the
    engine's own name for what it serves, by which all its leases can be released. counts, is_told: as in
    `MatchPrefix`. found: blocks that the look-up before it found, if the lease is of fewer; for the counts alone."""

    namespace: int
    keys: Keys
    first_block: int
    deadline_ms: float
    request: str = ""
    counts: bool = True
    found: int = 0
    is_told: bool = False


class Which(msgspec.Struct, array_like=True, frozen=True, tag="which"):
    """Ask which of these blocks are readable, each as the first of a chain. Pins, changes and counts nothing."""

    namespace: int
    keys: Keys


class Attach(msgspec.Struct, array_like=True, frozen=True, tag="attach"):
    """Hold leases that another connection of the same session took."""

    leases: Numbers


class Release(msgspec.Struct, array_like=True, frozen=True, tag="release"):
    """Release leases. The sidecar ignores unknown ones."""

    leases: Numbers


class ReleaseRequest(msgspec.Struct, array_like=True, frozen=True, tag="release_request"):
    """Release every lease of the session that this connection holds and that was taken for a request of the engine.
    (The client in this repository tracks leases itself: it must not release one that it is reading at the moment.)"""

    request: str


class ReportFrame(msgspec.Struct, array_like=True, frozen=True, tag="report"):
    """A frame failed its reader's check: the sidecar verifies it too, and quarantines the block if it fails again."""

    lease: int
    block: int
    part: int


class Reserve(msgspec.Struct, array_like=True, frozen=True, tag="reserve"):
    """Reserve slots for a chain's missing blocks from `first_block` on. collective: a name within the session, for a
    put that several of its connections make together; parts: those that the caller fills, all of them if it names none.
    (A sidecar that knows neither field reserves for each caller alone; no block then gets all parts or is visible.)
    skipped: blocks of the chain before the first key; sidecars whose `Welcome` says how many keys they take know it.
    waits: the caller waits for what is in flight, and asks again: until then none of it counts as refused."""

    namespace: int
    keys: Keys
    first_block: int
    priority: int = 0
    ttl_seconds: float | None = None
    collective: str = ""
    parts: Annotated[list[int], Meta(max_length=MAX_PARTS)] = []
    skipped: int = 0
    waits: bool = False


class Commit(msgspec.Struct, array_like=True, frozen=True, tag="commit"):
    """Seal the next blocks of a part, from `first` on, and publish those that are complete. digests: of each block, one
    of each layer slice. Answered by `Counted`."""

    reservation: int
    part: int
    first: int
    digests: Annotated[list[Digests], Meta(max_length=MAX_COMMITTED)]


class Abort(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """End a reservation, and give up its blocks that are not visible yet; in a collective put, for all participants."""

    reservation: int


class Persist(msgspec.Struct, array_like=True, frozen=True, tag="persist"):
    """Make leading blocks durable, within so many seconds."""

    namespace: int
    keys: Keys
    seconds: float


class Extents(msgspec.Struct, array_like=True, frozen=True, tag="extents"):
    """Ask for descriptors of the tenant's extents. The answer leaves out those that are gone, and those of others.
    writable: to fill slots."""

    numbers: Annotated[list[int], Meta(max_length=MAX_EXTENTS)]
    writable: bool


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """Ask which extents were given back (`Reply.retired`). wants_bell: the answer may be `NotifyPipeReply` in place of
    `Done`."""

    wants_bell: bool = False


class Changes(msgspec.Struct, array_like=True, frozen=True, tag="changes"):
    """Ask for a namespace's changes from the number `after` on; 0: from now on. From version 2 on."""

    namespace: int
    after: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Await(msgspec.Struct, array_like=True, frozen=True, tag="await"):
    """The sidecar answers when the last of these keys is readable, or will not be for now: see `tiering.counts.awaits`.
    keys: consecutive in a chain; one is enough. Does not count against the connection's requests in flight. seconds: at
    most 30. located: of a `Located`, whose blocks up to the last key are fetched meanwhile. From version 3 on."""

    namespace: int
    keys: Annotated[list[Key], Meta(min_length=1, max_length=MAX_AWAITED_KEYS)]
    seconds: float
    located: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag="cancel"):
    """Give up these requests of the connection: those of them that are `Await` are answered."""

    numbers: Annotated[list[int], Meta(max_length=MAX_CANCELLED)]


class SealTicket(msgspec.Struct, array_like=True, frozen=True, tag="seal_ticket"):
    """Ask for a ticket for a chain, from its first block on, by which another engine waits for it
    (`hand_off_ticket`). The sidecar retains the stored blocks for `seconds`, as with a put's `ttl`."""

    namespace: int
    keys: Annotated[list[Key], Meta(min_length=1, max_length=MAX_KEYS)]
    seconds: float


class OpenTicket(msgspec.Struct, array_like=True, frozen=True, tag="open_ticket"):
    """Ask what a ticket promises in a namespace."""

    namespace: int
    ticket: str


class Tell(msgspec.Struct, array_like=True, frozen=True, tag="tell"):
    """An engine reports on its requests and what hits saved, for people. From version 2 on; the engine does not wait
    for the answer. prompts: of earlier engines, unused. namespace: of requests whose tokens count."""

    requests: Annotated[list[RequestTold], Meta(max_length=MAX_TOLD_REQUESTS)]
    savings: SavingsTold | None = None
    prompts: Annotated[list[Any], Meta(max_length=MAX_TOLD_PROMPTS)] = []
    namespace: int = -1

    @property
    def firsts(self) -> list[RequestTold]:
        """The first reports on their requests; a client whose tokens do not count by them sends one of each."""
        return [one for one in self.requests if one.counts or self.namespace < 0]


class Drop(msgspec.Struct, array_like=True, frozen=True, tag="drop"):
    """Forget every block of a namespace; `Failed` if that takes longer than so many seconds."""

    namespace: int
    seconds: float = DROP_SECONDS


class Namespaces(msgspec.Struct, array_like=True, frozen=True, tag="namespaces"):
    """List the tenant's own namespaces, from position `first` on."""

    first: int = 0


class Stat(msgspec.Struct, array_like=True, frozen=True, tag="stat"):
    """Admin: what the sidecar holds and has served. numbers_only: without what is listed of namespaces, sessions and
    tenants."""

    numbers_only: bool = False


class DropAny(msgspec.Struct, array_like=True, frozen=True, tag="drop_any"):
    """Admin: forget every block of a namespace, by the first digits of its digest. tenant: whose, where several have
    it."""

    id: Annotated[str, Meta(max_length=MAX_NAME)]
    tenant: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    seconds: float = DROP_SECONDS


class Purge(msgspec.Struct, array_like=True, frozen=True, tag="purge"):
    """Admin: void every block of a tenant durably, retire its key, and disconnect its clients."""

    tenant: Annotated[str, Meta(max_length=MAX_NAME)]
    seconds: float = DROP_SECONDS


class Record(msgspec.Struct, array_like=True, frozen=True, tag="record"):
    """Admin: record look-ups, in a namespace by the first digits of its digest or in all; or, with the name of a
    recording, return its notes since the last call. ends: stop recording."""

    recording: Annotated[bytes, Meta(max_length=RECORDING_BYTES)] = b""
    id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    tenant: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    ends: bool = False


class Why(msgspec.Struct, array_like=True, frozen=True, tag="why"):
    """Admin: what is known of a request of an engine, by its name there or the beginning of it ("": the last
    ones). tenant: search this one only, by its shown name; "" for all."""

    request: Annotated[str, Meta(max_length=MAX_REQUEST_CHARACTERS)]
    tenant: Annotated[str, Meta(max_length=MAX_NAME)] = ""


class Prefixes(msgspec.Struct, array_like=True, frozen=True, tag="prefixes"):
    """Admin: the hottest prefixes. tenant: as in `Why`."""

    tenant: Annotated[str, Meta(max_length=MAX_NAME)] = ""


class UnknownVerb(msgspec.Struct, array_like=True, frozen=True, tag="unknown"):
    """In the place of a verb that this program does not know, as of a later client."""


Verb = (
    Hello
    | OpenNamespace
    | MatchPrefix
    | LeasePrefix
    | Attach
    | Release
    | ReleaseRequest
    | ReportFrame
    | Reserve
    | Commit
    | Abort
    | Persist
    | Extents
    | Changes
    | Tell
    | Drop
    | Ping
    | Namespaces
    | Stat
    | DropAny
    | Purge
    | Record
    | Why
    | Await
    | Cancel
    | SealTicket
    | OpenTicket
    | Prefixes
    | Locate
    | Adopt
    | Questions
    | Holdings
    | Which
    | UnknownVerb
)


class Request(msgspec.Struct, array_like=True, frozen=True):
    """What a client sends. number: the client's, above 0; an answer bears it."""

    number: int
    verb: Verb


# Replies --------------------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    """version: the one that both speak from now on. run: names this run of the sidecar. session: the token by which
    other connections join. max_keys: blocks of one chain that the sidecar takes in a message. fingerprint: of the
    tenant's keys. node, incarnation: which node this is, and which run of it."""

    version: int
    run: bytes
    session: bytes
    max_keys: int = OLDER_MAX_KEYS
    fingerprint: bytes = b""
    node: bytes = b""
    incarnation: bytes = b""


class Granted(msgspec.Struct, array_like=True, frozen=True, tag="granted"):
    """A namespace is open."""

    grant: Grant


class Matched(msgspec.Struct, array_like=True, frozen=True, tag="matched"):
    """To `MatchPrefix`. has_courier: whether a courier is connected, so that `Locate` may find blocks elsewhere."""

    reply: MatchReply
    has_courier: bool = False


class Held(msgspec.Struct, array_like=True, frozen=True, tag="held"):
    """To `Which`. bits: one for each key, in order, from the lowest bit of the first byte on; those that are missing
    are 0."""

    bits: Annotated[bytes, Meta(max_length=MAX_KEYS // 8)]


class Leased(msgspec.Struct, array_like=True, frozen=True, tag="leased"):
    """To `LeasePrefix`."""

    reply: LeaseReply


class Attached(msgspec.Struct, array_like=True, frozen=True, tag="attached"):
    """The leases that could be attached to."""

    leases: list[int]


class Reserved(msgspec.Struct, array_like=True, frozen=True, tag="reserved"):
    """To `Reserve`."""

    reply: ReserveReply


class Counted(msgspec.Struct, array_like=True, frozen=True, tag="counted"):
    """A number of blocks: to `Commit`, those committed in the caller's parts; to `Drop`, `DropAny` and `Purge`, those
    that were readable. elsewhere: a line on what other nodes or remote engines may still hold. not_reached: ids, where
    they are known, and addresses of nodes that may have copies."""

    blocks: int
    elsewhere: str = ""
    not_reached: list[tuple[str, str]] = []


class Persisted(msgspec.Struct, array_like=True, frozen=True, tag="persisted"):
    """To `Persist`."""

    blocks: int
    reason: MissReason | None


class ExtentEntry(msgspec.Struct, array_like=True, frozen=True):
    """Shared memory: its number, its size, and its frames'. A descriptor for each comes beside the message."""

    number: int
    size_bytes: int
    frame_bytes: int


class ExtentsReply(msgspec.Struct, array_like=True, frozen=True, tag="extents"):
    """Those that still exist."""

    extents: list[ExtentEntry]


class NotifyPipeReply(msgspec.Struct, array_like=True, frozen=True, tag="bell"):
    """With the read end of a pipe, in which there is a byte whenever the client should ping. A client has one such
    pipe: the next one replaces it."""


class Changed(msgspec.Struct, array_like=True, frozen=True, tag="changed"):
    """To `Changes`. run: of the store; empty if none answered. changes: prefix keys, and these blocks' places from then
    on: 0 nowhere, 1 in DRAM, 2 on NVMe alone. next: where to go on. is_lost: part of the record in between is lost.
    indexes: of each, how many blocks are before it in its chain."""

    run: bytes
    changes: list[tuple[bytes, int]]
    next: int
    is_lost: bool = False
    indexes: list[int] = []


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


class Done(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """An answer without content."""


class Opened(msgspec.Struct, array_like=True, frozen=True):
    """A namespace that can be opened. id: its whole digest in hexadecimal. packed, payload_bytes: for
    `OpenNamespace`."""

    id: str
    packed: bytes
    payload_bytes: list[int]
    blocks: int


class NamespacesReply(msgspec.Struct, array_like=True, frozen=True, tag="namespaces"):
    """Some of the tenant's namespaces. next: where to go on, or 0 at the end."""

    namespaces: list[Opened]
    next: int


class StatReply(msgspec.Struct, array_like=True, frozen=True, tag="stat"):
    """To `Stat`."""

    facts: SidecarStatus


class Recorded(msgspec.Struct, array_like=True, frozen=True, tag="recorded"):
    """To `Record`. requests: seconds since it began, and a number for each full block. lost: requests that were not
    noted, in all."""

    recording: bytes
    block_tokens: int
    requests: list[tuple[float, list[int]]] = []
    lost: int = 0


class WhyReply(msgspec.Struct, array_like=True, frozen=True, tag="why"):
    """To `Why`: the newest first, of at most `MAX_RECORDS`. kept: requests of which something is known."""

    found: list[RequestRecord]
    kept: int


class PrefixesReply(msgspec.Struct, array_like=True, frozen=True, tag="prefixes"):
    """To `Prefixes`."""

    figures: PrefixFigures


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The request was not served. text: one line for people."""

    fault: RequestFault
    text: str


Answer = (
    Welcome
    | Granted
    | Matched
    | Leased
    | Attached
    | Reserved
    | Counted
    | Persisted
    | ExtentsReply
    | NotifyPipeReply
    | Changed
    | Done
    | Failed
    | NamespacesReply
    | StatReply
    | Recorded
    | WhyReply
    | Awaited
    | Sealed
    | TicketOpened
    | PrefixesReply
    | Located
    | QuestionsReply
    | HoldingsReply
    | Held
)


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """What the sidecar sends. number: of the request. retired: extents to unmap as soon as no get reads them."""

    number: int
    answer: Answer
    retired: list[int] = []


MAX_TEXT = 2000
"""Characters of a line for people in an answer."""


def failed(fault: RequestFault, text: str) -> Failed:
    """A refusal. Its line may repeat a client's text: it is made printable, so that it can be encoded, and short."""
    kept = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text[:MAX_TEXT])
    return Failed(fault, kept[:MAX_TEXT])


def name_of(verb: Verb | type[Verb]) -> str:
    """A verb's name on the wire, and in `kvstore stat`."""
    return str(verb.__struct_config__.tag)


def descriptors_for(verb: Verb) -> int:
    """The most descriptors that are sent beside its answer."""
    if isinstance(verb, Extents):
        return len(verb.numbers)
    return int(isinstance(verb, Ping) and verb.wants_bell)


_UNREADABLE = (ValueError, msgspec.DecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_any_requests = msgspec.msgpack.Decoder(tuple[int, Annotated[list[Any], Meta(min_length=1)]])
_KNOWN = frozenset(name_of(verb) for verb in get_args(Verb))
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def pack(message: Request | Reply) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def unpack_request(body: bytes | memoryview) -> Request:
    """A frame's body as a client's message. Raises `ValueError`, which reveals nothing of the contents."""
    try:
        return _requests.decode(body)
    except _UNREADABLE as error:
        with suppress(*_UNREADABLE):
            number, verb = _any_requests.decode(body)
            if isinstance(verb[0], str) and verb[0] not in _KNOWN:
                return Request(number, UnknownVerb())
        raise ValueError(f"not a request ({type(error).__name__})") from None


def unpack_answer(answer: msgspec.Raw) -> Answer:
    """Decode a whole answer. Raises `ValueError`."""
    return decoded(_answers, answer, "an answer")


def decoded(decoder: msgspec.msgpack.Decoder[T], packed: bytes | memoryview, what: str) -> T:
    """Raises `ValueError`, which reveals nothing of the contents."""
    try:
        return decoder.decode(packed)
    except _UNREADABLE as error:
        raise ValueError(f"not {what} ({type(error).__name__})") from None
