"""Loads and saves on the chaos device: right in every legal order, and with any one wait taken out, found out.

A story is an engine's life in small: steps that read and write pages, loads whose layers are used one by one, saves
whose pages are reused, slots that are evicted and filled again as soon as they may be. A hazard is the same story
without one kind of wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from kv_kernels.device import Region, host_tensor
from kv_kernels.happens_before import Clock, HazardError
from kv_kernels.under_way import Loading, Outcome, Saving
from small_engine import (
    FRAME_BYTES,
    HEADER_BYTES,
    LAYERS,
    PAGES,
    POOL_PAGES,
    Engine,
    NoWait,
)

SEEDS = range(60)
HAZARD_SEEDS = range(30)


@dataclass
class Load:
    loading: Loading
    slots: list[int]
    pages: list[int]
    expected: list[torch.Tensor]
    used: int = 0
    is_abandoned: bool = False


@dataclass
class Save:
    saving: Saving
    slots: list[int]
    pages: list[int]
    are_pages_back: bool = False


@dataclass
class Story:
    """State of the engine and of the store beside it."""

    engine: Engine
    keeps_tables: bool = True
    free_pages: list[int] = field(default_factory=lambda: list(range(POOL_PAGES)))
    filled: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    leased: dict[int, int] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    released: list[tuple[Clock, list[int]]] = field(default_factory=list)
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
            engine.random.choice(
                [self.load, self.load, self.save, self.save, self.use, self.use, self.evict, self.abandon]
            )()
            engine.pump()
            self.look()
        for _ in range(200):
            if not self.loads and not self.saves:
                break
            self.use()
            for transfer in [*self.loads, *self.saves]:
                (transfer.loading if isinstance(transfer, Load) else transfer.saving).wait(10.0)
            self.look()
        assert not self.loads and not self.saves, "all end"
        engine.collect()
        engine.finish()
        assert not self.faults, self.faults
        assert not any(self.leased.values()), "all slots are given back"

    def load(self) -> None:
        engine = self.engine
        slots = engine.random.sample(self.filled, min(len(self.filled), engine.random.randint(1, 5)))
        if engine.random.random() < 0.5:
            slots.sort()  # neighbours come as one run
        if len(self.free_pages) < PAGES * len(slots) or not slots:
            return
        pages = self.take_pages(len(slots))
        if engine.random.random() < 0.5:
            engine.attend(pages, engine.random.randrange(LAYERS))  # of whoever had them, in the step in flight
        else:
            engine.write(pages)
        for slot in slots:
            self.leased[slot] = self.leased.get(slot, 0) + 1
        loading = engine.load(
            slots, pages, lambda: self.released.append((engine.chaos.tick(), slots)), self.keeps_tables
        )
        self.detours += not loading.is_direct
        expected = [engine.expected(slots, layer) for layer in range(LAYERS)]
        self.loads.append(Load(loading, slots, pages, expected))

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

        def publish() -> bool:
            for slot, expected in zip(slots, frames, strict=True):
                payload = Region(slot + HEADER_BYTES, FRAME_BYTES - HEADER_BYTES)
                engine.chaos.host_read([payload], "takes a digest")
                if not torch.equal(host_tensor(*payload), expected):
                    self.faults.append(f"slot {slot:#x} was published with other bytes")
                engine.chaos.host_write([Region(slot, HEADER_BYTES)], "writes a header")
                host_tensor(slot, HEADER_BYTES).fill_(7)
                engine.contents[slot] = host_tensor(slot, FRAME_BYTES).clone()
            self.saved += 1
            return True

        saving = engine.save(slots, pages, publish, lambda: self.faults.append("aborted"))
        self.saves.append(Save(saving, slots, pages))

    def use(self) -> None:
        """The next layer of some loads."""
        engine = self.engine
        for load in self.loads:
            if load.used < LAYERS and not load.is_abandoned:
                if not load.loading.wait_layer(load.used, engine.device.compute(), 10.0):
                    self.faults.append("a layer did not come")
                engine.attend(load.pages, load.used, load.expected[load.used])
                load.used += 1

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

    def abandon(self) -> None:
        """The request of a load is gone; its pages may be reused when the load is done."""
        if self.loads and self.engine.random.random() < 0.3:
            load = self.engine.random.choice(self.loads)
            load.is_abandoned = True
            load.loading.cancel()

    def look(self) -> None:
        """What is done, and what that gives back."""
        engine = self.engine
        released, self.released = self.released, []
        for clock, slots in released:
            engine.chaos.join(clock)
            for slot in slots:
                self.leased[slot] -= 1
                if not self.leased[slot] and engine.random.random() < 0.5:
                    engine.evict(slot)
                    engine.fill(slot)
        for load in list(self.loads):
            if (load.used == LAYERS or load.is_abandoned) and load.loading.is_done():
                if load.loading.outcome is not (Outcome.CANCELLED if load.is_abandoned else Outcome.DONE):
                    # A cancellation may come after the end.
                    assert load.loading.outcome is Outcome.DONE, load.loading.error
                self.loaded += load.loading.outcome is Outcome.DONE
                self.loads.remove(load)
                self.free_pages += load.pages
                engine.write(load.pages)
        for save in list(self.saves):
            if not save.are_pages_back and (engine.random.random() < 0.5 or save.saving.is_done()):
                if engine.random.random() < 0.7 or not save.saving.are_pages_read():
                    assert save.saving.wait_pages(engine.device.compute(), 10.0)
                save.are_pages_back = True
                self.free_pages += save.pages
                engine.write(save.pages)
            if save.are_pages_back and save.saving.is_done():
                assert save.saving.outcome is Outcome.DONE, save.saving.error
                self.saves.remove(save)
                self.filled += save.slots
        engine.collect()

    def take_pages(self, frames: int) -> list[int]:
        self.engine.random.shuffle(self.free_pages)
        pages, self.free_pages = self.free_pages[: PAGES * frames], self.free_pages[PAGES * frames :]
        return pages


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
    "pages are loaded while a step still reads them, or is yet to zero them": ("load kernels", "compute"),
    "a kernel reads a segment before the copy into it": ("load kernels", "load copies"),
    "a segment is filled again while a kernel reads it": ("load copies", "load kernels"),
    "a layer is used before its event": ("compute", "load kernels"),
    "slots are given back while they are copied from": ("load worker", "load copies"),
    "pages are called loaded, and tables given up, before the kernels end": ("load worker", "load kernels"),
    "pages are saved before the forward has written them": ("save kernels", "compute"),
    "a segment is copied before the kernel has filled it": ("save copies", "save kernels"),
    "a segment is filled again while it is copied": ("save kernels", "save copies"),
    "pages are reused while they are being saved": ("compute", "save kernels"),
    "pages are called free while they are being saved": ("engine", "save kernels"),
    "a save is published before it has landed": ("save worker", "save copies"),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_a_wait_that_is_missing_is_found(name: str) -> None:
    _all_are_found(name, lambda seed, no_wait: Story(Engine(seed, no_wait)).run(100), NoWait(*HAZARDS[name]))


@pytest.mark.parametrize("lane", ["load", "save"])
def test_a_bounce_segment_that_is_used_too_early_is_found(lane: str) -> None:
    no_wait = NoWait(f"{lane} worker", f"{lane} copies")
    _all_are_found(lane, lambda seed, no_wait: Story(Engine(seed, no_wait, refused=True)).run(100), no_wait)


def test_tables_that_are_given_up_too_early_are_found() -> None:
    """The kernel's launches have the tables' addresses; here the kernel does not hold the tables themselves."""

    def run(seed: int, no_wait: NoWait) -> None:
        Story(Engine(seed, no_wait), keeps_tables=False).run()

    assert _found(run, NoWait()) == len(HAZARD_SEEDS)


def _all_are_found(name: str, run: Callable[[int, NoWait], None], no_wait: NoWait) -> None:
    found = _found(run, no_wait)
    assert no_wait.times, f"nobody was about to wait: {name}"
    assert found >= len(HAZARD_SEEDS) - 1, f"found with {found} of {len(HAZARD_SEEDS)} seeds: {name}"


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
