"""Which nodes of a pool are alive, and whether this run may announce for its own node.

An entry is valid for `NODE_SECONDS` after it was seen, by this host's own clock: no other host's times are compared
with it. A node has one live incarnation; two of them mean a copied data directory. The second one stays silent: its
entry would replace that of the first, whose hints would then lead to it.

    UNSURE   an entry of another run is there: of the run before, which soon expires, or of a clone
    OURS     no entry, or ours: it is written again and again
    CLONED   an entry of another run replaced ours, or does not go away
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from enum import StrEnum

from kvstore.block.identity import NodeIdentity
from kvstore.pool.directory import NODE_SECONDS, NodeEntry

MAX_NODES = 4096
FORGOTTEN_SECONDS = 1.5 * NODE_SECONDS
"""After this time, an entry that is not rewritten is gone."""


class AliveTable:
    """The other nodes. Thread-safe."""

    def __init__(self, here: NodeIdentity) -> None:
        self._here = here.node
        self._lock = threading.Lock()
        self._seen: dict[bytes, tuple[NodeEntry, float]] = {}

    def saw(self, entries: Iterable[NodeEntry], now: float, seconds: float = NODE_SECONDS) -> None:
        """These were alive just now, and count as alive for that time; of one node the last entry counts. At most
        `MAX_NODES` are kept."""
        with self._lock:
            self._seen = {node: seen for node, seen in self._seen.items() if seen[1] > now}
            for entry in entries:
                if entry.node != self._here and (entry.node in self._seen or len(self._seen) < MAX_NODES):
                    self._seen[entry.node] = (entry, now + seconds)

    def gone(self, node: bytes) -> None:
        """It announced its end, or its entry is gone."""
        with self._lock:
            self._seen.pop(node, None)

    def alive(self, now: float) -> Mapping[bytes, NodeEntry]:
        with self._lock:
            return {node: entry for node, (entry, until) in self._seen.items() if until > now}


class ClaimState(StrEnum):
    """Whether this run may announce for its node."""

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
        """Returns whether our entry may be written; a clone's may, once the other run is gone. found: the incarnation
        in this node's entry now; None without one."""
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
