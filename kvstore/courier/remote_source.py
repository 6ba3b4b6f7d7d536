"""Blocks from a remote tier, and to it: frames under salted names, several calls in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvstore.block.account import HitTier, MissReason
from kvstore.courier.figures import Figures, OncePerKind
from kvstore.courier.link import CourierRun, CourierSpace
from kvstore.courier.peer_source import Filled, Stops
from kvstore.courier.window import Forged, ReservedWindow
from kvstore.peers.checks import FrameCheck
from kvstore.pool.speeds import REMOTE_PRIOR
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
    told: OncePerKind
    clock: Clock
    writes: RemoteWrites
    ttl_ms: int
    _warming: RemoteCall[None] | None = None
    _warmed_at: float = -inf

    @property
    def name(self) -> str:
        """In the speeds, and for people."""
        return self.engine.name

    def has(
        self, run: CourierRun, space: CourierSpace, keys: Sequence[bytes], wanted_by: float, ends_at: float
    ) -> RemoteCall[int]:
        """Ask how many leading blocks there are. wanted_by: then it is late. ends_at: the call's own limit."""
        began_at = self.clock.monotonic_seconds()
        stamps, step = space.grant.stamps, max(1, -(-len(keys) // MOST_PROBED))
        last = len(stamps) - 1

        def work() -> int:
            try:
                salt = self.salts.of(run.fingerprint, space.id, ends_at)
                names = [remote_key(salt, stamps[last], keys[at], last) for at in range(step - 1, len(keys), step)]
                found = self.engine.exists(names, ends_at)
            finally:
                now = self.clock.monotonic_seconds()
                self.figures.answered(self.name, self.name, now - began_at, now > wanted_by, self.told)
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

    def names(self, run: CourierRun, space: CourierSpace, keys: Sequence[bytes], ends_at: float) -> list[bytes]:
        """Names of all frames of these blocks, the parts of each in order. Raises `RemoteFault`."""
        salt = self.workers.submit(lambda: self.salts.of(run.fingerprint, space.id, ends_at), ends_at).result()
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


class RemoteSource:
    """The remote tier, for one fetch."""

    tier = HitTier.REMOTE
    publishes = False

    def __init__(self, ways: RemoteWays) -> None:
        self._ways = ways
        self.name = ways.name

    def fill(self, window: ReservedWindow, stops: Stops) -> Filled:
        """Read the blocks of the window that it has, several frames at a time, checked in order."""
        ways, clock = self._ways, self._ways.clock
        began_at = clock.monotonic_seconds()
        window.run.uses.came(window.keys)
        try:
            filled = self._read(window, stops)
        except RemoteFault as fault:
            if fault.is_of_engine:
                ways.told.say(f"remote {ways.name}", f"the remote engine {ways.name} fails: {fault}")
            filled = Filled(MissReason(fault.reason), str(fault))
        window.adopt()
        window.run.uses.did_not_come(window.keys[window.adopted :])
        if isinstance(window.failed, Forged):
            ways.figures.refused(ways.name, "header")
            filled = Filled(MissReason.CORRUPT, str(window.failed))
        if window.adopted:
            now, size = clock.monotonic_seconds(), window.adopted * window.space.block_bytes
            ways.figures.came(ways.name, window.adopted, size)
            ways.figures.speeds.learn(ways.name, size, now - began_at, now, REMOTE_PRIOR)
            ways.told.ended(f"remote {ways.name}", f"the remote engine {ways.name} answers")
        return filled

    def _read(self, window: ReservedWindow, stops: Stops) -> Filled:
        ways, workers = self._ways, self._ways.workers
        names = ways.names(window.run, window.space, window.keys, stops.ends_at)
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
                return Filled(MissReason.DISABLED, "no engine waits for it any more")
            call, check = calls.popleft()
            try:
                is_there = call.result()
            except WrongSize:
                self._refuse(names[at])
                raise
            if not is_there:
                return Filled(MissReason.STALE_HINT, f"{ways.name} has it no more")
            if not window.take(slot, is_right=check.is_right):
                if window.refused:
                    self._refuse(names[at])
                return Filled(MissReason.CORRUPT, f"{ways.name}: a frame that is not what it should be")
        return Filled()

    def _refuse(self, name: bytes) -> None:
        self._ways.figures.refused(self._ways.name, "frame")
        self._ways.workers.delete([name], self._ways.clock.monotonic_seconds() + FORGET_SECONDS)
