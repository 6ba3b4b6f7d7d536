"""What callers who stop in the middle of a request cost another one, by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from listeners.test_doors import Door, Siege, door_named, sidecars

__all__ = ["door_named", "sidecars"]  # fixtures


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
        with Siege(door, door.stages["silent" if name == "api" else "head"]):
            ratios.append(slowest() / quiet)
        if ratios[-1] <= 1.5:
            return
    raise AssertionError(ratios)
