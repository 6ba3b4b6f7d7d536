"""The HTTP server of one sidecar, from its settings: health and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from kvstore.metrics.bounded_http import HttpServer
from kvstore.metrics.endpoints import MetricsAccess, read_token, sidecar_pages
from kvstore.metrics.metrics import Metrics
from kvstore.service.daemon import Daemon
from kvstore.service.settings import Settings

_log = logging.getLogger(__name__)


class SidecarServer(HttpServer):
    """`kvstore.service.serve.HealthServer`."""

    access: MetricsAccess

    def read_again(self, settings: Settings) -> Callable[[], None]:
        """As `HealthServer.read_again`."""
        return partial(self.access.change_token, _token(settings))


def _token(settings: Settings) -> str | None:
    return read_token(settings.http.token_file) if settings.http.token_file is not None else None


def server_of(host: str, port: int, daemon: Daemon, version: str) -> SidecarServer:
    """A server, which the caller starts and closes. port: 0 for any that is free. version: of the program. Raises
    `BadInput` where the address cannot be had, or the token cannot be read."""
    settings, clock = daemon.settings, daemon.store.core.clock
    access = MetricsAccess(_token(settings), is_shared=len(settings.sockets()) > 1)
    if access.is_closed:
        _log.warning("/metrics is closed: several tenants are configured, and there is no http.token_file")
    metrics = Metrics(
        daemon.store,
        daemon.counting,
        daemon.sessions,
        daemon.door,
        daemon.readiness,
        version,
        daemon.whatif,
        daemon.told,
        daemon.warnings,
        daemon.couriers,
    )
    told = daemon.reasons, metrics.page, access, daemon.public_warnings, daemon.store.core.node
    pages = sidecar_pages(daemon.readiness, daemon.is_alive, *told)
    server = SidecarServer(host, port, pages, clock.monotonic_seconds)
    server.access = access
    return server
