"""Which nodes of a pool are alive, and whether this run may speak for its own node.

An entry is believed for `NODE_SECONDS` after it was seen, by this host's own clock: no other host's times are compared
with it. A node has one live incarnation; two of them are a copied data directory. The second one to come then stays
silent: it would take the place of the first, whose hints would lead to it.

    UNSURE   an entry of another run is there: of the run before, which is soon forgotten, or of a clone
    OURS     no entry, or ours: it is written again and again
    CLONED   an entry of another run came in the place of ours, or does not go away
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from enum import StrEnum

from kvstore.block.identity import NodeIdentity
from kvstore.pool.directory import NODE_SECONDS, NodeEntry

MAX_NODES = 4096
FORGOTTEN_SECONDS = 1.5 * NODE_SECONDS
"""After so long, an entry that is not rewritten is gone."""


class AliveTable:
    """The other nodes. Thread-safe."""

    def __init__(self, here: NodeIdentity) -> None:
        self._here = here.node
        self._lock = threading.Lock()
        self._seen: dict[bytes, tuple[NodeEntry, float]] = {}

    def saw(self, entries: Iterable[NodeEntry], now: float, seconds: float = NODE_SECONDS) -> None:
        """These were alive just now, and count as alive for so long; of one node the last one counts. At most
        `MAX_NODES` are kept."""
        with self._lock:
            self._seen = {node: seen for node, seen in self._seen.items() if seen[1] > now}
            for entry in entries:
                if entry.node != self._here and (entry.node in self._seen or len(self._seen) < MAX_NODES):
                    self._seen[entry.node] = (entry, now + seconds)

    def gone(self, node: bytes) -> None:
        """It said so, or its entry is gone."""
        with self._lock:
            self._seen.pop(node, None)

    def alive(self, now: float) -> Mapping[bytes, NodeEntry]:
        """By the nodes' ids."""
        with self._lock:
            return {node: entry for node, (entry, until) in self._seen.items() if until > now}


class ClaimState(StrEnum):
    """Whether this run speaks for its node."""

    UNSURE = "unsure"
    OURS = "ours"
    CLONED = "cloned"


class NodeClaim:
    """Of this run. Not thread-safe: the thread that writes the entry looks first."""

    def __init__(self, here: NodeIdentity) -> None:
        self._incarnation = here.incarnation
        self._other: tuple[bytes, float] | None = None
        self._wrote = False
        self.state = ClaimState.UNSURE

    def look(self, found: bytes | None, now: float) -> bool:
        """found: the incarnation in this node's entry now; None without one. Returns whether ours may be written. A
        clone may once the other one is gone."""
        if found is None or found == self._incarnation:
            self._other, self.state = None, ClaimState.OURS
            return True
        if self._other is None or self._other[0] != found:
            self._other = (found, now)
        if self.state == ClaimState.OURS or now - self._other[1] > FORGOTTEN_SECONDS:
            self.state = ClaimState.CLONED
        return False

    def wrote(self) -> None:
        """Our entry is there, for `NODE_SECONDS`."""
        self._wrote = True

    def was_lost(self, found: bytes | None) -> bool:
        """Whether an entry that was written is gone: then our hints, or announcements since, may be lost too."""
        return found is None and self._wrote
