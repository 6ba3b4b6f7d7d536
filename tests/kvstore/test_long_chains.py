"""Leases of chains so long that the store works on a piece at a time, and others have its lock in between.

The pieces are made small here, and what others do in between is done at exactly that point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.block.account import HitTier, MissReason
from kvstore.client.handle import NamespaceHandle
from kvstore.config import Limits
from kvstore.core import leases, table
from kvstore.core.store import Store
from kvstore.protocol.messages import LeaseReply
from simulation.two_tiers import put
from tiering.tier import extent_of, slot_of
from workbench import Bench, bench, ids, random_pages

from .test_between_tiers import Place, Prompt

BLOCKS = 20
PIECE = 3


class Gaps(threading.Condition):
    """The store's condition: whoever waits at it gives way, and then `meanwhile` is done, once each time."""

    def __init__(self, lock: threading.Lock, meanwhile: Callable[[int], object]) -> None:
        super().__init__(lock)
        self.meanwhile = meanwhile
        self.count = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.count += 1
        self._lock.release()  # type: ignore[attr-defined]
        try:
            self.meanwhile(self.count)
        finally:
            self._lock.acquire()  # type: ignore[attr-defined]
        return True


def watched(store: Store, meanwhile: Callable[[int], object] = lambda count: None) -> Gaps:
    gaps = store.moves_done = Gaps(store.lock, meanwhile)
    return gaps


