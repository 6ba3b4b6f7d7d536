"""Many processes on whole stores, each ended by SIGKILL: at random moments (`stores`), at every failpoint (`points`).

Two directories are worked on at a time, each by one child and one witness. A directory is compared after one to three
kills, so that some children begin where another one was killed; after some kills a new directory takes its place.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from torture import Report, quiet
from torture.nursery import Nursery
from torture.points import AT_FIRST, ONCE_A_SESSION, POINTS
from torture.witness import Witness

DIRECTORIES_AT_ONCE = 2
KILLS_PER_DIRECTORY = 12
MOST_CALLS = 80
"""A child that is open is killed within its first so many calls, which on a busy machine may take a while."""
CALLS_WITHIN_SECONDS = 20
LAST_CALL_SECONDS = 0.02
READY_WITHIN_SECONDS = 60
REACHED_WITHIN_SECONDS = 60
MOST_PASSAGES, FEW_PASSAGES = 6, 2


def stores(nursery: Nursery, kills: int, seed: int, report: Report = quiet) -> dict[str, int]:
    """That many processes, each killed at a random moment of its work; what happened."""
    return _campaign(nursery, _by_directory([""] * kills), seed, report)


def points(
    nursery: Nursery, times: int, seed: int, report: Report = quiet, names: Iterable[str] = POINTS
) -> dict[str, int]:
    """That many processes for each failpoint, killed when they reach it; how many were, by failpoint.

    Once each is a short form: at the first passage, and compared after the last kill of a directory only.
    """
    plan = [point for point in names for _ in range(times)]
    Random(seed).shuffle(plan)
    return _campaign(nursery, _by_directory(plan), seed, report, is_short=times == 1)


def nursery() -> Nursery:
    """Where the processes come from."""
    return Nursery("torture.child")


def _by_directory(plan: Iterable[str]) -> list[list[str]]:
    """What is done to one directory after the other; what new directories alone come to stands first."""
    plans: list[list[str]] = []
    for point in plan:
        if not plans or point in AT_FIRST or len(plans[-1]) == KILLS_PER_DIRECTORY:
            plans.append([])
        plans[-1].append(point)
    return plans


def _campaign(
    nursery: Nursery, plans: list[list[str]], seed: int, report: Report, *, is_short: bool = False
) -> dict[str, int]:
    counts: Counter[str] = Counter()
    guard = threading.Lock()

    def done() -> None:
        with guard:
            counts["kills"] += 1
            report(counts["kills"])

    with ThreadPoolExecutor(DIRECTORIES_AT_ONCE) as pool:
        work = [
            pool.submit(_one_directory, nursery, plan, seed * 1_000_003 + number, done, is_short)
            for number, plan in enumerate(plans)
        ]
        try:
            for number, finished in enumerate(work):
                try:
                    counts.update(finished.result())
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}, directory {number}, {error}") from error
        finally:
            pool.shutdown(cancel_futures=True)
    return dict(counts)


def _one_directory(
    nursery: Nursery, plan: list[str], seed: int, done: Callable[[], None], is_short: bool
) -> Counter[str]:
    random = Random(seed)
    kills = 0
    with tempfile.TemporaryDirectory(prefix="kv-torture-") as directory:
        witness = Witness(Path(directory), seed)
        try:
            until_compared = len(plan) if is_short else 1
            for point in plan:
                options = {
                    "directory": str(witness.store_directory),
                    "seed": random.getrandbits(48),
                    "guests": witness.guests,
                }
                if point:
                    _let_one_reach(nursery, witness, point, 1 if is_short else _passages(point, random), options)
                    witness.counts[point] += 1
                else:
                    _let_one_live(nursery, witness, random, options)
                kills += 1
                done()
                until_compared -= 1
                if not until_compared or kills == len(plan):
                    witness.compare()
                    until_compared = random.choice([1, 1, 2, 3])
        except Exception as error:
            raise AssertionError(f"after {kills} kills: {type(error).__name__}: {error}") from error
        finally:
            witness.close()
        return witness.counts


def _let_one_live(nursery: Nursery, witness: Witness, random: Random, options: dict[str, Any]) -> None:
    child = nursery.start(**options)
    # One in eight dies while it is being born or opens; the others some time after they began to work.
    if random.random() < 0.125:
        child.listen(time.monotonic() + random.random() * 0.1)
    else:
        is_ready = child.listen(time.monotonic() + READY_WITHIN_SECONDS, b"ready")
        assert is_ready, "the child does not open the directory"
        child.listen(time.monotonic() + CALLS_WITHIN_SECONDS, b"\nended", random.randrange(MOST_CALLS))
        child.listen(time.monotonic() + random.random() * LAST_CALL_SECONDS)
    child.kill()
    status = nursery.bury(child)
    witness.hear(bytes(child.heard), child.lines())
    assert status == -signal.SIGKILL, f"the child ended by itself, with status {status}"


def _passages(point: str, random: Random) -> int:
    return random.randrange(1, 1 + (FEW_PASSAGES if point in AT_FIRST | ONCE_A_SESSION else MOST_PASSAGES))


def _let_one_reach(nursery: Nursery, witness: Witness, point: str, at: int, options: dict[str, Any]) -> None:
    child = nursery.start(**options, point=point, at=at)
    has_ended = child.listen(time.monotonic() + REACHED_WITHIN_SECONDS)
    child.kill()
    status = nursery.bury(child)
    lines = child.lines()
    witness.hear(bytes(child.heard), lines)
    assert has_ended and f"at {point}" in lines, f"{point!r} was not reached"
    assert status == -signal.SIGKILL, f"the child ended by itself, with status {status}"
