"""What commands share: common options, results and progress on a terminal, and how they fail.

If the command line's packages are missing, importing it ends the program: `plain` has what goes without.
"""

import gzip
import inspect
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, Protocol

from kvstore.block.errors import BadInput
from kvstore.cli import plain
from kvstore.cli.standard_streams import say
from kvstore.config import expanded

_OF_SERVER = "typer rich lmdb fastapi starlette httpx2 grpc grpc_health grpc_reflection google h11 prometheus_client"
EXTRA_OF = dict.fromkeys(_OF_SERVER.split(), "server") | {
    "cryptography": "tls",
    "matplotlib": "plot",
    "numba": "adaptive",
    "torch": "hf",
    "transformers": "hf",
    "tokenizers": "hf",
    "triton": "gpu",
}


def needs(module: str) -> str:
    return f"kvstore: this needs the package {module}; run: pip install 'prefix-kvstore[{EXTRA_OF[module]}]'"


COMMANDS = tuple(
    (
        "demo run prove doctor fsck serve keys console network pd-proxy prime ping stat why prefixes namespaces drop "
        "purge warm record replay whatif plan models lint bench"
    ).split()
)
ABOUT = "A KV-cache store for language models: keep what prefill has computed, and never serve the wrong bytes."


try:
    import typer
    import typer.core
    from rich.console import Console, RenderableType
    from rich.console import Group as Group
    from rich.live import Live as Live
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text
except ModuleNotFoundError as absent:
    if absent.name not in EXTRA_OF:
        raise
    commands = ", ".join(name for name in COMMANDS if name != "doctor")
    raise SystemExit(plain.run(ABOUT, commands, needs(absent.name))) from None

OK, CHECK_FAILED, BAD_INPUT, OUT_OF_RESOURCES, INTERRUPTED = 0, 1, 2, 71, 130

PLAIN_WIDTH = 120

# By version typer uses its own copy of click or the installed one; this is either's usage error.
UsageError: Any = typer.BadParameter.__base__

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on standard output.")]


def expanded_path(path: str | None) -> str | None:
    return expanded(path) if path else path


def option(metavar: str, about: str, *names: str, **more: Any) -> Any:
    """An option that has a value."""
    return typer.Option(*names, metavar=metavar, help=about, **more)


def path_option(metavar: str, about: str, *names: str, **more: Any) -> Any:
    """The same for a path, which is expanded."""
    return option(metavar, about, *names, callback=expanded_path, **more)


def argument(metavar: str, about: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=about, **more)


def path_argument(metavar: str, about: str, **more: Any) -> Any:
    """For a path, which is expanded."""
    return argument(metavar, about, callback=expanded_path, **more)


# Flags for settings of a sidecar, from tables: a row has a flag, its setting, its metavar and its help ----------------

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


# ---------------------------------------------------------------------------------------------------------------------


class InOrder(typer.core.TyperGroup):
    """Lists commands in the order of `COMMANDS`, then any others."""

    def list_commands(self, ctx: Any) -> list[str]:
        known = [name for name in COMMANDS if name in self.commands]
        return [*known, *(name for name in self.commands if name not in known)]


app = typer.Typer(
    cls=InOrder,
    help=ABOUT,
    epilog="Each command explains itself: kvstore COMMAND --help. Start with: kvstore demo",
    rich_markup_mode="markdown",  # lets help flow to the terminal's width
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(help="Measure a path of the store against its physical limit, in the same run.")
app.add_typer(bench, name="bench")

keys = typer.Typer(help="Tenants' secrets that the nodes of a pool share, in a directory of files of mode 0400.")
app.add_typer(keys, name="keys")


class Result(Protocol):
    """The result of a command."""

    def to_dict(self) -> dict[str, object]:
        """One object for `--json`."""
        ...

    def render(self, console: Any) -> None:
        """The same for people."""
        ...


@dataclass(frozen=True, slots=True)
class Shown:
    """A result that is there in both forms. told: the object. lines: for people, made when they are read, once; text
    goes on beyond the terminal's width, and is printed as it is, never as markup."""

    told: Mapping[str, object]
    lines: Iterable[RenderableType]

    def to_dict(self) -> dict[str, object]:
        return {**self.told}

    def render(self, console: Console) -> None:
        for one in self.lines:
            if isinstance(one, str):
                console.print(Text(one), soft_wrap=True)
            else:
                console.print(one)


Show = Callable[..., None]
"""Called with what is being done and, if known, steps done of how many."""


def print_result(result: Result, as_json: bool) -> int:
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        result.render(Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    return OK


@contextmanager
def shown_progress() -> Iterator[Show]:
    """A progress line on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda doing, done=0, steps=0: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("starting", total=None)
        yield lambda doing, done=0, steps=0: bar.update(line, description=doing, completed=done, total=steps or None)


def fail(message: str, status: int = BAD_INPUT) -> NoReturn:
    """Print the message as one line, and exit."""
    say(f"kvstore: {' '.join(message.split())}", sys.stderr)
    raise SystemExit(status) from None


def check_folder(given: str, file: str) -> None:
    """Raises if the file's folder is missing."""
    folder = Path(file).parent
    if not folder.is_dir():
        raise typer.BadParameter(f"{given}: there is no folder {folder}; make it, or give another one")


def listed(given: list[str], flag: str, allowed: str) -> list[str]:
    """Split at commas, and strip."""
    found = []
    for one in given:
        pieces = [piece.strip() for piece in one.split(",") if piece.strip()]
        if not pieces:
            raise typer.BadParameter(f"{flag} {one[:40]!r}; {allowed}")
        found += pieces
    return found


def whole(given: str, flag: str, least: int, most: int, allowed: str = "") -> int:
    """Parse an option's whole number. allowed: for the message."""
    is_whole = re.fullmatch(r"\s*[+-]?[0-9]{1,40}\s*", given) is not None
    if not is_whole or not least <= int(given) <= most:
        raise typer.BadParameter(f"{flag} {given[:40]!r}; {allowed or f'give a whole number from {least} to {most}'}")
    return int(given)


def real(given: str, flag: str, allowed: str) -> float:
    """Parse an option's number. allowed: for the message."""
    try:
        return float(given)
    except ValueError:
        raise typer.BadParameter(f"{flag} {given[:40]!r}; {allowed}") from None


@contextmanager
def lines_of(file: Path) -> Iterator[Iterator[str]]:
    """Lines of a text file, unpacked if it is gzip."""
    with open(file, "rb") as raw:
        is_packed = raw.peek(2)[:2] == b"\x1f\x8b"
        try:
            with io.TextIOWrapper(
                gzip.open(raw) if is_packed else raw, encoding="utf-8-sig", errors="replace"
            ) as lines:
                yield lines
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadInput(f"{file} cannot be unpacked ({error}); it was cut off or damaged: fetch it again") from None
