"""HTTP/1.1 for the ASGI applications of this house, on h11: console, routers' queries, pd-proxy, the sidecar's pages.

    accept > TLS > head > what HTTP lets a server refuse > the application > its answer > the next request, or the end

A client that stops at any of these costs a place that it loses to the next one (`places`), and nothing else: heads,
bodies and unread answers are bounded in bytes and seconds. An application says who the caller is as soon as it knows,
by `introduce`. Requests write no line of log; a fault of an application writes one a minute.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Hashable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from http.client import responses
from logging import getLogger
from typing import Any
from urllib.parse import unquote

import h11
import msgspec

from kvstore.listeners.places import Place, TakenPlaces
from tiering.clock import Clock
from tiering.faults import RateLimitedLog

MOST_HEAD_BYTES, MOST_TARGET_BYTES = 16 << 10, 8 << 10
LINGER_SECONDS, LINGER_BYTES = 2.0, 16 << 20
"""How long, and how much, a client may send on that was answered before its request was whole: a connection that is
closed with unread bytes loses the answer."""
NO_DESCRIPTOR_SECONDS = 0.1
PLACE, CERTIFICATE = "kvstore.place", "kvstore.certificate"
"""Keys in a request's scope: its connection's place, and the URIs of its client's certificate."""
METHODS = frozenset("GET HEAD POST PUT DELETE PATCH OPTIONS TRACE".split())
"""Others are not known here at all: 501. An application answers 405 to those that it does not serve at a path."""
_READ_BYTES = 64 << 10
_HEAD_END = re.compile(rb"\n\r?\n")
_AUTHORITY = re.compile(rb"[A-Za-z0-9.\-_~%:\[\]]*")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """connections: at a time. head_seconds: until a request's head is there; body_seconds: and its body. idle_seconds:
    between two requests. unread_seconds: without the client reading. end_seconds: for running requests at the end.
    body_bytes: of all requests that are not whole yet. accepts_per_second: and as many at once; further connections
    wait in the kernel. methods: that are served at any path; others are refused whatever else they ask for."""

    connections: int = 256
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 60.0
    unread_seconds: float = 60.0
    end_seconds: float = 1.0
    body_bytes: int = 256 << 20
    accepts_per_second: float = 1e9
    methods: frozenset[str] = METHODS


class HttpRefused(Exception):
    """A request that is refused with a status. headers: of the answer."""

    def __init__(self, status: int, text: str, *headers: tuple[str, str]) -> None:
        super().__init__(" ".join(text.split()))
        self.status, self.headers = status, headers


def introduce(scope: Message, caller: Hashable) -> None:
    """The application knows the caller: its connection is no stranger's any more."""
    scope[PLACE].caller = caller


def json_error(status: int, text: str) -> bytes:
    return msgspec.json.encode({"error": text})


async def answer(
    send: Send, status: int, body: bytes, headers: Sequence[tuple[str, str]] = (), kind: str = "application/json"
) -> None:
    """Send a whole answer."""
    named = [("content-type", kind), ("content-length", str(len(body))), *headers]
    listed = [(name.encode(), value.encode("latin-1", "replace")) for name, value in named]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def whole_body(scope: Message, receive: Receive, most: int) -> bytes:
    """Raises `HttpRefused` for one of more bytes, which is not read if its length was given."""
    too_long = HttpRefused(413, f"a body of more than {most} bytes")
    if int(dict(scope["headers"]).get(b"content-length", b"0")) > most:
        raise too_long
    body, has_more = bytearray(), True
    while has_more:
        message = await receive()
        body += message["body"]
        has_more = message["more_body"]
        if len(body) > most:
            raise too_long
    return bytes(body)


