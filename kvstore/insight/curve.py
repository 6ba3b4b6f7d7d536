"""LRU's hit rate at every size at once, estimated in one pass from a few thousand sampled names; and the same of a
sidecar's live look-ups, without delaying them.

    request   each block is judged against the requests before it    > the blocks are used, the deepest first
    sample    a name is sampled if its mark is below a threshold; when names exceed the room, the threshold falls
    hot       names with a large share of all references are always followed, and counted apart
    ceiling   first references are counted over a fourth of all names, in a table of flags; the sample says which
              share of the others a given size finds

A block's distance is the weight of everything used since its own last use, itself included: a store finds it exactly if
it has room for that much. An ancestor is used after its descendants, so it is never further away than they are, and
what is found is always a whole prefix: the same blocks that leaf-first LRU finds. It does not model pins, deadlines and
declined writes, so a store's own hit rate may be lower.

Sampling by a hash of the name, and the falling threshold: C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad, "Efficient
MRC construction with SHARDS", FAST 2015. Hot names and the ceiling are this file's additions: one system prompt is 4 %
of all references of a chat, so whether it is sampled bends every rate; and the share of first references among 4,096
names is off by 0.01 of all references. Distinct names by a table of flags: K.-Y. Whang, B. Vander-Zanden, H. Taylor, "A
linear-time probabilistic counting algorithm for database applications", ACM TODS 15 (2), 1990.

Clock and salt are handed in; the caller owns the thread. Marks are uniform over 64 bits, made with a secret salt so
that clients who choose keys cannot choose marks. Memory is bounded: two estimators and a full queue take at most 4 MiB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import expm1, floor, inf, isinf, log, log2
from typing import Any

import numpy as np

from kvstore.status.tree import WhatIfPoint, WhatIfStatus
from tiering.clock import Clock

Marks = np.ndarray[Any, np.dtype[np.uint64]]
"""One mark for each block of a request, first block first."""

NAMES = 4096
"""Names sampled at a time: the error is below 0.01 on average on both public traces (docs/policies.md)."""
LEAST_NAMES = 16
MARKS = 1 << 64
"""Number of possible marks; threshold / MARKS is the sampled share."""
BINS_PER_DOUBLING = 32
BINS = 64 * BINS_PER_DOUBLING
"""Bins of distances; the last one ends at 2**64."""
PART, NEW_OF_NAMES = 512, 32
"""Sampled references that are judged at a time, or one request's: each row of them is compared with each. Fewer where
more than one in `NEW_OF_NAMES` names are new: the threshold falls only between parts, and the curve errs more if by
much."""

HOT_SHARE = 0.002
"""A name with this share of all references becomes hot; it stays hot until it has less than half of that."""
HOT_NAMES, HOT_ONE_IN = 256, 64
"""Hot names at most; they are followed at least in one of so many runs."""
NOTED = 1 << 13
"""References noted to find the hot names, at least half as many once there are so many. Where more come, every second
one is dropped, and from then on half as many of those that come are noted."""
LEAST_NOTED = 8
"""A hot name has been noted so often."""
LOOKED_AT_REQUESTS = 256
"""A run of requests: hot names are looked for after each."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Multiples of it are spread evenly, so blocks of alternating requests are noted equally often."""

FLAGS = 1 << 19
"""Size of the table of seen names."""
FLAGGED_NAMES = 4
"""One name in this many has a flag, so the table suffices for 3.3 million names."""
_FLAGGED_BITS = np.uint64(2)
FULLEST = 0.8
"""With a larger share of flags set, the table is ignored and the sample used."""

_COLD = 0  # bins of names that are not hot
_ASKED, _ASKED_COLD, _FIRST, _SAMPLED = range(4)  # what is counted


