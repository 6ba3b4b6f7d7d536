"""Tenants that share a store: what one is guaranteed no other one takes, and what is idle is anybody's."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import Share
from kvstore.block.account import MissReason
from kvstore.client.handle import Lease, NamespaceHandle
from kvstore.config import Limits
from kvstore.core.index import RowState
from kvstore.node import EmbeddedStore
from model.store_model import WHOLE, Prompt, open_store
from simulation.two_tiers import wait_until_idle
from tiering.tier import SLOT_BITS
from workbench import ids, one_line, random_pages, small_layout

BLOCK = 64
MODELS = ("m" * 40, "n" * 40)
LAYOUT = small_layout()
PAGES = {blocks: random_pages(LAYOUT, blocks) for blocks in range(1, 41)}


class Tenants:
    """One store of sixteen extents of five blocks each, and those who use it."""

    def __init__(self, directory: Path, shares: dict[str, Share], nvme: str | None = None) -> None:
        self.store: EmbeddedStore = kvstore.embedded(
            str(directory), dram="1MiB", extent="64KiB", nvme=nvme, slab="128KiB" if nvme else None, shares=shares
        )
        self.blocks = self.store._store.blocks
        self.shares = self.blocks.shares
        self._handles: dict[tuple[str, str], NamespaceHandle] = {}

    def handle(self, tenant: str, model: str = MODELS[0]) -> NamespaceHandle:
        found = self._handles.get((tenant, model))
        if found is None:
            found = self._handles[tenant, model] = self.store.for_tenant(tenant).namespace(model=model, layout=LAYOUT)
        return found

    def put(self, tenant: str, prompt: int, blocks: int = 10, model: str = MODELS[0]) -> MissReason | None:
        result = self.handle(tenant, model).put(tokens(prompt, blocks), PAGES[blocks])
        self.settle()
        return result.reason

    def settle(self) -> None:
        if self.blocks.lower is not None:
            wait_until_idle(self.store._store)

    def found(self, tenant: str, prompt: int, blocks: int = 10, model: str = MODELS[0]) -> int:
        return self.handle(tenant, model).match(tokens(prompt, blocks)).blocks

    def extents(self, tenant: str) -> int:
        return self.blocks.dram.held()[self.store.keys.tenant(tenant).tenant]


def tokens(prompt: int, blocks: int) -> list[int]:
    return ids(blocks * BLOCK, 10_000 * prompt)


def test_what_is_idle_is_borrowed_and_given_back(tmp_path: Path) -> None:
    world = Tenants(tmp_path, {"quiet": Share(0.5)})
    with world.store:
        for prompt in range(50):
            assert world.put("flood", prompt) is None
        assert world.extents("flood") == 16
        for prompt in range(4):
            assert world.put("quiet", prompt) is None
        assert [world.found("quiet", prompt) for prompt in range(4)] == [10] * 4
        assert world.extents("flood") == 8 and world.found("flood", 49) == 10


def test_without_room_for_it_a_tenant_is_told_so_and_gets_its_own_back(tmp_path: Path) -> None:
    """All is guaranteed to others, who use it: whoever has nothing gets nothing, whoever has something goes on."""
    world = Tenants(tmp_path, {"a": Share(0.5), "b": Share(0.5)})
    with world.store:
        for prompt in range(4):
            assert world.put("a", prompt) is None and world.put("b", prompt) is None
        assert world.put("c", 0) is MissReason.QUOTA
        for prompt in range(4, 20):
            assert world.put("a", prompt) is None
        assert world.extents("a") == world.extents("b") == 8
        assert [world.found("b", prompt) for prompt in range(4)] == [10] * 4


def test_by_weight(tmp_path: Path) -> None:
    world = Tenants(tmp_path, {"a": Share(weight=3.0), "b": Share(weight=1.0)})
    with world.store:
        for prompt in range(40):
            assert world.put("a", prompt) is None and world.put("b", prompt) is None
        assert (world.extents("a"), world.extents("b")) == (12, 4)


def test_who_gives_way_gives_a_whole_extent_and_nobody_else_anything(tmp_path: Path) -> None:
    """Also between namespaces of one tenant: the one whose oldest are the worst."""
    world = Tenants(tmp_path, {})
    with world.store:
        for prompt in range(3):
            assert world.put("t", prompt, model=MODELS[1]) is None
        for prompt in range(5):
            assert world.put("t", prompt, model=MODELS[0]) is None
        before = world.store._store.usage().counters.get("evicted_blocks", 0)
        assert world.put("t", 99, 1, model="o" * 40) is None
        assert world.store._store.usage().counters.get("evicted_blocks", 0) - before == 5
        assert [world.found("t", prompt, model=MODELS[1]) for prompt in range(3)] == [5, 10, 10]
        assert [world.found("t", prompt, model=MODELS[0]) for prompt in range(5)] == [10] * 5


def test_an_extent_that_nobody_uses_is_given(tmp_path: Path) -> None:
    """A block of each other one is being read: those cannot be given back, whatever goes."""
    world = Tenants(tmp_path, {})
    with world.store:
        for prompt in range(16):
            assert world.put("t", prompt, 5) is None
        handle = world.handle("t")
        leases = [handle.lease(handle.match(tokens(prompt, 1))) for prompt in range(16)]
        pinned = {world.blocks.residency.place(row, 0) >> SLOT_BITS for row in pinned_rows(world)}
        assert len(pinned) == world.extents("t") == 16
        assert world.put("other", 99, 1) is MissReason.PINNED_FULL
        assert sum(world.found("t", prompt, 5) for prompt in range(16)) == 80, "it would have helped nobody"
        leases.pop(7).release()
        assert world.put("other", 99, 1) is None
        assert world.extents("t") == 15 and sum(world.found("t", prompt, 5) for prompt in range(16)) == 75
        for lease in leases:
            lease.release()
        world.store.check()


def pinned_rows(world: Tenants) -> list[int]:
    return [row for row, count in enumerate(world.blocks.residency.pins.counts) if count]


def test_of_many_with_one_extent_each_one_gives_it(tmp_path: Path) -> None:
    """They were used in turn, so that all of them have some of the worst."""
    world = Tenants(tmp_path, {})
    with world.store:
        models = [chr(ord("a") + number) * 40 for number in range(16)]
        for prompt in range(5):
            for model in models:
                assert world.put("t", prompt, 1, model=model) is None
        assert world.extents("t") == 16
        leases = [world.handle("t", models[0]).lease(world.handle("t", models[0]).match(tokens(0, 1)))]
        assert world.put("other", 99, 1) is None
        left = [sum(world.found("t", prompt, 1, model=model) for prompt in range(5)) for model in models]
        assert sorted(left) == [0] + [5] * 15 and left[0] == 5
        leases[0].release()


@pytest.mark.parametrize("late", [1, 5, 15])
def test_what_late_readers_hold_is_no_room(tmp_path: Path, late: int) -> None:
    """Blocks of the oldest extents were leased, the leases ran out, and nobody said that he is done."""
    opened = open_store(tmp_path, limits=Limits(pinned_fraction=1.0, lease_seconds=10.0))
    old, new = opened.namespace("old", WHOLE), opened.namespace("new", WHOLE)
    dram, slot_class = opened.blocks.dram, opened.blocks.spaces[old.number].classes[0]
    prompts = 0
    while dram.has_room() or dram.free_slots(slot_class):
        old.put(Prompt((prompts,)))
        prompts += 1
    blocks = dram.extent_bytes // slot_class.frame_bytes
    leases = [old.handle.lease(old.match(Prompt((prompt,)))) for prompt in range(late * blocks)]
    for prompt in range(late * blocks, prompts):
        old.handle.lease(old.match(Prompt((prompt,)))).release()
    opened.clock.advance(20)
    opened.core.evict(0)
    assert new.put(Prompt((1,))).stored == 1
    assert sum(old.match(Prompt((prompt,))).blocks for prompt in range(prompts)) == prompts - blocks
    opened.core.check()
    del leases
    opened.close()


def read_at_random(world: Tenants, prompts: int, blocks: int, times: int) -> None:
    random, handle = Random(1), world.handle("t")
    for _ in range(times):
        handle.lease(handle.match(tokens(random.randrange(prompts), blocks))).release()


def on_disk(world: Tenants) -> set[int]:
    return {
        row
        for space in world.blocks.spaces
        for row in world.blocks.index.rows(space.number)
        if world.blocks.is_below(row)
    }


def fill_disk(world: Tenants) -> int:
    """By one tenant, up to the last slab; returns how many prompts of five blocks it took."""
    assert world.blocks.lower is not None and world.store._store._levels is not None
    prompts = 0
    while world.blocks.lower.tier.held().get(world.store.keys.tenant("t").tenant, 0) < world.blocks.lower.tier.pieces():
        assert world.put("t", prompts, 5) is None
        assert not world.store._store._levels.demote_all(30)
        prompts += 1
    return prompts


@pytest.mark.slow
def test_on_disk_one_slab_goes_and_not_all_that_is_old(tmp_path: Path) -> None:
    """What was used at the same time stands in many slabs: leaf by leaf, most of all would go before one is empty."""
    world = Tenants(tmp_path, {}, nvme="8MiB")
    with world.store:
        prompts = fill_disk(world)
        read_at_random(world, prompts, 5, 5 * prompts)
        before = on_disk(world)
        assert world.put("other", 9_999, 1) is None
        assert world.store._store._levels is not None and not world.store._store._levels.demote_all(30)
        lost = before - on_disk(world)
        print(f"{len(lost)} of {len(before)} blocks went for one slab")
        assert len(before) > 500 and len(lost) <= 30
        world.store.check()


def test_on_disk_nothing_goes_for_a_slab_that_nobody_can_give(tmp_path: Path) -> None:
    world = Tenants(tmp_path, {}, nvme="1MiB")
    with world.store:
        prompts = fill_disk(world)
        handle = world.handle("t")
        levels = world.store._store._levels
        assert levels is not None
        leases = [handle.lease(handle.match(tokens(prompt, 1))) for prompt in range(prompts)]
        before = on_disk(world)
        assert len(before) > 70 and len(pinned_rows(world)) == prompts
        assert world.put("other", 9_999, 1) is None
        assert levels.demote_all(1) is not None and on_disk(world) == before
        assert len(world.store._store.blocks.dirty) == 1
        for lease in leases[:-1]:
            lease.release()
        assert not levels.demote_all(30) and not len(world.store._store.blocks.dirty)
        assert world.found("t", prompts - 1, 5) == 5 and 0 < len(before - on_disk(world)) <= 20
        leases[-1].release()
        world.store.check()


class Disk(Tenants):
    """Eight slabs of ten blocks, and DRAM for all of it."""

    def __init__(self, directory: Path) -> None:
        self.store = kvstore.embedded(str(directory), dram="8MiB", extent="64KiB", nvme="1MiB", slab="128KiB")
        self.blocks = self.store._store.blocks
        self._handles = {}

    def put_down(self, tenant: str, prompt: int, blocks: int, ttl: float | None = None) -> MissReason | None:
        result = self.handle(tenant).put(tokens(prompt, blocks), PAGES[blocks], durability="disk", ttl=ttl)
        self.settle()
        return result.reason

    def fill(self, blocks: int) -> None:
        """Up to so many."""
        prompt = 1_000
        while len(on_disk(self)) < blocks:
            assert self.put_down("t", prompt, min(5, blocks - len(on_disk(self)))) is None
            prompt += 1

    def slab_of(self, row: int) -> int:
        assert self.blocks.lower is not None
        return self.blocks.lower.residency.place(row, 0) >> SLOT_BITS


@pytest.mark.parametrize("chains", [1, 2])
def test_on_disk_a_chain_that_goes_on_in_memory_alone_is_passed_over(tmp_path: Path, chains: int) -> None:
    """The oldest slab has blocks that only NVMe has and that lead to what is not there: another one goes."""
    world = Disk(tmp_path)
    with world.store:
        for prompt in range(2):
            assert world.put_down("t", prompt, 5) is None
        world.store._store.evict(10)
        for prompt in range(chains):
            assert world.put("t", prompt, 6) is None
        world.fill(80)
        before = on_disk(world)
        assert world.put_down("other", 0, 1) is None
        assert len(before - on_disk(world)) == 10
        assert [world.found("t", prompt, 6) for prompt in range(2)] == [
            6 if prompt < chains else 5 for prompt in range(2)
        ]
        world.store.check()


@pytest.mark.parametrize("chains", [4, 7])
def test_on_disk_the_way_to_what_is_in_both_is_passed_over(tmp_path: Path, chains: int) -> None:
    """Its end goes from NVMe and stays in DRAM, so that it cannot go: nor can its slab."""
    world = Disk(tmp_path)
    with world.store:
        blocks, lock = world.blocks, world.store._store.lock
        for prompt in range(8):
            before = on_disk(world)
            assert world.put_down("t", 2 * prompt, 5) is None
            if prompt < chains:
                rows = sorted(on_disk(world) - before, key=blocks.index.depth, reverse=True)
                with lock:
                    assert blocks._evict(iter(rows), 5) == 5
            assert world.put_down("t", 2 * prompt, 6) is None
            assert world.put_down("t", 2 * prompt + 1, 4) is None
        before = on_disk(world)
        assert len(before) == 80 and sum(not blocks.is_above(row) for row in before) == 5 * chains
        assert world.put_down("other", 0, 1) is None
        assert len(before - on_disk(world)) == 10
        world.store.check()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_on_disk_who_asks_may_have_nothing_that_goes(tmp_path: Path, is_damaged: bool) -> None:
    """Its one chain there leads to what is not there: somebody else's slab goes."""
    world = Disk(tmp_path)
    with world.store:
        assert world.put_down("other", 0, 10) is None
        world.store._store.evict(10)
        if is_damaged:
            (tip,) = [row for row in on_disk(world) if world.blocks.index.depth(row) == 9]
            with world.store._store.lock:
                world.blocks.below.quarantine(tip)  # type: ignore[union-attr]
        else:
            assert world.put("other", 0, 11) is None
        world.fill(80 - is_damaged)
        assert world.put_down("other", 1, 1) is None
        assert world.found("other", 0, 11) == 11 - 2 * is_damaged
        world.store.check()


