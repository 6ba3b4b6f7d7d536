"""The five verbs end to end: match, lease, get, put and release, and what they say where there is less than asked."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asking import stand_in
from kvstore import HitTier, Limits, MissReason
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput, LayoutMismatch, LeaseExpired, StoreClosed
from kvstore.block.identity import ExtraKey, Prompt, TenantKeys
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import WINDOW_BLOCKS, NamespaceHandle, PutResult
from kvstore.protocol import messages as m
from tiering.frame import HEADER_BYTES, digest
from workbench import (
    OTHER_SECRET,
    Bench,
    bench,
    blank_pages,
    ids,
    one_line,
    random_pages,
    same_tokens,
    small_layout,
)

FRAME = 12 * 1024
LAYOUTS = {
    "one part": small_layout(),
    "by head and layer": small_layout(kv_heads=4, head_shards=2, layer_shards=2),
    "latent": Layout.mla(layers=3, latent_dim=24, rope_dim=8, dtype="bfloat16"),
    "float32": small_layout(dtype="float32"),
}


@pytest.fixture
def a() -> Bench:
    return bench()


def put(ns: NamespaceHandle, tokens: int, start: int = 0, seed: int = 0, **options: Any) -> tuple[Pages, PutResult]:
    """Store a prompt with pages of random bits for its full blocks."""
    pages = random_pages(ns.layout, tokens // ns.block_tokens, seed=seed)
    return pages, ns.put(ids(tokens, start), pages, **options)


# All five -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_what_was_put_is_got_bit_for_bit(a: Bench, name: str, page_tokens: int) -> None:
    ns = a.namespace(LAYOUTS[name])
    pages = random_pages(ns.layout, 3, page_tokens)
    prompt = ids(3 * 64 + 5)
    assert ns.match(prompt).account.misses == {MissReason.ABSENT: 192, MissReason.PARTIAL_BLOCK: 5}
    assert ns.put(prompt, pages) == PutResult(present=0, stored=3, stopped_at=None, reason=None)
    assert ns.put(prompt, pages) == PutResult(present=3, stored=0, stopped_at=None, reason=None)

    match = ns.match(prompt)
    assert (match.blocks, match.tokens, match.reason, match.detail) == (3, 192, None, "")
    assert match.tiers == ((HitTier.DRAM, 3),) and match.tier_of_block == [HitTier.DRAM] * 3
    assert match.account.to_dict() == {"asked": 197, "hits": {"dram": 192}, "misses": {"partial_block": 5}}

    into = blank_pages(ns.layout, 3, page_tokens)
    with ns.lease(match) as lease:
        assert (lease.blocks, lease.tokens, lease.first_token, lease.account) == (3, 192, 0, match.account)
        loaded = ns.get(lease, into)
        a.store.check()
    assert (loaded.tokens, loaded.account, loaded.reason) == (192, match.account, None)
    assert same_tokens(into, pages, range(192))
    a.store.check()
    assert a.store.usage().leases == a.store.usage().pinned_bytes == a.store.usage().reservations == 0


@given(
    tokens=st.integers(0, 300),
    stored=st.integers(0, 300),
    page_tokens=st.sampled_from([16, 32, 64]),
    name=st.sampled_from(sorted(LAYOUTS)),
    scattered=st.booleans(),
    data=st.data(),
)
@settings(max_examples=40)
def test_the_tokens_of_any_prompt_are_explained(
    tokens: int, stored: int, page_tokens: int, name: str, scattered: bool, data: st.DataObject
) -> None:
    a = bench()
    ns = a.namespace(LAYOUTS[name])
    source = random_pages(ns.layout, 5, page_tokens)
    count = len(source.table)
    if scattered:
        source = replace(source, table=data.draw(st.permutations(range(count))))
    assert ns.put(ids(stored), source).stored == stored // 64
    match = ns.match(ids(tokens))
    found = min(tokens, stored) // 64 * 64
    rest = tokens // 64 * 64 - found
    assert match.account.to_dict() == {
        "asked": tokens,
        "hits": {"dram": found} if found else {},
        "misses": {
            **({"absent": rest} if rest else {}),
            **({"partial_block": tokens % 64} if tokens % 64 else {}),
        },
    }
    into = blank_pages(ns.layout, 5, page_tokens)
    into = replace(into, table=data.draw(st.permutations(range(count)))) if scattered else into
    first_token = data.draw(st.integers(0, count)) * page_tokens
    with ns.lease(match, first_token) as lease:
        loaded = ns.get(lease, into, first_token)
    assert loaded.tokens == (found if first_token < found else min(found, first_token))
    assert same_tokens(into, source, range(first_token, max(first_token, loaded.tokens)), offset=first_token)
    a.store.check()


def test_prompts_that_begin_alike_share_their_beginning(a: Bench) -> None:
    ns = a.namespace()
    pages, _ = put(ns, 256)
    other = ids(128) + ids(128, 9000)
    match = ns.match(other)
    assert match.tokens == 128 and match.reason is MissReason.DIVERGED
    assert match.account.misses == {MissReason.DIVERGED: 128}
    assert ns.put(other, random_pages(ns.layout, 4, seed=5)) == PutResult(2, 2, None, None)
    with ns.lease(ns.match(other)) as lease:
        into = blank_pages(ns.layout, 4)
        assert ns.get(lease, into).tokens == 256
    assert same_tokens(into, pages, range(128)), "what was there first is kept"
    assert not same_tokens(into, pages, range(128, 192))


def test_an_extra_key_is_another_prompt(a: Bench) -> None:
    ns = a.namespace()
    pages = random_pages(ns.layout, 3)
    image = (ExtraKey(b"hash of an image", 70),)
    ns.put(ids(192), pages, extra_keys=image)
    assert ns.match(ids(192), image).blocks == 3
    assert ns.match(ids(192)).blocks == 1 and ns.match(ids(192), ("salt",)).blocks == 0


def test_a_lease_promises_what_it_pins(a: Bench) -> None:
    ns = a.namespace()
    pages, _ = put(ns, 256)
    lease = ns.lease(ns.match(ids(256)))
    assert a.store.usage().pinned_bytes == 4 * FRAME
    assert a.store.evict(10) == 0
    into = blank_pages(ns.layout, 4)
    assert ns.get(lease, into).tokens == 256 and same_tokens(into, pages, range(256))
    ns.release(lease)
    assert a.store.evict(10) == 4
    a.store.check()


# Where to begin -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [16, 32])
@pytest.mark.parametrize("first_token", [0, 32, 64, 96, 160, 192])
def test_get_from_any_page_on(a: Bench, page_tokens: int, first_token: int) -> None:
    ns = a.namespace()
    source = random_pages(ns.layout, 3, page_tokens)
    ns.put(ids(192), source)
    into = blank_pages(ns.layout, 3, page_tokens)
    into = replace(into, table=list(into.table)[first_token // page_tokens :])
    with ns.lease(ns.match(ids(192)), first_token) as lease:
        assert lease.first_token == first_token // 64 * 64 and lease.tokens == 192
        assert a.store.usage().pinned_bytes == (3 - first_token // 64) * FRAME, "only what is wanted is pinned"
        assert ns.get(lease, into, first_token).tokens == 192
    assert same_tokens(into, source, range(first_token, 192), offset=first_token)


def test_get_into_fewer_pages_loads_whole_blocks(a: Bench) -> None:
    ns = a.namespace()
    source = random_pages(ns.layout, 3, 16)
    ns.put(ids(192), source)
    into = blank_pages(ns.layout, 3, 16)
    with ns.lease(ns.match(ids(192))) as lease:
        short = replace(into, table=range(7))  # 112 tokens: one block and a part of the second
        loaded = ns.get(lease, short)
        assert (loaded.tokens, loaded.reason) == (64, None)
        assert ns.get(lease, replace(into, table=range(3))).tokens == 0
        assert ns.get(lease, replace(into, table=range(1)), 48).tokens == 64
    assert same_tokens(into, source, range(48, 64), offset=48)


def test_get_twice_from_one_lease(a: Bench) -> None:
    ns = a.namespace()
    source, _ = put(ns, 192)
    into = blank_pages(ns.layout, 3)
    with ns.lease(ns.match(ids(192))) as lease:
        for block in range(3):
            assert ns.get(lease, replace(into, table=[block]), 64 * block).tokens == 64 * (block + 1)
    assert same_tokens(into, source, range(192))


def test_nothing_to_lease_is_a_lease_of_nothing(a: Bench) -> None:
    ns = a.namespace()
    with ns.lease(ns.match(ids(128))) as lease:
        assert (lease.blocks, lease.tokens, lease.reason) == (0, 0, None)
        assert lease.account.misses == {MissReason.ABSENT: 128}
        loaded = ns.get(lease, blank_pages(ns.layout, 2))
        assert (loaded.tokens, loaded.account) == (0, lease.account)
    assert a.store.usage().leases == 0


@pytest.mark.parametrize("first_token", [128, 130, 10_000])
def test_a_lease_of_what_is_not_wanted_pins_nothing_and_misses_nothing(a: Bench, first_token: int) -> None:
    """An engine that has the whole prefix itself: the store's part is still there, and nothing was evicted."""
    ns = a.namespace()
    put(ns, 128)
    match = ns.match(ids(128))
    with ns.lease(match, first_token) as lease:
        assert lease.account == match.account and lease.tokens == 128
        assert a.store.usage().pinned_bytes == 0
        assert ns.get(lease, blank_pages(ns.layout, 1), 128).tokens == 128


