"""The first hits, and one in a thousand after them, are computed all the same: to compare what is stored with what the
engine computes, and to measure what a hit saves.

    1. `Holdout.begins` decides, when a request hits, whether it is computed. If so, all that the store found for it is
       a miss (`MissReason.AUDIT`), and `Holdout.ended` is called when it is over. Every hit is computed, also those
       that are not compared, where all hits are audited and until the first comparisons have found nothing wrong (the
       trial).
    2. `blocks.compare_block` for each block that was found, beside the block that was computed.
    3. `judged` finds the worst verdict, and logs a namespace that has drifted: once, since its engine leaves it then.
    4. `TtftSaving.record` for held-out requests and hits alike: chance alone decided which is which, so the difference
       of their times measures what hits save.

No torch, clock or randomness here: they are handed in. Must never log tokens or keys. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from logging import getLogger
from math import isfinite, sqrt

_log = getLogger(__name__)

FRACTION = 1 / 1000
"""Share of the hits that are audited: this costs a thousandth of what hits save."""
LONGEST_AUDIT_SECONDS = 600.0
"""After this, a held-out request that never ended no longer blocks further audits."""


FIRST_HITS = 2
"""Comparisons that must find nothing wrong before any hit is loaded: with an inexact codec, a prompt's first block and
a later one."""
MOST_GIVEN_UP = 16
"""Comparisons of the first hits that may fail to complete before hits are loaded without them."""


class Holdout:
    """Decides which hits are computed all the same; one of these at a time is compared. first_left: comparisons that
    must find nothing wrong before a hit is loaded."""

    def __init__(self, choose: Callable[[], float], fraction: float = FRACTION, first: int = FIRST_HITS) -> None:
        """choose: uniform random numbers in [0, 1), as `random.Random.random`. fraction: 0 turns audits off, the first
        ones too; with 1 no hit is ever loaded."""
        self._choose = choose
        self._fraction = fraction
        self._under_way: tuple[str, float] | None = None
        self._given_up_left = MOST_GIVEN_UP
        self.first_left = first if fraction > 0 else 0

    @property
    def takes_all(self) -> bool:
        return self._fraction >= 1.0 or self.first_left > 0

    def begins(self, request: str, now_seconds: float) -> bool:
        """Whether this hit is held out. Ask once for each request, and only if the store found something: chance alone
        must decide, or hits and held-out ones cannot be compared."""
        if not self.takes_all and self._choose() >= self._fraction:
            return False
        if self._under_way is not None and now_seconds - self._under_way[1] < LONGEST_AUDIT_SECONDS:
            return self.takes_all
        self._under_way = (request, now_seconds)
        return True

    def compares(self, request: str) -> bool:
        """Whether it is compared, and not only computed."""
        return self._under_way is not None and self._under_way[0] == request

    def ended(self, request: str, is_sound: bool = False) -> None:
        """The request is over, compared or given up; no effect for one that is not compared. is_sound: it was compared,
        and nothing was wrong."""
        if not self.compares(request):
            return
        self._under_way = None
        if not self.first_left:
            return
        if is_sound:
            self.first_left -= 1
            return
        self._given_up_left -= 1
        if not self._given_up_left:
            self.first_left = 0
            _log.warning(
                "hits are loaded from here on: of %d requests that were to be compared with what is stored, too few "
                "could be",
                MOST_GIVEN_UP,
            )


# Verdicts ---------------------------------------------------------------------------------------------------------


class AuditVerdict(StrEnum):
    EXACT = "exact"  # bit for bit, or what the codec makes of the computed block bit for bit
    CLOSE = "close"  # as far off as another order of additions, and the codec, can make it
    DRIFTED = "drifted"  # further: other weights, another adapter, other tokens, another layout


UNLIKE_ANYTHING = 1e30
"""Finite, so that it can be written as JSON."""
_SEVERITY = (AuditVerdict.EXACT, AuditVerdict.CLOSE, AuditVerdict.DRIFTED)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """One block. worst_error: root mean square of the difference, without the codec's share, over that of the computed
    numbers, of the plane where it is largest compared with what is allowed there (allowed_error; the plane is in
    `worst_layer`). An error that is not finite, or relative to zero, is `UNLIKE_ANYTHING`.
    """

    verdict: AuditVerdict
    worst_error: float
    allowed_error: float
    worst_layer: int

    @property
    def of_allowed(self) -> float:
        """The worst error over what is allowed; above 1 the block has drifted."""
        return self.worst_error / self.allowed_error if self.worst_error else 0.0


def judged(namespace: str, results: Sequence[AuditResult]) -> AuditVerdict | None:
    """The worst verdict on the block of one held-out request; logs a drift, on which the caller must act: drifted
    blocks must not be served. namespace: its name for people. None: nothing was compared."""
    if not results:
        return None
    worst = max(results, key=lambda result: (_SEVERITY.index(result.verdict), result.of_allowed))
    if worst.verdict is AuditVerdict.DRIFTED:
        _log.error(
            "what is stored in namespace %s is not what the engine computes: %d of %d blocks, layer %d off by %.2g of "
            "its size where %.2g is allowed; were weights or an adapter changed under an old name?",
            namespace,
            sum(result.verdict is AuditVerdict.DRIFTED for result in results),
            len(results),
            worst.worst_layer,
            worst.worst_error,
            worst.allowed_error,
        )
    return worst.verdict


# What a hit saves -------------------------------------------------------------------------------------------------

MOST_BITS = 24
"""Most bits of a number of tokens: longer prompts share a bin."""
LEAST_OF_AN_ARM = 2
"""Times needed in each arm of a bin before their variance is estimated."""


@dataclass(slots=True)
class _Times:
    """Count, mean and squared deviations, added up as Welford has it (Technometrics 4, 1962)."""

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.deviations += step * (value - self.mean)

    @property
    def variance_of_mean(self) -> float:
        return self.deviations / (self.count - 1) / self.count


@dataclass(frozen=True, slots=True)
class HitSaving:
    """What one hit saves on average, in milliseconds."""

    mean_ms: float
    standard_error_ms: float


class TtftSaving:
    """Times to the first token, of hits and of held-out ones, side by side in bins of like requests: by the powers of
    two above found tokens and prompt tokens."""

    def __init__(self) -> None:
        self._bins: dict[tuple[int, int], tuple[_Times, _Times]] = {}

    def record(self, held_out: bool, prompt_tokens: int, found_tokens: int, ttft_seconds: float) -> None:
        """One request in which the store found something."""
        if not (isfinite(ttft_seconds) and ttft_seconds >= 0 and found_tokens > 0):
            return
        key = (min(found_tokens.bit_length(), MOST_BITS), min(prompt_tokens.bit_length(), MOST_BITS))
        arms = self._bins.setdefault(key, (_Times(), _Times()))
        arms[held_out].add(ttft_seconds)

    def estimate(self) -> HitSaving | None:
        """The mean of the bins' differences, weighted by their hits, with its standard error (Welch: each arm has a
        variance of its own). None until some bin has two of each."""
        total = variance = 0.0
        hits = 0
        for loaded, computed in self._bins.values():
            if min(loaded.count, computed.count) < LEAST_OF_AN_ARM:
                continue
            total += loaded.count * (computed.mean - loaded.mean)
            variance += loaded.count**2 * (loaded.variance_of_mean + computed.variance_of_mean)
            hits += loaded.count
        if not hits:
            return None
        return HitSaving(1e3 * total / hits, 1e3 * sqrt(variance) / hits)
