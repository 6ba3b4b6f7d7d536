"""How much of a found prefix to load, and how much to compute: whichever is expected to be over sooner.

    position   0         local            load up to here       found            prompt
               |== engine =|====== loaded ======|--- declined ---|--- not found ---|
                           '-- DRAM --'-- NVMe -'---- NVMe ------'

What other nodes or a remote tier have is decided alike: a fetch is a run of that tier, with its load from DRAM added. A
request waits for it no longer than computing the same takes, and no longer than a few times the expected duration.

A tier whose speed was never learned is loaded from. A load that would be declined is tried now and then as a *probe*,
since a belief that is never tested cannot be corrected; so is a tier that was slow when last seen and is only hoped to
be better now. No clock, no waiting, some microseconds a call; must never raise for any number. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter

from engine_adapter.cost.speeds import LONGEST_SECONDS, LoadSpeed, PrefillSpeed, Speeds, as_tokens, load_seconds
from kvstore.block.account import HitTier

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


@dataclass
class CostCounts:
    """Outcomes of the decisions. Tokens of whole blocks: loaded + declined is what was found.

    explored: decisions that loaded more than was believed right. unlearned: those that no learned speeds decided.
    judged: finished loads that were compared with computing; regret_ms and saved_ms: by how much they, with the fetch
    before them, took longer or less. locates: how often the store was asked what is elsewhere; fetches: that ended;
    short_fetches: of these, those that did not bring all.
    """

    decisions: int = 0
    loaded_tokens: int = 0
    declined_tokens: int = 0
    explored: int = 0
    unlearned: int = 0
    finished: int = 0
    judged: int = 0
    regret_ms: float = 0.0
    saved_ms: float = 0.0
    locates: int = 0
    fetches: int = 0
    short_fetches: int = 0


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
        self.counts = CostCounts()
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
            self.counts.decisions += 1
            self.counts.loaded_tokens += load_tokens
            self.counts.declined_tokens += last - chosen
            self.counts.explored += is_explored
            self.counts.unlearned += not is_learned
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
        self.counts.finished += 1
        self._learn(decision, actual_seconds, now_seconds, is_whole=loaded == decision.load_tokens)
        start = decision.local_tokens
        compute_seconds = self.prefill.more_seconds(start, start + loaded)
        if compute_seconds is None or not 0.0 <= actual_seconds <= LONGEST_SECONDS:
            return
        gained = compute_seconds - actual_seconds - fetch_seconds
        self.counts.judged += 1
        self.counts.regret_ms += 1e3 * max(0.0, -gained)
        self.counts.saved_ms += 1e3 * max(0.0, gained)

    def fetch_ended(
        self, decision: Decision, seconds: float, now_seconds: float, *, came: bool, of_ticket: bool = False
    ) -> None:
        """A fetch ended after that time. came: all of it; else its time is regretted. of_ticket: it may have waited for
        another engine to compute, which teaches nothing."""
        self.counts.fetches += 1
        self.counts.short_fetches += not came
        if of_ticket:
            return
        self._learn(decision, seconds, now_seconds, is_whole=came)
        if not came and 0.0 <= seconds <= LONGEST_SECONDS:
            self.counts.regret_ms += 1e3 * seconds

    # Inside --------------------------------------------------------------------------------------------------------

    def _learn(self, decision: Decision, seconds: float, now_seconds: float, *, is_whole: bool) -> None:
        if is_whole or 1e3 * seconds > decision.predicted_load_ms:
            self.loads.observe(decision.parts, seconds, now_seconds, decision.waiting_seconds)

    def _is_due(self, tier: HitTier) -> bool:
        self._declining[tier] = (self._declining[tier] + 1) % self._explore_every
        return self._declining[tier] == 0
