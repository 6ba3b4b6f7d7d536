"""What the machine ran out of, or failed at (disk, descriptors, memory, threads), and its listeners.

Code that asks the machine for something reports each outcome under a name (`what`: "nvme writes", "connections", ...);
the listener counts, logs at intervals, and reports the fault while it lasts. Knows no blocks and no tenants. Listeners
must not call back, and never raise.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Protocol

from tiering.clock import Clock


class FaultKind(StrEnum):
    """What ran out, or failed, in words for people."""

    DISK_FULL = "disk full"
    DISK_FAULT = "disk fault"
    DISK_HANGS = "disk hangs"
    FILES_GONE = "files gone"
    NO_DESCRIPTORS = "no descriptors"
    NO_MEMORY = "no memory"
    NO_THREADS = "no threads"
    OTHER = "fault"


NVME_READS, NVME_WRITES, NEW_SLABS = "nvme reads", "nvme writes", "new slabs"
EXTENTS, HANDED_OVER, KEPT = "extents of dram", "extents handed over", "extents kept for a restart"
CONNECTIONS, MODEL_NAMES, SENT = "connections", "writes of model names", "descriptors sent to clients"
MOVE_THREADS, DOOR_THREADS, EXTENT_THREADS = (
    "starts of a move thread",
    "starts of a door thread",
    "starts of an extent thread",
)
"""Names for `what`."""

_BY_ERRNO = {
    errno.ENOSPC: FaultKind.DISK_FULL,
    errno.EDQUOT: FaultKind.DISK_FULL,
    errno.EFBIG: FaultKind.DISK_FULL,
    errno.ENOENT: FaultKind.FILES_GONE,
    errno.ENOTDIR: FaultKind.FILES_GONE,
    errno.ESTALE: FaultKind.FILES_GONE,
    errno.EMFILE: FaultKind.NO_DESCRIPTORS,
    errno.ENFILE: FaultKind.NO_DESCRIPTORS,
    errno.ETOOMANYREFS: FaultKind.NO_DESCRIPTORS,
    errno.ENOMEM: FaultKind.NO_MEMORY,
    errno.ENOBUFS: FaultKind.NO_MEMORY,
    errno.EAGAIN: FaultKind.NO_THREADS,  # from clone: no file is opened in a way that could return this
    errno.EIO: FaultKind.DISK_FAULT,
    errno.EROFS: FaultKind.DISK_FAULT,
    errno.ENXIO: FaultKind.DISK_FAULT,
    errno.ENODEV: FaultKind.DISK_FAULT,
    errno.EUCLEAN: FaultKind.DISK_FAULT,
}
SHORTAGES = frozenset({FaultKind.NO_DESCRIPTORS, FaultKind.NO_MEMORY, FaultKind.NO_THREADS, FaultKind.DISK_FULL})
"""The machine is short of something, and the input is sound: the same start may succeed later."""
_THREAD_WORDS = "start new thread"
_MOST_CAUSES = 8


class FaultReports(Protocol):
    """Takes reports. Thread-safe; cheap while nothing is wrong."""

    @property
    def failing(self) -> Collection[str]:
        """Present faults: only for these does `worked` do anything."""
        ...

    def failed(self, what: str, kind: FaultKind, detail: str) -> None:
        """`what` failed. detail: for people, without anything of a client's."""
        ...

    def worked(self, what: str) -> None:
        """`what` worked: its fault, if any, has ended."""
        ...


class Unheard:
    """`FaultReports` that drops everything."""

    failing: Collection[str] = frozenset()

    def failed(self, what: str, kind: FaultKind, detail: str) -> None: ...

    def worked(self, what: str) -> None: ...


def kind_of(error: BaseException) -> FaultKind:
    """The kind of an error, or of its cause."""
    one: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if one is None:
            break
        if isinstance(one, MemoryError):
            return FaultKind.NO_MEMORY
        if isinstance(one, RuntimeError) and _THREAD_WORDS in str(one):
            return FaultKind.NO_THREADS
        number = getattr(one, "errno", None)
        if isinstance(number, int) and number in _BY_ERRNO:
            return _BY_ERRNO[number]
        one = one.__cause__ or one.__context__
    return FaultKind.OTHER


# ---------------------------------------------------------------------------------------------------------------------
# Warnings that something outside can cause at will: one line per kind and minute. A client that sends nonsense, or a
# disk that stays full, must not fill a log. The first warning of a kind is written; those that follow within the minute
# are counted, and the next line gives their number.


LINE_SECONDS = 60.0
"""Between two lines of a kind."""
MOST_KINDS = 64
"""Of more kinds at a time, the others share one line per minute."""


