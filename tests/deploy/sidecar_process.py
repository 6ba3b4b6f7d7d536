"""`kvstore serve` as a process, as deploy/ starts it, and what its help says it takes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import kvstore
from programs import KVSTORE, PATHS, serving_program
from service.sidecar import patient
from workbench import MODEL, blank_pages, ids, random_pages, same_tokens, small_layout

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SERVE = [*KVSTORE, "serve"]
AROUND_SECONDS = 15
"""For what surrounds draining and writing down, each of which takes up to `limits.close_seconds`."""


@cache
def known_flags() -> frozenset[str]:
    """Of `kvstore serve`, from its help."""
    wide = {**os.environ, **PATHS, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run([*SERVE, "--help"], capture_output=True, text=True, env=wide, timeout=60)
    assert done.returncode == 0, done.stderr
    return frozenset(re.findall(r"--[a-z][a-z-]*", done.stdout))


def flags_in(arguments: Sequence[str]) -> set[str]:
    """What is a flag among them."""
    return {one.split("=")[0] for one in arguments if one.startswith("-")}


def serving(
    *flags: str, under: Sequence[str] = (), environment: Mapping[str, str] | None = None, **options: Any
) -> AbstractContextManager[tuple[subprocess.Popen[str], Any]]:
    """A sidecar, and what it printed once it took connections. under: a command that starts the command behind it.
    options: of the process."""
    env = {**os.environ, **PATHS, **(environment or {})}
    return serving_program([*under, *SERVE, "--json", *flags], env, **options)


def stores_and_reads(said: Mapping[str, Any], durability: str) -> None:
    """An engine does so with ten blocks, at a sidecar that said that."""
    layout = small_layout()
    pages, blank = random_pages(layout, 10), blank_pages(layout, 10)
    with patient(kvstore.open(f"unix:{said['serving'][0]}")) as store:
        handle = store.namespace(model=MODEL, layout=layout)
        assert handle.put(ids(640), pages, durability=durability).reason is None
        with handle.lease(handle.match(ids(640)), deadline_ms=5000) as lease:
            assert handle.get(lease, blank).tokens == 640
    assert same_tokens(pages, blank, range(640))
