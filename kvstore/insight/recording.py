"""Recording: what clients look up, for `kvstore replay`, without a token or a key of it.

    begin > every look-up is noted > the operator's command takes them, again and again > it has not come for long: over

A block is given out as a number: 53 bits of a keyed hash of its namespace and its prefix key. The key of that hash is
drawn when a recording begins and never leaves the sidecar, so a number reveals nothing of a prompt, and differs between
recordings. Nothing is noted without a recording; the notes are bounded, and lost ones are counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import ceil
from typing import NamedTuple

from kvstore.block.errors import BadInput
from kvstore.protocol.messages import RECORDING_BYTES
from tiering.clock import Clock

SILENCE_SECONDS = 10.0
"""A recording whose notes were not fetched for so long is over."""
MOST_WAITING = 1 << 20
"""Blocks that are noted and were not taken yet."""
_OVERHEAD = 4
"""What a request takes beside its blocks, in blocks."""
MOST_AT_ONCE = 1 << 15
"""Blocks that are taken at a time; of one request, if it has more."""
SALT_BYTES = 32
ID_BITS = 53


class LookedUp(NamedTuple):
    """Seconds since the recording began, and a number for each full block of the prompt."""

    seconds: float
    ids: list[int]


class _Noted(NamedTuple):
    at: float
    namespace: int
    keys: Sequence[bytes]


class Recording:
    """One at a time. Thread-safe; its lock is held for an addition."""

    def __init__(self, clock: Clock, random: Callable[[int], bytes]) -> None:
        """random: returns so many unpredictable bytes."""
        self._clock = clock
        self._random = random
        self._lock = threading.Lock()
        self.token = b""
        """What the recording under way is called; empty where there is none, and `looked_up` has nothing to do."""
        self._salt = b""
        self._namespaces: frozenset[int] = frozenset()
        self._began_at = self._asked_at = 0.0
        self._noted: deque[_Noted] = deque()
        self._waiting = 0
        self._lost = 0

    def begin(self, namespaces: frozenset[int]) -> bytes:
        """Note from now on what is looked up in these; returns what the recording is called. Raises `BadInput` where
        somebody else records."""
        with self._lock:
            now = self._clock.monotonic_seconds()
            left = SILENCE_SECONDS - (now - self._asked_at)
            if self.token and left > 0:
                raise BadInput(
                    "somebody else is recording; end that (SIGINT or SIGTERM), or, where it was killed, try again in "
                    f"{ceil(left)} s"
                )
            self._end()
            self.token, self._salt = self._random(RECORDING_BYTES), self._random(SALT_BYTES)
            self._namespaces, self._began_at, self._asked_at = namespaces, now, now
            return self.token

    def looked_up(self, namespace: int, keys: Sequence[bytes]) -> None:
        """A request asked how much of its prompt there is."""
        if not self.token:
            return
        with self._lock:
            now = self._clock.monotonic_seconds()
            if now - self._asked_at >= SILENCE_SECONDS:
                self._end()
            elif namespace not in self._namespaces or not keys:
                return
            elif self._waiting + len(keys) + _OVERHEAD > MOST_WAITING:
                self._lost += 1
            else:
                self._noted.append(_Noted(now - self._began_at, namespace, keys))
                self._waiting += len(keys) + _OVERHEAD

    def take(self, token: bytes) -> tuple[list[LookedUp], int]:
        """What was noted, in its order, as far as it is taken at a time; and how many look-ups were lost in all. Raises
        `BadInput` where the recording is over."""
        with self._lock:
            if self._clock.monotonic_seconds() - self._asked_at >= SILENCE_SECONDS:
                self._end()
            if not token or token != self.token:
                raise BadInput("that recording is over: its notes were not fetched in time; begin another one")
            self._asked_at = self._clock.monotonic_seconds()
            taken: list[_Noted] = []
            blocks = 0
            while self._noted and (not taken or blocks + len(self._noted[0].keys) <= MOST_AT_ONCE):
                taken.append(self._noted.popleft())
                blocks += len(taken[-1].keys)
            self._waiting -= blocks + _OVERHEAD * len(taken)
            salt, lost = self._salt, self._lost
        return [LookedUp(one.at, [_id(salt, one.namespace, key) for key in one.keys]) for one in taken], lost

    def end(self, token: bytes) -> None:
        """Note nothing any more."""
        with self._lock:
            if token == self.token:
                self._end()

    def _end(self) -> None:
        self.token = self._salt = b""
        self._noted.clear()
        self._waiting = self._lost = 0


def _id(salt: bytes, namespace: int, key: bytes) -> int:
    digest = blake2b(namespace.to_bytes(8, "little") + key, digest_size=8, key=salt).digest()
    return int.from_bytes(digest, "little") >> 64 - ID_BITS
