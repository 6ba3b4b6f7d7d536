"""Scrubbing: re-reads NVMe in the background, so that rot is found before a request needs the block.

    a frame     read > verified as for a request: MAC, stamp, name, generation, every digest
    damaged     read and verified once more > its block is quarantined on NVMe > written again if DRAM has it
    unreadable  a fault of the tier; met again in the next pass, and after the third one treated as damaged

No pin is taken and no lock is held while a frame is read or hashed. A frame that was evicted meanwhile is no damage:
before a block is quarantined, the tier confirms that the very frame still stands there. Windows of frames run in the
move queue at the lowest priority, one at a time, and end early when a request waits. Reading changes no block's place
in the eviction order. Must never touch DRAM's copy of a block.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.block.account import MissReason
from kvstore.core.levels import Levels
from kvstore.core.recovery import Recovery
from kvstore.core.shared import Shared
from kvstore.core.table import Lower
from tiering.errors import BlockCorrupt, BlockMissing, EpochRetired, TierUnavailable
from tiering.faults import NVME_READS
from tiering.frame import Stamp, verify_frame
from tiering.move_queue import Move, Priority
from tiering.nvme.scrub import CheckResult, Scrub, ScrubLimits
from tiering.nvme.slab import slab_name
from tiering.nvme.slab_files import private_pages
from tiering.nvme.tier import NvmeTier, Resident
from tiering.tier import TierMiss, extent_of, slot_of

RECHECKS = 3
"""How often a failed frame is read again if evictions in its slab leave it undecided."""

YIELD_SECONDS = 0.1
"""Pause after the scrubber saw a request wait."""

LOADING_LOOK_SECONDS = 0.2
"""How often it checks whether recovery is over."""

MEND_SECONDS = 10.0
"""Time to write one block again."""

MENDS = 1024
"""Blocks queued for rewriting; others are written when DRAM gets full or the store is closed."""

SHORTEST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 0.01, 3600.0

LINES_PER_PASS = 16


_log = logging.getLogger(__name__)


class Aim(NamedTuple):
    """What a frame's header must say."""

    row: int
    key: bytes
    generation: int
    stamp: Stamp


@dataclass(slots=True)
class ReadWindow:
    """Frames that one move reads; it removes those it has visited."""

    frames: deque[Resident]
    move: Move | None = None
    failed: bool = False  # the first frame could not be read
    made_way: bool = False  # a request waits


