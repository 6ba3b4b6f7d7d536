"""docs/reference.md against the code, both ways: metrics with all that is said of them, and HTTP routes."""

from __future__ import annotations

import re
from pathlib import Path

from engine_adapter.connector_metrics import CONNECTOR_METRICS, FORMER_METRICS
from kvstore.edge.pages import PATHS
from kvstore.status.declared import families
from kvstore.status.tree import SidecarStatus

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
