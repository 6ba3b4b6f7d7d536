"""`kvstore pd-proxy` as an ASGI application: one endpoint in front of separate engines for prefill and decode.

    body, bounded > its fields > prefill's leg (and meanwhile: who decodes) > decode's leg > events or a whole answer

Both engines get the prompt; decode gets prefill's transfer parameters unchanged. Prefill is optional: if it is down,
busy, late or answers nonsense, decode computes the prompt itself. A request goes to another decode engine only if the
first cannot have begun with it, so a request that kills an engine kills one. If a client hangs up, both legs'
connections are closed.

An example, not a load balancer: one process, no queue, no other retries.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from kvstore.listeners.addresses import listening_sockets
from kvstore.listeners.http_server import (
    HttpLimits,
    HttpListener,
    HttpRefused,
    Message,
    Receive,
    Send,
    introduce,
    whole_body,
)
from kvstore.openai.api import (
    DONE,
    MOST_BODY_BYTES,
    ApiRefusal,
    Body,
    EventSplitter,
    Legs,
    decode_body,
    error_body,
    prefill_body,
    prefilled_parameters,
    read_body,
)
from kvstore.openai.client import JSON_HEADERS, AnswerStream, EngineAnswer, EngineFault
from kvstore.openai.fleet import Fleet, ProxiedEngine
from tiering.clock import Clock

PATHS = ("/v1/completions", "/v1/chat/completions")
MOST_ID = 128
BUSY = (429, 503)
"""Answers of an engine that did not take the request."""


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """requests: concurrent ones. body_bytes: of a client's body. prefill_seconds: of that leg, after which decode
    computes alone. decode_seconds: of that leg in all; silent_seconds: between its events. prefilled_bytes: of
    prefill's answer."""

    requests: int = 256
    body_bytes: int = MOST_BODY_BYTES
    prefill_seconds: float = 120.0
    decode_seconds: float = 3600.0
    silent_seconds: float = 300.0
    prefilled_bytes: int = 8 << 20


