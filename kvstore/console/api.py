"""What the console keeps of a sidecar, what each route of its API answers, and the document that describes them. Knows
no HTTP.

A route is a method of `ConsoleApi`: its name is the path's last word, `asked` has its parameters, its result is the
answer, and its docstring is the summary in the document.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from kvstore.block.errors import StoreError
from kvstore.client.connection import check_numbers
from kvstore.client.framing import TimedOut
from kvstore.console.audit import AuditEntry
from kvstore.console.events import ConsoleEvent, events_between
from kvstore.console.figures import (
    MOST_LISTED,
    ConsoleStatus,
    Contact,
    EngineFigures,
    MissFigures,
    TenantFigures,
    WhatIfFigures,
    facts_of_tenant,
    misses_of,
    namespaces_of,
    reading_of,
    status_of,
    status_of_tenant,
    tenants_of,
    whatif_of,
)
from kvstore.console.operate import ORDERS, ActionAnswer, OperatorActions, Order, TicketAnswer
from kvstore.console.planning import PlanAnswer, PlannedModel, PlanQuery, models_of_table, planned
from kvstore.console.reasons import ReasonText
from kvstore.console.rings import Rings, SeriesAnswer, Window
from kvstore.edge.watch import ANSWER_SECONDS, StatusWatch
from kvstore.protocol import messages as m
from kvstore.protocol.told import PrefixFigures, RequestRecord
from kvstore.status.declared import picked
from kvstore.status.tree import ElsewhereStatus, NamespaceStatus, SidecarStatus
from tiering.tier import MoveCounts

A = TypeVar("A")
ASK_EVERY_SECONDS = 0.25
"""From one question of a reader's to the next, so that however many ask, engines wait no longer at the sidecar."""
MOST_EVENTS, EVENTS_TOLD = 500, 8
_OF_TENANTS = "status stat series misses prefixes tenants namespaces request models plan".split()
TENANT_PATHS = tuple(f"/api/{one}" for one in _OF_TENANTS)
"""What a tenant's reader may ask for."""
_OF_ALL = "engines elsewhere whatif events".split()
WAITING = ("/api/request", "/api/prefixes")
"""What the sidecar is asked for each time."""
ACTIONS = {f"/api/operator/{what}": order for what, order in ORDERS.items()}
"""Served to POST if the console acts for an operator."""
ERRORS = {
    "401": "The token is missing or wrong",
    "403": "A page of another site asked, or a tenant asked for what is of all",
    "421": "Another host was asked for",
    "422": "A parameter that cannot be",
    "503": "No sidecar has answered yet",
}
ACTION_ERRORS = {"409": "Another action is under way", "413": "Too long", "415": "Not JSON"}


class NoQuery(msgspec.Struct, frozen=True):
    """Of a route without parameters."""


class WindowQuery(msgspec.Struct, frozen=True):
    window: Window = "1h"


class NamespacesQuery(msgspec.Struct, frozen=True):
    """tenant: "" for all. first: of the page."""

    tenant: Annotated[str, Meta(max_length=128)] = ""
    first: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class RequestQuery(msgspec.Struct, frozen=True):
    """id: how names of requests begin; "" for the last ones."""

    id: Annotated[str, Meta(max_length=256)] = ""


class ApiError(msgspec.Struct, frozen=True):
    """The API's error: one line for people."""

    error: str


class NamespacesAnswer(msgspec.Struct, frozen=True):
    """`/api/namespaces`. all: how many there are; next: first of the next page, None at the end."""

    namespaces: list[NamespaceStatus]
    all: int
    next: int | None


class EnginesAnswer(msgspec.Struct, frozen=True):
    """`/api/engines`."""

    engines: EngineFigures
    moves: list[MoveCounts]


class ElsewhereAnswer(msgspec.Struct, frozen=True):
    """`/api/elsewhere`. elsewhere: as in `kvstore stat`; None if not configured."""

    elsewhere: ElsewhereStatus | None


class RequestAnswer(msgspec.Struct, frozen=True):
    """`/api/request`. found: newest first. kept: requests that the sidecar knows of."""

    found: list[RequestRecord]
    kept: int


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """make: the answer to a query, for a tenant's reader or, with None, for one who sees everything. Raises
    `StoreError`."""

    make: Callable[[Any, str | None], Any]
    query: type[msgspec.Struct]
    answer: Any
    summary: str


