"""The contract between what a user holds (`handle`) and a store, wherever that runs.

Keys, places and digests cross it; token ids, prompts and payload bytes never do. The same messages are method calls in
one process and, through a local door, frames on a socket: `spans` are then the client's own mapping of an extent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import BadInput, StoreClosed
from kvstore.block.identity import Namespace
from kvstore.protocol.requests import Requests
from tiering.tier import FrameSpan

R_co = TypeVar("R_co", covariant=True)


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
    """How many leading blocks are there, in which tier (runs of blocks), and why it ended there."""

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

    present: offered blocks that were there before. stopped_at: the first block that will not be held, and why. detail:
    of the reason, for people.
    """

    reservation: int
    present: int
    blocks: list[int] = []
    places: tuple[list[int], ...] = ()
    stopped_at: int | None = None
    reason: MissReason | None = None
    detail: str = ""


class ReservationLost(StoreClosed):
    """What was reserved cannot be filled or committed any more. reason: as what that counts."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Collective:
    """A put that several processes make together, each of its own parts.

    name: by which they find each other: the same for all, and for no other put of theirs. parts: of the family, that
    the caller fills. session: whose it is; a door to another process leaves that to its other side.
    """

    name: str
    parts: tuple[int, ...]
    session: bytes = b""


class Submitted(Protocol[R_co]):
    """An answer that is on its way. Nothing here waits for anything."""

    def poll(self) -> R_co | None:
        """The answer, once; None while it is not there. After the deadline it is a miss. Never raises."""
        ...

    def cancel(self) -> None:
        """What comes later is given back. Nothing else is called afterwards."""
        ...

    def cancel_from_finalizer(self) -> None:
        """The same, called by a finalizer, at any point of any thread."""
        ...


class Door(Protocol):
    """A store as one tenant's client sees it."""

    @property
    def requests(self) -> Requests:
        """What this process holds for each request of its engine."""
        ...

    def open_namespace(self, namespace: Namespace, payload_bytes: Sequence[int], name: str = "") -> Grant:
        """Make a namespace known; payload_bytes: of each part, after the codec. name: of the model, for people."""
        ...

    def match(self, number: int, keys: Sequence[bytes]) -> MatchReply:
        """The longest readable prefix. Pins and changes nothing."""
        ...

    def now(self) -> float:
        """The store's clock, in seconds: what a caller may wait for is counted by it."""
        ...

    def present(self, number: int, keys: Sequence[bytes], seconds: float | None = None) -> int:
        """How many leading blocks a put need not bring. No look-up, which would be counted. seconds: that it waits at
        most, here and below, where its caller has less time than the store would take."""
        ...

    def lease(
        self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float, request: str = ""
    ) -> LeaseReply:
        """Pin the longest readable prefix; frames of the blocks from `first_block` on."""
        ...

    def submit_match(self, number: int, keys: Sequence[bytes], deadline_ms: float) -> Submitted[MatchReply]:
        """`match`, without waiting for its answer."""
        ...

    def submit_lease(
        self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float, request: str = ""
    ) -> Submitted[LeaseReply]:
        """`lease`, without waiting for its answer."""
        ...

    def named(self, lease: int) -> tuple[bytes, int]:
        """The run of the store that granted a lease, and its number there; ("", 0) where it means nothing any more."""
        ...

    def attach(self, run: bytes, reply: LeaseReply) -> LeaseReply:
        """Hold a lease that is held already, by the number that it has in the store's run; it ends with the last of its
        holders. The reply is the same under a number of this door, or empty with a reason."""
        ...

    def release(self, lease: int) -> None:
        """Give a lease back. Unknown ones are ignored: it may have been released before."""
        ...

    def release_later(self, lease: int) -> None:
        """Release a lease that its holder forgot: at once or at the next call, without waiting for anything.

        A finalizer calls this, at any point of any thread.
        """
        ...

    def is_within_reach(self, lease: int) -> bool:
        """Whether the store that gave a lease is still the one behind this door: if not, its memory is gone."""
        ...

    def report(self, lease: int, block: int, part: int) -> None:
        """A frame under this lease failed a check at the reader."""
        ...

    def reserve(
        self,
        number: int,
        keys: Sequence[bytes],
        first_block: int,
        priority: int,
        ttl_seconds: float | None,
        collective: Collective | None = None,
        seconds: float | None = None,
    ) -> ReserveReply:
        """Slots for the blocks from `first_block` on that are not there yet.

        collective: the first who asks under a name reserves, and all others are told the same. Each is given a number
        of its own, and the places of those of its parts that nobody fills already; the other lists are empty.
        """
        ...

    def commit(
        self,
        reservation: int,
        part: int,
        first: int,
        digests: Sequence[Sequence[bytes]],
        seconds: float | None = None,
    ) -> int:
        """Digests of every layer slice of the next reserved blocks, in their order; returns the blocks of which all
        that was to be filled under this number is committed: they are visible, or will be once the others of a
        collective put have committed theirs. 0 where the reservation has ended. Raises `ReservationLost` where that is
        not known.

        first: of these blocks, as the reservation counts them, which is how many of the part were committed before.
        """
        ...

    commits_early: bool
    """Whether a put gains by committing blocks while it fills the next ones."""

    def post_commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> None:
        """The same, and wait for nothing: what came of it, the next `commit` says."""
        ...

    def persist(self, number: int, keys: Sequence[bytes], seconds: float) -> tuple[int, MissReason | None]:
        """Wait until blocks are durable: how many are, from the first on, after at most that long, and why not all."""
        ...

    def abort(self, reservation: int) -> None:
        """End a reservation; what is not visible by now never will be, in a collective put for nobody."""
        ...

    def spans(self, places: Sequence[int]) -> list[FrameSpan]:
        """The bytes of leased frames in this process, up to the first whose memory was given back; only to be read."""
        ...

    def spans_to_fill(self, places: Sequence[int]) -> list[FrameSpan]:
        """The same of reserved frames, for their producer."""
        ...


MAX_COLLECTIVE_CHARACTERS = 256
"""Of a collective put's name as a user gives it."""

WINDOW_CHARACTERS = 16
"""What is added to it: which blocks of the prompt it is about."""


def check_collective(name: str) -> None:
    """Raise `BadInput` unless that can be the name of a collective put; empty is none."""
    if not isinstance(name, str) or len(name) > MAX_COLLECTIVE_CHARACTERS:
        raise BadInput(f"collective={name!r:.80}; give text of at most {MAX_COLLECTIVE_CHARACTERS} characters")


def collective_of(name: str, stop: int, parts: Collection[int]) -> Collective:
    """A user's collective put, as far as it is about the blocks before `stop`."""
    return Collective(f"{name}/{stop}", tuple(parts))


MAX_PRIORITY = 100
