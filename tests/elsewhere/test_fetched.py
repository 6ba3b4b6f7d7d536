"""Fetched blocks in a store whose clock stands still: how long they are kept, what they may take, and for whom they
make room."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from elsewhere.courier import PAYLOAD, block_bytes, chain
from kvstore.block.account import HitTier, MissReason
from kvstore.block.identity import KeyRing, Namespace, TenantKeys
from kvstore.config import DramConfig, Limits
from kvstore.core.store import Store
from kvstore.elsewhere.desk import GIVES_WAY_AT_ONCE, KEPT_SECONDS, SHARE_OF_DRAM, FetchedBlocks
from kvstore.node import build_store
from kvstore.service.dispatch import Parking
from waiting import FakeClock
from workbench import small_layout

BLOCK = block_bytes(PAYLOAD)
DRAM = 64 * 16 * BLOCK // 12 * 12  # a whole number of extents
SPACE = Namespace("fetched", small_layout(), "raw")


@dataclass
class Bench:
    store: Store
    clock: FakeClock
    number: int
    fetched: FetchedBlocks

    def put(self, blocks: int) -> tuple[list[bytes], int]:
        """An engine's, of a chain of its own; how many blocks of it are stored."""
        keys = chain(blocks)
        reply = self.store.reserve(self.number, keys, 0, 0, None)
        if not reply.reservation:
            return keys, 0
        return keys, self.store.commit(reply.reservation, 0, 0, [[bytes(16)] * 2] * len(reply.blocks))

    def fetch(self, keys: Sequence[bytes], tier: HitTier = HitTier.PEER) -> int:
        """A courier's; how many blocks of the chain are here then."""
        reply = self.store.reserve(self.number, keys, 0, 0, None, couriers=1)
        if reply.reservation:
            self.fetched.comes_from(reply.reservation, tier)
            self.store.commit(reply.reservation, 0, 0, [[bytes(16)] * 2] * len(reply.blocks))
        return reply.present + len(reply.blocks)

    def lease(self, keys: Sequence[bytes]) -> tuple[int, tuple[tuple[HitTier, int], ...], MissReason | None]:
        """As an engine does."""
        reply = self.store.lease(self.number, keys, 0, 0.0)
        if reply.lease:
            self.fetched.leased(reply.lease)
        return reply.lease, reply.tiers, reply.reason


def bench_of(dram_bytes: int, **limits: float) -> Bench:
    keys, clock = TenantKeys.derive(secrets.token_bytes(32)), FakeClock()
    store = build_store(DramConfig.of(dram_bytes, None, 1 << 40), Limits(**limits), KeyRing([keys]), clock)
    store.fetched = fetched = FetchedBlocks(store, Parking(store))
    number = store.open_namespace(keys, SPACE, PAYLOAD).number
    return Bench(store, clock, number, fetched)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = bench_of(3 << 20)
    yield bench
    bench.store.check()
    bench.store.close()


EIGHTH = int(SHARE_OF_DRAM * (3 << 20)) // BLOCK


def test_a_fetched_block_is_kept_for_a_second_and_marked_until_a_lease_has_it(bench: Bench) -> None:
    keys = chain(4)
    assert bench.fetch(keys[:2]) == 2 and bench.fetch(keys, HitTier.REMOTE) == 4
    both = ((HitTier.PEER, 2), (HitTier.REMOTE, 2))
    assert bench.store.match(bench.number, keys).tiers == both
    assert bench.store.usage().pinned_bytes == 4 * BLOCK and bench.store.usage().leases == 0
    bench.clock.advance(KEPT_SECONDS - 0.001)
    bench.store.expire_due()
    assert bench.fetched.kept_bytes == 4 * BLOCK
    bench.clock.advance(0.001)
    assert bench.store.runs_out_at <= bench.clock.monotonic
    bench.store.expire_due()
    assert bench.fetched.kept_bytes == bench.store.usage().pinned_bytes == 0
    lease, tiers, _ = bench.lease(keys)
    assert tiers == both, "it is still the first that has them"
    bench.store.release(lease)
    assert bench.store.match(bench.number, keys).tiers == ((HitTier.DRAM, 4),)
    assert bench.lease(keys)[1] == ((HitTier.DRAM, 4),)


