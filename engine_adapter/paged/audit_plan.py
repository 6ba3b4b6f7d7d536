"""Hits that are computed all the same, from the choice to the verdict.

    begins (a hit is held out, the stored block is leased) > computed (the block is there: its comparison is ordered)
    > reported (by every rank) > a verdict

With a codec that is not exact, what was computed behind a restored prefix carries its errors, and small changes of the
weights hide behind them. Nothing lies before a prompt's first block: it is compared every other time.

One thread; nothing here waits. `audit` says which hits, `audit_blocks` compares. Must never import an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine_adapter.audit.audits import AuditVerdict
from engine_adapter.paged.load_choice import LoadChoice
from engine_adapter.paged.requests import AuditUnderWay, Computed, RequestState
from engine_adapter.paged.save_plan import SavePlan, page_runs
from engine_adapter.paged.step_plan import AuditOrder, AuditReport, NamespaceSpec, StepPlan
from kvstore.block.codec import codec_named
from kvstore.client.handle import Match, NamespaceHandle

GIVEN_UP = "given_up"
"""Beside the verdicts: the request ended first, the block was gone, or a page before it held restored numbers."""


class AuditPlan:
    """Of one engine and namespace."""

    def __init__(
        self,
        choice: LoadChoice,
        facts: NamespaceSpec,
        ranks: Sequence[int],
        number: Callable[[], int],
        lease_deadline_ms: float,
    ) -> None:
        """ranks: that compare, each its part. number: of the next order."""
        self._choice = choice
        self._facts = facts
        self._ranks = tuple(ranks)
        self._number = number
        self._lease_deadline_ms = lease_deadline_ms
        self._is_exact = codec_named(facts.codec).is_exact
        self._is_first_due = not self._is_exact
        """Whether the next one is a prompt's first block."""
        self._under_way: dict[int, RequestState] = {}
        self._outcomes: dict[str, int] = {}
        self.name = ""
        """Of the namespace, for people."""

    def begins(self, state: RequestState, match: Match, namespace: NamespaceHandle, now: float) -> bool:
        """Whether this hit is computed all the same; asked once for each request that hits. The last usable block is
        compared, or the first."""
        holdout, request = self._choice.holdout, state.request.request_id
        if not holdout.begins(request, now):
            return False
        if not holdout.compares(request):
            return True
        self.name = self.name or namespace.namespace.digest().hex()[:12]
        block = namespace.block_tokens
        stop = 1 if self._is_first_due else min(match.tokens, state.prompt.tokens - 1) // block
        self._is_first_due = not self._is_exact and not self._is_first_due
        wanted = replace(match, keys=match.keys[:stop], blocks=stop, tokens=stop * block)
        pending = namespace.submit_lease(wanted, (stop - 1) * block, self._lease_deadline_ms)
        state.audit = AuditUnderWay(stop - 1, pending)
        return True

    def is_ready(self, state: RequestState) -> bool:
        """Whether the stored block is held, or cannot be: known by its lease's deadline."""
        audit = state.audit
        return audit is None or audit.pending is None or audit.pending.poll() is not None

    def computed(self, state: RequestState, one: Computed, plan: SavePlan, orders: StepPlan) -> None:
        """A step computes as much of a request: order the comparison, if it is held out and the block is complete."""
        audit, block = state.audit, self._facts.layout.block_tokens
        if audit is None or audit.pending is None or one.stop < (audit.block + 1) * block:
            return
        lease = audit.pending.poll()
        if lease is None:
            return
        audit.lease, audit.pending = lease, None
        first = audit.block * block
        pages = one.tables()
        # Of the engine's own cache there may be pages that an inexact codec restored, of this block or of others.
        is_exact = plan.exact_runs(pages, 0, audit.block + 1) == [(0, audit.block + 1)]
        if lease.tokens < first + block or not is_exact:
            self.ended(state)
            return
        tables = page_runs(pages, first, first + block, self._facts.layout.page_tokens)
        audit.order = AuditOrder(
            self._number(), state.request.request_id, self._facts.number, lease.ticket(), first, tables
        )
        audit.waiting = set(self._ranks)
        self._under_way[audit.order.number] = state
        plan.watch(audit.order.number, tables)
        orders.audits.append(audit.order)

    def reported(self, report: AuditReport, plan: SavePlan, now: float) -> AuditVerdict | None:
        """One rank has compared; the verdict, once all have. None if one of them had nothing to compare: it may be the
        one that knows that the step was computed behind a failed load."""
        state = self._under_way.get(report.number)
        audit = state.audit if state is not None else None
        if state is None or audit is None or audit.order is None:
            return None
        audit.waiting.discard(report.rank)
        audit.results += report.results
        audit.is_void |= not report.results
        if audit.waiting:
            return None
        del self._under_way[report.number]
        plan.unwatch(report.number)
        audit.order = None
        results = () if audit.is_void else audit.results
        self._end(state, [result.verdict for result in results])
        return self._choice.audits.record(self.name, results, now)

    def close(self) -> dict[int, set[int]]:
        """Ignore all further reports. Returns the comparisons under way, each with the ranks that have not reported:
        until then they read pages."""
        reading = {}
        for number, state in self._under_way.items():
            if state.audit is not None:
                reading[number] = state.audit.waiting
                state.audit.order = None
                self.ended(state)
        self._under_way.clear()
        return reading

    def ended(self, state: RequestState) -> None:
        """The request is over; nothing more comes of it, unless a comparison is under way. Safe to call again."""
        if state.audit is not None and state.audit.order is None:
            self._end(state, [])

    def _end(self, state: RequestState, verdicts: Sequence[AuditVerdict]) -> None:
        """Release, and count. verdicts: none if nothing was compared."""
        audit = state.audit
        assert audit is not None
        if audit.pending is not None:
            audit.pending.end()
        if audit.lease is not None:
            audit.lease.release()
        state.audit = None
        outcomes: list[str] = [*verdicts] or [GIVEN_UP]
        for outcome in outcomes:
            self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        is_sound = bool(verdicts) and AuditVerdict.DRIFTED not in verdicts
        self._choice.holdout.ended(state.request.request_id, is_sound)

    def take_outcomes(self) -> dict[str, int]:
        """Since the last call: blocks by verdict, of each rank, and requests without a comparison."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes
