"""Memory of an earlier process, taken over: what was readable is again, and nothing else ever is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvstore.block.account import HitTier, MissReason
from kvstore.block.identity import KeyRing, Prompt, TenantKeys, pack_about
from kvstore.block.layout import Layout
from kvstore.client.handle import NamespaceHandle
from kvstore.client.lease import Lease
from kvstore.config import DramConfig, Limits
from kvstore.core.index import OpenedNamespace
from kvstore.core.recovery import space_of
from kvstore.node import StoreParts, build_store
from simulation.two_tiers import Disk
from tiering.dram.extents import MappedExtent
from tiering.frame import FrameHeader
from tiering.nvme.tier import NvmeTier
from tiering.slab_header import SlabSizes
from tiering.tier import SLOT_BITS, extent_of, slot_of
from waiting import FakeClock
from workbench import SECRET, Bench, bench, blank_pages, ids, random_pages, same_tokens, small_layout

from .conftest import Holder

LAYOUT = small_layout()
SHARDED = small_layout(layer_shards=2)
BLOCKS = 6
PROMPT = ids(64 * BLOCKS, 10_000)
"""The tokens of number 1."""
GUARD = 1000
"""Holders below it are clients of an earlier process."""


def begun(holder: Holder, run: int, ring: KeyRing | None = None, **options: Any) -> Bench:
    """A process's store, after whatever holder has; what came before it is not asked any more."""
    made = opened(holder, run, ring, **options)
    take_over(made)
    return made


def take_over(made: Bench) -> None:
    made.store.start_loading({made.keys.tenant: made.keys})
    assert made.store.warmed(10)


def parts_of(holder: Holder, guard: int) -> StoreParts:
    return StoreParts(keeper=holder, kept=holder.handed_over(), guard=guard)


def opened(holder: Holder, run: int, ring: KeyRing | None = None, **options: Any) -> Bench:
    """The same before anything was taken over."""
    clock, ring = FakeClock(), ring or KeyRing()
    dram = DramConfig(options.get("dram", 1 << 20), options.get("extent", 64 << 10))
    store = build_store(dram, Limits(), ring, clock, parts=parts_of(holder, GUARD * run))
    made = Bench(store, clock, ring)
    ring.add(made.keys)
    return made


def stored(handle: NamespaceHandle, number: int, blocks: int = BLOCKS, layout: Layout = LAYOUT) -> int:
    pages = random_pages(layout, BLOCKS, seed=number)
    return handle.put(ids(64 * blocks, 10_000 * number), pages).stored


def readable(handle: NamespaceHandle, number: int, layout: Layout = LAYOUT) -> int:
    """Blocks that are there; each byte of them is right."""
    blank = blank_pages(layout, BLOCKS)
    with handle.lease(handle.match(ids(64 * BLOCKS, 10_000 * number)), deadline_ms=1000) as lease:
        loaded = handle.get(lease, blank)
    assert loaded.tokens == lease.tokens
    assert same_tokens(random_pages(layout, BLOCKS, seed=number), blank, range(loaded.tokens))
    return loaded.tokens // 64


@pytest.mark.parametrize("layout", [LAYOUT, SHARDED], ids=["one part", "two parts"])
def test_what_was_readable_is_again(layout: Layout, keeper: Holder) -> None:
    first = begun(keeper, 1)
    handle = first.namespace(layout)
    for number in range(4):
        assert stored(handle, number, layout=layout) == BLOCKS
    for run in (2, 3):
        after = begun(keeper, run)
        handle = after.namespace(layout)
        after.store.check()
        assert [readable(handle, number, layout) for number in range(4)] == [BLOCKS] * 4
        assert stored(handle, 10 + run, layout=layout) == BLOCKS
        after.store.check()


