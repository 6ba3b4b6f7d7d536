"""Who may read the console: host names, origins, tokens and login cookies. Knows no HTTP library.

A page of another site could reach this host under a name of its own (DNS rebinding), so without a token only the names
of the loopback are answered. With a token, any name is. Nothing here changes the sidecar; the only state is who is
logged in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from urllib.parse import urlsplit

from kvstore.block.errors import BadInput
from kvstore.config import is_loopback
from kvstore.edge.tokens import Caller, Tokens
from tiering.clock import Clock

COOKIE = "kvstore_console"
LOGIN_SECONDS = 12 * 3600.0
MOST_LOGINS = 64
"""Of more logins, the oldest ends."""
MOST_FAILURES, FAILURE_SECONDS = 10, 60.0
"""More wrong tokens within this time are answered late, and with 429. A right one is never kept waiting: it has 256
bits, which nothing finds by trying."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Access control of one listening address. Not thread-safe."""

    def __init__(self, host: str, tokens: Tokens | None, clock: Clock, new_token: Callable[[int], bytes]) -> None:
        """tokens: None lets every process on this host read. Raises `BadInput` if that would let other hosts read
        too."""
        if tokens is None and not is_loopback(host):
            raise BadInput(
                f"{host} can be reached by other hosts; give --token-file (console.token_file), or listen on 127.0.0.1"
            )
        self._tokens = tokens
        self._names = {host.lower(), *_LOOPBACK}
        self._clock = clock
        self._new_token = new_token
        self._logins: OrderedDict[str, tuple[float, Caller]] = OrderedDict()  # by cookie: end, reader
        self._failures: deque[float] = deque(maxlen=MOST_FAILURES + 1)

    @property
    def has_token(self) -> bool:
        return self._tokens is not None

    def change_tokens(self, tokens: Tokens) -> None:
        """Replace the tokens and end every login. Only for a guard that has tokens."""
        self._tokens = tokens
        self._logins.clear()

    def is_known_host(self, host: str) -> bool:
        """host: as the request's Host header has it, with or without a port."""
        name = _host_name(host)
        return name is not None and (self.has_token or name in self._names)

    def is_own_origin(self, origin: str, host: str) -> bool:
        """Whether a request comes from a page of this server."""
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()

    def reader(self, authorization: str | None, login: str) -> Caller | None:
        """The reader by bearer token or by the login cookie's value; None if access is denied."""
        if self._tokens is None:
            return Caller()
        if authorization is not None:
            return self._tokens.bearer(authorization)
        until, reader = self._logins.get(login, (0.0, None))
        return reader if self._clock.monotonic_seconds() < until else None

    def log_in(self, given: str) -> str | None:
        """The new login's cookie value, or None if the token is wrong."""
        reader = self._tokens.caller(given) if self._tokens is not None else None
        if reader is None:
            return None
        name = self._new_token(32).hex()
        self._logins[name] = self._clock.monotonic_seconds() + LOGIN_SECONDS, reader
        if len(self._logins) > MOST_LOGINS:
            self._logins.popitem(last=False)
        return name

    def log_out(self, login: str) -> None:
        self._logins.pop(login, None)

    def refused_for(self) -> float:
        """Count a wrong token. Returns the seconds for which its sender should send none, if too many came lately."""
        now = self._clock.monotonic_seconds()
        self._failures.append(now)
        is_full = len(self._failures) == self._failures.maxlen and now - self._failures[0] < FAILURE_SECONDS
        return FAILURE_SECONDS if is_full else 0.0


def _host_name(host: str) -> str | None:
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    is_plain = parts.netloc == host and "@" not in host
    return parts.hostname.lower() if is_plain and parts.hostname else None
