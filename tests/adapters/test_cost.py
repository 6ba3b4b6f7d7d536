"""Speeds that are learned, from exact observations, from noise, from outliers, after changes, and from nonsense; the
best place to stop, what is counted, and a simulated engine whose disk is throttled.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.cost import (
    EXPLORE_EVERY,
    HALF_LIFE_SECONDS,
    LEAST_STEP_TOKENS,
    LEAST_STEPS,
    PRIORS,
    STEPS_AHEAD,
    SYNCHRONOUS_MS,
    CostModel,
    Decision,
    LoadChoice,
    LoadSpeed,
    PrefillSpeed,
    StepWork,
    TierPrior,
)
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.client.handle import Match

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


# How much to load -----------------------------------------------------------------------------------------------------


TIERS = [HitTier.HBM, HitTier.DRAM, HitTier.NVME, HitTier.REMOTE]
BYTES_PER_TOKEN = 128 * 1024.0

Runs = list[tuple[HitTier, int]]


def learned(step: float, token: float, pair: float) -> PrefillSpeed:
    """Speeds learned from exact steps of an engine with these costs, in seconds."""
    speed = PrefillSpeed()
    for start, count in [(0, 128), (0, 2048), (8192, 2048), (0, 512), (30000, 1024), (4096, 200)] * 5:
        speed.observe([(start, count)], 0, step + token * count + pair * count * (start + count / 2))
    return speed


def model_of(
    speeds: dict[HitTier, TierPrior] | None = None, prefill: PrefillSpeed | None = None, explore_every: int = 10**9
) -> CostModel:
    prefill = learned(8e-3, 40e-6, 2e-9) if prefill is None else prefill
    return CostModel(prefill, LoadSpeed(speeds or PRIORS), bytes_per_token=BYTES_PER_TOKEN, explore_every=explore_every)


def total_seconds(model: CostModel, local: int, runs: Runs, prompt: int, stop: int, waiting: float) -> float:
    """Of loading up to `stop` and computing the rest, added up token by token of each run."""
    parts: Runs = []
    position = local
    for tier, tokens in runs:
        if position < stop:
            parts.append((tier, min(tokens, stop - position)))
        position += tokens
    rest = model.prefill.more_seconds(stop, prompt)
    assert rest is not None
    return loading(model, parts) + rest + (waiting if stop > local else 0.0)


def loading(model: CostModel, runs: Runs) -> float:
    return model.loads.seconds([(tier, tokens * BYTES_PER_TOKEN) for tier, tokens in runs], 0.0)


@dataclass(frozen=True)
class Case:
    local: int
    runs: Runs
    prompt: int
    block: int
    queued: float
    others: bool

    def choose(self, model: CostModel, now: float = 0.0) -> Decision:
        return model.choose(self.local, self.runs, self.prompt, self.block, self.queued, self.others, now)

    def waiting(self, model: CostModel) -> float:
        load_ms = 1e3 * (self.queued + loading(model, self.within_prompt()))
        late = model.prefill.typical_step_seconds / 2 if self.others and load_ms > SYNCHRONOUS_MS else 0.0
        return self.queued + late

    def within_prompt(self) -> Runs:
        """What of the runs lies in whole blocks of the prompt."""
        stop = min(self.local + sum(tokens for _, tokens in self.runs), self.prompt) // self.block * self.block
        left, cut = stop - self.local, []
        for tier, tokens in self.runs:
            cut.append((tier, max(0, min(tokens, left))))
            left -= tokens
        return cut

    def boundaries(self) -> list[int]:
        """Where loading may stop; the first is where it begins."""
        found = min(self.local + sum(tokens for _, tokens in self.runs), self.prompt)
        return [self.local, *range((self.local // self.block + 1) * self.block, found + 1, self.block)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block = draw(st.sampled_from([64, 128, 192]))
    local = draw(st.integers(0, 4096))
    runs = draw(st.lists(st.tuples(st.sampled_from(TIERS), st.integers(0, 4096)), max_size=5))
    found = local + sum(tokens for _, tokens in runs)
    prompt = found + draw(st.integers(-100, 4000))
    queued = draw(st.sampled_from([0.0, 0.001, 0.05, 1.0]))
    return Case(local, runs, max(prompt, local), block, queued, draw(st.booleans()))


ANY_RUNS = st.lists(st.tuples(st.sampled_from(list(HitTier)), COUNTS), max_size=6)
ANY_CASE = st.builds(Case, COUNTS, ANY_RUNS, COUNTS, COUNTS, FINITE, st.booleans())
SPEEDS = st.fixed_dictionaries(
    {tier: st.builds(TierPrior, st.floats(1e-5, 0.1), st.floats(1e7, 1e11)) for tier in TIERS}
)
PREFILLS = [learned(8e-3, 40e-6, 2e-9), learned(20e-3, 1e-3, 1e-7), learned(1e-3, 1e-6, 0.0), learned(0.0, 1e-6, 5e-9)]


# The choice -------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(cases(), SPEEDS, st.sampled_from(PREFILLS))
def test_no_block_boundary_would_be_better(case: Case, speeds: dict[HitTier, TierPrior], prefill: PrefillSpeed) -> None:
    """Whatever waits before it, and however late a busy engine notices its end. Nothing found is no decision."""
    model = model_of(speeds, prefill)
    decision = case.choose(model)
    stop, boundaries = case.local + decision.load_tokens, case.boundaries()
    assert stop in boundaries and stop + decision.declined_tokens == boundaries[-1]
    totals = {
        boundary: total_seconds(model, case.local, case.runs, case.prompt, boundary, case.waiting(model))
        for boundary in boundaries
    }
    best = min(totals.values())
    assert totals[stop] <= best * (1 + 1e-9) + 1e-12  # "loading nothing" and "loading all" are among them
    assert decision.is_learned and not decision.is_explored
    spent = decision.predicted_load_ms / 1e3 + (prefill.more_seconds(stop, case.prompt) or 0.0)
    assert spent == pytest.approx(totals[stop], rel=1e-9, abs=1e-12)
    assert sum(size for _, size in decision.parts) == decision.load_tokens * BYTES_PER_TOKEN
    model.finished(decision, 1.0, 0.0)
    counts = model.counts
    assert (counts["decisions"], counts["finished"]) == (len(boundaries) > 1, decision.load_tokens > 0)


@given(ANY_CASE, FINITE, FINITE, COUNTS)
def test_no_number_makes_it_fail(case: Case, now: float, actual: float, loaded: int) -> None:
    for prefill in (PrefillSpeed(), PREFILLS[0]):
        model = model_of(prefill=prefill, explore_every=1)
        decision = case.choose(model, now)
        assert decision.load_tokens >= 0 and decision.declined_tokens >= 0 and decision.predicted_load_ms >= 0
        model.finished(decision, actual, now, loaded)
        model.finished(decision, actual, now)


# What is counted --------------------------------------------------------------------------------------------------


def test_what_was_never_learned_is_loaded_and_counted() -> None:
    model = model_of({**PRIORS, HitTier.DRAM: TierPrior(10.0, 1.0)}, PrefillSpeed())
    decision = Case(0, [(HitTier.DRAM, 1000)], 1200, 64, 0.0, False).choose(model)
    assert decision.load_tokens == 960 and not decision.is_learned
    model.finished(decision, 10.0, 1.0)
    counts = model.counts
    assert (counts["decisions"], counts["unlearned"], counts["finished"], counts["judged"]) == (1, 1, 1, 0)
    assert counts["regret_ms"] == counts["saved_ms"] == 0.0


def test_regret_and_savings_are_against_computing_the_same_tokens() -> None:
    model = model_of()
    case = Case(0, [(HitTier.DRAM, 4096)], 5000, 64, 0.0, False)
    computing = model.prefill.more_seconds(0, 4096)
    assert computing is not None
    decision = case.choose(model)
    model.finished(decision, computing + 0.5, 1.0)
    model.finished(decision, computing - 0.1, 2.0)
    assert model.counts["regret_ms"] == pytest.approx(500) and model.counts["saved_ms"] == pytest.approx(100)
    model.finished(decision, computing, 3.0, loaded_tokens=0)
    assert model.counts["regret_ms"] == pytest.approx(500 + 1e3 * computing), "nothing came, all of the time was lost"
    assert model.counts["judged"] == 3


def test_a_load_that_was_cut_short_early_does_not_look_fast() -> None:
    model = model_of()
    decision = Case(0, [(HitTier.DRAM, 4096)], 5000, 64, 0.0, False).choose(model)
    before = model.loads.seconds(decision.parts, 0.0)
    model.finished(decision, 1e-4, 0.0, loaded_tokens=64)
    assert model.loads.seconds(decision.parts, 0.0) == before
    model.finished(decision, 1.0, 0.0, loaded_tokens=64)
    assert model.loads.seconds(decision.parts, 0.0) > 1.5 * decision.predicted_load_ms / 1e3


def test_one_decision_in_many_probes_what_it_would_decline() -> None:
    slow = {**PRIORS, HitTier.NVME: TierPrior(1e-3, 0.5e9)}
    model = model_of(slow, explore_every=EXPLORE_EVERY)
    case = Case(0, [(HitTier.DRAM, 1024), (HitTier.NVME, 8192)], 12000, 64, 0.0, False)
    decisions = [case.choose(model) for _ in range(3 * EXPLORE_EVERY)]
    explored = [number for number, decision in enumerate(decisions, 1) if decision.is_explored]
    assert explored == [EXPLORE_EVERY, 2 * EXPLORE_EVERY, 3 * EXPLORE_EVERY]
    assert model.counts["explored"] == 3
    computing = model.prefill.more_seconds(0, case.prompt)
    assert computing is not None
    for number, decision in enumerate(decisions, 1):
        assert decision.load_tokens + decision.declined_tokens == 9216
        if number in explored:
            assert decision.load_tokens >= 1024 + 64 and decision.load_tokens % 64 == 0
            assert decision.predicted_load_ms <= 1e3 * computing
        else:
            assert decision.load_tokens == 1024


def test_a_prefix_that_is_wholly_declined_is_tried_by_one_block_if_more_takes_too_long() -> None:
    model = model_of({**PRIORS, HitTier.REMOTE: TierPrior(5.0, 1e6)}, explore_every=1)
    decision = Case(0, [(HitTier.REMOTE, 640)], 700, 64, 0.0, False).choose(model)
    assert decision.is_explored and decision.load_tokens == 64 and decision.declined_tokens == 576


# A throttled disk -------------------------------------------------------------------------------------------------

DRAM_TRUE, NVME_TRUE = TierPrior(1e-3, 6e9), TierPrior(2e-3, 5e9)
STEP, TOKEN, PAIR = 10e-3, 45e-6, 1.5e-9  # an 8B model on one GPU: break-even near 3 GB/s
THROTTLE = 50.0
NOISE = 0.05


@dataclass
class Request:
    """What one request took, and would have taken with everything loaded, and with nothing."""

    seconds: float
    if_loaded: float
    if_computed: float
    decision: Decision

    @property
    def excess(self) -> float:
        """Beyond the better of the two, as a share of computing."""
        return (self.seconds - min(self.if_loaded, self.if_computed)) / self.if_computed


class Simulation:
    """One engine, one request after another, a clock of its own. Found: DRAM first, and NVMe behind it."""

    def __init__(self, seed: int, seconds_between: float) -> None:
        print("seed", seed)
        self.random = Random(seed)
        self.between = seconds_between
        self.now = 0.0
        self.prefill = PrefillSpeed()
        self.model = CostModel(self.prefill, LoadSpeed(), bytes_per_token=BYTES_PER_TOKEN)

    def run(self, requests: int, throttle: float) -> list[Request]:
        return [self._request(throttle) for _ in range(requests)]

    def _request(self, throttle: float) -> Request:
        random, model = self.random, self.model
        self.now += random.expovariate(1 / self.between)
        in_dram, on_disk = random.choice([0, 0, 512, 2048]), random.randint(8, 128) * 64
        prompt = in_dram + on_disk + random.randint(64, 1024)
        runs = [(HitTier.DRAM, in_dram), (HitTier.NVME, on_disk)]
        noise = [random.lognormvariate(0, NOISE) for _ in range(2)]
        decision = model.choose(0, runs, prompt, 64, 0.0, False, self.now)

        def load(tokens: int) -> float:
            dram, disk = min(tokens, in_dram), max(0, tokens - in_dram)
            seconds = DRAM_TRUE.overhead_seconds + dram * BYTES_PER_TOKEN / DRAM_TRUE.bytes_per_second if dram else 0.0
            if disk:
                size = disk * BYTES_PER_TOKEN
                seconds += throttle * (NVME_TRUE.overhead_seconds + size / NVME_TRUE.bytes_per_second)
            return seconds * noise[0]

        def compute(start: int) -> float:
            return (STEP + TOKEN * (prompt - start) + PAIR * (prompt * prompt - start * start) / 2) * noise[1]

        found, loaded = in_dram + on_disk, decision.load_tokens
        model.finished(decision, load(loaded), self.now)
        self.prefill.observe([(loaded, prompt - loaded)], 0, compute(loaded))
        return Request(load(loaded) + compute(loaded), load(found) + compute(found), compute(0), decision)


def percentile(requests: list[Request], share: float) -> float:
    return sorted(request.excess for request in requests)[int(share * (len(requests) - 1))]


def declined_share(requests: list[Request]) -> float:
    """Of the tokens on the disk that were not brought by exploring."""
    told = [request.decision for request in requests if not request.decision.is_explored]
    declined = sum(decision.declined_tokens for decision in told)
    from_disk = sum(size for decision in told for tier, size in decision.parts if tier is HitTier.NVME)
    return declined / (declined + from_disk / BYTES_PER_TOKEN)


@pytest.mark.slow
@pytest.mark.parametrize("seconds_between", [0.05, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_throttled_disk_never_makes_it_slower_than_computing(seed: int, seconds_between: float) -> None:
    simulation = Simulation(seed, seconds_between)
    simulation.run(30, throttle=1.0)
    healthy = simulation.run(400, throttle=1.0)
    noticing = simulation.run(6, throttle=THROTTLE)
    slow = simulation.run(1500, throttle=THROTTLE)
    noticing_again = simulation.run(3 * EXPLORE_EVERY, throttle=1.0)
    recovered = simulation.run(400, throttle=1.0)

    for phase in (healthy, slow, recovered):
        assert percentile(phase, 0.95) <= 0.05  # of computing: what noise in both speeds makes of near ties
    assert declined_share(healthy) < 0.02
    assert declined_share(slow) > 0.97
    assert declined_share(recovered) < 0.02
    assert declined_share(noticing_again[-EXPLORE_EVERY // 2 :]) < 0.5
    # What the throttled disk costs in all: the explored ones, at most twice computing each.
    computing = sum(request.if_computed for request in slow)
    assert sum(request.seconds for request in slow) <= computing * (1 + 1 / EXPLORE_EVERY + 0.01)
    explored = [request for request in slow if request.decision.is_explored]
    assert len(slow) // EXPLORE_EVERY - 1 <= len(explored) <= len(slow) // EXPLORE_EVERY + 1
    # The loads that told it, which nothing can spare.
    assert sum(request.seconds > 1.5 * request.if_computed for request in noticing) <= 4
    assert simulation.model.counts["saved_ms"] > 0 and simulation.model.counts["regret_ms"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_what_is_asked_seldom_probes_a_slow_tier_more_often(seed: int) -> None:
    simulation = Simulation(seed, seconds_between=100.0)
    simulation.run(60, throttle=1.0)
    simulation.run(12, throttle=THROTTLE)
    slow = simulation.run(800, throttle=THROTTLE)
    computing = sum(request.if_computed for request in slow)
    assert sum(request.seconds for request in slow) <= computing * (1 + 1 / EXPLORE_EVERY + 0.01)
    assert percentile(slow, 0.95) <= 1.0, "a probe takes no longer than computing"
    assert declined_share(slow) > 0.97


@given(FINITE)
def test_what_is_left_of_a_load(elapsed: float) -> None:
    model = model_of()
    decision = Case(0, [(HitTier.DRAM, 4096)], 5000, 64, 0.02, False).choose(model)
    predicted = decision.predicted_load_ms / 1e3
    left = decision.remaining_seconds(elapsed)
    assert left >= 0
    if elapsed <= 0.02:
        assert left == pytest.approx(predicted - 0.02), "its own time, however long the others take"
    elif elapsed < predicted:
        assert left == pytest.approx(predicted - elapsed)
    else:
        assert left == pytest.approx(min(elapsed - predicted, 3600.0))


@pytest.mark.parametrize("seed", range(4))
def test_a_disk_that_hangs_is_noticed_before_its_first_load_has_ended(seed: int) -> None:
    """Fifty requests a second, and a disk that reads one load after another."""
    print("seed", seed)
    random = Random(seed)
    model = model_of(explore_every=EXPLORE_EVERY)
    now = free_at = 0.0
    under_way: list[tuple[float, float, Decision]] = []  # started, ends
    begun_while_it_hangs = asked_while_it_hangs = 0
    while now < 30.0:
        now += random.expovariate(50.0)
        for started, ends, decision in [load for load in under_way if load[1] <= now]:
            model.finished(decision, ends - started, ends)
        under_way = [load for load in under_way if load[1] > now]
        tokens = random.randint(8, 32) * 64
        queued = sum(decision.remaining_seconds(now - started) for started, _, decision in under_way)
        decision = model.choose(0, [(HitTier.NVME, tokens)], tokens + 100, 64, queued, True, now)
        if decision.load_tokens:
            size = decision.load_tokens * BYTES_PER_TOKEN
            own = NVME_TRUE.overhead_seconds + size / NVME_TRUE.bytes_per_second
            free_at = max(free_at, now) + own * random.lognormvariate(0, NOISE)
            if now >= 10.0 and free_at < 15.0:
                free_at += 20.0
            under_way.append((now, free_at, decision))
        if 10.0 <= now < 29.0:
            asked_while_it_hangs += 1
            begun_while_it_hangs += decision.load_tokens > 0
    assert model.counts["loaded_tokens"] > 100 * 64, "it was used before"
    assert asked_while_it_hangs > 800
    assert begun_while_it_hangs <= 15 + asked_while_it_hangs // EXPLORE_EVERY


@pytest.mark.parametrize("seed", range(4))
def test_hiccups_of_a_disk_cost_themselves_and_little_more(seed: int) -> None:
    simulation = Simulation(seed, seconds_between=1.0)
    simulation.run(60, throttle=1.0)
    told = [simulation.run(1, throttle=20.0 if number % 50 == 49 else 1.0)[0] for number in range(1000)]
    usual = [request for number, request in enumerate(told) if number % 50 != 49]
    assert declined_share(usual) < 0.1
    assert percentile(usual, 0.9) <= 0.05


# What the scheduler's half asks, and what it teaches ------------------------------------------------------------------


BLOCK = 64


def match(*tiers: tuple[HitTier, int], asked: int = 1000) -> Match:
    blocks = sum(count for _, count in tiers)
    segments: list[Any] = [(tier, count * BLOCK) for tier, count in tiers]
    segments.append((MissReason.ABSENT, asked - blocks * BLOCK))
    return Match([bytes(32)] * blocks, blocks, blocks * BLOCK, tiers, Account.of(segments), MissReason.ABSENT, "")


def choice(*, is_on: bool = True) -> LoadChoice:
    return LoadChoice(1000.0, is_on=is_on, audit=0.0, choose=lambda: 1.0)


@dataclass
class Steps:
    """Steps of an engine that takes so many seconds for a token."""

    choice: LoadChoice
    now: float = 100.0
    steps: int = 0

    def begin(self, tokens: int, waited: bool = False) -> int:
        self.steps += 1
        self.choice.step_begins(self.steps, StepWork([(0, tokens)], 0), self.now, waited)
        return self.steps

    def end(self, number: int, seconds: float) -> None:
        self.now += seconds
        self.choice.step_ends(number, self.now)

    def compute(self, tokens: int, seconds: float, waited: bool = False) -> None:
        self.end(self.begin(tokens, waited), seconds)

    def learned(self) -> Steps:
        for tokens in (100, 300, 500, 700, 900) * 6:
            self.compute(tokens, 0.001 + tokens * 1e-5)
        return self

    def load(self, name: str, found: Match, seconds: float, local: int = 0) -> int:
        stop, _ = self.choice.stop_token(name, found, local, 999, BLOCK, False, self.now)
        self.choice.begins(name, self.now)
        self.now += seconds
        self.choice.ended(name, None, stop - local, self.now)
        return stop


def coefficients(choice: LoadChoice) -> list[float]:
    """After the last step."""
    assert choice.costs.prefill.typical_step_seconds >= 0
    return choice.costs.prefill._coefficients()


def test_what_the_engine_has_is_not_asked_about() -> None:
    chosen = choice()
    assert chosen.stop_token("a", match((HitTier.DRAM, 3)), 192, 999, BLOCK, False, 1.0) == (999, MissReason.GRID)
    assert chosen.costs.counts["decisions"] == 0


def test_a_slow_tier_is_declined_and_where_it_is_off_it_is_not() -> None:
    for is_on in (True, False):
        engine = Steps(choice(is_on=is_on)).learned()
        for number in range(4):
            engine.load(f"l{number}", match((HitTier.NVME, 10)), 2.0)
        found = match((HitTier.DRAM, 2), (HitTier.NVME, 8))
        stops = [engine.choice.stop_token(f"a{at}", found, 0, 999, BLOCK, False, engine.now) for at in range(3)]
        if is_on:
            assert (min(stops)[0] <= 128) and min(stops)[1] is MissReason.CHEAPER_TO_COMPUTE, stops
        else:
            assert set(stops) == {(999, MissReason.GRID)}


def test_a_load_that_is_dropped_teaches_nothing() -> None:
    engine = Steps(choice())
    engine.choice.stop_token("a", match((HitTier.DRAM, 10)), 0, 999, BLOCK, False, engine.now)
    engine.choice.dropped("a")
    engine.choice.begins("a", engine.now)
    engine.choice.ended("a", 1.0, 640, engine.now)
    assert engine.choice.load_ms(640, engine.now) == inf, "no load was seen"
    engine.load("b", match((HitTier.DRAM, 10)), 5.0)
    first = engine.choice.load_ms(640, engine.now)
    engine.load("c", match((HitTier.DRAM, 10)), 5.0)
    assert inf > engine.choice.load_ms(640, engine.now) > first


def test_steps_that_waited_for_a_load_are_not_learned_from() -> None:
    engine = Steps(choice())
    for tokens in (100, 400, 800) * 5:
        engine.compute(tokens, 3.0, waited=True)
    fresh = coefficients(choice())
    assert coefficients(engine.choice) == fresh
    engine.compute(100, 0.01)
    assert coefficients(engine.choice) != fresh


def test_of_steps_that_are_under_way_together_each_has_its_own_wait() -> None:
    engine, alone = Steps(choice()), Steps(choice())
    for tokens in (100, 400, 800) * 5:
        waiting, other = engine.begin(tokens, waited=True), engine.begin(100)
        engine.end(waiting, 3.0)
        engine.end(other, 0.01)
        alone.compute(100, 0.01)
    assert coefficients(engine.choice) == pytest.approx(coefficients(alone.choice))


def test_an_engine_that_schedules_far_ahead_is_timed_for_some_of_its_steps() -> None:
    engine = Steps(choice())
    numbers = [engine.begin(100) for _ in range(3 * STEPS_AHEAD)]
    assert len(engine.choice._steps) == STEPS_AHEAD
    for number in numbers:
        engine.end(number, 1.0)
    assert not engine.choice._steps


def test_a_step_that_never_reports_is_nobody_elses() -> None:
    engine, alone = Steps(choice()), Steps(choice())
    for tokens in (100, 400, 800) * 5:
        engine.begin(50)
        engine.compute(tokens, tokens / 1000)
        alone.compute(tokens, tokens / 1000)
    assert coefficients(engine.choice) == pytest.approx(coefficients(alone.choice))


def test_loads_in_progress_are_waited_for_by_those_after_them() -> None:
    engine = Steps(choice()).learned()
    for number in range(6):
        engine.load(f"taught{number}", match((HitTier.DRAM, 10)), 0.004)
    found, reasons = match((HitTier.DRAM, 10)), []
    for number in range(8):
        reasons.append(engine.choice.stop_token(f"a{number}", found, 0, 999, BLOCK, False, engine.now)[1])
        engine.choice.begins(f"a{number}", engine.now)
    assert reasons[0] is MissReason.GRID, "alone it is sooner than computing"
    assert reasons[-1] is MissReason.CHEAPER_TO_COMPUTE, "behind others it is not"


def test_the_fetch_before_a_load_counts_in_what_it_cost() -> None:
    regrets = []
    for fetch_seconds in (0.0, 0.5):
        engine = Steps(choice()).learned()
        engine.choice.fetch_seconds["a"] = fetch_seconds
        engine.load("a", match((HitTier.DRAM, 10)), 0.1)
        regrets.append(engine.choice.costs.counts["regret_ms"])
    assert regrets[1] - regrets[0] == pytest.approx(500)
