"""What every bench prints: one row for a figure beside its limit, one table of rows, and one form as JSON.

    what                     what was measured, by name: the first columns
    value, unit              the figure, a median over `samples` turns; low, high: its spread
    limit, limit_of          what it is held against, in the same unit, and what that is
    ratio                    of both, turn by turn, since machines drift; ratio_low, ratio_high: its quartiles
    target                   what the ratio, the value or one of the details is to reach
    details                  further figures, by name

As JSON a row is one flat object of all these names, with `met`, which is null where there is no target.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvstore.config import format_size

MS, SECONDS, SHARE = "ms", "s", "share"


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which about `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> dict[str, object]:
    """The processor, the cores that this process may use, and memory in bytes."""
    processors, memory = (Path(f"/proc/{name}").read_text().splitlines() for name in ("cpuinfo", "meminfo"))
    names = (line.partition(":")[2].strip() for line in processors if line.startswith("model name"))
    totals = (int(line.split()[1]) * 1024 for line in memory if line.startswith("MemTotal:"))
    return {
        "processor": next(names, "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": next(totals, 0),
    }


@dataclass(frozen=True, slots=True)
class Target:
    """number: that `of`, a figure of the row, is to reach at least, or else at most."""

    number: float
    is_least: bool = True
    of: str = "ratio"

    def is_met(self, found: float) -> bool:
        return found >= self.number if self.is_least else found <= self.number

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.number:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """See the file's head."""

    what: Mapping[str, object]
    value: float
    unit: str
    samples: int = 1
    low: float | None = None
    high: float | None = None
    limit_of: str = ""
    limit: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    target: Target | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [*self.what, *self.details, *_FIGURES, "met"]
        assert len(names) == len(set(names)), f"a name stands for two figures: {names}"
        assert self.met is not None or self.target is None, f"there is no {self.target}"

    def __getitem__(self, name: str) -> Any:
        """A figure, by its name in JSON."""
        for named in (self.what, self.details):
            if name in named:
                return named[name]
        return getattr(self, name)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where none is set."""
        return None if self.target is None else self.target.is_met(self[self.target.of])

    def to_dict(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in _FIGURES}
        target = self.target
        figures |= {
            "target": None if target is None else target.number,
            "target_of": "" if target is None else f"{target.of}, at {'least' if target.is_least else 'most'}",
            "met": self.met,
        }
        return {**self.what, **figures, **self.details}

    def __str__(self) -> str:
        """One line, for a target that was missed."""
        named = ", ".join(f"{name} {cell(name, value)}" for name, value in self.what.items())
        shown = f"{named}: {cell('', self.value)} {self.unit}".rstrip()
        if self.ratio is not None:
            shown += f", ratio {number(self.ratio)}"
        if self.target is None:
            return shown
        of = "" if self.target.of in ("value", "ratio") else f", {self.target.of} {number(self[self.target.of])}"
        return f"{shown}{of}, wanted {self.target}"


_FIGURES = [one.name for one in fields(Row) if one.name not in ("what", "details", "target")]


@dataclass(frozen=True)
class Section:
    """Rows of one table. title, words: before and behind it. name: of the list in JSON; sections may have one together.
    left_out: columns that the table has no room for."""

    rows: Sequence[Row]
    title: str = ""
    words: str = ""
    name: str = "rows"
    left_out: tuple[str, ...] = ()


@dataclass
class BenchResult:
    """What a bench has found. about: facts that JSON has beside the rows. faults: what makes figures worthless."""

    bench: str
    options: Any = None
    sections: list[Section] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Of all tables."""
        return [row for section in self.sections for row in section.rows]

    def missed(self) -> list[str]:
        """A line for each target that was missed."""
        return [f"target missed: {row}" for row in self.rows if row.met is False]

    def is_judged(self) -> bool:
        """Whether any row has a target here."""
        return any(row.target is not None for row in self.rows)

    def to_dict(self) -> dict[str, object]:
        found: dict[str, Any] = {"bench": self.bench, "machine": machine()}
        found |= {} if self.options is None else {"options": asdict(self.options)}
        found |= self.about
        for section in self.sections:
            found.setdefault(section.name, []).extend(row.to_dict() for row in section.rows)
        return {**found, "faults": self.faults}

    def render(self, console: Any) -> None:
        """A table for each section, with its words."""
        for section in self.sections:
            if section.title:
                console.print(escape(section.title), highlight=False)
            if section.rows:
                console.print(table_of(section.rows, section.left_out))
                for row in section.rows:
                    _print_details(row, section.rows, console)
            if section.words:
                console.print(escape(section.words), highlight=False)


def table_of(rows: Sequence[Row], left_out: Iterable[str] = ()) -> Table:
    """A line for each row. Columns are what these rows have; what they differ in names of is no column."""
    marks = {None: "", True: "met", False: "missed"}
    what = {_heading(name): [cell(name, row.what.get(name)) for row in rows] for row in rows for name in row.what}
    columns = what | {
        "samples": [str(row.samples) for row in rows],
        "measured": [f"{cell('', row.value)} {row.unit}".rstrip() for row in rows],
        "low .. high": [_spread(row.low, row.high) for row in rows],
        "beside": ["" if row.limit is None else f"{row.limit_of} {number(row.limit)}" for row in rows],
        "ratio": ["" if row.ratio is None else number(row.ratio) for row in rows],
        "quartiles": [_spread(row.ratio_low, row.ratio_high) for row in rows],
    }
    columns |= what  # what rows are of is never left out for a figure of that name
    columns |= {_heading(name): [cell(name, row.details[name]) for row in rows] for name in _shared(rows)}
    columns["target"] = [f"{row.target or ''} {marks[row.met]}".strip() for row in rows]
    shown = {name: cells for name, cells in columns.items() if name not in left_out and any(cells)}
    table = Table(*shown)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*map(escape, cells))
    return table


def _heading(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def cell(name: str, value: Any) -> str:
    """One figure or name, as people read it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_size(value) if name.endswith("_bytes") else f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """With three digits that count, and all of a large one."""
    size = abs(value)
    if size and size < 0.01:
        return f"{value:.3g}"
    if size < 100:
        return f"{value:.3f}" if size < 1 else f"{value:.2f}"
    return f"{value:,.1f}" if size < 1000 else f"{value:,.0f}"


def _spread(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None or low == high else f"{number(low)} .. {number(high)}"


def _shared(rows: Sequence[Row]) -> list[str]:
    """Details that each row has, and that a cell can show."""
    return [
        name
        for name, value in rows[0].details.items()
        if not isinstance(value, Mapping) and all(name in row.details for row in rows)
    ]


def _print_details(row: Row, rows: Sequence[Row], console: Any) -> None:
    shared = _shared(rows)
    others = {name: one for name, one in row.details.items() if name not in shared and not isinstance(one, Mapping)}
    if others:
        named = ", ".join(cell(name, value) for name, value in row.what.items())
        told = ", ".join(f"{name.replace('_', ' ')} {cell(name, value)}" for name, value in others.items())
        console.print(escape(f"{named}: {told}"), highlight=False)
