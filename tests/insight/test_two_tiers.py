"""Replay through two tiers: what is found where, what is written, and what admission makes of that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.block.errors import BadInput
from kvstore.insight import replay as replays
from kvstore.insight.replay import (
    ALL,
    COIN,
    LEARNED,
    ORACLE,
    CoinAdmission,
    OracleAdmission,
    Replay,
    ReplayOptions,
    optimal_hits,
)
from kvstore.insight.trace import Trace
from kvstore.node import build_replay
from recorded import made_of, recorded
from tiering.policies.adaptive import Adaptive
from tiering.policies.admission import URGE, Admission, AdmitAll, LearnedAdmission
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=40)
QUIET = (lambda doing, done, steps: None,)


def two_tiers_by_hand(trace: Trace, above: int, below: int) -> list[tuple[int, int, int, int]]:
    """Two leaf-first LRUs; what leaves the upper one goes down behind its ancestors. By request: found above, written
    there, found below alone, written there."""
    dram, nvme, told = OrderedDict[int, None](), OrderedDict[int, None](), []
    parents: dict[int, int] = {}
    written = [0]

    def leaf(held: OrderedDict[int, None], kept: set[int]) -> int | None:
        inner = {parents.get(one) for one in held} | kept
        return next((one for one in held if one not in inner), None)

    def touch(blocks: list[int]) -> None:
        for block in blocks:
            for held in (dram, nvme):
                if block in held:
                    held.move_to_end(block)

    def go_down(block: int | None) -> None:
        way = []
        while block is not None and block not in nvme:
            way.append(block)
            block = parents.get(block)
        for one in reversed(way):
            while len(nvme) >= below:
                last = leaf(nvme, pinned | {one, parents.get(one, -1)})
                if last is None:
                    return
                del nvme[last]
            nvme[one] = None
            chain = [one]
            while parents.get(chain[-1]) is not None:
                chain.append(parents[chain[-1]])
            for ancestor in chain:
                nvme.move_to_end(ancestor)
            written[0] += 1

    def make_room(kept: set[int]) -> bool:
        while len(dram) >= above:
            last = leaf(dram, kept)
            if last is None:
                return False
            go_down(last)
            del dram[last]
        return True

    for chain in trace.chains():
        parents.update((after, before) for before, after in pairwise(chain))
        written[0], brought = 0, 0
        found = next((at for at, block in enumerate(chain) if block not in dram and block not in nvme), len(chain))
        high = next((at for at, block in enumerate(chain[:found]) if block not in dram), found)
        pinned = set(chain[:found])
        for block in chain[high:found]:
            if not make_room(pinned):
                break
            dram[block] = None
            brought += 1
        touch(chain[:found][::-1])
        pinned = set()
        stored = 0
        if high + brought == found:
            for block in chain[found:]:
                if not make_room(set(chain)):
                    break
                dram[block] = None
                stored += 1
            if stored:
                touch(chain[: found + stored][::-1])
        told.append((high, brought + stored, found - high, written[0]))
    return told


@given(prompts=PROMPTS, above=st.integers(1, 8), below=st.integers(8, 20))
@settings(max_examples=150, deadline=None)
def test_it_is_what_it_says(prompts: list[list[int]], above: int, below: int) -> None:
    trace = made_of(*prompts)
    replay = build_replay(LeafFirstLru, above, 0, below)
    done = replay.run(trace)
    replay.check()
    rows = zip(done.dram_hits, done.dram_writes, done.nvme_hits, done.nvme_writes, strict=True)
    assert [tuple(map(int, row)) for row in rows] == two_tiers_by_hand(trace, above, below)


ADMISSIONS = {
    "all": lambda replay, trace: AdmitAll(),
    "learned": lambda replay, trace: LearnedAdmission(replay.names, lambda: replay.seconds, 3.0),
    "coin": lambda replay, trace: CoinAdmission(0.4, 3),
    "oracle": lambda replay, trace: OracleAdmission(trace, replay.names, lambda: replay.request),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", kvstore.config.POLICIES)
@pytest.mark.parametrize("admission", ADMISSIONS)
@given(prompts=PROMPTS, above=st.integers(1, 8), below=st.integers(1, 12), seed=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_tables_agree_whatever_is_admitted(
    policy: str, admission: str, prompts: list[list[int]], above: int, below: int, seed: int
) -> None:
    trace = made_of(*prompts)
    replay = build_replay(
        kvstore.policy_named(policy), above, seed, below, lambda replay: ADMISSIONS[admission](replay, trace)
    )
    done = replay.run(trace)
    replay.check()
    lengths = np.diff(trace.starts)
    assert (done.dram_hits + done.nvme_hits <= lengths).all()
    assert (done.dram_hits + done.nvme_hits).sum() <= optimal_hits(trace, above + below).sum()
    assert done.nvme_hits.sum() == 0 or done.nvme_writes.sum() > 0


def test_nothing_is_written_twice_while_it_is_there() -> None:
    """Brought up and gone again, it is on NVMe still."""
    trace = made_of(*[[1], [2], [3]] * 20)
    done = build_replay(LeafFirstLru, 1, 0, 3).run(trace)
    assert done.nvme_writes.sum() == 3 and done.nvme_hits.sum() == 57 and done.dram_writes.sum() == 60


# The curve -----------------------------------------------------------------------------------------------------------


def rows_of(trace: Trace, **options: object) -> list[replays.ReplayRow]:
    given = ReplayOptions(**{"blocks": [4], "nvme_blocks": 12, **options})  # type: ignore[arg-type]
    return list(replays.run([trace], {"lru": LeafFirstLru}, given, build_replay, *QUIET).rows)


@pytest.mark.slow
def test_rows_are_by_admission_with_all_first_and_the_optimum_of_both_tiers_last() -> None:
    random = np.random.default_rng(3)
    trace = made_of(*(random.integers(0, 3, random.integers(1, 6)).tolist() for _ in range(400)))
    rows = rows_of(trace, admission=[ORACLE, COIN, LEARNED], write_shares=[0.5])
    assert [(row.admission, row.write_share) for row in rows] == [
        (ALL, None), (LEARNED, None), (LEARNED, 0.5), (COIN, 0.5), (ORACLE, None), (None, None),
    ]  # fmt: skip
    everything, _, budget, coin, oracle, best = rows
    # In so short a trace all that an hour leaves may be spent.
    assert budget.nvme_written_blocks <= 0.5 / (1 - 1 / URGE) * everything.nvme_written_blocks
    assert abs(coin.nvme_written_blocks - budget.nvme_written_blocks) <= 0.1 * everything.nvme_written_blocks
    assert oracle.nvme_written_blocks <= everything.nvme_written_blocks
    assert best.hit_blocks == optimal_hits(trace, 16).sum() and best.nvme_blocks == 12
    for row in rows[:-1]:
        assert row.hit_blocks == row.dram_hit_blocks + row.nvme_hit_blocks
        assert row.nvme_written_bytes == row.nvme_written_blocks * trace.block_tokens * (128 << 10)
    assert rows == rows_of(trace, admission=[ORACLE, COIN, LEARNED], write_shares=[0.5]), "the same again"


def test_where_nothing_is_written_every_row_is_there() -> None:
    """DRAM has room for all, so that a budget is of nothing."""
    rows = rows_of(made_of([1, 2], [1, 2]), blocks=[16], admission=[COIN, LEARNED], write_shares=[0.5, 0.8])
    assert [(row.admission, row.write_share, row.hit_blocks, row.nvme_written_blocks) for row in rows] == [
        (ALL, None, 2, 0), (LEARNED, None, 2, 0), (LEARNED, 0.5, 2, 0), (LEARNED, 0.8, 2, 0), (COIN, 0.5, 2, 0),
        (COIN, 0.8, 2, 0), (None, None, 2, None),
    ]  # fmt: skip


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_a_budget_may_be_of_less_than_a_block(share: float) -> None:
    """Few requests, or so slow that hardly one is paid for."""
    for requests in (3, 8, 40):
        trace = made_of(*([number, number + 1] for number in range(0, 2 * requests, 2)))
        for step_ms in (1, 360_000):
            slow = replace(trace, timestamps_ms=np.arange(requests) * step_ms)
            rows = rows_of(slow, admission=[COIN, LEARNED], write_shares=[share])
            everything, (learned,) = (
                rows[0],
                [row for row in rows if (row.admission, row.write_share) == (LEARNED, share)],
            )
            assert everything.nvme_written_blocks >= 2 * requests - 4 >= 2
            assert learned.nvme_written_blocks <= everything.nvme_written_blocks


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"admission": [COIN]}, "--admission random writes a share; give --write-share"),
        ({"admission": ["some"]}, "--admission 'some'; allowed: all, learned, random, oracle"),
        ({"write_shares": [0.0]}, "--write-share 0; give a share"),
        ({"write_shares": [float("nan")]}, "--write-share nan; give a share"),
        ({"nvme_blocks": 0, "write_shares": [0.5]}, "give --nvme-blocks, too"),
    ],
)
def test_what_cannot_be_is_one_line(given: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says.replace("?", r"\?")):
        rows_of(made_of([1]), **given)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "times_a_coin"), [(LeafFirstLru, 1.25), (Adaptive, 1.3)])
def test_on_recorded_conversations_fewer_bytes_keep_the_hits(policy: PolicyMaker, times_a_coin: float) -> None:
    """5,000 blocks of DRAM above 35,000 of NVMe: without a budget; and with one of half the bytes, beside a coin that
    writes a little more."""
    trace = recorded("mooncake_conversation")

    def hits_and_writes(admission: Callable[[Replay], Admission]) -> tuple[int, int, int]:
        done = build_replay(policy, 5_000, 0, 35_000, admission).run(trace)
        nvme_hits = int(done.nvme_hits.sum())
        return int(done.dram_hits.sum()) + nvme_hits, nvme_hits, int(done.nvme_writes.sum())

    hits, _, written = hits_and_writes(lambda replay: AdmitAll())
    fewer, _, less = hits_and_writes(lambda replay: LearnedAdmission(replay.names, lambda: replay.seconds))
    assert less <= 0.9 * written and fewer >= 0.98 * hits
    seconds = float(np.ptp(trace.timestamps_ms)) / 1000
    rate = LearnedAdmission.rate_for(0.482 * written, seconds)
    _, mine, half = hits_and_writes(
        lambda replay: LearnedAdmission(replay.names, lambda: replay.seconds, rate * replay.block_bytes)
    )
    assert 0.49 * written <= half <= 0.505 * written
    _, random, as_much = hits_and_writes(lambda replay: CoinAdmission(0.0325, 0))
    assert as_much >= half and mine >= times_a_coin * random, (mine, half, random, as_much)
