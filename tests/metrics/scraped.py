"""A page of metrics, read by Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """One page. series: value by name (of a histogram with its ending) and labels."""

    text: str

    @cached_property
    def series(self) -> Mapping[str, Mapping[Labels, float]]:
        found: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                mine = found.setdefault(sample.name, {})
                labels = frozenset(sample.labels.items())
                assert labels not in mine, f"{sample.name}{dict(labels)} is there twice"
                mine[labels] = sample.value
        return found

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        return {words[2]: words[3] for words in map(str.split, self.text.splitlines()) if words[:2] == ["#", "TYPE"]}

    def total(self, name: str, **labels: str) -> float:
        """The sum of a name's series that have these labels."""
        wanted = labels.items()
        return sum(value for mine, value in self.series[f"kvstore_{name}"].items() if wanted <= set(mine))

    def adds_up(self) -> bool:
        """asked == (granted - revoked) + missed + (found - claimed)"""
        names = ("granted", "revoked", "missed", "found", "claimed", "asked")
        granted, revoked, missed, found, claimed, asked = (self.total(f"{name}_tokens_total") for name in names)
        return asked == (granted - revoked) + missed + (found - claimed)

    def falls_behind(self, later: Scrape) -> list[str]:
        """Counters, and counts of histograms, that are lower later on, or not there any more."""
        wrong = []
        for name, mine in self.series.items():
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                for labels, value in mine.items():
                    if not later.series.get(name, {}).get(labels, -1.0) >= value:
                        wrong.append(f"{name}{dict(labels)}: {value} > {later.series.get(name, {}).get(labels)}")
        return wrong
