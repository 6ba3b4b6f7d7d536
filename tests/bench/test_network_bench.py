"""`kvstore bench network` at its smallest: both rows are measured, and judged by their targets."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("grpc_health", reason="grpcio-health-checking is not installed (extra: server)")

from kv_bench.network import rows as network
from kvstore.bench import measure


def test_both_rows_are_measured_and_judged() -> None:
    options = network.NetworkBenchOptions(blocks=16, calls=3, laps=2, seconds=0.5, flood_laps=1, streams=256)
    said: list[str] = []
    result = network.run(options, said.append)
    assert result.blocks == 16 and min(result.match_ms, result.empty_ms, result.local_ms, result.quiet_ms_p99) > 0
    assert result.good_calls > 0 and said[-1] == "beside parked awaits, lap 1 of 1"
    assert min(result.unparked_ms_p99, result.parked_ms_p99) > 0
    assert len(measure.judged(result.to_dict())) == 4
    shown = io.StringIO()
    result.render(Console(file=shown, width=120))
    assert "through gRPC" in shown.getvalue()


def test_a_missed_target_is_named() -> None:
    result = network.NetworkBenchResult(512, 2.0, 1.0, 0.5, 1.34, 1.0, 1.4, 1.4, 1.0, 1.9, 1.9, 1.0, 1.0, 1.0, 1.1, 1.1)
    (line,) = measure.missed(result.to_dict())
    assert "gRPC match" in line
