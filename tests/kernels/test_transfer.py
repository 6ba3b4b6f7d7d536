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

from chaos import ChaosDevice, ChaosEvent, NoWait
from happens_before import Clock, HazardError, Pageable, Race, Region, merge
from kv_kernels.cuda import Direction, host_tensor
from kv_kernels.transfer import LayerSlice, PageMover, Transfer, TransferOutcome, layer_slices
from kv_kernels.worker import Worker
from small_engine import (
    FRAME_BYTES,
    HEADER_BYTES,
    LAYER_BYTES,
    LAYERS,
    PAGE_BYTES,
    PAGES,
    POOL_PAGES,
    SEGMENT_BYTES,
    Engine,
    Kernel,
)

SEEDS = range(int(os.environ.get("TRANSFER_HISTORIES", "60")))
HAZARD_SEEDS = range(30)


@dataclass
class Load:
    transfer: Transfer
    slots: list[int]
    pages: list[int]
    is_abandoned: bool = False


@dataclass
class Save:
    transfer: Transfer
    slots: list[int]
    pages: list[int]
    frames: torch.Tensor


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
    loads: list[Load] = field(default_factory=list)
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
            steps = [self.load, self.load, self.save, self.save, self.evict, self.release_later, self.replay]
            (self.reset if engine.random.random() < 0.03 else engine.random.choice(steps))()
            engine.pump()
            self.look()
        for _ in range(200):
            if not self.loads and not self.saves:
                break
            for one in [*self.loads, *self.saves]:
                one.transfer.wait(10.0)
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
            slots.sort(key=engine.slots().index)  # neighbours come as one run
        if len(self.free_pages) < PAGES * len(slots) or not slots:
            return
        pages = self.take_pages(len(slots))
        if engine.random.random() < self.zeroed:
            engine.write(pages)
        else:
            engine.attend(pages, engine.random.randrange(LAYERS))  # of whoever had them, in the step in flight
        for slot in slots:
            self.leased[slot] = self.leased.get(slot, 0) + 1
        loading = engine.load(slots, pages, self.keeps_tables)
        self.detours += not loading.is_direct
        self.loads.append(Load(loading, slots, pages))

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
        self.saves.append(Save(engine.save(slots, pages), slots, pages, frames))

    def publish(self, save: Save) -> None:
        engine = self.engine
        for slot, expected in zip(save.slots, save.frames, strict=True):
            payload = Region(slot + HEADER_BYTES, FRAME_BYTES - HEADER_BYTES)
            engine.chaos.host_read([payload], "takes a digest")
            if not torch.equal(host_tensor(*payload), expected):
                self.faults.append(f"slot {slot:#x} was published with other bytes")
            engine.chaos.host_write([Region(slot, HEADER_BYTES)], "writes a header")
            host_tensor(slot, HEADER_BYTES).fill_(7)
            engine.contents[slot] = host_tensor(slot, FRAME_BYTES).clone()
        self.saved += 1

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

    def release_later(self) -> None:
        """The request of a load is gone; its pages may be reused when the load is done."""
        if self.loads and self.engine.random.random() < 0.3:
            load = self.engine.random.choice(self.loads)
            load.is_abandoned = True
            load.transfer.cancel()

    def replay(self) -> None:
        """A captured step again: over pages that are no transfer's, of whatever request has them by now."""
        if len(self.free_pages) > 2:
            self.engine.attend(self.free_pages[:2], self.engine.random.randrange(LAYERS))
            self.engine.write(self.free_pages[2:3])

    def reset(self) -> None:
        """The engine forgets all requests, and the store what no load has."""
        for load in self.loads:
            load.is_abandoned = True
            load.transfer.cancel()
        for slot in [slot for slot in self.filled if not self.leased.get(slot)]:
            self.engine.evict(slot)
            self.filled.remove(slot)
            self.empty.append(slot)

    def look(self) -> None:
        """What is done, and what that gives back."""
        engine = self.engine
        for load in [one for one in self.loads if one.transfer.wait(0.0)]:
            self.loads.remove(load)
            if load.transfer.outcome is TransferOutcome.DONE:  # an abandoned one, too, if that came after the end
                self.loaded += 1
                for layer in range(LAYERS):
                    engine.attend(load.pages, layer, engine.expected(load.slots, layer))
            else:
                assert load.is_abandoned and load.transfer.outcome is TransferOutcome.CANCELLED, load.transfer.error
            for slot in load.slots:
                self.leased[slot] -= 1
                if not self.leased[slot] and engine.random.random() < 0.5:
                    engine.evict(slot)
                    engine.fill(slot)
            self.free_pages += load.pages
            engine.write(load.pages)
        for save in [one for one in self.saves if one.transfer.wait(0.0)]:
            assert save.transfer.outcome is TransferOutcome.DONE, save.transfer.error
            self.saves.remove(save)
            self.publish(save)
            self.filled += save.slots
            self.free_pages += save.pages
            engine.write(save.pages)
        engine.collect()

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
    "pages are called loaded, and tables given up, before the kernels end": ("load worker", "load 0"),
    "pages are called loaded before those of the other stream are": ("load worker", "load 1"),
    "pages are saved before the forward has written them": ("save 0", "compute"),
    "a save is published before it has landed": ("save worker", "save 1"),
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

    _all_are_found("load", run, NoWait("load 1", "compute"))
    assert _found(run, NoWait()) == 0


