"""A store in this process, and beside it another one from which a courier fetches as a test says.

Everything behind that is the real one: awaits are parked in the store's own table, and what is fetched is put into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec

from kvstore.block.account import HitTier, MissReason
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from kvstore.protocol import messages as m
from kvstore.protocol.door import NamedLease
from paged_engine import SharedStore, stored_blocks
from tiering.counts.awaits import AwaitEnd


class Courier:
    """What it knows and does. is_there: whether there is one. answers: whether it answers what is elsewhere at once.
    brings: of what is wanted, the share that comes; None: it waits to be told. end: with which a fetch ends that does
    not bring all; None: with its time. milliseconds, tier, reason: as it tells."""

    def __init__(self) -> None:
        self.is_there, self.answers = True, True
        self.brings: float | None = 1.0
        self.end: AwaitEnd | None = AwaitEnd.SHORT
        self.milliseconds, self.tier = 1.0, HitTier.PEER
        self.reason: MissReason | None = None
        self.asked = Counter[str]()
        self.tickets: list[str] = []
        self.fetches: list[FarReply] = []
        """Under way."""
        self.came: set[bytes] = set()
        """Keys that no lease has had yet."""
        self._chains: dict[bytes, tuple[NamespaceHandle, NamespaceHandle, list[int], int]] = {}

    def holds(self, far: NamespaceHandle, near: NamespaceHandle, tokens: Sequence[int]) -> int:
        """What the other store has of a prompt can be fetched into this one; how many blocks."""
        blocks = far.match(list(tokens)).blocks
        for at, key in enumerate(near.hashed(list(tokens)).keys[:blocks]):
            self._chains[key] = far, near, list(tokens), at + 1
        return blocks

    def located(self, request: m.Locate) -> m.Located:
        there = [key in self._chains for key in request.keys]
        blocks = [*there, False].index(False)
        if not self.is_there or not blocks:
            return m.Located(0, 0, reason=self.reason)
        return m.Located(7, blocks, self.tier, self.milliseconds, "far away")

    def bring(self, reply: FarReply, share: float = 1.0) -> None:
        """So much of what one waits for comes."""
        self.fetches.remove(reply)
        far, near, tokens, blocks = self._chains[reply.keys[-1]]
        block = near.block_tokens
        missing = near.match(tokens, counts=False).blocks
        stop = (missing + int(share * (blocks - missing))) * block
        for first, pages in stored_blocks(far, tokens[: blocks * block]):
            if missing * block <= first < stop:
                if near.put(tokens[: first + block], pages, first).reason is not None:
                    break  # this engine stores it at this moment
        self.came.update(near.hashed(tokens[:stop]).keys[missing:])
        if share < 1 and self.end is not None:
            reply.ended = m.Awaited(0, self.end, self.reason)

    def gone(self) -> None:
        """It hangs up: whatever is fetched ends, and nobody asks for more."""
        self.is_there, self.answers = False, True
        for reply in list(self.fetches):
            self.fetches.remove(reply)
            reply.ended = m.Awaited(0, AwaitEnd.SHORT, MissReason.UNREACHABLE)


class FarStore(SharedStore):
    """With a courier."""

    def __init__(self, store: EmbeddedStore, courier: Courier) -> None:
        super().__init__(store)
        self.courier = courier

    def namespace(self, **given: Any) -> NamespaceHandle:
        handle = super().namespace(**given)
        handle.door = FarDoor(handle.door, self.courier)  # type: ignore[assignment]
        return handle


class FarDoor:
    def __init__(self, door: Any, courier: Courier) -> None:
        self._door, self._courier = door, courier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)

    def call(self, request: Any, kind: Any, seconds: float | None = None) -> Any:
        if isinstance(request, m.Locate) or (isinstance(request, m.Await) and request.located):
            reply = self.submit(request, kind, 0.0)
            while (answer := reply.poll()) is None:
                self._door.clock.sleep(0.0005)
            return answer
        self._courier.asked[type(request).__name__] += 1
        return self._seen(request, self._door.call(request, kind, seconds))

    def submit(self, request: Any, kind: Any, seconds: float) -> Any:
        courier = self._courier
        courier.asked[type(request).__name__] += 1
        if isinstance(request, m.Locate):
            courier.tickets.append(request.ticket)
            ends_at = self._door.clock.monotonic_seconds() + seconds
            return FarReply(self, request, None, ends_at)
        reply = FarReply(self, request, self._door.submit(request, kind, seconds), inf)
        if isinstance(request, m.Await) and request.located:
            reply.keys = request.keys
            courier.fetches.append(reply)
            if courier.brings is not None:
                courier.bring(reply, courier.brings)
        return reply

    def _seen(self, request: Any, answer: Any) -> Any:
        if isinstance(answer, m.Matched):
            return m.Matched(answer.reply, self._courier.is_there)
        if isinstance(request, m.LeasePrefix) and isinstance(answer, NamedLease) and answer.reply.lease:
            came, tier = self._courier.came, self._courier.tier
            leased = request.keys[: answer.reply.blocks]
            runs = tuple((tier if key in came else HitTier.DRAM, 1) for key in leased)
            came.difference_update(request.keys)
            reply = msgspec.structs.replace(answer.reply, tiers=runs)
            return msgspec.structs.replace(answer, reply=reply)
        return answer


class FarReply:
    """`Submitted`."""

    def __init__(self, door: FarDoor, request: Any, reply: Any, ends_at: float) -> None:
        self._door, self._request, self._reply, self._ends_at = door, request, reply, ends_at
        self.keys: list[bytes] = []
        self.ended: m.Awaited | None = None

    def is_ready(self) -> bool:
        return self.ended is not None or self._reply is None or bool(self._reply.is_ready())

    def poll(self) -> Any:
        courier, clock = self._door._courier, self._door._door.clock
        if self._reply is None:
            if courier.answers:
                return courier.located(self._request)
            return m.Located(0, 0, reason=MissReason.DEADLINE) if clock.monotonic_seconds() >= self._ends_at else None
        if self.ended is not None:
            self._reply.cancel()
            return self.ended
        answer = self._reply.poll()
        if answer is not None:
            self._forget()
        return self._door._seen(self._request, answer)

    def cancel(self) -> None:
        self._forget()
        if self._reply is not None:
            self._reply.cancel()

    def cancel_from_finalizer(self) -> None:
        if self._reply is not None:
            self._reply.cancel_from_finalizer()

    def _forget(self) -> None:
        if self in self._door._courier.fetches:
            self._door._courier.fetches.remove(self)
