"""Matches through the door are whole, by real clients in processes of their own; how fast, no test asserts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

import pytest

from kvstore.bench import lookup_door
from kvstore.bench.lookup_client import MODEL, _turn, shape_of
from kvstore.bench.measure import WARM_UP_LAPS, Cost
from kvstore.bench.rig import LookupOptions, PagePool, Prompts
from kvstore.bench.row import Row, Target
from kvstore.bench.sidecar import Sidecar
from kvstore.block.errors import StoreError

FEW = LookupOptions(
    prompt_tokens=1024,
    small_blocks=40,
    large_blocks=40,
    door_laps=5,
    clients=2,
    client_laps=2,
    client_seconds=0.2,
)
STORED = 2  # whole prompts of 16 blocks in 40


@pytest.fixture(scope="module")
def measured() -> tuple[Row, Row, list[str]]:
    said: list[str] = []
    return *lookup_door.run(FEW, said.append), said


def test_one_client_and_many_together_are_measured(measured: tuple[Row, Row, list[str]]) -> None:
    one, together, said = measured
    assert one["blocks"] == STORED * 16 and one.samples == FEW.door_laps, "whole prompts only"
    assert 0 < one.value <= one["ms_p99"] and 0 < one["limit"] <= one["chain_ms_p99"]
    assert 0 < one["ratio_low"] <= one["ratio"] <= one["ratio_high"]
    assert together["clients"] == 2 and 0 < together["ms_p50"] <= together["ms_p99"] <= 1e3 * FEW.client_seconds
    assert together.value > 0 and together["limit"] > 0 and together.unit == "matches/s"
    assert 0 < together["ratio_low"] <= together["ratio"] <= together["ratio_high"]
    assert together["times_chain"] == pytest.approx(1e3 / together.value / one["limit"])
    assert [line.split()[0] for line in said] == ["filling", "matching", "starting", "matching"]


def test_targets_are_in_chains(measured: tuple[Row, Row, list[str]]) -> None:
    one, together = (row.target for row in measured[:2])
    assert one == Target(pytest.approx(0.8 / 0.27, rel=0.01), is_least=False)
    assert together == Target(pytest.approx(1 / 0.27, rel=0.01), is_least=False, of="times_chain")
    assert LookupOptions().clients == 8 and LookupOptions().prompt_tokens == 32768


# The clients ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled() -> Iterator[str]:
    with Sidecar({"dram": "4MiB", "nvme": "off"}) as sidecar, sidecar.client() as client:
        handle = client.namespace(model=MODEL, layout=shape_of(FEW).layout)
        pages = PagePool(shape_of(FEW), FEW.prompt_blocks, 0, prompts=1).take()
        for number in range(STORED):
            assert handle.put(Prompts(FEW)[number], pages).stored == FEW.prompt_blocks
        yield sidecar.socket


def test_clients_are_processes_that_do_as_they_are_told(filled: str) -> None:
    with lookup_door.Clients(FEW, filled, STORED) as clients:
        numbers = [child.process.pid for child in clients.children]
        assert len({*numbers, os.getpid()}) == 1 + FEW.clients
        started = perf_counter()
        costs = [clients.match(), clients.hash(), clients.match()]
        assert perf_counter() - started >= 3 * FEW.client_seconds
        assert [cost.wall for cost in costs[::2]] == [FEW.client_seconds / len(waits) for waits in clients.waits]
        assert all(0 < cost.wall <= FEW.client_seconds and cost.cpu > 0 for cost in costs)
        assert max(map(max, clients.waits)) <= FEW.client_seconds
    assert [child.process.returncode for child in clients.children] == [0, 0]


def test_a_match_that_is_not_whole_is_no_measurement(filled: str) -> None:
    with (
        pytest.raises(StoreError, match=r"lookup_client ended with 1:(?s:.*)AssertionError(?s:.*): Match\(blocks=0"),
        lookup_door.Clients(replace(FEW, clients=1), filled, 30 * STORED) as clients,
    ):
        for _ in range(100):
            clients.match()


def test_a_turn_counts_what_ended_in_time() -> None:
    calls: list[float] = []
    start = perf_counter() + 0.02

    def work() -> None:
        assert perf_counter() >= start
        calls.append(perf_counter())

    turn = _turn(work, start, start + 0.02)
    counted = turn["seconds"]
    assert isinstance(counted, list) and len(counted) == len(calls) - 1, "the last one came too late"
    assert sum(counted) <= 0.02
    assert _turn(work, 0.0, 0.0)["seconds"] == []


def test_percentiles_leave_the_warm_up_out() -> None:
    walls = iter([9.0] * WARM_UP_LAPS + [1.0, 2.0, 3.0])
    kept = lookup_door._TimedTurn(lambda: Cost(next(walls), 0.0))
    for _ in range(WARM_UP_LAPS + 3):
        kept()
    assert kept.last(3) == [1.0, 2.0, 3.0]
