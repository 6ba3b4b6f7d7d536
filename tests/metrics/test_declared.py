"""A number that is declared once is everywhere: in the JSON, on Prometheus's page, in `kvstore stat`, in gRPC's answer
and in the console's API. And what a declaration says of labels is what its series have."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import structs
from rich.console import Console

from engine_adapter.connector_metrics import CONNECTOR_METRICS, FORMER_METRICS
from kvstore.block.account import MissReason
from kvstore.cli.report import stat_report
from kvstore.edge.pages import PATHS
from kvstore.network.services import stat_response
from kvstore.status.declared import Sample, counter, families, gauge, histogram, label, samples
from kvstore.status.page import StatusPage
from kvstore.status.tree import LookupCounts, SidecarStatus
from metrics.scraped import Scrape
from service.sidecar import Sidecar
from tiering.counts.histogram import AGE_SECONDS, WAIT_SECONDS, Histogram, HistogramCounts
from waiting import FakeClock
from workbench import MODEL, ids, small_layout


class StatusOfTomorrow(SidecarStatus, frozen=True):
    """With one line more."""

    teapots: Annotated[int, counter("Teapots that were asked for coffee.")] = 0


def page_of(facts: msgspec.Struct) -> Scrape:
    return Scrape(StatusPage(lambda: facts, FakeClock(), {}).render().decode())  # type: ignore[arg-type, return-value]


def test_a_new_number_is_one_line_and_is_found_everywhere(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        store.namespace(model=MODEL, layout=small_layout()).match(ids(64))
        facts = StatusOfTomorrow(**structs.asdict(sidecar.admin.facts()), teapots=7)
    assert page_of(facts).total("teapots_total") == 7
    report = stat_report(facts)
    assert report.to_dict()["teapots"] == 7
    console = Console(width=80, file=io.StringIO())
    report.render(console)
    assert "\nteapots: 7\n" in console.file.getvalue()  # type: ignore[attr-defined]
    assert json.loads(stat_response(facts).json)["teapots"] == 7
    _, components = msgspec.json.schema_components([StatusOfTomorrow])
    shown = components["StatusOfTomorrow"]["properties"]
    assert shown["teapots"]["description"] == "Teapots that were asked for coffee." and shown["state"]["description"]


def test_a_new_reason_of_a_miss_is_found_everywhere(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        store.namespace(model=MODEL, layout=small_layout()).match(ids(64))
        facts = sidecar.admin.facts()
    assert facts.looked.miss_tokens == {MissReason.ABSENT: 64}
    new = structs.replace(facts, looked=structs.replace(facts.looked, miss_tokens={"moonlight": 64}))
    assert page_of(new).total("missed_tokens_total", reason="moonlight") == 64
    assert json.loads(stat_response(new).json)["looked"]["miss_tokens"] == {"moonlight": 64}


class Source(msgspec.Struct, frozen=True):
    name: Annotated[str, label("name")]
    blocks_in: Annotated[int, counter("Blocks.", "blocks", "name way", way="in")] = 0
    blocks_out: Annotated[int, counter("Blocks.", "blocks", "name way", way="out")] = 0
    refused: Annotated[dict[str, int], counter("Refused.", labels="name")] = {}
    late_ms: Annotated[float | None, gauge("Late.", "late_seconds", "name", times=1e-3)] = None


class Tree(msgspec.Struct, frozen=True):
    sources: list[Source] = []
    moves: Annotated[dict[str, dict[str, int]], counter("Moves.", labels="kind result")] = {}
    state: Annotated[str, gauge("State.", labels="state", unit="1")] = "ready"
    named: Annotated[list[tuple[str, str]], gauge("Names.", labels="number name", unit="1")] = []
    warnings: Annotated[list[str], gauge("Warnings.")] = []
    waits: Annotated[HistogramCounts | None, histogram("Waits.")] = None
    unknown: Annotated[int | None, gauge("Unknown.")] = None


def found(tree: Tree) -> dict[tuple[str, ...], Any]:
    def of(one: Sample) -> tuple[tuple[str, ...], Any]:
        return (one.family.name.removeprefix("kvstore_"), *one.values), one.value

    return dict(map(of, samples(tree)))


def test_labels_come_from_the_declaration_from_fields_around_and_from_keys() -> None:
    tree = Tree(
        [Source("a", 1, 2, {"mac": 3, "size": 4}), Source("b", late_ms=250.0)],
        {"load": {"done": 5, "failed": 6}},
        named=[("1", "one")],
        warnings=["first", "second"],
    )
    assert found(tree) == {
        ("blocks_total", "a", "in"): 1,
        ("blocks_total", "a", "out"): 2,
        ("refused_total", "a"): 7,
        ("blocks_total", "b", "in"): 0,
        ("blocks_total", "b", "out"): 0,
        ("refused_total", "b"): 0,
        ("late_seconds", "b"): 0.25,
        ("moves_total", "load", "done"): 5,
        ("moves_total", "load", "failed"): 6,
        ("state", "ready"): 1,
        ("named", "1", "one"): 1,
        ("warnings",): 2,
    }


def test_any_text_of_a_label_and_any_number_comes_back_as_it_was() -> None:
    strange = ['quotes " here', "back\\slash", "line\nfeed", "\\n", "{}=,", "größe ☃", ""]
    numbers = [0, 1, 2**63, 0.1, 1e-9, 1e300, 123456789.125]
    tree = Tree([Source(text, late_ms=number) for text, number in zip(strange, numbers, strict=True)])
    series = page_of(tree).series["kvstore_late_seconds"]
    expected = {text: number * 1e-3 for text, number in zip(strange, numbers, strict=True)}
    assert {dict(labels)["name"]: value for labels, value in series.items()} == expected


def test_a_histogram_counts_up_to_each_bound_and_adds_up() -> None:
    times, values = Histogram(WAIT_SECONDS), [0.0, 0.001, 0.0011, 0.05, 4.9, 5.0, 5.1, 1e6, -3.0]
    for value in values:
        times.add(value)
    series = page_of(Tree(waits=times.now())).series
    buckets = {dict(labels)["le"]: count for labels, count in series["kvstore_waits_seconds_bucket"].items()}
    assert list(buckets) == [*(repr(bound) for bound in WAIT_SECONDS), "+Inf"]
    at_least_0 = [max(0.0, value) for value in values]
    for bound, count in buckets.items():
        assert count == sum(value <= (math.inf if bound == "+Inf" else float(bound)) for value in at_least_0), bound
    assert list(series["kvstore_waits_seconds_sum"].values()) == [pytest.approx(sum(at_least_0))]
    assert [1000 * bound for bound in WAIT_SECONDS] == [1, 2.5, 5, 10, 25, 50, 100, 250, 1000, 5000], "as documented"
    assert AGE_SECONDS == (1, 10, 60, 5 * 60, 15 * 60, 3600, 6 * 3600, 24 * 3600)


def test_what_is_not_known_has_no_series_and_no_head() -> None:
    assert "kvstore_unknown" not in page_of(Tree()).text and "kvstore_sources" not in page_of(Tree()).text


def test_counts_of_several_namespaces_add_up() -> None:
    one = LookupCounts(10, {"dram": 4}, {"absent": 6}, granted_tokens=4, hit_rate=0.4)
    both = LookupCounts.summed([one, LookupCounts(30, {"dram": 6, "engine": 5}, granted_tokens=6, hit_rate=0.2)])
    assert (both.asked_tokens, both.hit_tokens) == (40, {"dram": 10, "engine": 5}) and both.hit_rate == 0.25
    assert LookupCounts.summed([]) == LookupCounts()


# docs/reference.md against the code, both ways: metrics with all that is said of them, and HTTP routes -------------


METRICS = families(SidecarStatus)
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference.md").read_text()
ROW = r"^\| `(kvstore_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$"

Row = tuple[str, str, str, str, str]


def rows_of(heading: str) -> list[Row]:
    """The table of metrics below a heading."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    found: list[Row] = re.findall(ROW, section, re.MULTILINE)
    assert len(found) == len(re.findall(r"^\| `kvstore_", section, re.MULTILINE)), "a row of another form"
    return found


