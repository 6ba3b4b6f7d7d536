"""Chunks, each a block by itself, for an engine that hands out (name, slot) pairs and whose thread must not wait.

    engine's thread              ask > PENDING, PENDING, HELD > load           store         finished
                                 match > lease (pins, verified)
                                 match > what is elsewhere: fetched, within `lease_ms` > match > lease
    threads of its own                                          get            put
                                 forget: what an owner asked for and did not load is released

Only `drain` and `close` wait for the store. Any fault of the store becomes a miss here, or a failed job; nothing raises
because of it. Must never import an engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum, auto

from engine_adapter.chunks.space import ChunkOutcomes, ChunkSpace
from engine_adapter.handoff.block_wait import BlockWait, ParkedWaits, WaitPlan
from engine_adapter.handoff.fetch import FetchPolicy
from engine_adapter.paged.worker import IDLE_WAIT_SECONDS, OPEN_SECONDS, SAVE_DEADLINE_MS, lower_priority
from kvstore.block.pages import Pages
from kvstore.client.handle import Lease, Match, NamespaceHandle
from kvstore.client.pending import PendingReply

POLL_SECONDS = 0.0002
"""Between two polls of submitted requests."""
IN_FLIGHT = 48
"""Look-ups and leases submitted at a time; a connection may have 64 unanswered requests."""


class ChunkState(Enum):
    """HELD: pinned in memory and verified, until it is loaded or forgotten."""

    PENDING = auto()
    HELD = auto()
    MISSING = auto()


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Named upper bounds. asked: chunks asked for or held at a time; beyond that they are missing. queued_stores:
    chunks of several jobs that wait to be stored, whose slots the engine cannot use; beyond that they fail.
    load_threads, save_threads: that copy, in each space. lease_ms: how long a chunk's promotion from a lower tier may
    take. ask_seconds: beyond that, how long an answer may take before the chunk is missing. hold_seconds: how long a
    chunk is held without being loaded. drain_seconds: after which `drain` gives up what has not begun."""

    asked: int = 4096
    queued_stores: int = 1024
    load_threads: int = 2
    save_threads: int = 2
    lease_ms: float = 50.0
    ask_seconds: float = 0.5
    hold_seconds: float = 10.0
    drain_seconds: float = 10.0


@dataclass(eq=False, slots=True)
class ChunkJob:
    """good: names of the chunks that were copied and verified, or stored; failed: all others. size_bytes: of the good
    ones. left: undecided ones. since, seconds: when it was submitted, and how long it took."""

    number: int
    owner: str
    is_load: bool
    since: float
    left: int
    good: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False, slots=True)