def test_on_disk_what_is_kept_goes_where_all_else_is_in_use(tmp_path: Path) -> None:
    """Also where a block that is not kept stands behind it."""
    world = Disk(tmp_path)
    with world.store:
        assert world.put_down("t", 0, 10, ttl=600) is None
        assert world.put_down("t", 0, 11) is None
        world.fill(80)
        handle, leases = world.handle("t"), []
        for prompt in range(1_000, 1_020):
            if lease := handle.lease(handle.match(tokens(prompt, 1))):
                leases.append(lease)
        in_use = {world.slab_of(row) for row in pinned_rows(world)}
        kept = {world.slab_of(row) for row in on_disk(world) if world.blocks.index.depth(row) >= 5} - in_use
        assert len(in_use) == 7 and len(kept) == 1
        before = on_disk(world)
        assert world.put_down("other", 0, 1) is None
        assert len(before - on_disk(world)) == 11
        for lease in leases:
            lease.release()
        world.store.check()


@pytest.mark.parametrize(
    ("options", "tier", "key"),
    [
        ({"dram": "2MiB"}, "dram", "extent"),
        ({"dram": "3MiB", "extent": "1MiB"}, "dram", "extent"),
        ({"dram": "64MiB", "extent": "64KiB", "nvme": "16MiB", "slab": "2MiB"}, "nvme", "slab"),
        ({"dram": "64MiB", "extent": "64KiB", "nvme": "14MiB", "slab": "2MiB"}, "nvme", "slab"),
    ],
)
def test_what_a_share_that_is_too_small_is_told_to_be_is_taken(
    options: dict[str, str], tier: str, key: str, tmp_path: Path
) -> None:
    def opened(share: float) -> None:
        kvstore.embedded(str(tmp_path), shares={"a": Share(share)}, **options).close()  # type: ignore[arg-type]

    with pytest.raises(kvstore.BadInput) as caught:
        opened(0.002)
    assert one_line(caught.value, f"less than one piece of {tier}", f"smaller pieces ({key}, ", f"store.{key}: 64.0")
    told = re.search(r"give ([0-9.]+) or more", str(caught.value))
    assert told is not None
    opened(float(told.group(1)))


