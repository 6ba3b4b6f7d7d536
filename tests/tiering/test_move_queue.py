"""The move queue: order, joined moves, cancelling, bounds, retries, breakers and bugs, in real threads.

Moves stand still at gates that the tests open, so that nothing here depends on how fast anything is. Whatever a move
or a callback raises ends up among the queue's bugs, which the fixture looks at: an assertion in a thread counts.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tiering.errors import BlockCorrupt, BlockMissing, IndexDoubtful, TierError, TierFull, TierUnavailable
from tiering.move_queue import MOST_PASSES, Move, MoveQueue, Priority, QueueLimits
from tiering.tier import TierMiss
from waiting import FakeClock, together, wait_until

DISK, FAR = "disk", "far"
HANGS_AFTER_SECONDS = 5.0
SEEDS = (1, 2, 3)


class Queues:
    """Queues of one test on one clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.made: list[MoveQueue] = []
        self.gates: list[Gate] = []
        self.bugs_expected = False

    def new(self, threads: int = 1, shares: dict[str, int] | None = None, **limits: Any) -> MoveQueue:
        self.made.append(MoveQueue(self.clock, QueueLimits(**limits), threads, shares))
        return self.made[-1]

    def gate(self, error: Exception | None = None) -> Gate:
        self.gates.append(Gate(error))
        return self.gates[-1]

    def busy(self, queue: MoveQueue, tier: str = "gate") -> Gate:
        """A gate that one worker stands at."""
        gate = self.gate()
        queue.submit(object(), tier, Priority.WAITING, gate)
        assert gate.begun.wait(HANGS_AFTER_SECONDS)
        return gate


