"""Single flight: of several callers that want the same blocks from elsewhere, one fetches, and the others wait for it.

    begin   > the keys that are the caller's to fetch   join   > notified once at the end of each
    end, leave                                          > callers that joined are notified

A leader fails by `leave`, or when its time is over: the next caller of `begin` takes its place, and callers that joined
learn that it failed. At most `MAX_FLIGHTS` are in progress; beyond that, blocks are fetched without one.
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
class _Flight(Generic[K]):
    leader: Hashable
    until: float
    joined: list[Callable[[K, bool], None]] = field(default_factory=list)


class Flights(Generic[K]):
    """By (namespace, key), or another name of what is fetched. Thread-safe; callbacks are called without its lock."""

    def __init__(self, most: int = MAX_FLIGHTS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._flights: dict[K, _Flight[K]] = {}
        self._led: dict[Hashable, set[K]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, keys: Iterable[K], leader: Hashable, now: float, until: float) -> list[K]:
        """Returns those of these keys that the leader is to fetch, and to `end` before that time. The others are in
        progress."""
        wanted, mine = list(keys), []
        with self._lock:
            flights = [(key, self._flights.get(key)) for key in dict.fromkeys(wanted)]
            over = [(key, self._over(key)) for key, one in flights if one is not None and one.until <= now]
            for key in wanted:
                if key not in self._flights and len(self._flights) < self._most:
                    self._flights[key] = _Flight(leader, until)
                    self._led.setdefault(leader, set()).add(key)
                    mine.append(key)
        _tell(over, False)
        return mine

    def join(self, keys: Iterable[K], told: Callable[[K, bool], None]) -> list[K]:
        """Returns those of these keys that are in progress: for each, `told` is called once, at its end, with whether
        it landed. The others have ended meanwhile: look whether they are here, and begin."""
        joined = []
        with self._lock:
            for key in keys:
                flight = self._flights.get(key)
                if flight is not None and len(flight.joined) < MAX_JOINED:
                    flight.joined.append(told)
                    joined.append(key)
        return joined

    def end(self, keys: Sequence[K], leader: Hashable, landed: bool) -> None:
        """These are over, if that leader still leads them."""
        with self._lock:
            over = [(key, self._over(key)) for key in keys if self._leads(leader, key)]
        _tell(over, landed)

    def leave(self, leader: Hashable) -> None:
        """The leader failed: its flights did not land."""
        with self._lock:
            over = [(key, self._over(key)) for key in list(self._led.get(leader, ()))]
        _tell(over, False)

    def _leads(self, leader: Hashable, key: K) -> bool:
        return key in self._led.get(leader, ())

    def _over(self, key: K) -> _Flight[K]:
        flight = self._flights.pop(key)
        led = self._led[flight.leader]
        led.discard(key)
        if not led:
            del self._led[flight.leader]
        return flight


def _tell(over: Iterable[tuple[K, _Flight[K]]], landed: bool) -> None:
    for key, flight in over:
        for told in flight.joined:
            told(key, landed)
