"""Where the rest of a chain is: on other nodes, or in the remote tier. Answered in a few milliseconds, or not at all.

    hints of the directory > at most two nodes, and those of `network.peers` > Has, all at once > blocks by node
    the remote tier        > which names exist                                                  > blocks

Findings are kept for the fetch that may follow. A ticket's node is asked first, if it is a node of the pool: blocks
that it promises count as there, since it may still be publishing them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from kvstore.block.account import HitTier, MissReason
from kvstore.courier.link import CourierRun, CourierSpace
from kvstore.courier.members import NamedPeers
from kvstore.courier.peer_source import MOST_ASKED_KEYS, PeerSource, PeerWays
from kvstore.courier.remote_source import RemoteSource, RemoteWays
from kvstore.pool.choice import MOST_ASKED
from kvstore.pool.directory import (
    CHUNK_BLOCKS,
    MAX_HEADS,
    Directory,
    DirectoryDown,
    Holder,
    NodeEntry,
    chunk_heads,
    hint_name,
    leading_places,
)
from kvstore.pool.members import AliveTable
from kvstore.pool.speeds import REMOTE_PRIOR
from tiering.clock import Clock
from tiering.remote.driver import RemoteFault

LOOK_SECONDS = 0.0042
"""For all of a `Locate`: the engine gets the answer "nothing" after 5 ms."""
DIRECTORY_SECONDS, HAS_SECONDS = 0.002, 0.0025
MOST_NAMED = 8
"""Nodes of `network.peers` that are asked at once."""
MOST_PLACES = 16
"""In a prompt, at which the directory is asked. Where all nodes have it a longer look-up would not end in its time, and
three in a row stop all tenants' look-ups for a while."""
MOST_KEPT = 4096
RECENT_SECONDS, MOST_RECENT = 1.0, 256
"""How long a finding about a chain, perhaps too late for its own request, serves others; and how many are kept."""

Source = PeerSource | RemoteSource


@dataclass
class Places:
    """sources: to ask in this order. blocks, tier, milliseconds, where: the best one's. reason, detail: why none."""

    sources: list[Source] = field(default_factory=list)
    blocks: int = 0
    tier: HitTier | None = None
    milliseconds: float = 0.0
    where: str = ""
    reason: MissReason | None = MissReason.ABSENT
    detail: str = ""


@dataclass(frozen=True)
class HintedHolders:
    """Other nodes that have leading blocks of a prompt, most first. left_out: why more may have some; empty if none."""

    holders: Sequence[Holder] = ()
    left_out: str = ""


