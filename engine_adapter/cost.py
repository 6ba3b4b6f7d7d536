"""How far a found prefix is loaded and how far it is computed: whichever is expected to be over sooner.

    position   0         local            load up to here       found            prompt
               |== engine =|====== loaded ======|--- declined ---|--- not found ---|
                           '-- DRAM --'-- NVMe -'---- NVMe ------'

What other nodes or a remote tier have is decided alike: a fetch is a run of that tier, with its load from DRAM added. A
request waits for it no longer than computing the same takes, and no longer than a few times the expected duration.

A tier whose speed was never learned is loaded from. A load that would be declined is tried now and then as a *probe*,
since a belief that is never tested cannot be corrected; so is a tier that was slow when last seen and is only hoped to
be better now.

`PrefillSpeed` learns how fast the engine computes from its steps, `LoadSpeed` how fast the store brings a prompt from
finished loads. Both are a few numbers and a few dozen multiplications per call, so that a scheduler can ask them within
a step. No clock and no waiting here: times are handed in, in seconds. Nothing may raise for any number, however odd:
what cannot be a duration or a count is left out. Must never import an engine. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from operator import itemgetter, mul
from typing import Any

from engine_adapter.audit.audits import Holdout, TtftSaving
from kvstore.block.account import HitTier, MissReason
from kvstore.client.handle import Match

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


# How much to load -----------------------------------------------------------------------------------------------------


SYNCHRONOUS_MS = 2.0
"""A shorter load is over before another step would be: the engine waits for it. A longer one runs beside the engine's
steps, and its end is noticed between two of them."""
EXPLORE_EVERY = 64
"""Of so many decisions that decline something, one loads part of it to explore. That takes no longer than computing the
prompt, as far as is known: so all of them together take at most a 64th more than they had to."""
PATIENCE = 4.0
"""A fetch is waited for no longer than so many times its expected duration."""
LEAST_WAIT_SECONDS = 0.05
"""But at least for this long, since any machine may be busy with something else."""
UNLEARNED_SECONDS = 2.0
"""The longest wait of an engine that has not learned how fast it computes, and for fetches of unknown duration."""

Belief = Callable[[HitTier, float], tuple[float, float]]
"""`LoadSpeed.of_tier`, or `LoadSpeed.doubted_of_tier`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with one found prefix. Times in milliseconds.

    load_tokens: from `local_tokens` on, and up to a block's boundary (0: compute everything). declined_tokens: of
    whole blocks that were found behind. predicted_load_ms: with all waiting. is_learned: whether learned speeds
    decided, and not the default. is_explored: whether more is loaded than is believed to be best. parts:
    bytes by tier. waiting_seconds: the part of the load's time that is expected to be waiting.
    """

    local_tokens: int
    load_tokens: int
    declined_tokens: int
    predicted_load_ms: float
    is_learned: bool
    is_explored: bool
    parts: tuple[tuple[HitTier, float], ...]
    waiting_seconds: float

    def remaining_seconds(self, elapsed_seconds: float) -> float:
        """How long loads queued behind this one still wait for it, without this one's own waiting. A load that is late
        is expected to take as long again as it is late, so that a tier that hangs is noticed before its load ends."""
        predicted = 1e-3 * self.predicted_load_ms
        left = predicted - max(0.0, elapsed_seconds)
        return min(left, predicted - self.waiting_seconds) if left > 0.0 else min(-left, LONGEST_SECONDS)


class CostModel:
    """Decides for one engine and one namespace. The speeds may be shared with others."""

    def __init__(
        self,
        prefill: PrefillSpeed,
        loads: LoadSpeed,
        *,
        bytes_per_token: float,
        is_on: bool = True,
        explore_every: int = EXPLORE_EVERY,
    ) -> None:
        """bytes_per_token: of the store's payloads, all layers and heads. is_on: whether tokens that are slower to load
        are computed; speeds are learned in any case."""
        assert bytes_per_token > 0 and explore_every > 0
        self.prefill = prefill
        self.loads = loads
        self.counts = defaultdict[str, float](float)
        """decisions: how far to load; explored: those that loaded more than was believed right; unlearned: those that
        no learned speeds decided. loaded_tokens, declined_tokens: of whole blocks, all that was found. finished: loads;
        judged: those that were compared with computing; regret_ms, saved_ms: by how much these, with the fetch before
        them, took longer or less. locates: how often the store was asked what is elsewhere; fetches: that ended;
        short_fetches: of these, those that did not bring all."""
        self.bytes_per_token = bytes_per_token
        self._is_on, self._explore_every = is_on, explore_every
        self._declining: Counter[HitTier] = Counter()
        """By the last run's tier: decisions that declined something, since one explored."""

    def choose(
        self,
        local_tokens: int,
        runs: Sequence[tuple[HitTier, int]],
        prompt_tokens: int,
        block_tokens: int,
        queued_seconds: float,
        others_running: bool,
        now_seconds: float,
        speeds: Callable[[Belief], Speeds] | None = None,
    ) -> Decision:
        """How much of a prefix to load.

        local_tokens: what the engine has of it. runs: what was found behind, in order, as (tier, tokens).
        queued_seconds: what is left of the loads in progress, which go first (`Decision.remaining_seconds` of each,
        added up where they go one after another). others_running: whether the engine is busy with other requests, so
        that the end of a load beside its steps is noticed half a step late on average. speeds: of a fetch, which is not
        counted as a decision how far to load.

        Each token of a run takes as long to load as any other, while a later token takes longer to compute (attention).
        So loading plus computing the rest is a concave function of where to stop, and cheapest at one end of a run.
        """
        local, prompt, block = as_tokens(local_tokens), as_tokens(prompt_tokens), max(1, as_tokens(block_tokens))
        is_fetch, speeds = speeds is not None, speeds or (lambda belief: lambda tier: belief(tier, now_seconds))
        believed, doubted = speeds(self.loads.of_tier), speeds(self.loads.doubted_of_tier)
        is_learned = self._is_on and self.prefill.is_learned
        begun: list[tuple[int, HitTier, dict[HitTier, int]]] = []
        """Of each run: its first token, its tier, and the tokens before it by tier."""
        tokens_of: dict[HitTier, int] = {}
        stops, end = [], local
        for tier, tokens in runs:
            start, end = end, max(end, min(end + as_tokens(tokens), prompt))
            if end > start:
                begun.append((start, tier, dict(tokens_of)))
                tokens_of[tier] = tokens_of.get(tier, 0) + end - start
                # A run that begins within a block has its first boundary as an end of its own.
                stops += sorted({at for at in (-(-start // block) * block, end // block * block) if start < at <= end})
        if not stops:
            return Decision(local, 0, 0, 0.0, is_learned, False, (), 0.0)

        def parts(stop: int) -> tuple[tuple[HitTier, float], ...]:
            start, tier, before = begun[bisect_left(begun, stop, key=itemgetter(0)) - 1]
            loaded = {**before, tier: before.get(tier, 0) + stop - start}
            return tuple((tier, tokens * self.bytes_per_token) for tier, tokens in loaded.items())

        def computing(start: int) -> float:
            return self.prefill.more_seconds(start, prompt) or 0.0

        def cheapest(speeds: Speeds) -> int:
            totals = {stop: waiting + load_seconds(parts(stop), speeds) + computing(stop) for stop in stops}
            return min(reversed([local, *stops]), key=lambda stop: totals.get(stop, computing(local)))

        waiting = min(queued_seconds, LONGEST_SECONDS) if queued_seconds > 0 else 0.0
        last = chosen = stops[-1]
        if others_running and 1e3 * (waiting + load_seconds(parts(last), believed)) > SYNCHRONOUS_MS:
            waiting += self.prefill.typical_step_seconds / 2
        is_explored = False
        if is_learned:
            chosen = cheapest(believed)
            is_due = chosen < last and self._is_due(begun[-1][1])
            if is_due or (chosen > local and any(self.loads.hopes(tier, now_seconds) for tier in tokens_of)):
                certain = min(chosen, cheapest(doubted))
                is_explored = is_due or certain < chosen
            if is_explored:
                # Further than is certain: by a block at least, and up to where loading takes no longer than computing
                # everything would, if the tiers are as they were when last seen.
                further = range(certain // block + 1, (last if is_due else chosen) // block + 1)
                reached = bisect_right(
                    further, computing(local), key=lambda blocks: load_seconds(parts(blocks * block), doubted)
                )
                chosen = further[max(0, reached - 1)] * block
        load_tokens, loaded = chosen - local, parts(chosen) if chosen > local else ()
        predicted_ms = 1e3 * (waiting + load_seconds(loaded, believed)) if load_tokens else 0.0
        if not is_fetch:
            self.counts["decisions"] += 1
            self.counts["loaded_tokens"] += load_tokens
            self.counts["declined_tokens"] += last - chosen
            self.counts["explored"] += is_explored
            self.counts["unlearned"] += not is_learned
        return Decision(local, load_tokens, last - chosen, predicted_ms, is_learned, is_explored, loaded, waiting)

    def choose_fetch(
        self,
        tier: HitTier,
        here: int,
        local: int,
        located: int,
        prompt_tokens: int,
        block_tokens: int,
        told_ms: float,
        others_running: bool,
        now_seconds: float,
    ) -> tuple[Decision, float]:
        """How much of what is elsewhere to fetch, from `here` on, and for how many seconds to wait for that.

        here, located: up to which token the store has the chain, and could have it; at a block's boundary. local: what
        the engine has itself. told_ms: how long the store expects to fetch all of it, infinite if unknown.
        """
        here, start, located = as_tokens(here), as_tokens(max(here, local)), as_tokens(located)
        told = min(1e-3 * told_ms, LONGEST_SECONDS) if 0 < told_ms < inf else 0.0

        def fetching(belief: Belief) -> tuple[float, float]:
            overhead, byte_seconds = belief(tier, now_seconds)
            return overhead, max(byte_seconds, (told - overhead) / (max(1, located - here) * self.bytes_per_token))

        def speeds(belief: Belief) -> Speeds:
            (overhead, byte_seconds), load = fetching(belief), belief(HitTier.DRAM, now_seconds)
            overhead += (start - here) * self.bytes_per_token * byte_seconds
            return lambda _: (overhead + load[0], byte_seconds + load[1])

        fetch = [(tier, located - start)]
        decision = self.choose(start, fetch, prompt_tokens, block_tokens, 0.0, others_running, now_seconds, speeds)
        if not decision.load_tokens:
            return replace(decision, local_tokens=here), 0.0
        stop, tokens = start + decision.load_tokens, start - here + decision.load_tokens
        overhead, byte_seconds = fetching(self.loads.of_tier)
        expected = overhead + tokens * self.bytes_per_token * byte_seconds + decision.waiting_seconds
        gained = self.prefill.more_seconds(start, prompt_tokens if decision.is_explored else stop)
        longest = gained if gained is not None and decision.is_learned else UNLEARNED_SECONDS
        is_known = told > 0 or self.loads.has_seen(tier)
        patience = max(LEAST_WAIT_SECONDS, PATIENCE * expected) if is_known else UNLEARNED_SECONDS
        parts = ((tier, tokens * self.bytes_per_token),)
        decision = replace(
            decision, local_tokens=here, load_tokens=tokens, predicted_load_ms=1e3 * expected, parts=parts
        )
        return decision, min(longest, patience, LONGEST_SECONDS)

    def finished(
        self,
        decision: Decision,
        actual_seconds: float,
        now_seconds: float,
        loaded_tokens: int | None = None,
        fetch_seconds: float = 0.0,
    ) -> None:
        """The load of a decision has ended, after that time with all its waiting. loaded_tokens: what came, if it was
        not all; the speeds learn from such a load only that it took at least so long. fetch_seconds: how long its
        request waited before that for a fetch."""
        if not decision.load_tokens:
            return
        loaded = decision.load_tokens if loaded_tokens is None else min(as_tokens(loaded_tokens), decision.load_tokens)
        self.counts["finished"] += 1
        self._learn(decision, actual_seconds, now_seconds, is_whole=loaded == decision.load_tokens)
        start = decision.local_tokens
        compute_seconds = self.prefill.more_seconds(start, start + loaded)
        if compute_seconds is None or not 0.0 <= actual_seconds <= LONGEST_SECONDS:
            return
        gained = compute_seconds - actual_seconds - fetch_seconds
        self.counts["judged"] += 1
        self.counts["regret_ms"] += 1e3 * max(0.0, -gained)
        self.counts["saved_ms"] += 1e3 * max(0.0, gained)

    def fetch_ended(
        self, decision: Decision, seconds: float, now_seconds: float, *, came: bool, of_ticket: bool = False
    ) -> None:
        """A fetch ended after that time. came: all of it; else its time is regretted. of_ticket: it may have waited for
        another engine to compute, which teaches nothing."""
        self.counts["fetches"] += 1
        self.counts["short_fetches"] += not came
        if of_ticket:
            return
        self._learn(decision, seconds, now_seconds, is_whole=came)
        if not came and 0.0 <= seconds <= LONGEST_SECONDS:
            self.counts["regret_ms"] += 1e3 * seconds

    # Inside --------------------------------------------------------------------------------------------------------

    def _learn(self, decision: Decision, seconds: float, now_seconds: float, *, is_whole: bool) -> None:
        if is_whole or 1e3 * seconds > decision.predicted_load_ms:
            self.loads.observe(decision.parts, seconds, now_seconds, decision.waiting_seconds)

    def _is_due(self, tier: HitTier) -> bool:
        self._declining[tier] = (self._declining[tier] + 1) % self._explore_every
        return self._declining[tier] == 0


# One engine -----------------------------------------------------------------------------------------------------------


STEPS_AHEAD = 8
"""An engine that schedules ahead of its workers has at most this many steps in flight; more are not timed."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step. prefills: of each prompt in it (tokens before, new tokens). decodes: other requests."""

    prefills: Sequence[tuple[int, int]]
    decodes: int


class LoadChoice:
    """Decides how far to load, for one engine and namespace."""

    def __init__(self, bytes_per_token: float, *, is_on: bool, audit: float, choose: Callable[[], float]) -> None:
        """bytes_per_token, is_on: as in `CostModel`. choose: uniform random numbers in [0, 1)."""
        self.holdout = Holdout(choose, audit)
        self.saving = TtftSaving()
        self.costs = CostModel(PrefillSpeed(), LoadSpeed(), bytes_per_token=bytes_per_token, is_on=is_on)
        self.fetch_seconds: dict[str, float] = {}
        """By request whose load has not begun: how long it waited for fetches that brought blocks."""
        self._decided: dict[str, Decision] = {}
        self._under_way: dict[str, tuple[Decision, float, float]] = {}
        """Each with when it began, and for how long a fetch before it was waited for."""
        self._steps: deque[tuple[int, float, StepWork, bool]] = deque(maxlen=STEPS_AHEAD)
        self._last_report_at = 0.0
        self._told: dict[str, float] = {}

    def stop_token(
        self, request: str, match: Match, local_tokens: int, cap: int, block_tokens: int, busy: bool, now: float
    ) -> tuple[int, MissReason]:
        """The token up to which to load, and why not further. cap: what can be used."""
        runs, position = [], 0
        for tier, blocks in match.tiers:
            start, position = position, position + blocks * block_tokens
            tokens = min(position, cap) - max(start, local_tokens)
            if tokens > 0:  # blocks of other nodes are in DRAM by now
                runs.append((HitTier.DRAM if tier in (HitTier.PEER, HitTier.REMOTE) else tier, tokens))
        if not runs:
            return cap, MissReason.GRID
        queued = sum(one.remaining_seconds(now - began) for one, began, _ in self._under_way.values())
        decision = self.costs.choose(local_tokens, runs, match.account.asked, block_tokens, queued, busy, now)
        self._decided[request] = decision
        if not decision.declined_tokens:
            return cap, MissReason.GRID
        return local_tokens + decision.load_tokens, MissReason.CHEAPER_TO_COMPUTE

    def load_ms(self, tokens: int, now: float) -> float:
        """The expected time to load this many tokens from DRAM; infinite until a load was measured, since the prior
        assumes a fast machine."""
        if not self.costs.loads.has_seen(HitTier.DRAM):
            return inf
        return 1e3 * self.costs.loads.seconds([(HitTier.DRAM, tokens * self.costs.bytes_per_token)], now)

    def begins(self, request: str, now: float) -> None:
        decision = self._decided.pop(request, None)
        if decision is not None:
            self._under_way[request] = (decision, now, self.fetch_seconds.pop(request, 0.0))

    def ended(self, request: str, seconds: float | None, loaded_tokens: int, now: float) -> None:
        """A request's load has ended, after that time; None: it ended just now."""
        under_way = self._under_way.pop(request, None)
        if under_way is not None:
            decision, began, fetch_seconds = under_way
            taken = now - began if seconds is None else seconds
            self.costs.finished(decision, taken, now, loaded_tokens, fetch_seconds)

    def dropped(self, request: str) -> None:
        self._decided.pop(request, None)
        self._under_way.pop(request, None)
        self.fetch_seconds.pop(request, None)

    def step_begins(self, number: int, work: StepWork, now: float, waits: bool) -> None:
        """A step is scheduled; numbers rise. waits: whether it waits for a load."""
        self._steps.append((number, now, work, waits))

    def step_ends(self, number: int, now: float) -> None:
        """A step's report is here. Earlier steps without a report never get one."""
        last, self._last_report_at = self._last_report_at, now
        while self._steps and self._steps[0][0] <= number:
            scheduled, began, work, waited = self._steps.popleft()
            if scheduled == number and not waited:
                self.costs.prefill.observe(work.prefills, work.decodes, now - max(began, last))

    def take_costs(self) -> dict[str, Any]:
        """`CostModel.counts` since the last call."""
        before, self._told = self._told, dict(self.costs.counts)
        return {name: count - before.get(name, 0.0) for name, count in self._told.items()}