class Gate:
    """Work that waits until it is let through, and then returns or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.opened, self.error, self.runs = threading.Event(), threading.Event(), error, 0

    def __call__(self) -> None:
        self.runs += 1
        self.begun.set()
        assert self.opened.wait(HANGS_AFTER_SECONDS)
        if self.error is not None:
            raise self.error


class Work:
    """Work that raises what it was given, attempt by attempt, and then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.runs = list(errors), 0

    def __call__(self) -> None:
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture(autouse=True)
def a_hang_ends_the_run() -> Iterator[None]:
    """A lock that is never let go cannot be waited for with a bound: show where everybody stands, and stop."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def queues() -> Iterator[Queues]:
    queues = Queues()
    yield queues
    for gate in queues.gates:
        gate.opened.set()
    for queue in queues.made:
        assert queue.close(HANGS_AFTER_SECONDS)
        assert queues.bugs_expected or not queue.bugs


def finished(*moves: Move) -> list[TierMiss | None]:
    """What came of moves that have to end."""
    for move in moves:
        assert move.wait(HANGS_AFTER_SECONDS) and move.done
    return [move.finding for move in moves]


def down() -> TierUnavailable:
    return TierUnavailable("the disk is gone")


def break_tier(queue: MoveQueue, tier: str = DISK) -> None:
    """Faults until the breaker is open."""
    for attempt in range(100):
        if queue.is_open(tier):
            return
        finished(queue.submit(("fault", attempt), tier, Priority.WAITING, Work(down(), down(), down())))
    raise AssertionError("the breaker did not open")


# Order ----------------------------------------------------------------------------------------------------------------


def test_the_higher_priority_runs_first_and_the_earlier_of_equals(queues: Queues) -> None:
    queue, order, chance = queues.new(), list[tuple[int, int]](), random.Random(5)
    gate = queues.busy(queue)
    wanted = [(priority, number) for priority in Priority for number in range(4)]
    numbers, moves = Counter[int](), []
    for priority in chance.sample([priority for priority, _ in wanted], len(wanted)):
        label = (priority, numbers[priority])
        numbers[priority] += 1
        moves.append(queue.submit(label, DISK, priority, partial(order.append, label)))
    assert queue.depths() == dict.fromkeys(Priority, 4)
    assert not any(move.done for move in moves)
    gate.opened.set()
    assert finished(*moves) == [None] * len(moves)
    assert order == wanted
    assert queue.depths() == dict.fromkeys(Priority, 0)


def test_no_priority_starves(queues: Queues) -> None:
    """Each of four priorities below a steady load of the highest gets its turn, and no more than that."""
    queue, order = queues.new(), list[Priority]()
    gate = queues.busy(queue)
    moves = [
        queue.submit((priority, number), DISK, priority, partial(order.append, priority))
        for priority in Priority
        for number in range(3 * MOST_PASSES if priority is Priority.WAITING else 2)
    ]
    gate.opened.set()
    finished(*moves)
    lower = list(Priority)[1:]
    assert order[:MOST_PASSES] == [Priority.WAITING] * MOST_PASSES
    assert order[MOST_PASSES : MOST_PASSES + len(lower)] == lower
    for priority in Priority:
        places = [index for index, each in enumerate(order) if each is priority]
        assert places[1] <= 2 * (MOST_PASSES + len(lower))
    assert order[MOST_PASSES + len(lower)] is Priority.WAITING


# Joining --------------------------------------------------------------------------------------------------------------


def test_a_move_of_the_same_key_is_joined_and_moves_up(queues: Queues) -> None:
    queue, order = queues.new(), list[str]()
    gate, unused = queues.busy(queue), Work()
    first = queue.submit("x", DISK, Priority.SCRUB, partial(order.append, "x"))
    other = queue.submit("y", DISK, Priority.SAVE, partial(order.append, "y"))
    early = queue.submit("z", DISK, Priority.WAITING, partial(order.append, "z"))
    second = queue.submit("x", DISK, Priority.WAITING, unused)
    third = queue.submit("x", DISK, Priority.DEMOTION, unused)
    assert queue.depths() == {**dict.fromkeys(Priority, 0), Priority.WAITING: 2, Priority.SAVE: 1}
    gate.opened.set()
    assert finished(first, second, third, other, early) == [None] * 5
    assert order == ["z", "x", "y"] and unused.runs == 0


def test_a_move_stays_where_it_is_if_the_higher_priority_is_full(queues: Queues) -> None:
    queue = queues.new(waiting_moves=2)
    gate = queues.busy(queue)
    moves = [queue.submit(number, DISK, Priority.WAITING, Work()) for number in range(2)]
    moves += [queue.submit("x", DISK, priority, Work()) for priority in (Priority.SAVE, Priority.WAITING)]
    assert queue.depths()[Priority.WAITING] == 2 and queue.depths()[Priority.SAVE] == 1
    gate.opened.set()
    assert finished(*moves) == [None] * 4


def test_a_running_move_is_joined_and_a_finished_one_is_not(queues: Queues) -> None:
    queue, gate, unused, again = queues.new(threads=2), queues.gate(BlockMissing("evicted")), Work(), Work()
    first = queue.submit("x", DISK, Priority.SAVE, gate)
    assert gate.begun.wait(HANGS_AFTER_SECONDS)
    second = queue.submit("x", DISK, Priority.WAITING, unused)
    assert queue.depths() == dict.fromkeys(Priority, 0)
    assert not second.wait(0.001) and second.finding is None and not second.done
    gate.opened.set()
    assert finished(first, second) == [TierMiss.EVICTED] * 2
    assert finished(queue.submit("x", DISK, Priority.SAVE, again)) == [None]
    assert (gate.runs, unused.runs, again.runs) == (1, 0, 1)


# Cancelling -----------------------------------------------------------------------------------------------------------


def test_the_only_holder_ends_a_move_that_has_not_begun(queues: Queues) -> None:
    queue = queues.new(waiting_moves=1)
    gate, work, again, heard = queues.busy(queue), Work(), Work(), list[Move]()
    move = queue.submit("x", DISK, Priority.WAITING, work)
    move.then(heard.append)
    assert move.cancel() and move.done and move.finding is TierMiss.TIMED_OUT and heard == [move]
    assert not move.cancel()
    assert queue.depths() == dict.fromkeys(Priority, 0)
    after = queue.submit("x", DISK, Priority.WAITING, again)
    gate.opened.set()
    assert finished(after) == [None] and (work.runs, again.runs) == (0, 1) and heard == [move]


def test_one_of_two_holders_only_leaves(queues: Queues) -> None:
    queue = queues.new()
    gate, work, heard = queues.busy(queue), Work(), list[Move]()
    first, second = (queue.submit("x", DISK, Priority.SAVE, work) for _ in range(2))
    first.then(heard.append)
    assert not first.cancel() and not first.done
    third = queue.submit("x", DISK, Priority.SAVE, work)
    assert not second.cancel()
    gate.opened.set()
    assert finished(third) == [None] and work.runs == 1
    assert queue.close(HANGS_AFTER_SECONDS) and heard == [first]


def test_a_move_that_began_is_not_cancelled(queues: Queues) -> None:
    queue, gate = queues.new(), queues.gate()
    move = queue.submit("x", DISK, Priority.SAVE, gate)
    assert gate.begun.wait(HANGS_AFTER_SECONDS)
    assert not move.cancel() and not move.done
    gate.opened.set()
    assert finished(move) == [None] and not move.cancel()


def test_how_long_moves_ran_is_counted_by_priority_and_what_never_began_is_not(queues: Queues) -> None:
    queue, gate = queues.new(), queues.gate()
    move = queue.submit("x", DISK, Priority.SAVE, gate)
    assert gate.begun.wait(HANGS_AFTER_SECONDS)
    waiting = queue.submit("y", DISK, Priority.SCRUB, Work())
    assert waiting.cancel()
    queues.clock.advance(0.02)
    gate.opened.set()
    assert finished(move) == [None]
    wait_until(lambda: sum(queue.seconds()[Priority.SAVE].counts) == 1)
    seconds = queue.seconds()
    assert seconds.keys() == set(Priority) and seconds[Priority.SAVE].sum == pytest.approx(0.02)
    assert sum(sum(one.counts) for one in seconds.values()) == 1


# Bounds ---------------------------------------------------------------------------------------------------------------


def test_a_full_queue_answers_at_once(queues: Queues) -> None:
    queue = queues.new(waiting_moves=3)
    gate, refused_work = queues.busy(queue), Work()
    taken = [queue.submit(number, DISK, Priority.SCRUB, Work()) for number in range(3)]
    refused = queue.submit("x", DISK, Priority.SCRUB, refused_work)
    assert refused.done and refused.finding is TierMiss.PINNED_FULL and not refused.cancel()
    joined = queue.submit(2, DISK, Priority.SCRUB, Work())
    taken.append(queue.submit("x", DISK, Priority.SAVE, Work()))
    assert not joined.done and queue.depths()[Priority.SCRUB] == 3
    gate.opened.set()
    assert finished(*taken, joined) == [None] * 5 and refused_work.runs == 0
    assert finished(queue.submit("y", DISK, Priority.SCRUB, Work())) == [None]


# What a move says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "finding"),
    [
        (BlockMissing("gone"), TierMiss.EVICTED),
        (BlockCorrupt("digest"), TierMiss.CORRUPT),
        (TierFull("full"), TierMiss.PINNED_FULL),
    ],
)
def test_an_answer_is_final_and_no_fault(queues: Queues, error: TierError, finding: TierMiss) -> None:
    queue = queues.new(breaker_faults=2, attempts=3)
    for _ in range(4):
        work = Work(error)
        assert finished(queue.submit("x", DISK, Priority.SAVE, work)) == [finding]
        assert work.runs == 1
    assert not queue.is_open(DISK)


@pytest.mark.parametrize("error", [down(), IndexDoubtful("torn"), TierError("what else")])
def test_a_fault_is_tried_again_a_bounded_number_of_times(queues: Queues, error: TierError) -> None:
    queue, mended, gone = queues.new(attempts=3, breaker_faults=100), Work(error, error), Work(*[error] * 9)
    assert finished(queue.submit("x", DISK, Priority.SAVE, mended)) == [None] and mended.runs == 3
    assert finished(queue.submit("x", DISK, Priority.SAVE, gone)) == [TierMiss.DOWN] and gone.runs == 3


# Breakers -------------------------------------------------------------------------------------------------------------


def test_when_all_threads_hang_nothing_is_taken_until_one_is_back(queues: Queues) -> None:
    queue = queues.new(threads=2, stall_seconds=3.0)
    first, second = queues.busy(queue), queues.busy(queue)
    queues.clock.advance(3.0)
    waiting = queue.submit("a", DISK, Priority.WAITING, Work())
    assert not waiting.done, "so long a move may take"
    queues.clock.advance(0.1)
    refused = queue.submit("b", DISK, Priority.WAITING, Work())
    assert refused.done and refused.finding is TierMiss.DOWN
    joined = queue.submit("a", DISK, Priority.WAITING, Work())
    assert not joined.done, "what was taken before goes on waiting"
    first.opened.set()
    assert finished(waiting, joined) == [None, None]
    assert finished(queue.submit("c", DISK, Priority.WAITING, Work())) == [None], "one thread is enough"
    second.opened.set()


def test_one_thread_that_hangs_beside_one_that_has_just_begun_stops_nothing(queues: Queues) -> None:
    queue = queues.new(threads=2, stall_seconds=3.0)
    hangs = queues.busy(queue)
    queues.clock.advance(3.1)
    fresh = queues.busy(queue)
    assert not queue.submit("a", DISK, Priority.WAITING, Work()).done
    fresh.opened.set()
    hangs.opened.set()


def test_a_share_leaves_threads_for_others(queues: Queues) -> None:
    queue = queues.new(threads=3, shares={FAR: 2})
    gates = [queues.busy(queue, FAR), queues.busy(queue, FAR)]
    held = [queue.submit(number, FAR, Priority.SAVE, Work()) for number in range(3)]
    for number in range(5):
        assert finished(queue.submit(("disk", number), DISK, Priority.SCRUB, Work())) == [None]
    assert not any(move.done for move in held) and queue.depths()[Priority.SAVE] == 3
    gates[0].opened.set()
    assert finished(*held) == [None] * 3
    gates[1].opened.set()


def test_faults_in_a_row_open_the_breaker_of_their_tier(queues: Queues) -> None:
    queue, refused = queues.new(attempts=2, breaker_faults=5), Work()
    works = [Work(down(), down()) for _ in range(3)]
    for work in works:
        assert not queue.is_open(DISK)
        assert finished(queue.submit("x", DISK, Priority.SAVE, work)) == [TierMiss.DOWN]
    assert [work.runs for work in works] == [2, 2, 1], "an open breaker ends the attempts"
    assert queue.is_open(DISK)
    move = queue.submit("x", DISK, Priority.WAITING, refused)
    assert move.done and move.finding is TierMiss.DOWN and refused.runs == 0
    assert finished(queue.submit("x", FAR, Priority.WAITING, Work())) == [None]
    assert not queue.is_open(FAR) and not queue.is_open("unheard of")


@pytest.mark.parametrize("answer", [None, BlockMissing("gone")])
def test_whatever_a_tier_answers_ends_the_row(queues: Queues, answer: Exception | None) -> None:
    queue = queues.new(attempts=1, breaker_faults=2)
    for _ in range(4):
        finished(queue.submit("x", DISK, Priority.SAVE, Work(down())))
        finished(queue.submit("x", DISK, Priority.SAVE, Work(*([answer] if answer else []))))
    assert not queue.is_open(DISK)


def test_what_waits_hears_at_once_that_the_breaker_opened(queues: Queues) -> None:
    """The worker that would get to them may stand still for long."""
    queue, heard, work = queues.new(attempts=1, breaker_faults=1), list[Move](), Work()
    failing, standing = queues.gate(down()), queues.gate()
    fault = queue.submit("fault", DISK, Priority.WAITING, failing)
    fault.then(lambda _: standing())
    assert failing.begun.wait(HANGS_AFTER_SECONDS)
    other = queue.submit("other", FAR, Priority.WAITING, Work())
    waiting = [queue.submit(priority, DISK, priority, work) for priority in Priority]
    waiting[0].then(heard.append)
    failing.opened.set()
    assert finished(*waiting, fault) == [TierMiss.DOWN] * (len(Priority) + 1)
    assert standing.begun.wait(HANGS_AFTER_SECONDS) and heard == [waiting[0]] and not other.done
    standing.opened.set()
    assert finished(other) == [None] and work.runs == 0


def test_one_trial_is_let_through_and_closes_the_breaker(queues: Queues) -> None:
    queue = queues.new(threads=2, breaker_seconds=5.0)
    break_tier(queue)
    queues.clock.advance(4.9)
    assert queue.submit("early", DISK, Priority.WAITING, Work()).finding is TierMiss.DOWN
    assert queue.is_open(DISK)
    queues.clock.advance(0.2)
    gate, refused, unused = queues.gate(), Work(), Work()
    trial = queue.submit("trial", DISK, Priority.SCRUB, gate)
    assert queue.is_open(DISK) and gate.begun.wait(HANGS_AFTER_SECONDS)
    queues.clock.advance(100)
    others = [queue.submit(number, DISK, Priority.WAITING, refused) for number in range(3)]
    joined = queue.submit("trial", DISK, Priority.WAITING, unused)
    assert [other.finding for other in others] == [TierMiss.DOWN] * 3 and not joined.done
    gate.opened.set()
    assert finished(trial, joined) == [None, None] and (refused.runs, unused.runs) == (0, 0)
    assert not queue.is_open(DISK)
    fault = Work(down())
    assert finished(queue.submit("x", DISK, Priority.WAITING, fault)) == [None] and fault.runs == 2, (
        "the row begins anew"
    )


def test_a_failed_trial_opens_the_breaker_again(queues: Queues) -> None:
    queue = queues.new(attempts=3, breaker_seconds=5.0)
    break_tier(queue)
    for _ in range(2):
        queues.clock.advance(7)
        trial = Work(down())
        assert finished(queue.submit("x", DISK, Priority.WAITING, trial)) == [TierMiss.DOWN] and trial.runs == 1
        assert queue.is_open(DISK)
        queues.clock.advance(4)
        assert queue.submit("x", DISK, Priority.WAITING, trial).done and trial.runs == 1, "five seconds from the trial"
    queues.clock.advance(1)
    assert finished(queue.submit("x", DISK, Priority.WAITING, Work(BlockMissing("gone")))) == [TierMiss.EVICTED]
    assert not queue.is_open(DISK), "a tier that answers is there"


def test_a_trial_that_never_ran_decides_nothing(queues: Queues) -> None:
    queue, work = queues.new(), Work()
    break_tier(queue)
    queues.clock.advance(5)
    gate = queues.busy(queue, FAR)
    trial = queue.submit("x", DISK, Priority.WAITING, work)
    assert trial.cancel()
    assert finished(trial) == [TierMiss.TIMED_OUT] and work.runs == 0
    assert queue.is_open(DISK)
    gate.opened.set()
    assert finished(queue.submit("x", DISK, Priority.WAITING, work)) == [None]
    assert not queue.is_open(DISK)


def test_a_full_queue_is_no_trial(queues: Queues) -> None:
    queue = queues.new(waiting_moves=1)
    break_tier(queue)
    queues.clock.advance(5)
    gate = queues.busy(queue, FAR)
    filler = queue.submit("filler", FAR, Priority.SAVE, Work())
    assert queue.submit("x", DISK, Priority.SAVE, Work()).finding is TierMiss.PINNED_FULL
    assert queue.is_open(DISK)
    trial = queue.submit("x", DISK, Priority.WAITING, Work())
    gate.opened.set()
    assert finished(filler, trial) == [None, None]


def test_what_began_before_the_breaker_opened_decides_nothing(queues: Queues) -> None:
    queue = queues.new(threads=3, attempts=2, breaker_faults=2)
    good, bad = queues.gate(), queues.gate(down())
    moves = [queue.submit(gate, DISK, Priority.SAVE, gate) for gate in (good, bad)]
    assert good.begun.wait(HANGS_AFTER_SECONDS) and bad.begun.wait(HANGS_AFTER_SECONDS)
    break_tier(queue)
    good.opened.set()
    assert finished(moves[0]) == [None] and queue.is_open(DISK)
    queues.clock.advance(5)
    trial_gate = queues.gate()
    trial = queue.submit("trial", DISK, Priority.SAVE, trial_gate)
    bad.opened.set()
    assert finished(moves[1]) == [TierMiss.DOWN] and bad.runs == 1
    assert queue.is_open(DISK)
    trial_gate.opened.set()
    assert finished(trial) == [None] and not queue.is_open(DISK)


# Bugs and callbacks ---------------------------------------------------------------------------------------------------


def test_a_bug_ends_its_move_and_not_the_worker(queues: Queues) -> None:
    queues.bugs_expected = True
    queue, work = queues.new(attempts=3, breaker_faults=3), Work(*[ZeroDivisionError("a bug") for _ in range(9)])
    for runs in (1, 2, 3):
        assert finished(queue.submit("x", DISK, Priority.SAVE, work)) == [TierMiss.DOWN]
        assert work.runs == runs, "it is not tried again"
    assert queue.is_open(DISK)
    assert finished(queue.submit("x", FAR, Priority.SAVE, Work())) == [None]
    assert len(queue.bugs) == 3
    assert all("ZeroDivisionError: a bug" in bug and "in __call__" in bug for bug in queue.bugs)


def test_callbacks_run_after_the_move_in_its_thread_with_their_handle(queues: Queues) -> None:
    queue, gate, heard = queues.new(), queues.gate(), list[tuple[Move, bool, str]]()

    def hear(move: Move) -> None:
        queue.depths()  # no lock is held
        heard.append((move, move.done, threading.current_thread().name))

    first, second = (queue.submit("x", DISK, Priority.SAVE, gate) for _ in range(2))
    for move in (first, second):
        move.then(hear)
    assert not heard
    gate.opened.set()
    finished(first, second)
    assert queue.close(HANGS_AFTER_SECONDS)
    assert heard == [(move, True, "kv-move-0") for move in (first, second)]
    second.then(hear)
    assert heard[2] == (second, True, threading.current_thread().name)


def test_a_callback_may_submit_the_same_key_again(queues: Queues) -> None:
    queue, works, moves = queues.new(), [Work(), Work()], list[Move]()
    again = threading.Event()

    def follow(move: Move) -> None:
        moves.append(queue.submit("x", DISK, Priority.SAVE, works[1]))
        again.set()

    queue.submit("x", DISK, Priority.SAVE, works[0]).then(follow)
    assert again.wait(HANGS_AFTER_SECONDS)
    assert finished(*moves) == [None] and [work.runs for work in works] == [1, 1]


def test_a_bug_in_a_callback_harms_nobody(queues: Queues) -> None:
    queues.bugs_expected = True
    queue, gate, heard = queues.new(breaker_faults=1), queues.gate(), list[Move]()

    def broken(move: Move) -> None:
        raise LookupError("in a callback")

    move = queue.submit("x", DISK, Priority.SAVE, gate)
    move.then(broken)
    move.then(heard.append)
    gate.opened.set()
    assert finished(move, queue.submit("y", DISK, Priority.SAVE, Work())) == [None, None]
    move.then(broken)
    assert heard == [move] and not queue.is_open(DISK)
    assert ["LookupError: in a callback" in bug for bug in queue.bugs] == [True, True]


@pytest.mark.parametrize("error", [None, down(), BlockMissing("gone"), ZeroDivisionError("a bug")])
def test_a_kept_handle_keeps_no_memory(queues: Queues, error: Exception | None) -> None:
    """Neither a finished move nor a sleeping worker refers to what the work and its callbacks refer to."""
    queues.bugs_expected = True
    queue = queues.new(attempts=2)

    class Buffer:
        pass

    def work_on(buffer: Buffer) -> Callable[[], None]:
        def work() -> None:
            local = buffer
            if error is not None:
                try:
                    raise OSError(str(local))
                except OSError as cause:
                    raise type(error)(*error.args) from cause

        return work

    def hear(buffer: Buffer) -> Callable[[Move], None]:
        return lambda move: buffer.__init__()  # type: ignore[misc]

    used, heard, called = Buffer(), Buffer(), threading.Event()
    gate = queues.busy(queue)
    move = queue.submit("x", DISK, Priority.SAVE, work_on(used))
    move.then(hear(heard))
    move.then(lambda _: called.set())
    gone = [weakref.ref(used), weakref.ref(heard)]
    del used, heard
    gc.disable()
    try:
        gate.opened.set()
        finished(move)
        assert called.wait(HANGS_AFTER_SECONDS)
        wait_until(lambda: all(each() is None for each in gone))
    finally:
        gc.enable()


# Threads and the end --------------------------------------------------------------------------------------------------


def worker_threads() -> list[threading.Thread]:
    return sorted(
        (thread for thread in threading.enumerate() if thread.name.startswith("kv-move-")), key=lambda each: each.name
    )


def test_threads_come_with_the_first_submit_and_sleep_when_idle(queues: Queues) -> None:
    queue = queues.new(threads=3)
    queue.depths()
    assert worker_threads() == []
    finished(queue.submit("x", DISK, Priority.SAVE, Work()))
    finished(queue.submit("x", DISK, Priority.SAVE, Work()))
    threads = worker_threads()
    assert [thread.name for thread in threads] == ["kv-move-0", "kv-move-1", "kv-move-2"]
    assert all(thread.daemon for thread in threads)


def test_a_system_without_threads_makes_misses(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, start, left = queues.new(threads=2), threading.Thread.start, [0]

    def scarce(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    assert queue.submit("x", DISK, Priority.SAVE, Work()).finding is TierMiss.DOWN
    left[0] = 1
    assert finished(queue.submit("x", DISK, Priority.SAVE, Work())) == [None]
    assert len(worker_threads()) == 1


def test_close_ends_what_waits_and_awaits_what_runs(queues: Queues) -> None:
    queue, heard, gates = queues.new(threads=2), list[Move](), [queues.gate(), queues.gate()]
    running = [queue.submit(gate, DISK, Priority.SAVE, gate) for gate in gates]
    assert all(gate.begun.wait(HANGS_AFTER_SECONDS) for gate in gates)
    waiting = [queue.submit(priority, DISK, priority, Work()) for priority in Priority]
    for move in waiting:
        move.then(heard.append)
    start = time.monotonic()
    assert not queue.close(0.01), "two moves still run"
    assert 0.01 <= time.monotonic() - start < HANGS_AFTER_SECONDS
    assert finished(*waiting) == [TierMiss.DOWN] * len(Priority) and heard == waiting
    assert queue.depths() == dict.fromkeys(Priority, 0) and not any(move.done for move in running)
    refused = [queue.submit(key, DISK, Priority.WAITING, Work()) for key in ("new", gates[0])]
    assert all(move.done for move in refused) and finished(*refused) == [TierMiss.DOWN] * 2
    gates[0].opened.set()
    assert finished(running[0]) == [None] and not queue.close(0.01)
    gates[1].opened.set()
    assert queue.close(HANGS_AFTER_SECONDS) and queue.close(0)
    assert finished(*running) == [None, None] and heard == waiting
    for thread in worker_threads():
        thread.join(HANGS_AFTER_SECONDS)
    assert worker_threads() == []


# All at once ----------------------------------------------------------------------------------------------------------

SUBMITTERS, OPERATIONS, KEYS, WAITING = 3, 400, 16, 4
OUTCOMES: list[Exception | None] = [
    *[None] * 6,
    *[down()] * 3,
    BlockMissing("gone"),
    BlockCorrupt("bad"),
    TierFull("full"),
]
FINDINGS = {
    type(None): None,
    TierUnavailable: TierMiss.DOWN,
    BlockMissing: TierMiss.EVICTED,
    BlockCorrupt: TierMiss.CORRUPT,
    TierFull: TierMiss.PINNED_FULL,
}


class Soak:
    """Random submits from several threads; what ran is compared with what the handles say."""

    def __init__(self, queues: Queues) -> None:
        self.clock = queues.clock
        self.queue = queues.new(threads=3, waiting_moves=WAITING, attempts=2, breaker_faults=3, breaker_seconds=1.0)
        self.running = [threading.Lock() for _ in range(KEYS)]

    def tier(self, key: int) -> str:
        return DISK if key % 2 else FAR

    def submitter(self, seed: int, moves: list[SoakMove]) -> None:
        chance, queue = random.Random(seed), self.queue
        for _ in range(OPERATIONS):
            move = SoakMove(self, chance.randrange(KEYS), chance.choices(OUTCOMES, k=2), chance.random() < 0.2)
            move.handle = queue.submit(move.key, self.tier(move.key), chance.choice(list(Priority)), move.work)
            move.handle.then(move.heard.append)
            moves.append(move)
            if chance.random() < 0.3:
                chance.choice(moves[-5:]).cancel()
            if chance.random() < 0.05:
                self.clock.advance(0.3)
            assert all(0 <= depth <= WAITING for depth in queue.depths().values())
            if chance.random() < 0.1:
                move.handle.wait(0.001)


class SoakMove:
    """One submit: its own work, its handle, and what it heard."""

    def __init__(self, soak: Soak, key: int, outcomes: list[Exception | None], slow: bool) -> None:
        self.soak, self.key, self.outcomes, self.slow = soak, key, outcomes, slow
        self.handle: Move
        self.heard: list[Move] = []
        self.said: list[Exception | None] = []
        self.has_left = False

    def work(self) -> None:
        assert self.soak.running[self.key].acquire(blocking=False), "a key is moved twice at a time"
        try:
            if self.slow:
                time.sleep(0.0005)
            self.said.append(self.outcomes[len(self.said)])
        finally:
            self.soak.running[self.key].release()
        if (error := self.said[-1]) is not None:
            raise type(error)(*error.args)

    def cancel(self) -> None:
        if not self.has_left and self.handle.cancel():
            assert not self.said and self.handle.finding is TierMiss.TIMED_OUT
        self.has_left = True

    def check(self) -> str:
        """One handle, one end; what ran is what it says."""
        assert self.handle.done and self.heard == [self.handle]
        if not self.said:
            return f"joined or refused: {self.handle.finding}"
        assert self.handle.finding is FINDINGS[type(self.said[-1])]
        assert len(self.said) == 1 or isinstance(self.said[0], TierUnavailable)
        return f"ran {len(self.said)}: {self.handle.finding}"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_move_ends_once_whatever_happens(queues: Queues, seed: int) -> None:
    print(f"seed {seed}")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        soak = Soak(queues)
        moves: list[list[SoakMove]] = [[] for _ in range(SUBMITTERS)]
        together(lambda number: soak.submitter(seed * 100 + number, moves[number]), SUBMITTERS)
        everything = [move for mine in moves for move in mine]
        finished(*(move.handle for move in everything))
        assert soak.queue.depths() == dict.fromkeys(Priority, 0)
        soak.clock.advance(10)
        for key in range(KEYS):  # no key is stuck, and no breaker
            work = Work()
            assert finished(soak.queue.submit(key, soak.tier(key), Priority.SCRUB, work)) == [None] and work.runs == 1
        assert soak.queue.close(HANGS_AFTER_SECONDS)
        counts = Counter(move.check() for move in everything)
        print(dict(sorted(counts.items())))
        assert counts.total() == SUBMITTERS * OPERATIONS
        assert {"ran 1: None", "ran 2: None", "joined or refused: None"} <= set(counts), "the soak soaks nothing"
    finally:
        sys.setswitchinterval(interval)


def test_what_waits_runs_and_ended_is_counted(queues: Queues) -> None:
    queue = queues.new(waiting_moves=1)
    gate = queues.busy(queue, DISK)
    waiting = queue.submit("a", DISK, Priority.SAVE, lambda: None)
    assert queue.submit("b", DISK, Priority.SAVE, lambda: None).finding is TierMiss.PINNED_FULL
    joined = queue.submit("a", DISK, Priority.SCRUB, lambda: None)
    late = queue.submit("c", DISK, Priority.SCRUB, lambda: None)
    assert late.cancel()
    counts = {one.priority: (one.waiting, one.running, one.done, one.failed) for one in queue.counts()}
    assert counts == {"waiting": (0, 1, 0, 0), "save": (1, 0, 0, 1), "scrub": (0, 0, 0, 1)}
    gate.opened.set()
    assert finished(waiting, joined) == [None, None]
    counts = {one.priority: (one.waiting, one.running, one.done, one.failed) for one in queue.counts()}
    assert counts == {"waiting": (0, 0, 1, 0), "save": (0, 0, 1, 1), "scrub": (0, 0, 0, 1)}
