"""LRU's hit rate at every size at once, estimated in one pass from a few thousand sampled names.

    request   each block is judged against the requests before it    > the blocks are used, the deepest first
    sample    a name is sampled if its mark is below a threshold; when names exceed the room, the threshold falls
    hot       names with a large share of all references are always followed, and counted apart
    ceiling   first references are counted over a fourth of all names, in a table of flags; the sample says which
              share of the others a given size finds

A block's distance is the weight of everything used since its own last use, itself included: a store finds it exactly if
it has room for that much. An ancestor is used after its descendants, so it is never further away than they are, and
what is found is always a whole prefix: the same blocks that leaf-first LRU finds.

Sampling by a hash of the name, and the falling threshold: C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad, "Efficient
MRC construction with SHARDS", FAST 2015. Hot names and the ceiling are this file's additions: one system prompt is 4 %
of all references of a chat, so whether it is sampled bends every rate; and the share of first references among 4,096
names is off by 0.01 of all references. Distinct names by a table of flags: K.-Y. Whang, B. Vander-Zanden, H. Taylor, "A
linear-time probabilistic counting algorithm for database applications", ACM TODS 15 (2), 1990.

Pure: no clock, no randomness, no thread. Marks are uniform over 64 bits; the caller makes them with a secret salt so
that clients who choose keys cannot choose marks. Memory is bounded by the number of names.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil, floor, inf, log2
from typing import Any

import numpy as np

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

HOT_SHARE = 0.002
"""A name with this share of all references becomes hot; it stays hot until it has less than half of that."""
HOT_NAMES = 256
HOT_DEPTH = 256
"""Only blocks among the first so many of a request can be hot."""
CANDIDATES = 2048
"""Names whose references are counted to find the hot ones. A fourth of them goes at a time: making room for one after
the other takes longer than counting."""
COUNTED_REQUESTS = 16
"""References are counted in one request of this many, which stands for all."""
HOT_ROOM = 64 * HOT_NAMES
"""More times than `names` need: each request uses up as many as it has hot names, until times are numbered anew."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Multiples of it are spread evenly, so requests of alternating kinds are counted equally often."""
LEAST_COUNTED = 4
LOOKED_AT_REQUESTS = 256
"""Hot names are checked for having cooled down after this many requests."""
FLAGS = 1 << 19
"""Size of the table of seen names."""
FLAGGED_NAMES = 4
"""One name in this many has a flag, so the table suffices for 3.3 million names."""
_FLAGGED_BITS = np.uint64(2)
FULLEST = 0.8
"""With a larger share of flags set, the table is ignored and the sample used."""

TOKENS, SIZE = MEASURES = (0, 1)
"""Hits are counted in tokens and in units of the sizes."""


