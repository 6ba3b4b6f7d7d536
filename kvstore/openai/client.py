"""Client of one engine over HTTP. Answers and streams are bounded in bytes and seconds.

Bodies are passed on as sent, never decompressed; redirects and the environment's proxies are not followed. Leaving or
cancelling a stream closes its connection, which tells the engine to stop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx2
import msgspec

from kvstore.block.errors import BadInput, StoreError
from kvstore.config import is_loopback

CONNECT_SECONDS = 2.0
WRITE_SECONDS = 30.0
"""Without progress in sending a request."""
IDLE_SECONDS = 2.0
"""Unused connections are closed after this time; engines close theirs after five."""
MOST_ANSWER_BYTES = 64 << 20
MODELS_SECONDS = 10.0
MOST_SHOWN_MODELS = 8
_MOST_IDLE = 64
JSON_HEADERS = {"content-type": "application/json"}


class EngineFault(StoreError):
    """An engine that could not be reached or did not answer properly. has_begun: it may have begun to work."""

    def __init__(self, text: str, *, has_begun: bool) -> None:
        super().__init__(text)
        self.has_begun = has_begun


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    status: int
    content_type: str
    body: bytes
    retry_after: str | None = None


class AnswerStream:
    """An answer whose head has arrived."""

    def __init__(self, response: httpx2.Response, where: str) -> None:
        self._response = response
        self._where = where
        self.status = response.status_code
        self.content_type = response.headers.get("content-type", "")
        self.retry_after: str | None = response.headers.get("retry-after")

    @property
    def has_events(self) -> bool:
        return self.content_type.lower().startswith("text/event-stream")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Bytes as they arrive. Raises `EngineFault` if the connection breaks."""
        try:
            async for piece in self._response.aiter_raw():
                yield piece
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise EngineFault(f"{self._where} broke off: {_reason(error)}", has_begun=True) from None

    async def whole(self, most_bytes: int = MOST_ANSWER_BYTES) -> EngineAnswer:
        """The whole answer. Raises `EngineFault`."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > most_bytes:
                raise EngineFault(f"{self._where} answered with more than {most_bytes} bytes", has_begun=True)
        return EngineAnswer(self.status, self.content_type, bytes(body), self.retry_after)


class EngineClient:
    """Client of the engine at one address. An async context manager, for one event loop."""

    def __init__(self, url: str, name: str = "the engine") -> None:
        """url: from `checked_url`."""
        self.url = url
        self.name = name
        self._http = httpx2.AsyncClient(
            base_url=url,
            trust_env=False,  # else the environment's proxy is asked for 127.0.0.1 too
            follow_redirects=False,
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS, write=WRITE_SECONDS),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=_MOST_IDLE, keepalive_expiry=IDLE_SECONDS
            ),
            headers={"accept-encoding": "identity", "user-agent": "kvstore"},
        )

    @asynccontextmanager
    async def asked(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[AnswerStream]:
        """Send a request; yields the answer once its head is there. The caller sets the timeout. Raises
        `EngineFault`."""
        where = f"{self.name} at {self.url}"
        try:
            request = self._http.build_request(method, path, content=body, headers=headers)
            response = await self._http.send(request, stream=True)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol) as error:
            raise EngineFault(f"{where} cannot be reached: {_reason(error)}", has_begun=False) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise EngineFault(f"{where} did not answer: {_reason(error)}", has_begun=True) from None
        try:
            yield AnswerStream(response, where)
        finally:
            await response.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float,
        most_bytes: int = MOST_ANSWER_BYTES,
    ) -> EngineAnswer:
        """Send a request and read the whole answer within `seconds`. Raises `EngineFault`."""
        try:
            async with asyncio.timeout(seconds), self.asked(method, path, body, headers) as answer:
                return await answer.whole(most_bytes)
        except TimeoutError:
            raise EngineFault(f"{self.name} at {self.url} took more than {seconds:g} s", has_begun=True) from None

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class EngineModel(msgspec.Struct):
    """max_model_len: limit of prompt and answer in tokens, if the engine gives one."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[EngineModel]


async def model_of(client: EngineClient, headers: Mapping[str, str], name: str | None) -> EngineModel:
    """The model of that name, or the engine's first. Raises `EngineFault`, and `BadInput` if the engine lacks it."""
    answer = await client.ask("GET", "/v1/models", None, headers, seconds=MODELS_SECONDS, most_bytes=1 << 20)
    try:
        listed = msgspec.json.decode(answer.body, type=_Models).data
    except (msgspec.DecodeError, RecursionError):
        listed = []
    for one in listed:
        if name in (None, one.id):
            return one
    if not listed:
        what = f"{client.url} names no model at /v1/models (status {answer.status})"
        raise EngineFault(f"{what}; give an engine with OpenAI's API, and its --api-key-file", has_begun=False)
    named = ", ".join(repr(one.id[:80]) for one in listed[:MOST_SHOWN_MODELS])
    raise BadInput(f"--model {name!r}; {client.url} has {named}")


def checked_url(given: str, flag: str, *, is_anywhere: bool = True) -> str:
    """Normalise an engine's address: drops a trailing slash and /v1. is_anywhere: other hosts are allowed. Raises
    `BadInput`."""
    wanted = f"{flag} {given[:80]!r}; give an address, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(given.strip())
        port = parts.port
    except ValueError:
        raise BadInput(wanted) from None
    host = parts.hostname or ""
    is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not re.fullmatch(r"[A-Za-z0-9.:_-]+", host) or not is_plain:
        raise BadInput(wanted)
    if not is_anywhere and not is_loopback(host):
        raise BadInput(f"{flag} {given[:80]!r} is another host; say --anywhere if that is meant")
    shown = f"[{host}]" if ":" in host else host
    path = re.sub(r"(/v1)?/*$", "", parts.path)
    return f"{parts.scheme}://{shown}{f':{port}' if port is not None else ''}{path}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# A page of Prometheus metrics -------------------------------------------------------------------------------------

METRICS_SECONDS = 10.0
MOST_METRICS_BYTES = 8 << 20
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class CounterSample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def samples_of(page: str) -> Iterator[CounterSample]:
    """Lines that it does not understand are skipped."""
    for line in page.splitlines():
        if found := _SAMPLE.match(line):
            name, labels, value = found.groups()
            try:
                yield CounterSample(name, dict(_LABEL.findall(labels or "")), float(value))
            except ValueError:
                pass


async def page_of(client: EngineClient) -> str:
    """The metrics page; empty if there is none."""
    try:
        answer = await client.ask("GET", "/metrics", seconds=METRICS_SECONDS, most_bytes=MOST_METRICS_BYTES)
    except EngineFault:
        return ""
    return answer.body.decode(errors="replace") if answer.status == 200 else ""
