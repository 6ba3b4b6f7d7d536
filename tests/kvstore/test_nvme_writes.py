"""What of that which leaves DRAM a store writes to NVMe, as it was told."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore.handle import NamespaceHandle
from kvstore.miss import HitTier
from kvstore.node import EmbeddedStore
from simulation.two_tiers import wait_until_idle
from tiering import admission
from workbench import blank_pages, ids, one_line, random_pages, small_layout

BLOCK = 64


class Load:
    """Long prompts that nobody asks for again, and short ones that come back when DRAM has long forgotten them."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store = store
        self.layout = small_layout()
        self.handle: NamespaceHandle = store.namespace(model="m" * 40, layout=self.layout)
        self.rounds = 0

    def put(self, tokens: list[int]) -> None:
        assert self.handle.put(tokens, random_pages(self.layout, len(tokens) // BLOCK)).reason is None
        wait_until_idle(self.store._store)

    def get(self, tokens: list[int]) -> dict[HitTier, int]:
        match = self.handle.match(tokens)
        with self.handle.lease(match) as lease:
            if lease.tokens:
                self.handle.get(lease, blank_pages(self.layout, len(tokens) // BLOCK))
            return {tier: blocks for tier, blocks in match.tiers if blocks}

    def short(self, number: int) -> list[int]:
        return ids(BLOCK, 1_000_000 + BLOCK * number)

    def long(self, number: int) -> list[int]:
        return ids(20 * BLOCK, 10_000_000 + 20 * BLOCK * number)

    def go_on(self, rounds: int, behind: int = 10) -> None:
        for _ in range(rounds):
            self.put(self.long(self.rounds))
            self.put(self.short(self.rounds))
            if self.rounds >= behind:
                earlier = self.short(self.rounds - behind)
                if not self.get(earlier):
                    self.put(earlier)
            self.rounds += 1

    def counters(self) -> dict[str, int]:
        return dict(self.store._store.usage().counters)


@pytest.fixture(autouse=True)
def quick_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LEAST_HISTORY", 100)
    monkeypatch.setattr(admission, "MOST_HISTORY", 100)
    monkeypatch.setattr(admission, "_RANKED_EVERY", 20)
    monkeypatch.setattr(admission, "_COARSE_WEIGHT", 2.0)


def opened(path: Path, **options: object) -> EmbeddedStore:
    return kvstore.embedded(str(path), dram="1MiB", nvme="256MiB", **options)  # type: ignore[arg-type]


def test_what_comes_back_is_written_and_what_does_not_is_not(tmp_path: Path) -> None:
    with opened(tmp_path, nvme_writes="learned") as store:
        load = Load(store)
        load.go_on(60)
        before = load.counters()
        load.go_on(40)
        after = load.counters()
        declined = after["declined_blocks"] - before["declined_blocks"]
        written = after["demoted_blocks"] - before["demoted_blocks"]
        assert declined > 30 * 20 and written < 10 * 20, (declined, written)
        assert load.get(load.short(80)) == {HitTier.NVME: 1} and load.get(load.long(80)) == {}
        store.check()


def test_blocks_that_are_used_all_the_time_keep_nobody_from_being_looked_at(tmp_path: Path) -> None:
    """They stay in DRAM and are on NVMe; what comes and goes beside them is still chosen from."""
    with opened(tmp_path, nvme_writes="learned") as store:
        load = Load(store)
        hot = [load.long(1_000 + number) for number in range(2)]
        for tokens in hot:
            pages = random_pages(load.layout, 20)
            assert load.handle.put(tokens, pages, durability="disk").reason is None
        before = load.counters()["demoted_blocks"]
        for _ in range(40):
            load.go_on(1)
            for tokens in hot:
                load.get(tokens)
        assert load.counters()["demoted_blocks"] > before
        store.check()


def test_by_itself_everything_is_written(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        load = Load(store)
        load.go_on(30)
        assert "declined_blocks" not in load.counters()
        assert load.get(load.long(5)) == {HitTier.NVME: 20}


def test_a_budget_is_not_gone_beyond(tmp_path: Path) -> None:
    """A hundred blocks in an hour, which is all that may be kept."""
    with opened(tmp_path, nvme_writes=100 * 24 * block_bytes(tmp_path) / (256 << 20)) as store:
        load = Load(store)
        load.go_on(40)
        assert 0 < load.counters()["demoted_blocks"] <= 101


def block_bytes(path: Path) -> int:
    with kvstore.embedded(str(path / "other"), dram="1MiB") as store:
        return Load(store).store._store._blocks.spaces[0].block_bytes


def test_an_end_in_order_writes_what_waits(tmp_path: Path) -> None:
    """And not what was declined."""
    with opened(tmp_path, nvme_writes="learned") as store:
        load = Load(store)
        load.go_on(80)
        last, lost = load.long(79), load.counters()["declined_blocks"]
        assert lost and load.handle.match(last).blocks == 20
    with opened(tmp_path, nvme_writes="learned") as store:
        assert store.warmed(60)
        load = Load(store)
        assert load.get(last) == {HitTier.NVME: 20}


@pytest.mark.parametrize("given", ["learned", 1.0])
def test_without_nvme_there_is_nothing_to_choose(given: str | float, tmp_path: Path) -> None:
    with pytest.raises(kvstore.BadInput) as caught:
        kvstore.embedded(str(tmp_path), dram="1MiB", nvme_writes=given)
    assert one_line(caught.value, f"nvme_writes={given!r}", "there is none; give nvme a size, or leave nvme_writes out")
    kvstore.embedded(str(tmp_path), dram="1MiB", nvme_writes="all").close()


@pytest.mark.parametrize("given", ["some", "", -1, 0, float("nan"), True, 1e9])
def test_what_cannot_be_is_one_line(given: str | float, tmp_path: Path) -> None:
    with pytest.raises(kvstore.BadInput) as caught:
        opened(tmp_path, nvme_writes=given)
    assert one_line(caught.value, "nvme_writes=", "give all, learned, or how many times")
