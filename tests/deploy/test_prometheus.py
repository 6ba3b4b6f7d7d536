"""deploy/prometheus and deploy/grafana against what a sidecar that served everything exports: each name, each label and
each value of a label is there; and Prometheus's own tool runs all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from adapters.test_connector_metrics import everything, scraped
from console.running import console
from kvstore.status.tree import Readiness
from metrics.busy_sidecar import busy_sidecar, scrape
from metrics.promtool import promtool
from metrics.scraped import Labels

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
RULES_TESTS = sorted(RULES.parent.glob("*_test.yml"))
FIRST = ["Healthy", "Saved", "Largest avoidable miss", "What next"]
"""Panels of the dashboard's first row; the other rows are collapsed."""
DASHBOARD = ROOT / "deploy" / "grafana" / "kvstore.json"
PAGE = (ROOT / "docs" / "dashboard.md").read_text()
FROM_PROMETHEUS = {"instance", "job"}
"""Labels that the scraper adds."""
ENDINGS = ("_bucket", "_sum", "_count")

Series = Mapping[str, Mapping[Labels, float]]


@cache
def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@cache
def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return read


def panels() -> list[dict[str, Any]]:
    """Also those of rows that are collapsed."""
    found = [inner for one in dashboard()["panels"] for inner in (one, *one.get("panels", ()))]
    return [one for one in found if one["type"] != "row"]


def plain(expression: str) -> str:
    """As Grafana sends it."""
    for variable, value in (("$__rate_interval", "5m"), ("$__range", "6h"), ("$instance", ".*")):
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def of_panels() -> dict[str, str]:
    """Every expression of the dashboard, by its place there."""
    return {
        f"{one['id']}{target['refId']} {one['title']}": target["expr"] for one in panels() for target in one["targets"]
    }


def expressions() -> dict[str, str]:
    """All of them, those of the rules by their name."""
    return {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()} | of_panels()


def selectors(expression: str) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Names and, of each, its matchers: by label the operator and the value."""
    for name, matchers in re.findall(r"\b((?:instance:)?kvstore_[\w:]+)(?:\{([^}]*)\})?", expression):
        found = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers or "")
        yield name, {label: (operator, value) for label, operator, value in found}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Of the sidecar and of the connector."""
    with busy_sidecar(tmp_path_factory.mktemp("busy")) as (_, metrics):
        of_sidecar = scrape(metrics).series
    return {**of_sidecar, **scraped(everything(), {"hit_dram": 1}).series}


