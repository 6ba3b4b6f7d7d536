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
from kvstore.client.connection import SidecarConnection, Unavailable
from kvstore.client.framing import FramedSocket
from kvstore.courier.link import CourierRun, CourierSpace
from kvstore.node import EmbeddedDoor, EmbeddedStore, SystemClock
from kvstore.protocol import messages as m
from kvstore.protocol.courier import FetchQuestion, LocateQuestion, QuestionAnswered
from kvstore.protocol.door import NamedLease
from kvstore.protocol.notify_pipe import NotifyPipeEnd
from tiering.frame import HEADER_BYTES

SECONDS = 10.0
LEASE_MS = 5000.0


class SmallCourier:
    """Close it, or use it as a context. milliseconds: as it tells. may_bring: asked before each fetch, in its thread,
    with the blocks that are wanted; returns how many come. spoils: what it does to a payload on the way."""

    def __init__(self, path: Path, far: EmbeddedStore, tenant: str = "default", tier: HitTier = HitTier.PEER) -> None:
        self.tier, self.milliseconds = tier, 500.0  # so that engines are patient
        self.may_bring: Callable[[int], int] = lambda blocks: blocks
        self.brought = Counter[str]()
        self._far: EmbeddedDoor = far._door_for_handle()
        clock, session = SystemClock(), secrets.token_bytes(16)
        wire = FramedSocket(str(path), "small courier", session, clock, SECONDS, tenant=tenant)
        self._run = CourierRun(tenant, SidecarConnection(wire, clock))
        self._numbers: dict[bytes, int] = {}  # of namespaces in the other store
        bell = self._run.connection.answer(m.Ping(True), SECONDS)
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
        except Unavailable:
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
        return self._run.connection.ask(verb, kind, SECONDS)

    def _there(self, space: CourierSpace) -> int:
        """Its number in the other store."""
        if space.id not in self._numbers:
            for one in self._ask(m.Namespaces(), m.NamespacesReply).namespaces:
                opened = self._far.call(m.OpenNamespace(one.packed, one.payload_bytes), m.Granted)
                self._numbers[bytes.fromhex(one.id)] = opened.grant.number
        return self._numbers[space.id]

    def _located(self, one: LocateQuestion) -> QuestionAnswered:
        there = self._there(self._run.space(one.namespace))
        blocks = self._far.call(m.MatchPrefix(there, one.keys, counts=False), m.Matched).reply.blocks
        self.brought["located"] += 1
        return QuestionAnswered(one.number, blocks, self.tier, self.milliseconds, "the other store")

    def _fetched(self, one: FetchQuestion) -> QuestionAnswered:
        space, first = self._run.space(one.namespace), one.present
        keys = one.keys[: first + self.may_bring(len(one.keys) - first)]
        done = first
        self.brought["fetches"] += 1
        reply = space.reserve(keys[first - 1] if first else None, keys[first:], first)
        if reply.reservation:
            lease = self._far.call(m.LeasePrefix(self._there(space), keys, 0, LEASE_MS), NamedLease).reply
            try:
                for part, slots in enumerate(self._run.frames(reply.places, writable=True)):
                    places = [lease.places[part][block] for block in reply.blocks]
                    sources = [span.view for span in self._far.memory(lease.lease, places)]
                    stop = HEADER_BYTES + space.grant.payload_bytes[part]
                    for source, slot in zip(sources, slots, strict=True):
                        slot[HEADER_BYTES:stop] = source[HEADER_BYTES:stop]
                    headers = [bytes(source[:HEADER_BYTES]) for source in sources]
                    came = self._ask(m.Adopt(reply.reservation, part, 0, headers, self.tier), m.Counted).blocks
                done = first + came
                self.brought["blocks"] += came
            finally:
                self._far.call(m.Release([lease.lease]), m.Done)
        reason = None if done == len(one.keys) else MissReason.STALE_HINT
        return QuestionAnswered(one.number, done, self.tier, reason=reason)
