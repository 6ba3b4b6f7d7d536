"""The console over HTTP: pages, the JSON API behind them, and the event stream. All of it reads, except the login and
the actions of `kvstore.console.operate`.

    request > a known host > our own origin > a token, if configured > page or API > headers

`kvstore.console.api` makes the API's answers; `/openapi.json` documents them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from html import escape
from typing import Any
from urllib.parse import parse_qs, parse_qsl

import msgspec
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from kvstore.block.errors import BadInput, StoreError
from kvstore.console.access import COOKIE, LOGIN_SECONDS, Guard
from kvstore.console.api import ACTIONS, TENANT_PATHS, WAITING, ApiRoute, ConsoleApi, api_document
from kvstore.console.operate import MOST_ORDER_BYTES, ActionUnderWay
from kvstore.console.stream import Broadcast
from kvstore.edge.tokens import Caller
from kvstore.edge.watch import ANSWER_SECONDS
from kvstore.listeners.http_server import HttpRefused, Message, Receive, Send, answer, introduce, json_error, whole_body

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
    "json": "application/json",
}
PLAIN = "text/plain; charset=utf-8"
PAGES = ("/", "/misses", "/prefixes", "/tenants", "/moves", "/engines", "/request", "/plan", "/operate", "/events")
HELP = "/help"
"""Explains all panels, reasons and alerts; has no numbers."""
MOST_FORM_BYTES = 8192
WRONG_SECONDS = 0.5
"""How late a wrong token is answered to."""
OPEN_PATHS = ("/login", "/static/style.css", "/static/favicon.svg")
"""Served without a login."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the package, as it is sent."""

    body: bytes
    type: str
    tag: str

    @staticmethod
    def of(name: str, body: bytes) -> StaticFile:
        return StaticFile(body, TYPES.get(name.rpartition(".")[2], PLAIN), f'"{sha256(body).hexdigest()[:16]}"')


@dataclass(frozen=True, slots=True)
class _LetIn:
    """A request that was let in. headers: as text, of each name the last. who: the reader's name for the audit log."""

    scope: Message
    receive: Receive
    send: Send
    headers: Mapping[str, str]
    reader: Caller
    who: str

    async def answer(self, value: object) -> None:
        await answer(self.send, 200, msgspec.json.encode(value))

    async def redirect(self, path: str, cookie: str = "") -> None:
        await answer(self.send, 303, b"", [("location", path), *([("set-cookie", cookie)] if cookie else [])], PLAIN)

    async def file(self, one: StaticFile, status: int = 200) -> None:
        headers = [("cache-control", "no-cache"), ("etag", one.tag)]
        if status == 200 and self.headers.get("if-none-match") == one.tag:
            listed = [(name.encode(), value.encode()) for name, value in headers]
            await self.send({"type": "http.response.start", "status": 304, "headers": listed})
            await self.send({"type": "http.response.body"})
            return
        await answer(self.send, status, one.body, headers, one.type)


