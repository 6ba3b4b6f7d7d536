"""Runs `kvstore pd-proxy`: engines, the application, and its listener."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from kvstore.listeners.addresses import listening_sockets
from kvstore.listeners.http_server import HttpLimits, HttpListener
from kvstore.openai.api import error_body
from kvstore.openai.fleet import Fleet
from kvstore.openai.proxy import PdProxy
from tiering.clock import Clock

MOST_CONNECTIONS, MOST_UNFINISHED_BYTES = 1024, 1 << 30
HEAD_SECONDS, BODY_SECONDS = 15.0, 60.0
END_SECONDS = 10.0
"""Time for open streams after SIGTERM."""


def serve_proxy(
    fleet: Fleet, app: PdProxy, address: tuple[str, int], clock: Clock, started: Callable[[int], None]
) -> None:
    """Serve until SIGTERM or SIGINT. started: called with the port once it listens. Raises `BadInput`."""
    host, port = address
    sockets = listening_sockets(host, port, "--listen")

    async def run() -> None:
        limits = HttpLimits(
            MOST_CONNECTIONS,
            HEAD_SECONDS,
            BODY_SECONDS,
            idle_seconds=HEAD_SECONDS,
            end_seconds=END_SECONDS,
            body_bytes=MOST_UNFINISHED_BYTES,
        )
        listener = HttpListener(sockets, app, limits, clock, error_body=error_body)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, listener.end)
        watching = asyncio.create_task(fleet.watch())
        try:
            started(sockets[0].getsockname()[1])
            await listener.serve()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for engine in (fleet.prefill, *fleet.decodes):
                await engine.close()

    try:
        asyncio.run(run())
    finally:
        for one in sockets:
            one.close()
