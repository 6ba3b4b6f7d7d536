"""The index against plain dictionaries, what it says of a key that is not there, and what a block costs in it."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.index import NO_ROW, PrefixIndex
from tiering.tier import TierMiss

TENANTS = [b"one", b"one", b"two"]  # of namespaces 0, 1 and 2
FORGOTTEN = 6


def key_of(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=32).digest()


@given(parents=st.lists(st.integers(-1, 40), min_size=1, max_size=40), data=st.data())
def test_families(parents: list[int], data: st.DataObject) -> None:
    """Blocks and all that follow them, in an index where some went."""
    index = PrefixIndex()
    space = index.add_namespace(b"one")
    rows: list[int] = []
    for number, parent in enumerate(parents):
        row = index.insert(space, key_of(number), rows[parent % number] if number and parent >= 0 else NO_ROW)
        index.publish(row)
        rows.append(row)
    for row in data.draw(st.lists(st.sampled_from(rows), unique=True, max_size=20)):
        if not index.children(row):
            index.remove(row)
            rows.remove(row)
    chosen = data.draw(st.lists(st.sampled_from(rows), max_size=5)) if rows else []
    found = index.families(chosen)
    assert set(found) == {row for row in rows if set(index.chain(row)) & set(chosen)} and len(found) == len(set(found))
    assert [index.depth(row) for row in found] == sorted((index.depth(row) for row in found), reverse=True)


# Against a model ------------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """A block as the model knows it: by its key, no rows."""

    parent: bytes | None
    state: str
    retention: tuple[int, int]
    depth: int


@dataclass
class Model:
    """One dictionary per namespace, and the evicted keys in the order in which they went."""

    spaces: list[dict[bytes, Block]] = field(default_factory=lambda: [{} for _ in TENANTS])
    evicted: list[tuple[int, bytes]] = field(default_factory=list)

    def children(self, space: int, key: bytes) -> int:
        return sum(block.parent == key for block in self.spaces[space].values())

    def matched(self, space: int, keys: list[bytes]) -> int:
        blocks = self.spaces[space]
        for count, key in enumerate(keys):
            if key not in blocks or blocks[key].state != "visible":
                return count
        return len(keys)

    def why_not(self, space: int, key: bytes, parent: bytes | None) -> TierMiss | None:
        block = self.spaces[space].get(key)
        if block is not None:
            return {"pending": TierMiss.IN_FLIGHT, "lost": TierMiss.CORRUPT}[block.state]
        if (space, key) in self.evicted:
            return TierMiss.EVICTED
        if parent is not None and self.children(space, parent):
            return None
        return TierMiss.NEVER_SEEN

    def elsewhere(self, space: int, key: bytes) -> int:
        for other, blocks in enumerate(self.spaces):
            if other != space and TENANTS[other] == TENANTS[space] and key in blocks:
                if blocks[key].state == "visible":
                    return other
        return -1

    def remember(self, space: int, key: bytes) -> None:
        if (space, key) not in self.evicted:
            self.evicted.append((space, key))
        del self.evicted[:-FORGOTTEN]

    def chain(self, space: int, key: bytes) -> list[bytes]:
        """From the root to the block."""
        keys: list[bytes] = []
        at: bytes | None = key
        while at is not None:
            keys.insert(0, at)
            at = self.spaces[space][at].parent
        return keys


ACTIONS = "insert insert root publish publish lost refill remove evict".split()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(ACTIONS), st.integers(0, len(TENANTS) - 1), st.integers(0, 10**6), st.integers(0, 11)
        ),
        max_size=60,
    )
)
@settings(max_examples=100)
def test_the_index_is_the_model(steps: list[tuple[str, int, int, int]]) -> None:
    index, model = PrefixIndex(FORGOTTEN), Model()
    for tenant in TENANTS:
        index.add_namespace(tenant)
    for action, space, choice, name in steps:
        blocks, key = model.spaces[space], key_of(name)
        order = sorted(blocks)
        chosen = order[choice % len(order)] if order else b""
        row = index.find(space, chosen) if chosen else NO_ROW
        if action in ("insert", "root"):
            parent = chosen if action == "insert" and chosen else None
            if key in blocks:
                with pytest.raises(AssertionError):
                    index.insert(space, key, NO_ROW)
            elif key != parent:
                depth = blocks[parent].depth + 1 if parent else 0
                blocks[key] = Block(parent, "pending", (name - 5, choice), depth)
                index.insert(space, key, index.find(space, parent) if parent else NO_ROW, name - 5, choice)
        elif not chosen:
            continue
        elif action in ("publish", "refill"):
            parent_key = blocks[chosen].parent
            ready = parent_key is None or blocks[parent_key].state != "pending"
            if ready and blocks[chosen].state == ("pending" if action == "publish" else "lost"):
                index.publish(row)
                blocks[chosen].state = "visible"
                model.evicted = [one for one in model.evicted if one != (space, chosen)]
        elif action == "lost":
            if blocks[chosen].state == "visible":
                index.mark_lost(row)
                blocks[chosen].state = "lost"
        elif model.children(space, chosen):
            with pytest.raises(AssertionError, match="before its parent"):
                index.remove(row)
        else:
            parent_key = blocks.pop(chosen).parent
            assert index.remove(row, remember=action == "evict") == (
                index.find(space, parent_key) if parent_key else NO_ROW
            )
            if action == "evict":
                model.remember(space, chosen)
        compare(index, model)


def compare(index: PrefixIndex, model: Model) -> None:
    index.check()
    for space, blocks in enumerate(model.spaces):
        assert index.visible_blocks(space) == sum(block.state == "visible" for block in blocks.values())
        assert {index.key(row) for row in index.rows(space)} == set(blocks)
        for key, block in blocks.items():
            row = index.find(space, key)
            assert index.key(row) == key and index.namespace_of(row) == space
            assert index.state(row).name.lower() == block.state
            assert index.parent(row) == (index.find(space, block.parent) if block.parent else NO_ROW)
            assert index.depth(row) == block.depth and index.hint(row) == block.retention
            assert index.children(row) == model.children(space, key)
            chain = model.chain(space, key)
            assert [index.key(one) for one in index.chain(row)] == chain[::-1]
            rows = index.match(space, chain)
            assert len(rows) == index.matched(space, chain) == model.matched(space, chain)
            assert [index.key(one) for one in rows] == chain[: len(rows)]
        for number in range(12):
            key = key_of(number)
            assert index.elsewhere(space, key) == model.elsewhere(space, key)
            if key in blocks and blocks[key].state == "visible":
                continue
            for parent in (None, *(key for key, block in blocks.items() if block.state == "visible")):
                row = index.find(space, parent) if parent else NO_ROW
                assert index.why_not(space, key, row) == model.why_not(space, key, parent)
    assert index.visible_blocks() == sum(index.visible_blocks(space) for space in range(len(TENANTS)))


# One by one -----------------------------------------------------------------------------------------------------------


def chain_in(index: PrefixIndex, space: int, numbers: range) -> list[int]:
    rows: list[int] = []
    for number in numbers:
        rows.append(index.insert(space, key_of(number), rows[-1] if rows else NO_ROW))
        index.publish(rows[-1])
    return rows


# What a block costs ---------------------------------------------------------------------------------------------------

BLOCKS = 200_000


@pytest.mark.slow
def test_two_hundred_thousand_blocks_cost_at_most_300_bytes_each() -> None:
    names = np.random.default_rng(1).integers(0, 256, (BLOCKS, 32), dtype=np.uint8)
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex()
    index.add_namespace(b"t")
    row = NO_ROW
    for number in range(BLOCKS):
        row = index.insert(0, names[number].tobytes(), row if number % 100 else NO_ROW)
        index.publish(row)
    tracked = len(gc.get_objects())
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.visible_blocks() == BLOCKS
    assert used / BLOCKS <= 300, f"{used / BLOCKS:.0f} bytes per block"
    del index
    assert tracked - len(gc.get_objects()) < 100, "blocks are no work for the garbage collector"


def test_rows_are_used_again() -> None:
    index = PrefixIndex()
    index.add_namespace(b"t")
    highest = 0
    for turn in range(20):
        rows = chain_in(index, 0, range(turn * 10, turn * 10 + 10))
        highest = max(highest, *rows)
        for row in reversed(rows):
            index.remove(row)
    assert highest < 10
    index.check()


# Many at once ---------------------------------------------------------------------------------------------------------


def column(values: list[int]) -> Any:
    return np.array(values, np.int64)


@given(
    parents=st.lists(st.integers(-1, 30), max_size=31),
    stored=st.integers(0, 31),
    cut=st.integers(1, 8),
    gone=st.sets(st.integers(0, 30), max_size=3),
)
@settings(max_examples=150)
def test_loading_gives_the_chains_that_inserting_gives(
    parents: list[int], stored: int, cut: int, gone: set[int]
) -> None:
    """The first blocks of a forest are inserted, the others loaded, some rows having been used before."""
    forest = {block: min(parent, block - 1) for block, parent in enumerate(parents)}  # -1: a first block
    keys = {block: b"%032d" % block for block in forest}
    depths: dict[int, int] = {}
    for block, parent in forest.items():
        depths[block] = depths[parent] + 1 if parent >= 0 else 0
    index, model = PrefixIndex(), PrefixIndex()
    namespace = index.add_namespace(b"t")
    model.add_namespace(b"t")
    for number in gone:  # leaves free rows behind
        index.remove(index.insert(namespace, b"%032d" % (1000 + number), NO_ROW))
    for block, parent in forest.items():
        for one in (model, index) if block < stored else (model,):
            row = one.insert(namespace, keys[block], one.find(namespace, keys[parent]) if parent >= 0 else NO_ROW, 7, 9)
            one.publish(row)
    found = [block for block in forest if block >= stored]
    assert not index.knows_any(namespace, [keys[block] for block in found])
    for at in range(0, len(found), cut):
        batch = found[at : at + cut]
        count = len(batch)
        rows = index.load(
            namespace,
            [keys[block] for block in batch],
            column([depths[block] for block in batch]),
            column([7] * count),
            column([9] * count),
        )
        above = [keys[forest[block]] if forest[block] >= 0 else b"" for block in batch]
        index.link(rows, column([index.find(namespace, key) for key in above]))
        index.check()
    for block, key in keys.items():
        mine, theirs = index.find(namespace, key), model.find(namespace, key)
        assert index.children(mine) == model.children(theirs) and index.hint(mine) == (7, 9)
        assert [index.key(row) for row in index.chain(mine)] == [keys[one] for one in _up(forest, block)]
    assert stored == 0 or not forest or index.knows_any(namespace, [b"?" * 32, keys[0]])
    for block in reversed(forest):
        index.remove(index.find(namespace, keys[block]))
    index.check()


def test_a_key_is_loaded_once() -> None:
    index = PrefixIndex()
    namespace = index.add_namespace(b"t")
    zeros = column([0])
    index.load(namespace, [b"a" * 32], zeros, zeros, zeros)
    index.insert(namespace, b"b" * 32, NO_ROW)
    for key in (b"a" * 32, b"b" * 32):
        with pytest.raises(AssertionError):
            index.load(namespace, [key], zeros, zeros, zeros)


def _up(forest: dict[int, int], block: int) -> list[int]:
    """A block and its ancestors."""
    chain = []
    while block >= 0:
        chain.append(block)
        block = forest[block]
    return chain


def test_each_tenant_has_as_many_evicted_keys_remembered_until_it_is_gone() -> None:
    index = PrefixIndex(forgotten_limit=10)
    for tenant in (b"mine", b"theirs", b"mine"):
        index.add_namespace(tenant)
    for number in range(4):
        index.remove(*chain_in(index, 0, range(number, number + 1)), remember=True)
    for number in range(100):
        index.remove(*chain_in(index, 1, range(number, number + 1)), remember=True)
    assert [index.why_not(0, key_of(number), NO_ROW) for number in range(4)] == [TierMiss.EVICTED] * 4
    assert index.remembered == {b"mine": 4, b"theirs": 10}
    for number in range(10, 19):  # of another namespace of the same tenant
        index.remove(*chain_in(index, 2, range(number, number + 1)), remember=True)
    found = [index.why_not(0, key_of(number), NO_ROW) for number in range(4)]
    assert found == [TierMiss.NEVER_SEEN] * 3 + [TierMiss.EVICTED]
    index.forget(b"theirs")
    index.check()
    assert index.remembered == {b"mine": 10} and index.why_not(1, key_of(99), NO_ROW) is TierMiss.NEVER_SEEN
