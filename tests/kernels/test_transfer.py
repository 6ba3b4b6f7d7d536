"""Loads and saves on the chaos device: right in every legal order, and with any one wait taken out, found out.

A story is an engine's life in small: steps that read and write pages, loads that are used and saves that are published
once they are done, slots that are evicted and filled again as soon as they may be. A hazard is the same story without
one kind of wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from chaos import ChaosEvent, NoWait
from happens_before import HazardError, Pageable, Race, Region
from kv_kernels.cuda import Direction, host_tensor
from kv_kernels.transfer import LayerSlice
from small_engine import FRAME_BYTES, HEADER_BYTES, LAYERS, PAGE_BYTES, PAGES, POOL_PAGES, Engine, Moved

SEEDS = range(int(os.environ.get("TRANSFER_HISTORIES", "60")))
HAZARD_SEEDS = range(30)


@dataclass
class Save:
    moved: Moved
    slots: list[int]
    frames: torch.Tensor
    published: int = 0


@dataclass
class Story:
    """State of the engine and of the store beside it."""

    engine: Engine
    keeps_tables: bool = True
    zeroed: float = 0.5  # how likely new pages are zeroed before a load; else a step in flight still reads them
    free_pages: list[int] = field(default_factory=lambda: list(range(POOL_PAGES)))
    filled: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    leased: dict[int, int] = field(default_factory=dict)
    loads: list[tuple[Moved, list[int]]] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    saved: int = 0
    loaded: int = 0
    detours: int = 0
    faults: list[str] = field(default_factory=list)

    def run(self, steps: int = 30) -> None:
        engine = self.engine
        slots = engine.slots()
        self.filled, self.empty = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        for slot in self.filled:
            engine.fill(slot)
        engine.write(self.free_pages)
        for _ in range(steps):
            steps = [self.load, self.load, self.save, self.save, self.evict, self.replay]
            (self.reset if engine.random.random() < 0.03 else engine.random.choice(steps))()
            if engine.random.random() < 0.3:
                engine.extents.step()
            self.look(engine.random.choice([0.0, 0.0, 0.5]))
        self.look(1.0)
        engine.finish()
        assert not self.faults, self.faults
        assert not any(self.leased.values()), "all slots are given back"
        assert engine.extents.close(1.0), "nothing is held"

    def load(self) -> None:
        engine = self.engine
        slots = engine.random.sample(self.filled, min(len(self.filled), engine.random.randint(1, 5)))
        if engine.random.random() < 0.5:
            slots.sort(key=engine.slots().index)  # neighbours come as one run
        if len(self.free_pages) < PAGES * len(slots) or not slots:
            return
        pages = self.take_pages(len(slots))
        if engine.random.random() < self.zeroed:
            engine.write(pages)
        else:
            engine.attend(pages, engine.random.randrange(LAYERS))  # of those that had them, in the step in flight
        for slot in slots:
            self.leased[slot] = self.leased.get(slot, 0) + 1
        moved = engine.start(Direction.LOAD, slots, pages, self.keeps_tables)
        self.detours += not moved.is_direct
        self.loads.append((moved, slots))

    def save(self) -> None:
        engine = self.engine
        count = min(len(self.empty), engine.random.randint(1, 6))
        if not count or len(self.free_pages) < PAGES * count:
            return
        pages = self.take_pages(count)
        slots = [self.empty.pop(engine.random.randrange(len(self.empty))) for _ in range(count)]
        values = engine.values(len(pages))
        engine.write(pages, values)
        frames = values.unflatten(1, (count, PAGES)).transpose(0, 1).flatten(1)
        self.saves.append(Save(engine.start(Direction.SAVE, slots, pages), slots, frames))

    def publish(self, save: Save, frames: range) -> None:
        engine = self.engine
        for slot, expected in zip(save.slots[frames.start : frames.stop], save.frames[frames.start :], strict=False):
            payload = Region(slot + HEADER_BYTES, FRAME_BYTES - HEADER_BYTES)
            engine.chaos.host_read([payload], "takes a digest")
            if not torch.equal(host_tensor(*payload), expected):
                self.faults.append(f"slot {slot:#x} was published with other bytes")
            engine.chaos.host_write([Region(slot, HEADER_BYTES)], "writes a header")
            host_tensor(slot, HEADER_BYTES).fill_(7)
            engine.contents[slot] = host_tensor(slot, FRAME_BYTES).clone()
            self.filled.append(slot)
        save.published += 1

    def evict(self) -> None:
        slots = [slot for slot in self.filled if not self.leased.get(slot)]
        if not slots:
            return
        slot = self.engine.random.choice(slots)
        self.engine.evict(slot)
        if self.engine.random.random() < 0.3:
            self.engine.fill(slot)
        else:
            self.filled.remove(slot)
            self.empty.append(slot)

    def replay(self) -> None:
        """A captured step again: over pages that are no transfer's, of whatever request has them by now."""
        if len(self.free_pages) > 2:
            self.engine.attend(self.free_pages[:2], self.engine.random.randrange(LAYERS))
            self.engine.write(self.free_pages[2:3])

    def reset(self) -> None:
        """The engine forgets all requests, once their transfers have ended, and the store all that it has."""
        self.look(1.0)
        for slot in self.filled:
            self.engine.evict(slot)
        self.filled, self.empty = [], [*self.empty, *self.filled]

    def look(self, waits: float) -> None:
        """Use what is done. waits: how likely another one, or another part of one, is waited for."""
        engine = self.engine
        for one in [one for one in self.loads if one[0].is_done() or engine.random.random() < waits]:
            moved, slots = one
            assert moved.wait()
            self.loads.remove(one)
            self.loaded += 1
            for layer in range(LAYERS):
                engine.attend(moved.pages, layer, engine.expected(slots, layer))
            for slot in slots:
                self.leased[slot] -= 1
                if not self.leased[slot] and engine.random.random() < 0.5:
                    engine.evict(slot)
                    engine.fill(slot)
            self.free_pages += moved.pages
            engine.write(moved.pages)
        for save in list(self.saves):
            ends = save.moved.ends
            while save.published < len(ends) and (save.moved.is_done() or engine.random.random() < waits):
                assert save.moved.wait(save.published)
                self.publish(save, ends[save.published][0])
            if save.published == len(ends):
                assert save.moved.wait()
                self.saves.remove(save)
                self.saved += 1
                self.free_pages += save.moved.pages
                engine.write(save.moved.pages)

    def take_pages(self, frames: int) -> list[int]:
        self.engine.random.shuffle(self.free_pages)
        pages, self.free_pages = self.free_pages[: PAGES * frames], self.free_pages[PAGES * frames :]
        return pages


