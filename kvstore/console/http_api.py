"""The console over HTTP: pages, the JSON API behind them, and the event stream. All of it reads, except the login and
the actions of `kvstore.console.operate`.

    request > a known host > our own origin > a token, if configured > page or API > headers

`kvstore.console.figures` makes the API's answers; `/openapi.json` documents them. Only this room imports FastAPI: the
sidecar's process has none of it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from html import escape
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import RedirectResponse, StreamingResponse
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from kvstore.block.errors import BadInput, StoreError
from kvstore.console.access import COOKIE, LOGIN_SECONDS, Guard
from kvstore.console.audit import AuditEntry
from kvstore.console.events import ConsoleEvent
from kvstore.console.figures import (
    MOST_LISTED,
    ConsoleStatus,
    EngineFigures,
    MissFigures,
    TenantFigures,
    WhatIfFigures,
    facts_of_tenant,
    misses_of,
    namespaces_of,
    tenants_of,
    whatif_of,
)
from kvstore.console.history import SidecarHistory
from kvstore.console.operate import (
    MOST_ORDER_BYTES,
    ORDERS,
    ActionAnswer,
    ActionUnderWay,
    OperatorActions,
    TicketAnswer,
)
from kvstore.console.planning import PlanAnswer, PlannedModel, models_of_table, planned
from kvstore.console.rings import WINDOWS, SeriesAnswer
from kvstore.console.stream import Broadcast
from kvstore.edge.tokens import Caller
from kvstore.listeners.http_server import App, HttpRefused, Message, Receive, Send, introduce, whole_body
from kvstore.protocol.told import PrefixFigures, RequestRecord
from kvstore.status.tree import ElsewhereStatus, NamespaceStatus, SidecarStatus
from tiering.tier import MoveCounts

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, browsers send the login form with origin null
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
PAGES = ("/", "/misses", "/prefixes", "/tenants", "/moves", "/engines", "/request", "/plan", "/operate", "/events")
HELP = "/help"
"""Explains all panels, reasons and alerts; has no numbers."""
MOST_FORM_BYTES = 8192
WRONG_SECONDS = 0.5
"""How late a wrong token is answered to."""
ACTIONS = {f"/api/operator/{what}": order for what, order in ORDERS.items()}
"""Served to POST if the console acts for an operator."""
TENANT_PATHS = tuple(
    f"/api/{one}"
    for one in ("status", "stat", "series", "misses", "prefixes", "tenants", "namespaces", "request", "models", "plan")
)
"""What a tenant's reader may ask of the API."""
TENANT = "kvstore.tenant"
"""Key in a request's scope: the tenant that the reader is limited to; None for all."""
WHO = "kvstore.who"
"""Key in a request's scope: the reader's name for the audit log."""
OPEN_PATHS = ("/login", "/static/style.css", "/static/favicon.svg")
"""Served without a login."""

A = TypeVar("A")


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
class StaticFile:
    """A file of the package, as it is sent."""

    body: bytes
    type: str
    tag: str

    @staticmethod
    def of(name: str, body: bytes) -> StaticFile:
        ending = name.rpartition(".")[2] if "." in name else "txt"
        return StaticFile(body, TYPES.get(ending, TYPES["txt"]), f'"{sha256(body).hexdigest()[:16]}"')


