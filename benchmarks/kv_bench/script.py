"""Benches that are scripts of their own: their options, and their figures as one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn


def options(about: str | None, *names: str, **usual: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        parser.add_argument(name)
    for name, value in usual.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{value} if left out")
    return parser.parse_args()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rounded(digits: int, **figures: Any) -> dict[str, Any]:
    return {name: round(one, digits) if isinstance(one, float) else one for name, one in figures.items()}


def end(found: Any, is_met: bool = True) -> NoReturn:
    print(json.dumps(found))
    raise SystemExit(not is_met)
