"""Runs `kvstore console`: the poller of a sidecar, the guard, the pages, and their HTTP server."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import uvicorn

from kvstore.block.errors import BadInput
from kvstore.console.access import ConsoleTokens, Guard
from kvstore.console.audit import AuditLines, AuditLog
from kvstore.console.http_api import make_app
from kvstore.console.operate import OperatorActions, OperatorVerbs
from kvstore.console.stream import Broadcast
from kvstore.console.watch import SidecarWatch
from tiering.clock import Clock

_log = logging.getLogger(__name__)
MOST_CONNECTIONS = 128
"""Further connections get a 503."""
END_SECONDS = 1
"""Streams do not end by themselves; a shutdown waits for them this long."""
NO_RUN = "none"


@dataclass(frozen=True, slots=True)
class ConsoleParts:
    """What a console is handed. files: the package's, by name below static/. new_token: returns so many random bytes.
    is_wanted: polled; false once the process that started the console is gone. operator: the operator's verbs and audit
    file; None if the console may change nothing."""

    clock: Clock
    new_token: Callable[[int], bytes]
    files: Mapping[str, bytes]
    version: str
    is_wanted: Callable[[], bool] = lambda: True
    operator: tuple[OperatorVerbs, AuditLines] | None = None


def serve_console(
    sidecar: str,
    address: tuple[str, int],
    read_tokens: Callable[[], ConsoleTokens] | None,
    parts: ConsoleParts,
    started: Callable[[int], None],
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the tokens. started: called with the port once it listens. Raises
    `BadInput`."""
    host, port = address
    tokens = read_tokens() if read_tokens is not None else None
    if parts.operator is not None and tokens is None:
        raise BadInput("an operator's console drops and purges for who has its token; give --token-file")
    guard = Guard(host, tokens, parts.clock, parts.new_token)
    listening = _listening(host, port)
    watch = SidecarWatch(sidecar, parts.version, parts.clock, acts=parts.operator is not None)
    hub = Broadcast()
    actions = None
    if parts.operator is not None:
        verbs, lines = parts.operator
        actions = OperatorActions(verbs, AuditLog(lines), parts.clock, parts.new_token)
    app = make_app(watch, guard, hub, parts.files, parts.version, actions)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=END_SECONDS,
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # The handler also has to be there before the server installs its own, and after, when uvicorn raises the
            # signal again.
            signal.signal(number, server.handle_exit)

        def publish() -> None:
            one = watch.status()
            hub.publish(one.run or NO_RUN, msgspec.json.encode(one))

        def told() -> None:
            if not parts.is_wanted():
                server.should_exit = True
            loop.call_soon_threadsafe(publish)

        def read_again() -> None:
            try:
                if read_tokens is not None:
                    guard.change_tokens(read_tokens())
                    hub.end()
                    _log.warning("the tokens were read again, and all logins have ended")
            except (BadInput, OSError) as error:
                _log.error("the tokens could not be read again, and those before count: %s", error)

        loop.add_signal_handler(signal.SIGHUP, read_again)
        watch.start(told)
        started(listening.getsockname()[1])
        await server.serve([listening])

    try:
        asyncio.run(run())
    finally:
        watch.close()
        listening.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadInput(f"{host}:{port} cannot be listened on: {error.strerror}; give another --listen") from None