def test_put_from_the_first_new_token_on(a: Bench) -> None:
    ns = a.namespace()
    source = random_pages(ns.layout, 4, 16)
    ns.put(ids(128), replace(source, table=range(8)))
    assert ns.put(ids(256), replace(source, table=range(8, 16)), first_token=128) == PutResult(2, 2, None, None)
    into = blank_pages(ns.layout, 4, 16)
    with ns.lease(ns.match(ids(256))) as lease:
        assert ns.get(lease, into).tokens == 256
    assert same_tokens(into, source, range(256))


def test_put_from_the_middle_of_a_block_that_is_there(a: Bench) -> None:
    """The engine computed from token 80 on: block 1 is there or cannot be stored, block 2 is new."""
    ns = a.namespace()
    source = random_pages(ns.layout, 3, 16)
    tail = replace(source, table=range(5, 12))
    ns.put(ids(64), replace(source, table=range(4)))
    assert ns.put(ids(192), tail, first_token=80) == PutResult(1, 0, 1, MissReason.ABSENT)
    ns.put(ids(128), replace(source, table=range(8)))
    assert ns.put(ids(192), tail, first_token=80) == PutResult(2, 1, None, None)
    into = blank_pages(ns.layout, 3, 16)
    with ns.lease(ns.match(ids(192))) as lease:
        ns.get(lease, into)
    assert same_tokens(into, source, range(192))


