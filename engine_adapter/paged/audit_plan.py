"""Audited hits: computed although they are stored, and then compared; from the choice to the verdict.

    begins (a hit is held out, the stored block is leased) > computed (the block is there: its comparison is ordered)
    > reported (by every rank) > a verdict

With a codec that is not exact, KV computed behind a restored prefix has that codec's errors, and small changes of the
weights hide behind them. Nothing precedes a prompt's first block, so every other audit compares that one.

Not thread-safe; nothing here waits. `audit.audits` chooses the hits, `audit.blocks` compares. Must never import an
engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine_adapter.audit.audits import AuditVerdict
from engine_adapter.cost.load_choice import LoadChoice
from engine_adapter.paged.requests import AuditUnderWay, Computed, RequestState
from engine_adapter.paged.save_plan import SavePlan, page_runs
from engine_adapter.paged.step_plan import AuditOrder, AuditReport, NamespaceSpec, StepPlan
from kvstore.block.codec import codec_named
from kvstore.client.handle import Match, NamespaceHandle

GIVEN_UP = "given_up"
"""An outcome besides the verdicts: the request ended first, the block was gone, or a page before it held restored
KV."""


class AuditPlan:
    def __init__(
        self,
        choice: LoadChoice,
        facts: NamespaceSpec,
        ranks: Sequence[int],
        numbers: Iterator[int],
        lease_deadline_ms: float,
    ) -> None:
        """ranks: of the workers; each compares its part of a block. numbers: of orders."""
        self._choice = choice
        self._facts = facts
        self._ranks = tuple(ranks)
        self._numbers = numbers
        self._lease_deadline_ms = lease_deadline_ms
        self._is_exact = codec_named(facts.codec).is_exact
        self._is_first_due = not self._is_exact
        """Whether the next audit compares a prompt's first block."""
        self._under_way: dict[int, RequestState] = {}
        self._outcomes: dict[str, int] = {}
        self.name = ""
        """Of the namespace, in verdicts."""

    def begins(self, state: RequestState, match: Match, namespace: NamespaceHandle, now: float) -> bool:
        """Whether this hit is computed all the same; called once for each request that hits. Compares the last usable
        block, or the first."""
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
        pending = namespace.submit_lease(wanted, (stop - 1) * block, self._lease_deadline_ms, counts=False)
        state.audit = AuditUnderWay(stop - 1, pending)
        return True

    def is_ready(self, state: RequestState) -> bool:
        """Whether the lease of the stored block has been answered, at the latest at its deadline."""
        audit = state.audit
        return audit is None or audit.pending is None or audit.pending.poll() is not None

    def computed(self, state: RequestState, one: Computed, plan: SavePlan, orders: StepPlan) -> None:
        """A step computes this much of a request: order the comparison if the request is held out and the block is
        complete."""
        audit, block = state.audit, self._facts.layout.block_tokens
        if audit is None or audit.pending is None or one.stop < (audit.block + 1) * block:
            return
        lease = audit.pending.poll()
        if lease is None:
            return
        audit.lease, audit.pending = lease, None
        first = audit.block * block
        pages = one.tables()
        # An inexact codec may have restored pages that are now in the engine's own cache, of this block or of earlier
        # ones.
        is_exact = plan.exact_runs(pages, 0, audit.block + 1) == [(0, audit.block + 1)]
        if lease.tokens < first + block or not is_exact:
            self.ended(state)
            return
        tables = page_runs(pages, first, first + block, self._facts.layout.page_tokens)
        audit.order = AuditOrder(
            next(self._numbers), state.request.request_id, self._facts.number, lease.ticket(), first, tables
        )
        audit.waiting = set(self._ranks)
        self._under_way[audit.order.number] = state
        plan.watch(audit.order.number, tables)
        orders.audits.append(audit.order)

    def reported(self, report: AuditReport, plan: SavePlan, now: float) -> AuditVerdict | None:
        """Take one rank's report. Returns the verdict once all have reported; None if one of them had nothing to
        compare: only it may know that the step was computed behind a failed load."""
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
        """Ignore all further reports. Returns the comparisons in progress, each with the ranks that have not reported:
        they read pages until then."""
        reading = {}
        for number, state in self._under_way.items():
            if state.audit is not None:
                reading[number] = state.audit.waiting
                state.audit.order = None
                self.ended(state)
        self._under_way.clear()
        return reading

    def ended(self, state: RequestState) -> None:
        """The request is over: its audit ends, unless the comparison is in progress. Safe to call again."""
        if state.audit is not None and state.audit.order is None:
            self._end(state, [])

    def _end(self, state: RequestState, verdicts: Sequence[AuditVerdict]) -> None:
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
        """Since the last call: compared parts of blocks by verdict, and requests without a comparison."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes
