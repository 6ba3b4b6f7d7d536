"""Which hits are held out, what is counted and logged of audits, and what hits are measured to save."""

from __future__ import annotations

import logging
from random import Random
from statistics import fmean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.audit.audits import (
    FIRST_HITS,
    FRACTION,
    LONGEST_AUDIT_SECONDS,
    MOST_GIVEN_UP,
    AuditResult,
    AuditVerdict,
    Holdout,
    TtftSaving,
    judged,
)

# Which hits are held out ------------------------------------------------------------------------------------------


def test_one_in_a_thousand_and_the_same_ones_with_the_same_chances() -> None:
    def held_out(seed: int) -> list[int]:
        print("seed", seed)
        holdout = Holdout(Random(seed).random, first=0)
        chosen = []
        for request in range(100_000):
            if holdout.begins(str(request), float(request)):
                chosen.append(request)
                holdout.ended(str(request))
        return chosen

    assert held_out(1) == held_out(1) != held_out(2)
    assert 60 <= len(held_out(1)) <= 140, "four standard deviations about 100"
    assert FRACTION == 1 / 1000


def test_one_at_a_time() -> None:
    holdout = Holdout(lambda: 0.0, 0.5, first=0)
    assert holdout.begins("a", 0.0)
    assert not holdout.begins("b", 1.0)
    holdout.ended("b")
    assert not holdout.begins("c", 2.0), "the end of another request ends no audit"
    holdout.ended("a")
    assert holdout.begins("d", 3.0)
    holdout.ended("d")
    assert not holdout.compares("d")


def test_an_audit_that_never_ends_does_not_keep_others_away_for_ever() -> None:
    holdout = Holdout(lambda: 0.0, 0.5, first=0)
    assert holdout.begins("lost", 0.0)
    assert not holdout.begins("early", LONGEST_AUDIT_SECONDS - 1)
    assert holdout.begins("late", LONGEST_AUDIT_SECONDS)
    holdout.ended("lost")
    assert not holdout.begins("other", LONGEST_AUDIT_SECONDS + 1), "the late one is under way"


def test_none_and_all() -> None:
    off = Holdout(Random(3).random, 0.0)
    assert not any(off.begins(str(request), 0.0) for request in range(10_000))
    always = Holdout(Random(3).random, 1.0)
    for request in range(1000):
        assert always.begins(str(request), 0.0)
        always.ended(str(request))


def test_where_all_are_audited_those_that_are_not_compared_are_computed_too() -> None:
    all_of_them = Holdout(Random(3).random, 1.0)
    assert all_of_them.begins("a", 0.0) and all_of_them.compares("a")
    for request in "bcd":
        assert all_of_them.begins(request, 1.0) and not all_of_them.compares(request)
        all_of_them.ended(request, is_sound=True)
    assert all_of_them.compares("a")
    for number in range(10 * FIRST_HITS):
        all_of_them.ended("a", is_sound=True)
        assert all_of_them.begins("a", float(number)) and all_of_them.takes_all


def test_no_hit_is_loaded_before_the_first_ones_were_compared_and_found_right() -> None:
    holdout = Holdout(lambda: 0.99, 0.5)
    for _ in range(FIRST_HITS):
        assert holdout.begins("a", 0.0) and holdout.begins("beside it", 0.0)
        holdout.ended("beside it", is_sound=True)
        holdout.ended("a")
        assert holdout.takes_all, "that one came to nothing"
        assert holdout.begins("b", 0.0)
        holdout.ended("b", is_sound=True)
    assert not holdout.takes_all and not holdout.begins("c", 0.0)
    assert Holdout(lambda: 0.99, 0.0).takes_all is False


