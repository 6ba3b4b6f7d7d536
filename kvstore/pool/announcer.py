"""What this node announces to the directory, and when.

    stored    a chunk is committed       > announced in the next batch
    removed   it is about to be evicted  > withdrawn in the next batch, best effort: a node that still asks for it gets
              the answer that it is gone
    again     after 10 minutes, and at once if the directory lost everything; at a bounded rate, so that a pool that
              comes back does not flood it

The queue of news is bounded: the oldest is dropped and counted. A chunk whose announcement was dropped or failed is
announced with the repeats; a removal that was leaves a stale hint until it expires.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from kvstore.block.account import HitTier

BATCH = 500
MAX_QUEUED = 1 << 14
MAX_HELD = 1 << 20
"""The most recent chunks, which are announced again: of 16 million blocks."""
AGAIN_SECONDS = 600.0
AGAIN_PER_SECOND = 2000.0
POOL_AGAIN_PER_SECOND = 100_000.0
"""Repeated announcements that a directory can take: of one node, and of all of a pool together."""
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class HintBatch:
    """For the directory, at most `BATCH` in all. again: how many of the announcements are repeats."""

    announce: list[tuple[bytes, HitTier]]
    withdraw: list[bytes]
    again: int = 0

    def __bool__(self) -> bool:
        return bool(self.announce or self.withdraw)


@dataclass(slots=True)
class _ToldChunk:
    tier: HitTier
    told_at: float
    told_in: int
    """How often the directory had been emptied by then."""


class Announcer:
    """Of one node. Thread-safe; one thread takes batches."""

    def __init__(self, most_queued: int = MAX_QUEUED, most_held: int = MAX_HELD) -> None:
        self._most_queued, self._most_held = most_queued, most_held
        self._lock = threading.Lock()
        self._queue: OrderedDict[bytes, HitTier | None] = OrderedDict()
        """News, the oldest first; None: removed."""
        self._held: OrderedDict[bytes, _ToldChunk] = OrderedDict()
        """What is here, least recently announced first."""
        self._emptied = 0
        self._allowance, self._allowed_at, self._rate = 0.0, _NEVER, AGAIN_PER_SECOND
        self.dropped = 0

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def stored(self, name: bytes, tier: HitTier) -> None:
        """The chunk's last block is committed, or in another tier now. name: by `hint_name`."""
        with self._lock:
            self._hold(name, tier)
            self._enqueue(name, tier)

    def kept(self, name: bytes, tier: HitTier) -> None:
        """A node that starts has it already: it is announced after all news, as a repeat."""
        with self._lock:
            self._queue.pop(name, None)
            self._hold(name, tier)

    def removed(self, name: bytes) -> None:
        """It is about to be evicted from its last tier here, or was. No effect for names that are not announced."""
        with self._lock:
            if self._held.pop(name, None) is not None:
                self._enqueue(name, None)

    def lost(self) -> None:
        """The directory was emptied: everything is announced again."""
        with self._lock:
            self._emptied += 1

    def shares(self, nodes: int) -> None:
        self._rate = min(AGAIN_PER_SECOND, POOL_AGAIN_PER_SECOND / max(1, nodes))

    def batch(self, now: float) -> HintBatch:
        """What to announce and withdraw now; empty if there is nothing. `told` or `failed` must follow."""
        with self._lock:
            announce: list[tuple[bytes, HitTier]] = []
            withdraw: list[bytes] = []
            while self._queue and len(announce) + len(withdraw) < BATCH:
                name, tier = self._queue.popitem(last=False)
                if tier is None:
                    withdraw.append(name)
                else:
                    announce.append((name, tier))
                    self._note(name, now)
            again = self._due(min(BATCH - len(announce) - len(withdraw), self._allowed(now)), now)
            self._allowance -= len(again)
            return HintBatch(announce + again, withdraw, len(again))

    def failed(self, batch: HintBatch) -> None:
        """The directory did not take it: announcements are repeated later, and removals precede others."""
        with self._lock:
            for name, tier in reversed(batch.announce):
                one = self._held.get(name)
                if one is not None and one.tier == tier:
                    self._hold(name, tier)
            for name in reversed(batch.withdraw):
                if name in self._held or name in self._queue:
                    continue  # it came back meanwhile
                if len(self._queue) < self._most_queued:
                    self._queue[name] = None
                    self._queue.move_to_end(name, last=False)
                else:
                    self.dropped += 1

    def _hold(self, name: bytes, tier: HitTier) -> None:
        self._held[name] = _ToldChunk(tier, _NEVER, self._emptied)
        self._held.move_to_end(name, last=False)
        if len(self._held) > self._most_held:
            self._queue.pop(self._held.popitem()[0], None)
            self.dropped += 1

    def _enqueue(self, name: bytes, tier: HitTier | None) -> None:
        self._queue.pop(name, None)
        self._queue[name] = tier
        if len(self._queue) > self._most_queued:
            oldest, was = self._queue.popitem(last=False)
            self.dropped += 1
            if was is not None:
                self._hold(oldest, was)

    def _note(self, name: bytes, now: float) -> None:
        one = self._held[name]
        one.told_at, one.told_in = now, self._emptied
        self._held.move_to_end(name)

    def _allowed(self, now: float) -> int:
        self._allowance = min(float(BATCH), self._allowance + self._rate * max(0.0, now - self._allowed_at))
        self._allowed_at = now
        return int(self._allowance)

    def _due(self, most: int, now: float) -> list[tuple[bytes, HitTier]]:
        due: list[tuple[bytes, HitTier]] = []
        while len(due) < most and self._held:
            name, one = next(iter(self._held.items()))
            if one.told_in == self._emptied and one.told_at > now - AGAIN_SECONDS:
                break
            due.append((name, one.tier))
            self._note(name, now)
        return due
