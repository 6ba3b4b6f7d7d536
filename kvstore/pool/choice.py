"""Which holders to ask for blocks, and over which transport: at most two, one after the other.

    1. none that is gone, of another run, without the tenant's keys, or banned: two failed pulls from one incarnation
       ban it for 10 s
    2. most blocks first. A holder more than twice as slow as the fastest has its blocks discounted in proportion, so
       that a few more blocks behind a slow link do not put it before the others
    3. among equal holders, a hash of prompt, holder and asking node decides (rendezvous): asking nodes spread over
       holders without coordination, and each asks the same holder again

Two are asked because a hint may be old; a third costs more time than it finds blocks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import exp, log

from kvstore.block.account import Holder
from kvstore.pool.directory import NodeEntry

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
    """How long bytes take from each node and remote tier, learned from finished transfers. Thread-safe.

        seconds = latency + bytes * seconds per byte

    Of each source two logarithms are kept: how many times slower than the prior its latency and its bytes are. A
    transfer moves both, by their shares in its time, half of the way to the measured time, and by at most `STEP`: one
    hiccup has little effect, three slow transfers have. Knowledge fades, by half in `HALF_LIFE_SECONDS`, so that a slow
    source is tried again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: OrderedDict[Hashable, _Learned] = OrderedDict()

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
            while len(self._sources) > MAX_SOURCES:
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


# Which to ask --------------------------------------------------------------------------------------------------------


MOST_ASKED = 2
FAILURES = 2
BAN_SECONDS = 10.0
EQUALLY_FAST = 2.0
MAX_RECORDS = 4096
"""The most recent failures."""
UNREACHED_SECONDS, LONGEST_UNREACHED_SECONDS = 60.0, 3600.0
"""How long a transport is left out after it failed to reach a node: at first, and at most; failures double it."""
MOST_UNREACHED = 1024


@dataclass(slots=True)
class _Failures:
    count: int
    at: float
    banned_until: float = 0.0


class HolderChoice:
    """Of one node. Thread-safe."""

    def __init__(self, here: bytes, speeds: SpeedBook) -> None:
        self._here = here
        self._speeds = speeds
        self._lock = threading.Lock()
        self._failures: OrderedDict[tuple[bytes, bytes], _Failures] = OrderedDict()

    def choose(
        self,
        holders: Iterable[Holder],
        alive: Mapping[bytes, NodeEntry],
        head: bytes,
        block_bytes: int,
        now: float,
        fingerprint: bytes = b"",
    ) -> list[Holder]:
        """In which order to ask; empty if there is none. head: names the prompt, as a hint's name does. fingerprint: of
        the tenant's keys; empty: any holder."""
        fit = [one for one in holders if self._is_fit(one, alive, now, fingerprint)]
        if not fit:
            return []
        size = block_bytes * max(one.blocks for one in fit)
        times = {one.node: self._speeds.milliseconds(one.node, size, now) for one in fit}
        enough = EQUALLY_FAST * min(times.values())

        def rank(one: Holder) -> tuple[float, bytes]:
            slower = max(1.0, times[one.node] / enough)
            spread = blake2b(head + one.node + self._here, digest_size=8).digest()
            return -(one.blocks / slower), spread

        chosen: dict[bytes, Holder] = {}
        for one in sorted(fit, key=rank):
            chosen.setdefault(one.node, one)
        return list(chosen.values())[:MOST_ASKED]

    def failed(self, node: bytes, incarnation: bytes, now: float) -> None:
        """A pull from it failed: it was not reached, did not answer in time, or sent something else. A block that it no
        longer has, or a busy answer, is no failure."""
        with self._lock:
            one = self._failures.pop((node, incarnation), None)
            if one is None or now - one.at > BAN_SECONDS:
                one = _Failures(0, now)
            one.count, one.at = one.count + 1, now
            if one.count >= FAILURES:
                one.count, one.banned_until = 0, now + BAN_SECONDS
            self._failures[node, incarnation] = one
            while len(self._failures) > MAX_RECORDS:
                self._failures.popitem(last=False)

    def worked(self, node: bytes, incarnation: bytes) -> None:
        """A pull from it succeeded: earlier failures are forgotten."""
        with self._lock:
            self._failures.pop((node, incarnation), None)

    def is_banned(self, node: bytes, incarnation: bytes, now: float) -> bool:
        with self._lock:
            one = self._failures.get((node, incarnation))
            return one is not None and now < one.banned_until

    def _is_fit(self, one: Holder, alive: Mapping[bytes, NodeEntry], now: float, fingerprint: bytes) -> bool:
        entry = alive.get(one.node)
        return (
            entry is not None
            and one.blocks > 0
            and one.node != self._here
            and entry.incarnation == one.incarnation
            and (not fingerprint or fingerprint in entry.fingerprints)
            and not self.is_banned(one.node, one.incarnation, now)
        )


FAIR_SECONDS = 0.25


def late_has_failed(given_seconds: float, came: int) -> bool:
    """Whether a late node has failed: it had enough time, and nothing came. An engine that would compute the blocks
    sooner waits for less time, and must not cause a ban of a healthy node."""
    return not came and given_seconds >= FAIR_SECONDS


class UsableTransports:
    """The transports for pulls from a node, the best first, without those that recently failed to reach it; the last
    one is always tried. Thread-safe."""

    def __init__(self, names: Sequence[str]) -> None:
        """names: the best first."""
        self._names = list(names)
        self._lock = threading.Lock()
        self._unreached: OrderedDict[tuple[bytes, str], tuple[float, float]] = OrderedDict()  # until when, and how long
        self._worked: OrderedDict[bytes, str] = OrderedDict()

    def names(self, node: bytes, now: float) -> list[str]:
        with self._lock:
            return [name for name in self._names[:-1] if self._is_usable(node, name, now)] + self._names[-1:]

    def is_last(self, name: str) -> bool:
        """Whether there is no other transport to fall back to."""
        return name not in self._names[:-1]

    def failed(self, node: bytes, name: str, now: float) -> None:
        """The node offered a pull over this transport, which did not reach it."""
        with self._lock:
            _, before = self._unreached.pop((node, name), (0.0, UNREACHED_SECONDS / 2))
            seconds = min(2 * before, LONGEST_UNREACHED_SECONDS)
            self._unreached[node, name] = now + seconds, seconds
            while len(self._unreached) > MOST_UNREACHED:
                self._unreached.popitem(last=False)

    def worked(self, node: bytes, name: str) -> None:
        with self._lock:
            self._unreached.pop((node, name), None)
            self._worked[node] = name
            self._worked.move_to_end(node)
            while len(self._worked) > MOST_UNREACHED:
                self._worked.popitem(last=False)

    def told(self, node: bytes, now: float) -> str:
        """For people; empty with a single transport."""
        with self._lock:
            if len(self._names) < 2:
                return ""
            lacking = [name for name in self._names[:-1] if not self._is_usable(node, name, now)]
            worked = [f"over {self._worked[node]}"] if node in self._worked else []
        return "; ".join(worked + [f"not reached over {name}" for name in lacking])

    def _is_usable(self, node: bytes, name: str, now: float) -> bool:
        return now >= self._unreached.get((node, name), (0.0, 0.0))[0]
