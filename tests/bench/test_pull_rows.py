"""`kvstore bench network`, rows from node to node, at their smallest."""

from __future__ import annotations

import io
import json

from rich.console import Console

from kv_bench.network import pull_rows
from kvstore.bench.row import Target


def test_each_transport_is_measured_beside_the_raw_stream_and_judged() -> None:
    options = pull_rows.PullBenchOptions(frames=20, payload_bytes=128 << 10, laps=2)
    result = pull_rows.run(options, lambda _: None)
    rows = {row["way"]: row for row in result.sections[0].rows}
    assert [*rows][:2] == [pull_rows.ONE, pull_rows.BESIDE]
    assert all(min(row.value, row["limit"], row["ratio"]) > 0 for row in rows.values())
    assert {way: row.target and row.target.number for way, row in rows.items()} == {
        way: pull_rows.TARGETS.get(way) for way in rows
    }
    has_ucx = pull_rows.UCX_ROW in rows
    assert [row.target for row in result.rows[len(rows) :]] == [Target(0.03, is_least=False, of="value")] * has_ucx
    assert json.loads(json.dumps(result.to_dict()))["frame_bytes"] > 128 << 10
    shown = io.StringIO()
    result.render(Console(file=shown, width=150))
    assert all(name in shown.getvalue() for name in rows)
