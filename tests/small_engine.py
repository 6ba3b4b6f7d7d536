"""A small engine on the chaos device, and a way to take one wait out of whatever runs on it.

Pages of a pool [layer, page, PAGE_BYTES], frames [layer, PAGES, PAGE_BYTES] in slots of two extents. The engine's steps
are put into the compute stream; loads and saves are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import torch

from chaos import ChaosDevice, NoWait
from happens_before import Region, region
from kv_kernels.cuda import Direction, host_tensor
from kv_kernels.pinned import Hold, PinnedExtents
from kv_kernels.transfer import LayerSlice, PageMover, Transfer, layer_slices

LAYERS, PAGES, PAGE_BYTES = 4, 2, 8
LAYER_BYTES = PAGES * PAGE_BYTES
HEADER_BYTES = 8
FRAME_BYTES = HEADER_BYTES + LAYERS * LAYER_BYTES
POOL_PAGES, SLOTS = 64, 14
SEGMENT_BYTES = FRAME_BYTES + LAYER_BYTES


class Moved(Transfer):
    """Frames between slots and pages, by a kernel that reads the page table. keeps: it holds the table, as it must."""

    def __init__(
        self,
        engine: Engine,
        direction: Direction,
        slots: Sequence[int],
        pages: Sequence[int],
        slices: Sequence[LayerSlice] | None = None,
        keeps: bool = True,
    ) -> None:
        at_once = engine.random.choice([1, 1 << 40]) if direction is Direction.SAVE else 1 << 40
        super().__init__(engine.movers[direction], np.array(slots, np.int64), slices or engine.slices(), at_once)
        self.pages, self._engine = pages, engine
        self.table, _ = engine.chaos.tables(4 * len(pages))
        self._region = region(self.table)
        self.table.view(torch.int32).copy_(torch.tensor(pages, dtype=torch.int32))
        engine.chaos.host_write([self._region], "writes a page table")
        if not keeps:
            engine.loose.append(self.table)
            del self.table

    def _batches(self, hold: Hold) -> Iterator[Any]:
        batches = list(super()._batches(hold))
        self.is_direct = all(batch.is_pinned for batch in batches)
        return iter(batches)

    def is_done(self) -> bool:
        return all(event.query() for _, event in self.ends)

    def launch(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        pool, count = self._engine.pool, len(frames)
        numbers = host_tensor(*self._region).view(torch.int32)[frames.start * PAGES : frames.stop * PAGES].tolist()
        held = staged.view(count, layers.size_bytes)
        head = 0 if layers.offset_bytes else HEADER_BYTES
        pages = held[:, head:].unflatten(1, (layers.stop - layers.first, PAGES, PAGE_BYTES))
        for layer in range(layers.first, layers.stop):
            for at, page in enumerate(numbers):
                inside, outside = pages[at // PAGES, layer - layers.first, at % PAGES], pool[layer, page]
                target, source = (outside, inside) if self.mover.loads else (inside, outside)
                target.copy_(source)
        if not self.mover.loads and head:
            held[:, :head] = 0

    def touched(self, frames: range, layers: LayerSlice) -> tuple[list[Region], ...]:
        pages = self.pages[frames.start * PAGES : frames.stop * PAGES]
        return self._engine.regions(pages, range(layers.first, layers.stop)), [self._region], [], []


class Engine:
    """The pool, the slots, and what the engine does with them."""

    def __init__(self, seed: int, no_wait: NoWait, refused: bool = False, eagerness: float | None = None) -> None:
        self.random = Random(seed)
        refuse = lambda *_: "not allowed" if refused else ""  # noqa: E731
        self.device = self.chaos = ChaosDevice(Random(seed + 1), refuse, eagerness, no_wait=no_wait)
        self._pool = self.chaos.memory(LAYERS * POOL_PAGES * PAGE_BYTES)
        self.pool = self._pool.view(LAYERS, POOL_PAGES, PAGE_BYTES)
        self.wrong: list[str] = []
        self.memory = [torch.zeros(SLOTS * FRAME_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.extents = PinnedExtents(self.chaos)
        for memory in self.memory:
            self.extents.adopt(memory.data_ptr(), len(memory), lambda leave: None, writable=True)
        self.movers = {one: PageMover(self.device, one, self.extents, SEGMENT_BYTES) for one in Direction}
        self.loose: list[torch.Tensor] = []
        self.contents: dict[int, torch.Tensor] = {}

    # --- memory

    def slots(self) -> list[int]:
        return [memory.data_ptr() + slot * FRAME_BYTES for memory in self.memory for slot in range(SLOTS)]

    def fill(self, slot: int, label: str = "fills a slot") -> None:
        self.contents[slot] = torch.tensor(list(self.random.randbytes(FRAME_BYTES)), dtype=torch.uint8)
        self.chaos.host_write([Region(slot, FRAME_BYTES)], label)
        host_tensor(slot, FRAME_BYTES).copy_(self.contents[slot])

    def evict(self, slot: int) -> None:
        self.chaos.release([Region(slot, FRAME_BYTES)], "evicts a slot")
        self.chaos.take([Region(slot, FRAME_BYTES)], "reserves a slot")

    def page_region(self, layer: int, page: int) -> Region:
        return Region(self.pool[layer, page].data_ptr(), PAGE_BYTES)

    def regions(self, pages: Sequence[int], layers: Iterable[int] = range(LAYERS)) -> list[Region]:
        return [self.page_region(layer, page) for layer in layers for page in pages]

    # --- steps of the engine, in the compute stream

    def write(self, pages: Sequence[int], values: torch.Tensor | None = None) -> None:
        """values: [LAYERS, pages, PAGE_BYTES], as a forward writes them; none: zeros, as after an allocation."""

        def body() -> None:
            self.pool[:, list(pages)] = torch.zeros((), dtype=torch.uint8) if values is None else values

        self.device.compute().step(body, writes=self.regions(pages))

    def attend(self, pages: Sequence[int], layer: int, expected: torch.Tensor | None = None) -> None:
        """Read one layer of some pages. expected: [pages, PAGE_BYTES]."""

        def body() -> None:
            if expected is not None and not torch.equal(self.pool[layer, list(pages)], expected):
                self.wrong.append(f"layer {layer} of pages {pages}")

        self.device.compute().step(body, reads=self.regions(pages, [layer]))

    def values(self, pages: int) -> torch.Tensor:
        numbers = list(self.random.randbytes(LAYERS * pages * PAGE_BYTES))
        return torch.tensor(numbers, dtype=torch.uint8).view(LAYERS, pages, PAGE_BYTES)

    def expected(self, slots: Sequence[int], layer: int) -> torch.Tensor:
        """What a layer of the pages is after a load from these slots."""
        start = HEADER_BYTES + layer * LAYER_BYTES
        return torch.cat([self.contents[slot][start : start + LAYER_BYTES].view(PAGES, PAGE_BYTES) for slot in slots])

    # --- transfers

    def slices(self) -> list[LayerSlice]:
        """By layers, or whole slots with their headers."""
        if self.random.random() < 0.4:
            return [LayerSlice(0, LAYERS, 0, FRAME_BYTES)]
        return layer_slices(LAYERS, LAYER_BYTES, self.random.choice([1, 2, 3, LAYERS]), HEADER_BYTES)

    def start(self, direction: Direction, slots: Sequence[int], pages: Sequence[int], keeps: bool = True) -> Moved:
        moved = Moved(self, direction, slots, pages, keeps=keeps)
        assert moved.start()
        self.loose.clear()
        return moved

    def finish(self) -> None:
        """Everything runs to its end. Raises the first hazard of all."""
        while self.extents.step():
            pass
        self.chaos.finish()
        assert not self.wrong, self.wrong
