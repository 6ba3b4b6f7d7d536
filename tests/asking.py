"""Single requests to a door, as a test says them, and doors whose answers a test watches or replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore.block.account import MissReason
from kvstore.block.identity import Namespace
from kvstore.protocol import messages as m
from kvstore.protocol.door import Collective, Door, NamedLease
from kvstore.protocol.messages import Grant, LeaseReply, MatchReply, ReserveReply


class Asking:
    """Asks one door. `seconds` is as in `Door.call`."""

    def __init__(self, door: Door) -> None:
        self.door = door

    def open_namespace(self, namespace: Namespace, payload_bytes: Sequence[int], name: str = "") -> Grant:
        return self.door.call(m.OpenNamespace(namespace.pack(), list(payload_bytes), name), m.Granted).grant

    def match(self, number: int, keys: Sequence[bytes]) -> MatchReply:
        return self.door.call(m.MatchPrefix(number, list(keys)), m.Matched).reply

    def lease(self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float) -> LeaseReply:
        return self.door.call(m.LeasePrefix(number, list(keys), first_block, deadline_ms), NamedLease).reply

    def release(self, lease: int) -> None:
        self.door.call(m.Release([lease]), m.Done)

    def report(self, lease: int, block: int, part: int) -> None:
        self.door.call(m.ReportFrame(lease, block, part), m.Done)

    def reserve(
        self,
        number: int,
        keys: Sequence[bytes],
        first_block: int = 0,
        priority: int = 0,
        ttl_seconds: float | None = None,
        collective: Collective | None = None,
        seconds: float | None = None,
    ) -> ReserveReply:
        name, parts = (collective.name, list(collective.parts)) if collective is not None else ("", [])
        request = m.Reserve(number, list(keys), first_block, priority, ttl_seconds, name, parts)
        return self.door.call(request, m.Reserved, seconds).reply

    def commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> int:
        return self.door.call(m.Commit(reservation, part, first, list(digests)), m.Counted).blocks

    def abort(self, reservation: int) -> None:
        self.door.call(m.Abort(reservation), m.Done)

    def persist(self, number: int, keys: Sequence[bytes], seconds: float) -> tuple[int, MissReason | None]:
        kept = self.door.call(m.Persist(number, list(keys), seconds), m.Persisted)
        return kept.blocks, kept.reason

    def drop(self, number: int, seconds: float = m.DROP_SECONDS) -> int:
        return self.door.call(m.Drop(number, seconds), m.Counted).blocks


def stand_in(door: Any, kind: type, act: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Have `act` answer a door's requests of a kind. It is handed the request, and what asks the store."""
    call = door.call

    def called(request: Any, answer: Any, seconds: float | None = None) -> Any:
        if isinstance(request, kind):
            return act(request, lambda: call(request, answer, seconds))
        return call(request, answer, seconds)

    door.call = called
