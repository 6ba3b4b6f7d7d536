"""`kvstore bench network`, rows from node to node, at their smallest."""

from __future__ import annotations

import io
import json

from rich.console import Console

from kv_bench.network import pull_rows
from kvstore.bench import measure


def test_each_transport_is_measured_beside_the_raw_stream_and_judged() -> None:
    options = pull_rows.PullBenchOptions(frames=20, payload_bytes=128 << 10, laps=2)
    result = pull_rows.run(options, lambda _: None)
    names = [row.what for row in result.rows]
    assert names[:2] == [pull_rows.ONE, pull_rows.BESIDE]
    assert all(min(row.gbps, row.raw_gbps, row.ratio) > 0 for row in result.rows)
    told = json.loads(json.dumps(result.to_dict()))
    targets = {row.what for row in result.rows if row.at_least is not None}
    assert len(measure.judged(told)) == len(targets) + (result.ucx_idle is not None)
    shown = io.StringIO()
    result.render(Console(file=shown, width=150))
    assert all(name in shown.getvalue() for name in names)
