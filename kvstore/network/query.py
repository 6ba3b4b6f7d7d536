"""A router's queries over HTTP: POST /query and POST /query_by_hash, in the form of Mooncake's conductor and Dynamo's
indexer, for the caller's tenant alone.

    {"model": ..., "token_ids": [...]}  >  {TENANT: {INSTANCE: {"longest_matched": tokens, "GPU", "CPU", "DISK", "DP"}}}

An instance is a node's sidecar, which the engines of its host share: the asked one's, and those of its pool that have
some of the prompt. A query pins and counts nothing. Callers and their lanes are those of gRPC; a request without a
credential is refused before its body is read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Annotated, Any

import h11
import msgspec
from msgspec import Meta

from kvstore.block.errors import BadInput, StoreError, shown
from kvstore.block.identity import ExtraKey
from kvstore.client.framing import TimedOut
from kvstore.network.answers import check_blocks, hashed
from kvstore.network.credentials import Rotated
from kvstore.network.lanes import CallerLanes
from kvstore.network.links import CallTime, OpenSpace, SidecarBusy, TenantLink
from kvstore.network.services import DoorCall, DoorCaller, Scored, Scorer, spaces_of_model
from kvstore.network.watch import StatusWatch
from tiering.clock import Clock
from tiering.frame import KEY_BYTES

MOST_BODY_BYTES, MOST_HEAD_BYTES = 4 << 20, 16 << 10
MOST_CONNECTIONS, MOST_BODIES = 256, 8
"""At a time; and bodies of one caller that are being read."""
IDLE_SECONDS, REQUEST_SECONDS, ANSWER_SECONDS = 60.0, 10.0, 5.0
MOST_SPACES = 8
"""Namespaces of one model that are looked up: one for each codec and layout."""
PATHS = ("/query", "/query_by_hash")
_READ_BYTES = 64 << 10
_CPU, _DISK = "dram", "nvme"

_log = logging.getLogger(__name__)


class HttpQuery(msgspec.Struct):
    """block_size: the router's; the answer is in tokens in any case. block_hashes: prefix keys in hexadecimal, for
    clients that hold their tenant's identity key."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    token_ids: list[Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]] = []
    block_hashes: list[Annotated[str, Meta(max_length=2 * KEY_BYTES)]] = []
    block_size: int | None = None
    tenant_id: str | None = None
    instance_id: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    lora_id: int | None = None


_queries = msgspec.json.Decoder(HttpQuery)


