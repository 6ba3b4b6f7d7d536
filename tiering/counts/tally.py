"""Counters of what a store's tiers did since the start: evictions, checks, damage, copies. They only rise.

Callers hold the lock of the tables whose events they report, so this takes none. Knows bytes and ages, never keys,
tokens or tenants. Without a clock (when a trace is replayed) it keeps no ages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from tiering.counts.histogram import AGE_SECONDS, Histogram, HistogramCounts


class TierName(StrEnum):
    """A tier, by its name for people."""

    DRAM = "dram"
    NVME = "nvme"


class EvictedTo(StrEnum):
    """Where an evicted block can still be read. `DECLINED`: nowhere, since the admission policy declined to write it to
    NVMe."""

    DRAM = "dram"
    NVME = "nvme"
    NOTHING = "nothing"
    DECLINED = "declined"


EVICTIONS = (
    (TierName.DRAM, EvictedTo.NVME),
    (TierName.DRAM, EvictedTo.NOTHING),
    (TierName.DRAM, EvictedTo.DECLINED),
    (TierName.NVME, EvictedTo.DRAM),
    (TierName.NVME, EvictedTo.NOTHING),
)
"""Every possible pair."""


class CheckedAt(StrEnum):
    """When frames were verified. `LOAD`: read from NVMe for a lease. `LEASE`: first leased after another process left
    them in DRAM. `REPORT`: a reader reported them as bad. `MOVE`: before a copy, to NVMe or within DRAM. `SCRUB`: read
    again in the background."""

    LOAD = "load"
    LEASE = "lease"
    REPORT = "report"
    MOVE = "move"
    SCRUB = "scrub"


class CopyKind(StrEnum):
    """A copy between or within tiers. `COMPACT`: within DRAM, to empty an extent."""

    PROMOTE = "promote"
    DEMOTE = "demote"
    COMPACT = "compact"


class EvictionCause(StrEnum):
    """Why a block cannot be read any more. `DECLINED`: evicted from DRAM, and the admission policy declined to write it
    to NVMe."""

    ROOM = "room"
    DECLINED = "declined"
    DROP = "drop"


CAUSE_OF = {EvictedTo.NOTHING: EvictionCause.ROOM, EvictedTo.DECLINED: EvictionCause.DECLINED}
_CAUSES = tuple(EvictionCause)


class Eviction(NamedTuple):
    """How a block left the last tier that had it. seconds_ago: to a second."""

    tier: TierName
    cause: EvictionCause
    seconds_ago: float


class TallyCounts(NamedTuple):
    """A tally at one moment; every possible event is among the keys. Histograms are of seconds."""

    evicted: dict[tuple[TierName, EvictedTo], int]
    idle: dict[TierName, HistogramCounts]
    wanted_again: dict[TierName, HistogramCounts]
    quarantined: dict[TierName, int]
    verified_bytes: dict[CheckedAt, int]
    damaged: dict[CheckedAt, int]
    copied_bytes: dict[CopyKind, int]
    written_bytes: int
    stored_tokens: int


class Tally:
    """One store's."""

    def __init__(self, seconds: Callable[[], float] | None = None) -> None:
        """seconds: a clock that never goes back; None for no ages."""
        self._seconds = seconds
        self._began_at = seconds() if seconds is not None else 0.0
        self._evicted: Counter[tuple[TierName, EvictedTo]] = Counter()
        self._idle = {tier: Histogram(AGE_SECONDS) for tier in TierName}
        self._wanted_again = {tier: Histogram(AGE_SECONDS) for tier in TierName}
        self.quarantined: Counter[TierName] = Counter()
        """In blocks."""
        self.copied_bytes: Counter[CopyKind] = Counter()
        """In bytes of frames."""
        self.written_bytes = 0
        """Bytes of frames, to NVMe."""
        self.stored_tokens = 0
        """Of blocks that puts made readable; counted by `BlockTable`, which knows how many tokens a block has."""
        self._verified_bytes: Counter[CheckedAt] = Counter()
        self._damaged: Counter[CheckedAt] = Counter()

    def evicted(self, tier: TierName, to: EvictedTo, idle_seconds: float | None) -> None:
        """A block was evicted from a tier. idle_seconds: since its last use, or None if that is unknown."""
        self._evicted[tier, to] += 1
        if idle_seconds is not None:
            self._idle[tier].add(idle_seconds)

    def stamp(self, tier: TierName, cause: EvictionCause = EvictionCause.ROOM) -> int:
        """The stamp of a block that leaves the last tier that had it, for `asked_again` and `eviction`: above 0; 0
        without a clock."""
        if self._seconds is None:
            return 0
        return (1 + int(self._seconds() - self._began_at)) << 3 | _CAUSES.index(cause) << 1 | (tier is TierName.NVME)

    def eviction(self, stamp: int) -> Eviction | None:
        """What a stamp stands for; None for 0."""
        if self._seconds is None or not stamp:
            return None
        tier = TierName.NVME if stamp & 1 else TierName.DRAM
        ago = self._seconds() - self._began_at - ((stamp >> 3) - 1)
        return Eviction(tier, _CAUSES[stamp >> 1 & 3], max(0.0, ago))

    def asked_again(self, stamp: int) -> None:
        """An evicted block was asked for, for the first time since its eviction."""
        eviction = self.eviction(stamp)
        if eviction is not None and eviction.cause is not EvictionCause.DROP:
            self._wanted_again[eviction.tier].add(eviction.seconds_ago)

    def checked(self, at: CheckedAt, size_bytes: int, *, is_sound: bool) -> None:
        """Frames were verified up to the first bad one, which counts as damaged."""
        self._verified_bytes[at] += size_bytes
        self._damaged[at] += not is_sound

    def now(self) -> TallyCounts:
        return TallyCounts(
            {pair: self._evicted[pair] for pair in EVICTIONS},
            {tier: one.now() for tier, one in self._idle.items()},
            {tier: one.now() for tier, one in self._wanted_again.items()},
            {tier: self.quarantined[tier] for tier in TierName},
            {at: self._verified_bytes[at] for at in CheckedAt},
            {at: self._damaged[at] for at in CheckedAt},
            {kind: self.copied_bytes[kind] for kind in CopyKind},
            self.written_bytes,
            self.stored_tokens,
        )
