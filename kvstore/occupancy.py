"""What each namespace takes up in each tier (floor 2). Reads tables only; callers hold the store's lock.

A block counts in a tier once its first part stands there, committed. For a moment, while a put is under way, that may
be more than can be found.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.blocks import Blocks
from kvstore.identity import Namespace


@dataclass(frozen=True, slots=True)
class Held:
    """What a namespace has in one tier."""

    blocks: int
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class SpaceUsage:
    """A namespace, its readable blocks, and what it has in each tier. payload_bytes: of each part. nvme: None without
    such a tier."""

    number: int
    tenant: bytes
    namespace: Namespace
    digest: bytes
    payload_bytes: tuple[int, ...]
    blocks: int
    dram: Held
    nvme: Held | None


def occupancy(blocks: Blocks) -> list[SpaceUsage]:
    """Every namespace that was opened or found on disk, in the order of its number."""
    found = []
    tier = blocks.lower.tier if blocks.lower is not None else None
    for space in blocks.spaces:
        live = [sum(extent.slots.live for extent in blocks.dram.all_extents(one)) for one in space.classes]
        below = [tier.frames_of(one) for one in space.classes] if tier is not None else None
        sizes = [one.frame_bytes for one in space.classes]
        found.append(
            SpaceUsage(
                space.number,
                space.tenant,
                space.namespace,
                space.classes[0].namespace,
                tuple(sealer.stamp.payload_bytes for sealer in space.sealers),
                blocks.index.visible_blocks(space.number),
                _held(live, sizes),
                _held(below, sizes) if below is not None else None,
            )
        )
    return found


def _held(frames: list[int], sizes: list[int]) -> Held:
    return Held(frames[0], sum(count * size for count, size in zip(frames, sizes, strict=True)))
