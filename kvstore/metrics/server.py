"""The HTTP server of one sidecar, from its settings: health and metrics, in a thread of its own.

A second thread makes the page of metrics, which may wait for the store's lock, so that probes are answered meanwhile.
Slow or hostile clients cost these threads a bounded part of their time: `LIMITS`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import get_args

from msgspec.structs import replace

from kvstore.block.account import HitTier, MissReason
from kvstore.listeners.addresses import listening_sockets
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
from kvstore.metrics.endpoints import METRICS_PATH, MetricsAccess, Page, read_token, sidecar_pages
from kvstore.protocol import messages as m
from kvstore.service.daemon import Daemon
from kvstore.service.settings import Settings
from kvstore.status.page import StatusPage, Values
from kvstore.status.tree import Readiness
from tiering.clock import Clock

LIMITS = HttpLimits(
    connections=32,
    head_seconds=5.0,
    body_seconds=5.0,
    idle_seconds=5.0,
    unread_seconds=5.0,
    accepts_per_second=200.0,
    methods=frozenset({"GET", "HEAD"}),
)
"""At so many new connections a second a flood delays no engine. Of those that wait in the kernel, in order, a scraper
waits `BACKLOG` / 200 seconds at most, which is less than its timeout."""
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

_log = logging.getLogger(__name__)


class SidecarServer:
    """`kvstore.service.serve.HealthServer`."""

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, Page],
        access: MetricsAccess,
        clock: Clock,
        is_kept: Callable[[], bool] = lambda: False,
    ) -> None:
        """port: 0 for any free one. pages: by path. is_kept: the page of metrics is there, and takes no thread of its
        own. Raises `BadInput` if the address cannot be had."""
        self.access = access
        self._pages, self._is_kept = pages, is_kept
        self._sockets = listening_sockets(host, port, "http.listen (--http)")
        self.port: int = self._sockets[0].getsockname()[1]
        self._listener = HttpListener(self._sockets, self._app, LIMITS, clock)
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(1, "kv-http-page")
        self._thread = threading.Thread(target=self._serve, name="kv-http", daemon=True)

    def start(self) -> None:
        self._pool.submit(lambda: None)  # its thread is there from now on
        self._thread.start()

    def read_again(self, settings: Settings) -> Callable[[], None]:
        """As `HealthServer.read_again`."""
        return partial(self.access.change_token, _token(settings))

    def close(self, seconds: float) -> None:
        """Serve no more, and give back the address."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._listener.end)
            self._thread.join(seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for one in self._sockets:
            one.close()

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._listener.serve())
        finally:
            self._loop.close()

    async def _app(self, scope: Message, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], {name.decode("latin-1"): one.decode("latin-1") for name, one in scope["headers"]}
        introduce(scope, "asked")
        page = self._pages.get(path)
        if page is None:
            raise HttpRefused(404, f"there is nothing here; there are {', '.join(self._pages)}")
        if path == METRICS_PATH and not self._is_kept():
            made = await asyncio.get_running_loop().run_in_executor(self._pool, page, headers)
        else:
            made = page(headers)
        more = (("cache-control", "no-store"), *made.headers)
        await answer(send, made.status, made.body, more, made.content_type)


def _token(settings: Settings) -> str | None:
    return read_token(settings.http.token_file) if settings.http.token_file is not None else None


def server_of(host: str, port: int, daemon: Daemon, version: str) -> SidecarServer:
    """A server, which the caller starts and closes. port: 0 for any that is free. version: of the program. Raises
    `BadInput` where the address cannot be had, or the token cannot be read."""
    settings, clock, report, health = daemon.settings, daemon.store.core.clock, daemon.report, daemon.health
    access = MetricsAccess(_token(settings), is_shared=len(settings.sockets()) > 1)
    if access.is_closed:
        _log.warning("/metrics is closed: several tenants are configured, and there is no http.token_file")
    page = StatusPage(lambda: replace(report.numbers(), version=version), clock, ALWAYS)
    told = health.reasons, page.page, access, health.public_warnings, daemon.store.core.node
    pages = sidecar_pages(health.readiness, daemon.is_alive, *told)
    return SidecarServer(host, port, pages, access, clock, page.is_kept)
