"""How far a found prefix is loaded: what the scheduler's half asks, and what it teaches."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import pytest

from engine_adapter.cost import STEPS_AHEAD, LoadChoice, StepWork
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.client.handle import Match

BLOCK = 64


def match(*tiers: tuple[HitTier, int], asked: int = 1000) -> Match:
    blocks = sum(count for _, count in tiers)
    segments: list[Any] = [(tier, count * BLOCK) for tier, count in tiers]
    segments.append((MissReason.ABSENT, asked - blocks * BLOCK))
    return Match([bytes(32)] * blocks, blocks, blocks * BLOCK, tiers, Account.of(segments), MissReason.ABSENT, "")


def choice(*, is_on: bool = True) -> LoadChoice:
    return LoadChoice(1000.0, is_on=is_on, audit=0.0, choose=lambda: 1.0)


@dataclass
class Engine:
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

    def learned(self) -> Engine:
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


def test_before_anything_is_known_all_is_loaded() -> None:
    stop, reason = choice().stop_token("a", match((HitTier.DRAM, 10)), 0, 999, BLOCK, False, 100.0)
    assert (stop, reason) == (999, MissReason.GRID)


def test_what_the_engine_has_is_not_asked_about() -> None:
    chosen = choice()
    assert chosen.stop_token("a", match((HitTier.DRAM, 3)), 192, 999, BLOCK, False, 1.0) == (999, MissReason.GRID)
    assert chosen.costs.counts.decisions == 0


def test_a_slow_tier_is_declined_and_where_it_is_off_it_is_not() -> None:
    for is_on in (True, False):
        engine = Engine(choice(is_on=is_on)).learned()
        for number in range(4):
            engine.load(f"l{number}", match((HitTier.NVME, 10)), 2.0)
        found = match((HitTier.DRAM, 2), (HitTier.NVME, 8))
        stops = [engine.choice.stop_token(f"a{at}", found, 0, 999, BLOCK, False, engine.now) for at in range(3)]
        if is_on:
            assert (min(stops)[0] <= 128) and min(stops)[1] is MissReason.CHEAPER_TO_COMPUTE, stops
        else:
            assert set(stops) == {(999, MissReason.GRID)}


def test_a_load_that_is_dropped_teaches_nothing() -> None:
    engine = Engine(choice())
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
    engine = Engine(choice())
    for tokens in (100, 400, 800) * 5:
        engine.compute(tokens, 3.0, waited=True)
    fresh = coefficients(choice())
    assert coefficients(engine.choice) == fresh
    engine.compute(100, 0.01)
    assert coefficients(engine.choice) != fresh


def test_of_steps_that_are_under_way_together_each_has_its_own_wait() -> None:
    engine, alone = Engine(choice()), Engine(choice())
    for tokens in (100, 400, 800) * 5:
        waiting, other = engine.begin(tokens, waited=True), engine.begin(100)
        engine.end(waiting, 3.0)
        engine.end(other, 0.01)
        alone.compute(100, 0.01)
    assert coefficients(engine.choice) == pytest.approx(coefficients(alone.choice))


def test_an_engine_that_schedules_far_ahead_is_timed_for_some_of_its_steps() -> None:
    engine = Engine(choice())
    numbers = [engine.begin(100) for _ in range(3 * STEPS_AHEAD)]
    assert len(engine.choice._steps) == STEPS_AHEAD
    for number in numbers:
        engine.end(number, 1.0)
    assert not engine.choice._steps


def test_a_step_that_never_reports_is_nobody_elses() -> None:
    engine, alone = Engine(choice()), Engine(choice())
    for tokens in (100, 400, 800) * 5:
        engine.begin(50)
        engine.compute(tokens, tokens / 1000)
        alone.compute(tokens, tokens / 1000)
    assert coefficients(engine.choice) == pytest.approx(coefficients(alone.choice))


def test_loads_in_progress_are_waited_for_by_those_after_them() -> None:
    engine = Engine(choice()).learned()
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
        engine = Engine(choice()).learned()
        engine.choice.fetch_seconds["a"] = fetch_seconds
        engine.load("a", match((HitTier.DRAM, 10)), 0.1)
        regrets.append(engine.choice.costs.counts.regret_ms)
    assert regrets[1] - regrets[0] == pytest.approx(500)