def labels(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_each_metric_of_the_sidecar_has_its_row_and_each_row_its_metric() -> None:
    written = [(one.name, one.kind.value, labels(one.labels), one.unit, one.text) for one in METRICS]
    assert sorted(rows_of("Metrics of the sidecar")) == sorted(written)


def test_each_metric_of_the_connector_has_its_row_and_each_row_its_metric() -> None:
    written = [(one.name, one.kind, labels(one.labels), one.unit, one.text) for one in CONNECTOR_METRICS]
    assert rows_of("Metrics of the vLLM connector") == written
    assert all(f"`{one.name}`" in PAGE for one in FORMER_METRICS)


def test_each_label_has_its_values() -> None:
    explained = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ", PAGE, re.MULTILINE))))
    names = {label for one in (*METRICS, *CONNECTOR_METRICS) for label in one.labels if not one.name.endswith("_info")}
    assert names - {"tenant"} <= explained


def test_each_route_has_its_row_and_each_row_its_route() -> None:
    assert re.findall(r"^\| `(/\w+)` \| ", PAGE, re.MULTILINE) == list(PATHS)


def test_names_are_made_as_prometheus_has_them() -> None:
    for one in (*METRICS, *CONNECTOR_METRICS):
        assert re.fullmatch(r"kvstore_[a-z_]+", one.name) and "_ms" not in one.name
        assert one.name.endswith("_total") is (str(one.kind) == "counter"), one.name
        assert one.text.endswith(".") and one.unit
        if str(one.kind) == "histogram":
            assert one.name.endswith("_seconds")
    assert len({one.name for one in (*METRICS, *CONNECTOR_METRICS)}) == len(METRICS) + len(CONNECTOR_METRICS)
