"""`kvstore whatif` inside: sizes, parts of a trace that keep its chains, and adaptive estimated from a tenth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.insight.curve import HOT_NAMES, HOT_SHARE
from kvstore.insight.whatif import (
    ADAPTIVE,
    LEAST_ROOM,
    WhatIfOptions,
    WhatIfResult,
    hot_blocks,
    part_for,
    replayed_rate,
    run,
    thinned,
    thinned_rate,
)
from recorded import PUBLIC, made_of, recorded
from tiering.clock import SystemClock

SEEDS = range(10)
SIZES = {
    "mooncake_conversation": [int(size) for size in np.geomspace(1_000, 150_000, 10)],
    "mooncake_synthetic": [int(size) for size in np.geomspace(500, 40_000, 10)],
}
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=40)
GIB = 1 << 30


def estimated(*requests: list[int], **options: object) -> WhatIfResult:
    given = WhatIfOptions(**options)  # type: ignore[arg-type]
    return run(made_of(*requests), given, lambda part: kvstore.policy_named(given.policy, part), SystemClock())


@given(prompts=PROMPTS, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_of_a_short_trace_nothing_is_sampled_out(prompts: list[list[int]], sizes: list[int]) -> None:
    """Distances of fewer than 32 blocks have bins of their own; within one, its share of the bin is what is told."""
    if not any(prompts):
        return
    result = estimated(*prompts, blocks=sizes, is_exact=True)
    assert [row.blocks for row in result.rows] == sorted({*sizes})
    assert result.ceiling_error == pytest.approx(0, abs=1e-12)
    distinct = result.trace.distinct_blocks
    for row in result.rows:
        assert row.sample_ratio == 1 and row.error is not None and row.error <= 1e-12
        if row.blocks >= 2 * distinct or row.blocks in (1, 2, 4, 8, 16, 32):
            assert row.error == pytest.approx(0, abs=1e-12)


@given(prompts=PROMPTS, part=st.floats(0.05, 0.95), seed=st.integers(0, 9))
@example(prompts=[[0, 1, 2, 0, 1], [1, 2, 0]] * 20, part=0.5, seed=3)
@settings(max_examples=60, deadline=None)
def test_a_part_of_a_chain_is_a_chain(prompts: list[list[int]], part: float, seed: int) -> None:
    trace = made_of(*prompts)
    hot = hot_blocks(trace)
    uses = np.bincount(trace.blocks, minlength=trace.distinct_blocks)
    assert len(hot) <= HOT_NAMES and (uses[hot] >= HOT_SHARE * len(trace.blocks)).all()
    left_out = hot[:1]
    thin = thinned(trace, part, seed, left_out)
    parents: dict[int, int] = {}
    for chain in thin.chains():
        assert chain, "requests of which nothing is left are left out"
        for before, after in pairwise(chain):
            assert parents.setdefault(after, before) == before
    assert Counter(np.bincount(thin.blocks).tolist()) <= Counter(uses.tolist()), "of a block all uses, or none"
    assert len(thin.blocks) <= len(trace.blocks) - uses[left_out].sum()
    assert (thin.input_tokens == np.diff(thin.starts) * thin.block_tokens).all()


def test_sizes_are_blocks_or_bytes_or_some_that_fit() -> None:
    requests = [[at, at + 1, 7] for at in range(100)]
    given = {"kv_bytes_per_token": 1 << 20}
    block_bytes = 16 << 20
    result = estimated(*requests, blocks=[64], sizes_bytes=[GIB], **given)
    assert [(row.blocks, row.size_bytes) for row in result.rows] == [(64, GIB)]
    result = estimated(*requests, sizes_bytes=[GIB, 2 * GIB - 1], **given)
    assert [row.blocks for row in result.rows] == [64, 127] and result.rows[1].size_bytes == 127 * block_bytes
    rows = estimated(*requests).rows
    assert rows[-1].blocks == 300 and rows[0].blocks == 1 and len(rows) <= 10
    assert rows[-1].hit_rate == rows[-1].ceiling == 0, "each of them is there once"


def test_a_small_size_takes_a_larger_part() -> None:
    assert (part_for(100), part_for(400), part_for(1_000), part_for(2_000), part_for(1 << 20)) == (
        1,
        0.5,
        0.2,
        0.1,
        0.1,
    )
    assert all(blocks * part_for(blocks) > LEAST_ROOM - 0.01 for blocks in range(LEAST_ROOM, 50_000, 97))


def test_a_size_below_the_least_room_is_replayed_in_full() -> None:
    requests = [[at % 7, at % 5, at % 3] for at in range(200)]
    result = estimated(*requests, blocks=[20], policy=ADAPTIVE, is_exact=True)
    assert result.rows[0].sample_ratio == 1 and result.rows[0].error == 0 and result.mean_error == 0


def errors_at(name: str, size: int, told_part: float, seeds: Sequence[int]) -> float:
    """The mean absolute error at one size. told_part: what the policy takes its part of all blocks for."""
    trace = recorded(name).without_partial()
    whole = replayed_rate(trace, size, 0, kvstore.policy_named(ADAPTIVE))
    maker = kvstore.policy_named(ADAPTIVE, told_part)
    rates = [thinned_rate(trace, size, seed, maker) for seed in seeds]
    print(f"{size} blocks: {whole:.4f}, estimated", *(f"{rate:.4f}" for rate in rates))
    return float(np.abs(np.array(rates) - whole).mean())


@pytest.mark.slow
def test_a_part_learns_as_much_as_all_if_it_knows_that_it_is_one() -> None:
    """What the policy has as floors in names and in uses is of all blocks."""
    name, size = "mooncake_conversation", 10_000
    assert errors_at(name, size, part_for(size), range(4)) < errors_at(name, size, 1.0, range(4))


@cache
def exact(name: str) -> list[float]:
    trace, maker = recorded(name).without_partial(), kvstore.policy_named(ADAPTIVE)
    return [replayed_rate(trace, size, 0, maker) for size in SIZES[name]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.slow
def test_adaptive_is_near_enough(name: str, seed: int) -> None:
    trace = recorded(name).without_partial()
    rates = []
    for size in SIZES[name]:
        part = part_for(size)
        assert size * part > 100
        rates.append(thinned_rate(trace, size, seed, kvstore.policy_named(ADAPTIVE, part)))
    off = np.abs(np.array(rates) - exact(name))
    print(f"{name}, seed {seed}: MAE {off.mean():.4f}, worst {off.max():.4f}")
    assert off.mean() <= 0.015
