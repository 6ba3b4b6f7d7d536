"""Estimates from live look-ups what other store sizes would have found, without delaying the look-ups.

    looked_up()  puts a look-up's keys into a bounded queue; if that is full, drops and counts them
    step()       the worker's thread feeds the estimators all that is queued; run() repeats it until stopped
    snapshot()   any thread reads hit rates at multiples of a budget, and the whole curve, of about the last hour

Counts decay with a half-life of half an hour. A sample's threshold only falls, so estimators take turns: each learns
for an hour while the one before it answers, counts from the second half of that on, answers for an hour, and goes. The
curve is LRU's; it does not model pins, deadlines and declined writes, so a store's own hit rate may be lower.

A secret salt and the namespace turn each key into a mark, so no client can choose which of its blocks are sampled.
Clock and salt are handed in; the caller owns the thread. Memory is at most 4 MiB. If the worker takes more than a
hundredth of the process's work, it samples fewer names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import expm1, inf, isinf, log
from typing import Any

import numpy as np

from kvstore.insight.lru_curve import BINS_PER_DOUBLING, COUNTED_REQUESTS, MARKS, NAMES, TOKENS, LruCurve, Marks
from kvstore.status.tree import WhatIfPoint, WhatIfStatus
from tiering.clock import Clock

KEY_BYTES = 32
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, inf)
"""Multiples of the budget in a snapshot."""
UNBOUNDED = "infinite"
"""The last of them by name."""
HALF_LIFE_SECONDS = 1800.0
TURN_SECONDS = 3600.0
FADE_EVERY_SECONDS = 10.0
MOST_QUEUED_BLOCKS = 1 << 15
"""Blocks of queued look-ups, 32 bytes each; a longer look-up is dropped. One step works through all of them, some
milliseconds, during which other threads run as usual. Each array operation releases the interpreter lock and takes it
again, at the cost of the thread that serves: a few long arrays delay look-ups less than many short ones."""
MOST_QUEUED_LOOKUPS = 1 << 11
MANY_LOOKUPS, COUNTED_REQUESTS_OF_MANY = 32, 4 * COUNTED_REQUESTS
"""So many look-ups of a kind in one step, above 160 a second, are enough to count references in fewer of them."""
WAIT_SECONDS, LEAST_WAIT_SECONDS, FILLED = 0.2, 0.01, 0.75
"""From one step to the next. The longer the wait, the fewer steps take the interpreter lock from the thread that
serves. It is shorter if so much of the queue fills sooner: above 123,000 blocks a second. At 3.2 million some are
dropped."""
FEW_SAMPLED, FEW_NAMES = 2_000, 3_072
"""Below so many sampled references, or names, the snapshot's words warn. With 1,024 names the worst of ten samples of a
public trace was off by 0.018 on average over sizes, with 256 by 0.035."""
FIRST_SAMPLE = 4
"""An estimator starts with this multiple of its predecessor's sampled share."""
POINTS_PER_DOUBLING = 4
WORK_SHARE = 0.01
"""Of the process's work; if the worker takes more, it samples fewer names: half of them, or less."""
FREE_WORK = 0.001
"""Share of a core that the worker may always take."""
WEIGHED_EVERY_SECONDS = 5.0
WEIGHED_AFTER_WORK_SECONDS = WORK_SHARE * WEIGHED_EVERY_SECONDS
"""CPU seconds of the worker, after which its work is weighed at once: as much as one busy core allows it until then."""
FEWEST_NAMES = 256

_ODD = 0x9E3779B97F4A7C15
_ODDS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


_Kind = tuple[int, int, int]
"""Of look-ups that are worked through together: namespace, bytes and tokens of a block."""
_Waiting = tuple[bytes, _Kind]
"""A look-up that waits: its keys, joined, and its kind."""


