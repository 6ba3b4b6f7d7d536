"""A disk that hangs or only fails: requests are answered within their deadline, and DRAM goes on as if nothing were.

Calls to the simulated disk stand at a gate until the test opens it. What is asserted are counts and reasons; times are
asserted in seconds where the bound is milliseconds, so that a busy machine changes nothing.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.block.account import HitTier, MissReason
from kvstore.client import handle
from kvstore.config import Limits
from kvstore.core import levels
from model.store_model import WHOLE, OpenStore, Owned, Prompt
from simulation.two_tiers import LATE_SECONDS, Disk, Sizes, bugs, load, open_two_tiers, put, wait_until_idle
from tiering.files import DirectoryLock
from waiting import wait_until

SIZES = Sizes(dram=1 << 20, nvme=16 << 20, slab=1 << 20)
"""DRAM has room for 48 blocks, three in each extent; NVMe for all that is put here."""
LIMITS = Limits(pinned_fraction=0.8, close_seconds=0.2)
DEADLINE_MS = 50
HOT = Prompt((0, 1, 2, 3))
COLD = [Prompt((10 + number, 1, 2, 3)) for number in range(12)]


class SlowDisk(Disk):
    """A disk some of whose calls hang or fail, as long as the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.before_files = self.hook
        self.counts: Counter[str] = Counter()
        self.hanging: set[str] = set()
        self.failing: set[str] = set()
        self.gate = threading.Event()
        self.at_the_gate = threading.Semaphore(0)

    def hook(self, call: str) -> None:
        self.counts[call] += 1
        if call in self.hanging:
            self.at_the_gate.release()
            assert self.gate.wait(60)
        if call in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def wait_for(self, calls: int) -> None:
        """Until that many calls stand at the gate."""
        for _ in range(calls):
            assert self.at_the_gate.acquire(timeout=60)

    def mend(self) -> None:
        self.hanging.clear()
        self.failing.clear()
        self.gate.set()