class ConsoleApp:
    """The ASGI application: checks host, origin and access of every request, and adds headers to every answer."""

    def __init__(self, api: ConsoleApi, guard: Guard, hub: Broadcast, files: Mapping[str, bytes]) -> None:
        """files: name below static/ -> contents."""
        self._guard, self._hub, self._operator = guard, hub, api.actions
        self._asks = ThreadPoolExecutor(1, "kv-console-ask")
        self._actions = ACTIONS if api.actions is not None else {}
        reads = api.routes()
        self._static = {name: StaticFile.of(name, body) for name, body in files.items()}
        shell = files["index.html"]
        if guard.has_token:
            shell = shell.replace(b'action="/logout" hidden', b'action="/logout"')
            self._static["index.html"] = StaticFile.of("index.html", shell)
        described = StaticFile.of("openapi.json", api_document(api.version, reads, self._actions))
        helps = StaticFile.of("help.html", help_page(files["dashboard.md"].decode(), shell))
        self._routes: dict[str, dict[str, Callable[[_LetIn], Awaitable[None]]]] = {
            **{path: {"GET": partial(self._read, route)} for path, route in reads.items()},
            **{path: {"POST": self._act} for path in self._actions},
            **{path: {"GET": partial(_LetIn.file, one=self._static["index.html"])} for path in PAGES},
            HELP: {"GET": partial(_LetIn.file, one=helps)},
            "/openapi.json": {"GET": partial(_LetIn.file, one=described)},
            "/api/stream": {"GET": self._stream},
            "/login": {"GET": self._login_page, "POST": self._log_in},
            "/logout": {"POST": self._log_out},
            **{f"/static/{name}": {"GET": partial(_LetIn.file, one=one)} for name, one in self._static.items()},
        }

    def close(self) -> None:
        self._asks.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI interface."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                more = HEADERS if b"cache-control" in names else {**HEADERS, "cache-control": "no-store"}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in more.items())]
            await send(message)

        try:
            asked = self._let_in(scope, receive, sent)
            methods = self._routes.get(scope["path"])
            if methods is None:
                raise HttpRefused(404, "there is nothing here")
            if scope["method"] not in methods:
                raise HttpRefused(405, "that is not served here", ("allow", ", ".join(methods)))
            await methods[scope["method"]](asked)
        except HttpRefused as refused:
            if refused.status == 429:
                await asyncio.sleep(WRONG_SECONDS)
            await answer(sent, refused.status, json_error(refused.status, str(refused)), refused.headers)

    def _let_in(self, scope: Message, receive: Receive, send: Send) -> _LetIn:
        """Raises `HttpRefused`."""
        listed = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers, path, guard = dict(listed), scope["path"], self._guard
        host, authorization = headers.get("host", ""), headers.get("authorization")
        origins = [value for name, value in listed if name == "origin"]
        if not guard.is_known_host(host):
            raise HttpRefused(421, "this server has another name; ask for it as localhost or 127.0.0.1")
        if not all(guard.is_own_origin(one, host) for one in origins):
            raise HttpRefused(403, "a page of another site asks; open the console itself")
        cookie = "; ".join(value for name, value in listed if name == "cookie")
        reader = Caller() if path in OPEN_PATHS else guard.reader(authorization, cookie)
        if reader is None:
            if authorization is not None and (seconds := guard.refused_for()):
                raise _too_many(seconds)
            if path in PAGES or path == HELP:
                raise HttpRefused(303, "log in first", ("location", "/login"))
            text = "give the token: Authorization: Bearer ..., or log in at /login"
            raise HttpRefused(401, text, ("www-authenticate", "Bearer"))
        if reader.tenant is not None and path.startswith("/api/") and path not in TENANT_PATHS:
            raise HttpRefused(403, f"a tenant's token shows that tenant alone: {', '.join(TENANT_PATHS)}")
        if scope["method"] != "GET" and path not in ("/login", "/logout", *self._actions):
            raise HttpRefused(405, "this changes nothing: ask with GET", ("allow", "GET, HEAD"))
        if path in self._actions and authorization is None and not origins:
            raise HttpRefused(403, "an action is asked for with the token, or from a page of the console")
        if path not in OPEN_PATHS:
            introduce(scope, reader)
        who = f"operator's {'login' if authorization is None else 'token'} at {(scope['client'] or '-')[0]}"
        return _LetIn(scope, receive, send, headers | {"cookie": cookie}, reader, who)

    # The API -----------------------------------------------------------------------------------------------------

    async def _read(self, route: ApiRoute, asked: _LetIn) -> None:
        given = dict(parse_qsl(asked.scope["query_string"].decode("latin-1"), keep_blank_values=True))
        try:
            make = partial(route.make, msgspec.convert(given, route.query, strict=False), asked.reader.tenant)
            if asked.scope["path"] in WAITING:
                asking = asyncio.get_running_loop().run_in_executor(self._asks, make)
                found = await asyncio.wait_for(asking, 2 * ANSWER_SECONDS)
            else:
                found = make()
        except TimeoutError:
            raise HttpRefused(503, "others ask at the moment; try again") from None
        except (msgspec.ValidationError, StoreError) as error:
            raise _refused(error) from None
        await asked.answer(found)

    async def _act(self, asked: _LetIn) -> None:
        """`_let_in` has checked that the operator asks, and from where."""
        assert self._operator is not None, "else there is no such route"
        if asked.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HttpRefused(415, "give application/json")
        body = await whole_body(asked.scope, asked.receive, MOST_ORDER_BYTES)
        try:
            order = msgspec.json.decode(body, type=ACTIONS[asked.scope["path"]])
            done = await asyncio.to_thread(self._operator.act, order, asked.who)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, StoreError) as error:
            raise _refused(error) from None
        await asked.answer(done)

    async def _stream(self, asked: _LetIn) -> None:
        if self._hub.is_full:
            raise HttpRefused(503, f"{self._hub.streams} pages listen already; close one")
        named = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        headers = [(name.encode(), value.encode()) for name, value in (named | {"x-accel-buffering": "no"}).items()]
        await asked.send({"type": "http.response.start", "status": 200, "headers": headers})

        async def tell() -> None:
            async with aclosing(self._hub.listen()) as messages:
                async for message in messages:
                    await asked.send({"type": "http.response.body", "body": message, "more_body": True})
            await asked.send({"type": "http.response.body"})

        async def leave() -> None:
            while (await asked.receive())["type"] != "http.disconnect":
                pass

        telling, leaving = asyncio.create_task(tell()), asyncio.create_task(leave())
        try:
            await asyncio.wait((telling, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            telling.cancel()
            leaving.cancel()
            await asyncio.gather(telling, leaving, return_exceptions=True)
        if not telling.cancelled():
            telling.result()

    # A login -----------------------------------------------------------------------------------------------------

    async def _login_page(self, asked: _LetIn) -> None:
        await (asked.file(self._static["login.html"]) if self._guard.has_token else asked.redirect("/"))

    async def _log_in(self, asked: _LetIn) -> None:
        body = await whole_body(asked.scope, asked.receive, MOST_FORM_BYTES)
        name = self._guard.log_in(parse_qs(body.decode("latin-1"), max_num_fields=8).get("token", [""])[0])
        if name is not None:
            await asked.redirect(
                "/", f"{COOKIE}={name}; HttpOnly; Max-Age={LOGIN_SECONDS:.0f}; Path=/; SameSite=strict"
            )
            return
        if seconds := self._guard.refused_for():
            raise _too_many(seconds)
        await asyncio.sleep(WRONG_SECONDS)
        page = self._static["login.html"]
        wrong = replace(page, body=page.body.replace(b"<p>", b"<p>That is not the token. ", 1))
        await asked.file(wrong, status=403)

    async def _log_out(self, asked: _LetIn) -> None:
        self._guard.log_out(asked.headers["cookie"])
        await asked.redirect("/login", f"{COOKIE}=; Max-Age=0; Path=/")


def _refused(error: Exception) -> HttpRefused:
    status = 409 if isinstance(error, ActionUnderWay) else 503
    is_wrong = isinstance(error, BadInput) or not isinstance(error, StoreError)
    return HttpRefused(422 if is_wrong else status, str(error))


def _too_many(seconds: float) -> HttpRefused:
    return HttpRefused(429, "too many wrong tokens came; wait a minute", ("retry-after", f"{seconds:.0f}"))


# Renders `docs/dashboard.md`, which the package carries, as the console's help page. Pure text ---------------------


MAIN = re.compile(rb'(?<=<main id="main">).*?(?=</main>)', re.DOTALL)
"""The part of the shell that a page replaces."""
ANCHOR = re.compile(r'<a id="[\w-]+">|</a>')
SECTION, END = '<section class="panel wide help">', "</section>"


def help_page(document: str, shell: bytes) -> bytes:
    """Put the document into the shell of all pages."""
    reader = MarkdownIt("commonmark", renderer_cls=_Renderer).enable("table")
    text = f"{SECTION}{reader.render(document)}{END}"
    return MAIN.sub(lambda _: text.encode(), shell, count=1)


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
