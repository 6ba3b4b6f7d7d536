"""Options of benches, and what those have in common that are scripts of their own: figures as one line of JSON, wrong
input as one line with status 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from kvstore.block.errors import BadInput, StoreError
from kvstore.cli.terminal import BAD_INPUT, lines_of
from kvstore.config import format_size
from kvstore.insight.trace import Trace, read_trace


def options(about: str | None, *names: str, **usual: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        parser.add_argument(name)
    for name, value in usual.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{value} if left out")
    return parser.parse_args()


def one_of(option: str, given: object, allowed: Collection[str], otherwise: str = ", or leave it out") -> None:
    """Raises `BadInput` where it is another one; None is left out."""
    if given is not None and given not in allowed:
        raise BadInput(f"{option}={given!r}; allowed: {', '.join(allowed)}{otherwise}")


def trace_of(path: str) -> Trace:
    """Raises `BadInput`."""
    try:
        with lines_of(Path(path)) as lines:
            return read_trace(Path(path).name, lines)
    except OSError as error:
        allowed = "JSON lines of Mooncake's form, or of kvstore record, as they are or as gzip"
        raise BadInput(f"trace={path!r} cannot be read ({error.strerror}); allowed: {allowed}") from None


def enough(what: str, needed: int, allowed: int, of: str = "memory") -> int:
    """What is allowed, in bytes. Raises `BadInput` where more is needed."""
    if needed > allowed:
        more = f"needs {format_size(needed)} of {of} and may take {format_size(allowed)}"
        raise BadInput(f"{what} {more}; free some, or measure something smaller (--help)")
    return allowed


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rounded(digits: int, **figures: Any) -> dict[str, Any]:
    return {name: round(one, digits) if isinstance(one, float) else one for name, one in figures.items()}


def run(work: Callable[[], None]) -> None:
    """A script's work; what was given wrongly, or is missing, ends the program."""
    try:
        work()
    except StoreError as error:
        say(f"{Path(sys.argv[0]).name}: {error}")
        raise SystemExit(BAD_INPUT) from None


def end(found: Any, is_met: bool = True) -> NoReturn:
    print(json.dumps(found))
    raise SystemExit(not is_met)
