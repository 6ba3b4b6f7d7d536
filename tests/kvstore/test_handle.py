"""The five verbs end to end: match, lease, get, put and release, and what they say where there is less than asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import HitTier, Limits, MissReason
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput, LayoutMismatch, StoreClosed
from kvstore.block.identity import ExtraKey, Prompt, TenantKeys
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle, PutResult
from workbench import OTHER_SECRET, Bench, bench, blank_pages, ids, random_pages, refused, same_tokens, small_layout

FRAME = 12 * 1024
LAYOUTS = {
    "one part": small_layout(),
    "by head and layer": small_layout(kv_heads=4, head_shards=2, layer_shards=2),
    "latent": Layout.mla(layers=3, latent_dim=24, rope_dim=8, dtype="bfloat16"),
    "float32": small_layout(dtype="float32"),
}


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


# Less than asked ------------------------------------------------------------------------------------------------------


def test_a_lease_stops_where_too_much_would_be_pinned() -> None:
    a = bench(limits=Limits(pinned_fraction=4 * FRAME / (1 << 20)))
    ns = a.namespace()
    put(ns, 6 * 64)
    match = ns.match(ids(6 * 64))
    with ns.lease(match) as lease:
        assert (lease.blocks, lease.reason) == (4, MissReason.PINNED_FULL) and lease.detail and lease.reply.lacks_room
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
    with refused(BadInput, "2 namespaces of this tenant", "limits.tenant_namespaces"):
        a.namespace(model="one too many")
    a.namespace(keys=other, model="another one")


def test_a_put_that_cannot_be_done_evicts_nothing() -> None:
    a = bench()
    ns = a.namespace()
    for turn in range(8):
        put(ns, 10 * 64, start=turn * 10_000, seed=turn)
    with pytest.raises(LayoutMismatch):
        ns.put(ids(640, 90_000), random_pages(small_layout(kv_heads=1), 10))
    assert "evicted_blocks" not in a.store.usage().counters
    assert ns.match(ids(640)).blocks == 10


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


# Damage ---------------------------------------------------------------------------------------------------------------


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


# The life of a lease --------------------------------------------------------------------------------------------------


def test_a_lease_is_released_when_its_context_is_left_by_an_error(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 64)
    with pytest.raises(KeyError), ns.lease(ns.match(ids(64))) as lease:
        raise KeyError
    assert lease.released and a.store.usage().leases == 0


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


def test_a_lease_of_another_namespace_loads_nothing(a: Bench) -> None:
    mine, other = a.namespace(), a.namespace(model="another")
    put(mine, 64)
    with mine.lease(mine.match(ids(64))) as lease:
        into = blank_pages(mine.layout, 1)
        assert other.get(lease, into).reason is MissReason.CORRUPT
        assert mine.get(lease, into).tokens == 64, "nothing was taken away"


# Closed ---------------------------------------------------------------------------------------------------------------


def test_operations_on_a_closed_store_say_so(a: Bench) -> None:
    a.store.close()
    for use in (lambda: a.store.evict(1), lambda: a.store.drop(0), a.namespace, lambda: a.store.spans([0])[0]):
        with refused(StoreClosed, "closed"):
            use()


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


def test_a_match_prints_no_keys(a: Bench) -> None:
    ns = a.namespace()
    put(ns, 64)
    match = ns.match(ids(64))
    assert repr(match.keys[0])[2:-1] not in repr(match) and "dram" in repr(match)


def test_namespaces_are_bounded_in_number() -> None:
    a = bench(limits=Limits(namespaces=2))
    for model in ("one", "two", "one"):
        a.namespace(model=model)
    with refused(BadInput, "as many namespaces as may be opened (2)", "limits.namespaces"):
        a.namespace(model="three")


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
        with refused(BadInput, "extra keys"):
            ns.match(given_prompt, extra)
    assert prompt.keys[0].hex() not in repr(prompt)