def test_put_of_a_chain_whose_start_is_missing(a: Bench) -> None:
    ns = a.namespace()
    pages = random_pages(ns.layout, 1)
    assert ns.put(ids(192), pages, first_token=128) == PutResult(0, 0, 0, MissReason.ABSENT)
    put(ns, 192)
    a.store.evict(2)
    assert ns.put(ids(192), pages, first_token=128) == PutResult(1, 0, 1, MissReason.EVICTED)
    assert ns.put(ids(64) + ids(128, 500), pages, first_token=128) == PutResult(1, 0, 1, MissReason.ABSENT)
    put(ns, 128)
    assert ns.put(ids(64) + ids(128, 500), pages, first_token=128) == PutResult(1, 0, 1, MissReason.DIVERGED)
    assert a.store.usage().reservations == 0
    a.store.check()


def test_a_prompt_without_a_full_block_stores_nothing(a: Bench) -> None:
    ns = a.namespace()
    assert ns.put(ids(63), random_pages(ns.layout, 1)) == PutResult(0, 0, None, None)
    assert ns.put([], Pages(random_pages(ns.layout, 1).planes, [], 64)) == PutResult(0, 0, None, None)
    assert ns.match([]).account.asked == 0


# What is kept with a block --------------------------------------------------------------------------------------------


def test_retention_is_kept_in_the_header_of_every_part(a: Bench) -> None:
    ns = a.namespace(LAYOUTS["by head and layer"])
    put(ns, 128, ttl=3600.5, priority=-7)
    put(ns, 192, priority=100)
    with ns.lease(ns.match(ids(192))) as lease:
        for part, places in enumerate(lease.reply.places):
            headers = [a.header_of(place) for place in places]
            assert [(header.priority, header.expires_at) for header in headers] == [
                (-7, int(a.clock.wall + 3600.5)),
                (-7, int(a.clock.wall + 3600.5)),
                (100, 0),
            ]
            assert [header.block_index for header in headers] == [0, 1, 2]
            assert {(header.stamp.part, header.stamp.parts) for header in headers} == {(part, 4)}
            assert [header.prefix_key for header in headers] == lease.keys
            assert [header.parent for header in headers[1:]] == lease.keys[:-1]
            assert [header.generation for header in headers] == lease.reply.generations
        assert len(set(lease.reply.generations)) == 3


def test_the_lease_carries_the_digest_of_every_header(a: Bench) -> None:
    ns = a.namespace(LAYOUTS["by head and layer"])
    put(ns, 128)
    with ns.lease(ns.match(ids(128))) as lease:
        for places, digests in zip(lease.reply.places, lease.reply.header_digests, strict=True):
            for place, want in zip(places, digests, strict=True):
                assert digest(bytes(a.store.spans([place])[0].view[:HEADER_BYTES])) == want


# Less than asked ------------------------------------------------------------------------------------------------------


def test_a_lease_is_shorter_than_the_match_when_blocks_went_meanwhile(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 256)
    match = ns.match(ids(256))
    assert a.store.evict(2) == 2
    with ns.lease(match) as lease:
        assert (lease.blocks, lease.reason) == (2, MissReason.EVICTED)
        assert lease.account.to_dict() == {"asked": 256, "hits": {"dram": 128}, "misses": {"evicted": 128}}
        loaded = ns.get(lease, blank_pages(ns.layout, 4))
        assert (loaded.tokens, loaded.account, loaded.reason) == (128, lease.account, None)
    a.store.evict(2)
    with ns.lease(match) as lease:
        assert lease.blocks == 0 and lease.account.misses == {MissReason.EVICTED: 256}
    assert ns.match(ids(256)).reason is MissReason.EVICTED


def test_a_lease_stops_where_too_much_would_be_pinned() -> None:
    a = bench(limits=Limits(pinned_fraction=4 * FRAME / (1 << 20)))
    ns = a.namespace()
    put(ns, 6 * 64)
    match = ns.match(ids(6 * 64))
    with ns.lease(match) as lease:
        assert (lease.blocks, lease.reason) == (4, MissReason.PINNED_FULL) and lease.detail
        assert lease.account.to_dict() == {"asked": 384, "hits": {"dram": 256}, "misses": {"pinned_full": 128}}
        assert a.store.usage().pinned_bytes == 4 * FRAME
        put(ns, 128, start=5000)
        with ns.lease(ns.match(ids(128, 5000))) as none:
            assert none.blocks == 0 and none.account.misses == {MissReason.PINNED_FULL: 128}
        with ns.lease(match) as again:
            assert again.blocks == 4, "what is pinned already costs nothing more"
        assert a.store.usage().pinned_bytes == 4 * FRAME
        with ns.lease(match, first_token=128) as tail:
            assert tail.blocks == 4, "two that are pinned and two that would be new"
        a.store.check()
    with ns.lease(match, first_token=128) as tail:
        assert tail.blocks == 6
    assert a.store.usage().pinned_bytes == 0


def test_leases_are_bounded_in_number() -> None:
    a = bench(limits=Limits(leases=2, lease_seconds=10))
    ns = a.namespace()
    put(ns, 64)
    match = ns.match(ids(64))
    leases = [ns.lease(match), ns.lease(match)]
    assert ns.lease(match).account.misses == {MissReason.PINNED_FULL: 64}
    a.clock.advance(11)
    assert ns.lease(match).account.misses == {MissReason.PINNED_FULL: 64}, "one that ran out still keeps its slots"
    leases[0].release()
    assert ns.lease(match).blocks == 1


