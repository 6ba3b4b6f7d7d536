"""How many of the product's files, classes and functions a verb passes through, counted as it runs: a put, and what
reads it back.

Counted are those in which at least one line of code ran, in any thread. The figures are today's, may fall and must not
rise.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import gt
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import kvstore
from house import PACKAGES
from kvstore.client.connection import CallLimits
from kvstore.service.connections import DoorLimits
from service.sidecar import Sidecar
from workbench import MODEL, blank_pages, ids, random_pages, same_tokens, small_layout

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(str(ROOT / folder) for folder in PACKAGES.values())
BLOCKS = 4
TOKENS = ids(64 * BLOCKS)

BEHIND_SECONDS = 0.05
"""What a sidecar does behind its answer to the verb before is over then; nothing tells when it is."""
QUIET = CallLimits(match=10.0, lease=10.0, ping=600.0)
"""A client that does not ping beside what is counted; the sidecar sweeps not during it either."""

MOST = {
    "embedded": {
        "put": (16, 24, 130),
        "match": (6, 6, 21),
        "lease": (13, 17, 48),
        "get": (11, 13, 81),
        "release": (6, 7, 16),
    },
    "nvme": {
        "put": (34, 46, 291),
        "match": (8, 8, 26),
        "lease": (15, 19, 54),
        "get": (11, 13, 81),
        "release": (6, 7, 16),
    },
    "socket": {
        "put": (25, 37, 251),
        "match": (17, 21, 118),
        "lease": (23, 32, 163),
        "get": (11, 11, 78),
        "release": (15, 17, 82),
    },
}
"""Files, classes, functions."""


def counted(passed: set[CodeType]) -> tuple[int, int, int]:
    """Files; classes whose code ran; functions, with those that are defined in others, by their names."""
    names = {(one.co_filename, one.co_qualname) for one in passed}
    owners = {(path, name.partition(".<locals>")[0].rpartition(".")[0]) for path, name in names}
    return len({path for path, _ in names}), sum(owner != "" for _, owner in owners), len(names)


class Passed:
    """Notes code while it is told to, in every thread that was started inside `everywhere`."""

    def __init__(self) -> None:
        self._noted: set[CodeType] = set()
        self._is_on = False

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def during(self, act: Callable[[], Any], *, is_answered: bool = True) -> tuple[Any, set[CodeType]]:
        """is_answered: else a sidecar may still be at it when `act` returns."""
        time.sleep(BEHIND_SECONDS)
        self._noted, self._is_on = set(), True
        try:
            done = act()
            if not is_answered:
                time.sleep(BEHIND_SECONDS)
            return done, self._noted
        finally:
            self._is_on = False

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            self._noted.add(frame.f_code)


def verbs(passed: Passed, namespace: Any, durability: str) -> dict[str, set[CodeType]]:
    """Each verb once, for what the third call of it passes: the first one opens and maps things, and the
    second sees that done."""
    found = {}
    for turn in range(3):
        prompt = ids(64 * BLOCKS, 10_000 * turn)
        pages, into = random_pages(namespace.layout, BLOCKS), blank_pages(namespace.layout, BLOCKS)
        put, found["put"] = passed.during(lambda: namespace.put(prompt, pages, durability=durability))  # noqa: B023
        assert put.stored == BLOCKS and put.reason is None
        match, found["match"] = passed.during(lambda: namespace.match(prompt))  # noqa: B023
        lease, found["lease"] = passed.during(lambda: namespace.lease(match, deadline_ms=10_000))  # noqa: B023
        loaded, found["get"] = passed.during(lambda: namespace.get(lease, into))  # noqa: B023
        assert loaded.tokens == 64 * BLOCKS and same_tokens(pages, into, range(64 * BLOCKS))
        _, found["release"] = passed.during(lease.release, is_answered=False)
    return found


@pytest.mark.parametrize("way", MOST)
def test_a_verb_passes_little(way: str, tmp_path: Path) -> None:
    passed = Passed()
    with passed.everywhere():
        if way == "socket":
            with Sidecar(tmp_path, DoorLimits(sweep_seconds=10.0)) as sidecar, sidecar.client() as store:
                store._door._limits = QUIET
                found = verbs(passed, store.namespace(model=MODEL, layout=small_layout()), "volatile")
        else:
            sizes = {"dram": "16MiB", "nvme": "16MiB" if way == "nvme" else None}
            with kvstore.open(f"embedded:{tmp_path}", **sizes) as store:
                assert store.warmed(20)
                durability = "disk" if way == "nvme" else "volatile"
                found = verbs(passed, store.namespace(model=MODEL, layout=small_layout()), durability)
    counts = {verb: counted(codes) for verb, codes in found.items()}
    for verb, count in counts.items():
        print(f"{way} {verb}: {count[0]} files, {count[1]} classes, {count[2]} functions")
    above = {verb: count for verb, count in counts.items() if any(map(gt, count, MOST[way][verb]))}
    assert above == {}