class Locator:
    """Of one courier. Thread-safe."""

    def __init__(
        self,
        table: AliveTable,
        named: NamedPeers | None,
        directory: Directory | None,
        peers: PeerWays | None,
        remote: RemoteWays | None,
        clock: Clock,
    ) -> None:
        self._table = table
        self._named = named
        self._directory = directory
        self._peers = peers
        self._remote = remote
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Places] = OrderedDict()
        self._recent: OrderedDict[tuple[bytes, bytes, int], tuple[float, Places]] = OrderedDict()

    def keep(self, tenant: str, number: int, places: Places) -> None:
        """Keep places for the fetch that names that question; question numbers are per tenant."""
        with self._lock:
            self._kept[tenant, number] = places
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)

    def kept(self, tenant: str, number: int) -> Places | None:
        """Take them out."""
        with self._lock:
            return self._kept.pop((tenant, number), None)

    def find(
        self,
        run: CourierRun,
        space: CourierSpace,
        keys: Sequence[bytes],
        present: int,
        node: bytes = b"",
        incarnation: bytes = b"",
        seconds: float = LOOK_SECONDS,
    ) -> Places:
        """The places of the blocks behind the first `present`. node, incarnation: of a ticket."""
        now, chain = self._clock.monotonic_seconds(), (space.id, keys[-1], present)
        with self._lock:
            found_at, recent = self._recent.get(chain, (-inf, Places()))
        if not node and now - found_at < RECENT_SECONDS:
            return replace(recent, sources=list(recent.sources))
        ends_at = now + seconds
        from_remote = self._remote.has(run, space, keys[present:], ends_at) if self._remote is not None else None
        places = Places()
        size = space.block_bytes
        if self._peers is not None:
            self._find_peers(places, run, space, keys, present, (node, incarnation), ends_at)
        if from_remote is not None:
            assert self._remote is not None
            self._find_remote(places, self._remote, from_remote, present, size, now)
        if places.sources:
            places.reason = None
        if places.sources and not node:  # a ticket's promise is for its own request only
            with self._lock:
                self._recent[chain] = self._clock.monotonic_seconds(), places
                while len(self._recent) > MOST_RECENT:
                    self._recent.popitem(last=False)
        return places

    def holders(
        self, run: CourierRun, namespace: bytes, keys: Sequence[bytes], seconds: float, *, are_own: bool
    ) -> HintedHolders:
        """Which other nodes have leading chunks of a prompt, for a router, which may send it to any of them. are_own:
        the keys were made with the tenant's identity key. Others may be another tenant's: for these each node is asked,
        since it looks at the tenant's own blocks alone."""
        if self._directory is None:
            return HintedHolders(left_out="no directory is configured here")
        most = CHUNK_BLOCKS * MAX_HEADS if are_own else MOST_ASKED_KEYS
        heads = leading_places(chunk_heads(namespace, keys[:most]), MOST_PLACES)
        ends_at = self._clock.monotonic_seconds() + seconds
        try:
            found = self._directory.holders(heads, seconds if are_own else DIRECTORY_SECONDS)
        except DirectoryDown:
            return HintedHolders(left_out="the directory did not answer in time")
        alive = self._table.alive(self._clock.monotonic_seconds())
        fit = [one for one in found if one.node in alive and run.fingerprint in alive[one.node].fingerprints]
        if not are_own:
            fit, is_whole = self._proven(run, namespace, keys, fit, ends_at)
            if not is_whole:
                return HintedHolders(fit, "not all nodes answered in time")
        is_cut = len(keys) - most >= CHUNK_BLOCKS
        return HintedHolders(fit, f"only the first {most} blocks are looked up" if is_cut else "")

    def _proven(
        self, run: CourierRun, namespace: bytes, keys: Sequence[bytes], hinted: Sequence[Holder], ends_at: float
    ) -> tuple[list[Holder], bool]:
        """Those that say so themselves, and whether all did say."""
        space, alive = run.space_of(namespace), self._table.alive(self._clock.monotonic_seconds())
        asked = [one for one in hinted[:MOST_NAMED] if one.node in alive]
        left = ends_at - self._clock.monotonic_seconds()
        counts: list[int | None] = [None] * len(asked)
        if asked and space is not None and self._peers is not None and left > 0:
            counts = self._peers.has(run, space, [alive[one.node] for one in asked], keys, 0, left)
        proven = [one._replace(blocks=min(one.blocks, of)) for one, of in zip(asked, counts, strict=True) if of]
        return proven, len(asked) == len(hinted) and None not in counts

    def _find_remote(
        self, places: Places, remote: RemoteWays, asked: Callable[[], int], present: int, size: int, now: float
    ) -> None:
        try:
            found = asked()
        except RemoteFault as fault:
            if not places.sources:
                places.reason, places.detail = MissReason(fault.reason), str(fault)
            return
        remote.figures.looked(remote.name, bool(found))
        if not found:
            return
        milliseconds = remote.figures.speeds.milliseconds(remote.name, found * size, now, REMOTE_PRIOR)
        source = RemoteSource(remote)
        is_better = (present + found, -milliseconds) > (places.blocks, -places.milliseconds)
        if is_better and not any(one.publishes for one in places.sources):
            places.sources.insert(0, source)
            self._best(places, present + found, HitTier.REMOTE, milliseconds, remote.name)
        else:
            places.sources.append(source)

    @staticmethod
    def _best(places: Places, blocks: int, tier: HitTier, milliseconds: float, where: str) -> None:
        places.blocks, places.tier, places.milliseconds, places.where = blocks, tier, milliseconds, where

    def _find_peers(
        self,
        places: Places,
        run: CourierRun,
        space: CourierSpace,
        keys: Sequence[bytes],
        present: int,
        ticket: tuple[bytes, bytes],
        ends_at: float,
    ) -> None:
        peers = self._peers
        assert peers is not None
        now, alive = self._clock.monotonic_seconds(), self._table.alive(self._clock.monotonic_seconds())
        head, size = hint_name(space.id, keys[-1]), space.block_bytes
        hinted = self._hinted(places, space, keys, present)
        chosen = peers.choice.choose(hinted, alive, head, size, now, run.fingerprint)
        asked = {one.node: alive[one.node] for one in chosen}
        for other in self._named.nodes() if self._named is not None else ():
            entry = alive.get(other)
            if entry is not None and other not in asked and len(asked) < MOST_ASKED + MOST_NAMED:
                self._ask_too(asked, entry, run, peers, now)
        node, incarnation = ticket
        promised = alive.get(node) if node and node != run.node else None
        if promised is not None and promised.incarnation == incarnation:
            asked.setdefault(node, promised)
        elif node and node != run.node:
            places.reason, places.detail, promised = MissReason.STALE_HINT, "the ticket's node is not in the pool", None
        left = min(HAS_SECONDS, ends_at - self._clock.monotonic_seconds())
        entries = list(asked.values())
        counts = peers.has(run, space, entries, keys[present:], present, left) if entries and left > 0 else []
        said = {one.node: _with_tail(one.blocks, len(keys)) for one in chosen}
        found = []
        for entry, count in zip(entries, counts or [None] * len(entries), strict=True):
            blocks = present + count if count is not None else said.get(entry.node, 0)
            if blocks > present:
                found.append(Holder(entry.node, entry.incarnation, blocks, HitTier.DRAM))
        if chosen and not found:
            places.reason, places.detail = MissReason.STALE_HINT, "the directory names nodes that have it no more"
        best = peers.choice.choose(found, alive, head, size, now, run.fingerprint)
        if promised is not None:
            source = PeerSource(promised, peers, publishes=True)
            places.sources.append(source)
            milliseconds = peers.figures.speeds.milliseconds(node, (len(keys) - present) * size, now)
            self._best(places, len(keys), HitTier.PEER, milliseconds, source.name)
        for one in best:
            if promised is not None and one.node == promised.node:
                continue
            source = PeerSource(alive[one.node], peers)
            if not places.sources:
                milliseconds = peers.figures.speeds.milliseconds(one.node, (one.blocks - present) * size, now)
                self._best(places, one.blocks, HitTier.PEER, milliseconds, source.name)
            places.sources.append(source)

    @staticmethod
    def _ask_too(asked: dict[bytes, NodeEntry], entry: NodeEntry, run: CourierRun, peers: PeerWays, now: float) -> None:
        if run.fingerprint not in entry.fingerprints:
            peers.mismatch(entry, run)
        elif not peers.choice.is_banned(entry.node, entry.incarnation, now):
            asked[entry.node] = entry

    def _hinted(self, places: Places, space: CourierSpace, keys: Sequence[bytes], present: int) -> list[Holder]:
        heads = leading_places(chunk_heads(space.id, keys, present), MOST_PLACES)
        if self._directory is None or not heads:
            return []
        try:
            return self._directory.holders(heads, DIRECTORY_SECONDS)
        except DirectoryDown as down:
            places.reason, places.detail = MissReason.UNREACHABLE, f"the directory does not answer: {down}"
            return []


def _with_tail(hinted: int, asked: int) -> int:
    """A tail shorter than a chunk has no hint: a node that has all before it is assumed to have it too."""
    return asked if asked - hinted < CHUNK_BLOCKS else hinted