# Whatever they do -----------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d")
PUTS = st.tuples(
    st.just("put"), st.sampled_from(NAMES), st.integers(0, 12), st.sampled_from([3, 20, 40]), st.sampled_from(MODELS)
)
HOLDS = st.tuples(
    st.just("hold"), st.sampled_from(NAMES), st.integers(0, 12), st.sampled_from([3, 20, 40]), st.sampled_from(MODELS)
)
RELEASES = st.tuples(st.just("release"), st.just(""), st.just(0), st.just(1), st.just(""))
ACTS = st.lists(st.one_of(PUTS, PUTS, PUTS, HOLDS, RELEASES), min_size=20, max_size=60)
GUARANTEES = st.tuples(*[st.sampled_from([0.0625, 0.2, 0.25, 0.33])] * 3)


@pytest.mark.slow
def test_a_tenant_that_reads_is_not_idle_on_disk(tmp_path: Path) -> None:
    world = Tenants(tmp_path, {"reader": Share(0.1), "writer": Share(0.1)}, nvme="3MiB")
    with world.store:
        for prompt in range(6):
            assert world.put("reader", prompt) is None
        assert world.store._store._levels is not None
        world.store._store._levels.demote_all(30)
        for prompt in range(60):
            assert world.put("writer", prompt) is None
            handle = world.handle("reader")
            for mine in range(6):
                handle.lease(handle.match(tokens(mine, 10))).release()
        assert world.blocks.lower is not None and world.shares is not None
        idle = world.blocks.lower.residency.groups.idle()  # type: ignore[union-attr]
        assert not idle[world.shares.of_namespace[world.handle("reader").number]]


