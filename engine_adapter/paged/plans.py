"""The scheduler half's loads, saves and audits in flight: which requests they hold up, and which pages they use.

    load    ordered > every rank has reported > over
            a step waits for it    the engine treats its pages as cached from the start: no other request may use them
                                   until the load has succeeded, and none at all if it failed
            beside the steps       its request is parked: it holds pages and does not run. If the load brought nothing,
                                   the engine takes the pages back and tries that request before all others. If it has
                                   no room, it must let parked requests pass: otherwise they would never run
    save    a step completes a block > a save is ordered > its pages are watched > the workers report
                                                         > a page is given to another request: the save is fenced
    audit   a hit is held out, the stored block is leased > the block is computed: its comparison is ordered
            > reported by every rank > a verdict

A page that an inexact codec restored is never encoded again. Blocks that were refused, dropped or evicted meanwhile are
offered again with the request's next block.

Where a model has recurrent states, the one behind an audited block is compared as well (`passed`), and an audit that
could not do that proves nothing. With a codec that is not exact, KV computed behind a restored prefix has that codec's
errors, and small changes of the weights hide behind them. Nothing precedes a prompt's first block, so every other audit
compares that one. `audit.audits` chooses the hits, `audit.blocks` compares.

Not thread-safe, except `SavePatience`; nothing here waits. Must never import an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine_adapter.audit.audits import AuditResult, AuditVerdict, judged
from engine_adapter.cost import LoadChoice
from engine_adapter.paged.requests import AuditUnderWay, Computed, LoadUnderWay, RequestState
from engine_adapter.paged.step_plan import (
    GroupSpec,
    LoadOrder,
    LoadReport,
    NamespaceSpec,
    PageRun,
    SaveOrder,
    SaveReport,
    StepPlan,
)
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.client.handle import Match, NamespaceHandle
from kvstore.client.states import PrefixStates


class LoadPlan:
    def __init__(self, page_tokens: int, block_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._under_way: dict[int, LoadUnderWay] = {}
        self._parked: set[str] = set()
        self._rejected: set[str] = set()
        self._invalid_pages: set[int] = set()
        self._is_given_up = False

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, load: LoadUnderWay) -> None:
        self._under_way[load.order.number] = load
        if not load.order.waits:
            self._parked.add(load.order.request)

    def reported(self, report: LoadReport) -> LoadUnderWay | None:
        """Take one worker's report. Returns the load once all have reported."""
        load = self._under_way.get(report.number)
        if load is None:
            return None
        load.waiting.discard(report.rank)
        load.seconds = max(load.seconds, report.seconds)
        if report.tokens < load.tokens:
            load.tokens, load.reason = report.tokens, report.reason
        if load.waiting:
            return None
        del self._under_way[report.number]
        if load.order.waits and not load.is_whole:
            self._invalid_pages.update(load.pages[(load.end - load.order.first_token) // self._page_tokens :])
        return load

    def turn_away(self, request_id: str) -> None:
        """A request's load brought nothing, so the engine takes its pages back."""
        self._parked.discard(request_id)
        self._rejected.add(request_id)

    # What requests may do --------------------------------------------------------------------------------------------

    def asks(self, state: RequestState, local_tokens: int) -> bool:
        """A request is to be matched; local_tokens: of the engine's own cache. Returns whether it must ask again in the
        next step."""
        request_id = state.request.request_id
        self._parked.discard(request_id)
        is_held_up = request_id in self._rejected and bool(self._parked)
        return is_held_up or self._is_unsure(state, local_tokens)

    @property
    def takes_no_more(self) -> bool:
        """Whether no further load beside the steps may take pages, since a request whose load brought nothing waits for
        room."""
        return bool(self._rejected)

    def resumes(self, request_id: str) -> bool:
        """A request gets pages. Returns whether it was parked: then these are for the tokens behind its load."""
        if request_id not in self._parked:
            self._rejected.discard(request_id)
            return False
        self._parked.discard(request_id)
        return True

    def ended(self, request_id: str) -> None:
        self._parked.discard(request_id)
        self._rejected.discard(request_id)

    def _is_unsure(self, state: RequestState, local_tokens: int) -> bool:
        if self._is_given_up:
            return False
        for load in self._under_way.values():
            if not load.order.waits or load.state is state or local_tokens <= load.order.first_token:
                continue
            blocks = load.order.first_token // self._block_tokens
            keys, others = state.prompt.keys, load.state.prompt.keys
            if min(len(keys), len(others)) < blocks or keys[:blocks][-1:] == others[:blocks][-1:]:
                return True
        return False

    # What a failed load leaves behind --------------------------------------------------------------------------------

    def take_invalid_pages(self) -> set[int]:
        """Pages without KV, and those computed behind them, since the last call."""
        invalid_pages, self._invalid_pages = self._invalid_pages, set()
        return invalid_pages

    def give_up(self) -> None:
        """From now on, outcomes of loads that steps wait for are unknown: no request may use their pages, and none
        waits for a report."""
        self._is_given_up = True
        for load in self._under_way.values():
            self._invalid_pages.update(load.pages)


# Saves ----------------------------------------------------------------------------------------------------------------


FREED = 0
"""The page number in an engine's tables for a freed page; never that of a request's page."""
QUIET_SECONDS = 0.03
"""Without a step for this long the engine is idle: a running one has shorter gaps between steps."""
HURRIED_SECONDS = 10.0
"""For this long after a save was lost, others do not wait."""


@dataclass(slots=True)
class Offer:
    """One save in flight. held: leading blocks that the store has, as far as known. dropped: not all of it was read.
    results: of an audit; None once a rank had nothing to compare."""

    order: SaveOrder
    first_block: int
    stop_block: int
    waiting: set[int]
    held: int
    stored: int = 0
    reason: MissReason | None = None
    dropped: bool = False
    results: tuple[AuditResult, ...] | None = ()


class SavePlan:
    def __init__(self, ranks: Iterable[int], groups: Sequence[GroupSpec], block_tokens: int) -> None:
        """ranks: workers that report each save. groups: with KV."""
        self._ranks = tuple(ranks)
        self._groups = tuple(groups)
        self._block_tokens = block_tokens
        self._offers: dict[int, Offer] = {}
        self._reading: dict[int, set[int]] = {}
        """Pages being read, and by which orders: several may read a page of the engine's own cache."""
        self._decoded: dict[int, int] = {}
        """Pages that an inexact codec restored, each with its load."""

    def taken(self, pages: set[int]) -> list[int]:
        """These pages are written to from now on; returns the saves that read any of them."""
        if self._decoded:
            for page in pages:
                self._decoded.pop(page, None)
        return sorted({number for page in pages for number in self._reading.get(page, ())})

    def decoded(self, pages: Iterable[int], number: int) -> None:
        """An inexact codec restored these, in the load of that number."""
        self._decoded.update(dict.fromkeys(pages, number))

    def computed(self, load: LoadOrder, tokens: int) -> None:
        """The load failed, and the engine itself computes the pages behind so many tokens. A page that another load has
        filled since keeps its mark."""
        for run, group in zip(load.tables, self._groups, strict=True):
            for page in run.pages[max(0, tokens // group.page_tokens - run.first) :]:
                if self._decoded.get(page) == load.number:
                    del self._decoded[page]

    def exact_runs(self, tables: Sequence[Sequence[int]], first_block: int, stop_block: int) -> list[tuple[int, int]]:
        """Runs of blocks whose pages are all as the engine computed them."""
        if not self._decoded:
            return [(first_block, stop_block)]
        runs: list[tuple[int, int]] = []
        for number in range(first_block, stop_block):
            first = number * self._block_tokens
            of_block = page_runs(tables, first, first + self._block_tokens, self._groups)
            if not all(self._decoded.keys().isdisjoint(run.pages) for run in of_block):
                continue
            if runs and runs[-1][1] == number:
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
        return runs

    def add(self, order: SaveOrder, first_block: int, stop_block: int) -> None:
        self._offers[order.number] = Offer(order, first_block, stop_block, set(self._ranks), stop_block)
        for page in _pages_of(order):
            self._reading.setdefault(page, set()).add(order.number)

    def reported(self, report: SaveReport) -> Offer | None:
        """Take one worker's report. Returns the save once all have reported."""
        offer = self._offers.get(report.number)
        if offer is None:
            return None
        offer.waiting.discard(report.rank)
        offer.stored = max(offer.stored, report.stored)
        offer.results = offer.results + report.results if offer.results is not None and report.results else None
        if report.reason is not None or report.dropped:
            offer.dropped |= report.dropped
            offer.reason = report.reason or offer.reason
            # A dropped save says nothing about the blocks before; a put may find that they were evicted.
            offer.held = min(offer.held, max(report.held, offer.first_block) if report.dropped else report.held)
        if offer.waiting:
            return None
        del self._offers[report.number]
        for page in _pages_of(offer.order):
            self._reading[page].discard(report.number)
            if not self._reading[page]:
                del self._reading[page]
        return offer


def _pages_of(order: SaveOrder) -> set[int]:
    return {page for run in order.tables for page in run.pages}


def page_runs(
    tables: Sequence[Sequence[int]], first_token: int, stop_token: int, groups: Iterable[GroupSpec]
) -> tuple[PageRun, ...]:
    """Each group's pages of these tokens, without leading pages that were freed since, which an engine's tables list as
    page 0 (sliding windows); of a state, the page with the state behind the last of them."""
    runs = []
    for group in groups:
        table, stop = tables[group.table], -(-stop_token // group.page_tokens)
        if group.is_state:
            runs.append(PageRun(0, list(table[stop - 1 : stop])))
            continue
        first = first_token // group.page_tokens
        pages = list(table[first:stop])
        freed = next((at for at, page in enumerate(pages) if page != FREED), len(pages))
        runs.append(PageRun(first + freed, pages[freed:]))
    return tuple(runs)


class SavePatience:
    """How long a save waits for an engine that computes on the same CPU cores. Of one worker, under its lock except
    `step_began`; callers pass the time.

        a step computes > it is over > QUIET_SECONDS without another one > saves go

    Encoding and copying take cores, memory bandwidth and the interpreter's lock from a step; after it they cost the
    engine nothing. The wait is bounded, and is off for a while once it has lost a save: one whose pages were wanted
    before its turn, or that found no room behind the waiting ones.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: that a save waits at most; 0 for an engine that computes elsewhere."""
        self._seconds = seconds
        self._is_in_step = False
        self._stepped_at = 0.0
        self._hurried_until = 0.0

    def __bool__(self) -> bool:
        return self._seconds > 0

    def step_began(self) -> None:
        self._is_in_step = True

    def step_ended(self, now: float) -> None:
        """Also called, without `step_began`, for steps that compute nothing."""
        if self._is_in_step:
            self._is_in_step = False
            self._stepped_at = now

    def gave_up(self, now: float) -> None:
        self._hurried_until = now + HURRIED_SECONDS

    def seconds_left(self, since: float, now: float) -> float:
        """How long a save that was ordered at `since` still waits; 0 when it is its turn."""
        left = since + self._seconds - now
        if left <= 0 or now < self._hurried_until:
            return 0.0
        quiet = QUIET_SECONDS if self._is_in_step else self._stepped_at + QUIET_SECONDS - now
        return max(0.0, min(left, quiet))


# Audits ---------------------------------------------------------------------------------------------------------------


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
