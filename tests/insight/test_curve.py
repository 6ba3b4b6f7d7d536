"""The estimator: exact where nothing is sampled out, bounded whatever comes, and near enough on both public traces. And
its live side: look-ups are taken without waiting, worked through elsewhere, and read as a curve."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from hashlib import blake2b
from itertools import groupby
from math import inf
from timeit import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh3_128_digest

import kvstore.insight.curve
from kvstore.insight.curve import (
    FEWEST_NAMES,
    HALF_LIFE_SECONDS,
    HOT_NAMES,
    LEAST_NAMES,
    MARKS,
    MOST_QUEUED_BLOCKS,
    MOST_QUEUED_LOOKUPS,
    NAMES,
    SCALES,
    TURN_SECONDS,
    WEIGHED_AFTER_WORK_SECONDS,
    LruCurve,
    WhatIf,
    marks_of,
    mixed,
)
from kvstore.insight.whatif import curve_of, marks_of_blocks
from recorded import PUBLIC, recorded
from waiting import FakeClock

SALT = 0x1234_5678_9ABC_DEF0
BLOCK_BYTES, BLOCK_TOKENS = 2 << 20, 64
MOST_MIB = 4
SEEDS = range(10)
SIZES = {
    "mooncake_conversation": np.geomspace(1_000, 150_000, 10).tolist(),
    "mooncake_synthetic": np.geomspace(500, 40_000, 10).tolist(),
}
PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.sampled_from((1, 3, 64))), min_size=1, max_size=30
)
LARGE = 4
"""Times the size of others, that a third of all conversations have."""


# Exact stack distances of leaf-first LRU, in a way that shares nothing with the product ------------------------------

Request = tuple[Sequence[Hashable], int]
"""Names, the first block's first, and what each of them weighs."""


def distances_of(requests: Sequence[Request]) -> list[list[float]]:
    """What lies between two uses of a block, and itself; `inf` for a first use. A request is judged, then used from its
    end on. By sums in a tree."""
    room = sum(len(names) for names, _ in requests) + 1
    sums, used_at, now, total = [0] * (room + 1), dict[Hashable, int](), 0, 0

    def add(at: int, weight: int) -> None:
        at += 1
        while at <= room:
            sums[at] += weight
            at += at & -at

    found = []
    for names, weight in requests:
        told = []
        for name in names:
            if (at := used_at.get(name)) is None:
                told.append(inf)
                continue
            before = 0
            while at:
                before += sums[at]
                at &= at - 1
            told.append(float(total - before))
        found.append(told)
        for name in reversed(names):
            if (at := used_at.get(name)) is not None:
                add(at, -weight)
                total -= weight
            used_at[name] = now
            add(now, weight)
            total += weight
            now += 1
    return found


def rates(requests: Sequence[Request], found: Sequence[Sequence[float]], sizes: Sequence[float]) -> Any:
    """The share of the weight asked for that each size finds; `inf` finds all but first uses."""
    distances = np.concatenate([np.asarray(told, float) for told in found])
    weights = np.concatenate([np.full(len(names), weight, float) for names, weight in requests])
    return np.array([weights[(distances <= size) & (distances < inf)].sum() / weights.sum() for size in sizes])


# ---------------------------------------------------------------------------------------------------------------------


def named(prompts: Sequence[tuple[list[int], int]]) -> list[Request]:
    """Blocks named by their whole chain; those of one weight are of one namespace."""
    return [([(weight, *ids[: at + 1]) for at in range(len(ids))], weight) for ids, weight in prompts]


def marks(names: Sequence[Any]) -> Any:
    """The same in every process, as `hash` is not."""
    return np.array([xxh3_64_intdigest(repr(name).encode()) for name in names], np.uint64)


def told(curve: LruCurve, requests: Sequence[Request], at_once: int = 1) -> None:
    """Of one weight those that are told at once."""
    for first in range(0, len(requests), at_once):
        batch = requests[first : first + at_once]
        names = [name for request, _ in batch for name in request]
        curve.requests(marks(names), [len(request) for request, _ in batch], float(batch[0][1]), 16.0)


