"""What all benches share: turns beside limits, rows and their targets, processes that end with the bench; and the rows
of those that need a vLLM, where there is none."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import threading
from importlib.util import find_spec
from math import comb
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benches import bench as commands
from kv_bench import measure, ttft_vllm
from kv_bench.llamas import MID, TINY, kv_bytes_per_token, parse_tokens
from kv_bench.process import Child, Sidecar
from kv_bench.ttft_vllm import (
    AT_ONCE,
    BARE,
    COLD,
    DEFAULT,
    EXTERNAL,
    OWN,
    PLAIN,
    RAW,
    TICKET,
    HandOver,
    hand_over_row,
    hooks_row,
    interval_of_median,
    itl_rows,
    overhead_row,
    ttft_rows,
)
from kvstore.block.errors import BadInput, StoreError
from kvstore.cli.bench import judge
from kvstore.cli.terminal import CHECK_FAILED, OK
from kvstore.traffic.row import BenchResult, Row, Section, Target

# Turns ----------------------------------------------------------------------------------------------------------------


def test_every_limit_runs_around_every_contender() -> None:
    calls: list[str] = []

    def turn(name: str, *seconds: float) -> measure.Turn:
        left = iter(seconds * 9)

        def one() -> measure.Cost:
            calls.append(name)
            assert not gc.isenabled()
            return measure.Cost(next(left), 1.0)

        return one

    limits = {"x": turn("x", 1.0, 3.0, 5.0), "y": turn("y", 8.0)}
    found = measure.against_each(limits, {"a": turn("a", 2.0), "b": turn("b", 4.0)}, laps=1, warm_up_laps=0)
    assert calls == ["x", "y", "a", "x", "y", "b", "x", "y"] and gc.isenabled()
    assert found["a"]["x"] == measure.Against(2.0, 3.0, 1.0, 1.0, 1.0, 1.0), "the mean of 1 and 3 is 2"
    assert (found["b"]["x"].ratio, found["a"]["y"].ratio, found["b"]["y"].ratio) == (1.0, 4.0, 2.0)
    calls.clear()
    one = measure.against(turn("limit", 1.0), {"a": turn("a", 2.0)}, laps=3)["a"]
    assert calls == ["limit", *["a", "limit"] * (3 + measure.WARM_UP_LAPS)] and (one.ratio, one.laps) == (0.5, 3)
    assert [measure.quantile([3, 1, 2, 4], share) for share in (0.0, 0.25, 0.75, 1.0)] == [1, 2, 4, 4]
    assert measure.in_turn("abc", -1) == ["c", "a", "b"]


def test_together_counts_from_the_first_start_to_the_last_end_and_a_failure_is_the_callers() -> None:
    met, before = threading.Barrier(2, timeout=10), threading.active_count()

    def fail() -> None:
        raise RuntimeError("in the second thread")

    with measure.Together(2) as team:
        for _ in range(3):
            cost = team.run([lambda: met.wait() and None, lambda: met.wait() and None])
            assert 0 < cost.wall < 10 and cost.cpu >= 0
        with pytest.raises(RuntimeError, match="second thread"):
            team.run([lambda: None, fail])
        assert team.run([lambda: None, lambda: None]).wall >= 0
    assert threading.active_count() == before
    assert measure.available_bytes() > 0


def test_rates_are_of_bytes_per_second_and_times_are_turned_round() -> None:
    found = measure.Against(2.0, 1.0, 0.5, 0.4, 0.8, 0.6, 3)
    rate = measure.rate_row({}, found, 4e9, "copy", 0.7, limit_bytes=8e9)
    assert (rate.value, rate.limit, rate.ratio, rate.met) == (2.0, 8.0, 0.25, False)
    time = measure.time_row({}, found, "chain", 2.2)
    assert (time.value, time.limit, time.ratio, time.met) == (2e3, 1e3, 2.0, True)
    assert (time.ratio_low, time.ratio_high) == (1.25, 2.5)


# Rows -----------------------------------------------------------------------------------------------------------------

MET = Row({"figure": "match"}, 1.5, "ms", limit_of="chain", limit=1.0, ratio=1.5, target=Target(2.2, is_least=False))
MISSED = Row({"figure": "bytes per block"}, 312.25, "bytes", target=Target(300, is_least=False, of="value"))
UNSET = Row({"figure": "a row without a target"}, 0.5, "")
DETAIL = Row({"codec": "raw"}, 1.0, "GB/s", ratio=0.4, target=Target(4.0, of="core"), details={"core": 3.9})


def found(*rows: Row, faults: tuple[str, ...] = ()) -> BenchResult:
    """What a bench found, in two tables."""
    return BenchResult("b", sections=[Section(rows[:1]), Section(rows[1:], name="more")], faults=list(faults))


def test_a_row_is_met_by_the_figure_that_its_target_names() -> None:
    assert (MET.met, MISSED.met, UNSET.met, DETAIL.met) == (True, False, None, False)
    told = DETAIL.to_dict()
    assert (told["target"], told["target_of"], told["met"], told["core"]) == (4.0, "core, at least", False, 3.9)
    with pytest.raises(AttributeError):
        Row({}, 1.0, "", target=Target(1.0, of="rate"))
    with pytest.raises(AssertionError, match="two figures"):
        Row({"ratio": 1}, 1.0, "")


def test_every_row_of_every_table_is_in_the_json_and_on_the_screen() -> None:
    told, shown = json.loads(json.dumps(found(MET, MISSED, UNSET).to_dict())), io.StringIO()
    assert [row["figure"] for row in told["rows"]] == ["match"] and len(told["more"]) == 2 and told["faults"] == []
    assert told["machine"]["cores"] >= 1 and told["machine"]["memory_bytes"] > 1 << 28
    found(MET, MISSED, UNSET).render(Console(file=shown, width=120))
    for text in ("chain 1.00", "<= 2.2 met", "312.2 bytes", "<= 300 missed"):
        assert text in shown.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_with_check_the_status_says_so(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge([found(MET, UNSET)], as_json, True) == OK
    assert judge([found(MET, MISSED)], as_json, False) == OK
    capsys.readouterr()
    assert judge([found(MET, MISSED, DETAIL)], as_json, True) == CHECK_FAILED
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "kvstore: target missed: figure bytes per block: 312.2 bytes, wanted <= 300",
        "kvstore: target missed: codec raw: 1.00 GB/s, ratio 0.400, core 3.90, wanted >= 4",
    ]
    with pytest.raises(BadInput, match="nothing that was measured has a target"):
        judge([found(UNSET)], as_json, True)
    assert judge([found(MET, faults=("the answers differ",))], as_json, False) == CHECK_FAILED
    capsys.readouterr()
    assert judge([found(MET), found(MISSED)], as_json, True) == CHECK_FAILED
    if as_json:
        assert [one["bench"] for one in json.loads(capsys.readouterr().out)["results"]] == ["b", "b"]


def test_every_bench_takes_check_and_json() -> None:
    for command in commands.registered_commands:
        assert command.callback is not None
        assert {"check", "as_json"} <= command.callback.__annotations__.keys(), command.name


# Processes ------------------------------------------------------------------------------------------------------------

STORE = {"dram": "1MiB", "nvme": "off"}


@pytest.mark.slow
def test_a_child_answers_until_the_bench_ends_it() -> None:
    job = {"prompts": 1, "number": 0, "options": {"prompt_tokens": 64}}
    with Sidecar(STORE) as sidecar:
        sidecar.greeted()
        with Child("kv_bench.lookup", {**job, "socket": sidecar.socket}) as child:
            assert child.hear() == "ready" and Path(f"/proc/{child.process.pid}").exists()
    assert child.process.returncode == 0
    with (
        pytest.raises(StoreError, match="it ended with 1: KeyError"),
        Child("kv_bench.lookup", {}, "it") as child,
    ):
        child.hear()


def test_a_sidecar_is_a_process_that_leaves_nothing_behind() -> None:
    with Sidecar(STORE) as one:
        assert 0 < one.greeted() <= one.greeted() and one.keeper != os.getpid()
    assert not Path(f"/proc/{one.keeper}").exists() and not one.folder.exists()
    with pytest.raises(RuntimeError, match="in the bench"), Sidecar(STORE) as one:
        one.greeted()
        raise RuntimeError("in the bench")
    assert one._process.returncode == -9


def test_a_sidecar_that_cannot_start_was_killed_or_has_to_warn_is_no_measurement() -> None:
    wrong = pytest.raises(StoreError, match=r"ended with 2: .*dram='nothing' is not a size")
    with wrong, Sidecar({"dram": "nothing"}) as one:
        one.greeted()
    assert not one.folder.exists()
    with pytest.raises(StoreError, match="ended with -9"), Sidecar(STORE) as one:
        one.greeted()
        one.kill()
        one.end()
    with pytest.raises(StoreError, match="frames cannot be read"), Sidecar(STORE) as one:
        one.greeted()
        with one._log.open("a") as log:
            log.write("frames cannot be read\n")


# Rows of a vLLM -------------------------------------------------------------------------------------------------------


def answer(ttft_ms: float, slow: int = 1) -> dict[str, Any]:
    parts = {"lookup_ms": slow * 1.0, "lease_ms": slow * 0.5, "load_ms": slow * 4.0}
    return {"ttft_ms": slow * ttft_ms, "kvstore": None, **parts}


def test_ratios_are_of_a_turns_own_neighbours() -> None:
    """Three turns on a machine that is twice and three times as slow in the later ones."""
    times = {(PLAIN, COLD): 1500.0, (PLAIN, OWN): 20.0, (BARE, OWN): 20.0, (BARE, EXTERNAL): 25.0}
    times |= {(engine, path): ms for engine in (RAW, DEFAULT) for path, ms in ((OWN, 24.0), (EXTERNAL, 30.0))}
    rows = {
        row["what"]: row
        for row in ttft_rows({name: [answer(ms, slow) for slow in (1, 2, 3)] for name, ms in times.items()})
    }
    cold, raw, bare = rows[COLD], rows[f"{EXTERNAL}, {RAW}"], rows[f"{EXTERNAL}, {BARE}"]
    assert (raw.value, raw.limit, raw.samples, raw.ratio, raw.met) == (60.0, 40.0, 3, 1.5, False) and len(rows) == 8
    assert raw.details["to its engine's own hit"] == 1.25 and cold.ratio == 50 and cold.met is True
    parts = [raw.details[f"{name}_ms"] for name in ("lookup", "lease", "load", "rest")]
    assert parts == pytest.approx([2, 1, 8, 49]) and sum(parts) == raw.value and "lookup_ms" not in bare.details
    assert {row.target.number for row in rows.values() if row.target} == {30.0, 1.03, 1.25, 1.35, 1.3}


def test_gaps_hooks_and_slowdowns_are_judged_by_what_they_say() -> None:
    gaps = {"none": [10.0] * 100, OWN: [20.0] * 99 + [30.0], EXTERNAL: [20.0] * 98 + [32.9, 33.1]}
    alone, own, external = itl_rows(gaps, {OWN: [40.0], EXTERNAL: [60.0, 80.0]})
    assert (alone.value, own.value, external.value, external.limit) == (10.0, 30.0, 33.1, 30.0)
    assert alone.ratio is None and own.target is None and external.met is False
    assert external.details == {"arrivals": 2.0, "their TTFT ms": 70.0}
    row = hooks_row(100, 2.0, {"build_connector_meta": (0.02, 100), "wait_for_save": (0.008, 300)})
    assert row.value == pytest.approx(0.014) and row.met is True and row.details["calls a step"] == 4
    without = [100.0 + number for number in range(40)]
    unsure = overhead_row(without, [ms * (1.0 if number % 2 else 1.2) for number, ms in enumerate(without)])
    assert unsure.high == pytest.approx(0.2) and unsure.met is False
    assert overhead_row(without, [1.2 * ms for ms in without], AT_ONCE).met is None, "it is told beside the other"


def test_a_hand_over_is_held_against_its_own_request() -> None:
    """Prefill's end, the load and three steps, on a machine that is twice as slow later."""
    made = [HandOver(slow * ms, slow * 1000, slow * 10, slow * 30) for slow, ms in ((1, 1050), (2, 1100), (1, 1200))]
    row = hand_over_row(TICKET, made)
    assert (row.samples, row.value, row.limit) == (3, 1200, 1100) and row.ratio == pytest.approx(1.0) and row.met
    assert row.details["behind prefill's end, ms"] == 200 and row.details["ttft p99, ms"] == 2200


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (2, 0), (5, 0), (6, 0), (9, 1), (40, 13), (100, 39)])
def test_the_interval_is_that_of_order_statistics(count: int, rank: int) -> None:
    values = [float(number) for number in range(count)]
    random.Random(count).shuffle(values)
    assert interval_of_median(values) == (rank, count - 1 - rank)
    outside = 2 * sum(comb(count, below) for below in range(rank + 1)) / 2**count
    if count >= 6:
        assert outside <= 0.05 < outside + 2 * comb(count, rank + 1) / 2**count


