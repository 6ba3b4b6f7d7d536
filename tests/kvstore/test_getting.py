"""A get layer by layer: what each yield promises, what ends it, and that nothing is held between two of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from groups import canary_planes, copied, full, same_bits, sliding
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.errors import LeaseExpired
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client import get as getting
from kvstore.client.handle import Loaded, NamespaceHandle
from kvstore.client.lease import Lease
from tiering.frame import HEADER_BYTES, digest
from workbench import Bench, bench, blank_pages, ids, plausible_pages, random_pages, same_tokens, small_layout

LAYOUTS = {
    "one part": small_layout(layers=4),
    "by layer": small_layout(layers=5, layer_shards=3),
    "by head and layer": small_layout(layers=4, kv_heads=4, head_shards=2, layer_shards=2),
    "latent": Layout.mla(layers=3, latent_dim=24, rope_dim=8, dtype="bfloat16"),
    "more than ten": small_layout(layers=12),
    "mixed groups": Layout((full("full", (5, 0, 3)), sliding("sliding", (4, 1, 2), 100))),
}
BLOCKS = 4


def namespace(a: Bench, layout: Layout, codec: str = "raw") -> tuple[NamespaceHandle, Pages]:
    """One with a prompt of four blocks."""
    ns = a.namespace(layout, codec=codec)
    source = random_pages(layout, BLOCKS, 16) if codec == "raw" else plausible_pages(layout, BLOCKS, 16)
    assert ns.put(ids(64 * BLOCKS), source).stored == BLOCKS
    return ns, source


def lease_of(ns: NamespaceHandle, **options: Any) -> Lease:
    return ns.lease(ns.match(ids(64 * BLOCKS)), **options)


def canaries(layout: Layout, blocks: int = BLOCKS) -> Pages:
    pages = 4 * blocks
    return Pages(canary_planes(layout, pages, 16, 7), range(pages), 16)


def damage(a: Bench, lease: Lease, part: int, block: int, at: int) -> None:
    a.store.spans([lease.reply.places[part][block]])[0].view[at] ^= 1


def part_of(layout: Layout, layer: int) -> tuple[int, int, int]:
    """Of a layer's first part: its number, how many layers it has, and which of them this is."""
    part = next(part for part in layout.parts if layer in part.layers)
    return part.index, len(part.layers), part.layers.index(layer)


# What each yield says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("codec", ["raw", "int8-kc64"])
def test_layers_come_in_the_order_of_their_numbers(a: Bench, name: str, codec: str) -> None:
    """After each yield that layer is as a get would have made it, and no later one is touched."""
    layout = LAYOUTS[name]
    ns, _ = namespace(a, layout, codec)
    whole, into = canaries(layout), canaries(layout)
    before = copied(dict(into.planes))
    with lease_of(ns) as lease:
        wanted = ns.get(lease, whole)
        assert wanted.tokens == 64 * BLOCKS
        layers = list(layout.layers)
        for at, loaded in enumerate(ns.get_by_layer(lease, into)):
            assert loaded == wanted
            for layer in layers:
                right = whole.planes if layer in layers[: at + 1] else before
                for got, want in zip(into.planes[layer], right[layer], strict=True):
                    assert same_bits(got, want), f"layer {layer} after {at + 1} layers"
        assert at + 1 == len(layers)
    a.store.check()