def test_a_block_that_stands_alone_under_a_key_of_another_chain_is_readable_again(keeper: Holder) -> None:
    """As a state does, under the key of the KV block that it stands behind."""
    first = begun(keeper, 1)
    handle = first.namespace(LAYOUT)
    assert stored(handle, 0) == BLOCKS
    keys = handle.hashed(ids(64 * BLOCKS)).keys
    alone = Prompt(64, [keys[3]])
    assert first.namespace(LAYOUT, model="states").put(alone, random_pages(LAYOUT, 1, seed=9)).stored == 1
    after = begun(keeper, 2)
    states, blank = after.namespace(LAYOUT, model="states"), blank_pages(LAYOUT, 1)
    assert states.which(keys) == [False, False, False, True, False, False]
    assert states.get(states.lease(states.match(alone)), blank).tokens == 64
    assert same_tokens(random_pages(LAYOUT, 1, seed=9), blank, range(64))
    assert readable(after.namespace(LAYOUT), 0) == BLOCKS
    after.store.check()


def test_what_was_being_filled_is_not(tmp_path: Any, keeper: Holder) -> None:
    before = begun(keeper, 1)
    handle = before.namespace()
    assert stored(handle, 1) == BLOCKS
    keys = handle.match(ids(64 * BLOCKS, 20_000)).keys
    reply = before.store.reserve(handle.number, keys, 0, 0, None)
    assert before.store.commit(reply.reservation, 0, 0, [[bytes(16)] * 2] * 2) == 2  # two blocks of six are visible
    after = begun(keeper, 2)
    handle = after.namespace()
    assert handle.match(ids(64 * BLOCKS, 20_000)).blocks == 2
    assert after.store.usage().dram.used == BLOCKS + 2 and after.store.usage().dram.reserved == 0
    # Their payloads are not what their producer said: no engine gets them.
    with handle.lease(handle.match(ids(64 * BLOCKS, 20_000)), deadline_ms=1000) as lease:
        assert lease.blocks == 0 and lease.reason is MissReason.CORRUPT
    assert readable(handle, 1) == BLOCKS
    after.store.check()


def test_what_is_stored_before_anything_is_taken_over_stays(keeper: Holder) -> None:
    """Also where it went into slots of the memory that is taken over."""
    before = begun(keeper, 1)
    assert stored(before.namespace(), 1) == BLOCKS
    after = opened(keeper, 2)
    handle = after.namespace()
    assert stored(handle, 2, 3) == 3
    with handle.lease(handle.match(ids(64 * 3, 20_000))) as lease:
        taken_over = after.store.blocks.dram._extents.keys() & {place >> SLOT_BITS for place in lease.reply.places[0]}
        assert len(taken_over) == 1 and len(after.store.blocks.dram._extents) == 2
        take_over(after)
        after.store.check()
        assert stored(handle, 3) == BLOCKS, "which would be in the same slots"
        blank = blank_pages(LAYOUT, BLOCKS)
        assert handle.get(lease, blank).tokens == 64 * 3
        assert same_tokens(random_pages(LAYOUT, BLOCKS, seed=2), blank, range(64 * 3))
    assert [readable(handle, number) for number in (1, 2, 3)] == [BLOCKS, 3, BLOCKS]
    after.store.check()


def test_memory_without_a_block_may_go_before_anything_is_taken_over(keeper: Holder) -> None:
    before = begun(keeper, 1, dram=128 << 10)
    empty, full = before.namespace(), before.namespace(model="1" * 40)
    assert stored(empty, 1, 1) == stored(full, 2, 1) == 1
    assert before.store.evict(1) == 1 and len(keeper.kept) == 2
    after = opened(keeper, 2, dram=128 << 10)
    assert stored(after.namespace(model="2" * 40), 3, 1) == 1, "it has the extent that is empty"
    take_over(after)
    assert readable(after.namespace(model="1" * 40), 2) == 1
    after.store.check()


def test_what_was_dropped_or_evicted_stays_away(keeper: Holder) -> None:
    before = begun(keeper, 1)
    dropped, evicted = before.namespace(), before.namespace(model="1" * 40)
    assert stored(dropped, 1) == stored(evicted, 2) == BLOCKS
    lease = dropped.lease(dropped.match(PROMPT))  # its frames are kept from reuse
    assert before.store.drop(dropped.number) == BLOCKS and before.store.evict(2) == 2
    after = begun(keeper, 2)
    dropped, evicted = after.namespace(), after.namespace(model="1" * 40)
    assert readable(dropped, 1) == 0 and readable(evicted, 2) == BLOCKS - 2
    after.store.check()
    lease.release()


