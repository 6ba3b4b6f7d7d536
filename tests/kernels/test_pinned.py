"""Memory that copies may reach: runs, refusals, and memory that stays as long as something uses it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from chaos import ChaosDevice
from happens_before import Region
from kv_kernels.cuda import host_tensor
from kv_kernels.pinned import Leave, PinnedExtents
from tiering.dram.extents import Extent
from waiting import wait_until

SLOT = 24


def _extents(refused: bool = False) -> tuple[PinnedExtents, ChaosDevice]:
    device = ChaosDevice(Random(1), lambda *_: "operation not supported (801)" if refused else "")
    return PinnedExtents(device), device


def _add(extents: PinnedExtents, memory: torch.Tensor, *, writable: bool = True) -> Leave:
    leaves: list[Leave] = []
    extents.adopt(memory.data_ptr(), len(memory), leaves.append, writable=writable)
    return leaves[0]


def _do_all(extents: PinnedExtents) -> None:
    while extents.step():
        pass


def test_runs_are_whole_and_in_order_and_end_where_an_extent_does() -> None:
    extents, _ = _extents()
    memory = torch.randint(0, 256, (10 * SLOT,), dtype=torch.uint8)
    for half in memory.split(5 * SLOT):
        _add(extents, half)
    _do_all(extents)
    for seed in range(200):
        slots = Random(seed).sample(range(10), Random(seed).randint(1, 10))
        if seed % 2:
            slots.sort()
        rows, is_pinned = extents.runs(memory.data_ptr() + SLOT * np.array(slots), SLOT)
        tensors = [host_tensor(*run) for run in rows[1:].T.tolist()]
        assert torch.equal(torch.cat(tensors), torch.cat([memory.view(10, SLOT)[slot] for slot in slots]))
        assert is_pinned
        for run in tensors:
            start = run.data_ptr() - memory.data_ptr()
            assert start // (5 * SLOT) == (start + len(run) - 1) // (5 * SLOT), "inside one extent"
    every, _ = extents.runs(memory.data_ptr() + SLOT * np.arange(10), SLOT)
    assert every[2].tolist() == [5 * SLOT, 5 * SLOT]


def test_slots_are_pinned_when_all_their_extents_are() -> None:
    extents, _ = _extents()
    memory, seen = torch.zeros(10 * SLOT, dtype=torch.uint8), []
    for half in memory.split(5 * SLOT):
        _add(extents, half)
    for _ in range(3):
        seen.append([extents.runs(memory.data_ptr() + SLOT * np.array(two), SLOT)[1] for two in ([0, 4], [4, 5])])
        extents.step()
    assert seen == [[False, False], [True, False], [True, True]]


def test_a_refusal_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    extents, device = _extents(refused=True)
    memory = torch.zeros(10 * SLOT, dtype=torch.uint8)
    with caplog.at_level(logging.INFO, "kv_kernels"):
        for half in memory.split(5 * SLOT):
            _add(extents, half, writable=False)
        _do_all(extents)
    assert device.refused == 2
    (record,) = caplog.records
    assert "120 bytes of read-only shared memory: operation not supported (801)" in record.getMessage()
    assert not extents.runs(np.array([memory.data_ptr()]), SLOT)[1] and extents.close(1.0)


def test_memory_stays_while_it_is_held_and_goes_then() -> None:
    extents, device = _extents()
    memory = torch.zeros(10 * SLOT, dtype=torch.uint8)
    address, gone = memory.data_ptr(), list[bool]()
    leave = _add(extents, memory)
    _do_all(extents)
    hold = extents.hold(np.array([address, address + SLOT]), SLOT)
    assert hold is not None and not extents.close(0.0) and device.reaches(Region(address, 1)), "it is held"
    hold.release()
    hold.release()  # once is enough
    assert extents.close(1.0) and not device.reaches(Region(address, 1))
    leave(lambda: gone.append(True))
    assert gone == [True]


def test_a_close_waits_for_all_that_is_held_and_nothing_is_held_meanwhile() -> None:
    extents, device = _extents()
    memory, done = torch.zeros(10 * SLOT, dtype=torch.uint8), list[bool]()
    slots = memory.data_ptr() + SLOT * np.arange(10)
    for half in memory.split(5 * SLOT):
        _add(extents, half)
    extents.run()
    assert extents.wait(slots, SLOT, 30.0)
    holds = [extents.hold(slots[at:], SLOT) for at in (0, 5)]
    closing = threading.Thread(target=lambda: done.append(extents.close(30.0)), daemon=True)
    closing.start()
    wait_until(lambda: extents.hold(slots, SLOT) is None)
    for hold in holds:
        assert hold is not None and len(device._registered) == 2 and not done
        hold.release()
    closing.join(30.0)
    assert done == [True] and not device._registered and extents.close(0.0)


def test_memory_that_cannot_be_unregistered_stays_mapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    extents, device = _extents()
    memory, other = (torch.zeros(10 * SLOT, dtype=torch.uint8) for _ in range(2))
    unregister, gone = device.unregister, list[str]()

    def fails(at: int) -> None:
        if at == memory.data_ptr():
            raise RuntimeError("busy")
        unregister(at)

    monkeypatch.setattr(device, "unregister", fails)
    leaves = [_add(extents, one) for one in (memory, other)]
    extents.run()
    assert extents.wait(np.array([memory.data_ptr(), other.data_ptr()]), 10 * SLOT, 30.0)
    leaves[0](lambda: gone.append("memory"))
    leaves[1](lambda: gone.append("other"))
    wait_until(lambda: gone == ["other"])
    assert "page-locking failed" in caplog.text and "busy" in caplog.text
    assert device.reaches(Region(memory.data_ptr(), 10 * SLOT))


def test_what_overlaps_other_memory_is_left_out() -> None:
    extents, _ = _extents()
    memory, leaves = torch.zeros(100, dtype=torch.uint8), list[Leave]()
    _add(extents, memory[20:60])
    for start, size in ((0, 21), (59, 10), (30, 5), (0, 100), (20, 40)):
        extents.adopt(memory.data_ptr() + start, size, leaves.append, writable=True)
    assert not leaves
    _add(extents, memory[:20])
    _add(extents, memory[60:])
    for start in (10, 12, 90):  # two extents are not one, though they are neighbours
        with pytest.raises(ValueError, match="not wholly inside its extent"):
            extents.runs(np.array([memory.data_ptr() + start]), SLOT)


def test_other_memory_is_the_callers_and_is_not_page_locked() -> None:
    extents, _ = _extents()
    memory, other = (torch.zeros(10 * SLOT, dtype=torch.uint8) for _ in range(2))
    _add(extents, memory)
    _do_all(extents)
    slots = [memory.data_ptr(), other.data_ptr() + SLOT, other.data_ptr() + 2 * SLOT]
    rows, is_pinned = extents.runs(np.array(slots), SLOT)
    assert rows[1].tolist() == slots and not is_pinned


def test_its_thread_does_what_there_is_and_ends() -> None:
    extents, device = _extents()
    memory, seen = torch.zeros(10 * SLOT, dtype=torch.uint8), list[str]()
    leave = _add(extents, memory)
    extents.run()
    assert extents.wait(memory.data_ptr() + SLOT * np.arange(10), SLOT, 30.0)
    leave(lambda: seen.append(threading.current_thread().name))
    assert extents.close(30.0) and not device.reaches(Region(memory.data_ptr(), 1))
    assert seen == ["kv-pins"]


# Memory of a store goes when its last view does ----------------------------------------------------------------------

SIZE = 1 << 16


def _adopt(extents: PinnedExtents, extent: Extent) -> None:
    memory = extent.memory
    extents.adopt(memory.address, memory.size_bytes, memory.before_unmap, writable=memory.writable)


def _new(extents: PinnedExtents) -> Extent:
    extent = Extent(SIZE)
    extent.close()  # of the descriptor; the memory stays for as long as there is a view
    _adopt(extents, extent)
    return extent


def _adopted() -> tuple[PinnedExtents, ChaosDevice, Extent]:
    device = ChaosDevice(Random(1), knows_host=False)
    extents = PinnedExtents(device)
    return extents, device, _new(extents)


def _is_mapped(address: int) -> bool:
    return any(line.startswith(f"{address:08x}-") for line in Path("/proc/self/maps").read_text().splitlines())


def test_what_is_adopted_is_unregistered_before_it_is_unmapped() -> None:
    extents, device, extent = _adopted()
    address, everything = extent.address, Region(extent.address, 1)
    _adopt(extents, extent)  # it is known
    assert extents.step() and not extents.step() and device.reaches(everything)
    unregistered = []
    unregister = device.unregister
    device.unregister = lambda at: (unregistered.append(_is_mapped(address)), unregister(at))  # type: ignore
    del extent
    assert _is_mapped(address) and device.reaches(everything), "no finalizer has waited"
    assert extents.step() and not _is_mapped(address)
    assert unregistered == [True] and not device.reaches(everything)


def test_what_goes_before_it_is_registered_is_not() -> None:
    extents, device, extent = _adopted()
    address = extent.address
    del extent
    _do_all(extents)
    assert not _is_mapped(address) and not device.registrations


def test_the_same_address_may_come_again() -> None:
    extents, _, extent = _adopted()
    for _ in range(3):  # mostly it does
        del extent
        _do_all(extents)
        extent = _new(extents)
        _do_all(extents)
        assert extents.runs(np.array([extent.address]), 4096)[1]


def test_after_the_close_memory_goes_at_once() -> None:
    extents, device, extent = _adopted()
    extents.step()
    assert extents.close(1.0) and not device._registered
    _adopt(extents, extent)
    assert _is_mapped(extent.address)
    address = extent.address
    del extent
    assert not _is_mapped(address)


def test_memory_that_a_failed_device_may_still_use_stays() -> None:
    extents, _, extent = _adopted()
    _do_all(extents)
    extents.hold(np.array([extent.address]), 4096)
    address = extent.address
    del extent
    _do_all(extents)
    assert _is_mapped(address) and not extents.close(0.0) and _is_mapped(address)


def test_a_forked_child_unmaps_by_itself() -> None:
    extents, device, extent = _adopted()
    extents.step()
    address = extent.address
    child = os.fork()
    if child == 0:
        assert extents.close(0.0)
        del extent
        os._exit(1 if _is_mapped(address) or device._registered == {} else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _is_mapped(address) and device.reaches(Region(address, 1))


def test_who_leaves_does_not_wait_for_all_that_is_to_be_page_locked() -> None:
    extents, device, extent = _adopted()
    others = [_new(extents) for _ in range(3)]
    extents.step()
    address = extent.address
    assert len(device._registered) == 1
    del extent
    assert extents.step() and not _is_mapped(address) and not device._registered
    _do_all(extents)
    assert len(device._registered) == len(others)