@pytest.mark.parametrize("lane", ["load", "save"])
def test_a_bounce_segment_that_is_used_too_early_is_found(lane: str) -> None:
    no_wait = NoWait(f"{lane} worker", f"{lane} 0")
    _all_are_found(lane, lambda seed, no_wait: Story(Engine(seed, no_wait, refused=True)).run(120), no_wait)


def test_a_step_that_is_replayed_over_pages_of_a_load_is_found() -> None:
    """One before it sees the old pages, one after its outcome the new ones."""
    for seed in range(10):
        engine, slots, pages = _ready(seed)
        engine.attend(pages, 0, torch.zeros(len(pages), PAGE_BYTES, dtype=torch.uint8))
        loading = engine.load(slots, pages)
        if seed % 2:
            with pytest.raises(Race):
                engine.attend(pages, 0)
                engine.finish()
        else:
            assert loading.wait(10.0)
            engine.attend(pages, 0, engine.expected(slots, 0))
            engine.finish()


def test_tables_that_are_given_up_too_early_are_found() -> None:
    """The kernel's launches have the tables' addresses; here the kernel does not hold the tables themselves."""

    def run(seed: int, no_wait: NoWait) -> None:
        Story(Engine(seed, no_wait), keeps_tables=False).run()

    assert _found(run, NoWait()) == len(HAZARD_SEEDS)


def _all_are_found(name: str, run: Callable[[int, NoWait], None], no_wait: NoWait) -> None:
    found = _found(run, no_wait)
    assert no_wait.times, f"nobody was about to wait: {name}"
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


