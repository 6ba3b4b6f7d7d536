"""A sidecar's hot prefixes, live: hierarchical heavy hitters over the chains that look-ups found.

    looked_up(), granted()  a sample goes into the tenant's bounded queue; if that is full, they are counted as dropped
    told()                  counts what its engines saved
    step()                  the worker's thread feeds trees from the queues, a path of runs of blocks for each chain,
                            counted at each node passed; run() repeats it until stopped
    figures()               any thread reads which prefixes are hot, of about the last hour: from the leaves up, a
                            node's own uses are those that no reported node below it explains; x its tokens

A prefix that a thousand conversations share is one node. Trees are bounded: when one has too many nodes or blocks, the
least used leaves go, and their uses stay counted above them. Counts decay with a half-life of half an hour. Each tenant
has its own queue, rate and trees, so that other tenants hardly influence what it sees. After G. Cormode, F. Korn, S.
Muthukrishnan, D. Srivastava, "Finding Hierarchical Heavy Hitters in Streaming Data", ACM TKDD 1 (4), 2008. Clock and
names are handed in; the caller owns the thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from kvstore.block.account import HitTier
from kvstore.insight.curve import HALF_LIFE_SECONDS, faded_seconds
from kvstore.protocol import messages as m
from kvstore.protocol.told import HotPrefix, PrefixFigures
from kvstore.protocol.words import printable
from tiering.clock import Clock
from tiering.frame import KEY_BYTES

MOST_NODES, MOST_BLOCKS = 1 << 13, 1 << 16
MOST_TREES, LEAST_NODES = 64, 16
"""Per tenant: namespaces that are followed, the most recent; nodes that each may have in any case."""
FREE_A_SECOND, ONE_IN = 32, 67
"""Per tenant, of look-ups and of leases: so many a second are followed, and of the rest one in so many."""
MOST_QUEUED, MOST_QUEUED_BLOCKS = 256, 1 << 14
LEAST_SHARE = 0.01
"""A prefix is listed if it found this share of the tokens that its tenant's look-ups found."""
MOST_ROWS = 20
"""Per tenant and list; three times as many in the list of all tenants."""
FADE_EVERY_SECONDS, WAIT_SECONDS, FRESH_SECONDS, LEAST_SECONDS = 60.0, 1.0, 2.0, 60.0
ROW_DIGITS = 8
LEAST_USES = 0.01
"""Prefixes with fewer decayed uses are not listed."""
MOST_SECONDS_A_TOKEN = 1.0
"""Limit of the saving that an engine may report."""
KEPT_OF_LEAVES = 0.75
"""Share of leaves that a shrink keeps, the most used."""


class Standing(NamedTuple):
    """State of a chain in the store: readable blocks, how many per tier, and until when all of it is retained."""

    blocks: int
    tiers: Mapping[str, int]
    retained_until: float | None


class SpaceNames(NamedTuple):
    """First digits of a namespace's digest, and its model's name."""

    id: str
    model: str


UNKNOWN = SpaceNames("", "")


class _Chain(NamedTuple):
    """keys: joined. first_block: of a lease; None for a look-up."""

    namespace: int
    keys: bytes
    first_block: int | None
    weight: int


@dataclass(slots=True)
class _Sampling:
    """For look-ups or for leases. free: how many may still be followed in this second."""

    came: int = 0
    free: int = FREE_A_SECOND

    def weight(self) -> int:
        """Count one more; returns how many it stands for, or 0 if it is not followed."""
        self.came += 1
        if self.free > 0:
            self.free -= 1
            return 1
        return 0 if self.came % ONE_IN else ONE_IN


@dataclass(slots=True)
class _Tenant:
    lookups: _Sampling = field(default_factory=_Sampling)
    leases: _Sampling = field(default_factory=_Sampling)
    sampled: int = 0
    dropped: int = 0
    chains: deque[_Chain] = field(default_factory=deque)
    queued_blocks: int = 0
    trees: dict[int, PrefixTree] = field(default_factory=dict)  # last fed at the end
    saved_seconds: float = 0.0
    saved_tokens: int = 0
    tells_savings: bool = False

    @property
    def seconds_a_token(self) -> float | None:
        """Saved by each token loaded, as its engines report; None if they report nothing."""
        if not self.tells_savings or not self.saved_tokens:
            return None
        return min(MOST_SECONDS_A_TOKEN, max(0.0, self.saved_seconds / self.saved_tokens))