def test_a_tenant_leaves_the_others_their_share() -> None:
    a = bench(limits=Limits(leases=4, namespaces=4).shared_by(2))
    other = TenantKeys.derive(OTHER_SECRET)
    greedy, modest = a.namespace(), a.namespace(keys=other)
    for ns in (greedy, modest):
        put(ns, 64)
    match = greedy.match(ids(64))
    leases = [greedy.lease(match) for _ in range(3)]
    assert [lease.blocks for lease in leases] == [1, 1, 0]
    assert leases[2].account.misses == {MissReason.PINNED_FULL: 64}
    with modest.lease(modest.match(ids(64))) as lease:
        assert lease.blocks == 1
    leases[0].release()
    assert greedy.lease(match).blocks == 1
    a.namespace(model="another one")
    with pytest.raises(BadInput) as caught:
        a.namespace(model="one too many")
    assert one_line(caught.value, "2 namespaces of this tenant", "limits.tenant_namespaces")
    a.namespace(keys=other, model="another one")


def test_a_block_that_another_put_is_storing_is_in_flight(a: Bench) -> None:
    ns = a.namespace()
    match = ns.match(ids(192))
    reserved = a.store.reserve(ns.number, match.keys[:2], 0, 0, None)
    assert ns.match(ids(192)).account.misses == {MissReason.IN_FLIGHT: 192}
    assert put(ns, 192)[1] == PutResult(0, 0, 0, MissReason.IN_FLIGHT)
    a.store.abort(reserved.reservation)
    assert ns.match(ids(192)).reason is MissReason.ABSENT
    assert put(ns, 192)[1] == PutResult(0, 3, None, None)
    a.store.check()


def test_a_full_store_evicts_the_oldest_for_a_new_prompt() -> None:
    a = bench()  # sixteen extents of five frames
    ns = a.namespace()
    for turn in range(8):
        assert put(ns, 10 * 64, start=turn * 10_000, seed=turn)[1].stored == 10
    assert put(ns, 640, start=90_000)[1] == PutResult(0, 10, None, None)
    assert ns.match(ids(640)).account.misses == {MissReason.EVICTED: 640}
    assert ns.match(ids(640, 10_000)).blocks == 10
    assert a.store.usage().counters["evicted_blocks"] == 10
    a.store.check()


def test_a_put_that_cannot_be_done_evicts_nothing() -> None:
    a = bench()
    ns = a.namespace()
    for turn in range(8):
        put(ns, 10 * 64, start=turn * 10_000, seed=turn)
    with pytest.raises(LayoutMismatch):
        ns.put(ids(640, 90_000), random_pages(small_layout(kv_heads=1), 10))
    assert "evicted_blocks" not in a.store.usage().counters
    assert ns.match(ids(640)).blocks == 10


def test_a_long_put_is_stored_in_pieces_that_others_see_early() -> None:
    """The store may be asked between any two pieces; what is visible then is what the pieces before have stored."""
    blocks = 2 * WINDOW_BLOCKS + 3
    a = bench(dram=16 << 20, extent=1 << 20)
    ns = a.namespace()
    seen = []
    door = a.door()

    def watched(request: m.Commit, commit: Callable[[], Any]) -> Any:
        visible = commit()
        seen.append(a.store.usage().blocks)
        return visible

    stand_in(door, m.Commit, watched)
    watched_ns = NamespaceHandle(door, ns.namespace, codec_named("raw"))
    pages = random_pages(ns.layout, blocks)
    assert watched_ns.put(ids(blocks * 64), pages) == PutResult(0, blocks, None, None)
    assert seen == [WINDOW_BLOCKS, 2 * WINDOW_BLOCKS, blocks]
    found = blank_pages(ns.layout, blocks)
    with ns.lease(ns.match(ids(blocks * 64))) as lease:
        assert ns.get(lease, found).tokens == blocks * 64
    assert same_tokens(found, pages, range(blocks * 64))
    a.store.check()


def test_a_block_that_is_found_damaged_between_two_pieces_of_a_put_is_stored_by_it() -> None:
    """It was there when the put began: it counts as stored then, and no more as there before."""
    blocks = WINDOW_BLOCKS + 3
    a = bench(dram=16 << 20, extent=1 << 20)
    ns = a.namespace()
    put(ns, 128)
    door = a.door()

    def watched(request: m.Commit, commit: Callable[[], Any]) -> Any:
        if len(request.digests) == WINDOW_BLOCKS - 2:  # of the first piece, of which two blocks are there
            with ns.lease(ns.match(ids(128))) as lease:
                a.store.spans([lease.reply.places[0][1]])[0].view[5000] ^= 1
                assert ns.get(lease, blank_pages(ns.layout, 2)).reason is MissReason.CORRUPT
        return commit()

    stand_in(door, m.Commit, watched)
    pages = random_pages(ns.layout, blocks)
    watched_ns = NamespaceHandle(door, ns.namespace, codec_named("raw"))
    assert watched_ns.put(ids(blocks * 64), pages) == PutResult(1, blocks - 1, None, None)
    found = blank_pages(ns.layout, blocks)
    with ns.lease(ns.match(ids(blocks * 64))) as lease:
        assert ns.get(lease, found).tokens == blocks * 64
    assert same_tokens(found, pages, range(64, blocks * 64))
    a.store.check()


def test_a_prompt_that_was_leased_goes_after_one_that_was_not(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 128)
    put(ns, 128, start=5000)
    ns.match(ids(128, 5000))  # pins nothing and changes nothing
    ns.lease(ns.match(ids(128))).release()
    a.store.evict(2)
    assert ns.match(ids(128)).blocks == 2 and ns.match(ids(128, 5000)).blocks == 0


