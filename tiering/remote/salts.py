"""The salts in the names of a tenant's frames. Why, and what a drop leaves: `driver.py`.

A salt lies in the engine under a name of its own and is made by the node that first finds none: it writes a random one,
which changes nothing where another node was quicker, and reads what is there then. So all nodes agree, on any engine
whose writes of a name that is there change nothing; and a salt that was replaced never comes back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from math import inf

from tiering.clock import Clock
from tiering.remote.driver import SALT_BYTES, RemoteEngine, RemoteFault, WrongSize, salt_key

SALT_SECONDS = 1.0
"""For which a salt that was read is used: so long other nodes find what was dropped."""
MOST_SALTS = 4096
_TRIES = 3


class NoSalt(RemoteFault):
    """The engine keeps none: it has no room, and none is there."""

    reason = "busy"
    is_of_engine = False


class NamespaceSalts:
    """Of one engine. Calls block, as the engine's do: `RemoteWorkers.submit`. Thread-safe."""

    def __init__(self, engine: RemoteEngine, clock: Clock, randomness: Callable[[int], bytes]) -> None:
        self._engine = engine
        self._clock = clock
        self._randomness = randomness
        self._lock = threading.Lock()
        self._replaced = 0  # how often; what was read before the last time is not kept
        self._read: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()  # by name; the one used last is the last

    def of(self, tenant: bytes, namespace: bytes, deadline: float = inf) -> bytes:
        """The salt for `remote_key`. Raises `RemoteFault`."""
        return self._salt(salt_key(tenant), deadline) + self._salt(salt_key(tenant, namespace), deadline)

    def replace(self, tenant: bytes, namespace: bytes = b"", deadline: float = inf) -> None:
        """Drop the namespace, or without one purge the tenant: none of its frames is found from now on, and on other
        nodes from `SALT_SECONDS` later. Raises `RemoteFault`; then they may still be found."""
        name = salt_key(tenant, namespace)
        self._engine.delete([name], deadline)
        with self._lock:
            self._replaced += 1
            self._read.pop(name, None)
        with suppress(NoSalt):  # there is none, and the next one is another
            self._salt(name, deadline)

    def _salt(self, name: bytes, deadline: float) -> bytes:
        now = self._clock.monotonic_seconds()
        with self._lock:
            read_at, salt = self._read.get(name, (-inf, b""))
            if now - read_at < SALT_SECONDS:
                self._read.move_to_end(name)
                return salt
            replaced = self._replaced
        salt = self._fetched(name, deadline)
        with self._lock:
            if replaced != self._replaced:
                return salt
            self._read[name] = (now, salt)
            self._read.move_to_end(name)
            if len(self._read) > MOST_SALTS:
                self._read.popitem(last=False)
        return salt

    def _fetched(self, name: bytes, deadline: float) -> bytes:
        salt = bytearray(SALT_BYTES)
        for _ in range(_TRIES):
            try:
                if self._engine.read(name, memoryview(salt), deadline):
                    return bytes(salt)
            except WrongSize:
                self._engine.delete([name], deadline)
            if not self._engine.write(name, b"", self._randomness(SALT_BYTES), 0, deadline):
                break
        raise NoSalt(f"{self._engine.name} has no room for a salt")
