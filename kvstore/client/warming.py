"""Promotes the stored prefixes of prompts to DRAM: for the command line, and for gRPC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvstore.block.account import HitTier, MissReason
from kvstore.protocol import messages as m
from tiering.clock import Clock

ANSWER_SECONDS = 5.0
"""For requests that a sidecar answers at once."""
WARM_BLOCKS = 256
"""Promoted under one lease, so that a long prompt is not pinned as a whole."""
WARM_SECONDS = 50.0
"""For each of these leases."""


@dataclass
class Warming:
    """In blocks. ask: asks a sidecar (verb, kind of the answer, seconds); raises for an answer of another kind. warm:
    already in DRAM. promoted: from a lower tier. left: found but not promoted, by reason. absent: not stored, by
    reason. asked = warm + promoted + the sums of left and absent."""

    ask: Callable[..., Any]
    number: int
    clock: Clock
    ends_at: float = inf
    asked: int = 0
    warm: int = 0
    promoted: int = 0
    left: Counter[str] = field(default_factory=Counter)
    absent: Counter[str] = field(default_factory=Counter)

    def take(self, keys: list[bytes]) -> None:
        """Promote one prompt. After `ends_at` the rest counts as left, by `deadline`."""
        seconds = min(ANSWER_SECONDS, max(0.1, self.ends_at - self.clock.monotonic_seconds()))
        match = self.ask(m.MatchPrefix(self.number, keys, counts=False), m.Matched, seconds).reply
        self.asked += len(keys)
        if match.blocks < len(keys):
            self.absent[str(match.reason or MissReason.ABSENT)] += len(keys) - match.blocks
        tiers = [tier for tier, blocks in match.tiers for _ in range(blocks)]
        lacking = [at for at, tier in enumerate(tiers) if tier is not HitTier.DRAM]
        self.warm += match.blocks - len(lacking)
        reached, reason = self._promote(keys[: match.blocks])
        self.promoted += sum(at < reached for at in lacking)
        lost = sum(at >= reached for at in lacking)
        if lost:
            self.left[str(reason or MissReason.EVICTED)] += lost

    def _promote(self, keys: Sequence[bytes]) -> tuple[int, MissReason | None]:
        for start in range(0, len(keys), WARM_BLOCKS):
            seconds = min(WARM_SECONDS, self.ends_at - self.clock.monotonic_seconds())
            if seconds <= 0:
                return start, MissReason.DEADLINE
            stop = min(start + WARM_BLOCKS, len(keys))
            verb = m.LeasePrefix(self.number, list(keys[:stop]), start, 1000 * seconds, counts=False)
            reply = self.ask(verb, m.Leased, seconds + ANSWER_SECONDS).reply
            if reply.lease:
                self.ask(m.Release([reply.lease]), m.Done, ANSWER_SECONDS)
            if reply.blocks < stop:
                return reply.blocks, reply.reason
        return len(keys), None
