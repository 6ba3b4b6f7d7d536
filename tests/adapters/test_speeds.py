"""Speeds that are learned: from exact observations, from noise, from outliers, after changes, and from nonsense."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.cost import (
    HALF_LIFE_SECONDS,
    LEAST_STEP_TOKENS,
    LEAST_STEPS,
    PRIORS,
    LoadSpeed,
    PrefillSpeed,
    TierPrior,
)
from kvstore.block.account import HitTier

MEBIBYTE = 1 << 20
FINITE = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = st.integers(-(10**30), 10**30)


class Engine:
    """True costs of a step, in seconds: fixed, per token, per pair of tokens, per decoding request."""

    def __init__(self, random: Random, step: float, token: float, pair: float, decode: float) -> None:
        self.random = random
        self.costs = (step, token, pair, decode)

    def seconds(self, scheduled: list[tuple[int, int]], decoding: int) -> float:
        step, token, pair, decode = self.costs
        work = sum(token * count + pair * count * (start + count / 2) for start, count in scheduled)
        return step + work + decode * decoding

    def show(self, speed: PrefillSpeed, steps: int, noise: float = 0.0, hiccups: float = 0.0) -> None:
        """hiccups: the share of steps that take ten times as long."""
        for _ in range(steps):
            scheduled = [
                (self.random.choice([0, 0, 512, 4096, 16384]), self.random.randint(1, 2048))
                for _ in range(self.random.randint(1, 3))
            ]
            decoding = self.random.randint(0, 16)
            seconds = self.seconds(scheduled, decoding) * max(0.1, 1 + self.random.gauss(0, noise))
            if self.random.random() < hiccups:
                seconds *= 10
            speed.observe(scheduled, decoding, seconds)

    def marginal(self, start: int, stop: int) -> float:
        _, token, pair, _ = self.costs
        return token * (stop - start) + pair * (stop * stop - start * start) / 2


GPU = (8e-3, 30e-6, 2e-9, 0.1e-3)
CPU = (20e-3, 1e-3, 1e-7, 5e-3)
PROMPTS = [(0, 1000), (0, 8000), (512, 1024), (8000, 16000), (16000, 16500)]


# Prefill ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [GPU, CPU])
def test_exact_steps_give_the_costs_back(costs: tuple[float, float, float, float]) -> None:
    engine, speed = Engine(Random(1), *costs), PrefillSpeed()
    engine.show(speed, 60)
    for start, stop in PROMPTS:
        assert speed.more_seconds(start, stop) == pytest.approx(engine.marginal(start, stop), rel=0.03)
        whole = speed._coefficients()[0] + speed.more_seconds(start, stop)
        assert whole == pytest.approx(engine.seconds([(start, stop - start)], 0), rel=0.03)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("costs", [GPU, CPU])
def test_noise_and_hiccups_do_not_move_it_far(costs: tuple[float, float, float, float], seed: int) -> None:
    print("seed", seed)
    engine, speed = Engine(Random(seed), *costs), PrefillSpeed()
    engine.show(speed, 300, noise=0.05, hiccups=0.03)
    for start, stop in PROMPTS:
        assert speed.more_seconds(start, stop) == pytest.approx(engine.marginal(start, stop), rel=0.15)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_an_engine_that_changes_its_speed_is_followed(factor: float) -> None:
    before, speed = Engine(Random(2), *GPU), PrefillSpeed()
    before.show(speed, 200, noise=0.03)
    after = Engine(Random(3), *(factor * cost for cost in GPU))
    after.show(speed, 400, noise=0.03)
    assert speed.more_seconds(0, 8000) == pytest.approx(after.marginal(0, 8000), rel=0.15)


def test_what_is_told_takes_in_the_last_step() -> None:
    """Though outliers may be judged by a few steps less."""
    engine, speed = Engine(Random(5), *GPU), PrefillSpeed()
    engine.show(speed, 100)
    told = set()
    for _ in range(9):
        speed.observe([(0, 1024)], 0, 1.01 * engine.seconds([(0, 1024)], 0))
        told.add(speed.more_seconds(0, 1024))
    assert len(told) == 9


def test_nothing_is_said_before_enough_was_seen() -> None:
    engine, speed = Engine(Random(4), *GPU), PrefillSpeed()
    for _ in range(100):
        speed.observe([(0, LEAST_STEP_TOKENS - 1)], 0, engine.seconds([(0, LEAST_STEP_TOKENS - 1)], 0))
        speed.observe([], 8, engine.seconds([], 8))
    assert speed.more_seconds(0, 100) is None and not speed.is_learned
    for step in range(LEAST_STEPS):
        assert not speed.is_learned, step
        speed.observe([(0, 1024)], 0, engine.seconds([(0, 1024)], 0))
    assert speed.is_learned


def test_steps_that_are_all_alike_are_put_down_to_their_tokens() -> None:
    speed = PrefillSpeed()
    for _ in range(50):
        speed.observe([(0, 2048)], 0, 0.1)
    assert speed.more_seconds(0, 2048) == pytest.approx(0.1, rel=0.02)
    assert speed.more_seconds(0, 8192) == pytest.approx(0.4, rel=0.02)


def test_steps_without_prefill_only_tell_how_long_a_step_takes() -> None:
    speed = PrefillSpeed()
    for _ in range(100):
        speed.observe([], 32, 0.02)
    assert not speed.is_learned and speed.typical_step_seconds == pytest.approx(0.02)


@given(
    st.lists(st.tuples(st.lists(st.tuples(COUNTS, COUNTS), max_size=4), COUNTS, FINITE), max_size=40), COUNTS, COUNTS
)
def test_no_number_makes_prefill_fail_or_negative(
    steps: list[tuple[list[tuple[int, int]], int, float]], start: int, stop: int
) -> None:
    speed = PrefillSpeed()
    for scheduled, decoding, seconds in steps:
        speed.observe(scheduled, decoding, seconds)
        found = speed.more_seconds(start, stop)
        assert found is None or found >= 0.0
    assert min(speed._coefficients()) >= 0


@given(st.integers(0, 2**20), st.integers(0, 2**16), st.integers(0, 2**16))
def test_more_tokens_never_take_less(start: int, more: int, most: int) -> None:
    engine, speed = Engine(Random(6), *GPU), PrefillSpeed()
    engine.show(speed, 20, noise=0.3)
    one, two = speed.more_seconds(start, start + more), speed.more_seconds(start, start + more + most)
    assert one is not None and two is not None and 0 <= one <= two
    later = speed.more_seconds(start + most, start + most + more)
    assert later is not None and later >= one * (1 - 1e-12)  # attention: the same tokens further behind


# Loads ------------------------------------------------------------------------------------------------------------

TRUE = {HitTier.DRAM: TierPrior(1e-3, 6e9), HitTier.NVME: TierPrior(2e-3, 3e9), HitTier.REMOTE: TierPrior(10e-3, 0.4e9)}


def true_seconds(parts: list[tuple[HitTier, float]], slow: dict[HitTier, float] | None = None) -> float:
    return sum(
        (slow or {}).get(tier, 1.0) * (TRUE[tier].overhead_seconds + size / TRUE[tier].bytes_per_second)
        for tier, size in parts
    )


def show_loads(
    speed: LoadSpeed, random: Random, loads: int, start: float, slow: dict[HitTier, float] | None = None
) -> float:
    """A load every second, of one tier or of two. Returns the time behind them."""
    for _ in range(loads):
        start += 1.0
        tiers = random.choice([[HitTier.DRAM], [HitTier.DRAM, HitTier.NVME], [HitTier.NVME, HitTier.REMOTE]])
        parts = [(tier, random.uniform(1, 200) * MEBIBYTE) for tier in tiers]
        speed.observe(parts, true_seconds(parts, slow) * random.lognormvariate(0, 0.1), start)
    return start


DISK = [(HitTier.NVME, 100.0 * MEBIBYTE)]


@pytest.mark.parametrize("seed", range(5))
def test_each_tier_is_learned_also_from_loads_of_several(seed: int) -> None:
    print("seed", seed)
    speed = LoadSpeed()
    now = show_loads(speed, Random(seed), 120, 0.0)
    for tier in TRUE:
        for size in (20, 200):
            parts = [(tier, float(size * MEBIBYTE))]
            assert speed.seconds(parts, now) == pytest.approx(true_seconds(parts), rel=0.4)
    both = [(HitTier.DRAM, 50.0 * MEBIBYTE), (HitTier.NVME, 70.0 * MEBIBYTE)]
    assert speed.seconds(both, now) == pytest.approx(sum(speed.seconds([part], now) for part in both))


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_disk_is_noticed_within_loads_and_not_put_down_to_dram(seed: int) -> None:
    print("seed", seed)
    random, speed = Random(seed), LoadSpeed()
    now = show_loads(speed, random, 60, 0.0)
    for _ in range(4):
        now += 1.0
        parts = [(HitTier.DRAM, 50.0 * MEBIBYTE), (HitTier.NVME, 100.0 * MEBIBYTE)]
        speed.observe(parts, true_seconds(parts, {HitTier.NVME: 50.0}), now)
    memory = [(HitTier.DRAM, 100.0 * MEBIBYTE)]
    assert speed.seconds(DISK, now) > 20 * true_seconds(DISK)
    assert speed.seconds(memory, now) < 3 * true_seconds(memory)
    speed.observe(DISK, true_seconds(DISK), now + 1)
    assert speed.seconds(DISK, now + 1) < 3 * true_seconds(DISK), "good news is believed at once"


def test_bad_news_is_believed_step_by_step() -> None:
    speed = LoadSpeed()
    for second in range(20):
        speed.observe(DISK, true_seconds(DISK), float(second))
    slower = []
    for second in range(20, 24):
        speed.observe(DISK, 1000 * true_seconds(DISK), float(second))
        slower.append(speed.seconds(DISK, float(second)) / true_seconds(DISK))
    assert (
        slower[0] < 1.2 and 3 < slower[1] < 5 and 30 < slower[2] < 5 * 17 and slower[3] == pytest.approx(1000, rel=0.1)
    )


def test_beliefs_go_back_to_the_prior() -> None:
    speed = LoadSpeed()
    before = speed.seconds(DISK, 0.0)
    for second in range(10):
        speed.observe(DISK, 50 * before, float(second))
    slow = speed.seconds(DISK, 9.0)
    assert slow == pytest.approx(50 * before, rel=0.2)
    aged = [speed.seconds(DISK, 9.0 + halves * HALF_LIFE_SECONDS) for halves in range(12)]
    assert aged == sorted(aged, reverse=True)
    assert aged[1] == pytest.approx((slow * before) ** 0.5, rel=0.1)
    assert aged[-1] == pytest.approx(before, rel=0.01)
    later = 9.0 + 12 * HALF_LIFE_SECONDS
    assert not speed.hopes(HitTier.NVME, 9.0) and speed.hopes(HitTier.NVME, later)
    then, now, doubted = speed.of_tier(HitTier.NVME, 9.0), speed.of_tier(HitTier.NVME, later), speed.doubted_of_tier
    assert doubted(HitTier.NVME, later) == (max(then[0], now[0]), max(then[1], now[1]))
    speed.observe(DISK, slow, later)
    assert speed.seconds(DISK, later) == pytest.approx(slow), "as it was"


def test_what_was_waited_for_is_not_put_down_to_the_tier() -> None:
    speed = LoadSpeed()
    for second in range(50):
        speed.observe(DISK, true_seconds(DISK) + 1.0, float(second), queued_seconds=1.0)
    assert speed.seconds(DISK, 50.0) < 3 * true_seconds(DISK)


def test_what_the_engine_has_costs_nothing_and_teaches_nothing() -> None:
    speed = LoadSpeed()
    assert speed.seconds([(HitTier.ENGINE, 1e9)], 0.0) == 0.0
    speed.observe([(HitTier.ENGINE, 1e9)], 5.0, 0.0)
    parts = [(tier, 1e9) for tier in HitTier]
    assert speed.seconds(parts, 0.0) == LoadSpeed().seconds(parts, 0.0)


PARTS = st.lists(st.tuples(st.sampled_from(list(HitTier)), FINITE), max_size=4)


@given(st.lists(st.tuples(PARTS, FINITE, FINITE, FINITE), max_size=40), PARTS, FINITE)
def test_no_number_makes_loads_fail_or_negative(
    loads: list[tuple[list[tuple[HitTier, float]], float, float, float]],
    parts: list[tuple[HitTier, float]],
    now: float,
) -> None:
    speed = LoadSpeed()
    for observed, seconds, at, queued in loads:
        speed.observe(observed, seconds, at, queued)
        assert speed.seconds(parts, now) >= 0.0
        for tier in PRIORS:
            overhead, byte_seconds = speed.of_tier(tier, now)
            assert 0 < overhead < 1e9 and 0 < byte_seconds < 1e9
