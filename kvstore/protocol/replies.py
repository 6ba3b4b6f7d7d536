"""What a store answers, as data: namespaces, look-ups, leases, reservations.

Keys, places and digests are in it; token ids, prompts and payload bytes never are. On a socket these are parts of
`messages`; in one process they are handed over as they are.
"""

from __future__ import annotations

import msgspec

from kvstore.block.account import HitTier, MissReason


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
