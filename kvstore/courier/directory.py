"""The directory of a pool in Valkey or Redis: small values alone.

    kv:nodes      a set: the nodes' ids, so that none has to scan           one thread    refresh, announce, withdraw
    kv:n:<node>   a node's entry, for 5 s; written anew each 1.5 s          callers       look-ups, on connections
    kv:h:<name>   hints of a chunk (`pool/directory`), for 15 minutes                     that this thread keeps open

A field of `kv:h:` has its own time to live if the server knows HSETEX (Valkey 9, Redis 8); otherwise its value contains
its end, by the server's clock. No two hosts' clocks are ever compared.

A look-up never connects, never retries and never waits for an announcement. If the server is slow or gone, three
failures open the breaker: look-ups then fail at once, until the thread's own refresh is quick again. Replies are
bounded before anything is built from them: 64 hints of a chunk, and the bytes of all that a call may be answered.
Values that are no hint or entry are skipped.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, LifoQueue
from typing import Any
from urllib.parse import unquote, urlsplit

from kvstore.block.account import HitTier
from kvstore.block.errors import BadInput, shown
from kvstore.block.identity import NODE_BYTES, NodeIdentity
from kvstore.courier.figures import DIRECTORY, DOWN, OPEN, UP, Figures
from kvstore.pool.directory import (
    HINT_SECONDS,
    MAX_ENTRY_BYTES,
    MAX_HOLDERS,
    MAX_NODES,
    NODE_SECONDS,
    AliveTable,
    Announcer,
    ClaimState,
    DirectoryDown,
    Holder,
    NodeClaim,
    NodeEntry,
    entry_bytes,
    hint_value,
    leading_holders,
    read_entry,
)
from kvstore.protocol.courier import SourceFigures
from tiering.clock import Clock
from tiering.remote.resp import ErrorReply, Reply, ReplyRoom, RespConnection, RespFault, TooLarge, command

REFRESH_SECONDS, TICK_SECONDS = 1.5, 0.2
CALL_SECONDS, CONNECT_SECONDS, LEAVE_SECONDS = 1.0, 1.0, 0.5
SLOW_SECONDS = 0.05
"""A refresh slower than this does not close a breaker that look-ups opened."""
NODES_PER_REFRESH = 256
"""A larger pool's table is read less often, in proportion: otherwise the reads grow with the square of the nodes."""
LOOKUP_CONNECTIONS = 8  # twice as many as one tenant's threads use at once
FAILURES_TO_OPEN = 3
MAX_ITEMS, MAX_ITEMS_PER_COMMAND = MAX_NODES, 2 * MAX_HOLDERS + 1
ROOM_BYTES, ROOM_PER_COMMAND_BYTES = 1 << 20, 8 << 10
"""Of all replies of a call together: items, and bytes of strings."""
BUFFER_BYTES = 64 << 10
MAX_TIME_MS = 1 << 48
DEFAULT_PORT = 6379
_NODES, _NODE, _HINTS = b"kv:nodes", b"kv:n:", b"kv:h:"
_LIST_ANEW = (b"DEL", _NODES)  # a broken set: each node enters itself again with its next refresh

_log = logging.getLogger(__name__)


