"""Whether what is elsewhere is fetched, or computed: whichever is believed to be over sooner.

    position   0        here       local       located           prompt
               |= DRAM =|======= fetched =======|=== computed ===|
                        '-- fetching: all of it --'
                                   '- gained: what computing this would take, less loading it -'

A request waits for a fetch no longer than computing the same takes, and no longer than a few times the fetch's expected
duration: so a fetch makes a request slower by that wait at most. A fetch that ended teaches how fast its tier is;
fetches that would be declined are tried now and then, as with loads. Pure: no clock, no waiting. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from engine_adapter.cost.model import EXPLORE_EVERY, CostModel
from engine_adapter.cost.speeds import LONGEST_SECONDS, as_tokens
from kvstore.block.account import HitTier

PATIENCE = 4.0
"""A fetch is waited for no longer than so many times its expected duration."""
LEAST_WAIT_SECONDS = 0.05
"""But at least for this long, since any machine may be busy with something else."""
UNLEARNED_SECONDS = 2.0
"""The longest wait of an engine that has not learned how fast it computes, and for fetches of unknown duration."""


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """tokens: the chain is fetched up to this one; 0: nothing is. seconds: how long to wait for that. expected_seconds:
    how long it should take, with `waiting_seconds` until its end is noticed."""

    tier: HitTier
    tokens: int
    seconds: float
    expected_seconds: float
    waiting_seconds: float
    size_bytes: float
    is_explored: bool = False


class FetchModel:
    """Decides with what an engine's cost model has learned, and teaches it."""

    def __init__(self, costs: CostModel, *, is_on: bool, explore_every: int = EXPLORE_EVERY) -> None:
        """is_on: whether blocks that are slower to fetch are computed; speeds are learned anyway."""
        self._costs, self._is_on, self._explore_every = costs, is_on, explore_every
        self._declining = 0

    def choose(
        self,
        tier: HitTier,
        here: int,
        local: int,
        located: int,
        prompt: int,
        block_tokens: int,
        told_ms: float,
        others_running: bool,
        now: float,
    ) -> FetchDecision:
        """here, located: up to which token the store has the chain, and could have it; at a block's boundary. local:
        what the engine has itself. told_ms: how long the store expects to fetch all of it, infinite if unknown.
        others_running: whether the engine is busy, so that a fetch's end is noticed half a step late on average."""
        costs, prefill = self._costs, self._costs.prefill
        here, local, located, prompt = map(as_tokens, (here, local, located, prompt))
        start, told = max(here, local), 1e-3 * told_ms if isfinite(told_ms) and told_ms > 0 else 0.0
        waiting = prefill.typical_step_seconds / 2 if others_running else 0.0

        def fetching(stop: int, speeds: Callable[[HitTier, float], tuple[float, float]]) -> float:
            overhead, byte_seconds = speeds(tier, now)
            share = (stop - here) / max(1, located - here)
            return min(max(overhead + (stop - here) * costs.bytes_per_token * byte_seconds, share * told), 1e4)

        def decided(stop: int, longest: float, explores: bool = False) -> FetchDecision:
            expected = fetching(stop, costs.loads.of_tier) if stop else 0.0
            is_known = told > 0 or costs.loads.has_seen(tier)
            patience = max(LEAST_WAIT_SECONDS, PATIENCE * (expected + waiting)) if is_known else UNLEARNED_SECONDS
            seconds = min(longest, patience, LONGEST_SECONDS)
            size = max(0, stop - here) * costs.bytes_per_token
            return FetchDecision(tier, stop, seconds, expected + waiting, waiting, size, explores)

        if located <= start:
            return decided(0, 0.0)
        gained = prefill.more_seconds(start, located)
        if gained is None or not self._is_on:
            return decided(located, UNLEARNED_SECONDS)
        gained_less = gained - 1e-3 * costs.predicted_load_ms([(HitTier.DRAM, located - start)], now) - waiting
        is_cheaper = fetching(located, costs.loads.of_tier) <= gained_less
        if is_cheaper and fetching(located, costs.loads.doubted_of_tier) <= gained_less:
            return decided(located, gained)
        self._declining = (self._declining + (not is_cheaper)) % self._explore_every
        if not is_cheaper and self._declining:
            return decided(0, 0.0)
        # A probe: as much as takes no longer than computing everything, if the tier is as it was when last seen.
        affordable = prefill.more_seconds(start, prompt) or 0.0
        share = min(1.0, affordable / max(1e-9, fetching(located, costs.loads.doubted_of_tier)))
        block = max(1, block_tokens)
        reached = (here + int(share * (located - here))) // block * block
        stop = min(located, max(reached, (start // block + 1) * block))
        return decided(stop, affordable, explores=True)

    def ended(
        self, decision: FetchDecision, seconds: float, now: float, *, came: bool, of_ticket: bool = False
    ) -> None:
        """A fetch ended after that time. came: all of it; else only that it takes at least so long is learned, and the
        time is regretted. of_ticket: it may have waited for another engine to compute, which teaches nothing."""
        counts = self._costs.counts
        counts.fetches += 1
        counts.short_fetches += not came
        if of_ticket:
            return
        if came or seconds > decision.expected_seconds:
            parts = [(decision.tier, decision.size_bytes)]
            self._costs.loads.observe(parts, seconds, now, decision.waiting_seconds)
        if not came and 0.0 <= seconds <= LONGEST_SECONDS:
            counts.regret_ms += 1e3 * seconds
