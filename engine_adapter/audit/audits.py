"""The first hits, and one in a thousand after them, are computed all the same: to compare what is stored with what the
engine computes, and to measure what a hit saves.

    1. `Holdout.begins` decides, when a request hits, whether it is computed. If so, all that the store found for it is
       a miss (`MissReason.AUDIT`), and `Holdout.ended` is called when it is over. Every hit is computed, also those
       that are not compared, where all hits are audited and until the first comparisons have found nothing wrong (the
       trial).
    2. `blocks.compare_block` for each block that was found, beside the block that was computed.
    3. `Audits.record` counts the verdicts, and tells the caller of a namespace that has drifted.
    4. `TtftSaving.record` for held-out requests and hits alike: chance alone decided which is which, so the difference
       of their times measures what hits save.

No torch, clock or randomness here: they are handed in. Must never log tokens or keys. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from logging import getLogger
from math import frexp, isfinite, sqrt

from kvstore.block.errors import BadInput

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
    """Decides which hits are computed all the same; one of these at a time is compared. Counts: hits, that were
    considered; held_out, chosen to be compared; busy, not compared since another comparison was in progress.
    first_left: comparisons that must find nothing wrong before a hit is loaded."""

    def __init__(self, choose: Callable[[], float], fraction: float = FRACTION, first: int = FIRST_HITS) -> None:
        """choose: uniform random numbers in [0, 1), as `random.Random.random`. fraction: 0 turns audits off, the first
        ones too; with 1 no hit is ever loaded. Raises `BadInput`."""
        if not 0.0 <= fraction <= 1.0:
            raise BadInput(f"an audit of {fraction} of all hits; give a fraction from 0 (off) to 1")
        self._choose = choose
        self._fraction = fraction
        self._under_way: tuple[str, float] | None = None
        self._given_up_left = MOST_GIVEN_UP
        self.first_left = first if fraction > 0 else 0
        self.hits = 0
        self.held_out = 0
        self.busy = 0

    @property
    def takes_all(self) -> bool:
        """Whether no hit is loaded at present."""
        return self._fraction >= 1.0 or self.first_left > 0

    def begins(self, request: str, now_seconds: float) -> bool:
        """Whether this hit is held out. Ask once for each request, and only if the store found something: chance alone
        must decide, or hits and held-out ones cannot be compared."""
        self.hits += 1
        if not self.takes_all and self._choose() >= self._fraction:
            return False
        if self._under_way is not None and now_seconds - self._under_way[1] < LONGEST_AUDIT_SECONDS:
            self.busy += 1
            return self.takes_all
        self._under_way = (request, now_seconds)
        self.held_out += 1
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

    def to_dict(self) -> dict[str, int | float]:
        return {"fraction": self._fraction, "hits": self.hits, "held_out": self.held_out, "busy": self.busy}


# Verdicts ---------------------------------------------------------------------------------------------------------


class AuditVerdict(StrEnum):
    """How a stored block compares with the computed one."""

    EXACT = "exact"  # bit for bit, or what the codec makes of the computed block bit for bit
    CLOSE = "close"  # as far off as another order of additions, and the codec, can make it
    DRIFTED = "drifted"  # further: other weights, another adapter, other tokens, another layout


UNLIKE_ANYTHING = 1e30
"""Finite, so that it can be written as JSON."""
_SEVERITY = (AuditVerdict.EXACT, AuditVerdict.CLOSE, AuditVerdict.DRIFTED)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """One block. relative_error: root mean square of the difference over that of the computed numbers, of the block.
    max_abs_error: of one number. worst_error: the relative error without the codec's share, of the plane where it is
    largest compared with what is allowed there (allowed_error; the plane is in `worst_layer`). outside_share: the share
    of numbers further off than the codec's bound; None for a codec that changes nothing. An error that is not finite,
    or relative to zero, is `UNLIKE_ANYTHING`.
    """

    verdict: AuditVerdict
    relative_error: float
    max_abs_error: float
    worst_error: float
    allowed_error: float
    worst_layer: int
    outside_share: float | None

    @property
    def of_allowed(self) -> float:
        """The worst error over what is allowed; above 1 the block has drifted."""
        return self.worst_error / self.allowed_error if self.worst_error else 0.0


LEAST_EXPONENT, MOST_EXPONENT = -10, 10
"""Powers of two of the histogram: errors from a thousandth of what is allowed to a thousand times as much."""


@dataclass
class AuditCounts:
    """What audits found. audits: held-out requests whose blocks were compared; drifted_audits: those with a block
    that has drifted. exact, close, drifted: blocks. worst_...: the largest of any block. errors: close and drifted
    blocks by the power of two above error / allowed.
    """

    audits: int = 0
    exact: int = 0
    close: int = 0
    drifted: int = 0
    drifted_audits: int = 0
    worst_relative_error: float = 0.0
    worst_of_allowed: float = 0.0
    worst_outside_share: float = 0.0
    squared_error_sum: float = 0.0
    errors: dict[int, int] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return self.exact + self.close + self.drifted

    def to_dict(self) -> dict[str, object]:
        """For `--json`. relative_error: root mean square over the blocks that have not drifted."""
        sound = self.exact + self.close
        counts = {name: value for name, value in asdict(self).items() if name != "squared_error_sum"}
        return counts | {
            "blocks": self.blocks,
            "relative_error": sqrt(self.squared_error_sum / sound) if sound else None,
            "errors": {f"2^{exponent}": self.errors[exponent] for exponent in sorted(self.errors)},
        }


LOG_EVERY_SECONDS = 60.0
MOST_NAMESPACES = 256
"""Namespaces whose last log line is remembered."""


class Audits:
    """Counts comparisons, and logs drifted ones: once a minute for each namespace."""

    def __init__(self) -> None:
        self.counts = AuditCounts()
        self._logged_at: dict[str, float] = {}

    def record(self, namespace: str, results: Sequence[AuditResult], now_seconds: float) -> AuditVerdict | None:
        """The blocks of one held-out request. namespace: its name for people. Returns the worst verdict, on which the
        caller must act: drifted blocks must not be served. None: nothing was compared."""
        if not results:
            return None
        counts = self.counts
        counts.audits += 1
        for result in results:
            self._count(result)
        worst = max((result.verdict for result in results), key=_SEVERITY.index)
        if worst is AuditVerdict.DRIFTED:
            counts.drifted_audits += 1
            self._log(namespace, results, now_seconds)
        return worst

    def _count(self, result: AuditResult) -> None:
        counts = self.counts
        counts.worst_relative_error = max(counts.worst_relative_error, result.relative_error)
        counts.worst_of_allowed = max(counts.worst_of_allowed, result.of_allowed)
        counts.worst_outside_share = max(counts.worst_outside_share, result.outside_share or 0.0)
        if result.verdict is AuditVerdict.DRIFTED:
            counts.drifted += 1
        else:
            counts.squared_error_sum += result.relative_error * result.relative_error
            if result.verdict is AuditVerdict.EXACT:
                counts.exact += 1
                return
            counts.close += 1
        exponent = frexp(result.of_allowed)[1] if result.of_allowed else LEAST_EXPONENT
        exponent = max(LEAST_EXPONENT, min(exponent, MOST_EXPONENT))
        counts.errors[exponent] = counts.errors.get(exponent, 0) + 1

    def _log(self, namespace: str, results: Sequence[AuditResult], now_seconds: float) -> None:
        last = self._logged_at.pop(namespace, None)
        if last is not None and 0.0 <= now_seconds - last < LOG_EVERY_SECONDS:
            self._logged_at[namespace] = last
            return
        self._logged_at[namespace] = now_seconds
        if len(self._logged_at) > MOST_NAMESPACES:
            del self._logged_at[next(iter(self._logged_at))]
        drifted = [result for result in results if result.verdict is AuditVerdict.DRIFTED]
        worst = max(drifted, key=lambda result: result.of_allowed)
        _log.error(
            "what is stored in namespace %s is not what the engine computes: %d of %d blocks, layer %d off by %.2g of "
            "its size where %.2g is allowed; were weights or an adapter changed under an old name?",
            namespace,
            len(drifted),
            len(results),
            worst.worst_layer,
            worst.worst_error,
            worst.allowed_error,
        )


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
    """What one hit saves on average, in milliseconds. hits, held_out: of the bins that have enough of both."""

    mean_ms: float
    standard_error_ms: float
    hits: int
    held_out: int
    bins: int


class TtftSaving:
    """Times to the first token, of hits and of held-out ones, side by side in bins of like requests: by the powers of
    two above found tokens and prompt tokens."""

    def __init__(self) -> None:
        self._bins: dict[tuple[int, int], tuple[_Times, _Times]] = {}
        self.refused = 0

    def record(self, held_out: bool, prompt_tokens: int, found_tokens: int, ttft_seconds: float) -> None:
        """One request in which the store found something."""
        if not (isfinite(ttft_seconds) and ttft_seconds >= 0 and found_tokens > 0):
            self.refused += 1
            return
        key = (min(found_tokens.bit_length(), MOST_BITS), min(prompt_tokens.bit_length(), MOST_BITS))
        arms = self._bins.setdefault(key, (_Times(), _Times()))
        arms[held_out].add(ttft_seconds)

    def estimate(self) -> HitSaving | None:
        """The mean of the bins' differences, weighted by their hits, with its standard error (Welch: each arm has a
        variance of its own). None until some bin has two of each."""
        total = variance = 0.0
        hits = held_out = bins = 0
        for loaded, computed in self._matched():
            total += loaded.count * (computed.mean - loaded.mean)
            variance += loaded.count**2 * (loaded.variance_of_mean + computed.variance_of_mean)
            hits += loaded.count
            held_out += computed.count
            bins += 1
        if not hits:
            return None
        return HitSaving(1e3 * total / hits, 1e3 * sqrt(variance) / hits, hits, held_out, bins)

    def to_dict(self) -> dict[str, object]:
        """For `--json`: numerator and denominator of the mean, and how many of each arm there were in all."""
        saving = self.estimate()
        return {
            "saved_ms": saving.mean_ms * saving.hits if saving else None,
            "of_hits": saving.hits if saving else 0,
            "saved_ms_per_hit": saving.mean_ms if saving else None,
            "standard_error_ms": saving.standard_error_ms if saving else None,
            "of_held_out": saving.held_out if saving else 0,
            "bins": saving.bins if saving else 0,
            "hits": sum(loaded.count for loaded, _ in self._bins.values()),
            "held_out": sum(computed.count for _, computed in self._bins.values()),
            "refused": self.refused,
        }

    def _matched(self) -> list[tuple[_Times, _Times]]:
        return [arms for arms in list(self._bins.values()) if min(arm.count for arm in arms) >= LEAST_OF_AN_ARM]
