"""One engine over HTTP: whole answers and streams, each bounded in bytes and seconds.

Bodies are read as they are sent and never inflated; redirects and proxies of the environment are not followed. Leaving
a stream, or being cancelled in it, closes its connection: that is how an engine learns that its answer is not wanted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

import httpx2
import msgspec

from kvstore.block.errors import BadInput, StoreError
from kvstore.config import is_loopback

CONNECT_SECONDS = 2.0
WRITE_SECONDS = 30.0
"""Without a byte of a request taken."""
IDLE_SECONDS = 2.0
"""An unused connection is closed after so long; engines close theirs after five."""
MOST_ANSWER_BYTES = 64 << 20
MODELS_SECONDS = 10.0
MOST_SHOWN_MODELS = 8
_MOST_IDLE = 64
JSON_HEADERS = {"content-type": "application/json"}


class EngineFault(StoreError):
    """An engine that could not be asked, or did not answer as it has to. has_begun: it may have begun to work on it."""

    def __init__(self, text: str, *, has_begun: bool) -> None:
        super().__init__(text)
        self.has_begun = has_begun


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """A whole one."""

    status: int
    content_type: str
    body: bytes
    retry_after: str | None = None


class AnswerStream:
    """An answer of which the head is there."""

    def __init__(self, response: httpx2.Response, where: str) -> None:
        self._response = response
        self._where = where
        self.status = response.status_code
        self.content_type = response.headers.get("content-type", "")
        self.retry_after: str | None = response.headers.get("retry-after")

    @property
    def has_events(self) -> bool:
        """Whether it comes as events."""
        return self.content_type.lower().startswith("text/event-stream")

    async def pieces(self) -> AsyncIterator[bytes]:
        """As they arrive. Raises `EngineFault` where it breaks off."""
        try:
            async for piece in self._response.aiter_raw():
                yield piece
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise EngineFault(f"{self._where} broke off: {_reason(error)}", has_begun=True) from None

    async def whole(self, most_bytes: int = MOST_ANSWER_BYTES) -> EngineAnswer:
        """All of it. Raises `EngineFault`."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > most_bytes:
                raise EngineFault(f"{self._where} answered with more than {most_bytes} bytes", has_begun=True)
        return EngineAnswer(self.status, self.content_type, bytes(body), self.retry_after)


class EngineClient:
    """Of the engine at one address. A context of one loop."""

    def __init__(self, url: str, name: str = "the engine") -> None:
        """url: as `checked_url` has it."""
        self.url = url
        self.name = name
        self._http = httpx2.AsyncClient(
            base_url=url,
            trust_env=False,  # a proxy of the environment would be asked for 127.0.0.1, too
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
        """An answer from its head on. How long it may take is for the caller to say. Raises `EngineFault`."""
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
        """A whole answer within that time. Raises `EngineFault`."""
        try:
            async with asyncio.timeout(seconds), self.asked(method, path, body, headers) as answer:
                return await answer.whole(most_bytes)
        except TimeoutError:
            raise EngineFault(f"{self.name} at {self.url} took more than {seconds:g} s", has_begun=True) from None

    async def close(self) -> None:
        """Hang up."""
        await self._http.aclose()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class EngineModel(msgspec.Struct):
    """max_model_len: tokens of a prompt and its answer, where an engine says how many it takes."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[EngineModel]


async def model_of(client: EngineClient, headers: Mapping[str, str], name: str | None) -> EngineModel:
    """The one of that name; the first one that the engine has, where none is given. Raises `EngineFault`, and
    `BadInput` where it has others."""
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
    """The address of an engine, without what people copy behind it (/v1, a slash). is_anywhere: other hosts, too.
    Raises `BadInput`."""
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