class PrefixBook:
    """Thread-safe; one thread at a time steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sizes: dict[int, tuple[int, int]] = {}
        self._tenants: dict[bytes, _Tenant] = {}
        self._queue_lock = threading.Lock()  # guards queues and counts; held for one append
        self._lock = threading.Lock()  # guards trees; held for one item
        self._began_at = self._faded_at = self._paid_at = clock.monotonic_seconds()
        self._busy = 1  # tenants with trees
        self._shown: dict[tuple[bool, tuple[bytes, ...]], tuple[float, PrefixFigures]] = {}

    # Feeding it ----------------------------------------------------------------------------------------------------

    def opened(self, tenant: bytes, namespace: int, block_bytes: int, block_tokens: int) -> None:
        """Announce a tenant's namespace. block_bytes: size of its blocks in a tier."""
        self._sizes[namespace] = block_bytes, block_tokens
        with self._queue_lock:
            self._tenants.setdefault(tenant, _Tenant())

    def looked_up(self, tenant: bytes, namespace: int, keys: Sequence[bytes], blocks: int) -> None:
        mine = self._tenants.get(tenant)
        if mine is not None and (weight := mine.lookups.weight()):
            self._offer(mine, _Chain(namespace, b"".join(keys[:blocks]), None, weight))

    def granted(self, tenant: bytes, namespace: int, keys: Sequence[bytes], first_block: int, blocks: int) -> None:
        """A lease granted these from first_block up to `blocks`."""
        mine = self._tenants.get(tenant)
        if mine is not None and (weight := mine.leases.weight()):
            self._offer(mine, _Chain(namespace, b"".join(keys[:blocks]), first_block, weight))

    def told(self, tenant: bytes, verb: m.Tell) -> None:
        mine = self._tenants.get(tenant)
        if mine is None or verb.savings is None:
            return
        with self._queue_lock:
            mine.tells_savings = True
            mine.saved_seconds += verb.savings.saved_seconds - verb.savings.regret_seconds
            for one in verb.firsts:
                mine.saved_tokens += one.hits.get(HitTier.DRAM, 0) + one.hits.get(HitTier.NVME, 0)

    def _offer(self, mine: _Tenant, chain: _Chain) -> None:
        blocks = len(chain.keys) // KEY_BYTES
        with self._queue_lock:
            if len(mine.chains) >= MOST_QUEUED or mine.queued_blocks + blocks > MOST_QUEUED_BLOCKS:
                mine.dropped += chain.weight if chain.first_block is None else 0
                return
            mine.sampled += chain.first_block is None
            if blocks:
                mine.chains.append(chain)
                mine.queued_blocks += blocks

    # Working through it --------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Process everything queued; returns how many items."""
        self._pass_time()
        done = 0
        tenants = list(self._tenants.values())
        self._busy = max(1, sum(bool(mine.trees) for mine in tenants))
        for mine in tenants:
            with self._queue_lock:
                chains, mine.chains = mine.chains, deque()
                mine.queued_blocks = 0
            for chain in chains:
                with self._lock:
                    self._follow(mine, chain)
            done += len(chains)
        return done

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; what is queued then is dropped."""
        while not stop.wait(WAIT_SECONDS):
            self.step()

    def _follow(self, mine: _Tenant, chain: _Chain) -> None:
        size_bytes, tokens = self._sizes[chain.namespace]
        tree = mine.trees.pop(chain.namespace, None) or PrefixTree(tokens, size_bytes)
        mine.trees[chain.namespace] = tree
        while len(mine.trees) > MOST_TREES:
            del mine.trees[next(iter(mine.trees))]
        if chain.first_block is None:
            tree.found(chain.keys, chain.weight, self._clock.wall_seconds())
        else:
            tree.granted(chain.keys, chain.first_block, chain.weight)
        self._shrink(mine, tree)

    def _shrink(self, mine: _Tenant, tree: PrefixTree) -> None:
        trees = len(mine.trees) * self._busy
        tree.shrink(max(LEAST_NODES, MOST_NODES // trees), max(LEAST_NODES, MOST_BLOCKS // trees))

    def _pass_time(self) -> None:
        now = self._clock.monotonic_seconds()
        if now - self._paid_at >= WAIT_SECONDS:
            with self._queue_lock:
                for mine in self._tenants.values():
                    mine.lookups.free = mine.leases.free = FREE_A_SECOND
            self._paid_at = now
        if now - self._faded_at < FADE_EVERY_SECONDS:
            return
        factor = 0.5 ** ((now - self._faded_at) / HALF_LIFE_SECONDS)
        self._faded_at = now
        for mine in list(self._tenants.values()):
            with self._lock:
                for tree in mine.trees.values():
                    tree.fade(factor)
                    self._shrink(mine, tree)

    # Reading it ----------------------------------------------------------------------------------------------------

    def figures(
        self,
        names: Mapping[bytes, str],
        named: Mapping[int, SpaceNames],
        standing: Callable[[int, Sequence[bytes]], Standing],
        *,
        of_all: bool,
    ) -> PrefixFigures:
        """Figures of these tenants, under their names, at most `FRESH_SECONDS` old. of_all: the reader may see totals
        over all tenants. named, standing: look up namespaces by number."""
        asker, now = (of_all, tuple(names)), self._clock.monotonic_seconds()
        shown_at, shown = self._shown.get(asker, (0.0, None))
        if shown is not None and now - shown_at < FRESH_SECONDS:
            return shown
        most = 3 * MOST_ROWS if of_all else MOST_ROWS
        per_hour = 3600 / faded_seconds(max(LEAST_SECONDS, now - self._began_at))
        mine = [(name, self._tenants[one]) for one, name in names.items() if one in self._tenants]
        hot: list[tuple[float, int, bytes, HotPrefix]] = []
        for name, tenant in mine:
            with self._lock:
                hot += _hottest(tenant, printable(name), named, per_hour)
        hot.sort(key=lambda one: -one[0])
        tenants = [tenant for _, tenant in mine]
        shown = PrefixFigures(  # asks the store, so outside of our lock
            [_standing(row, keys, number, standing) for _, number, keys, row in hot[:most]],
            now - self._began_at,
            sum(one.lookups.came for one in tenants),
            sum(one.sampled for one in tenants),
            sum(one.dropped for one in tenants),
        )
        with self._queue_lock:
            if len(self._shown) > 2 * len(self._tenants):  # one for each tenant, and one of all
                self._shown.clear()
            self._shown[asker] = now, shown
        return shown

    def forget(self, tenant: bytes) -> None:
        with self._queue_lock, self._lock:
            self._tenants.pop(tenant, None)
            self._shown.clear()

    def check(self) -> None:
        """Verify the bounds, and the invariants of each tree and table."""
        with self._queue_lock, self._lock:
            tenants = list(self._tenants.values())
            for mine in tenants:
                assert len(mine.chains) <= MOST_QUEUED
                queued = sum(len(one.keys) for one in mine.chains)
                assert queued == mine.queued_blocks * KEY_BYTES <= MOST_QUEUED_BLOCKS * KEY_BYTES
                assert len(mine.trees) <= MOST_TREES
                for tree in mine.trees.values():
                    tree.check()


def _hottest(
    mine: _Tenant, tenant: str, named: Mapping[int, SpaceNames], per_hour: float
) -> list[tuple[float, int, bytes, HotPrefix]]:
    """(tokens found, namespace, keys, what is known without the store)"""
    least = LEAST_SHARE * sum(tree.found_tokens() for tree in mine.trees.values())
    found = [(number, tree, one) for number, tree in mine.trees.items() for one in tree.hottest(least)]
    found = [one for one in found if one[2].uses >= LEAST_USES]
    found.sort(key=lambda one: -one[2].uses * one[2].node.end * one[1].block_tokens)
    rows = []
    for number, tree, one in found[:MOST_ROWS]:
        tokens, keys = one.node.end * tree.block_tokens, one.node.keys()
        saved, seconds = one.saved_blocks * tree.block_tokens * per_hour, mine.seconds_a_token
        row = HotPrefix(
            keys[-KEY_BYTES:].hex()[:ROW_DIGITS],
            tenant,
            *named.get(number, UNKNOWN),
            tokens,
            one.node.end * tree.block_bytes,
            one.uses * per_hour,
            saved,
            saved * seconds if seconds is not None else None,
            0,
            {},
            one.node.used_at,
            None,
        )
        rows.append((one.uses * tokens, number, keys, row))
    return rows


def _standing(
    row: HotPrefix, keys: bytes, number: int, standing: Callable[[int, Sequence[bytes]], Standing]
) -> HotPrefix:
    chain = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
    blocks, tiers, until = standing(number, chain)
    stored = blocks * (row.tokens // len(chain))
    return structs.replace(row, stored_tokens=stored, tiers=dict(tiers), retained_until=until)


# A namespace's tree ----------------------------------------------------------------------------------------------


class PrefixNode:
    """The end of a run of blocks. end: its depth in blocks. uses: look-ups that found all of it; leased: leases that
    granted it, skipped: blocks up to it that those leases left out in all, since the engine had them."""

    __slots__ = ("children", "edge", "end", "leased", "parent", "skipped", "used_at", "uses")

    def __init__(self, parent: PrefixNode | None, edge: bytes, end: int) -> None:
        self.parent, self.edge, self.end = parent, edge, end
        self.children: dict[bytes, PrefixNode] = {}
        self.uses = self.leased = self.skipped = self.used_at = 0.0

    def keys(self) -> bytes:
        """Keys of all blocks up to here, `KEY_BYTES` each."""
        edges = []
        node: PrefixNode | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return b"".join(reversed(edges))


@dataclass(slots=True)
class HotNode:
    """A reported node. uses: its own; leases, saved_blocks: of these uses, and what they granted."""

    node: PrefixNode
    uses: float
    leases: float
    saved_blocks: float


class PrefixTree:
    """One namespace's. Not thread-safe."""

    def __init__(self, block_tokens: int, block_bytes: int) -> None:
        self.block_tokens, self.block_bytes = block_tokens, block_bytes
        self.nodes = self.blocks = 0
        self._root = PrefixNode(None, b"", 0)

    def found(self, keys: bytes, weight: float, now: float) -> None:
        """Count a look-up that found these blocks, with a weight."""
        for node in self._path(keys):
            node.uses += weight
            node.used_at = now

    def granted(self, keys: bytes, first_block: int, weight: float) -> None:
        """Count a lease that granted these blocks from first_block on."""
        for node in self._path(keys):
            node.leased += weight
            node.skipped += weight * min(first_block, node.end)

    def fade(self, factor: float) -> None:
        for node in self._down():
            node.uses *= factor
            node.leased *= factor
            node.skipped *= factor

    def shrink(self, nodes: int, blocks: int) -> None:
        """Drop the least used leaves until both bounds hold."""
        while self.nodes > nodes or self.blocks > blocks:
            leaves = sorted((one for one in self._down() if not one.children), key=lambda one: (one.uses, one.used_at))
            for leaf in leaves[: max(1, len(leaves) - int(KEPT_OF_LEAVES * len(leaves)))]:
                assert leaf.parent is not None
                del leaf.parent.children[leaf.edge[:KEY_BYTES]]
                self.nodes -= 1
                self.blocks -= len(leaf.edge) // KEY_BYTES

    def found_tokens(self) -> float:
        return self.block_tokens * sum(one.uses * len(one.edge) for one in self._down()) / KEY_BYTES

    def hottest(self, least_tokens: float) -> list[HotNode]:
        """Nodes whose own uses found at least so many tokens."""
        found: list[HotNode] = []
        # Below a node, or itself: the nearest reported nodes, all of them, and leases in between that count for those.
        below: dict[PrefixNode, tuple[list[PrefixNode], list[HotNode], PrefixNode]] = {}
        for node in reversed(list(self._down())):
            parts = [below.pop(child) for child in node.children.values()]
            rows = [row for part in parts for row in part[1]]
            nearest, counted = [one for part in parts for one in part[0]], _shorter_leases(node, rows)
            counted.leased += sum(part[2].leased for part in parts)
            counted.skipped += sum(part[2].skipped for part in parts)
            explained = [*nearest, counted]
            uses = node.uses - sum(one.uses for one in explained)
            if uses > 0 and uses * node.end * self.block_tokens >= least_tokens:
                leases = max(0.0, node.leased - sum(one.leased for one in explained))
                skipped = node.skipped - sum(min(one.skipped, one.leased * node.end) for one in explained)
                row = HotNode(node, uses, leases, max(0.0, leases * node.end - max(0.0, skipped)))
                found.append(row)
                nearest, rows, counted = [node], [*rows, row], PrefixNode(None, b"", 0)
            below[node] = nearest, rows, counted
        return found

    def check(self) -> None:
        nodes = list(self._down())
        assert len(nodes) == self.nodes and sum(len(one.edge) for one in nodes) == self.blocks * KEY_BYTES
        for node in nodes:
            assert node.parent is not None and node.edge and len(node.edge) % KEY_BYTES == 0
            assert node.parent.children[node.edge[:KEY_BYTES]] is node
            assert node.end == node.parent.end + len(node.edge) // KEY_BYTES
            assert sum(one.uses for one in node.children.values()) <= node.uses * (1 + 1e-9) + 1e-9

    def _down(self) -> Iterator[PrefixNode]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _path(self, keys: bytes) -> Iterator[PrefixNode]:
        node, at = self._root, 0
        while at < len(keys):
            first = keys[at : at + KEY_BYTES]
            child = node.children.get(first)
            if child is None:
                child = self._new(node, keys[at:])
                node.children[first] = child
            elif not keys.startswith(child.edge, at):
                child = self._split(node, child, _equal_start(child.edge, keys[at : at + len(child.edge)]))
            yield child
            node, at = child, at + len(child.edge)

    def _new(self, parent: PrefixNode, edge: bytes) -> PrefixNode:
        blocks = len(edge) // KEY_BYTES
        self.nodes += 1
        self.blocks += blocks
        return PrefixNode(parent, edge, parent.end + blocks)

    def _split(self, parent: PrefixNode, child: PrefixNode, size: int) -> PrefixNode:
        upper = self._new(parent, child.edge[:size])
        self.blocks -= size // KEY_BYTES
        upper.uses, upper.leased, upper.used_at = child.uses, child.leased, child.used_at
        upper.skipped = min(child.skipped, child.leased * upper.end)
        parent.children[child.edge[:KEY_BYTES]] = upper
        child.parent, child.edge = upper, child.edge[size:]
        upper.children[child.edge[:KEY_BYTES]] = child
        return upper