class Watched(Tenants):
    """Looks, before and after each time that room is made, at those who are within their guarantee."""

    def __init__(self, directory: Path, shares: dict[str, Share], nvme: str | None) -> None:
        super().__init__(directory, shares, nvme)
        self.evicted = 0
        blocks = self.blocks
        blocks.evict_for = self._watched(blocks.evict_for, 0)  # type: ignore[method-assign,assignment]
        blocks.evict_own = self._watched(blocks.evict_own, 1)  # type: ignore[method-assign,assignment]
        if (below := blocks.below) is not None:
            below.evict = self._watched(below.evict, 1)  # type: ignore[method-assign,assignment]

    def _watched(self, evict: Callable[[int, int], object], number_at: int) -> Callable[[int, int], object]:
        def watched(*given: int) -> object:
            before = self.protected(self.shares.of_namespace[given[number_at]])  # type: ignore[union-attr]
            result = evict(*given)
            self.evicted += 1
            for name, had in before.items():
                assert had <= self.stands(name), f"{name} is within its guarantee, and lost blocks"
            return result

        return watched

    def protected(self, asker: int) -> dict[tuple[int, str], set[int]]:
        """Rows of the groups that hold no more than they are guaranteed, in each tier."""
        shares, lower = self.shares, self.blocks.lower
        assert shares is not None
        found = {}
        for group in range(1, len(shares)):
            if group == asker:
                continue
            for name, tier in (("dram", self.blocks.dram), ("nvme", lower.tier if lower is not None else None)):
                if tier is not None and shares.held(tier.held())[group] <= shares.guaranteed(group, tier.pieces()):
                    found[group, name] = self.stands((group, name))
        return found

    def stands(self, name: tuple[int, str]) -> set[int]:
        group, tier = name
        blocks, index = self.blocks, self.blocks.index
        assert self.shares is not None
        is_there = blocks.is_above if tier == "dram" else blocks.is_below
        return {
            row
            for space in blocks.spaces
            if self.shares.of_namespace[space.number] == group
            for row in index.rows(space.number)
            if index.state(row) is RowState.VISIBLE and is_there(row)
        }


