"""Records what clients look up, for `kvstore replay`, without a token or a key of it.

    begin > every look-up is noted > the operator's command fetches the notes periodically > when it stops, it is over

Each block becomes a number: 53 bits of a keyed hash of its namespace and prefix key. The hash's key is drawn when a
recording begins and never leaves the sidecar, so a number reveals nothing of a prompt and differs between recordings.
Without a recording nothing is noted; notes are bounded, and lost ones counted.
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
"""A recording ends when its notes were not fetched for this long."""
MOST_WAITING = 1 << 20
"""Blocks noted and not fetched yet."""
_OVERHEAD = 4
"""Memory of a request apart from its blocks, in blocks."""
MOST_AT_ONCE = 1 << 15
"""Blocks fetched at a time; a longer request is fetched alone."""
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
    """One recording at a time. Thread-safe; the lock is held for one append."""

    def __init__(self, clock: Clock, random: Callable[[int], bytes]) -> None:
        """random: returns so many unpredictable bytes."""
        self._clock = clock
        self._random = random
        self._lock = threading.Lock()
        self.token = b""
        """Token of the recording in progress, or empty: then `looked_up` returns at once."""
        self._salt = b""
        self._namespaces: frozenset[int] = frozenset()
        self._began_at = self._asked_at = 0.0
        self._noted: deque[_Noted] = deque()
        self._waiting = 0
        self._lost = 0

    def begin(self, namespaces: frozenset[int]) -> bytes:
        """Start noting look-ups in these namespaces; returns the recording's token. Raises `BadInput` if another
        operator is recording."""
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
        """Note a look-up, if a recording is on."""
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
        """Fetch notes in order, up to `MOST_AT_ONCE` blocks, and the number of look-ups lost so far. Raises `BadInput`
        if the recording is over."""
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
