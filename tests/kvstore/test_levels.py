"""DRAM above NVMe on a real disk: what goes down comes up again, bit for bit, also in another process's place."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvstore
from asking import Asking
from kvstore.block.account import HitTier, MissReason
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from tiering.counts.tally import CheckedAt
from tiering.errors import TierUnavailable
from tiering.nvme.tier import NvmeTier
from tiering.slots import FrameState
from tiering.tier import extent_of, slot_of
from workbench import MODEL, prompt_of, put_prompt, read_prompt, small_layout

BLOCKS = 20
PROMPTS = 12
prompt = partial(prompt_of, blocks=BLOCKS)
put = partial(put_prompt, blocks=BLOCKS)
read = partial(read_prompt, blocks=BLOCKS)


def opened(path: Path, **options: Any) -> EmbeddedStore:
    """1 MiB of DRAM is room for 80 blocks of one part, 4 prompts."""
    store = kvstore.open(f"embedded:{path}", **{"dram": "1MiB", "nvme": "64MiB", **options})
    assert store.warmed(20)
    return store


def namespace(store: EmbeddedStore, **layout: Any) -> NamespaceHandle:
    return store.namespace(model=MODEL, layout=small_layout(**layout))


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
            blocks, _, lease = read(handle, number)
            assert blocks == BLOCKS and lease.account.hits == {HitTier.NVME: 64 * BLOCKS}
            assert handle.match(prompt(number)).tiers == ((HitTier.DRAM, BLOCKS),)
            store.check()


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
        delivered, _, lease = read(handle, 0)
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


def test_a_durable_put_that_stops_has_made_durable_what_it_holds(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        handle = namespace(store)
        keys = handle.match(prompt(0)).keys
        assert put(handle, 0, blocks=7, of=BLOCKS).stored == 7
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
        assert not core._levels._queue.bugs
        result = put(handle, 0, durability="disk")
        assert result.reason is None and result.present >= 3
        assert read(handle, 0)[0] == BLOCKS
        store.check()
    with opened(tmp_path) as store:
        assert read(namespace(store), 0)[0] == BLOCKS


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
