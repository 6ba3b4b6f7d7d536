"""Does the copies that `residency` decided on, and reports their outcome.

A move never changes a table: it gets reserved places, copies, checks the result and reports. It runs outside the
store's lock, so the caller pins its frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tiering.dram.tier import DramTier, copy_frame
from tiering.errors import BlockCorrupt, BlockMissing, EpochRetired
from tiering.frame import HEADER_BYTES, MacKeys, open_header, verify_payload


class MoveOutcome(Enum):
    """Of a copy. Unless `MOVED`, the target holds nothing and is still reserved."""

    MOVED = "moved"
    CORRUPT = "corrupt"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class FrameCopy:
    """One frame from its place to a reserved one of the same class."""

    row: int
    source: int
    target: int


class Mover:
    """Copies frames between places of the DRAM tier."""

    def __init__(self, dram: DramTier, keys: MacKeys) -> None:
        self._dram = dram
        self._keys = keys

    def run(self, copies: Sequence[FrameCopy]) -> list[MoveOutcome]:
        """Copy each frame and verify it at the target. Bytes that fail a check are never reported as moved."""
        return [self._copy(copy) for copy in copies]

    def _copy(self, copy: FrameCopy) -> MoveOutcome:
        try:
            source = self._dram.committed_span(copy.source)
            target = self._dram.reserved_span(copy.target)
            copy_frame(source, target)
            header = open_header(bytes(target.view[:HEADER_BYTES]), self._keys)
            verify_payload(header, target.view[HEADER_BYTES:])
        except (BlockMissing, EpochRetired):  # the frame of a retired epoch is left to be evicted where it is
            return MoveOutcome.GONE
        except BlockCorrupt:
            return MoveOutcome.CORRUPT
        return MoveOutcome.MOVED