Damage = Callable[[Bench, Lease], object]


def flipped(at: int, block: int, part: int = 0) -> Damage:
    def damage(made: Bench, lease: Lease) -> None:
        made.store.spans([lease.reply.places[part][block]])[0].view[at] ^= 1

    return damage


def other_generation(by: int) -> Damage:
    """The ledger is written when a frame is committed, and the frame may be another one by then or since."""

    def damage(made: Bench, lease: Lease) -> None:
        place = lease.reply.places[0][4]
        ledger = made.store.blocks.dram._extents[extent_of(place)].ledger
        assert ledger is not None and ledger.generations[slot_of(place)] == lease.reply.generations[4]
        ledger.generations[slot_of(place)] += by

    return damage


def other_depth(index: int) -> Damage:
    return lambda made, lease: _write_header(made, lease.reply.places[0][5], block_index=index)


PAYLOAD, HEADER = 4096 + 77, 40
DAMAGES: dict[str, tuple[Layout, list[Damage], int, int]] = {
    # a prompt's blocks that are taken over, and how many of them are sound when they are first leased
    "a payload, and a header behind it": (LAYOUT, [flipped(PAYLOAD, 2), flipped(HEADER, 4)], 4, 2),
    "one of two parts": (SHARDED, [flipped(PAYLOAD, 3)], BLOCKS, 3),
    "the other part": (SHARDED, [flipped(PAYLOAD, 3, 1)], BLOCKS, 3),
    "no header of one part": (SHARDED, [flipped(HEADER, 3)], 3, 3),
    "no header of the other part": (SHARDED, [flipped(HEADER, 3, 1)], 3, 3),
    "an older generation than its ledger says": (LAYOUT, [other_generation(-1)], 4, 4),
    "a newer one": (LAYOUT, [other_generation(1)], 4, 4),
    "the depth of a first block": (LAYOUT, [other_depth(0)], 5, 5),
    "one too shallow": (LAYOUT, [other_depth(4)], 5, 5),
    "one too deep": (LAYOUT, [other_depth(6)], 5, 5),
}


@pytest.mark.parametrize(("layout", "damages", "found", "sound"), DAMAGES.values(), ids=DAMAGES)
def test_a_frame_that_is_not_what_was_stored_costs_its_block_and_what_follows_it_alone(
    layout: Layout, damages: list[Damage], found: int, sound: int, keeper: Holder
) -> None:
    """By its header it is given up before it is found; by its payload at the first lease. The other parts of its
    block are sound, and that is not enough."""
    before = begun(keeper, 1)
    handle = before.namespace(layout)
    for number in (1, 2):
        assert stored(handle, number, layout=layout) == BLOCKS
    lease = handle.lease(handle.match(PROMPT))
    for damage in damages:
        damage(before, lease)
    after = begun(keeper, 2)
    handle = after.namespace(layout)
    assert handle.match(PROMPT).blocks == found
    assert after.store.usage().dram.used == len(layout.parts) * (found + BLOCKS)
    with handle.lease(handle.match(PROMPT), deadline_ms=1000) as granted:
        assert granted.blocks == sound and (granted.reason is MissReason.CORRUPT) == (sound < found)
    assert after.store.usage().counters.get("quarantined_blocks", 0) == (sound < found)
    assert [readable(handle, number, layout) for number in (1, 2)] == [sound, BLOCKS]
    after.store.check()


def test_no_frame_is_taken_over_below_a_block_that_is_being_stored(keeper: Holder) -> None:
    before = begun(keeper, 1)
    assert stored(before.namespace(), 1) == BLOCKS
    after = opened(keeper, 2)
    handle = after.namespace()
    keys = handle.match(PROMPT).keys
    reserved = after.store.reserve(handle.number, keys[:3], 0, 0, None)
    take_over(after)
    after.store.check()
    after.store.abort(reserved.reservation)
    assert after.store.usage().dram.used == 0 and readable(handle, 1) == 0
    after.store.check()


