"""The HTTP server of one sidecar, from its settings: health and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import get_args

from msgspec.structs import replace

from kvstore.block.account import HitTier, MissReason
from kvstore.metrics.bounded_http import HttpServer
from kvstore.metrics.endpoints import MetricsAccess, read_token, sidecar_pages
from kvstore.protocol import messages as m
from kvstore.service.daemon import Daemon
from kvstore.service.settings import Settings
from kvstore.status.page import StatusPage, Values
from kvstore.status.tree import Readiness

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
    health, report = daemon.health, daemon.report
    page = StatusPage(lambda: replace(report.numbers(), version=version), clock, ALWAYS)
    told = health.reasons, page.page, access, health.public_warnings, daemon.store.core.node
    pages = sidecar_pages(health.readiness, daemon.is_alive, *told)
    server = SidecarServer(host, port, pages, clock.monotonic_seconds)
    server.access = access
    return server
