"""How long bytes take from each node and remote tier, learned from finished transfers.

    seconds = latency + bytes * seconds per byte

Of each source two logarithms are kept: how many times slower than the prior its latency and its bytes are. A transfer
moves both, by their shares in its time, half of the way to the measured time, and by at most `STEP`: one hiccup has
little effect, three slow transfers have. Knowledge fades, by half in `HALF_LIFE_SECONDS`, so that a slow source is
tried again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import exp, log

MAX_SOURCES = 256
"""Beyond it, the least recently updated is forgotten."""
HALF_LIFE_SECONDS = 900.0
STEP = log(4.0)
FURTHEST = log(1e4)
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-6, 3600.0
LARGE_BYTES = 1 << 20
"""Larger transfers measure a source's bandwidth."""
REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class SourcePrior:
    """Assumed of a source before its first transfer."""

    latency_seconds: float
    bytes_per_second: float


PEER_PRIOR = SourcePrior(1e-3, 5e9)
REMOTE_PRIOR = SourcePrior(1e-3, 3e9)


@dataclass(frozen=True, slots=True)
class SourceSpeed:
    """For people, of the last large transfers: bytes a second, and the slowest of a hundred; 0 without any."""

    bytes_per_second: float = 0.0
    milliseconds_p99: float = 0.0


@dataclass(slots=True)
class _Learned:
    prior: SourcePrior
    slow_latency: float = 0.0
    slow_bytes: float = 0.0
    at: float = 0.0
    large: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def terms(self, size_bytes: int, now: float) -> tuple[float, float]:
        kept = 2.0 ** (-max(0.0, now - self.at) / HALF_LIFE_SECONDS)
        latency = self.prior.latency_seconds * exp(kept * self.slow_latency)
        return latency, size_bytes / self.prior.bytes_per_second * exp(kept * self.slow_bytes)


class SpeedBook:
    """Of all sources, by name. Thread-safe."""

    def __init__(self, most: int = MAX_SOURCES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._sources: OrderedDict[Hashable, _Learned] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sources)

    def milliseconds(self, source: Hashable, size_bytes: int, now: float, prior: SourcePrior = PEER_PRIOR) -> float:
        with self._lock:
            return 1e3 * sum((self._sources.get(source) or _Learned(prior)).terms(max(0, size_bytes), now))

    def learn(
        self, source: Hashable, size_bytes: int, seconds: float, now: float, prior: SourcePrior = PEER_PRIOR
    ) -> None:
        """A transfer has ended. Impossible durations are ignored."""
        if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS or size_bytes < 0:
            return
        with self._lock:
            one = self._sources.setdefault(source, _Learned(prior))
            self._sources.move_to_end(source)
            while len(self._sources) > self._most:
                self._sources.popitem(last=False)
            latency, transfer = one.terms(size_bytes, now)
            share = latency / (latency + transfer)
            error = max(-STEP, min(STEP, log(seconds / (latency + transfer))))
            gain = 0.5 * error / (share * share + (1.0 - share) ** 2)
            kept = 2.0 ** (-max(0.0, now - one.at) / HALF_LIFE_SECONDS)
            one.slow_latency = _within(kept * one.slow_latency + gain * share)
            one.slow_bytes = _within(kept * one.slow_bytes + gain * (1.0 - share))
            one.at = now
            if size_bytes >= LARGE_BYTES:
                one.large.append((size_bytes, seconds))

    def speed(self, source: Hashable) -> SourceSpeed:
        with self._lock:
            one = self._sources.get(source)
            large = list(one.large) if one is not None else []
        if not large:
            return SourceSpeed()
        times = sorted(seconds for _, seconds in large)
        slowest = times[min(len(times) - 1, len(times) * 99 // 100)]
        return SourceSpeed(sum(size for size, _ in large) / sum(times), 1e3 * slowest)


def _within(slow: float) -> float:
    return max(-FURTHEST, min(slow, FURTHEST))
