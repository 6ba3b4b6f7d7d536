"""What of the machine ran out or failed, and who is told (floor 1): disk, descriptors, memory, threads.

Whoever asks the machine for something says what came of it, each time, in a word of its own (`what`: "nvme writes",
"connections", ...); who listens counts, writes a line now and then, and tells the operator for as long as it lasts.
Knows no blocks and no tenants. Listeners must not call back, and never raise.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol


class FaultKind(StrEnum):
    """What ran out, or failed; as it is said to people."""

    DISK_FULL = "disk full"
    DISK_FAULT = "disk fault"
    DISK_HANGS = "disk hangs"
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
"""`what` as it is told."""

_BY_ERRNO = {
    errno.ENOSPC: FaultKind.DISK_FULL,
    errno.EDQUOT: FaultKind.DISK_FULL,
    errno.EFBIG: FaultKind.DISK_FULL,
    errno.EMFILE: FaultKind.NO_DESCRIPTORS,
    errno.ENFILE: FaultKind.NO_DESCRIPTORS,
    errno.ETOOMANYREFS: FaultKind.NO_DESCRIPTORS,
    errno.ENOMEM: FaultKind.NO_MEMORY,
    errno.ENOBUFS: FaultKind.NO_MEMORY,
    errno.EAGAIN: FaultKind.NO_THREADS,  # of clone; no file of ours is opened so that it would answer this
    errno.EIO: FaultKind.DISK_FAULT,
    errno.EROFS: FaultKind.DISK_FAULT,
    errno.ENXIO: FaultKind.DISK_FAULT,
    errno.ENODEV: FaultKind.DISK_FAULT,
    errno.EUCLEAN: FaultKind.DISK_FAULT,
}
SHORTAGES = frozenset({FaultKind.NO_DESCRIPTORS, FaultKind.NO_MEMORY, FaultKind.NO_THREADS, FaultKind.DISK_FULL})
"""Of the machine, and no fault of what was given: the same start may go well later."""
_THREAD_WORDS = "start new thread"
_MOST_CAUSES = 8


class FaultReports(Protocol):
    """Who is told. Thread-safe; cheap where nothing is wrong."""

    def failed(self, what: str, kind: FaultKind, detail: str) -> None:
        """It did not work. detail: for people, without anything of a client's."""
        ...

    def worked(self, what: str) -> None:
        """It did: whatever was wrong with it is over."""
        ...


class Unheard:
    """`FaultReports` where nobody listens."""

    def failed(self, what: str, kind: FaultKind, detail: str) -> None:
        """Nothing."""

    def worked(self, what: str) -> None:
        """Nothing."""


def kind_of(error: BaseException) -> FaultKind:
    """What ran out or failed, by the error or whatever it came from."""
    for one in _causes(error):
        if isinstance(one, MemoryError):
            return FaultKind.NO_MEMORY
        if isinstance(one, RuntimeError) and _THREAD_WORDS in str(one):
            return FaultKind.NO_THREADS
        number = getattr(one, "errno", None)
        if isinstance(number, int) and number in _BY_ERRNO:
            return _BY_ERRNO[number]
    return FaultKind.OTHER


def _causes(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if one is None:
            return
        yield one
        one = one.__cause__ or one.__context__
