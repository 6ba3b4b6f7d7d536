"""A trace as requests: what shared a prefix shares one, what did not does not, and nothing is longer than it may be."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_bench.traffic_engines import findable_tokens
from kvstore.block.errors import BadInput
from kvstore.insight.trace import Trace, read_trace
from kvstore.openai.client import samples_of
from kvstore.traffic.run import (
    UNKNOWN_OUTPUT,
    RequestOutcome,
    Slo,
    TrafficOptions,
    TrafficResult,
    TurnFigures,
    Workload,
    engine_tokens,
    grown,
    sidecar_tokens,
)

BLOCK = 64


def trace_of(chains: list[tuple[list[int], int]], outputs: int = 40) -> Trace:
    """chains: ids of each request, and tokens of its last block."""
    lines = [
        {
            "timestamp": 250 * at,
            "input_length": BLOCK * (len(ids) - 1) + tail,
            "output_length": outputs,
            "hash_ids": [*ids[:-1], 10_000 + at if tail < BLOCK else ids[-1]],
        }
        for at, (ids, tail) in enumerate(chains)
    ]
    return read_trace("drawn", map(json.dumps, lines), BLOCK)


def made(trace: Trace, longest: int = 1 << 20, **given_: Any) -> Workload:
    options = TrafficOptions(**{"seconds": 1e6, "vocabulary": 50_000, **given_})
    return Workload.of(trace, options, longest)


def shared_length(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


CHAINS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, BLOCK)), min_size=1, max_size=8
)


@given(CHAINS, st.sampled_from([1.0, 0.5, 0.25]), st.integers(0, 3))
@settings(deadline=None)
def test_prompts_share_what_the_trace_shares(chains: list[tuple[list[int], int]], scale: float, salt: int) -> None:
    trace = trace_of(chains)
    workload = made(trace, scale=scale)
    size = workload.block_tokens
    assert size == BLOCK * scale
    prompts = [workload.prompt(one, salt) for one in workload.requests]
    for prompt, request, tokens in zip(prompts, workload.requests, trace.input_tokens.tolist(), strict=True):
        assert len(prompt) == workload.tokens_of(request) and abs(len(prompt) - tokens * scale) <= 1
    for (first, one), (second, other) in combinations(zip(prompts, trace.chains(), strict=True), 2):
        shared = shared_length(one, other)
        assert shared_length(first, second) >= min(shared * size, len(first), len(second))
        assert shared_length(first, second) <= shared * size + 3, "but for luck"
    anew = workload.prompt(workload.requests[0], salt + 1)
    assert shared_length(prompts[0], anew) <= 3


def test_arrivals_are_the_traces_at_the_speed_that_is_wanted() -> None:
    trace = trace_of([([0], 64)] * 9)
    assert [one.at for one in made(trace).requests] == [0.25 * at for at in range(9)]
    assert [one.at for one in made(trace, speed=0.5).requests][:3] == [0, 0.5, 1.0]
    assert len(made(trace, seconds=1.0).requests) == 4
    assert len(made(trace, requests=2).requests) == 2


def test_the_longest_request_just_fits() -> None:
    trace = trace_of([([0, 1, 2, 3], 64), ([0], 7)], outputs=256)
    workload = made(trace, longest=128)
    assert workload.scale == 0.25 and workload.longest_tokens == 128
    assert [one.output for one in workload.requests] == [64, 64]
    cut = made(trace, longest=100, scale=1.0)
    assert all(cut.tokens_of(one) + one.output <= 100 for one in cut.requests)
    whole = made(trace, longest=1000, scale=1.0)
    assert (whole.working_set_tokens, whole.shared_tokens) == (BLOCK * 5, 0)
    with pytest.raises(BadInput, match="--scale"):
        made(trace, longest=4)


@given(CHAINS, st.sampled_from([1.0, 0.5, 0.25]), st.sampled_from([16, 24, 64, 96]))
@settings(deadline=None)
def test_what_pages_can_find_is_what_a_cache_of_these_tokens_finds(
    chains: list[tuple[list[int], int]], scale: float, page: int
) -> None:
    workload, seen, found = made(trace_of(chains), scale=scale), set(), 0
    for request in workload.requests:
        prompt = workload.prompt(request, 0)
        pages = [tuple(prompt[:end]) for end in range(page, len(prompt) + 1, page)]
        wanted = [one for one in pages if len(one) < len(prompt)]
        found += page * next((at for at, one in enumerate(wanted) if one not in seen), len(wanted))
        seen.update(pages)
    assert findable_tokens(workload, page) == found


def test_what_a_recording_does_not_know_is_made_up() -> None:
    assert made(trace_of([([0], 5)], outputs=0)).requests[0].output == UNKNOWN_OUTPUT


PAGE = """# HELP x y
kvstore_vllm_prompt_tokens_total{engine="0",outcome="hit",origin="dram"} 128.0
kvstore_vllm_prompt_tokens_total{engine="0",outcome="hit",origin="engine"} 64.0
kvstore_vllm_prompt_tokens_total{engine="0",outcome="miss",origin="absent"} 8.0
vllm:prefix_cache_hits_total{engine="0"} 64.0
garbage{ 1
kvstore_x not_a_number
"""


def test_hits_are_read_by_tier_and_misses_by_reason() -> None:
    tokens = {"asked": 200.0, "dram": 128.0, "engine": 64.0, "missed absent": 8.0}
    assert engine_tokens(PAGE) == tokens
    figures = TurnFigures.of([outcome(0.1)], 1.0, grown({}, tokens), []).figures
    assert [figures[name] for name in ("hit, dram", "hit, engine", "miss, absent")] == [0.64, 0.32, 0.04]
    plain = 'vllm:prefix_cache_queries_total{a="b"} 100\nvllm:prefix_cache_hits_total 30.0\n'
    assert engine_tokens(plain) == {"asked": 100.0, "engine": 30.0}
    assert engine_tokens("") == {} and len(list(samples_of(PAGE))) == 4
    granted = 'kvstore_granted_tokens_total{tier="nvme"} 9\nkvstore_revoked_tokens_total{tier="nvme"} 2\n'
    assert sidecar_tokens(granted) == {"sidecar nvme": 7.0}
    assert grown({"asked": 5.0}, {"asked": 7.0, "new": 1.0}) == {"asked": 2, "new": 1}


def outcome(ttft: float, gaps: tuple[float, ...] = (), error: str = "") -> RequestOutcome:
    first = None if error else 1.0 + ttft
    return RequestOutcome(1.0, first, 1.0 + ttft + sum(gaps), list(gaps), 10, 1 + len(gaps), None, error)


def test_goodput_counts_what_failed_as_bad() -> None:
    slo = Slo(200, 100)
    outcomes = [outcome(0.1, (0.05, 0.15)), outcome(0.1, (0.3,)), outcome(0.3), outcome(0.0, error="broken")]
    turn = TurnFigures.of(outcomes, 2.0, {"asked": 40, "dram": 10}, [slo])
    assert turn.figures[slo.name] == 0.25 and (turn.failed, turn.errors) == (1, ["broken"])
    assert turn.figures["hit, dram"] == 0.25 and turn.figures["output tokens/s"] == 3.0
    assert turn.figures["TTFT p50, ms"] == pytest.approx(100)
    nothing = TurnFigures.of([outcome(0.0, error="broken")], 1.0, {}, [slo])
    assert "TTFT p50, ms" not in nothing.figures and nothing.failed == nothing.requests


def test_ratios_are_of_the_same_turn() -> None:
    def turn(ttft: float) -> TurnFigures:
        return TurnFigures({"TTFT": ttft}, {}, 1, 0, 1.0)

    result = TrafficResult(made(trace_of([([0], 64)])), 1.0)
    result.turns = {
        "a": [turn(10), turn(100)],
        "b": [turn(5), turn(25)],
        "c": [TurnFigures({}, {}, 1, 1, 1.0, ["x"])] * 2,
    }
    found = result.found()
    a, b = (row for row in found.rows if row["figure"] == "TTFT")
    assert (a["endpoint"], a["ratio"], b["endpoint"], b["ratio"], b["limit"]) == ("a", None, "b", 0.375, 55)
    assert (b.value, b["low"], b["high"], b.samples) == (15, 5, 25, 2)
    failed = [row for row in found.rows if row["figure"] == "failed"]
    assert [(row["endpoint"], row.value, row.met) for row in failed] == [
        ("a", 0, True),
        ("b", 0, True),
        ("c", 2, False),
    ]
    assert len(found.faults) == 2 and found.to_dict()["faults"] == found.faults
