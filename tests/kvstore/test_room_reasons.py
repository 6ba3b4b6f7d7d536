"""Why there is no room: `pinned_full` where somebody has to release a lease, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asking import Asking
from kvstore.block.account import MissReason
from kvstore.client.handle import NamespaceHandle, PutResult
from kvstore.config import Limits
from kvstore.protocol import messages as m
from kvstore.protocol.messages import ReserveReply
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.tier import extent_of
from torture.peer import reply_in
from workbench import MODEL, Bench, bench, blank_pages, ids, open_at, random_pages, same_tokens, small_layout

FULL = 80
"""Blocks of the small layout that a bench has room for."""


@pytest.fixture
def a() -> Iterator[Bench]:
    made = bench(limits=Limits(pinned_fraction=1.0))
    yield made
    made.store.check()
    made.store.close()


def put(ns: NamespaceHandle, blocks: int, start: int = 0) -> PutResult:
    return ns.put(ids(64 * blocks, start), random_pages(ns.layout, blocks))


def reserve(ns: NamespaceHandle, blocks: int, start: int = 0) -> ReserveReply:
    """A put that has slots and fills none."""
    return Asking(ns.door).reserve(ns.number, ns.match(ids(64 * blocks, start)).keys, 0, 0, None)


def test_what_others_lease(a: Bench) -> None:
    ns, other = a.namespace(), a.namespace(model="other")
    assert put(ns, FULL).stored == FULL
    lease = ns.lease(ns.match(ids(64 * FULL)))
    refused = put(other, 1)
    assert refused.reason is MissReason.PINNED_FULL and "leased" in refused.detail
    lease.release()
    assert put(other, 1).reason is None


def test_what_a_late_reader_may_be_reading(a: Bench) -> None:
    ns, other = a.namespace(), a.namespace(model="other")
    assert put(ns, FULL).stored == FULL
    lease = ns.lease(ns.match(ids(64 * FULL)))
    a.clock.advance(61)
    refused = put(other, 1)
    assert refused.reason is MissReason.PINNED_FULL and a.store.usage().pinned_bytes == 0
    lease.release()
    assert put(other, 1).reason is None


def test_what_clients_map_that_was_given_back(a: Bench) -> None:
    ns, other = a.namespace(), a.namespace(model="other")
    assert put(ns, FULL).stored == FULL
    with ns.lease(ns.match(ids(64 * FULL))) as lease:
        extents = {extent_of(place) for place in lease.reply.places[0]}
    mapped = [a.store.share(extent, a.keys.tenant, 1).descriptor for extent in extents]
    for _ in range(2):  # waited for, and then not again
        refused = put(other, 1)
        assert refused.reason is MissReason.DEADLINE and "mapped" in refused.detail
        assert a.store.usage().leases == a.store.usage().pinned_bytes == 0
    for descriptor in mapped:
        os.close(descriptor)
    assert put(other, 1).reason is None


def test_what_others_are_storing_into(a: Bench) -> None:
    ns, other = a.namespace(), a.namespace(model="other")
    filling = reserve(ns, FULL)
    assert len(filling.blocks) == FULL
    refused = put(other, 1)
    assert refused.reason is MissReason.DEADLINE and "stored" in refused.detail
    Asking(ns.door).abort(filling.reservation)
    assert put(other, 1).reason is None


def test_what_others_lease_and_are_storing_into(a: Bench) -> None:
    """Somebody has to release something, and that would help."""
    ns, other = a.namespace(), a.namespace(model="other")
    assert put(ns, 40).stored == 40
    lease = ns.lease(ns.match(ids(64 * 40)))
    filling = reserve(ns, 40, start=100_000)
    assert len(filling.blocks) == 40
    assert put(other, 1).reason is MissReason.PINNED_FULL
    lease.release()
    assert put(other, 1).reason is None
    Asking(ns.door).abort(filling.reservation)


@pytest.mark.parametrize("blocks", [FULL + 1, 2 * FULL, 400])
def test_a_prompt_that_is_longer_than_memory(a: Bench, blocks: int) -> None:
    result = put(a.namespace(), blocks)
    assert (result.stored, result.stopped_at, result.reason) == (FULL, FULL, MissReason.QUOTA)
    assert "alone" in result.detail


def test_where_nothing_was_found_there_is_a_detail_for_each_reason(a: Bench) -> None:
    """And none where all was held, or was not a matter of room."""
    ns = a.namespace()
    assert put(ns, 4).detail == ""
    filling = reserve(ns, 4, start=5000)
    result = put(ns, 4, start=5000)
    assert (result.reason, result.detail) == (MissReason.IN_FLIGHT, "")
    Asking(ns.door).abort(filling.reservation)


def test_a_lease_for_which_all_of_memory_is_being_stored_into(tmp_path: Path) -> None:
    """It is called late, not pinned, and nothing is read past DRAM."""
    with ExitStack() as stack:
        store = stack.enter_context(open_at(tmp_path, dram="1MiB", extent="64KiB", nvme="4MiB", indexes=LmdbMaker))
        ns, other = (store.namespace(model=model, layout=small_layout()) for model in (MODEL, "other"))
        pages = random_pages(ns.layout, 6)
        assert ns.put(ids(64 * 6), pages, durability="disk").stored == 6
        assert store.evict(6) == 6
        filling = reserve(other, FULL)
        assert len(filling.blocks) == FULL
        match = ns.match(ids(64 * 6))
        reply = Asking(ns.door).lease(ns.number, match.keys, 0, 1000)
        assert (reply.lease, reply.reason, reply.lacks_room) == (0, MissReason.DEADLINE, True) and reply.detail
        with ns.lease(match, deadline_ms=1000) as lease:
            assert (lease.tokens, lease.reason) == (0, MissReason.DEADLINE)
            assert lease.account.misses == {MissReason.DEADLINE: 64 * 6}
            assert ns.get(lease, blank_pages(ns.layout, 6)).tokens == 0
        Asking(other.door).abort(filling.reservation)
        with ns.lease(match, deadline_ms=10_000) as lease:
            into = blank_pages(ns.layout, 6)
            assert ns.get(lease, into).tokens == 64 * 6 and same_tokens(pages, into, range(64 * 6))
            assert not lease.reply.lacks_room
        store.check()


def test_a_reply_of_an_older_version_has_no_detail() -> None:
    """Fields that are appended have defaults both ways."""
    packed = m.pack(m.Reply(1, m.Reserved(ReserveReply(9, 1, [1], ([5],), 3, MissReason.QUOTA, "why"))))
    told = reply_in(packed)
    assert isinstance(told.answer, m.Reserved) and told.answer.reply.detail == "why"
    older = packed.replace(b"\xa6detail\xa3why", b"\xa6unseen\xa3why")
    told = reply_in(older)
    assert isinstance(told.answer, m.Reserved) and told.answer.reply.detail == ""
