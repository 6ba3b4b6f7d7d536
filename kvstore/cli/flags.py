"""Flags of commands for settings of a sidecar, from tables: a row has a flag, its setting, its metavar and its help."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, NamedTuple

from kvstore.cli.terminal import expanded_path, typer

PATHS = ("FILE", "DIR", "PATH")
Given = dict[str, dict[str, Any]]
"""Settings by section and key, without those that were not given."""


class Flag(NamedTuple):
    """name: as a parameter. setting: SECTION.KEY. option: for typer; kind: of its value."""

    name: str
    setting: str
    option: Any
    kind: Any
    default: Any

    @staticmethod
    def read(row: str) -> "Flag":
        """Its metavar is `-` for a flag without a value, METAVAR... for one that may be repeated, and METAVAR=VALUE has
        the default. Those of paths are expanded."""
        flag, setting, written, about = row.split(maxsplit=3)
        metavar, _, default = written.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if metavar == "-":
            return Flag(name, setting, typer.Option(flag, help=about), bool, False)
        kind: Any = list[str] if metavar.endswith("...") else float if metavar == "SECONDS" else str
        expands = expanded_path if metavar in PATHS else None
        told = typer.Option(flag, metavar=metavar.removesuffix("..."), help=about, callback=expands)
        return Flag(name, setting, told, kind | None, kind(default) if default else None)


def flags_of(table: str) -> Sequence[Flag]:
    return [Flag.read(row) for row in table.strip().splitlines()]


def settings_of(flags: Sequence[Flag], values: Mapping[str, Any]) -> Given:
    """values: of all parameters of a command, by name."""
    given: Given = {}
    for one in flags:
        if values[one.name] not in (None, [], False):
            section, _, key = one.setting.partition(".")
            given.setdefault(section, {})[key] = values[one.name]
    return given


def with_settings(flags: Sequence[Flag]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command these flags, behind its first parameter; it gets their settings as its parameter `given`."""

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        def run(**values: Any) -> int:
            given, names = settings_of(flags, values), {one.name for one in flags}
            return command(given=given, **{name: one for name, one in values.items() if name not in names})

        def parameter(flag: Flag) -> inspect.Parameter:
            kind, told = Annotated[flag.kind, flag.option], inspect.Parameter.KEYWORD_ONLY
            return inspect.Parameter(flag.name, told, default=flag.default, annotation=kind)

        signature = inspect.signature(command, eval_str=True)
        first, *rest = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in signature.parameters.values()]
        shown = [first, *map(parameter, flags), *(one for one in rest if one.name != "given")]
        run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return run

    return decorated
