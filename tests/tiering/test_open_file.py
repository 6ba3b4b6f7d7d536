"""Memory that a holder denies to have open: it counts, its pages go back, and nobody waits for him."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiering.dram import extents as dram_extents
from tiering.dram.extents import RARELY, SLOW_QUESTION_SECONDS, Extent, ExtentPool
from tiering.dram.keeping import NAME_BYTES, KeptExtent, Ledger
from tiering.dram.tier import DramTier
from tiering.errors import BlockMissing, TierFull, TierUnavailable
from tiering.tier import extent_of
from workbench import slot_class

KIB, MIB = 1 << 10, 1 << 20
ROOT = Path(__file__).resolve().parents[2]
UNLOCK = struct.pack("@hhqqi4x", fcntl.F_UNLCK, 0, 0, 0, 0)


def denied(extent: Extent, *, writable: bool = False) -> int:
    """A descriptor whose holder has dropped the lock by which it is known."""
    descriptor = extent.share(1, writable=writable)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, UNLOCK)
    return descriptor


def mapped(*, writable: bool = False, **options: int) -> Callable[[Extent], Callable[[], object]]:
    def hold(extent: Extent) -> Callable[[], object]:
        descriptor = denied(extent, writable=writable)
        memory = mmap.mmap(descriptor, extent.size_bytes, **options)
        os.close(descriptor)
        return memory.close

    return hold


def descriptor_alone(extent: Extent) -> Callable[[], object]:
    descriptor = denied(extent)
    return lambda: os.close(descriptor)


def opened_once_more(extent: Extent) -> Callable[[], object]:
    given = extent.share(1, writable=False)
    own = os.open(f"/proc/self/fd/{given}", os.O_RDONLY)
    os.close(given)
    return lambda: os.close(own)


def on_its_way(extent: Extent) -> Callable[[], object]:
    ours, theirs = socket.socketpair()
    descriptor = denied(extent)
    socket.send_fds(ours, [b"x"], [descriptor])
    os.close(descriptor)
    ours.close()
    return theirs.close


HOLDS = {
    "mapping": mapped(prot=mmap.PROT_READ),
    "writable mapping": mapped(writable=True),
    "private mapping": mapped(flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ),
    "descriptor": descriptor_alone,
    "opened once more": opened_once_more,
    "on its way": on_its_way,
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_what_somebody_denies_to_have_open_counts_as_taken(hold: Callable[[Extent], Callable[[], object]]) -> None:
    pool = ExtentPool(2 * MIB, MIB)
    first, second = pool.create(), pool.create()
    let_go = hold(first)
    assert not first.is_shared(), "it is denied"
    assert not pool.destroy(first, b"a") and pool.destroy(second, b"b")
    assert pool.taken_bytes == MIB and pool.lingering() == Counter([b"a"])
    third = pool.create()
    with pytest.raises(TierFull):
        pool.create()
    assert len(pool.awaited()) == 1
    let_go()
    assert pool.has_room() and not pool.lingering() and first.descriptor == -1
    assert pool.destroy(third)
    assert pool.taken_bytes == 0
    pool.close()


def test_a_handle_that_maps_nothing_keeps_no_memory() -> None:
    pool = ExtentPool(MIB, MIB)
    extent = pool.create()
    extent.view[:] = b"\x07" * MIB
    given = extent.share(1, writable=False)
    handle = os.open(f"/proc/self/fd/{given}", os.O_PATH)
    os.close(given)
    assert os.stat(f"/proc/self/fd/{handle}").st_blocks * 512 == MIB
    assert pool.destroy(extent) and pool.taken_bytes == 0
    assert os.stat(f"/proc/self/fd/{handle}").st_blocks == 0
    with open(f"/proc/self/fd/{handle}", "rb") as opened_later:
        assert opened_later.read() == bytes(MIB), "it is nobody's any more"
    os.close(handle)
    pool.close()


def test_where_the_kernel_grants_no_leases_a_denied_mapping_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def without_leases(descriptor: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "no leases")
        return real(descriptor, command, argument)

    monkeypatch.setattr(dram_extents.fcntl, "fcntl", without_leases)
    pool = ExtentPool(2 * MIB, MIB)
    first, second = pool.create(), pool.create()
    first.view[:5] = second.view[:5] = b"hello"
    honest = second.share(2, writable=False)
    descriptor = denied(first)
    memory = mmap.mmap(descriptor, MIB, prot=mmap.PROT_READ)
    assert pool.destroy(first) and not pool.destroy(second)
    assert os.fstat(descriptor).st_blocks == 0 and memory[:5] == bytes(5)
    assert pool.taken_bytes == MIB
    os.close(honest)
    os.close(descriptor)
    memory.close()
    assert pool.taken_bytes == 0
    pool.close()


def test_whoever_reads_when_the_pool_is_closed_reads_on() -> None:
    pool = ExtentPool(2 * MIB, MIB)
    extents = [pool.create(), pool.create()]
    readers = []
    for extent in extents:
        extent.view[:5] = b"hello"
        descriptor = denied(extent)
        readers.append(mmap.mmap(descriptor, MIB, prot=mmap.PROT_READ))
        os.close(descriptor)
    pool.destroy(extents[0])
    pool.close()
    pool.destroy(extents[1])
    assert [memory[:5] for memory in readers] == [b"hello"] * 2
    for memory in readers:
        memory.close()


def test_an_extent_that_was_taken_back_is_served_to_nobody() -> None:
    tier = DramTier(ExtentPool(128 * KIB, 64 * KIB))
    slots = slot_class(owner=b"a")
    tier.adopt(tier.new_extent(), slots)
    (place,) = tier.reserve(slots, 1)
    memory = next(iter(tier.all_extents(slots))).memory
    descriptor = denied(memory, writable=True)
    tier.abort([place])
    tier.retire(extent_of(place))
    assert not tier.spans_at([place])
    for writable in (False, True):
        with pytest.raises(BlockMissing):
            tier.share(extent_of(place), 2, writable=writable)
    tier.adopt(tier.new_extent(), slots)
    os.pwrite(descriptor, b"liar", 0)
    (other,) = tier.reserve(slots, 1)
    assert bytes(tier.spans_at([other])[0].view[:4]) == bytes(4), "new memory, that nobody was given"
    assert tier.held() == {slots.tenant: 2} and not tier.has_room(), "its tenant pays for what is not free"
    os.close(descriptor)
    assert tier.has_room() and tier.held() == {slots.tenant: 1}
    with pytest.raises(TierUnavailable):
        memory.share(2, writable=False)
    tier.close()


def test_nobody_waits_for_a_client_that_has_a_lease_on_memory() -> None:
    """The kernel would have whoever opens it wait until the client gives it up, for 45 seconds as a rule."""
    extent = Extent(64 * KIB)
    descriptor = extent.share(1, writable=False)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # here the client is this process
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    with pytest.raises(TierUnavailable, match="opened again"):
        extent.share(2, writable=True)
    assert extent.is_open_elsewhere()
    os.close(descriptor)
    assert not extent.is_open_elsewhere()
    extent.close()


OPEN_AGAIN_AND_AGAIN = """
import os, sys, time
ends_at = time.monotonic() + 20
sys.stdout.write("x"); sys.stdout.flush()
while time.monotonic() < ends_at and os.getppid() == int(sys.argv[2]):
    for _ in range(100):
        os.close(os.open(f"/proc/self/fd/{sys.argv[1]}", os.O_RDONLY))
