"""Loads in flight, and which requests they hold up.

    ordered > every rank has reported > over

    a step waits for it    the engine treats its pages as cached from the start: no other request may use them until the
                           load has succeeded, and none at all if it failed
    beside the steps       its request is parked: it holds pages and does not run. If the load brought nothing, the
                           engine takes the pages back and tries that request before all others. If it has no room, it
                           must let parked requests pass: otherwise it would keep them from ever running

Knows requests, pages and reports, and no engine. Not thread-safe.
"""

from __future__ import annotations

from engine_adapter.paged.requests import LoadUnderWay, RequestState
from engine_adapter.paged.step_plan import LoadReport


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