def live(
    directory: Path, parts: tuple[float, ...], acts: list[tuple[str, str, int, int, str]], nvme: str | None
) -> int:
    shares = {name: Share(part) for name, part in zip(NAMES, parts, strict=False) if part}
    world = Watched(directory, shares or {"a": Share(0.5)}, nvme)
    held: list[Lease] = []
    with world.store:
        for act, tenant, prompt, blocks, model in acts:
            if act == "put":
                world.put(tenant, prompt, blocks, model)
            elif act == "hold":
                handle = world.handle(tenant, model)
                held.append(handle.lease(handle.match(tokens(prompt, blocks))))
            elif held:
                held.pop(0).release()
            world.settle()
            world.store.check()
        for lease in held:
            lease.release()
    return world.evicted


@pytest.mark.slow
@given(parts=GUARANTEES, acts=ACTS)
@settings(deadline=None, max_examples=25)
def test_within_its_guarantee_a_tenant_loses_no_block_to_others(
    parts: tuple[float, ...], acts: list[tuple[str, str, int, int, str]]
) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-shares-") as directory:
        live(Path(directory), parts, acts, None)


@pytest.mark.slow
@given(parts=GUARANTEES, acts=ACTS)
@settings(deadline=None, max_examples=15)
def test_nor_on_nvme(parts: tuple[float, ...], acts: list[tuple[str, str, int, int, str]]) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-shares-") as directory:
        live(Path(directory), parts, acts, "3MiB")


@pytest.mark.slow
def test_long_floods(tmp_path: Path) -> None:
    """The same over a long life, in which room is made often."""
    acts = [("put", NAMES[at * 7 % 4], at * 5 % 13, 1 + at * 11 % 40, MODELS[at % 2]) for at in range(150)]
    assert live(tmp_path / "dram", (0.25, 0.33, 0.2), acts, None) > 100
    assert live(tmp_path / "both", (0.25, 0.33, 0.2), acts, "3MiB") > 100
