"""How a number is declared, at the field that holds it, and the walks over what is declared.

    class DoorStatus(msgspec.Struct):
        malformed: Annotated[int, counter("Messages that ended their connection.")]

One such line is enough: the field is in the JSON, in messages and tables, and has a series under its metric's name. A
metric's labels get their values, in this order, from the declaration (`door="tenant"`), from fields around it that are
a `label`, and from the keys of tables, one level of a table for each label that is left. A table without a label left
counts as its sum, a list as its length, and a word is a label of a series that is 1. None has no series.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from tiering.counts.histogram import HistogramCounts

S = TypeVar("S", bound=msgspec.Struct)
PREFIX = "kvstore_"
MOST_ROWS = 64
"""Of a list, such as that of other nodes, have series of their own."""
_METRIC, _LABEL, _PARTS = "metric", "label", "parts"


class MetricKind(StrEnum):
    """As Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One name. unit: of its values, for people. text: what is counted, in one line. given: values of labels that all
    series of a declaration have. times: what its field is multiplied by."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    unit: str
    text: str
    given: Mapping[str, str]
    times: float


class Sample(NamedTuple):
    """values: of the family's labels, in their order."""

    family: MetricFamily
    values: tuple[str, ...]
    value: int | float | HistogramCounts


def _metric(kind: MetricKind) -> Callable[..., Meta]:
    """Declares one of a kind. text: what is counted. name: the field's where it is not given, without what all begin
    with and counters and histograms end with. labels: their names. unit: the last word of the name where it is not
    given. times: what the field is multiplied by. given: values of labels."""

    def declare(text: str, name: str = "", labels: str = "", unit: str = "", times: float = 1, **given: str) -> Meta:
        family = MetricFamily(name, kind, tuple(labels.split()), unit, text, given, times)
        return Meta(description=text, extra={_METRIC: family})

    return declare


counter, gauge, histogram = map(_metric, MetricKind)
"""A counter counts events since the start of the process, and never falls; a histogram's field is a
`HistogramCounts` of seconds."""
_ENDINGS = {MetricKind.COUNTER: "_total", MetricKind.GAUGE: "", MetricKind.HISTOGRAM: "_seconds"}


def _named(family: MetricFamily, field: str) -> MetricFamily:
    name = family.name or field
    unit = family.unit or ("seconds" if family.kind is MetricKind.HISTOGRAM else name.rpartition("_")[2])
    return replace(family, name=f"{PREFIX}{name}{_ENDINGS[family.kind]}", unit=unit)


def label(name: str) -> Meta:
    """The field's text is a label of the metrics beside and below it."""
    return Meta(extra={_LABEL: name})


def parts(**declared: Meta) -> Meta:
    """The metrics of a field whose type is declared on a floor below, by its attributes."""
    return Meta(extra={_PARTS: declared})


class _Field(NamedTuple):
    """families: by the attribute of the value that has the number; "" for the value itself."""

    name: str
    label: str
    families: tuple[tuple[str, MetricFamily], ...]
    inner: Any
    is_list: bool


@cache
def _fields(kind: type) -> tuple[_Field, ...]:
    """Those of a struct that lead to a metric."""
    found = []
    for one in msgspec.structs.fields(kind):
        extra, plain = _unwrapped(one.type)
        is_list = get_origin(plain) is list
        inner = get_args(plain)[0] if is_list else plain
        is_struct = isinstance(inner, type) and issubclass(inner, msgspec.Struct)
        is_walked = is_struct and bool(_fields(inner)) and (not is_list or any(field.label for field in _fields(inner)))
        declared = {name: (meta.extra or {})[_METRIC] for name, meta in extra.get(_PARTS, {}).items()}
        declared |= {"": extra[_METRIC]} if _METRIC in extra else {}
        if declared or is_walked or _LABEL in extra:
            named = tuple((name, _named(family, name or one.name)) for name, family in declared.items())
            found.append(_Field(one.name, extra.get(_LABEL, ""), named, inner if is_walked else None, is_list))
    return tuple(found)


def _unwrapped(kind: Any) -> tuple[dict[str, Any], Any]:
    """What is declared of a field, and its type without that and without None."""
    extra: dict[str, Any] = {}
    if get_origin(kind) is Annotated:
        kind, *metas = get_args(kind)
        extra = {name: value for meta in metas for name, value in (meta.extra or {}).items()}
    if get_origin(kind) in (Union, types.UnionType):
        plain = [one for one in get_args(kind) if one is not type(None)]
        kind = plain[0] if len(plain) == 1 else kind
    return extra, kind


def picked(kind: type[S], *sources: object, **given: Any) -> S:
    """A struct of the sources' attributes of the same names, the last one's first, and of what is given."""
    found = {
        name: getattr(source, name) for source in sources for name in kind.__struct_fields__ if hasattr(source, name)
    }
    return kind(**{**found, **given})


@cache
def families(kind: type) -> tuple[MetricFamily, ...]:
    """All that are declared in a struct and in those that it leads to, each once."""
    found: dict[str, MetricFamily] = {}
    for field in _fields(kind):
        mine = [family for _, family in field.families]
        for one in [*mine, *(families(field.inner) if field.inner is not None else ())]:
            found.setdefault(one.name, one)
    return tuple(found.values())


def samples(struct: msgspec.Struct, around: Mapping[str, str] = types.MappingProxyType({})) -> Iterator[Sample]:
    """Every series of a struct. around: values of labels, by name."""
    fields = _fields(type(struct))
    around = {**around, **{one.label: str(getattr(struct, one.name)) for one in fields if one.label}}
    for field in fields:
        value = getattr(struct, field.name)
        if value is None:
            continue
        for name, family in field.families:
            number = getattr(value, name) if name else value
            yield from _series(family, number, {**around, **family.given})
        if field.inner is not None:
            for one in value[:MOST_ROWS] if field.is_list else (value,):
                yield from samples(one, around)


def _series(family: MetricFamily, value: Any, known: Mapping[str, str]) -> Iterator[Sample]:
    left = next((name for name in family.labels if name not in known), None)
    if isinstance(value, Mapping) and left is not None:
        for key, inner in value.items():
            yield from _series(family, inner, {**known, left: str(key)})
    elif isinstance(value, str) and left is not None:
        yield Sample(family, _values(family, {**known, left: value}), 1)
    elif isinstance(value, Sequence) and left is not None:  # a row of labels in each
        names = [name for name in family.labels if name not in known]
        for row in value:
            yield Sample(family, _values(family, {**known, **dict(zip(names, row, strict=True))}), 1)
    elif isinstance(value, HistogramCounts):
        yield Sample(family, _values(family, known), value)
    elif value is not None:
        whole = sum(value.values()) if isinstance(value, Mapping) else value
        number = len(whole) if isinstance(whole, Sequence) else whole
        yield Sample(family, _values(family, known), number * family.times)


def _values(family: MetricFamily, known: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(known[name] for name in family.labels)
