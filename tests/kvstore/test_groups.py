"""Groups with sliding windows through put and get: what is read, what is not touched, and where a load can end."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from groups import (
    Load,
    Planes,
    Prompt,
    assert_same_planes,
    canary_planes,
    check_loaded,
    copied,
    expected_planes,
    full,
    same_bits,
    sliding,
    spread,
)
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.errors import LayoutMismatch
from kvstore.block.layout import Attention, KvGroup, Layout
from kvstore.block.pages import GroupPages, Pages
from kvstore.client.handle import Loaded, NamespaceHandle, PutResult
from kvstore.client.lease import Lease
from tiering.frame import HEADER_BYTES, digest
from workbench import Bench, bench, ids, plausible_planes, refused

TWO = Layout((full("full", (0, 2)), sliding("sliding", (1, 3), 100)))
"""By pages of 16: at the end of block n the sliding group needs the last 99 tokens, which begin 7 pages before."""
THREE = Layout((full("full", (0, 4)), sliding("near", (1, 5), 64), sliding("far", (2, 3), 200)))


Sizes = Mapping[str, int]
"""Tokens of a page, by the names of groups that have other pages than the rest."""


def shuffled(layout: Layout, tokens: int, page_tokens: int, sizes: Sizes, seed: int, spare: int) -> list[int]:
    """As many pages as all groups take, and some more."""
    count = sum(tokens // sizes.get(group.name, page_tokens) for group in layout.groups) + spare
    return random.Random(seed).sample(range(count), count)


def stored(
    ns: NamespaceHandle,
    blocks: int,
    page_tokens: int = 16,
    seed: int = 0,
    *,
    prompt: int = 0,
    shared: bool = False,
    sizes: Sizes = MappingProxyType({}),
) -> Prompt:
    """A prompt of random bits whose pages lie all over, put."""
    tokens = blocks * ns.block_tokens
    order = shuffled(ns.layout, tokens, page_tokens, sizes, seed, 5)
    planes = canary_planes(ns.layout, len(order), page_tokens, seed, shared, sizes)
    if ns.namespace.codec != "raw":
        planes = plausible_planes(ns.layout, len(order), page_tokens, seed)
    source = spread(ns.layout, planes, page_tokens, order, tokens // page_tokens, None, sizes)
    assert ns.put(ids(blocks * ns.block_tokens, prompt), source.pages) == PutResult(0, blocks, None, None)
    return source


class Target(NamedTuple):
    """Pages to load into, and what is in them before."""

    prompt: Prompt
    before: Planes


def target(
    layout: Layout,
    tokens: int,
    firsts: Mapping[str, int] | None = None,
    page_tokens: int = 16,
    *,
    shared: bool = False,
    sizes: Sizes = MappingProxyType({}),
) -> Target:
    """Pages for so many tokens, with canaries in them and around them; firsts: of each group its first page."""
    order = shuffled(layout, tokens, page_tokens, sizes, 99, 7)
    planes = canary_planes(layout, len(order), page_tokens, 77, shared, sizes)
    return Target(spread(layout, planes, page_tokens, order, tokens // page_tokens, firsts, sizes), copied(planes))


def lease_of(ns: NamespaceHandle, blocks: int, prompt: int = 0, **options: Any) -> Lease:
    return ns.lease(ns.match(ids(blocks * ns.block_tokens, prompt)), **options)


def damage(a: Bench, lease: Lease, part: int, block: int, at: int = HEADER_BYTES + 5) -> None:
    place = lease.reply.places[part][block - lease.reply.first_block]
    a.store.spans([place])[0].view[at] ^= 1


# What is read ---------------------------------------------------------------------------------------------------------


class Watched:
    """A namespace whose handle tells which frames it opened and how many layer slices it digested."""

    def __init__(self, a: Bench, layout: Layout) -> None:
        self.opened: list[int] = []
        self.digests = 0
        door = a.door()
        memory = door.memory

        def watched_memory(held: int, places: Any, *, writable: bool = False) -> Any:
            self.opened += places
            return memory(held, places, writable=writable)

        def watched_digest(*buffers: Any) -> bytes:
            self.digests += 1
            return digest(*buffers)

        door.memory = watched_memory  # type: ignore[method-assign]
        self.ns = NamespaceHandle(door, a.namespace(layout).namespace, codec_named("raw"), watched_digest)

    def blocks_opened(self, lease: Lease) -> list[set[int]]:
        """Of each part."""
        return [
            {block for block, place in enumerate(places, lease.reply.first_block) if place in self.opened}
            for places in lease.reply.places
        ]


def test_of_a_sliding_group_nothing_is_read_before_the_window(a: Bench) -> None:
    """100 tokens before token 512 begin with token 413, in the page of token 400, in block 6."""
    watched = Watched(a, TWO)
    ns = watched.ns
    source = stored(ns, 8)
    into, before = target(TWO, 512, {"sliding": 25})
    with lease_of(ns, 8) as lease:
        for block in range(6):
            damage(a, lease, 1, block, block)  # what is not opened is not missed
        watched.opened.clear()
        watched.digests = 0
        assert ns.get(lease, into.pages) == Loaded(512, lease.account, None)
        assert watched.blocks_opened(lease) == [set(range(8)), {6, 7}]
    assert watched.digests == 2 * 8 + 2 * 2
    assert a.store.usage().counters.get("reported_frames", 0) == 0
    load = Load(TWO, 16, 0, {}, 8, {})
    assert load.needed(TWO.groups[1], 8) == range(400, 512)
    assert_same_planes(into.pages.planes, expected_planes(before, into, source, load, 8))


@pytest.mark.parametrize("window", [1, 2, 17, 64, 65, 100, 448, 449, 512, 10_000])
@pytest.mark.parametrize("first_token", [0, 48, 320])
@pytest.mark.parametrize("has_all_pages", [True, False])
def test_a_window_of_any_size_is_read_from_where_it_begins(
    a: Bench, window: int, first_token: int, has_all_pages: bool
) -> None:
    """Whether there are more pages than it needs or not."""
    layout = Layout((full("full", (0,)), sliding("sliding", (1,), window)))
    ns = a.namespace(layout)
    source = stored(ns, 8)
    first_page = (max(first_token, 512 - window + 1) - first_token) // 16
    into, before = target(layout, 512 - first_token, {} if has_all_pages else {"sliding": first_page})
    with lease_of(ns, 8, first_token=first_token) as lease:
        assert ns.get(lease, into.pages, first_token).tokens == 512
    load = Load(layout, 16, first_token, {}, 8, {})
    assert_same_planes(into.pages.planes, expected_planes(before, into, source, load, 8))


def test_the_end_of_the_load_decides_not_that_of_the_pages_or_of_the_prompt(a: Bench) -> None:
    ns = a.namespace(TWO)
    source = stored(ns, 8)
    into, before = target(TWO, 512 + 80)
    with lease_of(ns, 5) as lease:
        assert ns.get(lease, into.pages).tokens == 320
    load = Load(TWO, 16, 0, {}, 5, {})
    assert_same_planes(into.pages.planes, expected_planes(before, into, source, load, 5))
    short, before = target(TWO, 144)
    with lease_of(ns, 8) as lease:
        assert ns.get(lease, short.pages).tokens == 128
    assert_same_planes(short.pages.planes, expected_planes(before, short, source, replace(load, stop=2), 2))


@pytest.mark.parametrize("codec", ["int8-kc64"])
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_codecs_of_8_bits_read_windows(a: Bench, codec: str, page_tokens: int) -> None:
    """As they read whole prompts: the same numbers in the window, nothing before it."""
    layout = Layout((full("full", (0, 2)), sliding("sliding", (1, 3), 100)), head_shards=2, layer_shards=2)
    ns = a.namespace(layout, codec=codec)
    stored(ns, 4, page_tokens)
    plain = Layout((full("full", (0, 2)), full("sliding", (1, 3))), head_shards=2, layer_shards=2)
    everything = a.namespace(plain, codec=codec)
    wanted = stored(everything, 4, page_tokens)
    whole, _ = target(plain, 256, page_tokens=page_tokens)
    into, before = target(layout, 256, {"sliding": 144 // page_tokens}, page_tokens)
    with lease_of(everything, 4) as lease:
        assert everything.get(lease, whole.pages).tokens == 256
    with lease_of(ns, 4) as lease:
        assert ns.get(lease, into.pages).tokens == 256
    load = Load(layout, page_tokens, 0, {}, 4, {})
    assert_same_planes(into.pages.planes, expected_planes(before, into, whole, load, 4))
    assert not same_bits(wanted.numbers(plain.groups[0], 0, 0, 0), whole.numbers(plain.groups[0], 0, 0, 0))


def test_groups_that_share_their_memory(a: Bench) -> None:
    """As an engine has it: layers of all groups at the same depth have one tensor, and each group pages of its own."""
    ns = a.namespace(THREE)
    source = stored(ns, 7, shared=True)
    assert source.pages.planes[0][0].data_ptr() == source.pages.planes[2][0].data_ptr()
    into, before = target(THREE, 448, {"near": 24, "far": 15}, shared=True)
    with lease_of(ns, 7) as lease:
        assert ns.get(lease, into.pages).tokens == 448
    assert_same_planes(into.pages.planes, expected_planes(before, into, source, Load(THREE, 16, 0, {}, 7, {}), 7))


# Pages that are not there ---------------------------------------------------------------------------------------------


def test_a_window_without_its_pages_is_one_line_and_touches_nothing(a: Bench) -> None:
    ns = a.namespace(TWO)
    stored(ns, 8)
    into, before = target(TWO, 512, {"sliding": 26})
    with lease_of(ns, 8) as lease:
        for verb in (ns.get, ns.get_by_layer):
            with refused(LayoutMismatch, "page 25", "'sliding'", "begin at page 26", "window=100", "to token 512"):
                verb(lease, into.pages)
        with refused(LayoutMismatch, "page 9", "begin at page 10", "up to token 512"):
            ns.get(lease, target(TWO, 256, {"sliding": 10}).prompt.pages, 256)
    assert_same_planes(into.pages.planes, before)


def test_full_attention_without_its_first_pages_is_one_line(a: Bench) -> None:
    ns = a.namespace(TWO)
    stored(ns, 2)
    into, before = target(TWO, 128, {"full": 1})
    with lease_of(ns, 2) as lease, refused(LayoutMismatch, "'full'", "full attention", "page 1"):
        ns.get(lease, into.pages)
    assert_same_planes(into.pages.planes, before)


def test_a_group_that_the_layout_does_not_have_is_one_line(a: Bench) -> None:
    ns = a.namespace(TWO)
    pages = replace(target(TWO, 128).prompt.pages, groups={"window": GroupPages(range(8))})
    stored(ns, 2)
    with lease_of(ns, 2) as lease:
        for use in (lambda: ns.get(lease, pages), lambda: ns.put(ids(128, 900), pages)):
            with refused(LayoutMismatch, "'window'", "'full', 'sliding'"):
                use()


def test_two_pieces_of_a_prompt_in_one_page_are_one_line(a: Bench) -> None:
    ns = a.namespace(TWO)
    stored(ns, 2)
    planes = canary_planes(TWO, 20, 16, 5, shared=True)
    before = copied(planes)
    pages = Pages(planes, range(8), 16, {"sliding": GroupPages([8, 9, 10, 11, 12, 13, 14, 3])})
    with lease_of(ns, 2) as lease:
        for verb in (ns.get, ns.get_by_layer):
            with refused(LayoutMismatch, "'full' and 'sliding'", "page 3", "one piece of a prompt"):
                verb(lease, pages)
    assert_same_planes(planes, before)
    for groups in ({}, pages.groups):
        with pytest.raises(LayoutMismatch):
            ns.put(ids(128, 900), replace(pages, groups=groups))
    assert a.store.usage().blocks == 2 and not a.store.usage().reservations


# What fails -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", range(1, 8))
def test_where_a_block_fails_the_window_before_it_is_read_if_there_are_pages_for_it(a: Bench, bad: int) -> None:
    """Before the window at the end, or in it: block 6, where that begins, was read in part."""
    ns = a.namespace(TWO)
    source = stored(ns, 8)
    into, before = target(TWO, 512)
    with lease_of(ns, 8) as lease:
        damage(a, lease, 0, bad)
        loaded = ns.get(lease, into.pages)
        assert (loaded.tokens, loaded.reason) == (64 * bad, MissReason.CORRUPT)
        account = {"asked": 512, "hits": {"dram": 64 * bad}, "misses": {"corrupt": 512 - 64 * bad}}
        assert loaded.account.to_dict() == account
    check_loaded(before, into, source, Load(TWO, 16, 0, {}, 8, {"full": [bad]}), 64 * bad)
    assert a.store.usage().counters["reported_frames"] == 1
    assert ns.match(ids(512)).blocks == bad


def test_a_load_that_lacks_the_chunk_of_a_fault_ends_where_that_chunk_begins(a: Bench) -> None:
    """There it needs nothing of that group. A fault at token 320, in the chunk of 256, whose pages are gone."""
    layout = Layout((full("full", (0,)), KvGroup("chunk", (1,), 2, (8, 8), "bfloat16", Attention.CHUNKED, 128)))
    ns = a.namespace(layout)
    source = stored(ns, 7)
    into, before = target(layout, 448, {"chunk": 384 // 16})
    with lease_of(ns, 7) as lease:
        damage(a, lease, 0, 5)
        loaded = ns.get(lease, into.pages)
    assert (loaded.tokens, loaded.reason) == (256, MissReason.CORRUPT)
    check_loaded(before, into, source, Load(layout, 16, 0, {"chunk": 24}, 7, {"full": [5]}), 256)


def test_what_was_read_before_a_fault_is_not_read_again(a: Bench) -> None:
    """But for the block in which the window began: that was written in part."""
    layout = Layout((full("full", (0, 1)), sliding("sliding", (2, 3), 200)))
    watched = Watched(a, layout)
    source = stored(watched.ns, 8)
    into, before = target(layout, 512)
    with lease_of(watched.ns, 8) as lease:
        damage(a, lease, 0, 7)
        watched.digests = 0
        assert watched.ns.get(lease, into.pages).tokens == 448
    assert watched.digests == (2 * 7 + 1) + 2 * len([4, 5, 6]) + 2 * len([3, 4])
    check_loaded(before, into, source, Load(layout, 16, 0, {}, 8, {"full": [7]}), 448)


SHAPES = st.sampled_from([(2, (8, 8), "bfloat16"), (1, (16,), "float32"), (2, (4, 12), "uint8")])


class Shape(NamedTuple):
    """A layout and the pages of an engine that has it."""

    layout: Layout
    page_tokens: int
    sizes: Sizes


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """One to three groups of two layers of any kind, their layers in any order, each with rows and pages of its own."""
    block_tokens = draw(st.sampled_from([64, 128, 112]))
    divisors = [tokens for tokens in range(8, block_tokens + 1) if block_tokens % tokens == 0]
    count = draw(st.integers(1, 3))
    layers = draw(st.permutations(range(2 * count)))
    groups, sizes = [], {}
    page_tokens = draw(st.sampled_from(divisors))
    for at in range(count):
        kind = draw(st.sampled_from(Attention))
        has_window = kind in (Attention.SLIDING, Attention.CHUNKED)
        window = draw(st.integers(1, 500) | st.sampled_from([64, 256])) if has_window else 0
        row = block_tokens if kind is Attention.STATE else draw(st.sampled_from([1, 1, 4, 16]))
        size = draw(st.sampled_from([tokens for tokens in divisors if tokens % row == 0]))
        if size != page_tokens:
            sizes[f"group {at}"] = size
        groups.append(KvGroup(f"group {at}", tuple(layers[2 * at : 2 * at + 2]), *draw(SHAPES), kind, window, row))
    shards = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    return Shape(Layout(tuple(groups), block_tokens, 1, *shards), page_tokens, sizes)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(shape=shapes(), data=st.data())
def test_right_bytes_exactly_where_they_are_promised(shape: Shape, data: st.DataObject) -> None:
    """Any layout, any tables, any beginning, any number of bad frames, at once and layer by layer."""
    layout, page_tokens, sizes = shape
    a = bench()
    ns = a.namespace(layout)
    blocks, size = data.draw(st.integers(1, 5), "blocks"), layout.block_tokens
    source = stored(ns, blocks, page_tokens, seed=data.draw(st.integers(0, 3), "seed"), sizes=sizes)
    boundary = lcm(page_tokens, *sizes.values())
    first_token = data.draw(st.integers(0, blocks * size // boundary), "first page") * boundary
    load = Load(layout, page_tokens, first_token, {}, blocks, {}, sizes)
    firsts = {
        group.name: data.draw(
            st.integers(0, (load.needed(group, blocks).start - first_token) // load.page(group)), "first"
        )
        for group in layout.groups
    }
    faults = data.draw(
        st.lists(st.tuples(st.integers(0, len(layout.parts) - 1), st.integers(0, blocks - 1)), max_size=3), "faults"
    )
    bad: dict[str, list[int]] = {}
    for part, block in faults:
        bad.setdefault(layout.parts[part].group.name, []).append(block)
    load = replace(load, first_pages=firsts, bad=bad)
    with lease_of(ns, blocks, first_token=first_token) as lease:
        for part, block in set(faults):
            if block >= lease.reply.first_block and first_token < blocks * size:
                damage(a, lease, part, block, data.draw(st.sampled_from([3, 300, HEADER_BYTES + 9]), "at"))
        into, before = target(layout, blocks * size - first_token, firsts, page_tokens, sizes=sizes)
        loaded = ns.get(lease, into.pages, first_token)
        by_layer = target(layout, blocks * size - first_token, firsts, page_tokens, sizes=sizes)
        told = list(ns.get_by_layer(lease, by_layer.prompt.pages, first_token))
    if first_token == blocks * size:
        assert loaded.tokens == first_token and loaded.reason is None
    else:
        assert loaded.tokens == load.end() * size
        assert loaded.reason is (None if load.end() == blocks else MissReason.CORRUPT)
    check_loaded(before, into, source, load, loaded.tokens)
    if loaded.reason is None:
        assert_same_planes(into.pages.planes, expected_planes(before, into, source, load, blocks))
    assert len(told) == len(layout.layers)
    assert all(one.tokens >= other.tokens for one, other in pairwise(told))
    last = told[-1].tokens
    on_the_way = range(last // size, blocks + 1) if len(faults) > 1 else ()
    check_loaded(by_layer.before, by_layer.prompt, source, load, last, on_the_way)
    if len(faults) < 2:
        assert told[-1] == loaded
    assert loaded.account.asked == told[-1].account.asked == blocks * size
    assert a.store.usage().pinned_bytes == 0
    a.store.check()


# Put ------------------------------------------------------------------------------------------------------------------


def offered(
    ns: NamespaceHandle, blocks: int, firsts: dict[str, int], page_tokens: int = 16, first_token: int = 0
) -> Pages:
    return target(ns.layout, blocks * ns.block_tokens - first_token, firsts, page_tokens).prompt.pages


def test_a_block_without_all_of_its_pages_is_not_stored(a: Bench) -> None:
    ns = a.namespace(TWO)
    for first_page in (1, 4, 17, 32):
        pages = offered(ns, 8, {"sliding": first_page})
        assert ns.put(ids(512), pages) == PutResult(0, 0, 0, MissReason.INCOMPLETE)
    assert a.store.usage().blocks == a.store.usage().reservations == 0
    assert ns.put(ids(512), offered(ns, 8, {"full": 3})) == PutResult(0, 0, 0, MissReason.INCOMPLETE)
    a.store.check()


@pytest.mark.parametrize(
    ("present", "first_page", "result"),
    [
        (1, 4, PutResult(1, 7, None, None)),
        (1, 5, PutResult(1, 0, 1, MissReason.INCOMPLETE)),
        (2, 5, PutResult(2, 6, None, None)),
        (5, 16, PutResult(5, 3, None, None)),
        (7, 28, PutResult(7, 1, None, None)),
        (7, 29, PutResult(7, 0, 7, MissReason.INCOMPLETE)),
        (8, 32, PutResult(8, 0, None, None)),
    ],
)
def test_blocks_that_are_stored_need_no_pages(a: Bench, present: int, first_page: int, result: PutResult) -> None:
    ns = a.namespace(TWO)
    source = stored(ns, present)
    pages = offered(ns, 8, {"sliding": first_page})
    assert ns.put(ids(512), pages) == result
    into, before = target(TWO, 512)
    blocks = result.present + result.stored
    with lease_of(ns, 8) as lease:
        loaded = ns.get(lease, into.pages)
    assert loaded.tokens == 64 * blocks
    if blocks == present:
        check_loaded(before, into, source, Load(TWO, 16, 0, {}, present, {}), 64 * present)
    assert a.store.usage().reservations == 0
    a.store.check()


def test_a_put_that_begins_later_says_what_is_missing_before_it(a: Bench) -> None:
    """Blocks before its first token are not its own to store: they are absent, and those behind incomplete."""
    ns = a.namespace(TWO)
    pages = offered(ns, 8, {"sliding": 6}, first_token=128)
    assert ns.put(ids(512), pages, first_token=128) == PutResult(0, 0, 0, MissReason.ABSENT)
    stored(ns, 1)
    assert ns.put(ids(512), pages, first_token=128) == PutResult(1, 0, 1, MissReason.ABSENT)
    pages = offered(ns, 8, {"sliding": 6}, first_token=64)
    assert ns.put(ids(512), pages, first_token=64) == PutResult(1, 0, 1, MissReason.INCOMPLETE)


def test_what_stands_in_the_way_of_any_put_is_said_as_ever(a: Bench) -> None:
    ns = a.namespace(TWO)
    pages = offered(ns, 2, {"sliding": 4})
    reserved = a.store.reserve(ns.number, ns.match(ids(128)).keys, 0, 0, None)
    assert ns.put(ids(128), pages) == PutResult(0, 0, 0, MissReason.IN_FLIGHT)
    a.store.abort(reserved.reservation)
    assert ns.put(ids(128), pages) == PutResult(0, 0, 0, MissReason.INCOMPLETE)
    stored(ns, 2)
    a.store.evict(1)
    assert ns.put(ids(128), pages).stored == 1
    a.store.evict(2)
    assert ns.put(ids(128), pages) == PutResult(0, 0, 0, MissReason.INCOMPLETE)
    a.store.close()
    assert ns.put(ids(128), pages) == PutResult(0, 0, 0, MissReason.DISABLED)


def test_an_incomplete_put_evicts_nothing() -> None:
    a = bench(dram=1 << 18)
    ns = a.namespace(TWO)
    turn = 0
    while "evicted_blocks" not in a.store.usage().counters:
        stored(ns, 2, prompt=10_000 * turn)
        turn += 1
    evicted = a.store.usage().counters["evicted_blocks"]
    assert ns.put(ids(512, 990_000), offered(ns, 8, {"sliding": 1})).reason is MissReason.INCOMPLETE
    assert a.store.usage().counters["evicted_blocks"] == evicted


def test_what_is_held_is_made_durable_before_a_put_says_that_it_is_incomplete(tmp_path: Path) -> None:
    with kvstore.open(f"embedded:{tmp_path}", dram="1MiB", nvme="16MiB") as store:
        ns = store.namespace(model="m", layout=TWO)
        stored(ns, 3)
        found = ns.put(ids(512), offered(ns, 8, {"sliding": 16}), durability="disk")
        assert found == PutResult(3, 0, 3, MissReason.INCOMPLETE)
        assert store.usage().nvme is not None
        assert ns.put(ids(192), offered(ns, 3, {"sliding": 12}), durability="disk") == PutResult(3, 0, None, None)


def test_long_prompts_go_in_pieces(a: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a put and of a get, with pages that begin and a window that begins in the middle of any of them."""
    monkeypatch.setattr("kvstore.client.handle.WINDOW_BLOCKS", 2)
    monkeypatch.setattr("kvstore.client.get.PIECE_BLOCKS", 2)
    ns = a.namespace(THREE)
    assert ns.put(ids(512), offered(ns, 8, {"near": 21})) == PutResult(0, 0, 0, MissReason.INCOMPLETE)
    source = stored(ns, 8)
    into, before = target(THREE, 512, {"near": 28, "far": 19})
    with lease_of(ns, 8) as lease:
        assert ns.get(lease, into.pages).tokens == 512
    assert_same_planes(into.pages.planes, expected_planes(before, into, source, Load(THREE, 16, 0, {}, 8, {}), 8))
    a.store.evict(3)
    assert ns.put(ids(512), offered(ns, 8, {"near": 20})) == PutResult(5, 3, None, None)
    a.store.evict(3)
    assert ns.put(ids(512), offered(ns, 8, {"near": 21})) == PutResult(5, 0, 5, MissReason.INCOMPLETE)


def test_the_model_of_these_tests_knows_wrong_bytes() -> None:
    """A window that begins one page too late, and a page that was not to be touched."""
    a = bench()
    ns = a.namespace(TWO)
    source = stored(ns, 4)
    into, before = target(TWO, 256)
    with lease_of(ns, 4) as lease:
        ns.get(lease, into.pages)
    load = Load(TWO, 16, 0, {}, 4, {})
    check_loaded(before, into, source, load, 256)
    first = into.page("sliding", 150)
    assert first is not None and load.needed(TWO.groups[1], 4).start == 144
    kept = into.pages.planes[1][0][first].clone()
    into.pages.planes[1][0][first] = before[1][0][first]
    with pytest.raises(AssertionError, match="page of token 144"):
        check_loaded(before, into, source, load, 256)
    into.pages.planes[1][0][first] = kept
    outside = into.page("sliding", 130)
    into.pages.planes[3][1][outside] = torch.zeros_like(into.pages.planes[3][1][outside])
    with pytest.raises(AssertionError, match="layer 3, plane 1"):
        check_loaded(before, into, source, load, 256)
