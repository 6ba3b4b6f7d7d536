"""The scrub of a store on a real disk: rot is found and mended, what moves meanwhile is no rot, nobody waits for it."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import kvstore
from kvstore.block.account import HitTier, MissReason
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.config import Limits, parse_rate
from kvstore.core.recovery import NvmeRecovery
from kvstore.core.scrub import Scrubbing
from kvstore.node import EmbeddedStore
from tiering.faults import NVME_READS
from tiering.move_queue import Priority, QueueLimits
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.nvme.scrub import ScrubLimits
from tiering.nvme.slab import slab_name
from tiering.nvme.slab_files import DirectFiles
from tiering.slots import FrameState
from tiering.tier import extent_of, slot_of
from waiting import wait_until
from workbench import (
    MODEL,
    blank_planes,
    open_at,
    prompt_of,
    put_prompt,
    random_pages,
    read_prompt,
    small_layout,
)

SEED = 20261120
BLOCKS = 20
prompt = partial(prompt_of, blocks=BLOCKS)
put = partial(put_prompt, blocks=BLOCKS)
LONG_MS = 20_000
LONG_SECONDS = 30.0
EVER = ScrubLimits(1 << 40, first_seconds=0, pass_seconds=0, pause_seconds=0.02)
"""One pass after the other, as fast as it goes."""


class Watched(DirectFiles):
    """The real disk, with somebody who is told of each read before and after it is done."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.before: Callable[[str, int], None] | None = None
        self.after: Callable[[str, int], None] | None = None
        self.reads = 0

    def read(self, name: str, offset: int, into: memoryview) -> None:
        self.reads += 1
        if self.before is not None:
            self.before(name, offset)
        super().read(name, offset, into)
        if self.after is not None:
            self.after(name, offset)


class Rig:
    """A store, its disk, and hands on both."""

    def __init__(self, path: Path, scrub: Any = EVER, **options: Any) -> None:
        def files(directory: Path) -> Watched:
            self.files = Watched(directory)
            return self.files

        self.path = path
        options = {"dram": "1MiB", "nvme": "64MiB", **options}
        name = "scrub_limits" if isinstance(scrub, ScrubLimits) else "scrub"
        self.store = open_at(path, indexes=LmdbMaker, files=files, **{name: scrub}, **options)
        assert self.store.warmed(20)
        core = self.store._store
        assert core._levels is not None and core.blocks.lower is not None
        self.core, self.blocks, self.lower, self.queue = core, core.blocks, core.blocks.lower, core._levels._queue

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def namespace(self, **layout: Any) -> NamespaceHandle:
        return self.store.namespace(model=MODEL, layout=small_layout(**layout))

    def row(self, handle: NamespaceHandle, number: int, block: int) -> int:
        return self.blocks.index.match(handle.number, handle.match(prompt(number)).keys)[block]

    def place(self, row: int, part: int = 0) -> int:
        return self.lower.residency.place(row, part)

    def at(self, place: int) -> tuple[str, int]:
        """The slab and the offset of a place."""
        slab = self.lower.tier._ledger.pieces[extent_of(place)]
        return slab_name(slab.number), slab.header.offset(slot_of(place))

    def bytes_at(self, place: int, length: int) -> bytes:
        name, offset = self.at(place)
        return (self.path / "nvme" / name).read_bytes()[offset : offset + length]

    def damage(self, place: int, change: Callable[[bytes], bytes], at: int = 0, length: int = 4096) -> None:
        name, offset = self.at(place)
        with (self.path / "nvme" / name).open("r+b") as file:
            file.seek(offset + at)
            content = file.read(length)
            file.seek(offset + at)
            file.write(change(content))
            file.flush()
            os.fsync(file.fileno())

    def state(self, place: int) -> int | None:
        return self.lower.tier._ledger.state(place)

    def evict_below(self, handle: NamespaceHandle) -> None:
        """The worst leaf goes from NVMe, and its slots are free."""
        with self.core.lock:
            gone, claimed = self.blocks.below.evict(1, handle.number)
        places = [place for column in claimed for place in column]
        assert gone == len(places) == 1
        self.lower.tier.await_claims(places)
        self.lower.tier.abort(places)
        self.lower.tier.settle()

    def whole_pass(self) -> None:
        """Wait for a pass that has not begun yet to be over."""
        enough = self.scrub.passes + 2
        wait_until(lambda: self.scrub.passes >= enough)

    @property
    def scrub(self) -> Any:
        return self.store.usage().scrub

    @property
    def counters(self) -> dict[str, int]:
        return self.store.usage().counters

    def check(self) -> None:
        self.store.check()
        assert not self.queue.bugs, self.queue.bugs