class Scrubbing:
    """The scrubber of one store. The lock is the store's."""

    def __init__(
        self, shared: Shared, lower: Lower[NvmeTier], levels: Levels, recovery: Recovery, limits: ScrubLimits
    ) -> None:
        self._blocks, self._lower, self._levels, self._recovery = shared.blocks, lower, levels, recovery
        self._keys, self._clock, self._lock, self._limits = shared.blocks.keys, shared.clock, shared.lock, limits
        self.scrub = Scrub(lower.tier, limits, shared.clock, lower.tier.session.number)
        self._window: ReadWindow | None = None
        self._buffer = memoryview(b"")
        self._to_mend: dict[int, int] = {}  # row -> generation: lost on NVMe, good in DRAM
        self._next_mend = 0.0
        self._lines = 0
        self._wake = threading.Event()
        self.closing = False

    def start(self) -> None:
        """Scrub in a thread from now on, until `close` or until the store is garbage-collected."""
        wake = self._wake
        reference = weakref.ref(self, lambda _: wake.set())
        threading.Thread(target=_drive, args=(reference, wake), name="kv-scrub", daemon=True).start()

    def close(self) -> None:
        """Start no further frame. Returns at once."""
        with self._lock:
            self.closing = True
        self._wake.set()

    # Driving -------------------------------------------------------------------------------------------------------

    def step(self) -> float:
        """Do what is due; returns the seconds until more is due, unless the thread is woken earlier."""
        if self._recovery.is_nvme_under_way:
            return max(LOADING_LOOK_SECONDS, self.scrub.seconds_until_due())
        window = self._window
        if window is not None:
            assert window.move is not None
            if not window.move.done:
                return LONGEST_SLEEP_SECONDS
            self._end(window)
        self._mend()
        frames = self.scrub.window()
        for frame in self.scrub.given_up():
            self._give_up(frame)
        if frames:
            self._begin(frames)
            return LONGEST_SLEEP_SECONDS
        if not self.scrub.usage().in_pass:
            self._buffer, self._lines = memoryview(b""), 0
        seconds = self.scrub.seconds_until_due()
        if self._to_mend:
            seconds = min(seconds, self._next_mend - self._clock.monotonic_seconds())
        return min(max(seconds, SHORTEST_SLEEP_SECONDS), LONGEST_SLEEP_SECONDS)

    def _begin(self, frames: Sequence[Resident]) -> None:
        window = self._window = ReadWindow(deque(frames))
        wake = self._wake
        window.move = self._levels.queue.submit("scrub", NVME_READS, Priority.SCRUB, lambda: self._read(window))
        window.move.then(lambda _: wake.set())

    def _end(self, window: ReadWindow) -> None:
        assert window.move is not None
        self._window = None
        if window.failed:
            self.scrub.visited(window.frames[0], CheckResult.UNREADABLE)
            self._tell(window.frames[0], "it cannot be read")
        if window.move.finding is not None:  # a fault, an open breaker, no room in the queue
            self.scrub.pause(self._limits.pause_seconds)
        elif window.made_way:
            self.scrub.pause(YIELD_SECONDS)

    # Reading, in a thread of the queue -----------------------------------------------------------------------------

    def _read(self, window: ReadWindow) -> None:
        window.failed = False
        with self._lock:
            aims = [self._aim(frame) for frame in window.frames]
        for aim in aims:
            if self.closing:
                return
            frame = window.frames[0]
            try:
                verdict = self._verdict(frame, aim) if aim is not None else CheckResult.GONE
            except TierUnavailable:
                window.failed = True
                raise
            window.frames.popleft()
            self.scrub.visited(frame, verdict)
            if window.frames and self._levels.queue.depths()[Priority.WAITING]:
                window.made_way = True
                return

    def _aim(self, frame: Resident) -> Aim | None:
        """What should stand at a place; None if no readable block has it. Under the lock."""
        row, residency, index = frame.row, self._lower.residency, self._blocks.index
        if row < 0 or not residency.is_listed(row) or residency.place(row, frame.part) != frame.place:
            return None
        stamp = self._blocks.spaces[index.namespace_of(row)].stamps[frame.part]
        return Aim(row, index.key(row), residency.generation(row), stamp)

    def _verdict(self, frame: Resident, aim: Aim) -> CheckResult:
        try:
            self._check(frame, aim)
            return CheckResult.GOOD
        except BlockMissing:
            return CheckResult.GONE
        except BlockCorrupt:
            return self._second_look(frame.place)

    def _second_look(self, place: int) -> CheckResult:
        for _ in range(RECHECKS):
            with self._lock:
                frame = next(iter(self._lower.tier.residents(place, place + 1, 0)), None)
                aim = self._aim(frame) if frame is not None else None
            if frame is None or aim is None:
                return CheckResult.GONE
            try:
                self._check(frame, aim)
                return CheckResult.GOOD
            except BlockMissing:
                return CheckResult.GONE
            except EpochRetired:
                self._quarantine(frame, aim, TierMiss.RETIRED)
                return CheckResult.GONE
            except BlockCorrupt as error:
                if self._quarantine(frame, aim):
                    self._tell(frame, str(error))
                    return CheckResult.DAMAGED
        return CheckResult.GONE  # the next pass will see

    def _check(self, frame: Resident, aim: Aim) -> None:
        if len(self._buffer) < frame.frame_bytes:
            self._buffer = private_pages(frame.frame_bytes).view
        view = self._buffer[: frame.frame_bytes]
        self.scrub.spent(frame)
        self._lower.tier.read(frame.place, view)
        verify_frame(view, self._keys, aim.stamp, aim.key, aim.generation)

    # Damage --------------------------------------------------------------------------------------------------------

    def _quarantine(self, frame: Resident, aim: Aim, why: TierMiss = TierMiss.CORRUPT) -> bool:
        def stands() -> bool:
            if self.closing or self._lower.tier.residents(frame.place, frame.place + 1, 0) != [frame]:
                return False
            return self._aim(frame) == aim

        if not self._levels.quarantine_below(aim.row, stands, why):
            return False
        with self._lock:
            if len(self._to_mend) < MENDS and self._is_lost(aim.row, aim.generation):
                self._to_mend[aim.row] = aim.generation
        return True

    def _give_up(self, frame: Resident) -> None:
        with self._lock:
            now = next(iter(self._lower.tier.residents(frame.place, frame.place + 1, 0)), None)
            aim = self._aim(now) if now is not None and now.row == frame.row else None
        if now is not None and aim is not None and self._quarantine(now, aim):
            self._tell(frame, f"it could not be read in {self._limits.unreadable_passes} passes; quarantined")

    def _is_lost(self, row: int, generation: int) -> bool:
        """Whether DRAM has the block and NVMe does not. Under the lock."""
        return self._blocks.stands(row, generation) and not self._blocks.is_below(row)

    def _mend(self) -> None:
        if not self._to_mend or self._clock.monotonic_seconds() < self._next_mend:
            return
        index = self._blocks.index
        with self._lock:
            self._to_mend = {row: one for row, one in self._to_mend.items() if self._is_lost(row, one)}
            chains = [
                (row, index.namespace_of(row), [index.key(one) for one in index.chain(row)[::-1]])
                for row in sorted(self._to_mend, key=index.depth)
            ]
        for row, number, chain in chains:
            if self.closing:
                return
            _, reason = self._levels.persist(number, chain, MEND_SECONDS)
            if reason is None:
                self.scrub.mended += 1
                del self._to_mend[row]
                continue
            self._next_mend = self._clock.monotonic_seconds() + self._limits.pause_seconds
            if reason is not MissReason.EVICTED:  # an ancestor is lost in both tiers: a put may heal it
                return

    def _tell(self, frame: Resident, what: str) -> None:
        if self._lines < LINES_PER_PASS:
            self._lines += 1
            _log.warning("scrub: %s, slot %d: %s", slab_name(extent_of(frame.place)), slot_of(frame.place), what)


def _drive(reference: weakref.ref[Scrubbing], wake: threading.Event) -> None:
    """The scrubber's thread. It holds no reference while it sleeps, so that an unused store can be collected."""
    while True:
        scrubbing = reference()
        if scrubbing is None or scrubbing.closing:
            return
        seconds = scrubbing.step()
        del scrubbing
        wake.wait(seconds)
        wake.clear()
