"""A sidecar's hot prefixes, fed by look-ups, leases and engines' reports without delaying them.

    looked_up(), granted()  a sample goes into the tenant's bounded queue; if that is full, they are counted as dropped
    told()                  counts what its engines saved
    step()                  the worker's thread feeds trees from the queues; run() repeats it until stopped
    figures()               any thread reads which prefixes are hot, of about the last hour

Counts decay with a half-life of half an hour. Each tenant has its own queue, rate and trees, so that other tenants
hardly influence what it sees. Shared bounds: 8,192 nodes of 65,536 blocks (32 bytes each); the tenant with most gives
way. Clock and names are handed in; the caller owns the thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.block.account import HitTier
from kvstore.insight.curve import HALF_LIFE_SECONDS, faded_seconds
from kvstore.prefixes.hottest import PrefixTree
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
        hot: list[_Hot] = []
        for name, tenant in mine:
            with self._lock:
                hot += _hottest(tenant, printable(name))
        hot.sort(key=lambda one: -one.found_tokens)
        tenants = [tenant for _, tenant in mine]
        shown = PrefixFigures(
            [_row(one, named, standing, per_hour) for one in hot[:most]],  # calls the store, so outside of our lock
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


class _Hot(NamedTuple):
    """keys: of its whole chain; uses, saved_tokens: decayed."""

    tenant: str
    namespace: int
    keys: bytes
    tokens: int
    size_bytes: int
    uses: float
    saved_tokens: float
    seconds_a_token: float | None
    used_at: float

    @property
    def found_tokens(self) -> float:
        """The rank of a hot prefix."""
        return self.uses * self.tokens


def _hottest(mine: _Tenant, tenant: str) -> list[_Hot]:
    least = LEAST_SHARE * sum(tree.found_tokens() for tree in mine.trees.values())
    found = [(number, tree, one) for number, tree in mine.trees.items() for one in tree.hottest(least)]
    found = [one for one in found if one[2].uses >= LEAST_USES]
    found.sort(key=lambda one: -one[2].uses * one[2].node.end * one[1].block_tokens)
    return [
        _Hot(
            tenant,
            number,
            one.node.keys(),
            one.node.end * tree.block_tokens,
            one.node.end * tree.block_bytes,
            one.uses,
            one.saved_blocks * tree.block_tokens,
            mine.seconds_a_token,
            one.node.used_at,
        )
        for number, tree, one in found[:MOST_ROWS]
    ]


def _row(
    hot: _Hot,
    named: Mapping[int, SpaceNames],
    standing: Callable[[int, Sequence[bytes]], Standing],
    per_hour: float,
) -> HotPrefix:
    keys = [hot.keys[at : at + KEY_BYTES] for at in range(0, len(hot.keys), KEY_BYTES)]
    there, saved = standing(hot.namespace, keys), hot.saved_tokens * per_hour
    return HotPrefix(
        keys[-1].hex()[:ROW_DIGITS],
        hot.tenant,
        *named.get(hot.namespace, UNKNOWN),
        hot.tokens,
        hot.size_bytes,
        hot.uses * per_hour,
        saved,
        saved * hot.seconds_a_token if hot.seconds_a_token is not None else None,
        there.blocks * (hot.tokens // len(keys)),
        dict(there.tiers),
        hot.used_at,
        there.retained_until,
    )