def test_a_lease_ends_the_pin_and_keeps_its_own(bench: Bench) -> None:
    keys = chain(3)
    bench.fetch(keys)
    lease, _, _ = bench.lease(keys[:2])
    assert bench.fetched.kept_bytes == BLOCK and bench.store.usage().pinned_bytes == 3 * BLOCK
    bench.store.check()
    bench.store.release(lease)
    assert bench.store.usage().pinned_bytes == BLOCK


def test_slots_and_kept_blocks_come_to_an_eighth(bench: Bench) -> None:
    keys = chain(3 * EIGHTH)
    first = bench.store.reserve(bench.number, keys, 0, 0, None, couriers=1)
    assert len(first.blocks) == EIGHTH and first.stopped_at == EIGHTH and first.reason is MissReason.BUSY
    other = chain(2)
    none = bench.store.reserve(bench.number, other, 0, 0, None, couriers=1)
    assert (none.reservation, none.stopped_at, none.reason) == (0, 0, MissReason.BUSY)
    bench.store.commit(first.reservation, 0, 0, [[bytes(16)] * 2] * EIGHTH)
    assert bench.fetch(other) == 0, "what is kept counts as well"
    bench.clock.advance(KEPT_SECONDS)
    assert bench.fetch(other) == 2
    assert bench.fetch(keys) == 2 * EIGHTH - 2
    reply = bench.store.reserve(bench.number, chain(2), 0, 0, None)
    assert len(reply.blocks) == 2, "engines have all the rest"


def test_what_was_aborted_or_cancelled_is_counted_until_its_slots_are_back(bench: Bench) -> None:
    reply = bench.store.reserve(bench.number, chain(EIGHTH), 0, 0, None, couriers=1)
    bench.store.cancel(reply.reservation)
    assert bench.fetch(chain(1)) == 0, "its courier may write still"
    bench.store.abort(reply.reservation)
    assert bench.fetch(chain(1)) == 1


