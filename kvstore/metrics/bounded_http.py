"""A small HTTP server: one thread, GET and HEAD, one request for each connection, a bound on everything.

    accept > read until the empty line > answer > close the sending half > read what is left > close

Slow or hostile clients cost only this server's own thread, and a bounded part of its time: there are limits on
connections at a time, on new ones a second, and on the bytes and seconds of each. When all connections are taken, the
server closes the oldest one that has sent no whole request. A second thread makes slow pages, so that probes are
answered meanwhile. Knows nothing of the sidecar; must never call it but through the pages that it is handed.
"""

from __future__ import annotations

import json
import logging
import re
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

from kvstore.listeners.addresses import listening_sockets

MAX_CONNECTIONS = 32
"""At a time."""
MAX_REQUEST_BYTES = 8 << 10
"""Of a request line and its headers."""
EXCHANGE_SECONDS = 5.0
"""From the acceptance of a connection until it has sent its request and read the answer."""
LINGER_SECONDS, LINGER_BYTES = 1.0, 64 << 10
"""How long, and how much, an answered client may go on sending: a connection that is closed with unread bytes loses the
answer."""
ACCEPTS_PER_SECOND, ACCEPT_BURST = 200.0, 200.0
"""Limits on new connections: at these a flood takes a few hundredths of a processor, and delays no engine. Of
those that wait in the kernel, in order, a scraper waits `BACKLOG / ACCEPTS_PER_SECOND` seconds at most, which is less
than its timeout."""
LOOK_SECONDS = 0.25
"""How often late connections are looked for, while there are any."""
METHODS = frozenset("GET HEAD POST PUT DELETE PATCH OPTIONS TRACE".split())
"""Others are not known here: 501."""
PLAIN, JSON = "text/plain; charset=utf-8", "application/json"

_log = logging.getLogger(__name__)


class HttpRequest(NamedTuple):
    """headers: by name in lower case; of repeated ones, the first."""

    path: str
    headers: Mapping[str, str]


class HttpAnswer(NamedTuple):
    """headers: beyond type and length."""

    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    headers: tuple[tuple[str, str], ...] = ()


