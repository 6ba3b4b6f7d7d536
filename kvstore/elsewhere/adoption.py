"""Headers of frames that another store sealed: whether each belongs to the wanted block, and its digests.

Pure. Must never trust a field that the MAC does not cover, nor pass on anything of a header but its digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, MacKeys, Stamp, open_header, parse_header


class AdoptFault(StrEnum):
    """What was wrong with an `Adopt`."""

    RESERVATION = "reservation"  # not one of that connection's, or already over
    TIER = "tier"  # neither a peer nor a remote tier
    ORDER = "order"  # not the next blocks of a part of that reservation, or more than were reserved
    FORM = "form"  # not a frame's header
    TENANT = "tenant"
    NAMESPACE = "namespace"
    CODEC = "codec"
    PART = "part"
    SIZE = "size"  # of the block, of its slices, or of the payload
    BLOCK = "block"  # another block's prefix key
    PARENT = "parent"
    INDEX = "index"
    KEY = "key"  # signed with a key that this store does not hold
    EPOCH = "epoch"  # signed in an epoch that was retired
    MAC = "mac"


class WantedFrame(NamedTuple):
    """The block that belongs into a slot: its prefix key, its parent's, and the number of blocks before it."""

    key: bytes
    parent: bytes
    depth: int


class HeaderRefused(Exception):
    def __init__(self, why: AdoptFault, at: int, detail: str = "") -> None:
        super().__init__(detail or f"header {at} is not of the frame that is wanted there: another {why}")
        self.why = why


def digests_of(
    headers: Sequence[bytes], stamp: Stamp, wanted: Sequence[WantedFrame], keys: MacKeys
) -> list[tuple[bytes, ...]]:
    """The digests of each header, which must be the wanted frame's, of that slot class. Raises `HeaderRefused`."""
    return [_digests(raw, at, stamp, one, keys) for at, (raw, one) in enumerate(zip(headers, wanted, strict=True))]


def _digests(raw: bytes, at: int, stamp: Stamp, wanted: WantedFrame, keys: MacKeys) -> tuple[bytes, ...]:
    try:
        header = parse_header(raw)
    except BlockCorrupt as error:
        text = f"header {at} is none: {error}; give the {HEADER_BYTES} bytes before a frame's payload"
        raise HeaderRefused(AdoptFault.FORM, at, text) from None
    found = header.stamp
    for why, is_right in (
        (AdoptFault.TENANT, found.tenant == stamp.tenant),
        (AdoptFault.NAMESPACE, found.namespace == stamp.namespace),
        (AdoptFault.CODEC, found.codec == stamp.codec),
        (AdoptFault.PART, (found.part, found.parts) == (stamp.part, stamp.parts)),
        (AdoptFault.SIZE, found == stamp),
        (AdoptFault.BLOCK, header.prefix_key == wanted.key),
        (AdoptFault.PARENT, header.parent == wanted.parent),
        (AdoptFault.INDEX, header.block_index == wanted.depth),
    ):
        if not is_right:
            raise HeaderRefused(why, at)
    key = keys.mac_key(found.tenant, found.key_id, found.epoch)
    if not key:
        why, text = (AdoptFault.KEY, "not known here") if key is None else (AdoptFault.EPOCH, "retired")
        raise HeaderRefused(why, at, f"header {at} was signed with a key that is {text}, in epoch {found.epoch}")
    try:
        return open_header(raw, keys).digests
    except BlockCorrupt as error:
        raise HeaderRefused(AdoptFault.MAC, at, f"header {at}: {error}") from None
