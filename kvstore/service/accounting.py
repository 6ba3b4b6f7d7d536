"""What tenants asked the sidecar for, and what they got: hits by tier and misses by reason, by namespace.

    look-up   asked += the prompt's full blocks; where the match ended early, the rest is missed for its reason, and
              what was found is `found` until somebody leases it
    lease     takes what its look-up found: granted blocks are hits of the tier where they lay (of `engine` where the
              client said that it has them), the others are missed for the reason why the lease ended
    report    a block that failed its reader's check: from there to the lease's end hits become misses, `corrupt`

    asked == hits + misses + found          always, in every namespace and in sum

A lease that no look-up led to is asked for as well. Matches of puts are no look-ups. Counted is in whole blocks: a
prompt's tail is no business of a sidecar. Keys lead from a lease to its look-up and are forgotten then; token ids
never come here.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvstore.block.account import HitTier, MissReason
from kvstore.protocol.replies import LeaseReply, MatchReply
from kvstore.protocol.status import LookupCounts
from tiering.clock import Clock

OPEN_LOOKUPS = 4096
"""Look-ups of all namespaces that a lease may still come for; what older ones found stays `found`."""

REMEMBERED_LEASES = 16384
"""So many of the last leases may be reported."""


@dataclass(slots=True)
class NamespaceCounts:
    """Blocks of one namespace, and when it was used last."""

    block_tokens: int
    asked: int = 0
    found: int = 0
    lookups: int = 0
    leases: int = 0
    reports: int = 0
    hits: Counter[HitTier] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    last_used: float | None = None

    def copy(self) -> NamespaceCounts:
        """As it is now."""
        return replace(self, hits=Counter(self.hits), misses=Counter(self.misses))


@dataclass(slots=True)
class _Granted:
    """A lease: the origin of each of its blocks, in runs from the first on, as far as none was reported."""

    namespace: int
    runs: list[tuple[HitTier, int]]


class Counting:
    """Counts of one run of a sidecar. Thread-safe; its lock is held for a few additions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[int, NamespaceCounts] = {}
        # Namespace, last key found, how many keys that were -> how often, and no lease came for it yet.
        self._open: OrderedDict[tuple[int, bytes, int], int] = OrderedDict()
        self._granted: OrderedDict[int, _Granted] = OrderedDict()

    def now(self) -> float:
        """Unix time."""
        return self._clock.wall_seconds()

    def opened(self, number: int, block_tokens: int) -> None:
        """A namespace may be asked for from now on."""
        with self._lock:
            self._counts.setdefault(number, NamespaceCounts(block_tokens)).last_used = self.now()

    def looked_up(self, number: int, keys: Sequence[bytes], reply: MatchReply) -> None:
        """Somebody asked how much of a prompt there is."""
        with self._lock:
            counts = self._used(number)
            counts.lookups += 1
            counts.asked += len(keys)
            counts.found += reply.blocks
            _add(counts.misses, reply.reason or MissReason.ABSENT, len(keys) - reply.blocks)
            if reply.blocks:
                name = number, keys[reply.blocks - 1], reply.blocks
                self._open[name] = self._open.get(name, 0) + 1
                if len(self._open) > OPEN_LOOKUPS:
                    self._open.popitem(last=False)

    def leased(self, number: int, keys: Sequence[bytes], reply: LeaseReply) -> None:
        """Somebody wanted to have a prefix."""
        with self._lock:
            counts = self._used(number)
            if not keys:
                return
            counts.leases += 1
            name = number, keys[-1], len(keys)
            times = self._open.pop(name, 0)
            if times:
                counts.found -= len(keys)
                if times > 1:
                    self._open[name] = times - 1
            else:
                counts.asked += len(keys)
            runs = _runs(reply)
            for tier, blocks in runs:
                _add(counts.hits, tier, blocks)
            _add(counts.misses, reply.reason or MissReason.ABSENT, len(keys) - sum(blocks for _, blocks in runs))
            if reply.lease:
                self._granted[reply.lease] = _Granted(number, runs)
                if len(self._granted) > REMEMBERED_LEASES:
                    self._granted.popitem(last=False)

    def reported(self, lease: int, block: int) -> None:
        """The holder of a lease says that a block failed a check: from there on it has nothing."""
        with self._lock:
            granted = self._granted.get(lease)
            if granted is None:
                return
            counts = self._used(granted.namespace)
            counts.reports += 1
            kept, left = [], max(0, block)
            for tier, blocks in granted.runs:
                stays = min(blocks, left)
                left -= stays
                if stays:
                    kept.append((tier, stays))
                _add(counts.hits, tier, stays - blocks)
                _add(counts.misses, MissReason.CORRUPT, blocks - stays)
            granted.runs = kept

    def stored(self, number: int) -> None:
        """Somebody stores in a namespace."""
        with self._lock:
            self._used(number)

    def all(self) -> dict[int, NamespaceCounts]:
        """Every namespace's counts now, by its number."""
        with self._lock:
            return {number: counts.copy() for number, counts in self._counts.items()}

    def _used(self, number: int) -> NamespaceCounts:
        counts = self._counts[number]
        counts.last_used = self.now()
        return counts


def _runs(reply: LeaseReply) -> list[tuple[HitTier, int]]:
    """Where the granted blocks came from; those before the first one wanted are the engine's own."""
    own = min(reply.first_block, reply.blocks)
    runs = [(HitTier.ENGINE, own)] if own else []
    for tier, blocks in reply.tiers:
        skipped = min(own, blocks)
        own -= skipped
        if blocks > skipped:
            runs.append((tier, blocks - skipped))
    return runs


def _add(counter: Counter[HitTier] | Counter[MissReason], name: HitTier | MissReason, blocks: int) -> None:
    if blocks:
        counter[name] += blocks  # type: ignore[index]


def looked(all_counts: list[NamespaceCounts]) -> LookupCounts:
    """Counts of several namespaces in sum."""

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in all_counts)

    def tokens(name: str) -> int:
        return sum(getattr(one, name) * one.block_tokens for one in all_counts)

    def by_origin(name: str) -> tuple[dict[str, int], dict[str, int]]:
        """Tokens and blocks of `hits` or `misses`, where there are any."""
        in_tokens, in_blocks = Counter[str](), Counter[str]()
        for one in all_counts:
            for origin, count in (+getattr(one, name)).items():
                in_tokens[str(origin)] += count * one.block_tokens
                in_blocks[str(origin)] += count
        return dict(in_tokens), dict(in_blocks)

    asked_tokens = tokens("asked")
    (hit_tokens, hit_blocks), (miss_tokens, miss_blocks) = by_origin("hits"), by_origin("misses")
    granted = sum(count for origin, count in hit_tokens.items() if origin != HitTier.ENGINE)
    return LookupCounts(
        asked_tokens,
        hit_tokens,
        miss_tokens,
        tokens("found"),
        total("asked"),
        hit_blocks,
        miss_blocks,
        total("found"),
        total("lookups"),
        total("leases"),
        total("reports"),
        granted,
        granted / asked_tokens if asked_tokens else None,
    )
