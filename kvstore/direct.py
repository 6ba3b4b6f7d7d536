"""Direct reads: blocks that NVMe has, read past DRAM into memory of the reader's (floor 2).

For a reader in this process, where DRAM is full of blocks that must stay: its lease goes on with blocks that are kept
on NVMe, and `fetch` brings each of them, verified, into pages that belong to nobody else: from DRAM if it happens to be
there too, else from the disk. Nothing of it pins or takes a slot in DRAM. Who reads through a socket has a shorter
lease instead.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count, takewhile

from kvstore.blocks import Blocks, Lower
from kvstore.config import Limits
from kvstore.door import DirectReply, FetchReply
from kvstore.lease import LeaseRecord, LeaseTable
from kvstore.levels import READS
from kvstore.miss import REASON_OF_FINDING, MissReason
from tiering.errors import BlockCorrupt, BlockMissing
from tiering.extents import private_pages
from tiering.frame import MacKeys, verify_frame
from tiering.move_queue import Clock, Move, MoveQueue, Priority
from tiering.nvme import NvmeTier
from tiering.tier import NO_PLACE, Finding, FrameSpan

_Name = tuple[bytes, int, list[int]]
"""What a block on NVMe is known by: its key, its generation, and its places by part."""


class DirectReader:
    """`DirectDoor` over one store's NVMe tier. Thread-safe; the lock is the store's."""

    def __init__(
        self,
        blocks: Blocks,
        lower: Lower[NvmeTier],
        queue: MoveQueue,
        keys: MacKeys,
        clock: Clock,
        limits: Limits,
        lock: threading.Lock,
        condemn: Callable[[int, Callable[[], bool]], bool],
        new_number: Callable[[], int] | None = None,
    ) -> None:
        """condemn: quarantines a block on NVMe, as `Levels.condemn_below` does. new_number: as in `LeaseTable`."""
        self._blocks = blocks
        self._lower = lower
        self._queue = queue
        self._keys = keys
        self._clock = clock
        self._limits = limits
        self._lock = lock
        self._condemn = condemn
        self._leases = LeaseTable(limits.lease_seconds, new_number)
        self._abandoned: deque[int] = deque()
        self._numbers = count()
        self._closed = False

    # What a reader calls -------------------------------------------------------------------------------------------

    def lease(self, number: int, keys: Sequence[bytes], first_block: int) -> DirectReply:
        """Keep the blocks from `first_block` on that are on NVMe, up to the first that is not."""
        with self._lock:
            if self._closed or number in self._blocks.dropping:
                return DirectReply(0, first_block, first_block)
            self.run_out()
            chain = self._blocks.index.match(number, keys)
            rows = list(takewhile(self._blocks.is_below, chain[first_block : first_block + self._affordable(number)]))
            if not rows:
                return DirectReply(0, first_block, first_block)
            self._lower.residency.keep(rows)
            self._blocks.used(chain[: first_block + len(rows)][::-1], len(rows))
            lease = self._leases.add(number, first_block, rows, array("q"), self._clock.monotonic_seconds())
            return DirectReply(lease, first_block, first_block + len(rows))

    def fetch(self, lease: int, block: int, blocks: int, deadline_ms: float) -> FetchReply:
        """Whole frames of the next blocks, by block and part, each one verified; and why there are no more."""
        deadline = self._clock.monotonic_seconds() + deadline_ms / 1000
        with self._lock:
            record = self._leases.get(lease)
            if record is None or record.has_lapsed or self._closed:
                return FetchReply([], MissReason.DISABLED if self._closed else MissReason.EVICTED)
            at = block - record.first_block
            rows = record.rows[at : at + blocks]
            sizes = [slot_class.frame_bytes for slot_class in self._blocks.spaces[record.namespace].classes]
            wanted = [(row, self._name(record.namespace, row)) for row in rows]
        targets = [[private_pages(size) for size in sizes] for _ in rows]
        moves = [
            None
            if self._copy(record.namespace, row, name, target)
            else self._queue.submit(
                ("direct", next(self._numbers)),  # a read of one's own: it has a target of its own
                READS,
                Priority.WAITING,
                self._reading(record.namespace, name, target),
                deadline=deadline,
            )
            for (row, name), target in zip(wanted, targets, strict=True)
        ]
        frames: list[list[FrameSpan]] = []
        reason: MissReason | None = None
        for move, target, (row, name) in zip(moves, targets, wanted, strict=True):
            reason = self._outcome(move, record.namespace, row, name, deadline) if move is not None else None
            if reason is not None:
                break
            frames.append(target)
        for move in moves[len(frames) :]:
            if move is not None:
                move.cancel()
        return FetchReply(frames, reason)

    def release(self, lease: int) -> None:
        """Keep them no longer."""
        with self._lock:
            self._release(lease)

    def abandon(self, lease: int) -> None:
        """Release at the next call: a finalizer may run inside this very lock."""
        self._abandoned.append(lease)

    # What the store calls, under the lock --------------------------------------------------------------------------

    def run_out(self) -> None:
        """End the leases that were abandoned or whose time is over."""
        while self._abandoned:
            self._release(self._abandoned.popleft())
        for record in list(self._leases.run_out(self._clock.monotonic_seconds())):
            self._let_loose(record)

    @property
    def has_leases(self) -> bool:
        """Whether anything is kept on NVMe for a reader. Under the lock."""
        return len(self._leases) > 0

    def forget(self, number: int) -> None:
        """A namespace is dropped: its leases end now, and what they would still read is a miss."""
        for record in list(self._leases.lapse_all(number)):
            self._let_loose(record)

    def close(self) -> None:
        """Nothing is leased or read any more."""
        self._closed = True

    def disown(self, lock: threading.Lock) -> None:
        """In a forked child, which has no part in any of this: closed, and under another lock."""
        self._closed = True
        self._lock = lock

    def check(self) -> None:
        """What is kept is what the leases keep."""
        kept: Counter[int] = Counter()
        for record in self._leases.live():
            kept.update(record.rows)
        assert self._lower.residency.kept == kept

    # Inside --------------------------------------------------------------------------------------------------------

    def _affordable(self, number: int) -> int:
        """How many blocks of a namespace may be kept besides those that are: a disk that is all kept takes no more."""
        if len(self._leases) >= self._limits.leases:
            return 0
        spaces, index = self._blocks.spaces, self._blocks.index
        kept = sum(spaces[index.namespace_of(row)].block_bytes for row in self._lower.residency.kept)
        budget = int(self._limits.pinned_fraction * self._lower.tier.budget_bytes) - kept
        return max(0, budget) // spaces[number].block_bytes

    def _name(self, number: int, row: int) -> _Name:
        """A block's name; without places if NVMe does not have it any more. Under the lock."""
        residency = self._lower.residency
        if not self._blocks.is_below(row) or self._blocks.index.namespace_of(row) != number:
            return b"", 0, []
        parts = range(len(self._blocks.spaces[number].classes))
        return self._blocks.index.key(row), residency.generation(row), [residency.place(row, part) for part in parts]

    def _reading(self, number: int, name: _Name, target: Sequence[FrameSpan]) -> Callable[[], None]:
        key, generation, places = name
        sealers = self._blocks.spaces[number].sealers

        def read() -> None:
            if not places:
                raise BlockMissing("it is not on NVMe any more")
            for place, frame, sealer in zip(places, target, sealers, strict=True):
                self._lower.tier.read(place, frame.view)
                verify_frame(frame.view, self._keys, sealer.stamp, key, generation)

        return read

    def _copy(self, number: int, row: int, name: _Name, target: Sequence[FrameSpan]) -> bool:
        """From DRAM, if the block happens to be there too and is right. Its slots are not used again meanwhile."""
        blocks, key = self._blocks, name[0]
        sealers = blocks.spaces[number].sealers
        with self._lock:
            if self._closed or not blocks.is_above(row) or blocks.index.key(row) != key:
                return False
            generation = blocks.residency.generation(row)
            places = [blocks.residency.place(row, part) for part in range(len(target))]
            if NO_PLACE in places:  # hollow
                return False
            blocks.residency.hold(places)
            spans = [blocks.dram.committed_span(place) for place in places]
        try:
            for span, frame, sealer in zip(spans, target, sealers, strict=True):
                ctypes.memmove(frame.address, span.address, len(frame.view))
                verify_frame(frame.view, self._keys, sealer.stamp, key, generation)
            return True
        except BlockCorrupt:
            return False  # whoever leases it finds out
        finally:
            with self._lock:
                if not self._closed:
                    blocks.dram.let_go(blocks.residency.let_go(places))

    def _outcome(self, move: Move, number: int, row: int, name: _Name, deadline: float) -> MissReason | None:
        if not move.wait(max(0.0, deadline - self._clock.monotonic_seconds())):
            return MissReason.DEADLINE
        if move.finding is None:
            return None
        if move.finding is Finding.CORRUPT:
            with self._lock:
                if self._name(number, row) != name:  # it went while it was read, and something else stands there
                    return MissReason.EVICTED
            self._condemn(row, lambda: self._name(number, row) == name)
        return REASON_OF_FINDING[move.finding]

    def _release(self, lease: int) -> None:
        record = self._leases.take(lease)
        if record is not None and not record.has_lapsed:
            self._let_loose(record)

    def _let_loose(self, record: LeaseRecord) -> None:
        self._lower.residency.let_loose(record.rows)
