"""What callers who stop in the middle of a request cost another one, by the clock."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from listeners.test_doors import Door, Siege, door_named, sidecars

__all__ = ["door_named", "sidecars"]  # fixtures
FORKING = multiprocessing.get_context("fork")


def besiege(door: Door, said: bytes, has_begun: Any, is_over: Any) -> None:
    with Siege(door, said):
        has_begun.set()
        is_over.wait()


@contextmanager
def besieged(door: Door, said: bytes) -> Iterator[bool]:
    """By another process: in this one besiegers and the good caller would wait for each other."""
    has_begun, is_over = FORKING.Event(), FORKING.Event()
    process = FORKING.Process(target=besiege, args=(door, said, has_begun, is_over))
    process.start()
    try:
        yield has_begun.wait(20)
    finally:
        is_over.set()
        process.join(20)


@pytest.mark.parametrize("name", ["console", "query", "pd-proxy", "grpc", "api"])
def test_callers_that_stop_cost_another_half_of_its_time_at_most(door_named: Callable[[str], Door], name: str) -> None:
    """The 99th percentile of 100 calls, in the best of some rounds: quiet and besieged in turns."""
    door = door_named(name)

    def slowest() -> float:
        took = []
        for _ in range(100):
            began = time.perf_counter()
            door.good()
            took.append(time.perf_counter() - began)
        return sorted(took)[-2]

    ratios = []
    for _ in range(6):
        quiet = slowest()
        with besieged(door, door.stages["silent" if name == "api" else "head"]) as has_begun:
            assert has_begun
            ratios.append(slowest() / quiet)
        if ratios[-1] <= 1.5:
            return
    raise AssertionError(ratios)
