"""Admission: which blocks that leave DRAM are written to the lower tier.

    stored in DRAM > used, perhaps again > about to leave: is it likely to come back? > written, or not > it did, or not

Eviction asks which block is worth least; admission asks which is worth a write, since a drive endures a limited number.
A block's class is: how often it was used, whether it was the last of its request, whether that began a conversation,
and how many new blocks it brought. Per class it counts how many of the blocks that left came back while a third as many
others left as the tier holds; a written block counts once for each stay there, and its ancestors that are written with
it count as if they left, too. A class of which few come back is not written.

A budget of bytes per second is spent on the classes of which most come back, the one at the edge in part. Unspent
budget is kept for an hour, and the more of it is left the more is written: a new tier fills at once, and a quiet hour
pays for a busy one. The budget is exceeded in two cases only: each start begins with an hour's worth, and retained
blocks are written without asking; they count, and nothing else is written until the budget has caught up.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

LEAST_SHARE = 0.1
"""Classes of which a smaller share comes back are not written."""
BUCKET_SECONDS = 3600.0
"""Unspent budget is kept this long."""
URGE = 5.0
"""With a full bucket, this multiple of the budget is spent; with a partly full one, the budget itself."""
USES = 5
"""So many uses and more count as equal."""
SIZES = 8
"""Of a request, by its new blocks: 1, 2-3, 4-7 .. 128 and more."""
_KINDS = SIZES * 2 * 2
CLASSES = USES * _KINDS
_BEGINS_BEHIND = 1
"""Blocks that all requests may share: a request that found no more begins a conversation."""
LEAST_HISTORY, MOST_HISTORY = 1 << 13, 1 << 17
PAST = 4
"""Number of histories for which blocks that did not come back are remembered, since they still may."""
_HALF_LIFE = 8
"""Counts are halved when so many histories have left."""
_RANKED_EVERY = 256
"""Blocks that leave between two rankings of the classes."""
_COARSE_WEIGHT = 20.0
"""The average over all sizes weighs as much as so many blocks of one size."""
_HOPE = 4.0
"""Blocks assumed to have come back before anything is known."""
_LOOK_BACK_SECONDS = 600.0
"""Period over which the rate of leaving blocks is measured."""


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """Bytes that may be written to NVMe. left_bytes: now, of at most most_bytes, the limit of unspent budget. Published
    unchanged, see `tiering.tier`."""

    bytes_per_second: float
    left_bytes: float
    most_bytes: float


class Admission(Protocol):
    """Not thread-safe. chooses: whether it ever declines."""

    chooses: bool

    def expect(self, blocks: int) -> None:
        """The tier below has room for so many."""
        ...

    def stored(self, row: int) -> None:
        """A new block is readable in DRAM."""
        ...

    def found(self, rows: range) -> None:
        """These blocks are from before a restart."""
        ...

    def used(self, chain: Sequence[int], count: int) -> None:
        """As `EvictionPolicy.used`."""
        ...

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        """The first of these is about to leave DRAM: whether to write it, after the others, its ancestors that the tier
        lacks."""
        ...

    def budget(self) -> WriteBudget | None:
        """None if any number of bytes may be written."""
        ...

    def spent(self, written_bytes: int) -> None:
        """So much was written without asking."""
        ...


AdmissionMaker = Callable[["array[int]", Callable[[], float], int], Admission]
"""Takes 64 bits of each row's key, a clock in seconds, and the bytes of the tier below."""


class AdmitAll:
    """Writes everything."""

    chooses = False

    def expect(self, blocks: int) -> None: ...

    def stored(self, row: int) -> None: ...

    def found(self, rows: range) -> None: ...

    def used(self, chain: Sequence[int], count: int) -> None: ...

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        return True

    def budget(self) -> WriteBudget | None:
        return None

    def spent(self, written_bytes: int) -> None: ...


