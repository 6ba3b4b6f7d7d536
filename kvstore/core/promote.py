"""Promotes blocks to DRAM before a lease is granted.

    pinned, a slot in DRAM > read > verified: MAC, name, generation, every digest > readable from DRAM

Moves run in the queue's threads; the lock is the store's, and is not held while anything is read or hashed. A failed
move means a shorter lease, never an error of a request.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from kvstore.block.account import REASON_OF_FINDING, MissReason
from kvstore.core.rows.below import Lower
from kvstore.core.table import BlockTable
from tiering.clock import Clock
from tiering.counts.tally import CheckedAt
from tiering.faults import NVME_READS
from tiering.frame import HEADER_BYTES, MacKeys, digest, verify_frame
from tiering.move_queue import Move, MoveQueue, Priority
from tiering.nvme.tier import NvmeTier
from tiering.tier import TierMiss

READS = NVME_READS
WINDOW_BLOCKS = 32
"""Blocks promoted at a time."""
WINDOWS_AT_ONCE = 2
"""Windows in flight for one lease: the disk has work while the first one's last blocks are verified."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Promotion:
    """A block being promoted. waiting: leases that wait for it. settled: its slots are in use or were freed."""

    number: int
    row: int
    move: Move | None = None
    waiting: int = 1
    settled: bool = False


@dataclass(slots=True)
class SlotRequest:
    """Blocks that need slots in DRAM; `Store` finds them."""

    namespace: int
    rows: list[int]
    places: list[list[int]]
    filled: int = 0
    cancelled: bool = False


