"""The changes of a namespace's blocks, in order, for engines that tell routers what is cached.

    asked for > the namespace is watched > its blocks come, move and go > reported from the engine's position on
              > `MOST_KEPT` further changes without a request: not watched any more

Nothing is recorded for namespaces that no engine asks about. The record is bounded: an engine that asks too rarely
learns that part of it is lost, and must discard all that it knew. Thread-safe; the lock is held for an addition.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

MOST_KEPT = 1 << 14
"""Changes of one namespace, some 150 bytes each."""
MOST_WATCHED = 64
"""Namespaces; of more, the one asked for longest ago is not watched any more."""
MOST_TOLD = 1 << 11
"""Changes in one answer."""


class BlockPlace(IntEnum):
    """The fastest tier that has a block."""

    NOWHERE = 0
    DRAM = 1
    NVME = 2


class ChangesTold(NamedTuple):
    """changes: (prefix key, the block's new place), oldest first. next: where to go on. is_lost: part of the record is
    missing. indexes: for each, the number of its ancestors."""

    changes: list[tuple[bytes, int]]
    next: int
    is_lost: bool = False
    indexes: Sequence[int] = ()


@dataclass(slots=True)
class _Watched:
    first: int  # the number of the oldest change that is kept
    kept: deque[tuple[bytes, int, int]] = field(default_factory=deque)
    unasked: int = 0

    @property
    def next(self) -> int:
        return self.first + len(self.kept)


class BlockChanges:
    """The record of one store. Changes are numbered from 1, never twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: OrderedDict[int, _Watched] = OrderedDict()  # the one asked for last at the end
        self._unused = 1  # above every number used
        self.is_watching = False
        """Whether `note` has work."""

    def note(self, number: int, key: bytes, place: BlockPlace, index: int = 0) -> None:
        """A block of a namespace came, moved or went. index: its place in its chain."""
        with self._lock:
            watched = self._watched.get(number)
            if watched is None:
                return
            watched.unasked += 1
            if watched.unasked > MOST_KEPT:
                self._end(number)
                return
            watched.kept.append((key, place, index))
            if len(watched.kept) > MOST_KEPT:
                watched.kept.popleft()
                watched.first += 1

    def since(self, number: int, after: int) -> ChangesTold:
        """Changes from that number on; 0: from now on."""
        with self._lock:
            watched = self._watched.get(number)
            if watched is None:
                watched = self._watched[number] = _Watched(self._unused)
                self.is_watching = True
                if len(self._watched) > MOST_WATCHED:
                    self._end(next(iter(self._watched)))
            self._watched.move_to_end(number)
            watched.unasked = 0
            if not watched.first <= after <= watched.next:
                return ChangesTold([], watched.next, is_lost=after != 0)
            told = list(islice(watched.kept, after - watched.first, after - watched.first + MOST_TOLD))
            return ChangesTold([one[:2] for one in told], after + len(told), indexes=[index for _, _, index in told])

    def _end(self, number: int) -> None:
        # An engine that stands at its end lost something.
        self._unused = max(self._unused, self._watched.pop(number).next + 1)
        self.is_watching = bool(self._watched)
