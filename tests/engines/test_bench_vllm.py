"""`bench ttft --engine vllm` in a real vLLM, on the smallest model: counts and sums, and never how fast anything is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kv_bench import ttft_vllm
from kv_bench.ttft_vllm import (
    BARE,
    COLD,
    DEFAULT,
    EXTERNAL,
    HAND_OVER,
    HAND_OVERS,
    HOOKS,
    ITL,
    OVERHEAD,
    OWN,
    PLAIN,
    RAW,
    SMALL,
    TTFT,
)
from kvstore.traffic.row import BenchResult

pytestmark = pytest.mark.slow


def measured(part: str, **options: Any) -> BenchResult:
    """One part alone. Nothing failed: every prefix came whole from where it was to come from, or there is a fault."""
    result = ttft_vllm.run(replace(SMALL, parts=(part,), **options), print)
    assert result.faults == []
    assert result.about["versions"]["vllm"] and {row["part"] for row in result.rows} == {part}
    return result


def test_every_engine_and_path_has_its_turns() -> None:
    rows = {row["what"]: row for row in measured(TTFT, turns=3).rows}
    paths = [f"{path}, {engine}" for engine in (RAW, DEFAULT, BARE) for path in (OWN, EXTERNAL)]
    assert list(rows) == [COLD, f"{OWN}, {PLAIN}", *paths]
    for row in rows.values():
        assert row.samples == 3 and 0 < row.low <= row.value <= row.high
    for engine in (RAW, DEFAULT):
        details = rows[f"{EXTERNAL}, {engine}"].details
        assert all(details[f"{part}_ms"] > 0 for part in ("lookup", "lease", "load", "rest"))
    external = [f"{EXTERNAL}, {engine}" for engine in (RAW, DEFAULT, BARE)]
    assert {row["what"] for row in rows.values() if row.target} == {COLD, f"{OWN}, {RAW}", *external}


def test_hits_of_both_kinds_arrive_among_all_streams() -> None:
    options = replace(SMALL, arrivals=3, own_prefixes=2)
    alone, own, external = measured(ITL, arrivals=3, own_prefixes=2).rows
    assert alone.samples == 2 * options.arrivals * options.steps_between * options.streams, "a token a step and stream"
    for row in (own, external):
        assert row.details["arrivals"] == 3
        assert row.samples >= 3 * options.streams and row.samples % options.streams == 0
    assert external.limit == own.value and external.target is not None


def test_every_step_has_its_hooks() -> None:
    (row,) = measured(HOOKS).rows
    assert row.samples == SMALL.load_prompts * SMALL.load_steps_between
    names = [name.split()[0] for name in row.details if name.endswith(" us a step")]
    assert {"build_connector_meta", "start_load_kv", "wait_for_save", "on_new_request"} <= set(names)
    assert 0 < row.value < 1
    # Once a step: orders, their binding, the load, the save, what is finished, what failed; per layer two more.
    assert row.details["calls a step"] >= 6 + 2 * 4


def test_pairs_are_of_the_same_new_prompts() -> None:
    shipped, at_once = measured(OVERHEAD, pairs=3).rows
    assert (shipped.target is None, at_once.target is None) == (False, True)
    for row in (shipped, at_once):
        assert row.samples == 3 and row.low <= row.value <= row.high and row.limit is not None and row.limit > 0


def test_decode_loads_all_that_prefill_stored_both_ways() -> None:
    rows = measured(HAND_OVER, hand_overs=3, prefix_tokens=1024).rows
    assert [row["what"] for row in rows] == [f"decode's TTFT, {way}" for way in HAND_OVERS]
    for row in rows:
        assert row.samples == 3 and row.limit is not None and row.limit > row.details["prefill_ms"] > 0
        assert row.details["load_ms"] > 0 and row.details["step_ms"] > 0
