"""The benches measure what they say: counts, sums and shapes of results. How fast a machine is, is nobody's test."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from kvstore.bench import lookup, tiers
from kvstore.bench.measure import Against, Cost
from kvstore.bench.rig import Shape
from kvstore.errors import BadInput

TINY = tiers.Options(shapes=(Shape(2, 64, kv_heads=1, head_dim=16),), working_set_bytes=1 << 20, laps=3)
FEW = lookup.Options(prompt_tokens=1024, sizes=(64, 640), probes=4, rounds=2, collections=1)


def rendered(result: tiers.TiersResult | lookup.LookupResult) -> str:
    console = Console(file=StringIO(), width=200)
    result.render(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def measured() -> tiers.TiersResult:
    return tiers.run(TINY)


def test_tiers_measures_every_path_in_every_way(measured: tiers.TiersResult) -> None:
    ways = {(row.path, row.page_order, row.verified, row.threads) for row in measured.rows}
    assert len(ways) == len(measured.rows) == 2 * 2 * 2 * len(TINY.threads)
    for row in measured.rows:
        assert row.payload_bytes == TINY.shapes[0].payload_bytes
        assert row.gb_per_second > 0 and row.memcpy_gb_per_second > 0
        assert row.ratio_low <= row.ratio <= row.ratio_high


def test_tiers_sets_targets_for_large_frames_only(measured: tiers.TiersResult) -> None:
    assert all(row.target is None and row.met is None for row in measured.rows)
    row = tiers.Row(
        "get", 2 << 20, tiers.HEAD_MAJOR, True, 1, 1.0, 2.0, 0.71, 0.7, 0.8, 0.7, tiers.TARGETS["get", True, 1]
    )
    assert row.met is True


def test_tiers_says_what_it_measured(measured: tiers.TiersResult) -> None:
    found = json.loads(json.dumps(measured.to_dict()))
    assert found["bench"] == "tiers" and len(found["rows"]) == len(measured.rows)
    assert {"path", "payload_bytes", "verified", "threads", "ratio", "memcpy_gb_per_second"} <= found["rows"][0].keys()
    assert "without verification" in rendered(measured)


def test_tiers_refuses_frames_that_memory_cannot_hold() -> None:
    with pytest.raises(BadInput, match="this bench needs"):
        tiers.run(tiers.Options(shapes=(Shape(128, 4096, kv_heads=128),)))


def test_lookup_matches_whole_prompts_in_every_index() -> None:
    lines: list[str] = []
    result = lookup.run(FEW, lines.append)
    assert [row.blocks for row in result.rows] == [64, 640]
    for row in result.rows:
        assert row.match_ms > row.chain_ms / 2 > 0, "a match hashes the chain"
        assert row.match_ms <= row.match_ms_p99
    assert "matching" in lines
    found = json.loads(json.dumps(result.to_dict()))
    assert found["bench"] == "lookup" and set(found["targets"]) == set(result.targets)
    assert "bytes per block" in rendered(result)


def test_lookup_refuses_an_index_that_memory_cannot_hold() -> None:
    with pytest.raises(BadInput, match="of memory"):
        lookup.run(lookup.Options(sizes=(1 << 40,)))


def test_a_ratio_is_the_median_of_neighbours() -> None:
    """The limit drifts from 1 to 3 seconds while the contender takes 4: each pair has its own quotient."""
    costs = [Cost(4.0, 4.0)] * 3
    limits = [(Cost(1.0, 1.0), Cost(1.0, 1.0)), (Cost(1.0, 1.0), Cost(3.0, 3.0)), (Cost(3.0, 3.0), Cost(3.0, 3.0))]
    assert Against.of(costs, limits).ratio == 0.5