def _no_password() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class DirectoryAddress:
    """A directory's address: host and port, or the path of a UNIX socket; and the user of its ACL, or nothing.
    password: read for each connection, so that it can be changed; it may raise `OSError`."""

    host: str
    port: int
    path: str
    user: str
    password: Callable[[], str] = _no_password

    @classmethod
    def read(cls, text: str, password: Callable[[], str] = _no_password) -> DirectoryAddress:
        """As in settings: valkey://[USER@]HOST[:PORT] or valkey+unix:PATH, with a user valkey+unix://USER@PATH. Raises
        `BadInput`."""
        given = (
            "a directory's address with a password"
            if re.search("//[^/@]*:[^/]*@", text)
            else f"directory={shown(text)}"
        )
        wrong = BadInput(
            f"{given}; give valkey://[USER@]HOST[:PORT] or valkey+unix:/PATH (the password stands in a file of its own)"
        )
        try:
            parts = urlsplit(text)
            host, port, user = parts.hostname or "", parts.port or DEFAULT_PORT, unquote(parts.username or "")
        except ValueError:
            raise wrong from None
        is_unix = parts.scheme == "valkey+unix"
        fits = (parts.path.startswith("/") and not host) if is_unix else (host and parts.path in ("", "/"))
        if parts.scheme not in ("valkey", "valkey+unix") or not fits or parts.password or parts.query or parts.fragment:
            raise wrong
        return cls(host, port, unquote(parts.path) if is_unix else "", user, password)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class ValkeyDirectory:
    """Shared by the nodes of a pool. Start it, use it from any thread, close it."""

    def __init__(
        self,
        address: DirectoryAddress,
        here: NodeIdentity,
        entry: Callable[[], NodeEntry],
        table: AliveTable,
        announcer: Announcer,
        clock: Clock,
        figures: Figures,
    ) -> None:
        """entry: returns this node's present entry, with the node and incarnation of `here`. table: receives the other
        nodes."""
        self._address = address
        self._here = here
        self._entry = entry
        self._table = table
        self._announcer = announcer
        self._clock = clock
        self._figures = figures
        self._own, self._telling = _ValkeyWire(address, clock), threading.Lock()
        self._lookups: LifoQueue[_ValkeyWire] = LifoQueue()
        self._missing_lookups = LOOKUP_CONNECTIONS
        self._claim, self._has_entered = NodeClaim(here), False
        self._lock = threading.Lock()
        self._wanted, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="kv-directory", daemon=True)
        self._down: str | None = "not asked yet"
        self._refused: dict[str, str] = {}
        self._is_slow = False
        self._failed_lookups = 0
        self._table_due = self._quiet_until = float("-inf")
        self._server_ahead_ms: int | None = None
        self._fields_age = True

    def start(self) -> None:
        """Enter this node, and keep it there."""
        assert read_entry(self._here.node, entry_bytes(self._entry())) is not None
        self._thread.start()

    def close(self) -> None:
        """Leave the pool, if the server answers. Ends all threads and connections."""
        self._ends.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(2 * (CALL_SECONDS + CONNECT_SECONDS) + LEAVE_SECONDS)
        self._down = "closed"
        self._drop_lookups()

    @property
    def reason(self) -> str:
        """Why this node works alone, or others do not see its blocks; empty if all is well."""
        if self._claim.state == ClaimState.CLONED:
            node = self._here.node.hex()
            return (
                f"another run of node {node} is in the directory, so its data directory is a copy: this one announces "
                "nothing; remove DIR/node of one of the two"
            )
        if self._down is not None:
            return f"the directory {self._address} cannot be asked: {self._down}"
        refused = next(iter(self._refused.copy().values()), None)
        return "" if refused is None else f"the directory {self._address} refuses what this node tells it: {refused}"

    def figures(self) -> SourceFigures:
        state = UP if self._down is None else OPEN if self._is_slow else DOWN
        hints, why = self._announcer.held, self.reason
        return self._figures.told(DIRECTORY, DIRECTORY, str(self._address), state, hints, why)

    def alive(self) -> Mapping[bytes, NodeEntry]:
        """The other nodes, as of some seconds ago."""
        return self._table.alive(self._clock.monotonic_seconds())

    def holders(self, heads: Sequence[tuple[int, bytes]], seconds: float) -> list[Holder]:
        """Which nodes have leading chunks of these. Raises `DirectoryDown`."""
        if self._down is not None:
            raise DirectoryDown(self._down)
        alive = self.alive()
        if not heads or not alive:
            return []
        deadline = self._clock.monotonic_seconds() + seconds
        try:
            wire = self._lookups.get(timeout=max(0.0, seconds / 2))  # the other half is the server's
        except Empty:
            raise DirectoryDown("all connections are in use") from None
        try:
            wanted = [(b"HRANDFIELD", _HINTS + name, MAX_HOLDERS, b"WITHVALUES") for _, name in heads]
            replies = wire.call(wanted, max(0.0, deadline - self._clock.monotonic_seconds()))
        except DirectoryDown as error:
            with self._lock:
                self._missing_lookups += 1
            self._lookup_failed(str(error))
            raise
        self._lookups.put(wire)
        said = [_fields(reply) for reply in replies]
        found = leading_holders(heads, said, alive, self._server_ms())
        with self._lock:
            self._failed_lookups = 0
        self._figures.count(DIRECTORY, lookups=1, found=bool(found))
        return found

    def announce(self, hints: Sequence[tuple[bytes, HitTier]], seconds: float = CALL_SECONDS) -> None:
        """Announce that this node has these chunks; called by the `Announcer`. Raises `DirectoryDown`."""
        node, run, ttl_ms = self._here.node, self._here.incarnation, int(1e3 * HINT_SECONDS)
        if self._fields_age:
            how = (b"PX", ttl_ms, b"FIELDS", 1, node)
            wanted = [(b"HSETEX", _HINTS + name, *how, hint_value(run, tier)) for name, tier in hints]
            replies = self._ask(wanted, seconds)
            if not any(isinstance(reply, ErrorReply) and "unknown command" in reply.text.lower() for reply in replies):
                return self._judge(replies)
            self._fields_age = False
        now_ms = self._server_ms()
        if now_ms is None:
            raise DirectoryDown("its time is not known yet")
        commands: list[tuple[Any, ...]] = []
        for name, tier in hints:
            commands.append((b"HSET", _HINTS + name, node, hint_value(run, tier, now_ms + ttl_ms)))
            commands.append((b"PEXPIRE", _HINTS + name, ttl_ms))
        self._judge(self._ask(commands, seconds))

    def withdraw(self, names: Sequence[bytes], seconds: float = CALL_SECONDS) -> None:
        """Called by the `Announcer`. Raises `DirectoryDown`."""
        self._judge(self._ask([(b"HDEL", _HINTS + name, self._here.node) for name in names], seconds))

    def _work(self) -> None:
        due = self._clock.monotonic_seconds()
        while not self._ends.is_set():
            self._wanted.clear()
            now = self._clock.monotonic_seconds()
            if now >= due:
                self._refresh(now)
                due = now + REFRESH_SECONDS
            self._connect_lookups()
            if not self._tell():
                self._wanted.wait(max(0.0, min(TICK_SECONDS, due - self._clock.monotonic_seconds())))
        self._leave()

    def _refresh(self, now: float) -> None:
        try:
            mine = (b"GETRANGE", _NODE + self._here.node, 0, MAX_ENTRY_BYTES)
            try:
                own, clock, listed = self._ask([mine, (b"TIME",), (b"SRANDMEMBER", _NODES, MAX_NODES)])
            except _Oversized:
                self._ask([_LIST_ANEW])
                raise
            took = self._clock.monotonic_seconds() - now
            self._judge([own, clock, listed])
            self._server_ahead_ms = _milliseconds(clock) - int(1e3 * self._clock.monotonic_seconds())
            self._write_entry(own, now)
            self._read_table(listed, now)
        except DirectoryDown as error:
            self._fields_age = True  # another server may have taken its place
            self._drop_lookups()
            self._set_down(str(error), is_slow=False)
            return
        if self._down is not None and not (self._is_slow and took > SLOW_SECONDS):
            self._set_down(None, is_slow=False)

    def _write_entry(self, own: object, now: float) -> None:
        entry = read_entry(self._here.node, own)
        found = None if entry is None else entry.incarnation
        if found is None and self._has_entered:  # then our hints, or announcements since, may be lost too
            self._announcer.lost()
        was = self._claim.state
        if self._claim.look(found, now):
            key, value, ttl_ms = _NODE + self._here.node, entry_bytes(self._entry()), int(1e3 * NODE_SECONDS)
            try:
                self._judge(self._ask([(b"SET", key, value, b"PX", ttl_ms), (b"SADD", _NODES, self._here.node)]))
                self._has_entered = True
                self._refused.pop("entry", None)
            except _Refused as error:
                self._refused["entry"] = str(error)
        if was != self._claim.state == ClaimState.CLONED:
            _log.error("%s", self.reason)

    def _read_table(self, listed: object, now: float) -> None:
        if not isinstance(listed, list):  # it is of another type
            self._ask([_LIST_ANEW])
            listed = []
        names = [one for one in listed if isinstance(one, bytes)]
        nodes = [one for one in names if len(one) == NODE_BYTES]
        if now < self._table_due:
            return
        found: list[NodeEntry] = []
        left_out = [one for one in names if len(one) != NODE_BYTES]
        for at in range(0, len(nodes), NODES_PER_REFRESH):
            asked = nodes[at : at + NODES_PER_REFRESH]
            replies = self._ask([(b"GETRANGE", _NODE + node, 0, MAX_ENTRY_BYTES) for node in asked])
            entries = [read_entry(node, reply) for node, reply in zip(asked, replies, strict=True)]
            found += [one for one in entries if one is not None]
            for node in [node for node, one in zip(asked, entries, strict=True) if one is None]:
                self._table.gone(node)
                left_out.append(node)
        further = REFRESH_SECONDS * max(0.0, len(found) / NODES_PER_REFRESH - 1.0)
        self._table_due = now + further
        self._table.saw(found, now, NODE_SECONDS + further)
        self._announcer.shares(len(found))
        left_out = [node for node in left_out if node != self._here.node]
        if left_out:
            self._judge(self._ask([(b"SREM", _NODES, *left_out)]))

    def _tell(self) -> bool:
        now = self._clock.monotonic_seconds()
        if self._down is not None or self._claim.state != ClaimState.OURS or now < self._quiet_until:
            return False
        batch = self._announcer.batch(now)
        if not batch:
            return False
        try:
            if batch.withdraw:
                self.withdraw(batch.withdraw)
            if batch.announce:
                self.announce(batch.announce)
            self._refused.pop("hints", None)
        except DirectoryDown as error:
            self._announcer.failed(batch)
            self._quiet_until = now + REFRESH_SECONDS
            if isinstance(error, _Refused):
                self._refused["hints"] = str(error)
            return False
        return True

    def _connect_lookups(self) -> None:
        while self._missing_lookups and self._down is None and not self._ends.is_set():
            wire = _ValkeyWire(self._address, self._clock)
            try:
                wire.call([(b"TIME",)])
            except DirectoryDown as error:
                self._set_down(str(error), is_slow=False)
                return
            with self._lock:
                self._missing_lookups -= 1
            self._lookups.put(wire)

    def _drop_lookups(self) -> None:
        with suppress(Empty):
            while True:
                self._lookups.get_nowait().close()
                with self._lock:
                    self._missing_lookups += 1

    def _leave(self) -> None:
        try:
            if self._claim.state == ClaimState.OURS and self._down is None:
                key = _NODE + self._here.node
                entry = read_entry(self._here.node, self._ask([(b"GET", key)], LEAVE_SECONDS)[0])
                if entry is not None and entry.incarnation == self._here.incarnation:
                    self._ask([(b"DEL", key)], LEAVE_SECONDS)
        except DirectoryDown:
            pass  # the entry expires by itself
        self._own.close()

    def _lookup_failed(self, why: str) -> None:
        self._figures.count(DIRECTORY, lookups=1, failures=1)
        with self._lock:
            self._failed_lookups += 1
            opens = self._failed_lookups >= FAILURES_TO_OPEN
        if opens:
            self._set_down(f"{FAILURES_TO_OPEN} look-ups in a row failed ({why})", is_slow=True)
        self._wanted.set()

    def _set_down(self, why: str | None, *, is_slow: bool) -> None:
        with self._lock:
            was, self._down, self._is_slow, self._failed_lookups = self._down, why, is_slow, 0
        if (was is None) != (why is None):
            _log.warning("directory %s: %s", self._address, why or "answers; look-ups ask it again")

    def _server_ms(self) -> int | None:
        ahead = self._server_ahead_ms
        return None if ahead is None else ahead + int(1e3 * self._clock.monotonic_seconds())

    def _ask(self, commands: Sequence[tuple[Any, ...]], seconds: float = CALL_SECONDS) -> list[Any]:
        with self._telling:
            return self._own.call(commands, seconds)

    @staticmethod
    def _judge(replies: Sequence[object]) -> None:
        for one in replies:
            if isinstance(one, ErrorReply) and one.code != "WRONGTYPE":
                raise _Refused(one.text)


