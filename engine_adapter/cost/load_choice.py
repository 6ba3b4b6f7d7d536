"""How far a found prefix is loaded, and what is learned from loads and steps.

The cost model learns from the engine's steps and from finished loads; one hit in a thousand is held out, computed, and
compared. No clock, no waiting. Must never import an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf

from engine_adapter.audit.audits import Holdout, TtftSaving
from engine_adapter.cost.model import CostModel, Decision
from engine_adapter.cost.speeds import LoadSpeed, PrefillSpeed
from kvstore.block.account import HitTier, MissReason
from kvstore.client.handle import Match

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
        self._told: dict[str, int | float] = {}

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

    def take_costs(self) -> dict[str, float]:
        """`CostCounts` since the last call."""
        now, before = asdict(self.costs.counts), self._told
        self._told = now
        return {name: count - before.get(name, 0) for name, count in now.items()} if now != before else {}
