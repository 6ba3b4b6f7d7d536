"""The console as a part of the edge: the history of a sidecar, the guard, the pages, and their listener."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

import msgspec

from kvstore.config import host_and_port
from kvstore.console.access import Guard
from kvstore.console.audit import AuditLog
from kvstore.console.history import SidecarHistory
from kvstore.console.http_api import make_app
from kvstore.console.operate import OperatorActions, OperatorVerbs
from kvstore.console.reasons import reasons_of
from kvstore.console.stream import Broadcast
from kvstore.edge.process import EdgePart, Soon
from kvstore.edge.tokens import Tokens, read_credential
from kvstore.edge.watch import StatusWatch
from kvstore.listeners.addresses import listening_sockets
from kvstore.listeners.http_server import HttpLimits, HttpListener
from kvstore.service.settings import ConsoleSettings, Settings
from kvstore.status.tree import SidecarStatus

_log = logging.getLogger(__name__)
LIMITS = HttpLimits(connections=128)
NO_RUN = "none"


class ConsolePart(EdgePart):
    """Its pages, and the history behind them."""

    def __init__(
        self,
        console: ConsoleSettings,
        watch: StatusWatch,
        version: str,
        new_token: Callable[[int], bytes],
        operator: tuple[OperatorVerbs, AuditLog] | None = None,
    ) -> None:
        """new_token: returns so many random bytes. operator: the operator's verbs and audit log; None if the console
        may change nothing. Raises `BadInput`, `OSError`."""
        assert console.listen is not None
        self._file, self._watch, self._clock = console.token_file, watch, watch.clock
        self._key = new_token(32)
        self._host, self._port = host_and_port(console.listen, "--listen")
        self._guard = Guard(self._host, self._tokens(), watch.clock, new_token)
        self._hub = Broadcast()
        files = static_files()
        reasons = reasons_of(files["dashboard.md"].decode())
        self._history = SidecarHistory(watch, version, reasons, acts=operator is not None)
        actions = OperatorActions(*operator, watch.clock, new_token) if operator is not None else None
        self._app = make_app(self._history, self._guard, self._hub, files, version, actions)
        self._soon: Soon | None = None

    def start(self, soon: Soon) -> Sequence[HttpListener]:
        sockets = listening_sockets(self._host, self._port, "--listen (console.listen)")
        host, port = self._host, sockets[0].getsockname()[1]
        url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        self.said, self.line = {"console": url}, f"console on {url}"
        self._soon = soon
        self._watch.follow(self._hear)
        self._watch.start()
        return [HttpListener(sockets, self._app, LIMITS, self._clock)]

    def read_again(self, settings: Settings | None) -> Callable[[], None]:
        tokens = self._tokens()
        return partial(self._apply, tokens) if tokens is not None else super().read_again(settings)

    def _apply(self, tokens: Tokens) -> None:
        self._guard.change_tokens(tokens)
        self._hub.end()
        _log.warning("the tokens were read again, and all logins have ended")

    def close(self) -> None:
        if self._soon is not None:
            self._watch.leave(self._hear)

    def _hear(self, facts: SidecarStatus | None, why: str) -> None:
        """Called by the watch's thread."""
        self._history.hear(facts, why)
        if self._soon is not None:
            self._soon(self._publish)

    def _publish(self) -> None:
        one = self._history.status()
        self._hub.publish(one.run or NO_RUN, msgspec.json.encode(one))

    def _tokens(self) -> Tokens | None:
        return Tokens(read_credential(self._file), self._file, self._key) if self._file is not None else None


def static_files() -> dict[str, bytes]:
    """Contents of the console's files, by name."""
    root = Path(str(resources.files("kvstore.console") / "static"))
    return {str(one.relative_to(root)): one.read_bytes() for one in sorted(root.rglob("*")) if one.is_file()}