class Interrupted(Kernel):
    """Its first launch is interrupted, after it was put in."""

    def __call__(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        super().__call__(staged, frames, layers)
        raise KeyboardInterrupt


class Failing(Kernel):
    """Its second launch fails, after half of it was launched."""

    launches = 0

    def __call__(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        self.launches += 1
        super().__call__(staged, frames, layers)
        if self.launches == 2:
            raise OSError("a kernel that does not compile")


def _ready(seed: int = 1, refused: bool = False) -> tuple[Engine, list[int], list[int]]:
    """An engine with memory page-locked, five filled slots and the pages for them."""
    engine = Engine(seed, NoWait(), refused)
    while engine.pin_worker.pump():
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
@pytest.mark.parametrize("seed", range(8))
def test_what_fails_half_way_gives_its_slots_and_pages_back(seed: int, direction: Direction, refused: bool) -> None:
    engine, slots, pages = _ready(seed, refused)
    transfer = engine.start(slots, WHOLE, Failing(engine, direction, pages))
    assert transfer is not None and transfer.wait(10.0) and not transfer.is_stranded
    assert transfer.outcome is TransferOutcome.FAILED and isinstance(transfer.error, OSError)
    for slot in slots:
        engine.evict(slot)  # a race where a copy is still under way
    engine.write(pages)
    engine.finish()


@pytest.mark.parametrize("seed", range(8))
def test_a_save_that_is_cancelled_gives_its_slots_back(seed: int) -> None:
    engine, slots, pages = _ready(seed)
    saving = engine.save(slots, pages)
    saving.cancel()
    assert saving.wait(10.0) and saving.outcome is TransferOutcome.CANCELLED
    engine.evict(slots[0])
    engine.finish()


@pytest.mark.parametrize("direction", list(Direction))
def test_an_interrupt_of_the_callers_thread_ends_its_transfer_alone(direction: Direction) -> None:
    """Those behind it would wait for it for ever."""
    engine, slots, pages = _ready()

    with pytest.raises(KeyboardInterrupt):
        engine.start(slots, WHOLE, Interrupted(engine, direction, pages))
    transfer = engine.load(slots, pages) if direction is Direction.LOAD else engine.save(slots, pages)
    assert transfer.wait(10.0) and transfer.outcome is TransferOutcome.DONE
    assert engine.extents.remove(engine.memory[0].data_ptr(), 1.0), "nothing is held"
    engine.finish()


def test_a_device_that_fails_keeps_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell whether its copies still run."""
    engine, slots, pages = _ready()

    def broken(self: ChaosEvent) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    loading = engine.load(slots, pages)
    saving = engine.save(engine.slots()[10:15], list(range(20, 20 + len(pages))))
    monkeypatch.setattr(ChaosEvent, "synchronize", broken)
    for transfer in (loading, saving):
        assert transfer.wait(10.0) and transfer.outcome is TransferOutcome.FAILED and transfer.is_stranded
    assert not engine.extents.remove(engine.memory[0].data_ptr(), 0.0), "nor may the memory go"
    assert engine.start(slots, WHOLE, Kernel(engine, Direction.LOAD, pages)) is None
    del loading, saving, transfer
    engine.collect()  # nor the tables
    engine.finish()


def test_an_interrupt_on_a_device_that_fails_keeps_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, slots, pages = _ready()

    def broken(self: ChaosEvent) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(ChaosEvent, "synchronize", broken)
    with pytest.raises(KeyboardInterrupt):
        engine.start(slots, WHOLE, Interrupted(engine, Direction.LOAD, pages))
    assert not engine.extents.remove(engine.memory[0].data_ptr(), 0.0)
    assert engine.start(slots, WHOLE, Kernel(engine, Direction.LOAD, pages)) is None


def test_a_slot_that_is_not_inside_its_extent_is_refused_before_anything_begins() -> None:
    engine, slots, pages = _ready()
    for addresses in ([slots[0], engine.slots()[-1] + 8], [slots[0] - 8]):
        with pytest.raises(ValueError, match="of 72 bytes is not wholly inside its extent"):
            engine.start(addresses, WHOLE, Kernel(engine, Direction.LOAD, pages))
    assert engine.extents.remove(engine.memory[0].data_ptr(), 1.0), "nothing is held"


def test_a_worker_with_too_much_to_do_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, slots, pages = _ready()
    monkeypatch.setattr(engine.load_worker, "submit", lambda job, wakes: False)
    assert engine.start(slots, WHOLE, Kernel(engine, Direction.LOAD, pages)) is None
    assert engine.extents.remove(engine.memory[0].data_ptr(), 1.0)
    engine.finish()


def test_neighbouring_slots_are_one_copy() -> None:
    engine, _, _ = _ready()
    first, second = [memory.data_ptr() for memory in engine.memory]
    order = [first + slot * FRAME_BYTES for slot in (0, 1, 2, 4, 3)] + [second, second + FRAME_BYTES]
    runs = engine.extents.runs(np.array(order), FRAME_BYTES)
    assert (runs.rows[2] // FRAME_BYTES).tolist() == [3, 1, 1, 2]
    assert runs.are_pinned == [True]


def test_memory_is_not_unregistered_under_a_copy() -> None:
    for seed in range(10):
        engine, slots, pages = _ready(seed)
        address = engine.memory[0].data_ptr()
        loading = engine.load(slots, pages)
        assert not engine.extents.remove(address, 0.0), "it is held"
        assert loading.wait(10.0) and loading.outcome is TransferOutcome.DONE
        assert engine.extents.remove(address, 10.0)
        engine.finish()


def test_memory_that_is_unregistered_under_a_copy_is_found() -> None:
    for seed in range(10):
        engine, slots, pages = _ready(seed)
        engine.load(slots, pages)
        with pytest.raises((Race, Pageable), match=r"unregistering|not pinned"):
            engine.chaos.unregister(engine.memory[0].data_ptr())
            engine.finish()


class Handing(Worker):
    """A real thread, of which the chaos device knows what comes after what."""

    def __init__(self, chaos: ChaosDevice, name: str) -> None:
        self._chaos = chaos
        self._name = name
        self._told: Clock = {}
        super().__init__(name)

    def submit(self, job: Callable[[], object], *, wakes: bool = True) -> bool:
        issued = self._chaos.tick()

        def with_clocks() -> None:
            with self._chaos.acting(self._name):
                self._chaos.join(issued)
                job()
                self.notify()

        return super().submit(with_clocks, wakes=wakes)

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None) -> bool:
        is_so = super().wait(is_ready, timeout_s)
        self._chaos.join(self._told)
        return is_so

    def notify(self) -> None:
        with self._changed:
            merge(self._told, self._chaos.tick())
            self._changed.notify_all()


@pytest.mark.parametrize("refused", [False, True])
def test_real_threads_get_to_the_end(refused: bool) -> None:
    for seed in range(5):
        engine, slots, pages = _ready(seed, refused)
        workers = [Handing(engine.chaos, f"{lane.value} thread") for lane in Direction]
        for direction, worker in zip(Direction, workers, strict=True):
            engine.movers[direction] = PageMover(engine.device, direction, engine.extents, worker, SEGMENT_BYTES)
        slices = layer_slices(LAYERS, LAYER_BYTES, 1, HEADER_BYTES)
        loading = engine.start(slots, slices, Kernel(engine, Direction.LOAD, pages))
        assert loading is not None and loading.wait(30.0)
        for layer in range(LAYERS):
            engine.attend(pages, layer, engine.expected(slots, layer))
        targets = engine.slots()[10:15]
        saving = engine.start(targets, slices, Kernel(engine, Direction.SAVE, pages))
        assert saving is not None and saving.wait(30.0)
        engine.write(pages)
        for source, target in zip(slots, targets, strict=True):
            payload = Region(target + HEADER_BYTES, FRAME_BYTES - HEADER_BYTES)
            engine.chaos.host_read([payload], "compares")
            assert torch.equal(host_tensor(*payload), engine.contents[source][HEADER_BYTES:])
        assert all(worker.close(30.0) for worker in workers)
        engine.finish()
