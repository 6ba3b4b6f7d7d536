"""What is written to a remote engine, and when: the policy, and the background writer's queue.

`all`: every stored block. `learned`: blocks that were used again (a second use). `none`: nothing; the engine is only
read. Pure: times come in. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import StrEnum
from typing import Generic, TypeVar

MOST_QUEUED = 4096
NO_ROOM_SECONDS = 1.0
LEARNED_USES = 2


class RemoteWrites(StrEnum):
    """The setting `remote.writes`."""

    ALL = "all"
    LEARNED = "learned"
    NONE = "none"

    def wants(self, uses: int) -> bool:
        """uses: of the block by requests, its put included."""
        return self is RemoteWrites.ALL or (self is RemoteWrites.LEARNED and uses >= LEARNED_USES)


Block = TypeVar("Block", bound=Hashable)


class WriteQueue(Generic[Block]):
    """Blocks to write, oldest first; each once. A full queue drops its oldest, and counts them."""

    def __init__(self) -> None:
        self.dropped = 0
        self._queue: OrderedDict[Block, None] = OrderedDict()
        self._next_at = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, block: Block) -> None:
        if block not in self._queue and len(self._queue) >= MOST_QUEUED:
            self._queue.popitem(last=False)
            self.dropped += 1
        self._queue.setdefault(block)

    def forget(self, block: Block) -> None:
        """The block was evicted or dropped: do not write it."""
        self._queue.pop(block, None)

    def has_one(self, now: float) -> bool:
        return bool(self._queue) and now >= self._next_at

    def take(self, now: float) -> Block | None:
        """The next block to write now."""
        return self._queue.popitem(last=False)[0] if self.has_one(now) else None

    def no_room(self, now: float) -> None:
        """The engine had no room: pause."""
        self._next_at = now + NO_ROOM_SECONDS
