"""The live side: look-ups are taken without waiting, worked through elsewhere, and read as a curve."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Sequence
from hashlib import blake2b
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

import kvstore.insight.lru_curve
import kvstore.insight.whatif
from kvstore.insight.lru_curve import HOT_NAMES, LEAST_NAMES, NAMES
from kvstore.insight.whatif import (
    FEWEST_NAMES,
    HALF_LIFE_SECONDS,
    MOST_QUEUED_BLOCKS,
    MOST_QUEUED_LOOKUPS,
    SCALES,
    TURN_SECONDS,
    WEIGHED_AFTER_WORK_SECONDS,
    WhatIf,
    marks_of,
)
from recorded import recorded
from stack_distances import by_list, rates
from workbench import FakeClock

SALT = 0x1234_5678_9ABC_DEF0
BLOCK_BYTES, BLOCK_TOKENS = 2 << 20, 64
MOST_MIB = 4
PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.sampled_from((1, 2))), min_size=1, max_size=30
)


def key(*name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=32).digest()


def chain(ids: Sequence[object]) -> list[bytes]:
    return [key(*ids[: at + 1]) for at in range(len(ids))]


def looked_up(whatif: WhatIf, namespace: int, keys: Sequence[bytes], block_bytes: int = BLOCK_BYTES) -> bool:
    whatif.opened(namespace, block_bytes, BLOCK_TOKENS)
    return whatif.looked_up(namespace, keys)


def work_through(whatif: WhatIf) -> None:
    while whatif.step():
        pass


@given(prompts=PROMPTS, times=st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_with_nothing_sampled_out_the_curve_is_exact(prompts: list[tuple[list[int], int]], times: int) -> None:
    """Of two namespaces with blocks of two sizes; equal keys in both are two blocks."""
    whatif = WhatIf(FakeClock(), SALT)
    requests = []
    for ids, namespace in prompts * times:
        assert looked_up(whatif, namespace, chain(ids), namespace * BLOCK_BYTES)
        work_through(whatif)  # at once: look-ups that are worked through together are put together by namespace
        names = [(namespace, *ids[: at + 1]) for at in range(len(ids))]
        requests.append((names, namespace * BLOCK_BYTES))
    whatif.check()
    found = by_list(requests)
    told = whatif.snapshot(BLOCK_BYTES)
    ceiling = told.points[-1]
    assert [point.scale for point in told.points] == [*SCALES[:-1], None] and ceiling.size_bytes is None
    curve = whatif._turns[0].curve
    sizes = [*curve.edges(), inf]
    assert curve.hit_rates(sizes) == pytest.approx(rates(requests, found, sizes), abs=1e-12)
    blocks = [(names, 1) for names, _ in requests]
    (exact,) = rates(blocks, found, [inf])
    assert ceiling.token_hit_rate == pytest.approx(exact, abs=1e-12)
    assert curve.asked() == sum(len(names) * weight for names, weight in requests)
    assert told.asked_tokens == BLOCK_TOKENS * sum(len(names) for names, _ in requests) and told.sample_ratio == 1


def test_a_full_queue_drops_and_counts() -> None:
    whatif = WhatIf(FakeClock(), SALT)
    half = chain(range(8)) * (MOST_QUEUED_BLOCKS // 16)
    assert looked_up(whatif, 1, half) and looked_up(whatif, 1, half)
    assert not looked_up(whatif, 1, half[:1]), "as many blocks wait as may"
    whatif.check()
    told = whatif.snapshot(10**9)
    assert (told.lookups, told.dropped_lookups, whatif._dropped_blocks) == (3, 1, 1)
    work_through(whatif)
    assert looked_up(whatif, 1, half[:1]), "there is room again"
    assert not looked_up(whatif, 1, [bytes(32)] * (MOST_QUEUED_BLOCKS + 1)), "never fits"
    work_through(whatif)
    taken = sum(looked_up(whatif, 1, [key(at)]) for at in range(MOST_QUEUED_LOOKUPS + 7))
    assert taken == MOST_QUEUED_LOOKUPS
    whatif.check()
    work_through(whatif)
    assert "came too fast or were too long, and are left out" in whatif.snapshot(10**9).words
    assert looked_up(whatif, 1, []), "nothing is no look-up"
    assert whatif.step() == 0


def test_a_look_up_does_not_wait_for_work() -> None:
    """The clock is read in the middle of a step; here it stands still there."""
    reads, goes_on = threading.Event(), threading.Event()

    class SlowClock(FakeClock):
        def monotonic_seconds(self) -> float:
            if threading.current_thread() is not threading.main_thread():
                reads.set()
                assert goes_on.wait(30)
            return self.monotonic

    whatif = WhatIf(SlowClock(), SALT)
    worker = threading.Thread(target=whatif.step)
    worker.start()
    assert reads.wait(30)
    assert looked_up(whatif, 1, chain(range(4))), "in this thread, which would hang"
    goes_on.set()
    worker.join(30)
    assert not worker.is_alive() and whatif.step() == 4


def test_it_runs_until_it_is_stopped() -> None:
    whatif, stop = WhatIf(FakeClock(), SALT), threading.Event()
    worker = threading.Thread(target=whatif.run, args=(stop,))
    for _ in range(50):
        looked_up(whatif, 1, chain(range(4)))
    worker.start()
    while whatif.snapshot(10**9).asked_tokens < 200 * BLOCK_TOKENS:
        assert worker.is_alive()
    stop.set()
    worker.join(30)
    assert not worker.is_alive()
    assert whatif.snapshot(10**9).points[-1].token_hit_rate == pytest.approx(49 / 50)


@pytest.mark.parametrize(
    ("blocks_a_second", "most_lost", "steps"), [(120_000, 0, (10, 12)), (800_000, 160_000, (30, 60))]
)
def test_a_busy_queue_is_worked_through_in_time_and_a_quiet_one_seldom(
    blocks_a_second: int, most_lost: int, steps: tuple[int, int]
) -> None:
    """For two seconds. What is lost is lost at first, until it is known how much comes."""
    clock, waits = FakeClock(), list[float]()
    whatif = WhatIf(clock, SALT, 16)
    keys = [key(at) for at in range(8_000)]
    look_ups = [keys[at : at + 400] for at in range(0, len(keys), 400)]

    class TwoSeconds:
        def is_set(self) -> bool:
            return sum(waits) >= 2

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            for at in range(round(blocks_a_second * timeout / 400)):
                looked_up(whatif, 1, look_ups[at % len(look_ups)])
            waits.append(timeout)
            clock.monotonic += timeout
            return False

    whatif.run(TwoSeconds())
    told = whatif.snapshot(10**9)
    assert told.lookups * 400 >= 1.9 * blocks_a_second and whatif._dropped_blocks <= most_lost
    assert steps[0] <= len(waits) <= steps[1]


def test_what_was_counted_half_an_hour_ago_counts_half() -> None:
    clock = FakeClock()
    whatif = WhatIf(clock, SALT)
    looked_up(whatif, 1, chain(range(100)))
    work_through(whatif)
    before = whatif.snapshot(10**9)
    clock.monotonic += HALF_LIFE_SECONDS
    after = whatif.snapshot(10**9)
    assert after.asked_tokens == pytest.approx(before.asked_tokens / 2)


def test_estimators_take_turns_of_an_hour() -> None:
    """Each learns for an hour before it answers, and goes after two: what was before that is forgotten. What is asked
    for the first time since it began is not counted in its first half hour."""
    clock = FakeClock()
    whatif = WhatIf(clock, SALT)

    def an_hour(*name: object) -> None:
        for at in range(60):
            looked_up(whatif, 1, chain([*name, at % 6]))
            work_through(whatif)
            clock.monotonic += TURN_SECONDS / 60
        whatif.check()

    an_hour("old")
    assert whatif.snapshot(10**9).seconds == pytest.approx(TURN_SECONDS)
    an_hour("new")
    assert whatif.snapshot(10**9).seconds == pytest.approx(TURN_SECONDS), "the second one, which began an hour ago"
    an_hour("new")
    told = whatif.snapshot(10**9)
    assert told.seconds == pytest.approx(TURN_SECONDS)
    assert told.sampled_names <= 7, "those that were asked for in the last two hours"
    assert told.points[-1].token_hit_rate == pytest.approx(1.0), "each was asked for an hour ago as well"
    clock.monotonic += 10 * TURN_SECONDS
    assert whatif.snapshot(10**9).asked_tokens == pytest.approx(0, abs=1)


def test_nobody_without_the_salt_can_tell_what_is_sampled() -> None:
    """Neither by keys that differ little, nor in another namespace, nor with another salt."""
    keys = b"".join(at.to_bytes(8, "little") + bytes(24) for at in range(4_096))
    marks = marks_of(keys, SALT, 1)
    assert len(np.unique(marks)) == len(marks)
    for others in (marks_of(keys, SALT, 2), marks_of(keys, SALT + 1, 1)):
        assert not np.isin(marks, others).any()
        both = ((marks < 1 << 60) & (others < 1 << 60)).sum()
        assert both < 60, "a sixteenth of a sixteenth: 16"
    assert 180 < (marks < 1 << 60).sum() < 340, "a sixteenth: 256"


def test_the_words_say_how_far_to_trust_it() -> None:
    whatif = WhatIf(FakeClock(), SALT, LEAST_NAMES)
    assert whatif.snapshot(10**9).words == "nothing was looked up yet"
    assert whatif.snapshot(0).curve == []
    for at in range(100):
        looked_up(whatif, 1, chain([at, at]))
    work_through(whatif)
    words = whatif.snapshot(10**9).words
    assert words.startswith("estimated for LRU from 16 names") and "of so few names only" in words
    whatif = WhatIf(FakeClock(), SALT)
    looked_up(whatif, 1, chain(range(100)))
    work_through(whatif)
    words = whatif.snapshot(10**9).words
    assert words.startswith("estimated for LRU from 100 names, 100 % of all; of 100 sampled references only")
    for _ in range(20):
        looked_up(whatif, 1, chain(range(100)))
    work_through(whatif)
    assert "several points" not in whatif.snapshot(10**9).words, "all names, and references enough"


@pytest.mark.slow
def test_where_sampling_takes_much_of_the_work_fewer_names_are_sampled_and_later_more_again() -> None:
    clock = FakeClock()
    whatif = WhatIf(clock, SALT, 2_048)

    def ask_for(first: int) -> int:
        for at in range(first, first + 3_000):
            looked_up(whatif, 1, chain([at]))
            whatif.step()
        whatif.check()
        return whatif.snapshot(10**9).sampled_names

    def is_sampled_of(names: int) -> bool:
        return whatif.snapshot(10**9).sampled_names <= names

    assert ask_for(0) == 2_048
    whatif.weigh(0.004, 0.1, 5.0)
    assert ask_for(0) == 2_048, "less than a thousandth of a core"
    whatif.weigh(0.04, 10.0, 5.0)
    assert ask_for(0) == 2_048, "less than a hundredth of the work"
    for most in (1_024, 512, FEWEST_NAMES, FEWEST_NAMES):
        whatif.weigh(0.2, 10.0, 5.0)
        assert is_sampled_of(most) and ask_for(0) == most
    for names in (512, 1_024, 2_048, 2_048):
        whatif.weigh(0.0, 10.0, 5.0)
        clock.monotonic += TURN_SECONDS
        ask_for(0)  # of the next turn, which samples more
        clock.monotonic += TURN_SECONDS
        ask_for(0)  # and answers now
        assert whatif.snapshot(10**9).sampled_names <= names
    assert whatif.snapshot(10**9).sampled_names > FEWEST_NAMES


def test_a_worker_that_takes_far_too_much_samples_far_fewer_names_at_once() -> None:
    """Until then a sidecar that starts under load spends much of a core on it."""
    whatif = WhatIf(FakeClock(), SALT, 2_048)
    for at in range(3_000):
        looked_up(whatif, 1, chain([at]))
        whatif.step()
    whatif.weigh(0.5, 10.0, 5.0)  # five times what it may
    assert whatif.snapshot(10**9).sampled_names <= 2_048 // 5
    whatif.weigh(5.0, 10.0, 5.0)
    assert FEWEST_NAMES / 2 <= whatif.snapshot(10**9).sampled_names <= FEWEST_NAMES


def test_a_burst_of_work_is_weighed_at_once_and_a_little_every_five_seconds() -> None:
    """Weighed after five seconds alone, a sidecar that starts under load serves thousands of look-ups late."""
    clock, spent = FakeClock(), [0.0]
    whatif = WhatIf(clock, SALT, 2_048)
    for at in range(3_000):
        looked_up(whatif, 1, chain([at]))
        whatif.step()

    class Steps:
        """So many steps of 0.2 s, of which the worker takes some."""

        def __init__(self, steps: int, worker_seconds: float) -> None:
            self.left, self.seconds = steps, worker_seconds

        def is_set(self) -> bool:
            return not self.left

        def wait(self, timeout: float | None = None) -> bool:
            self.left -= 1
            clock.monotonic += 0.2
            spent[0] += self.seconds
            return False

    def names_after(steps: Steps) -> int:
        whatif.run(steps, lambda: (spent[0], 0.0))
        return whatif.snapshot(10**9).sampled_names

    assert names_after(Steps(24, 0.001)) == 2_048, "not weighed yet"
    assert names_after(Steps(1, 1.5 * WEIGHED_AFTER_WORK_SECONDS)) <= FEWEST_NAMES, "weighed at once"
    whatif = WhatIf(clock, SALT, 2_048)
    for at in range(3_000):
        looked_up(whatif, 1, chain([at]))
        whatif.step()
    assert 2_048 // 6 <= names_after(Steps(25, 0.001)) <= 2_048 // 4, "weighed after five seconds: five times too much"


def test_the_rate_of_tokens_is_what_was_asked_for_in_a_second() -> None:
    clock = FakeClock()
    whatif = WhatIf(clock, SALT)
    for seconds in range(5_000):
        looked_up(whatif, 1, chain([seconds % 7, 1]))
        clock.monotonic += 1.0
        work_through(whatif)
        if seconds in (100, 1_000, 3_000, 4_999):
            assert whatif.snapshot(10**9).tokens_per_second == pytest.approx(2 * BLOCK_TOKENS, rel=0.03), seconds


def test_a_namespace_has_to_be_opened_first() -> None:
    whatif = WhatIf(FakeClock(), SALT)
    assert not whatif.looked_up(3, chain([1]))
    whatif.opened(3, BLOCK_BYTES, BLOCK_TOKENS)
    assert whatif.looked_up(3, chain([1])) and whatif.looked_up(3, chain([1, 2]))
    work_through(whatif)
    told = whatif.snapshot(4 * BLOCK_BYTES)
    assert (told.lookups, told.asked_tokens) == (2, 3 * BLOCK_TOKENS)
    assert told.points[-1].token_hit_rate == pytest.approx(1 / 3)


@pytest.mark.slow
def test_memory_is_bounded_with_two_estimators_and_a_full_queue() -> None:
    random = np.random.default_rng(1)
    clock = FakeClock()
    tracemalloc.start()
    try:
        whatif = WhatIf(clock, SALT)
        most = 0
        for at in range(120):
            raw = random.bytes(32 * (MOST_QUEUED_BLOCKS if at % 40 == 0 else 300))
            looked_up(whatif, 1, [raw[start : start + 32] for start in range(0, len(raw), 32)])
            del raw
            tracemalloc.reset_peak()
            work_through(whatif)
            clock.monotonic += TURN_SECONDS / 55
            most = max(most, _held(tracemalloc.take_snapshot())) if at % 40 == 39 else most
        while looked_up(whatif, 1, [random.bytes(32) for _ in range(64)]):
            pass
        most = max(most, _held(tracemalloc.take_snapshot()))
    finally:
        tracemalloc.stop()
    whatif.check()
    assert whatif.snapshot(10**9).sampled_names >= 4_096
    print(f"{most / (1 << 20):.2f} MiB with two estimators and a full queue")
    assert most <= MOST_MIB << 20


def _held(snapshot: tracemalloc.Snapshot) -> int:
    files = [kvstore.insight.lru_curve.__file__, kvstore.insight.whatif.__file__]
    own = snapshot.filter_traces([tracemalloc.Filter(True, file) for file in files])
    return sum(one.size for one in own.statistics("filename"))


def copy_us() -> tuple[float, float]:
    """Of a block of 2 MiB out of more memory than the caches have: by itself, and with its digest."""
    source, target = (np.ones((64, BLOCK_BYTES), np.uint8) for _ in range(2))
    copied = verified = 0.0
    for _ in range(4):
        before = time.thread_time()
        for block in range(len(source)):
            target[block] = source[block]
        copied += time.thread_time() - before
        before = time.thread_time()
        for block in range(len(source)):
            target[block] = source[block]
            xxh3_128_digest(memoryview(target[block]))
        verified += time.thread_time() - before
    return tuple(1e6 * one / (4 * len(source)) for one in (copied, verified))  # type: ignore[return-value]


@pytest.mark.slow
def test_few_blocks_take_work() -> None:
    """What it costs is printed, beside a copy of a block and the digest of it; how many names are followed is bounded:
    the rest is the machine."""
    trace = recorded("mooncake_conversation").without_partial()
    clock = FakeClock()
    whatif = WhatIf(clock, SALT)
    chains, seconds = list(trace.chains()), (trace.timestamps_ms / 1000).tolist()
    for lap in range(3):
        keys = [key(block, lap if block else 0) for block in range(trace.distinct_blocks)]
        handed = worked = 0.0
        blocks = waiting = 0
        for names, second in zip(chains, seconds, strict=True):
            clock.monotonic = 1_000 + lap * TURN_SECONDS + second
            look_up = [keys[name] for name in names]
            before = time.thread_time()
            assert looked_up(whatif, 1, look_up)
            handed += time.thread_time() - before
            blocks += len(names)
            waiting += len(names)
            if waiting >= 2_000:
                before = time.thread_time()
                work_through(whatif)
                worked += time.thread_time() - before
                waiting = 0
        per_block = [1e6 * one / blocks for one in (handed, worked)]
        copied, verified = copy_us()
        print(
            f"hour {lap + 1}: {per_block[0]:.2f} us a block to hand over, {per_block[1]:.2f} us behind the answer: "
            f"{100 * sum(per_block) / copied:.2f} % of a copy of 2 MiB ({copied:.0f} us), "
            f"{100 * sum(per_block) / verified:.2f} % of one with its digest ({verified:.0f} us)"
        )
    whatif.check()
    told = whatif.snapshot(1e12)
    print(told.words)
    assert told.dropped_lookups == 0 and told.sampled_names <= NAMES + HOT_NAMES and told.sample_ratio < 0.03
