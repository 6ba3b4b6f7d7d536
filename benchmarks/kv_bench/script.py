"""Options of benches, and the figures of those that are scripts of their own, as one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from typing import Any, NoReturn

from kvstore.block.errors import BadInput
from kvstore.config import format_size


def options(about: str | None, *names: str, **usual: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        parser.add_argument(name)
    for name, value in usual.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{value} if left out")
    return parser.parse_args()


def one_of(option: str, given: object, allowed: Collection[str]) -> None:
    """Raises `BadInput` where it is another one; None is left out."""
    if given is not None and given not in allowed:
        raise BadInput(f"{option}={given!r}; allowed: {', '.join(allowed)}, or leave it out")


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


def end(found: Any, is_met: bool = True) -> NoReturn:
    print(json.dumps(found))
    raise SystemExit(not is_met)
