"""What an earlier run left on disk comes in while the store is used already; nothing is lost, doubled or in the air."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvstore
from asking import Asking
from kvstore.block.account import HitTier, MissReason
from kvstore.client.handle import NamespaceHandle
from kvstore.core import recovery as loading
from kvstore.core.recovery import NvmeRecovery
from kvstore.node import EmbeddedStore
from kvstore.protocol.messages import ReserveReply
from tiering.errors import TierUnavailable
from tiering.nvme.slab import slab_name
from tiering.nvme.tier import NvmeTier
from tiering.slab_header import PAGE_BYTES
from tiering.tier import extent_of, slot_of
from workbench import MODEL, prompt_of, put_prompt, read_prompt, small_layout

BLOCKS = 12
PARTS = [1, 2]
USED = 3 * BLOCKS * sum(PARTS)
"""Frames of the prompts that are on disk."""
prompt = partial(prompt_of, blocks=BLOCKS)
put = partial(put_prompt, blocks=BLOCKS, of=BLOCKS)


def opened(path: Path, **options: Any) -> EmbeddedStore:
    return kvstore.open(f"embedded:{path}", **{"dram": "2MiB", "nvme": "16MiB", **options})


@contextmanager
def warmed(path: Path, **options: Any) -> Iterator[EmbeddedStore]:
    """Once all is in; its tables are right then, and at the end."""
    with opened(path, **options) as store:
        assert store.warmed(20)
        store.check()
        yield store
        store.check()


def used(store: EmbeddedStore) -> int:
    """Frames on NVMe."""
    usage = store.usage()
    assert usage.nvme is not None
    return usage.nvme.used


def ended(handle: NamespaceHandle, reply: ReserveReply, outcome: str) -> None:
    """A put of two blocks that had begun."""
    if outcome == "abort":
        Asking(handle.door).abort(reply.reservation)
    else:
        digests = [[b"d" * 16] * len(handle.layout.parts[0].layers)] * 2
        assert Asking(handle.door).commit(reply.reservation, 0, 0, digests) == 2


def namespace(store: EmbeddedStore, parts: int = 1) -> NamespaceHandle:
    return store.namespace(model=MODEL, layout=small_layout(layer_shards=parts))


def delivered(handle: NamespaceHandle, number: int, tier: HitTier | None = None) -> int:
    """Blocks of a prompt; all from that tier, if one is named."""
    found = read_prompt(handle, number, BLOCKS)
    assert tier is None or set(found.lease.account.hits) <= {tier}
    return found.blocks


@pytest.fixture
def directory(tmp_path: Path, request: Any) -> Path:
    """Three prompts on disk, stored by a run that is over."""
    with opened(tmp_path) as store:
        for parts in PARTS:
            handle = namespace(store, parts)
            for number in range(3):
                assert put(handle, number, durability="disk").reason is None
    return tmp_path


@contextmanager
def held_back(monkeypatch: Any) -> Iterator[Callable[[], None]]:
    """Loading stands still between the disk and the tables until the yielded function is called."""
    goes_on = threading.Event()
    real = loading.recovery_order

    def wait(*arguments: Any) -> Any:
        found = real(*arguments)
        assert goes_on.wait(20)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(loading, "recovery_order", wait)
        try:
            yield goes_on.set
        finally:
            goes_on.set()


@pytest.mark.parametrize("durability", ["volatile", "disk"])
@pytest.mark.parametrize("parts", PARTS)
def test_what_is_stored_anew_meanwhile_has_one_copy_on_disk(
    directory: Path, parts: int, durability: str, monkeypatch: Any
) -> None:
    with held_back(monkeypatch) as go_on, opened(directory) as store:
        handle = namespace(store, parts)
        assert handle.match(prompt(0)).reason is MissReason.WARMING
        assert put(handle, 0, blocks=5, durability=durability).stored == 5
        go_on()
        assert store.warmed(20)
        store.check()
        assert used(store) == USED
        assert store.usage().blocks == 3 * BLOCKS * len(PARTS)
        assert delivered(handle, 0) == BLOCKS
        store.evict(1000)
        store.check()
        assert delivered(handle, 0, HitTier.NVME) == BLOCKS, "the copies on disk are as good as the ones that went"
    with warmed(directory) as store:
        assert [delivered(namespace(store, parts), number) for number in range(3)] == [BLOCKS] * 3


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_what_is_being_stored_meanwhile_is_left_to_the_next_start(
    directory: Path, outcome: str, monkeypatch: Any
) -> None:
    """The block may go yet, and would leave its descendants in the air. This one takes longer than loading waits."""
    monkeypatch.setattr(loading, "LOOKS", 3)
    with held_back(monkeypatch) as go_on, opened(directory) as store:
        handle = namespace(store)
        keys = handle.match(prompt(0)).keys
        assert put(handle, 0, blocks=2).stored == 2
        reply = Asking(handle.door).reserve(handle.number, keys[:4], 0, 0, None)
        assert len(reply.blocks) == 2
        go_on()
        assert store.warmed(20)
        store.check()
        assert handle.match(prompt(0)).blocks == 2
        ended(handle, reply, outcome)
        if outcome == "commit":
            assert store.drop(handle) == 2 * BLOCKS + 4
            put(handle, 0, blocks=4, durability="disk")
        store.check()
        assert handle.match(prompt(0)).blocks == (2 if outcome == "abort" else 4)
    with warmed(directory) as store:
        assert delivered(namespace(store), 0) == (BLOCKS if outcome == "abort" else 4), "no more than was stored since"


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_loading_waits_for_what_is_being_stored(directory: Path, outcome: str, monkeypatch: Any) -> None:
    with held_back(monkeypatch) as go_on, opened(directory) as store:
        handle = namespace(store)
        keys = handle.match(prompt(0)).keys
        reply = Asking(handle.door).reserve(handle.number, keys[:2], 0, 0, None)
        go_on()
        assert not store.warmed(0.2)
        assert handle.match(prompt(0)).reason is MissReason.IN_FLIGHT
        ended(handle, reply, outcome)
        assert store.warmed(20)
        store.check()
        assert used(store) == USED
        assert handle.match(prompt(0)).blocks == BLOCKS
        store.evict(1000)
        assert delivered(handle, 0, HitTier.NVME) == BLOCKS, "these are from before"


def test_a_block_on_its_way_down_is_decided_when_it_is_there(directory: Path, monkeypatch: Any) -> None:
    """The write has chosen its blocks and has no places for them yet, when their older copies are found."""
    with held_back(monkeypatch) as go_on, opened(directory) as store:
        handle, levels = namespace(store), store._store._levels
        real = levels._make_room

        def make_room(*arguments: Any) -> Any:
            monkeypatch.setattr(levels, "_make_room", real)
            go_on()
            assert not store.warmed(0.3), "it waits for the write"
            return real(*arguments)

        monkeypatch.setattr(levels, "_make_room", make_room)
        result = put(handle, 0, blocks=5, durability="disk")
        assert result.stored == 5 and result.reason is None
        assert store.warmed(20)
        store.check()
        assert not levels._queue.bugs
        assert used(store) == USED
        assert not store.usage().nvme.reserved and delivered(handle, 0) == BLOCKS


def test_nothing_is_evicted_from_a_disk_that_is_not_known_yet(tmp_path: Path, monkeypatch: Any) -> None:
    """It may be the way to blocks that are not in yet. A durable put waits for the end of it."""
    options = {"nvme": "1MiB", "dram": "1MiB", "slab": "256KiB"}
    with opened(tmp_path, **options) as store:
        for number in range(8):
            assert put(namespace(store), number, durability="disk").reason is None
        assert store.usage().counters["nvme_evicted_blocks"]
    with held_back(monkeypatch) as go_on, opened(tmp_path, **options) as store:
        handle, done = namespace(store), threading.Event()

        def store_one() -> None:
            assert put(handle, 9, durability="disk").reason is None
            done.set()

        thread = threading.Thread(target=store_one)
        thread.start()
        assert not done.wait(0.5) and not store.usage().counters.get("nvme_evicted_blocks")
        go_on()
        thread.join(20)
        assert done.is_set() and store.warmed(20)
        assert store.usage().counters["nvme_evicted_blocks"]
        assert delivered(handle, 9) == BLOCKS
        store.check()


@pytest.mark.parametrize("cut", [0, 3, BLOCKS - 1])
def test_a_frame_that_a_crash_cut_short_is_never_called_durable(tmp_path: Path, cut: int) -> None:
    """The index is lost as well: a header says that the frame is there. A put must not believe it."""
    _crash(tmp_path, cut)
    with warmed(tmp_path / "crashed") as store:
        handle = namespace(store)
        assert handle.match(prompt(0)).blocks == cut
        store.check()
        assert put(handle, 0, durability="disk").reason is None
    with warmed(tmp_path / "crashed") as store:
        assert delivered(namespace(store), 0, HitTier.NVME) == BLOCKS


@pytest.mark.parametrize("end", ["crash", "close", "close, and the index is lost"])
def test_frames_stay_unproven_until_all_are_verified(tmp_path: Path, end: str, monkeypatch: Any) -> None:
    """A start that builds the index again and ends before it has read the frames leaves that to the next one."""
    cut = 3
    _crash(tmp_path, cut)
    verdict, reached, go_on = NvmeRecovery._verdict, threading.Event(), threading.Event()

    def wait_at_first(self: NvmeRecovery, *args: Any) -> Any:
        reached.set()
        assert go_on.wait(20)
        return verdict(self, *args)

    directory = tmp_path / "crashed"
    with monkeypatch.context() as patch:
        patch.setattr(NvmeRecovery, "_verdict", wait_at_first)
        with opened(directory) as store:
            assert reached.wait(20)
            progress = store.usage().loading
            assert progress is not None and progress.slots == progress.all_slots
            assert progress.to_verify_bytes == BLOCKS * (2 * 4096 + 4096) and progress.verified_bytes == 0
            assert namespace(store).match(prompt(0)).reason is MissReason.WARMING
            if end == "crash":
                directory = tmp_path / "crashed again"
                shutil.copytree(tmp_path / "crashed", directory)
            else:
                threading.Timer(0.5, go_on.set).start()
                store._store._recovery.of_nvme.closing.set()  # type: ignore[union-attr]
            if end == "crash":
                go_on.set()
    if "lost" in end:
        shutil.rmtree(directory / "nvme" / "index")
    with warmed(directory) as store:
        handle = namespace(store)
        assert handle.match(prompt(0)).blocks == cut
        progress = store.usage().loading
        assert progress is not None and progress.verified_bytes == progress.to_verify_bytes > 0
        assert put(handle, 0, durability="disk").reason is None
    with warmed(directory) as store:
        progress = store.usage().loading
        assert progress is not None and progress.to_verify_bytes == 0  # nothing is verified twice
        assert delivered(namespace(store), 0, HitTier.NVME) == BLOCKS


def _crash(tmp_path: Path, cut: int) -> None:
    """A directory, "crashed", whose index is lost and in which the write of one frame was cut short."""
    with opened(tmp_path / "kv") as store:
        handle = namespace(store)
        assert put(handle, 0, durability="disk").reason is None
        blocks = store._store.blocks
        row = blocks.index.match(handle.number, handle.match(prompt(0)).keys)[cut]
        place = blocks.lower.residency.place(row, 0)
        frame_bytes = blocks.spaces[handle.number].classes[0].frame_bytes
        shutil.copytree(tmp_path / "kv", tmp_path / "crashed")
    slab = tmp_path / "crashed" / "nvme" / slab_name(extent_of(place))
    with slab.open("r+b") as file:
        file.seek(PAGE_BYTES + (slot_of(place) + 1) * frame_bytes - 4096)
        file.write(bytes(4096))
    shutil.rmtree(tmp_path / "crashed" / "nvme" / "index")


@pytest.mark.parametrize("is_evicted", [False, True])
def test_an_older_copy_ends_with_the_newer_one(directory: Path, is_evicted: bool, monkeypatch: Any) -> None:
    """It could not be decided while the directory was taken in; then a newer one was durable, and perhaps evicted."""
    monkeypatch.setattr(loading, "LOOKS", 3)
    with held_back(monkeypatch) as go_on, opened(directory) as store:
        handle, core = namespace(store), store._store
        reply = Asking(handle.door).reserve(handle.number, handle.match(prompt(0)).keys[:2], 0, 0, None)
        go_on()
        assert store.warmed(20)
        Asking(handle.door).abort(reply.reservation)
        assert put(handle, 0, durability="disk").reason is None
        core.blocks.lower.tier.settle()
        assert used(store) == USED
        if is_evicted:
            with core.lock:
                while core.blocks.below.evict(1000, handle.number)[0]:
                    pass
            store.evict(1000)
            left = [handle.match(prompt(number)).blocks for number in range(3)]
            assert left == [0, 0, 0]
        else:
            left = [BLOCKS] * 3
        store.check()
    with warmed(directory) as store:
        assert [namespace(store).match(prompt(number)).blocks for number in range(3)] == left


def test_dropping_a_namespace_ends_however_busy_it_is(tmp_path: Path) -> None:
    with warmed(tmp_path, nvme="2MiB") as store:
        handle, over = namespace(store), threading.Event()

        def go_on(first: int) -> None:
            number = first
            while not over.is_set():
                number += 3
                put(handle, number % 9, durability="disk")

        threads = [threading.Thread(target=go_on, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        dropper = threading.Thread(target=store.drop, args=(handle,))
        dropper.start()
        dropper.join(20)
        is_dropped = not dropper.is_alive()
        over.set()
        for thread in [*threads, dropper]:
            thread.join(20)
        assert is_dropped


def test_who_asks_meanwhile_is_let_in_between_two_slices(directory: Path, monkeypatch: Any) -> None:
    real = loading.NvmeRecovery._insert
    slices, most = 0, 0

    def insert(*arguments: Any) -> Any:
        nonlocal slices
        slices += 1
        until = time.monotonic() + 0.002
        while time.monotonic() < until:
            pass
        return real(*arguments)

    monkeypatch.setattr(loading, "SLICE_BLOCKS", 1)
    monkeypatch.setattr(loading.NvmeRecovery, "_insert", insert)
    with held_back(monkeypatch) as go_on, opened(directory) as store:
        handle = namespace(store)
        go_on()
        while not store.warmed(0):
            before = slices
            handle.match(prompt(0))
            most = max(most, slices - before)
        assert slices == 3 * BLOCKS * len(PARTS)
        assert 0 < most < 20, f"one answer took as long as {most} of {slices} slices"


def test_a_namespace_that_is_dropped_meanwhile_is_gone_for_good(directory: Path, monkeypatch: Any) -> None:
    with held_back(monkeypatch) as go_on, opened(directory) as store:
        handle = namespace(store)
        assert put(handle, 7).stored == BLOCKS
        dropped: list[int] = []
        thread = threading.Thread(target=lambda: dropped.append(store.drop(handle)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not dropped, "it waits for what is on disk"
        go_on()
        thread.join(20)
        assert dropped == [4 * BLOCKS]
        assert handle.match(prompt(0)).blocks == 0
        store.check()
        # As if the process ended here: what the drop has promised is on the disk.
        copy = directory.parent / "copy"
        _copy(directory, copy)
    for path in (directory, copy):
        with warmed(path) as store:
            assert namespace(store).match(prompt(0)).blocks == 0 and namespace(store).match(prompt(7)).blocks == 0
            assert delivered(namespace(store, 2), 1) == BLOCKS, "the other namespace is untouched"


def test_nothing_is_dropped_that_would_be_back(directory: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise TierUnavailable("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(NvmeTier, "load", refuse)
        with opened(directory) as store:
            assert not store.warmed(20)
            with pytest.raises(TierUnavailable, match="would be back"):
                store.drop(namespace(store))


def test_closing_while_it_loads_loses_nothing(directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "SLICE_BLOCKS", 5)
    with held_back(monkeypatch) as go_on:
        store = opened(directory)
        handle = namespace(store)
        assert put(handle, 0, blocks=3).stored == 3
        closer = threading.Thread(target=store.close)
        closer.start()
        go_on()
        closer.join(20)
        assert store.closed
    with warmed(directory) as store:
        assert [delivered(namespace(store), number) for number in range(3)] == [BLOCKS] * 3


@pytest.mark.parametrize("is_back", [False, True])
def test_blocks_below_an_unreadable_slab_wait_for_it(tmp_path: Path, is_back: bool) -> None:
    """Each part of a slab file's name is known: the first slab has the first blocks, for they are written first."""
    options = {"slab": "64KiB"}
    with opened(tmp_path, **options) as store:
        assert put(namespace(store), 0, durability="disk").reason is None
    slabs = sorted((tmp_path / "nvme").glob("*.slab"))[1:]
    assert len(slabs) >= 2, "the prompt takes more than one slab"
    contents = slabs[0].read_bytes()
    slabs[0].write_bytes(b"\xff" * len(contents))
    with warmed(tmp_path, **options) as store:
        assert namespace(store).match(prompt(0)).blocks == 0
        assert store.usage().blocks == 0
    if is_back:
        slabs[0].write_bytes(contents)
    with warmed(tmp_path, **options) as store:
        assert delivered(namespace(store), 0) == (BLOCKS if is_back else 0)


def _copy(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
            copy.chmod(0o600)
