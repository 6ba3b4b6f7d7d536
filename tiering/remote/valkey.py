"""Valkey or Redis as a remote engine: one server, with our own RESP, over TCP, a UNIX socket or TLS.

The verbs are GET, SET NX, EXISTS and DEL, so there is no client library: its packers cost most of the bandwidth, and
its retries, pools and threads have their own deadlines. A server of a cluster is refused: redirections are not
followed. A connection begins with HELLO, which authenticates it; it is kept as long as everything on it succeeded, and
on the next use unread bytes show that it is out of step.

TLS is Python's `ssl`, which reaches 0.15 to 0.35 of a plain socket: for servers that demand it. Between hosts that
trust their network, or through a proxy in the kernel or the mesh, a plain socket is better; frames bear a MAC and
digests on any.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from typing import Self
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from tiering.clock import Clock
from tiering.remote.driver import Arrived, RemoteFault, RemoteTimedOut, RemoteUnreachable, WrongSize, ignored
from tiering.remote.resp import ErrorReply, Piece, Reply, RespConnection, RespFault, command, set_command

CALL_SECONDS, CONNECT_SECONDS = 2.0, 0.5
"""Limit of a call, whatever its deadline; and of connecting and authenticating, which may pass the deadline by so
much."""
MOST_IDLE = 16
"""Connections kept for later."""
DEFAULT_PORT, DEFAULT_USER, CLIENT_NAME = 6379, "default", b"kvstore"
RULES = "~kvf:* -@all +get +set +del +exists +ping +hello +client|setname"
"""An access list that suffices."""
_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_ALLOWED = "valkey://[USER@]HOST[:PORT], valkeys://[USER@]HOST[:PORT][?ca=FILE] for TLS, or valkey+unix:PATH"
_CLUSTER = "is one of a cluster, whose redirections are not followed; name a server, or a proxy, that has all keys"
_OUT_OF_MEMORY = "OOM"
_WRONG_TYPE = "WRONGTYPE"
_MEANINGS = {
    "WRONGPASS": "user or password is wrong: see password_file and the user in the URL",
    "NOAUTH": "it wants a password: set password_file, and the user in the URL",
    "NOPERM": f"the user may not do this: its access list must have {RULES}",
    "MOVED": f"it {_CLUSTER}",
    "ASK": f"it {_CLUSTER}",
    "CROSSSLOT": f"it {_CLUSTER}",
    "CLUSTERDOWN": f"it {_CLUSTER}",
    "READONLY": "it is a replica: name the primary",
    "LOADING": "it is loading its data: turn its persistence off, this is a cache",
    "MISCONF": "it refuses writes because it cannot persist them: turn its persistence off, this is a cache",
    "NOPROTO": "it is older than Redis 6",
    "ERR": "it does not know the command, or is older than Redis 6",
}


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """A server's address. path: of its UNIX socket, or empty. ca: file of certificates to trust; empty for the
    system's."""

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    user: str = ""
    is_tls: bool = False
    ca: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ValueError, in one line."""
        scheme, _, rest = url.partition(":")
        if scheme in ("valkey+unix", "redis+unix"):
            path = rest.removeprefix("//")
            if not path.startswith("/"):
                raise ValueError(f"the path of a UNIX socket begins with /: {url!r}; allowed is {_ALLOWED}")
            return cls(path=path)
        try:
            parts = urlsplit(url)
            host, port, user = parts.hostname, parts.port, unquote(parts.username or "")
            (host or "").encode("idna")  # as connecting will: reports an impossible host here
        except ValueError as error:
            raise ValueError(f"{error} in {scheme}://...; allowed is {_ALLOWED}") from None
        if parts.password is not None:
            raise ValueError("a password does not belong into the URL, where everybody sees it: name a password_file")
        if scheme not in _SCHEMES or not host or port == 0 or parts.path.strip("/") or parts.fragment:
            raise ValueError(f"not the address of a Valkey: {url!r}; allowed is {_ALLOWED}")
        return cls(host, port or DEFAULT_PORT, "", user, _SCHEMES[scheme], _ca(parts, _SCHEMES[scheme]))

    def __str__(self) -> str:
        if self.path:
            return f"valkey+unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"valkey{'s' * self.is_tls}://{host}:{self.port}"


def _ca(parts: SplitResult, is_tls: bool) -> str:
    given = parse_qs(parts.query, keep_blank_values=True)
    (ca,) = given.pop("ca", [""])[:1]
    if given or (ca and not is_tls) or (parts.query and not ca):
        raise ValueError(f"not options of a Valkey: {parts.query!r}; allowed is {_ALLOWED}")
    return ca


class _NoRoom(Exception):
    """The server has no room for a write."""


def _no_password() -> bytes:
    return b""


class ValkeyEngine:
    """`RemoteEngine` on one server."""

    def __init__(
        self,
        address: ValkeyAddress,
        clock: Clock,
        password: Callable[[], bytes] = _no_password,
        call_seconds: float = CALL_SECONDS,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """password: called for each connection, so that a new one takes effect. Raises OSError if the file of
        certificates cannot be read."""
        self.name = str(address)
        self._address = address
        self._clock = clock
        self._password = password
        self._call_seconds = call_seconds
        self._connect_seconds = connect_seconds
        self._tls = ssl.create_default_context(cafile=address.ca or None) if address.is_tls else None
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []  # last used at the end
        self._lent: set[RespConnection] = set()
        self._is_closed = False

    def exists(self, keys: Sequence[bytes], deadline: float = inf) -> list[bool]:
        deadline = self._bounded(deadline)
        with self._connection(deadline) as one:
            one.send([b"".join(command(b"EXISTS", key) for key in keys)], deadline)
            return [_counted(one.reply(deadline), 1) == 1 for _ in keys]

    def read(self, key: bytes, slot: memoryview, deadline: float = inf, arrived: Arrived = ignored) -> bool:
        deadline = self._bounded(deadline)
        with self._connection(deadline) as one:
            one.send([command(b"GET", key)], deadline)
            return one.reply_into(slot.cast("B"), deadline, arrived)

    def write(
        self, key: bytes, header: bytes | memoryview, payload: bytes | memoryview, ttl_ms: int, deadline: float = inf
    ) -> bool:
        """Sends a value even if it exists already: ask `exists` before."""
        pieces: list[Piece] = [memoryview(header).cast("B"), memoryview(payload).cast("B")]
        deadline = self._bounded(deadline)
        try:
            with self._connection(deadline) as one:
                one.send(set_command(key, pieces, ttl_ms), deadline)
                if one.reply(deadline) not in (b"OK", None):
                    raise RespFault("an answer that no SET has")
        except _NoRoom:
            return False
        return True

    def delete(self, keys: Sequence[bytes], deadline: float = inf) -> int:
        if not keys:
            return 0
        deadline = self._bounded(deadline)
        with self._connection(deadline) as one:
            one.send([command(b"DEL", *keys)], deadline)
            return _counted(one.reply(deadline), len(keys))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for one in self._lent:
                one.interrupt()
        for one in idle:
            one.close()

    # --- connections ---

    def _bounded(self, deadline: float) -> float:
        return min(deadline, self._clock.monotonic_seconds() + self._call_seconds)

    @contextmanager
    def _connection(self, deadline: float) -> Iterator[RespConnection]:
        """A connection in step; kept afterwards only if nothing failed on it."""
        one = None
        is_whole = False
        try:
            one = self._kept() or self._opened()
            is_whole = self._clock.monotonic_seconds() >= deadline  # for the next call
            if is_whole:
                raise TimeoutError
            yield one
            is_whole = True
        except TimeoutError:
            raise RemoteTimedOut(f"{self.name} did not answer in time") from None
        except OSError as error:
            why = error if error.filename else error.strerror or error  # a file: that of the password
            raise RemoteUnreachable(f"{self.name}: {why}") from error
        except ErrorReply as error:
            if error.code == _OUT_OF_MEMORY:
                raise _NoRoom from None
            if error.code == _WRONG_TYPE:
                raise WrongSize("a value of another type") from None
            meaning = _MEANINGS.get(error.code, "see its log")
            raise RemoteFault(f"{self.name} answered {error.code}: {meaning}") from None
        except RespFault as error:
            raise RemoteFault(f"{self.name}: {error}") from None
        finally:
            if one is not None:
                self._returned(one, is_whole)

    def _kept(self) -> RespConnection | None:
        while True:
            with self._lock:
                if self._is_closed:
                    raise RemoteUnreachable(f"{self.name} was closed")
                if not self._idle:
                    return None
                one = self._idle.pop()
                self._lent.add(one)
            if one.is_in_step():
                return one
            self._returned(one, False)

    def _returned(self, one: RespConnection, is_whole: bool) -> None:
        with self._lock:
            self._lent.discard(one)
            if is_whole and not self._is_closed and len(self._idle) < MOST_IDLE:
                self._idle.append(one)
                return
        one.close()

    def _opened(self) -> RespConnection:
        """To a limit of its own: where a call's deadline ended it, each next call would begin anew, and be late too."""
        until = self._clock.monotonic_seconds() + self._connect_seconds
        try:
            one = RespConnection(self._connected(until), self._clock)
        except TimeoutError:
            raise RemoteUnreachable(f"{self.name} takes no connection") from None
        with ExitStack() as undo:
            undo.callback(self._returned, one, False)
            with self._lock:
                self._lent.add(one)
            self._greet(one, until)
            undo.pop_all()
        return one

    def _connected(self, until: float) -> socket.socket:
        address, left = self._address, max(1e-3, until - self._clock.monotonic_seconds())
        with ExitStack() as undo:
            if address.path:
                plain = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                plain.settimeout(left)
                plain.connect(address.path)
            else:
                plain = undo.enter_context(socket.create_connection((address.host, address.port), timeout=left))
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                plain.settimeout(max(1e-3, until - self._clock.monotonic_seconds()))
                plain = self._tls.wrap_socket(plain, server_hostname=address.host)
            undo.pop_all()
        return plain

    def _greet(self, one: RespConnection, until: float) -> None:
        words = [b"HELLO", b"2"]
        password = self._password()
        if password or self._address.user:
            words += [b"AUTH", (self._address.user or DEFAULT_USER).encode(), password]
        one.send([command(*words, b"SETNAME", CLIENT_NAME)], until)
        said = one.reply(until)
        if not isinstance(said, list):
            raise RespFault("no answer to HELLO")
        if b"cluster" in said:
            raise RespFault(f"it {_CLUSTER}")


def _counted(reply: Reply, most: int) -> int:
    if not isinstance(reply, int) or reply > most:
        raise RespFault("an answer that is no count")
    return reply
