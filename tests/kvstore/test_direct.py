"""Blocks that DRAM has no place for are read from NVMe into the caller's pages: verified, kept as long as leased."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from groups import assert_same_planes, canary_planes, copied, full, sliding
from kvstore.config import Limits
from kvstore.handle import Lease, NamespaceHandle
from kvstore.layout import Layout
from kvstore.miss import HitTier, MissReason
from kvstore.node import EmbeddedStore
from kvstore.pages import GroupPages, Pages
from tiering.nvme import NvmeTier
from tiering.tier import extent_of, slot_of
from workbench import MODEL, blank_planes, ids, random_pages, same_tokens, small_layout

BLOCKS = 24
LIMITS = Limits(pinned_fraction=0.125)  # of 1 MiB of DRAM; a block of one part has 12 KiB


def opened(path: Path, **options: Any) -> EmbeddedStore:
    store = kvstore.open(f"embedded:{path}", **{"dram": "1MiB", "nvme": "16MiB", "limits": LIMITS, **options})
    assert store.warmed(20)
    return store


def namespace(store: EmbeddedStore, parts: int = 1) -> NamespaceHandle:
    return store.namespace(model=MODEL, layout=small_layout(layer_shards=parts))


def prompt(number: int) -> list[int]:
    return ids(64 * BLOCKS, 10_000 * number)


def put(handle: NamespaceHandle, number: int) -> None:
    pages = random_pages(handle.layout, BLOCKS, 64, number)
    assert handle.put(prompt(number), pages, durability="disk").reason is None


def lease(handle: NamespaceHandle, number: int, **options: Any) -> Lease:
    return handle.lease(handle.match(prompt(number)), **{"deadline_ms": 20_000, **options})


def get(handle: NamespaceHandle, held: Lease, number: int, first_block: int = 0) -> Any:
    """What a get delivers, compared."""
    into = Pages(blank_planes(handle.layout, BLOCKS, 64), range(BLOCKS - first_block), 64)
    loaded = handle.get(held, into, 64 * first_block)
    count = loaded.tokens // 64 - first_block
    for layer, planes in into.planes.items():
        for got, want in zip(planes, random_pages(handle.layout, BLOCKS, 64, number).planes[layer], strict=True):
            expected = want[first_block : first_block + count]
            assert torch.equal(got[:count].view(torch.uint8), expected.view(torch.uint8))
    return loaded


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("first_block", [0, 3, BLOCKS - 2])
def test_a_lease_goes_on_where_dram_ends(tmp_path: Path, parts: int, first_block: int) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store, parts)
        put(handle, 0)
        with lease(handle, 0, first_token=64 * first_block) as held:
            store.check()
            assert held.blocks == BLOCKS
            assert store.usage().pinned_bytes <= LIMITS.pinned_fraction * (1 << 20)
            if first_block < BLOCKS - 2:
                assert held.direct is not None and held.reply.blocks < BLOCKS
                assert held.direct.blocks == BLOCKS
            loaded = get(handle, held, 0, first_block)
            assert loaded.tokens == 64 * BLOCKS and loaded.reason is None
            assert loaded.account.asked == 64 * BLOCKS
        store.check()
        assert store.usage().pinned_bytes == 0


def test_with_all_of_dram_pinned_everything_comes_from_nvme(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store)
        put(handle, 0)
        put(handle, 1)
        with lease(handle, 0) as first:
            pinned = store.usage().pinned_bytes
            with lease(handle, 1) as second:
                assert second.reply.blocks == 0 and second.reply.lease == 0 and second.blocks == BLOCKS
                assert store.usage().pinned_bytes == pinned
                loaded = get(handle, second, 1)
                assert loaded.tokens == 64 * BLOCKS
                assert {one.origin for one in loaded.account.segments} == {HitTier.NVME}
                store.check()
            assert get(handle, first, 0).tokens == 64 * BLOCKS
        store.check()


def test_what_is_leased_is_not_evicted_from_the_disk(tmp_path: Path) -> None:
    """NVMe has room for three prompts; two leases keep two of them, and the third makes room for all others."""
    with opened(tmp_path, nvme="1MiB", slab="256KiB", limits=Limits(pinned_fraction=0.5)) as store:
        handle = namespace(store)
        put(handle, 0)
        held = lease(handle, 0)
        direct = handle.door.direct
        assert direct is not None
        kept = direct.lease(handle.number, held.keys, 0)
        held.release()
        assert kept.blocks == BLOCKS
        for number in range(1, 8):
            put(handle, number)
            store.check()
        store.evict(1000)
        reply = direct.fetch(kept.lease, 0, BLOCKS, 20_000)
        assert reply.reason is None and len(reply.frames) == BLOCKS
        direct.release(kept.lease)
        direct.release(kept.lease)
        store.check()
        for number in range(8, 12):
            put(handle, number)
        assert handle.match(prompt(0)).blocks < BLOCKS, "released, it went the way of all others"
        assert direct.fetch(kept.lease, 0, 1, 20_000).reason is MissReason.EVICTED


def test_layers_come_when_all_of_them_are_there(tmp_path: Path) -> None:
    """What comes from NVMe does so with all its layers: once for all of them."""
    with opened(tmp_path) as store:
        handle = namespace(store, 2)
        put(handle, 0)
        with lease(handle, 0) as held:
            assert held.direct is not None
            store.evict(1000)
            into = Pages(blank_planes(handle.layout, BLOCKS, 64), range(BLOCKS), 64)
            assert [loaded.tokens for loaded in handle.get_by_layer(held, into)] == [64 * BLOCKS] * 2
            assert same_tokens(into, random_pages(handle.layout, BLOCKS), range(64 * BLOCKS))
            ready = Pages(blank_planes(handle.layout, BLOCKS, 64), range(held.reply.blocks), 64)
            assert next(handle.get_by_layer(held, ready)).tokens == 64 * held.reply.blocks
            assert not any(plane.any() for plane in ready.planes[1]), "and what DRAM has layer by layer"
        store.check()


def test_a_window_is_read_past_dram(tmp_path: Path) -> None:
    layout = Layout((full("full", (0,)), sliding("sliding", (1,), 200)))
    with opened(tmp_path) as store:
        handle = store.namespace(model=MODEL, layout=layout)
        source = random_pages(layout, BLOCKS, 16)
        assert handle.put(prompt(0), source, durability="disk").reason is None
        with lease(handle, 0) as held:
            assert held.direct is not None and held.reply.blocks < BLOCKS
            first = (64 * BLOCKS - 199) // 16
            groups = {"sliding": GroupPages(range(300, 300 + 4 * BLOCKS - first), first)}
            for verb in (lambda *given: [handle.get(*given)], handle.get_by_layer):
                planes = canary_planes(layout, 400, 16, 1)
                before = copied(planes)
                told = list(verb(held, Pages(planes, range(4 * BLOCKS), 16, groups)))
                assert {loaded.tokens for loaded in told} == {64 * BLOCKS}
                before[0][0][: 4 * BLOCKS], before[0][1][: 4 * BLOCKS] = source.planes[0]
                for plane, right in zip(before[1], source.planes[1], strict=True):
                    plane[300 : 300 + 4 * BLOCKS - first] = right[first:]
                assert_same_planes(planes, before)
        store.check()


def test_a_frame_that_rotted_is_a_miss_from_there_on(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store)
        put(handle, 0)
        with lease(handle, 0) as held:
            assert held.direct is not None
            bad = held.reply.blocks + 3
            row = store._store._blocks.index.match(handle.number, held.keys)[bad]
            _flip(tmp_path, store, row)
            assert get(handle, held, 0).tokens == 64 * BLOCKS, "as long as DRAM has it too"
            store.evict(1000)
            loaded = get(handle, held, 0)
            assert loaded.tokens == 64 * bad and loaded.reason is MissReason.CORRUPT
            assert loaded.account.asked == 64 * BLOCKS
            assert store.usage().counters["quarantined_blocks"] == 1
            store.check()
        assert handle.match(prompt(0)).blocks == bad
        assert handle.match(prompt(0)).reason is MissReason.CORRUPT
        store.check()


def test_a_namespace_that_is_dropped_ends_the_lease(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store)
        put(handle, 0)
        with lease(handle, 0) as held:
            ready = held.reply.blocks
            assert store.drop(handle) == BLOCKS
            put(handle, 0)  # the same prompt again, in other places
            loaded = get(handle, held, 0)
            assert loaded.tokens == 64 * ready and loaded.reason is MissReason.EVICTED
            store.check()
        store.check()


def test_a_disk_that_does_not_answer_is_a_miss(tmp_path: Path, monkeypatch: Any) -> None:
    answers = threading.Event()
    real = NvmeTier.read

    def slow(*arguments: Any) -> None:
        assert answers.wait(20)
        real(*arguments)

    monkeypatch.setattr("kvstore.getting.DIRECT_MS", 50.0)
    with opened(tmp_path) as store:
        handle = namespace(store)
        put(handle, 0)
        with lease(handle, 0) as held:
            store.evict(1000)
            monkeypatch.setattr(NvmeTier, "read", slow)
            loaded = get(handle, held, 0)
            assert loaded.tokens == held.reply.blocks * 64 and loaded.reason is MissReason.DEADLINE
            answers.set()
            monkeypatch.setattr("kvstore.getting.DIRECT_MS", 20_000.0)
            assert get(handle, held, 0).tokens == 64 * BLOCKS, "the lease still stands"
        store.check()


@pytest.mark.parametrize("end", ["run out", "forgotten", "closed"])
def test_leases_end_as_others_do(tmp_path: Path, end: str) -> None:
    store = opened(tmp_path, limits=Limits(pinned_fraction=0.125, lease_seconds=0.05 if end == "run out" else 30))
    handle = namespace(store)
    put(handle, 0)
    held: Lease | None = lease(handle, 0)
    assert held is not None and held.direct is not None
    kept = store._store._blocks.lower.residency.kept  # type: ignore[union-attr]
    assert kept
    if end == "run out":
        threading.Event().wait(0.1)
        lease(handle, 0).release()
        loaded = get(handle, held, 0)
        assert loaded.reason is MissReason.EVICTED and loaded.tokens == 64 * held.reply.blocks
    elif end == "forgotten":
        held = None
        gc.collect()
        put(handle, 0)  # whatever is asked next
        assert not kept
    else:
        store.close()
        assert get(handle, held, 0).reason is MissReason.DISABLED
    store.check()
    store.close()


def test_a_forked_child_reads_nothing_and_waits_for_nobody(tmp_path: Path) -> None:
    """Another thread of the parent has the store's lock at that moment; in the child there is no such thread."""
    with opened(tmp_path) as store:
        handle = namespace(store)
        put(handle, 0)
        held = lease(handle, 0)
        assert held.direct is not None
        into = Pages(blank_planes(handle.layout, BLOCKS, 64), range(BLOCKS), 64)
        with store._store._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork: they are the point
            child = os.fork()
            if not child:
                try:
                    signal.alarm(20)
                    reason = handle.get(held, into).reason
                    held.release()
                    store.close()
                    os._exit(0 if reason is MissReason.DISABLED else 3)
                finally:
                    os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert get(handle, held, 0).tokens == 64 * BLOCKS
        held.release()
        store.check()


