"""How the benches measure: interleaved with a limit taken in the same run, since a shared machine drifts by a third
within seconds. A contender's ratio is the median over many short turns of its result against the mean of its two
neighbours. Times are wall times; nothing here prints.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple, TypeVar

from kvstore.config import memory_limit, memory_limit_files
from kvstore.traffic.row import MS, Row, Target, quantile
from tiering.files import read_text_files

WARM_UP_LAPS = 2
Name = TypeVar("Name", bound=Hashable)
Say = Callable[[str], None]
"""Gets one line at a time about what the bench is doing."""


class Cost(NamedTuple):
    """Seconds of a piece of work: wall time, and CPU time over all threads."""

    wall: float
    cpu: float


Turn = Callable[[], Cost]
"""Does one turn of work and returns the cost of a piece."""


class Stopwatch:
    """Runs from now on."""

    def __init__(self, cpu: Callable[[], float] = process_time) -> None:
        """cpu: whose processor time, of all threads or of this one."""
        self._cpu = cpu
        self._worked, self._began = cpu(), perf_counter()

    def cost(self) -> Cost:
        return Cost(perf_counter() - self._began, self._cpu() - self._worked)


def timed(work: Callable[[], object]) -> Turn:
    def turn() -> Cost:
        watch = Stopwatch()
        work()
        return watch.cost()

    return turn


@dataclass(frozen=True, slots=True)
class Against:
    """A contender beside its limit, over all laps: the median cost of each, and the median of their quotients.

    ratio: limit's wall time / contender's, so 1 is as fast as the limit; low, high: quartiles of these quotients, which
    show the machine's drift. cpu_ratio: the same of CPU time, which neighbours on a shared machine disturb least.
    """

    seconds: float
    limit_seconds: float
    ratio: float
    low: float
    high: float
    cpu_ratio: float
    laps: int = 1
    seconds_p99: float = field(default=0.0, compare=False)
    limit_seconds_p99: float = field(default=0.0, compare=False)

    @staticmethod
    def of(costs: Sequence[Cost], limits: Sequence[tuple[Cost, Cost]]) -> Against:
        """costs: the contender's, lap by lap. limits: the limit's cost right before and right after."""
        pairs = list(zip(costs, limits, strict=True))
        ratios = [(before.wall + after.wall) / 2 / cost.wall for cost, (before, after) in pairs]
        of_cpu = [(before.cpu + after.cpu) / 2 / cost.cpu for cost, (before, after) in pairs]
        seconds, limit = [cost.wall for cost in costs], [after.wall for _, after in limits]
        quartiles = quantile(ratios, 0.25), quantile(ratios, 0.75)
        slow = quantile(seconds, 0.99), quantile(limit, 0.99)
        middle = median(seconds), median(limit), median(ratios)
        return Against(*middle, *quartiles, median(of_cpu), len(costs), *slow)


def against(limit: Turn, contenders: Mapping[Name, Turn], laps: int) -> dict[Name, Against]:
    """Run limit, contender, limit, contender, ...: `laps` times through all, after some uncounted laps."""
    found = against_each({"limit": limit}, contenders, laps)
    return {name: beside["limit"] for name, beside in found.items()}


def against_each(
    limits: Mapping[str, Turn], contenders: Mapping[Name, Turn], laps: int, warm_up_laps: int = WARM_UP_LAPS
) -> dict[Name, dict[str, Against]]:
    """The same with several limits, all run before and after each contender."""
    costs: dict[Name, list[Cost]] = {name: [] for name in contenders}
    around: dict[Name, list[dict[str, tuple[Cost, Cost]]]] = {name: [] for name in contenders}
    with quiet_collector():
        before = {limit: turn() for limit, turn in limits.items()}
        for lap in range(-warm_up_laps, laps):
            for name, turn in contenders.items():
                cost = turn()
                after = {limit: turn() for limit, turn in limits.items()}
                if lap >= 0:
                    costs[name].append(cost)
                    around[name].append({limit: (before[limit], after[limit]) for limit in limits})
                before = after
    return {
        name: {limit: Against.of(costs[name], [lap[limit] for lap in around[name]]) for limit in limits}
        for name in contenders
    }


def rate_row(
    what: Mapping[str, object],
    found: Against,
    size_bytes: float,
    limit_of: str,
    target: float | Target | None = None,
    *,
    limit_bytes: float | None = None,
    **details: Any,
) -> Row:
    """Decimal GB/s of so many bytes in a turn, beside those of the limit; 1 is as fast as that. limit_bytes: of its own
    turn, where that moves others."""
    share = size_bytes / (limit_bytes or size_bytes)
    rate, limit = size_bytes / found.seconds / 1e9, size_bytes / share / found.limit_seconds / 1e9
    ratios = found.ratio * share, found.low * share, found.high * share
    wanted = Target(target) if isinstance(target, float) else target
    return Row(what, rate, "GB/s", found.laps, None, None, limit_of, limit, *ratios, wanted, details)


def time_row(what: Mapping[str, object], found: Against, limit_of: str, most: float | None, **details: Any) -> Row:
    """Milliseconds of a turn, and how many times those of the limit they are; most: the target."""
    times, limit = found.seconds * 1e3, found.limit_seconds * 1e3
    ratios = 1 / found.ratio, 1 / found.high, 1 / found.low
    target = None if most is None else Target(most, is_least=False)
    return Row(what, times, MS, found.laps, None, None, limit_of, limit, *ratios, target, details)


def quartile_row(
    what: Mapping[str, object], values: Sequence[float], unit: str, limit_of: str = "", limits: Sequence[float] = (),
    target: Target | None = None, **details: Any,
) -> Row:  # fmt: skip
    """The median of values with their quartiles, beside limits of the same turns: the ratio is that of quotients."""
    limit = median(limits) if limits else None
    ratio = median(one / beside for one, beside in zip(values, limits, strict=True)) if limits else None
    spread = quantile(values, 0.25), quantile(values, 0.75)
    return Row(what, median(values), unit, len(values), *spread, limit_of, limit, ratio, target=target, details=details)


def in_turn(names: Sequence[Name], turn: int) -> list[Name]:
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def repeated(work: Callable[[int], object], seconds: float) -> list[float]:
    """Seconds of each turn that ends in this time. work: is told how many there were before."""
    took, now = list[float](), perf_counter()
    end = now + seconds
    while True:
        work(len(took))
        before, now = now, perf_counter()
        if now > end:
            return took
        took.append(now - before)


@contextmanager
def quiet_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Together:
    """Runs one piece of work per thread at once, on kept threads. A context manager that ends them."""

    def __init__(self, threads: int) -> None:
        self._start, self._pool = threading.Barrier(threads), ThreadPoolExecutor(threads)

    def run(self, work: Sequence[Callable[[], object]]) -> Cost:
        """The cost per piece, of as many as there are threads; wall time from the first start to the last end."""
        starts, ends, cpus = zip(*self._pool.map(self._timed, work), strict=True)
        return Cost((max(ends) - min(starts)) / len(work), sum(cpus) / len(work))

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def _timed(self, work: Callable[[], object]) -> tuple[float, float, float]:
        self._start.wait()
        cpu, start = thread_time(), perf_counter()
        work()
        return start, perf_counter(), thread_time() - cpu


def available_bytes() -> int:
    cgroups, memory = (read_text_files([path])[path] for path in ("/proc/self/cgroup", "/proc/meminfo"))
    (available,) = (int(line.split()[1]) * 1024 for line in memory.splitlines() if line.startswith("MemAvailable:"))
    return min(available, memory_limit(read_text_files(memory_limit_files(cgroups))))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