class Room:
    """A store on such a disk, everything cold in NVMe alone, and `HOT` in DRAM."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk = SlowDisk()
        self.opened: OpenStore = open_two_tiers(directory, self.disk, SIZES, LIMITS)
        assert self.opened.store.warmed(60)
        self.space: Owned = self.opened.namespace("a", WHOLE)
        for prompt in (*COLD, HOT):
            assert self.put(prompt, "disk") is None
        self.opened.core.evict(1000)
        assert self.load(HOT, 30_000) == (4, None)
        self.disk.counts.clear()

    def put(self, prompt: Prompt, durability: str = "volatile") -> MissReason | None:
        return put(self.space, prompt, durability)

    def fill(self, prompt: Prompt) -> MissReason | None:
        """A volatile put. What is being written down at that moment may be all that could make room."""
        reason = self.put(prompt)
        if reason is MissReason.DEADLINE:
            wait_until_idle(self.opened.core)
            reason = self.put(prompt)
        return reason

    def load(self, prompt: Prompt, deadline_ms: float = DEADLINE_MS) -> tuple[int, MissReason | None]:
        return load(self.space, prompt, deadline_ms)

    def try_again(self) -> None:
        """Long enough for an open breaker; the first move that is let through decides."""
        self.opened.clock.advance(60)  # type: ignore[attr-defined]
        self.load(COLD[0], 30_000)
        self.put(Prompt((999,)), "disk")
        wait_until_idle(self.opened.core)

    def is_well(self) -> None:
        """Everything is back: no move, pin or slot is left over, and every block can be read."""
        core = self.opened.core
        wait_until_idle(core)
        assert not bugs(core), bugs(core)
        core.check()
        usage = core.usage()
        assert (usage.leases, usage.pinned_bytes, usage.dram.reserved) == (0, 0, 0)
        self.try_again()
        for prompt in (*COLD, HOT):
            assert self.load(prompt, 30_000) == (4, None)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    yield room
    room.disk.mend()
    room.opened.close()


def test_reads_that_hang_cost_their_own_deadline_and_dram_nothing(room: Room) -> None:
    room.disk.hanging.add("read")
    assert room.load(COLD[0]) == (0, MissReason.DEADLINE)
    room.disk.wait_for(4)
    for prompt in COLD:
        assert room.load(prompt) == (0, MissReason.DEADLINE)
        assert room.load(HOT) == (4, None), "what DRAM has is there while reads hang"
        assert room.put(Prompt((100, 1))) is None
    assert room.disk.counts["read"] == 4, "there are four threads, and all of them still stand at the gate"
    usage = room.opened.core.usage()
    assert usage.pinned_bytes == 4 * room.opened.blocks.spaces[0].block_bytes, "only what is being read is pinned"
    assert usage.dram.reserved == 4
    room.opened.core.check()
    room.disk.mend()
    room.is_well()


def test_when_everything_hangs_for_long_nobody_waits_any_more(room: Room) -> None:
    room.disk.hanging.add("read")
    assert room.load(COLD[0]) == (0, MissReason.DEADLINE)
    room.disk.wait_for(4)
    room.opened.clock.advance(10)  # type: ignore[attr-defined]
    for prompt in COLD:
        assert room.load(prompt, 60_000) == (0, MissReason.TIER_DOWN), "in far less than its deadline"
    assert room.load(HOT) == (4, None)
    room.disk.mend()
    room.is_well()


def test_reads_that_fail_open_the_breaker_and_are_not_tried_again(room: Room) -> None:
    room.disk.failing.add("read")
    for prompt in COLD:
        assert room.load(prompt, 60_000) == (0, MissReason.TIER_DOWN)
        assert room.load(HOT) == (4, None)
    asked = room.disk.counts["read"]
    assert 5 <= asked <= 20, "five faults open it; what runs at that moment may add some"
    for number in range(60):
        assert room.fill(Prompt((700 + number, 1))) is None  # DRAM is full now
    wait_until_idle(room.opened.core)
    held = room.opened.core.usage().dram.used
    for prompt in COLD:
        assert room.load(prompt, 60_000) == (0, MissReason.TIER_DOWN)
    assert room.disk.counts["read"] == asked, "nobody asks a disk that is known to fail"
    assert room.opened.core.usage().dram.used == held, "nor makes room for what it will not give"
    assert room.put(Prompt((100, 1)), "disk") is None, "it can still be written"
    room.opened.clock.advance(6)  # type: ignore[attr-defined]
    assert room.load(COLD[0], 60_000) == (0, MissReason.TIER_DOWN)
    assert room.disk.counts["read"] > asked, "after a while one read finds out"
    room.disk.mend()
    room.is_well()


@pytest.mark.parametrize("call", ["write", "sync", "create"])
def test_a_disk_that_cannot_be_written_can_be_read(room: Room, call: str) -> None:
    room.disk.failing.add(call)
    reasons = Counter(room.put(Prompt((200 + number, 1, 2)), "disk") for number in range(30))
    assert set(reasons) <= {None, MissReason.TIER_DOWN} and reasons[MissReason.TIER_DOWN] >= 5, reasons
    for prompt in COLD:
        assert room.load(prompt, 30_000) == (4, None)
    assert all(room.fill(Prompt((300 + number, 1))) is None for number in range(30)), "volatile puts go on"
    room.disk.mend()
    room.try_again()
    assert room.put(Prompt((400, 1)), "disk") is None, "and it goes on where it stopped, without a restart"
    room.is_well()


def test_a_spill_that_fails_loses_nothing_of_what_dram_has(room: Room) -> None:
    """What could not be written down goes down later, at the latest with the close."""
    room.disk.failing.add("write")
    kept = [Prompt((500 + number, 1)) for number in range(12)]
    for prompt in kept:
        assert room.put(prompt) is None
    wait_until_idle(room.opened.core)
    assert not bugs(room.opened.core), bugs(room.opened.core)
    there = [prompt for prompt in kept if room.space.match(prompt).blocks == 2]
    assert len(there) == len(kept), "DRAM has room for them"
    room.disk.mend()
    room.opened.clock.advance(6)  # type: ignore[attr-defined]
    room.opened.close()
    room.opened = open_two_tiers(room.directory, room.disk, SIZES, LIMITS)
    assert room.opened.store.warmed(60)
    room.space = room.opened.namespace("a", WHOLE)
    for prompt in there:
        assert room.space.match(prompt).tiers == ((HitTier.NVME, 2),)
        assert room.load(prompt, 30_000) == (2, None)


@pytest.mark.parametrize(
    ("how", "why"), [("failing", "the disk takes no writes"), ("hanging", "limits.close_seconds=0.2 was over")]
)
def test_a_close_says_what_it_could_not_write_down(
    room: Room, how: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(room.disk, how).add("write")
    for number in range(3):
        assert room.put(Prompt((500 + number, 1))) is None
    room.opened.close()
    (record,) = [one for one in caplog.records if one.name == "kvstore.core.levels"]
    assert record.levelname == "WARNING"
    assert re.match(
        rf"closing: of what memory alone held 0 blocks \(0 B\) written to NVMe; 6 blocks \(.* KiB\) not, since {why}",
        record.message,
    ), record.message
    core = room.opened.core
    room.disk.mend()
    assert core._levels is not None and core._levels.close(30)
    assert not bugs(core), "what comes back from the disk after the close finds no tables, and needs none"


class DyingDisk(SlowDisk):
    """Takes so many more writes."""

    left = 1 << 30

    def hook(self, call: str) -> None:
        if call == "write":
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_is_to_be_kept_is_written_first_at_a_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the disk stops, nothing else is there if not all of that is."""
    monkeypatch.setattr(levels, "GROUP_BLOCKS", 4)
    others, kept = [Prompt((500 + number, 1, 2, 3)) for number in range(3)], Prompt((600, 1, 2, 3))
    found = []
    for writes in range(1, 100):
        directory, disk = tmp_path / str(writes), DyingDisk()
        directory.mkdir()
        opened = open_two_tiers(directory, disk, SIZES, LIMITS)
        space = opened.namespace("a", WHOLE)
        assert [put(space, prompt) for prompt in (*others, kept)] == [None] * 4
        space.handle.put(kept.token_ids, space.pages(kept.tokens).pages, ttl=600)
        disk.left = writes
        opened.close()
        disk.left = 1 << 30
        opened = open_two_tiers(directory, disk, SIZES, LIMITS)
        assert opened.store.warmed(60)
        space = opened.namespace("a", WHOLE)
        found.append((space.match(kept).blocks, sum(space.match(prompt).blocks for prompt in others)))
        opened.close()
        if found[-1] == (4, 12):
            break
    assert found[-1] == (4, 12) and (4, 0) in found
    assert all(mine == 4 or not theirs for mine, theirs in found), found