class LruCurve:
    """Not thread-safe."""

    def __init__(self, names: int = NAMES, threshold: int = MARKS) -> None:
        """names: sampled at a time, `LEAST_NAMES` or more; about 170 bytes each, and 0.9 MiB. threshold: where to
        begin, if it is known that sampling all names would soon be too many."""
        assert names >= LEAST_NAMES and 0 < threshold <= MARKS
        self.threshold = threshold
        """Names with marks below it are sampled. It only falls."""
        self.count = 0
        """Requests so far."""
        self.asked_blocks = 0
        self.sampled_references = 0
        self._most = names
        self._cold: dict[int, _Segment] = {}  # sampled names, by name
        self._highest: list[int] = []  # a heap of the same names, negated; some are stale
        self._hot: dict[int, _Segment] = {}  # hot names, by name
        self._segments: dict[int, _Segment] = {}  # the same, by their first names
        self._hot_weight = 0.0
        self._counts: dict[int, float] = {}  # references of candidates and hot names, in counted requests
        self._weights = _Weights(4 * names + HOT_ROOM)
        self._seen = _SeenNames()
        self._now = 0
        self._blocks = 0.0  # asked for, decayed
        # Each by measure, and all decay: tokens or sizes asked for; of these, cold names; first references, by the
        # table; sampled references of cold names, in all and by distance; references of hot names by distance.
        self._asked, self._asked_cold, self._first, self._sampled = (array("d", (0.0, 0.0)) for _ in range(4))
        self._bins, self._hot_bins = ([array("d", bytes(8 * (BINS + 1))) for _ in MEASURES] for _ in range(2))

    @property
    def names(self) -> int:
        """Names followed at present, hot ones included."""
        return len(self._cold) + len(self._hot)

    @property
    def sample_ratio(self) -> float:
        """The share of names that are sampled, not counting hot ones."""
        return self.threshold / MARKS

    def asked(self, measure: int = SIZE) -> float:
        return self._asked[measure]

    def requests(
        self, marks: Marks, lengths: Sequence[int], size: float, tokens: float, one_in: int = COUNTED_REQUESTS
    ) -> None:
        """Take in some requests, in order. marks: of all their blocks, request after request. lengths: blocks of each
        request. size, tokens: of each block, constant over all requests that have it. size: bytes, or 1 where sizes are
        blocks; >= 1. one_in: references are counted in one of so many requests; fewer suffice where many come."""
        assert len(marks) == sum(lengths) and size >= 1 and tokens >= 0
        first_ones = self._seen.first_ones(marks)
        passing = self._passing(marks)
        threshold = self.threshold
        nonempty = np.array([length for length in lengths if length], np.intp)
        ends = np.cumsum(nonempty)
        firsts = marks[ends - nonempty]
        passes = np.bincount(np.searchsorted(ends, passing, "right"), minlength=len(nonempty))
        is_counted = self._is_counted(len(nonempty), one_in)
        is_looked_at = (passes > 0) | is_counted
        if self._segments:  # passes over requests that begin with what becomes hot below
            is_looked_at |= np.isin(firsts, np.fromiter(self._segments, np.uint64))
        if self.count // LOOKED_AT_REQUESTS < (self.count + len(nonempty)) // LOOKED_AT_REQUESTS:
            self._cool_down()
        self.count += len(nonempty)
        self._blocks += len(marks)
        places: list[int] = passing.tolist()
        passing_names: list[int] = marks[passing].tolist()
        batch = _BatchCounts()
        at = hot_blocks = 0
        columns = (column[is_looked_at].tolist() for column in (ends - nonempty, nonempty, passes, is_counted, firsts))
        for start, length, passed, counts, first in zip(*columns, strict=True):
            names = marks[start : start + min(length, HOT_DEPTH)].tolist() if counts or first in self._segments else []
            hot, depth = self._hot_prefix(names)
            taken = passing_names[at : at + passed]
            if depth or self.threshold < threshold:  # it has fallen since
                of = zip(places[at : at + passed], taken, strict=True)
                taken = [name for place, name in of if place - start >= depth and name < self.threshold]
            at += passed
            hot_blocks += depth
            if hot and (counts or self.threshold == MARKS):
                self._judge_hot(hot, 1 if self.threshold == MARKS else one_in, batch)
            cold = self._cold_segments(taken)
            self._judge(cold, size, batch)
            if counts and (segment := self._count(names, depth, size, one_in / COUNTED_REQUESTS)) is not None:
                hot.append(segment)
                cold = self._cold_segments(taken)  # some of these names may be hot now
            self._use(hot, cold, size)
        self.asked_blocks += len(marks)
        for measure, amount in ((TOKENS, tokens), (SIZE, size)):
            self._first[measure] += first_ones * amount
            self._asked[measure] += len(marks) * amount
            self._asked_cold[measure] += (len(marks) - hot_blocks) * amount
            self._sampled[measure] += batch.sampled * amount
        for all_bins, found in ((self._bins, batch.cold_found), (self._hot_bins, batch.hot_found)):
            if found.rows:
                references = found.binned()
                for measure, amount in ((TOKENS, tokens), (SIZE, size)):
                    np.frombuffer(all_bins[measure])[:] += references * amount

    def narrow(self, names: int) -> None:
        """From now on sample at most so many names, `LEAST_NAMES` or more: each sampled name costs time."""
        assert names >= LEAST_NAMES
        self._most = min(self._most, names)
        while len(self._cold) > self._most:
            self._lower_threshold()

    def fade(self, factor: float) -> None:
        for column in self._counted():
            np.frombuffer(column)[:] *= factor
        self._blocks *= factor
        counts = {name: count * factor for name, count in self._counts.items()}
        self._counts = {name: count for name, count in counts.items() if count > 0.01 or name in self._hot}

    def start_counting(self) -> None:
        """Reset all counts. Names and their order stay."""
        for column in self._counted():
            np.frombuffer(column)[:] = 0.0
        self.sampled_references = 0

    def hit_rates(self, sizes: Sequence[float], measure: int = SIZE) -> list[float]:
        """For each size, the share of what was asked for that a store of that size would have found; size `inf` gives
        the ceiling. 0 if nothing was asked for. Linear between two edges of a bin."""
        if not self._asked[measure]:
            return [0.0] * len(sizes)
        cold, hot = (np.cumsum(np.frombuffer(bins[measure])) for bins in (self._bins, self._hot_bins))
        found = self._found_again(measure)
        if cold[-1] > 0:
            cold = cold * (found / cold[-1])
        if hot[-1] > 0:
            hot = hot * ((self._asked[measure] - self._asked_cold[measure]) / hot[-1])
        hits = np.minimum((cold + hot) / self._asked[measure], 1.0)
        return [_between(hits, size) for size in sizes]

    def edges(self) -> list[float]:
        """Bin edges from the last one without hits to the first with all: `hit_rates` is not interpolated there."""
        counted = np.flatnonzero(np.frombuffer(self._bins[SIZE]) + np.frombuffer(self._hot_bins[SIZE]))
        if not len(counted):
            return []
        return [_edge(at) for at in range(max(0, int(counted[0]) - 1), int(counted[-1]) + 1)]

    def check(self) -> None:
        """Verify the invariants that hold between two requests."""
        assert len(self._cold) <= self._most and len(self._hot) <= HOT_NAMES and len(self._counts) <= CANDIDATES
        assert all(name < self.threshold for name in self._cold) and not self._cold.keys() & self._hot.keys()
        assert self._cold.keys() <= {-one for one in self._highest}
        assert len(self._highest) <= 2 * self._most + HOT_NAMES
        cold = {*self._cold.values()}
        assert self._cold == {name: one for one in cold for name in one.names}
        when = [at for one in (*cold, *self._segments.values()) for at in one.times]
        assert len(dict.fromkeys(when)) == len(when) and max(when, default=-1) < self._now <= self._weights.room
        assert self._hot == {name: one for one in self._segments.values() for name in one.names}
        assert all(first == one.names[0] for first, one in self._segments.items())
        assert abs(sum(one.weight for one in self._segments.values()) - self._hot_weight) <= 1e-9 * self._hot_weight
        self._weights.check(at for one in cold for at in one.times)

    # Inside ---------------------------------------------------------------------------------------------------------

    def _counted(self) -> Iterable[array[float]]:
        return (self._asked, self._asked_cold, self._first, self._sampled, *self._bins, *self._hot_bins)

    def _found_again(self, measure: int) -> float:
        """How much of what was asked for, hot names apart, was asked for before. Taken from the table of flags, or from
        the sample if that is all names or the table is full."""
        asked, sampled = self._asked_cold[measure], self._sampled[measure]
        again = float(np.frombuffer(self._bins[measure]).sum())
        if self.threshold < MARKS and not self._seen.is_full:
            return max(0.0, asked - self._first[measure])
        return again / sampled * asked if sampled else 0.0

    def _hot_prefix(self, head: list[int]) -> tuple[list[_Segment], int]:
        hot: list[_Segment] = []
        depth = 0
        while depth < len(head):
            segment = self._hot.get(head[depth])
            if segment is None or segment.names[0] != head[depth]:
                break
            hot.append(segment)
            used = segment.names_in_common(head[depth : depth + len(segment.names)])
            depth += used
            if used < len(segment.names):  # from now on the rest has other times
                rest = segment.cut(used, self._hot)
                self._segments[rest.names[0]] = rest
                break
        return hot, depth

    def _judge_hot(self, hot: Sequence[_Segment], stands_for: float, batch: _BatchCounts) -> None:
        scale = MARKS / self.threshold
        for segment in hot:
            behind = self._weights.behind(segment.at) * scale + self._hot_behind(segment.at)
            batch.hot_found.add(behind + segment.size, stands_for, len(segment.names), segment.size)

    def _cold_segments(self, names: list[int]) -> list[_Segment]:
        if names and (segment := self._cold.get(names[0])) is not None and segment.names == names:
            return [segment]  # the usual case: what a request finds one request used before, all of it
        names = [name for name in dict.fromkeys(names) if name not in self._hot]
        segments: list[_Segment] = []
        at = 0
        while at < len(names):
            segment = self._cold.get(names[at])
            if segment is None:
                end = next((end for end in range(at, len(names)) if names[end] in self._cold), len(names))
                segments.append(_Segment(names[at:end]))
                at = end
                continue
            if segment.names[0] != names[at]:
                segment = segment.cut(segment.names.index(names[at]), self._cold)
            used = segment.names_in_common(names[at : at + len(segment.names)])
            if used < len(segment.names):
                segment.cut(used, self._cold)
            at += used
            above = segments[-1] if segments else segment
            if above.at == segment.at + len(segment.names) and above.size == segment.size:  # used together before
                above.names += segment.names
                above.at = segment.at
                self._cold.update(dict.fromkeys(segment.names, above))
            else:
                segments.append(segment)
        return segments

    def _leave(self, name: int) -> None:
        segment = self._cold[name]
        rest = segment.cut(segment.names.index(name), self._cold)
        del rest.names[0], self._cold[name]
        last = rest.at + len(rest.names)
        self._weights.put(last, last + 1, 0.0)

    def _judge(self, segments: Sequence[_Segment], size: float, batch: _BatchCounts) -> None:
        scale = MARKS / self.threshold  # names that one sampled name stands for
        names = sum([len(segment.names) for segment in segments])
        for segment in segments:
            if segment.at >= 0:
                first = segment.at + len(segment.names) - 1
                behind = self._weights.behind(first) * scale + self._hot_behind(first)
                batch.cold_found.add(behind + size, scale, len(segment.names), segment.size * scale)
        batch.sampled += names * scale
        self.sampled_references += names

    def _hot_behind(self, at: int) -> float:
        if not self._segments:
            return 0.0
        return self._hot_weight - sum(segment.weight for segment in self._segments.values() if segment.at <= at)

    def _use(self, hot: Sequence[_Segment], cold: Sequence[_Segment], size: float) -> None:
        more = sum([len(segment.names) for segment in (*hot, *cold)])
        if self._now + more >= self._weights.room:
            self._renumber(more)
        began_at = self._now
        for segment in reversed(cold):
            names = len(segment.names)
            if segment.at < 0:
                self._cold.update(dict.fromkeys(segment.names, segment))
                for name in segment.names:
                    heappush(self._highest, -name)
            else:
                self._weights.put(segment.at, segment.at + names, 0.0, segment.size)
            segment.at, segment.size = self._now, size
            self._now += names
        self._weights.put(began_at, self._now, size, 0.0)
        for segment in reversed(hot):
            self._hot_weight -= segment.weight
            segment.at, segment.size = self._now, size
            self._hot_weight += segment.weight
            self._now += len(segment.names)
        while len(self._cold) > self._most:
            self._lower_threshold()

    def _is_counted(self, requests: int, one_in: int) -> Any:
        numbers = np.arange(self.count + 1, self.count + 1 + requests, dtype=np.uint64)
        return numbers * _GOLDEN < np.uint64(MARKS // one_in)

    def _count(self, head: list[int], depth: int, size: float, weight: float) -> _Segment | None:
        """Count a request's leading names. Returns those that become hot now; `depth` of them were hot before. weight:
        in references of one of `COUNTED_REQUESTS`."""
        counts = self._counts
        for name in head:
            counts[name] = counts.get(name, 0.0) + weight
        if len(counts) > CANDIDATES:
            counts = self._counts = self._with_room(counts, weight)
        least = max(LEAST_COUNTED * weight, HOT_SHARE * self._blocks / COUNTED_REQUESTS)
        segment = _Segment([], self._now, size)  # `_use` corrects the time
        for name in head[depth:]:
            if name in self._hot or len(self._hot) >= HOT_NAMES or counts.get(name, 0.0) < least:
                break
            if name in self._cold:
                self._leave(name)
            segment.names.append(name)
            self._hot[name] = segment
        if not segment.names:
            return None
        self._segments[segment.names[0]] = segment
        self._hot_weight += segment.weight
        return segment

    def _with_room(self, counts: dict[int, float], less: float) -> dict[int, float]:
        """Candidates with so much less each, without those that have none left, until there is room. J. Misra, D.
        Gries, "Finding repeated elements", Science of Computer Programming 2 (2), 1982."""
        while len(counts) > CANDIDATES * 3 // 4:
            lower = {name: count if name in self._hot else count - less for name, count in counts.items()}
            counts = {name: count for name, count in lower.items() if count > 0 or name in self._hot}
        return counts

    def _cool_down(self) -> None:
        """Demote hot names that have less than half of `HOT_SHARE`. A parent is counted whenever its child is."""
        least = HOT_SHARE * self._blocks / COUNTED_REQUESTS / 2
        for segment in [*self._segments.values()]:
            hot = 0
            while hot < len(segment.names) and self._counts.get(segment.names[hot], 0.0) >= least:
                hot += 1
            if hot == len(segment.names):
                continue
            self._hot_weight -= segment.weight
            cold = segment.cut(hot, self._hot)
            self._hot_weight += segment.weight
            if not hot:
                del self._segments[cold.names[0]]
            for name, at in zip(cold.names, cold.times, strict=True):
                del self._hot[name]
                if name < self.threshold:
                    self._cold[name] = _Segment([name], at, cold.size)
                    self._weights.put(at, at + 1, cold.size)
                    heappush(self._highest, -name)
        if len(self._highest) > 2 * self._most:  # stale entries: names that became hot, or are listed twice
            self._highest = [-name for name in self._cold]
            heapify(self._highest)

    def _passing(self, marks: Marks) -> Any:
        passing = np.flatnonzero(marks <= np.uint64(self.threshold - 1))
        if len(passing) > self._most and len(names := np.unique(marks[passing])) > self._most:
            threshold = int(names[self._most])
            while self._highest and -self._highest[0] >= threshold:
                self._lower_threshold()
            self.threshold = threshold
            passing = np.flatnonzero(marks <= np.uint64(threshold - 1))
        return passing

    def _lower_threshold(self) -> None:
        name = -heappop(self._highest)
        if name in self._cold:  # else it is hot, or was listed twice
            self.threshold = name
            self._leave(name)

    def _renumber(self, more: int) -> None:
        weights: list[float] = []
        for segment in sorted({*self._cold.values(), *self._segments.values()}, key=lambda segment: segment.at):
            segment.at = len(weights)
            weights += [0.0 if segment.names[0] in self._hot else segment.size] * len(segment.names)
        self._weights = _Weights(max(4 * self._most + HOT_ROOM, len(weights) + more + 1), weights)
        self._now = len(weights)


@dataclass(slots=True, eq=False)
class _Segment:
    """Hot names, or sampled ones, that follow each other in requests, and were last used together. at: when the deepest
    was used, which is the last of them, or -1 for never; those above it were used right after it. size: of each."""

    names: list[int]
    at: int = -1
    size: float = 0.0

    @property
    def weight(self) -> float:
        return len(self.names) * self.size

    @property
    def times(self) -> range:
        return range(self.at + len(self.names) - 1, self.at - 1, -1)

    def names_in_common(self, names: list[int]) -> int:
        """How many this one and `names`, as long at most, begin with."""
        if names == self.names:
            return len(names)
        return next((at for at, name in enumerate(names) if name != self.names[at]), len(names))

    def cut(self, names: int, by_name: dict[int, _Segment]) -> _Segment:
        """Keep so many; returns the deeper rest, a segment of its own. by_name: where they are listed."""
        rest = _Segment(self.names[names:], self.at, self.size)
        self.at += len(rest.names)
        del self.names[names:]
        by_name.update(dict.fromkeys(rest.names, rest))
        return rest


class _BatchCounts:
    """Counts of a batch of requests with equal blocks, in blocks."""

    def __init__(self) -> None:
        self.sampled = 0.0
        self.cold_found, self.hot_found = _References(), _References()


class _References:
    """References of names that were used before: their distances, and how many references each stands for."""

    def __init__(self) -> None:
        self.rows = array("d")

    def add(self, distance: float, stands_for: float, references: int = 1, step: float = 0.0) -> None:
        """references: so many, each a step further away than the one before it."""
        self.rows.extend((distance, stands_for, references, step))

    def binned(self) -> Any:
        """References by bin: each distance in the bin that ends at the first edge >= it."""
        nearest, stands_for, references, step = np.frombuffer(self.rows).reshape(-1, 4).T
        counts = references.astype(np.intp)
        before = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        distances = np.maximum(np.repeat(nearest, counts) + before * np.repeat(step, counts), 1.0)
        bins = np.minimum(np.ceil(BINS_PER_DOUBLING * np.log2(distances)), BINS).astype(np.intp)
        return np.bincount(bins, np.repeat(stands_for, counts), BINS + 1)


class _Weights:
    """Weights by time, with fast sums of all that is later: sums of parts, and sums of those. Faster here than a tree
    with a level per power of two, since updates are three times as frequent as sums and Python sums a slice quickly."""

    def __init__(self, room: int, weights: Sequence[float] = ()) -> None:
        """weights: of the first times."""
        self._width = width = ceil(room ** (1 / 3)) + 1
        self.room = room
        self._weights, self._parts, self._large = (array("d", bytes(8 * width**power)) for power in (3, 2, 1))
        self._weights[: len(weights)] = array("d", weights)
        for sums, of in ((self._parts, self._weights), (self._large, self._parts)):
            sums[:] = array("d", np.frombuffer(of).reshape(-1, width).sum(1))

    def put(self, begin: int, end: int, weight: float, before: float | None = None) -> None:
        """Give this weight to each time from begin to before end. before: the weight of each until now, if known."""
        if begin + 1 == end:  # by far the most frequent
            part = begin // self._width
            more = weight - self._weights[begin]
            self._weights[begin] = weight
            self._parts[part] += more
            self._large[part // self._width] += more
            return
        while begin < end:
            part = begin // self._width
            stop = min(end, (part + 1) * self._width)
            more = weight * (stop - begin)
            more -= sum(self._weights[begin:stop]) if before is None else before * (stop - begin)
            self._weights[begin:stop] = array("d", (weight,)) * (stop - begin)
            self._parts[part] += more
            self._large[part // self._width] += more
            begin = stop

    def behind(self, at: int) -> float:
        """Sum of all weights later than `at`."""
        width = self._width
        part = at // width
        large = part // width
        return (
            sum(self._large[large + 1 :])
            + sum(self._parts[part + 1 : (large + 1) * width])
            + sum(self._weights[at + 1 : (part + 1) * width])
        )

    def check(self, there: Iterable[int]) -> None:
        """there: the times that have a weight."""
        assert {at for at, weight in enumerate(self._weights) if weight} == {*there}
        total = sum(self._weights)
        for at in (0, self._width, self.room // 2, self.room - 1):
            assert abs(self.behind(at) - sum(self._weights[at + 1 :])) <= 1e-9 * total


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
        new = places[~self._flags[places]]
        if not len(new):
            return 0.0
        new = np.unique(new)
        self._flags[new] = True
        unset = 1 - (self._set + len(new) / 2) / FLAGS
        self._set += len(new)
        return FLAGGED_NAMES * len(new) / unset


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
