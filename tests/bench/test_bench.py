"""The benches count, pair and report as they say; how fast anything is, no test asserts.

Everything runs on the real store with frames of a few KiB and indexes of a few hundred blocks.
"""

from __future__ import annotations

import gc
import io
import json
import threading
from typing import Any

import pytest
from rich.console import Console

from kvstore.bench import lookup, measure, rig, tiers
from kvstore.bench import rig as rows
from kvstore.bench.row import BenchResult, Target
from kvstore.block.errors import BadInput
from tiering.frame import digest

SHAPE = rig.BlockShape(layers=2, block_tokens=64, kv_heads=2, head_dim=8)
BLOCKS = 3
SMALL = tiers.TiersOptions(shapes=(SHAPE,), working_set_bytes=rig.PROMPTS * BLOCKS * SHAPE.payload_bytes, laps=2)


def rendered(result: Any) -> str:
    """What a person sees."""
    console = Console(file=io.StringIO(), width=200)
    result.render(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


# tiers ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiers_result() -> tuple[BenchResult, list[str]]:
    said: list[str] = []
    return tiers.run(SMALL, said.append, "dram"), said


def test_every_path_order_thread_count_and_side_has_a_row(tiers_result: tuple[BenchResult, list[str]]) -> None:
    rows = tiers_result[0].rows
    seen = {
        (row["path"], row["page_order"], row["threads"], row["verified"]) for row in rows if row["path"] != "memcpy"
    }
    orders = (tiers.HEAD_MAJOR, tiers.TOKEN_MAJOR)
    assert seen == {
        (path, order, threads, verified)
        for path in ("get", "put")
        for order in orders
        for threads in SMALL.threads
        for verified in (True, False)
    }
    assert {(row["tier"], row.limit_of) for row in rows} == {("dram", "memcpy")} and tiers_result[0].about[
        "disk"
    ] is None
    assert [row["threads"] for row in rows if row["path"] == "memcpy"] == [2] * 4, "both directions in both orders"
    assert len(rows) == len(seen) + 4


def test_rows_are_ratios_with_their_quartiles(tiers_result: tuple[BenchResult, list[str]]) -> None:
    for row in tiers_result[0].rows:
        assert row["payload_bytes"] == SHAPE.payload_bytes == 2 * 2 * 64 * 2 * 8 * 2
        assert 0 < row.ratio_low <= row.ratio <= row.ratio_high and row["cpu_ratio"] > 0
        assert row.value > 0 and row.limit > 0
        assert row.target is None and row.met is None, "targets are for frames of 2 MiB and above"


def test_tiers_as_json_and_as_text(tiers_result: tuple[BenchResult, list[str]]) -> None:
    result, said = tiers_result
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["bench"] == "tiers" and len(plain["rows"]) == len(result.rows)
    assert {"processor", "cores", "memory_bytes"} <= plain["machine"].keys()
    assert {"path", "payload_bytes", "value", "unit", "limit", "limit_of", "ratio", "target", "met"} <= plain["rows"][
        0
    ].keys()
    text = rendered(result)
    assert "[token, head, dim]" in text and "without verification" in text and "NVMe" not in text
    assert any("filling" in line for line in said) and any("put" in line for line in said)


def test_targets_are_set_where_they_hold() -> None:
    large = rig.BlockShape(8, 64)
    found = measure.Against(1.0, 0.8, 0.8, 0.7, 0.9, 0.8)
    row = rows.memcpy_row("dram", "get", large, rows.HEAD_MAJOR, True, 1, 4, found)
    assert large.payload_bytes == 2 << 20 and row["prompt_tokens"] == 4 * 64
    assert (row.target, row.met) == (Target(0.70), True)
    assert row.value == pytest.approx(4 * (2 << 20) / 1e9)
    assert rows.memcpy_row("dram", "get", large, rows.HEAD_MAJOR, True, 2, 4, found).met is False
    assert rows.memcpy_row("door", "get", large, rows.HEAD_MAJOR, True, 1, 4, found).target == Target(0.68)
    assert rows.memcpy_row("door", "put", large, rows.HEAD_MAJOR, False, 1, 4, found).met is False
    assert rows.memcpy_row("dram", "get", large, rows.TOKEN_MAJOR, True, 1, 4, found).target is None
    assert rows.memcpy_row("dram", "get", SHAPE, rows.HEAD_MAJOR, True, 1, 4, found).target is None


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "available_bytes", lambda: 1 << 20)
    with pytest.raises(BadInput, match="free some"):
        tiers.run(tiers.TiersOptions(), only="dram")


