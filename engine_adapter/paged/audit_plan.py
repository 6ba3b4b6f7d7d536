"""Audited hits: computed although they are stored, and then compared; from the choice to the verdict.

    begins (a hit is held out, the stored block is leased) > computed (the block is there: its comparison is ordered)
    > reported (by every rank) > a verdict

Where a model has recurrent states, the one behind that block is compared as well (`passed`), and an audit that could
not do that proves nothing.

With a codec that is not exact, KV computed behind a restored prefix has that codec's errors, and small changes of the
weights hide behind them. Nothing precedes a prompt's first block, so every other audit compares that one.

Not thread-safe; nothing here waits. `audit.audits` chooses the hits, `audit.blocks` compares. Must never import an
engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from engine_adapter.audit.audits import AuditResult, AuditVerdict, judged
from engine_adapter.cost.load_choice import LoadChoice
from engine_adapter.paged.requests import AuditUnderWay, Computed, RequestState
from engine_adapter.paged.save_plan import SavePlan, page_runs
from engine_adapter.paged.step_plan import NamespaceSpec, PageRun, SaveOrder, StepPlan
from kvstore.block.codec import codec_named
from kvstore.client.handle import Match, NamespaceHandle
from kvstore.client.states import PrefixStates

GIVEN_UP = "given_up"
"""An outcome besides the verdicts: the request ended first, the block was gone, or a page before it held restored
KV."""


class AuditPlan:
    def __init__(
        self,
        choice: LoadChoice,
        facts: NamespaceSpec,
        plan: SavePlan,
        numbers: Iterator[int],
        lease_deadline_ms: float,
    ) -> None:
        """plan: watches pages that are compared. numbers: of orders."""
        self._choice = choice
        self._facts, self._plan, self._numbers = facts, plan, numbers
        self._lease_deadline_ms = lease_deadline_ms
        self._is_exact = codec_named(facts.codec).is_exact
        self._is_first_due = not self._is_exact
        """Whether the next audit compares a prompt's first block."""
        self._under_way: dict[int, RequestState] = {}
        self._outcomes = Counter[str]()
        self.name = ""
        """Of the namespace, in verdicts."""

    def begins(
        self, state: RequestState, match: Match, namespace: NamespaceHandle, states: PrefixStates | None, now: float
    ) -> bool:
        """Whether this hit is computed all the same; called once for each request that hits. Compares the last usable
        block, or the first."""
        holdout, request = self._choice.holdout, state.request.request_id
        if not holdout.begins(request, now):
            return False
        if not holdout.compares(request):
            return True
        self.name = self.name or namespace.namespace.digest().hex()[:12]
        block = namespace.block_tokens
        last = min(match.tokens, state.prompt.tokens - 1) // block
        stop = 1 if self._is_first_due else last
        self._is_first_due = not self._is_exact and not self._is_first_due
        pending, deadline_ms = {}, self._lease_deadline_ms
        if self._facts.has_kv:
            wanted = replace(match, keys=match.keys[:stop], blocks=stop, tokens=stop * block)
            pending[False] = namespace.submit_lease(wanted, (stop - 1) * block, deadline_ms, counts=False)
        if states is not None and stop == last:
            of_state = states.match_of(match.keys[stop - 1])
            pending[True] = states.handle.submit_lease(of_state, 0, deadline_ms, counts=False)
        state.audit = AuditUnderWay(stop - 1, pending)
        return True

    def is_ready(self, state: RequestState) -> bool:
        """Whether the leases of what is stored have been answered, at the latest at their deadline."""
        return state.audit is None or all(one.poll() is not None for one in state.audit.pending.values())

    def computed(self, state: RequestState, one: Computed, orders: StepPlan) -> None:
        """A step computes this much of a request: order the comparison if the request is held out and the block is
        complete."""
        audit, block = state.audit, self._facts.layout.block_tokens
        if audit is None or False not in audit.pending or one.stop < (audit.block + 1) * block:
            return
        pages, first = one.tables(), audit.block * block
        # An inexact codec may have restored pages that are now in the engine's own cache, of this block or of earlier
        # ones.
        is_read = audit.pending[False].poll() is not None
        if is_read and self._plan.exact_runs(pages, 0, audit.block + 1) != [(0, audit.block + 1)]:
            self.ended(state)
            return
        tables = page_runs(pages, first, first + block, self._facts.kv_groups)
        self._order(state, audit, first + block, tables, orders, is_state=False)

    def passed(self, state: RequestState, blocks: int, tables: tuple[PageRun, ...], orders: StepPlan) -> None:
        """A step computes the states behind so many blocks: likewise. tables: with these."""
        audit = state.audit
        if audit is not None and True in audit.pending and blocks == audit.block + 1:
            self._order(state, audit, self._facts.layout.block_tokens, tables, orders, is_state=True)

    def _order(
        self,
        state: RequestState,
        audit: AuditUnderWay,
        least: int,
        tables: tuple[PageRun, ...],
        orders: StepPlan,
        *,
        is_state: bool,
    ) -> None:
        lease = audit.pending[is_state].poll()
        if lease is None:
            return
        del audit.pending[is_state]
        audit.leases.append(lease)
        if lease.tokens < least:
            self.ended(state)
            return
        first, number = audit.block * self._facts.layout.block_tokens, next(self._numbers)
        order = SaveOrder(
            number,
            state.request.request_id,
            self._facts.number,
            b"",
            first,
            tables,
            None,
            0,
            is_urgent=True,
            is_state=is_state,
            ticket=lease.ticket(),
        )
        orders.saves.append(order)
        audit.orders.add(number)
        self._under_way[number] = state
        self._plan.add(order, audit.block, audit.block + 1)

    def reported(self, number: int, results: tuple[AuditResult, ...]) -> AuditVerdict | None:
        """All ranks have reported: returns the verdict. results: empty if one of them had nothing to compare: only it
        may know that the step was computed behind a failed load."""
        state = self._under_way.pop(number, None)
        audit = state.audit if state is not None else None
        if state is None or audit is None:
            return None
        audit.orders.discard(number)
        audit.verdicts += [result.verdict for result in results]
        audit.is_partial |= not results
        if not audit.pending:
            self.ended(state)
        return judged(self.name, results)

    def close(self) -> None:
        """Give up the comparisons in progress, and ignore their reports."""
        for state in self._under_way.values():
            if state.audit is not None:
                state.audit.is_partial = True
                state.audit.orders.clear()
                self.ended(state)
        self._under_way.clear()

    def ended(self, state: RequestState) -> None:
        """The request is over: its audit ends, unless a comparison is in progress. Safe to call again."""
        audit = state.audit
        if audit is None:
            return
        audit.is_partial |= bool(audit.pending)
        for pending in audit.pending.values():
            pending.end()
        audit.pending.clear()
        if audit.orders:
            return
        for lease in audit.leases:
            lease.release()
        state.audit = None
        self._outcomes.update(map(str, audit.verdicts) if audit.verdicts else [GIVEN_UP])
        is_compared = bool(audit.verdicts) and not audit.is_partial
        is_sound = is_compared and AuditVerdict.DRIFTED not in audit.verdicts
        self._choice.holdout.ended(state.request.request_id, is_sound)

    def take_outcomes(self) -> Counter[str]:
        """Since the last call: compared parts of blocks by verdict, and requests without a comparison."""
        outcomes, self._outcomes = self._outcomes, Counter()
        return outcomes
