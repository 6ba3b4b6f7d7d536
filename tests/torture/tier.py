"""A bare NVMe tier on a real directory."""

from __future__ import annotations

import os
from pathlib import Path

from simulation.machine import SLAB_BYTES, Machine
from tiering.nvme.frame_index import FrameIndex
from tiering.nvme.lmdb_index import discard, open_index
from tiering.nvme.slab_files import DirectFiles

BUDGET_BYTES = 6 * SLAB_BYTES


class RealMachine(Machine):
    """The tier on a real directory: direct I/O and LMDB."""

    def __init__(self, directory: Path) -> None:
        super().__init__(BUDGET_BYTES)
        self.directory = directory
        self.switch_on()

    def switch_on(self) -> None:
        """A process begins to use the directory."""
        self.files = DirectFiles(self.directory / "slabs")  # type: ignore[assignment]

    def open(self, *, clean: bool) -> FrameIndex:
        self.index = open_index(self.directory / "index", 1 << 20, clean=clean)  # type: ignore[assignment]
        return self.index

    def discard(self) -> None:
        discard(self.directory / "index")

    def stop(self) -> None:
        assert self.tier is not None
        self.tier.close()
        self.tier = None
        self.switch_on()

    def vanish(self) -> None:
        """As if the process were gone: nothing is finished, and the stamp says so."""
        self.tier = None
        self.index.close()
        self.files.close()
        self.switch_on()

    def new_uid(self) -> bytes:
        return os.urandom(16)
