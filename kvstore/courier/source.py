"""Slots of the sidecar, for one reservation: filled by a source, checked here, adopted by the sidecar; and the contract
of sources.

    reserve > a source fills the slots, block by block > each frame is checked > adopted as they come > the rest aborted

A frame counts when its header names this block and part and the payload has the header's digests; the sidecar then
checks the header's MAC. Slots that a source's call may still write stay lent; the reservation ends when the last of
these calls has returned.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kvstore.block.account import HitTier, MissReason
from kvstore.client.connection import Unavailable
from kvstore.courier.figures import Figures
from kvstore.courier.link import ANSWER_SECONDS, CourierSpace
from kvstore.peers.reader import FrameCheck, FrameChecks
from kvstore.pool.choice import PEER_PRIOR, SourcePrior
from kvstore.protocol import messages as m
from kvstore.protocol.courier import MAX_ADOPTED
from kvstore.protocol.messages import ReserveReply
from tiering.clock import Clock
from tiering.frame import HEADER_BYTES

ADOPT_BYTES = 8 << 20
"""Adopted together: the engine reads these while the rest is on its way. The first block is adopted at once."""


class Forged(Exception):
    """The sidecar refused a frame as altered or misplaced; the text is one line for people."""


class Lending:
    """Memory that calls use, besides its holder: `over` is called once, when all have returned it. Thread-safe."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over
        self._lock = threading.Lock()
        self._count = 1  # to its holder

    def lend(self) -> None:
        """A call may use it until `returned`."""
        with self._lock:
            self._count += 1

    def returned(self) -> None:
        """A call, or the holder, is done with it. Any thread."""
        with self._lock:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self._over()
            del self._over  # a holder's own: its memory is unmapped now, not when the garbage collector comes


class ReservedWindow(Lending):
    """A reservation, as far as its blocks are consecutive. One thread fills it, and has it `returned` in the end; calls
    of its source may use the slots for longer."""

    def __init__(self, space: CourierSpace, reply: ReserveReply, keys: Sequence[bytes], tier: HitTier) -> None:
        """keys: of the whole chain. reply: of a reservation that begins with the chain's first missing block."""
        super().__init__(self._abort_rest)
        self.space = space
        self.tier = tier
        self.first = reply.blocks[0]
        count = next((at for at, one in enumerate(reply.blocks) if one != self.first + at), len(reply.blocks))
        columns = [column[:count] for column in space.run.frames(reply.places, writable=True)]
        count = min(map(len, columns), default=0)
        self.keys = list(keys[self.first : self.first + count])
        self.slots = [column[block] for block in range(count) for column in columns]
        self.adopted = 0
        """Blocks that are readable."""
        self.failed: Forged | Unavailable | None = None
        """Why no more is adopted: the source's fault, or the sidecar's."""
        self._reservation = reply.reservation
        self._blocks = len(reply.blocks)
        self._parts = len(columns)
        self._headers: list[bytes] = []  # of checked frames that are not adopted yet
        self._checks = FrameChecks(space.grant.stamps, self.keys)
        self.refused = False
        """Whether a frame came that does not belong in its slot."""

    @property
    def blocks(self) -> int:
        return len(self.keys)

    def check_of(self, at: int) -> FrameCheck:
        """The check of the frame that is to arrive in slot `at`."""
        return self._checks.of(at, self.slots[at])

    def check(self, at: int, frame: memoryview) -> bool:
        """Whether this is the frame that belongs in slot `at`; frames come in order. Adopts now and then."""
        return self.take(frame, is_right=self._checks(at, frame))

    def take(self, frame: memoryview, *, is_right: bool) -> bool:
        """The same, of the next frame, which was checked."""
        if not is_right:
            self.refused = True
            return False
        self._headers.append(bytes(frame[:HEADER_BYTES]))
        whole, further = divmod(len(self._headers), self._parts)
        size = whole * self.space.block_bytes
        if whole and not further and (not self.adopted or size >= ADOPT_BYTES or whole >= MAX_ADOPTED):
            self.adopt()
        return self.failed is None

    def adopt(self) -> None:
        """Have the sidecar adopt the checked frames. Faults are in `failed`."""
        whole = len(self._headers) // self._parts
        if not whole or self.failed is not None:
            return
        headers, self._headers = self._headers[: whole * self._parts], self._headers[whole * self._parts :]
        try:
            for part in range(self._parts):
                verb = m.Adopt(self._reservation, part, self.adopted, headers[part :: self._parts], self.tier)
                answer = self.space.run.connection.answer(verb, ANSWER_SECONDS).answer
                if isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT:
                    raise Forged(answer.text)
                if not isinstance(answer, m.Counted):
                    text = answer.text if isinstance(answer, m.Failed) else "an answer of another kind"
                    raise Unavailable(MissReason.UNREACHABLE, text)
                done = answer.blocks
        except (Forged, Unavailable) as failed:
            self.failed = failed
            return
        if done < self.adopted + whole:  # the reservation is over: dropped, purged or expired
            self.failed = Unavailable(MissReason.DISABLED, "the sidecar gave the slots to another client")
        self.adopted = max(self.adopted, min(done, self.adopted + whole))

    def _abort_rest(self) -> None:
        if self.adopted < self._blocks:
            self.space.run.abort(self._reservation)


@dataclass(frozen=True, slots=True)
class Filled:
    """A source's result for a window. reason: why there are no more blocks; None if it is full."""

    reason: MissReason | None = None
    detail: str = ""


NOT_WANTED = Filled(MissReason.DISABLED, "no engine waits for it any more")


class Stops:
    """Ends what a fetch waits for, from another thread. over: the fetch is to end."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None

    def waits_for(self, stop: Callable[[], None] | None) -> None:
        """A wait begins. stop: ends it; None once it is over."""
        with self._lock:
            self._stop = stop
        if stop is not None and self.over.is_set():
            stop()

    def end(self) -> None:
        self.over.set()
        with self._lock:
            stop = self._stop
        if stop is not None:
            stop()


class Source(ABC):
    """One source, for one fetch. counted_as: in figures and speeds. name: for people. publishes: whether a ticket says
    that it will have more soon."""

    tier: HitTier
    prior: SourcePrior = PEER_PRIOR

    def __init__(
        self, counted_as: Hashable, name: str, figures: Figures, clock: Clock, *, publishes: bool = False
    ) -> None:
        self.name, self.publishes = name, publishes
        self._counted_as, self._figures, self._clock = counted_as, figures, clock

    def fill(self, window: ReservedWindow, stops: Stops) -> Filled:
        """Bring the blocks of the window that the source has, and have the sidecar adopt them."""
        began_at = self._clock.monotonic_seconds()
        filled = self._read(window, stops)
        window.adopt()
        if isinstance(window.failed, Forged):
            self._figures.refused(self._counted_as, "header")
            filled = self._forged(str(window.failed))
        if window.adopted:
            now, size = self._clock.monotonic_seconds(), window.adopted * window.space.block_bytes
            self._figures.came(self._counted_as, window.adopted, size)
            self._figures.speeds.learn(self._counted_as, size, now - began_at, now, self.prior)
        return filled

    @abstractmethod
    def _read(self, window: ReservedWindow, stops: Stops) -> Filled:
        """Fill slots in order, each frame checked by the window."""

    def _forged(self, detail: str) -> Filled:
        """The sidecar refused what came."""
        return Filled(MissReason.CORRUPT, detail)
