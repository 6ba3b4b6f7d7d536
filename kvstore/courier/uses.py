"""How often recent requests named each block, in which chains, and which came from the remote tier. Bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

MOST_NAMES = 1 << 17
"""In one generation: when it is full, the previous one is forgotten."""
NAME_BYTES = 8
MOST_WANTED, MOST_CAME = 1 << 14, 1 << 16
MOST_CHAINS, MOST_CHAIN_KEYS = 256, 1024
"""The most recent chains, and how many leading blocks of each."""


class Uses:
    """Of one tenant. Thread-safe. wanted: blocks that have become worth writing."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._new: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._came: OrderedDict[bytes, None] = OrderedDict()
        self._chains: OrderedDict[tuple[bytes, bytes], list[bytes]] = OrderedDict()
        self.wanted: deque[tuple[bytes, bytes]] = deque(maxlen=MOST_WANTED)

    def note(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                name = key[:NAME_BYTES]
                if name not in self._new and len(self._new) >= self._most:
                    self._old, self._new = self._new, {}
                self._new[name] = max(self._new.get(name, 0), self._old.get(name, 0)) + 1

    def note_chain(self, space: bytes, keys: Sequence[bytes]) -> None:
        """A request named this chain of that namespace, from its first block on."""
        self.note(keys)
        leading = list(keys[:MOST_CHAIN_KEYS])
        if leading:
            with self._lock:
                self._chains[space, leading[-1]] = leading
                self._chains.move_to_end((space, leading[-1]))
                while len(self._chains) > MOST_CHAINS:
                    self._chains.popitem(last=False)

    def chains(self) -> list[tuple[bytes, list[bytes]]]:
        """Namespace and leading keys of the most recent chains."""
        with self._lock:
            return [(space, keys) for (space, _), keys in self._chains.items()]

    def of(self, key: bytes) -> int:
        """How often a block was named."""
        name = key[:NAME_BYTES]
        return max(self._new.get(name, 0), self._old.get(name, 0))

    def came(self, keys: Iterable[bytes]) -> None:
        """The remote tier has these: they are not written to it."""
        with self._lock:
            for key in keys:
                self._came[key[:NAME_BYTES]] = None
            while len(self._came) > MOST_CAME:
                self._came.popitem(last=False)

    def did_not_come(self, keys: Iterable[bytes]) -> None:
        """The remote tier turned out to lack these, or to have them damaged."""
        with self._lock:
            for key in keys:
                self._came.pop(key[:NAME_BYTES], None)

    def has_come(self, key: bytes) -> bool:
        """Whether the remote tier has it, as far as is known."""
        return key[:NAME_BYTES] in self._came
