"""`kvstore bench network` at its smallest: both rows are measured, and judged by their targets."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("grpc_health", reason="grpcio-health-checking is not installed (extra: server)")

from kv_bench.network import rows as network
from kvstore.bench.row import Target


def test_both_rows_are_measured_and_judged() -> None:
    options = network.NetworkBenchOptions(blocks=16, calls=3, laps=2, seconds=0.5, flood_laps=1, streams=256)
    said: list[str] = []
    result = network.run(options, said.append)
    assert min(min(row.value, row["limit"], row["ratio"]) for row in result.rows) > 0
    assert result.about["good_calls"] > 0 and said[-1] == "beside parked awaits, lap 1 of 1"
    assert [row.target for row in result.rows] == [Target(most, is_least=False) for most in (1.3, 1.5, 2.0, 1.1)]
    assert min(result.rows[0]["empty_ms"], result.rows[0]["local_ms"]) > 0
    shown = io.StringIO()
    result.render(Console(file=shown, width=160))
    assert "through gRPC" in shown.getvalue() and "answers a second" in shown.getvalue()


def test_a_missed_target_is_named() -> None:
    quiet, flooded = ([1.0], [1.0]), ([1.4], [1.9])
    options = network.NetworkBenchOptions()
    result = network.result_of(options, ([2.01], [1.0], [0.5]), (quiet, flooded), ([1.0], [1.1]), (1.0, 1.0))
    assert [row["ratio"] for row in result.rows] == [pytest.approx(one) for one in (1.34, 1.4, 1.9, 1.1)]
    (line,) = result.missed()
    assert "512 keys through gRPC" in line and "ratio 1.34, wanted <= 1.3" in line
