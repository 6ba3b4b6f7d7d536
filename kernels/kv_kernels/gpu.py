"""The route to one GPU, and which way it takes: copies with a kernel behind each, or a kernel that reaches into host
memory itself.

    python -m kv_kernels.gpu 0      both ways measured on GPU 0, as JSON: a list of `Measured`

Which one is faster depends on the GPU, its bus, the direction, the codec and the size of a payload, so each machine
measures. An engine has a process of its own do it: what a way does wrong on a GPU where it was never tried ends that
process, and the engine stays with copies. A way that moves other bytes than copies do is never taken.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_kernels.cuda import CudaDevice, Direction, host_tensor
from kv_kernels.device_copy import DeviceTransfers
from kv_kernels.host import Paged
from kv_kernels.int8_form import KC64, SliceForm, slice_form
from kv_kernels.pinned import Leave

KV_BYTES, LAPS, SECONDS = 64 << 20, 4, 90.0
"""Of a measurement; turns of each way; and how long another process may take for all of it."""
_PIN_SECONDS = 10.0
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_BLOCK_TOKENS, _PAGE_TOKENS = 64, 16
_log = logging.getLogger(__name__)


class Measured(NamedTuple):
    """Payloads' bytes in a second, each way; reached is 0 where it moved other bytes."""

    direction: str
    codec: str
    payload_bytes: int
    copied_gb_per_second: float
    reached_gb_per_second: float


class _Slot(NamedTuple):
    address: int
    view: memoryview = memoryview(b"")
    memory: None = None


def on_cuda(index: int, *, learns: bool = True) -> DeviceTransfers:
    """The transfers of a GPU. Raises RuntimeError if there is none, or no memory on it. learns: which way is faster, in
    the background."""
    ways = DeviceTransfers(CudaDevice(index))
    ways.extents.run()
    if learns:
        threading.Thread(target=_learn, args=(ways, index), name=f"kv-gpu-{index}", daemon=True).start()
    return ways


def _learn(ways: DeviceTransfers, index: int) -> None:
    """From a process of its own."""
    command = [sys.executable, "-P", "-m", "kv_kernels.gpu", str(index)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)
        found = [Measured(**one) for one in json.loads(done.stdout.splitlines()[-1])]
    except (OSError, subprocess.SubprocessError) as error:
        reason = type(error).__name__
    except (ValueError, TypeError, IndexError):
        reason = next(reversed(done.stderr.splitlines()), f"status {done.returncode}")
    else:
        for one in found:
            is_faster = one.reached_gb_per_second > one.copied_gb_per_second
            ways.take(Direction(one.direction), one.codec == KC64, one.payload_bytes, reaches=is_faster)
        return
    _log.warning("GPU %d was not measured, and is served by copies: %s", index, reason)


def measured(
    ways: DeviceTransfers, kv_bytes: int = KV_BYTES, heads: int = 8, width: int = 128, layers: Sequence[int] = (1, 32)
) -> Iterator[Measured]:
    """Both ways, for each codec, number of layers and direction."""
    for form in (None, slice_form(heads, _BLOCK_TOKENS, (width, width), 2)):
        for count in layers:
            blocks = max(1, kv_bytes // (4 * count * heads * _BLOCK_TOKENS * width))
            shape = (2 * count, blocks * _BLOCK_TOKENS // _PAGE_TOKENS, _PAGE_TOKENS, heads, width)
            pages = ways.device.memory(2 * torch.Size(shape).numel()).view(torch.bfloat16).view(shape).normal_()
            yield from _of_pages(ways, form, pages, blocks)


def _of_pages(ways: DeviceTransfers, form: SliceForm | None, pages: torch.Tensor, blocks: int) -> Iterator[Measured]:
    """pages: bfloat16 [K and V of each layer, pages, page_tokens, heads, width]."""
    planes = [list(layer) for layer in pages.split(2)]
    copy: Any = ways.bind(form, Paged(planes, range(pages.shape[1]), _PAGE_TOKENS, _BLOCK_TOKENS))
    size = copy.slice_bytes * len(planes)
    tokens = range(0, blocks * _BLOCK_TOKENS, _BLOCK_TOKENS)
    with _both_mappings(ways, blocks * size) as (written, read):
        into, of = ([_Slot(address + block * size) for block in range(blocks)] for address in (written, read))
        save = partial(copy.encode, tokens, into, None)
        digests = list(save())
        moves: dict[Direction, tuple[list[_Slot], torch.Tensor, Callable[[], object], object]] = {
            Direction.SAVE: (into, host_tensor(written, blocks * size), lambda: list(save()), digests),
            Direction.LOAD: (of, pages, lambda: copy.decode(of, tokens, 0, digests, None), blocks),
        }
        for direction, (slots, target, move, wanted) in moves.items():
            ways.take(Direction.SAVE, form is not None, size, reaches=False)
            list(save())  # for the loads
            can_reach = ways.extents.wait(copy.addresses_of(slots), size, _PIN_SECONDS)
            assert not can_reach or blocks * len(planes) >= ways.programs, "enough to do for a kernel"
            rates, outcomes = [], []
            for reaches in (False, True) if can_reach else (False,):
                ways.take(direction, form is not None, size, reaches=reaches)
                seconds = []
                for _ in range(LAPS):
                    target.zero_()
                    ways.device.compute().record().synchronize()
                    start = perf_counter()
                    outcome = move()
                    seconds.append(perf_counter() - start)
                rates.append(blocks * size / min(seconds) / 1e9)
                outcomes.append((outcome == wanted, target.view(torch.uint8).cpu().clone()))
            is_right = all(is_good and torch.equal(outcomes[0][1], state) for is_good, state in outcomes)
            codec = "raw" if form is None else KC64
            yield Measured(direction.value, codec, size, rates[0], rates[1] if is_right and can_reach else 0.0)


@contextmanager
def _both_mappings(ways: DeviceTransfers, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Where shared memory lies that is mapped twice, as a store's is: to be filled, and read-only to be read."""
    number = os.memfd_create("kv-measured")
    os.ftruncate(number, size_bytes)
    maps = [mmap.mmap(number, size_bytes), mmap.mmap(number, size_bytes, prot=mmap.PROT_READ)]
    os.close(number)
    filled, read = addresses = [np.frombuffer(one, np.uint8).ctypes.data for one in maps]
    leaves: list[Leave] = []
    for address in addresses:
        ways.extents.adopt(address, size_bytes, leaves.append, writable=address == filled)
    try:
        yield filled, read
    finally:
        for leave in leaves:
            leave(partial(list, maps))  # which keeps them until then


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    try:
        print(json.dumps([one._asdict() for one in measured(on_cuda(int(sys.argv[1]), learns=False))]))
    except RuntimeError as error:
        sys.exit(str(error))