@pytest.mark.parametrize("later", [0, 1], ids=["the same", "another one"])
def test_a_block_that_nvme_has_too_is_joined_with_its_own_frame_only(later: int, keeper: Holder) -> None:
    """In DRAM it may be what was stored after NVMe was to give up the other: they are two generations of one block."""
    disk = Disk()
    with ExitStack() as closed_at_the_end:
        before = on_disk(disk, keeper, 1)
        closed_at_the_end.callback(lambda: before.store._levels._queue.close(10))  # it was killed, but for its threads
        handle = before.namespace()
        assert handle.put(PROMPT, random_pages(LAYOUT, BLOCKS, seed=1), durability="disk").reason is None
        lease = handle.lease(handle.match(PROMPT))
        (place,) = lease.reply.places[0][-1:]
        header = _write_header(before, place, generation=before.header_of(place).generation + later)
        ledger = before.store.blocks.dram._extents[extent_of(place)].ledger
        assert ledger is not None
        ledger.write(slot_of(place), header.generation)
        after = on_disk(disk, keeper, 2)
        closed_at_the_end.callback(after.store.close)
        handle = after.namespace()
        tiers = handle.match(PROMPT).tiers
        assert tiers == (((HitTier.DRAM, 5), (HitTier.NVME, 1)) if later else ((HitTier.DRAM, 6),))
        assert readable(handle, 1) == BLOCKS
        after.store.check()


def _write_header(made: Bench, place: int, **other: int) -> FrameHeader:
    """The frame's header again, sealed with other numbers."""
    header = replace(made.header_of(place), **other)
    sealer = made.store.blocks.spaces[0].sealers[0]
    raw = sealer.seal(header.prefix_key, header.parent, header.block_index, header.generation, header.digests)
    made.store.spans([place])[0].view[: len(raw)] = raw
    return header


def on_disk(disk: Disk, holder: Holder, run: int) -> Bench:
    """A process's store, with NVMe below it."""
    clock, ring = FakeClock(), KeyRing()
    keys = TenantKeys.derive(SECRET)
    ring.add(keys)
    tier = NvmeTier(disk.process(), disk, ring, SlabSizes(4 << 20, 1 << 20), disk.new_uid)
    dram = DramConfig(1 << 20, 64 << 10)
    store = build_store(dram, Limits(), ring, clock, tier, parts_of(holder, GUARD * run))
    store.start_loading({keys.tenant: keys})
    assert store.warmed(20)
    return Bench(store, clock, ring)


def test_a_slot_that_a_client_of_the_process_before_maps_is_not_used_for_other_blocks(keeper: Holder) -> None:
    before = begun(keeper, 1, dram=64 << 10)  # one extent of five frames
    handle = before.namespace()
    assert stored(handle, 1, 4) == 4
    (extent,) = before.store.blocks.dram.all_extents(before.store.blocks.spaces[0].classes[0])
    mapped = MappedExtent(extent.memory.share(GUARD, writable=True), 64 << 10, writable=True)
    after = begun(keeper, 2, dram=64 << 10)
    handle = after.namespace()
    assert readable(handle, 1) == 4
    assert handle.put(ids(64, 50_000), random_pages(LAYOUT, 1)).reason is MissReason.DEADLINE
    assert readable(handle, 1) == 4, "nothing was evicted for what it would not have helped"
    assert after.store.usage().guarded_bytes == 64 << 10
    after.store.check()
    del mapped
    assert after.store.usage().guarded_bytes == 0
    assert stored(handle, 5, 1) == 1 and readable(handle, 1) == 4
    assert stored(handle, 6, 2) == 2
    after.store.check()


