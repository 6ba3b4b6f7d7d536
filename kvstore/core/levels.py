"""Moves between the tiers: blocks are promoted to DRAM before a lease is granted, and dirty ones flushed to NVMe in
time.

    up    pinned, a slot in DRAM > read > verified: MAC, name, generation, every digest > readable from DRAM
    down  pinned, verified where it stands > a slot on NVMe > durable > readable from NVMe too

Moves run in the queue's threads; the lock is the store's, and is not held while anything is read, hashed or written. A
failed move means a shorter lease, or a block that stays where it is, never an error of a request. Reads have a breaker
of their own: a disk that is full, or refuses writes, may still be read. Ancestors are written
before their descendants, so NVMe holds whole chains at any moment.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, takewhile

from kvstore.block.account import REASON_OF_FINDING, MissReason
from kvstore.config import format_size
from kvstore.core.index import NO_ROW, OpenedNamespace, RowState
from kvstore.core.room import Room
from kvstore.core.shared import Shared, SlotRequest
from kvstore.core.table import Lower, Promotion
from tiering.counts.tally import CheckedAt
from tiering.errors import BlockMissing, TierFull, TierUnavailable
from tiering.faults import NVME_READS, NVME_WRITES
from tiering.frame import HEADER_BYTES, digest, verify_frame
from tiering.move_queue import Move, Priority
from tiering.nvme.tier import NvmeTier
from tiering.tier import TierMiss

WINDOW_BLOCKS = 32
"""Blocks promoted at a time."""
WINDOWS_AT_ONCE = 2
"""Windows in flight for one lease: the disk has work while the first one's last blocks are verified."""

LOADING_LOOK_SECONDS = 0.05
"""How often a durable put that must wait for recovery before it can make room checks whether it is over."""
GROUP_BLOCKS = 128
"""Blocks demoted at a time, for one round of syncs and index batches."""

FLUSH_FRACTION = 0.25
"""Dirty blocks are flushed in the background while less than this share of DRAM is free."""

CHOSEN_DOWN_TO = 0.65
"""A choosing admission policy goes on until at most this share of DRAM is dirty."""

WHY_LEFT = {
    MissReason.DEADLINE: "limits.close_seconds={seconds:g} was over; give it more",
    MissReason.PINNED_FULL: "NVMe has no room for them",
    MissReason.CORRUPT: "they, or blocks before them, are damaged",
}
"""Why blocks that only memory held were lost when a store closed; any other reason is the disk's fault."""

_log = logging.getLogger(__name__)