@dataclass(slots=True)
class _Told:
    """When a line was written, and how many were suppressed since."""

    at: float
    suppressed: int = 0


class RateLimitedLog:
    """A logger for warnings, each of a kind: a cause, and its source. Thread-safe."""

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[str, _Told] = OrderedDict()  # least recently told first
        self._others = _Told(-inf)

    def warn(self, kind: str, message: str, *args: object) -> bool:
        """Log a warning, unless its kind has had its line; returns whether it was logged."""
        return self._log(logging.WARNING, kind, message, args, None)

    def error(self, kind: str, message: str, *args: object, error: BaseException | None = None) -> bool:
        """The same for a fault in this program, with its traceback."""
        return self._log(logging.ERROR, kind, message, args, error)

    def _log(self, level: int, kind: str, message: str, args: tuple[object, ...], error: BaseException | None) -> bool:
        now = self._clock.monotonic_seconds()
        with self._lock:
            told = self._told(kind, now)
            if now - told.at < LINE_SECONDS:
                told.suppressed += 1
                return False
            suppressed, told.at, told.suppressed = told.suppressed, now, 0
            if told is not self._others:
                self._kinds.move_to_end(kind)
        if suppressed:
            message, args = message + " (%d more like this were not logged)", (*args, suppressed)
        self._logger.log(level, message, *args, exc_info=error)
        return True

    def _told(self, kind: str, now: float) -> _Told:
        if kind not in self._kinds:
            if len(self._kinds) >= MOST_KINDS:
                oldest = next(iter(self._kinds))
                if now - self._kinds[oldest].at < LINE_SECONDS:
                    return self._others
                self._others.suppressed += self._kinds.pop(oldest).suppressed  # its next line may never come
            self._kinds[kind] = _Told(-inf)
        return self._kinds[kind]


# ---------------------------------------------------------------------------------------------------------------------
# The faults of a store's machine: counted, logged once a minute, and reported while they last.
#
#     failed > degraded, a line in the log > failed, failed, ... (counted) > worked > well again, a line in the log
#
# A fault lasts until the same thing has worked again. Holds a few counters for each thing and kind, whatever happens.


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MachineFault:
    """A present fault. count: failures since it last worked. kind: a `FaultKind`, or one that only another version
    knows. detail: of the last failure. Published as it is, as `tiering.tier` says."""

    what: str
    kind: str
    count: int
    since_seconds_ago: float
    last_seconds_ago: float
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.count:,} {self.what} failed, last {_span(self.last_seconds_ago)} ago"


@dataclass(slots=True)
class _Failing:
    since: float
    last: float
    count: int
    detail: str


class Faults:
    """`FaultReports` that counts and logs. Thread-safe; calls nothing but the log."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines = RateLimitedLog(_log, clock)
        self._lock = threading.Lock()
        self.failing: dict[str, dict[FaultKind, _Failing]] = {}  # by `what`
        self._counts: Counter[FaultKind] = Counter()

    def failed(self, what: str, kind: FaultKind, detail: str) -> None:
        with suppress(MemoryError):  # there may be no memory to count with
            at = self._clock.monotonic_seconds()
            with self._lock:
                one = self.failing.setdefault(what, {}).setdefault(kind, _Failing(at, at, 0, detail))
                one.last, one.count, one.detail = at, one.count + 1, detail
                self._counts[kind] += 1
            self._lines.warn(f"{what}: {kind}", "%s: %s failed: %s", kind, what, detail)

    def worked(self, what: str) -> None:
        """Takes the lock only if something failed."""
        if what not in self.failing:
            return
        with self._lock:
            over = self.failing.pop(what, {})
        if not over:
            return
        with suppress(MemoryError):
            seconds = self._clock.monotonic_seconds() - min(one.since for one in over.values())
            words = ", ".join(f"{kind} {one.count:,} times" for kind, one in over.items())
            self._lines.warn(f"{what} again", "%s work again, after %s: %s", what, _span(seconds), words)

    def now(self) -> list[MachineFault]:
        """Present faults, the latest first."""
        at = self._clock.monotonic_seconds()
        with self._lock:
            found = [
                MachineFault(what, kind, one.count, at - one.since, at - one.last, one.detail)
                for what, kinds in self.failing.items()
                for kind, one in kinds.items()
            ]
        return sorted(found, key=lambda one: one.last_seconds_ago)

    def reasons(self) -> list[str]:
        """The same in words."""
        return [str(one) for one in self.now()]

    def counts(self) -> dict[str, int]:
        """Failures since the start by kind, under names for scripts."""
        with self._lock:
            return {kind.replace(" ", "_"): count for kind, count in sorted(self._counts.items())}


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
