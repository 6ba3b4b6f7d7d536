"""The scrub's schedule: which frames are read again, and when, so that rot is found before a request needs them.

    pass      every readable frame once, slab by slab; a new one begins `pass_seconds` after the last one began
    window    the next few frames of a pass; no other is begun before time has paid for it: bytes / rate
    visited   the outcome for each frame. One that cannot be read is skipped, and given up after several passes

The cursor is a place, not a list of frames: slabs and frames may come and go. Frames that came after a pass began may
be left to the next one. Decides and counts; must never read, wait or change a frame itself. Not thread-safe, except
`usage`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum

from tiering.clock import Clock
from tiering.nvme.tier import NvmeTier, Resident
from tiering.tier import ScrubUsage, place_of

LEAST_CHARGE_BYTES = 64 << 10
"""A smaller frame is charged as one of this size: it takes about as long."""

GOLDEN = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly: so are the starts of passes that are all cut short."""


class CheckResult(Enum):
    """The outcome for a frame. `GONE`: evicted, moved or not listed yet; none of the scrub's business."""

    GOOD = "good"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ScrubLimits:
    """Named bounds of a scrub.

    bytes_per_second: over any stretch of time at most that, and one window, is read. window_bytes: read in one go, or
    one frame if it is larger. first_seconds: until the first pass. pass_seconds: from the beginning of one pass to that
    of the next, at least. pause_seconds: without reading after a fault of the tier. unreadable_passes: a frame that
    cannot be read in so many passes in a row is given up. suspects: frames of one pass that are remembered for that.
    """

    bytes_per_second: int
    window_bytes: int = 1 << 20
    first_seconds: float = 60.0
    pass_seconds: float = 86400.0
    pause_seconds: float = 30.0
    unreadable_passes: int = 3
    suspects: int = 4096


class Scrub:
    """One pass after another over the frames of a tier.

    1. `window` gives the next frames, or none as long as `seconds_until_due` is not zero. 2. Each frame read is
    reported to `spent`, and its verdict to `visited`, in the order of the window. Frames of a window
       that were not visited are in the next one.
    """

    def __init__(self, frames: NvmeTier, limits: ScrubLimits, clock: Clock, turn: int = 0) -> None:
        """turn: another number for each start of the program; it decides at which slab passes begin, so that a program
        that never runs for a whole pass also reaches all of its slabs in time."""
        self._frames = frames
        self._limits = limits
        self._clock = clock
        self._turn = turn
        self._due = self._next_pass = clock.monotonic_seconds() + limits.first_seconds
        self._window_began = self._pass_began = self._due
        self._spent_bytes = 0
        self._ranges: deque[tuple[int, int]] = deque()  # places that this pass has yet to come to
        self._in_pass = False
        self._good_in_pass = False
        self._unread: dict[int, Resident] = {}  # unreadable in this pass, by place
        self._unread_passes: dict[int, int] = {}
        self._given_up: list[Resident] = []
        self._passes = self._verified = self._bytes = self._damaged = self._unreadable = 0
        self.mended = 0
        self._last_pass_seconds: float | None = None
        self._last_pass_ended: float | None = None
        self._last_pass_frames: int | None = None
        self._verified_before = 0  # this pass began

    def set_rate(self, bytes_per_second: int) -> None:
        """Applies to later reads."""
        self._limits = replace(self._limits, bytes_per_second=bytes_per_second)

    def seconds_until_due(self) -> float:
        at = self._due if self._in_pass else max(self._due, self._next_pass)
        return max(0.0, at - self._clock.monotonic_seconds())

    def window(self) -> list[Resident]:
        """The next frames to read; none if nothing is due, or if a pass just ended."""
        if self.seconds_until_due() > 0:
            return []
        now = self._clock.monotonic_seconds()
        if not self._in_pass:
            self._begin(now)
        while self._ranges:
            window = self._frames.residents(*self._ranges[0], self._limits.window_bytes)
            if window:
                self._window_began, self._spent_bytes = now, 0
                return window
            self._ranges.popleft()
        self._end(now)
        return []

    def spent(self, frame: Resident) -> None:
        """A frame was read, maybe not for the first time: the next window is due that much later."""
        self._spent_bytes += max(frame.frame_bytes, LEAST_CHARGE_BYTES)
        self._due = max(self._due, self._window_began + self._spent_bytes / self._limits.bytes_per_second)

    def visited(self, frame: Resident, verdict: CheckResult) -> None:
        """Move the cursor behind this frame."""
        first, stop = self._ranges[0]
        assert first <= frame.place < stop, "visited in the order of the window"
        self._ranges[0] = frame.place + 1, stop
        if verdict in (CheckResult.GOOD, CheckResult.DAMAGED):
            self._verified += 1
            self._bytes += frame.frame_bytes
            self._good_in_pass = True
        if verdict is CheckResult.DAMAGED:
            self._damaged += 1
        elif verdict is CheckResult.UNREADABLE:
            self._unreadable += 1
            if len(self._unread) < self._limits.suspects:
                self._unread[frame.place] = frame

    def pause(self, seconds: float) -> None:
        self._due = max(self._due, self._clock.monotonic_seconds() + seconds)

    def given_up(self) -> list[Resident]:
        """Frames that could not be read in too many passes, each reported once."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def usage(self) -> ScrubUsage:
        return ScrubUsage(
            bytes_per_second=self._limits.bytes_per_second,
            passes=self._passes,
            frames=self._verified,
            bytes=self._bytes,
            damaged=self._damaged,
            unreadable=self._unreadable,
            mended=self.mended,
            in_pass=self._in_pass,
            last_pass_seconds=self._last_pass_seconds,
            last_pass_ended=self._last_pass_ended,
            last_pass_frames=self._last_pass_frames,
        )

    def _begin(self, now: float) -> None:
        self._in_pass, self._pass_began, self._good_in_pass = True, now, False
        self._verified_before = self._verified
        numbers = self._frames.slab_numbers()
        if numbers:
            first = numbers[int(self._turn * GOLDEN % 1 * len(numbers))]
            self._ranges.append((place_of(first, 0), place_of(numbers[-1] + 1, 0)))
            self._ranges.append((0, place_of(first, 0)))

    def _end(self, now: float) -> None:
        self._in_pass = False
        self._next_pass = max(now, self._pass_began + self._limits.pass_seconds)
        self._passes += 1
        self._last_pass_seconds = now - self._pass_began
        self._last_pass_ended = self._clock.wall_seconds()
        self._last_pass_frames = self._verified - self._verified_before
        if self._good_in_pass:  # else it is the tier that cannot be read, which says nothing about any frame
            passes = {place: self._unread_passes.get(place, 0) + 1 for place in self._unread}
            hopeless = [place for place, count in passes.items() if count >= self._limits.unreadable_passes]
            self._given_up += [self._unread[place] for place in hopeless]
            self._unread_passes = {place: count for place, count in passes.items() if place not in hopeless}
        self._unread.clear()