@dataclass
class Exchange:
    """One client's request, and how much of its answer was sent."""

    path: str
    headers: dict[str, str]
    send: Send
    prefilled: str = ""
    decoded_by: str = ""
    has_started: bool = False
    told: dict[str, str] = field(default_factory=dict)

    async def start(self, status: int, content_type: str, length: int | None = None) -> None:
        shown = {"content-type": content_type, "cache-control": "no-store", **self.told}
        if self.decoded_by:
            shown |= {"x-kvstore-prefill": self.prefilled, "x-kvstore-decode": self.decoded_by}
        if length is not None:
            shown["content-length"] = str(length)
        self.has_started = True
        listed = [(name.encode(), value.encode("latin-1", "replace")) for name, value in shown.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": listed})

    async def write(self, piece: bytes, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": more})

    async def whole(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        await self.start(status, content_type, len(body))
        await self.write(body, more=False)


class PdProxy:
    """The ASGI application, for one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        legs: Legs,
        new_id: Callable[[], str],
        *,
        prefiller: tuple[str, int] | None,
        limits: ProxyLimits,
        passed: Collection[str],
    ) -> None:
        """new_id: names requests that bring no id, and pairs of legs. prefiller: see `decode_body`. passed: see
        `read_body`."""
        self._fleet = fleet
        self._legs = legs
        self._new_id = new_id
        self._prefiller = prefiller
        self._limits = limits
        self._passed = passed
        self._under_way = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        exchange = self._exchange(scope, send)
        try:
            await self._routed(scope, receive, exchange)
        except ApiRefusal as refusal:
            if refusal.status in BUSY:
                exchange.told["retry-after"] = "1"
            await self._ended(exchange, refusal)
        except HttpRefused as refused:  # its body was too long, or late
            await self._ended(exchange, ApiRefusal(refused.status, str(refused)))

    def _exchange(self, scope: Message, send: Send) -> Exchange:
        given = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        name = given.get("x-request-id", "")
        if not 0 < len(name) <= MOST_ID or not name.isascii() or not name.isprintable():
            name = self._new_id()
        headers = {**JSON_HEADERS, "x-request-id": name}
        if given.get("authorization", "\xff").isascii():
            headers["authorization"] = given["authorization"]
        return Exchange(scope["path"], headers, send, told={"x-request-id": name})

    async def _routed(self, scope: Message, receive: Receive, exchange: Exchange) -> None:
        path, method = scope["path"], scope["method"]
        if path in PATHS and method == "POST":
            content = await whole_body(scope, receive, self._limits.body_bytes)  # a request counts once it is whole
            if self._under_way >= self._limits.requests:
                raise ApiRefusal(503, f"{self._under_way} requests are under way; try again in a moment")
            introduce(scope, (scope["client"] or ("",))[0])
            self._under_way += 1
            try:
                await self._served(content, receive, exchange)
            finally:
                self._under_way -= 1
        elif path == "/health" and method == "GET":
            await self._health(exchange)
        elif path == "/v1/models" and method == "GET":
            await self._models(exchange)
        elif path in (*PATHS, "/health", "/v1/models"):
            exchange.told["allow"] = "POST" if path in PATHS else "GET, HEAD"
            raise ApiRefusal(405, f"{method} {path} is not there; POST to {' or '.join(PATHS)}")
        else:
            raise ApiRefusal(404, f"there is no such path; POST to {' or '.join(PATHS)}")

    async def _health(self, exchange: Exchange) -> None:
        fleet = self._fleet
        can_decode = any(one.is_up for one in fleet.decodes)
        state = "down" if not can_decode else "ok" if fleet.prefill.is_up else "degraded"
        decodes = [one.told() for one in fleet.decodes]
        told = {"status": state, "under_way": self._under_way, "prefill": fleet.prefill.told(), "decode": decodes}
        await exchange.whole(200 if can_decode else 503, msgspec.json.encode(told))

    async def _models(self, exchange: Exchange) -> None:
        engine = next((one for one in self._fleet.decodes if one.is_up), self._fleet.decodes[0])
        try:
            answer = await engine.client.ask(
                "GET", "/v1/models", None, exchange.headers, seconds=10, most_bytes=1 << 22
            )
        except EngineFault as fault:
            raise ApiRefusal(502, str(fault)) from None
        await exchange.whole(answer.status, answer.body, answer.content_type)

    # A request -------------------------------------------------------------------------------------------------------

    async def _served(self, content: bytes, receive: Receive, exchange: Exchange) -> None:
        body = read_body(content, self._passed)
        answering = asyncio.create_task(self._answered(body, content, exchange))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            both = (answering, leaving)
            for task in both:
                task.cancel()
            await asyncio.wait(both)
        if not answering.cancelled():
            answering.result()

    async def _answered(self, body: Body, content: bytes, exchange: Exchange) -> None:
        name = self._new_id()  # never the client's: two clients of one name would be given each other's blocks
        sent = prefill_body(body, self._legs, name, self._prefiller is not None)
        choosing = asyncio.create_task(self._fleet.order(exchange.path, body, content, exchange.headers))
        prefilling = asyncio.create_task(self._prefilled(sent, exchange))
        # If prefill is down, decode must not await its blocks.
        legs = self._legs if self._fleet.prefill.is_up else Legs.SHARED_STORAGE
        try:
            exchange.prefilled, parameters = ("at once", None) if legs is Legs.AT_ONCE else await prefilling
            told = decode_body(body, legs, parameters, name, self._prefiller)
            await self._decoded(told, exchange, await choosing)
        except EngineFault as fault:
            await self._ended(exchange, ApiRefusal(502, str(fault)))
        except TimeoutError:
            bounds = f"{self._limits.decode_seconds:g} s in all, {self._limits.silent_seconds:g} s without an event"
            await self._ended(exchange, ApiRefusal(504, f"{exchange.decoded_by} took too long: {bounds}"))
        finally:
            for task in (choosing, prefilling):
                task.cancel()
            await asyncio.gather(choosing, prefilling, return_exceptions=True)

    async def _prefilled(self, sent: bytes, exchange: Exchange) -> tuple[str, Raw | None]:
        """Run prefill. Returns its outcome, and its transfer parameters or None. Raises `ApiRefusal` for a request that
        it refuses, since decode would refuse it too."""
        engine, limits = self._fleet.prefill, self._limits
        if not engine.is_up:
            return "down", None
        try:
            with engine.lent():
                answer = await engine.client.ask(
                    "POST",
                    exchange.path,
                    sent,
                    exchange.headers,
                    seconds=limits.prefill_seconds,
                    most_bytes=limits.prefilled_bytes,
                )
            parameters = prefilled_parameters(answer.body) if answer.status == 200 else None
        except (EngineFault, ValueError) as error:
            fault = error if isinstance(error, EngineFault) else EngineFault(str(error), has_begun=True)
            engine.unreached(fault)
            return "failed", None
        if answer.status != 200 and 400 <= answer.status < 500 and answer.status not in (408, *BUSY):
            raise _Passed(answer)
        return "done" if answer.status == 200 else "failed", parameters

    async def _decoded(self, told: bytes, exchange: Exchange, order: list[ProxiedEngine]) -> None:
        busy: EngineAnswer | None = None
        fault: EngineFault | None = None
        async with asyncio.timeout(self._limits.decode_seconds):
            for engine in order:
                exchange.decoded_by = engine.name
                try:
                    with engine.lent():
                        async with engine.client.asked("POST", exchange.path, told, exchange.headers) as answer:
                            if answer.status not in BUSY:
                                await self._passed_on(answer, exchange)
                                return
                            busy = await answer.whole()
                except EngineFault as error:
                    engine.unreached(error)
                    if error.has_begun:
                        raise
                    fault = error
        if busy is not None:
            raise _Passed(busy)
        raise ApiRefusal(503, f"no engine decodes: {fault}")

    async def _passed_on(self, answer: AnswerStream, exchange: Exchange) -> None:
        if not answer.has_events:
            whole = await answer.whole()
            _retry_told(whole, exchange)
            await exchange.whole(whole.status, whole.body, whole.content_type)
            return
        await exchange.start(answer.status, answer.content_type)
        splitter, is_done = EventSplitter(), False
        silent_seconds, loop = self._limits.silent_seconds, asyncio.get_running_loop()
        async with asyncio.timeout(silent_seconds) as silence:
            async for piece in answer.pieces():
                try:
                    events = splitter.fed(piece)
                except ValueError as error:
                    raise EngineFault(f"{exchange.decoded_by} sent {error}", has_begun=True) from None
                if events:
                    silence.reschedule(loop.time() + silent_seconds)
                    is_done = is_done or any(event.startswith(DONE) for event in events)
                    await exchange.write(b"".join(events))
        if not is_done:
            raise EngineFault(f"{exchange.decoded_by} ended its answer early", has_begun=True)
        await exchange.write(b"", more=False)

    async def _ended(self, exchange: Exchange, refusal: ApiRefusal) -> None:
        if exchange.has_started:
            await exchange.write(b"data: " + refusal.body + b"\n\n", more=False)
        elif isinstance(refusal, _Passed):
            _retry_told(refusal.answer, exchange)
            await exchange.whole(refusal.status, refusal.answer.body, refusal.answer.content_type)
        else:
            await exchange.whole(refusal.status, refusal.body)


class _Passed(ApiRefusal):
    """An engine's own refusal, passed on unchanged."""

    def __init__(self, answer: EngineAnswer) -> None:
        super().__init__(answer.status, "the engine refused it")
        self.answer = answer


def _retry_told(answer: EngineAnswer, exchange: Exchange) -> None:
    if answer.retry_after is not None and answer.retry_after.isdigit():
        exchange.told["retry-after"] = answer.retry_after[:8]


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Its listener -----------------------------------------------------------------------------------------------------

LIMITS = HttpLimits(
    connections=1024,
    head_seconds=15.0,
    body_seconds=30.0,
    idle_seconds=15.0,
    unread_seconds=60.0,
    end_seconds=10.0,  # for open streams after SIGTERM
    body_bytes=1 << 30,
)


def serve_proxy(
    fleet: Fleet, app: PdProxy, address: tuple[str, int], clock: Clock, started: Callable[[int], None]
) -> None:
    """Serve until SIGTERM or SIGINT. started: called with the port once it listens. Raises `BadInput`."""
    host, port = address
    sockets = listening_sockets(host, port, "--listen")

    async def run() -> None:
        listener = HttpListener(sockets, app, LIMITS, clock, error_body=error_body)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, listener.end)
        watching = asyncio.create_task(fleet.watch())
        try:
            started(sockets[0].getsockname()[1])
            await listener.serve()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for engine in (fleet.prefill, *fleet.decodes):
                await engine.close()

    try:
        asyncio.run(run())
    finally:
        for one in sockets:
            one.close()
