"""The contract of pulls between nodes, and what all transports share: the bytes of its messages, errors, addresses.

A node asks a holder of blocks over gRPC, and gets a `PullOffer`. It connects to the holder's data server (its *door*),
proves that it has the secret of this offer, and reads frames in the order of the offer, block by block, the parts of
each in order:

    puller > HELLO   token's digest, MAC               door > WELCOME  MAC        (or REFUSED, and the end)
    puller > ASK     request, first frame, frames      door > FRAME    header page and payload, for each of them
                     (two requests in flight)

Each of these messages but the first begins with a record. Anything else than the requested ends the connection; the
puller keeps what is checked by then. Sizes are those of the slots, never those that the other side names.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from kvstore.block.errors import BadInput, OutOfResources, StoreError
from tiering.clock import Clock
from tiering.frame import ALIGNMENT

VERSION = 1
TOKEN_BYTES = 32
OFFER_SECONDS = 5.0
"""How long blocks are pinned for a puller, at most."""
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
"""Follow the record of a welcome: proof that the server has the secret too."""


class PullStatus(enum.IntEnum):
    FRAME = 0
    WELCOME = 1
    REFUSED = 3  # 2 was never sent


class FrameRecord(NamedTuple):
    """The head of a message. follow: frames still to come for this request; in an ASK, the requested ones."""

    magic: bytes
    version: int
    status: int
    follow: int
    request: int
    number: int
    frame_bytes: int


class PullFault(StoreError):
    """A pull ended early. verified: leading frames of this call that are whole and checked, and stay valid."""

    verified = 0


class PeerFault(PullFault):
    """The other side, or the network, broke the protocol."""


class TimedOutPull(PullFault):
    """The deadline passed."""


class PullBusy(OutOfResources):
    """The maximum of offers or connections is reached; a retry may soon succeed."""


@dataclass(frozen=True, slots=True)
class PullOffer:
    """A holder's answer. Raises `PeerFault` if it is impossible.

    token: for one connection, valid for 5 s. address: HOST:PORT of the data server, numeric and never a name. blocks:
    pinned leading ones, from the first requested. frame_bytes: whole frames, by part.
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
        return self.blocks * len(self.frame_bytes)


@dataclass(slots=True, repr=False)
class OfferedFrames:
    """Frames that a holder has pinned for one puller.

    spans: whole frames in place, block by block, the parts of each in order. frame_bytes: by part. sent: called with
    the bytes of each frame that is sent. release: ends the pins; called once, when all frames are sent, the puller is
    gone, or `OFFER_SECONDS` are over; no span is read after it. The data server's thread calls it, or the thread that
    closes. Neither may block.
    """

    spans: Sequence[memoryview]
    frame_bytes: tuple[int, ...]
    release: Callable[[], None]
    sent: Callable[[int], None] = lambda size: None

    def __post_init__(self) -> None:
        parts = len(self.frame_bytes)
        assert not len(self.spans) % parts
        assert all(span.nbytes == self.frame_bytes[at % parts] for at, span in enumerate(self.spans))


def listened(listen: str) -> tuple[str, int]:
    """An address to listen at, as numeric host and port. Raises `BadInput`."""
    host, _, port = listen.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        raise BadInput(f"{listen!r} is no address to listen at; give HOST:PORT, such as 10.0.0.7:7472") from None
    bare: str = infos[0][4][0]  # type: ignore[assignment]
    if not host or bare in ("0.0.0.0", "::"):
        raise BadInput(f"{listen!r} is not where peers reach this host; give its own address, such as 10.0.0.7:7472")
    return bare, int(port)


def numeric_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, with a numeric host: a name's look-up in the middle of a pull would have no deadline.
    Raises `PeerFault`."""
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
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def stays_here(host: str) -> bool:
    """Whether that address is loopback: its traffic does not leave the host."""
    return ip_address(host.partition("%")[0]).is_loopback


def must_seal(host: str, seal: str) -> bool:
    """Whether a data server of that address seals frames. seal: auto (beyond loopback) or always."""
    if seal not in ("auto", "always"):
        raise BadInput(f"seal={seal!r}; allowed: auto (sealed beyond loopback), always")
    return seal == "always" or not stays_here(host)


def seconds_left(clock: Clock, deadline: float) -> float:
    """Raises `TimedOutPull` if there are none."""
    left = deadline - clock.monotonic_seconds()
    if left <= 0:
        raise TimedOutPull("the deadline came before the frames")
    return left


def as_bytes(memory: memoryview) -> memoryview:
    """A slot or a span as bytes; a device's memory stays as it is, for a transport that can read it."""
    return memory.cast("B") if isinstance(memory, memoryview) else memory


def checked_record(raw: bytes | memoryview, magic: bytes) -> FrameRecord:
    """Raises `PeerFault` for a record that no peer of this version sends."""
    record = FrameRecord(*RECORD.unpack(raw))
    if record.magic != magic or record.version != VERSION:
        raise PeerFault("bytes that are no record of this protocol")
    return record