def test_a_prompt_that_grew_was_used_from_its_beginning_on(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 128)
    put(ns, 64, start=5000)
    with ns.lease(ns.match(ids(64, 5000))):
        assert put(ns, 192)[1].stored == 1
        assert a.store.evict(1) == 1  # the end of the longer one: the other is pinned
    a.store.evict(1)
    assert ns.match(ids(128)).blocks == 2 and ns.match(ids(64, 5000)).blocks == 0
    a.store.check()


def test_a_put_larger_than_the_store_keeps_its_beginning() -> None:
    a = bench()
    ns = a.namespace()
    _, result = put(ns, 100 * 64)
    assert result == PutResult(0, 80, 80, MissReason.QUOTA) and "alone" in result.detail
    assert ns.match(ids(6400)).blocks == 80
    a.store.check()


def test_what_is_pinned_is_not_evicted_for_a_put() -> None:
    a = bench(limits=Limits(pinned_fraction=1.0))
    ns = a.namespace()
    source, _ = put(ns, 80 * 64)
    with ns.lease(ns.match(ids(80 * 64)), first_token=64) as lease:
        assert put(ns, 128, start=90_000)[1] == PutResult(0, 0, 0, MissReason.PINNED_FULL)
        into = blank_pages(ns.layout, 79)
        assert ns.get(lease, into, 64).tokens == 80 * 64
        assert same_tokens(into, source, range(64, 80 * 64), offset=64)
    assert put(ns, 128, start=90_000)[1].stored == 2
    a.store.check()


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 150, 2000, HEADER_BYTES + 3, FRAME - 1])
def test_a_damaged_frame_is_a_miss_and_goes(a: Bench, at: int) -> None:
    ns = a.namespace()
    source, _ = put(ns, 192)
    into = blank_pages(ns.layout, 3)
    with ns.lease(ns.match(ids(192))) as lease:
        a.store.spans([lease.reply.places[0][1]])[0].view[at] ^= 1
        loaded = ns.get(lease, into)
        assert (loaded.tokens, loaded.reason) == (64, MissReason.CORRUPT)
        assert loaded.account.to_dict() == {"asked": 192, "hits": {"dram": 64}, "misses": {"corrupt": 128}}
    assert same_tokens(into, source, range(64))
    match = ns.match(ids(192))
    assert (match.blocks, match.reason) == (1, MissReason.CORRUPT)
    assert a.store.usage().counters["quarantined_blocks"] == 1 and a.store.usage().dram.quarantined == 1
    assert put(ns, 192, seed=0)[1] == PutResult(1, 1, None, None), "its child was still there"
    into = blank_pages(ns.layout, 3)
    with ns.lease(ns.match(ids(192))) as lease:
        assert ns.get(lease, into).tokens == 192
    assert same_tokens(into, source, range(192))
    a.store.check()


def test_a_reader_that_is_wrong_about_damage_takes_nothing_away(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 64)
    with ns.lease(ns.match(ids(64))) as lease:
        a.store.report(lease.reply.lease, 0, 0)
        for block, part in ((-1, 0), (5, 0), (0, 7), (0, -1)):
            a.store.report(lease.reply.lease, block, part)
    a.store.report(12345, 0, 0)
    assert ns.match(ids(64)).blocks == 1
    assert a.store.usage().counters["reported_frames"] == 6


def test_a_frame_that_was_condemned_under_a_lease_is_a_miss_even_when_its_extent_is_gone() -> None:
    a = bench(dram=1 << 20, extent=512 * 1024)
    ns = a.namespace()
    put(ns, 64)
    late, first = ns.lease(ns.match(ids(64))), ns.lease(ns.match(ids(64)))
    a.store.spans([first.reply.places[0][0]])[0].view[5000] ^= 1
    assert ns.get(first, blank_pages(ns.layout, 1)).reason is MissReason.CORRUPT
    first.release()
    a.store.drop(ns.number)
    assert a.store.usage().dram.taken_bytes == 0
    loaded = ns.get(late, blank_pages(ns.layout, 1))
    assert (loaded.tokens, loaded.reason) == (0, MissReason.CORRUPT)
    late.release()
    a.store.check()


# The life of a lease --------------------------------------------------------------------------------------------------


def test_a_lease_may_be_released_twice(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 64)
    one, two = ns.lease(ns.match(ids(64))), ns.lease(ns.match(ids(64)))
    one.release()
    one.release()
    ns.release(one)
    assert one.released and not two.released
    assert a.store.usage().leases == 1 and a.store.usage().pinned_bytes == FRAME
    with two:
        two.release()
    assert a.store.usage().leases == 0
    a.store.check()


def test_a_lease_is_released_when_its_context_is_left_by_an_error(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 64)
    with pytest.raises(KeyError), ns.lease(ns.match(ids(64))) as lease:
        raise KeyError
    assert lease.released and a.store.usage().leases == 0


def test_a_lease_that_was_forgotten_is_released_by_the_next_call(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 64)
    lease = ns.lease(ns.match(ids(64)))
    assert not lease.released
    del lease
    gc.collect()
    assert a.store.evict(1) == 1
    assert a.store.usage().leases == 0 and a.store.usage().pinned_bytes == 0
    a.store.check()


def test_a_released_lease_reads_nothing(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 64)
    lease = ns.lease(ns.match(ids(64)))
    lease.release()
    with pytest.raises(LeaseExpired) as caught:
        ns.get(lease, blank_pages(ns.layout, 1))
    assert one_line(caught.value, "released", "new one")