"""
ASK = f"""
import os, subprocess, sys
from tiering.dram.extents import Extent

extent = Extent(65536)
given = extent.share(1, writable=False)
handle = os.open(f"/proc/self/fd/{{given}}", os.O_PATH)
os.close(given)
opener = subprocess.Popen(
    [sys.executable, "-c", {OPEN_AGAIN_AND_AGAIN!r}, str(handle), str(os.getpid())],
    pass_fds=[handle], stdout=subprocess.PIPE,
)
opener.stdout.read(1)
open_then = sum(extent.is_open_elsewhere() for _ in range(20000))
opener.kill()
opener.wait()
assert open_then and not extent.is_open_elsewhere()
"""


def test_whoever_opens_memory_while_it_is_asked_about_stops_nobody() -> None:
    asking = subprocess.run(
        [sys.executable, "-c", ASK], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False
    )
    assert asking.returncode == 0


def test_what_is_slow_to_find_out_is_asked_seldom() -> None:
    now, questions = 0.0, 0

    class Slow(Extent):
        def is_open_elsewhere(self) -> bool:
            nonlocal now, questions
            questions += 1
            now += price
            return super().is_open_elsewhere()

    pool = ExtentPool(2 * MIB, MIB, now=lambda: now, thread_seconds=lambda: now)
    price = SLOW_QUESTION_SECONDS / 2
    extent = Slow(MIB)
    assert pool.take_over(extent)
    descriptor = denied(extent)
    pool.destroy(extent)
    for _ in range(10):
        assert pool.taken_bytes == MIB
    assert questions == 11
    price = 3 * SLOW_QUESTION_SECONDS
    for _ in range(10):
        assert pool.taken_bytes == MIB
    assert questions == 12
    now += RARELY * price / 2
    assert pool.taken_bytes == MIB and questions == 12
    os.close(descriptor)
    now += RARELY * price / 2
    assert pool.taken_bytes == 0 and questions == 13
    pool.close()


def test_memory_of_an_earlier_run_that_is_slow_to_ask_about_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now, price, questions = 0.0, 0.0, Counter[int]()
    real = Extent.is_shared

    def is_shared(self: Extent, first: int = 0, last: int = 1 << 62) -> bool:
        nonlocal now
        questions[self.size_bytes] += 1
        now += price
        return real(self, first, last)

    slots = slot_class(owner=b"a")
    kept, held = [], []
    for number in range(3):
        name = bytes([number]) * NAME_BYTES
        extent, ledger = Extent(64 * KIB), Ledger.new(slots, 64 * KIB // slots.frame_bytes, b"", name)
        held.append(extent.share(7, writable=False))
        kept.append(KeptExtent(name, os.dup(extent.descriptor), os.dup(ledger.descriptor)))
    tier = DramTier(ExtentPool(256 * KIB, 64 * KIB, now=lambda: now, thread_seconds=lambda: now))
    tier.take_over(kept, guard=8)
    assert len(tier.taken_over) == 3
    monkeypatch.setattr(Extent, "is_shared", is_shared)
    tier.look_at_guarded()
    assert questions.total() == 3 and tier.guarded_bytes() == 192 * KIB
    price = 3 * SLOW_QUESTION_SECONDS
    for asked in (4, 5, 6, 6, 6):  # one takes longer than a look may
        tier.look_at_guarded()
        assert questions.total() == asked
    for descriptor in held:
        os.close(descriptor)
    tier.look_at_guarded()
    assert questions.total() == 6 and tier.guarded_bytes() == 192 * KIB
    now += 2 * RARELY * price
    price = 0.0
    tier.look_at_guarded()
    assert questions.total() == 9 and tier.guarded_bytes() == 0
    tier.close()
