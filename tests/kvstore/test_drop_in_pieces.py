"""A namespace is dropped, or blocks are evicted, in pieces: how much at a time, and what may come in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.block.account import MissReason
from kvstore.block.errors import StoreClosed
from kvstore.client.handle import NamespaceHandle
from kvstore.core import namespaces, reservations, room
from workbench import Bench, bench, ids, random_pages, small_layout

from .test_long_chains import watched

BLOCKS, PARTS = 24, 4
ALL_TOKENS = ids(64 * BLOCKS)


def stocked() -> tuple[Bench, NamespaceHandle, list[bytes]]:
    a = bench(dram=4 << 20)
    handle = a.namespace(small_layout(layers=4, kv_heads=2, layer_shards=2, head_shards=2))
    assert len(handle.layout.parts) == PARTS
    assert handle.put(ALL_TOKENS, random_pages(handle.layout, BLOCKS)).stored == BLOCKS
    return a, handle, handle.hashed(ALL_TOKENS).keys


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks are dropped at a time, or evicted, one extent is given back, and 16 rows are looked at."""
    for module in (namespaces, reservations):
        monkeypatch.setattr(module, "ABORTED_PLACES", 3 * PARTS)
    monkeypatch.setattr(room, "EVICTED_BLOCKS", 3)
    monkeypatch.setattr(room, "RETIRED_BYTES", 1)
    monkeypatch.setattr(namespaces, "SCANNED_ROWS", 16)


def turns(a: Bench, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, cost: Callable[[Any], int]) -> list[int]:
    """What was done in each turn with the lock."""
    done = [0]
    really = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        result = really(*args, **options)
        done[-1] += cost(result)
        return result

    monkeypatch.setattr(owner, name, counted)
    watched(a.store, lambda count: done.append(0))
    return done


def test_so_many_blocks_are_dropped_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    a, handle, _keys = stocked()
    done = turns(a, monkeypatch, a.store.blocks, "drop", lambda _: 1)
    assert a.store.drop(handle.number) == BLOCKS
    assert max(done) == 3 and sum(done) == BLOCKS
    assert a.store.usage().dram.taken_bytes == 0
    a.store.check()


def test_so_many_extents_are_given_back_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    a, handle, _keys = stocked()
    extents = a.store.usage().dram.taken_bytes // a.store.blocks.dram.extent_bytes
    assert extents > 2
    done = turns(a, monkeypatch, a.store.blocks.dram, "retire", lambda _: 1)
    assert a.store.drop(handle.number) == BLOCKS
    assert max(done) == 1 and sum(done) == extents


def test_so_many_blocks_are_evicted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    a, _handle, _keys = stocked()
    done = turns(a, monkeypatch, a.store.blocks, "evict_worst", lambda gone: gone)
    assert a.store.evict(10) == 10 and max(done) == 3 and sum(done) == 10
    done.append(0)
    assert a.store.evict(1000) == BLOCKS - 10 and max(done) == 3
    a.store.check()


def test_nothing_of_it_is_found_or_stored_from_the_first_piece_on() -> None:
    a, handle, keys = stocked()
    seen = []

    def meanwhile(count: int) -> None:
        if a.store.blocks.index.visible_blocks(handle.number) < BLOCKS:
            match = a.store.match(handle.number, keys)
            lease = a.store.lease(handle.number, keys, 0, 0)
            reply = a.store.reserve(handle.number, keys, 0, 0, None)
            seen.append((match.blocks, reply.present, lease.lease, reply.reservation))
            assert match.reason is lease.reason is reply.reason is MissReason.DISABLED

    watched(a.store, meanwhile)
    assert a.store.drop(handle.number) == BLOCKS
    assert len(seen) >= BLOCKS // 3 and set(seen) == {(0, 0, 0, 0)}
    assert handle.put(ALL_TOKENS, random_pages(handle.layout, BLOCKS)).stored == BLOCKS
    assert a.store.match(handle.number, keys).blocks == BLOCKS


def test_rows_that_were_evicted_meanwhile_and_are_others_now_stay() -> None:
    a, handle, keys = stocked()
    other = a.namespace(handle.layout, model="other")
    tokens = ids(64 * 6, 5000)
    stored = []

    def meanwhile(count: int) -> None:
        if not stored and a.store.blocks.index.visible_blocks(handle.number) < BLOCKS:
            stored.append(0)
            a.store.blocks.evict_worst(6)
            stored[0] = other.put(tokens, random_pages(other.layout, 6)).stored

    watched(a.store, meanwhile)
    assert a.store.drop(handle.number) == BLOCKS
    assert stored == [6] and a.store.match(other.number, other.hashed(tokens).keys).blocks == 6
    assert a.store.match(handle.number, keys).blocks == 0
    a.store.check()


def test_a_store_that_is_closed_meanwhile_says_so() -> None:
    a, handle, _ = stocked()

    def meanwhile(count: int) -> None:
        if a.store.blocks.index.visible_blocks(handle.number) < BLOCKS:
            a.store.close()

    watched(a.store, meanwhile)
    with pytest.raises(StoreClosed):
        a.store.drop(handle.number)