def test_a_lease_that_ran_out_pins_nothing_but_reads_what_it_promised() -> None:
    a = bench(limits=Limits(lease_seconds=30))
    ns = a.namespace()
    source, _ = put(ns, 128)
    lease = ns.lease(ns.match(ids(128)))
    a.clock.advance(29.9)
    assert a.store.evict(5) == 0
    a.clock.advance(0.2)
    assert a.store.evict(5) == 2 and a.store.usage().dram.zombie == 2
    put(ns, 79 * 64, start=70_000)
    into = blank_pages(ns.layout, 2)
    assert ns.get(lease, into).tokens == 128 and same_tokens(into, source, range(128))
    a.store.check()
    lease.release()
    assert a.store.usage().dram.zombie == 0 and a.store.usage().counters["lapsed_leases"] == 1
    a.store.check()


def test_damage_that_a_late_reader_finds_is_condemned_too() -> None:
    a = bench(limits=Limits(lease_seconds=30))
    ns = a.namespace()
    put(ns, 128)
    lease = ns.lease(ns.match(ids(128)))
    a.store.spans([lease.reply.places[0][1]])[0].view[HEADER_BYTES + 5] ^= 1
    a.clock.advance(31)
    assert a.store.evict(0) == 0
    assert ns.get(lease, blank_pages(ns.layout, 2)).reason is MissReason.CORRUPT
    assert a.store.usage().counters["quarantined_blocks"] == 1
    assert ns.match(ids(128)).blocks == 1
    a.store.check()
    lease.release()
    a.store.check()


@pytest.mark.parametrize(
    "table", [[1, 1], np.array([1, 1]), torch.tensor([1, 1]), torch.tensor([1, 1], dtype=torch.int8)]
)
def test_a_page_holds_one_piece_of_a_prompt(a: Bench, table: Any) -> None:
    """Whatever the table is: elements of a tensor are never equal to each other by their hashes."""
    ns = a.namespace()
    put(ns, 128)
    blank = blank_pages(ns.layout, 2)
    with ns.lease(ns.match(ids(128))) as lease, pytest.raises(LayoutMismatch) as caught:
        ns.get(lease, Pages(blank.planes, table, 64))
    assert one_line(caught.value, "names a page twice")


@pytest.mark.parametrize("table", [np.array([[0, 1]]), [[0], [1]], torch.tensor([0.0, 1.0]), None, 5, iter([0, 1])])
def test_what_is_no_page_table_is_one_line(a: Bench, table: Any) -> None:
    ns = a.namespace()
    put(ns, 128)
    blank = blank_pages(ns.layout, 2)
    with ns.lease(ns.match(ids(128))) as lease, pytest.raises(BadInput) as caught:
        ns.get(lease, Pages(blank.planes, table, 64))
    assert one_line(caught.value, "page table", "one page number each")


@pytest.mark.parametrize("page_tokens", [64.0, "64", None, 0])
def test_what_is_no_page_size_is_one_line(a: Bench, page_tokens: Any) -> None:
    with pytest.raises(BadInput) as caught:
        Pages(blank_pages(a.namespace().layout, 2).planes, [0, 1], page_tokens)
    assert one_line(caught.value, f"page_tokens={page_tokens!r}")


@pytest.mark.parametrize("plane", [[1.0], None])
def test_planes_that_are_no_tensors_are_one_line(a: Bench, plane: Any) -> None:
    ns = a.namespace()
    with pytest.raises(LayoutMismatch) as caught:
        ns.put(ids(128), Pages(dict.fromkeys(ns.layout.layers, (plane, plane)), [0, 1], 64))
    assert one_line(caught.value, type(plane).__name__, "give tensors")


@pytest.mark.parametrize(("blocks", "named"), [(-5, "blocks=-5"), ("many", "blocks='many'"), (0.5, "blocks=0.5")])
def test_what_is_no_number_of_blocks_is_not_evicted(a: Bench, blocks: Any, named: str) -> None:
    with pytest.raises(BadInput) as caught:
        a.store.evict(blocks)
    assert one_line(caught.value, named, "0 or more")


# Tenants and namespaces -----------------------------------------------------------------------------------------------


def test_another_tenant_learns_nothing(a: Bench) -> None:
    mine = a.namespace()
    theirs = a.namespace(keys=TenantKeys.derive(OTHER_SECRET))
    put(mine, 192)
    match = theirs.match(ids(192))
    assert match.account.misses == {MissReason.ABSENT: 192} and match.detail == ""
    assert not set(match.keys) & set(mine.match(ids(192)).keys)
    assert put(theirs, 192, seed=9)[1] == PutResult(0, 3, None, None)


def test_the_same_prompt_in_another_namespace_is_named(a: Bench) -> None:
    mine = a.namespace()
    put(mine, 128)
    other = a.namespace(model="another")
    match = other.match(ids(192))
    assert match.account.misses == {MissReason.OTHER_NAMESPACE: 192}
    assert match.detail == "model is another here and 3f5e1c0d9a there"


def test_the_same_namespace_twice_is_one(a: Bench) -> None:
    one, two = a.namespace(), a.namespace()
    put(one, 64)
    assert one.number == two.number and two.match(ids(64)).blocks == 1


