"""Runs `kvstore pd-proxy`: engines, the application, and a uvicorn server.

uvicorn lacks a bound that is added here: a connection is closed if no complete request head arrives in time, and at
once if too many are open.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.block.errors import BadInput
from kvstore.openai.api import Legs
from kvstore.openai.fleet import Fleet, ProxiedEngine
from kvstore.openai.proxy import PdProxy, ProxyLimits

MOST_CONNECTIONS = 1024
HEAD_SECONDS = 15.0
END_SECONDS = 10
"""Time for open streams after SIGTERM."""


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """prefill, decodes: addresses of engines. scores: of the sidecar beside each decode engine, or empty; score_token,
    score_model: see `Fleet`. prefiller: where prefill's blocks are fetched, with `at-once` and vLLM's tier of peers.
    passed: see `read_body`."""

    prefill: str
    decodes: Sequence[str]
    scores: Sequence[str] = ()
    score_token: str = ""
    score_model: str = ""
    legs: Legs = Legs.NIXLV2
    prefiller: tuple[str, int] | None = None
    limits: ProxyLimits = field(default_factory=ProxyLimits)
    passed: Sequence[str] = ()


def serve_proxy(
    options: ProxyOptions,
    address: tuple[str, int],
    new_id: Callable[[], str],
    started: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT. started: called with the port once it listens. say: gets messages about engines.
    Raises `BadInput`."""
    host, port = address
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadInput(f"{host}:{port} cannot be listened on: {error.strerror}; give another --listen") from None

    logging.getLogger("uvicorn.error").addFilter(_FewLines())

    async def run() -> None:
        scores: Sequence[str | None] = options.scores or [None] * len(options.decodes)
        decodes = [
            ProxiedEngine(f"decode-{number}", url, score, say)
            for number, (url, score) in enumerate(zip(options.decodes, scores, strict=True))
        ]
        prefill = ProxiedEngine("prefill", options.prefill, None, say)
        fleet = Fleet(prefill, decodes, options.score_token, options.score_model)
        app = PdProxy(
            fleet, options.legs, new_id, prefiller=options.prefiller, limits=options.limits, passed=options.passed
        )
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_BoundedProtocol,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=END_SECONDS,
            )
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            # The handler also has to be there before the server installs its own, and after, when uvicorn raises the
            # signal again.
            signal.signal(number, server.handle_exit)
        watching = asyncio.create_task(fleet.watch())
        try:
            started(listening.getsockname()[1])
            await server.serve([listening])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for engine in (fleet.prefill, *decodes):
                await engine.close()

    try:
        asyncio.run(run())
    finally:
        listening.close()


class _FewLines(logging.Filter):
    """Lets one line per second through: clients can make the server warn."""

    _last = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        is_due = record.created - self._last >= 1.0
        self._last = record.created if is_due else self._last
        return is_due


class _BoundedProtocol(H11Protocol):
    """Closes connections that send no request."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Close it at once if there are too many, else start the timer."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._late = self.loop.call_later(HEAD_SECONDS, self._look, transport, None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _look(self, transport: Any, last: object) -> None:
        """Close a connection that answered nothing since the last look. last: the request that was last then."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is last:
            transport.abort()
        else:
            self._late = self.loop.call_later(HEAD_SECONDS, self._look, transport, self.cycle if is_idle else self)
