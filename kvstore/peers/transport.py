"""The contract of pulls between nodes, and what both transports share: the bytes of its messages, errors, addresses.

A node that wants blocks asks their holder over gRPC, and is answered by a `PullOffer`. It connects to the holder's door
for data, shows that it has the secret of this offer, and reads frames in the order of the offer, block by block, the
parts of each in order:

    puller > HELLO   token's digest, MAC               door > WELCOME  MAC        (or REFUSED, and the end)
    puller > ASK     request, first frame, frames      door > FRAME    header page and payload, for each of them
                     (two requests under way)          door > GONE     no more will come; the end

A record heads each of these messages but the first. Whatever is not what was asked for ends the connection. What is
checked already stays with the puller. Sizes are those of the slots, never those that the other side names.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple, Protocol

from kvstore.block.errors import BadInput, OutOfResources, StoreError
from tiering.frame import ALIGNMENT

VERSION = 1
TOKEN_BYTES = 32
OFFER_SECONDS = 5.0
"""For so long blocks are pinned for a puller, at most."""
HANDSHAKE_SECONDS = 1.0
"""A connection must name its offer within this."""
FRAMES_ASKED, REQUESTS_UNDER_WAY = 8, 2
MOST_BLOCKS, MOST_PARTS = 65_536, 1_024
MOST_FRAME_BYTES = 1 << 30
MOST_ADDRESS_CHARACTERS = 64

HELLO_MAGIC, ASK_MAGIC, FRAME_MAGIC = b"KVPH", b"KVPA", b"KVPF"
HELLO = struct.Struct("<4sBBH32s32s")
"""Magic, version, 1 for sealed, 0, a digest of the token, MAC."""
RECORD = struct.Struct("<4sBBHQQQ")
"""Magic, version, status, frames that follow, request, number of the frame, its bytes."""
PROOF_BYTES = 32
"""Behind the record of a welcome: the door has the secret too."""


class PullStatus(enum.IntEnum):
    """What a record says."""

    FRAME = 0
    WELCOME = 1
    GONE = 2
    REFUSED = 3


class FrameRecord(NamedTuple):
    """The head of a message. follow: frames that are still to come for this request, or are asked for."""

    magic: bytes
    version: int
    status: int
    follow: int
    request: int
    number: int
    frame_bytes: int


class PullFault(StoreError):
    """A pull ended early. verified: leading frames of this call that are whole and checked, and stay good."""

    verified = 0


class PeerFault(PullFault):
    """The other side, or the way to it, broke the protocol."""


class TimedOutPull(PullFault):
    """The deadline came first."""


class PullBusy(OutOfResources):
    """The maximum of offers or connections is reached; a retry may soon succeed."""


@dataclass(frozen=True, slots=True)
class PullOffer:
    """A holder's answer. Raises `PeerFault` if it is impossible.

    token: for one connection, good for 5 s. address: HOST:PORT of the data door, numeric and never a name. blocks:
    pinned leading ones, from the first that was asked for. frame_bytes: whole frames, by part.
    """

    token: bytes = field(repr=False)
    address: str
    transport: str
    blocks: int
    frame_bytes: tuple[int, ...]
    is_sealed: bool

    def __post_init__(self) -> None:
        sizes = self.frame_bytes
        if len(self.token) != TOKEN_BYTES or not 0 <= self.blocks <= MOST_BLOCKS or not 0 < len(sizes) <= MOST_PARTS:
            raise PeerFault("an offer of sizes that cannot be")
        if any(not 2 * ALIGNMENT <= one <= MOST_FRAME_BYTES or one % ALIGNMENT for one in sizes):
            raise PeerFault("an offer of frames of sizes that cannot be")
        numeric_address(self.address)

    @property
    def frames(self) -> int:
        """Of all blocks."""
        return self.blocks * len(self.frame_bytes)


@dataclass(slots=True, repr=False)
class OfferedFrames:
    """Frames that a holder has pinned for one puller.

    spans: whole frames in place, block by block, the parts of each in order. frame_bytes: by part. sent: called with
    the bytes of each frame that is sent. release: ends the pins. Called once, from a thread of the door or one that
    withdraws or closes, when all frames are sent, or the puller is gone, or after `OFFER_SECONDS`; from then on no span
    is read. Neither may block.
    """

    spans: Sequence[memoryview]
    frame_bytes: tuple[int, ...]
    release: Callable[[], None]
    sent: Callable[[int], None] = lambda size: None

    def __post_init__(self) -> None:
        parts = len(self.frame_bytes)
        assert not len(self.spans) % parts
        assert all(span.nbytes == self.frame_bytes[at % parts] for at, span in enumerate(self.spans))


class PullReader(Protocol):
    """A puller's connection, for one offer. Of one thread at a time."""

    ended: PullStatus | None
    """Why the holder gives no more of its offer, if it said so."""

    def pull(self, slots: Sequence[memoryview], check: Callable[[int, memoryview], bool], deadline: float) -> int:
        """Read the next frames of the offer into slots, a slot each, and say how many leading ones are whole and
        checked. Fewer than `slots`: the holder has no more (`ended`).

        check: given a slot's place in `slots` and its bytes, whether this is the frame that belongs there; see
        `FrameChecks`. It may be called from another thread. deadline: monotonic seconds.
        Raises `PeerFault` and `TimedOutPull`, whose `verified` says what the answer would have; the connection is
        over then, and so are slots behind that number: what lies in them may be anything.
        """
        ...

    def free_slots(self, when_free: Callable[[], None]) -> bool:
        """Whether no slot of this connection can be written any more, after a fault too. If not, `when_free` is
        called once when that is so, from another thread; slots must not be reused before."""
        ...

    def close(self) -> None:
        """End it, from any thread; a pull that is under way raises `PeerFault`."""
        ...