def test_what_is_no_match_lease_or_pages_is_refused_in_one_line(a: Bench) -> None:
    mine = a.namespace()
    match = mine.match(ids(64))
    calls: list[tuple[str, Callable[[], object]]] = [
        ("match of type list", lambda: mine.lease(ids(64))),  # type: ignore[arg-type]
        ("lease of type Match", lambda: mine.get(match, into=blank_pages(mine.layout, 1))),  # type: ignore[arg-type]
        ("into of type dict", lambda: mine.get(mine.lease(match), into={})),  # type: ignore[arg-type]
        ("pages of type NoneType", lambda: mine.put(ids(64), None)),  # type: ignore[arg-type]
    ]
    for fragment, call in calls:
        with pytest.raises(BadInput) as caught:
            call()
        assert one_line(caught.value, fragment, "; give ")


def test_a_lease_of_another_namespace_loads_nothing(a: Bench) -> None:
    mine, other = a.namespace(), a.namespace(model="another")
    put(mine, 64)
    with mine.lease(mine.match(ids(64))) as lease:
        into = blank_pages(mine.layout, 1)
        assert other.get(lease, into).reason is MissReason.CORRUPT
        assert mine.get(lease, into).tokens == 64, "nothing was taken away"


# Closed ---------------------------------------------------------------------------------------------------------------


def test_a_closed_store_is_a_miss(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 128)
    match = ns.match(ids(130))
    lease = ns.lease(match)
    a.store.close()
    a.store.close()
    assert a.store.closed
    assert ns.match(ids(130)).account.misses == {MissReason.DISABLED: 128, MissReason.PARTIAL_BLOCK: 2}
    assert ns.match(ids(130)).detail == "the store is closed"
    with ns.lease(match) as nothing:
        assert nothing.account.misses == {MissReason.DISABLED: 128, MissReason.PARTIAL_BLOCK: 2}
        assert ns.get(nothing, blank_pages(ns.layout, 2)).tokens == 0
    loaded = ns.get(lease, blank_pages(ns.layout, 2))
    assert (loaded.tokens, loaded.reason) == (0, MissReason.DISABLED)
    assert loaded.account.misses == {MissReason.DISABLED: 128, MissReason.PARTIAL_BLOCK: 2}
    lease.release()
    assert put(ns, 128)[1] == PutResult(0, 0, 0, MissReason.DISABLED)


def test_operations_on_a_closed_store_say_so(a: Bench) -> None:
    a.store.close()
    for use in (lambda: a.store.evict(1), lambda: a.store.drop(0), a.namespace, lambda: a.store.spans([0])[0]):
        with pytest.raises(StoreClosed) as caught:
            use()
        assert one_line(caught.value, "closed")


def test_a_store_that_closes_under_a_put_is_a_put_of_nothing(a: Bench) -> None:
    class ClosingCodec:
        """A codec obeying its contract, in a process that closes the store at an unlucky moment."""

        name = "raw"
        is_exact = True
        payload_bytes = staticmethod(codec_named("raw").payload_bytes)
        prepare = staticmethod(codec_named("raw").prepare)

        def bind(self, pages: Pages, layout: Layout, part: Any) -> Any:
            a.store.close()
            return codec_named("raw").bind(pages, layout, part)

    ns = a.namespace()
    closing = NamespaceHandle(a.door(), ns.namespace, ClosingCodec())
    result = closing.put(ids(128), random_pages(ns.layout, 2))
    assert result == PutResult(0, 0, 0, MissReason.DISABLED)


# What people give -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"durability": "forever"}, ("'forever'", "volatile, disk")),
        ({"durability": "disk"}, ("NVMe", "nvme=")),
        ({"first_token": -64}, ("first_token=-64", "multiple of 64")),
        ({"first_token": 63}, ("first_token=63", "multiple of 64")),
        ({"ttl": 0}, ("ttl=0", "seconds above 0")),
        ({"ttl": -5.0}, ("ttl=-5.0",)),
        ({"ttl": float("nan")}, ("ttl=nan",)),
        ({"ttl": float("inf")}, ("ttl=inf",)),
        ({"ttl": "1h"}, ("ttl='1h'", "seconds above 0")),
        ({"priority": 101}, ("priority=101", "-100 to 100")),
        ({"priority": -101}, ("priority=-101",)),
        ({"priority": 0.5}, ("priority=0.5", "whole number")),
        ({"priority": True}, ("priority=True", "whole number")),
        ({"ttl": True}, ("ttl=True", "seconds above 0")),
        ({"priority": "high"}, ("priority='high'", "whole number")),
    ],
)
def test_bad_options_of_a_put_are_one_clear_line(a: Bench, options: dict[str, Any], fragments: tuple[str, ...]) -> None:
    ns = a.namespace()
    with pytest.raises(BadInput) as caught:
        ns.put(ids(64), random_pages(ns.layout, 1), **options)
    assert one_line(caught.value, *fragments)
    assert a.store.usage().reservations == 0 and ns.match(ids(64)).blocks == 0
    a.store.check()


def test_too_few_pages_for_a_put(a: Bench) -> None:
    ns = a.namespace()
    with pytest.raises(LayoutMismatch) as caught:
        ns.put(ids(192), random_pages(ns.layout, 2))
    assert one_line(caught.value, "up to token 128", "up to 192", "more pages or fewer token ids")


def test_pages_that_do_not_fit_leave_nothing_behind(a: Bench) -> None:
    ns = a.namespace(small_layout(kv_heads=4, head_shards=2))
    wrong = random_pages(small_layout(kv_heads=2), 2)
    with pytest.raises(LayoutMismatch):
        ns.put(ids(128), wrong)
    assert a.store.usage().reservations == 0 and a.store.usage().dram.reserved == 0
    assert ns.match(ids(128)).reason is MissReason.ABSENT
    put(ns, 128)
    with ns.lease(ns.match(ids(128))) as lease, pytest.raises(LayoutMismatch):
        ns.get(lease, wrong)
    a.store.check()


