"""Single flight: of several callers that want the same blocks from elsewhere, one fetches, and the others wait for it.

    begin   > the keys that are the caller's to fetch   join   > notified once at the end
    end, leave                                          > callers that joined are notified

A leader fails by `leave`, or when its time is over: the next caller of `begin` takes its place. Callers that joined are
notified of any end, and look what is here. At most `MAX_FLIGHTS` are in progress; beyond that, blocks are fetched
without one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
MAX_FLIGHTS = 1 << 16
MAX_JOINED = 1024
"""Of one flight; later callers are not notified."""


@dataclass(slots=True)
class _Flight:
    leader: Hashable
    until: float
    joined: list[Callable[[], None]] = field(default_factory=list)


class Flights(Generic[K]):
    """By (namespace, key), or another name of what is fetched. Thread-safe; callbacks are called without its lock."""

    def __init__(self, most: int = MAX_FLIGHTS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._flights: dict[K, _Flight] = {}
        self._led: dict[Hashable, set[K]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, keys: Iterable[K], leader: Hashable, now: float, until: float) -> list[K]:
        """Returns those of these keys that the leader is to fetch, and to `end` before that time. The others are in
        progress."""
        wanted, mine = list(keys), []
        with self._lock:
            flights = [(key, self._flights.get(key)) for key in dict.fromkeys(wanted)]
            over = [self._over(key) for key, one in flights if one is not None and one.until <= now]
            for key in wanted:
                if key not in self._flights and len(self._flights) < self._most:
                    self._flights[key] = _Flight(leader, until)
                    self._led.setdefault(leader, set()).add(key)
                    mine.append(key)
        _tell(over)
        return mine

    def join(self, key: K, told: Callable[[], None]) -> bool:
        """Whether that key is in progress: `told` is called once, at its end. Otherwise it has ended meanwhile: look
        whether it is here, and begin."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is None or len(flight.joined) >= MAX_JOINED:
                return False
            flight.joined.append(told)
        return True

    def end(self, keys: Sequence[K], leader: Hashable) -> None:
        """These are over, if that leader still leads them: they landed, or are given up."""
        with self._lock:
            over = [self._over(key) for key in keys if key in self._led.get(leader, ())]
        _tell(over)

    def leave(self, leader: Hashable) -> None:
        """The leader is gone, and all that it leads is over."""
        with self._lock:
            led = list(self._led.get(leader, ()))
        self.end(led, leader)

    def _over(self, key: K) -> _Flight:
        flight = self._flights.pop(key)
        led = self._led[flight.leader]
        led.discard(key)
        if not led:
            del self._led[flight.leader]
        return flight


def _tell(over: Iterable[_Flight]) -> None:
    for flight in over:
        for told in flight.joined:
            told()