class WhatIf:
    """Curves of the last hour. Thread-safe; one thread at a time steps."""

    def __init__(self, clock: Clock, salt: int, names: int = NAMES) -> None:
        """salt: 64 bits that no client knows. names: that are sampled at a time by each of two estimators."""
        self._clock = clock
        self._salt = salt
        self._names = self._names_at_next_turn = self._most_names = names
        self._kinds: dict[int, _Kind] = {}  # of namespaces that were opened
        self._queue: list[_Waiting] = []
        self._queue_lock = threading.Lock()  # held for an addition
        self._queued_blocks = 0
        self._taken_lookups = self._dropped_lookups = self._dropped_blocks = 0
        self._lock = threading.Lock()  # guards the estimators; held for a batch
        now = clock.monotonic_seconds()
        self._turns = [_Turn(now, LruCurve(names), counts=True)]
        self._faded_at = now

    def opened(self, namespace: int, block_bytes: int, block_tokens: int) -> None:
        """A namespace may be looked up in from now on. block_bytes: that a block of it takes in a tier."""
        self._kinds[namespace] = namespace, block_bytes, block_tokens

    def looked_up(self, namespace: int, keys: Sequence[bytes]) -> bool:
        """A look-up of these keys, `KEY_BYTES` each, the first block's first, in a namespace that was opened; `False`
        and uncounted in another one. Never waits for work: where the queue is full, or the look-up longer than it,
        returns `False` and counts it as dropped."""
        kind, count = self._kinds.get(namespace), len(keys)
        if kind is None or not count:
            return kind is not None
        # In the thread that serves the look-up: each line costs it some tenths of a microsecond, for code and data that
        # are in no cache. Each key by itself would keep its memory until the next step, and those of the next look-up
        # would be made in memory that is in no cache either.
        with self._queue_lock:
            if self._queued_blocks + count <= MOST_QUEUED_BLOCKS and len(self._queue) < MOST_QUEUED_LOOKUPS:
                self._queued_blocks += count
                self._queue.append((b"".join(keys), kind))
                return True
            self._dropped_lookups += 1
            self._dropped_blocks += count
        return False

    def step(self) -> int:
        """Work through what waits; returns how many blocks that was. 0: nothing waits."""
        with self._queue_lock:
            batch, self._queue = self._queue, []
            blocks, self._queued_blocks = self._queued_blocks, 0
            self._taken_lookups += len(batch)
        with self._lock:
            self._pass_time()
            alike: dict[_Kind, list[bytes]] = {}  # in the order in which each kind came first
            for keys, kind in batch:
                alike.setdefault(kind, []).append(keys)
            for (namespace, block_bytes, block_tokens), joined in alike.items():
                lengths = [len(keys) // KEY_BYTES for keys in joined]
                marks = marks_of(b"".join(joined), self._salt, namespace)
                one_in = COUNTED_REQUESTS if len(lengths) < MANY_LOOKUPS else COUNTED_REQUESTS_OF_MANY
                for turn in self._turns:
                    turn.curve.requests(marks, lengths, float(block_bytes), float(block_tokens), one_in)
        return blocks

    def run(self, stop: threading.Event, worked: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)) -> None:
        """Step until `stop` is set; what is queued then is dropped. worked: CPU seconds of this thread and of the
        process."""
        weighed_at, (mine, everybodys) = self._clock.monotonic_seconds(), worked()
        pause, dropped = WAIT_SECONDS, 0
        while not stop.is_set():
            worked_through = self.step()
            just_dropped = self._dropped_blocks - dropped
            dropped += just_dropped
            came = max(1, worked_through + just_dropped)
            pause *= FILLED * MOST_QUEUED_BLOCKS / came  # by then so much is queued, at that rate
            pause = min(WAIT_SECONDS, max(LEAST_WAIT_SECONDS, pause))
            stop.wait(pause)
            now = self._clock.monotonic_seconds()
            mine_now, everybodys_now = worked()
            if now - weighed_at >= WEIGHED_EVERY_SECONDS or mine_now - mine >= WEIGHED_AFTER_WORK_SECONDS:
                self.weigh(mine_now - mine, everybodys_now - everybodys, now - weighed_at)
                weighed_at, mine, everybodys = now, mine_now, everybodys_now

    def weigh(self, mine: float, everybodys: float, seconds: float) -> None:
        """Sample fewer names in proportion if sampling took too much of the process's work; if it took little, more
        from the next estimator on. mine, everybodys: CPU seconds within so many seconds."""
        allowed = max(WORK_SHARE * everybodys, FREE_WORK * seconds)
        with self._lock:
            if mine > allowed:
                fewer = min(self._names // 2, int(self._names * allowed / mine))
                self._names = self._names_at_next_turn = max(min(FEWEST_NAMES, self._names), fewer)
                for turn in self._turns:
                    turn.curve.narrow(self._names)
            elif mine < allowed / 4:
                self._names_at_next_turn = min(self._most_names, 2 * self._names)

    def snapshot(self, budget_bytes: int) -> WhatIfStatus:
        """Rates at `SCALES` of the budget, and the whole curve."""
        with self._queue_lock:
            dropped = self._dropped_lookups
            lookups = self._taken_lookups + len(self._queue) + dropped
        with self._lock:
            self._pass_time()
            turn = self._turns[0]
            curve, edges = turn.curve, _thinned(turn.curve.edges())
            rates = curve.hit_rates([inf if isinf(scale) else scale * budget_bytes for scale in SCALES], TOKENS)
            points = [
                WhatIfPoint(None, None, rate) if isinf(scale) else WhatIfPoint(round(scale * budget_bytes), scale, rate)
                for scale, rate in zip(SCALES, rates, strict=True)
            ]
            whole = [
                WhatIfPoint(round(size), size / budget_bytes if budget_bytes else inf, rate)
                for size, rate in zip(edges, curve.hit_rates(edges, TOKENS), strict=True)
            ]
            seconds, asked = self._clock.monotonic_seconds() - turn.began_at, curve.asked(TOKENS)
            return WhatIfStatus(
                budget_bytes,
                points,
                whole,
                round(asked),
                asked / faded_seconds(seconds),
                curve.sample_ratio,
                curve.names,
                seconds,
                lookups,
                dropped,
                _words(curve, dropped / lookups if lookups else 0.0),
                {
                    UNBOUNDED if isinf(scale) else f"{scale:g}": round(rate * asked)
                    for scale, rate in zip(SCALES, rates, strict=True)
                },
            )

    def check(self) -> None:
        """Verify the queue's bounds and each estimator's invariants."""
        with self._queue_lock:
            blocks = sum(len(keys) for keys, _ in self._queue) // KEY_BYTES
            assert self._queued_blocks == blocks <= MOST_QUEUED_BLOCKS and len(self._queue) <= MOST_QUEUED_LOOKUPS
        with self._lock:
            assert 1 <= len(self._turns) <= 2
            for turn in self._turns:
                turn.curve.check()

    # Inside ---------------------------------------------------------------------------------------------------------

    def _pass_time(self) -> None:
        now = self._clock.monotonic_seconds()
        if now - self._faded_at >= FADE_EVERY_SECONDS:
            factor = 0.5 ** ((now - self._faded_at) / HALF_LIFE_SECONDS)
            self._faded_at = now
            for turn in self._turns:
                turn.curve.fade(factor)
        newest = self._turns[-1]
        if not newest.counts and now - newest.began_at >= TURN_SECONDS / 2:
            newest.curve.start_counting()
            newest.counts = True
        if now - newest.began_at < TURN_SECONDS:
            return
        # The next estimator starts near the threshold that it would soon reach, rather than with all names.
        threshold = min(MARKS, FIRST_SAMPLE * newest.curve.threshold)
        self._names = self._names_at_next_turn
        self._turns = [newest, _Turn(now, LruCurve(self._names, threshold), counts=False)]


@dataclass(slots=True)
class _Turn:
    began_at: float
    curve: LruCurve
    counts: bool  # off at first, when nearly everything looks new


def marks_of(keys: bytes, salt: int, namespace: int) -> Marks:
    """keys: `KEY_BYTES` each. Uses the first 8 bytes of each, which are hash bits."""
    assert len(keys) % KEY_BYTES == 0, "keys are 32 bytes"
    words = np.frombuffer(keys, "<u8")[:: KEY_BYTES // 8]
    (salt,) = mixed(np.array([namespace], np.uint64), salt).tolist()
    return mixed(words, salt)


def mixed(words: Any, salt: int) -> Marks:
    """Numbers to marks: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""
    marks: Marks = words ^ np.uint64(salt)
    marks += np.uint64(_ODD)
    marks ^= marks >> _SHIFTS[0]
    marks *= _ODDS[0]
    marks ^= marks >> _SHIFTS[1]
    marks *= _ODDS[1]
    marks ^= marks >> _SHIFTS[2]
    return marks


def faded_seconds(seconds: float) -> float:
    """Effective length of so many seconds of counting, with the decay that counts have."""
    mean_life = HALF_LIFE_SECONDS / log(2)
    return max(1.0, mean_life * -expm1(-seconds / mean_life))


def _thinned(edges: Sequence[float]) -> list[float]:
    step = BINS_PER_DOUBLING // POINTS_PER_DOUBLING
    return [*edges[:-1:step], *edges[-1:]]


def _words(curve: LruCurve, dropped: float) -> str:
    sampled = curve.sampled_references
    if not sampled:
        return "nothing was looked up yet"
    words = f"estimated for LRU from {curve.names:,} names, {100 * curve.sample_ratio:.3g} % of all"
    if curve.sample_ratio < 1 and curve.names < FEW_NAMES:
        words += "; of so few names only, so it may be off by several points"
    elif sampled < FEW_SAMPLED:
        words += f"; of {sampled:,} sampled references only, so it may be off by several points"
    else:
        words += "; on two public traces off by less than 0.01 on average over sizes"
    if dropped:
        words += f"; {100 * dropped:.2g} % of all look-ups came too fast or were too long, and are left out"
    return words