def test_memory_that_does_not_fit_is_given_back_when_nobody_maps_it(keeper: Holder) -> None:
    before = begun(keeper, 1)
    handle = before.namespace()
    for number in range(4):
        assert stored(handle, number) == BLOCKS
    assert len(keeper.kept) == 5
    (extent, *_) = before.store.blocks.dram.all_extents(before.store.blocks.spaces[0].classes[0])
    mapped = MappedExtent(extent.memory.share(GUARD, writable=False), 64 << 10, writable=False)
    smaller = begun(keeper, 2, dram=128 << 10)  # two of the five extents fit
    handle = smaller.namespace()
    assert 0 < sum(readable(handle, number) for number in range(4)) <= 10
    smaller.store.check()
    assert len(keeper.kept) == 2
    other = begun(keeper, 3, extent=128 << 10)
    assert len(keeper.kept) == 1, "the one that is mapped counts until it is not"
    assert other.store.usage().dram.taken_bytes == 64 << 10 and other.store.usage().dram.capacity == 0
    del mapped
    assert other.store.usage().dram.taken_bytes == 0 and not keeper.kept


def test_memory_of_a_tenant_without_keys_is_used_for_others(keeper: Holder) -> None:
    before = begun(keeper, 1)
    assert stored(before.namespace(), 1) == BLOCKS
    clock, ring = FakeClock(), KeyRing()
    dram = DramConfig(1 << 20, 64 << 10)
    store = build_store(dram, Limits(), ring, clock, parts=parts_of(keeper, 2))
    store.start_loading({})
    assert store.warmed(10) and store.usage().dram.used == 0
    store.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_random_life_over_many_processes(seed: int, keeper: Holder) -> None:
    """Each process ends at a random moment; the next one has a part of what was readable, right to the byte, and every
    block of it that fits."""
    random = Random(seed)
    ring = KeyRing()
    visible: dict[int, int] = {}
    for run in range(1, 7):
        made = begun(keeper, run, ring, dram=random.choice([512 << 10, 1 << 20]))
        spaces = [made.namespace(layout) for layout in (LAYOUT, SHARDED)]
        there = {number: readable(spaces[number % 2], number, (LAYOUT, SHARDED)[number % 2]) for number in range(8)}
        assert all(there[number] <= visible.get(number, 0) for number in there), f"seed {seed}"
        made.store.check()
        for _ in range(random.randrange(20)):
            number = random.randrange(8)
            handle, layout = spaces[number % 2], (LAYOUT, SHARDED)[number % 2]
            act = random.random()
            if act < 0.6:
                stored(handle, number, random.randrange(1, BLOCKS + 1), layout)
            elif act < 0.8:
                made.store.evict(random.randrange(4))
            elif act < 0.85:
                made.store.drop(handle.number)
            else:
                readable(handle, number, layout)
            made.store.check()
        visible = {number: spaces[number % 2].match(ids(64 * BLOCKS, 10_000 * number)).blocks for number in range(8)}


def test_an_orderly_end_leaves_nothing(keeper: Holder) -> None:
    made = begun(keeper, 1)
    assert stored(made.namespace(), 1) == BLOCKS and keeper.kept
    made.store.close()
    assert not keeper.kept


def _about(space: OpenedNamespace) -> bytes:
    return pack_about(space.namespace, [sealer.stamp.payload_bytes for sealer in space.sealers])


def test_what_is_said_of_a_namespace_must_be_its_own() -> None:
    """It is kept beside the frames, and who wrote it is not known: its digest has to be that of their headers."""
    a = bench()
    mine = a.store.blocks.spaces[a.namespace().number]
    other = a.store.blocks.spaces[a.namespace(model="1" * 40).number]
    blocks = bench().store.blocks
    assert space_of(blocks, a.keys, mine.namespace.digest(), _about(other)) is None
    assert space_of(blocks, None, mine.namespace.digest(), _about(mine)) is None
    assert space_of(blocks, a.keys, mine.namespace.digest(), b"") is None
    assert blocks.spaces == []
    found = space_of(blocks, a.keys, mine.namespace.digest(), _about(mine))
    assert found is not None and found.namespace == mine.namespace
    assert space_of(blocks, a.keys, mine.namespace.digest(), _about(other)) is found, "it is known by now"
