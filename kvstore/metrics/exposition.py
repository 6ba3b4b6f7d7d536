"""Prometheus's text format: numbers under names, with labels whose text is made once.

A family that has no sample is left out with its head: what a sidecar cannot know has no series, rather than a wrong
one.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from tiering.counts.histogram import HistogramCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS_KEPT = 4096
"""Label texts that are cached: several times as many as a sidecar may have series."""


class MetricKind(StrEnum):
    """As Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One name. unit: of its values, for people. text: what is counted, in one line."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    unit: str
    text: str


LabelValues = tuple[str, ...]
Samples = Mapping[LabelValues, "int | float | HistogramCounts"]


class Exposition:
    """Renders samples of the same families again and again. One thread at a time."""

    def __init__(self, families: Sequence[MetricFamily]) -> None:
        self._families = families
        self._heads = {
            one.name: f"# HELP {one.name} {_escaped(one.text, quotes=False)}\n# TYPE {one.name} {one.kind}\n".encode()
            for one in families
        }
        # Of each series the text before its value; of a histogram one for each line.
        self._texts: OrderedDict[tuple[str, LabelValues], list[bytes]] = OrderedDict()

    def render(self, samples: Mapping[str, Samples]) -> bytes:
        """The page. samples: by the family's name, then by the values of its labels in their order."""
        unknown = samples.keys() - self._heads.keys()
        assert not unknown, f"not among the families: {unknown}"
        lines: list[bytes] = []
        for family in self._families:
            mine = samples.get(family.name)
            if not mine:
                continue
            lines.append(self._heads[family.name])
            for values, value in mine.items():
                if isinstance(value, HistogramCounts):
                    self._add_histogram(lines, family, values, value)
                else:
                    (text,) = self._texts_of(family, values, ())
                    lines.append(b"%b %b\n" % (text, _number(value)))
        return b"".join(lines)

    def _add_histogram(
        self, lines: list[bytes], family: MetricFamily, values: LabelValues, value: HistogramCounts
    ) -> None:
        texts = self._texts_of(family, values, value.bounds)
        cumulative = list(accumulate(value.counts))
        for text, count in zip(texts, cumulative, strict=False):
            lines.append(b"%b %d\n" % (text, count))
        lines.append(b"%b %b\n" % (texts[-2], _number(value.sum)))
        lines.append(b"%b %d\n" % (texts[-1], cumulative[-1]))

    def _texts_of(self, family: MetricFamily, values: LabelValues, bounds: Iterable[float]) -> list[bytes]:
        name = family.name, values
        texts = self._texts.get(name)
        if texts is None:
            assert len(values) == len(family.labels), f"{family.name} has labels {family.labels}, and not {values}"
            pairs = [f'{label}="{_escaped(value)}"' for label, value in zip(family.labels, values, strict=True)]
            if family.kind is MetricKind.HISTOGRAM:
                lasts = [*(_number(bound).decode() for bound in bounds), "+Inf"]
                texts = [_series(f"{family.name}_bucket", [*pairs, f'le="{last}"']) for last in lasts]
                texts += [_series(f"{family.name}_{end}", pairs) for end in ("sum", "count")]
            else:
                texts = [_series(family.name, pairs)]
            self._texts[name] = texts
            if len(self._texts) > LABELS_KEPT:
                self._texts.popitem(last=False)
        return texts


def _series(name: str, pairs: Sequence[str]) -> bytes:
    return (f"{name}{{{','.join(pairs)}}}" if pairs else name).encode()


def _number(value: int | float) -> bytes:
    """Whole numbers without a point, others so that reading them gives the same number."""
    return b"%d" % value if isinstance(value, int) else repr(float(value)).encode()


def _escaped(text: str, *, quotes: bool = True) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped
