"""DRAM above NVMe on a real disk: what goes down comes up again, bit for bit, also in another process's place."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import kvstore
from asking import Asking
from kvstore.block.account import HitTier, MissReason
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.config import Limits
from kvstore.node import EmbeddedStore
from tiering.counts.tally import CheckedAt
from tiering.errors import TierUnavailable
from tiering.nvme.tier import NvmeTier
from tiering.slots import FrameState
from tiering.tier import extent_of, slot_of
from workbench import MODEL, blank_planes, ids, random_pages, small_layout

BLOCKS = 20
PROMPTS = 12
LONG_MS = 20_000


def opened(path: Path, **options: Any) -> EmbeddedStore:
    """1 MiB of DRAM is room for 80 blocks of one part, 4 prompts."""
    store = kvstore.open(f"embedded:{path}", **{"dram": "1MiB", "nvme": "64MiB", **options})
    assert store.warmed(20)
    return store


def namespace(store: EmbeddedStore, **layout: Any) -> NamespaceHandle:
    return store.namespace(model=MODEL, layout=small_layout(**layout))


def prompt(number: int, blocks: int = BLOCKS) -> list[int]:
    return ids(64 * blocks, 10_000 * number)


def pages(number: int, handle: NamespaceHandle, blocks: int = BLOCKS) -> Pages:
    return random_pages(handle.layout, blocks, 64, number)


def read(handle: NamespaceHandle, number: int, deadline_ms: float = LONG_MS) -> tuple[int, Any]:
    """How many blocks were delivered, each compared bit for bit; and the lease."""
    into = Pages(blank_planes(handle.layout, BLOCKS, 64), range(BLOCKS), 64)
    with handle.lease(handle.match(prompt(number)), deadline_ms=deadline_ms) as lease:
        loaded = handle.get(lease, into)
    want = pages(number, handle)
    blocks = loaded.tokens // 64
    for layer, planes in into.planes.items():
        for got, expected in zip(planes, want.planes[layer], strict=True):
            assert torch.equal(got[:blocks].view(torch.uint8), expected[:blocks].view(torch.uint8))
    assert loaded.account.asked == lease.account.asked == 64 * BLOCKS
    return blocks, lease


def put(handle: NamespaceHandle, number: int, **options: Any) -> Any:
    return handle.put(prompt(number), pages(number, handle), **options)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"layer_shards": 2}])
def test_more_than_dram_holds_is_all_there_and_still_there_after_a_restart(tmp_path: Path, layout: Any) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store, **layout)
        for number in range(PROMPTS):
            result = put(handle, number, durability="disk")
            assert result.reason is None and result.stored == BLOCKS
        for number in range(PROMPTS):
            assert read(handle, number)[0] == BLOCKS
            store.check()
        assert store.usage().counters["promoted_blocks"] > 0
        assert not store.usage().counters.get("evicted_blocks"), "nothing was lost, only moved"
    with opened(tmp_path) as store:
        handle = namespace(store, **layout)
        for number in range(PROMPTS):
            match = handle.match(prompt(number))
            assert match.tiers == ((HitTier.NVME, BLOCKS),)
            blocks, lease = read(handle, number)
            assert blocks == BLOCKS and lease.account.hits == {HitTier.NVME: 64 * BLOCKS}
            assert handle.match(prompt(number)).tiers == ((HitTier.DRAM, BLOCKS),)
            store.check()


def test_closing_writes_down_what_dram_alone_holds(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store)
        put(handle, 0)
        assert handle.match(prompt(0)).tiers == ((HitTier.DRAM, BLOCKS),)
    with opened(tmp_path) as store:
        assert read(namespace(store), 0)[0] == BLOCKS


def test_a_longer_prompt_goes_on_where_the_disk_ends(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store)
        handle.put(prompt(0, 8), pages(0, handle, 8), durability="disk")
    with opened(tmp_path) as store:
        handle = namespace(store)
        result = put(handle, 0, durability="disk")
        assert (result.present, result.stored, result.reason) == (8, BLOCKS - 8, None)
        tiers = handle.match(prompt(0)).tiers
        assert tiers == ((HitTier.NVME, 8), (HitTier.DRAM, BLOCKS - 8))
        store.check()


def test_tenants_do_not_see_each_other_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(namespace(store), 0)
        other = namespace(store.for_tenant("other"))
        other.put(prompt(1), pages(1, other))
    with opened(tmp_path) as store:
        mine, other = namespace(store), namespace(store.for_tenant("other"))
        assert read(mine, 0)[0] == BLOCKS and mine.match(prompt(1)).reason is MissReason.ABSENT
        assert read(other, 1)[0] == BLOCKS and other.match(prompt(0)).reason is MissReason.ABSENT


def test_a_namespace_that_is_dropped_stays_away(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store)
        put(handle, 0, durability="disk")
        assert store.drop(handle) == BLOCKS
        assert handle.match(prompt(0)).blocks == 0
        store.check()
    with opened(tmp_path) as store:
        assert namespace(store).match(prompt(0)).reason is MissReason.ABSENT


def test_a_frame_that_rotted_is_a_miss_and_its_slot_is_not_used_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(namespace(store), 0, durability="disk")
    with opened(tmp_path) as store:
        handle = namespace(store)
        blocks = store._store.blocks
        assert blocks.lower is not None
        row = blocks.index.match(handle.number, handle.match(prompt(0)).keys)[5]
        place = blocks.lower.residency.place(row, 0)
        slab = blocks.lower.tier._ledger.pieces[extent_of(place)]
        with (tmp_path / "nvme" / slab.name).open("r+b") as file:
            file.seek(slab.header.offset(slot_of(place)) + 5000)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        delivered, lease = read(handle, 0)
        assert delivered == 5 and lease.reason is MissReason.CORRUPT
        assert blocks.tally.now().damaged[CheckedAt.LOAD] == 1
        assert slab.slots.states[slot_of(place)] == FrameState.QUARANTINED
        assert handle.match(prompt(0)).reason is MissReason.CORRUPT
        store.check()
        assert put(handle, 0, durability="disk").stored == 1, "a put heals the chain"
        assert read(handle, 0)[0] == BLOCKS
        store.check()


def test_a_frame_in_the_place_of_the_blocks_other_part_is_a_miss(tmp_path: Path) -> None:
    """The same name and generation, and good in itself: a write that went astray inside one block."""
    with opened(tmp_path) as store:
        put(namespace(store, layer_shards=2), 0, durability="disk")
    with opened(tmp_path) as store:
        handle = namespace(store, layer_shards=2)
        blocks = store._store.blocks
        assert blocks.lower is not None
        row = blocks.index.match(handle.number, handle.match(prompt(0)).keys)[5]
        files, places = [], [blocks.lower.residency.place(row, part) for part in range(2)]
        for place in places:
            slab = blocks.lower.tier._ledger.pieces[extent_of(place)]
            files.append((tmp_path / "nvme" / slab.name, slab.header.offset(slot_of(place)), slab.frame_bytes))
        (target, offset, size), (source, source_offset, _) = files
        with source.open("rb") as whence, target.open("r+b") as whither:
            whence.seek(source_offset)
            whither.seek(offset)
            whither.write(whence.read(size))
        assert read(handle, 0)[0] == 5
        assert handle.match(prompt(0)).reason is MissReason.CORRUPT, "and not tried again by every request"
        store.check()
        assert put(handle, 0, durability="disk").stored == 1 and read(handle, 0)[0] == BLOCKS


def test_a_full_disk_evicts_its_oldest_chains(tmp_path: Path) -> None:
    with opened(tmp_path, nvme="2MiB", slab="512KiB") as store:
        handle = namespace(store)
        for number in range(PROMPTS):
            result = put(handle, number, durability="disk")
            assert result.reason is None, result
            store.check()
        usage = store.usage()
        assert usage.nvme is not None and usage.nvme.taken_bytes <= 2 << 20
        assert read(handle, PROMPTS - 1)[0] == BLOCKS
        assert handle.match(prompt(0)).reason is MissReason.EVICTED


def test_a_full_disk_takes_one_chain_after_the_other(tmp_path: Path) -> None:
    """Not the last blocks of all of them, the latest included: one whole chain is worth more than ten stumps."""
    frame, chains = 12 << 10, 5
    slab = BLOCKS * frame + (8 << 10)
    with opened(tmp_path, dram="4MiB", nvme=chains * slab, slab=slab) as store:
        handle = namespace(store)
        for number in range(chains + 2):
            assert put(handle, number, durability="disk").reason is None
        store.evict(10_000)  # what NVMe has not kept is gone with it
        found = [handle.match(prompt(number)).blocks for number in range(chains + 2)]
        assert found == [0, 0, *[BLOCKS] * chains]
        store.check()


def test_a_disk_that_does_not_answer_is_a_miss_at_the_deadline(tmp_path: Path, monkeypatch: Any) -> None:
    with opened(tmp_path) as store:
        for number in range(2):
            put(namespace(store), number, durability="disk")
    with opened(tmp_path) as store:
        handle = namespace(store)
        lower = store._store.blocks.lower
        assert lower is not None
        with monkeypatch.context() as patch:

            def refuse(*_: Any) -> None:
                raise TierUnavailable("the disk is gone")

            patch.setattr(lower.tier, "read", refuse)
            delivered, lease = read(handle, 0, deadline_ms=2000)
            assert delivered == 0 and lease.reason is MissReason.TIER_DOWN
            store.check()
            levels = store._store._levels
            assert levels is not None
            deadline = time.monotonic() + 20
            while levels._promoting:  # the others of the window still find out
                assert time.monotonic() < deadline
                time.sleep(0.001)
        levels._queue._breakers.clear()
        assert read(handle, 1)[0] == BLOCKS
    with opened(tmp_path) as store:
        handle = namespace(store)
        delivered, lease = read(handle, 0, deadline_ms=0)
        assert delivered == 0 and lease.reason is MissReason.DEADLINE
        store.check()


def test_a_durable_put_that_stops_has_made_durable_what_it_holds(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store)
        keys = handle.match(prompt(0)).keys
        assert handle.put(prompt(0, 7), pages(0, handle, 7)).stored == 7
        reply = Asking(handle.door).reserve(handle.number, keys[:9], 0, 0, None)  # somebody else is storing two blocks
        result = put(handle, 0, durability="disk")
        assert (result.stopped_at, result.reason) == (7, MissReason.IN_FLIGHT)
        rows = store._store.blocks.index.match(handle.number, keys)
        assert len(rows) == 7 and all(store._store.blocks.is_below(row) for row in rows)
        Asking(handle.door).abort(reply.reservation)


@pytest.mark.parametrize("is_refilled", [False, True])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_reader_finds_damage_before_the_write_does(
    tmp_path: Path, when: str, is_refilled: bool, monkeypatch: Any
) -> None:
    """A reader quarantines a block that is about to go down, or on its way; and perhaps a put fills it again."""
    with opened(tmp_path) as store:
        handle, core = namespace(store), store._store
        assert put(handle, 0).stored == BLOCKS
        lease = handle.lease(handle.match(prompt(0)))
        view = core.spans([lease.reply.places[0][3]])[0].view
        view[5000] ^= 1
        repairs: list[Any] = []

        def find() -> None:
            monkeypatch.undo()
            core.report(lease.reply.lease, 3, 0)
            assert core.usage().counters["quarantined_blocks"] == 1
            if is_refilled:
                repairs.append(Asking(handle.door).reserve(handle.number, handle.match(prompt(0)).keys, 0, 0, None))

        if when == "before":
            real_room = core._levels._make_room
            monkeypatch.setattr(core._levels, "_make_room", lambda *args: (real_room(*args), find())[0])
        else:
            real_verify = core.blocks.verify

            def verify(row: int, part: int) -> bool:
                if core.blocks.index.depth(row) == 3:
                    find()
                return real_verify(row, part)

            monkeypatch.setattr(core.blocks, "verify", verify)
        keys = handle.match(prompt(0)).keys
        durable, reason = Asking(handle.door).persist(handle.number, keys, 20)
        assert durable == 3 and reason is MissReason.CORRUPT, "up to the block that is not readable any more"
        lease.release()
        for reply in repairs:
            Asking(handle.door).abort(reply.reservation)
        store.check()
        assert core._levels._queue.bugs() == []
        result = put(handle, 0, durability="disk")
        assert result.reason is None and result.present >= 3
        assert read(handle, 0)[0] == BLOCKS
        store.check()
    with opened(tmp_path) as store:
        assert read(namespace(store), 0)[0] == BLOCKS


def test_what_it_says_of_bad_options(tmp_path: Path) -> None:
    for options, words in (
        ({"nvme": "1KiB"}, "too small"),
        ({"nvme": "9000TiB"}, "more than"),
        ({"nvme": "64MiB", "slab": "1GiB"}, "slab=1GiB"),
        ({"nvme": "much"}, "nvme='much'"),
    ):
        with pytest.raises(kvstore.BadInput, match=words):
            kvstore.open(f"embedded:{tmp_path}", dram="1MiB", **options)
    with opened(tmp_path, limits=Limits(lease_seconds=5)) as store:
        assert store.usage().blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_chains_wander_between_small_tiers(tmp_path: Path, seed: int) -> None:
    """Prompts that share beginnings, far more than both tiers hold: what is found is right, and nothing gets stuck."""
    random = Random(seed)
    with opened(tmp_path, nvme="1536KiB", slab="256KiB") as store:
        handle = namespace(store)
        assert store._store._levels is not None
        queue = store._store._levels._queue
        planes = {number: pages(number, handle) for number in range(3)}
        for _ in range(120):
            number, blocks = random.randrange(3), random.randrange(5, BLOCKS + 1)
            tail = random.randrange(8)  # the last four blocks differ
            ids_ = [*prompt(number, blocks - 4), *ids(256, 500_000 + 1000 * tail)]
            if random.random() < 0.6:
                durability = random.choice(["volatile", "volatile", "disk"])
                handle.put(ids_, Pages(planes[number].planes, range(blocks), 64), durability=durability)
            else:
                into = Pages(blank_planes(handle.layout, blocks, 64), range(blocks), 64)
                with handle.lease(handle.match(ids_), deadline_ms=LONG_MS) as lease:
                    loaded = handle.get(lease, into)
                for layer, got in into.planes.items():
                    for mine, want in zip(got, planes[number].planes[layer], strict=True):
                        count = loaded.tokens // 64
                        assert torch.equal(mine[:count].view(torch.uint8), want[:count].view(torch.uint8))
            assert not queue.bugs(), queue.bugs()
            store.check()
        assert {"demoted_blocks", "promoted_blocks", "evicted_blocks"} <= store.usage().counters.keys()
        assert store.usage().counters.get("quarantined_blocks", 0) == 0
    with opened(tmp_path, nvme="1536KiB", slab="256KiB") as store:
        store.check()
        assert store.usage().blocks > 0 and not store.usage().counters.get("quarantined_blocks")


def test_a_disk_that_cannot_be_taken_in_is_not_called_empty(tmp_path: Path, monkeypatch: Any) -> None:
    with opened(tmp_path) as store:
        put(namespace(store), 0, durability="disk")

    def refuse(*_: Any) -> None:
        raise TierUnavailable("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(NvmeTier, "load", refuse)
        with kvstore.open(f"embedded:{tmp_path}", dram="1MiB", nvme="64MiB") as store:
            assert not store.warmed(20)
            assert namespace(store).match(prompt(0)).reason is MissReason.TIER_DOWN
    with opened(tmp_path) as store:
        assert read(namespace(store), 0)[0] == BLOCKS, "and nothing of it was lost"
