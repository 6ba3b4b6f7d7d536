"""Which blocks of which request are offered to the store, and which pages are read for that.

    a step completes a block > a save is ordered > its pages are watched > the workers report
                                                 > a page is given to another request: the save is fenced

A page that an inexact codec restored is never encoded again. Blocks that were refused, dropped or evicted meanwhile are
offered again with the request's next block. Knows pages and keys, no engine and no tokens. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_adapter.audit.audits import AuditResult
from engine_adapter.paged.step_plan import GroupSpec, LoadOrder, PageRun, SaveOrder, SaveReport
from kvstore.block.account import MissReason

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
