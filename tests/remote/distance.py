"""A server that is farther away, for tests: every byte takes a while each way, and the way may stall and go on."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Distance:
    """Between callers at a port of loopback and a server at another, or at UNIX sockets. seconds: each way, may be
    changed at any time; a new connection's first bytes take a round trip more, as connecting does."""

    def __init__(self, target: int | str, at: str = "") -> None:
        """target: a port, or a path. at: a path, in place of a port."""
        self.seconds = 0.0
        self.connections = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        door = socket.create_server(at, family=socket.AF_UNIX) if at else socket.create_server(("127.0.0.1", 0))
        self.port = 0 if at else int(door.getsockname()[1])
        self._thread = threading.Thread(target=self._run, args=(door,), daemon=True)
        self._thread.start()

    def stall(self) -> None:
        """Nothing arrives any more, in either direction; connections stay."""
        self._loop.call_soon_threadsafe(self._goes_on.clear)

    def go_on(self) -> None:
        self._loop.call_soon_threadsafe(self._goes_on.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, door: socket.socket) -> None:
        start = asyncio.start_unix_server if door.family == socket.AF_UNIX else asyncio.start_server
        server = self._loop.run_until_complete(start(self._serve, sock=door))
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if isinstance(self._target, str):
            far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        else:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        ways = [
            asyncio.ensure_future(self._carry(reader, far_writer, 2 * self.seconds)),
            asyncio.ensure_future(self._carry(far_reader, writer, 0.0)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in ways:
                one.cancel()
            for end in (writer, far_writer):
                end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connecting: float) -> None:
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        feeding = asyncio.ensure_future(self._feed(reader, due, self._loop.time() + connecting))
        try:
            while (sent := await due.get())[1]:
                await asyncio.sleep(max(0.0, sent[0] - self._loop.time()))
                await self._goes_on.wait()
                with suppress(OSError):
                    writer.write(sent[1])
                    await writer.drain()
        finally:
            feeding.cancel()

    async def _feed(self, reader: asyncio.StreamReader, due: asyncio.Queue[tuple[float, bytes]], from_: float) -> None:
        data = b"?"
        while data:
            try:
                data = await reader.read(1 << 18)
            except OSError:
                data = b""
            due.put_nowait((max(from_, self._loop.time()) + self.seconds, data))


@contextmanager
def distance(target: int | str, at: str = "") -> Iterator[Distance]:
    one = Distance(target, at)
    try:
        yield one
    finally:
        one.close()
