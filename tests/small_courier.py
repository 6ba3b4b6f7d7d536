"""A courier of a sidecar, as small as one can be: it brings what another store of this process has, which has the same
keys. It comes in at courier.sock and asks what any courier asks; its transport is a copy."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import Unreachable
from kvstore.client.connection import SidecarConnection, spans, taken
from kvstore.client.framing import AnsweredCall, FramedSocket
from kvstore.node import EmbeddedDoor, EmbeddedStore, SystemClock
from kvstore.protocol import messages as m
from kvstore.protocol.courier import FetchQuestion, LocateQuestion, QuestionAnswered
from kvstore.protocol.door import NamedLease
from kvstore.protocol.notify_pipe import NotifyPipeEnd
from tiering.frame import HEADER_BYTES

SECONDS = 10.0
LEASE_MS = 5000.0


class _CourierSocket(FramedSocket):
    """Its hello names a tenant."""

    def __init__(self, tenant: str, path: str) -> None:
        self._tenant = tenant
        super().__init__(path, "small courier", secrets.token_bytes(16), SystemClock(), SECONDS)

    def call(self, verb: m.Verb, seconds: float, look: Callable[[], None] = lambda: None) -> AnsweredCall:
        if isinstance(verb, m.Hello):
            verb = msgspec.structs.replace(verb, tenant=self._tenant)
        return super().call(verb, seconds, look)


class SmallCourier:
    """Close it, or use it as a context. milliseconds: as it tells. may_bring: asked before each fetch, in its thread,
    with the blocks that are wanted; returns how many come. spoils: what it does to a payload on the way."""

    def __init__(self, path: Path, far: EmbeddedStore, tenant: str = "default", tier: HitTier = HitTier.PEER) -> None:
        self.tier, self.milliseconds = tier, 500.0  # so that engines are patient
        self.may_bring: Callable[[int], int] = lambda blocks: blocks
        self.brought = Counter[str]()
        self._far: EmbeddedDoor = far._door()
        self._wire = _CourierSocket(tenant, str(path))
        self._run = SidecarConnection(self._wire, SystemClock())
        self._numbers: dict[int, tuple[int, list[int]]] = {}  # the tenant's > the other store's, and payload bytes
        bell = self._wire.call(m.Ping(True), SECONDS)
        self._bell = NotifyPipeEnd(bell.descriptors[0])
        self._fault: BaseException | None = None
        self._is_asked = threading.Event()
        self._thread = threading.Thread(target=self._run_all, name="small-courier", daemon=True)
        self._thread.start()
        assert self._is_asked.wait(SECONDS), "it is there for whoever asks"

    def __enter__(self) -> SmallCourier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """It is gone, as if it had been killed."""
        self._run.close()
        self._thread.join(SECONDS)
        assert self._fault is None, self._fault

    def _run_all(self) -> None:
        try:
            self._serve()
        except Unreachable:
            pass  # it was closed, or the sidecar was
        except BaseException as fault:
            self._fault = fault

    def _serve(self) -> None:
        answers: list[QuestionAnswered] = []
        while True:
            asked = self._ask(m.Questions(answers), m.QuestionsReply)
            self._is_asked.set()
            answers = [self._located(one) for one in asked.locates]
            if answers:
                asked_more = self._ask(m.Questions(answers), m.QuestionsReply)
                asked = msgspec.structs.replace(asked_more, fetches=[*asked.fetches, *asked_more.fetches])
                answers = [self._located(one) for one in asked.locates]
            answers += [self._fetched(one) for one in asked.fetches if one.number not in asked.over]
            answers += [QuestionAnswered(one.number, 0) for one in asked.forgets]
            if not answers and not asked.more and not self._bell.wait():
                return

    def _ask(self, verb: m.Verb, kind: type[Any]) -> Any:
        return taken(self._wire.call(verb, SECONDS), kind)

    def _number(self, number: int) -> tuple[int, list[int]]:
        """A namespace there, and its payloads."""
        if number not in self._numbers:
            for one in self._ask(m.Namespaces(), m.NamespacesReply).namespaces:
                opening = m.OpenNamespace(one.packed, one.payload_bytes)
                here = taken(self._run.answer(opening, SECONDS), m.Granted).grant
                there = self._far.call(opening, m.Granted).grant
                self._numbers[here.number] = there.number, one.payload_bytes
        return self._numbers[number]

    def _located(self, one: LocateQuestion) -> QuestionAnswered:
        there, _ = self._number(one.namespace)
        blocks = self._far.call(m.MatchPrefix(there, one.keys, counts=False), m.Matched).reply.blocks
        self.brought["located"] += 1
        return QuestionAnswered(one.number, blocks, self.tier, self.milliseconds, "the other store")

    def _fetched(self, one: FetchQuestion) -> QuestionAnswered:
        there, payloads = self._number(one.namespace)
        wanted = self.may_bring(len(one.keys) - one.present)
        keys = one.keys[: one.present + wanted]
        done = one.present
        self.brought["fetches"] += 1
        reply = self._ask(m.Reserve(one.namespace, keys, one.present), m.Reserved).reply
        if reply.reservation:
            lease = self._far.call(m.LeasePrefix(there, keys, 0, LEASE_MS), NamedLease).reply
            try:
                self._run.walk(self._run.mapping(reply.places, writable=True), SECONDS, lambda: SECONDS)
                for part, size in enumerate(payloads):
                    headers = []
                    sources = self._far.memory(lease.lease, [lease.places[part][block] for block in reply.blocks])
                    slots = spans(self._run.writable, reply.places[part])
                    for source, slot in zip(sources, slots, strict=True):
                        stop = HEADER_BYTES + size
                        slot.view[HEADER_BYTES:stop] = source.view[HEADER_BYTES:stop]
                        headers.append(bytes(source.view[:HEADER_BYTES]))
                    adopt = m.Adopt(reply.reservation, part, 0, headers, self.tier)
                    came = self._ask(adopt, m.Counted).blocks
                done = one.present + came
                self.brought["blocks"] += came
            finally:
                self._far.call(m.Release([lease.lease]), m.Done)
        reason = None if done == len(one.keys) else MissReason.STALE_HINT
        return QuestionAnswered(one.number, done, self.tier, reason=reason)
