"""The store behind the door: what happens when calls meet that have to share the same blocks, slots and pins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore import Limits, MissReason
from kvstore.block.identity import KeyRing
from kvstore.client.handle import NamespaceHandle
from kvstore.core.index import PrefixIndex
from kvstore.core.store import Store
from kvstore.core.table import BlockTable
from kvstore.protocol.messages import ReserveReply
from tiering.dram.extents import Extent, ExtentPool
from tiering.dram.tier import DramTier
from tiering.errors import TierUnavailable
from tiering.frame import HEADER_BYTES, digest
from tiering.policies.lru import LeafFirstLru
from tiering.residency import Pins, Residency
from waiting import FakeClock
from workbench import KIB, Bench, bench, blank_pages, ids, random_pages, same_tokens, small_layout

FRAME = 12 * KIB
PER_EXTENT = 5


class ScarcePool(ExtentPool):
    """The real pool on a machine that may have no memory left, and with something happening while memory is made."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes, 64 * KIB)
        self.is_empty = False
        self.meanwhile: Callable[[], object] = lambda: None

    def create(self) -> Extent:
        if self.is_empty:
            raise TierUnavailable("no shared memory: Cannot allocate memory")
        extent = super().create()
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return extent


class Watched(Bench):
    """A bench whose memory can be watched. Two extents of five small frames each, unless said otherwise."""

    def __init__(self, extents: int = 2) -> None:
        ring, clock = KeyRing(), FakeClock()
        self.pool = ScarcePool(extents * 64 * KIB)
        dram = DramTier(self.pool)
        blocks = BlockTable(PrefixIndex(100), Residency(LeafFirstLru(), Pins()), dram, ring)
        super().__init__(Store(blocks, clock, Limits(pinned_fraction=1.0)), clock, ring)


def put(ns: NamespaceHandle, blocks: int, start: int = 0) -> Any:
    pages = random_pages(ns.layout, blocks, seed=start)
    return pages, ns.put(ids(64 * blocks, start), pages)


def reserve(a: Bench, ns: NamespaceHandle, blocks: int, start: int = 0) -> ReserveReply:
    return a.store.reserve(ns.number, ns.match(ids(64 * blocks, start)).keys, 0, 0, None)


def commit(a: Bench, reply: ReserveReply, part: int = 0, count: int | None = None, first: int = 0) -> int:
    """Fill the next blocks of a part of the small layout with zeros and commit them."""
    places = reply.places[part][first : None if count is None else first + count]
    for place in places:
        a.store.spans([place])[0].view[HEADER_BYTES:] = bytes(FRAME - HEADER_BYTES)
    return a.store.commit(reply.reservation, part, first, [[digest(bytes(4 * KIB))] * 2 for _ in places])


# A put in steps -------------------------------------------------------------------------------------------------------


def test_blocks_become_visible_one_after_the_other() -> None:
    a = bench()
    ns = a.namespace()
    reply = reserve(a, ns, 3)
    assert (reply.present, reply.blocks, len(reply.places[0])) == (0, [0, 1, 2], 3)
    assert commit(a, reply, count=1) == 1 and ns.match(ids(192)).blocks == 1
    assert ns.match(ids(192)).reason is MissReason.IN_FLIGHT
    assert commit(a, reply, count=2, first=1) == 3 and ns.match(ids(192)).blocks == 3
    a.store.abort(reply.reservation)
    assert ns.match(ids(192)).blocks == 3, "what is visible stays"
    a.store.check()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_is_readable_of_a_put_that_was_given_up_is_evicted_as_a_chain(is_cancelled: bool) -> None:
    """From its end, before what was stored later: an ancestor stands nearer to the recent end than its descendants."""
    a = bench()
    ns = a.namespace()
    for start in (0, 1000):
        reply = reserve(a, ns, 4, start)
        for first in range(3):
            assert commit(a, reply, count=1, first=first) == first + 1
        if is_cancelled:
            a.store.cancel(reply.reservation)
        a.store.abort(reply.reservation)
    assert a.store.evict(3) == 3
    assert (ns.match(ids(192)).blocks, ns.match(ids(192, 1000)).blocks) == (0, 3)
    a.store.check()


def test_a_block_is_visible_when_its_whole_family_is_committed() -> None:
    a = bench()
    ns = a.namespace(small_layout(layer_shards=2, head_dim=16))
    reply = reserve(a, ns, 2)
    assert len(reply.places) == 2
    for part in range(2):
        for place in reply.places[part]:
            a.store.spans([place])[0].view[HEADER_BYTES:] = bytes(8 * KIB)
    one = [[digest(bytes(8 * KIB))]]
    assert a.store.commit(reply.reservation, 0, 0, one * 2) == 0 and ns.match(ids(128)).blocks == 0
    assert a.store.commit(reply.reservation, 1, 0, one) == 1 and ns.match(ids(128)).blocks == 1
    a.store.abort(reply.reservation)
    assert ns.match(ids(128)).blocks == 1 and a.store.usage().dram.reserved == 0
    a.store.check()


