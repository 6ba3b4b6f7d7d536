"""Server-sent events: one producer sends the same bytes to every listening page.

A slow page skips messages and gets the newest when it next reads; each message is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

MOST_STREAMS = 16
COMMENT_SECONDS = 15.0
RETRY_MS = 2000


class Broadcast:
    """The newest message, and the pages that wait for the next. For one event loop."""

    def __init__(self) -> None:
        self._number = 0
        self._message = b""
        self._next = asyncio.Event()
        self.streams = self._ended = 0

    def end(self) -> None:
        """End all streams; a page reconnects if it still may."""
        self._ended += 1
        self._wake()

    def publish(self, run: str, data: bytes) -> None:
        """Send a message to all. run: with a number it forms the message's id; when it changes, a page starts anew."""
        self._number += 1
        self._message = b"id: %s-%d\ndata: %s\n\n" % (run.encode(), self._number, data)
        self._wake()

    def _wake(self) -> None:
        waited, self._next = self._next, asyncio.Event()
        waited.set()

    @property
    def is_full(self) -> bool:
        return self.streams >= MOST_STREAMS

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Messages until the page goes away. Check `is_full` first."""
        self.streams += 1
        try:
            yield b"retry: %d\n\n" % RETRY_MS
            seen, ended = 0, self._ended
            while ended == self._ended:
                waits_for = self._next
                if seen != self._number:
                    seen = self._number
                    yield self._message
                    continue
                try:
                    await asyncio.wait_for(waits_for.wait(), COMMENT_SECONDS)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.streams -= 1
