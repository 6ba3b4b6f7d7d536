"""What is expected of a transfer comes from the last ones, and fades."""

from __future__ import annotations

from math import inf, isfinite, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.pool.choice import HALF_LIFE_SECONDS, MAX_SOURCES, PEER_PRIOR, SourcePrior, SourceSpeed, SpeedBook

MB = 1 << 20


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("latency", "rate"), [(0.2e-3, 8e9), (30e-3, 1e9), (1e-3, 10e6), (0.2, 50e9)])
def test_it_learns_latency_and_rate_within_a_quarter(seed: int, latency: float, rate: float) -> None:
    print(f"seed {seed}")
    random, book = Random(seed), SpeedBook()
    for at in range(200):
        size = random.choice([MB // 16, MB, 16 * MB, 128 * MB, 512 * MB])
        book.learn("a", size, (latency + size / rate) * random.uniform(0.9, 1.1), float(at))
    for size in (MB, 128 * MB, 512 * MB):
        assert book.milliseconds("a", size, 200.0) == pytest.approx(1e3 * (latency + size / rate), rel=0.25)


def test_a_link_that_is_throttled_is_known_after_a_few_transfers_and_one_hiccup_is_not_believed() -> None:
    book = SpeedBook()
    for at in range(20):
        book.learn("a", 64 * MB, 0.014, float(at))
    book.learn("a", 64 * MB, 14.0, 20.0)
    assert book.milliseconds("a", 64 * MB, 20.0) < 3 * 14
    for at in range(5):
        book.learn("a", 64 * MB, 0.14, 21.0 + at)
    assert 100 < book.milliseconds("a", 64 * MB, 26.0) < 200


def test_what_is_known_fades_and_sources_are_bounded() -> None:
    book = SpeedBook()
    unknown = book.milliseconds("a", 64 * MB, 0.0)
    assert unknown == pytest.approx(1e3 * (PEER_PRIOR.latency_seconds + 64 * MB / PEER_PRIOR.bytes_per_second))
    for at in range(20):
        book.learn("a", 64 * MB, 100 * unknown / 1e3, float(at))
    slow = book.milliseconds("a", 64 * MB, 20.0)
    assert slow > 50 * unknown
    assert book.milliseconds("a", 64 * MB, 20.0 + HALF_LIFE_SECONDS) == pytest.approx((slow * unknown) ** 0.5, rel=0.05)
    assert book.milliseconds("a", 64 * MB, 20.0 + 20 * HALF_LIFE_SECONDS) == pytest.approx(unknown, rel=0.01)
    for number in range(2 * MAX_SOURCES):
        book.learn(number, MB, 0.001, 100.0)
    assert len(book) == MAX_SOURCES and book.speed("a") == SourceSpeed() != book.speed(2 * MAX_SOURCES - 1)
    assert book.milliseconds("b", 0, 0.0, SourcePrior(0.5, 1.0)) == 500.0


@given(st.lists(st.tuples(st.integers(-1, 1 << 60), st.one_of(st.floats(), st.sampled_from([nan, inf, -inf, 0.0])))))
def test_no_number_breaks_it(transfers: list[tuple[int, float]]) -> None:
    book = SpeedBook()
    for at, (size, seconds) in enumerate(transfers):
        book.learn("a", size, seconds, float(at))
    expected = [book.milliseconds("a", size, 1e9) for size in (-5, 0, 1, 1 << 60)]
    assert all(isfinite(one) and one > 0 for one in expected) and expected == sorted(expected)


def test_people_are_told_of_large_transfers_alone() -> None:
    book = SpeedBook()
    assert book.speed("a").bytes_per_second == 0.0
    book.learn("a", 1000, 0.5, 0.0)
    assert book.speed("a").bytes_per_second == 0.0
    for at in range(100):
        book.learn("a", 10 * MB, 1.0 if at == 7 else 0.01, float(at))
    speed = book.speed("a")
    assert speed.milliseconds_p99 == 1000.0
    assert speed.bytes_per_second == pytest.approx(1000 * MB / 1.99)