class _Refused(DirectoryDown): ...


class _Oversized(DirectoryDown):
    """The reply is longer than a call's may be."""


def _fields(reply: object) -> dict[bytes, bytes]:
    if isinstance(reply, ErrorReply) and reply.code != "WRONGTYPE":
        raise DirectoryDown(reply.text)
    flat = reply if isinstance(reply, list) else []
    pairs = zip(flat[::2], flat[1::2], strict=False)
    return {node: value for node, value in pairs if isinstance(node, bytes) and isinstance(value, bytes)}


def _milliseconds(reply: Any) -> int:
    try:
        now_ms = int(reply[0]) * 1000 + int(reply[1]) // 1000
    except (TypeError, ValueError, IndexError):
        now_ms = -1
    if not 0 <= now_ms < MAX_TIME_MS:
        raise DirectoryDown("it does not tell the time")
    return now_ms


class _ValkeyWire:
    """One connection, for one thread at a time: each call within a deadline, and its replies bounded in all."""

    def __init__(self, address: DirectoryAddress, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._connection: RespConnection | None = None

    def call(self, commands: Sequence[tuple[Any, ...]], seconds: float = CALL_SECONDS) -> list[Any]:
        """The replies in order; the error of a single command is an `ErrorReply` among them. Connects if there is no
        connection. On failure closes it and raises `DirectoryDown`."""
        try:
            connection = self._connection or self._connected()
            return self._replies(connection, commands, seconds)
        except (OSError, RespFault) as error:
            self.close()
            if isinstance(error, TooLarge):
                raise _Oversized(str(error)) from None
            is_late = isinstance(error, TimeoutError)
            raise DirectoryDown(f"no answer in {1e3 * seconds:.0f} ms" if is_late else str(error)[:200]) from None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> RespConnection:
        address = self._address
        if address.path:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(CONNECT_SECONDS)
            sock.connect(address.path)
        else:
            sock = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = self._connection = RespConnection(sock, self._clock, BUFFER_BYTES)
        password = address.password()
        if password or address.user:
            user = (address.user.encode(),) if address.user else ()
            (reply,) = self._replies(connection, [(b"AUTH", *user, password.encode())], CONNECT_SECONDS)
            if isinstance(reply, ErrorReply):
                raise RespFault(reply.text)
        return connection

    def _replies(
        self, connection: RespConnection, commands: Sequence[tuple[Any, ...]], seconds: float
    ) -> list[Reply | ErrorReply]:
        if not connection.is_in_step():
            raise RespFault("it closed the connection, or answered what was not asked")
        ends_at = self._clock.monotonic_seconds() + seconds
        words = [[b"%d" % word if isinstance(word, int) else word for word in one] for one in commands]
        connection.send([b"".join(command(*one) for one in words)], ends_at)
        room = ReplyRoom(
            MAX_ITEMS + MAX_ITEMS_PER_COMMAND * len(words), ROOM_BYTES + ROOM_PER_COMMAND_BYTES * len(words)
        )
        replies: list[Reply | ErrorReply] = []
        for _ in words:
            try:
                replies.append(connection.reply(ends_at, room))
            except ErrorReply as error:
                replies.append(error)
        return replies
