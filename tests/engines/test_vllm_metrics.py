"""What the connector counts, as vLLM adds it up, logs it and hands it to Prometheus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from engine_adapter.vllm_connector import ConnectorCounts, KvStoreConnector

STEPS: list[dict[str, Any]] = [
    {
        "asked": 100,
        "hit_dram": 64,
        "miss_absent": 36,
        "loads": 1,
        "load_seconds": [0.02],
        "cost_saved_ms": 12.3456,
        "ttft_saved_ms_mean": 50.0,
    },
    {
        "asked": 50,
        "load_seconds": [0.5],
        "miss_absent": 50,
        "cost_saved_ms": 1.0,
        "ttft_saved_ms_mean": 40.0,
        "ttft_saved_ms_standard_error": 3.0,
    },
]


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"engine": "0", **labels})


def test_sums_are_added_up_and_what_is_so_now_is_the_last() -> None:
    counts = ConnectorCounts(data={})
    assert counts.is_empty()
    for step in STEPS:
        counts.aggregate(ConnectorCounts(data=dict(step)))
    assert counts.reduce() == {
        "asked": 150,
        "hit_dram": 64,
        "miss_absent": 86,
        "loads": 1,
        "cost_saved_ms": 13.35,
        "ttft_saved_ms_mean": 40.0,
        "ttft_saved_ms_standard_error": 3.0,
    }
    assert counts.data["load_seconds"] == [0.02, 0.5] and STEPS[0]["load_seconds"] == [0.02]
    counts.reset()
    assert counts.is_empty()


def test_prometheus_has_a_counter_a_gauge_and_a_histogram_by_vllms_own_classes() -> None:
    """Which there are, by which names: `test_connector_metrics`."""
    config: Any = SimpleNamespace(kv_transfer_config=None)
    kinds: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    metrics = KvStoreConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    assert metrics is not None
    for step in STEPS:
        metrics.observe(dict(step))
    assert value("kvstore:events_total", event="cost_saved_ms") == pytest.approx(13.3456)
    assert value("kvstore:ttft_saved_ms", statistic="mean") == 40.0
    assert value("kvstore_vllm_prompt_tokens_total", outcome="miss", origin="absent") == 86
    assert value("kvstore_vllm_load_wait_seconds_count") == 2
