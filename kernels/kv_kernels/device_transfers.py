"""What all transfers of one device share, and which pages may go that way.

Streams, staging rings, tables' memory, page-locked extents and the threads behind them: made once, by the store's
codecs, when pages on that device are first seen; 512 MiB of the device's memory. `close` ends the threads after what
they have begun; copies that are bound then take the plain route. Must never be made when a module is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kv_kernels import int8_plain, reference
from kv_kernels.copies import BlockCopy
from kv_kernels.cuda import CudaDevice, local_cpus
from kv_kernels.device import Device
from kv_kernels.device_copy import DeviceContext, DeviceCopy
from kv_kernels.device_tables import TableMemory
from kv_kernels.int8 import ALIGN_BYTES, KC64, SliceForm
from kv_kernels.pinned import PinnedExtents
from kv_kernels.transfer import Loader, Saver
from kv_kernels.triton_digest import digest_keys
from kv_kernels.worker import ThreadWorker, Worker

SEGMENT_BYTES, SEGMENTS = 128 << 20, 2
"""Of each direction. The engine's thread takes 0.3 ms for a segment, which PCIe 5 moves in 2.4 ms; with segments of 32
MiB a GiB takes that thread two to four times as long (measured beside an H100)."""

_log = logging.getLogger(__name__)


class Workers(NamedTuple):
    """Threads: one that page-locks, and one that waits for the ends of each direction."""

    pins: Worker
    loads: Worker
    saves: Worker


class DeviceTransfers:
    """`routes.OnDevice`: one device. Any thread may call."""

    def __init__(
        self, device: Device, workers: Workers, segment_bytes: int = SEGMENT_BYTES, segments: int = SEGMENTS
    ) -> None:
        """Raises RuntimeError where the device has no memory for it. segment_bytes: a multiple of 16."""
        assert segment_bytes % ALIGN_BYTES == 0, "rows of a segment are aligned"
        self.extents = PinnedExtents(device.host, workers.pins)
        self._workers = workers
        loader = Loader(device, self.extents, workers.loads, segment_bytes, segments)
        saver = Saver(device, self.extents, workers.saves, segment_bytes, segments)
        keys = digest_keys(device.memory(ALIGN_BYTES).device)
        self._ways = DeviceContext(device, loader, saver, self.extents, TableMemory(device), segment_bytes, keys)
        self._refused: set[str] = set()

    def raw_copy(
        self, planes: Sequence[Sequence[torch.Tensor]], table: Sequence[int], page_tokens: int, block_tokens: int
    ) -> BlockCopy | None:
        """Bit for bit; None where these pages are not for this route."""

        def plain() -> BlockCopy:
            return reference.ReferenceRawCopy(planes, table, page_tokens, block_tokens)

        numbers = sum([plane.shape[2] * plane.shape[3] for plane in planes[0]])
        slice_bytes = numbers * block_tokens * planes[0][0].element_size()
        return self._copy(planes, table, block_tokens, slice_bytes, None, plain)

    def int8_copy(
        self, form: SliceForm, planes: Sequence[Sequence[torch.Tensor]], table: Sequence[int], page_tokens: int
    ) -> BlockCopy | None:
        """planes: of the dtype that is quantized. None where these pages are not for this route."""

        def plain() -> BlockCopy:
            return int8_plain.PlainInt8Copy(form, planes, table, page_tokens)

        return self._copy(planes, table, form.tokens, form.size_bytes, KC64, plain)

    def close(self, timeout_s: float) -> bool:
        """Take no more transfers, finish those under way, and end the threads; returns whether that was in time."""
        workers = self._workers
        have_ended = [workers.loads.close(timeout_s), workers.saves.close(timeout_s), self.extents.close(timeout_s)]
        return workers.pins.close(timeout_s) and all(have_ended)

    def _copy(
        self,
        planes: Sequence[Sequence[torch.Tensor]],
        table: Sequence[int],
        block_tokens: int,
        slice_bytes: int,
        codec: str | None,
        plain: Callable[[], BlockCopy],
    ) -> BlockCopy | None:
        try:
            return DeviceCopy(self._ways, planes, table, block_tokens, slice_bytes, codec, plain)
        except ValueError as error:
            if str(error) not in self._refused:
                self._refused.add(str(error))
                _log.warning(
                    "pages go block by block through plain torch, which is slow: %s (said once)",
                    " ".join(str(error).split()),
                )
            return None


def on_cuda(index: int) -> DeviceTransfers:
    """The transfers of a GPU. Raises RuntimeError if there is none, or no memory on it."""
    cpus = local_cpus(index)
    names = [f"kv-{name}-{index}" for name in Workers._fields]
    device = CudaDevice(index)
    return DeviceTransfers(device, Workers(*[ThreadWorker(name, cpus) for name in names]))
