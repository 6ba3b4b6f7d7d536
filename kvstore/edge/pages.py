"""What the edge tells probes and scrapers of a sidecar, and who may read it.

    GET /livez     200 while the sidecar answers at its socket at all, 503 else
    GET /readyz    200 once everything on disk can be found; 503 with `warming` before, with `stopping` at the end, with
                   `unreachable` while the sidecar does not answer; 200 with `degraded` and the reasons while something
                   does not work; with `warnings` for the operator
    GET /metrics   Prometheus's text format. It takes a token where one is set, and where several tenants are
                   configured, since sums over all tenants tell one tenant of another

`livez` and `readyz` tell nothing of tenants and blocks, and take no token. However many clients ask, the sidecar is
asked once in `FRESH_SECONDS`, and for a page of metrics once in `KEPT_SECONDS`.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import StoreError
from kvstore.edge.process import EdgePart, Soon
from kvstore.edge.watch import FRESH_SECONDS, READY, StatusWatch
from kvstore.listeners.http_server import (
    HttpLimits,
    HttpListener,
    HttpRefused,
    Message,
    Receive,
    Send,
    answer,
    introduce,
)
from kvstore.protocol import messages as m
from kvstore.service.settings import HttpSettings, Settings, read_token
from kvstore.status.page import StatusPage, Values
from kvstore.status.tree import Readiness, SidecarStatus

PATHS = ("/livez", "/readyz", "/metrics")
KEPT_SECONDS = 1.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LIMITS = HttpLimits(
    connections=32,
    head_seconds=5.0,
    body_seconds=5.0,
    idle_seconds=5.0,
    unread_seconds=5.0,
    accepts_per_second=200.0,
    methods=frozenset({"GET", "HEAD"}),
)
"""Of connections that wait in the kernel, in order, a scraper waits `BACKLOG` / 200 seconds at most, which is less than
its timeout."""
TIERS, REASONS = [(one.value,) for one in HitTier], [(one.value,) for one in MissReason]
ALWAYS: Mapping[str, Sequence[Values]] = {
    "granted_tokens_total": TIERS,
    "revoked_tokens_total": TIERS,
    "missed_tokens_total": REASONS,
    "put_refused_tokens_total": REASONS,
    "requests_total": [(m.name_of(verb),) for verb in get_args(m.Verb)],
    "state": [(one.value,) for one in Readiness],
    "gpu_saved_seconds_total": [()],
    "gpu_regret_seconds_total": [()],
}
"""Series that are there from the start, as 0."""
_NO_STORE = ("cache-control", "no-store")

T = TypeVar("T")


def metrics_refusal(token: str | None, authorization: str, *, is_shared: bool) -> str:
    """Why a client may not read the metrics; empty for one that may. token: the one required, or None. authorization:
    the header. is_shared: several tenants are configured."""
    if token is None and not is_shared:
        return ""
    if token is None:
        return "several tenants are configured, and the metrics tell one of another: set http.token_file"
    scheme, _, given = authorization.partition(" ")
    is_right = hmac.compare_digest(given.strip().encode("latin-1", "replace"), token.encode())
    if scheme.lower() == "bearer" and is_right:
        return ""
    return "the metrics take a token: send the header Authorization: Bearer TOKEN, with what is in http.token_file"


class _Shared(Generic[T]):
    """An answer of the sidecar that all clients share for a while; a new one takes a thread."""

    def __init__(self, ask: Callable[[], T], seconds: float = FRESH_SECONDS) -> None:
        self._ask, self._seconds, self._until = ask, seconds, 0.0
        self._pool = ThreadPoolExecutor(1, "kv-edge-page")
        self._asked: asyncio.Future[T] | None = None

    async def now(self) -> T:
        loop = asyncio.get_running_loop()
        if self._asked is None or (self._asked.done() and loop.time() >= self._until):
            self._asked, self._until = loop.run_in_executor(self._pool, self._ask), loop.time() + self._seconds
        return await asyncio.shield(self._asked)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class PagesPart(EdgePart):
    """Health and metrics, on sockets that listen already and that the supervisor keeps: probes wait while an edge is
    replaced."""

    def __init__(
        self, sockets: Sequence[socket.socket], http: HttpSettings, watch: StatusWatch, version: str, *, is_shared: bool
    ) -> None:
        """is_shared: several tenants are configured. version: of this program. Raises `BadInput`."""
        self._sockets, self._clock, self._is_shared = sockets, watch.clock, is_shared
        self._token = _token(http)
        page = StatusPage(lambda: _with_version(watch.numbers(), version), watch.clock, ALWAYS)
        self._alive, self._numbers = _Shared(watch.is_alive), _Shared(watch.numbers)
        self._page = _Shared(page.render, KEPT_SECONDS)

    def start(self, soon: Soon) -> Sequence[HttpListener]:
        return [HttpListener(self._sockets, self._app, LIMITS, self._clock)]

    def read_again(self, settings: Settings | None) -> Callable[[], None]:
        assert settings is not None, "it has no credentials but those of a configuration"
        return partial(setattr, self, "_token", _token(settings.http))

    def close(self) -> None:
        for one in (self._alive, self._numbers, self._page):
            one.close()

    async def _app(self, scope: Message, receive: Receive, send: Send) -> None:
        introduce(scope, "asked")
        match scope["path"]:
            case "/livez":
                is_alive = await self._alive.now()
                await answer(send, 200 if is_alive else 503, msgspec.json.encode({"alive": is_alive}), [_NO_STORE])
            case "/readyz":
                status, body = await self._readiness()
                await answer(send, status, msgspec.json.encode(body), [_NO_STORE])
            case "/metrics":
                given = b"".join([value for name, value in scope["headers"] if name == b"authorization"][:1])
                why = metrics_refusal(self._token, given.decode("latin-1"), is_shared=self._is_shared)
                if why:
                    realm = ("www-authenticate", 'Bearer realm="kvstore"')
                    await answer(send, 401, f"{why}\n".encode(), [_NO_STORE, realm], "text/plain; charset=utf-8")
                    return
                try:
                    page = await self._page.now()
                except StoreError as error:
                    raise HttpRefused(503, str(error)) from None
                await answer(send, 200, page, [_NO_STORE], CONTENT_TYPE)
            case _:
                raise HttpRefused(404, f"there is nothing here; there are {', '.join(PATHS)}")

    async def _readiness(self) -> tuple[int, dict[str, object]]:
        try:
            facts = await self._numbers.now()
        except StoreError:
            return 503, {"ready": False, "state": "unreachable"}
        is_ready = facts.state in READY
        found: dict[str, object] = {"ready": is_ready, "state": facts.state}
        if facts.state == Readiness.DEGRADED:
            found["reasons"] = facts.reasons
        if facts.public_warnings:
            found["warnings"] = facts.public_warnings
        return 200 if is_ready else 503, found | {"node": facts.node, "incarnation": facts.incarnation}


def _token(http: HttpSettings) -> str | None:
    return read_token(http.token_file) if http.token_file is not None else None


def _with_version(facts: SidecarStatus, version: str) -> SidecarStatus:
    return replace(facts, version=facts.version or version)
