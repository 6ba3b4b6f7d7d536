"""What of that which leaves DRAM a store writes to NVMe, as it was told."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.block.account import HitTier
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from simulation.two_tiers import wait_until_idle
from tiering.policies import admission
from workbench import blank_pages, ids, random_pages, small_layout

BLOCK = 64


class Load:
    """Long prompts that nobody asks for again, and short ones that come back when DRAM has long forgotten them."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store = store
        self.layout = small_layout()
        self.handle: NamespaceHandle = store.namespace(model="m" * 40, layout=self.layout)
        self.rounds = 0

    def put(self, tokens: list[int], **wish: Any) -> None:
        assert self.handle.put(tokens, random_pages(self.layout, len(tokens) // BLOCK), **wish).reason is None
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_by_itself_everything_is_written(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        load = Load(store)
        load.go_on(30)
        assert "declined_blocks" not in load.counters()
        assert load.get(load.long(5)) == {HitTier.NVME: 20}


def test_a_budget_is_not_gone_beyond(tmp_path: Path) -> None:
    """A hundred blocks in an hour, which is all that may be kept."""
    with opened(tmp_path, nvme_writes=an_hour_of(100, tmp_path)) as store:
        load = Load(store)
        load.go_on(40)
        assert 0 < load.counters()["demoted_blocks"] <= 101


def an_hour_of(blocks: int, path: Path) -> float:
    """The setting with which so many blocks may be written at once, and hardly any more while a test runs."""
    with kvstore.embedded(str(path / "other"), dram="1MiB") as store:
        return blocks * 24 * Load(store).store._store.blocks.spaces[0].block_bytes / (256 << 20)


@pytest.mark.slow
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


# What is kept for a time: memory, of 80 blocks, may keep 20 of them, and the disk all that is put here ----------------


def setting(name: str, path: Path) -> str | float:
    return an_hour_of(5, path) if name == "number" else name


def found_after_a_restart(path: Path, writes: str | float, prompts: Sequence[list[int]]) -> list[int]:
    with opened(path, nvme_writes=writes) as store:
        assert store.warmed(60)
        load = Load(store)
        found = [load.get(tokens) for tokens in prompts]
        store.check()
    assert all(set(one) <= {HitTier.NVME} for one in found)
    return [one.get(HitTier.NVME, 0) for one in found]


def declined_of(store: EmbeddedStore) -> int:
    return len(store._store.blocks.dirty.declined())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "learned", "number"])
@pytest.mark.parametrize(("prompts", "wish"), [(1, {"ttl": 3600}), (3, {"ttl": 3600}), (1, {"priority": 100})])
def test_what_is_to_be_kept_is_there_after_a_restart(
    name: str, prompts: int, wish: dict[str, int], tmp_path: Path
) -> None:
    """Twenty blocks, or sixty: more than memory may keep, and less than the disk. Of their class nobody comes back, and
    the number is spent."""
    writes = setting(name, tmp_path)
    with opened(tmp_path, nvme_writes=writes) as store:
        load = Load(store)
        load.go_on(80)
        kept = [load.long(1_000 + number) for number in range(prompts)]
        for tokens in kept:
            load.put(tokens, **wish)
        before = load.counters().get("declined_blocks", 0)
        load.go_on(20)
        assert (load.counters().get("declined_blocks", 0) - before > 20) == (name != "all")
        store.check()
    assert found_after_a_restart(tmp_path, writes, kept) == [20] * prompts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned", "number"])
def test_who_asks_after_it_was_declined_gets_it_written(name: str, tmp_path: Path) -> None:
    writes = setting(name, tmp_path)
    with opened(tmp_path, nvme_writes=writes) as store:
        load = Load(store)
        load.go_on(80)
        while not declined_of(store):
            load.go_on(1)
        recent = [load.long(number) for number in range(load.rounds - 4, load.rounds)]
        oldest = next(tokens for tokens in recent if load.handle.match(tokens).blocks == 20)
        before = declined_of(store)
        load.put(oldest, ttl=3600)
        assert declined_of(store) < before
        load.go_on(20)
    assert found_after_a_restart(tmp_path, writes, [oldest]) == [20]


def test_what_is_to_be_kept_goes_before_others_and_counts(tmp_path: Path) -> None:
    """It takes the whole budget, though others came before it."""
    with opened(tmp_path, nvme_writes=an_hour_of(20, tmp_path)) as store:
        load = Load(store)
        load.go_on(1)
        load.put(load.long(1_000), ttl=3600)
        load.go_on(20)
        assert load.counters()["demoted_blocks"] == 20
        assert load.get(load.long(1_000)) == {HitTier.DRAM: 20}
        store._store.evict(80)
        assert load.get(load.long(1_000)) == {HitTier.NVME: 20}


def test_what_is_to_be_kept_is_written_beyond_the_budget_and_nothing_else_is(tmp_path: Path) -> None:
    with opened(tmp_path, nvme_writes=an_hour_of(5, tmp_path)) as store:
        load = Load(store)
        load.go_on(20)
        before = load.counters()["demoted_blocks"]
        assert before <= 6
        for number in range(3):
            load.put(load.long(1_000 + number), ttl=3600)
        load.go_on(20)
        assert 40 <= load.counters()["demoted_blocks"] - before <= 60


@pytest.mark.slow
def test_to_keep_everything_is_to_keep_no_more_than_the_disk_may(tmp_path: Path) -> None:
    """Which is 436 blocks here; of the others it is chosen."""
    limits = kvstore.Limits(retained_fraction=0.02)
    with opened(tmp_path, nvme_writes=an_hour_of(5, tmp_path), limits=limits) as store:
        load = Load(store)
        for number in range(40):
            load.put(load.long(number), ttl=3600)
        usage = store.usage()
        assert 400 < load.counters()["demoted_blocks"] < 450
        assert usage.nvme_retained_bytes is not None and usage.nvme_retained_bytes <= 0.02 * (256 << 20)
        store.check()


@pytest.mark.slow
def test_a_kept_block_whose_time_is_over_is_as_any_other(tmp_path: Path) -> None:
    writes = an_hour_of(5, tmp_path)
    with opened(tmp_path, nvme_writes=writes) as store:
        load = Load(store)
        load.put(load.long(1_000), ttl=1)
        time.sleep(2)
        load.go_on(40)
        assert load.counters()["demoted_blocks"] <= 6
    assert found_after_a_restart(tmp_path, writes, [load.long(1_000)]) < [20]


def test_a_durable_put_is_written_whatever_was_chosen(tmp_path: Path) -> None:
    writes = an_hour_of(5, tmp_path)
    with opened(tmp_path, nvme_writes=writes) as store:
        load = Load(store)
        load.go_on(20)
        before = load.counters()["demoted_blocks"]
        for number, wish in enumerate([{}, {"ttl": 3600}]):
            load.put(load.long(1_000 + number), durability="disk", **wish)
        assert load.counters()["demoted_blocks"] == before + 40
        load.go_on(20)
    assert found_after_a_restart(tmp_path, writes, [load.long(1_000), load.long(1_001)]) == [20, 20]


@pytest.mark.parametrize(("name", "rounds"), [("all", 2), ("number", 20)])
def test_a_close_says_what_it_wrote_and_what_it_did_not(
    name: str, rounds: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writes = setting(name, tmp_path)
    with opened(tmp_path, nvme_writes=writes) as store:
        load = Load(store)
        load.go_on(rounds)
        declined = declined_of(store)
        before = load.counters().get("demoted_blocks", 0)
        caplog.set_level(logging.INFO, "kvstore.core.levels")
    (line,) = caplog.messages
    found = re.fullmatch(
        r"closing: of what memory alone held (\d+) blocks \(.* KiB\) written to NVMe"
        r"(?:; (\d+) blocks \(.* KiB\) not, as nvme_writes has it)?",
        line,
    )
    assert found and caplog.records[0].levelno == logging.INFO, line
    assert int(found[2] or 0) == declined and (declined > 0) == (name == "number")
    assert int(found[1]) == load.counters()["demoted_blocks"] - before > 0