class Levels:
    """Moves between DRAM and NVMe of one store. All methods are called without the store's lock, unless they say so."""

    def __init__(self, shared: Shared, lower: Lower[NvmeTier], room: Room) -> None:
        """lower: as in `shared`. room: finds slots in DRAM."""
        assert shared.blocks.below is not None and lower.queue is not None
        self._blocks, self._below, self._lower, self._room = shared.blocks, shared.blocks.below, lower, room
        self._queue = self.queue = lower.queue
        self._keys, self._clock, self._limits = shared.blocks.keys, shared.clock, shared.limits
        self._lock = shared.lock
        self._changed = threading.Condition(shared.lock)  # notified as moves end
        self._pin, self._unpin = shared.blocks.pin, shared.blocks.unpin
        self._planning = threading.Lock()  # one lease at a time looks for what to promote
        self._promoting = shared.blocks.promoting
        self.is_over = False  # DRAM was given back, and its tables are void
        self._numbers = count()
        self._demoting, self._dirty = shared.blocks.demoting, shared.blocks.dirty
        self.pinned_for_demotion: list[list[int]] = []  # rows, a list for each move
        self._flushing = False
        self._written: Counter[str] = Counter()  # blocks and bytes
        self._making_room = threading.Lock()  # no slab may be given back while another move takes slots in it
        self._closing = False

    # Up --------------------------------------------------------------------------------------------------------------

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
        if self._queue.is_down(NVME_READS):  # finding slots would evict blocks for nothing
            return [], MissReason.TIER_DOWN
        if not self._planning.acquire(timeout=max(0.0, deadline - self._clock.monotonic_seconds())):
            return [], MissReason.DEADLINE
        try:
            with self._lock:
                under_way = [self._promoting[row] for row in rows if row in self._promoting]
                for promotion in under_way:
                    promotion.waiting += 1
                missing = [row for row in rows if row not in self._promoting and not self._blocks.is_above(row)]
            lift = SlotRequest(namespace=number, rows=missing, places=[[] for _ in self._blocks.spaces[number].classes])
            try:
                reason = self._room.find_slots(lift) if missing else None
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
                promotion.move = self._queue.submit(key, NVME_READS, Priority.WAITING, partial(self._read, promotion))
                promotion.move.then(partial(self._settle, promotion))
            if missing:
                extra = {"namespace": number, "blocks": len(promotions), "of": len(missing), "why_not": reason}
                _log.debug("bringing up to dram", extra=extra)
            return under_way + promotions, reason
        finally:
            self._planning.release()

    def _read(self, promotion: Promotion) -> None:
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

    def _settle(self, promotion: Promotion, move: Move) -> None:
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

    def _end(self, promotion: Promotion) -> None:
        promotion.settled = True
        del self._promoting[promotion.row]
        self._unpin(promotion.number, [promotion.row])
        self._changed.notify_all()

    def quarantine_below(self, row: int, stands: Callable[[], bool], why: TierMiss) -> bool:
        """Quarantine a block on NVMe that the scrubber found damaged. If DRAM has it, it is dirty again.

        stands: asked under the lock whether the damaged frame is still the block's. Returns False if not, or if a
        promotion is reading the block and will find out itself.
        """
        with self._planning, self._lock:  # `_planning`: no lease may be looking for slots for this block
            if row in self._promoting or not self._below.has(row) or not stands():
                return False
            self._below.quarantine(row, why)
            return True

    # Down ----------------------------------------------------------------------------------------------------------

    def flush_if_needed(self) -> None:
        """Start flushing if DRAM is nearly full."""
        if not self._dirty or self._closing or not self._is_pressed():
            return
        with self._lock:
            if self._flushing:
                return
            self._flushing, before = True, len(self._dirty)
        move = self._queue.submit("down", NVME_WRITES, Priority.DEMOTION, self._flush_batch)
        move.then(lambda move: self._flushed(move, before))

    def _flushed(self, move: Move, before: int) -> None:
        with self._lock:
            self._flushing = False
            helped = move.finding is None and len(self._dirty) < before
        if helped:
            self.flush_if_needed()

    def _is_pressed(self) -> bool:
        """Whether to flush now. Under a choosing policy, blocks to be retained are flushed as early as without one: the
        policy has nothing to learn about them."""
        if not self._lower.admission.chooses:
            return self._is_nearly_full()
        return self._must_choose() or (self._dirty.is_any_prioritized and self._is_nearly_full())

    def _is_nearly_full(self) -> bool:
        with self._lock:
            usage = self._blocks.dram.usage()
        free_share = usage.free / usage.capacity if usage.capacity else 1.0
        free_bytes = usage.budget_bytes - usage.taken_bytes * (1 - free_share)
        return free_bytes < FLUSH_FRACTION * usage.budget_bytes

    def _must_choose(self) -> bool:
        """Whether the policy must choose now. It is put off until nearly all of DRAM is dirty, when most is known about
        the blocks; but not once dirty blocks left DRAM before their turn, since the rest may be in constant use."""
        waiting = self._dirty.waiting_bytes
        return waiting > (1 - FLUSH_FRACTION) * self._blocks.dram.budget_bytes or self._dirty.missed > 0

    def _flush_batch(self, *, everything: bool = False) -> None:
        """everything: do not ask the policy."""
        blocks, dirty = self._blocks, self._dirty
        admission = None if everything else self._lower.admission
        chooses = admission is not None and admission.chooses
        with self._lock:
            kept = dirty.prioritized(GROUP_BLOCKS) if everything else self._take_kept()
            is_their_turn = not kept and (not chooses or self._must_choose())
            rows = dirty.oldest(GROUP_BLOCKS) if is_their_turn else kept
            by_space: dict[int, list[int]] = {}
            taken: set[int] = set()
            enough = CHOSEN_DOWN_TO * blocks.dram.budget_bytes if chooses else 0.0
            missed = dirty.missed
            if is_their_turn:  # else the oldest are still to be looked at
                dirty.missed = 0
            left = float(dirty.waiting_bytes)
            looked_at: list[int] = []
            insisted: dict[int, int] = {}  # row -> bytes of blocks written without asking the policy
            for row in rows:
                if is_their_turn and left < enough and not missed:
                    break
                looked_at.append(row)
                way = self._way_down(row, taken)
                number = blocks.index.namespace_of(row)
                left -= blocks.spaces[number].block_bytes
                if not way or not self._demoting.isdisjoint(way):  # it is being written already
                    continue
                is_whole = all(blocks.index.state(one) is RowState.VISIBLE for one in way)
                if chooses and not is_whole:
                    dirty.decline(row)  # an ancestor was quarantined: the block would be charged and not written
                    continue
                block_bytes = blocks.spaces[number].block_bytes
                if chooses and self._below.is_to_be_kept(row):
                    insisted.update((one, block_bytes) for one in way)
                if admission is None or row in insisted or admission.admits(way[::-1], block_bytes):
                    taken.update(way)
                    by_space.setdefault(number, []).extend(way)
                else:
                    dirty.decline(row)
                    blocks.counters["declined_blocks"] += 1
        try:
            for number, mine in by_space.items():
                self._demote(number, mine)
        finally:
            with self._lock:  # blocks that could not be written are tried again after all others
                if admission is not None and insisted:
                    admission.spent(sum(size for row, size in insisted.items() if blocks.is_below(row)))
                for row in looked_at:
                    if dirty.waits(row):
                        dirty.requeue(row)

    def _take_kept(self) -> list[int]:
        """A group of the prioritized blocks that NVMe would retain. The others, expired or beyond NVMe's budget for
        retention, wait as any other; if DRAM still retains one at its turn, it is written."""
        kept = []
        for row in self._dirty.prioritized(GROUP_BLOCKS):
            if self._below.would_keep(row):
                kept.append(row)
            else:
                self._dirty.requeue(row)
        return kept

    def _way_down(self, row: int, taken: set[int]) -> list[int]:
        way = []
        while row != NO_ROW and row not in taken and not self._blocks.is_below(row):
            way.append(row)
            row = self._blocks.index.parent(row)
        return way[::-1]

    def demote_all(self, seconds: float) -> MissReason | None:
        """Flush dirty blocks except declined ones, retained ones first, for at most that long. Returns why some remain,
        if any do."""
        deadline = self._clock.monotonic_seconds() + seconds
        vain = 0
        reason = None
        dirty = self._dirty
        with self._lock:
            for row in dirty.prioritized(len(dirty)):
                dirty.requeue(row)
            for row in [*dirty.oldest(len(dirty)), *dirty.declined()]:
                if self._below.is_to_be_kept(row):
                    dirty.prioritize(row)
        while vain * GROUP_BLOCKS < len(dirty):
            if self._clock.monotonic_seconds() >= deadline:
                return MissReason.DEADLINE
            before = len(dirty)
            move = self._queue.submit("down", NVME_WRITES, Priority.SAVE, partial(self._flush_batch, everything=True))
            if not move.wait(max(0.0, deadline - self._clock.monotonic_seconds())):
                return MissReason.DEADLINE
            is_vain = len(dirty) >= before  # these cannot be written, others may
            vain += is_vain
            if move.finding is not None:
                reason = REASON_OF_FINDING[move.finding]
            elif is_vain:
                reason = MissReason.CORRUPT
            if move.finding is TierMiss.DOWN:
                break
        return reason

    def persist(self, number: int, keys: Sequence[bytes], seconds: float) -> tuple[int, MissReason | None]:
        """How many leading blocks of a chain are durable after at most that long; and why not all.

        They are looked up again after each wait: a row may have gone meanwhile, and be another block's. Blocks that
        NVMe has are durable as long as a start would find their files.
        """
        deadline = self._clock.monotonic_seconds() + seconds
        waits = 1 + int(seconds / LOADING_LOOK_SECONDS)
        while True:
            with self._lock:
                if number in self._blocks.dropping:
                    return 0, MissReason.DISABLED
                rows = self._blocks.index.match(number, keys)
                done = next((at for at, row in enumerate(rows) if not self._blocks.is_below(row)), len(rows))
                if done == len(rows):
                    here = self._lower.residency
                    parts = range(len(self._blocks.spaces[number].classes))
                    places = [place for part in parts for place in here.places_of(rows, part)]
                    break
                if rows[done] in self._demoting:  # by another thread
                    if not self._changed.wait(max(0.0, deadline - self._clock.monotonic_seconds())):
                        return done, MissReason.DEADLINE
                    continue
            window = rows[done : done + GROUP_BLOCKS]
            work = partial(self._demote, number, window)
            move = self._queue.submit(("down", window[0]), NVME_WRITES, Priority.SAVE, work)
            if not move.wait(max(0.0, deadline - self._clock.monotonic_seconds())):
                move.cancel()
                return done, MissReason.DEADLINE
            if move.finding is TierMiss.PINNED_FULL and self._below.is_loading:
                with self._lock:
                    self._changed.wait(LOADING_LOOK_SECONDS)
                waits -= 1
                if not waits or self._clock.monotonic_seconds() >= deadline:
                    return done, MissReason.WARMING
                continue
            if move.finding is not None:
                return done, REASON_OF_FINDING[move.finding]
        try:
            self._lower.tier.confirm(places)
        except TierUnavailable:
            if not self._done(partial(self._lower.tier.bring_back, places), deadline):
                return 0, MissReason.TIER_DOWN
        return done, None if done == len(keys) else MissReason.EVICTED

    def _demote(self, number: int, rows: Sequence[int]) -> None:
        blocks = self._blocks
        with self._lock:
            chosen: dict[int, int] = {}  # in order, with the generation to be written
            for row in rows if number not in blocks.dropping else ():
                if blocks.index.namespace_of(row) != number:
                    continue  # the row belongs to another block now
                parent = blocks.index.parent(row)
                follows = parent == NO_ROW or blocks.is_below(parent) or parent in chosen
                here = blocks.index.state(row) is RowState.VISIBLE and blocks.is_above(row)
                if here and follows and not blocks.is_below(row) and row not in self._demoting:
                    chosen[row] = blocks.residency.generation(row)
            batch = list(chosen)
            # The batch's ancestors must stay on NVMe until it is written: else NVMe would hold the end of a chain.
            parents = {blocks.index.parent(row) for row in batch} - {NO_ROW, *chosen}
            pinned = [*batch, *sorted(parents)]
            self._pin(number, pinned)
            self.pinned_for_demotion.append(pinned)
            self._demoting.update(batch)
        placed: list[int] = []
        written = False
        try:
            left = batch
            while left:
                with self._making_room:
                    placed, columns = self._make_room(number, left[:GROUP_BLOCKS])
                wanted = len(placed)
                with self._lock:
                    standing = list(takewhile(lambda row: blocks.stands(row, chosen[row]), placed))
                    self._below.not_demoted(placed[len(standing) :])
                    placed, columns = standing, [column[: len(standing)] for column in columns]
                    frames = [
                        blocks.dram.committed_span(blocks.residency.place(row, part)).view
                        for part in range(len(columns))
                        for row in placed
                    ]
                good = self._commit_good(number, {row: chosen[row] for row in placed}, columns, frames)
                with self._lock:
                    written = True
                    size_bytes = blocks.spaces[number].block_bytes
                    blocks.tally.written_bytes += len(placed) * size_bytes
                    blocks.tally.checked(CheckedAt.MOVE, len(good) * size_bytes, is_sound=True)
                    self._below.demoted(number, good, [chosen[row] for row in good])
                    self._written.update(blocks=len(good), bytes=len(good) * size_bytes)
                    _log.debug("written to nvme", extra={"namespace": number, "blocks": len(good), "of": len(placed)})
                    self._below.not_demoted(placed[len(good) :])
                left = left[wanted:] if len(good) == wanted else []
                placed, written = [], False
        finally:
            with self._lock:
                if placed and not written:
                    self._below.not_demoted(placed)
                self._demoting.difference_update(batch)
                self.pinned_for_demotion = [one for one in self.pinned_for_demotion if one is not pinned]
                self._unpin(number, pinned)
                self._changed.notify_all()

    def _commit_good(
        self,
        number: int,
        generations: Mapping[int, int],
        columns: Sequence[Sequence[int]],
        frames: Sequence[memoryview],
    ) -> list[int]:
        """Returns the blocks before the first bad one, which are durable. generations: of the rows, in order."""
        good: list[int] = []
        if not generations:
            return good

        def verify() -> list[int]:
            good.extend(self._verified(number, generations))
            return [place for column in columns for place in column[: len(good)]]

        self._lower.tier.commit([place for column in columns for place in column], frames, verify)
        return good

    def _verified(self, number: int, generations: Mapping[int, int]) -> list[int]:
        """Up to the first that fails a check; that one is quarantined, unless a reader has done it."""
        blocks = self._blocks
        good: list[int] = []
        for row, generation in generations.items():
            for part in range(len(blocks.spaces[number].classes)):
                try:
                    is_right = blocks.verify(row, part)
                except BlockMissing:  # quarantined by a reader, and its extent given back
                    is_right = False
                if not is_right:
                    with self._lock:
                        if not self.is_over and blocks.stands(row, generation):
                            blocks.tally.checked(CheckedAt.MOVE, 0, is_sound=blocks.quarantine(row))
                    return good
            good.append(row)
        return good

    def _make_room(self, number: int, rows: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """At least one slot on NVMe. Raises `TierFull` and `TierUnavailable`."""
        tier, space = self._lower.tier, self._blocks.spaces[number]
        is_disk_full = False  # the disk has no room for another slab, though the budget allows one
        for _ in range(self._limits.room_steps):
            with self._lock:
                free = min(tier.free_slots(slot_class) for slot_class in space.classes)
                if free:
                    chosen = list(rows[:free])
                    return chosen, self._below.make_place(number, chosen)
                short = [part for part, one in enumerate(space.classes) if not tier.free_slots(one)]
            if tier.has_room() and not is_disk_full:
                is_disk_full = not self._has_new_slab(space, short[0])
                if is_disk_full and len(tier.slab_numbers()) < len(space.classes):
                    raise TierFull("the disk has no room for a slab of each part")  # whatever else would go for them
                continue
            # What was given up before may suffice; and a disk that refuses writes must not cost NVMe any block.
            tier.settle(under_way=False)
            if all([tier.free_slots(slot_class) for slot_class in space.classes]):
                continue
            spare = tier.spare_slab(space.classes)
            if spare is not None:
                tier.retire(spare)
                is_disk_full = False
                continue
            with self._lock:
                if not self._below.all_known:
                    raise TierFull("nothing on NVMe may go before all of it was taken in")
                gone, claimed = self._below.evict(len(rows), number)
            _log.debug("evicted from nvme", extra={"blocks": gone, "for_namespace": number})
            if not gone:
                raise TierFull("nothing on NVMe may go")
            if claimed[0]:
                tier.await_claims([place for column in claimed for place in column])
                with self._lock:
                    chosen = list(rows[: len(claimed[0])])
                    return chosen, self._below.make_place(number, chosen, claimed)
        raise TierFull("no room on NVMe after as many steps as are allowed")

    def _has_new_slab(self, space: OpenedNamespace, part: int) -> bool:
        stamp = space.stamps[part]
        key = self._keys.slab_key(stamp.tenant, stamp.key_id, stamp.epoch)
        assert key is not None
        try:
            self._lower.tier.new_slab(stamp, key, space.about)
        except TierFull:
            return False
        return True

    # Giving up -----------------------------------------------------------------------------------------------------

    def settle(self, deadline: float) -> bool:
        """Whether the disk has durably forgotten, by then, all that was given up."""
        return self._done(self._lower.tier.settle, deadline)

    def retire_slabs(self, tenant: bytes, deadline: float) -> bool:
        """Whether every slab of a tenant was given back by then. Nothing readable may be left in them."""

        def retire() -> None:
            tier = self._lower.tier
            with self._making_room:
                for number in tier.slabs_of(tenant):
                    if number not in tier.empty_slabs():
                        raise TierUnavailable("a slab is still in use")
                    tier.retire(number)

        return self._done(retire, deadline)

    def _done(self, work: Callable[[], None], deadline: float) -> bool:
        move = self._queue.submit(("give up", next(self._numbers)), NVME_WRITES, Priority.SAVE, work)
        return move.wait(max(0.0, deadline - self._clock.monotonic_seconds())) and move.finding is None

    # Ends ----------------------------------------------------------------------------------------------------------

    def is_moving(self, number: int) -> bool:
        """Whether a block of a namespace is being promoted or demoted. Under the lock."""
        is_promoting = any(promotion.number == number for promotion in self._promoting.values())
        return is_promoting or any(self._blocks.index.namespace_of(row) == number for row in self._demoting)

    def close(self, seconds: float) -> bool:
        """Flush what can be flushed in that time, and log the outcome, then refuse moves; returns whether all moves
        ended in as much time again."""
        if not self._closing:
            before = self._written.copy()
            reason = self.demote_all(seconds)
            self._closing = True
            ended = self._queue.close(seconds)
            self._say(self._written - before, reason, seconds)
            return ended
        return self._queue.close(seconds)

    def _say(self, written: Counter[str], reason: MissReason | None, seconds: float) -> None:
        with self._lock:
            declined = self._dirty.declined()
            left, left_bytes = len(self._dirty), self._dirty.waiting_bytes
        words = f"of what memory alone held {_amount(written['blocks'], written['bytes'])} written to NVMe"
        if declined:
            words += f"; {_amount(len(declined), sum(declined.values()))} not, as nvme_writes has it"
        if left:
            why = WHY_LEFT.get(reason or MissReason.TIER_DOWN, "the disk takes no writes").format(seconds=seconds)
            words += f"; {_amount(left, left_bytes)} not, since {why}"
        if written or declined or left:
            _log.log(logging.WARNING if left else logging.INFO, "closing: %s", words)


def _amount(blocks: int, size_bytes: int) -> str:
    return f"{blocks} block{'s' * (blocks != 1)} ({format_size(size_bytes)})"