def test_more_than_was_reserved_is_a_bug() -> None:
    a = bench()
    ns = a.namespace()
    reply = reserve(a, ns, 1)
    with pytest.raises(AssertionError, match="more blocks than were reserved"):
        a.store.commit(reply.reservation, 0, 0, [[bytes(16)] * 2] * 2)
    with pytest.raises(AssertionError, match="in their order"):
        a.store.commit(reply.reservation, 0, 1, [])


# Dropping a namespace -------------------------------------------------------------------------------------------------


def test_a_reader_finishes_what_was_dropped_under_it() -> None:
    a = bench()
    ns = a.namespace()
    pages, _ = put(ns, 3)
    lease = ns.lease(ns.match(ids(192)))
    assert a.store.drop(ns.number) == 3
    put(ns, 70, 90_000)
    into = blank_pages(ns.layout, 3)
    assert ns.get(lease, into).tokens == 192 and same_tokens(into, pages, range(192))
    a.store.check()
    lease.release()
    assert a.store.usage().dram.zombie == 0
    a.store.check()


# Memory that does not come --------------------------------------------------------------------------------------------


def test_a_machine_without_memory_stores_what_fits() -> None:
    a = Watched(extents=4)
    ns = a.namespace()
    a.pool.meanwhile = lambda: setattr(a.pool, "is_empty", True)
    assert put(ns, 7)[1].stored == PER_EXTENT
    assert put(ns, 7)[1].reason is MissReason.TIER_DOWN
    a.pool.is_empty = False
    assert put(ns, 7)[1].stored == 2
    a.store.check()


def test_a_machine_without_memory_still_makes_room_by_evicting() -> None:
    """Nothing is refused for space while something evictable is there, whoever's it is."""
    a = Watched(extents=8)
    ns, other = a.namespace(), a.namespace(model="other")
    put(ns, PER_EXTENT)
    put(other, 2 * PER_EXTENT)
    a.pool.is_empty = True
    assert put(ns, 3, 40_000)[1].stored == 3
    assert ns.match(ids(192)).blocks == 2, "the oldest went, from their end"
    third = a.namespace(model="third")
    assert put(third, 1)[1].reason is MissReason.TIER_DOWN, "an extent was given back, but the machine kept it"
    assert a.store.usage().dram.taken_bytes == 2 * 64 * KIB, "no more of them go than the one"
    a.pool.is_empty = False
    assert put(third, 1)[1].stored == 1
    a.store.check()


def test_memory_that_comes_after_closing_goes_back() -> None:
    a = Watched()
    ns = a.namespace()
    a.pool.meanwhile = a.store.close
    assert put(ns, 1)[1].reason is MissReason.DISABLED
    assert a.pool.taken_bytes == 0


def test_a_bounded_number_of_steps() -> None:
    a = bench(limits=Limits(room_steps=2))
    ns = a.namespace()
    _, result = put(ns, 20)
    assert (result.stored, result.reason) == (PER_EXTENT, MissReason.DEADLINE), "grow, use it, grow: that was two"
    a.store.check()


# Everybody at once ----------------------------------------------------------------------------------------------------


def test_a_block_moves_to_a_copy_of_its_own_frame_only() -> None:
    """Another block's frame is sound as well, and would be read under this one's name."""
    a = bench()
    ns = a.namespace()
    pages = random_pages(ns.layout, 3)
    assert ns.put(ids(192), pages).stored == 3
    blocks = a.store.blocks
    rows = blocks.index.match(ns.number, ns.match(ids(192)).keys)
    for _ in range(2):  # there, and to the place where it was
        (target,) = blocks.dram.reserve(blocks.spaces[ns.number].classes[0], 1)
        source = blocks.residency.place(rows[1], 0)
        for row, is_own in ((rows[0], False), (rows[2], False), (rows[1], True)):
            blocks.dram.reserved_span(target).view[:] = blocks.dram.committed_span(blocks.residency.place(row, 0)).view
            assert blocks.relocate(rows[1], 0, target) is is_own
            assert blocks.residency.place(rows[1], 0) == (target if is_own else source)
        a.store.check()
    with ns.lease(ns.match(ids(192))) as lease:
        blank = blank_pages(ns.layout, 3)
        assert ns.get(lease, blank).tokens == 192
    assert same_tokens(pages, blank, range(192))