def read(handle: NamespaceHandle, number: int, blocks: int = BLOCKS) -> int:
    return read_prompt(handle, number, blocks).blocks


def on_disk(path: Path, prompts: int = 1, **layout: Any) -> None:
    """Prompts that are on disk, in a store that is closed."""
    with Rig(path, scrub="off") as rig:
        handle = rig.namespace(**layout)
        for number in range(prompts):
            assert put(handle, number, durability="disk").reason is None


def scrub_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-scrub"]


# Rot ------------------------------------------------------------------------------------------------------------------

DAMAGES: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "a bit of the payload": (8192, lambda page: bytes([page[0] ^ 1]) + page[1:]),
    "a bit of the header": (0, lambda page: page[:100] + bytes([page[100] ^ 4]) + page[101:]),
    "a bit behind the header's end": (0, lambda page: page[:-1] + b"\x01"),
    "zeros for a header": (0, lambda page: bytes(4096)),
    "zeros for a page": (4096, lambda page: bytes(4096)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_rot_is_found_before_a_request_needs_the_block(tmp_path: Path, kind: str) -> None:
    on_disk(tmp_path)
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        rig.whole_pass()
        assert rig.scrub.frames >= BLOCKS and not rig.scrub.damaged
        place = rig.place(rig.row(handle, 0, 5))
        rig.damage(place, DAMAGES[kind][1], at=DAMAGES[kind][0])
        rig.whole_pass()
        assert rig.counters["scrub_damaged_frames"] == rig.scrub.damaged == 1
        assert rig.counters["quarantined_blocks"] == 1 and "promoted_blocks" not in rig.counters
        assert rig.state(place) == FrameState.QUARANTINED
        match = handle.match(prompt(0))
        assert (match.blocks, match.reason) == (5, MissReason.CORRUPT)
        rig.check()
        assert put(handle, 0, durability="disk").stored == 1, "a put heals the chain"
        assert read(handle, 0) == BLOCKS
        rig.whole_pass()
        assert rig.scrub.damaged == 1
        rig.check()
    with Rig(tmp_path) as rig:
        assert read(rig.namespace(), 0) == BLOCKS
        assert rig.state(place) == FrameState.QUARANTINED, "and its slot is not used again"


def test_a_whole_frame_in_the_wrong_place_is_rot(tmp_path: Path) -> None:
    """Valid in itself: another block's, and the other part of the same block."""
    on_disk(tmp_path, layer_shards=2)
    with Rig(tmp_path) as rig:
        handle = rig.namespace(layer_shards=2)
        rows = [rig.row(handle, 0, block) for block in (3, 4, 8)]
        frames = [rig.bytes_at(rig.place(row, part), 8192) for row, part in ((rows[1], 0), (rows[2], 1))]
        assert rig.lower.tier.residents(rig.place(rows[0]), 1 << 62, 0)[0].frame_bytes == 8192
        rig.damage(rig.place(rows[0], 0), lambda _: frames[0], length=8192)
        rig.whole_pass()
        assert rig.scrub.damaged == 1 and handle.match(prompt(0)).blocks == 3
        rig.damage(rig.place(rows[2], 0), lambda _: frames[1], length=8192)
        rig.whole_pass()
        assert rig.scrub.damaged == 2 and rig.counters["quarantined_blocks"] == 2
        assert not rig.blocks.is_below(rows[2]), "a block goes as a whole"
        rig.check()


@pytest.mark.parametrize("layout", [{}, {"layer_shards": 2}])
def test_what_dram_has_is_served_on_and_durable_again(tmp_path: Path, layout: Any) -> None:
    with Rig(tmp_path) as rig:
        handle = rig.namespace(**layout)
        assert put(handle, 0, durability="disk").reason is None
        rows = [rig.row(handle, 0, block) for block in (0, 7, 8, 19)]
        places = [rig.place(row) for row in rows]
        for place in places:
            rig.damage(place, lambda page: page[::-1])
        wait_until(lambda: rig.scrub.mended == 4)
        assert rig.counters["scrub_damaged_frames"] == 4 and rig.counters["scrub_mended_blocks"] == 4
        assert handle.match(prompt(0)).tiers == ((HitTier.DRAM, BLOCKS),)
        assert read(handle, 0) == BLOCKS
        for row, place in zip(rows, places, strict=True):
            assert rig.blocks.is_below(row) and rig.place(row) != place
            assert rig.state(place) == FrameState.QUARANTINED
        rig.whole_pass()
        assert rig.scrub.damaged == 4
        rig.check()
    with Rig(tmp_path) as rig:
        handle = rig.namespace(**layout)
        assert handle.match(prompt(0)).tiers == ((HitTier.NVME, BLOCKS),)
        assert read(handle, 0) == BLOCKS


def test_a_block_that_is_bad_in_both_tiers_is_a_miss(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        assert put(handle, 0, durability="disk").reason is None
        row = rig.row(handle, 0, 5)
        rig.blocks.dram.span_at(rig.blocks.residency.place(row, 0)).view[5000] ^= 1
        rig.damage(rig.place(row), lambda page: page[::-1])
        wait_until(lambda: rig.counters.get("quarantined_blocks") == 2)
        assert handle.match(prompt(0)).reason is MissReason.CORRUPT and not rig.scrub.mended
        assert put(handle, 0, durability="disk").stored == 1 and read(handle, 0) == BLOCKS
        rig.check()


def test_what_cannot_be_mended_at_once_is_written_down_at_the_end(tmp_path: Path) -> None:
    """An ancestor is lost in both tiers, so nothing may follow it down; until somebody puts it again."""
    on_disk(tmp_path)
    with Rig(tmp_path, scrub=ScrubLimits(1 << 40, first_seconds=0, pass_seconds=0, pause_seconds=600)) as rig:
        handle = rig.namespace()
        assert read(handle, 0) == BLOCKS  # so DRAM has it too, and nothing waits to be written down
        lost, row = rig.row(handle, 0, 4), rig.row(handle, 0, 9)
        rig.blocks.dram.span_at(rig.blocks.residency.place(lost, 0)).view[5000] ^= 1
        rig.damage(rig.place(lost), lambda page: page[::-1])
        wait_until(lambda: rig.counters.get("quarantined_blocks") == 2)
        rig.damage(rig.place(row), lambda page: page[::-1])
        wait_until(lambda: rig.scrub.damaged == 2 and rig.counters["quarantined_blocks"] == 3)
        rig.whole_pass()
        assert not rig.blocks.is_below(row) and not rig.scrub.mended
        rig.check()
        assert put(handle, 0).stored == 1
    with Rig(tmp_path, scrub="off") as rig:
        assert read(rig.namespace(), 0) == BLOCKS


# Frames that come and go while they are read --------------------------------------------------------------------------


def in_the_scrubs_read(monkeypatch: pytest.MonkeyPatch, hook: Callable[[str, int], None]) -> Callable[[str, int], None]:
    """The hook, called for reads that are the scrub's."""
    mine = threading.local()
    check = Scrubbing._check

    def watched(self: Scrubbing, *given: Any) -> None:
        mine.on = True
        try:
            check(self, *given)
        finally:
            mine.on = False

    def only_mine(name: str, offset: int) -> None:
        if getattr(mine, "on", False):
            hook(name, offset)

    monkeypatch.setattr(Scrubbing, "_check", watched)
    return only_mine


def test_a_block_that_goes_and_comes_back_to_the_same_slot_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read sees the zeros in between. Slot, row, key and generation are the same before and after it."""
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        assert put(handle, 0, durability="disk").reason is None
        row = rig.row(handle, 0, BLOCKS - 1)
        place = rig.place(row)
        target = rig.at(place)
        went: list[int | None] = []
        came: list[int] = []

        def go(name: str, offset: int) -> None:
            if (name, offset) == target and len(went) < 12:
                rig.evict_below(handle)
                went.append(rig.state(place))

        def come_back(name: str, offset: int) -> None:
            if (name, offset) == target and len(came) < len(went):
                assert put(handle, 0, durability="disk").reason is None
                came.append(rig.place(row))

        rig.files.before = in_the_scrubs_read(monkeypatch, go)
        rig.files.after = in_the_scrubs_read(monkeypatch, come_back)
        wait_until(lambda: len(came) == 12)
        rig.whole_pass()
        assert set(went) == {FrameState.FREE} and set(came) == {place}
        assert not rig.scrub.damaged and "quarantined_blocks" not in rig.counters
        assert rig.state(place) == FrameState.RESIDENT
        rig.check()


def test_a_read_that_goes_wrong_once_condemns_nothing(tmp_path: Path) -> None:
    """What is wrong is the way, not the medium: the second look finds the frame good."""
    on_disk(tmp_path)
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        place = rig.place(rig.row(handle, 0, 5))
        target = rig.at(place)
        flips: list[int] = []

        def flip(name: str, offset: int) -> None:
            if (name, offset) == target and len(flips) < 2:
                flips.append(offset)
                rig.damage(place, lambda page: bytes([page[0] ^ 1]) + page[1:], at=4096)

        rig.files.before = flip  # wrong for the first look, right again for the second one
        wait_until(lambda: len(flips) == 2)
        rig.files.before = None
        rig.whole_pass()
        assert not rig.scrub.damaged and read(handle, 0) == BLOCKS
        rig.check()


def test_a_request_that_brings_a_damaged_block_up_settles_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scrub meets the damage while a request reads the same frame: one of the two quarantines it, once."""
    on_disk(tmp_path)
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        row = rig.row(handle, 0, 5)
        target = rig.at(rig.place(row))
        promoting, looked = threading.Event(), threading.Event()
        looks: list[bool] = []

        def hold(name: str, offset: int) -> None:
            if (name, offset) == target and not getattr(scrubs, "on", False):
                promoting.set()
                assert looked.wait(LONG_SECONDS)

        scrubs = threading.local()
        quarantine = Scrubbing._quarantine

        def watched(self: Scrubbing, *given: Any) -> bool:
            looks.append(quarantine(self, *given))
            if promoting.is_set():
                looked.set()
            return looks[-1]

        def check(self: Scrubbing, *given: Any) -> None:
            scrubs.on = True
            try:
                original(self, *given)
            finally:
                scrubs.on = False

        original = Scrubbing._check
        monkeypatch.setattr(Scrubbing, "_check", check)
        monkeypatch.setattr(Scrubbing, "_quarantine", watched)
        rig.files.before = hold
        delivered: list[int] = []
        reader = threading.Thread(target=lambda: delivered.append(read(handle, 0)))
        reader.start()
        assert promoting.wait(LONG_SECONDS)
        rig.damage(rig.place(row), lambda page: page[::-1])
        assert looked.wait(LONG_SECONDS)
        reader.join(LONG_SECONDS)
        assert delivered == [5] and looks and not any(looks)
        rig.whole_pass()
        assert rig.counters["quarantined_blocks"] == 1
        rig.check()


THREADS = 4
OPERATIONS = 120
"""Of each worker at least; more where the scrub has not come by often enough."""


def test_nothing_is_condemned_while_a_lease_looks_for_slots_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(tmp_path)
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        row = rig.row(handle, 0, 5)
        assert rig.core._levels is not None
        room, levels = rig.core._room, rig.core._levels
        find_slots, quarantine_below = room.find_slots, levels.quarantine_below
        tried, quarantined = threading.Event(), threading.Event()
        early: list[bool] = []

        def look(lift: Any) -> Any:
            rig.damage(rig.place(row), lambda page: page[::-1])
            assert tried.wait(LONG_SECONDS)
            early.append(quarantined.wait(0.3))
            return find_slots(lift)

        def quarantine(*given: Any) -> bool:
            tried.set()
            done = quarantine_below(*given)
            quarantined.set()
            return done

        monkeypatch.setattr(room, "find_slots", look)
        monkeypatch.setattr(levels, "quarantine_below", quarantine)
        assert read(handle, 0) == 5 and early == [False]
        wait_until(lambda: "quarantined_blocks" in rig.counters)
        rig.whole_pass()
        assert rig.counters["quarantined_blocks"] == 1
        rig.check()


class Worker:
    """One thread that puts and reads prompts with common beginnings, and compares every byte."""

    def __init__(self, rig: Rig, handle: NamespaceHandle, planes: Any, seed: str, enough: threading.Event) -> None:
        self.rig, self.handle, self.planes, self.random = rig, handle, planes, Random(seed)
        self.enough = enough
        self.fault: BaseException | None = None
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        try:
            done = 0
            while done < OPERATIONS or not self.enough.is_set():
                done += 1
                blocks = self.random.randrange(1, BLOCKS + 1)
                chosen = prompt_of(self.random.randrange(16), blocks)
                if self.random.random() < 0.6:
                    durability = self.random.choice(["volatile", "disk"])
                    self.handle.put(chosen, Pages(self.planes, range(blocks), 64), durability=durability)
                else:
                    self.read(chosen, blocks)
        except BaseException as error:
            self.fault = error

    def read(self, chosen: list[int], blocks: int) -> None:
        into = Pages(blank_planes(self.handle.layout, blocks, 64), range(blocks), 64)
        with self.handle.lease(self.handle.match(chosen), deadline_ms=LONG_MS) as lease:
            count = self.handle.get(lease, into).tokens // 64
        for layer, got in into.planes.items():
            for mine, want in zip(got, self.planes[layer], strict=True):
                assert torch.equal(mine[:count].view(torch.uint8), want[:count].view(torch.uint8))


def run_workers(rig: Rig, monkeypatch: pytest.MonkeyPatch, seed: int, meanwhile: Callable[[Random], None]) -> list[str]:
    """Four workers and a scrub that never rests; returns the verdicts of its second looks.

    On any disk: the workers go on until the scrub has read some frames and has met one that changed meanwhile.
    """
    looks: list[str] = []
    enough, late = threading.Event(), time.monotonic() + LONG_SECONDS
    second_look = Scrubbing._second_look

    def counted(self: Scrubbing, place: int) -> Any:
        verdict = second_look(self, place)
        looks.append(verdict.value)
        return verdict

    monkeypatch.setattr(Scrubbing, "_second_look", counted)
    monkeypatch.setattr("kvstore.core.scrub.YIELD_SECONDS", 0.0)
    # What was readable when the read began may be anything when it is done.
    pauses = Random(f"{seed} pauses")
    rig.files.before = in_the_scrubs_read(monkeypatch, lambda *_: time.sleep(pauses.choice([0.0005, 0.0005, 0.03])))
    handle, random = rig.namespace(), Random(seed)
    planes = random_pages(handle.layout, BLOCKS, 64, 1).planes
    workers = [Worker(rig, handle, planes, f"{seed} {number}", enough) for number in range(THREADS)]
    while any(worker.thread.is_alive() for worker in workers):
        meanwhile(random)
        if (looks and rig.scrub.frames > 10) or time.monotonic() > late:
            enough.set()
        time.sleep(0.005)
    for worker in workers:
        assert worker.fault is None, worker.fault
    print(rig.scrub, looks, rig.counters)
    return looks


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED, SEED + 2))
def test_many_threads_and_tiny_tiers_make_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Far more than both tiers hold, so that slots change hands all the time."""
    print("seed", seed)
    with Rig(tmp_path, nvme="1536KiB", slab="256KiB") as rig:
        looks = run_workers(rig, monkeypatch, seed, lambda random: None)
        assert looks and not rig.scrub.damaged and "quarantined_blocks" not in rig.counters
        assert not rig.scrub.unreadable and rig.scrub.frames > 10
        assert rig.counters["evicted_blocks"] > 100
        rig.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED, SEED + 2))
def test_damage_under_many_threads_is_found_and_the_tables_stay_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    print("seed", seed)
    with Rig(tmp_path, nvme="3MiB", slab="256KiB") as rig:

        def rot(random: Random) -> None:
            frames = rig.lower.tier.residents(0, 1 << 62, 1 << 40)
            if frames:
                name, offset = rig.at(random.choice(frames).place)
                with (rig.path / "nvme" / name).open("r+b") as file:  # maybe another frame's by now: rot does not ask
                    file.seek(offset + random.randrange(12 * 1024))
                    file.write(b"\x55")
            rig.store.check()

        run_workers(rig, monkeypatch, seed, rot)
        rig.files.before = None
        rig.whole_pass()
        assert rig.scrub.damaged and rig.counters["quarantined_blocks"] >= rig.scrub.damaged
        damaged = rig.scrub.damaged
        rig.whole_pass()
        assert rig.scrub.damaged == damaged
        rig.check()


# A disk that does not read --------------------------------------------------------------------------------------------


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each step of the scrub's thread has returned so far."""
    steps: list[float] = []
    step = Scrubbing.step

    def counted(self: Scrubbing) -> float:
        steps.append(step(self))
        return steps[-1]

    monkeypatch.setattr(Scrubbing, "step", counted)
    return steps


