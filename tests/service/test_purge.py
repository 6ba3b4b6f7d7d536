"""A purge, whole and cut short: what it leaves on disk, in the key file, and for other tenants."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from asking import Asking
from kvstore import fsck
from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, KeysUnusable
from kvstore.node import EmbeddedStore
from service.purging import BLOCKS, SIZES, fill
from tiering.errors import TierUnavailable
from tiering.nvme.lmdb_index import LmdbMaker
from torture.nursery import Nursery
from workbench import MODEL, blank_pages, ids, one_line, open_at, random_pages, same_tokens, small_layout

AFTER_VOIDING = (
    "batch that retires: to be applied",
    "batch that retires: synced",
    "slab to be removed",
    "slab unlinked",
    "slab removed",
    "secret draft made",
    "secret written",
    "secret synced",
    "secret renamed",
)
"""From here on nothing may be found."""
POINTS = (
    "batch that forgets: to be applied",
    "batch that forgets: applied",
    "batch that forgets: synced",
    "void: first half written",
    "void: written",
    "voids: synced",
    "batch that frees: to be applied",
    "batch that frees: synced",
    *AFTER_VOIDING,
    "key of a new tenant made",
)


@pytest.fixture(scope="module")
def children() -> Iterator[Nursery]:
    with Nursery("service.purging") as one:
        yield one


def opened(directory: Path) -> EmbeddedStore:
    store = open_at(directory, **SIZES, indexes=LmdbMaker)
    assert store.warmed(60)
    return store


def names(directory: Path) -> set[str]:
    return set(json.loads((directory / "keys").read_text())["tenants"])


def readable(store: EmbeddedStore, tenant: str, seed: int) -> list[int]:
    """Blocks of each namespace that can be read; every byte is compared."""
    counts = []
    for parts in ({}, {"head_shards": 2}):
        layout = small_layout(**parts)
        handle = store.for_tenant(tenant).namespace(model=MODEL, layout=layout)
        blank = blank_pages(layout, BLOCKS)
        with handle.lease(handle.match(ids(64 * BLOCKS)), deadline_ms=30_000) as lease:
            loaded = handle.get(lease, blank)
        assert loaded.reason is None
        assert same_tokens(random_pages(layout, BLOCKS, seed=seed), blank, range(loaded.tokens))
        counts.append(loaded.tokens // 64)
    return counts


def slabs(directory: Path) -> int:
    return len(list((directory / "nvme").glob("*.slab"))) - 1


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_step_it_leaves_the_old_key_with_nothing_or_no_key(
    children: Nursery, tmp_path: Path, point: str
) -> None:
    directory = tmp_path / "kv"
    child = children.start(directory=str(directory), point=point)
    child.listen(time.monotonic() + 120)
    assert child.ended, "it was not over in time"
    status = children.bury(child)
    assert status == -signal.SIGKILL and f"at {point}" in child.lines(), child.lines()
    had_key = "guest" in names(directory)
    assert had_key is (point not in ("secret renamed",))
    with opened(directory) as store:
        assert readable(store, "default", 1) == [BLOCKS, BLOCKS]
        found = readable(store, "guest", 2)
        if point in (*AFTER_VOIDING, "key of a new tenant made"):
            assert found == [0, 0]
        store.purge("guest")
        assert readable(store, "guest", 2) == [0, 0] and readable(store, "default", 1) == [BLOCKS, BLOCKS]
        assert not store.core.blocks.lower.tier.left_alone  # type: ignore[union-attr]
        store.check()
    assert fsck.check(str(directory)).is_well


def test_nothing_of_it_is_left_and_the_tenant_comes_again_with_another_key(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    with opened(directory) as store:
        fill(store, "default", 1)
        before = slabs(directory)
        fill(store, "guest", 2)
        handle = store.for_tenant("guest").namespace(model=MODEL, layout=small_layout())
        lease = handle.lease(handle.match(ids(64 * BLOCKS)))
        old, blocks = store.purge("guest")
        assert blocks == 2 * BLOCKS and slabs(directory) == before and names(directory) == {"default"}
        assert store._ring.mac_key(old.tenant, old.key_id, old.epoch) is None
        assert handle.get(lease, blank_pages(handle.layout, BLOCKS)).tokens in (0, 64 * BLOCKS), "memory is his still"
        lease.release()
        assert handle.match(ids(64)).blocks == 0
        assert handle.put(ids(64), random_pages(handle.layout, 1)).reason is MissReason.DISABLED
        with pytest.raises(BadInput, match="its key was retired"):
            Asking(handle.door).open_namespace(handle.namespace, [8192])
        with pytest.raises(BadInput) as wrong:
            store.purge("guest")
        assert one_line(wrong.value, "'guest' has no keys here", "default")
        fill(store, "guest", 3)
        assert store.tenant_keys("guest").tenant != old.tenant
        assert readable(store, "guest", 3) == readable(store, "default", 1) == [BLOCKS, BLOCKS]
    with opened(directory) as store:
        assert readable(store, "guest", 3) == readable(store, "default", 1) == [BLOCKS, BLOCKS]


def test_a_purge_that_is_not_over_in_time_leaves_the_tenant_as_it_was(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        fill(store, "guest", 2)
        space = next(one for one in store.core.namespaces() if one.blocks)
        waiting = (space.number, [])  # a lease that waits for blocks on their way up
        store.core.leases.promoting.append(waiting)
        with pytest.raises(TierUnavailable, match="on the move, and nothing was dropped; ask again"):
            store.purge("guest", 0.2)
        store.core.leases.promoting.remove(waiting)
        assert readable(store, "guest", 2) == [BLOCKS, BLOCKS]
        fill(store, "guest", 2)
        assert store.purge("guest")[1] == 2 * BLOCKS


def test_a_key_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "kv"
    with opened(directory) as store:
        fill(store, "guest", 2)
        with monkeypatch.context() as patched:

            def full(*_: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patched.setattr("kvstore.block.key_file.write_secret_file", full)
            with pytest.raises(KeysUnusable, match=r"cannot be written .* a retired key must be gone"):
                store.purge("guest")
        assert "guest" in names(directory)
        with pytest.raises(BadInput, match="purged"):
            store.for_tenant("guest").namespace(model=MODEL, layout=small_layout())
        assert store.purge("guest")[1] == 0
        fill(store, "guest", 3)
        assert readable(store, "guest", 3) == [BLOCKS, BLOCKS]


def test_memory_alone_can_be_purged(tmp_path: Path) -> None:
    with kvstore.open(f"embedded:{tmp_path}", dram="1MiB") as store:
        assert isinstance(store, EmbeddedStore)
        guest = store.for_tenant("guest").namespace(model=MODEL, layout=small_layout())
        guest.put(ids(640), random_pages(guest.layout, 10))
        assert store.purge("guest")[1] == 10 and store.usage().dram.used == 0
        store.check()
