"""Slots of the sidecar, for one reservation: filled by a source, checked here, adopted by the sidecar.

    reserve > a source fills the slots, block by block > each frame is checked > adopted as they come > the rest aborted

A frame counts when its header names this block and part and the payload has the header's digests; the sidecar then
checks the header's MAC. Slots that a source's call may still write stay lent; the reservation ends when the last of
these calls has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstore.block.account import HitTier, MissReason
from kvstore.client.connection import Unavailable
from kvstore.courier.link import ANSWER_SECONDS, CourierSpace
from kvstore.peers.checks import FrameCheck, FrameChecks
from kvstore.protocol import messages as m
from kvstore.protocol.courier import MAX_ADOPTED
from kvstore.protocol.messages import ReserveReply
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
