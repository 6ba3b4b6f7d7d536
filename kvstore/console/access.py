"""Who may read the console: host names, origins, tokens and login cookies. Knows no HTTP library.

A page of another site could reach this host under a name of its own (DNS rebinding), so without a token only the names
of the loopback are answered. With a token, any name is. Nothing here changes the sidecar; the only state is who is
logged in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from hmac import compare_digest
from urllib.parse import urlsplit

from kvstore.block.errors import BadInput
from kvstore.config import is_loopback
from kvstore.edge.tokens import Caller
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

    def __init__(
        self, host: str, readers: Mapping[str, Caller] | None, clock: Clock, new_token: Callable[[int], bytes]
    ) -> None:
        """readers: by token; None lets every process on this host read. Raises `BadInput` if that would let other hosts
        read too."""
        if readers is None and not is_loopback(host):
            raise BadInput(
                f"{host} can be reached by other hosts; give --token-file (console.token_file), or listen on 127.0.0.1"
            )
        self.has_token = readers is not None
        self._readers = readers or {}
        self._names = {host.lower(), *_LOOPBACK}
        self._clock = clock
        self._new_token = new_token
        self._logins: OrderedDict[str, tuple[float, Caller]] = OrderedDict()  # by cookie: end, reader
        self._failures: deque[float] = deque(maxlen=MOST_FAILURES + 1)

    def change_tokens(self, readers: Mapping[str, Caller]) -> None:
        """Replace the tokens and end every login. Only for a guard that has tokens."""
        self._readers = readers
        self._logins.clear()

    def is_known_host(self, host: str) -> bool:
        """host: as the request's Host header has it, with or without a port."""
        name = _host_name(host)
        return name is not None and (self.has_token or name in self._names)

    def is_own_origin(self, origin: str | None, host: str) -> bool:
        """Whether a request comes from a page of this server, or from no page."""
        if origin is None:
            return True
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()

    def reader(self, authorization: str | None, cookie: str | None) -> Caller | None:
        """The reader by bearer token or login cookie; None if access is denied."""
        if not self.has_token:
            return Caller()
        if authorization is not None:
            kind, _, given = authorization.partition(" ")
            return self._reader_of(given.strip()) if kind.lower() == "bearer" else None
        until, reader = self._logins.get(_cookie_value(cookie or ""), (0.0, None))
        return reader if self._clock.monotonic_seconds() < until else None

    def log_in(self, given: str) -> str | None:
        """The new login's cookie value, or None if the token is wrong."""
        reader = self._reader_of(given)
        if reader is None:
            return None
        name = self._new_token(32).hex()
        self._logins[name] = self._clock.monotonic_seconds() + LOGIN_SECONDS, reader
        if len(self._logins) > MOST_LOGINS:
            self._logins.popitem(last=False)
        return name

    def log_out(self, cookie: str | None) -> None:
        self._logins.pop(_cookie_value(cookie or ""), None)

    def refused_for(self) -> float:
        """Count a wrong token. Returns the seconds for which its sender should send none, if too many came lately."""
        now = self._clock.monotonic_seconds()
        self._failures.append(now)
        is_full = len(self._failures) == self._failures.maxlen and now - self._failures[0] < FAILURE_SECONDS
        return FAILURE_SECONDS if is_full else 0.0

    def _reader_of(self, given: str) -> Caller | None:
        found = [one for token, one in self._readers.items() if compare_digest(given.encode(), token.encode())]
        return found[0] if found else None


def _host_name(host: str) -> str | None:
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    is_plain = parts.netloc == host and "@" not in host
    return parts.hostname.lower() if is_plain and parts.hostname else None


def _cookie_value(header: str) -> str:
    for one in header.split(";"):
        name, _, value = one.strip().partition("=")
        if name == COOKIE:
            return value
    return ""
