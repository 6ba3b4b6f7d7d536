"""The move queue: runs planned moves by priority, in a few threads, with a bound on everything.

Other files decide what moves, and the callables do it. This file decides when a move runs, how often, and whether at
all: a slow or failing tier makes misses, not waits. A full queue, a deadline that passed and a tier that keeps failing
are answers, and they are given at once.

Knows neither frames nor places. Must never run the work of one key twice at the same time, interrupt a running move,
call anything of its callers while it holds its lock, or sleep. All threads are shared by all tiers: a tier that can
hang for long should have its own queue.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from typing import TypeVar

from tiering.clock import Clock
from tiering.counts.histogram import Histogram, HistogramCounts
from tiering.errors import BlockCorrupt, BlockMissing, EpochRetired, TierError, TierFull
from tiering.faults import MOVE_THREADS, FaultKind, FaultReports, Unheard, kind_of
from tiering.tier import MoveCounts, TierMiss

MOST_PASSES = 64
"""Moves of higher priorities that may pass a priority with waiting moves before one of its own is due."""
BUGS_KEPT = 16

T = TypeVar("T")

_log = logging.getLogger(__name__)

ANSWERS: dict[type[TierError], TierMiss] = {
    BlockMissing: TierMiss.EVICTED,
    EpochRetired: TierMiss.RETIRED,  # before its base class
    BlockCorrupt: TierMiss.CORRUPT,
    TierFull: TierMiss.PINNED_FULL,
}
"""Final answers of a working tier. Any other error is a fault of the tier."""


class Priority(IntEnum):
    """Why a move is made; lower runs first. `WAITING`: a request waits for it."""

    WAITING = 0
    PREFETCH = 1
    SAVE = 2
    DEMOTION = 3
    SCRUB = 4


class BreakerState(Enum):
    """`OPEN`: the tier's moves are refused. `TRIAL`: all but one, whose outcome decides."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Named upper bounds of a queue.

    waiting_moves: of each priority. attempts: runs of one move, the first among them. breaker_faults: faults of a tier
    in a row that open its breaker. breaker_seconds: from then until one move is let through on trial. stall_seconds:
    when every thread has been at its move for longer, nothing is taken before one of them is back.
    """

    waiting_moves: int = 1024
    attempts: int = 2
    breaker_faults: int = 5
    breaker_seconds: float = 5.0
    stall_seconds: float = 5.0

    def __post_init__(self) -> None:
        if min(self.waiting_moves, self.attempts, self.breaker_faults) < 1:
            raise ValueError(f"{self}; waiting_moves, attempts and breaker_faults are at least 1")
        if not min(self.breaker_seconds, self.stall_seconds) >= 0:
            raise ValueError(f"{self}; breaker_seconds and stall_seconds are at least 0")


class Move:
    """One holder's handle on a move. Holders of one move share its outcome; each may leave it once."""

    __slots__ = ("_left", "_queue", "_task")

    def __init__(self, queue: MoveQueue, task: _Task) -> None:
        self._queue = queue
        self._task = task
        self._left = False

    @property
    def done(self) -> bool:
        """Whether it has ended, with any outcome."""
        return self._task.ended.is_set()

    @property
    def finding(self) -> TierMiss | None:
        """Why it did not succeed; None for a success, and while it is not done.

        DOWN: a fault of the tier, its open breaker, or a closed queue. TIMED_OUT: given up before it began, because its
        deadline passed or its last holder cancelled. EVICTED and CORRUPT: what was to be read is gone or bad.
        PINNED_FULL: no room in the tier, or in this queue.
        """
        return self._task.finding

    def wait(self, timeout_seconds: float) -> bool:
        """Wait at most that long; returns whether it is done. Callbacks may still be running then."""
        return self._task.ended.wait(timeout_seconds)

    def then(self, callback: Callable[[Move], None]) -> None:
        """Call back with this handle when the move is done, in the thread that ended it; at once if it is done already.

        At once means in the calling thread: hold no lock here that the callback takes. Callbacks are short; one that
        raises is kept as a bug.
        """
        self._queue._attach(self, self._task, callback)

    def cancel(self) -> bool:
        """Leave the move. True if that ended it: it had not begun, and no other holder waits for it.

        A handle that left still hears how the move ended.
        """
        return self._queue._leave(self, self._task)


_Call = tuple[Callable[[Move], None], Move]