def test_headers_are_checked_once_and_digests_taken_once(a: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["by head and layer"]
    ns, source = namespace(a, layout)
    checked: list[bytes] = []
    names_block = getting.names_block
    monkeypatch.setattr(getting, "names_block", lambda *given: checked.append(given[0]) or names_block(*given))
    taken = []
    counting = NamespaceHandle(a.door(), ns.namespace, codec_named("raw"), lambda *it: taken.append(1) or digest(*it))
    into = blank_pages(layout, BLOCKS, 16)
    with lease_of(ns) as lease:
        assert [one.tokens for one in counting.get_by_layer(lease, into)] == [64 * BLOCKS] * 4
    assert len(checked) == len(layout.parts) * BLOCKS
    assert len(taken) == sum(len(part.layers) for part in layout.parts) * BLOCKS
    assert same_tokens(into, source, range(64 * BLOCKS))


def test_nothing_to_load_is_told_for_every_layer(a: Bench) -> None:
    layout = LAYOUTS["one part"]
    ns, _ = namespace(a, layout)
    with ns.lease(ns.match(ids(128, 900))) as nothing:
        told = list(ns.get_by_layer(nothing, canaries(layout)))
    assert told == [Loaded(0, nothing.account, None)] * 4


# What fails -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one part", "by layer", "by head and layer"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_bad_slice_ends_the_load_from_its_layer_on(a: Bench, name: str, layer: int) -> None:
    """And is reported once, however many layers the frame has."""
    layout = LAYOUTS[name]
    ns, source = namespace(a, layout)
    part, count, at = part_of(layout, layer)
    size = ns._grant.payload_bytes[part] // count
    into = canaries(layout)
    with lease_of(ns) as lease:
        damage(a, lease, part, 2, HEADER_BYTES + at * size + 11)
        told = list(ns.get_by_layer(lease, into))
        numbers = list(layout.layers)
        assert [one.tokens for one in told] == [64 * (4 if number < layer else 2) for number in numbers]
        assert [one.reason for one in told] == [None if number < layer else MissReason.CORRUPT for number in numbers]
        assert all(one.account.asked == 64 * BLOCKS for one in told)
        assert told[-1].account.misses == {MissReason.CORRUPT: 128}
    assert same_tokens(into, source, range(128))
    assert a.store.usage().counters["reported_frames"] == a.store.usage().counters["quarantined_blocks"] == 1
    assert ns.match(ids(64 * BLOCKS)).blocks == 2
    a.store.check()


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_header_that_goes_with_other_bytes_is_not_the_one_that_was_leased(a: Bench, by_layer: bool) -> None:
    """Payload and header were changed together, so that they agree: the lease's digest of the header tells."""
    layout = LAYOUTS["one part"]
    ns, source = namespace(a, layout)
    into = canaries(layout)
    with lease_of(ns) as lease:
        view = a.store.spans([lease.reply.places[0][2]])[0].view
        size = ns._grant.payload_bytes[0] // 4
        was = digest(view[HEADER_BYTES : HEADER_BYTES + size])
        at = bytes(view[:HEADER_BYTES]).index(was)
        view[HEADER_BYTES + 5] ^= 1
        view[at : at + len(was)] = digest(view[HEADER_BYTES : HEADER_BYTES + size])
        loaded = list(ns.get_by_layer(lease, into))[-1] if by_layer else ns.get(lease, into)
    assert loaded.tokens == 128 and loaded.reason is MissReason.CORRUPT
    assert same_tokens(into, source, range(128))
    assert a.store.usage().counters["quarantined_blocks"] == 1


def test_layers_that_were_told_before_are_mended_where_a_later_one_fails(a: Bench) -> None:
    """The sliding group's layers come first: their window moves back when the full one fails."""
    layout = Layout((sliding("sliding", (0, 1), 70), full("full", (2, 3))))
    ns, source = namespace(a, layout)
    into = canaries(layout)
    before = copied(dict(into.planes))
    with lease_of(ns) as lease:
        damage(a, lease, 1, 2, HEADER_BYTES + 1)
        told = ns.get_by_layer(lease, into)
        assert [next(told).tokens, next(told).tokens] == [256, 256]
        for layer in (0, 1):
            for plane, want in zip(into.planes[layer], before[layer], strict=True):
                assert same_bits(plane[:11], want[:11]), "69 tokens before token 256 are in pages 11 to 15"
        assert [one.tokens for one in told] == [128, 128]
    for layer in (0, 1):
        for plane, right, was in zip(into.planes[layer], source.planes[layer], before[layer], strict=True):
            assert same_bits(plane[3:8], right[3:8]) and same_bits(plane[:3], was[:3])
    assert same_tokens(Pages({2: into.planes[2], 3: into.planes[3]}, into.table, 16), source, range(128))


# What ends it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(4))
def test_a_release_ends_it_and_nothing_is_pinned_for_it(a: Bench, after: int) -> None:
    layout = LAYOUTS["one part"]
    ns, _ = namespace(a, layout)
    lease = lease_of(ns)
    into = canaries(layout)
    told = ns.get_by_layer(lease, into)
    assert [next(told).tokens for _ in range(after)] == [256] * after
    lease.release()
    assert a.store.usage().pinned_bytes == a.store.usage().leases == 0
    assert a.store.evict(10) == BLOCKS and a.store.usage().dram.zombie == 0
    before = copied(dict(into.planes))
    rest = list(told)
    assert [(one.tokens, one.reason) for one in rest] == [(0, MissReason.DISABLED)] * (4 - after)
    assert all(one.account.misses == {MissReason.DISABLED: 256} for one in rest)
    for layer, planes in before.items():
        assert all(map(same_bits, into.planes[layer], planes)), "nothing is written under a lease that is gone"
    a.store.check()
    with pytest.raises(LeaseExpired):
        ns.get_by_layer(lease, into)


@pytest.mark.parametrize("has_window", [False, True])
def test_a_release_in_the_middle_of_a_get_ends_it_at_the_next_piece(
    a: Bench, monkeypatch: pytest.MonkeyPatch, has_window: bool
) -> None:
    """What was read until then counts, if windows before it need nothing more."""
    monkeypatch.setattr(getting, "PIECE_BLOCKS", 1)
    layout = Layout((full("full", (0,)), sliding("sliding", (1,), 70))) if has_window else small_layout(layers=1)
    ns, source = namespace(a, layout)
    lease = lease_of(ns)
    taken: list[int] = []

    def releasing(*buffers: Any) -> bytes:
        taken.append(1)
        if len(taken) == 2:
            lease.release()
            assert a.store.usage().leases == 1, "a slot must not be used again under a copy"
        return digest(*buffers)

    into = canaries(layout)
    loaded = NamespaceHandle(a.door(), ns.namespace, codec_named("raw"), releasing).get(lease, into)
    assert (loaded.tokens, loaded.reason) == (0 if has_window else 128, MissReason.DISABLED)
    assert loaded.account.misses == {MissReason.DISABLED: 256 - loaded.tokens} and len(taken) == 2
    assert same_tokens(into, source, range(loaded.tokens))
    assert a.store.usage().leases == 0
    a.store.check()


def test_a_lease_that_ran_out_is_read_to_its_end(a: Bench) -> None:
    ns, source = namespace(a, LAYOUTS["one part"])
    lease = lease_of(ns)
    into = canaries(ns.layout)
    told = ns.get_by_layer(lease, into)
    next(told)
    a.clock.advance(10_000)
    assert a.store.evict(10) == BLOCKS and a.store.usage().dram.zombie == BLOCKS
    assert [one.tokens for one in told] == [256] * 3
    assert same_tokens(into, source, range(256))
    lease.release()
    assert a.store.usage().dram.zombie == 0
    a.store.check()


def test_one_that_is_forgotten_holds_nothing(a: Bench) -> None:
    ns, _ = namespace(a, LAYOUTS["one part"])
    lease = lease_of(ns)
    told: Iterator[Loaded] | None = ns.get_by_layer(lease, canaries(ns.layout))
    assert told is not None and next(told).tokens == 256
    told = None
    gc.collect()
    lease.release()
    assert a.store.usage().leases == 0 and a.store.evict(10) == BLOCKS
    a.store.check()


def test_a_store_that_closes_is_a_miss(a: Bench) -> None:
    ns, _ = namespace(a, LAYOUTS["one part"])
    lease = lease_of(ns)
    told = ns.get_by_layer(lease, canaries(ns.layout))
    assert next(told).tokens == 256
    a.store.close()
    assert [(one.tokens, one.reason) for one in told] == [(0, MissReason.DISABLED)] * 3


def test_a_namespace_that_is_dropped_is_a_miss_or_right(a: Bench) -> None:
    """Its slots are kept for the reader; what the extents are given back for meanwhile is not read."""
    ns, source = namespace(a, LAYOUTS["one part"])
    lease = lease_of(ns)
    into = canaries(ns.layout)
    told = ns.get_by_layer(lease, into)
    assert next(told).tokens == 256
    a.store.drop(ns.number)
    namespace(a, LAYOUTS["one part"])
    last = list(told)[-1]
    assert same_tokens(into, source, range(last.tokens))
    lease.release()
    a.store.check()


def test_what_each_layer_is_told_never_grows() -> None:
    """Many faults in many places."""
    for seed in range(12):
        a = bench()
        ns, source = namespace(a, LAYOUTS["by head and layer"])
        generator = torch.Generator().manual_seed(seed)
        into = canaries(ns.layout)
        with lease_of(ns) as lease:
            for _ in range(3):
                part, block, at = (int(torch.randint(0, most, (1,), generator=generator)) for most in (4, 4, 8000))
                damage(a, lease, part, block, at)
            told = [one.tokens for one in ns.get_by_layer(lease, into)]
        assert all(one >= other for one, other in pairwise(told)), f"seed {seed}"
        assert same_tokens(into, source, range(told[-1])), f"seed {seed}"
        a.store.check()
