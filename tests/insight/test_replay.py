"""Replay: the store's own tables, the figures that were measured, and the same each time."""

from __future__ import annotations

import ast
from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.block.errors import BadInput
from kvstore.config import POLICIES
from kvstore.insight import replay as replays
from kvstore.insight.replay import OPTIMUM, ReplayOptions, optimal_hits
from kvstore.insight.trace import Trace
from kvstore.node import build_replay
from recorded import line, made_of, read_trace, recorded

SEED = 7
MAKERS = {name: kvstore.policy_named(name) for name in POLICIES}
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=40)
QUIET = (lambda doing, done, steps: None,)

# Of leaf-first LRU; as in test_optimum.
MEASURED = {
    "mooncake_conversation": {
        1_000: 0.0445, 5_000: 0.1118, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637,
    },
    "mooncake_synthetic": {1_000: 0.0841, 5_000: 0.2793, 10_000: 0.4239, 30_000: 0.6242},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        pytest.param(name, size, marks=() if size in (5_000, 30_000) else pytest.mark.slow)
        for name, sizes in MEASURED.items()
        for size in sizes
    ],
)
def test_lru_has_the_figures_that_were_measured(name: str, blocks: int) -> None:
    trace = recorded(name)
    hits = build_replay(MAKERS["lru"], blocks).run(trace).dram_hits
    assert f"{hits.sum() / len(trace.blocks):.4f}" == f"{MEASURED[name][blocks]:.4f}"


def lru_by_hand(trace: Trace, capacity: int) -> list[int]:
    """Leaf-first LRU in a dozen lines: hits of each request."""
    held, parents, told = OrderedDict[int, None](), dict[int, int](), []
    for chain in trace.chains():
        parents.update((after, before) for before, after in pairwise(chain))
        found = next((depth for depth, block in enumerate(chain) if block not in held), len(chain))
        told.append(found)
        for block in reversed(chain[:found]):
            held.move_to_end(block)
        kept = chain[:capacity]
        for block in kept[found:]:
            while len(held) >= capacity:
                inner = {parents.get(one) for one in held} | set(kept)
                del held[next(one for one in held if one not in inner)]
            held[block] = None
        for block in reversed(kept):
            held.move_to_end(block)
    return told