def make_app(
    history: SidecarHistory,
    guard: Guard,
    hub: Broadcast,
    files: Mapping[str, bytes],
    version: str,
    actions: OperatorActions | None = None,
) -> App:
    """files: name below static/ -> contents. actions: None if the console may change nothing."""
    app = FastAPI(title="kvstore console", version=version, docs_url=None, redoc_url=None, openapi_url=None)
    static = {name: StaticFile.of(name, body) for name, body in files.items()}
    if guard.has_token:
        shown = files["index.html"].replace(b'action="/logout" hidden', b'action="/logout"')
        static["index.html"] = StaticFile.of("index.html", shown)
    written = help_page(files["dashboard.md"].decode(), static["index.html"].body)
    static["help.html"] = StaticFile.of("help.html", written)
    _add_api(app, history, hub)
    if actions is not None:
        _add_actions(app, actions)
    _add_pages(app, guard, static)
    _add_document(app, version, acts=actions is not None)

    @app.exception_handler(HttpRefused)
    async def refused(request: Request, error: HttpRefused) -> Response:
        return _json(ApiError(str(error)), error.status, dict(error.headers))

    @app.exception_handler(HTTPException)
    async def unserved(request: Request, error: HTTPException) -> Response:
        return _json(ApiError(str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def not_understood(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(one) for one in first.get("loc", ())[1:])
        return _json(ApiError(f"{name}: {first.get('msg', 'not understood')}"), 422)

    return Gate(app, guard, () if actions is None else tuple(ACTIONS))


class Gate:
    """Middleware before every request: checks host, origin and access; adds headers to every answer."""

    def __init__(self, app: App, guard: Guard, actions: tuple[str, ...] = ()) -> None:
        """actions: paths that change something, for readers with the operator's token."""
        self._app = app
        self._guard = guard
        self._actions = actions

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI interface."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                more = HEADERS if b"cache-control" in names else {**HEADERS, "cache-control": "no-store"}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in more.items())]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None and refusal.status_code == 429:
            await asyncio.sleep(WRONG_SECONDS)
        app: App = self._app if refusal is None else refusal
        await app(scope, receive, sent)

    def _refusal(self, scope: Message) -> Response | None:
        asked = HTTPConnection(scope)
        host, origins = asked.headers.getlist("host"), asked.headers.getlist("origin")
        if len(host) != 1 or not self._guard.is_known_host(host[0]):
            return _json(ApiError("this server has another name; ask for it as localhost or 127.0.0.1"), 421)
        if not all(self._guard.is_own_origin(one, host[0]) for one in origins):
            return _json(ApiError("a page of another site asks; open the console itself"), 403)
        path = scope["path"]
        authorization, login = asked.headers.get("authorization"), asked.cookies.get(COOKIE, "")
        reader = Caller() if path in OPEN_PATHS else self._guard.reader(authorization, login)
        if reader is not None:
            if reader.tenant is not None and path.startswith("/api/") and path not in TENANT_PATHS:
                return _json(ApiError(f"a tenant's token shows that tenant alone: {', '.join(TENANT_PATHS)}"), 403)
            if scope["method"] != "GET" and path not in ("/login", "/logout", *self._actions):
                return _json(ApiError("this changes nothing: ask with GET"), 405, {"allow": "GET, HEAD"})
            if path in self._actions and authorization is None and not origins:
                return _json(ApiError("an action is asked for with the token, or from a page of the console"), 403)
            if path not in OPEN_PATHS:
                introduce(scope, reader)
            scope[TENANT] = reader.tenant
            scope[WHO] = f"operator's {'login' if authorization is None else 'token'} at {(scope['client'] or '-')[0]}"
            return None
        if authorization is not None and (seconds := self._guard.refused_for()):
            return _too_many(seconds)
        if path in PAGES or path == HELP:
            return RedirectResponse("/login", 303)
        answer = _json(ApiError("give the token: Authorization: Bearer ..., or log in at /login"), 401)
        answer.headers["www-authenticate"] = "Bearer"
        return answer


def _add_api(app: FastAPI, history: SidecarHistory, hub: Broadcast) -> None:
    window = Query("1h", description=f"One of {', '.join(WINDOWS)}.", pattern=f"^({'|'.join(WINDOWS)})$")

    def known(request: Request) -> SidecarStatus:
        facts, tenant = history.facts(), request.scope[TENANT]
        if facts is None:
            why = history.status().contact.error if tenant is None else ""
            raise HttpRefused(503, f"no sidecar has answered yet: {why or 'wait a moment'}")
        return facts if tenant is None else facts_of_tenant(facts, tenant)

    def seen(request: Request, window: str) -> SeriesAnswer:
        """Series are of all tenants together, so a tenant's reader gets none."""
        found = history.window(window)
        if request.scope[TENANT] is None:
            return found
        return SeriesAnswer(window, found.step, found.times, {}, {}, {}, None, [])

    def asked(ask: Callable[[], A | None]) -> A:
        """Ask the sidecar now."""
        try:
            found = ask()
        except StoreError as error:
            raise HttpRefused(503, str(error)) from None
        if found is None:
            raise HttpRefused(503, "others ask at the moment; try again")
        return found

    @app.get("/api/status", summary="How the sidecar is, in one object")
    async def status(request: Request) -> Response:
        tenant = request.scope[TENANT]
        return _json(history.status() if tenant is None else history.status_of_tenant(tenant))

    @app.get("/api/stat", summary="All that the sidecar reports, as in `kvstore stat --json`")
    async def stat(request: Request) -> Response:
        return _json(known(request))

    @app.get("/api/series", summary="Numbers over time")
    async def series(request: Request, window: str = window) -> Response:
        return _json(seen(request, window))

    @app.get("/api/misses", summary="Why tokens were computed, by reason")
    async def misses(request: Request, window: str = window) -> Response:
        return _json(misses_of(known(request), seen(request, window).sums, history.reasons))

    @app.get("/api/tenants", summary="Who asked, got and has how much")
    async def tenants(request: Request) -> Response:
        return _json(tenants_of(known(request)))

    @app.get("/api/namespaces", summary=f"Namespaces, {MOST_LISTED} at a time")
    async def namespaces(
        request: Request, tenant: str = Query("", max_length=128), first: int = Query(0, ge=0, le=1_000_000)
    ) -> Response:
        listed, count = namespaces_of(known(request), tenant, first)
        last = first + len(listed)
        return _json(NamespacesAnswer(listed, count, last if listed and last < count else None))

    @app.get("/api/engines", summary="Sessions of engines, the door, and moves between tiers")
    async def engines(request: Request) -> Response:
        facts = known(request)
        hidden = facts.hidden_sessions + max(0, len(facts.sessions) - MOST_LISTED)
        figures = EngineFigures(facts.sessions[:MOST_LISTED], hidden, facts.departed, facts.door)
        return _json(EnginesAnswer(figures, facts.moves))

    @app.get("/api/elsewhere", summary="Other nodes, the directory and the remote tier, as couriers tell of them")
    async def elsewhere(request: Request) -> Response:
        return _json(ElsewhereAnswer(known(request).elsewhere))

    @app.get("/api/whatif", summary="What other sizes would find, estimated")
    async def whatif(request: Request) -> Response:
        return _json(whatif_of(known(request), history.window("1h").sums))

    @app.get("/api/request", summary="The last requests of engines, or those whose names begin with id")
    def one_request(request: Request, id: str = Query("", max_length=256)) -> Response:
        found = asked(lambda: history.why(id, request.scope[TENANT] or ""))
        return _json(RequestAnswer(found.found, found.kept))

    @app.get("/api/prefixes", summary="Which stored prefixes are hot")
    def prefixes(request: Request) -> Response:
        return _json(asked(lambda: history.prefixes(request.scope[TENANT] or "")))

    @app.get("/api/models", summary="Models that the plan knows")
    async def models() -> Response:
        return _json(models_of_table())

    @app.get("/api/plan", summary="What a model's KV takes, what fits, and from where on loading is sooner")
    async def plan(
        request: Request,
        model: str = Query("llama-3.1-8b", max_length=128),
        context_tokens: int = Query(8192, ge=1, le=1 << 24),
        users: int = Query(1, ge=1, le=1_000_000),
        tensor_parallel: int = Query(1, ge=1, le=64),
        window_seconds: float = Query(900.0, gt=0, le=31_536_000),
        prefill_rate: float = Query(10_000.0, ge=1, le=1e9),
        gpu_memory: str = Query("", max_length=32),
        weights: str = Query("", max_length=32),
        dram: str = Query("", max_length=32),
        nvme: str = Query("", max_length=32),
        new_tokens_per_second: float | None = Query(None, ge=0, le=1e9),
    ) -> Response:
        try:
            return _json(
                planned(
                    history.facts() if request.scope[TENANT] is None else None,
                    model,
                    gpu_memory,
                    weights,
                    (dram, nvme),
                    new_tokens_per_second,
                    context_tokens=context_tokens,
                    users=users,
                    tensor_parallel=tensor_parallel,
                    window_seconds=window_seconds,
                    prefill_rate=prefill_rate,
                )
            )
        except BadInput as error:
            raise HttpRefused(422, str(error)) from None

    @app.get("/api/events", summary="What happened, the newest first")
    async def events() -> Response:
        return _json(history.events())

    @app.get("/api/stream", include_in_schema=False)
    async def stream() -> Response:
        if hub.is_full:
            raise HttpRefused(503, f"{hub.streams} pages listen already; close one")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(hub.listen(), media_type="text/event-stream", headers=headers)


def _add_actions(app: FastAPI, actions: OperatorActions) -> None:
    """The gate has checked that the operator asks, and from where."""

    @app.get("/api/operator", summary="A ticket, good for one action")
    async def ticket() -> Response:
        return _json(actions.ticket())

    @app.get("/api/audit", summary="What operators did here, the newest first")
    async def audit() -> Response:
        return _json(actions.audit.entries())

    async def act(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HttpRefused(415, "give application/json")
        body = await whole_body(request.scope, request.receive, MOST_ORDER_BYTES)
        try:
            order = msgspec.json.decode(body, type=ACTIONS[request.url.path])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise HttpRefused(422, str(error)) from None
        try:
            return _json(await run_in_threadpool(actions.act, order, request.scope[WHO]))
        except (BadInput, StoreError) as error:
            status = 422 if isinstance(error, BadInput) else 409 if isinstance(error, ActionUnderWay) else 503
            raise HttpRefused(status, str(error)) from None

    for path, what in zip(ACTIONS, ("Drop a namespace", "Purge a tenant", "Warm prefixes"), strict=True):
        app.add_api_route(path, act, methods=["POST"], summary=what, operation_id=path)


def _add_pages(app: FastAPI, guard: Guard, static: Mapping[str, StaticFile]) -> None:
    login = static["login.html"]
    wrong_token = replace(login, body=login.body.replace(b"<p>", b"<p>That is not the token. ", 1))

    async def page() -> Response:
        return _file(static["index.html"])

    for path in PAGES:
        app.add_api_route(path, page, methods=["GET"], include_in_schema=False)

    @app.api_route(HELP, methods=["GET"], include_in_schema=False)
    async def help_(request: Request) -> Response:
        return _file(static["help.html"], request.headers.get("if-none-match"))

    @app.api_route("/static/{name:path}", methods=["GET"], include_in_schema=False)
    async def static_file(request: Request, name: str) -> Response:
        if name not in static:
            raise HttpRefused(404, "there is no such file")
        return _file(static[name], request.headers.get("if-none-match"))

    @app.api_route("/login", methods=["GET"], include_in_schema=False)
    async def login_page() -> Response:
        return _file(login) if guard.has_token else RedirectResponse("/", 303)

    @app.post("/login", include_in_schema=False)
    async def log_in(request: Request) -> Response:
        body = await whole_body(request.scope, request.receive, MOST_FORM_BYTES)
        given = parse_qs(body.decode("latin-1"), max_num_fields=8).get("token", [""])[0]
        name = guard.log_in(given)
        if name is None:
            seconds = guard.refused_for()
            await asyncio.sleep(WRONG_SECONDS)
            return _too_many(seconds) if seconds else _file(wrong_token, status=403)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, name, max_age=int(LOGIN_SECONDS), httponly=True, samesite="strict", path="/")
        return answer

    @app.post("/logout", include_in_schema=False)
    async def log_out(request: Request) -> Response:
        guard.log_out(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE, path="/")
        return answer


def _add_document(app: FastAPI, version: str, acts: bool) -> None:
    kinds: dict[str, Any] = {
        "/api/status": ConsoleStatus,
        "/api/stat": SidecarStatus,
        "/api/series": SeriesAnswer,
        "/api/misses": list[MissFigures],
        "/api/prefixes": PrefixFigures,
        "/api/tenants": list[TenantFigures],
        "/api/namespaces": NamespacesAnswer,
        "/api/engines": EnginesAnswer,
        "/api/elsewhere": ElsewhereAnswer,
        "/api/whatif": WhatIfFigures,
        "/api/request": RequestAnswer,
        "/api/models": list[PlannedModel],
        "/api/plan": PlanAnswer,
        "/api/events": list[ConsoleEvent],
    }
    posted = ACTIONS if acts else {}
    kinds |= {"/api/operator": TicketAnswer, "/api/audit": list[AuditEntry]} if acts else {}
    kinds |= dict.fromkeys(posted, ActionAnswer)
    shown = [ApiError, *kinds.values(), *posted.values()]
    (error, *schemas), components = msgspec.json.schema_components(shown, ref_template="#/components/schemas/{name}")
    document = get_openapi(title="kvstore console", version=version, routes=app.routes)
    document.setdefault("components", {})["schemas"] = components
    for (path, order), schema in zip(posted.items(), schemas[len(kinds) :], strict=True):
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, **_content(str(order.__doc__), schema)}
    for path, schema in zip(kinds, schemas, strict=False):
        operation = document["paths"][path]["post" if path in posted else "get"]
        answers = operation["responses"] = {"200": _content("What was asked for, or done", schema)}
        for status, text in (
            ("401", "The token is missing or wrong"),
            ("403", "A page of another site asked, or a tenant asked for what is of all"),
            ("421", "Another host was asked for"),
            ("422", "A parameter that cannot be"),
            ("503", "No sidecar has answered yet"),
            *(
                (("409", "Another action is under way"), ("413", "Too long"), ("415", "Not JSON"))
                if path in posted
                else ()
            ),
        ):
            answers[status] = _content(text, error)
    body = msgspec.json.encode(document)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(body, media_type="application/json")


def _content(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _json(answer: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, media_type="application/json")


def _too_many(seconds: float) -> Response:
    return _json(ApiError("too many wrong tokens came; wait a minute"), 429, {"retry-after": f"{seconds:.0f}"})


def _file(one: StaticFile, known: str | None = None, status: int = 200) -> Response:
    headers = {"cache-control": "no-cache", "etag": one.tag}
    if known == one.tag:
        return Response(status_code=304, headers=headers)
    return Response(one.body, status, headers=headers, media_type=one.type)


# Renders `docs/dashboard.md`, which the package carries, as the console's help page. Pure text ---------------------


CHARTS = re.compile(rb"<(?:script|link)[^>]*/uplot/.*\n")
MAIN = re.compile(rb'(?<=<main id="main">).*?(?=</main>)', re.DOTALL)
"""The part of the shell that a page replaces."""
ANCHOR = re.compile(r'<a id="[\w-]+">|</a>')
SECTION, END = '<section class="panel wide help">', "</section>"


def help_page(document: str, shell: bytes) -> bytes:
    """Put the document into the shell of all pages, without what draws charts."""
    reader = MarkdownIt("commonmark", renderer_cls=_Renderer).enable("table")
    text = f"{SECTION}{reader.render(document)}{END}"
    return MAIN.sub(lambda _: text.encode(), CHARTS.sub(b"", shell), count=1)


class _Renderer(RendererHTML):
    """A method is named after the token that it renders."""

    def heading_open(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        tag, title = tokens[at].tag, tokens[at + 1].content
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")  # GitHub's anchor names
        return f'{END + SECTION if tag == "h2" else ""}<{tag} id="{anchor}">'

    def table_open(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        return '<div class="scroll" tabindex="0"><table>'

    def table_close(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        return "</table></div>"

    def image(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        return ""

    def html_inline(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        text = tokens[at].content
        return text if ANCHOR.fullmatch(text) else escape(text)

    def html_block(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        return self.html_inline(tokens, at, options, env)

    def link_open(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        to = str(tokens[at].attrs["href"])
        return f'<a href="{escape(to)}">' if to.startswith("#") else ""

    def link_close(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        opened = max(before for before in range(at) if tokens[before].type == "link_open")
        to, text = str(tokens[opened].attrs["href"]), "".join(one.content for one in tokens[opened + 1 : at])
        if to.startswith("#"):
            return "</a>"
        return "" if text == to else f" (<code>{escape(to.removeprefix('../'))}</code>)"
