"""What happens now, to every page that listens: server-sent events, one producer, the same bytes to all.

A page that reads slowly gets the newest message when it reads next, and none of those between: each is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

MOST_STREAMS = 16
COMMENT_SECONDS = 15.0
RETRY_MS = 2000


class Broadcast:
    """The newest message, and who waits for the next one. For one event loop."""

    def __init__(self) -> None:
        self._number = 0
        self._message = b""
        self._next = asyncio.Event()
        self.streams = self._ended = 0

    def end(self) -> None:
        """No page listens any more; each comes anew, if it still may."""
        self._ended += 1
        self._wake()

    def publish(self, run: str, data: bytes) -> None:
        """One message to all. run: with its number it is the message's id: after another one a page begins anew."""
        self._number += 1
        self._message = b"id: %s-%d\ndata: %s\n\n" % (run.encode(), self._number, data)
        self._wake()

    def _wake(self) -> None:
        waited, self._next = self._next, asyncio.Event()
        waited.set()

    @property
    def is_full(self) -> bool:
        """Whether one more would be too many."""
        return self.streams >= MOST_STREAMS

    async def listen(self) -> AsyncIterator[bytes]:
        """Until the page goes away. Take it only where `is_full` is false."""
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