class ConsoleApi:
    """What the console keeps of a sidecar over time, and answers: the last status, series, events, and how long ago it
    answered. It follows the edge's watch; while the sidecar is away the last numbers stay, and `contact` says how old
    they are. Thread-safe, but for what waits: one caller at a time.

    tenant, of a route: what the reader is limited to; None for one who sees everything."""

    def __init__(
        self,
        watch: StatusWatch,
        version: str,
        reasons: Mapping[str, ReasonText],
        actions: OperatorActions | None = None,
    ) -> None:
        """version: of this program. reasons: words of each. actions: None if the console may change nothing."""
        self._watch, self._clock = watch, watch.clock
        self.version, self.actions, self._reasons = version, actions, reasons
        self._lock = threading.Lock()
        self._rings = Rings()
        self._facts: SidecarStatus | None = None
        self._events: deque[ConsoleEvent] = deque(maxlen=MOST_EVENTS)
        self._contact = Contact(False, self._clock.wall_seconds(), None)
        self._asks_at = -math.inf  # the soonest that the sidecar may be asked for a reader

    def hear(self, facts: SidecarStatus | None, why: str) -> None:
        """A poll was answered; or it was not, for that reason."""
        with self._lock:
            if facts is not None:
                self._take(facts)
            else:
                self._lose(why)

    def routes(self) -> dict[str, ApiRoute]:
        """By path."""
        found = {}
        for name in (*_OF_TENANTS, *_OF_ALL):
            method = getattr(self, name)
            hints = get_type_hints(method)
            found[f"/api/{name}"] = ApiRoute(method, hints["asked"], hints["return"], method.__doc__.rstrip("."))
        if (actions := self.actions) is not None:
            ticket, audit = (lambda *_: actions.ticket()), (lambda *_: actions.audit.entries())
            told = "What operators did here, the newest first"
            found["/api/operator"] = ApiRoute(ticket, NoQuery, TicketAnswer, "A ticket, good for one action")
            found["/api/audit"] = ApiRoute(audit, NoQuery, list[AuditEntry], told)
        return found

    def status(self, asked: NoQuery, tenant: str | None) -> ConsoleStatus:
        """How the sidecar is, in one object."""
        with self._lock:
            now, facts, contact = self._clock.wall_seconds(), self._facts, self._contact
            if tenant is not None:
                return status_of_tenant(self.version, now, contact, facts, tenant)
            one = status_of(self.version, now, contact, facts, self._newest_first()[:EVENTS_TOLD])
            return msgspec.structs.replace(one, acts=self.actions is not None)

    def stat(self, asked: NoQuery, tenant: str | None) -> SidecarStatus:
        """All that the sidecar reports, as in `kvstore stat --json`."""
        facts = self._facts
        if facts is None:
            why = self._contact.error if tenant is None else ""
            raise StoreError(f"no sidecar has answered yet: {why or 'wait a moment'}")
        return facts if tenant is None else facts_of_tenant(facts, tenant)

    def series(self, asked: WindowQuery, tenant: str | None) -> SeriesAnswer:
        """Numbers over time."""
        with self._lock:
            found = self._rings.window(asked.window, self._clock.wall_seconds())
        if tenant is None:
            return found
        # They are of all tenants together.
        return SeriesAnswer(asked.window, found.step, found.times, {}, {}, {}, None, [])

    def misses(self, asked: WindowQuery, tenant: str | None) -> list[MissFigures]:
        """Why tokens were computed, by reason."""
        return misses_of(self.stat(NoQuery(), tenant), self.series(asked, tenant).sums, self._reasons)

    def prefixes(self, asked: NoQuery, tenant: str | None) -> PrefixFigures:
        """Which stored prefixes are hot."""
        return self._ask(m.Prefixes(tenant or ""), m.PrefixesReply).figures

    def tenants(self, asked: NoQuery, tenant: str | None) -> list[TenantFigures]:
        """Who asked, got and has how much."""
        return tenants_of(self.stat(asked, tenant))

    def namespaces(self, asked: NamespacesQuery, tenant: str | None) -> NamespacesAnswer:
        """Namespaces, 500 at a time."""
        listed, count = namespaces_of(self.stat(NoQuery(), tenant), asked.tenant, asked.first)
        last = asked.first + len(listed)
        return NamespacesAnswer(listed, count, last if listed and last < count else None)

    def request(self, asked: RequestQuery, tenant: str | None) -> RequestAnswer:
        """The last requests of engines, or those whose names begin with id."""
        return picked(RequestAnswer, self._ask(m.Why(asked.id, tenant or ""), m.WhyReply))

    def models(self, asked: NoQuery, tenant: str | None) -> list[PlannedModel]:
        """Models that the plan knows."""
        return models_of_table()

    def plan(self, asked: PlanQuery, tenant: str | None) -> PlanAnswer:
        """What a model's KV takes, what fits, and from where on loading is sooner."""
        return planned(self._facts if tenant is None else None, asked)

    # Of all tenants together -------------------------------------------------------------------------------------

    def engines(self, asked: NoQuery, tenant: None) -> EnginesAnswer:
        """Sessions of engines, the door, and moves between tiers."""
        facts = self.stat(asked, tenant)
        hidden = facts.hidden_sessions + max(0, len(facts.sessions) - MOST_LISTED)
        figures = EngineFigures(facts.sessions[:MOST_LISTED], hidden, facts.departed, facts.door)
        return EnginesAnswer(figures, facts.moves)

    def elsewhere(self, asked: NoQuery, tenant: None) -> ElsewhereAnswer:
        """Other nodes, the directory and the remote tier, as couriers tell of them."""
        return ElsewhereAnswer(self.stat(asked, tenant).elsewhere)

    def whatif(self, asked: NoQuery, tenant: None) -> WhatIfFigures:
        """What other sizes would find, estimated."""
        return whatif_of(self.stat(asked, tenant), self.series(WindowQuery(), tenant).sums)

    def events(self, asked: NoQuery, tenant: None) -> list[ConsoleEvent]:
        """What happened, the newest first."""
        with self._lock:
            return self._newest_first()

    # ---------------------------------------------------------------------------------------------------------------

    def _newest_first(self) -> list[ConsoleEvent]:
        return sorted(reversed(self._events), key=lambda one: -one.at)  # the sidecar's arrive late

    def _ask(self, verb: m.Verb, kind: type[A]) -> A:
        self._clock.sleep(max(0.0, self._asks_at - self._clock.monotonic_seconds()))
        self._asks_at = self._clock.monotonic_seconds() + ASK_EVERY_SECONDS
        try:
            with closing(self._watch.connected()) as wire:
                answer = wire.call(verb, ANSWER_SECONDS).answer
            if not isinstance(answer, kind):
                raise StoreError(answer.text if isinstance(answer, m.Failed) else "the sidecar is of another version")
            check_numbers(msgspec.to_builtins(answer))
            return answer
        except (TimedOut, ValueError, OSError) as error:
            raise StoreError(" ".join(str(error).split()) or "no answer") from None

    def _take(self, facts: SidecarStatus) -> None:
        now = self._clock.wall_seconds()
        if not self._contact.connected and self._facts is not None:
            away = now - self._contact.since
            text = f"The sidecar answers again, after {away:.0f} s."
            self._events.append(ConsoleEvent(now, "info", "contact", text))
        self._events.extend(events_between(self._facts, facts))
        since = self._contact.since if self._contact.connected else now
        self._contact = Contact(True, since, facts.at)
        self._facts = facts
        self._rings.take(reading_of(facts))

    def _lose(self, why: str) -> None:
        if self._contact.connected:
            now = self._clock.wall_seconds()
            self._events.append(ConsoleEvent(now, "error", "contact", f"The sidecar does not answer: {why}."))
            self._contact = Contact(False, now, self._contact.numbers_from, why)
        else:
            self._contact = Contact(False, self._contact.since, self._contact.numbers_from, why)


