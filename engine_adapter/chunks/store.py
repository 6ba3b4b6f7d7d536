"""Opaque chunks of an engine's host memory, kept in the store under the engine's own names.

For engines whose offloading hands out (name, slot) pairs and never a token. Each chunk is a block by itself (see
`chunk_layout`): its prefix key depends on the tenant's secret as all others do, and accounts count tokens as ever.

    engine's thread     ask > PENDING, PENDING, HELD > load            store            finished
    asking thread           match > lease (pins, verified)
    load threads                                     get > release
    store threads                                                      put
                        forget: what an owner asked for and did not load is released

Nothing that the engine's thread calls waits for the store, but `drain` and `close`, and nothing raises because of it:
this is the edge at which any fault becomes a miss, or a failed job. Must never import an engine.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from logging import getLogger
from queue import SimpleQueue
from typing import Any

import numpy as np

from engine_adapter.chunks.layout import chunk_planes, chunk_prompt
from kvstore.block.account import MissReason
from kvstore.block.pages import Pages
from kvstore.client.handle import Lease, Match, NamespaceHandle
from kvstore.client.pending import PendingReply

POLL_SECONDS = 0.0005
"""Between two looks at what was submitted."""
IN_FLIGHT = 48
"""Look-ups and leases submitted at a time; a connection may have 64 requests that are not answered."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0
"""Between two attempts to open the namespaces."""
JOIN_SECONDS = 1.0

_log = getLogger(__name__)


