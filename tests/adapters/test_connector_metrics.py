"""What a connector counts, as metrics: each count has a name with its unit, and the former names are there beside."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine_adapter.audit.audits import AuditVerdict
from engine_adapter.connector_metrics import CONNECTOR_METRICS, FORMER_METRICS, ConnectorSeries, observations
from engine_adapter.paged.requests import counted
from kvstore.block.account import Account, HitTier, MissReason
from metrics.promtool import promtool
from metrics.scraped import Scrape


def everything() -> dict[str, Any]:
    """Each count is another number, none of them 0."""
    hits = [(tier, 10 + at) for at, tier in enumerate(HitTier)]
    misses = [(reason, 100 + at) for at, reason in enumerate(MissReason)]
    names = "decisions loaded_tokens declined_tokens explored unlearned finished judged regret_ms saved_ms locates"
    numbers = (9, 1000, 200, 2, 1, 4, 3, 120.0, 4500.0, 11, 8, 5)
    costs = zip([*names.split(), "fetches", "short_fetches"], numbers, strict=True)
    return {
        **counted(Account.of([*hits, *misses])),
        **{"loads": 5, "failed_loads": 1, "load_seconds": [0.004, 0.3], "saved_blocks": 7, "dropped_saves": 2},
        **{f"audited_{verdict}": 3 + at for at, verdict in enumerate(AuditVerdict)},
        **{f"cost_{name}": count for name, count in costs},
        **{"ttft_saved_ms_mean": 50.0, "ttft_saved_ms_standard_error": 4.0},
    }


def scraped(*steps: dict[str, Any]) -> Scrape:
    registry = CollectorRegistry()
    make = (partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram))
    series = ConnectorSeries(*make, ["engine"])
    for step in steps:
        series.observe(step, ["0"])
    return Scrape(generate_latest(registry).decode())


def test_every_count_has_its_metric_and_every_metric_a_count() -> None:
    page = scraped(everything())
    assert page.total("vllm_requests_total") == 1
    for at, tier in enumerate(HitTier):
        assert page.total("vllm_prompt_tokens_total", outcome="hit", origin=tier) == 10 + at
    for at, reason in enumerate(MissReason):
        assert page.total("vllm_prompt_tokens_total", outcome="miss", origin=reason) == 100 + at
    assert page.total("vllm_loads_total", result="begun") == 5 and page.total("vllm_loads_total", result="failed") == 1
    assert page.total("vllm_load_wait_seconds_count") == 2
    assert page.total("vllm_load_wait_seconds_sum") == pytest.approx(0.304)
    assert page.total("vllm_load_wait_seconds_bucket", le="0.005") == 1
    assert page.total("vllm_saved_blocks_total") == 7 and page.total("vllm_dropped_saves_total") == 2
    assert page.total("vllm_prefill_saved_seconds_total") == pytest.approx(4.5)
    assert page.total("vllm_cost_regret_seconds_total") == pytest.approx(0.12)
    choices = {
        name: page.total("vllm_cost_decisions_total", choice=name) for name in ("cheapest", "explored", "unlearned")
    }
    assert choices == {"cheapest": 6, "explored": 2, "unlearned": 1}
    assert page.total("vllm_cost_tokens_total", choice="loaded") == 1000
    assert page.total("vllm_cost_tokens_total", choice="declined") == 200
    assert page.total("vllm_cost_loads_total", result="judged") == 3
    fetches = {name: page.total("vllm_fetches_total", result=name) for name in ("asked", "ended", "short")}
    assert fetches == {"asked": 11, "ended": 8, "short": 5}
    assert page.total("vllm_ttft_saved_seconds", statistic="mean") == pytest.approx(0.05)
    assert page.total("vllm_audited_blocks_total") == 3 + 4 + 5
    for one in CONNECTOR_METRICS:
        name = f"{one.name}_count" if one.kind == "histogram" else one.name
        assert page.series[name], one.name
        assert {label for labels in page.series[name] for label, _ in labels} == {"engine", *one.labels}


def test_the_former_names_say_what_they_said() -> None:
    counts = everything()
    page = scraped(counts)
    for name, count in counts.items():
        if name.startswith(("hit_", "miss_")):
            assert page.series["kvstore:prompt_tokens_total"][frozenset({("engine", "0"), ("origin", name)})] == count
        elif name.startswith("ttft_saved_ms_"):
            labels = frozenset({("engine", "0"), ("statistic", name.removeprefix("ttft_saved_ms_"))})
            assert page.series["kvstore:ttft_saved_ms"][labels] == count
        elif name != "load_seconds":
            assert page.series["kvstore:events_total"][frozenset({("engine", "0"), ("event", name)})] == count
    assert {one.name for one in FORMER_METRICS} <= page.series.keys()


def test_the_lint_of_prometheus_finds_nothing_in_the_new_names() -> None:
    page = scraped(everything())
    new = "\n".join(line for line in page.text.splitlines() if "kvstore:" not in line and "_created" not in line)
    done = promtool("check", "metrics", text=f"{new}\n")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_tokens_add_up_to_the_prompts() -> None:
    counts = everything()
    page = scraped(counts, counts)
    assert page.total("vllm_prompt_tokens_total") == 2 * counts["asked"]


@pytest.mark.parametrize(
    ("counts", "is_up"),
    [
        ({"miss_unreachable": 64, "miss_partial_block": 3}, 0.0),
        ({"miss_unreachable": 64, "hit_dram": 64}, 0.0),
        ({"miss_unreachable": 64, "cost_locates": 1}, 1.0),
        ({"hit_dram": 64}, 1.0),
        ({"miss_absent": 64}, 1.0),
        ({"hit_engine": 64, "miss_last_token": 1}, None),
        ({"miss_disabled": 64}, None),
        ({"miss_warming": 64}, None),
        ({}, None),
    ],
)
def test_whether_the_store_answers_is_what_the_last_requests_saw(counts: dict[str, int], is_up: float | None) -> None:
    found = [amount for name, _, amount in observations(counts) if name == "kvstore_vllm_sidecar_up"]
    assert found == ([] if is_up is None else [is_up])