def api_document(version: str, reads: Mapping[str, ApiRoute], actions: Mapping[str, type[Order]]) -> bytes:
    """In OpenAPI's form. actions: the orders that are posted, by path."""
    queries = {one.query for one in reads.values()}
    kinds = [ApiError, ActionAnswer, *queries, *(one.answer for one in reads.values()), *actions.values()]
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(kinds, found, strict=True))
    fields = {one: components.pop(one.__name__)["properties"] for one in queries}

    def operation(summary: str, answer: Any, errors: Mapping[str, str]) -> dict[str, Any]:
        refusals = {status: _content(text, schemas[ApiError]) for status, text in errors.items()}
        answers = {"200": _content("What was asked for, or done", schemas[answer]), **refusals}
        return {"summary": summary, "responses": answers}

    paths: dict[str, Any] = {}
    for path, route in reads.items():
        parameters = [{"name": name, "in": "query", "schema": one} for name, one in fields[route.query].items()]
        paths[path] = {"get": {**operation(route.summary, route.answer, ERRORS), "parameters": parameters}}
    for path, order in actions.items():
        body = {"required": True, **_content(str(order.__doc__), schemas[order])}
        paths[path] = {"post": {**operation(order.summary, ActionAnswer, ERRORS | ACTION_ERRORS), "requestBody": body}}
    info = {"title": "kvstore console", "version": version}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    return msgspec.json.encode(document)


def _content(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