class LruCurve:
    """Not thread-safe."""

    def __init__(self, names: int = NAMES, threshold: int = MARKS) -> None:
        """names: sampled at a time, `LEAST_NAMES` or more; about 140 bytes each, and 0.7 MiB. threshold: where to
        begin, if it is known that sampling all names would soon be too many."""
        assert names >= LEAST_NAMES and 0 < threshold <= MARKS
        self.threshold = threshold
        """Names with marks below it are sampled. It only falls."""
        self.sampled_references = 0
        self._most = names
        # Names that are followed and were used, in the order of their last use: their marks, when that was, their size,
        # and whether they are hot. Below them, the same times by name.
        self._marks, self._times = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._sizes, self._is_hot = np.zeros(0), np.zeros(0, bool)
        self._used_at: dict[int, int] = {}
        self._hot = np.zeros(0, np.uint64)  # in order
        self._noted, self._one_in = np.zeros(0, np.uint64), 1
        self._hot_one_in = 1  # run of requests whose hot names are followed
        self._now = self._requests = self._blocks = 0
        self._seen = _SeenNames()
        # All of these decay, and are in tokens: asked for; of these, cold names; first references, by the
        # table; sampled references of cold names. And by bin: references that were used before, cold ones and hot ones.
        self._totals, self._bins = np.zeros(4), np.zeros((2, BINS + 1))

    @property
    def names(self) -> int:
        """Names followed at present, hot ones included."""
        return len(self._marks)

    @property
    def hot_names(self) -> int:
        return len(self._hot)

    @property
    def sample_ratio(self) -> float:
        """The share of names that are sampled, not counting hot ones."""
        return self.threshold / MARKS

    @property
    def asked_tokens(self) -> float:
        return float(self._totals[_ASKED])

    def requests(self, marks: Marks, lengths: Sequence[int], size: float, tokens: float) -> None:
        """Take in some requests, in order. marks: of all their blocks, request after request. lengths: blocks of each
        request. size, tokens: of each block, constant over all requests that have it. size: bytes, or 1 where sizes are
        blocks; >= 1."""
        assert len(marks) == sum(lengths) and size >= 1 and tokens >= 0
        first_ones, before = self._seen.first_ones(marks), self._requests
        self._requests += len(lengths)
        self._note(marks)
        if self._requests // LOOKED_AT_REQUESTS > before // LOOKED_AT_REQUESTS:
            self._look_for_hot()
        is_hot, is_followed = _are_in(marks, self._hot), self._is_sampled(marks)
        if len(self._hot):
            runs = np.arange(before, self._requests) // LOOKED_AT_REQUESTS
            is_followed = np.where(is_hot, np.repeat(runs % self._hot_one_in == 0, lengths), is_followed)
        followed = np.flatnonzero(is_followed)
        numbers = np.searchsorted(np.cumsum(lengths), followed, "right")  # of their requests
        begin = 0
        while begin < len(followed):
            end = _whole_requests(numbers, begin, PART)
            names = marks[followed[begin:end]]
            used = np.fromiter(map(self._used_at.get, names.tolist(), repeat(-1)), np.int64, len(names))
            few_new = int(np.searchsorted(np.cumsum(used < 0), self._most // NEW_OF_NAMES, "right"))
            end = min(end, _whole_requests(numbers, begin, few_new))
            part = np.flatnonzero(self._is_sampled(names[: end - begin]) | is_hot[followed[begin:end]])
            at = followed[begin + part]
            self._take(marks[at], used[part], numbers[begin + part], is_hot[at], size, tokens)
            begin = end
        counts = np.array((len(marks), len(marks) - is_hot.sum(), first_ones))
        self._totals[:_SAMPLED] += counts * tokens

    def narrow(self, names: int) -> None:
        """From now on sample at most so many names, `LEAST_NAMES` or more: each sampled name costs time."""
        assert names >= LEAST_NAMES
        self._most = min(self._most, names)
        self._trim()

    def thin(self) -> None:
        """From now on follow hot names in half as many runs of `LOOKED_AT_REQUESTS` requests. All their references are
        counted; of their distances, each run is a sample."""
        self._hot_one_in = min(2 * self._hot_one_in, HOT_ONE_IN)

    def fade(self, factor: float) -> None:
        self._totals *= factor
        self._bins *= factor
        self._noted = self._noted[round(len(self._noted) * (1 - factor)) :]
        if len(self._noted) < NOTED // 4:
            self._one_in = max(1, self._one_in // 2)

    def start_counting(self) -> None:
        """Reset all counts. Names and their order stay."""
        self._totals[:] = 0.0
        self._bins[:] = 0.0
        self.sampled_references = 0

    def hit_rates(self, sizes: Sequence[float]) -> list[float]:
        """For each size, the share of asked tokens that a store of that size would have found; size `inf` gives
        the ceiling. 0 if nothing was asked for. Linear between two edges of a bin."""
        asked, asked_cold = self._totals[:_FIRST]
        if not asked:
            return [0.0] * len(sizes)
        hits = np.zeros(BINS + 1)
        for bins, found in zip(self._bins, (self._found_again(), asked - asked_cold), strict=True):
            if total := bins.sum():
                hits += np.cumsum(bins) * (found / total)
        hits = np.minimum(hits / asked, 1.0)
        return [_between(hits, size) for size in sizes]

    def edges(self) -> list[float]:
        """Bin edges from the last one without hits to the first with all: `hit_rates` is not interpolated there."""
        counted = np.flatnonzero(self._bins.sum(0))
        if not len(counted):
            return []
        return [_edge(at) for at in range(max(0, int(counted[0]) - 1), int(counted[-1]) + 1)]

    def check(self) -> None:
        """Verify the invariants that hold between two requests."""
        assert dict(zip(self._marks.tolist(), self._times.tolist(), strict=True)) == self._used_at
        assert len(self._used_at) == len(self._marks) == len(self._sizes) == len(self._is_hot)
        assert (np.diff(self._times) > 0).all() and self._times.max(initial=-1) < self._now
        assert (self._is_hot == _are_in(self._marks, self._hot)).all() and self.hot_names <= HOT_NAMES
        cold = self._marks[~self._is_hot]
        assert self._is_sampled(cold).all() and len(cold) <= self._most and len(self._noted) <= NOTED

    # Inside ---------------------------------------------------------------------------------------------------------

    def _is_sampled(self, marks: Marks) -> Any:
        return marks <= np.uint64(self.threshold - 1)

    def _found_again(self) -> float:
        """How much of what was asked for, hot names apart, was asked for before. Taken from the table of flags, or from
        the sample if that is all names or the table is full."""
        asked, first, sampled = (float(one) for one in self._totals[_ASKED_COLD:])
        if self.threshold < MARKS and not self._seen.is_full:
            return max(0.0, asked - first)
        return float(self._bins[_COLD].sum()) / sampled * asked if sampled else 0.0

    def _take(self, marks: Marks, before: Any, numbers: Any, is_hot: Any, size: float, tokens: float) -> None:
        """Judge the followed names of some requests, then use them. before: when they were used, or -1. numbers: of
        their requests."""
        first, last = (np.searchsorted(numbers, numbers, side) for side in ("left", "right"))
        used_at = self._now + first + last - 1 - np.arange(len(marks))  # of a request, the deepest first
        self._used_at.update(zip(marks.tolist(), used_at.tolist(), strict=True))
        by_name = np.argsort(marks, kind="stable")
        are_same = marks[by_name[1:]] == marks[by_name[:-1]]
        sooner = by_name[:-1][are_same]
        before[by_name[1:][are_same]] = used_at[sooner]
        self._judge(before, used_at, numbers, is_hot, size, tokens)
        stays = np.ones(len(self._marks), bool)
        stays[np.searchsorted(self._times, before[(before >= 0) & (before < self._now)])] = False
        is_last = np.ones(len(marks), bool)
        is_last[sooner] = False
        new = np.flatnonzero(is_last)
        new = new[np.argsort(used_at[new])]
        self._marks = np.append(self._marks[stays], marks[new])
        self._times = np.append(self._times[stays], used_at[new])
        self._sizes = np.append(self._sizes[stays], np.full(len(new), size))
        self._is_hot = np.append(self._is_hot[stays], is_hot[new])
        self._now += len(marks)
        self._trim()

    def _judge(self, before: Any, used_at: Any, numbers: Any, is_hot: Any, size: float, tokens: float) -> None:
        """Count references, and the distance of each whose name was used before: the weight of the names that were used
        since, last before this part or first within it, by an earlier request."""
        scale = MARKS / self.threshold  # names that one sampled name stands for
        later = np.append(np.cumsum((self._sizes * np.where(self._is_hot, 1.0, scale))[::-1])[::-1], 0.0)
        again = np.flatnonzero(before >= 0)
        since = before[again]
        distances = later[np.searchsorted(self._times, since, "right")] + size
        if len(again) and numbers[0] < numbers[-1]:
            # Of references in a row, where names are that were used in a row, no other name was used between those.
            weights = np.where(is_hot, size, size * scale)
            goes_on = (np.diff(numbers[again]) == 0) & (np.diff(since) == -1) & (since[1:] != self._now - 1)
            begins = np.flatnonzero(np.append(True, ~goes_on))
            lengths, first = np.diff(np.append(begins, len(again))), again[begins][:, None]
            last = np.maximum(before - self._now, -(1 << 30))
            number, used, last = (one.astype(np.int32) for one in (numbers, used_at - self._now, last))
            is_between = number < number[first]
            is_between &= last < last[first]
            is_between &= used > last[first]
            distances += np.repeat(is_between.astype(np.float32) @ weights.astype(np.float32), lengths)
            sooner = np.cumsum(weights[again]) - weights[again]
            distances += np.where(since >= self._now, sooner - np.repeat(sooner[begins], lengths), 0.0)
        bins = np.minimum(np.ceil(BINS_PER_DOUBLING * np.log2(distances)), BINS).astype(np.intp)
        cold = len(before) - int(is_hot.sum())
        self.sampled_references += cold
        self._totals[_SAMPLED] += cold * scale * tokens
        np.add.at(self._bins, (is_hot[again].astype(np.intp), bins), np.where(is_hot[again], tokens, scale * tokens))

    def _note(self, marks: Marks) -> None:
        noted = np.append(self._noted, marks[_spread(self._blocks, len(marks), self._one_in)])
        while len(noted) > NOTED:
            noted = noted[_spread(0, len(noted), 2)]
            self._one_in *= 2
        self._noted = noted
        self._blocks += len(marks)

    def _look_for_hot(self) -> None:
        names, counts = np.unique(self._noted, return_counts=True)
        least = max(LEAST_NOTED, HOT_SHARE * len(self._noted))
        often = np.flatnonzero(counts >= np.where(_are_in(names, self._hot), least / 2, least))
        often = np.sort(often[np.argsort(-counts[often], kind="stable")][:HOT_NAMES])
        self._hot = names[often]
        self._is_hot = _are_in(self._marks, self._hot)
        self._follow_only(self._is_sampled(self._marks) | self._is_hot)
        self._trim()

    def _trim(self) -> None:
        """Lower the threshold until the sample has its size."""
        if len(self._marks) <= self._most:
            return
        cold = self._marks[~self._is_hot]
        if len(cold) > self._most:
            self.threshold = int(np.partition(cold, self._most)[self._most])
            self._follow_only(self._is_sampled(self._marks) | self._is_hot)

    def _follow_only(self, these: Any) -> None:
        if these.all():
            return
        for name in self._marks[~these].tolist():
            del self._used_at[name]
        self._marks, self._times = self._marks[these], self._times[these]
        self._sizes, self._is_hot = self._sizes[these], self._is_hot[these]


class _SeenNames:
    """A flag for every fourth name that was seen. Names may share a flag; the count corrects for that."""

    def __init__(self) -> None:
        self._flags = np.zeros(FLAGS, bool)
        self._set = 0

    @property
    def is_full(self) -> bool:
        return self._set > FULLEST * FLAGS

    def first_ones(self, marks: Marks) -> float:
        """Count the names that were not seen before, and mark them as seen."""
        if self.is_full:
            return 0.0
        places = (marks[(marks & np.uint64(FLAGGED_NAMES - 1)) == 0] >> _FLAGGED_BITS) & np.uint64(FLAGS - 1)
        new = np.unique(places[~self._flags[places]])
        self._flags[new] = True
        unset = 1 - (self._set + len(new) / 2) / FLAGS
        self._set += len(new)
        return FLAGGED_NAMES * len(new) / unset


def _are_in(marks: Marks, table: Marks) -> Any:
    """table: in order."""
    if not len(table):
        return np.zeros(len(marks), bool)
    return table[np.minimum(np.searchsorted(table, marks), len(table) - 1)] == marks


def _whole_requests(numbers: Any, begin: int, most: int) -> int:
    """Where to end after at most so many references of whole requests, or after one request. numbers: of them."""
    if begin + most >= len(numbers):
        return len(numbers)
    last = int(np.searchsorted(numbers, numbers[begin + most]))
    return last if last > begin else int(np.searchsorted(numbers, numbers[begin], "right"))


def _spread(first: int, count: int, one_in: int) -> Any:
    """Which of so many to take, to take one in `one_in` of all, evenly. first: how many came before these."""
    numbers = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    return numbers * _GOLDEN <= np.uint64((MARKS - 1) // one_in)


def _edge(bin_: int) -> float:
    return float(2 ** (bin_ / BINS_PER_DOUBLING))


def _between(hits: Any, size: float) -> float:
    if size < 1:
        return 0.0
    if size == inf or (at := BINS_PER_DOUBLING * log2(size)) >= BINS:
        return float(hits[BINS])
    below = floor(at)
    part = (size - _edge(below)) / (_edge(below + 1) - _edge(below))
    return float(hits[below] + part * (hits[below + 1] - hits[below]))


# A sidecar's look-ups ------------------------------------------------------------------------------------------------

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
    """Curves of about the last hour. Thread-safe; one thread at a time steps.

        looked_up()  puts a look-up's keys into a bounded queue; if that is full, drops and counts them
        step()       the worker's thread feeds the estimators all that is queued; run() repeats it until stopped
        snapshot()   any thread reads hit rates at multiples of a budget, and the whole curve

    Counts decay with a half-life of half an hour. A sample's threshold only falls, so estimators take turns: each
    learns for an hour while the one before it answers, counts from the second half of that on, answers for an hour, and
    goes. If the worker takes more than a hundredth of the process's work, it samples fewer names.
    """

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
                words = np.frombuffer(b"".join(joined), "<u8")[:: KEY_BYTES // 8]  # hash bits
                marks = marks_of(words, self._salt, namespace)
                for turn in self._turns:
                    turn.curve.requests(marks, lengths, float(block_bytes), float(block_tokens))
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
        """Sample fewer names in proportion if sampling took too much of the process's work, and where they are few
        already, follow hot ones less often; if it took little, sample more from the next estimator on. mine,
        everybodys: CPU seconds within so many seconds."""
        allowed = max(WORK_SHARE * everybodys, FREE_WORK * seconds)
        with self._lock:
            if mine > allowed:
                is_fewest = self._names <= FEWEST_NAMES
                fewer = min(self._names // 2, int(self._names * allowed / mine))
                self._names = self._names_at_next_turn = max(min(FEWEST_NAMES, self._names), fewer)
                for turn in self._turns:
                    if is_fewest:
                        turn.curve.thin()
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
            rates = curve.hit_rates([inf if isinf(scale) else scale * budget_bytes for scale in SCALES])
            points = [
                WhatIfPoint(None, None, rate) if isinf(scale) else WhatIfPoint(round(scale * budget_bytes), scale, rate)
                for scale, rate in zip(SCALES, rates, strict=True)
            ]
            whole = [
                WhatIfPoint(round(size), size / budget_bytes if budget_bytes else inf, rate)
                for size, rate in zip(edges, curve.hit_rates(edges), strict=True)
            ]
            seconds, asked = self._clock.monotonic_seconds() - turn.began_at, curve.asked_tokens
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


def marks_of(words: Any, salt: int, namespace: int = 0) -> Marks:
    """One mark for each of these 64-bit words, of keys that stand for one namespace's blocks."""
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
