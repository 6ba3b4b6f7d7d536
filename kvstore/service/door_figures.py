"""What a door counts, whatever it is asked: connections turned away, requests by verb, and how long these waited.

The door's own thread adds; any thread may read.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import StrEnum
from typing import NamedTuple

from kvstore.protocol.status import DoorStatus
from tiering.counts.histogram import Histogram, HistogramCounts

WAITS_KEPT = 4096
"""Of the last requests at the door, for how long they waited."""


class Refusal(StrEnum):
    """Why a connection was turned away. `DEPARTED`: too many of its tenant's are gone and not given back."""

    USER = "user"
    FULL = "full"
    DEPARTED = "departed"
    CLOSING = "closing"


class DoorCounts(NamedTuple):
    """Connections now; since the start: refused ones by reason, messages that were none, requests by verb, and how long
    these waited, in seconds, from the moment that one may have been there until it was begun."""

    connections: int
    admin_connections: int
    refused: dict[Refusal, int]
    malformed: int
    served: dict[str, int]
    waits: HistogramCounts


class DoorFigures:
    """Since the start."""

    def __init__(self) -> None:
        self.refused = dict.fromkeys(Refusal, 0)
        self.malformed = 0
        self.served: Counter[str] = Counter()
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)
        self._wait_counts = Histogram()

    def waited(self, seconds: float) -> None:
        """A request was begun so long after it may have been there."""
        self._waits.append(seconds)
        self._wait_counts.add(seconds)

    def counts(self, connections: int, admin_connections: int) -> DoorCounts:
        """With the connections that there are now."""
        refused, served = dict(self.refused), dict(self.served)
        return DoorCounts(connections, admin_connections, refused, self.malformed, served, self._wait_counts.now())

    def status(self, connections: int, admin_connections: int) -> DoorStatus:
        """The same for people."""
        waits = sorted(self._waits)
        p50, p99 = [round(1000 * waits[len(waits) * one // 100], 3) for one in (50, 99)] if waits else (None, None)
        refused, served = sum(self.refused.values()), dict(self.served)
        return DoorStatus(connections, admin_connections, refused, self.malformed, served, p50, p99)
