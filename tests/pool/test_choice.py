"""Whom to ask: never more than two, never one that is banned, gone or of another run; load spreads."""

from __future__ import annotations

from collections import Counter
from math import inf, isfinite, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.account import HitTier, Holder
from kvstore.pool.choice import (
    BAN_SECONDS,
    FAILURES,
    HALF_LIFE_SECONDS,
    MAX_SOURCES,
    MOST_ASKED,
    PEER_PRIOR,
    HolderChoice,
    SourcePrior,
    SourceSpeed,
    SpeedBook,
    late_has_failed,
)
from kvstore.pool.directory import NodeEntry

HERE = b"\xff" * 16
RUNS = [b"run 0...", b"run 1..."]
BLOCK = 2 << 20
HOLDERS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 64)), max_size=8)


def node(number: int) -> bytes:
    return number.to_bytes(16, "big")


def holder(number: int, blocks: int = 64, run: int = 0) -> Holder:
    return Holder(node(number), RUNS[run], blocks, HitTier.DRAM)


def alive(*numbers: int, run: int = 0) -> dict[bytes, NodeEntry]:
    return {node(one): NodeEntry(node(one), RUNS[run], "a:1", (b"tenant a",)) for one in numbers}


@given(st.data())
def test_what_is_chosen_is_fit(data: st.DataObject) -> None:
    """Against bans kept in the plainest way."""
    choice, now = HolderChoice(HERE, SpeedBook()), 0.0
    failures: dict[tuple[int, int], list[float]] = {}
    banned: dict[tuple[int, int], float] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        now += data.draw(st.sampled_from([0.0, 0.1, 4.0, BAN_SECONDS - 0.5, BAN_SECONDS + 0.5]))
        one, run = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 1))
        if data.draw(st.booleans()):
            choice.failed(node(one), RUNS[run], now)
            before = failures.get((one, run), [])
            if before and now - before[-1] > BAN_SECONDS:
                before = []
            failures[one, run] = [*before, now]
            if len(failures[one, run]) == FAILURES:
                banned[one, run], failures[one, run] = now + BAN_SECONDS, [now] * 0
        elif data.draw(st.booleans()):
            choice.worked(node(one), RUNS[run])
            failures.pop((one, run), None)
            banned.pop((one, run), None)
        up = alive(*data.draw(st.sets(st.integers(0, 4))), run=data.draw(st.integers(0, 1)))
        up[HERE] = NodeEntry(HERE, RUNS[0], "a:1")
        holders = [
            Holder(HERE if number == 5 else node(number), RUNS[of_run], blocks, HitTier.DRAM)
            for number, of_run, blocks in data.draw(HOLDERS)
        ]  # fmt: skip
        chosen = choice.choose(holders, up, b"prompt", BLOCK, now)
        fit = [
            of
            for of in holders
            if of.blocks and of.node != HERE and of.node in up and up[of.node].incarnation == of.incarnation
            and banned.get((int.from_bytes(of.node, "big"), RUNS.index(of.incarnation)), -1.0) <= now
        ]  # fmt: skip
        assert len(chosen) <= MOST_ASKED and len({of.node for of in chosen}) == len(chosen)
        assert set(chosen) <= set(fit)
        assert len(chosen) == min(MOST_ASKED, len({of.node for of in fit}))
        if chosen:
            assert chosen[0].blocks == max(of.blocks for of in fit), "all are equally fast: most blocks first"


def test_holders_without_the_tenant_s_keys_are_not_asked() -> None:
    choice = HolderChoice(HERE, SpeedBook())
    assert choice.choose([holder(1)], alive(1), b"p", BLOCK, 0.0, b"tenant b") == []
    assert choice.choose([holder(1)], alive(1), b"p", BLOCK, 0.0, b"tenant a") != []


@pytest.mark.parametrize("seed", range(3))
def test_load_spreads_over_equal_holders_and_one_asker_asks_the_same(seed: int) -> None:
    print(f"seed {seed}")
    random, holders = Random(seed), [holder(number) for number in range(8)]
    asked: Counter[bytes] = Counter()
    for _ in range(200):
        choice = HolderChoice(random.randbytes(16), SpeedBook())
        for _ in range(10):
            prompt = random.randbytes(16)
            first = choice.choose(random.sample(holders, 8), alive(*range(8)), prompt, BLOCK, 0.0)
            again = choice.choose(random.sample(holders, 8), alive(*range(8)), prompt, BLOCK, 0.0)
            assert first == again
            asked[first[0].node] += 1
    assert max(asked.values()) < 1.3 * 2000 / 8 and min(asked.values()) > 0.7 * 2000 / 8, asked


def test_a_slow_link_is_worth_less_and_a_slightly_slower_one_is_not() -> None:
    speeds = SpeedBook()
    for at in range(20):
        speeds.learn(node(1), 64 * BLOCK, 13.0, float(at))
        speeds.learn(node(2), 64 * BLOCK, 0.03, float(at))
        speeds.learn(node(3), 64 * BLOCK, 0.04, float(at))
    choice = HolderChoice(HERE, speeds)
    up = alive(1, 2, 3)
    chosen = choice.choose([holder(1, 64), holder(2, 48), holder(3, 48)], up, b"p", BLOCK, 20.0)
    assert node(1) not in [one.node for one in chosen], "10 MB/s, and a third more blocks"
    firsts = {
        choice.choose([holder(2), holder(3)], up, prompt.to_bytes(4, "big"), BLOCK, 20.0)[0].node
        for prompt in range(50)
    }
    assert firsts == {node(2), node(3)}
    assert choice.choose([holder(2, 48), holder(3, 64)], up, b"p", BLOCK, 20.0)[0].node == node(3)


@pytest.mark.parametrize(
    ("given", "came", "has_failed"), [(0.05, 0, False), (0.3, 0, True), (0.3, 1, False), (30.0, 0, True)]
)
def test_a_node_that_is_late_has_failed_where_it_had_a_fair_time_and_sent_nothing(
    given: float, came: int, has_failed: bool
) -> None:
    assert late_has_failed(given, came) is has_failed


def test_two_failures_of_one_run_ban_it_for_ten_seconds() -> None:
    choice = HolderChoice(HERE, SpeedBook())
    choice.failed(node(1), RUNS[0], 100.0)
    assert [one.node for one in choice.choose([holder(1)], alive(1), b"p", BLOCK, 100.0)] == [node(1)]
    choice.failed(node(1), RUNS[0], 101.0)
    assert choice.choose([holder(1)], alive(1), b"p", BLOCK, 101.0 + BAN_SECONDS - 0.01) == []
    assert choice.choose([holder(1)], alive(1), b"p", BLOCK, 101.0 + BAN_SECONDS) != []
    assert choice.choose([holder(1, run=1)], alive(1, run=1), b"p", BLOCK, 101.0) != [], "it was started again"


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
    last = 2 * MAX_SOURCES - 1
    forgotten = [book.speed(one) == SourceSpeed() for one in ("a", last - MAX_SOURCES, last - MAX_SOURCES + 1, last)]
    assert forgotten == [True, True, False, False]
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