class _Task:
    """A move as the queue sees it, shared by its holders. Guarded by the queue's lock.

    1. Queued by a submit; later ones of the same key join it, and may move it up.
    2. Begun by a worker, once, for one or more attempts; its key is still joined.
    3. Ended with a finding: its key is free, waiters wake, callbacks run. Also straight from 1, or refused before 1.
    """

    __slots__ = ("begun", "callbacks", "deadline", "ended", "finding", "holders", "key", "priority", "tier", "work")

    def __init__(
        self, key: Hashable, tier: str, priority: Priority, work: Callable[[], None], deadline: float | None
    ) -> None:
        self.key, self.tier, self.priority, self.deadline = key, tier, priority, deadline
        self.work: Callable[[], None] | None = work
        self.callbacks: list[_Call] = []
        self.holders = 1
        self.begun = False
        self.finding: TierMiss | None = None
        self.ended = threading.Event()

    def end(self, finding: TierMiss | None) -> list[_Call]:
        """Wake the waiters; returns the calls to make once no lock is held."""
        assert not self.ended.is_set(), "a move ends once"
        calls, self.callbacks = self.callbacks, []
        self.work = None  # a kept handle must not keep the memory that the work refers to
        self.finding = finding
        self.ended.set()
        return calls


class _Breaker:
    """Faults of a tier in a row; from `opened_at` on it is open, and `trial` is the one move that was let through."""

    __slots__ = ("faults", "opened_at", "trial")

    def __init__(self) -> None:
        self.faults = 0
        self.opened_at: float | None = None
        self.trial: _Task | None = None

    def refuses(self, now: float, seconds: float) -> bool:
        """Whether a new move of the tier must be refused."""
        return self.opened_at is not None and (self.trial is not None or now - self.opened_at < seconds)


