"""Replay: the store's own tables in one tier and in two, the figures that were measured, the same each time, and
nothing beats the optimum."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.config import POLICIES
from kvstore.insight import replay as replays
from kvstore.insight.replay import (
    ALL,
    COIN,
    LEARNED,
    OPTIMUM,
    ORACLE,
    CoinAdmission,
    OracleAdmission,
    Replay,
    ReplayOptions,
    optimal_hits,
)
from kvstore.insight.trace import Trace
from recorded import PUBLIC, line, made_of, read_trace, recorded
from tiering.policies.adaptive import Adaptive
from tiering.policies.admission import URGE, Admission, AdmitAll, LearnedAdmission
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker

SEED = 7
MAKERS = {name: kvstore.policy_named(name) for name in POLICIES}
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=40)

# Blocks found of all that were asked for, partly filled ones among them. Of MIN with bypass: what two more
# implementations, in two languages, agree on to four digits.
MEASURED = {
    ("mooncake_conversation", "lru"): {
        1_000: 0.0445, 5_000: 0.1118, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637,
    },
    ("mooncake_synthetic", "lru"): {1_000: 0.0841, 5_000: 0.2793, 10_000: 0.4239, 30_000: 0.6242},
    ("mooncake_conversation", OPTIMUM): {1_000: 0.1907, 5_000: 0.3412, 10_000: 0.3664, 30_000: 0.3664, 100_000: 0.3664},
    ("mooncake_synthetic", OPTIMUM): {1_000: 0.2767, 5_000: 0.5263, 10_000: 0.6180, 30_000: 0.6396},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("of", "blocks"), [(of, size) for of, sizes in MEASURED.items() for size in sizes])
def test_lru_and_the_optimum_have_the_figures_that_were_measured(of: tuple[str, str], blocks: int) -> None:
    trace = recorded(of[0])
    best = of[1] == OPTIMUM
    hits = optimal_hits(trace, blocks) if best else Replay(MAKERS["lru"], blocks).run(trace).dram_hits
    assert f"{hits.sum() / len(trace.blocks):.4f}" == f"{MEASURED[of][blocks]:.4f}"


def best_of_all(prompts: list[list[int]], capacity: int) -> int:
    """By trying everything that could be held after each request: whole prefixes, of what was held and what came."""
    states = {frozenset[tuple[int, ...]](): 0}
    for ids in prompts:
        chain = [tuple(ids[: depth + 1]) for depth in range(len(ids))]
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for held, hits in states.items():
            found = next((depth for depth, block in enumerate(chain) if block not in held), len(chain))
            all_blocks = held | set(chain)
            for size in range(min(capacity, len(all_blocks)) + 1):
                for kept in combinations(sorted(all_blocks), size):
                    chosen = frozenset(kept)
                    if all(len(block) == 1 or block[:-1] in chosen for block in chosen):
                        following[chosen] = max(following.get(chosen, 0), hits + found)
        states = following
    return max(states.values())


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6),
    capacity=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_nothing_does_better_than_the_optimum(prompts: list[list[int]], capacity: int) -> None:
    assert int(optimal_hits(made_of(*prompts), capacity).sum()) == best_of_all(prompts, capacity)


def test_the_optimums_hits_are_told_by_request() -> None:
    assert optimal_hits(made_of([1, 2], [1, 3], [1, 2, 4], []), 10).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("policy", MAKERS)
def test_the_same_again_gives_the_same(policy: str) -> None:
    random = np.random.default_rng(SEED)
    trace = made_of(*(random.integers(0, 4, random.integers(1, 9)).tolist() for _ in range(800)))
    first, again = (Replay(MAKERS[policy], 64, SEED).run(trace) for _ in range(2))
    assert (first.dram_hits == again.dram_hits).all() and (first.dram_writes == again.dram_writes).all()


def rows_of(trace: Trace, **options: object) -> list[replays.ReplayRow]:
    """Of `lru`."""
    given = ReplayOptions(**{"blocks": [4], **options})  # type: ignore[arg-type]
    return list(replays.run([trace], {"lru": LeafFirstLru}, given, lambda *_: None).rows)


def test_rows_are_sums_over_requests() -> None:
    lines = [line([1, 2, 3], 40), line([1, 2, 4], 48), line([1, 2, 3], 40)]
    trace = read_trace("made up", lines, 16)
    full, partial = (rows_of(trace, count_partial=counted, prefill_rate=16.0) for counted in (False, True))
    row, best = full
    assert (row.policy, best.policy) == ("lru", OPTIMUM)
    assert (row.asked_blocks, row.hit_blocks, row.written_blocks) == (7, 4, 3) and best.hit_blocks == 4
    assert row.block_hit_rate == 4 / 7
    assert (row.asked_tokens, row.hit_tokens) == (128, 64) and row.token_hit_rate == 0.5
    assert row.saved_prefill_seconds == pytest.approx(2 * 2 * (1 + 32 / replays.QUADRATIC_TOKENS))
    assert row.written_bytes == 3 * 16 * replays.KV_BYTES_PER_TOKEN
    row, _ = partial
    assert (row.asked_blocks, row.hit_blocks) == (9, 5) and row.hit_tokens == 32 + 40, "no more than there are"


def test_what_warms_up_is_not_counted() -> None:
    trace = made_of([1, 2], [1, 2], [1, 2], [5])
    row, _ = rows_of(trace, warmup=0.5)
    assert (row.asked_blocks, row.hit_blocks, row.written_blocks) == (3, 2, 1)


STATES = {"blocks": [100], "state_bytes": 48, "kv_bytes_per_token": 1}
"""A state takes the room of three blocks of 16 tokens, and is kept every 24 blocks."""


def with_states(trace: Trace, **options: object) -> dict[str | None, replays.ReplayRow]:
    """By where states are kept."""
    return {row.states: row for row in rows_of(trace, **{**STATES, **options}) if row.policy != OPTIMUM}


def test_a_hit_ends_at_the_deepest_state_that_an_engine_may_offer() -> None:
    same = [[1, 2, 3, 4]] * 2
    rows = with_states(made_of(*same))
    assert {at: row.hit_blocks for at, row in rows.items()} == {None: 4, **dict.fromkeys(replays.STATES, 3)}
    assert rows[replays.ENDS_ALONE].written_states == 1, "the last token is computed, so the state is of three blocks"
    longer = with_states(made_of([1, 2, 3, 4], [1, 2, 3, 4, 5, 6]))
    assert longer[replays.ENDS_ALONE].hit_blocks == 3 and longer[replays.EACH_BLOCK].hit_blocks == 4


def test_where_prompts_part_the_third_finds_what_the_second_did_not() -> None:
    parted = [[1, 2, 3, end, 5, 6] for end in (6, 7, 8)]
    rows = with_states(made_of(*parted))
    assert rows[replays.POLICY].hit_blocks == 3 and rows[replays.ENDS_ALONE].hit_blocks == 0
    assert rows[replays.EACH_BLOCK].hit_blocks == rows[None].hit_blocks == 6


def test_states_take_room_like_the_kv_beside_them() -> None:
    trace = made_of([1, 2, 3, 4, 5, 6], [7, 8, 9], [1, 2, 3, 4, 5, 6])
    assert with_states(trace)[replays.EACH_BLOCK].hit_blocks == 5
    rows = with_states(trace, blocks=[9])
    assert rows[None].hit_blocks == 6 and rows[replays.EACH_BLOCK].hit_blocks == 0
    row = with_states(trace)[replays.EACH_BLOCK]
    assert row.written_bytes == 9 * 16 and row.written_state_bytes == row.written_states * 48 == (6 + 3) * 48


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_the_policy_finds_more_than_states_everywhere_and_more_than_ends_alone(name: str) -> None:
    """Qwen3.5-27B, with room for 625 GiB and 1.8 TiB: what docs/policies.md says."""
    options = {"blocks": [30_000], "state_bytes": 153_944_064, "kv_bytes_per_token": 65_536}
    rows = with_states(recorded(name), **options)
    found = {at: row.hit_tokens for at, row in rows.items()}
    assert found[replays.POLICY] > max(found[replays.EACH_BLOCK], found[replays.ENDS_ALONE])
    row, each = rows[replays.POLICY], rows[replays.EACH_BLOCK]
    assert row.written_bytes is not None and row.written_state_bytes < row.written_bytes / 3
    assert each.written_bytes is not None and each.written_state_bytes > 4 * each.written_bytes
    assert found[replays.POLICY] > 0.88 * found[None]


# Two tiers -------------------------------------------------------------------------------------------------------


def two_tiers_by_hand(trace: Trace, above: int, below: int) -> list[tuple[int, int, int, int]]:
    """Two leaf-first LRUs, or one; what leaves the upper one goes down behind its ancestors. By request: found above,
    written there, found below alone, written there."""
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


@given(prompts=PROMPTS, above=st.integers(1, 12), below=st.just(0) | st.integers(12, 20))
@settings(max_examples=150, deadline=None)
def test_lru_in_one_tier_and_in_two_is_what_it_says(prompts: list[list[int]], above: int, below: int) -> None:
    trace = made_of(*prompts)
    replay = Replay(LeafFirstLru, above, 0, below)
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


@pytest.mark.parametrize("policy", MAKERS)
@pytest.mark.parametrize(
    "admission", ["all", *(pytest.param(one, marks=pytest.mark.slow) for one in ADMISSIONS if one != "all")]
)
@given(prompts=PROMPTS, above=st.integers(1, 12), below=st.integers(0, 12), seed=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_tables_agree_and_no_policy_finds_more_than_the_optimum(
    policy: str, admission: str, prompts: list[list[int]], above: int, below: int, seed: int
) -> None:
    trace = made_of(*prompts)
    replay = Replay(MAKERS[policy], above, seed, below, lambda replay: ADMISSIONS[admission](replay, trace))
    done = replay.run(trace)
    replay.check()
    lengths, hits = np.diff(trace.starts), done.dram_hits + done.nvme_hits
    assert (hits <= lengths).all() and hits.sum() <= optimal_hits(trace, above + below).sum()
    assert done.nvme_hits.sum() == 0 or done.nvme_writes.sum() > 0
    held = done.dram_hits + done.dram_writes  # as much of a request as there is room for, where nothing is brought up
    assert below or (held >= np.minimum(lengths, above)).all()


def test_nothing_is_written_twice_while_it_is_there() -> None:
    """Brought up and gone again, it is on NVMe still."""
    trace = made_of(*[[1], [2], [3]] * 20)
    done = Replay(LeafFirstLru, 1, 0, 3).run(trace)
    assert done.nvme_writes.sum() == 3 and done.nvme_hits.sum() == 57 and done.dram_writes.sum() == 60


# The curve -----------------------------------------------------------------------------------------------------------


def both_tiers(trace: Trace, **options: object) -> list[replays.ReplayRow]:
    return rows_of(trace, **{"nvme_blocks": 12, **options})


@pytest.mark.slow
def test_rows_are_by_admission_with_all_first_and_the_optimum_of_both_tiers_last() -> None:
    random = np.random.default_rng(3)
    trace = made_of(*(random.integers(0, 3, random.integers(1, 6)).tolist() for _ in range(400)))
    rows = both_tiers(trace, admission=[ORACLE, COIN, LEARNED], write_shares=[0.5])
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
    assert rows == both_tiers(trace, admission=[ORACLE, COIN, LEARNED], write_shares=[0.5]), "the same again"


def test_where_nothing_is_written_every_row_is_there() -> None:
    """DRAM has room for all, so that a budget is of nothing."""
    rows = both_tiers(made_of([1, 2], [1, 2]), blocks=[16], admission=[COIN, LEARNED], write_shares=[0.5, 0.8])
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
            rows = both_tiers(slow, admission=[COIN, LEARNED], write_shares=[share])
            everything, (learned,) = (
                rows[0],
                [row for row in rows if (row.admission, row.write_share) == (LEARNED, share)],
            )
            assert everything.nvme_written_blocks >= 2 * requests - 4 >= 2
            assert learned.nvme_written_blocks <= everything.nvme_written_blocks


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "times_a_coin"), [(LeafFirstLru, 1.25), (Adaptive, 1.3)])
def test_on_recorded_conversations_fewer_bytes_keep_the_hits(policy: PolicyMaker, times_a_coin: float) -> None:
    """5,000 blocks of DRAM above 35,000 of NVMe: without a budget; and with one of half the bytes, beside a coin that
    writes a little more."""
    trace = recorded("mooncake_conversation")

    def hits_and_writes(admission: Callable[[Replay], Admission]) -> tuple[int, int, int]:
        done = Replay(policy, 5_000, 0, 35_000, admission).run(trace)
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
