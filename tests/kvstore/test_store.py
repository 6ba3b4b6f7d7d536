"""The store behind the door: what happens when calls meet that have to share the same blocks, slots and pins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstore import Limits, MissReason
from kvstore.block.identity import KeyRing
from kvstore.client.handle import NamespaceHandle
from kvstore.core.rows.index import PrefixIndex
from kvstore.core.store import Store
from kvstore.core.table import BlockTable
from kvstore.protocol.replies import ReserveReply
from tiering.dram.extents import Extent, ExtentPool
from tiering.dram.mover import FrameCopy, MoveDone, Mover
from tiering.dram.tier import DramTier
from tiering.errors import TierUnavailable
from tiering.frame import HEADER_BYTES, digest
from tiering.policies.lru import LeafFirstLru
from tiering.residency import Pins, Residency
from workbench import KIB, Bench, FakeClock, bench, blank_pages, ids, random_pages, same_tokens, small_layout

FRAME = 12 * KIB
PER_EXTENT = 5


class WatchedMover(Mover):
    """The real mover, with something happening while it copies."""

    def __init__(self, dram: DramTier, ring: KeyRing) -> None:
        super().__init__(dram, ring)
        self.meanwhile: Callable[[], object] = lambda: None

    def run(self, copies: Sequence[FrameCopy]) -> list[MoveDone]:
        results = super().run(copies)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return results


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
    """A bench whose mover and memory can be watched. Two extents of five small frames each, unless said otherwise."""

    def __init__(self, extents: int = 2, limits: Limits | None = None) -> None:
        ring, clock = KeyRing(), FakeClock()
        self.pool = ScarcePool(extents * 64 * KIB)
        dram = DramTier(self.pool)
        self.mover = WatchedMover(dram, ring)
        blocks = BlockTable(PrefixIndex(100), Residency(LeafFirstLru(), Pins()), dram, ring)
        store = Store(blocks, clock, limits or Limits(pinned_fraction=1.0))
        store._room._mover = self.mover
        super().__init__(store, clock, ring)


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


def test_what_is_aborted_never_was() -> None:
    a = bench()
    ns = a.namespace()
    reply = reserve(a, ns, 3)
    a.store.abort(reply.reservation)
    a.store.abort(reply.reservation)
    assert a.store.usage().dram.reserved == 0 and a.store.usage().reservations == 0
    assert a.store.commit(reply.reservation, 0, 0, []) == 0
    assert ns.match(ids(192)).reason is MissReason.ABSENT
    a.store.check()


def test_more_than_was_reserved_is_a_bug() -> None:
    a = bench()
    ns = a.namespace()
    reply = reserve(a, ns, 1)
    with pytest.raises(AssertionError, match="more blocks than were reserved"):
        a.store.commit(reply.reservation, 0, 0, [[bytes(16)] * 2] * 2)
    with pytest.raises(AssertionError, match="in their order"):
        a.store.commit(reply.reservation, 0, 1, [])


def test_a_block_that_is_being_stored_keeps_its_chain() -> None:
    a = bench()
    ns = a.namespace()
    put(ns, 2)
    reply = reserve(a, ns, 3)
    assert (reply.present, reply.blocks) == (2, [2])
    assert a.store.evict(10) == 0, "the way to it must not go"
    assert commit(a, reply) == 1
    assert a.store.evict(10) == 3
    a.store.check()


def test_a_quarantined_block_is_filled_by_one_put_at_a_time() -> None:
    a = bench()
    ns = a.namespace()
    put(ns, 3)
    with ns.lease(ns.match(ids(192))) as lease:
        a.store.spans([lease.reply.places[0][1]])[0].view[5000] ^= 1
        ns.get(lease, blank_pages(ns.layout, 3))
    first = reserve(a, ns, 3)
    assert (first.present, first.blocks) == (1, [1])
    second = reserve(a, ns, 3)
    assert (second.reservation, second.stopped_at, second.reason) == (0, 1, MissReason.IN_FLIGHT)
    a.store.check()
    a.store.abort(first.reservation)
    a.store.check()
    assert ns.match(ids(192)).reason is MissReason.CORRUPT
    assert put(ns, 3)[1].stored == 1 and ns.match(ids(192)).blocks == 3
    a.store.check()
    assert a.store.usage().pinned_bytes == 0


# Dropping a namespace -------------------------------------------------------------------------------------------------


def test_dropping_forgets_all_of_a_namespace_and_nothing_of_another() -> None:
    a = bench()
    mine, other = a.namespace(), a.namespace(model="other")
    put(mine, 7)
    put(mine, 2, 5000)
    put(other, 3)
    assert a.store.drop(mine.number) == 9
    assert mine.match(ids(448)).reason is MissReason.EVICTED and other.match(ids(192)).blocks == 3
    assert a.store.usage().dram.taken_bytes == 64 * KIB, "its extents went back"
    assert a.store.drop(mine.number) == 0
    assert put(mine, 7)[1].stored == 7
    a.store.check()


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


@pytest.mark.parametrize("drops", [1, 2, 3])
def test_a_producer_finishes_what_was_dropped_under_it(drops: int) -> None:
    """Also when its namespace is dropped again: its rows belong to somebody else by then."""
    a = bench()
    ns = a.namespace()
    put(ns, 1)
    reply = reserve(a, ns, 3)
    for turn in range(drops):
        assert a.store.drop(ns.number) == (1 if turn < 2 else 0)
        a.store.check()
        if turn == 0:
            put(ns, 1, 7000)
    assert commit(a, reply) == 0
    assert a.store.usage().dram.reserved == 2
    a.store.abort(reply.reservation)
    assert a.store.usage().dram.reserved == 0
    assert ns.match(ids(64, 7000)).blocks == (1 if drops == 1 else 0)
    a.store.check()


def test_dropping_under_a_refill() -> None:
    a = bench()
    ns = a.namespace()
    put(ns, 3)
    with ns.lease(ns.match(ids(192))) as lease:
        a.store.spans([lease.reply.places[0][1]])[0].view[5000] ^= 1
        ns.get(lease, blank_pages(ns.layout, 3))
    reply = reserve(a, ns, 4)
    assert reply.blocks == [1, 3]
    a.store.drop(ns.number)
    a.store.check()
    a.store.abort(reply.reservation)
    a.store.check()
    assert a.store.usage().dram.capacity == 0 and a.store.usage().pinned_bytes == 0


# Extents that are emptied ---------------------------------------------------------------------------------------------


def cold(a: Watched) -> tuple[NamespaceHandle, Any]:
    """Two extents of one namespace with five blocks of one prompt between them, so that one can be emptied."""
    ns = a.namespace()
    put(ns, 3, 50_000)
    pages, _ = put(ns, 7)
    assert a.store.usage().dram.taken_bytes == 128 * KIB and not a.store.usage().dram.free
    a.store.evict(3)  # the older prompt
    with ns.lease(ns.match(ids(448)), first_token=448):
        pass
    a.store.evict(2)
    assert a.store.usage().dram.used == 5
    return ns, pages


def test_memory_goes_to_a_namespace_that_needs_it_without_losing_a_block() -> None:
    a = Watched()
    ns, pages = cold(a)
    other = a.namespace(model="other")
    assert put(other, 2)[1].stored == 2
    counters = a.store.usage().counters
    assert counters["reclaimed_extents"] == 1 and counters["moved_frames"] > 0 and counters["evicted_blocks"] == 5
    into = blank_pages(ns.layout, 5)
    with ns.lease(ns.match(ids(320))) as lease:
        assert ns.get(lease, into).tokens == 320
    assert same_tokens(into, pages, range(320))
    a.store.check()


def test_a_lease_that_is_taken_while_its_blocks_move() -> None:
    a = Watched()
    ns, pages = cold(a)
    leases: list[Any] = []
    a.mover.meanwhile = lambda: (leases.append(ns.lease(ns.match(ids(320)))), a.store.check())
    other = a.namespace(model="other")
    result = put(other, 2)[1]
    assert result.reason is MissReason.PINNED_FULL and result.stored == 0, "the reader was faster"
    assert a.store.usage().pinned_bytes == 5 * FRAME
    a.store.check()
    into = blank_pages(ns.layout, 5)
    assert ns.get(leases[0], into).tokens == 320 and same_tokens(into, pages, range(320))
    leases[0].release()
    assert a.store.usage().pinned_bytes == 0
    assert put(other, 2)[1].stored == 2
    a.store.check()


def test_a_lease_that_also_runs_out_while_its_blocks_move() -> None:
    """Its reader may still copy: the frames must not move away under it."""
    a = Watched(limits=Limits(pinned_fraction=1.0, lease_seconds=5))
    ns, pages = cold(a)
    leases: list[Any] = []

    def meanwhile() -> None:
        leases.append(ns.lease(ns.match(ids(320))))
        a.clock.advance(6)
        a.store.evict(0)
        a.store.check()

    a.mover.meanwhile = meanwhile
    put(a.namespace(model="other"), 1)
    into = blank_pages(ns.layout, 5)
    assert ns.get(leases[0], into).tokens == 320 and same_tokens(into, pages, range(320))
    a.store.check()
    leases[0].release()
    a.store.check()
    assert a.store.usage().dram.zombie == 0


def test_a_store_that_closes_while_blocks_move() -> None:
    a = Watched()
    cold(a)
    a.mover.meanwhile = a.store.close
    assert put(a.namespace(model="other"), 2)[1].reason is MissReason.DISABLED
    assert a.store.usage().dram.taken_bytes == 0


def test_dropping_waits_for_what_moves() -> None:
    a = Watched()
    ns, _ = cold(a)
    dropped: list[int] = []
    dropper = threading.Thread(target=lambda: dropped.append(a.store.drop(ns.number)))

    def meanwhile() -> None:
        dropper.start()
        dropper.join(0.1)
        assert not dropped

    a.mover.meanwhile = meanwhile
    put(a.namespace(model="other"), 1)
    dropper.join(30)
    assert dropped == [5]
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


def test_many_threads_over_few_slots() -> None:
    """Readers and writers of three namespaces on memory for half of it: what is read is what was written."""
    a = bench(dram=1 << 20, limits=Limits(pinned_fraction=0.5))
    spaces = [a.namespace(model=f"model-{number}") for number in range(3)]
    prompts = [
        (ns, start, random_pages(ns.layout, 6, seed=start)) for ns in spaces for start in range(0, 60_000, 10_000)
    ]
    stop, failures = threading.Event(), []

    def work(seed: int) -> None:
        try:
            for turn in range(60):
                ns, start, pages = prompts[(seed * 7 + turn * 5) % len(prompts)]
                into = blank_pages(ns.layout, 6)
                with ns.lease(ns.match(ids(384, start))) as lease:
                    loaded = ns.get(lease, into)
                assert loaded.reason is None and loaded.account.asked == 384
                assert same_tokens(into, pages, range(loaded.tokens))
                if loaded.tokens < 384:
                    ns.put(ids(384, start), pages)
                if turn % 20 == 19:
                    a.store.check()
        except BaseException as error:
            failures.append(error)
        finally:
            stop.set()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures[0]
    a.store.check()
    usage = a.store.usage()
    assert usage.leases == usage.reservations == usage.pinned_bytes == usage.dram.zombie == usage.dram.reserved == 0
    assert usage.counters["evicted_blocks"] > 0


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
