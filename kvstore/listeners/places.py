"""Who makes room when a listener has as many connections as it may have.

A connection is a *stranger's* until a request on it has named its caller; only then has it a place to keep:

    1. the oldest stranger makes room for a newcomer, if strangers have more than an eighth of all places
    2. else the one that has waited longest for its client, of the caller with the most places; else the oldest stranger
    3. else the oldest of a caller that has more than half of all; or the newcomer is turned away

The eighth is for newcomers, which are strangers until they are read, also where one caller has all other places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Place:
    """A connection. end: ends it. caller: None for a stranger. waits: for its client, which has not sent all of a
    request or does not read. held_bytes: of a request that is not whole yet."""

    end: Callable[[], object]
    caller: Hashable | None = None
    waits: bool = True
    held_bytes: int = 0


class TakenPlaces:
    """The connections of a listener. Not thread-safe."""

    def __init__(self, most: int, most_bytes: int = 1 << 40) -> None:
        """most_bytes: of all requests that are not whole yet."""
        self._most, self._most_bytes = most, most_bytes
        self._all: dict[Place, None] = {}  # in the order in which they began to wait, or to be served
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Place]:
        return iter(list(self._all))

    def make_room(self) -> bool:
        """Whether one more connection may come in, if need be in place of another."""
        return len(self._all) < self._most or self._end_one(list(self._all))

    def take(self, place: Place) -> None:
        """Let a connection in."""
        self._all[place] = None

    def turn(self, place: Place, *, waits: bool) -> None:
        """It waits for its client from now on, or no longer. Nothing is said of one that has left."""
        if self._all.pop(place, place) is None:
            place.waits = waits
            self._all[place] = None

    def hold(self, place: Place, count: int) -> None:
        """More bytes of a request came that is not whole yet; too many of all end the connections that hold some."""
        place.held_bytes += count
        self._held_bytes += count
        while self._held_bytes > self._most_bytes and self._end_one([one for one in self._all if one.held_bytes]):
            pass

    def release(self, place: Place) -> None:
        """Its request is whole, or it ends."""
        self._held_bytes -= place.held_bytes
        place.held_bytes = 0

    def leave(self, place: Place) -> None:
        self.release(place)
        self._all.pop(place, None)

    def _end_one(self, among: list[Place]) -> bool:
        strangers = [one for one in among if one.caller is None]
        waiting = [one for one in among if one.caller is not None and one.waits]
        if len(strangers) > self._most // 8 or (strangers and not waiting):
            found = strangers[0]
        else:
            counts = Counter(one.caller for one in among)
            if not waiting and (not among or 2 * max(counts.values()) <= self._most):
                return False
            found = max(waiting or among, key=lambda one: counts[one.caller])  # `max` takes the first of equals
        self.leave(found)
        found.end()
        return True
