"""Headers read in spans and by many threads say what headers read one by one say; bad sectors stay where they are."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest

from simulation.machine import MAC_KEY, OneKey
from tiering.frame import HEADER_BYTES, Sealer, Stamp, digest
from tiering.nvme.slab import BAD, EMPTY, HELD
from tiering.nvme.slab_files import DirectFiles
from tiering.nvme.slab_scan import MOST_UNREADABLE, SPAN_BYTES, TRIES, SlabScan
from tiering.slab_header import SlabHeader
from tiering.tier import SlotClass

NAME = "00000001.slab"


class BadSectors:
    """`Files` on a disk some pages of which cannot be read, some of them only at first."""

    def __init__(self, files: DirectFiles) -> None:
        self._files = files
        self.bad: dict[int, int] = {}  # offset of a page -> how often it fails
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def read(self, name: str, offset: int, into: memoryview) -> None:
        self.reads += 1
        for page in range(offset, offset + len(into), HEADER_BYTES):
            if self.bad.get(page, 0) > 0:
                self.bad[page] -= 1
                raise OSError(errno.EIO, "bad sector")
        self._files.read(name, offset, into)


def slab_of(payload_bytes: int, slots: int) -> tuple[SlabHeader, Sealer]:
    stamp = Stamp(b"key-id-0", 1, b"t" * 16, b"n" * 32, "raw", 0, 1, 64, 1, payload_bytes)
    slot_class = SlotClass(stamp.tenant, stamp.namespace, stamp.part, stamp.frame_bytes)
    return SlabHeader(1, slot_class, slots, stamp.key_id, stamp.epoch, b"u" * 16, b""), Sealer(stamp, MAC_KEY)


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    files = BadSectors(DirectFiles(tmp_path))
    yield files
    files.close()


def fill(disk: BadSectors, slab: SlabHeader, sealer: Sealer, random: Random) -> list[int]:
    """Frames, holes, and headers that are damaged in one bit; returns the slots of the good ones."""
    disk.create(NAME, slab.size_bytes)
    good = []
    for slot in range(slab.slots):
        kind = random.random()
        if kind < 0.2:
            continue
        header = bytearray(sealer.seal(bytes([slot % 251] * 32), bytes(32), slot, 1000 + slot, [digest(b"")], 3, 5))
        if kind < 0.4:
            header[random.randrange(300)] ^= 1 << random.randrange(8)
        else:
            good.append(slot)
        disk.write(NAME, slab.offset(slot), memoryview(bytes(header)))
    return good


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("payload_bytes", "slots"), [(4096, 700), (60_000, 90), (SPAN_BYTES, 9), (4096, 1)])
def test_it_finds_the_frames_that_are_right(disk: BadSectors, payload_bytes: int, slots: int, threads: int) -> None:
    seed = payload_bytes + slots
    slab, sealer = slab_of(payload_bytes, slots)
    good = fill(disk, slab, sealer, Random(seed))
    disk.reads = 0
    entries = SlabScan(disk, OneKey(), threads).entries(NAME, slab, range(slots))
    assert entries["state"].nonzero()[0].tolist() == good, f"seed {seed}"
    assert entries["generation"][good].tolist() == [1000 + slot for slot in good]
    assert entries["block_index"][good].tolist() == good
    assert {(int(one["priority"]), int(one["expires_at"])) for one in entries[good]} <= {(3, 5)}
    if 4 * slab.slot_class.frame_bytes <= SPAN_BYTES and threads == 1:
        assert disk.reads == -(-slots // (SPAN_BYTES // slab.slot_class.frame_bytes)), "neighbours in one read"
    first, last = slots // 3, slots // 2
    some = SlabScan(disk, OneKey(), threads).entries(NAME, slab, range(first, last))
    assert some.tobytes() == entries[first:last].tobytes()


@pytest.mark.parametrize("payload_bytes", [4096, SPAN_BYTES])
def test_a_sector_that_cannot_be_read_costs_its_own_slot(disk: BadSectors, payload_bytes: int, caplog: Any) -> None:
    slab, sealer = slab_of(payload_bytes, 12)
    good = fill(disk, slab, sealer, Random(7))
    gone, shy = good[1], good[-1]
    disk.bad = {slab.offset(gone): 1 << 30, slab.offset(shy): TRIES - 1}
    with caplog.at_level(logging.WARNING):
        entries = SlabScan(disk, OneKey(), 2).entries(NAME, slab, range(slab.slots))
    states = [EMPTY] * slab.slots
    for slot in good:
        states[slot] = HELD
    states[gone] = BAD
    assert entries["state"].tolist() == states
    assert "1 frame headers cannot be read" in caplog.text


@pytest.mark.parametrize("count", [MOST_UNREADABLE, MOST_UNREADABLE + 1])
def test_a_disk_that_refuses_too_much_is_at_fault(disk: BadSectors, count: int) -> None:
    """Nothing is quarantined for it: the disk may be well another day."""
    slab, sealer = slab_of(4096, 40)
    fill(disk, slab, sealer, Random(8))
    disk.bad = {slab.offset(slot): 1 << 30 for slot in range(count)}
    scan = SlabScan(disk, OneKey(), 1)
    if count > MOST_UNREADABLE:
        with pytest.raises(OSError, match="9 of 40 headers cannot be read"):
            scan.entries(NAME, slab, range(40))
    else:
        assert scan.entries(NAME, slab, range(40))["state"].tolist()[:count] == [BAD] * count