class MoveQueue:
    """Runs moves. Thread-safe; starts its threads at the first submit, and they sleep while there is nothing to do."""

    def __init__(
        self,
        clock: Clock,
        limits: QueueLimits,
        threads: int,
        shares: Mapping[str, int] | None = None,
        faults: FaultReports | None = None,
    ) -> None:
        """shares: for these tiers, the most moves that run at a time; the others may have all threads. faults: told of
        threads that cannot be had, of moves that hang, and of moves that lacked memory; a tier reports its own faults.

        All waiting moves of one priority should be of one tier: a move that its tier's share does not allow holds up
        those behind it.
        """
        if threads < 1 or min((shares or {}).values(), default=1) < 1:
            raise ValueError(f"threads={threads}, shares={shares}; give at least 1 of each")
        self._shares = dict(shares or {})
        self._running: dict[_Task, float] = {}  # since when
        self._clock = clock
        self._limits = limits
        self._threads = threads
        self._faults = faults or Unheard()
        self._untold: list[tuple[str, FaultKind, str]] = []  # faults, reported outside the lock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._worker_left = threading.Condition(self._lock)
        self._workers = 0
        self._tasks: dict[Hashable, _Task] = {}
        self._queues: dict[Priority, OrderedDict[Hashable, _Task]] = {each: OrderedDict() for each in Priority}
        self._passes = dict.fromkeys(Priority, 0)
        self._breakers: dict[str, _Breaker] = {}
        self._bugs: deque[str] = deque(maxlen=BUGS_KEPT)
        self._done: Counter[tuple[str, Priority]] = Counter()
        self._failed_moves: Counter[tuple[str, Priority]] = Counter()
        self._seconds = {priority: Histogram() for priority in Priority}
        self._closed = False

    def submit(
        self,
        key: Hashable,
        tier: str,
        priority: Priority,
        work: Callable[[], None],
        *,
        deadline: float | None = None,
    ) -> Move:
        """Queue `work`. It returns when the move is made, or raises a `TierError`; after a fault it may run again.

        If a move of the same key has not ended, this joins it: `work` is not used, the higher of both priorities holds
        if there is room in it, and the later of both deadlines. The deadline is a reading of the clock in seconds; a
        move that has not begun by then never does. Never blocks: a refused move comes back done.
        """
        with self._lock:
            joined = None if self._closed else self._tasks.get(key)
            if joined is not None:
                assert joined.tier == tier, "a key belongs to one tier"
                self._join(joined, priority, deadline)
                return Move(self, joined)
            task = _Task(key, tier, priority, work, deadline)
            refusal = self._refusal(task)
            if refusal is not None:
                self._failed_moves[tier, priority] += 1
                task.end(refusal)
            else:
                self._queue(task)
            untold, self._untold = self._untold, []
            has_all_threads = self._workers == self._threads
        for fault in untold:
            self._faults.failed(*fault)
        if has_all_threads and MOVE_THREADS in self._faults.failing:
            self._faults.worked(MOVE_THREADS)
        return Move(self, task)

    def is_down(self, tier: str) -> bool:
        """Whether a move of that tier would be refused now, so that preparing one, or waiting for one, is useless."""
        with self._lock:
            return self._is_down(tier)

    def breaker_state(self, tier: str) -> BreakerState:
        """An open breaker stays open until a submit after `breaker_seconds` puts it on trial."""
        with self._lock:
            breaker = self._breakers.get(tier)
            if breaker is None or breaker.opened_at is None:
                return BreakerState.CLOSED
            return BreakerState.OPEN if breaker.trial is None else BreakerState.TRIAL

    def depths(self) -> dict[Priority, int]:
        """Moves of each priority that have not begun."""
        with self._lock:
            return {priority: len(queue) for priority, queue in self._queues.items()}

    def counts(self) -> list[MoveCounts]:
        """Waiting, running and ended moves, for every tier and priority that ever had one."""
        with self._lock:
            waiting = Counter((task.tier, task.priority) for task in self._tasks.values() if not task.begun)
            running = Counter((task.tier, task.priority) for task in self._running)
            kinds = sorted({*waiting, *running, *self._done, *self._failed_moves})
            columns = (waiting, running, self._done, self._failed_moves)
            return [
                MoveCounts(tier, priority.name.lower(), *(column[tier, priority] for column in columns))
                for tier, priority in kinds
            ]

    def seconds(self) -> dict[Priority, HistogramCounts]:
        """How long moves of each priority ran, from beginning to end, with any outcome."""
        with self._lock:
            return {priority: histogram.now() for priority, histogram in self._seconds.items()}

    def bugs(self) -> list[str]:
        """The last `BUGS_KEPT` stack traces of exceptions, other than `TierError`, from moves and callbacks.

        As text, because an exception keeps the memory of all the frames it came through.
        """
        with self._lock:
            return list(self._bugs)

    def close(self, timeout_seconds: float) -> bool:
        """End waiting moves as DOWN and await running ones, for at most that long. Returns whether all threads have
        ended.

        Not to be called from a callback, which would wait for itself.
        """
        with self._lock:
            self._closed = True
            calls = [
                call for task in list(self._tasks.values()) if not task.begun for call in self._end(task, TierMiss.DOWN)
            ]
            self._arrived.notify_all()
        self._make(calls)
        with self._lock:
            return self._worker_left.wait_for(lambda: not self._workers, timeout_seconds)

    # Submitting ----------------------------------------------------------------------------------------------------

    def _queue(self, task: _Task) -> None:
        breaker = self._breakers.setdefault(task.tier, _Breaker())
        if breaker.opened_at is not None:
            breaker.trial = task
        self._tasks[task.key] = task
        self._queues[task.priority][task.key] = task
        self._arrived.notify()

    def _refusal(self, task: _Task) -> TierMiss | None:
        if self._is_down(task.tier):
            if self._is_stalled() and not self._closed:
                words = f"no thread is back from its move after {self._limits.stall_seconds:g} s"
                self._untold.append((task.tier, FaultKind.DISK_HANGS, words))
            return TierMiss.DOWN
        if len(self._queues[task.priority]) >= self._limits.waiting_moves:
            return TierMiss.PINNED_FULL
        return None if self._has_workers() else TierMiss.DOWN

    def _is_down(self, tier: str) -> bool:
        breaker, now = self._breakers.get(tier), self._clock.monotonic_seconds()
        if self._closed or (breaker is not None and breaker.refuses(now, self._limits.breaker_seconds)):
            return True
        return self._is_stalled()

    def _is_stalled(self) -> bool:
        if not self._running or len(self._running) < self._workers:
            return False
        return max(self._running.values()) + self._limits.stall_seconds < self._clock.monotonic_seconds()

    def _has_workers(self) -> bool:
        """Start the missing threads. One suffices, if the system gives no more."""
        while self._workers < self._threads:
            name = f"kv-move-{self._workers}"
            try:
                threading.Thread(target=self._serve, name=name, daemon=True).start()
            except (RuntimeError, MemoryError) as error:
                self._untold.append((MOVE_THREADS, kind_of(error), f"{self._workers} of {self._threads} are there"))
                break
            self._workers += 1
        return self._workers > 0

    def _join(self, task: _Task, priority: Priority, deadline: float | None) -> None:
        task.holders += 1
        if task.deadline is not None:
            task.deadline = None if deadline is None else max(task.deadline, deadline)
        if not task.begun and priority < task.priority and len(self._queues[priority]) < self._limits.waiting_moves:
            del self._queues[task.priority][task.key]
            self._queues[priority][task.key] = task
            task.priority = priority

    def _leave(self, move: Move, task: _Task) -> bool:
        with self._lock:
            if move._left or task.begun or task.ended.is_set():
                return False
            move._left = True
            task.holders -= 1
            if task.holders:
                return False
            calls = self._end(task, TierMiss.TIMED_OUT)
        self._make(calls)
        return True

    def _attach(self, move: Move, task: _Task, callback: Callable[[Move], None]) -> None:
        with self._lock:
            if not task.ended.is_set():
                task.callbacks.append((callback, move))
                return
        self._make([(callback, move)])

    # Running -------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            self._finish(task, self._run(task))

    def _next(self) -> _Task | None:
        with self._lock:
            while not self._closed:
                waiting = [priority for priority in Priority if self._may_run(self._queues[priority])]
                if waiting:
                    return self._begin(waiting)
                self._arrived.wait()
            self._workers -= 1
            self._worker_left.notify_all()
            return None

    def _may_run(self, queue: OrderedDict[Hashable, _Task]) -> bool:
        tier = next((task.tier for task in queue.values()), None)
        if tier not in self._shares:
            return tier is not None
        return sum(task.tier == tier for task in self._running) < self._shares[tier]

    def _begin(self, waiting: list[Priority]) -> _Task:
        due = [priority for priority in waiting if self._passes[priority] >= MOST_PASSES]
        chosen = (due or waiting)[0]
        for priority in waiting:
            if priority > chosen:
                self._passes[priority] += 1
        self._passes[chosen] = 0
        _, task = self._queues[chosen].popitem(last=False)
        task.begun = True
        self._running[task] = self._clock.monotonic_seconds()
        return task

    def _run(self, task: _Task) -> TierMiss | None:
        finding: TierMiss | None = TierMiss.TIMED_OUT
        for _ in range(self._limits.attempts):
            if self._is_late(task):
                break
            outcome = self._guarded(partial(self._outcome, task))
            if outcome is None:  # a bug: its state is unknown, so it is not retried
                self._failed(task)
                return TierMiss.DOWN
            finding, again = outcome
            if not again:
                break
        return finding

    def _is_late(self, task: _Task) -> bool:
        with self._lock:
            return task.deadline is not None and task.deadline < self._clock.monotonic_seconds()

    def _outcome(self, task: _Task) -> tuple[TierMiss | None, bool]:
        assert task.work is not None
        try:
            task.work()
        except TierError as error:
            answer = next((finding for kind, finding in ANSWERS.items() if isinstance(error, kind)), None)
            if answer is not None:
                self._answered(task)
                return answer, False
            return TierMiss.DOWN, self._failed(task)
        except MemoryError as error:
            self._faults.failed(task.tier, kind_of(error), "no memory for a move")
            self._failed(task)
            return TierMiss.DOWN, False
        self._answered(task)
        return None, False

    def _answered(self, task: _Task) -> None:
        with self._lock:
            breaker = self._breakers[task.tier]
            if breaker.trial is task:
                breaker.trial = breaker.opened_at = None
            if breaker.opened_at is None:  # else it began before the breaker opened, and only the trial decides
                breaker.faults = 0

    def _failed(self, task: _Task) -> bool:
        with self._lock:
            breaker = self._breakers[task.tier]
            calls: list[_Call] = []
            if breaker.trial is task:
                breaker.trial, breaker.opened_at = None, self._clock.monotonic_seconds()
            elif breaker.opened_at is None:
                breaker.faults += 1
                if breaker.faults >= self._limits.breaker_faults:
                    breaker.opened_at = self._clock.monotonic_seconds()
                    calls = self._end_waiting(task.tier)
            again = breaker.opened_at is None and not self._closed
        self._make(calls)
        return again

    def _end_waiting(self, tier: str) -> list[_Call]:
        """A breaker opened. Now, not when a worker comes by."""
        tasks = [task for task in self._tasks.values() if task.tier == tier and not task.begun]
        return [call for task in tasks for call in self._end(task, TierMiss.DOWN)]

    # Ending --------------------------------------------------------------------------------------------------------

    def _finish(self, task: _Task, finding: TierMiss | None) -> None:
        with self._lock:
            self._seconds[task.priority].add(self._clock.monotonic_seconds() - self._running.pop(task))
            calls = self._end(task, finding)
        self._make(calls)

    def _end(self, task: _Task, finding: TierMiss | None) -> list[_Call]:
        """Take a move out of the tables, under the lock; returns the calls to make outside of it."""
        assert self._tasks[task.key] is task
        del self._tasks[task.key]
        (self._done if finding is None else self._failed_moves)[task.tier, task.priority] += 1
        if not task.begun:
            del self._queues[task.priority][task.key]
        breaker = self._breakers[task.tier]
        if breaker.trial is task:  # it never ran, so it says nothing about the tier: the next one is the trial
            breaker.trial = None
        return task.end(finding)

    def _make(self, calls: list[_Call]) -> None:
        for callback, move in calls:
            self._guarded(partial(callback, move))

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """What it returns; None after a bug, which must not end the thread that all others wait for."""
        try:
            return work()
        except Exception as error:
            self._keep(error)
            return None

    def _keep(self, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))
        with self._lock:
            is_known = text in self._bugs
            self._bugs.append(text)
        if not is_known:
            _log.error("a move failed by a fault of this program, and counts as a fault of its tier: %s", text)
