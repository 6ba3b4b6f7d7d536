"""Prometheus's text format, read back by its own parser."""

from __future__ import annotations

import math

import pytest

from kvstore.metrics.exposition import LABELS_KEPT, Exposition, MetricFamily, MetricKind
from metrics.scraped import Scrape
from tiering.counts.histogram import AGE_SECONDS, WAIT_SECONDS, Histogram

COUNTS = MetricFamily(
    "kvstore_a_total", MetricKind.COUNTER, ("one", "two"), "tokens", "What is counted.\nTwo lines \\ in one."
)
PLAIN = MetricFamily("kvstore_b", MetricKind.GAUGE, (), "bytes", "A gauge.")
WAITS = MetricFamily("kvstore_c_seconds", MetricKind.HISTOGRAM, ("tier",), "seconds", "A histogram.")


def test_any_text_of_a_label_comes_back_as_it_was() -> None:
    strange = ['quotes " here', "back\\slash", "line\nfeed", "\\n", "{}=,", "größe ☃", ""]
    page = Exposition([COUNTS]).render({COUNTS.name: {(text, "x"): at for at, text in enumerate(strange)}})
    found = Scrape(page.decode()).series[COUNTS.name]
    assert {dict(labels)["one"]: value for labels, value in found.items()} == {
        text: float(at) for at, text in enumerate(strange)
    }
    assert page.decode().splitlines()[0] == r"# HELP kvstore_a_total What is counted.\nTwo lines \\ in one."


@pytest.mark.parametrize("value", [0, 1, 2**63, 0.1, 1e-9, 1e300, 123456789.125])
def test_numbers_come_back_as_they_were(value: float) -> None:
    page = Exposition([PLAIN]).render({PLAIN.name: {(): value}}).decode()
    assert Scrape(page).series[PLAIN.name] == {frozenset(): value}
    assert ("." in page.splitlines()[-1]) is (isinstance(value, float) and "e" not in repr(value))


def test_a_histogram_counts_up_to_each_bound_and_adds_up() -> None:
    histogram, values = Histogram(WAIT_SECONDS), [0.0, 0.001, 0.0011, 0.05, 4.9, 5.0, 5.1, 1e6, -3.0]
    for value in values:
        histogram.add(value)
    series = Scrape(Exposition([WAITS]).render({WAITS.name: {("dram",): histogram.now()}}).decode()).series
    buckets = {dict(labels)["le"]: count for labels, count in series[f"{WAITS.name}_bucket"].items()}
    assert list(buckets) == [*(repr(bound) for bound in WAIT_SECONDS), "+Inf"]
    at_least_0 = [max(0.0, value) for value in values]
    for bound, count in buckets.items():
        assert count == sum(value <= (math.inf if bound == "+Inf" else float(bound)) for value in at_least_0), bound
    assert list(series[f"{WAITS.name}_count"].values()) == [len(values)]
    assert list(series[f"{WAITS.name}_sum"].values()) == [pytest.approx(sum(at_least_0))]


def test_bounds_are_those_that_are_documented() -> None:
    assert [1000 * bound for bound in WAIT_SECONDS] == [1, 2.5, 5, 10, 25, 50, 100, 250, 1000, 5000]
    assert AGE_SECONDS == (1, 10, 60, 5 * 60, 15 * 60, 3600, 6 * 3600, 24 * 3600)


def test_what_is_not_known_has_no_series_and_no_head() -> None:
    page = Exposition([COUNTS, PLAIN, WAITS]).render({PLAIN.name: {(): 1}, COUNTS.name: {}}).decode()
    assert page == "# HELP kvstore_b A gauge.\n# TYPE kvstore_b gauge\nkvstore_b 1\n"


def test_what_is_no_family_is_not_rendered() -> None:
    with pytest.raises(AssertionError, match="kvstore_z"):
        Exposition([PLAIN]).render({"kvstore_z": {(): 1}})
    with pytest.raises(AssertionError, match="has labels"):
        Exposition([PLAIN]).render({PLAIN.name: {("x",): 1}})


def test_texts_of_labels_are_made_once_and_are_bounded() -> None:
    exposition = Exposition([COUNTS])
    first = exposition.render({COUNTS.name: {("a", "b"): 1}})
    (kept,) = exposition._texts.values()
    assert exposition.render({COUNTS.name: {("a", "b"): 1}}) == first
    assert next(iter(exposition._texts.values())) is kept
    for at in range(LABELS_KEPT + 10):
        exposition.render({COUNTS.name: {(str(at), "b"): 1}})
    assert len(exposition._texts) == LABELS_KEPT