class PullTransport(Protocol):
    """A way to pull frames."""

    name: str

    def connect(self, offer: PullOffer, secret: bytes, deadline: float) -> PullReader:
        """Raises `PeerFault`, `TimedOutPull`, and `BadInput` if this side lacks something that the offer needs."""
        ...


class FrameDoor(Protocol):
    """A holder's data door."""

    address: str

    def offer(self, frames: OfferedFrames, secret: bytes) -> PullOffer:
        """Let the node that has the secret pull these frames, once, within 5 s. Raises `PullBusy`, also if the door is
        closed; the caller then releases the frames."""
        ...

    def withdraw(self, token: bytes) -> None:
        """End an offer, and the pull of it: the puller hears that the rest is gone."""
        ...

    def close(self) -> None:
        """End all of them."""
        ...


def numeric_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, with a numeric host: no name is looked up in the middle of a pull, where that would
    have no deadline. Raises `PeerFault`."""
    host, _, port = address.rpartition(":") if len(address) <= MOST_ADDRESS_CHARACTERS else ("", "", "")
    bare = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    try:
        ip = ip_address(bare)
        is_odd = ip.is_unspecified or ip.is_multicast or (isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None)
        if not is_odd and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16:
            return bare, int(port)
    except ValueError:
        pass
    raise PeerFault(f"a door at {address[:MOST_ADDRESS_CHARACTERS]!r}; it must be an IP address and a port")


def written_address(host: str, port: int) -> str:
    """HOST:PORT, as `numeric_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def stays_here(host: str) -> bool:
    """Whether that address is loopback: its traffic leaves no host."""
    return ip_address(host.partition("%")[0]).is_loopback


def must_seal(host: str, seal: str) -> bool:
    """Whether frames are sealed at a door of that address. seal: auto (beyond loopback) or always."""
    if seal not in ("auto", "always"):
        raise BadInput(f"seal={seal!r}; allowed: auto (sealed beyond loopback), always")
    return seal == "always" or not stays_here(host)


def as_bytes(memory: memoryview) -> memoryview:
    """A slot or a span as bytes; a device's memory stays as it is, for a transport that can read it."""
    return memory.cast("B") if isinstance(memory, memoryview) else memory


def checked_record(raw: bytes | memoryview, magic: bytes) -> FrameRecord:
    """Raises `PeerFault` for what no peer of this version sends."""
    record = FrameRecord(*RECORD.unpack(raw))
    if record.magic != magic or record.version != VERSION:
        raise PeerFault("bytes that are no record of this protocol")
    return record
