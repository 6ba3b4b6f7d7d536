"""Prometheus's page of what a sidecar reports: families as `declared`, made at most once a second.

A scraper that asks more often gets the last page again. Other threads get the interpreter after each family. A family
without a sample is left out: what a sidecar cannot know has no series, rather than a wrong one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from kvstore.status.declared import PREFIX, MetricFamily, families, samples
from kvstore.status.tree import SidecarStatus
from tiering.clock import Clock
from tiering.counts.histogram import HistogramCounts

KEPT_SECONDS = 1.0
"""A page is served again for so long."""
Values = tuple[str, ...]
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class StatusPage:
    """Thread-safe."""

    def __init__(
        self, facts: Callable[[], SidecarStatus], clock: Clock, always: Mapping[str, Iterable[Values]]
    ) -> None:
        """facts: what there is now. always: values of labels whose series begin with 0, by the family's name."""
        self._facts, self._clock = facts, clock
        self._always = {f"{PREFIX}{name}": list(values) for name, values in always.items()}
        self._lock = threading.Lock()
        self._page, self._made_at = b"", float("-inf")

    def page(self) -> bytes:
        """At most a second old."""
        with self._lock:
            if self._clock.monotonic_seconds() - self._made_at >= KEPT_SECONDS:
                self._page = self.render()
                self._made_at = self._clock.monotonic_seconds()
            return self._page

    def render(self) -> bytes:
        """As it is now."""
        facts, lines = self._facts(), list[str]()
        found: dict[str, dict[Values, float | HistogramCounts]] = {
            name: dict.fromkeys(values, 0) for name, values in self._always.items()
        }
        for one in samples(facts):
            found.setdefault(one.family.name, {})[one.values] = one.value
        for family in families(type(facts)):
            if series := found.get(family.name):
                lines += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
                for values, value in series.items():
                    lines += _lines(family, dict(zip(family.labels, values, strict=True)), value)
                self._clock.sleep(0)
        return "".join(f"{line}\n" for line in lines).encode()


def _lines(family: MetricFamily, labels: Mapping[str, str], value: float | HistogramCounts) -> Iterator[str]:
    if not isinstance(value, HistogramCounts):
        yield _line(family.name, labels, value)
        return
    counts = list(accumulate(value.counts))
    for end, count in zip([*map(repr, value.bounds), "+Inf"], counts, strict=True):
        yield _line(f"{family.name}_bucket", {**labels, "le": end}, count)
    yield _line(f"{family.name}_count", labels, counts[-1])
    yield _line(f"{family.name}_sum", labels, value.sum)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{text.translate(_ESCAPED)}"' for label, text in labels.items())
    return f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}"