class Promoter:
    """Promotions of one store. All methods are called without the store's lock, unless they say so."""

    def __init__(
        self,
        blocks: BlockTable,
        lower: Lower[NvmeTier],
        queue: MoveQueue,
        keys: MacKeys,
        clock: Clock,
        lock: threading.Lock,
        changed: threading.Condition,
        pin: Callable[[int, Sequence[int]], None],
        unpin: Callable[[int, Sequence[int]], None],
        find_slots: Callable[[SlotRequest], MissReason | None],
    ) -> None:
        """changed: of that lock; notified as each promotion ends."""
        assert blocks.below is not None
        self._blocks = blocks
        self._below = blocks.below
        self._lower = lower
        self._queue = queue
        self._keys = keys
        self._clock = clock
        self._lock = lock
        self._changed = changed
        self._planning = threading.Lock()  # one lease at a time looks for what to promote
        self._pin = pin
        self._unpin = unpin
        self._find_slots = find_slots
        self._promoting: dict[int, Promotion] = {}
        self._numbers = count()
        self.is_over = False  # DRAM was given back, and its tables are void

    def bring_up(self, number: int, rows: Sequence[int], deadline: float) -> MissReason | None:
        """Promote blocks that the caller has pinned, in order; returns why it ended before the last one, or None.

        Moves that were begun go on when the deadline has passed.
        """
        under_way: deque[list[Promotion]] = deque()
        reason: MissReason | None = None
        try:
            for start in range(0, len(rows), WINDOW_BLOCKS):
                if self._clock.monotonic_seconds() >= deadline:
                    return MissReason.DEADLINE
                promotions, reason = self._begin(number, rows[start : start + WINDOW_BLOCKS], deadline)
                under_way.append(promotions)
                if reason is not None:
                    break
                if len(under_way) == WINDOWS_AT_ONCE:
                    late = self._await(under_way[0], deadline)
                    if late is not None:
                        return late
                    self._leave(under_way.popleft())
            for promotions in under_way:
                late = self._await(promotions, deadline)
                if late is not None:
                    return late
            return reason
        finally:
            for promotions in under_way:
                self._leave(promotions)

    def _await(self, promotions: Sequence[Promotion], deadline: float) -> MissReason | None:
        for promotion in promotions:
            assert promotion.move is not None
            if not promotion.move.wait(max(0.0, deadline - self._clock.monotonic_seconds())):
                return MissReason.DEADLINE
            if promotion.move.finding is not None:
                return REASON_OF_FINDING[promotion.move.finding]
        return None

    def _leave(self, promotions: Sequence[Promotion]) -> None:
        """A lease waits for these no more. Those that have not begun and that no other lease waits for give up slot and
        pin now, not once the disk has done all that was queued before."""
        with self._lock:
            for promotion in promotions:
                promotion.waiting -= 1
            unwanted = [promotion.move for promotion in promotions if not promotion.waiting and not promotion.settled]
        for move in unwanted:
            if move is not None:
                move.cancel()

    def _begin(self, number: int, rows: Sequence[int], deadline: float) -> tuple[list[Promotion], MissReason | None]:
        if self._queue.is_down(READS):  # finding slots would evict blocks for nothing
            return [], MissReason.TIER_DOWN
        if not self._planning.acquire(timeout=max(0.0, deadline - self._clock.monotonic_seconds())):
            return [], MissReason.DEADLINE
        try:
            with self._lock:
                under_way = [self._promoting[row] for row in rows if row in self._promoting]
                for promotion in under_way:
                    promotion.waiting += 1
                missing = [row for row in rows if row not in self._promoting and not self._blocks.is_above(row)]
            lift = SlotRequest(number, missing, [[] for _ in self._blocks.spaces[number].classes])
            try:
                reason = self._find_slots(lift) if missing else None
            except BaseException:  # interrupted
                with self._lock:
                    for row in missing[: lift.filled]:
                        self._blocks.not_promoted(row)
                raise
            with self._lock:
                promotions = [Promotion(number, row) for row in missing[: lift.filled]]
                self._pin(number, missing[: lift.filled])
                self._promoting.update((promotion.row, promotion) for promotion in promotions)
            for promotion in promotions:
                # A new key: the row's last move may have made its block readable and not have ended yet.
                key = ("up", promotion.row, next(self._numbers))
                promotion.move = self._queue.submit(key, READS, Priority.WAITING, self._reading(promotion))
                promotion.move.then(self._settling(promotion))
            if missing:
                extra = {"namespace": number, "blocks": len(promotions), "of": len(missing), "why_not": reason}
                _log.debug("bringing up to dram", extra=extra)
            return under_way + promotions, reason
        finally:
            self._planning.release()

    def _reading(self, promotion: Promotion) -> Callable[[], None]:
        def read() -> None:
            blocks, lower, row = self._blocks, self._lower, promotion.row
            digests = []
            for part, stamp in enumerate(blocks.spaces[promotion.number].stamps):
                target = blocks.dram.reserved_span(blocks.residency.place(row, part)).view
                lower.tier.read(lower.residency.place(row, part), target)
                verify_frame(target, self._keys, stamp, blocks.index.key(row), lower.residency.generation(row))
                digests.append(digest(target[:HEADER_BYTES]))
            with self._lock:
                blocks.tally.checked(CheckedAt.LOAD, blocks.spaces[promotion.number].block_bytes, is_sound=True)
                if not self.is_over:
                    blocks.promoted(row, digests)
                self._end(promotion)

        return read

    def _settling(self, promotion: Promotion) -> Callable[[Move], None]:
        def settle(move: Move) -> None:
            with self._lock:
                if promotion.settled:
                    return
                if not self.is_over:
                    self._blocks.not_promoted(promotion.row)
                    if move.finding is TierMiss.CORRUPT:
                        size_bytes = self._blocks.spaces[promotion.number].block_bytes
                        self._blocks.tally.checked(CheckedAt.LOAD, size_bytes, is_sound=False)
                    if move.finding in (TierMiss.CORRUPT, TierMiss.RETIRED):
                        self._below.quarantine(promotion.row, move.finding)
                self._end(promotion)

        return settle

    def _end(self, promotion: Promotion) -> None:
        promotion.settled = True
        del self._promoting[promotion.row]
        self._unpin(promotion.number, [promotion.row])
        self._changed.notify_all()

    def quarantine_below(self, row: int, stands: Callable[[], bool], why: TierMiss = TierMiss.CORRUPT) -> bool:
        """Quarantine a block on NVMe that the scrubber found damaged. If DRAM has it, it is dirty again.

        stands: asked under the lock whether the damaged frame is still the block's. Returns False if not, or if a
        promotion is reading the block and will find out itself.
        """
        with self._planning, self._lock:  # `_planning`: no lease may be looking for slots for this block
            if row in self._promoting or not self._below.has(row) or not stands():
                return False
            self._below.quarantine(row, why)
            return True

    def is_moving(self, number: int) -> bool:
        """Whether a block of a namespace is being promoted. Under the lock."""
        return any(promotion.number == number for promotion in self._promoting.values())

    @property
    def promoting(self) -> set[int]:
        """Rows being promoted."""
        return set(self._promoting)