def test_options_of_a_vllm_take_what_was_given_and_what_cannot_be_is_one_line() -> None:
    given = {"prefix_tokens": 1024, "turns": 9, "arrivals": 3, "pairs": None}
    options = ttft_vllm.options_for(["hooks", "ttft"], TINY, **given)
    assert (options.prefix_tokens, options.turns, options.pairs, options.parts) == (1024, 9, 2, ("ttft", "hooks"))
    assert kv_bytes_per_token(MID) == 8192
    assert [parse_tokens(text) for text in ("8k", "128K", " 300 ")] == [8192, 131072, 300]
    for work, words in (
        (lambda: ttft_vllm.options_for(shape="8b"), "allowed: tiny, mid"),
        (lambda: ttft_vllm.options_for(["speed"]), "allowed: ttft, itl, hooks, overhead, hand-over"),
        (lambda: ttft_vllm.options_for(prefix_tokens=4100), "use 4096"),
        (lambda: ttft_vllm.options_for(prefix_tokens=64 << 10), "use 8064"),
        (lambda: parse_tokens("1.5k"), "write e.g. 8192 or 8k"),
    ):
        with pytest.raises(BadInput, match=words):
            work()
    if find_spec("vllm") is None:
        with pytest.raises(BadInput, match="make engines"):
            ttft_vllm.run(ttft_vllm.SMALL, print)