class LearnedAdmission:
    """Learns which blocks come back."""

    chooses = True

    def __init__(self, names: array[int], clock: Callable[[], float], bytes_per_second: float | None = None) -> None:
        """names: 64 bits of each row's key. clock: seconds that never go back. bytes_per_second: None for no limit."""
        assert bytes_per_second is None or bytes_per_second > 0
        self._names = names
        self._clock = clock
        self._rate = bytes_per_second
        self._history = LEAST_HISTORY
        self._uses = bytearray()
        self._kinds = bytearray()  # by row, what is known of it from the start
        self._left: OrderedDict[int, int] = OrderedDict()  # by name, the class of blocks that left, oldest first
        self._past: OrderedDict[int, int] = OrderedDict()  # of those before them: they are assumed not to come back
        self._came = [0.0] * CLASSES
        self._gone = [0.0] * CLASSES
        self._seen = [0.0] * CLASSES
        self._written = [1.0] * CLASSES  # the written share of each class
        self._carried = [0.0] * CLASSES
        self._since_ranked = 0
        self._since_halved = 0
        self._looked_at = clock()
        self._budget = 0.0 if bytes_per_second is None else bytes_per_second * BUCKET_SECONDS
        self._leaving_bytes, self._leaving_since = 0.0, self._looked_at

    @staticmethod
    def rate_for(total_bytes: float, seconds: float) -> float:
        """The budget that spends so many bytes in that time, beginning with a full bucket."""
        return total_bytes / (seconds + BUCKET_SECONDS * (1 - 1 / URGE))

    def expect(self, blocks: int) -> None:
        """A block that left counts as not coming back once a third as many blocks have left."""
        self._history = min(max(LEAST_HISTORY, blocks // 3), MOST_HISTORY)

    def stored(self, row: int) -> None:
        """A block without a use so far."""
        self._grow_to(row)
        self._uses[row] = 0

    def found(self, rows: range) -> None:
        """Unknown blocks, assumed to be used often."""
        self._grow_to(rows.stop - 1)
        self._uses[rows.start : rows.stop] = bytes([USES]) * len(rows)
        self._kinds[rows.start : rows.stop] = bytes(len(rows))

    def used(self, chain: Sequence[int], count: int) -> None:
        """Blocks that had left have come back; new ones learn which kind of request brought them."""
        uses, kinds, names = self._uses, self._kinds, self._names
        known = 0
        for row in chain[:count]:
            found = self._came_back(names[row])
            if found is not None:
                known += 1
                if not uses[row]:  # it was not written, and is stored again
                    uses[row], kinds[row] = found // _KINDS + 1, found % _KINDS
        fresh = max(1, count - known)
        size = min(fresh.bit_length(), SIZES) - 1
        kind = size << 2 | (len(chain) - fresh <= _BEGINS_BEHIND) << 1
        for at, row in enumerate(chain[:count]):
            if not uses[row]:
                kinds[row] = kind | (at == 0)
            if uses[row] < USES:
                uses[row] += 1

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        """By the first block's class, and what is left of the budget."""
        self._look(block_bytes)
        number = self._class_of(way[0])
        self._carried[number] += self._written[number]
        is_admitted = self._carried[number] >= 1 - 1e-9
        if is_admitted:
            self._carried[number] -= 1
            is_admitted = self._rate is None or self._pays(block_bytes * len(way))
        for row in way if is_admitted else way[:1]:
            self._leaves(row)
            self._leaving_bytes += block_bytes
        return is_admitted

    def budget(self) -> WriteBudget | None:
        """The budget now; asking changes nothing. At least 0, even if more was spent."""
        if self._rate is None:
            return None
        most = self._rate * BUCKET_SECONDS
        since = max(0.0, self._clock() - self._looked_at)
        left = self._budget + since * self._rate
        return WriteBudget(self._rate, max(0.0, min(most, left)), most)

    def spent(self, written_bytes: int) -> None:
        """Charged to the budget even beyond its end. Nothing is learned from it: that a block is written says nothing
        about when it leaves."""
        if self._rate is not None:
            self._budget -= written_bytes

    def _grow_to(self, row: int) -> None:
        missing = row + 1 - len(self._uses)
        if missing > 0:
            more = max(missing, 1024, len(self._uses) >> 3)
            self._uses += bytes(more)
            self._kinds += bytes(more)

    def _class_of(self, row: int) -> int:
        return max(0, self._uses[row] - 1) * _KINDS + self._kinds[row]

    def _came_back(self, name: int) -> int | None:
        found = self._left.pop(name, None)
        if found is None:
            found = self._past.pop(name, None)
            if found is None:
                return None
            self._gone[found] = max(0.0, self._gone[found] - 1)
        self._came[found] += 1
        return found

    def _leaves(self, row: int) -> None:
        number, left, past = self._class_of(row), self._left, self._past
        self._seen[number] += 1
        self._since_ranked += 1
        left[self._names[row]] = number
        if len(left) > self._history:
            name, found = left.popitem(last=False)
            past[name] = found
            self._gone[found] += 1
            if len(past) > PAST * self._history:
                past.popitem(last=False)

    # The budget ------------------------------------------------------------------------------------------------------

    def _look(self, block_bytes: int) -> None:
        now = self._clock()
        if self._rate is not None and now > self._looked_at:
            self._budget += (now - self._looked_at) * self._rate
            self._budget = min(self._budget, self._rate * BUCKET_SECONDS)
        self._looked_at = max(now, self._looked_at)
        if self._since_ranked >= _RANKED_EVERY:
            self._since_halved += self._since_ranked
            self._since_ranked = 0
            if self._since_halved >= _HALF_LIFE * self._history:
                self._since_halved = 0
                for counts in (self._came, self._gone, self._seen):
                    counts[:] = [count / 2 for count in counts]
            self._rank()

    def _pays(self, wanted_bytes: int) -> bool:
        if self._budget < wanted_bytes:
            return False
        self._budget -= wanted_bytes
        return True

    def _rank(self) -> None:
        shares = self._shares()
        affordable, total = self._affordable(), sum(self._seen)
        for one in sorted(range(CLASSES), key=lambda one: -shares[one]):
            part = self._seen[one] / total
            paid = 1.0 if part <= affordable else affordable / part
            self._written[one] = paid if shares[one] >= LEAST_SHARE else 0.0
            affordable = max(0.0, affordable - part)

    def _shares(self) -> list[float]:
        came, gone, shares = self._came, self._gone, [1.0] * CLASSES
        for first in range(CLASSES):
            if first % _KINDS >= 4:  # a size above the first
                continue
            sizes = range(first, first + _KINDS, 4)
            all_came, all_gone = sum(came[one] for one in sizes), sum(gone[one] for one in sizes)
            coarse = (all_came + _HOPE) / (all_came + all_gone + _HOPE)
            for one in sizes:
                shares[one] = (came[one] + _COARSE_WEIGHT * coarse) / (came[one] + gone[one] + _COARSE_WEIGHT)
        return shares

    def _affordable(self) -> float:
        seconds = self._looked_at - self._leaving_since
        if self._rate is None or seconds <= 0:
            return 1.0
        share = self._rate * seconds / self._leaving_bytes
        if seconds > _LOOK_BACK_SECONDS:
            self._leaving_bytes, self._leaving_since = self._leaving_bytes / 2, self._looked_at - seconds / 2
        return share * URGE * max(0.0, self._budget) / (self._rate * BUCKET_SECONDS)