@given(prompts=PROMPTS, capacity=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_lru_is_what_it_says(prompts: list[list[int]], capacity: int) -> None:
    trace = made_of(*prompts)
    replay = build_replay(MAKERS["lru"], capacity)
    assert replay.run(trace).dram_hits.tolist() == lru_by_hand(trace, capacity)
    replay.check()


@pytest.mark.parametrize("policy", MAKERS)
@given(prompts=PROMPTS, capacity=st.integers(1, 12), seed=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_no_policy_finds_more_than_the_optimum(policy: str, prompts: list[list[int]], capacity: int, seed: int) -> None:
    trace = made_of(*prompts)
    replay = build_replay(MAKERS[policy], capacity, seed)
    done = replay.run(trace)
    replay.check()
    lengths = np.diff(trace.starts)
    assert done.dram_hits.sum() <= optimal_hits(trace, capacity).sum()
    assert (done.dram_hits <= lengths).all()
    room = np.minimum(lengths, capacity)
    assert (done.dram_hits + done.dram_writes >= room).all(), "as much of a request is held as there is room for"


@pytest.mark.parametrize("policy", MAKERS)
def test_the_same_again_gives_the_same(policy: str) -> None:
    random = np.random.default_rng(SEED)
    trace = made_of(*(random.integers(0, 4, random.integers(1, 9)).tolist() for _ in range(800)))
    first, again = (build_replay(MAKERS[policy], 64, SEED).run(trace) for _ in range(2))
    assert (first.dram_hits == again.dram_hits).all() and (first.dram_writes == again.dram_writes).all()


def test_there_is_no_second_index() -> None:
    """Nothing here keeps blocks by their keys: what is found and what goes is decided in the store's own tables."""
    tree = ast.parse(Path(replays.__file__).read_text())
    assert "kvstore.core.table" in {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    (tables,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Replay"]
    names = {node.id for node in ast.walk(tables) if isinstance(node, ast.Name)}
    assert not names & {"OrderedDict", "defaultdict", "heappush", "set", "dict"}
    assert not [node for node in ast.walk(tables) if isinstance(node, ast.Dict | ast.DictComp | ast.Set)]
    replay = build_replay(MAKERS["lru"], 4)
    replay.run(made_of([1, 2], [1, 3]))
    assert replay._blocks.index.visible_blocks() == 3


def table(trace: Trace, *policies: str, **options: object) -> replays.ReplayResult:
    given = ReplayOptions(**{"blocks": [4], **options})  # type: ignore[arg-type]
    return replays.run([trace], {name: MAKERS[name] for name in policies}, given, build_replay, *QUIET)


def test_rows_are_sums_over_requests() -> None:
    lines = [line([1, 2, 3], 40), line([1, 2, 4], 48), line([1, 2, 3], 40)]
    trace = read_trace("made up", lines, 16)
    full, partial = (table(trace, "lru", count_partial=counted, prefill_rate=16.0) for counted in (False, True))
    row, best = full.rows
    assert (row.policy, best.policy) == ("lru", OPTIMUM)
    assert (row.asked_blocks, row.hit_blocks, row.written_blocks) == (7, 4, 3) and best.hit_blocks == 4
    assert row.block_hit_rate == 4 / 7
    assert (row.asked_tokens, row.hit_tokens) == (128, 64) and row.token_hit_rate == 0.5
    assert row.saved_prefill_seconds == pytest.approx(2 * 2 * (1 + 32 / replays.QUADRATIC_TOKENS))
    assert row.written_bytes == 3 * 16 * replays.KV_BYTES_PER_TOKEN
    row, _ = partial.rows
    assert (row.asked_blocks, row.hit_blocks) == (9, 5) and row.hit_tokens == 32 + 40, "no more than there are"


def test_what_warms_up_is_not_counted() -> None:
    trace = made_of([1, 2], [1, 2], [1, 2], [5])
    (row, _) = table(trace, "lru", warmup=0.5).rows
    assert (row.asked_blocks, row.hit_blocks, row.written_blocks) == (3, 2, 1)


def test_sizes_and_policies_make_a_table() -> None:
    result = table(made_of([1, 2], [1, 3], [4]), "lru", "adaptive", blocks=[2, 8, 2])
    assert [(row.policy, row.dram_blocks) for row in result.rows] == [
        (policy, size) for size in (2, 8) for policy in ("lru", "adaptive", OPTIMUM)
    ]
    told = result.to_dict()
    assert told["options"]["blocks"] == [2, 8, 2] and len(told["rows"]) == 6  # type: ignore[call-overload, index, arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"blocks": []}, "no size was given"),
        ({"warmup": 1.0}, "--warmup 1; give the share"),
        ({"warmup": float("nan")}, "--warmup nan"),
        ({"prefill_rate": 1e-320}, "--prefill-rate .*; give tokens per second, 0.001"),
    ],
)
def test_what_cannot_be_is_said(given: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        table(made_of([1]), "lru", **given)


STATES = ReplayOptions([100], state_bytes=48, kv_bytes_per_token=1)
"""A state takes the room of three blocks of 16 tokens, and is kept every 24 blocks."""


def with_states(trace: Trace, **options: object) -> dict[str | None, replays.ReplayRow]:
    """Of `lru`, by where states are kept."""
    given = replace(STATES, **options)  # type: ignore[arg-type]
    rows = replays.run([trace], {"lru": MAKERS["lru"]}, given, build_replay, *QUIET).rows
    return {row.states: row for row in rows if row.policy != OPTIMUM}


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


def test_states_are_replayed_in_one_tier() -> None:
    with pytest.raises(BadInput, match="states are replayed in DRAM alone"):
        replace(STATES, nvme_blocks=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
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
