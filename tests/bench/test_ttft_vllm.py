"""`bench ttft --engine vllm` where there is no vLLM: arithmetic of its rows, its options, and what it says then."""

from __future__ import annotations

import io
import json
import random
from importlib.util import find_spec
from math import comb

import pytest
from rich.console import Console

from kv_bench.engines import ttft_vllm, vllm_rows
from kv_bench.engines.vllm_rows import (
    AT_ONCE,
    BARE,
    COLD,
    DEFAULT,
    EXTERNAL,
    HAND_OVER,
    OWN,
    PLAIN,
    RAW,
    TICKET,
    HandOver,
    Sample,
    VllmOptions,
    VllmResult,
    at_most,
    hand_over_row,
    hooks_row,
    interval_of_median,
    itl_rows,
    overhead_row,
    ttft_rows,
)
from kvstore.bench.row import Target
from kvstore.bench.traffic.random_llama import LLAMAS, MID, TINY, kv_bytes_per_token
from kvstore.block.errors import BadInput
from workbench import one_line


def samples(external_ms: float = 30.0, bare_ms: float = 25.0) -> dict[tuple[str, str], list[Sample]]:
    """Three turns on a machine that is twice and three times as slow in the later ones."""
    found = {(PLAIN, COLD): 1500.0, (PLAIN, OWN): 20.0, (BARE, OWN): 20.0, (BARE, EXTERNAL): bare_ms}
    found |= {(engine, path): ms for engine in (RAW, DEFAULT) for path, ms in ((OWN, 24.0), (EXTERNAL, external_ms))}
    return {
        name: [Sample(slow * ms, slow * 1.0, slow * 0.5, slow * 4.0) for slow in (1, 2, 3)]
        for name, ms in found.items()
    }


def test_ratios_are_of_a_turns_own_neighbours() -> None:
    rows = {row["what"]: row for row in ttft_rows(samples())}
    cold, raw, bare = rows[COLD], rows[f"{EXTERNAL}, {RAW}"], rows[f"{EXTERNAL}, {BARE}"]
    assert (raw.value, raw.limit, raw.samples) == (60.0, 40.0, 3)
    assert raw.ratio == pytest.approx(1.5) and raw.target == at_most(1.25) and raw.met is False
    assert raw.details["to its engine's own hit"] == pytest.approx(1.25)
    assert bare.ratio == pytest.approx(1.25) and bare.target == at_most(1.3) and bare.met is True
    assert cold.ratio == pytest.approx(50) and cold.target == Target(30) and cold.met is True
    default = rows[f"{EXTERNAL}, {DEFAULT}"]
    assert default.ratio == pytest.approx(1.5) and default.target == at_most(1.35) and default.met is False
    own = rows[f"{OWN}, {RAW}"]
    assert own.ratio == pytest.approx(1.2) and own.target == at_most(1.03) and own.met is False
    assert all(rows[f"{OWN}, {engine}"].target is None for engine in (PLAIN, DEFAULT, BARE))
    assert len(rows) == 8


def test_a_cold_run_that_is_too_near_misses_its_target() -> None:
    (cold,) = (row for row in ttft_rows(samples(external_ms=60.0)) if row["what"] == COLD)
    assert cold.ratio == pytest.approx(25) and cold.met is False


def test_the_parts_of_a_hit_are_all_of_it() -> None:
    raw = next(row for row in ttft_rows(samples()) if row["what"] == f"{EXTERNAL}, {RAW}")
    parts = [raw.details[f"{name}_ms"] for name in ("lookup", "lease", "load", "rest")]
    assert parts == pytest.approx([2, 1, 8, 49]) and sum(parts) == pytest.approx(raw.value)
    bare = next(row for row in ttft_rows(samples()) if row["what"] == f"{EXTERNAL}, {BARE}")
    assert "lookup_ms" not in bare.details, "nothing of it is timed"


def test_gaps_are_held_against_those_of_own_hits() -> None:
    gaps = {"none": [10.0] * 100, OWN: [20.0] * 99 + [30.0], EXTERNAL: [20.0] * 98 + [32.9, 33.1]}
    alone, own, external = itl_rows(gaps, {OWN: [Sample(40.0)], EXTERNAL: [Sample(60.0), Sample(80.0)]})
    assert (alone.value, own.value, external.value) == (10.0, 30.0, 33.1)
    assert alone.ratio is None and own.ratio is None and own.target is None
    assert external.limit == 30.0 and external.ratio == pytest.approx(33.1 / 30) and external.met is False
    assert external.details == {"arrivals": 2.0, "their TTFT ms": 70.0}
    assert (external.low, external.high) == (20.0, 33.1)


def test_hooks_are_a_share_of_all_steps() -> None:
    row = hooks_row(100, 2.0, {"build_connector_meta": (0.02, 100), "wait_for_save": (0.008, 300)})
    assert row.value == pytest.approx(0.014) and row.met is True and row.limit == pytest.approx(20.0)
    assert row.details["calls a step"] == 4 and row.details["ms a step"] == pytest.approx(0.28)
    assert row.details["wait_for_save us a step"] == pytest.approx(80)
    assert hooks_row(100, 2.0, {"build_connector_meta": (0.031, 100)}).met is False


def test_a_slowdown_is_judged_by_the_upper_end_of_its_interval() -> None:
    without = [100.0 + number for number in range(40)]
    steady = overhead_row(without, [1.03 * ms for ms in without])
    assert steady.value == pytest.approx(0.03) and steady.low == pytest.approx(0.03) and steady.met is True
    factors = [1.0 if number % 4 else 1.2 for number in range(40)]
    wandering = overhead_row(without, [factor * ms for factor, ms in zip(factors, without, strict=True)])
    assert wandering.value == pytest.approx(0.0) and wandering.high == pytest.approx(0.0) and wandering.met is True
    factors = [1.0 if number % 2 else 1.2 for number in range(40)]
    unsure = overhead_row(without, [factor * ms for factor, ms in zip(factors, without, strict=True)])
    assert unsure.low == pytest.approx(0.0) and unsure.high == pytest.approx(0.2) and unsure.met is False
    at_once = overhead_row(without, [1.2 * ms for ms in without], AT_ONCE)
    assert at_once["what"].endswith(AT_ONCE) and at_once.met is None, "it is told beside the other"