class HttpListener:
    """Serves an application in the event loop of `serve`."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        app: App,
        limits: HttpLimits,
        clock: Clock,
        *,
        context: Callable[[], ssl.SSLContext] | None = None,
        error_body: Callable[[int, str], bytes] = json_error,
    ) -> None:
        """sockets: listening, closed by `serve`. context: for TLS, asked for each connection. error_body: what an
        answer says that refuses a request, as JSON."""
        self.app, self.limits, self.error_body = app, limits, error_body
        self.places = TakenPlaces(limits.connections, limits.body_bytes)
        self.faults = RateLimitedLog(_log, clock)
        self._sockets, self._context = sockets, context
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    def end(self) -> None:
        self._over.set()

    async def serve(self) -> None:
        """Serve until `end`; then running requests have some time, and connections without one none."""
        accepting = [asyncio.create_task(self._accept(one)) for one in self._sockets]
        await self._over.wait()
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        for place in self.places:
            if place.waits:
                place.end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.limits.end_seconds)
        for one in self._tasks:
            one.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_ending(self) -> bool:
        return self._over.is_set()

    async def _accept(self, listening: socket.socket) -> None:
        loop, rate = asyncio.get_running_loop(), self.limits.accepts_per_second
        listening.setblocking(False)
        left, at = rate, loop.time()
        while True:
            left, at = min(rate, left + (loop.time() - at) * rate), loop.time()
            if left < 1:
                await asyncio.sleep((1 - left) / rate)
                continue
            left -= 1
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError:  # no descriptors left
                await asyncio.sleep(NO_DESCRIPTOR_SECONDS)
                continue
            await asyncio.sleep(0)  # existing connections are read first, even if more new ones are waiting
            if not self.places.make_room():
                sock.close()
                continue
            place = Place(lambda: None)
            task = loop.create_task(self._connection(place, sock))
            place.end = task.cancel
            self.places.take(place)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.faults.error("connection", "a connection broke", error=error)

    async def _connection(self, place: Place, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        came_at, reader = loop.time(), asyncio.StreamReader(limit=_READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.Transport | None = None
        try:
            context = self._context() if self._context is not None else None
            if context is None and not await self._sent_first(sock, reader, came_at + self.limits.head_seconds):
                return
            more: dict[str, Any] = {"ssl_handshake_timeout": self.limits.head_seconds} if context is not None else {}
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context, **more)
            transport.set_write_buffer_limits(0)  # `drain` then waits until the kernel has all
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            await _Exchanges(self, place, reader, writer, came_at).run()
        except (OSError, h11.RemoteProtocolError):
            pass
        finally:
            self.places.leave(place)
            if transport is not None:
                transport.abort()
            else:
                sock.close()

    async def _sent_first(self, sock: socket.socket, reader: asyncio.StreamReader, ends_at: float) -> bool:
        """Wait for a first head's end, or as long for one as may be; what came is in the reader. A transport costs
        three times as much as such a wait, and is not made for a client that stops in its head."""
        received = bytearray()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                while piece := await asyncio.get_running_loop().sock_recv(sock, _READ_BYTES):
                    seen = max(0, len(received) - 2)  # or who sends single bytes has all looked through for each
                    received += piece
                    if len(received) > MOST_HEAD_BYTES or _HEAD_END.search(received, seen):
                        break
        reader.feed_data(bytes(received))
        return bool(received)


class _Exchanges:
    def __init__(
        self,
        listener: HttpListener,
        place: Place,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        came_at: float,
    ) -> None:
        self._listener, self._limits, self._place = listener, listener.limits, place
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, MOST_HEAD_BYTES)
        self._ends_at = came_at + listener.limits.head_seconds  # of what is waited for
        self._early: h11.Data | None = None  # of the body, read with the head
        self._ahead = 0  # bytes behind the request that is being served
        self._answer_head = b""
        self._method = ""
        self._is_gone = False
        self._is_whole = self._is_received = self._is_head = self._has_started = self._is_answered = False

    async def run(self) -> None:
        """Until the client, a refusal or its time ends it."""
        while await self._exchange() and not self._listener.is_ending:
            self._http.start_next_cycle()
        if not self._is_answered:  # cut off, by either side
            return
        if self._writer.can_write_eof():
            self._writer.write_eof()
        count = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while count < LINGER_BYTES and (piece := await self._reader.read(_READ_BYTES)):
                    count += len(piece)

    async def _exchange(self) -> bool:
        self._listener.places.turn(self._place, waits=True)
        self._is_whole = self._is_received = self._is_head = self._has_started = self._is_answered = False
        self._early, self._ahead, self._answer_head = None, 0, b""
        try:
            head = await self._head()
            if head is None:
                return False
            scope = self._scope(head)
            self._look_at_body()
            await self._listener.app(scope, self._receive, self._send)
            if not self._has_started and not self._is_gone:
                raise RuntimeError("the application gave no answer")
        except HttpRefused as refused:
            await self._refuse(refused)
        except h11.RemoteProtocolError as error:
            await self._refuse(self._not_http(error))
        except Exception as error:
            if self._writer.transport.is_closing() or self._is_answered or self._is_gone:
                return False
            self._listener.faults.error("application", "a request could not be served", error=error)
            await self._refuse(HttpRefused(500, "a fault of the server; it is in its log"))
        http = self._http
        return self._is_answered and http.our_state is h11.DONE and http.their_state is h11.DONE

    # The request -----------------------------------------------------------------------------------------------------

    async def _head(self) -> h11.Request | None:
        loop, limits, http = asyncio.get_running_loop(), self._limits, self._http
        is_first = http.their_http_version is None
        if not http.trailing_data[0]:  # nothing of the request is there
            first = b""
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._ends_at if is_first else loop.time() + limits.idle_seconds):
                    first = await self._reader.read(_READ_BYTES)
            if not first:
                return None
            http.receive_data(first)
        self._method = http.trailing_data[0][:9].partition(b" ")[0].decode("latin-1")
        if not is_first:
            self._ends_at = loop.time() + limits.head_seconds
        try:
            event = await self._event()
        except TimeoutError:
            raise HttpRefused(408, f"no whole request came in {limits.head_seconds:g} s") from None
        self._ends_at = loop.time() + limits.body_seconds
        return event if isinstance(event, h11.Request) else None

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout_at(self._ends_at):
                received = await self._reader.read(_READ_BYTES)
            self._http.receive_data(received)
        return event

    def _scope(self, head: h11.Request) -> Message:
        method, target, headers = head.method.decode("latin-1"), head.target, list(head.headers)
        named = dict(headers)
        self._is_head = method == "HEAD"
        is_old, has_chunks = head.http_version == b"1.0", b"transfer-encoding" in named
        if not head.http_version.startswith(b"1."):
            raise HttpRefused(505, "only HTTP/1.1 is served")
        if len(target) > MOST_TARGET_BYTES:
            raise HttpRefused(414, f"a target of more than {MOST_TARGET_BYTES} bytes")
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEAD_BYTES:
            raise HttpRefused(431, f"headers of more than {MOST_HEAD_BYTES} bytes")
        if method not in METHODS:
            raise HttpRefused(501, "there is no such method here")
        if refused := self._unserved(method):
            raise refused
        if has_chunks and (is_old or b"content-length" in named):
            raise HttpRefused(400, "a body's length is given in two ways, or in chunks by HTTP/1.0; give one")
        if re.match(rb"https?://", target, re.IGNORECASE):  # as to a proxy
            authority, slash, rest = target.partition(b"://")[2].partition(b"/")
            headers = [(name, authority if name == b"host" else value) for name, value in headers]
            named[b"host"], target = authority, slash + rest or b"/"
        if not target.startswith(b"/") and not (target == b"*" and method == "OPTIONS"):
            raise HttpRefused(400, "the target is no path")
        if _AUTHORITY.fullmatch(named.get(b"host", b"")) is None:
            raise HttpRefused(400, "the header Host is to be the name that was asked for, once")
        if named.get(b"expect", b"100-continue").lower() != b"100-continue":
            raise HttpRefused(417, "only 100-continue can be expected")
        codings = named.get(b"content-encoding", b"identity").lower().replace(b" ", b"").split(b",")
        if set(codings) - {b"identity", b""} and (has_chunks or named.get(b"content-length", b"0").strip(b"0")):
            raise HttpRefused(415, "a body is taken as it is; send it without Content-Encoding", _IDENTITY)
        path, _, query = target.partition(b"?")
        certificate = self._writer.get_extra_info("peercert") or {}
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.http_version.decode(),
            "method": "GET" if self._is_head else method,  # what differs is done here
            "scheme": "https" if self._writer.get_extra_info("ssl_object") is not None else "http",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": (self._writer.get_extra_info("peername") or ())[:2] or None,
            "server": (self._writer.get_extra_info("sockname") or ())[:2] or None,
            PLACE: self._place,
            CERTIFICATE: [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"],
        }

    def _unserved(self, method: str) -> HttpRefused | None:
        named = ", ".join(sorted(self._limits.methods))
        return (
            None if method in self._limits.methods else HttpRefused(405, f"only {named} are served", ("allow", named))
        )

    def _look_at_body(self) -> None:
        event = self._http.next_event()
        if isinstance(event, h11.EndOfMessage):
            self._be_whole()
        elif isinstance(event, h11.Data):
            self._early = event

    def _be_whole(self) -> None:
        self._is_whole = True
        self._listener.places.release(self._place)
        self._listener.places.turn(self._place, waits=False)

    async def _receive(self) -> Message:
        if self._is_received:
            return await self._disconnected()
        if not self._is_whole:
            event = await self._body_event()
            if isinstance(event, h11.Data):
                self._listener.places.hold(self._place, len(event.data))
                return {"type": "http.request", "body": bytes(event.data), "more_body": True}
            if not isinstance(event, h11.EndOfMessage):
                raise HttpRefused(400, "the body was cut off")
            self._be_whole()
        self._is_received = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _body_event(self) -> Any:
        if self._http.they_are_waiting_for_100_continue:
            await self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
        try:
            event, self._early = self._early or await self._event(), None
        except TimeoutError:
            raise HttpRefused(408, f"the body did not arrive in {self._limits.body_seconds:g} s") from None
        except h11.RemoteProtocolError as error:  # by this name, applications can tell it from a fault of theirs
            raise self._not_http(error) from None
        return event

    async def _disconnected(self) -> Message:
        """Returns once the client is gone. What it sends meanwhile is its next request."""
        while self._ahead <= MOST_HEAD_BYTES:
            received = await self._reader.read(_READ_BYTES)
            self._http.receive_data(received)
            if not received:
                self._is_gone = True
                return {"type": "http.disconnect"}
            self._ahead += len(received)
        await asyncio.Event().wait()  # until the answer's end cancels it
        raise AssertionError

    # The answer ------------------------------------------------------------------------------------------------------

    async def _send(self, message: Message) -> None:
        http = self._http
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"date", formatdate(usegmt=True).encode())]
            is_refused = message["status"] >= 400 and self._place.caller is None
            if self._is_cut_short() or is_refused:
                headers.append((b"connection", b"close"))
            self._has_started = True
            status = message["status"]
            phrase = responses.get(status, "").encode()
            data = http.send(h11.Response(status_code=status, headers=headers, reason=phrase)) or b""
            if self._is_head:
                data += http.send(h11.EndOfMessage()) or b""
            self._is_answered = self._is_head
            if not self._is_head and any(name.lower() == b"content-length" for name, _ in headers):
                self._answer_head = data  # goes with its body
                return
        elif self._is_head:
            if message.get("more_body"):
                raise ConnectionResetError("the client asked for the head alone")
            return
        else:
            data = self._answer_head + (http.send(h11.Data(data=message.get("body", b""))) or b"")
            self._answer_head = b""
            if not message.get("more_body", False):
                data += http.send(h11.EndOfMessage()) or b""
                self._is_answered = True
        await self._write(data)

    def _is_cut_short(self) -> bool:
        with suppress(h11.RemoteProtocolError):
            while not self._is_whole and self._http.their_state is h11.SEND_BODY:
                event = self._http.next_event()
                if isinstance(event, h11.EndOfMessage):
                    self._be_whole()
                elif not isinstance(event, h11.Data):
                    break
        return not self._is_whole

    async def _refuse(self, refused: HttpRefused) -> None:
        if not self._has_started and self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = self._listener.error_body(refused.status, str(refused))
            await answer(self._send, refused.status, body, refused.headers)

    def _not_http(self, error: h11.RemoteProtocolError) -> HttpRefused:
        status = error.error_status_hint
        if status == 501 and (refused := self._unserved(self._method)):  # a coding that none of its bodies may have
            return refused
        if status == 431 and b"\n" not in self._http.trailing_data[0]:
            status = 414
        return HttpRefused(status, f"not an HTTP/1.1 request: {error}" if status == 400 else str(error))

    async def _write(self, data: bytes | None) -> None:
        self._writer.write(data or b"")
        if not self._writer.transport.get_write_buffer_size():
            await self._writer.drain()
            return
        places, waited = self._listener.places, self._place.waits
        places.turn(self._place, waits=True)
        try:
            async with asyncio.timeout(self._limits.unread_seconds):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise ConnectionResetError("the client does not read") from None
        places.turn(self._place, waits=waited)


_IDENTITY = ("accept-encoding", "identity")