def in_one_line(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> HttpAnswer:
    """An answer for people."""
    return HttpAnswer(status, f"{text}\n".encode(), PLAIN, headers)


def as_json(status: HTTPStatus, value: object) -> HttpAnswer:
    """An answer for programs."""
    return HttpAnswer(status, json.dumps(value, separators=(",", ":")).encode(), JSON)


@dataclass(frozen=True, slots=True)
class Page:
    """The page at a path. is_slow: it may wait for locks, and is made in the second thread."""

    answer: Callable[[HttpRequest], HttpAnswer]
    is_slow: bool = False


@dataclass(eq=False, slots=True)
class _HttpConnection:
    """One client. asked: it sent a whole request. lingering: it was answered, and may send on for a moment."""

    socket: socket.socket
    ends_at: float
    read: bytearray = field(default_factory=bytearray)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    asked: bool = False
    lingering: bool = False
    lingered_bytes: int = 0
    closed: bool = False


class HttpServer:
    """Serves pages until it is closed."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page], seconds: Callable[[], float]) -> None:
        """port: 0 for any free one. pages: by path. seconds: a clock that never goes back. Raises `BadInput` if the
        address cannot be had."""
        self._pages = pages
        self._seconds = seconds
        self._sockets = listening_sockets(host, port, "http.listen (--http)")
        for one in self._sockets:
            one.setblocking(False)
        self.port: int = self._sockets[0].getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._connections: dict[_HttpConnection, None] = {}  # the one that came first, first
        self._made: deque[tuple[_HttpConnection, bool, Future[HttpAnswer]]] = deque()
        self._making = 0  # pages that the second thread has to make, also for clients that are gone
        self._accepts, self._accepts_at = ACCEPT_BURST, seconds()
        self._is_accepting = False
        self._closing = False
        self._pool = ThreadPoolExecutor(1, "kv-http-page")
        self._thread = threading.Thread(target=self._serve, name="kv-http", daemon=True)

    def start(self) -> None:
        """Serve."""
        self._accept_from_now_on()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._pool.submit(lambda: None)  # its thread is there from now on
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Serve no more, and give back the address."""
        self._closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for one in (*self._sockets, self._woken, self._waker):
            one.close()

    # The loop ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            is_idle = not self._connections and self._is_accepting
            for key, _ in self._selector.select(None if is_idle else LOOK_SECONDS):
                if key.fileobj in self._sockets:
                    self._accept(key.fileobj)
                elif key.fileobj is self._woken:
                    self._deliver()
                else:
                    self._exchange(key.data)
            self._look_around()
        for connection in list(self._connections):
            self._close(connection)
        self._selector.close()

    def _look_around(self) -> None:
        now = self._seconds()
        self._accepts = min(ACCEPT_BURST, self._accepts + (now - self._accepts_at) * ACCEPTS_PER_SECOND)
        self._accepts_at = now
        if not self._is_accepting and self._accepts >= 1:
            self._accept_from_now_on()
        for connection in [one for one in self._connections if one.ends_at < now]:
            self._close(connection)

    def _accept_from_now_on(self) -> None:
        for one in self._sockets:
            self._selector.register(one, selectors.EVENT_READ)
        self._is_accepting = True

    def _accept(self, listening: socket.socket) -> None:
        if self._accepts < 1:
            self._pause_accept()
            return
        self._accepts -= 1
        try:
            sock, _ = listening.accept()
        except BlockingIOError:  # gone again
            return
        except OSError:  # no descriptors left: the next one is let in later
            self._accepts = 0.0
            self._pause_accept()
            return
        sock.setblocking(False)
        if len(self._connections) >= MAX_CONNECTIONS:
            self._close(min(self._connections, key=lambda one: one.asked))  # `min` takes the first of equals
        connection = _HttpConnection(sock, self._seconds() + EXCHANGE_SECONDS)
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._exchange(connection)

    def _pause_accept(self) -> None:
        if self._is_accepting:
            for one in self._sockets:
                self._selector.unregister(one)
            self._is_accepting = False

    def _exchange(self, connection: _HttpConnection) -> None:
        """Do what can be done at once for a connection."""
        if connection.closed:
            return
        try:
            if connection.unsent:
                self._flush(connection)
            elif connection.lingering:
                self._linger(connection)
            elif not connection.asked:
                self._read(connection)
        except BlockingIOError:
            pass
        except OSError:  # the client is gone
            self._close(connection)

    def _read(self, connection: _HttpConnection) -> None:
        received = connection.socket.recv(MAX_REQUEST_BYTES + 1 - len(connection.read))
        if not received:
            self._close(connection)
            return
        connection.read += received
        head, end, _ = bytes(connection.read).replace(b"\r\n", b"\n").partition(b"\n\n")
        if not end and len(connection.read) <= MAX_REQUEST_BYTES:
            return
        connection.asked = True
        self._selector.modify(connection.socket, 0x0 or selectors.EVENT_WRITE, connection)
        if not end:
            text, is_line = f"a request of more than {MAX_REQUEST_BYTES} bytes", b"\n" not in connection.read
            status = HTTPStatus.REQUEST_URI_TOO_LONG if is_line else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._answer(connection, in_one_line(status, text))
            return
        self._take(connection, head)

    def _take(self, connection: _HttpConnection, head: bytes) -> None:
        method, request, refused = parsed(head)
        if refused is not None or request is None:
            self._answer(connection, refused or in_one_line(HTTPStatus.BAD_REQUEST, "not a request"))
            return
        is_head = method == "HEAD"
        page = self._pages.get(request.path)
        if page is None:
            there = ", ".join(self._pages)
            self._answer(connection, in_one_line(HTTPStatus.NOT_FOUND, f"there is nothing here; there are {there}"))
            return
        if not page.is_slow:
            self._answer(connection, page.answer(request), without_body=is_head)
            return
        if self._making >= MAX_CONNECTIONS:
            self._answer(connection, in_one_line(HTTPStatus.SERVICE_UNAVAILABLE, "too many ask at a time; try again"))
            return
        self._making += 1
        self._selector.unregister(connection.socket)
        made = self._pool.submit(page.answer, request)
        made.add_done_callback(lambda future: self._tell_made(connection, is_head, future))

    def _tell_made(self, connection: _HttpConnection, is_head: bool, made: Future[HttpAnswer]) -> None:
        """In the second thread."""
        self._made.append((connection, is_head, made))
        self._wake()

    def _deliver(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._made:
            connection, is_head, made = self._made.popleft()
            self._making -= 1
            if connection.closed or made.cancelled():
                continue
            error = made.exception()
            if error is not None:
                _log.error("a page could not be made", exc_info=error)
                text = "a fault of the sidecar; it is in its log"
                answer = in_one_line(HTTPStatus.INTERNAL_SERVER_ERROR, text)
            else:
                answer = made.result()
            self._selector.register(connection.socket, selectors.EVENT_WRITE, connection)
            self._answer(connection, answer, without_body=is_head)

    def _answer(self, connection: _HttpConnection, answer: HttpAnswer, *, without_body: bool = False) -> None:
        lines = [
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Cache-Control: no-store",
            f"Date: {formatdate(usegmt=True)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in answer.headers),
        ]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        connection.unsent = memoryview(head if without_body else head + answer.body)
        self._exchange(connection)

    def _flush(self, connection: _HttpConnection) -> None:
        with suppress(BlockingIOError):
            connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        if connection.unsent:
            self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
            return
        connection.lingering = True
        connection.ends_at = min(connection.ends_at, self._seconds() + LINGER_SECONDS)
        connection.socket.shutdown(socket.SHUT_WR)
        self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _linger(self, connection: _HttpConnection) -> None:
        received = len(connection.socket.recv(LINGER_BYTES))
        connection.lingered_bytes += received
        if not received or connection.lingered_bytes > LINGER_BYTES:
            self._close(connection)

    def _close(self, connection: _HttpConnection) -> None:
        connection.closed = True
        self._connections.pop(connection, None)
        with suppress(KeyError, ValueError):  # its page is being made
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _wake(self) -> None:
        with suppress(OSError):  # it has not read the last ones, or is closed
            self._waker.send(b"x")


def parsed(head: bytes) -> tuple[str, HttpRequest | None, HttpAnswer | None]:
    """The method and request of a head (lines end with a line feed alone), or why it is refused."""
    line, *fields = head.decode("latin-1").split("\n")
    method, *rest = line.split(" ")
    if len(rest) != 2 or not re.fullmatch(r"HTTP/\d\.\d", rest[1]):
        return "", None, in_one_line(HTTPStatus.BAD_REQUEST, "not an HTTP/1 request; ask GET /livez, for one")
    if not rest[1].startswith("HTTP/1."):
        return "", None, in_one_line(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.1 is served")
    if method not in METHODS:
        return "", None, in_one_line(HTTPStatus.NOT_IMPLEMENTED, "there is no such method here")
    if method not in ("GET", "HEAD"):
        text = "only GET and HEAD are served"
        return "", None, in_one_line(HTTPStatus.METHOD_NOT_ALLOWED, text, ("Allow", "GET, HEAD"))
    headers: dict[str, str] = {}
    for one in fields:
        name, colon, value = one.partition(":")
        if not colon or not name or name != name.strip():
            return "", None, in_one_line(HTTPStatus.BAD_REQUEST, "a header that is none; give NAME: VALUE")
        if name.lower() == "host" and "host" in headers:
            return "", None, in_one_line(HTTPStatus.BAD_REQUEST, "two headers Host; give one")
        headers.setdefault(name.lower(), value.strip())
    if "host" not in headers and rest[1] != "HTTP/1.0":
        return "", None, in_one_line(HTTPStatus.BAD_REQUEST, "the header Host is missing")
    if not rest[0].startswith(("/", "http://", "https://")):
        return "", None, in_one_line(HTTPStatus.BAD_REQUEST, "a target that is no path")
    try:
        path = urlsplit(rest[0]).path
    except ValueError:
        return "", None, in_one_line(HTTPStatus.BAD_REQUEST, "a target that is no path")
    return method, HttpRequest(path, headers), None
