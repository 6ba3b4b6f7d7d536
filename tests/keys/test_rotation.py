"""Epochs under a store: what older ones signed is read until they are retired, and then nothing of it is."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from kvstore import fsck
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.identity import Namespace
from kvstore.client.handle import NamespaceHandle
from kvstore.config import KeysOptions
from kvstore.keys import pool_keys
from kvstore.keys.pool_keys import SecretDirectory, TenantSecrets
from kvstore.node import EmbeddedDoor, EmbeddedStore
from tiering.frame import epoch_in
from tiering.nvme.lmdb_index import LmdbMaker
from waiting import wait_until
from workbench import (
    MODEL,
    Bench,
    blank_pages,
    open_at,
    prompt_of,
    put_prompt,
    random_pages,
    read_prompt,
    same_tokens,
    shard_pages,
    small_layout,
)

SIZES = {"dram": "2MiB", "nvme": "4MiB", "slab": "64KiB", "extent": "64KiB", "scrub": 0}
BLOCKS = 6
LAYOUT = small_layout(head_shards=2)


class Pool:
    """A directory of keys, and what an operator does with it."""

    def __init__(self, path: Path) -> None:
        self.directory = SecretDirectory(path)
        self.options = KeysOptions(str(path))
        pool_keys.init(self.directory, ["default"], secrets.token_bytes)

    def rotate(self) -> TenantSecrets:
        return pool_keys.rotate(self.directory, "default", secrets.token_bytes)

    def retire(self, epoch: int) -> TenantSecrets:
        return pool_keys.retire(self.directory, "default", epoch)


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return Pool(tmp_path / "pool")


def opened(directory: Path, pool: Pool) -> EmbeddedStore:
    store = open_at(directory, **SIZES, indexes=LmdbMaker, keys=pool.options)
    assert store.warmed(60)
    return store


def space(store: EmbeddedStore) -> NamespaceHandle:
    return store.namespace(model=MODEL, layout=LAYOUT)


def put(handle: NamespaceHandle, prompt: int, blocks: int = BLOCKS, durability: str = "disk") -> None:
    done = put_prompt(handle, prompt, blocks, of=BLOCKS, durability=durability)
    assert done.reason is None, done


def read(handle: NamespaceHandle, prompt: int, blocks: int = BLOCKS) -> tuple[int, MissReason | None]:
    return read_prompt(handle, prompt, blocks)[:2]


def settle(store: EmbeddedStore) -> None:
    """Retired epochs are gone."""
    wait_until(lambda: store.rotation.step() or not store.keys.retired("default"))


def quarantined(store: EmbeddedStore) -> int:
    usage = store.usage()
    assert usage.nvme is not None
    return usage.dram.quarantined + usage.nvme.quarantined + usage.counters.get("quarantined_blocks", 0)


def test_what_older_epochs_signed_is_read_until_they_are_retired(tmp_path: Path, pool: Pool) -> None:
    with opened(tmp_path / "kv", pool) as store:
        handle = space(store)
        put(handle, 1)
        put(handle, 2, durability="volatile")
        pool.rotate()
        store.rotation.step()
        put(handle, 3)
        put(handle, 4, durability="volatile")
        assert [read(handle, prompt) for prompt in (1, 2, 3, 4)] == [(BLOCKS, None)] * 4
        assert read(space(store), 1) == (BLOCKS, None), "a handle that is opened later reads the same"
        store.check()
    with opened(tmp_path / "kv", pool) as store:  # both epochs are on disk, what memory held included
        handle = space(store)
        assert [read(handle, prompt) for prompt in (1, 2, 3, 4)] == [(BLOCKS, None)] * 4
        pool.retire(1)
        settle(store)
        # Frames of two prompts, of two parts each: none that the retired epoch signed.
        wait_until(lambda: store.usage().nvme.used == 4 * BLOCKS)  # type: ignore[union-attr]
        for prompt in (1, 2):
            assert read(handle, prompt) == (0, MissReason.KEY_MISMATCH)
        assert [read(handle, prompt) for prompt in (3, 4)] == [(BLOCKS, None)] * 2
        assert quarantined(store) == 0, "nothing was damaged"
        store.check()
        put(handle, 1)
        assert read(handle, 1) == (BLOCKS, None)
        assert [one.epoch for one in store.keys.accepted("default")] == [2]
    found = fsck.check(tmp_path / "kv", pool=pool.options.directory)
    assert found.is_well, found.to_dict()


def test_what_hangs_below_a_retired_block_is_found_again(tmp_path: Path, pool: Pool) -> None:
    """The oldest blocks are at the root of every chain: they are stored anew, and what newer epochs signed is there."""
    with opened(tmp_path / "kv", pool) as store:
        handle = space(store)
        put(handle, 1, blocks=2)
        pool.rotate()
        store.rotation.step()
        put(handle, 1, blocks=BLOCKS)
        pool.retire(1)
        settle(store)
        assert read(handle, 1) == (0, MissReason.KEY_MISMATCH)
        store.check()
        assert put_prompt(handle, 1, 2, of=BLOCKS, durability="disk").stored == 2
        assert read(handle, 1) == (BLOCKS, None)
        store.check()


def test_an_epoch_that_was_retired_while_no_sidecar_ran(tmp_path: Path, pool: Pool) -> None:
    """Its secret is gone at the next start, and what it signed goes all the same: no reader meets it as damage."""
    with opened(tmp_path / "kv", pool) as store:
        put(space(store), 1)
        pool.rotate()
        store.rotation.step()
        put(space(store), 2)
    pool.retire(1)
    with opened(tmp_path / "kv", pool) as store:
        handle = space(store)
        assert read(handle, 1, blocks=1) == (0, MissReason.KEY_MISMATCH), "also before it was taken out"
        settle(store)
        assert read(handle, 1) == (0, MissReason.KEY_MISMATCH) and read(handle, 2) == (BLOCKS, None)
        assert quarantined(store) == 0
        store.check()
    with opened(tmp_path / "kv", pool) as store:
        assert not store.keys.retired("default") and read(space(store), 2) == (BLOCKS, None)


@pytest.mark.parametrize("epochs_before", [0, 1])
def test_slabs_and_index_stay_of_use_when_the_first_epoch_is_retired(
    tmp_path: Path, pool: Pool, epochs_before: int
) -> None:
    """Whichever epoch it was when they were made."""
    for _ in range(epochs_before):
        pool.rotate()
    with opened(tmp_path / "kv", pool) as store:
        put(space(store), 1)  # makes slabs
        if not epochs_before:
            pool.rotate()
            store.rotation.step()
        put(space(store), 2)
        pool.retire(1)
        settle(store)
    for _ in range(2):
        with opened(tmp_path / "kv", pool) as store:
            assert read(space(store), 2) == (BLOCKS, None)
            assert store.core.blocks.lower.tier.left_alone == []  # type: ignore[union-attr]
            store.check()


def test_a_leased_block_goes_when_its_reader_is_done(tmp_path: Path, pool: Pool) -> None:
    with opened(tmp_path / "kv", pool) as store:
        handle = space(store)
        put(handle, 1, durability="volatile")
        lease = handle.lease(handle.match(prompt_of(1, BLOCKS)))
        pool.rotate()
        pool.retire(1)
        for _ in range(3):
            store.rotation.step()
        assert store.keys.retired("default"), "it is in use"
        blank = blank_pages(LAYOUT, BLOCKS)
        assert handle.get(lease, blank).tokens == 64 * BLOCKS
        assert same_tokens(random_pages(LAYOUT, BLOCKS, seed=1), blank, range(64 * BLOCKS))
        lease.release()
        settle(store)
        assert read(handle, 1) == (0, MissReason.KEY_MISMATCH)
        assert store.usage().dram.quarantined == 0 and store.usage().dram.used == 0, "its slots are free"
        store.check()


def test_a_put_that_began_before_a_rotation(tmp_path: Path, pool: Pool) -> None:
    """A block's parts may be of two epochs: readable under both, gone when either is retired."""
    with opened(tmp_path / "kv", pool) as store:
        halves = [store.namespace(model=MODEL, layout=LAYOUT, shard=shard) for shard in (0, 1)]
        prompt = prompt_of(1, 1)
        given = random_pages(LAYOUT, 1, seed=7)
        pages = [shard_pages(given, LAYOUT, shard) for shard in (0, 1)]
        assert halves[0].put(prompt, pages[0], collective="a").reason is None
        pool.rotate()
        store.rotation.step()
        assert halves[1].put(prompt, pages[1], collective="a").reason is None
        whole = space(store)
        assert whole.match(prompt).blocks == 1
        blocks = store.core.blocks
        row = blocks.index.match(0, whole.hashed(prompt).keys)[0]
        views = [blocks.dram.span_at(blocks.residency.place(row, part)).view for part in (0, 1)]
        assert [epoch_in(view)[1] for view in views] == [1, 2]
        blank = blank_pages(LAYOUT, 1)
        with whole.lease(whole.match(prompt)) as lease:
            assert whole.get(lease, blank).tokens == 64
        assert same_tokens(given, blank, range(64))
        pool.retire(1)
        settle(store)
        assert whole.match(prompt).blocks == 0
        store.check()


def test_a_namespace_that_is_opened_after_a_rotation(tmp_path: Path, pool: Pool) -> None:
    """By a connection from before it, which has the keys of then."""
    with opened(tmp_path / "kv", pool) as store:
        before = store.tenant_keys("default")
        pool.rotate()
        store.rotation.step()
        bench = Bench(store.core, store.core.clock, store._ring, before)  # type: ignore[arg-type]
        handle = NamespaceHandle(EmbeddedDoor(store.core, before), Namespace(MODEL, LAYOUT, "raw"), codec_named("raw"))
        put(handle, 1)
        blocks = store.core.blocks
        (row, *_) = blocks.index.match(0, handle.hashed(prompt_of(1, 1)).keys)
        assert bench.header_of(blocks.residency.place(row, 0)).stamp.epoch == 2
        pool.retire(1)
        settle(store)
        assert read(handle, 1) == (BLOCKS, None)
