"""A small server of the form of OpenAI's, for faults that no engine has on demand: it hangs up, drips, says nonsense.

It runs in a thread of the test. What it is asked is kept; how it answers is a coroutine of the test's.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

SECONDS = 30.0
"""That a test waits for anything."""
FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What proxies tell a prefilling engine: vLLM's toy proxy, llm-d's `nixlv2`, production-stack, and ours."""


@dataclass
class Asked:
    """A request. hung_up: set when the other end is gone."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    hung_up: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)

    @property
    def body(self) -> Any:
        return json.loads(self.content)

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, kind: str = "application/json", **more: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def json(self, body: Any, status: int = 200, **more: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.head(status, content_length=str(len(content)), **more)
        await self.raw(content)

    async def page(self, text: str) -> None:
        await self.head(kind="text/plain", content_length=str(len(text)))
        await self.raw(text.encode())

    async def begin_events(self) -> None:
        await self.head(kind="text/event-stream; charset=utf-8", transfer_encoding="chunked")

    async def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        await self.chunk(f"data: {text}\n\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_chunks(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def events(self, data: Iterable[Any]) -> None:
        """A whole stream."""
        await self.begin_events()
        for one in data:
            await self.event(one)
        await self.event("[DONE]")
        await self.end_chunks()

    async def until_gone(self) -> None:
        """Wait for the other end to hang up."""
        with suppress(OSError):
            await self.reader.read()


Answer = Callable[[Asked], Awaitable[None]]


def text_chunk(text: str) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": text}]}


class SmallOpenAi:
    """At `url`, until closed. answers: by path; what is not there is 404."""

    def __init__(self, answers: dict[str, Answer] | None = None) -> None:
        self.answers: dict[str, Answer] = {"/health": healthy, **(answers or {})}
        self.asked: list[Asked] = []
        self._came = threading.Condition()
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(SECONDS)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self._server = self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        started.set()
        self.loop.run_forever()

    def of(self, path: str) -> list[Asked]:
        return [one for one in self.asked if one.path == path]

    def wait(self, path: str, count: int = 1) -> Asked:
        """The last request once so many have come."""
        with self._came:
            has_come = self._came.wait_for(lambda: len(self.of(path)) >= count, SECONDS)
        assert has_come, f"{path}: {len(self.of(path))} requests"
        return self.of(path)[count - 1]

    def close(self) -> None:
        """Also what is under way."""

        async def end() -> None:
            self._server.close()
            tasks = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self.loop.is_running():
            asyncio.run_coroutine_threadsafe(end(), self.loop).result(SECONDS)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(SECONDS)
            self.loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: Asked | None = None
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in head[1:] if one)}
            content = await reader.readexactly(int(headers.get("content-length", "0")))
            asked = Asked(method, path, headers, content, reader, writer)
            with self._came:
                self.asked.append(asked)
                self._came.notify_all()
            if path in self.answers:
                await self.answers[path](asked)
            else:
                await asked.json({"error": {"message": "no such path"}}, 404)
            asked.answered.set()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if asked is not None and (reader.at_eof() or reader.exception() is not None):
                asked.hung_up.set()
            writer.close()


async def healthy(asked: Asked) -> None:
    await asked.json({})