@given(prompts=PROMPTS, times=st.integers(1, 12), most=st.integers(1, 7))
@settings(max_examples=80, deadline=None)
def test_with_nothing_sampled_out_it_is_exact(prompts: list[tuple[list[int], int]], times: int, most: int) -> None:
    """At every edge of a bin, one request at a time or several; and each small distance has a bin of its own, so that
    these are told apart."""
    requests = named(prompts * times)
    curve = LruCurve()
    for _, alike in groupby(requests, key=lambda one: one[1]):
        told(curve, list(alike), most)
    curve.check()
    assert curve.threshold == MARKS
    found = distances_of(requests)
    edges = [*curve.edges(), inf]
    alike = [(names, 1) for names, _ in requests]
    assert curve.hit_rates(edges) == pytest.approx(rates(alike, found, edges), abs=1e-12)
    assert curve.asked_tokens == 16 * sum(len(names) for names, _ in requests)


def test_keys_that_are_no_chain_are_judged_as_exactly() -> None:
    requests: list[Request] = [(["y"], 1), (["x"], 1), (["x", "y"], 1)]
    curve = LruCurve()
    told(curve, requests[:1])
    told(curve, requests[1:], 2)
    assert curve.hit_rates([1, 2, inf]) == [*rates(requests, distances_of(requests), [1, 2, inf])] == [0.25, 0.5, 0.5]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_with_hot_names_it_is_exact_as_well(seed: int) -> None:
    """Prompts share all or a part of a long start. Some names become hot, and after the middle others do, while those
    are so no more."""
    random = np.random.default_rng(seed)
    requests: list[Request] = []
    for at in range(3_000):
        half, shared = at // 1_500, (40, 40, 20, 10)[int(random.integers(0, 4))]
        own = [("own", at, n) for n in range(int(random.zipf(2)) % 9)]
        requests.append(([*((half, n) for n in range(shared)), *own], 3))
    curve, hot = LruCurve(1 << 20), set()
    for first in range(0, len(requests), 7):
        told(curve, requests[first : first + 7], 7)
        curve.fade(0.99)
        hot.add(curve.hot_names)
    curve.check()
    assert {0, 40} <= hot and max(hot) > 40, "they come and go"
    again = LruCurve(1 << 20)
    told(again, requests)
    edges = [*again.edges(), inf]
    assert again.hot_names and again.hit_rates(edges) == pytest.approx(
        rates(requests, distances_of(requests), edges), abs=1e-12
    )


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 30), fade=st.floats(0.1, 1))
@settings(max_examples=15, deadline=None)
def test_it_is_bounded_whatever_comes(seed: int, fade: float) -> None:
    random = np.random.default_rng(seed)
    curve = LruCurve(LEAST_NAMES)
    for at in range(600):
        length = int(random.integers(1, 200 if at % 50 == 0 else 12))
        root = int(random.zipf(1.3)) % 50 + (at // 300) * 1000
        ids = [root, *random.integers(0, 1 << 20, length).tolist()]
        curve.requests(marks([(root, *ids[: n + 1]) for n in range(len(ids))]), [len(ids)], 1.0, 16.0)
        if at % 40 == 0:
            curve.fade(fade)
            curve.check()
    curve.check()
    assert curve.names <= LEAST_NAMES + HOT_NAMES and 0 < curve.sample_ratio < 1
    steps = curve.hit_rates([*np.geomspace(1, 1e6, 60).tolist(), inf])
    assert steps == sorted(steps) and steps[0] >= 0 and steps[-1] <= 1


def test_a_request_of_all_lengths_fits() -> None:
    curve = LruCurve(LEAST_NAMES)
    long = marks(range(20_000))
    for _ in range(3):
        curve.requests(long, [len(long)], 1.0, 16.0)
        curve.requests(marks([-1, -2]), [0, 2, 0], 1.0, 16.0)
        curve.check()
    assert curve.hit_rates([inf])[0] == pytest.approx(2 / 3, abs=0.01)
    empty = LruCurve()
    empty.requests(marks([]), [], 1.0, 16.0)
    assert empty.hit_rates([1.0, inf]) == [0.0, 0.0] and empty.edges() == []


def test_what_is_hot_is_always_taken_and_is_as_others_later() -> None:
    """One prompt begins all requests; its blocks are found whatever the sample has, and are followed no more when they
    come no more."""
    random = np.random.default_rng(3)
    curve = LruCurve(LEAST_NAMES)
    prompt = [("system", at) for at in range(10)]
    for at in range(1_000):
        names = [*prompt, *(("own", at, n) for n in range(int(random.integers(1, 10))))]
        curve.requests(marks(names), [len(names)], 1.0, 16.0)
    assert curve.hot_names == len(prompt)
    exact = 10 * 999 * 16 / curve.asked_tokens
    assert curve.hit_rates([100.0])[0] == pytest.approx(exact, abs=0.03)
    for at in range(12_000):
        curve.requests(marks([("other", at)]), [1], 1.0, 16.0)
        if at % 100 == 0:
            curve.fade(0.9)
    curve.check()
    assert curve.hot_names == 0


def test_hot_names_are_looked_for_in_requests_of_all_kinds() -> None:
    """Two engines ask in turns, each behind a system prompt of its own."""
    curve = LruCurve(LEAST_NAMES)
    told(curve, [([("system", at % 2)], 1) for at in range(50_000)], 500)
    assert curve.hot_names == 2


@pytest.mark.slow
def test_the_sample_stands_for_all() -> None:
    """Of a made up load: documents that are asked for evenly, behind one prompt, with questions of their own."""
    random = np.random.default_rng(4)
    requests: list[Request] = []
    for at in range(8_000):
        document = int(random.integers(0, 2_000))
        names = ["prompt", *((document, part) for part in range(4)), *((at, part) for part in range(2))]
        requests.append((names, 1))
    sizes = np.geomspace(500, 40_000, 10).tolist()
    whole = rates(requests, distances_of(requests), sizes)
    for names in (512, 2_048):
        curve = LruCurve(names)
        told(curve, requests)
        off = np.abs(np.array(curve.hit_rates(sizes)) - whole)
        print(f"{names} names: MAE {off.mean():.4f}, worst {off.max():.4f}, sample {curve.sample_ratio:.3f}")
        assert curve.sample_ratio < 0.2 and off.mean() <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_long_prompt_of_every_second_request_bends_nothing(seed: int) -> None:
    """As an agent's: 200 blocks, 80 % of all references. Hot names are looked for in requests that are not all of one
    kind, whatever their order."""
    random = np.random.default_rng(1)
    requests: list[Request] = []
    for at in range(4_000):
        document = (at % 2, int(random.integers(0, 1_000)))
        names = [*range(200 * (at % 2)), *((document, part) for part in range(20)), *((at, part) for part in range(5))]
        requests.append((names, 1))
    curve = LruCurve(1_024)
    for names, _ in requests:
        curve.requests(mixed(marks(names), seed), [len(names)], 1.0, 16.0)
    sizes = np.geomspace(500, 30_000, 10).tolist()
    off = np.abs(np.array(curve.hit_rates(sizes)) - rates(requests, distances_of(requests), sizes))
    print(f"seed {seed}: MAE {off.mean():.4f}, worst {off.max():.4f}, {curve.hot_names} hot names")
    assert curve.hot_names == 200 and off.mean() <= 0.01


@pytest.mark.parametrize("seed", range(30))
def test_names_that_are_in_a_request_twice_break_nothing(seed: int) -> None:
    """A client may name a block twice: what a look-up found is not compared."""
    random = np.random.default_rng(seed)
    curve = LruCurve(int(random.choice((LEAST_NAMES, 64, 300))))
    pool = random.integers(0, MARKS - 1, int(random.choice((3, 40, 400))), np.uint64, endpoint=True)
    for _ in range(40):
        lengths = random.choice((0, 1, 5, 50), int(random.choice((1, 4)))).tolist()
        curve.requests(random.choice(pool, sum(lengths)), lengths, 64.0, 16.0)
        curve.check()


@cache
def exact(name: str, is_weighted: bool) -> tuple[list[Request], list[list[float]]]:
    """Full blocks, and their distances. Weighted: those of a third of the conversations, by the first block that not
    all have, are of another namespace, and `LARGE` times as large."""
    requests: list[Request] = []
    for chain in recorded(name).without_partial().chains():
        conversation = chain[min(1, len(chain) - 1)] if chain else 0
        is_large = is_weighted and int(mixed(np.array([conversation], np.uint64), 9)[0]) % 3 == 0
        requests.append(([-1 - block for block in chain], LARGE) if is_large else (chain, 1))
    return requests, distances_of(requests)


def errors_of(name: str, seed: int, names: int = NAMES, *, is_weighted: bool = False) -> tuple[float, float, float]:
    """(mean absolute error over the sizes, the largest one, error of the ceiling)"""
    requests, found = exact(name, is_weighted)
    trace = recorded(name).without_partial()
    mean_weight = sum(weight * len(names) for names, weight in requests) / len(trace.blocks)
    if is_weighted:
        small = np.zeros(trace.distinct_blocks, np.uint64)
        small[trace.blocks] = marks_of_blocks(trace, seed)
        large, curve = mixed(small, 77), LruCurve(names)
        for chain, weight in requests:
            blocks = np.array(chain, int)
            its = small[blocks] if weight == 1 else large[-1 - blocks]
            curve.requests(its, [len(chain)], float(weight), float(weight))
    else:
        curve = curve_of(trace, names, seed)
        curve.check()
    sizes = [*(size * mean_weight for size in SIZES[name]), inf]
    off = np.array(curve.hit_rates(sizes)) - rates(requests, found, sizes)
    return float(np.abs(off[:-1]).mean()), float(np.abs(off[:-1]).max()), float(off[-1])


@pytest.mark.parametrize("is_weighted", [False, True], ids=["blocks", "bytes"])
@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.slow
def test_it_is_near_enough_with_any_of_ten_seeds(name: str, is_weighted: bool) -> None:
    told = [errors_of(name, seed, is_weighted=is_weighted) for seed in SEEDS]
    for seed, (mean, worst, ceiling) in zip(SEEDS, told, strict=True):
        print(f"seed {seed}: MAE {mean:.4f}, worst {worst:.4f}, ceiling {ceiling:+.4f}")
    means, worsts, ceilings = np.array(told).T
    print(f"MAE mean {means.mean():.4f}, worst seed {means.max():.4f}; worst point {worsts.max():.4f}; ", end="")
    print(f"ceiling {np.abs(ceilings).mean():.4f}, worst seed {np.abs(ceilings).max():.4f}")
    assert means.max() <= 0.01 and np.abs(ceilings).max() <= 0.01


@pytest.mark.parametrize(("names", "most"), [(1_024, 0.018), (256, 0.036)])
@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.slow
def test_with_fewer_names_it_is_off_by_more(name: str, names: int, most: float) -> None:
    means = [errors_of(name, seed, names)[0] for seed in SEEDS]
    print(f"{names} names: MAE mean {np.mean(means):.4f}, worst seed {max(means):.4f}")
    assert max(errors_of(name, seed)[0] for seed in SEEDS) < max(means) <= most


# A sidecar's look-ups ------------------------------------------------------------------------------------------------


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


def ask_for(whatif: WhatIf, names: int) -> int:
    """Each by itself. Returns how many names are followed then."""
    for at in range(names):
        looked_up(whatif, 1, chain([at]))
        whatif.step()
    return whatif.snapshot(10**9).sampled_names


def test_live_the_curve_is_exact_as_well_with_nothing_sampled_out() -> None:
    """Of two namespaces with blocks of two sizes; equal keys in both are two blocks."""
    random = np.random.default_rng(2)
    whatif = WhatIf(FakeClock(), SALT)
    requests = []
    for _ in range(300):
        ids, namespace = random.integers(0, 3, int(random.integers(1, 7))).tolist(), int(random.integers(1, 3))
        assert looked_up(whatif, namespace, chain(ids), namespace * BLOCK_BYTES)
        work_through(whatif)  # at once: look-ups that are worked through together are put together by namespace
        requests.append(([(namespace, *ids[: at + 1]) for at in range(len(ids))], namespace * BLOCK_BYTES))
    whatif.check()
    told, found = whatif.snapshot(BLOCK_BYTES), distances_of(requests)
    ceiling = told.points[-1]
    assert [point.scale for point in told.points] == [*SCALES[:-1], None] and ceiling.size_bytes is None
    blocks = [(names, 1) for names, _ in requests]
    shown = [point for point in told.curve if point.token_hit_rate]
    sizes = [*(point.size_bytes for point in shown), inf]
    estimated = [*(point.token_hit_rate for point in shown), ceiling.token_hit_rate]
    assert estimated == pytest.approx(rates(blocks, found, sizes), abs=1e-12)
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
    words = np.arange(4_096, dtype=np.uint64)
    marks = marks_of(words, SALT, 1)
    assert len(np.unique(marks)) == len(marks)
    for others in (marks_of(words, SALT, 2), marks_of(words, SALT + 1, 1)):
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

    assert ask_for(whatif, 3_000) == 2_048
    whatif.weigh(0.004, 0.1, 5.0)
    assert ask_for(whatif, 3_000) == 2_048, "less than a thousandth of a core"
    whatif.weigh(0.04, 10.0, 5.0)
    assert ask_for(whatif, 3_000) == 2_048, "less than a hundredth of the work"
    for most in (1_024, 512, FEWEST_NAMES, FEWEST_NAMES):
        whatif.weigh(0.2, 10.0, 5.0)
        assert whatif.snapshot(10**9).sampled_names <= most == ask_for(whatif, 3_000)
        whatif.check()
    for names in (512, 1_024, 2_048, 2_048):
        whatif.weigh(0.0, 10.0, 5.0)
        for _ in range(2):  # the next turn samples more, and answers in the one behind it
            clock.monotonic += TURN_SECONDS
            told = ask_for(whatif, 3_000)
            whatif.check()
        assert told <= names
    assert told > FEWEST_NAMES


def test_a_worker_that_takes_far_too_much_samples_far_fewer_names_at_once() -> None:
    """Until then a sidecar that starts under load spends much of a core on it."""
    whatif = WhatIf(FakeClock(), SALT, 2_048)
    ask_for(whatif, 3_000)
    whatif.weigh(0.5, 10.0, 5.0)  # five times what it may
    assert whatif.snapshot(10**9).sampled_names <= 2_048 // 5
    whatif.weigh(5.0, 10.0, 5.0)
    assert FEWEST_NAMES / 2 <= whatif.snapshot(10**9).sampled_names <= FEWEST_NAMES


def test_where_few_names_take_too_much_work_hot_ones_are_followed_less_often_to_the_same_curve() -> None:
    """Two prompts that are asked for all the time, each time with other questions."""
    prompts, questions = [chain([at, *range(59)]) for at in range(2)], [key(at) for at in range(3_000)]
    rates, seconds = [], []
    for times in (0, 6):
        random, whatif = np.random.default_rng(5), WhatIf(FakeClock(), SALT, FEWEST_NAMES)
        for _ in range(times):
            whatif.weigh(5.0, 10.0, 5.0)
        before = time.thread_time()
        for at in range(20_000):
            asked = random.integers(len(questions), size=4).tolist()
            looked_up(whatif, 1, [*prompts[at % 2], *(questions[one] for one in asked)])
            if at % 100 == 0:
                work_through(whatif)
        seconds.append(time.thread_time() - before)
        told = [whatif.snapshot(blocks * BLOCK_BYTES) for blocks in (64, 100, 3_000)]
        rates.append([point.token_hit_rate for one in told for point in one.points])
    assert rates[1] == pytest.approx(rates[0], abs=0.01) and seconds[1] < seconds[0] / 2


def test_a_burst_of_work_is_weighed_at_once_and_a_little_every_five_seconds() -> None:
    """Weighed after five seconds alone, a sidecar that starts under load serves thousands of look-ups late."""
    clock, spent = FakeClock(), [0.0]
    whatif = WhatIf(clock, SALT, 2_048)
    ask_for(whatif, 3_000)

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
    ask_for(whatif, 3_000)
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
    own = snapshot.filter_traces([tracemalloc.Filter(True, kvstore.insight.curve.__file__)])
    return sum(one.size for one in own.statistics("filename"))


@pytest.mark.slow
def test_few_blocks_take_work() -> None:
    """What it costs is printed, beside a copy of a block and the digest of it; how many names are followed is bounded:
    the rest is the machine."""
    source, target = (np.ones((64, BLOCK_BYTES), np.uint8) for _ in range(2))  # more than the caches have

    def copy(reads: Callable[[memoryview], object] = len) -> None:
        for row, into in zip(source, target, strict=True):
            into[:] = row
            reads(memoryview(into))

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
        copied, verified = (
            1e6 * min(repeat(partial(copy, one), number=1, repeat=3)) / 64 for one in (len, xxh3_128_digest)
        )
        print(
            f"hour {lap + 1}: {per_block[0]:.2f} us a block to hand over, {per_block[1]:.2f} us behind the answer: "
            f"{100 * sum(per_block) / copied:.2f} % of a copy of 2 MiB ({copied:.0f} us), "
            f"{100 * sum(per_block) / verified:.2f} % of one with its digest ({verified:.0f} us)"
        )
    whatif.check()
    told = whatif.snapshot(1e12)
    print(told.words)
    assert told.dropped_lookups == 0 and told.sampled_names <= NAMES + HOT_NAMES and told.sample_ratio < 0.03
