"""Runs `kvstore pd-proxy`: engines, the application, and its listener."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.listeners.addresses import listening_sockets
from kvstore.listeners.http_server import HttpLimits, HttpListener
from kvstore.openai.api import Legs, error_body
from kvstore.openai.fleet import Fleet, ProxiedEngine
from kvstore.openai.proxy import PdProxy, ProxyLimits
from tiering.clock import Clock

MOST_CONNECTIONS, MOST_UNFINISHED_BYTES = 1024, 1 << 30
HEAD_SECONDS, BODY_SECONDS = 15.0, 60.0
END_SECONDS = 10.0
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
    clock: Clock,
    started: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT. started: called with the port once it listens. say: gets messages about engines.
    Raises `BadInput`."""
    host, port = address
    sockets = listening_sockets(host, port, "--listen")

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
            for engine in (fleet.prefill, *decodes):
                await engine.close()

    try:
        asyncio.run(run())
    finally:
        for one in sockets:
            one.close()
