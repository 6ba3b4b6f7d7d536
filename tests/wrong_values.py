"""Every setting of a sidecar, from the tree of sections; and values that a setting refuses, made from its own type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from msgspec import NODEFAULT, inspect, structs

from kvstore.config import Text, is_section, kinds_of, marks
from kvstore.service.settings import Settings, TenantSettings

ANY_TEXT = (None, *(one.pattern for one in (inspect.type_info(Text).type,)))  # type: ignore[attr-defined]
"""Patterns of settings that may be any text."""


def every_setting() -> Iterator[tuple[str, str, Any, Any]]:
    """SettingsSection, key, type and default of each; tenants.NAME is the section of a tenant."""
    for section, kind in kinds_of(Settings).items():
        inner = kind if is_section(kind) else TenantSettings
        for one in structs.fields(inner):
            name = section if inner is kind else f"{section}.NAME"
            yield name, one.name, one.type, None if one.default is NODEFAULT else one.default


def wrong_values(kind: Any) -> Iterator[Any]:
    """Of each other type, and just outside its bounds."""
    kinds = list(_types(inspect.type_info(kind)))
    types = {type(one) for one in kinds}
    numbers: set[type] = {inspect.IntType, inspect.FloatType}
    yield {"a": 1}
    yield from [True] if inspect.BoolType not in types else []
    yield from [1] if not numbers & types else []
    yield from [1.5] if inspect.FloatType not in types else []
    yield from [["a"]] if inspect.ListType not in types else []
    yield from ["no such value"] if inspect.StrType not in types else []
    for one in kinds:
        yield from _outside(one, "check" in marks(kind))


def _types(kind: inspect.Type) -> Iterator[inspect.Type]:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for one in kinds:
        yield from (
            _types(one.type)
            if isinstance(one, inspect.Metadata)
            else (_types(one) if isinstance(one, inspect.UnionType) else [one])
        )


def _outside(kind: inspect.Type, is_checked: bool) -> Iterator[Any]:
    match kind:
        case inspect.IntType(ge=least, le=most):
            yield from [least - 1] if least is not None else []
            yield from [most + 1] if most is not None else []
        case inspect.FloatType(gt=above, ge=least, lt=below, le=most):
            yield from (math.nan, math.inf, -math.inf)
            yield from [one for one in (above, below) if one is not None]
            yield from [math.nextafter(least, -math.inf)] if least is not None else []
            yield from [math.nextafter(most, math.inf)] if most is not None else []
        case inspect.StrType(pattern=pattern):
            yield from ["", "a\0b"] if is_checked or pattern is not None else []
            yield from ["no such value"] if is_checked or pattern not in ANY_TEXT else []
        case inspect.ListType(item_type=item, max_length=most):
            yield from ([value] for inner in _types(item) for value in (None, *_outside(inner, False)))
            yield from [["one"] * (most + 1)] if most is not None else []
