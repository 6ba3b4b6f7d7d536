"""The device on CUDA: refused with a reason where there is none, and a load and a save on a GPU where there is one."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from kv_kernels.cuda import CopyBatch, CudaDevice, Direction
from kv_kernels.pinned import Addresses, PinnedExtents
from kv_kernels.transfer import LayerSlice, PageMover, Transfer, layer_slices

LAYERS, FRAMES, LAYER_BYTES = 8, 24, 1 << 16
FRAME_BYTES = 4096 + LAYERS * LAYER_BYTES


def test_where_there_is_no_gpu_it_says_so() -> None:
    index = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(RuntimeError, match=f"there is no CUDA device {index}: torch .* sees {index}; install"):
        CudaDevice(index)


class Moved(Transfer):
    """Frames to rows of a pool [frame, layer, bytes] and back, by torch."""

    def __init__(self, mover: PageMover, slots: Addresses, pool: torch.Tensor) -> None:
        super().__init__(mover, slots, layer_slices(LAYERS, LAYER_BYTES, 3, 4096))
        self._pool = pool

    def launch(self, staged: torch.Tensor, frames: range, layers: LayerSlice) -> None:
        held = staged.view(len(frames), layers.stop - layers.first, LAYER_BYTES)
        pages = self._pool[frames.start : frames.stop, layers.first : layers.stop]
        target, source = (pages, held) if self.mover.loads else (held, pages)
        target.copy_(source)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_registered", [True, False])
def test_what_is_saved_is_loaded(is_registered: bool) -> None:
    device = CudaDevice(0)
    extents = PinnedExtents(device if is_registered else _Refusing(0))
    extents.run()
    size = -(-FRAMES * FRAME_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    extent = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    extents.adopt(extent.data_ptr(), size, lambda leave: None, writable=True)
    slots = extent.data_ptr() + FRAME_BYTES * np.arange(FRAMES)
    assert extents.wait(slots, FRAME_BYTES, 60.0 if is_registered else 0.0) is is_registered
    loads, saves = (PageMover(device, direction, extents, 5 * LAYER_BYTES) for direction in Direction)
    made = torch.randint(0, 256, (FRAMES, LAYERS, LAYER_BYTES), dtype=torch.uint8, device="cuda")
    saving = Moved(saves, slots, made)
    assert saving.start() and saving.wait()
    expected = made.clone()
    made.zero_()
    assert torch.equal(extent.view(-1)[4096:FRAME_BYTES], expected[0].cpu().view(-1))
    pool = torch.zeros_like(made)
    loading = Moved(loads, slots, pool)
    assert loading.start() and loading.wait()
    assert torch.equal(pool, expected)
    assert extents.close(60.0)


class _Refusing(CudaDevice):
    """Registers nothing."""

    def register(self, address: int, size_bytes: int, *, writable: bool) -> str:
        return "not here"


# All copies in one call of the driver, in both of its forms, and one for each where it has none -----------------------

STREAM = 0x1234_5678_9ABC


@pytest.fixture
def driver(tmp_path: Path) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for the driver that records")
    made = tmp_path / "driver.so"
    source = Path(__file__).with_name("driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", made, source], check=True)
    return ctypes.CDLL(str(made))


def of(driver: ctypes.CDLL, name: str, kind: type = ctypes.c_int) -> int:
    return int(kind.in_dll(driver, name).value)


def told(driver: ctypes.CDLL, **numbers: int) -> None:
    for name, number in numbers.items():
        ctypes.c_int.in_dll(driver, name).value = number


@pytest.mark.parametrize(
    ("version", "batches", "singles"),
    [(12_040, 0, 3), (12_080, 1, 0), (12_090, 1, 0), (13_000, 1, 0), (13_010, 1, 0)],
)
def test_copies_are_one_call_in_the_form_that_the_driver_has(
    driver: ctypes.CDLL, version: int, batches: int, singles: int
) -> None:
    told(driver, version=version)
    copies = CopyBatch(driver)
    source, target = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    sizes = [3, 90, 107]
    places = np.cumsum([0, *sizes[:-1]])
    copies(np.stack([target.data_ptr() + places, source.data_ptr() + places, np.array(sizes)]), STREAM)
    assert torch.equal(target, source)
    assert (of(driver, "batches"), of(driver, "singles")) == (batches, singles)
    assert of(driver, "stream_of_last", ctypes.c_uint64) == STREAM
    if batches:
        assert list((ctypes.c_int * 6).in_dll(driver, "attributes_of_last")) == [1, 0, 0, 0, 0, 1]


def test_memory_that_is_not_page_locked_is_copied_row_by_row(driver: ctypes.CDLL) -> None:
    told(driver, version=13_000)
    source, target = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    places = np.array([0, 100])
    copies = CopyBatch(driver)
    copies(
        np.stack([target.data_ptr() + places, source.data_ptr() + places, np.array([50, 100])]), STREAM, is_pinned=False
    )
    assert torch.equal(target[:50], source[:50]) and torch.equal(target[100:], source[100:])
    assert (of(driver, "batches"), of(driver, "singles")) == (0, 2)


@pytest.mark.parametrize("version", [12_040, 12_080, 13_000])
def test_a_refusal_is_an_error_with_its_number(driver: ctypes.CDLL, version: int) -> None:
    told(driver, version=version, refuses=1)
    row = np.zeros((3, 1), np.int64)
    with pytest.raises(RuntimeError, match=r"cuMemcpy(BatchAsync of 1 copies|Async) was refused .* CUDA error 1"):
        CopyBatch(driver)(row, STREAM)


def test_a_driver_without_a_version_is_refused(driver: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError, match="cuDriverGetVersion was refused by the driver: CUDA error 999"):
        CopyBatch(driver)