def _flip(directory: Path, store: EmbeddedStore, row: int) -> None:
    """One bit of a frame's payload on disk."""
    lower = store._store._blocks.lower
    assert lower is not None
    place = lower.residency.place(row, 0)
    slab = lower.tier._ledger.pieces[extent_of(place)]
    with open(directory / "nvme" / slab.name, "r+b") as file:
        file.seek(slab.header.offset(slot_of(place)) + 5000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 16]))


def test_the_frame_of_another_part_is_quarantined(tmp_path: Path) -> None:
    """It has the block's name and a good MAC: only its stamp tells that it stands in the wrong place."""
    with opened(tmp_path) as store:
        handle = namespace(store, parts=2)
        put(handle, 0)
        with lease(handle, 0) as held:
            assert held.direct is not None
            bad = held.reply.blocks + 2
            row = store._store._blocks.index.match(handle.number, held.keys)[bad]
            lower = store._store._blocks.lower
            assert lower is not None
            frames = []
            for part in range(2):
                place = lower.residency.place(row, part)
                slab = lower.tier._ledger.pieces[extent_of(place)]
                frames.append((tmp_path / "nvme" / slab.name, slab.header.offset(slot_of(place)), slab.frame_bytes))
            (source, at, size), (target, to, _) = frames[1], frames[0]
            content = source.read_bytes()[at : at + size]
            with target.open("r+b") as file:
                file.seek(to)
                file.write(content)
            store.evict(1000)
            loaded = get(handle, held, 0)
            assert loaded.tokens == 64 * bad and loaded.reason is MissReason.CORRUPT
            assert store.usage().counters["quarantined_blocks"] == 1
            store.check()
