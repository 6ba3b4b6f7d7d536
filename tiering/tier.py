"""The contract of a tier: a place for frames of equal size, with a bounded number of bytes.

A tier moves bytes and keeps the states of its slots. It decides nothing: what to keep, what to evict and what to tell
people is decided above. Callers serialise their calls; only `read` and copies into a reserved view run beside others. A
*place* is a slot's address in a tier, one integer: extent number in the upper bits, slot in the lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

Column = np.ndarray[Any, Any]

SLOT_BITS = 24
"""Bits of a place that number the slot inside its extent."""
SLOT_MASK = (1 << SLOT_BITS) - 1

EXTENT_BITS = 38
"""Of an extent's number: a place fits a column of signed 64-bit numbers."""

NO_PLACE = -1


class TierMiss(Enum):
    """Why a block is not readable, as a tier or the tables over the tiers see it."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    IN_FLIGHT = "in_flight"
    CORRUPT = "corrupt"
    RETIRED = "retired"
    TIMED_OUT = "timed_out"
    DOWN = "down"
    PINNED_FULL = "pinned_full"


class MappedMemory:
    """Memory with many frames, as this process maps it. Does not keep it mapped: views do."""

    def __init__(self, address: int, size_bytes: int, writable: bool) -> None:
        self.address, self.size_bytes, self.writable = address, size_bytes, writable
        self.leaving: list[Callable[[Callable[[], object]], object]] = []
        """Called by who maps the memory, when its last view is gone."""

    def before_unmap(self, leave: Callable[[Callable[[], object]], object]) -> None:
        """When the last view is gone, call `leave` in place of unmapping, with a function that unmaps, to be called
        once nothing needs the memory any more. A finalizer calls it, at any point of any thread: it must not block. Any
        number may register."""
        self.leaving.append(leave)


class FrameSpan(NamedTuple):
    """A frame's bytes in this process: where they start, a writable view of all of them, and the memory they lie in, if
    known."""

    address: int
    view: memoryview
    memory: MappedMemory | None = None


class SlotClass(NamedTuple):
    """Frames that may share an extent: same owner and same size. The three names are opaque to a tier."""

    tenant: bytes
    namespace: bytes
    part: int
    frame_bytes: int


# What operators are shown of tiers. The dataclasses are published unchanged, under their field names: fields may only
# be appended, with defaults.


class Usage(NamedTuple):
    """Slots by state, and bytes taken from the tier's budget."""

    free: int
    reserved: int
    used: int
    deleting: int
    quarantined: int
    zombie: int
    capacity: int
    taken_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class MoveCounts:
    """Moves of one kind (a tier, or one of its directions) and priority: waiting and running now, and their outcomes
    since the start. A move that was refused, or given up before it began, counts as failed."""

    kind: str
    priority: str
    waiting: int
    running: int
    done: int
    failed: int


@dataclass(frozen=True, slots=True)
class ScrubUsage:
    """What a scrub did since the start. frames, bytes: verified, good or damaged. unreadable: failed reads. mended:
    damaged blocks that were written again. last_pass_ended: Unix time. last_pass_frames: verified in it. What is of the
    last pass is None before the first one ended."""

    bytes_per_second: int
    passes: int
    frames: int
    bytes: int
    damaged: int
    unreadable: int
    mended: int
    in_pass: bool
    last_pass_seconds: float | None
    last_pass_ended: float | None
    last_pass_frames: int | None = None

    @property
    def counters(self) -> dict[str, int]:
        """Its counts above 0, under the names of the store's counters."""
        counts = {
            "scrubbed_frames": self.frames,
            "scrub_damaged_frames": self.damaged,
            "scrub_unreadable_frames": self.unreadable,
            "scrub_mended_blocks": self.mended,
        }
        return {name: count for name, count in counts.items() if count}


class Tier(Protocol):
    """Six verbs. Batch first; every place handed out by `reserve` ends in exactly one `commit` or `abort`."""

    def reserve(self, slot_class: SlotClass, count: int) -> list[int]:
        """Places for up to `count` frames; fewer, or none, if the tier has no free slot of that class."""
        ...

    def commit(self, places: Sequence[int], frames: Sequence[bytes | memoryview]) -> None:
        """Store frames and make them readable.

        A frame is given from its start on, as far as it does not stand at its place yet: whole, or its header alone if
        a tier in memory let the payload be written there.
        """
        ...

    def abort(self, places: Sequence[int]) -> None:
        """Give reserved places back; bytes written there are never read."""
        ...

    def read(self, place: int, into: memoryview) -> None:
        """Copy a whole frame, for the caller to check. Raises `BlockMissing` for a place that holds none."""
        ...

    def delete(self, places: Sequence[int]) -> None:
        """Free the places of committed frames."""
        ...

    def usage(self) -> Usage:
        """Counts and bytes now."""
        ...


class LowerTier(Protocol):
    """What the tables need of the tier below DRAM: its slots and their owners. budget_bytes: of all slots that may
    be."""

    budget_bytes: int

    def reserve(self, slot_class: SlotClass, count: int) -> list[int]:
        """As `Tier.reserve`."""
        ...

    def abort(self, places: Sequence[int]) -> None:
        """As `Tier.abort`."""
        ...

    def delete(self, places: Sequence[int], *, claim: bool = False) -> None:
        """As `Tier.delete`. claim: keep the slots for the caller, who evicted the frames."""
        ...

    def quarantine(self, places: Sequence[int]) -> None:
        """A check failed: the slots are not used again."""
        ...

    def own(self, places: Iterable[int], rows: Iterable[int]) -> None:
        """Record which block's frame stands at each place."""
        ...

    def own_many(self, places: Column, rows: Column) -> None:
        """The same for columns."""
        ...

    def frames_of(self, slot_class: SlotClass) -> int:
        """Readable frames of a class."""
        ...

    def held(self) -> dict[bytes, int]:
        """How many of its pieces each tenant has."""
        ...

    @property
    def piece_bytes(self) -> int:
        """Of one piece."""
        ...

    def pieces(self) -> int:
        """The limit of their number."""
        ...

    def rows_in(self, piece: int) -> list[int] | None:
        """The rows of the frames in a piece; None if one is being written, or has no known owner."""
        ...

    def check(self) -> None: ...


def place_of(extent: int, slot: int) -> int:
    """Pack an extent number and a slot into a place."""
    return extent << SLOT_BITS | slot


def extent_of(place: int) -> int:
    """The extent number of a place."""
    return place >> SLOT_BITS


def slot_of(place: int) -> int:
    """The slot of a place inside its extent."""
    return place & SLOT_MASK