def test_the_working_set_shrinks_to_half_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = rig.PROMPTS * SHAPE.payload_bytes
    monkeypatch.setattr(tiers, "available_bytes", lambda: 2 * tiers.BUFFERS * smallest)
    result = tiers.run(tiers.TiersOptions(shapes=(SHAPE,), laps=1, threads=(1,)), only="dram")
    assert result.options.working_set_bytes == smallest


@pytest.mark.parametrize("page_tokens", [0, 16])
def test_a_side_stores_new_blocks_into_a_full_store(page_tokens: int) -> None:
    pool = rig.PagePool(SHAPE, BLOCKS, page_tokens)
    side = rig.Side(SHAPE, BLOCKS, pool, 1, digest)
    try:
        before = side.store.usage()
        assert before.dram.free == 0 and before.dram.used == before.blocks >= rig.PROMPTS * BLOCKS
        for _ in range(3):
            side.get(0)
        side.put(0)
        after = side.store.usage()
        assert after.blocks == before.blocks
        for name in ("stored_blocks", "evicted_blocks"):
            assert after.counters[name] - before.counters[name] == BLOCKS
        side.check()
    finally:
        side.store.close()


def test_without_verification_leaves_out_the_payload_digests_only() -> None:
    taken: list[int] = []

    def counted(*buffers: Any) -> bytes:
        taken.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return digest(*buffers)

    pool = rig.PagePool(SHAPE, BLOCKS, 0)
    side = rig.Side(SHAPE, BLOCKS, pool, 1, counted)
    bare = rig.Side(SHAPE, BLOCKS, pool, 1, rig.no_digest)
    try:
        for path in ("get", "put"):
            taken.clear()
            getattr(side, path)(0)
            assert taken == [SHAPE.payload_bytes // SHAPE.layers] * (SHAPE.layers * BLOCKS)
            getattr(bare, path)(0)
        place = bare.store.blocks.residency.place(bare.store.blocks.index.match(0, bare_keys(bare))[0], 0)
        bare.store.spans([place])[0].view[100] ^= 1  # in the header: still checked
        with pytest.raises(AssertionError, match="corrupt"):
            bare.get(0)
    finally:
        side.store.close()
        bare.store.close()


def bare_keys(side: rig.Side) -> list[bytes]:
    """The keys of the prompt that this side gets next: the second one."""
    side._stored[:] = [side._prompt(next(side._numbers))]
    side._handles[0].put(side._stored[0], side._pool.take())
    return side._handles[0].match(side._stored[0]).keys


def test_pages_go_round() -> None:
    pool = rig.PagePool(SHAPE, BLOCKS, 16)
    tables = [list(pool.take().table) for _ in range(rig.PROMPTS + 1)]
    assert tables[0] == list(range(BLOCKS * 4)) == tables[-1]
    assert sorted(page for table in tables[:-1] for page in table) == list(range(rig.PROMPTS * BLOCKS * 4))
    assert pool.take().page_tokens == 16 and rig.PagePool(SHAPE, BLOCKS, 0).page_tokens == 64


# measure --------------------------------------------------------------------------------------------------------------


def test_every_contender_runs_between_two_limits() -> None:
    calls: list[str] = []

    def turn(name: str, seconds: float) -> measure.Turn:
        def one() -> measure.Cost:
            calls.append(name)
            assert not gc.isenabled()
            return measure.Cost(seconds, 2 * seconds)

        return one

    found = measure.against(turn("limit", 1.0), {"a": turn("a", 2.0), "b": turn("b", 4.0)}, laps=3)
    assert calls == ["limit", *["a", "limit", "b", "limit"] * (3 + measure.WARM_UP_LAPS)]
    assert found["a"] == measure.Against(2.0, 1.0, 0.5, 0.5, 0.5, 0.5, 3)
    assert found["b"].ratio == 0.25 and gc.isenabled()


def test_every_limit_runs_around_every_contender() -> None:
    calls: list[str] = []

    def turn(name: str, *seconds: float) -> measure.Turn:
        left = iter(seconds * 9)

        def one() -> measure.Cost:
            calls.append(name)
            return measure.Cost(next(left), 1.0)

        return one

    limits = {"x": turn("x", 1.0, 3.0, 5.0), "y": turn("y", 8.0)}
    found = measure.against_each(limits, {"a": turn("a", 2.0), "b": turn("b", 4.0)}, laps=1, warm_up_laps=0)
    assert calls == ["x", "y", "a", "x", "y", "b", "x", "y"]
    assert found["a"]["x"] == measure.Against(2.0, 3.0, 1.0, 1.0, 1.0, 1.0), "the mean of 1 and 3 is 2"
    assert (found["b"]["x"].ratio, found["a"]["y"].ratio, found["b"]["y"].ratio) == (1.0, 4.0, 2.0)


def test_quantile_of_few_values() -> None:
    assert [measure.quantile([3, 1, 2, 4], share) for share in (0.0, 0.25, 0.75, 1.0)] == [1, 2, 4, 4]


def test_together_counts_from_the_first_start_to_the_last_end() -> None:
    met = threading.Barrier(2, timeout=10)
    before = threading.active_count()
    with measure.Together(2) as team:
        for _ in range(3):
            cost = team.run([lambda: met.wait() and None, lambda: met.wait() and None])
            assert 0 < cost.wall < 10 and cost.cpu >= 0
    assert threading.active_count() == before


def test_a_failure_in_a_thread_is_the_callers() -> None:
    def fail() -> None:
        raise RuntimeError("in the second thread")

    with measure.Together(2) as team:
        with pytest.raises(RuntimeError, match="second thread"):
            team.run([lambda: None, fail])
        assert team.run([lambda: None, lambda: None]).wall >= 0


def test_the_machine_is_described() -> None:
    described = measure.machine()
    assert described["cores"] >= 1 and described["memory_bytes"] > 1 << 28  # type: ignore[operator]
    assert 0 < measure.available_bytes() <= described["memory_bytes"]  # type: ignore[operator]
    assert measure.resident_bytes() > 1 << 20


# lookup ---------------------------------------------------------------------------------------------------------------

FEW = lookup.LookupOptions(
    prompt_tokens=1024,
    small_blocks=32,
    large_blocks=400,
    laps=3,
    door_laps=5,
    clients=2,
    client_laps=1,
    client_seconds=0.2,
)


TABLES = ("keys", "names", "index", "residency", "policy", "slots")


@pytest.fixture(scope="module")
def lookup_result() -> tuple[BenchResult, list[str]]:
    said: list[str] = []
    return lookup.run(FEW, said.append), said


def test_both_indexes_are_matched_hot_and_in_turn(lookup_result: tuple[BenchResult, list[str]]) -> None:
    rows = [row for row in lookup_result[0].rows if row.what.get("by") == lookup.EMBEDDED]
    assert [(row["blocks"], row["prompts"]) for row in rows] == [
        (32, "the same"),
        (32, "in turn"),
        (400, "the same"),
        (400, "in turn"),
    ]
    for row in rows:
        assert 0 < row.ratio_low <= row.ratio <= row.ratio_high and row.target == Target(2.2, is_least=False)
        assert row.value > 0 and row.limit > 0 and (row.unit, row.samples) == ("ms", FEW.laps)


def test_lookup_as_json_and_as_text(lookup_result: tuple[BenchResult, list[str]]) -> None:
    result, said = lookup_result
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["bench"] == "lookup" and [row["by"] for row in plain["matches"][3:]] == [
        "this process",
        "a sidecar's socket",
    ]
    figures = {row["figure"]: row for row in plain["figures"]}
    assert {name: row["target"] for name, row in figures.items()} == {
        "match, large to small index": 1.7,
        "tables of a block": 300,
        "a block, as the process grew": 300,
        "garbage collection of the blocks": 50,
        "garbage collection of this program": None,
        "slowest insertion of a block": None,
    }
    assert all(row["value"] >= 0 and row["met"] in (None, True, False) for row in figures.values())
    tables = figures["tables of a block"]
    assert sum(tables[f"{name}_per_block"] for name in TABLES) == pytest.approx(tables["value"])
    assert plain["matches"][4]["blocks"] == 32 and plain["clients"][0]["clients"] == 2
    text = rendered(result)
    assert (
        "tables of a block: keys per block" in text and "1,024 tokens" in text and "client processes together" in text
    )
    assert any("400" in line for line in said) and any("2 clients" in line for line in said)
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_the_tables_are_filled_as_a_store_has_them() -> None:
    filled = lookup._Filled(FEW, FEW.large_blocks, lambda _: None)
    index, policy = filled._index, filled._policy
    whole = FEW.large_blocks // 16 * 16
    index.check()
    assert index.visible_blocks() == whole, "whole prompts only"
    leaves = {row for row in index.rows(0) if not index.children(row)}
    assert set(policy.victims()) == leaves and len(leaves) == whole // 16
    assert sum(table.capacity for table in filled._slots) >= whole
    footprint = filled.footprint(whole * 100)
    assert footprint.keys == 80 + 32 and footprint.counted > footprint.keys + 60
    assert filled.match(rotating=True)().wall > 0


@pytest.mark.parametrize("wrong", [{"prompt_tokens": 32}, {"small_blocks": 8}, {"large_blocks": 20}])
def test_an_index_smaller_than_a_prompt_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="at least one"):
        lookup.LookupOptions(**{"prompt_tokens": 1024, "small_blocks": 32, "large_blocks": 400, **wrong})