class _Asked:
    """A chunk that some request waits for."""

    name: bytes
    space: ChunkSpace
    handle: NamespaceHandle
    since: float
    owners: set[str] = field(default_factory=set)
    state: ChunkState = ChunkState.PENDING
    match: PendingReply[Match] | None = None
    wait: BlockWait | None = None
    leasing: PendingReply[Lease] | None = None
    lease: Lease | None = None


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy of one chunk; of a store also its `kvstore.client.handle.Reading`."""

    job: ChunkJob
    space: ChunkSpace | None
    name: bytes
    lease: Lease | None = None
    is_given_up: bool = False
    is_good: bool = False

    def begin(self) -> bool:
        return not self.is_given_up

    def end(self) -> None:
        """Whoever wants the slot back waits for all of the copy."""


class ChunkStore:
    """Chunks in the store, for one engine. One thread of the engine calls everything."""

    def __init__(
        self,
        spaces: Sequence[ChunkSpace],
        space_of: Callable[[bytes], int],
        limits: ChunkLimits,
        outcomes: ChunkOutcomes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """space_of: the space that a chunk's name belongs to; -1 for none. The spaces are closed with this."""
        self.limits, self._spaces, self._space_of, self._outcomes = limits, spaces, space_of, outcomes
        self._clock, self._answer_seconds = clock, limits.ask_seconds + limits.lease_ms / 1000
        self._asked: dict[bytes, _Asked] = {}
        self._of_owner: dict[str, set[bytes]] = {}
        self._missing: dict[str, set[bytes]] = {}
        self._parked = ParkedWaits()
        self._waiting, self._under_way = deque[_Asked](), list[_Asked]()
        self._jobs: list[ChunkJob] = []
        self._copies, self._loads = dict[_Copy, Future[None]](), set[Future[None]]()
        self._ended = deque[_Copy]()
        self._is_closed, self._swept = False, clock()
        self._loaders = ThreadPoolExecutor(limits.load_threads * len(spaces), "kv-chunk-load")
        self._savers = ThreadPoolExecutor(limits.save_threads * len(spaces), "kv-chunk-save", lower_priority)

    def ask(self, owner: str, name: bytes) -> ChunkState:
        """Whether a chunk can be loaded now. The first call asks the store; a missing one stays so for its owner."""
        if name in self._missing.get(owner, ()):
            return ChunkState.MISSING
        asked = self._asked.get(name)
        if asked is None:
            if (found := self._reached(name)) is None:
                return ChunkState.MISSING
            if len(self._asked) >= self.limits.asked:
                self._outcomes.count(refused_asks=1)
                return ChunkState.MISSING
            self._asked[name] = asked = _Asked(name, *found, self._clock())
            self._waiting.append(asked)
        asked.owners.add(owner)
        self._of_owner.setdefault(owner, set()).add(name)
        if asked.state is ChunkState.PENDING and self._clock() > asked.since + self._answer_seconds:
            self._answer(asked, None)
        if asked.state is ChunkState.MISSING:
            self._let_go(asked)
            for each in asked.owners:
                self._missing.setdefault(each, set()).add(name)
        return asked.state

    def forget(self, owner: str) -> None:
        """An owner asks no more: chunks that only it asked for are released."""
        self._missing.pop(owner, None)
        for name in self._of_owner.pop(owner, ()):
            asked = self._asked.get(name)
            if asked is not None:
                asked.owners.discard(owner)
                if not asked.owners:
                    self._let_go(asked)

    def proceed(self, seconds: float = 0.0) -> None:
        """Advance pending requests, and wait at most `seconds` for answers: without that wait, an idle engine calls so
        often that other threads hardly get the interpreter's lock."""
        for _ in range(1 + int(seconds / POLL_SECONDS)):
            room = min(IN_FLIGHT - len(self._under_way), len(self._waiting))
            burst = [self._waiting.popleft() for _ in range(room)]
            self._parked.read()
            self._under_way += reversed(burst)  # from a prefix's end, so that its beginning is used last, more or less
            self._under_way = [asked for asked in self._under_way if not self._is_answered(asked)]
            if not seconds or not (self._under_way or self._waiting):
                return
            time.sleep(POLL_SECONDS)

    def _is_answered(self, asked: _Asked) -> bool:
        if asked.state is not ChunkState.PENDING:
            return True
        handle, lease = asked.handle, None
        with self._outcomes.caught():
            asked.match = asked.match or handle.submit_match(asked.space.prompt(handle, [asked.name]))
            if (match := asked.match.poll()) is None:
                return False
            if asked.leasing is None:
                self._outcomes.told(match.reason)
            if not match.blocks and self._is_fetching(asked, handle):
                return False
            if match.blocks:
                asked.leasing = asked.leasing or handle.submit_lease(match, deadline_ms=self.limits.lease_ms)
                if (lease := asked.leasing.poll()) is None:
                    return False
        self._answer(asked, lease)
        return True

    def _is_fetching(self, asked: _Asked, handle: NamespaceHandle) -> bool:
        wait = asked.wait
        if wait is None:
            plan = WaitPlan(None, FetchPolicy(1, self.limits.lease_ms / 1000, handle.block_tokens))
            prompt = asked.space.prompt(handle, [asked.name])
            asked.wait = wait = BlockWait(handle, prompt, "", plan, self._parked)
            return wait.goes_on(0)
        if wait.is_over or not wait.may_look() or wait.is_over:
            return not wait.is_over
        wait.is_over, asked.match = True, handle.submit_match(asked.space.prompt(handle, [asked.name]), counts=False)
        return True

    def _answer(self, asked: _Asked, lease: Lease | None) -> None:
        asked.lease = lease
        asked.state = ChunkState.HELD if lease is not None and lease.blocks else ChunkState.MISSING
        self._outcomes.count(**{asked.state.name.lower(): 1})

    def _let_go(self, asked: _Asked) -> None:
        self._asked.pop(asked.name, None)
        if asked.state is ChunkState.PENDING:
            asked.state = ChunkState.MISSING
        for pending in (asked.match, asked.leasing):
            if pending is not None:
                pending.cancel()
        if asked.wait is not None:
            asked.wait.end()
        self._release(asked.lease)

    def load(self, number: int, owner: str, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Copy chunks into slots, each verified. Chunks that are not held fail."""
        self._jobs.append(job := ChunkJob(number, owner, True, self._clock(), len(names)))
        for name, slot in zip(names, slots, strict=True):
            asked = self._asked.get(name)
            if asked is None or asked.state is not ChunkState.HELD or asked.lease is None:
                self._end(_Copy(job, None, name))
                continue
            del self._asked[name]
            copy, pages = _Copy(job, asked.space, name, asked.lease), asked.space.pages([slot])
            self._copies[copy] = future = self._loaders.submit(self._get, copy, asked.lease, asked.handle, pages)
            self._loads.add(future)

    def store(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Put the chunks in these slots, a prefix in order; stored ones are skipped. Without a slot they fail. If the
        queue lacks room for all, the first ones are taken; all where nothing waits, since their engine keeps a job's
        slots to its end. The last of these are begun first: what was used last is evicted last, and a prefix is
        useful without its end, but not without its beginning."""
        queued = len(self._copies) - len(self._loads)
        is_open = not self._is_closed and all(space.handle is not None for space in self._spaces)
        room = max(0, self.limits.queued_stores - queued) if queued else len(slots)
        taken = min(room, len(slots)) if is_open else 0
        self._outcomes.count(refused_stores=len(names) - taken)
        self._jobs.append(job := ChunkJob(number, "", False, self._clock(), taken, failed=list(names[taken:])))
        for name, slot in reversed(list(zip(names[:taken], slots, strict=False))):
            space, _ = self._reached(name) or (None, None)
            copy = _Copy(job, space, name)
            if space is None:
                self._end(copy)
            else:
                self._copies[copy] = self._savers.submit(self._put, copy, space, space.pages([slot]))

    def _get(self, copy: _Copy, lease: Lease, handle: NamespaceHandle, pages: Pages) -> None:
        with self._outcomes.caught():
            copy.is_good = handle.get(lease, into=pages).tokens >= pages.tokens
        self._ended.append(copy)

    def _put(self, copy: _Copy, space: ChunkSpace, pages: Pages) -> None:
        with self._outcomes.caught():
            wait(tuple(self._loads))  # requests wait for loads; none waits for a store
            if (handle := space.writing(OPEN_SECONDS)) is not None and copy.begin():
                prompt = space.prompt(handle, [copy.name])
                result = handle.put(prompt, pages, reading=copy, deadline_ms=SAVE_DEADLINE_MS)
                self._outcomes.told(result.reason)
                copy.is_good = result.reason is None
        self._ended.append(copy)

    def _reached(self, name: bytes) -> tuple[ChunkSpace, NamespaceHandle] | None:
        place = self._space_of(name)
        space = self._spaces[place] if 0 <= place < len(self._spaces) and not self._is_closed else None
        handle = space.handle if space is not None else None
        return (space, handle) if space is not None and handle is not None else None

    def finished(self) -> list[ChunkJob]:
        """Jobs that ended since the last call. Chunks that could not be loaded are missing for their owner from now on.
        While loads are under way, and none is over, it waits a moment for one."""
        now = self._clock()
        if now - self._swept >= 1.0:  # a request was held up, or its engine had no slot for it
            self._swept = now
            for asked in [it for it in self._asked.values() if now - it.since > self.limits.hold_seconds]:
                self._let_go(asked)
        if self._loads and not self._ended:  # else an engine that only waits would keep the interpreter's lock
            wait(self._loads, IDLE_WAIT_SECONDS, FIRST_COMPLETED)
        self._collect()
        jobs = [job for job in self._jobs if not job.left]
        self._jobs = [job for job in self._jobs if job.left]
        for job in jobs:
            job.seconds = now - job.since
            if job.is_load and job.owner in self._of_owner:
                self._missing.setdefault(job.owner, set()).update(job.failed)
        return jobs

    def drain(self) -> None:
        """Return when no job is left and nothing touches the memory. A begun copy is never broken off; a store that has
        not begun after `drain_seconds` fails."""
        wait(self._copies.values(), self.limits.drain_seconds)
        self._give_up(stores_only=True)
        wait(self._copies.values())
        self._collect()

    def close(self) -> None:
        """End all threads that touch the memory, and release all chunks. Jobs that have not begun fail."""
        if self._is_closed:
            return
        self._is_closed = True
        self._give_up(stores_only=False)
        for threads in (self._loaders, self._savers):
            threads.shutdown()
        self._collect()
        for asked in list(self._asked.values()):
            self._let_go(asked)
        for space in self._spaces:
            space.close()

    def _collect(self) -> None:
        while self._ended:
            copy = self._ended.popleft()
            self._loads.discard(self._copies.pop(copy))
            self._end(copy)

    def _end(self, copy: _Copy) -> None:
        job, space, is_good = copy.job, copy.space, copy.is_good
        self._release(copy.lease)
        (job.good if is_good else job.failed).append(copy.name)
        job.size_bytes += space.chunk_bytes if is_good and space is not None else 0
        outcomes = ("failed_loads", "loaded") if job.is_load else ("failed_stores", "stored")
        self._outcomes.count(**{outcomes[is_good]: 1})
        job.left -= 1

    def _give_up(self, *, stores_only: bool) -> None:
        for copy, future in self._copies.items():
            if not (stores_only and copy.job.is_load):
                copy.is_given_up = True
                if future.cancel():
                    self._ended.append(copy)

    def _release(self, lease: Lease | None) -> None:
        with self._outcomes.caught():
            if lease is not None:
                lease.release()
