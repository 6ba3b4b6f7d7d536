"""Blocks from a remote tier, and to it: frames under salted names, several calls in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvstore.block.account import HitTier, MissReason
from kvstore.courier.figures import Figures
from kvstore.courier.link import CourierSpace
from kvstore.courier.source import NOT_WANTED, Filled, ReservedWindow, Source, Stops
from kvstore.peers.reader import FrameCheck
from kvstore.pool.choice import REMOTE_PRIOR
from tiering.clock import Clock
from tiering.remote.driver import RemoteEngine, RemoteFault, WrongSize, remote_key
from tiering.remote.salts import NamespaceSalts
from tiering.remote.workers import RemoteCall, RemoteWorkers
from tiering.remote.writes import RemoteWrites

READS_AHEAD = 8
MOST_PROBED = 512
"""Names in one question; of a longer chain, blocks at equal distances."""
FORGET_SECONDS = 2.0
WARM_SECONDS, WARM_EVERY_SECONDS = 1.0, 0.4


@dataclass
class RemoteWays:
    """One remote tier: what all fetches and writes share. writes: which blocks are written there. ttl_ms: how long they
    are kept; 0 for no end."""

    engine: RemoteEngine
    workers: RemoteWorkers
    salts: NamespaceSalts
    figures: Figures
    clock: Clock
    writes: RemoteWrites
    ttl_ms: int
    _warming: RemoteCall[None] | None = None
    _warmed_at: float = -inf

    @property
    def name(self) -> str:
        """In the speeds, and for people."""
        return self.engine.name

    def has(self, space: CourierSpace, keys: Sequence[bytes], wanted_by: float, ends_at: float) -> RemoteCall[int]:
        """Ask how many leading blocks there are. wanted_by: then it is late. ends_at: the call's own limit."""
        began_at = self.clock.monotonic_seconds()
        stamps, step = space.grant.stamps, max(1, -(-len(keys) // MOST_PROBED))
        last = len(stamps) - 1

        def work() -> int:
            try:
                salt = self.salts.of(space.run.fingerprint, space.id, ends_at)
                names = [remote_key(salt, stamps[last], keys[at], last) for at in range(step - 1, len(keys), step)]
                found = self.engine.exists(names, ends_at)
            finally:
                now = self.clock.monotonic_seconds()
                self.figures.answered(self.name, self.name, now - began_at, now > wanted_by)
            blocks = (found.index(False) if False in found else len(found)) * step
            self.figures.count(self.name, lookups=1, found=bool(blocks))
            return blocks

        return self.workers.submit(work, ends_at)

    def keep_warm(self) -> None:
        """While requests look things up: keep a connection and the salts, so that a look-up is one round trip. Called
        now and then; does not block."""
        now = self.clock.monotonic_seconds()
        is_due = now - self._warmed_at >= WARM_EVERY_SECONDS and (self._warming is None or self._warming.is_settled())
        if is_due and self.salts.are_used:
            self._warmed_at = now
            self._warming = self.workers.submit(lambda: self.salts.warm(now + WARM_SECONDS), now + WARM_SECONDS)

    def names(self, space: CourierSpace, keys: Sequence[bytes], ends_at: float) -> list[bytes]:
        """Names of all frames of these blocks, the parts of each in order. Raises `RemoteFault`."""
        salt = self.workers.submit(lambda: self.salts.of(space.run.fingerprint, space.id, ends_at), ends_at).result()
        stamps = space.grant.stamps
        return [remote_key(salt, stamp, key, part) for key in keys for part, stamp in enumerate(stamps)]

    def forget(self, fingerprint: bytes, namespace: bytes) -> str:
        """Drop a namespace, or all of a tenant if it is empty; returns why that failed, or nothing."""
        ends_at = self.clock.monotonic_seconds() + FORGET_SECONDS
        try:
            self.workers.submit(lambda: self.salts.replace(fingerprint, namespace, ends_at), ends_at).result()
        except RemoteFault as fault:
            return str(fault)
        return ""


class RemoteSource(Source):
    """The remote tier."""

    tier = HitTier.REMOTE
    prior = REMOTE_PRIOR

    def __init__(self, ways: RemoteWays) -> None:
        super().__init__(ways.name, ways.name, ways.figures, ways.clock)
        self._ways = ways

    def fill(self, window: ReservedWindow, stops: Stops) -> Filled:
        """The same; and note what the tier has, so that it is not written there."""
        uses = window.space.run.uses
        uses.came(window.keys)
        filled = super().fill(window, stops)
        uses.did_not_come(window.keys[window.adopted :])
        if window.adopted:
            self._figures.faults.ended(f"remote {self.name}", f"the remote engine {self.name} answers")
        return filled

    def _read(self, window: ReservedWindow, stops: Stops) -> Filled:
        """Several frames at a time, checked in order."""
        try:
            return self._read_frames(window, stops)
        except RemoteFault as fault:
            if fault.is_of_engine:
                self._figures.faults.say(f"remote {self.name}", f"the remote engine {self.name} fails: {fault}")
            return Filled(MissReason(fault.reason), str(fault))

    def _read_frames(self, window: ReservedWindow, stops: Stops) -> Filled:
        ways, workers = self._ways, self._ways.workers
        names = ways.names(window.space, window.keys, stops.ends_at)
        calls: deque[tuple[RemoteCall[bool], FrameCheck]] = deque()
        sent = 0
        for at, slot in enumerate(window.slots):
            while sent < len(names) and len(calls) < READS_AHEAD:
                check = window.check_of(sent)
                window.lend()
                call = workers.read(names[sent], window.slots[sent], stops.ends_at, window.returned, check.arrived)
                calls.append((call, check))
                sent += 1
            if stops.over.is_set():
                return NOT_WANTED
            call, check = calls.popleft()
            try:
                is_there = call.result()
            except WrongSize:
                self._refuse(names[at])
                raise
            if not is_there:
                return Filled(MissReason.STALE_HINT, f"{self.name} has it no more")
            if not window.take(slot, is_right=check.is_right):
                if window.refused:
                    self._refuse(names[at])
                return Filled(MissReason.CORRUPT, f"{self.name}: a frame that is not what it should be")
        return Filled()

    def _refuse(self, name: bytes) -> None:
        self._figures.refused(self.name, "frame")
        self._ways.workers.delete([name], self._clock.monotonic_seconds() + FORGET_SECONDS)
