"""Prometheus's page of what a sidecar reports: families as `declared`.

Other threads get the interpreter after each family. A family without a sample is left out: what a sidecar cannot know
has no series, rather than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.status.declared import PREFIX, MetricFamily, MetricKind, families, samples
from kvstore.status.tree import SidecarStatus
from tiering.clock import Clock
from tiering.counts.histogram import HistogramCounts

Values = tuple[str, ...]
Series = dict[Values, "int | float | HistogramCounts"]


class StatusPage(Collector):
    """Thread-safe."""

    def __init__(
        self, facts: Callable[[], SidecarStatus], clock: Clock, always: Mapping[str, Iterable[Values]]
    ) -> None:
        """facts: what there is now. always: values of labels whose series begin with 0, by the family's name."""
        self._facts, self._clock = facts, clock
        self._always = {f"{PREFIX}{name}": list(values) for name, values in always.items()}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """As it is now."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The families, for `prometheus_client`."""
        facts = self._facts()
        found: dict[str, Series] = {name: dict.fromkeys(values, 0) for name, values in self._always.items()}
        for one in samples(facts):
            found.setdefault(one.family.name, {})[one.values] = one.value
        for family in families(type(facts)):
            if series := found.get(family.name):
                yield _family(family, series)
                self._clock.sleep(0)


def _family(family: MetricFamily, series: Series) -> Metric:
    if family.kind is MetricKind.HISTOGRAM:
        times = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for values, one in series.items():
            if isinstance(one, HistogramCounts):
                ends = [*map(repr, one.bounds), "+Inf"]
                times.add_metric(values, list(zip(ends, accumulate(one.counts), strict=True)), one.sum)
        return times
    made = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
    numbers = made(family.name, family.text, labels=family.labels)
    for values, one in series.items():
        if not isinstance(one, HistogramCounts):
            numbers.add_metric(values, one)
    return numbers
