"""The device on CUDA: refused with a reason where there is none, and a load and a save on a GPU where there is one."""

from __future__ import annotations

import mmap

import pytest
import torch

from kv_kernels.cuda import CudaDevice, CudaHost, cpu_list, local_cpus
from kv_kernels.device import Direction, Region, Stream
from kv_kernels.pinned import PinnedExtents
from kv_kernels.transfer import Loader, Saver
from kv_kernels.transfer_state import LayerSlice, TransferOutcome, layer_slices
from kv_kernels.worker import ThreadWorker

LAYERS, FRAMES, LAYER_BYTES = 8, 24, 1 << 16
FRAME_BYTES = 4096 + LAYERS * LAYER_BYTES


def test_where_there_is_no_gpu_it_says_so() -> None:
    index = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(RuntimeError, match=f"there is no CUDA device {index}: torch .* sees {index}; install"):
        CudaDevice(index)


def test_the_list_of_cpus_is_the_kernels() -> None:
    assert cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cpu_list("5") == {5}
    for text in ("", "a-b", "1-x"):
        with pytest.raises(ValueError):
            cpu_list(text)


def test_a_copy_by_the_host_moves_every_run() -> None:
    source, target = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    sizes = [3, 90, 107]
    CudaHost(torch.device("cpu")).copy(target.split(sizes), source.split(sizes))
    assert torch.equal(target, source)


class TorchKernel:
    """Frames to rows of a pool [frame, layer, bytes] and back."""

    def __init__(self, pool: torch.Tensor, direction: Direction) -> None:
        self._pool = pool
        self._direction = direction

    def __call__(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        held = staged.view(len(frames), layers.stop - layers.first, LAYER_BYTES)
        pages = self._pool[frames.start : frames.stop, layers.first : layers.stop]
        target, source = (pages, held) if self._direction is Direction.LOAD else (held, pages)
        target.copy_(source)

    def pages(self, frames: range, layers: LayerSlice) -> list[Region]:
        return []

    def tables(self) -> list[Region]:
        return []

    def findings(self) -> list[Region]:
        return []

    def end(self, kernels: Stream) -> None:
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_registered", [True, False])
def test_what_is_saved_is_loaded(is_registered: bool) -> None:
    device = CudaDevice(0)
    threads = [ThreadWorker(name, local_cpus(0)) for name in ("pin", "load", "save")]
    extents = PinnedExtents(device.host if is_registered else _Refusing(torch.device("cuda", 0)), threads[0])
    size = -(-FRAMES * FRAME_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    extent = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    extents.add(extent.data_ptr(), size, extent, writable=True)
    slots = [extent.data_ptr() + frame * FRAME_BYTES for frame in range(FRAMES)]
    if is_registered:
        assert threads[0].wait(lambda: extents.runs(slots, FRAME_BYTES).is_pinned, 60.0)
    loader = Loader(device, extents, threads[1], 5 * LAYER_BYTES, 3)
    saver = Saver(device, extents, threads[2], 5 * LAYER_BYTES, 3)
    slices = layer_slices(LAYERS, LAYER_BYTES, 3, 4096)
    made = torch.randint(0, 256, (FRAMES, LAYERS, LAYER_BYTES), dtype=torch.uint8, device="cuda")
    after = device.compute().record()
    kernel = TorchKernel(made, Direction.SAVE)
    saving = saver.save(slots, slices, kernel, after)
    assert saving is not None and saving.wait(60.0)
    expected = made.clone()
    made.zero_()
    assert saving.outcome is TransferOutcome.DONE and saving.is_direct is is_registered
    assert torch.equal(extent.view(-1)[4096:FRAME_BYTES], expected[0].cpu().view(-1))
    pool = torch.zeros_like(made)
    loading = loader.load(slots, slices, TorchKernel(pool, Direction.LOAD))
    assert loading is not None and loading.wait(60.0) and loading.outcome is TransferOutcome.DONE
    assert torch.equal(pool, expected)
    assert extents.remove(extent.data_ptr(), 60.0)
    assert all(thread.close(60.0) for thread in threads)


class _Refusing(CudaHost):
    """Registers nothing."""

    def register(self, address: int, size_bytes: int, *, writable: bool) -> str:
        return "not here"
