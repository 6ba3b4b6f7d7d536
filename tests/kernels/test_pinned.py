"""Extents that copies may reach: chunks, runs, refusals, and memory that stays as long as somebody uses it."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from chaos import ChaosDevice
from chaos_worker import ChaosWorker
from happens_before import Region
from kv_kernels.cuda import host_tensor
from kv_kernels.pinned import PinnedExtents
from kv_kernels.worker import Worker
from tiering.dram.extents import Extent

CHUNK, SLOT = 64, 24


def _extents(refused: bool = False) -> tuple[PinnedExtents, ChaosWorker, ChaosDevice]:
    device = ChaosDevice(Random(1), lambda *_: "operation not supported (801)" if refused else "")
    worker = ChaosWorker(device, "pin worker")
    return PinnedExtents(device, worker, CHUNK), worker, device


def test_runs_are_whole_and_in_order_and_end_where_a_chunk_does() -> None:
    extents, worker, _ = _extents()
    memory = torch.randint(0, 256, (10 * SLOT,), dtype=torch.uint8)
    extents.add(memory.data_ptr(), len(memory), memory, writable=True)
    while worker.pump():
        pass
    for seed in range(200):
        slots = Random(seed).sample(range(10), Random(seed).randint(1, 10))
        if seed % 2:
            slots.sort()
        runs = extents.runs(memory.data_ptr() + SLOT * np.array(slots), SLOT)
        tensors = [host_tensor(*run) for run in runs.rows[1:].T.tolist()]
        assert torch.equal(torch.cat(tensors), torch.cat([memory.view(10, SLOT)[slot] for slot in slots]))
        assert runs.are_pinned == [True]
        for run in tensors:
            start = run.data_ptr() - memory.data_ptr()
            assert start // CHUNK == (start + len(run) - 1) // CHUNK, "inside one chunk"
    every = extents.runs(memory.data_ptr() + SLOT * np.arange(10), SLOT)
    assert every.rows[2].tolist() == [64, 64, 64, 48]


def test_a_slot_is_pinned_when_all_its_chunks_are() -> None:
    extents, worker, _ = _extents()
    memory = torch.zeros(10 * SLOT, dtype=torch.uint8)
    extents.add(memory.data_ptr(), len(memory), memory, writable=True)
    seen = []
    for _ in range(3):
        seen.append(
            [extents.runs(np.array([memory.data_ptr() + slot * SLOT]), SLOT).are_pinned[0] for slot in range(4)]
        )
        worker.pump()
    assert seen == [[False] * 4, [True, True, False, False], [True] * 4]


def test_a_refusal_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    extents, worker, device = _extents(refused=True)
    memory = torch.zeros(10 * SLOT, dtype=torch.uint8)
    with caplog.at_level(logging.INFO, "kv_kernels"):
        extents.add(memory.data_ptr(), len(memory), memory, writable=False)
        while worker.pump():
            pass
    assert device.refused == 4
    (record,) = caplog.records
    assert "64 bytes of read-only shared memory: operation not supported (801)" in record.getMessage()
    assert not extents.runs(np.array([memory.data_ptr()]), SLOT).are_pinned[0]
    assert extents.remove(memory.data_ptr(), 1.0)


def test_memory_stays_while_it_is_held_and_goes_then() -> None:
    extents, _, device = _extents()
    memory = torch.zeros(10 * SLOT, dtype=torch.uint8)
    address, gone = memory.data_ptr(), list[bool]()
    owner = memory.view(-1)
    weakref.finalize(owner, gone.append, True)
    extents.add(address, len(memory), owner, writable=True)
    del owner
    hold = extents.hold(np.array([address, address + SLOT]), SLOT)
    assert not extents.remove(address, 0.0) and not gone
    extents.hold(np.array([address]), SLOT).release()
    hold.release()
    hold.release()  # once is enough
    assert extents.remove(address, 1.0)
    assert gone and not device.reaches(Region(address, 1))
    assert extents.remove(address, 1.0), "it is gone already"
    extents.hold(np.array([address]), SLOT).release()  # it is a stranger's, who keeps it


def test_memory_that_could_not_be_removed_can_be_used_and_removed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    extents, worker, device = _extents()
    memory = torch.zeros(10 * SLOT, dtype=torch.uint8)
    address = memory.data_ptr()
    extents.add(address, len(memory), memory, writable=True)
    while worker.pump():
        pass
    with monkeypatch.context() as busy:
        busy.setattr(worker, "submit", lambda job: False)
        assert not extents.remove(address, 1.0)
    extents.hold(np.array([address]), SLOT).release()
    unregister, failures = device.unregister, [address + CHUNK]

    def fails_once(at: int) -> None:
        if at in failures:
            failures.remove(at)
            raise RuntimeError("busy")
        unregister(at)

    monkeypatch.setattr(device, "unregister", fails_once)
    with pytest.raises(RuntimeError, match="busy"):  # of the worker; a thread logs it
        extents.remove(address, 1.0)
    assert extents.remove(address, 1.0) and not device.reaches(Region(address, len(memory)))


def test_what_overlaps_is_refused() -> None:
    extents, _, _ = _extents()
    memory = torch.zeros(100, dtype=torch.uint8)
    extents.add(memory.data_ptr() + 20, 40, memory, writable=True)
    for start, size in ((0, 21), (59, 10), (30, 5), (0, 100)):
        with pytest.raises(ValueError, match="is here already"):
            extents.add(memory.data_ptr() + start, size, memory, writable=True)
    extents.add(memory.data_ptr(), 20, memory, writable=True)
    extents.add(memory.data_ptr() + 60, 40, memory, writable=True)
    for start in (10, 12, 90):  # two extents are not one, though they are neighbours
        with pytest.raises(ValueError, match="not wholly inside its extent"):
            extents.runs(np.array([memory.data_ptr() + start]), SLOT)


def test_other_memory_is_the_callers_and_bounces() -> None:
    extents, worker, _ = _extents()
    memory, other = (torch.zeros(10 * SLOT, dtype=torch.uint8) for _ in range(2))
    extents.add(memory.data_ptr(), len(memory), memory, writable=True)
    while worker.pump():
        pass
    slots = [memory.data_ptr(), other.data_ptr() + SLOT, other.data_ptr() + 2 * SLOT]
    hold, runs = extents.hold(np.array(slots), SLOT), extents.runs(np.array(slots), SLOT)
    assert runs.rows[1].tolist() == slots and runs.are_pinned == [False]
    hold.release()
    assert extents.remove(memory.data_ptr(), 1.0)


def test_a_thread_of_its_own_registers() -> None:
    device = ChaosDevice(Random(1))
    worker = Worker("pin")
    extents = PinnedExtents(device, worker, CHUNK)
    memory = torch.zeros(10 * SLOT, dtype=torch.uint8)
    extents.add(memory.data_ptr(), len(memory), memory, writable=True)
    assert worker.wait(lambda: extents.runs(np.array([memory.data_ptr() + 9 * SLOT]), SLOT).are_pinned[0], 30.0)
    assert extents.remove(memory.data_ptr(), 30.0)
    assert worker.close(30.0)


# Adopted ones: memory that goes when its last view does --------------------------------------------------------------

SIZE = 1 << 16


def _adopt(extents: PinnedExtents, extent: Extent) -> None:
    memory = extent.memory
    extents.adopt(memory.address, memory.size_bytes, memory.before_unmap, writable=memory.writable)


def _new(extents: PinnedExtents) -> Extent:
    extent = Extent(SIZE)
    extent.close()  # of the descriptor; the memory stays for as long as there is a view
    _adopt(extents, extent)
    return extent


def _adopted() -> tuple[PinnedExtents, ChaosWorker, ChaosDevice, Extent]:
    device = ChaosDevice(Random(1), knows_host=False)
    worker = ChaosWorker(device, "pin worker")
    extents = PinnedExtents(device, worker, SIZE // 4)
    return extents, worker, device, _new(extents)


def _is_mapped(address: int) -> bool:
    return any(line.startswith(f"{address:08x}-") for line in Path("/proc/self/maps").read_text().splitlines())


def test_what_is_adopted_is_unregistered_before_it_is_unmapped() -> None:
    extents, worker, device, extent = _adopted()
    address, everything = extent.address, Region(extent.address, 1)
    _adopt(extents, extent)  # it is known
    for _ in range(4):
        assert worker.pump()
    assert not worker.pump() and device.reaches(everything)
    unregistered = []
    unregister = device.unregister
    device.unregister = lambda at: (unregistered.append(_is_mapped(address)), unregister(at))  # type: ignore
    del extent
    assert _is_mapped(address) and device.reaches(everything), "no finalizer has waited"
    assert worker.pump() and not _is_mapped(address)
    assert unregistered == [True] * 4 and not device.reaches(everything)


def test_what_goes_before_it_is_registered_is_not() -> None:
    _, worker, device, extent = _adopted()
    address = extent.address
    assert worker.pump() and device.reaches(Region(address, 1))
    del extent
    while worker.pump():
        pass
    assert not _is_mapped(address) and not device._registered


def test_the_same_address_may_come_again() -> None:
    extents, worker, _, extent = _adopted()
    for _ in range(3):
        address = extent.address
        del extent
        while worker.pump():
            pass
        extent = _new(extents)
        while worker.pump():
            pass
        assert extents.runs(np.array([extent.address]), 4096).are_pinned[0]
        assert address  # mostly the same one


def test_after_the_close_memory_goes_at_once() -> None:
    extents, worker, device, extent = _adopted()
    worker.pump()
    assert extents.close(1.0) and not device._registered
    _adopt(extents, extent)
    assert worker.close(1.0) and _is_mapped(extent.address)
    address = extent.address
    del extent
    assert not _is_mapped(address)


def test_memory_that_a_failed_device_may_still_use_stays() -> None:
    extents, worker, _, extent = _adopted()
    while worker.pump():
        pass
    extents.hold(np.array([extent.address]), 4096)
    address = extent.address
    del extent
    while worker.pump():
        pass
    assert _is_mapped(address) and extents.close(1.0)


def test_a_forked_child_unmaps_by_itself() -> None:
    extents, worker, device, extent = _adopted()
    worker.pump()
    address = extent.address
    child = os.fork()
    if child == 0:
        assert extents.close(0.0)
        del extent
        os._exit(1 if _is_mapped(address) or device._registered == {} else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _is_mapped(address) and device.reaches(Region(address, 1))


def test_who_leaves_does_not_wait_for_all_that_is_to_be_page_locked() -> None:
    extents, worker, device, extent = _adopted()
    others = [_new(extents) for _ in range(3)]
    for _ in range(4):
        worker.pump()
    address = extent.address
    assert len(device._registered) == 4
    del extent
    assert worker.pump() and worker.pump() and not _is_mapped(address)
    assert len(device._registered) < 4
    while worker.pump():
        pass
    assert len(device._registered) == 4 * len(others)
