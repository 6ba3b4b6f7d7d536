"""A process that purges one of two tenants and is killed at a failpoint on the way. Forked by a `Nursery`."""

from __future__ import annotations

from typing import Any

from kvstore.node import EmbeddedStore
from torture.nursery import Voice
from torture.points import PointedFiles, PointedMaker, Trigger
from workbench import MODEL, ids, open_at, random_pages, small_layout

SIZES: dict[str, Any] = {"dram": "2MiB", "nvme": "2MiB", "slab": "64KiB", "extent": "64KiB"}
BLOCKS = 12
"""More than two slabs of one part have room for."""


class Armed(Trigger):
    """A trigger that counts nothing before it is armed."""

    armed = False

    def is_due(self, point: str) -> bool:
        return self.armed and super().is_due(point)


def fill(store: EmbeddedStore, tenant: str, seed: int) -> None:
    """Two namespaces of a tenant, all of it durable."""
    for parts in ({}, {"head_shards": 2}):
        layout = small_layout(**parts)
        handle = store.for_tenant(tenant).namespace(model=MODEL, layout=layout)
        pages = random_pages(layout, BLOCKS, seed=seed)
        assert handle.put(ids(64 * BLOCKS), pages, durability="disk").reason is None


def live(say: Voice, directory: str, point: str) -> None:
    """Until the failpoint is reached."""
    trigger = Armed(point, 1, 60.0, say)
    store = open_at(
        directory,
        **SIZES,
        indexes=lambda path: PointedMaker(path, trigger),
        files=lambda path: PointedFiles(path, trigger),
        reach=trigger.reach,
    )
    assert store.warmed(60)
    fill(store, "default", 1)
    fill(store, "guest", 2)
    trigger.armed = True
    store.purge("guest")
    say("purged")
    if point == "key of a new tenant made":
        store.tenant_keys("guest")
        trigger.reach(point)
