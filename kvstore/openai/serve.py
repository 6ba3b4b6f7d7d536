"""`kvstore pd-proxy`, put together: engines, the application, and a server for it.

The server is uvicorn's, with a bound that it lacks: a connection is closed where no whole head of a request arrives in
time, and where too many are open, so that clients that say nothing cost those that do nothing.
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
"""A stream that is under way at SIGTERM is given so long."""


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """prefill, decodes: addresses of engines. scores: of the sidecar beside each decode engine, or none; score_token,
    score_model: see `Fleet`. prefiller: where prefill's blocks are fetched, with `at-once` and vLLM's tier of peers."""

    prefill: str
    decodes: Sequence[str]
    scores: Sequence[str] = ()
    score_token: str = ""
    score_model: str = ""
    legs: Legs = Legs.NIXLV2
    prefiller: tuple[str, int] | None = None
    limits: ProxyLimits = field(default_factory=ProxyLimits)


def serve_proxy(
    options: ProxyOptions,
    address: tuple[str, int],
    new_id: Callable[[], str],
    started: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    """Until SIGTERM or SIGINT. started: told the port once it listens. say: what becomes of engines. Raises
    `BadInput`."""
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
        app = PdProxy(fleet, options.legs, new_id, prefiller=options.prefiller, limits=options.limits)
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
            # Before it serves as while it does; and behind its end, where uvicorn raises the signal once more.
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
    """One line a second: what clients send may make the server warn."""

    _last = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written."""
        is_due = record.created - self._last >= 1.0
        self._last = record.created if is_due else self._last
        return is_due


class _BoundedProtocol(H11Protocol):
    """A connection that has to ask for something."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Closed at once where there are too many, and later where nothing comes."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._late = self.loop.call_later(HEAD_SECONDS, self._look, transport, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _look(self, transport: Any, last: object) -> None:
        """last: the request that was answered at the look before, and still is the last one."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is last:
            transport.abort()
        else:
            self._late = self.loop.call_later(HEAD_SECONDS, self._look, transport, self.cycle if is_idle else self)