class QueryRefused(Exception):
    """A request that is refused with a status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class QueryPages:
    """The two pages. Thread-safe."""

    def __init__(self, links: Mapping[str, TenantLink], scorer: Scorer, watch: StatusWatch, clock: Clock) -> None:
        self._links = links
        self._scorer = scorer
        self._watch = watch
        self._clock = clock

    def check(self, caller: DoorCaller | None) -> DoorCaller:
        """Raises `QueryRefused` for a caller without the right."""
        if caller is None:
            raise QueryRefused(401, "unknown credential; send Authorization: Bearer TOKEN, or a client's certificate")
        if caller.tenant not in self._links:
            raise QueryRefused(403, "that credential is of no tenant that has a socket here")
        return caller

    def answer(self, path: str, body: bytes, caller: DoorCaller) -> dict[str, Any]:
        """Raises `QueryRefused`."""
        assert caller.tenant is not None, "`check` lets tenants in alone"
        link = self._links[caller.tenant]
        call = DoorCall(caller, CallTime(self._clock, self._clock.monotonic_seconds() + ANSWER_SECONDS), link)
        try:
            query = _queries.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise QueryRefused(400, f"not a query: {error}") from None
        try:
            return {caller.tenant: link.again(lambda: self._instances(path, query, call))}
        except BadInput as error:
            raise QueryRefused(400, str(error)) from None
        except TimedOut:
            raise QueryRefused(504, "the sidecar did not answer in time") from None
        except SidecarBusy as error:
            raise QueryRefused(429, str(error)) from None
        except StoreError as error:
            raise QueryRefused(503, str(error)) from None

    def _instances(self, path: str, query: HttpQuery, call: DoorCall) -> dict[str, Any]:
        if query.tenant_id not in (None, "", call.caller.tenant):
            raise QueryRefused(403, "tenant_id is another one than the credential's; leave it out")
        if query.lora_name or (query.lora_id or -1) >= 0:
            raise BadInput("adapters are known here by their digests; ask gRPC's Score with extra_keys")
        by_hash = path == "/query_by_hash"
        if by_hash and query.cache_salt:
            raise BadInput("cache_salt beside block_hashes, which cover it; leave it out")
        try:
            spaces = spaces_of_model(call, query.model, self._watch)
        except BadInput:
            return {}  # no engine has served it here
        named = [query.instance_id] if query.instance_id else []
        best, left_out = dict[str, Scored](), ""
        for one in spaces[:MOST_SPACES]:
            space = call.tenant.open(one, call.time)
            keys = _keys(query, space) if by_hash else _hashed(query, space)
            found = self._scorer.of(call, space, keys, not by_hash, named)
            left_out = left_out or found.left_out
            for node, its in found.nodes.items():
                if node not in best or its.matched > best[node].matched:
                    best[node] = its
        own = call.tenant.node(call.time)
        return {n: _instance(its) | {"is_asked": n == own, "partial_detail": left_out} for n, its in best.items()}


def _hashed(query: HttpQuery, space: OpenSpace) -> list[bytes]:
    check_blocks(len(query.token_ids) // space.block_tokens)
    extra = []
    if query.cache_salt:  # like the adapter for vLLM
        salt = blake2b(query.cache_salt.encode("utf-8", "replace"), digest_size=32).digest()
        extra = [ExtraKey(b"salt:" + salt)]
    return hashed(query.token_ids, extra, space.hasher)


def _keys(query: HttpQuery, space: OpenSpace) -> list[bytes]:
    check_blocks(len(query.block_hashes))
    keys = []
    for one in query.block_hashes:
        try:
            keys.append(bytes.fromhex(one))
        except ValueError:
            keys.append(b"")
        if len(keys[-1]) != KEY_BYTES:
            raise BadInput(f"a block hash {shown(one)}; give prefix keys, {2 * KEY_BYTES} hexadecimal digits each")
    return keys


def _instance(found: Scored) -> dict[str, Any]:
    seconds = found.load_seconds
    return {
        "longest_matched": found.matched,
        "GPU": 0,
        "CPU": found.tokens.get(_CPU, 0),
        "DISK": found.tokens.get(_DISK, 0),
        "DP": {},
        "load_ms": round(1000 * seconds, 3) if seconds is not None else None,
    }


# The server -----------------------------------------------------------------------------------------------------------


class QueryServer:
    """HTTP/1.1 in a thread of its own. When all connections are in use, one without a request is closed for a new
    one."""

    def __init__(
        self,
        address: tuple[str, int],
        pages: QueryPages,
        lanes: CallerLanes,
        by_header: Callable[[str], DoorCaller | None] | None,
        by_certificate: Callable[[list[str]], DoorCaller | None],
        contexts: Rotated[ssl.SSLContext] | None,
    ) -> None:
        """by_header: identifies a caller without TLS; contexts: for callers with certificates. Raises `BadInput`."""
        host, port = address
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise BadInput(
                f"{host}:{port} cannot be listened on: {error.strerror}; give another --http (network.http)"
            ) from None
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._pages, self._lanes = pages, lanes
        self._by_header, self._by_certificate, self._contexts = by_header, by_certificate, contexts
        self._tasks: dict[asyncio.Task[None], bool] = {}  # connections, the oldest first: whether it has a request
        self._bodies: Counter[DoorCaller] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="kv-network-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(seconds)
        self._socket.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        for task in (accepting, *self._tasks):
            task.cancel()
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(asyncio.gather(accepting, *self._tasks, return_exceptions=True))
        self._loop.close()

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._socket)
            except OSError:  # no descriptors left
                await asyncio.sleep(0.1)
                continue
            await asyncio.sleep(0)  # lets existing connections go on, even if new ones are waiting
            idle = (task for task, asks in list(self._tasks.items()) if not asks)
            while len(self._tasks) >= MOST_CONNECTIONS and (one := next(idle, None)) is not None:
                one.cancel()  # without effect if its request has just come: then it counts as busy again
                del self._tasks[one]
            if len(self._tasks) >= MOST_CONNECTIONS:
                sock.close()
                continue
            task = self._loop.create_task(self._connection(sock))
            self._tasks[task] = False
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.debug("a connection broke", exc_info=error)

    async def _connection(self, sock: socket.socket) -> None:
        reader = asyncio.StreamReader(limit=_READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        writer: asyncio.StreamWriter | None = None
        try:
            context = self._contexts.now() if self._contexts is not None else None
            more: dict[str, Any] = {"ssl_handshake_timeout": REQUEST_SECONDS} if context is not None else {}
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=context, **more)
            writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
            await self._exchanges(h11.Connection(h11.SERVER, MOST_HEAD_BYTES), reader, writer)
        except (OSError, h11.ProtocolError):
            pass
        finally:
            if writer is not None:
                writer.transport.abort()
            else:
                sock.close()

    async def _exchanges(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        me = asyncio.current_task()
        assert me is not None
        caller = self._certified(writer) if self._contexts is not None else None
        while True:
            if http.trailing_data[0] == b"":  # nothing of the next request is there
                first = await asyncio.wait_for(reader.read(_READ_BYTES), IDLE_SECONDS)
                if not first:
                    return
                http.receive_data(first)
            self._tasks[me] = True
            status, value = await self._exchange(http, reader, writer, caller)
            body = msgspec.json.encode(value if status == 200 else {"error": value})
            headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
            ends = http.their_state is not h11.DONE  # its body was not read
            headers += [("connection", "close")] if ends else []
            reply = h11.Response(status_code=status, headers=headers)
            data = b"".join(http.send(event) or b"" for event in (reply, h11.Data(data=body), h11.EndOfMessage()))
            writer.write(data)
            await asyncio.wait_for(writer.drain(), REQUEST_SECONDS)
            if ends or http.our_state is not h11.DONE:
                with suppress(TimeoutError):  # closing with unread bytes would lose the answer
                    await asyncio.wait_for(reader.read(_READ_BYTES), 0.2)
                return
            http.start_next_cycle()
            self._tasks[me] = False

    async def _exchange(
        self,
        http: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        caller: DoorCaller | None,
    ) -> tuple[int, Any]:
        ends_at = self._loop.time() + REQUEST_SECONDS
        try:
            head = await self._event(http, reader, ends_at)
            if not isinstance(head, h11.Request):
                raise QueryRefused(400, "not a request")
            path = head.target.decode("latin-1").partition("?")[0]
            if path not in PATHS:
                raise QueryRefused(404, f"there is nothing here; there are {' and '.join(PATHS)}")
            if head.method != b"POST":
                raise QueryRefused(405, "only POST is served")
            if self._by_header is not None:
                given = [value.decode("latin-1") for name, value in head.headers if name == b"authorization"]
                caller = self._by_header(given[0]) if len(given) == 1 else None
            who = self._pages.check(caller)
            body = await self._body(http, reader, writer, who, ends_at)
            return await self._made(path, body, who)
        except QueryRefused as refused:
            return refused.status, " ".join(str(refused).split())
        except h11.RemoteProtocolError as error:
            if http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                return error.error_status_hint, "not an HTTP/1.1 request"
            raise

    async def _made(self, path: str, body: bytes, caller: DoorCaller) -> tuple[int, Any]:
        made: asyncio.Future[tuple[int, Any]] = self._loop.create_future()

        def tell(found: tuple[int, Any]) -> None:
            if not made.done():  # else its client is gone
                made.set_result(found)

        def make() -> None:
            try:
                found: tuple[int, Any] = 200, self._pages.answer(path, body, caller)
            except QueryRefused as refused:
                found = refused.status, " ".join(str(refused).split())
            except BaseException:
                _log.exception("a query failed")
                found = 500, "a fault of the server; it is in its log"
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(tell, found)

        if not self._lanes.of(caller).submit(make):
            raise QueryRefused(429, "too many calls are in flight; ask again later")
        return await made

    async def _body(
        self,
        http: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        caller: DoorCaller,
        ends_at: float,
    ) -> bytes:
        if self._bodies[caller] >= MOST_BODIES:
            raise QueryRefused(429, "too many requests are being read; ask again later")
        if http.they_are_waiting_for_100_continue:
            writer.write(http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        self._bodies[caller] += 1
        try:
            body = bytearray()
            while True:
                event = await self._event(http, reader, ends_at)
                if isinstance(event, h11.EndOfMessage):
                    return bytes(body)
                if not isinstance(event, h11.Data):
                    raise QueryRefused(400, "the body was cut off")
                body += event.data
                if len(body) > MOST_BODY_BYTES:
                    raise QueryRefused(413, f"a body of more than {MOST_BODY_BYTES} bytes")
        finally:
            self._bodies[caller] -= 1
            if not self._bodies[caller]:
                del self._bodies[caller]

    async def _event(self, http: h11.Connection, reader: asyncio.StreamReader, ends_at: float) -> Any:
        while (event := http.next_event()) is h11.NEED_DATA:
            received = await asyncio.wait_for(reader.read(_READ_BYTES), max(0.0, ends_at - self._loop.time()))
            http.receive_data(received)
        return event

    def _certified(self, writer: asyncio.StreamWriter) -> DoorCaller | None:
        certificate = writer.get_extra_info("peercert") or {}
        return self._by_certificate([value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"])