def test_first_hits_that_can_never_be_compared_do_not_keep_the_store_away_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    holdout = Holdout(lambda: 0.99, 0.5)
    for _ in range(MOST_GIVEN_UP):
        assert holdout.begins("a", 0.0)
        holdout.ended("a")
    assert not holdout.begins("a", 0.0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# What is counted and logged ---------------------------------------------------------------------------------------


def result_of(verdict: AuditVerdict, error: float = 0.0, allowed: float = 0.01) -> AuditResult:
    return AuditResult(verdict, error, allowed, 7)


EXACT = result_of(AuditVerdict.EXACT)
CLOSE = result_of(AuditVerdict.CLOSE, 0.003)
DRIFTED = result_of(AuditVerdict.DRIFTED, 1.3)


def test_the_worst_block_is_the_verdict_and_a_drift_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "engine_adapter.audit.audits"):
        assert judged("a", []) is None
        assert judged("a", [EXACT, EXACT]) is AuditVerdict.EXACT
        assert judged("a", [CLOSE, EXACT]) is AuditVerdict.CLOSE
        assert not caplog.records
        assert judged("a", [EXACT, DRIFTED, CLOSE]) is AuditVerdict.DRIFTED
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.isprintable() and "namespace a is not what the engine computes: 1 of 3 blocks, layer 7" in line
    assert DRIFTED.of_allowed == pytest.approx(130)


# What a hit saves -------------------------------------------------------------------------------------------------


REQUESTS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 3), st.floats(0, 100)), min_size=1, max_size=60
)


@given(REQUESTS)
def test_it_is_the_difference_of_means_by_bins(requests: list[tuple[bool, int, int, float]]) -> None:
    saving = TtftSaving()
    bins: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for held_out, prompt, found, ttft in requests:
        saving.record(held_out, prompt, found, ttft)
        bins.setdefault((prompt.bit_length(), found.bit_length()), ([], []))[held_out].append(ttft)
    matched = [arms for arms in bins.values() if min(map(len, arms)) >= 2]
    told = saving.estimate()
    if not matched:
        assert told is None
        return
    assert told is not None
    hits = sum(len(loaded) for loaded, _ in matched)
    mean = sum(len(loaded) * (fmean(computed) - fmean(loaded)) for loaded, computed in matched) / hits
    square = sum(len(arms[0]) ** 2 * sum(variance(arm) / len(arm) for arm in arms) for arms in matched) / hits**2
    assert told.mean_ms == pytest.approx(1e3 * mean, abs=1e-6)
    assert told.standard_error_ms == pytest.approx(1e3 * square**0.5, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_the_true_saving_lies_within_the_error_and_sizes_do_not_bias_it(seed: int) -> None:
    print("seed", seed)
    random = Random(seed)
    saving, holdout = TtftSaving(), Holdout(random.random, 0.05)
    true_ms = []
    for request in range(6000):
        found = random.choice([100, 100, 100, 3000])  # long prefixes are rare and save most
        prompt = found + 50
        computing, loading = found * 1e-3, 0.005 + found * 2e-5
        is_held_out = holdout.begins(str(request), 0.0)
        ttft = 0.05 + (computing if is_held_out else loading)
        saving.record(is_held_out, prompt, found, ttft * random.lognormvariate(0, 0.2))
        holdout.ended(str(request))
        if not is_held_out:
            true_ms.append(1e3 * (computing - loading) * 1.0202)  # the mean of the noise: exp(0.2 ** 2 / 2)
    told = saving.estimate()
    assert told is not None
    assert abs(told.mean_ms - fmean(true_ms)) < 4 * told.standard_error_ms
    assert told.standard_error_ms < 0.05 * told.mean_ms


def test_what_cannot_be_a_time_is_left_out_and_bins_are_bounded() -> None:
    saving = TtftSaving()
    for ttft in (float("nan"), float("inf"), -1.0):
        saving.record(False, 100, 90, ttft)
    saving.record(False, 100, 0, 1.0)
    assert not saving._bins
    for bits in range(200):
        saving.record(bool(bits % 2), 2**bits, 2**bits, 1.0)
    assert len(saving._bins) == 24
