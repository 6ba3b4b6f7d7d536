"""An acknowledgement speaks of the blocks that it was asked about, whatever became of their rows while it waited."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.block.account import MissReason
from kvstore.client.handle import NamespaceHandle
from kvstore.core.recovery import recovery_order
from kvstore.node import EmbeddedStore
from tiering.frame import HEADER_BYTES, parse_header
from workbench import blank_pages, ids, random_pages, same_tokens, small_layout

OTHER = 100_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    with kvstore.open(f"embedded:{tmp_path}", dram="1MiB", nvme="2MiB", slab="64KiB") as opened:
        yield opened
        opened.check()


def namespace(store: EmbeddedStore, model: str = "a", **shape: Any) -> NamespaceHandle:
    return store.namespace(model=model, layout=small_layout(**shape))


def put(handle: NamespaceHandle, blocks: int, start: int = 0, durability: str = "volatile") -> Any:
    return handle.put(ids(64 * blocks, start), random_pages(handle.layout, blocks), durability=durability)


def before_the_move(store: EmbeddedStore, act: Callable[[], object]) -> None:
    """Something happens between the look at the tables and the move to the disk, once."""
    levels = store._store._levels
    assert levels is not None
    submit = levels._queue.submit
    pending = [act]

    def act_and_submit(*arguments: Any, **options: Any) -> Any:
        while pending:
            pending.pop()()
        return submit(*arguments, **options)

    levels._queue.submit = act_and_submit  # type: ignore[method-assign]


def test_a_durable_block_in_the_row_of_one_that_went_is_not_taken_for_it(store: EmbeddedStore) -> None:
    handle = namespace(store)

    def replace() -> None:
        assert store.evict(10) == 2
        assert put(handle, 2, OTHER, "disk").stopped_at is None

    before_the_move(store, replace)
    result = put(handle, 2, durability="disk")
    assert (result.stopped_at, result.reason) == (0, MissReason.EVICTED)
    assert handle.match(ids(128)).blocks == 0 and handle.match(ids(128, OTHER)).blocks == 2


def test_a_block_of_another_namespace_in_that_row_is_not_written_as_one_of_this(store: EmbeddedStore) -> None:
    handle, other = namespace(store), namespace(store, "b", kv_heads=4)

    def replace() -> None:
        assert store.evict(10) == 2
        assert put(other, 2, OTHER).stored == 2

    before_the_move(store, replace)
    result = put(handle, 2, durability="disk")
    assert (result.stopped_at, result.reason) == (0, MissReason.EVICTED)
    store.check()
    assert put(other, 2, OTHER, "disk").stopped_at is None
    assert other.match(ids(128, OTHER)).blocks == 2


def test_what_went_is_said_to_be_durable_up_to_there(store: EmbeddedStore) -> None:
    handle = namespace(store)
    assert put(handle, 1, durability="disk").stopped_at is None
    before_the_move(store, lambda: store.evict(2))
    result = put(handle, 3, durability="disk")
    assert (result.stopped_at, result.reason) == (1, MissReason.EVICTED)
    assert put(handle, 3, durability="disk").stopped_at is None


@pytest.mark.slow
def test_what_is_being_written_down_while_its_old_frames_are_found_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"dram": "1MiB", "nvme": "2MiB", "slab": "64KiB"}
    with kvstore.open(f"embedded:{tmp_path}", **shape) as store:
        assert put(namespace(store), 2, durability="disk").stopped_at is None
    may_load, writing, may_write = threading.Event(), threading.Event(), threading.Event()

    def wait_and_load(*arguments: Any) -> Any:
        assert may_load.wait(30)
        return recovery_order(*arguments)

    def wait_and_commit(*arguments: Any) -> None:
        writing.set()
        assert may_write.wait(30)
        commit(*arguments)

    monkeypatch.setattr("kvstore.core.recovery.recovery_order", wait_and_load)
    with kvstore.open(f"embedded:{tmp_path}", **shape) as store, ThreadPoolExecutor(1) as pool:
        handle = namespace(store)
        lower = store._store.blocks.lower
        assert lower is not None
        commit = lower.tier.commit
        lower.tier.commit = wait_and_commit  # type: ignore[method-assign]
        result = pool.submit(put, handle, 2, 0, "disk")
        assert writing.wait(30)
        may_load.set()
        assert store.warmed(30)
        may_write.set()
        assert result.result(30).stopped_at is None
        store.check()
    with kvstore.open(f"embedded:{tmp_path}", **shape) as store:
        assert store.warmed(30) and namespace(store).match(ids(128)).blocks == 2
        store.check()


def test_a_newer_copy_that_was_cut_short_does_not_hide_the_one_before_it(tmp_path: Path) -> None:
    shape = {"dram": "1MiB", "nvme": "2MiB", "slab": "64KiB"}
    with kvstore.open(f"embedded:{tmp_path}", **shape) as store:
        handle = namespace(store)
        assert put(handle, 1, durability="disk").stopped_at is None
        blocks = store._store.blocks
        assert blocks.lower is not None
        tier, space = blocks.lower.tier, blocks.spaces[handle.number]
        old = bytearray(space.classes[0].frame_bytes)
        row = blocks.index.find(handle.number, handle.match(ids(64)).keys[0])
        tier.read(blocks.lower.residency.place(row, 0), memoryview(old))
        header = parse_header(bytes(old[:HEADER_BYTES]))
        newer = space.sealers[0].seal(
            header.prefix_key, header.parent, 0, header.generation + 1, header.digests, header.priority, 0
        )
        cut = newer + old[HEADER_BYTES:-4096] + bytes(4096)  # its last page did not get there
        tier.commit(tier.reserve(space.classes[0], 1), [cut])
    with kvstore.open(f"embedded:{tmp_path}", **shape) as store:
        assert store.warmed(30)
        handle, into = namespace(store), blank_pages(small_layout(), 1)
        with handle.lease(handle.match(ids(64)), deadline_ms=30_000) as lease:
            assert handle.get(lease, into).tokens == 64
        assert same_tokens(into, random_pages(small_layout(), 1), range(64))
        store.check()