class ChunkState(Enum):
    """What is known of a chunk. HELD: it is pinned in memory, verified, until it is loaded or forgotten."""

    PENDING = auto()
    HELD = auto()
    MISSING = auto()


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Named upper bounds. asked: chunks asked for or held at a time; beyond that they are missing. queued_stores:
    chunks that wait to be stored, whose slots the engine cannot use meanwhile; beyond that they fail at once.
    lease_ms: how long a chunk may take to come up from a lower tier. ask_seconds: beyond that, how long an answer may
    take; then a chunk is missing. hold_seconds: how long one is held that is not loaded. drain_seconds: after which
    `drain` gives up what has not begun."""

    asked: int = 4096
    queued_stores: int = 1024
    load_threads: int = 2
    store_threads: int = 2
    lease_ms: float = 50.0
    ask_seconds: float = 0.5
    hold_seconds: float = 10.0
    drain_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """good: the names of the chunks that were copied and verified, or stored; failed: all others. size_bytes: of the
    good ones. seconds: from the submission on."""

    job: int
    good: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    size_bytes: int
    seconds: float


@dataclass(eq=False, slots=True)
class _Asked:
    """A chunk that somebody waits for. The asking thread writes `verdict` last."""

    name: bytes
    since: float
    owners: set[str]
    verdict: ChunkState = ChunkState.PENDING
    lease: Lease | None = None
    unwanted: bool = False
    match: PendingReply[Match] | None = None
    leasing: PendingReply[Lease] | None = None


@dataclass(eq=False, slots=True)
class _Job:
    number: int
    owner: str
    is_load: bool
    since: float
    left: int
    good: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _ChunkTask:
    job: _Job
    name: bytes
    slot: int
    lease: Lease | None


class ChunkStore:
    """Chunks in the store, for one engine. `ask`, `forget`, `load`, `store`, `finished`, `wait_briefly`, `drain` and
    `close` are called by one thread of the engine's."""

    def __init__(
        self,
        open_spaces: Callable[[], tuple[Sequence[NamespaceHandle], Sequence[NamespaceHandle]]],
        space_of: Callable[[bytes], int],
        memory: np.ndarray[Any, Any],
        limits: ChunkLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """open_spaces: opens the namespaces, for asking and loading and once more for storing: over a connection of
        their own stores do not hold up look-ups. It may wait, and is called again after it raised. space_of: which of
        them a chunk's name belongs to; -1 for none. memory: uint8 [slots, chunk bytes], which jobs read and write."""
        self.limits = limits
        self._open_spaces, self._space_of, self._clock = open_spaces, space_of, clock
        self._memory: np.ndarray[Any, Any] | None = memory
        self._chunk_bytes = memory.shape[1]
        self._unmap_wait = limits.ask_seconds + limits.lease_ms / 1000
        self._spaces: Sequence[NamespaceHandle] = ()
        self._storing: Sequence[NamespaceHandle] = ()
        self._planes: list[dict[int, tuple[np.ndarray[Any, Any]]]] = []
        self._asked: dict[bytes, _Asked] = {}
        self._of_owner: dict[str, set[bytes]] = {}
        self._missing: dict[str, set[bytes]] = {}
        self._inbox: deque[_Asked] = deque()
        self._wake, self._news = threading.Event(), threading.Event()
        self._guard = threading.Condition()
        self._loads: SimpleQueue[_ChunkTask | None] = SimpleQueue()
        self._stores: SimpleQueue[_ChunkTask | None] = SimpleQueue()
        self._done: deque[tuple[_Job, FinishedJob]] = deque()
        self._open_loads = self._open_stores = 0  # jobs
        self._unanswered = self._queued_stores = 0  # chunks
        self._is_giving_up = self._is_closed = False
        self._is_away: bool | None = None
        self._counts: Counter[str] = Counter()
        self._swept = clock()
        self._asking = threading.Thread(target=self._ask_all, name="kv-chunk-ask", daemon=True)
        self._threads = [
            threading.Thread(target=self._work, args=(queue, act), name=name, daemon=True)
            for queue, act, name, count in (
                (self._loads, self._load, "kv-chunk-load", limits.load_threads),
                (self._stores, self._store, "kv-chunk-store", limits.store_threads),
            )
            for _ in range(count)
        ]
        for thread in (self._asking, *self._threads):
            thread.start()

    # The engine's thread ---------------------------------------------------------------------------------------------

    def ask(self, owner: str, name: bytes) -> ChunkState:
        """Whether a chunk can be loaded now. The first call asks the store; what is missing stays so for its owner."""
        if name in self._missing.get(owner, ()):
            return ChunkState.MISSING
        asked = self._asked.get(name)
        if asked is None:
            if not self._spaces or not 0 <= self._space_of(name) < len(self._spaces):
                return ChunkState.MISSING
            if len(self._asked) >= self.limits.asked:
                self._count("refused_asks")
                return ChunkState.MISSING
            self._asked[name] = asked = _Asked(name, self._clock(), set())
            with self._guard:
                self._unanswered += 1
            self._inbox.append(asked)
            self._wake.set()
        asked.owners.add(owner)
        self._of_owner.setdefault(owner, set()).add(name)
        verdict = asked.verdict
        if verdict is ChunkState.PENDING and self._clock() > asked.since + self._unmap_wait:
            verdict = ChunkState.MISSING
        if verdict is ChunkState.MISSING:
            self._let_go(asked)
            for each in asked.owners:
                self._missing.setdefault(each, set()).add(name)
        return verdict

    def forget(self, owner: str) -> None:
        """An owner asks no more: what only it asked for is released."""
        self._missing.pop(owner, None)
        for name in self._of_owner.pop(owner, ()):
            asked = self._asked.get(name)
            if asked is not None:
                asked.owners.discard(owner)
                if not asked.owners:
                    self._let_go(asked)

    def load(self, job: int, owner: str, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Copy chunks into slots, each verified. What is not held fails."""
        work = _Job(job, owner, True, self._clock(), len(names))
        tasks = [_ChunkTask(work, name, int(slot), self._taken(name)) for name, slot in zip(names, slots, strict=True)]
        self._begin(work, tasks, self._loads)

    def store(self, job: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Put the chunks in these slots, a prefix in its order; those that are there already are skipped. Where there
        is no room for all in the queue, the first ones are taken. The last of these go first: what was used last is
        evicted last, and a prefix is of use without its end, but not without its beginning."""
        with self._guard:
            room = (
                max(0, self.limits.queued_stores - self._queued_stores) if self._spaces and not self._is_closed else 0
            )
            count = min(room, len(names))
            self._queued_stores += count
        work = _Job(job, "", False, self._clock(), count, failed=list(names[count:]))
        tasks = [_ChunkTask(work, name, int(slot), None) for name, slot in zip(names, slots, strict=True)][:count]
        if work.failed:
            self._count("refused_stores", len(work.failed))
        self._begin(work, tasks[::-1], self._stores)

    def finished(self) -> list[FinishedJob]:
        """Jobs that ended since the last call. What could not be loaded is missing for its owner from now on."""
        self._sweep()
        jobs = []
        while self._done:
            work, job = self._done.popleft()
            if work.is_load and work.owner in self._of_owner:
                self._missing.setdefault(work.owner, set()).update(job.failed)
            jobs.append(job)
        return jobs

    def is_awaited(self) -> bool:
        """Whether somebody waits: for an answer, or for a load."""
        return self._open_loads > 0 or self._unanswered > 0

    def wait_briefly(self, seconds: float) -> None:
        """At most this long, until all that was asked is answered or a load ended. An engine that has nothing else to
        do calls so often that other threads hardly get the interpreter."""
        self._news.clear()
        if self.is_awaited() and not self._done:
            self._news.wait(seconds)

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, in chunks: `loaded`, `failed_loads`, `stored`, `failed_stores`, `held`,
        `missing`, `refused_asks`, `refused_stores`; and `faults` of the store."""
        with self._guard:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def drain(self) -> None:
        """Return when no job is left and nothing touches the memory. A copy that has begun is never broken off; what
        has not begun after `drain_seconds` fails."""
        deadline = self._clock() + self.limits.drain_seconds
        with self._guard:
            while self._open_loads or self._open_stores:
                self._guard.wait(0.1)
                self._is_giving_up = self._is_giving_up or self._clock() >= deadline
            self._is_giving_up = False

    def close(self) -> None:
        """End all threads that touch the memory, and let go of it and of all that is held. What has not begun fails."""
        if self._is_closed:
            return
        self._is_closed = self._is_giving_up = True
        self._wake.set()
        for thread in self._threads:
            (self._loads if thread.name == "kv-chunk-load" else self._stores).put(None)
        for thread in self._threads:
            thread.join()
        self._asking.join(JOIN_SECONDS)  # it touches no memory, and may be waiting for a sidecar that is away
        for asked in list(self._asked.values()):
            self._let_go(asked)
        self._planes, self._memory = [], None

    # Inside, of the engine's thread ----------------------------------------------------------------------------------

    def _taken(self, name: bytes) -> Lease | None:
        asked = self._asked.get(name)
        if asked is None or asked.verdict is not ChunkState.HELD:
            return None
        del self._asked[name]
        return asked.lease

    def _begin(self, work: _Job, tasks: Sequence[_ChunkTask], queue: SimpleQueue[_ChunkTask | None]) -> None:
        if not tasks or self._is_closed:
            failed = (*work.failed, *(task.name for task in tasks))
            self._done.append((work, FinishedJob(work.number, (), failed, 0, 0.0)))
            return
        with self._guard:
            self._open_loads += work.is_load
            self._open_stores += not work.is_load
        for task in tasks:
            queue.put(task)

    def _sweep(self) -> None:
        """Give back what nobody came for: a request that was held up, or whose engine had no slot for it."""
        now = self._clock()
        if now - self._swept < 1.0:
            return
        self._swept = now
        for asked in [it for it in self._asked.values() if now - it.since > self.limits.hold_seconds]:
            self._let_go(asked)

    def _let_go(self, asked: _Asked) -> None:
        self._asked.pop(asked.name, None)
        asked.unwanted = True
        if asked.lease is not None:
            self._release(asked.lease)

    # The asking thread -----------------------------------------------------------------------------------------------

    def _ask_all(self) -> None:
        self._open()
        waiting: deque[_Asked] = deque()
        under_way: list[_Asked] = []
        while not self._is_closed:
            if not under_way and not waiting and not self._inbox:
                self._wake.wait()
            self._wake.clear()
            burst = [self._inbox.popleft() for _ in range(len(self._inbox))]
            waiting.extend(reversed(burst))  # from a prefix's end, so that its beginning is used last, more or less
            while waiting and len(under_way) < IN_FLIGHT:
                under_way.append(waiting.popleft())
            still = [asked for asked in under_way if not self._is_answered(asked)]
            with self._guard:
                self._unanswered -= len(under_way) - len(still)
            if not self._unanswered:
                self._news.set()
            under_way = still
            if under_way:
                time.sleep(POLL_SECONDS)

    def _open(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._is_closed and not self._spaces:
            try:
                spaces, self._storing = self._open_spaces()
                assert self._memory is not None and len(spaces) == len(self._storing)
                self._planes = [chunk_planes(space, self._memory) for space in spaces]
                self._spaces = spaces
                self._say(is_away=False)
            except Exception as error:
                if self._is_closed:
                    return
                self._fault(error)
                self._say(is_away=True, why=str(error))
                self._wake.wait(pause)
                self._wake.clear()
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _is_answered(self, asked: _Asked) -> bool:
        """One step further with a chunk: submitted, found, pinned."""
        try:
            space = self._spaces[self._space_of(asked.name)]
            if asked.unwanted:
                for pending in (asked.match, asked.leasing):
                    if pending is not None:
                        pending.cancel()
                return True
            if asked.match is None:
                asked.match = space.submit_match(*chunk_prompt(space, asked.name))
            if asked.leasing is None:
                match = asked.match.poll()
                if match is None:
                    return False
                if not match.blocks:
                    self._say(is_away=match.reason is MissReason.UNREACHABLE)
                    return self._settle(asked, None)
                asked.leasing = space.submit_lease(match, deadline_ms=self.limits.lease_ms)
            lease = asked.leasing.poll()
            return lease is not None and self._settle(asked, lease)
        except Exception as error:
            self._fault(error)
            return self._settle(asked, None)

    def _settle(self, asked: _Asked, lease: Lease | None) -> bool:
        held = lease is not None and lease.blocks > 0
        self._count("held" if held else "missing")
        asked.lease = lease if held else None
        asked.verdict = ChunkState.HELD if held else ChunkState.MISSING
        if lease is not None and (asked.unwanted or not held):
            self._release(lease)
        return True

    # The threads that copy -------------------------------------------------------------------------------------------

    def _work(self, queue: SimpleQueue[_ChunkTask | None], act: Callable[[_ChunkTask], bool]) -> None:
        while (task := queue.get()) is not None:
            is_good = False
            if not self._is_giving_up:
                try:
                    is_good = act(task)
                except Exception as error:
                    self._fault(error)
            if task.lease is not None:
                self._release(task.lease)
            self._end(task, is_good=is_good)

    def _load(self, task: _ChunkTask) -> bool:
        if task.lease is None:
            return False
        space, pages = self._place(task, self._spaces)
        return space.get(task.lease, into=pages).tokens == space.block_tokens

    def _store(self, task: _ChunkTask) -> bool:
        space, pages = self._place(task, self._storing)
        tokens, extra_keys = chunk_prompt(space, task.name)
        result = space.put(tokens, pages, extra_keys=extra_keys)
        self._say(is_away=result.reason is MissReason.UNREACHABLE)
        return result.stopped_at is None

    def _place(self, task: _ChunkTask, spaces: Sequence[NamespaceHandle]) -> tuple[NamespaceHandle, Pages]:
        number = self._space_of(task.name)
        space = spaces[number]
        return space, Pages(self._planes[number], [task.slot], space.block_tokens)

    def _end(self, task: _ChunkTask, *, is_good: bool) -> None:
        job = task.job
        outcomes = ("loaded", "failed_loads") if job.is_load else ("stored", "failed_stores")
        with self._guard:
            (job.good if is_good else job.failed).append(task.name)
            self._counts[outcomes[not is_good]] += 1
            self._queued_stores -= not job.is_load
            job.left -= 1
            if job.left:
                return
            size, seconds = len(job.good) * self._chunk_bytes, self._clock() - job.since
            self._done.append((job, FinishedJob(job.number, tuple(job.good), tuple(job.failed), size, seconds)))
            self._open_loads -= job.is_load
            self._open_stores -= not job.is_load
            self._guard.notify_all()
        if job.is_load:
            self._news.set()

    # Everywhere ------------------------------------------------------------------------------------------------------

    def _release(self, lease: Lease) -> None:
        try:
            lease.release()
        except Exception as error:
            self._fault(error)

    def _count(self, what: str, chunks: int = 1) -> None:
        with self._guard:
            self._counts[what] += chunks

    def _fault(self, error: Exception) -> None:
        self._count("faults")
        _log.debug("a fault of the store: %s: %s", type(error).__name__, error)

    def _say(self, *, is_away: bool, why: str = "it does not answer") -> None:
        """One line for each change of state."""
        with self._guard:
            if is_away is self._is_away:
                return
            self._is_away = is_away
        if is_away:
            _log.warning("chunks are computed, not loaded: the store cannot be asked (%s)", why)
        else:
            _log.info("chunks are kept in the store")
