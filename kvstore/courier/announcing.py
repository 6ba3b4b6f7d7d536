"""Follows a tenant's blocks and announces them: hints for the directory, frames for the remote tier.

    Changes, then Holdings > what is here      Changes > stored, moved, evicted      hint > of the last block of a chunk
    a block that the policy wants > queue > lease > header and payload written > released

One thread per tenant. After a gap (the courier was away, or the record of changes was too long) the namespace is listed
anew. Nothing waits for a write: a full queue drops its oldest entry, and that block stays out of the remote tier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from kvstore.block.account import HitTier, MissReason
from kvstore.client.connection import Unavailable
from kvstore.courier.link import ANSWER_SECONDS, CourierRun, CourierSpace
from kvstore.courier.sources import Lending, RemoteWays
from kvstore.pool.directory import Announcer, hint_name, is_head
from kvstore.protocol import messages as m
from tiering.clock import Clock
from tiering.frame import HEADER_BYTES
from tiering.remote.driver import RemoteFault
from tiering.remote.writes import LEARNED_USES, RemoteWrites, WriteQueue

LOOK_SECONDS, SPACES_SECONDS = 0.5, 2.0
LIST_SECONDS = 30.0
"""Between two listings of a namespace: if it changes faster than a sidecar records, gaps come again and again."""
NOWHERE, DRAM, NVME = 0, 1, 2
"""The tier of a block, in `Changed`."""
MANY_CHANGES = 1024
"""In one answer; after that many, the next query follows at once."""
WRITE_SECONDS, WRITE_LEASE_SECONDS = 5.0, 1.0
MOST_WRITTEN_AT_ONCE = 64
"""Blocks written between two queries for changes."""

_log = logging.getLogger(__name__)
_TIERS = {DRAM: HitTier.DRAM, NVME: HitTier.NVME}


@dataclass(slots=True)
class _Followed:
    """A namespace. after: for the next `Changes`; 0 before the first. is_listed: whether it is known completely. told:
    names of the announced chunks."""

    space: CourierSpace
    told: set[bytes]
    after: int = 0
    run: bytes = b""
    is_listed: bool = False
    listed_at: float = -inf


class Follower:
    """Follows one tenant's connection. Start it; it ends with the connection, or by `close`."""

    def __init__(
        self,
        run: CourierRun,
        announcer: Announcer | None,
        remote: RemoteWays | None,
        clock: Clock,
        looked: Callable[[], None],
        told: dict[bytes, set[bytes]],
    ) -> None:
        """looked: called now and then, to report figures. told: by namespace, the names of the announced chunks, also
        those of the tenant's earlier connections: chunks that went meanwhile are withdrawn."""
        self._run = run
        self._announcer = announcer
        self._remote = remote
        self._clock = clock
        self._looked = looked
        self._told = told
        self._followed: dict[bytes, _Followed] = {}
        self._listed_at = -inf
        self._queue = WriteQueue[tuple[bytes, bytes]]()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"kv-follow-{run.tenant}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ends.set()

    def _work(self) -> None:
        while not self._ends.is_set() and not self._run.is_over:
            try:
                self._look()
            except Unavailable as away:
                _log.debug("what is stored cannot be followed", extra={"reason": away.detail})
            self._looked()
            self._ends.wait(0.0 if self._write_some() else LOOK_SECONDS)

    # What is here ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = self._clock.monotonic_seconds()
        if now - self._listed_at >= SPACES_SECONDS:
            self._listed_at = now
            for space in self._run.list_spaces():
                self._followed.setdefault(space.id, _Followed(space, self._told.setdefault(space.id, set())))
        if self._announcer is None and self._remote is None:
            return
        for one in self._followed.values():
            self._follow(one)

    def _follow(self, one: _Followed) -> None:
        while not self._ends.is_set():
            verb = m.Changes(one.space.number, one.after)
            changed = self._run.connection.ask(verb, m.Changed, ANSWER_SECONDS)
            is_new = one.after == 0 or changed.is_lost or changed.run != one.run
            one.after, one.run = changed.next, changed.run
            if not changed.run:
                return
            one.is_listed &= not is_new
            now = self._clock.monotonic_seconds()
            if not one.is_listed and now - one.listed_at >= LIST_SECONDS:
                one.listed_at = now
                self._list(one)
                one.is_listed = True
            for (key, where), index in zip(changed.changes, changed.indexes, strict=False):
                self._take(one, key, index, where, is_news=True)
            if len(changed.changes) < MANY_CHANGES:
                return

    def _list(self, one: _Followed) -> None:
        after, before = 0, set(one.told)
        one.told.clear()
        while not self._ends.is_set():
            verb = m.Holdings(one.space.number, after)
            listed = self._run.connection.ask(verb, m.HoldingsReply, ANSWER_SECONDS)
            for key, index, where in listed.blocks:
                self._take(one, key, index, where, is_news=False)
            after = listed.next
            if not after:
                break
        if self._announcer is not None:
            for name in before - one.told:
                self._announcer.removed(name)

    def _take(self, one: _Followed, key: bytes, index: int, where: int, *, is_news: bool) -> None:
        space, uses = one.space, self._run.uses
        if self._announcer is not None and is_head(index):
            name = hint_name(space.id, key)
            if where == NOWHERE:
                one.told.discard(name)
                self._announcer.removed(name)
            else:
                one.told.add(name)
                tell = self._announcer.stored if is_news else self._announcer.kept
                tell(name, _TIERS[where])
        if self._remote is None:
            return
        if where == NOWHERE:
            self._queue.forget((space.id, key))
        elif where == DRAM and self._remote.writes.wants(uses.of(key)) and not uses.has_come(key):
            self._queue.offer((space.id, key))

    # To the remote tier ----------------------------------------------------------------------------------------------

    def used(self, space: CourierSpace, keys: Sequence[bytes]) -> None:
        """A request named these blocks, which are here. Any thread; handled in the follower's next turn."""
        self._run.uses.note_chain(space.id, keys)
        if self._remote is not None and self._remote.writes is RemoteWrites.LEARNED:
            self._run.uses.wanted.extend((space.id, key) for key in keys if self._run.uses.of(key) == LEARNED_USES)

    def _write_some(self) -> bool:
        remote = self._remote
        if remote is not None:
            remote.keep_warm()
        if remote is None or remote.writes is RemoteWrites.NONE:
            return False
        while self._run.uses.wanted:
            space_id, key = self._run.uses.wanted.popleft()
            if space_id in self._followed:
                self._queue.offer((space_id, key))
        for _ in range(MOST_WRITTEN_AT_ONCE):
            now = self._clock.monotonic_seconds()
            block = self._queue.take(now)
            if block is None or self._ends.is_set():
                break
            remote.keep_warm()
            try:
                if not self._write(remote, *block):
                    self._unwritten(remote, block, "no room there: raise its maxmemory, or let it evict")
            except RemoteFault as fault:
                self._unwritten(remote, block, str(fault))
            except Unavailable as away:
                _log.debug("a block was not written", extra={"reason": away.detail})
        if self._queue.dropped:
            remote.figures.count(remote.name, unwritten=self._queue.dropped)
            self._queue.dropped = 0
        return self._queue.has_one(self._clock.monotonic_seconds())

    def _unwritten(self, ways: RemoteWays, block: tuple[bytes, bytes], why: str) -> None:
        self._queue.offer(block)
        self._queue.no_room(self._clock.monotonic_seconds())
        ways.figures.count(ways.name, unwritten=1)
        line = f"nothing is written to {ways.name}, {len(self._queue):,} blocks wait: {why}"
        ways.figures.faults.say(f"writes {ways.name}", line)

    def _write(self, ways: RemoteWays, space_id: bytes, key: bytes) -> bool:
        run, space = self._run, self._followed[space_id].space
        ends_at = self._clock.monotonic_seconds() + WRITE_SECONDS
        names = ways.names(space, [key], ends_at)
        if all(ways.workers.submit(lambda: ways.engine.exists(names, ends_at), ends_at).result()):
            return True  # another node wrote it, or an earlier run of this one
        reply = space.lease([key], WRITE_LEASE_SECONDS)
        if not reply.lease:
            return True  # evicted, or DRAM is all pinned: its next use queues it again
        pin = Lending(lambda: run.connection.let_go(reply.lease))
        try:
            frames = [column[0] for column in run.frames(reply.places, writable=False) if column]
            if len(frames) < len(names):
                raise Unavailable(MissReason.UNREACHABLE, "the memory of a lease is not there")
            calls = []
            for name, frame in zip(names, frames, strict=True):
                pin.lend()
                header, payload = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
                write = partial(ways.engine.write, name, header, payload, ways.ttl_ms, ends_at)
                calls.append(ways.workers.submit(write, ends_at, pin.returned))
            is_there = all([call.result() for call in calls])
        finally:
            pin.returned()
        if is_there:
            ways.figures.count(ways.name, blocks_out=1, bytes_out=space.block_bytes)
            ways.figures.faults.ended(f"writes {ways.name}", f"{ways.name} takes what is written again")
        return is_there
