"""The route of pages on a device, on the chaos device: kernels in triton's interpreter, pages as tensors of the CPU.

`ChaosRoute` is what a codec is handed instead of the ways to GPUs.
"""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch

from chaos import ChaosDevice, NoWait
from happens_before import Region, region
from kv_kernels import triton_pools
from kv_kernels.cuda import Direction
from kv_kernels.device_copy import LARGE_BYTES, DeviceTransfers, Moving
from kv_kernels.transfer import LayerSlice

SEGMENT_BYTES = 24 << 10

needs_interpreter = pytest.mark.skipif(
    not hasattr(triton_pools._move, "rewrite"),
    reason="there is a GPU: compiled kernels cannot take pages of a CPU",
)


def touched(moving: Moving, frames: range, layers: LayerSlice) -> tuple[list[Region], ...]:
    """Of a launch: its pages, what else it reads, what else it writes, and its slots."""
    at, rows = moving.copy.layers.index(layers), slice(frames.start, frames.stop)
    named = sorted({page for page in moving.pages[rows].flatten().tolist() if page >= 0})
    pages = [_page(plane, page) for planes in moving.pools[at].planes for plane in planes for page in named]
    findings = [one for block in moving.status[rows, at : at + 1] for one in [region(block)]]
    findings += [region(block) for block in moving.digests[rows, layers.first : layers.stop]]
    slots = [Region(at + layers.offset_bytes, layers.size_bytes) for at in moving.payloads[rows].tolist()]
    return pages, [region(moving.table[rows]), region(moving.places[rows])], findings, slots


def _page(plane: torch.Tensor, page: int) -> Region:
    reach = sum([(size - 1) * stride for size, stride in zip(plane.shape[1:], plane.stride()[1:], strict=True)])
    return Region(plane[page].data_ptr(), (reach + 1) * plane.element_size())


class ChaosRoute:
    """`routes.Devices`. Memory is page-locked by `lock`, or by a thread of which the device knows nothing."""

    def __init__(
        self,
        seed: int,
        segment_bytes: int = SEGMENT_BYTES,
        no_wait: NoWait | None = None,
        refused: bool = False,
        eagerness: float | None = None,
        reaches: bool = False,
    ) -> None:
        print(f"seed {seed}")
        refuse = lambda *_: "not allowed" if refused else ""  # noqa: E731
        self.device = self.chaos = ChaosDevice(Random(seed), refuse, eagerness, False, no_wait, touched)
        self.transfers = DeviceTransfers(self.device, segment_bytes)
        self.transfers.programs = 2
        for cell in product(Direction, (False, True), (0, LARGE_BYTES)):
            self.transfers.take(*cell, reaches=reaches)

    def __call__(self, device: torch.device) -> DeviceTransfers:
        return self.transfers

    def lock(self) -> None:
        """Do all that the thread that page-locks would do."""
        while self.transfers.extents.step():
            pass

    def close(self) -> None:
        """Raises the first hazard of all."""
        assert self.transfers.close(30.0)
        self.chaos.finish()