def test_each_name_label_and_value_is_in_a_scrape(series: Series) -> None:
    recorded = {
        rule["record"]: set(re.findall(r"by \(([\w, ]+)\)", rule["expr"])) for rule in rules() if "record" in rule
    }
    for place, expression in expressions().items():
        found = list(selectors(expression))
        assert found, f"{place} asks for nothing"
        labels: set[str] = set()
        for name, matchers in found:
            if name in recorded:
                labels |= {"instance"}
                continue
            assert name in series, f"{place}: there is no {name}"
            mine = {label: value for one in series[name] for label, value in one}
            labels |= mine.keys()
            for label, (operator, value) in matchers.items():
                if label in FROM_PROMETHEUS:
                    continue
                values = {given for one in series[name] for key, given in one if key == label}
                assert label in mine, f"{place}: {name} has no label {label}"
                for one in value.split("|") if operator in ("=~", "!~") else [value]:
                    assert one in values, f"{place}: {name} has {label} {sorted(values)}, and not {one}"
        named = re.findall(r"\b(?:by|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expression)
        used = {one.strip() for some in named for one in some.split(",") if one.strip()}
        assert used <= labels | FROM_PROMETHEUS, f"{place}: {used - labels}"


def test_counters_are_rated_and_gauges_are_not(series: Series) -> None:
    counters = [name for name in series if name.endswith(("_total", *ENDINGS))]
    for place, expression in expressions().items():
        bare = re.sub(r"(?:rate|increase)\(\s*[\w:]+(?:\{[^}]*\})?\[[^\]]+\]\)", "", expression)
        assert not [name for name in counters if re.search(rf"\b{name}\b", bare)], f"{place}: a counter without a rate"
        for name in re.findall(r"(?:rate|increase)\(\s*([\w:]+)", expression):
            assert name in counters, f"{place}: a rate of {name}, which is no counter"


def test_no_panel_hides_that_a_metric_is_missing() -> None:
    for place, expression in expressions().items():
        assert "vector(0)" not in expression and " or " not in expression, place
        assert "[$__rate_interval]" in expression or "rate(" not in expression or place not in of_panels(), place
    for one in panels():
        text = " ".join(target["expr"] for target in one["targets"])
        if "> 0" in text:
            assert one["fieldConfig"]["defaults"]["noValue"] == "No traffic", one["title"]


def test_every_metric_is_on_the_dashboard_or_is_for_joins(series: Series) -> None:
    shown = {name for expression in expressions().values() for name, _ in selectors(expression)}
    families = {re.sub(r"_(?:bucket|sum|count|created)$", "", name) for name in series if name.startswith("kvstore_")}
    families = {name for name in families if not name.endswith("_created")}
    hidden = {one for one in families if not any(name.startswith(one) for name in shown)}
    assert hidden <= {"kvstore_namespace_info", "kvstore_vllm_cost_loads_total", "kvstore_vllm_cost_loads"}


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    rows = [one for one in dashboard()["panels"] if one["type"] == "row"]
    ids = [one["id"] for one in (*rows, *panels())]
    assert len(ids) == len(set(ids)) and len({one["title"] for one in panels()}) == len(panels())
    assert [one["title"] for one in dashboard()["panels"] if one["type"] != "row"] == FIRST
    assert [one["collapsed"] for one in rows] == [False] + [True] * (len(rows) - 1)
    for shown in (dashboard()["panels"], *(one["panels"] for one in rows)):
        do_not_overlap(shown)


def do_not_overlap(shown: list[dict[str, Any]]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for one in shown:
        at = one["gridPos"]
        assert set(at) == {"x", "y", "w", "h"} and all(isinstance(side, int) for side in at.values()), one["title"]
        assert at["x"] >= 0 and at["w"] > 0 and at["h"] > 0 and at["x"] + at["w"] <= 24, one["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{one['title']} lies on {taken[x, y]}"
                taken[x, y] = one["title"]


def test_the_data_source_is_the_variable() -> None:
    variables = {one["name"]: one for one in dashboard()["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["instance"]["datasource"] == wanted
    for one in panels():
        assert one["datasource"] == wanted and one["description"] and one["targets"], one["title"]
        assert all(target["datasource"] == wanted for target in one["targets"])
        assert len({target["refId"] for target in one["targets"]}) == len(one["targets"])
    assert dashboard()["uid"] == "kvstore"


def test_each_alert_has_a_test_in_which_it_fires_and_an_anchor() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    tests = [test for path in RULES_TESTS for test in yaml.safe_load(path.read_text())["tests"]]
    fired = {one["alertname"] for test in tests for one in test.get("alert_rule_test", []) if one["exp_alerts"]}
    silent = {one["alertname"] for test in tests for one in test.get("alert_rule_test", []) if not one["exp_alerts"]}
    assert fired == alerts.keys() and silent >= alerts.keys() - {"KvstoreWantedAgain"}
    headings = {one.strip().lower().replace(" ", "-") for one in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    for name, rule in alerts.items():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "http://127.0.0.1:9798/help" and anchor in headings, name
        assert rule["labels"]["severity"] in ("page", "ticket") and f"`{name}`" in PAGE, name


def test_each_state_of_a_sidecar_has_an_alert() -> None:
    watched = {
        matchers["state"][1]
        for rule in rules()
        for name, matchers in selectors(rule["expr"])
        if name == "kvstore_state" and "alert" in rule
    }
    assert watched == {one.value for one in Readiness} - {Readiness.READY.value}


def test_each_runbook_opens_at_the_consoles_own_address(tmp_path: Path) -> None:
    """A sidecar that is down is no reason why its page should not open."""
    with console(tmp_path / "no.sock") as shown:
        page = shown.ask("/help").body.decode()
    for rule in rules():
        if "alert" in rule:
            _, path, anchor = re.split("(?<=9798)(?=/)|#", rule["annotations"]["runbook_url"])
            assert path == "/help" and f'id="{anchor}"' in page, rule["alert"]


@pytest.mark.slow
def test_promtool_takes_the_rules_and_their_tests_pass() -> None:
    for arguments in (("check", "rules", RULES.name), ("test", "rules", *(path.name for path in RULES_TESTS))):
        done = promtool(*arguments, directory=RULES.parent)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout


def test_promtool_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    recorded = [{"record": f"panel:{at}", "expr": plain(one)} for at, one in enumerate(of_panels().values())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    done = promtool("check", "rules", "panels.yml", directory=tmp_path)
    assert done.returncode == 0 and f"{len(recorded)} rules found" in done.stdout, done.stdout + done.stderr


def test_each_panel_shows_data_of_what_was_scraped(series: Series, tmp_path: Path) -> None:
    """Prometheus's own engine evaluates every expression over series that grow as those of the scrape did."""
    given = []
    for name, mine in series.items():
        for labels, value in mine.items():
            pairs = ", ".join(
                f"{key}={json.dumps(given_value)}" for key, given_value in sorted([*labels, ("instance", "a")])
            )
            grows = name.endswith(("_total", *ENDINGS))
            values = f"0+{value!r}x400" if grows else f"{value!r}x400"
            given.append({"series": f"{name}{{{pairs}}}", "values": values})
    checks = [
        {"expr": f"count({plain(one)}) > bool 0", "eval_time": "380m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for one in of_panels().values()
    ]
    test = {
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "promql_expr_test": checks}],
    }
    (tmp_path / "panels.yml").write_text(yaml.safe_dump(test))
    done = promtool("test", "rules", "panels.yml", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"{len(checks)} expressions over {len(given)} series")
