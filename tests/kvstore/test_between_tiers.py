"""What happens between the two tiers at the wrong moment: each case once went wrong, or would without a line of code.

Everything runs on a simulated disk whose calls can be met one by one.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.block.account import HitTier, MissReason
from model.store_model import SHARDED, WHOLE, OpenStore, Owned, Prompt
from simulation.two_tiers import Disk, Sizes, bugs, load, nothing, open_two_tiers, put, wait_until_idle
from tiering.errors import TierUnavailable
from tiering.frame import HEADER_BYTES
from tiering.nvme.group_commit import BatchRequest
from tiering.nvme.tier import NvmeTier

ROOMY = Sizes(dram=1 << 20, nvme=16 << 20, slab=1 << 20)
A, LONGER = Prompt((0, 1)), Prompt((0, 1, 2))


class Place:
    """A store on a disk, opened as often as a test likes."""

    def __init__(self, directory: Path, sizes: Sizes = ROOMY, disk: Disk | None = None) -> None:
        self.directory, self.sizes = directory, sizes
        self.disk = disk or Disk()
        self.opened: OpenStore
        self.space: Owned
        self.sharded: Owned
        self.open()
        assert self.opened.store.warmed(60)

    def open(self) -> None:
        self.opened = open_two_tiers(self.directory, self.disk, self.sizes)
        self.space, self.sharded = self.opened.namespace("a", WHOLE), self.opened.namespace("b", SHARDED)

    def restart(self, index_too: bool = False) -> None:
        self.opened.close()
        if index_too:
            self.disk.discard()
        self.open()
        assert self.opened.store.warmed(60)

    def crash(self, seed: int = 0) -> None:
        self.disk.cut_power()
        self.opened.close()
        self.disk.crash(Random(seed))
        self.open()
        assert self.opened.store.warmed(60)

    @property
    def tier(self) -> NvmeTier:
        assert self.opened.blocks.lower is not None
        return self.opened.blocks.lower.tier

    @property
    def levels(self) -> Any:
        return self.opened.core._levels

    def is_well(self) -> None:
        wait_until_idle(self.opened.core)
        assert not bugs(self.opened.core), bugs(self.opened.core)
        self.opened.core.check()
        usage = self.opened.core.usage()
        assert (usage.leases, usage.pinned_bytes, usage.dram.reserved, usage.dram.zombie) == (0, 0, 0, 0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.disk.before_files = place.disk.before_index = nothing
    place.opened.close()


# Down -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["quarantined", "and stored again"])
def test_a_block_that_turns_out_bad_while_it_is_written_is_not_readable_from_disk(place: Place, again: bool) -> None:
    """Between its check and its commit a reader finds its frame damaged."""
    assert put(place.space, Prompt((9,)), "disk") is None  # the slab is there: the next sync is the block's
    assert put(place.space, A) is None
    lease = place.space.handle.lease(place.space.match(A))
    met = threading.Event()
    gone: list[tuple[int, bytes]] = []
    place.opened.blocks.lower.gone = lambda number, key: gone.append((number, key))  # type: ignore[union-attr]

    def damage(call: str) -> None:
        if call == "sync" and not met.is_set():
            met.set()
            place.space.frames(lease, 0)[0].view[HEADER_BYTES + 5] ^= 1
            place.opened.core.report(lease.reply.lease, 0, 0)
            lease.release()
            if again:
                assert put(place.space, A) is None

    place.disk.before_files = damage
    place.levels.demote_all(30)
    assert met.is_set()
    place.is_well()
    assert place.space.match(A).blocks == (2 if again else 0)
    assert again or place.space.match(A).reason is MissReason.CORRUPT
    assert not gone, "it was never there"
    blocks = place.opened.blocks
    for row in blocks.index.match(place.space.handle.number, lease.keys):
        if blocks.is_below(row):
            assert blocks.lower is not None
            assert blocks.lower.residency.generation(row) == blocks.residency.generation(row), "the older frame"
    assert put(place.space, A, "disk") is None
    assert load(place.space, A) == (2, None)
    place.is_well()
    place.crash()
    assert load(place.space, A) == (2, None), "what was acknowledged after it is there"
    place.is_well()


def test_a_damaged_frame_does_not_go_down(place: Place) -> None:
    """It is verified where it stands: what is written to the disk is believed by its header from then on."""
    assert put(place.sharded, LONGER) is None
    lease = place.sharded.handle.lease(place.sharded.match(LONGER))
    place.sharded.frames(lease, 1)[2].view[HEADER_BYTES + 5] ^= 1
    lease.release()
    assert place.levels.demote_all(30) is MissReason.CORRUPT
    assert len(place.opened.blocks.dirty) == 1, "what follows it stays, too"
    place.is_well()
    assert place.opened.core.usage().counters["demoted_blocks"] == 1
    assert place.sharded.match(LONGER).reason is MissReason.CORRUPT
    place.restart()
    assert load(place.sharded, LONGER)[0] == 1


def test_a_block_goes_down_behind_the_one_that_it_follows_and_never_alone(place: Place) -> None:
    """Whoever chose it may have chosen it while its parent was there. Else NVMe would hold the end of a chain."""
    assert put(place.space, LONGER) is None
    blocks, number = place.opened.blocks, place.space.handle.number
    rows = blocks.index.match(number, place.space.match(LONGER).keys)
    for alone in (rows[1:], rows[2:], [rows[2], rows[1]]):
        place.levels._demote(number, alone)
        assert not any(map(blocks.is_below, rows)) and place.tier.usage().used == 0
        place.is_well()
    place.levels._demote(number, [rows[0], rows[2]])
    assert list(map(blocks.is_below, rows)) == [True, False, False]
    place.levels._demote(number, rows[1:])
    assert all(map(blocks.is_below, rows))
    place.is_well()


def test_what_waits_to_be_written_down_is_no_more_than_what_there_is(place: Place) -> None:
    for number in range(300):
        assert put(place.space, Prompt((number % 7,))) is None
        place.opened.core.evict(10)
    rows = sum(len(list(place.opened.blocks.index.rows(space.number))) for space in place.opened.blocks.spaces)
    assert len(place.opened.blocks.dirty) <= rows + 10


def test_what_has_to_be_brought_up_is_not_leased_at_once(place: Place) -> None:
    """And asking so changes nothing; what is in DRAM, or nowhere, is answered."""
    core, number = place.opened.core, place.space.handle.number
    assert put(place.space, A, "disk") is None
    keys = place.space.match(A).keys
    at_once = core.lease_at_once(number, keys, 0)
    assert at_once is not None and at_once.blocks == len(keys)
    core.release(at_once.lease)
    place.restart()
    core, number = place.opened.core, place.space.handle.number
    assert core.lease_at_once(number, keys, 0) is None
    assert core.usage().pinned_bytes == 0 and core.usage().leases == 0
    absent = core.lease_at_once(number, [bytes(32)], 0)
    assert absent is not None and (absent.blocks, absent.reason) == (0, MissReason.ABSENT)
    lease = core.lease(number, keys, 0, 60_000)
    assert lease.blocks == len(keys) and lease.tiers == ((HitTier.NVME, len(keys)),)
    core.release(lease.lease)
    again = core.lease_at_once(number, keys, 0)
    assert again is not None and again.tiers == ((HitTier.DRAM, len(keys)),)
    core.release(again.lease)
    place.is_well()


def test_slots_in_doubt_after_a_crash_are_free_when_somebody_needs_them(tmp_path: Path) -> None:
    """All slots were about to be written: the next start has nothing that it could evict for a put."""
    place = Place(tmp_path, Sizes(nvme=640 << 10, slab=128 << 10))
    for number in range(20):
        assert put(place.space, Prompt((number,)), "disk") is None
    slot_class = place.opened.blocks.spaces[place.space.handle.number].classes[0]
    place.opened.drop(place.space)
    doubts = place.tier.reserve(slot_class, 1000)
    assert len(doubts) >= 24
    place.tier._commits.join(BatchRequest(doubts=doubts))
    place.crash()
    assert place.tier.usage().free == 0 and place.opened.core.usage().blocks == 0
    assert put(place.space, A, "disk") is None
    assert put(place.sharded, A, "disk") is None
    place.is_well()
    place.opened.close()


def test_parts_do_not_take_their_slabs_from_each_other(tmp_path: Path) -> None:
    """Five slabs; one namespace needs four of them, one for each part, and the other one had them all."""
    place = Place(tmp_path, Sizes(nvme=640 << 10, slab=128 << 10))
    for turn in range(4):
        for number in range(40):
            assert put(place.space, Prompt((100 * turn + number,)), "disk") is None
        for number in range(3):
            prompt = Prompt((100 * turn + number, 1))
            assert put(place.sharded, prompt, "disk") is None, (turn, number)
            assert place.sharded.match(prompt).blocks == 2
    place.is_well()
    place.opened.close()


def test_a_disk_that_takes_nothing_costs_no_more_than_one_group(tmp_path: Path) -> None:
    """NVMe is full and can be read, but nothing can be written: attempt after attempt must not evict what it has."""
    place = Place(tmp_path, Sizes(nvme=2 << 20, slab=512 << 10))
    for number in range(120):
        assert put(place.space, Prompt((number,)), "disk") is None
    before = place.tier.usage().used
    lost = []
    for call, hook in (("write", "files"), ("apply", "index")):

        def refuse(made: str, call: str = call) -> None:
            if made == call:
                raise OSError(errno.EIO, os.strerror(errno.EIO)) if call == "write" else TierUnavailable("no space")

        place.disk.before_files = refuse if hook == "files" else nothing
        place.disk.before_index = refuse if hook == "index" else nothing
        for number in range(30):
            put(place.space, Prompt((1000 + number,)), "disk")
            place.opened.clock.advance(6)  # type: ignore[attr-defined]
        wait_until_idle(place.opened.core)
        lost.append(before - place.tier.usage().used)
        place.disk.before_files = place.disk.before_index = nothing
        for _ in range(2):
            put(place.space, Prompt((2000,)), "disk")
            wait_until_idle(place.opened.core)
            place.opened.clock.advance(6)  # type: ignore[attr-defined]
        before = place.tier.usage().used
    assert max(lost) <= 32, lost
    place.is_well()
    place.opened.close()


# Up -------------------------------------------------------------------------------------------------------------------


def test_a_move_that_is_almost_over_is_not_taken_for_the_next_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block was brought up, given up and asked for again before the first move was out of the queue's books."""
    assert put(place.space, A, "disk") is None
    place.opened.core.evict(10)
    queue, gate, over = place.levels._queue, threading.Event(), threading.Event()
    finish: Callable[..., None] = queue._finish

    def finish_late(task: Any, finding: Any) -> None:
        if task.tier == "nvme reads" and not gate.is_set():
            over.set()
            assert gate.wait(60)
        finish(task, finding)

    monkeypatch.setattr(queue, "_finish", finish_late)
    try:
        with place.space.handle.lease(place.space.match(A), deadline_ms=200) as lease:
            assert over.wait(60) and lease.blocks <= 2
        while place.levels._promoting:
            threading.Event().wait(0.001)
        place.opened.core.evict(10)
        assert place.space.match(A).tiers == ((HitTier.NVME, 2),)
        with place.space.handle.lease(place.space.match(A), deadline_ms=500) as lease:
            assert lease.blocks == 2 or lease.reason is MissReason.DEADLINE, lease.reason
            assert place.space.match(A).tiers == ((HitTier.DRAM, 2),)
    finally:
        gate.set()
    place.is_well()


# Starts ---------------------------------------------------------------------------------------------------------------


def test_a_slab_that_cannot_be_read_at_a_start_costs_no_block_of_the_others(place: Place) -> None:
    """Of a block of four parts one cannot be looked at today. Its others stay, and it is all there tomorrow."""
    assert put(place.sharded, A, "disk") is None
    place.opened.close()
    for nth in (3, 4):  # behind the two pages of the stamp: both headers of the first slab
        place.disk.files.fail("read", nth, OSError(errno.EIO, os.strerror(errno.EIO)))
    place.open()
    assert not place.opened.store.warmed(60) and len(place.tier.left_alone) == 1
    assert place.sharded.match(A).reason is MissReason.TIER_DOWN, "not known to be absent"
    with pytest.raises(TierUnavailable):
        place.opened.drop(place.sharded)
    place.restart()
    assert load(place.sharded, A) == (2, None)