@pytest.mark.slow
def test_writes_that_hang_do_not_stop_puts_or_reads(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "DURABLE_SECONDS", 0.1)
    room.disk.hanging.add("write")
    waiting = [Prompt((600 + number,)) for number in range(8)]
    assert {room.put(prompt, "disk") for prompt in waiting} == {MissReason.DEADLINE}
    room.disk.wait_for(1)
    for number in range(60):
        assert room.put(Prompt((700 + number, 1))) is None, "DRAM evicts what is not being written"
        assert room.load(COLD[number % 12], 30_000) == (4, None), "a thread is left for reads"
    room.opened.core.check()
    levels = room.opened.core._levels
    assert levels is not None and len(levels._queue._moves) < 10, "what is refused leaves nothing in the queue"
    assert sum(len(move.callbacks) for move in levels._queue._moves.values()) < 10
    room.disk.mend()
    room.is_well()


@pytest.mark.parametrize("call", ["read", "write", "sync"])
def test_a_close_on_a_disk_that_hangs_ends(room: Room, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "DURABLE_SECONDS", 0.1)
    room.disk.hanging.add(call)
    if call == "read":
        assert room.load(COLD[0]) == (0, MissReason.DEADLINE)
    else:
        assert room.put(Prompt((600,)), "disk") is MissReason.DEADLINE
    room.disk.wait_for(1)
    start = time.monotonic()
    room.opened.close()
    assert time.monotonic() - start < 4 * LIMITS.close_seconds + LATE_SECONDS
    assert room.load(HOT) == (0, MissReason.DISABLED)
    with pytest.raises(BlockingIOError):
        DirectoryLock(room.directory)  # the call that hangs may have its effect yet
    room.disk.mend()
    wait_until(lambda: not room.opened.core.is_stuck)
    room.opened.close()
    room.opened = open_two_tiers(room.directory, room.disk, SIZES, LIMITS)
    assert room.opened.store.warmed(60)
    room.space = room.opened.namespace("a", WHOLE)
    room.is_well()