def failing(rig: Rig, targets: Callable[[str, int], bool]) -> None:
    def fail(name: str, offset: int) -> None:
        if targets(name, offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    rig.files.before = fail


def test_a_frame_that_stays_unreadable_is_given_up_after_the_third_pass(tmp_path: Path) -> None:
    on_disk(tmp_path)
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        place = rig.place(rig.row(handle, 0, 5))
        target = rig.at(place)
        states: list[tuple[int, int | None]] = []

        def fail(name: str, offset: int) -> None:
            if (name, offset) == target:
                states.append((rig.core._scrubbing.scrub.usage().unreadable, rig.state(place)))  # type: ignore[union-attr]
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        rig.files.before = fail
        wait_until(lambda: "quarantined_blocks" in rig.counters)
        assert states == [(done, FrameState.RESIDENT) for done in (0, 0, 1, 1, 2, 2)], "two attempts in each pass"
        assert rig.scrub.unreadable == rig.counters["scrub_unreadable_frames"] == 3 and not rig.scrub.damaged
        assert rig.state(place) == FrameState.QUARANTINED
        assert handle.match(prompt(0)).reason is MissReason.CORRUPT
        assert put(handle, 0, durability="disk").stored == 1 and read(handle, 0) == BLOCKS
        assert not rig.queue.is_open(NVME_READS)
        rig.check()


def test_an_unreadable_frame_of_a_block_in_dram_is_replaced(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        assert put(handle, 0, durability="disk").reason is None
        row = rig.row(handle, 0, 5)
        target = rig.at(rig.place(row))
        failing(rig, lambda name, offset: (name, offset) == target)
        wait_until(lambda: rig.scrub.mended == 1)
        assert handle.match(prompt(0)).tiers == ((HitTier.DRAM, BLOCKS),) and rig.blocks.is_below(row)
        rig.check()
    with Rig(tmp_path) as rig:
        assert read(rig.namespace(), 0) == BLOCKS


@pytest.mark.slow
def test_a_disk_that_is_gone_is_left_alone_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(tmp_path)
    steps = counted_steps(monkeypatch)
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        rig.queue._limits = QueueLimits(breaker_seconds=1.0)
        rig.whole_pass()
        failing(rig, lambda name, offset: True)
        wait_until(lambda: rig.queue.is_open(NVME_READS))
        reads, taken, start = rig.files.reads, len(steps), time.monotonic()
        time.sleep(0.5)  # a scrub that did not mind would ask fifty times, and one that did not rest some thousand
        assert rig.files.reads - reads <= 10
        assert len(steps) - taken <= 10 + 3 * (time.monotonic() - start) / EVER.pause_seconds
        assert read(handle, 0) == 0
        rig.files.before = None
        wait_until(lambda: not rig.queue.is_open(NVME_READS))
        rig.whole_pass()
        assert "quarantined_blocks" not in rig.counters and read(handle, 0) == BLOCKS
        rig.check()


# Nobody waits for it --------------------------------------------------------------------------------------------------


class Hang:
    """A read that goes on when it may. begun: called at each."""

    def __init__(self, begun: Callable[[], None] = lambda: None) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self._begun = begun

    def __call__(self, name: str, offset: int) -> None:
        self._begun()
        self.began.set()
        assert self.goes_on.wait(LONG_SECONDS)


def test_requests_go_on_while_a_read_of_the_scrub_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(tmp_path, prompts=2)
    with Rig(tmp_path) as rig:
        handle = rig.namespace()
        hang = Hang()
        rig.files.before = in_the_scrubs_read(monkeypatch, hang)
        assert hang.began.wait(LONG_SECONDS)
        try:
            frames = rig.scrub.frames
            assert read(handle, 0) == BLOCKS and read(handle, 1) == BLOCKS
            assert put(handle, 2, durability="disk").stored == BLOCKS and read(handle, 2) == BLOCKS
            assert rig.store.drop(handle) == 3 * BLOCKS
            rig.check()
            assert rig.scrub.frames == frames, "all the while it hung"
        finally:
            hang.goes_on.set()
        rig.whole_pass()
        assert not rig.scrub.damaged


def test_a_window_ends_early_when_a_request_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(tmp_path)
    with Rig(tmp_path) as rig:
        rig.whole_pass()
        order: list[str] = []
        hang, ended = Hang(lambda: order.append("scrub")), threading.Event()
        rig.files.before = in_the_scrubs_read(monkeypatch, hang)
        assert hang.began.wait(LONG_SECONDS)
        try:
            busy = [
                rig.queue.submit(f"busy {number}", NVME_READS, Priority.WAITING, partial(wait_until, ended.is_set))
                for number in range(3)  # with the scrub's, all threads there are
            ]
            wait_until(lambda: rig.queue.depths()[Priority.WAITING] == 0)
            waiting = rig.queue.submit("waiting", NVME_READS, Priority.WAITING, lambda: order.append("request"))
            hang.goes_on.set()
            assert waiting.wait(LONG_SECONDS)
            assert order == ["scrub", "request"]
        finally:
            hang.goes_on.set()
            ended.set()
        assert all(move.wait(LONG_SECONDS) for move in busy)
        rig.whole_pass()


def test_closing_in_the_middle_of_a_pass_is_quick(tmp_path: Path) -> None:
    on_disk(tmp_path, prompts=4)
    slow = ScrubLimits(64 << 10, first_seconds=0, window_bytes=1)  # one small frame in a second
    with Rig(tmp_path, scrub=slow) as rig:
        wait_until(lambda: rig.scrub.frames > 0)
        assert rig.scrub.in_pass
        start = time.monotonic()
        rig.store.close()
        assert time.monotonic() - start < 20, "what is left of the pass takes more than a minute"
        frames = rig.scrub.frames
        wait_until(lambda: not scrub_threads())
        assert rig.scrub.frames == frames < 4 * BLOCKS and rig.scrub.passes == 0


def test_closing_does_not_wait_for_a_read_that_hangs(tmp_path: Path) -> None:
    on_disk(tmp_path)
    rig = Rig(tmp_path, limits=Limits(close_seconds=0.2))
    hang = Hang()
    rig.files.before = hang
    assert hang.began.wait(LONG_SECONDS)
    rig.store.close()
    assert rig.store.closed and not hang.goes_on.is_set()
    wait_until(lambda: not scrub_threads())
    hang.goes_on.set()
    assert rig.queue.close(LONG_SECONDS)


def test_closing_waits_for_one_frame_and_not_for_its_window(tmp_path: Path) -> None:
    on_disk(tmp_path)
    rig = Rig(tmp_path)
    hang = Hang()
    rig.files.before = hang
    assert hang.began.wait(LONG_SECONDS)
    reads, scrubbing = rig.files.reads, rig.core._scrubbing
    closer = threading.Thread(target=rig.store.close)
    closer.start()
    assert scrubbing is not None
    wait_until(lambda: scrubbing.closing)
    hang.goes_on.set()
    closer.join(LONG_SECONDS)
    assert rig.store.closed and rig.files.reads == reads


def test_a_pass_over_an_idle_store_ends_and_goes_to_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(tmp_path)
    steps = counted_steps(monkeypatch)
    with Rig(tmp_path, scrub=ScrubLimits(1 << 40, first_seconds=0)) as rig:
        wait_until(lambda: bool(steps) and rig.scrub.passes == 1 and steps[-1] > 1000)
        taken, reads = len(steps), rig.files.reads
        time.sleep(0.3)
        assert len(steps) == taken and rig.files.reads == reads, "nothing wakes it for nothing"
        usage = rig.scrub
        assert (usage.passes, usage.frames, usage.in_pass, usage.damaged) == (1, BLOCKS, False, 0)
        assert usage.bytes == BLOCKS * 12 * 1024 and usage.last_pass_seconds >= 0
        assert abs(usage.last_pass_ended - time.time()) < 600


def test_nothing_is_read_before_what_is_on_disk_was_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(tmp_path)
    rig_made = threading.Event()
    original = NvmeRecovery.load

    def slow(self: Any, *given: Any) -> None:
        assert rig_made.wait(LONG_SECONDS)
        original(self, *given)

    monkeypatch.setattr(NvmeRecovery, "load", slow)
    monkeypatch.setattr(EmbeddedStore, "warmed", lambda self, seconds: True)
    with Rig(tmp_path) as rig:
        reads = rig.files.reads
        time.sleep(0.5)
        assert rig.scrub.passes == 0 and rig.files.reads == reads
        rig_made.set()
        wait_until(lambda: rig.scrub.frames >= BLOCKS)


def test_a_store_that_nobody_has_any_more_takes_its_thread_with_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, scrub="8MiB/s")
    assert scrub_threads()
    lock = rig.store._lock
    del rig
    gc.collect()
    wait_until(lambda: not scrub_threads())
    lock.release()


# Options --------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not scrub_threads())


def test_it_is_on_by_default_and_can_be_switched_off(tmp_path: Path) -> None:
    with kvstore.open(f"embedded:{tmp_path}", dram="1MiB", nvme="8MiB") as store:
        scrub = store.usage().scrub
        assert scrub is not None and scrub.bytes_per_second == 8 << 20
        assert not scrub.in_pass and scrub.passes == 0 and scrub.last_pass_ended is None and len(scrub_threads()) == 1
    for off in ("off", "OFF ", 0, "0", "0 MiB/s"):
        with kvstore.open(f"embedded:{tmp_path}", dram="1MiB", nvme="8MiB", scrub=off) as store:
            assert store.usage().scrub is None and not scrub_threads()
    with kvstore.open(f"embedded:{tmp_path}", dram="1MiB") as store:
        assert store.usage().scrub is None and not scrub_threads()


@pytest.mark.parametrize(
    ("written", "rate"),
    [("8MiB/s", 8 << 20), ("8 MiB / s", 8 << 20), ("1GB/S", 10**9), ("64k", 65536), (1 << 20, 1 << 20), ("off", 0)],
)
def test_rates_as_people_write_them(written: str | int, rate: int) -> None:
    assert parse_rate(written, "scrub") == rate
