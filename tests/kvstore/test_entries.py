"""What a store keeps does not grow with what it has done: entries of all its tables are counted, not bytes.

Two tenants store and read over a full NVMe tier, so that each put evicts. From the round on in which the last table is
full, each table has as many entries as before, whatever goes on.
"""

from __future__ import annotations

import gc
import types
from array import array
from collections import Counter, deque
from pathlib import Path
from random import Random

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from asking import Asking
from kvstore.block.identity import Namespace
from kvstore.block.layout import Layout
from kvstore.config import Limits
from kvstore.core.store import Store
from kvstore.node import EmbeddedStore
from tiering.frame import HEADER_BYTES
from tiering.nvme.lmdb_index import LmdbMaker
from workbench import open_at

LAYOUT = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")
PAYLOAD_BYTES = 2048
FORGOTTEN = 64
ROUNDS, VERBS = 8, 120
EARLY, LATE = slice(1, 4), slice(6, None)
"""Rounds that are compared: three rounds lie between them, and in none of them is a table filled at first."""
FREE = {"PrefixIndex._free_rows", "SlotTable._free"}
"""Rows that were in use once: at most as many as the columns beside them have, which are counted."""
MOST_BLOCKS = 8
OURS = ("kvstore.", "tiering.")


def entries(store: Store) -> Counter[str]:
    """Of every table that can be reached from a store, by what holds it."""
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    found: list[tuple[str, object]] = [("Store", store)]
    while found:
        name, one = found.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | str | bytes | int | float):
            continue
        seen.add(id(one))
        kind = type(one)
        if kind.__module__.startswith(OURS):
            inside = dict(getattr(one, "__dict__", {}))
            for base in kind.__mro__:
                inside |= {slot: getattr(one, slot, None) for slot in base.__dict__.get("__slots__", ())}
            found += [(f"{kind.__name__}.{attribute}", each) for attribute, each in inside.items()]
        elif isinstance(one, dict | list | set | deque | tuple):
            counts[name] += len(one)
            found += [(name, each) for each in gc.get_referents(one)]
        elif isinstance(one, array | bytearray | np.ndarray):
            counts[name] += len(one)
    return counts


class Tenant:
    """Chains of blocks of zeros, some of which go on where others end."""

    def __init__(self, store: EmbeddedStore, name: str, random: Random) -> None:
        self._door = store.for_tenant(name)._door_for_handle()
        self._number = Asking(self._door).open_namespace(Namespace("m", LAYOUT, "raw"), [PAYLOAD_BYTES]).number
        self._random = random
        self._chains: deque[list[bytes]] = deque([[]], maxlen=50)

    def put(self) -> None:
        before = self._random.choice(self._chains)
        kept = before[: self._random.randint(0, len(before) // 2)]
        chain = kept + [self._random.randbytes(32) for _ in range(self._random.randint(1, MOST_BLOCKS))]
        reply = Asking(self._door).reserve(self._number, chain, 0, 0, None)
        if reply.reservation:
            digests = []
            for span in self._door.memory(0, reply.places[0]):
                span.view[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = bytes(PAYLOAD_BYTES)
                digests.append([xxh3_128_digest(bytes(PAYLOAD_BYTES))])
            assert Asking(self._door).commit(reply.reservation, 0, 0, digests) == len(reply.blocks)
            if self._random.random() < 0.1:
                Asking(self._door).persist(self._number, chain, 10)
        self._chains.append(chain)

    def get(self) -> None:
        Asking(self._door).release(
            Asking(self._door).lease(self._number, self._random.choice(self._chains), 0, 100).lease
        )


@pytest.mark.slow
def test_no_table_grows_for_ever(tmp_path: Path) -> None:
    seed = 7
    random = Random(seed)
    limits = Limits(forgotten=FORGOTTEN)
    sizes = {"dram": "1MiB", "extent": "64KiB", "nvme": "2MiB", "slab": "128KiB"}
    with open_at(tmp_path, indexes=LmdbMaker, limits=limits, scrub="off", **sizes) as store:
        tenants = [Tenant(store, name, random) for name in ("one", "two")]
        totals, evicted = [], []
        for _ in range(ROUNDS):
            for at in range(VERBS):
                (tenants[at % 2].get if random.random() < 0.3 else tenants[at % 2].put)()
            totals.append(entries(store.core))
            evicted.append(store.usage().counters.get("nvme_evicted_blocks", 0))
            store.check()
        remembered = store.core.blocks.index.remembered  # what is stored again is not
        assert all(FORGOTTEN // 2 < remembered[store.tenant_keys(name).tenant] <= FORGOTTEN for name in ("one", "two"))
        assert evicted[EARLY.stop] > 100 and evicted[-1] > 1.5 * evicted[EARLY.stop], "NVMe is full, and goes on"
        for name in set().union(*totals) - FREE:
            before, after = max(one[name] for one in totals[EARLY]), min(one[name] for one in totals[LATE])
            # How far the writer to NVMe has come is another number each time: some hundred entries of one table. What
            # is left behind by one verb in three is more.
            assert after <= before + VERBS, (seed, name, [one[name] for one in totals])
