"""The real code of 10 and of 100 nodes on a clock of its own: a crude model of a pool, which prints whence hits came.

Documents are asked for by Zipf's law; each node keeps the last ones, announces and withdraws with a lag, some nodes die
and start again. In the model nothing wrong can be read; counted is how often a hint was old, and what that cost.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from random import Random

import numpy as np
import pytest

from kvstore.block.account import HitTier
from kvstore.block.identity import NodeIdentity
from kvstore.pool.announcer import Announcer
from kvstore.pool.choice import MOST_ASKED, HolderChoice
from kvstore.pool.directory import (
    CHUNK_BLOCKS,
    HINT_SECONDS,
    Holder,
    NodeEntry,
    chunk_heads,
    hint_value,
    leading_holders,
)
from kvstore.pool.members import AliveTable
from kvstore.pool.speeds import SpeedBook

BLOCKS = CHUNK_BLOCKS
"""A document is one chunk."""
BLOCK_BYTES = 100_000_000 // BLOCKS
REQUESTS_PER_SECOND, DOCUMENTS_PER_NODE, KEPT_DOCUMENTS = 5.0, 200, 160
TICK = 0.5


class Hints:
    """A directory: what nodes say of chunks, and until when."""

    def __init__(self) -> None:
        self.said: dict[bytes, dict[bytes, tuple[bytes, float]]] = {}
        self.entries: dict[bytes, tuple[NodeEntry, float]] = {}

    def values(self, name: bytes, now: float) -> Mapping[bytes, bytes]:
        return {node: value for node, (value, until) in self.said.get(name, {}).items() if until > now}


class PoolNode:
    """With the pool's code, and in place of a store the documents that it used last."""

    def __init__(self, number: int, run: int) -> None:
        self.here = NodeIdentity(number.to_bytes(16, "big"), run.to_bytes(8, "big"))
        self.entry = NodeEntry(self.here.node, self.here.incarnation, f"node{number}:7470")
        self.table, self.announcer, self.speeds = AliveTable(self.here), Announcer(), SpeedBook()
        self.choice = HolderChoice(self.here.node, self.speeds)
        self.has: OrderedDict[int, bytes] = OrderedDict()
        self.is_up, self.sent = True, 0

    def keep(self, document: int, name: bytes) -> None:
        self.has[document] = name
        self.announcer.stored(name, HitTier.DRAM)
        if len(self.has) > KEPT_DOCUMENTS:
            self.announcer.removed(self.has.popitem(last=False)[1])

    def tick(self, hints: Hints, now: float) -> None:
        """As the directory's thread does."""
        hints.entries[self.here.node] = (self.entry, now + 5.0)
        self.table.saw([entry for entry, until in hints.entries.values() if until > now], now)
        while batch := self.announcer.batch(now):
            for name in batch.withdraw:
                hints.said.get(name, {}).pop(self.here.node, None)
            for name, tier in batch.announce:
                value = (hint_value(self.here.incarnation, tier), now + HINT_SECONDS)
                hints.said.setdefault(name, {})[self.here.node] = value


def ran(nodes: int, seconds: float, seed: int, dying: float) -> Counter[str]:
    """Requests by what became of them."""
    random, hints = Random(seed), Hints()
    documents = nodes * DOCUMENTS_PER_NODE
    heads = [chunk_heads(b"n" * 16, [number.to_bytes(32, "big")] * BLOCKS) for number in range(documents)]
    weights = np.cumsum(1.0 / np.arange(1, documents + 1))
    pool = [PoolNode(number, 0) for number in range(nodes)]
    known = {one.here.node: one for one in pool}
    counts: Counter[str] = Counter()
    ticks = int(seconds / TICK)
    per_tick = int(nodes * REQUESTS_PER_SECOND * TICK)
    for tick in range(ticks):
        now = tick * TICK
        for number, one in enumerate(pool):
            if not one.is_up and random.random() < 0.1:
                pool[number] = known[one.here.node] = PoolNode(number, tick)  # empty, and a run of its own
            elif one.is_up and tick > ticks // 2 and random.random() < dying * TICK:
                one.is_up = False
        for one in pool:
            if one.is_up:
                one.tick(hints, now)
        drawn = np.searchsorted(weights, [random.random() * float(weights[-1]) for _ in range(per_tick)])
        for document in map(int, drawn):
            asker = random.choice(pool)
            if asker.is_up:
                counts[request(asker, document, heads[document], hints, known, counts, now)] += 1
                counts["requests"] += 1
    mean = sum(one.sent for one in pool) / nodes
    counts["egress max/mean %"] = int(100 * max(one.sent for one in pool) / mean)
    return counts


def request(
    asker: PoolNode,
    document: int,
    heads: list[tuple[int, bytes]],
    hints: Hints,
    known: dict[bytes, PoolNode],
    counts: Counter[str],
    now: float,
) -> str:
    name = heads[0][1]
    if document in asker.has:
        asker.has.move_to_end(document)
        return "local"
    alive = asker.table.alive(now)
    found = leading_holders(heads, [hints.values(name, now)], alive)
    chosen = asker.choice.choose(found, alive, name, BLOCK_BYTES, now)
    assert len(chosen) <= MOST_ASKED
    outcome = "stale > miss" if chosen else "miss"
    for holder in chosen:
        assert alive[holder.node].incarnation == holder.incarnation and holder.node != asker.here.node
        assert not asker.choice.is_banned(holder.node, holder.incarnation, now)
        if pulled(asker, holder, document, known[holder.node], now):
            outcome = "remote"
            break
        counts["stale tries"] += 1
    asker.keep(document, name)
    return outcome


def pulled(asker: PoolNode, holder: Holder, document: int, there: PoolNode, now: float) -> bool:
    if not there.is_up or there.here.incarnation != holder.incarnation:
        asker.choice.failed(holder.node, holder.incarnation, now)
        return False
    asker.choice.worked(holder.node, holder.incarnation)
    asker.speeds.learn(holder.node, BLOCKS * BLOCK_BYTES, 0.1, now)
    there.sent += document in there.has
    return document in there.has


@pytest.mark.parametrize(
    ("nodes", "seconds", "dying"),
    [(10, 200.0, 0.0), pytest.param(100, 30.0, 0.0, marks=pytest.mark.slow), (10, 200.0, 0.01)],
)
def test_a_pool_finds_what_it_has(nodes: int, seconds: float, dying: float) -> None:
    seed = 30
    print(f"seed {seed}: {nodes} nodes, {seconds:.0f} s, {dying:.0%} of the nodes die in each second")
    counts = ran(nodes, seconds, seed, dying)
    requests = counts.pop("requests")
    spread = counts.pop("egress max/mean %") / 100
    print({what: f"{count / requests:.2%}" for what, count in sorted(counts.items())}, f"egress max/mean {spread:.1f}")
    assert counts["local"] + counts["remote"] + counts["miss"] + counts["stale > miss"] == requests
    assert counts["stale tries"] <= (0.005 if not dying else 0.05) * requests
    assert counts["stale > miss"] <= (0.001 if not dying else 0.02) * requests
    if not dying:
        assert counts["remote"] > counts["miss"] / 2
        assert spread < 2.0, "load spreads over holders"
