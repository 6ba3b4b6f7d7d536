"""The salts in the names of a tenant's frames. `driver.py` explains why, and what a drop leaves behind.

A salt has a name in the engine, and the node that first finds none makes it: it writes a random one, which changes
nothing if another node was faster, and then reads the value. So all nodes agree, on any engine whose writes of an
existing name change nothing; and a replaced salt never comes back.
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
"""How long a salt is used after it was read: for this long other nodes still find what was dropped."""
MOST_SALTS = 4096
WARM_SECONDS, MOST_WARM = 60.0, 16
"""`warm` reads so many salts again, those of the last look-ups, for so long after the last one."""
_TRIES = 3


class NoSalt(RemoteFault):
    """The engine has no room for a salt, and none exists."""

    reason = "busy"
    is_of_engine = False


class NamespaceSalts:
    """One engine's. Calls block, as the engine's do: `RemoteWorkers.submit`. Thread-safe."""

    def __init__(self, engine: RemoteEngine, clock: Clock, randomness: Callable[[int], bytes]) -> None:
        self._engine = engine
        self._clock = clock
        self._randomness = randomness
        self._lock = threading.Lock()
        self._replaced = 0  # times; reads from before the last one are not cached
        self._read: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()  # by name; last used at the end
        self._used: OrderedDict[bytes, float] = OrderedDict()  # when, by name; last used at the end

    def of(self, tenant: bytes, namespace: bytes, deadline: float = inf) -> bytes:
        """The salt for `remote_key`. Raises `RemoteFault`."""
        names = (salt_key(tenant), salt_key(tenant, namespace))
        with self._lock:
            for name in names:
                self._used[name] = self._clock.monotonic_seconds()
                self._used.move_to_end(name)
            while len(self._used) > MOST_WARM:
                self._used.popitem(last=False)
        return b"".join(self._salt(name, deadline) for name in names)

    def warm(self, deadline: float = inf) -> None:
        """Read those in use again, before they have aged, so that a look-up need not; which keeps a connection, too.
        Raises `RemoteFault`."""
        now = self._clock.monotonic_seconds()
        with self._lock:
            names = [name for name, used_at in self._used.items() if now - used_at < WARM_SECONDS]
        for name in names:
            self._salt(name, deadline, SALT_SECONDS / 4)

    @property
    def are_used(self) -> bool:
        """Whether `warm` has anything to do."""
        with self._lock:
            last = next(reversed(self._used.values()), -inf)
        return self._clock.monotonic_seconds() - last < WARM_SECONDS

    def replace(self, tenant: bytes, namespace: bytes = b"", deadline: float = inf) -> None:
        """Drop the namespace, or without one purge the tenant: none of its frames is found from now on, and on other
        nodes from `SALT_SECONDS` later. Raises `RemoteFault`; then they may still be found."""
        name = salt_key(tenant, namespace)
        self._engine.delete([name], deadline)
        with self._lock:
            self._replaced += 1
            self._read.pop(name, None)
        with suppress(NoSalt):  # there is none, and the next will differ
            self._salt(name, deadline)

    def _salt(self, name: bytes, deadline: float, seconds: float = SALT_SECONDS) -> bytes:
        """seconds: how long ago it may have been read."""
        now = self._clock.monotonic_seconds()
        with self._lock:
            read_at, salt = self._read.get(name, (-inf, b""))
            if now - read_at < seconds:
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