def _shorter_leases(node: PrefixNode, rows: list[HotNode]) -> PrefixNode:
    """An engine may lease less than its look-up found. Leases that ended at this node, beyond the look-ups that did,
    count for reported nodes below, in proportion to the look-ups there that no lease is known of. They are returned as
    a node of their own."""
    children, counted = node.children.values(), PrefixNode(None, b"", 0)
    leases = node.leased - sum(one.leased for one in children)
    more = leases - (node.uses - sum(one.uses for one in children))
    without = sum(one.uses - one.leased for one in children)
    if more <= 0 or without <= 0:
        return counted
    skipped = max(0.0, node.skipped - sum(min(one.skipped, one.leased * node.end) for one in children)) / leases
    for row in rows:
        given = max(0.0, row.uses - row.leases) * min(1.0, more / without)
        row.leases += given
        row.saved_blocks += given * max(0.0, node.end - skipped)
        counted.leased += given
        counted.skipped += given * skipped
    return counted


def _equal_start(one: bytes, other: bytes) -> int:
    """Length in bytes of the equal start, in whole keys."""
    ends = range(KEY_BYTES, min(len(one), len(other)) + 1, KEY_BYTES)
    return KEY_BYTES * bisect_left(ends, True, key=lambda end: one[:end] != other[:end])
