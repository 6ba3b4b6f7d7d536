"""How fast this engine computes a prompt, and how fast the store brings one: learned from what happened.

`PrefillSpeed` learns from the engine's steps, `LoadSpeed` from finished loads. Both are a few numbers and a few dozen
multiplications per call, so that a scheduler can ask them within a step. Neither may ever raise for a number, however
odd: what cannot be a duration or a count is left out. No clock here: times are handed in, in seconds. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from operator import mul

from kvstore.block.account import HitTier

SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 3600.0
"""No step and no load takes less or more; nothing is learned from a time outside this range."""
MOST_TOKENS = 1 << 26
"""No prompt is longer; counts are cut to it, so that products of them stay exact enough in a double."""
MOST_BYTES = 2.0**60


def is_duration(seconds: float) -> bool:
    """Whether something can have taken that long. False for NaN."""
    return SHORTEST_SECONDS < seconds < LONGEST_SECONDS


def as_tokens(count: int) -> int:
    """A count of tokens between 0 and `MOST_TOKENS`."""
    return max(0, min(count, MOST_TOKENS))


# Prefill ----------------------------------------------------------------------------------------------------------
#
#   step seconds = step + linear * n + quadratic * q + decode * d
#
#   n   new prompt tokens in the step: the matrix products         d   requests in the step that only decode
#   q   (b * b - a * a) / 2, summed over its prompts' tokens a .. b - 1: attention, each token against all before it
#
# Sums over prompts stay sums, so a step that several prompts share is one observation. The four numbers minimise the
# squared relative error, by moving averages of what n, q, d and the time make multiplied with each other. What cannot
# be told apart (steps that are all alike) is put down to `linear`, because its ridge is the smallest.

TOKENS_UNIT = 1024.0
PAIRS_UNIT = TOKENS_UNIT * TOKENS_UNIT
"""Units of n and q, which keep the sums below within one order of magnitude."""
RIDGE = (1e-3, 1e-6, 1e-3, 1e-3)
ORDER, SWEEPS = (1, 0, 2, 3), 8
"""The numbers are fitted in this order, so many times over: `linear` first, which takes what cannot be told apart."""
KEPT = 0.99
"""Each step multiplies the weights of all earlier ones by this: about a hundred steps are remembered."""
LEAST_STEPS = 8
LEAST_STEP_TOKENS = 128
"""Speeds are known after that many steps of at least that many new tokens: in smaller ones, the fixed cost hides the
rest."""
OUTLIER = 4.0
"""Times the usual relative error, beyond which an error counts no more than this (Huber's weights): a step during which
the machine did something else."""
LEAST_SPREAD = 0.02
_SPREAD_AT_FIRST = 0.25
_SPREAD_GAIN = 0.05
_STEP_GAIN = 0.1
_REUSED_STEPS = 4
"""Whether a step is an outlier is judged by coefficients that may leave out so many steps before it: solving for them
is most of an observation's work."""
_NOTED_STEPS = 32
"""So many steps are noted before they are learned from, all at once: one after another, between two steps that fill
the processor's caches, they would take several times as long."""
_FORGOTTEN = 1e-30


class PrefillSpeed:
    """How long computing takes."""

    def __init__(self) -> None:
        self._noted: list[tuple[Sequence[tuple[int, int]], int, float]] = []
        self._squares = [[0.0] * 4 for _ in range(4)]
        self._products = [0.0] * 4
        self._solution = [0.0] * 4
        self._unsolved_steps = 0
        self._spread = _SPREAD_AT_FIRST
        self._telling_steps = 0
        self._typical_step_seconds = 0.0

    def observe(self, scheduled: Sequence[tuple[int, int]], decode_requests: int, step_seconds: float) -> None:
        """One step of the engine. scheduled: of each prompt in it (tokens before, new tokens). A step in which the
        engine waited for a load is not to be shown here, or without that wait."""
        self._noted.append((scheduled, decode_requests, step_seconds))
        if len(self._noted) >= _NOTED_STEPS:
            self._learn()

    def _learn(self) -> None:
        noted, self._noted = self._noted, []
        for scheduled, decode_requests, step_seconds in noted:
            self._take(scheduled, decode_requests, step_seconds)

    def _take(self, scheduled: Sequence[tuple[int, int]], decode_requests: int, step_seconds: float) -> None:
        if not is_duration(step_seconds):
            return
        typical = self._typical_step_seconds or step_seconds
        self._typical_step_seconds = typical + _STEP_GAIN * (min(step_seconds, 4 * typical) - typical)
        new_tokens, pairs = 0, 0.0
        for start, count in scheduled:
            start, count = as_tokens(start), as_tokens(count)
            new_tokens += count
            pairs += count * (start + count / 2)
        if not new_tokens:
            return
        features = (1.0, new_tokens / TOKENS_UNIT, pairs / PAIRS_UNIT, float(as_tokens(decode_requests)))
        weight = self._weight(features, step_seconds)
        for at, feature in enumerate(features):
            share = weight * feature
            self._squares[at] = [
                KEPT * old + share * other for old, other in zip(self._squares[at], features, strict=True)
            ]
            self._products[at] = KEPT * self._products[at] + share * step_seconds
        self._unsolved_steps += 1
        self._telling_steps += new_tokens >= LEAST_STEP_TOKENS

    @property
    def typical_step_seconds(self) -> float:
        """Of all steps, those that only decode included; 0 before the first one."""
        self._learn()
        return self._typical_step_seconds

    @property
    def is_learned(self) -> bool:
        self._learn()
        return self._telling_steps >= LEAST_STEPS

    def more_seconds(self, start_token: int, stop_token: int) -> float | None:
        """What computing the tokens start .. stop - 1 of a prompt adds to a step that runs anyway: what is saved where
        they are loaded, since some token of a prompt is always computed. None until enough was seen."""
        if not self.is_learned:
            return None
        start, stop = as_tokens(start_token), as_tokens(stop_token)
        if stop <= start:
            return 0.0
        _, linear, quadratic, _ = self._coefficients()
        count = stop - start
        return linear * (count / TOKENS_UNIT) + quadratic * (count * (start + count / 2) / PAIRS_UNIT)

    def _weight(self, features: tuple[float, ...], step_seconds: float) -> float:
        if self._telling_steps < LEAST_STEPS:
            return 1.0 / (step_seconds * step_seconds)  # slow first steps, which compile or load, count least
        expected: float = sum(map(mul, self._coefficients(_REUSED_STEPS), features))
        if expected < SHORTEST_SECONDS:
            return 1.0 / (step_seconds * step_seconds)
        error, spread = abs(step_seconds - expected) / expected, self._spread
        limit = OUTLIER * spread
        self._spread = max(LEAST_SPREAD, spread + _SPREAD_GAIN * (min(error, limit) - spread))
        return min(1.0, limit / error if error > 0.0 else 1.0) / (expected * expected)

    def _coefficients(self, reused_steps: int = 0) -> list[float]:
        if self._unsolved_steps > reused_steps:
            self._solution = _fitted(self._squares, self._products, self._solution)
            self._unsolved_steps = 0
        return self._solution


def _fitted(squares: list[list[float]], products: list[float], solution: list[float]) -> list[float]:
    """The four numbers, none negative: from the last ones on, each in turn is set to its best value for the others."""
    fitted = list(solution)
    for at in SWEEPS * ORDER:
        row, own = squares[at], squares[at][at] * (1.0 + RIDGE[at])
        rest = products[at] - sum(map(mul, row, fitted)) + row[at] * fitted[at]
        fitted[at] = max(0.0, rest / own) if own > _FORGOTTEN else 0.0
    return fitted


# Loads ------------------------------------------------------------------------------------------------------------
#
#   load seconds = sum over its tiers of (overhead + bytes / bandwidth)  +  what is under way before it
#
# Of each tier one logarithm is kept, a moving average: how many times slower it is than the prior says. With time since
# the last load, what is expected goes back to the prior, by half in `HALF_LIFE_SECONDS`. Logarithms cannot make a time
# negative, and weigh "50 times slower" and "50 times faster" alike. A load of several tiers teaches each by its share
# of the time, so that a slow disk is not put down to DRAM.


Speeds = Callable[[HitTier], tuple[float, float]]
"""Seconds of overhead, and per byte."""


@dataclass(frozen=True, slots=True)
class TierPrior:
    """What is believed of a tier before anything was loaded from it, and again long after."""

    overhead_seconds: float
    bytes_per_second: float


PRIORS: Mapping[HitTier, TierPrior] = {
    HitTier.HBM: TierPrior(0.1e-3, 500e9),
    HitTier.DRAM: TierPrior(0.3e-3, 20e9),
    HitTier.NVME: TierPrior(0.5e-3, 7e9),
    HitTier.PEER: TierPrior(1e-3, 5e9),
    HitTier.REMOTE: TierPrior(1e-3, 3e9),
}
"""Of good machines: the first load corrects a prior that is too fast, and nothing would test one that is too slow."""
HALF_LIFE_SECONDS = 900.0
HOPE_SECONDS = HALF_LIFE_SECONDS / 16
"""Within this time of a load, a belief moves back to the prior by less than noise."""
GAIN = 0.2
"""Of the moving average: a tier's fifth load and all later ones count a fifth."""
SURPRISE = log(2.0)
"""A larger error is no noise. The first slow load is a hiccup, and counts as noise would. From the second in a row on
the tier has changed: what is seen is believed up to 4 times, 16 times, ... what was believed before. Faster is believed
at once."""
LONGEST_SURPRISE = 2.0
"""The same for a tier that was never seen, or not for long."""
MOST_STRIKES = 6
FURTHEST = log(1e5)
"""A belief stays within this of the prior."""


@dataclass(slots=True)
class _TierBelief:
    overhead_seconds: float
    byte_seconds: float
    slow: float = 0.0
    seen_at: float = 0.0
    strikes: int = 0
    loads: int = 0

    def speeds(self, now_seconds: float) -> tuple[float, float]:
        """Seconds of overhead, and per byte: as last seen, moved back to the prior by the time since then."""
        times = exp(self.kept(now_seconds) * self.slow)
        return self.overhead_seconds * times, self.byte_seconds * times

    def kept(self, now_seconds: float) -> float:
        """1 just after a load, and 0 long after it."""
        age = now_seconds - self.seen_at
        return 2.0 ** (-age / HALF_LIFE_SECONDS) if self.loads and age > 0.0 else 1.0

    def believed(self, error: float, now_seconds: float) -> float:
        """How much of an error of a load that this tier decided is believed."""
        kept = self.kept(now_seconds) if self.loads else 0.0
        doubt = LONGEST_SURPRISE * (1.0 - kept)
        if abs(error) <= max(SURPRISE, doubt):
            self.strikes = 0
            return max(GAIN, 1.0 / (self.loads + 1), 1.0 - kept) * error
        if error < 0:
            self.strikes = 0
            return error
        self.strikes = min(MOST_STRIKES, self.strikes + 1)
        return max(GAIN * SURPRISE, doubt) if self.strikes == 1 else min(error, SURPRISE * 2.0 ** (self.strikes - 1))


class LoadSpeed:
    """How long loads take, by tier."""

    def __init__(self, priors: Mapping[HitTier, TierPrior] = PRIORS) -> None:
        """priors: of every tier that loads come from. What is in the engine already costs nothing."""
        self._beliefs = {
            tier: _TierBelief(prior.overhead_seconds, 1.0 / prior.bytes_per_second) for tier, prior in priors.items()
        }

    def has_seen(self, tier: HitTier) -> bool:
        return self._belief(tier).loads > 0

    def of_tier(self, tier: HitTier, now_seconds: float) -> tuple[float, float]:
        """Seconds of overhead, and seconds per byte."""
        return self._belief(tier).speeds(now_seconds)

    def doubted_of_tier(self, tier: HitTier, now_seconds: float) -> tuple[float, float]:
        """As `of_tier`, but no faster than when the tier was last seen."""
        belief = self._belief(tier)
        now, then = belief.speeds(now_seconds), belief.speeds(belief.seen_at)
        return max(now[0], then[0]), max(now[1], then[1])

    def hopes(self, tier: HitTier, now_seconds: float) -> bool:
        """Whether a tier is believed to be faster than when last seen, because that is a while ago."""
        belief = self._belief(tier)
        return belief.loads > 0 and now_seconds - belief.seen_at > HOPE_SECONDS

    def _belief(self, tier: HitTier) -> _TierBelief:
        return self._beliefs.get(tier) or _TierBelief(0.0, 0.0)

    def seconds(self, parts: Sequence[tuple[HitTier, float]], now_seconds: float) -> float:
        """What a load of these bytes from each tier takes."""
        return load_seconds(parts, lambda tier: self.of_tier(tier, now_seconds))

    def observe(
        self,
        parts: Sequence[tuple[HitTier, float]],
        load_seconds: float,
        now_seconds: float,
        queued_seconds: float = 0.0,
    ) -> None:
        """A load that has ended. queued_seconds: of its time, what loads before it were expected to take."""
        sizes = [(self._beliefs[tier], size) for tier, size in _joined(parts).items() if tier in self._beliefs]
        if not sizes:
            return
        if not is_duration(load_seconds):
            return
        taken = []
        total = max(0.0, min(queued_seconds, LONGEST_SECONDS))
        for belief, size_bytes in sizes:  # as it was last seen: that is the best guess of what is seen next
            overhead, byte_seconds = belief.speeds(belief.seen_at)
            taken.append(overhead + size_bytes * byte_seconds)
            total += taken[-1]
        longest = sizes[taken.index(max(taken))][0]
        believed = longest.believed(log(load_seconds / total), now_seconds)
        for (belief, _), seconds in zip(sizes, taken, strict=True):
            belief.slow = max(-FURTHEST, min(belief.slow + seconds / total * believed, FURTHEST))
            belief.seen_at, belief.loads = now_seconds, belief.loads + 1


def _joined(parts: Sequence[tuple[HitTier, float]]) -> dict[HitTier, float]:
    sizes: dict[HitTier, float] = {}
    for tier, size_bytes in parts:
        if size_bytes > 0:
            sizes[tier] = min(sizes.get(tier, 0.0) + size_bytes, MOST_BYTES)
    return sizes


def load_seconds(parts: Sequence[tuple[HitTier, float]], speeds: Speeds) -> float:
    """What a load of these bytes from each tier takes. Each tier's overhead is paid once, whatever its size."""
    total = 0.0
    for tier, size_bytes in _joined(parts).items():
        overhead, byte_seconds = speeds(tier)
        total += overhead + size_bytes * byte_seconds
    return total