def test_several_tenants_share_it(bench: Bench) -> None:
    one = bench.store.reserve(bench.number, chain(EIGHTH), 0, 0, None, couriers=2)
    assert len(one.blocks) == EIGHTH // 2
    other = TenantKeys.derive(secrets.token_bytes(32))
    number = bench.store.open_namespace(other, SPACE, PAYLOAD).number
    two = bench.store.reserve(number, chain(EIGHTH), 0, 0, None, couriers=2)
    assert len(two.blocks) == (EIGHTH - EIGHTH // 2) // 2, "one alone does not take all"
    for reply in (one, two):
        bench.store.abort(reply.reservation)


def test_a_put_is_never_refused_because_of_them(bench: Bench) -> None:
    """The rest of DRAM is leased, so that only what was fetched can make room: it does, also within its second."""
    dram = bench.store.blocks.dram
    room = dram.budget_bytes // dram.extent_bytes * (dram.extent_bytes // BLOCK)
    kept = chain(EIGHTH)
    assert bench.fetch(kept) == EIGHTH
    for _ in range(2 * room // 3 // 8):
        keys, stored = bench.put(8)
        assert stored == 8 and bench.lease(keys)[0]
    assert bench.fetched.kept_bytes == EIGHTH * BLOCK
    wanted = room - 2 * room // 3 // 8 * 8
    assert bench.put(wanted)[1] == wanted
    assert bench.fetched.kept_bytes == 0 and bench.fetched.gave_way == EIGHTH
    assert bench.store.match(bench.number, kept).blocks < EIGHTH, "they went, leaf first"


def test_a_lease_is_not_told_that_too_much_is_pinned_because_of_them() -> None:
    bench = bench_of(3 << 20, pinned_fraction=0.13)
    keys, _ = bench.put(EIGHTH)
    assert bench.fetch(chain(EIGHTH)) == EIGHTH
    lease, tiers, reason = bench.lease(keys)
    assert lease and sum(blocks for _, blocks in tiers) == EIGHTH and reason is None
    bench.store.check()
    bench.store.close()


def test_those_whose_time_is_over_give_way_first(bench: Bench) -> None:
    old, new = chain(EIGHTH // 2), chain(EIGHTH // 2)
    bench.fetch(old)
    bench.clock.advance(KEPT_SECONDS)
    bench.fetch(new)
    assert bench.fetched.kept_bytes == len(new) * BLOCK
    with bench.store.lock:  # as a put that lacks room does
        assert bench.fetched.give_way() and not bench.fetched.give_way()
    assert len(new) <= GIVES_WAY_AT_ONCE


def test_a_drop_waits_for_none_of_them(bench: Bench) -> None:
    keys = chain(EIGHTH - 2)
    bench.fetch(keys)
    under_way = bench.store.reserve(bench.number, chain(2), 0, 0, None, couriers=1)
    assert bench.fetched.wanted(under_way.reservation, 0, 0, 2) is not None
    assert bench.store.drop(bench.number, 0.0) == EIGHTH - 2
    assert bench.fetched.kept_bytes == 0
    assert bench.fetched.wanted(under_way.reservation, 0, 0, 1) is None
    bench.store.abort(under_way.reservation)
    assert bench.fetch(keys[:2]) == 2
    assert bench.store.match(bench.number, keys).tiers == ((HitTier.PEER, 2),)


def test_a_mark_is_of_one_generation(bench: Bench) -> None:
    keys = chain(2)
    bench.fetch(keys)
    bench.clock.advance(KEPT_SECONDS)
    assert bench.store.evict(2) == 2
    reply = bench.store.reserve(bench.number, keys, 0, 0, None)
    bench.store.commit(reply.reservation, 0, 0, [[bytes(16)] * 2] * 2)
    assert bench.store.match(bench.number, keys).tiers == ((HitTier.DRAM, 2),), "an engine stored it anew"


def test_all_that_is_readable_is_listed(bench: Bench) -> None:
    wanted = {}
    for _ in range(12):
        keys, stored = bench.put(5)
        wanted |= {key: at for at, key in enumerate(keys[:stored])}
    bench.store.reserve(bench.number, chain(3), 0, 0, None)  # is not readable
    found, after = list(bench.fetched.listed(bench.number, 0)[0]), bench.fetched.listed(bench.number, 0)[1]
    while after:
        some, after = bench.fetched.listed(bench.number, after)
        found += some
    assert {key: at for key, at, where in found if where == 1} == wanted and len(found) == len(wanted)
    assert bench.fetched.listed(bench.number, 1 << 40) == ([], 0)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_bounds_and_books_hold(seed: int) -> None:
    print(f"seed {seed}")
    chance, bench = random.Random(seed), bench_of(3 << 20)
    chains = [chain(chance.randint(1, EIGHTH)) for _ in range(12)]
    open_reservations, leases = list[tuple[int, int]](), list[int]()
    for _ in range(400):
        what, keys = chance.randrange(9), chance.choice(chains)
        if what < 3:
            reply = bench.store.reserve(bench.number, keys, 0, 0, None, couriers=1)
            if reply.reservation:
                open_reservations.append((reply.reservation, len(reply.blocks)))
        elif what == 3 and open_reservations:
            number, blocks = open_reservations.pop(chance.randrange(len(open_reservations)))
            done = chance.randint(0, blocks)
            bench.store.commit(number, 0, 0, [[bytes(16)] * 2] * done)
            if chance.random() < 0.5:
                bench.store.cancel(number)
            bench.store.abort(number)
        elif what == 4:
            bench.put(chance.randint(1, 12))
        elif what == 5:
            lease, _, _ = bench.lease(keys)
            leases += [lease] if lease else []
        elif what == 6 and leases:
            bench.store.release(leases.pop(chance.randrange(len(leases))))
        elif what == 7:
            bench.clock.advance(chance.choice([0.1, 0.5, 2.0]))
        elif what == 8 and chance.random() < 0.1:
            bench.store.drop(bench.number, 0.0)
            leases.clear()
        bench.store.check()
        held = sum(blocks for _, blocks in open_reservations) * BLOCK
        assert bench.fetched.kept_bytes + held <= SHARE_OF_DRAM * (3 << 20)
    for number, _ in open_reservations:
        bench.store.abort(number)
    bench.clock.advance(100.0)
    bench.store.expire_due()
    for lease in leases:
        bench.store.release(lease)
    bench.store.finish_ending()
    assert bench.store.usage().pinned_bytes == 0 and bench.store.usage().dram.reserved == 0
    bench.store.check()
    bench.store.close()
