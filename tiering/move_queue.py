"""The move queue: runs planned moves by priority, in a few threads, with a bound on everything.

Other files decide what moves, and the callables do it. This file decides when a move runs, how often, and whether at
all: a slow or failing tier makes misses, not waits. A full queue and a tier that keeps failing are answers, and they
are given at once.

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
from enum import IntEnum
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
    SAVE = 1
    DEMOTION = 2
    SCRUB = 3


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


class Move:
    """A move, shared by all that submitted its key meanwhile. Guarded by the queue's lock.

    1. Queued by a submit; later ones of the same key join it, and may move it up.
    2. Begun by a worker, once, for one or more attempts; its key is still joined.
    3. Ended with a finding: its key is free, waiters wake, callbacks run. Also straight from 1, or refused before 1.
    """

    __slots__ = ("_ended", "_queue", "begun", "callbacks", "finding", "holders", "key", "priority", "tier", "work")

    def __init__(
        self, queue: MoveQueue, key: Hashable, tier: str, priority: Priority, work: Callable[[], None]
    ) -> None:
        self.key, self.tier, self.priority = key, tier, priority
        self.work: Callable[[], None] | None = work
        self.callbacks: list[Callable[[Move], None]] = []
        self.holders = 1
        self.begun = False
        self.finding: TierMiss | None = None
        """Why it did not succeed; None for a success, and while it is not done.

        DOWN: a fault of the tier, its open breaker, or a closed queue. TIMED_OUT: cancelled by its last holder before
        it began. EVICTED and CORRUPT: what was to be read is gone or bad. PINNED_FULL: no room in the tier, or in this
        queue.
        """
        self._queue = queue
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, with any outcome."""
        return self._ended.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait at most that long; returns whether it is done. Callbacks may still be running then."""
        return self._ended.wait(timeout_seconds)

    def then(self, callback: Callable[[Move], None]) -> None:
        """Call back when the move is done, in the thread that ended it; at once if it is done already.

        At once means in the calling thread: hold no lock here that the callback takes. Callbacks are short; one that
        raises is kept as a bug.
        """
        self._queue._attach(self, callback)

    def cancel(self) -> bool:
        """Leave the move, which each holder may do once. True if that ended it: it had not begun, and no other holder
        waits for it."""
        return self._queue._leave(self)

    def end(self, finding: TierMiss | None) -> None:
        """The queue has taken it out of its tables. Wakes the waiters; the callbacks are called without its lock."""
        assert not self.done, "a move ends once"
        self.work = None  # a kept handle must not keep the memory that the work refers to
        self.finding = finding
        self._ended.set()


class _Breaker:
    """Faults of a tier in a row; from `opened_at` on it is open, and `trial` is the one move that was let through."""

    __slots__ = ("faults", "opened_at", "trial")

    def __init__(self) -> None:
        self.faults = 0
        self.opened_at: float | None = None
        self.trial: Move | None = None

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
        self._shares = dict(shares or {})
        self._running: dict[Move, float] = {}  # since when
        self._clock = clock
        self._limits = limits
        self._threads = threads
        self._faults = faults or Unheard()
        self._untold: list[tuple[str, FaultKind, str]] = []  # faults, reported outside the lock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._worker_left = threading.Condition(self._lock)
        self._workers = 0
        self._moves: dict[Hashable, Move] = {}
        self._queues: dict[Priority, OrderedDict[Hashable, Move]] = {each: OrderedDict() for each in Priority}
        self._passes = dict.fromkeys(Priority, 0)
        self._breakers: dict[str, _Breaker] = {}
        self.bugs: deque[str] = deque(maxlen=BUGS_KEPT)
        """The last stack traces of exceptions, other than `TierError`, from moves and callbacks. As text, because an
        exception keeps the memory of all the frames it came through."""
        self._done: Counter[tuple[str, Priority]] = Counter()
        self._failed_moves: Counter[tuple[str, Priority]] = Counter()
        self._seconds = {priority: Histogram() for priority in Priority}
        self._closed = False

    def submit(self, key: Hashable, tier: str, priority: Priority, work: Callable[[], None]) -> Move:
        """Queue `work`. It returns when the move is made, or raises a `TierError`; after a fault it may run again.

        If a move of the same key has not ended, this joins it: `work` is not used, and the higher of both priorities
        holds if there is room in it. Never blocks: a refused move comes back done.
        """
        with self._lock:
            joined = None if self._closed else self._moves.get(key)
            if joined is not None:
                assert joined.tier == tier, "a key belongs to one tier"
                self._join(joined, priority)
                return joined
            move = Move(self, key, tier, priority, work)
            refusal = self._refusal(move)
            if refusal is not None:
                self._failed_moves[tier, priority] += 1
                move.end(refusal)
            else:
                self._queue(move)
            untold, self._untold = self._untold, []
            has_all_threads = self._workers == self._threads
        for fault in untold:
            self._faults.failed(*fault)
        if has_all_threads and MOVE_THREADS in self._faults.failing:
            self._faults.worked(MOVE_THREADS)
        return move

    def is_down(self, tier: str) -> bool:
        """Whether a move of that tier would be refused now, so that preparing one, or waiting for one, is useless."""
        with self._lock:
            return self._is_down(tier)

    def is_open(self, tier: str) -> bool:
        """Whether the tier's breaker is open: all of its moves are refused, or all but one on trial."""
        with self._lock:
            breaker = self._breakers.get(tier)
            return breaker is not None and breaker.opened_at is not None

    def depths(self) -> dict[Priority, int]:
        """Moves of each priority that have not begun."""
        with self._lock:
            return {priority: len(queue) for priority, queue in self._queues.items()}

    def counts(self) -> list[MoveCounts]:
        """Waiting, running and ended moves, for every tier and priority that ever had one."""
        with self._lock:
            waiting = Counter((move.tier, move.priority) for move in self._moves.values() if not move.begun)
            running = Counter((move.tier, move.priority) for move in self._running)
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

    def close(self, timeout_seconds: float) -> bool:
        """End waiting moves as DOWN and await running ones, for at most that long. Returns whether all threads have
        ended.

        Not to be called from a callback, which would wait for itself.
        """
        with self._lock:
            self._closed = True
            waiting = self._end_waiting()
            self._arrived.notify_all()
        self._call_back(waiting)
        with self._lock:
            return self._worker_left.wait_for(lambda: not self._workers, timeout_seconds)

    # Submitting ----------------------------------------------------------------------------------------------------

    def _queue(self, move: Move) -> None:
        breaker = self._breakers.setdefault(move.tier, _Breaker())
        if breaker.opened_at is not None:
            breaker.trial = move
        self._moves[move.key] = move
        self._queues[move.priority][move.key] = move
        self._arrived.notify()

    def _refusal(self, move: Move) -> TierMiss | None:
        if self._is_down(move.tier):
            if self._is_stalled() and not self._closed:
                words = f"no thread is back from its move after {self._limits.stall_seconds:g} s"
                self._untold.append((move.tier, FaultKind.DISK_HANGS, words))
            return TierMiss.DOWN
        if len(self._queues[move.priority]) >= self._limits.waiting_moves:
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

    def _join(self, move: Move, priority: Priority) -> None:
        move.holders += 1
        if not move.begun and priority < move.priority and len(self._queues[priority]) < self._limits.waiting_moves:
            del self._queues[move.priority][move.key]
            self._queues[priority][move.key] = move
            move.priority = priority

    def _leave(self, move: Move) -> bool:
        with self._lock:
            if move.begun or move.done:
                return False
            move.holders -= 1
            if move.holders:
                return False
            self._end(move, TierMiss.TIMED_OUT)
        self._call_back([move])
        return True

    def _attach(self, move: Move, callback: Callable[[Move], None]) -> None:
        with self._lock:
            if not move.done:
                move.callbacks.append(callback)
                return
        self._guarded(partial(callback, move))

    # Running -------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (move := self._next()) is not None:
            self._finish(move, self._run(move))

    def _next(self) -> Move | None:
        with self._lock:
            while not self._closed:
                waiting = [priority for priority in Priority if self._may_run(self._queues[priority])]
                if waiting:
                    return self._begin(waiting)
                self._arrived.wait()
            self._workers -= 1
            self._worker_left.notify_all()
            return None

    def _may_run(self, queue: OrderedDict[Hashable, Move]) -> bool:
        tier = next((move.tier for move in queue.values()), None)
        if tier not in self._shares:
            return tier is not None
        return sum(move.tier == tier for move in self._running) < self._shares[tier]

    def _begin(self, waiting: list[Priority]) -> Move:
        due = [priority for priority in waiting if self._passes[priority] >= MOST_PASSES]
        chosen = (due or waiting)[0]
        for priority in waiting:
            if priority > chosen:
                self._passes[priority] += 1
        self._passes[chosen] = 0
        _, move = self._queues[chosen].popitem(last=False)
        move.begun = True
        self._running[move] = self._clock.monotonic_seconds()
        return move

    def _run(self, move: Move) -> TierMiss | None:
        for _ in range(self._limits.attempts):
            outcome = self._guarded(partial(self._outcome, move))
            if outcome is None:  # a bug: its state is unknown, so it is not retried
                self._failed(move)
                return TierMiss.DOWN
            finding, again = outcome
            if not again:
                break
        return finding

    def _outcome(self, move: Move) -> tuple[TierMiss | None, bool]:
        assert move.work is not None
        try:
            move.work()
        except TierError as error:
            answer = next((finding for kind, finding in ANSWERS.items() if isinstance(error, kind)), None)
            if answer is not None:
                self._answered(move)
                return answer, False
            return TierMiss.DOWN, self._failed(move)
        except MemoryError as error:
            self._faults.failed(move.tier, kind_of(error), "no memory for a move")
            self._failed(move)
            return TierMiss.DOWN, False
        self._answered(move)
        return None, False

    def _answered(self, move: Move) -> None:
        with self._lock:
            breaker = self._breakers[move.tier]
            if breaker.trial is move:
                breaker.trial = breaker.opened_at = None
            if breaker.opened_at is None:  # else it began before the breaker opened, and only the trial decides
                breaker.faults = 0

    def _failed(self, move: Move) -> bool:
        with self._lock:
            breaker = self._breakers[move.tier]
            ended: list[Move] = []
            if breaker.trial is move:
                breaker.trial, breaker.opened_at = None, self._clock.monotonic_seconds()
            elif breaker.opened_at is None:
                breaker.faults += 1
                if breaker.faults >= self._limits.breaker_faults:
                    breaker.opened_at = self._clock.monotonic_seconds()
                    ended = self._end_waiting(move.tier)
            again = breaker.opened_at is None and not self._closed
        self._call_back(ended)
        return again

    def _end_waiting(self, tier: str | None = None) -> list[Move]:
        """Of one tier, whose breaker opened, or all. Now, not when a worker comes by."""
        waiting = [move for move in self._moves.values() if tier in (None, move.tier) and not move.begun]
        return [self._end(move, TierMiss.DOWN) for move in waiting]

    # Ending --------------------------------------------------------------------------------------------------------

    def _finish(self, move: Move, finding: TierMiss | None) -> None:
        with self._lock:
            self._seconds[move.priority].add(self._clock.monotonic_seconds() - self._running.pop(move))
            self._end(move, finding)
        self._call_back([move])

    def _end(self, move: Move, finding: TierMiss | None) -> Move:
        """Take a move out of the tables, under the lock; `_call_back` follows outside of it."""
        assert self._moves[move.key] is move
        del self._moves[move.key]
        (self._done if finding is None else self._failed_moves)[move.tier, move.priority] += 1
        if not move.begun:
            del self._queues[move.priority][move.key]
        breaker = self._breakers[move.tier]
        if breaker.trial is move:  # it never ran, so it says nothing about the tier: the next one is the trial
            breaker.trial = None
        move.end(finding)
        return move

    def _call_back(self, ended: list[Move]) -> None:
        for move in ended:
            callbacks, move.callbacks = move.callbacks, []
            for callback in callbacks:
                self._guarded(partial(callback, move))

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """What it returns; None after a bug, which must not end the thread that all others wait for."""
        try:
            return work()
        except Exception as error:
            text = "".join(traceback.format_exception(error))
        with self._lock:
            is_known = text in self.bugs
            self.bugs.append(text)
        if not is_known:
            _log.error("a move failed by a fault of this program, and counts as a fault of its tier: %s", text)
        return None