def test_a_hand_over_is_held_against_its_own_request() -> None:
    """Prefill's end, the load and three steps, on a machine that is twice as slow later."""
    found = [
        HandOver(slow * ttft, slow * 1000, slow * 10, slow * 30) for slow, ttft in ((1, 1050), (2, 1100), (1, 1200))
    ]
    row = hand_over_row(TICKET, found)
    assert (row["part"], row.samples, row.value) == (HAND_OVER, 3, 1200) and row.limit == 1100
    assert row.ratio == pytest.approx(1.0) and row.met is True
    assert row.details["load_ms"] == 10 and row.details["step_ms"] == 30 and row.details["ttft p99, ms"] == 2200
    assert row.details["behind prefill's end, ms"] == 200 and row.details["ratio p99"] == pytest.approx(1200 / 1100)
    assert hand_over_row(TICKET, [HandOver(1101, 1000, 10, 30)]).met is False


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (2, 0), (5, 0), (6, 0), (9, 1), (40, 13), (100, 39)])
def test_the_interval_is_that_of_order_statistics(count: int, rank: int) -> None:
    values = [float(number) for number in range(count)]
    random.Random(count).shuffle(values)
    low, high = interval_of_median(values)
    assert (low, high) == (rank, count - 1 - rank)
    outside = 2 * sum(comb(count, below) for below in range(rank + 1)) / 2**count
    if count >= 6:
        assert outside <= 0.05 < outside + 2 * comb(count, rank + 1) / 2**count


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    held = 0
    for _ in range(2000):
        low, high = interval_of_median([rng.expovariate(1.0) for _ in range(40)])
        held += low <= 0.693147 <= high
    assert held > 0.93 * 2000, "0.962 is expected; seven standard deviations below it are 0.93"


def test_as_json_and_as_text() -> None:
    one = [Sample(1.0)]
    rows = ttft_rows(samples()) + itl_rows({"none": [1.0], OWN: [1.0], EXTERNAL: [1.0]}, {OWN: one, EXTERNAL: one})
    rows += [hooks_row(10, 1.0, {"wait_for_save": (0.001, 10)}), overhead_row([1.0] * 6, [1.0] * 6)]
    rows.append(hand_over_row(TICKET, [HandOver(1.0, 1.0, 0.1, 0.1)]))
    result = VllmResult(VllmOptions(), {"vllm": "0.32.0", "threads": 2}, rows, ["something failed"])
    plain = json.loads(json.dumps(result.found().to_dict()))
    assert plain["bench"] == "ttft" and plain["engine"] == "vllm" and len(plain["rows"]) == 14
    assert plain["faults"] == ["something failed"] and plain["options"]["prefix_tokens"] == 4096
    assert {row["part"] for row in plain["rows"]} == set(vllm_rows.PARTS)
    judged = [row for row in plain["rows"] if row["target"]]
    assert [row["target"] for row in judged] == [30.0, 1.03, 1.25, 1.35, 1.3, 1.1, 0.015, 0.05, 1.0]
    assert all(row["met"] in (True, False) for row in judged)
    console = Console(file=io.StringIO(), width=200)
    result.found().render(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in (">= 30 met", "<= 1.25 missed", "lookup ms", "95 % interval", "vLLM 0.32.0"):
        assert word in text


def test_the_usual_model_is_the_one_that_is_written_of() -> None:
    options = ttft_vllm.options_for()
    assert options == VllmOptions() and options.shape == MID and options.prefix_tokens == 4096 and options.turns >= 5
    assert options.pairs == 40 and options.streams == 8 and options.parts == vllm_rows.PARTS
    assert kv_bytes_per_token(MID) == 8192 and kv_bytes_per_token(TINY) == 2048
    mid = LLAMAS[MID]
    hidden, heads = mid["hidden_size"], mid["num_attention_heads"] * mid["head_dim"]
    attention = hidden * 2 * (heads + mid["num_key_value_heads"] * mid["head_dim"])
    weights = mid["num_hidden_layers"] * (attention + 3 * hidden * mid["intermediate_size"])
    assert round((weights + 2 * hidden * mid["vocab_size"]) / 1e6) == 98


def test_options_take_what_was_given() -> None:
    options = ttft_vllm.options_for(shape=TINY, context="1k", parts=["hooks", "ttft"], turns=9, arrivals=3, pairs=4)
    assert (options.shape, options.prefix_tokens) == (TINY, 1024)
    assert (options.turns, options.arrivals, options.pairs) == (9, 3, 4)
    assert options.parts == ("ttft", "hooks")


def test_what_cannot_be_is_one_line() -> None:
    for given, named in (
        ({"shape": "8b"}, "allowed with --engine vllm: tiny, mid"),
        ({"parts": ["speed"]}, "allowed: ttft, itl, hooks, overhead, hand-over"),
        ({"context": "4100"}, "use 4096"),
        ({"context": "64k"}, "use 8064"),
    ):
        with pytest.raises(BadInput) as caught:
            ttft_vllm.options_for(**given)  # type: ignore[arg-type]
        assert one_line(caught.value, named)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_one_line_says_how_to_get_it() -> None:
    with pytest.raises(BadInput) as caught:
        ttft_vllm.run()
    assert one_line(caught.value, "make engines")
