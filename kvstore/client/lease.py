"""A lease: pinned blocks that a user holds between verbs.

Another thread, or the end of its request, may release a lease in the middle of a get. The get then stops at its next
piece, and only after that are the blocks unpinned: no slot is reused under a copy.
"""

from __future__ import annotations

import threading
import weakref
from types import TracebackType

from kvstore.block.account import Account
from kvstore.protocol import messages as m
from kvstore.protocol.door import Door, NamedLease
from kvstore.protocol.lease_ticket import LeaseTicket
from kvstore.protocol.messages import Grant


class Lease:
    """Pinned blocks, until released, left as a context, or expired. Made by `NamespaceHandle.lease` and its kin.

    tokens: the promised prefix; first_token: the block boundary from which on frames are pinned. account: as in a
    match, cut to what is promised. request: the engine's name for what it serves.
    """

    def __init__(
        self,
        door: Door,
        leased: NamedLease,
        keys: list[bytes],
        account: Account,
        block_tokens: int,
        grant: Grant,
        request: str = "",
    ) -> None:
        self.reply = reply = leased.reply
        self._store_name = leased.run, leased.number
        self.keys = keys
        self.blocks = reply.blocks
        self.tokens = self.blocks * block_tokens
        self.first_token = reply.first_block * block_tokens
        self.account = account
        self.reason = reply.reason
        self.detail = reply.detail
        self.request = request
        self.ended = False
        self._door = door
        self._grant = grant
        self._guard = threading.Lock()
        self._readers = 0
        self._forget = weakref.finalize(self, door.forgotten.append, reply.lease)
        self._forget.atexit = False

    @property
    def released(self) -> bool:
        """Whether its frames may be gone."""
        return not self._forget.alive

    def release(self) -> None:
        """Unpin, once no get is running. Safe to call again."""
        with self._guard:
            was_held = self._forget.detach() is not None
            is_free = not self._readers
        if was_held and is_free:
            self._let_go()

    def end(self) -> None:
        """Release it because its request has ended: gets of it are misses from now on."""
        self.ended = True
        self.release()

    def ticket(self) -> bytes:
        """A ticket with which another process of the same engine can read these blocks; see `NamespaceHandle.attach`.

        Some 60 bytes a block. Valid while any process holds the lease.
        """
        run, number = self._store_name if not self.released else (b"", 0)
        return LeaseTicket.of(run, number, self.reply, self.keys, self.account, self.request).seal(self._grant)

    def begin_read(self) -> bool:
        """Begin a get; False if the lease was released before."""
        with self._guard:
            if not self._forget.alive:
                return False
            self._readers += 1
            return True

    def end_read(self) -> None:
        with self._guard:
            self._readers -= 1
            was_last = not self._readers and not self._forget.alive
        if was_last:
            self._let_go()

    def _let_go(self) -> None:
        self._door.call(m.Release([self.reply.lease]), m.Done)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
