"""What a put asked to be kept: how long it stays in either tier, over a restart too, and what it can never do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import Limits, Share
from kvstore.block.account import HitTier
from kvstore.client.handle import NamespaceHandle, PutResult
from kvstore.node import EmbeddedStore
from model.store_model import OpenStore
from simulation.two_tiers import Disk, Sizes, open_two_tiers, wait_until_idle
from waiting import FakeClock
from workbench import MODEL, ids, random_pages, small_layout

BLOCK = 64
LAYOUT = small_layout()
PAGES = {blocks: random_pages(LAYOUT, blocks) for blocks in (4, 10)}


class Kept:
    """A store with two tiers of 80 and 100 blocks, a quarter of each for what is to be kept."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.disk, self.clock = directory, Disk(), FakeClock()
        self.prompts = 100
        self.open()

    def open(self) -> None:
        self.opened: OpenStore = open_two_tiers(self.directory, self.disk, Sizes(), clock=self.clock)
        self.handle = self.opened.store.namespace(model=MODEL, layout=LAYOUT)
        assert self.opened.store.warmed(30)

    def put(self, prompt: int, blocks: int = 10, **wish: float) -> PutResult:
        result = self.handle.put(tokens(prompt, blocks), PAGES[blocks], **wish)  # type: ignore[arg-type]
        wait_until_idle(self.opened.core)
        return result

    def flood(self, puts: int = 40) -> None:
        """Many more blocks than both tiers have room for."""
        for _ in range(puts):
            self.prompts += 1
            assert self.put(self.prompts).reason is None

    def found(self, prompt: int, blocks: int = 10) -> dict[HitTier, int]:
        return {tier: count for tier, count in self.handle.match(tokens(prompt, blocks)).tiers if count}

    def retained_bytes(self) -> tuple[int, int]:
        usage = self.opened.core.usage()
        assert usage.nvme_retained_bytes is not None
        return usage.dram_retained_bytes, usage.nvme_retained_bytes


def tokens(prompt: int, blocks: int) -> list[int]:
    return ids(blocks * BLOCK, 10_000 * prompt)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    kept.opened.core.check()
    kept.opened.close()


def test_what_is_to_be_kept_outlives_a_flood_until_its_time_ends(kept: Kept) -> None:
    assert kept.put(1, ttl=60).reason is None and kept.put(2).reason is None
    kept.flood()
    assert kept.found(1) == {HitTier.DRAM: 10} and kept.found(2) == {}
    kept.clock.advance(61)
    kept.flood()
    assert kept.found(1) == {}


def test_a_priority_is_renewed_by_uses(kept: Kept) -> None:
    kept.put(1, priority=10)
    kept.put(2, priority=10)
    for _ in range(4):
        kept.clock.advance(60)
        kept.handle.lease(kept.handle.match(tokens(1, 10))).release()
        kept.flood(20)
    assert kept.found(1) == {HitTier.DRAM: 10} and kept.found(2) == {}


def test_a_put_of_what_is_there_renews_it(kept: Kept) -> None:
    kept.put(1)
    assert kept.put(1, ttl=60) == PutResult(10, 0, None, None)
    kept.flood()
    assert kept.found(1) == {HitTier.DRAM: 10}


def test_it_is_kept_on_disk_and_over_a_restart(kept: Kept) -> None:
    kept.put(1, ttl=600, durability="disk")  # type: ignore[arg-type]
    kept.put(2, durability="disk")  # type: ignore[arg-type]
    kept.opened.close()
    kept.open()
    assert kept.retained_bytes()[1] == 10 * kept.opened.blocks.spaces[0].block_bytes
    kept.flood()
    assert kept.found(1).get(HitTier.NVME) == 10 and kept.found(2) == {}


def test_it_can_never_fill_a_tier(kept: Kept) -> None:
    """Everybody wants everything to be kept: what comes finds room all the same."""
    for prompt in range(40):
        assert kept.put(prompt, ttl=1000 + prompt).reason is None
        dram, nvme = kept.retained_bytes()
        assert dram <= 0.25 * Sizes().dram and nvme <= 0.25 * Sizes().nvme
    assert kept.found(39) == {HitTier.DRAM: 10}
    kept.flood()
    assert kept.found(39) == {HitTier.DRAM: 10}, "of those, the one whose time ends last"
    assert kept.put(99, 4).reason is None


def embedded(path: Path, **options: object) -> tuple[EmbeddedStore, dict[str, NamespaceHandle]]:
    store = kvstore.embedded(str(path), dram="1MiB", extent="64KiB", **options)  # type: ignore[arg-type]
    return store, {name: store.for_tenant(name).namespace(model=MODEL, layout=LAYOUT) for name in ("a", "b")}


def test_a_tenant_keeps_within_its_own_share(tmp_path: Path) -> None:
    store, tenants = embedded(tmp_path, shares={"a": Share(0.5)})
    with store:
        for prompt in range(20):
            tenants["a"].put(tokens(prompt, 10), PAGES[10], ttl=1000)
            tenants["b"].put(tokens(prompt, 10), PAGES[10], ttl=1000)
        kept = [store._store.blocks.residency.retention.kept_bytes()]  # type: ignore[union-attr]
        assert all(0 < one <= 0.25 * (1 << 20) * part for one, part in zip(kept[0], (0.25, 0.75), strict=True))
        store.check()


def test_none_of_it_is_kept_where_nothing_may_be(tmp_path: Path) -> None:
    store, tenants = embedded(tmp_path, limits=Limits(retained_fraction=0))
    with store:
        for prompt in range(20):
            assert tenants["a"].put(tokens(prompt, 10), PAGES[10], ttl=1000).reason is None
        assert tenants["a"].match(tokens(0, 10)).blocks == 0 and store._store.usage().dram_retained_bytes == 0