@pytest.mark.slow
@pytest.mark.parametrize("refused", [False, True], ids=["page-locked", "refused"])
def test_every_legal_order_gives_the_right_bytes(refused: bool) -> None:
    loaded = saved = detours = 0
    for seed in SEEDS:
        print(f"seed {seed}")
        story = Story(Engine(seed, NoWait(), refused))
        story.run()
        loaded, saved, detours = loaded + story.loaded, saved + story.saved, detours + story.detours
    assert loaded > 2 * len(SEEDS) and saved > len(SEEDS), "they have something to go wrong"
    assert detours > len(SEEDS) if refused else detours > 0, "some come before their memory is page-locked"


HAZARDS = {
    "pages are called loaded, and tables given up, before the kernels end": ("engine", "load 0"),
    "pages are called loaded before those of the other stream are": ("engine", "load 1"),
    "pages are saved before the forward has written them": ("save 0", "compute"),
    "one stream waits for the forward, and the other one not for that": ("save 1", "save 0"),
    "a save is published before it has landed": ("engine", "save 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HAZARDS)
def test_a_wait_that_is_missing_is_found(name: str) -> None:
    _all_are_found(name, lambda seed, no_wait: Story(Engine(seed, no_wait)).run(120), NoWait(*HAZARDS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("zeroed", [0.0, 1.0], ids=["read", "zeroed"])
def test_a_load_over_pages_in_use_is_found(zeroed: float) -> None:
    def run(seed: int, no_wait: NoWait) -> None:
        Story(Engine(seed, no_wait), zeroed=zeroed).run(60)

    _all_are_found("load", run, NoWait("load 0", "compute"))
    assert _found(run, NoWait()) == 0


def test_a_step_that_is_replayed_over_pages_of_a_load_is_found() -> None:
    """One before it sees the old pages, one after its end the new ones."""
    for seed in range(10):
        engine, slots, pages = _ready(seed)
        engine.attend(pages, 0, torch.zeros(len(pages), PAGE_BYTES, dtype=torch.uint8))
        loading = engine.start(Direction.LOAD, slots, pages)
        if seed % 2:
            with pytest.raises(Race):
                engine.attend(pages, 0)
                engine.finish()
        else:
            assert loading.wait()
            engine.attend(pages, 0, engine.expected(slots, 0))
            engine.finish()


def test_tables_that_are_given_up_too_early_are_found() -> None:
    """The kernel's launches have the tables' addresses; here the transfer does not hold the tables themselves."""

    def run(seed: int, no_wait: NoWait) -> None:
        Story(Engine(seed, no_wait), keeps_tables=False).run()

    assert _found(run, NoWait()) == len(HAZARD_SEEDS)


def _all_are_found(name: str, run: Callable[[int, NoWait], None], no_wait: NoWait) -> None:
    found = _found(run, no_wait)
    assert no_wait.times, f"no such wait was about to be done: {name}"
    assert found >= len(HAZARD_SEEDS) - 2, f"found with {found} of {len(HAZARD_SEEDS)} seeds: {name}"


def _found(run: Callable[[int, NoWait], None], no_wait: NoWait) -> int:
    found = 0
    for seed in HAZARD_SEEDS:
        print(f"seed {seed}")
        try:
            run(seed, no_wait)
        except HazardError as error:
            print(error)
            found += 1
    return found


# --- how transfers end -----------------------------------------------------------------------------------------------


def _ready(seed: int = 1, refused: bool = False) -> tuple[Engine, list[int], list[int]]:
    """An engine with memory page-locked, five filled slots and the pages for them."""
    engine = Engine(seed, NoWait(), refused)
    while engine.extents.step():
        pass
    slots = engine.slots()[:5]
    for slot in slots:
        engine.fill(slot)
    pages = list(range(PAGES * len(slots)))
    engine.write(range(POOL_PAGES))
    return engine, slots, pages


WHOLE = [LayerSlice(0, LAYERS, 0, FRAME_BYTES)]


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("error", "launch"),
    [(OSError("a kernel that does not compile"), 2), (KeyboardInterrupt(), 1)],
    ids=["half", "first"],
)
@pytest.mark.parametrize("seed", range(8))
def test_what_fails_half_way_is_waited_for(
    seed: int, error: BaseException, launch: int, direction: Direction, refused: bool
) -> None:
    engine, slots, pages = _ready(seed, refused)
    engine.chaos.failures[launch] = error
    moved = Moved(engine, direction, slots, pages, WHOLE)
    with pytest.raises(type(error)):
        moved.start()
    assert moved.wait() and moved.wait(), "again"
    for slot in slots:
        engine.evict(slot)  # a race where a copy is still under way
        engine.fill(slot)
    engine.write(pages)
    assert engine.start(direction, slots, pages).wait(), "the next one goes on"
    engine.finish()
    assert not engine.movers[direction].under_way and engine.extents.close(1.0), "nothing is held"


@pytest.mark.parametrize("is_put_in", [False, True])
def test_a_device_that_fails_keeps_slots_and_tables(is_put_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its copies still run cannot be learnt."""
    engine, slots, pages = _ready()

    def broken(self: ChaosEvent) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    if is_put_in:
        moved = engine.start(Direction.LOAD, slots, pages)
    else:
        engine.chaos.failures[1] = KeyboardInterrupt()
        moved = Moved(engine, Direction.LOAD, slots, pages, WHOLE)
        with pytest.raises(KeyboardInterrupt):
            moved.start()
    monkeypatch.setattr(ChaosEvent, "synchronize", broken)
    assert not moved.wait() and not moved.wait() and "illegal memory" in str(moved.error)
    assert not Moved(engine, Direction.LOAD, slots, pages).start(), "no more are begun"
    assert not engine.extents.close(0.0) and engine.chaos.reaches(Region(slots[0], 1)), "nor may the memory go"
    del moved
    engine.chaos.finish()  # nor the tables


def test_a_slot_that_is_not_inside_its_extent_is_refused_before_anything_begins() -> None:
    engine, slots, pages = _ready()
    for addresses in ([slots[0], engine.slots()[-1] + 8], [slots[0] - 8]):
        moved = Moved(engine, Direction.LOAD, addresses, pages, WHOLE)
        with pytest.raises(ValueError, match="of 72 bytes is not wholly inside its extent"):
            moved.start()
        assert moved.wait()
    assert not engine.movers[Direction.LOAD].under_way and engine.extents.close(1.0), "nothing is held"


def test_neighbouring_slots_are_one_copy() -> None:
    engine, _, _ = _ready()
    first, second = [memory.data_ptr() for memory in engine.memory]
    order = [first + slot * FRAME_BYTES for slot in (0, 1, 2, 4, 3)] + [second, second + FRAME_BYTES]
    rows, is_pinned = engine.extents.runs(np.array(order), FRAME_BYTES)
    assert (rows[2] // FRAME_BYTES).tolist() == [3, 1, 1, 2] and is_pinned


def test_memory_is_not_unregistered_under_a_copy() -> None:
    for seed in range(10):
        engine, slots, pages = _ready(seed)
        loading = engine.start(Direction.LOAD, slots, pages)
        assert not engine.extents.close(0.0), "it is held"
        assert not Moved(engine, Direction.LOAD, slots, pages).start(), "and nothing more is begun"
        assert loading.wait() and engine.extents.close(0.0)
        engine.finish()


def test_memory_that_is_unregistered_under_a_copy_is_found() -> None:
    for seed in range(10):
        engine, slots, pages = _ready(seed)
        engine.start(Direction.LOAD, slots, pages)
        with pytest.raises((Race, Pageable), match=r"unregistering|not pinned"):
            engine.chaos.unregister(engine.memory[0].data_ptr())
            engine.finish()