def cut_into(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (leases, table):
        monkeypatch.setattr(module, "LOCKED_BLOCKS", piece)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(PIECE, monkeypatch)


def stocked(**options: Any) -> tuple[Bench, NamespaceHandle, list[bytes]]:
    a = bench(dram=4 << 20, **options)
    handle = a.namespace()
    assert handle.put(ids(BLOCKS * 64), random_pages(handle.layout, BLOCKS)).stored == BLOCKS
    return a, handle, handle.hashed(ids(BLOCKS * 64)).keys


def said(reply: LeaseReply) -> tuple[object, ...]:
    """All of it but what each store draws: numbers of leases and extents, and where generations begin."""
    extents: dict[int, int] = {}
    places = [
        [(extents.setdefault(extent_of(place), len(extents)), slot_of(place)) for place in column]
        for column in reply.places
    ]
    return (
        bool(reply.lease),
        reply.first_block,
        reply.blocks,
        places,
        [generation - reply.generations[0] for generation in reply.generations],
        reply.tiers,
        reply.reason,
        reply.detail,
    )


@pytest.mark.parametrize("asked", [4, 6, BLOCKS + 5])
@pytest.mark.parametrize("first_block", [0, 3, 5, 20])
@pytest.mark.parametrize("fraction", [1.0, 0.02])
def test_it_says_the_same_in_pieces(
    asked: int, first_block: int, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves the same behind: who is evicted first, and nothing once it is released."""
    told = []
    for piece in (1 << 20, PIECE):
        cut_into(piece, monkeypatch)
        a, handle, _ = stocked(limits=Limits(pinned_fraction=fraction))
        handle.put(ids(640, 5000), random_pages(handle.layout, 10))
        gaps = watched(a.store)
        keys = handle.hashed(ids((BLOCKS + 5) * 64)).keys[:asked]
        reply = a.store.lease(handle.number, keys, min(first_block, asked), 0)
        assert (gaps.count > 0) == (piece == PIECE)
        for column, digests in zip(reply.places, reply.header_digests, strict=True):
            assert len(column) == len(digests) == reply.blocks - reply.first_block
        rows = a.store.blocks.index.match(handle.number, keys)[reply.first_block : reply.blocks]
        for part, digests in enumerate(reply.header_digests):
            assert list(digests) == list(a.store.blocks.residency.header_digests_of(rows, part))
        a.store.check()
        order = list(a.store.blocks.residency.policy.victims())
        a.store.release(reply.lease)
        a.store.check()
        usage = a.store.usage()
        assert (usage.leases, usage.pinned_bytes, a.store.leases.promoting) == (0, 0, [])
        told.append((said(reply), order))
    assert told[0] == told[1]


def test_a_limit_that_bites_is_named(in_pieces: None) -> None:
    a, handle, keys = stocked(limits=Limits(pinned_fraction=0.02, leases=1))
    reply = a.store.lease(handle.number, keys, 0, 0)
    assert reply.reason is MissReason.PINNED_FULL and 0 < reply.blocks < BLOCKS
    assert f"at most {int(0.02 * (4 << 20))} bytes" in reply.detail and "limits.pinned_fraction" in reply.detail
    for asked in (keys, keys[:2]):
        refused = a.store.lease(handle.number, asked, 0, 0)
        assert (refused.lease, refused.reason) == (0, MissReason.PINNED_FULL) and "limits.leases" in refused.detail
    a.store.release(reply.lease)
    b, handle, keys = stocked(limits=Limits(tenant_leases=1))
    first = b.store.lease(handle.number, keys[:2], 0, 0)
    assert "limits.tenant_leases" in b.store.lease(handle.number, keys, 0, 0).detail
    b.store.release(first.lease)
    assert b.store.lease(handle.number, keys, 0, 0).blocks == BLOCKS


@pytest.mark.parametrize("gap", [1, 2, 3, 6, 8, 10, 14, 15, 17, 21])
@pytest.mark.parametrize("what", ["evict", "quarantine", "put", "lapse", "lease", "close", "interrupt"])
def test_whatever_others_do_in_between(gap: int, what: str, in_pieces: None) -> None:
    """What was pinned stays; what is said is so; nothing is left of it afterwards."""
    a, handle, keys = stocked()
    others = a.store.lease(handle.number, keys[:2], 0, 0)
    more: list[LeaseReply] = []

    def meanwhile(count: int) -> None:
        if count != gap:
            return
        a.store.check()
        if what == "evict":
            a.store.evict(1000)
        elif what == "quarantine":
            with a.store.lock:
                a.store.blocks.quarantine(a.store.blocks.index.find(handle.number, keys[10]))
        elif what == "put":
            handle.put(ids(640, 9000), random_pages(handle.layout, 10))
        elif what == "lapse":
            a.store.expire(others.lease)
        elif what == "lease":
            more.append(a.store.lease(handle.number, keys, 0, 0))
        elif what == "close":
            a.store.close()
        else:
            raise KeyboardInterrupt

    gaps = watched(a.store, meanwhile)
    reply = None
    try:
        reply = a.store.lease(handle.number, keys, 0, 0)
    except KeyboardInterrupt:
        assert what == "interrupt" and gaps.count == gap
    gaps.meanwhile = lambda count: None
    a.store.check()
    if reply is not None and reply.lease:
        assert all(len(column) == reply.blocks for column in (*reply.places, *reply.header_digests))
        assert reply.blocks == BLOCKS or reply.reason is not None
        rows = [a.store.blocks.index.find(handle.number, key) for key in keys[: reply.blocks]]
        if not a.store.closed:
            for row, place in zip(rows, reply.places[0], strict=True):
                if a.store.blocks.residency.place(row, 0) == place:  # a quarantined one has none
                    assert a.header_of(place).prefix_key == keys[rows.index(row)]
                else:
                    assert what == "quarantine" and row == rows[10]
            assert len(a.store.spans(reply.places[0])) == reply.blocks
    if what not in ("evict", "quarantine", "close", "interrupt"):
        assert reply is not None and (reply.blocks, reply.reason) == (BLOCKS, None)
    for one in (others, *more, *([reply] if reply is not None else [])):
        a.store.release(one.lease)
    if not a.store.closed:
        a.store.check()
        usage = a.store.usage()
        assert (usage.leases, usage.pinned_bytes, usage.dram.zombie) == (0, 0, 0)
    assert a.store.leases.promoting == []


def test_a_drop_waits_for_it(in_pieces: None) -> None:
    a, handle, keys = stocked()
    dropping = threading.Event()
    dropped: list[int] = []
    thread = threading.Thread(target=lambda: dropped.append(a.store.drop(handle.number)))

    def meanwhile(count: int) -> None:
        if count == 2:
            thread.start()
            while not a.store.blocks.dropping:
                pass
            dropping.set()

    watched(a.store, meanwhile)
    reply = a.store.lease(handle.number, keys, 0, 0)
    assert dropping.is_set() and reply.reason is MissReason.DISABLED and reply.blocks == 2 * PIECE
    a.store.release(reply.lease)
    thread.join(20)
    assert dropped == [BLOCKS]
    a.store.check()
    assert a.store.usage().pinned_bytes == 0


@pytest.mark.parametrize("above", [0, 4, 9])
def test_what_lies_below_is_brought_up_for_it(above: int, tmp_path: Path, in_pieces: None) -> None:
    """In DRAM up to there, and the rest on NVMe: each block is a hit of its tier; without time, what is in DRAM."""
    place = Place(tmp_path)
    chain = Prompt(tuple(range(9)))
    assert put(place.space, chain, "disk") is None
    keys = place.space.match(chain).keys
    place.restart()
    core, number = place.opened.core, place.space.handle.number
    if above:
        core.release(core.lease(number, keys[:above], 0, 60_000).lease)
    tiers = tuple(run for run in ((HitTier.DRAM, above), (HitTier.NVME, len(keys) - above)) if run[1])
    assert core.match(number, keys).tiers == tiers
    assert core.lease_at_once(number, keys, 0) is None
    now = core.lease(number, keys, 0, 0)
    assert (now.blocks, now.reason) == (above, MissReason.DEADLINE if above < len(keys) else None)
    core.release(now.lease)
    late = core.lease(number, keys, 0, 60_000)
    assert (late.blocks, late.reason, late.tiers) == (len(keys), None, tiers)
    core.release(late.lease)
    place.is_well()
    place.opened.close()


def test_a_put_of_a_long_chain_is_as_recent_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for piece in (1 << 20, PIECE):
        cut_into(piece, monkeypatch)
        a, handle, _ = stocked()
        handle.put(ids(640, 5000), random_pages(handle.layout, 10))
        longer = ids((BLOCKS + 4) * 64)
        assert handle.put(longer, random_pages(handle.layout, BLOCKS + 4)).stored == 4
        assert not a.store.blocks.refreshing
        a.store.check()
        victims = []
        while a.store.evict(1):
            victims.append(handle.match(longer).blocks)
        orders.append(victims)
    assert orders[0] == orders[1] and orders[0][0] == BLOCKS + 4