def test_a_coder_that_fails_leaves_nothing_behind(a: Bench) -> None:
    ns = a.namespace()
    pages = random_pages(ns.layout, 2)
    broken = Pages({**pages.planes, 1: [torch.zeros(2, 64, 2, 8, dtype=torch.bfloat16)]}, pages.table, 64)
    with pytest.raises(LayoutMismatch):
        ns.put(ids(128), broken)
    a.store.check()
    assert ns.put(ids(128), pages).stored == 2


@pytest.mark.parametrize(
    ("lease_from", "get_from", "fragments"),
    [(0, 63, ("first_token=63", "64 tokens")), (64, 0, ("first_token=0", "first token 64")), (0, -64, ("-64",))],
)
def test_a_get_begins_at_a_page_that_is_leased(
    a: Bench, lease_from: int, get_from: int, fragments: tuple[str, ...]
) -> None:
    ns = a.namespace()
    put(ns, 128)
    with ns.lease(ns.match(ids(128)), lease_from) as lease, pytest.raises(BadInput) as caught:
        ns.get(lease, blank_pages(ns.layout, 2), get_from)
    assert one_line(caught.value, *fragments)


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"first_token": -1}, ("first_token=-1", "0 or more")),
        ({"deadline_ms": -1}, ("deadline_ms=-1", "0 or more")),
        ({"deadline_ms": float("nan")}, ("deadline_ms=nan",)),
    ],
)
def test_bad_options_of_a_lease_are_one_clear_line(
    a: Bench, options: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    ns = a.namespace()
    with pytest.raises(BadInput) as caught:
        ns.lease(ns.match(ids(64)), **options)
    assert one_line(caught.value, *fragments)


def test_pages_have_a_size() -> None:
    with pytest.raises(BadInput) as caught:
        Pages({}, [], 0)
    assert one_line(caught.value, "page_tokens=0", "1 or more")
    assert Pages({}, range(5), 16).tokens == 80


def test_a_match_prints_no_keys(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 64)
    match = ns.match(ids(64))
    assert repr(match.keys[0])[2:-1] not in repr(match) and "dram" in repr(match)


@pytest.mark.parametrize(
    ("shape", "fragments"),
    [
        ({"head_dim": 256}, ("266240 bytes", "extent has 65536", "smaller blocks or layer_shards")),
        ({"layers": 17, "layer_shards": 17}, ("17 parts", "1114112", "1048576", "smaller extent=")),
        ({"layers": 300, "head_dim": 1}, ("300 layers", "at most", "layer_shards")),
    ],
)
def test_a_namespace_that_does_not_fit_is_one_clear_line(
    a: Bench, shape: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(BadInput) as caught:
        a.namespace(small_layout(**shape))
    assert one_line(caught.value, *fragments)


def test_namespaces_are_bounded_in_number() -> None:
    a = bench(limits=Limits(namespaces=2))
    for model in ("one", "two", "one"):
        a.namespace(model=model)
    with pytest.raises(BadInput) as caught:
        a.namespace(model="three")
    assert one_line(caught.value, "as many namespaces as may be opened (2)", "limits.namespaces")


# A prompt that is hashed once -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 700), max_size=6), position=st.integers(0, 699))
def test_a_prompt_hashed_in_pieces_has_the_keys_of_the_whole(cuts: list[int], position: int) -> None:
    ns, tokens = bench().namespace(), ids(700)
    extra = (b"salt", ExtraKey(b"image", position))
    whole = ns.hashed(tokens, extra)
    prompt = Prompt(0, [])
    for cut in [*sorted(cuts), 700]:
        prompt = ns.hashed(tokens[len(prompt.keys) * ns.block_tokens : cut], extra, prompt)
        assert prompt.tokens == cut
    assert (prompt.tokens, prompt.keys) == (whole.tokens, whole.keys)
    assert prompt.keys == ns.match(tokens, extra).keys


def test_verbs_take_a_prompt_in_place_of_token_ids(a: Bench) -> None:
    ns = a.namespace()
    prompt = ns.hashed(ids(300), (b"salt",))
    pages = random_pages(ns.layout, 4)
    assert ns.put(prompt, pages) == PutResult(0, 4, None, None)
    match = ns.match(prompt)
    assert (match.blocks, match.account.asked) == (4, 300)
    assert ns.match(ids(300), (b"salt",)).blocks == 4 and not ns.match(ids(300)).blocks
    into = blank_pages(ns.layout, 4)
    with ns.lease(match) as lease:
        assert ns.get(lease, into).tokens == 256
    assert same_tokens(pages, into, range(256))
    # Of another process, which knows the keys and not the tokens.
    assert ns.put(Prompt(256, prompt.keys[:4]), pages).present == 4


def test_a_prompt_that_contradicts_itself_is_one_clear_line(a: Bench) -> None:
    ns = a.namespace()
    prompt = ns.hashed(ids(128))
    for given_prompt, extra in ((Prompt(64, prompt.keys), ()), (prompt, (b"salt",))):
        with pytest.raises(BadInput) as caught:
            ns.match(given_prompt, extra)
        assert one_line(caught.value, "extra keys")
    assert prompt.keys[0].hex() not in repr(prompt)
