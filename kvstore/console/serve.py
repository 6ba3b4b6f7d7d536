"""Runs `kvstore console`: the poller of a sidecar, the guard, the pages, and their HTTP server."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from kvstore.block.errors import BadInput
from kvstore.console.access import ConsoleReader, Guard
from kvstore.console.audit import AuditLog
from kvstore.console.http_api import make_app
from kvstore.console.operate import OperatorActions, OperatorVerbs
from kvstore.console.stream import Broadcast
from kvstore.console.watch import SidecarWatch
from kvstore.listeners.addresses import listening_sockets
from kvstore.listeners.http_server import HttpLimits, HttpListener
from tiering.clock import Clock

_log = logging.getLogger(__name__)
LIMITS = HttpLimits(connections=128)
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
    operator: tuple[OperatorVerbs, AuditLog] | None = None


def serve_console(
    sidecar: str,
    address: tuple[str, int],
    read_tokens: Callable[[], dict[str, ConsoleReader]] | None,
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
    sockets = listening_sockets(host, port, "--listen (console.listen)")
    watch = SidecarWatch(sidecar, parts.version, parts.clock, acts=parts.operator is not None)
    hub = Broadcast()
    actions = None
    if parts.operator is not None:
        actions = OperatorActions(*parts.operator, parts.clock, parts.new_token)
    app = make_app(watch, guard, hub, parts.files, parts.version, actions)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = HttpListener(sockets, app, LIMITS, parts.clock)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, listener.end)

        def publish() -> None:
            one = watch.status()
            hub.publish(one.run or NO_RUN, msgspec.json.encode(one))

        def told() -> None:
            if not parts.is_wanted():
                loop.call_soon_threadsafe(listener.end)
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
        started(sockets[0].getsockname()[1])
        await listener.serve()

    try:
        asyncio.run(run())
    finally:
        watch.close()
        for one in sockets:
            one.close()
