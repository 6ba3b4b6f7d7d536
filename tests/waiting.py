"""Waiting for what another thread or process brings about, and that tells no event; threads that begin together; and a
clock that a test turns."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

VARIABLE = "WAIT_UNTIL_SECONDS"
SOON_SECONDS = float(os.environ.get(VARIABLE, "240"))

T = TypeVar("T")


def wait_until(is_so: Callable[[], T | None], step: Callable[[], object] = lambda: time.sleep(0.002)) -> T:
    """Looks again and again, and returns what is so at last. Fails after `SOON_SECONDS`, before the limit of a test
    ends the whole run. step: what is done in between."""
    deadline = time.monotonic() + SOON_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < deadline
        step()
    return found


def together(work: Callable[[int], T], threads: int) -> list[T]:
    """What it returns in each of so many threads, by their numbers; the first failure is raised."""
    all_are_there = threading.Barrier(threads)

    def run(number: int) -> T:
        all_are_there.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


@dataclass
class FakeClock:
    """`Clock`: time goes on when it is told to."""

    monotonic: float = 1000.0
    wall: float = 1_700_000_000.0

    def monotonic_seconds(self) -> float:
        return self.monotonic

    def wall_seconds(self) -> float:
        return self.wall

    def thread_seconds(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds
